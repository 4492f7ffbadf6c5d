"""Stretches of a sequence that repeat: the layers of a model among the products of a step.

In: a sequence of tokens, and how much each weighs. Out: the shortest pattern whose exact repeats, side by
side, hold most of the weight; and where a pattern occurs. Repeats of repeats (layers of micro-batches) are
looked into as long as what repeats inside holds half of the pattern, and a token that no layer is without.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from dpro.arrays import Bools, Floats, Ints

MAX_PERIOD = 1000  # tokens of a layer
NEARLY = 0.9  # of the weight that the best period covers: a shorter period that covers it is better
INNER = 0.5  # of a pattern's weight: what repeats inside with less is a part of a layer


def find_pattern(tokens: Ints, weight: Floats, needed: Collection[int] = ()) -> Ints:
    """The tokens of one layer; none where nothing repeats.

    Args:
        tokens: [N] in order.
        weight: [N] of each.
        needed: tokens one of which each layer has, where a pattern has any (attention: two equal matrices
            side by side are no layers).
    """
    begin, period, _ = _best(tokens, weight)
    if not period:
        return tokens[:0]
    pattern, own = tokens[begin : begin + period], weight[begin : begin + period]
    while period > 1:
        begin, period, covered = _best(pattern, own)
        inner = pattern[begin : begin + period]
        if not period or covered < INNER * own.sum():
            break
        if np.isin(pattern, list(needed)).any() and not np.isin(inner, list(needed)).any():
            break
        pattern, own = inner, own[begin : begin + period]
    return pattern


def occurrences(tokens: Ints, pattern: Ints) -> Ints:
    """Where a pattern begins, each after the one before has ended.

    Args:
        tokens: [N] in order.
        pattern: [P] at least one.
    """
    if tokens.size < pattern.size:
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, pattern.size)
    found, free = [], 0
    for at in np.flatnonzero((windows == pattern).all(1)).tolist():
        if at >= free:
            found.append(at)
            free = at + pattern.size
    return np.array(found, np.int64)


def _best(tokens: Ints, weight: Floats) -> tuple[int, int, float]:
    """Where the best repeats begin, their period (0 for none), and the weight that they cover."""
    total = np.concatenate([[0.0], np.cumsum(weight)])
    best: list[tuple[float, int, int]] = []
    for period in range(1, min(tokens.size // 2, MAX_PERIOD) + 1):
        begin, count = _longest(tokens[period:] == tokens[:-period], period, total)
        if count > 1:
            best.append((float(total[begin + count * period] - total[begin]), period, begin))
    if not best:
        return 0, 0, 0.0
    most = max(covered for covered, _, _ in best)
    covered, period, begin = next(each for each in best if each[0] >= NEARLY * most)
    return begin, period, covered


def _longest(equal: Bools, period: int, total: Floats) -> tuple[int, int]:
    """Where whole repeats of a period begin that weigh most, and how many there are."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    begins, lengths = edges[::2], edges[1::2] - edges[::2]
    counts = lengths // period + 1
    enough = counts > 1
    if not enough.any():
        return 0, 0
    begins, counts = begins[enough], counts[enough]
    at = int(np.argmax(total[begins + counts * period] - total[begins]))
    return int(begins[at]), int(counts[at])
