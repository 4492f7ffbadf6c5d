"""Ranks, operations and chains of waiting in words; every line can be traced to the calls it speaks of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise

from dpro.detect.hang.operations import Operation
from dpro.units import NS_PER_S


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) != 1 else ''} {numbers_in_words(numbers)}"


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Ascending numbers with those that follow each other joined: `0-2, 5`."""
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)] if numbers else []
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]] if numbers else []
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def one_of(ranks: Iterable[int]) -> str:
    """`rank 3`, or `one of ranks 0-2, 5`."""
    numbers = sorted(ranks)
    return ranks_in_words(numbers) if len(numbers) == 1 else f"one of {ranks_in_words(numbers)}"


def time_in_words(time_ns: int) -> str:
    """`12:34:56.789 UTC`."""
    if time_ns < 0:
        return "an unknown time"
    seconds, rest = divmod(time_ns, NS_PER_S)
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S}.{rest // 1_000_000:03d} UTC"


def name_of(operation: Operation) -> str:
    """`all_reduce #12 of group "5 tp" (ranks 0-3)`, or `message #4 from rank 0 to rank 8 in group "0"`."""
    number = f" #{operation.sequence}" if operation.sequence >= 0 else ""
    if operation.pair:
        source, target = operation.pair
        return f'message{number} from rank {source} to rank {target} in group "{operation.group}"'
    return f'{operation.op}{number} of group "{operation.group}" ({ranks_in_words(operation.members)})'


def attendance(operation: Operation) -> str:
    """Who came to an operation, who finished it and who did not come."""
    parts = []
    if operation.unfinished:
        came = f"{ranks_in_words(operation.unfinished)} came and wait"
        parts.append(came if len(operation.unfinished) > 1 else f"{came}s")
    if operation.finished:
        parts.append(f"{ranks_in_words(operation.finished)} finished it")
    if operation.came:
        parts.append(f"{ranks_in_words(operation.came)} came")
    if operation.absent:
        parts.append(f"{ranks_in_words(operation.absent)} never came")
    if operation.unknown:
        parts.append(f"of {ranks_in_words(operation.unknown)} nothing tells")
    return f"{name_of(operation)}: {'; '.join(parts)}; waited for since {time_in_words(operation.since_ns)}"


def chain_in_words(chain: Sequence[tuple[int, Operation]], ends: Collection[int]) -> str:
    """Who waits in what for whom, link by link; the last link waits for the ends."""
    links = []
    for (rank, operation), following in zip(chain, [*chain[1:], None], strict=True):
        waited = f"rank {following[0]}" if following else ranks_in_words(ends) if ends else "nobody"
        if following and following[0] == rank:
            waited = "what it has to finish first"
        links.append(f"rank {rank} waits in {name_of(operation)} for {waited}")
    return "; ".join(links)
