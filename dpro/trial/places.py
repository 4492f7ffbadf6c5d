"""Where a job was changed, in words.

In: `applied` of a manifest: per rank and change the places where it was made, and the reasons why it was
not. Out: a line for each of them, with the ranks that have it in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dpro.store import AppliedChange


def in_words(applied: Iterable[AppliedChange]) -> list[str]:
    """Return a line per place: `bucket:mb=1: DistributedDataParallel at train.py:12 (on 2 ranks)`."""
    ranks: dict[str, set[int]] = {}
    for change in applied:
        for what in _of_change(change):
            ranks.setdefault(f"{change.edit}: {what}", set()).add(change.rank)
    return [f"{line} (on {_ranks(sorted(who))})" for line, who in ranks.items()]


def _of_change(change: AppliedChange) -> Iterator[str]:
    for place in change.applied:
        instead_of = f", instead of {place.instead_of}" if place.instead_of else ""
        times = f", {place.times} times" if place.times > 1 else ""
        yield f"{place.where}{instead_of}{times}"
    for reason in change.refused:
        yield f"not made: {reason}"


def _ranks(who: list[int]) -> str:
    return f"rank {who[0]}" if len(who) == 1 else f"{len(who)} ranks"
