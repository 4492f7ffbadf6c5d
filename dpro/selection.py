"""Which steps and ranks of a run are selected, as options of commands and links of the dashboard write them.

In: texts such as `3,5,7-9`. Out: ranges of numbers, first and last included; a `Selection` that filters
tables by them. Ranks may also be named by where they stand, as `tp=0`: which these are, the layout of a run
says (`dpro.analysis.selected`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from dpro.documents import DocumentPart
from dpro.errors import UsageError
from dpro.words import few, one_line, shortened

if TYPE_CHECKING:
    import polars as pl

Ranges = tuple[tuple[int, int], ...]  # ascending, first and last of each included, none adjacent

_LONGEST = 60  # characters of what is not understood that are repeated
_DIGITS = 9  # of the number of a step or a rank, which then fits all columns
_MAX_LISTED = 8  # ranges in a message


@dataclass(frozen=True)
class Selection:
    """Selected steps and ranks.

    Attributes:
        steps: selected steps; empty for all.
        ranks: selected ranks; empty for all.
    """

    steps: Ranges = ()
    ranks: Ranges = ()

    def __bool__(self) -> bool:
        """Whether anything is left out."""
        return bool(self.steps or self.ranks)

    def __str__(self) -> str:
        """Both as the options that make them."""
        given = (("--steps", self.steps), ("--ranks", self.ranks))
        return " ".join(f"{option} {ranges_text(ranges)}" for option, ranges in given if ranges)

    def keep(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Those rows that are of selected steps and ranks, as far as a frame has these columns.

        Args:
            frame: rows with `step`, `rank`, both or neither.
        """
        for column, ranges in (("step", self.steps), ("rank", self.ranks)):
            if ranges and column in frame.columns:
                frame = frame.filter(is_in_ranges(column, ranges))
        return frame

    def has_rank(self, rank: int) -> bool:
        """Whether a rank is selected."""
        return not self.ranks or is_within(rank, self.ranks)

    def checked(self, recorded: pl.DataFrame, of: str = "") -> pl.DataFrame:
        """The rows that are selected, of those there are to select from.

        Args:
            recorded: `step` and `rank` of what was recorded in depth; a step below 0 is none.
            of: which run, where there are several.

        Raises:
            UsageError: none is selected; the message names those there are.
        """
        kept = self.keep(recorded)
        if not kept.is_empty():
            return kept
        there = (recorded["step"].filter(recorded["step"] >= 0), recorded["rank"])
        steps, ranks = (ranges_text(ranges_of(numbers.unique().to_list()), _MAX_LISTED) for numbers in there)
        raise UsageError(
            f"{of}{self} selects nothing; steps recorded in depth: {steps or 'none'}; ranks {ranks or 'none'}"
        )


ALL = Selection()


@dataclass(frozen=True)
class RankChoice:
    """Ranks as an option names them: by their numbers, or by where they stand.

    Attributes:
        ranks: their numbers.
        places: axes of the layout, and places along them; all hold.
    """

    ranks: Ranges = ()
    places: tuple[tuple[str, Ranges], ...] = ()

    def __bool__(self) -> bool:
        """Whether any are named."""
        return bool(self.ranks or self.places)

    def __str__(self) -> str:
        """As the option takes it."""
        places = ",".join(f"{axis}={ranges_text(along)}" for axis, along in self.places)
        return ranges_text(self.ranks) or places


class SelectionDocument(DocumentPart, frozen=True):
    """What was selected, as options write it: `3,5,7-9`.

    Attributes:
        steps: steps; absent where all are.
        ranks: ranks; absent where all are.
    """

    steps: str | UnsetType = UNSET
    ranks: str | UnsetType = UNSET


def selection_document(selection: Selection) -> SelectionDocument | UnsetType:
    """What `--json` calls `selection`, which is absent where nothing was selected."""
    if not selection:
        return UNSET
    return SelectionDocument(ranges_text(selection.steps) or UNSET, ranges_text(selection.ranks) or UNSET)


def is_within(number: int, ranges: Ranges) -> bool:
    """Whether a number lies in one of some ranges."""
    return any(first <= number <= last for first, last in ranges)


def is_in_ranges(column: str, ranges: Ranges) -> pl.Expr:
    """Whether a column's number lies in one of some ranges.

    Args:
        ranges: at least one.
    """
    import polars as pl

    return pl.any_horizontal(pl.col(column).is_between(*ends) for ends in ranges)


def parse_ranges(text: str, what: str) -> Ranges:
    """Read `3-8` or `3,5,7-9`; nothing for an empty text.

    Raises:
        UsageError: it is no such list.
    """
    parts = [part.strip() for part in text.split(",")]
    return _merged(_ends(part, what) for part in parts if part)


def parse_rank_choice(text: str) -> RankChoice:
    """Read `0,2-3`, or `tp=0` or `dp=0-3,pp=1`; nothing for an empty text.

    Raises:
        UsageError: it is no such list.
    """
    if "=" not in text:
        return RankChoice(parse_ranges(text, "ranks"))
    places: list[tuple[str, list[str]]] = []
    why = UsageError(f"ranks {quoted(text)} are invalid: give for instance 0,2-3, or tp=0, or dp=0-3,pp=1")
    for part in text.split(","):
        axis, equals, numbers = map(str.strip, part.partition("="))
        if equals and axis.isalnum() and axis not in dict(places):
            places.append((axis, [numbers]))
        elif places and not equals:
            places[-1][1].append(axis)
        else:
            raise why
    parsed = tuple((axis, parse_ranges(",".join(parts), f"ranks {axis}=")) for axis, parts in places)
    if not all(ranges for _, ranges in parsed):
        raise why
    return RankChoice(places=parsed)


def parse_selection(steps: str = "") -> Selection:
    """Read a selection of steps, as options write it; an empty text selects all.

    Args:
        steps: as `3-8` or `3,5,7-9`.

    Raises:
        UsageError: it is no such list, or names none.
    """
    return Selection(_some_ranges(steps, "steps"))


def _some_ranges(text: str, what: str) -> Ranges:
    ranges = parse_ranges(text, what)
    if text and not ranges:
        raise UsageError(f"{what} is empty: give for instance 3, 3-8 or 3,5,7-9")
    return ranges


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Numbers as ranges."""
    return _merged((number, number) for number in numbers)


def ranges_text(ranges: Ranges, most: int | None = None) -> str:
    """Ranges as `parse_ranges` reads them.

    Args:
        ranges: as from `parse_ranges`.
        most: how many to list at most; None for all, without blanks.
    """
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ",".join(texts) if most is None else few(texts, most)


def quoted(text: str) -> str:
    """What was not understood, on one line and not too long, to be repeated in a message."""
    return repr(shortened(one_line(text), _LONGEST))


def _merged(ends: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ends):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def _ends(text: str, what: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    given = [part.strip() for part in (first, last if dash else first)]
    if not all(part.isdecimal() and len(part) <= _DIGITS for part in given):
        raise UsageError(
            f"{what} {quoted(text)} are invalid: give for instance 3, 3-8 or 3,5,7-9, with numbers from 0"
        )
    ends = int(given[0]), int(given[1])
    if ends[0] > ends[1]:
        raise UsageError(f"{what} {quoted(text)} are invalid: a range begins with its smaller number")
    return ends
