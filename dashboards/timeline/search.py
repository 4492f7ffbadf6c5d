"""Search of spans by name: their number, the next and previous match, and levels of detail of the matches.

Takes a regular expression; returns the names that it matches, and levels of detail with only their spans.
Expressions are those of Rust's `regex`, whose time is proportional to the text for every expression.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.dashboards.timeline.detail import DetailLevel, levels, select_spans
from dpro.dashboards.timeline.lanes import RankLanes, SpanNames
from dpro.errors import UsageError
from dpro.words import shortened

LONGEST = 300  # characters of an expression
KEPT = 48  # cached levels of matches, one per expression and rank
_QUOTED = 60
_EXACT = 140  # characters of a name in an expression for it; each may take two
_MISTAKES = {  # the parser's message -> wording here
    "unclosed character class": "a [ is not closed",
    "unclosed group": "a ( is not closed",
    "unopened group": "a ) closes nothing",
    "unclosed counted repetition": "a { is not closed",
    "repetition quantifier expects": "a { } contains no number",
    "repetition operator missing": "a *, + or ? has nothing before it to repeat",
    "incomplete escape": "it ends with a \\",
    "unrecognized escape": "a \\ precedes a letter without a special meaning",
    "invalid character class range": "a range in [ ] ends before it begins",
    "look-around": "(?= and (?< are not supported",
    "backreferences": "\\1 is not known",
    "unrecognized flag": "a (? is followed by an unknown flag",
}
_SIGNS = "\\.+*?()|[]{}^$"


def exactly(name: str) -> str:
    """Return an expression that matches a name; for a long name, all names with the same beginning."""
    text = literally(name[:_EXACT])
    return f"^{text}$" if len(name) <= _EXACT else f"^{text}"


def literally(text: str) -> str:
    """Return an expression that matches a text."""
    return "".join(f"\\{sign}" if sign in _SIGNS else sign for sign in text)


class FoundSpan(NamedTuple):
    """A span: its start, its rank, and its index within the rank."""

    start: int
    rank: int
    item: int


def matching(pattern: str, names: Sequence[str]) -> Bools:
    """Return [names] whether each name matches, ignoring case.

    Args:
        pattern: a regular expression in Rust's syntax.

    Raises:
        UsageError: the pattern is not a regular expression.
    """
    if len(pattern) > LONGEST:
        raise UsageError(f"an expression to search for has at most {LONGEST} characters")
    try:
        return pl.Series(names, dtype=pl.String).str.contains(f"(?i){pattern}").to_numpy()
    except pl.exceptions.ComputeError as error:
        what = repr(shortened(pattern, _QUOTED))
        raise UsageError(f"{what} is not a regular expression: {_mistake(str(error))}") from error


def _mistake(error: str) -> str:
    """Word what Rust's parser reports about an expression."""
    in_words = (words for said, words in _MISTAKES.items() if said in error)
    last = error.strip().splitlines()[-1].strip() if error.strip() else ""
    return next(in_words, last.removeprefix("error: "))


class Search:
    """Searches; the latest results are cached."""

    def __init__(self, names: SpanNames) -> None:
        self._names = names
        self._levels: OrderedDict[tuple[str, int, int], Sequence[DetailLevel]] = OrderedDict()
        self._lock = threading.Lock()

    def of_rank(self, pattern: str, lanes: RankLanes, window_ns: int) -> Sequence[DetailLevel]:
        """Return levels of detail of a rank's matching spans.

        Raises:
            UsageError: the pattern is not a regular expression.
        """
        key = pattern, lanes.rank, id(lanes)
        with self._lock:
            if key in self._levels:
                self._levels.move_to_end(key)
                return self._levels[key]
        wanted = matching(pattern, self._names.texts)[lanes.name]
        matches = levels(select_spans(lanes.all, wanted), window_ns)
        with self._lock:
            self._levels[key] = matches
            while len(self._levels) > KEPT:
                self._levels.popitem(last=False)
        return matches

    def count(self, pattern: str, ranks: Mapping[int, RankLanes]) -> tuple[int, int]:
        """Return the number of matching spans, and their total duration in ns.

        Raises:
            UsageError: the pattern is not a regular expression.
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
        """Return the next matching span and its number among all matches, from 1; None and 0 if none match.

        Matches on GPU lanes come before those on CPU threads; after the last match comes the first.

        Args:
            after: where to continue; not found itself. If its rank is none of `ranks`, GPU lanes come next.
            backwards: find the previous match instead.

        Raises:
            UsageError: the pattern is not a regular expression.
        """
        keys = self._in_order(pattern, ranks)
        if not keys.size:
            return None, 0
        is_read = after.rank in ranks and 0 <= after.item < ranks[after.rank].name.size
        on_cpu = is_read and not ranks[after.rank].on_gpu[after.item]
        before, same = np.zeros(keys.shape[1], bool), np.ones(keys.shape[1], bool)
        for key, value in zip(keys, (int(on_cpu), *after), strict=True):
            before |= same & (key < value)
            same &= key == value
        place = (int(before.sum()) - 1 if backwards else int((before | same).sum())) % keys.shape[1]
        return FoundSpan(*keys[1:, place].tolist()), place + 1

    def longest(
        self, pattern: str, ranks: Mapping[int, RankLanes], among: Collection[int]
    ) -> tuple[FoundSpan | None, int]:
        """Return the longest matching span of some of the ranks, and its number among all matches.

        Raises:
            UsageError: the pattern is not a regular expression.
        """
        keys = self._in_order(pattern, ranks)
        lasts = np.zeros(keys.shape[1], np.int64)
        for rank in among:
            of_rank = np.flatnonzero(keys[2] == rank)
            if of_rank.size:
                item, spans = keys[3, of_rank], ranks[rank].all
                lasts[of_rank] = 1 + spans.end[item] - spans.start[item]
        if not lasts.any():
            return None, 0
        place = int(lasts.argmax())
        return FoundSpan(*keys[1:, place].tolist()), place + 1

    def _in_order(self, pattern: str, ranks: Mapping[int, RankLanes]) -> Ints:
        """Return [4, N] lane kind, start, rank and item of the matching spans, in the order of a search."""
        matches = matching(pattern, self._names.texts)
        columns = [np.empty((4, 0), np.int64)]
        for rank, lanes in ranks.items():
            item = np.flatnonzero(matches[lanes.name])
            of = np.full(item.size, rank)
            columns.append(np.stack([~lanes.on_gpu[item], lanes.all.start[item], of, item]).astype(np.int64))
        keys = np.concatenate(columns, axis=1)
        return keys[:, np.lexsort(keys[::-1])]
