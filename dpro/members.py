"""The ranks of process groups as text: `0-7`, `0-10232:8`, `0,1,8,9`.

Converts the ranks of a group, in its order, to text and back. Every collective call repeats the ranks of its
group: as lists, these would grow with the square of the number of ranks, whereas real groups are a few
ranges, however large. Equal texts mean equal ranks in equal order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from dpro.limits import MAX_RANKS

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)
MIN_RANGE = 3  # ranks


def members_text(ranks: Sequence[int]) -> str:
    """Return the ranks of a group as text; empty without ranks, or if one is invalid or repeated.

    Args:
        ranks: ranks of the group, in its order.
    """
    return _text(tuple(ranks))


@lru_cache(maxsize=64)
def _text(ranks: tuple[int, ...]) -> str:
    if any(rank is None or not 0 <= rank < MAX_RANKS for rank in ranks) or len(set(ranks)) < len(ranks):
        return ""
    parts, first = [], 0  # `first` and `last` are indices of `ranks`
    while first < len(ranks):
        last = first
        step = ranks[first + 1] - ranks[first] if first + 1 < len(ranks) else 0
        while step > 0 and last + 1 < len(ranks) and ranks[last + 1] - ranks[last] == step:
            last += 1
        if last - first + 1 < MIN_RANGE:
            last = first
            parts.append(f"{ranks[first]}")
        else:
            parts.append(f"{ranks[first]}-{ranks[last]}" + (f":{step}" if step > 1 else ""))
        first = last + 1
    return ",".join(parts)


@lru_cache(maxsize=256)
def members_of(text: str) -> tuple[int, ...]:
    """Return the ranks in a text of `members_text`; none if it is empty or malformed."""
    return tuple(rank for part in _ranges(text) for rank in part)


def count_of(text: str) -> int:
    """Return the number of ranks in a text of `members_text`; 0 if it is empty or malformed."""
    return sum(map(len, _ranges(text)))


def is_members_text(text: str) -> bool:
    """Return whether a text contains ranks, or is empty, which means that they are unknown."""
    return not text or count_of(text) > 0


def _ranges(text: str) -> Iterator[range]:
    """Return the ranges in a text; none if it is malformed, or exceeds `MAX_RANKS` by a rank or in number."""
    ranges = []
    for part in text.split(",") if text else []:
        match = _RANGE.fullmatch(part)
        if match is None:
            return iter(())
        first, last, step = match.groups()
        ranges.append(range(int(first), int(last or first) + 1, max(int(step or 1), 1)))
    whole = sum(map(len, ranges)) <= MAX_RANKS and all(ranks and ranks[-1] < MAX_RANKS for ranks in ranges)
    return iter(ranges if whole else ())
