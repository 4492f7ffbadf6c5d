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
from dpro.errors import UsageError
from dpro.words import shortened

LONGEST = 300  # characters of an expression
KEPT = 48  # ranks' levels of matches that are kept
_QUOTED = 60
_EXACT = 140  # characters of a name that an expression for it has; each may take two
_MISTAKES = {  # what the parser says -> what it is called here
    "unclosed character class": "a [ is not closed",
    "unclosed group": "a ( is not closed",
    "unopened group": "a ) closes nothing",
    "unclosed counted repetition": "a { is not closed",
    "repetition quantifier expects": "a { } holds no number",
    "repetition operator missing": "a *, + or ? has nothing before it to repeat",
    "incomplete escape": "it ends with a \\",
    "unrecognized escape": "a \\ stands before a letter that it gives no meaning",
    "invalid character class range": "a range in [ ] ends before it begins",
    "look-around": "(?= and (?< are not known",
    "backreferences": "\\1 is not known",
    "unrecognized flag": "a (? is followed by no known letter",
}
_SIGNS = "\\.+*?()|[]{}^$"


def exactly(name: str) -> str:
    """Return an expression that matches a name; for a long one, all names with the same beginning."""
    text = literally(name[:_EXACT])
    return f"^{text}$" if len(name) <= _EXACT else f"^{text}"


def literally(text: str) -> str:
    """Return an expression that matches a text."""
    return "".join(f"\\{sign}" if sign in _SIGNS else sign for sign in text)


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
        raise UsageError(f"{what} is no regular expression: {_mistake(str(error))}") from error


def _mistake(error: str) -> str:
    """Return what is wrong with an expression, as Rust's parser says it, in words."""
    in_words = (words for said, words in _MISTAKES.items() if said in error)
    last = error.strip().splitlines()[-1].strip() if error.strip() else ""
    return next(in_words, last.removeprefix("error: "))


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

        Matches on GPU lanes come first, and then those of CPU threads.

        Args:
            after: where to go on from; it is not found again. One of no rank goes on with GPU lanes.
            backwards: look for the one before instead. Beyond the last comes the first.

        Raises:
            UsageError: that is no regular expression.
        """
        matches = matching(pattern, self._names.texts)
        columns = [np.empty((4, 0), np.int64)]
        for rank, lanes in ranks.items():
            item = np.flatnonzero(matches[lanes.name])
            of = np.full(item.size, rank)
            columns.append(np.stack([~lanes.on_gpu[item], lanes.all.start[item], of, item]).astype(np.int64))
        keys = np.concatenate(columns, axis=1)
        keys = keys[:, np.lexsort(keys[::-1])]
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
