"""Which collectives of two ranks on one host are the same, by their clock: slow, and sure of nothing else."""

from __future__ import annotations

from collections.abc import Sequence


def pair_by_end(
    mine: Sequence[tuple[str, int]], theirs: Sequence[tuple[str, int]], within: int
) -> list[tuple[int, int]]:
    """Pair entries in order, so that most are paired, and of those ways the ends lie closest.

    Ranks run their collectives in one order, so pairs never cross. Any entries may be left over, not only
    at the ends of a window.

    Args:
        mine, theirs: (op, end in ns) in order; only equal ops can be paired.
        within: ns, largest distance of the ends of a pair.

    Returns:
        Positions of the pairs, in order.
    """
    # best[i][j]: (pairs, minus the sum of distances) of the first i of mine and j of theirs.
    best = [[(0, 0)] * (len(theirs) + 1) for _ in range(len(mine) + 1)]
    for i, (op, end) in enumerate(mine):
        for j, (other_op, other_end) in enumerate(theirs):
            options = [best[i][j + 1], best[i + 1][j]]
            distance = abs(end - other_end)
            if op == other_op and distance <= within:
                pairs, cost = best[i][j]
                options.append((pairs + 1, cost - distance))
            best[i + 1][j + 1] = max(options)
    pairs = []
    i, j = len(mine), len(theirs)
    while i and j:
        if best[i][j] == best[i - 1][j]:
            i -= 1
        elif best[i][j] == best[i][j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]
