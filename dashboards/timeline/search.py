"""Search of spans by name: their number, the next and the previous match, and levels of detail of matches.

In: a regular expression. Out: the names it matches, and levels of detail of their spans alone. Expressions
are those of Rust's `regex`, which takes time in proportion to the text whatever the expression is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools
from dpro.dashboards.timeline.detail import DetailLevel, chosen, levels
from dpro.dashboards.timeline.lanes import RankLanes, SpanNames
from dpro.errors import UsageError, first_line
from dpro.words import shortened

LONGEST = 300  # characters of an expression
KEPT = 48  # ranks' levels of matches that are kept
_QUOTED = 60
_EXACT = 140  # characters of a name that an expression for it has; each may take two
_SIGNS = "\\.+*?()|[]{}^$"


def exactly(name: str) -> str:
    """Return an expression that matches a name; for a long one, all names with the same beginning."""
    text = "".join(f"\\{sign}" if sign in _SIGNS else sign for sign in name[:_EXACT])
    return f"^{text}$" if len(name) <= _EXACT else f"^{text}"


class FoundSpan(NamedTuple):
    """A span: when it begins, whose it is, which of the rank's."""

    start: int
    rank: int
    item: int


def matching(pattern: str, names: Sequence[str]) -> Bools:
    """Return [names] whether each name matches, ignoring case.

    Args:
        pattern: a regular expression, of Rust's syntax.

    Raises:
        UsageError: that is no regular expression.
    """
    if len(pattern) > LONGEST:
        raise UsageError(f"an expression to search for has at most {LONGEST} characters")
    try:
        return pl.Series(names, dtype=pl.String).str.contains(f"(?i){pattern}").to_numpy()
    except pl.exceptions.ComputeError as error:
        what = repr(shortened(pattern, _QUOTED))
        raise UsageError(f"{what} is no regular expression: {first_line(error)}") from error


class Search:
    """Searches with cached results; the latest are kept."""

    def __init__(self, names: SpanNames) -> None:
        self._names = names
        self._levels: OrderedDict[tuple[str, int, int], Sequence[DetailLevel]] = OrderedDict()
        self._lock = threading.Lock()

    def of_rank(self, pattern: str, lanes: RankLanes, window_ns: int) -> Sequence[DetailLevel]:
        """Levels of detail of the spans of a rank that match.

        Raises:
            UsageError: that is no regular expression.
        """
        key = pattern, lanes.rank, id(lanes)
        with self._lock:
            if key in self._levels:
                self._levels.move_to_end(key)
                return self._levels[key]
        wanted = matching(pattern, self._names.texts)[lanes.name]
        matches = levels(chosen(lanes.all, wanted), window_ns)
        with self._lock:
            self._levels[key] = matches
            while len(self._levels) > KEPT:
                self._levels.popitem(last=False)
        return matches

    def count(self, pattern: str, ranks: Mapping[int, RankLanes]) -> tuple[int, int]:
        """How many spans match, and how long they last together, ns.

        Raises:
            UsageError: that is no regular expression.
        """
        matches = matching(pattern, self._names.texts)
        count = total = 0
        for lanes in ranks.values():
            wanted = matches[lanes.name]
            count += int(np.unique(lanes.ident[wanted]).size)
            total += int((lanes.all.end[wanted] - lanes.all.start[wanted]).sum())
        return count, total

    def next(
        self, pattern: str, ranks: Mapping[int, RankLanes], after: FoundSpan, backwards: bool = False
    ) -> tuple[FoundSpan | None, int]:
        """The span that matches and begins next, and its number among all that match, from 1 on.

        Args:
            after: where to go on from; it is not found again.
            backwards: look for the one before instead. Beyond the last comes the first.

        Raises:
            UsageError: that is no regular expression.
        """
        matches = matching(pattern, self._names.texts)
        items = {rank: np.flatnonzero(matches[lanes.name]) for rank, lanes in ranks.items()}
        rank = np.repeat(np.array(list(items), np.int64), [several.size for several in items.values()])
        item = np.concatenate([*items.values(), np.empty(0, np.int64)])
        if not item.size:
            return None, 0
        start = np.concatenate([lanes.all.start[items[of]] for of, lanes in ranks.items()])
        order = np.lexsort((item, rank, start))
        keys = [column[order] for column in (start, rank, item)]
        before = (keys[0] < after.start) | (
            (keys[0] == after.start)
            & ((keys[1] < after.rank) | ((keys[1] == after.rank) & (keys[2] < after.item)))
        )
        place = int(before.sum())
        here = place < order.size and tuple(int(key[place]) for key in keys) == tuple(after)
        place = (place - 1 if backwards else place + int(here)) % order.size
        return FoundSpan(*(int(key[place]) for key in keys)), place + 1
