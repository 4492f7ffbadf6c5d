"""Selection of steps and ranks, as options of commands and links of the dashboard write it.

Takes texts such as `3,5,7-9`; returns ranges of numbers, first and last included, and a `Selection` that
filters tables. Does not resolve ranks named by coordinates, such as `tp=0`: `dpro.analysis.selected` does,
with the layout of a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from dpro.documents import DocumentPart
from dpro.errors import UsageError
from dpro.words import first_few, one_line, shortened

if TYPE_CHECKING:
    import polars as pl

Ranges = tuple[tuple[int, int], ...]  # ascending, first and last of each included, none adjacent

_LONGEST = 60  # characters of invalid input that a message repeats
_DIGITS = 9  # of a step or a rank: such numbers fit Int32 columns
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
        """Return whether the selection is narrower than all steps and ranks."""
        return bool(self.steps or self.ranks)

    def __str__(self) -> str:
        """Return the selection as command-line options."""
        given = (("--steps", self.steps), ("--ranks", self.ranks))
        return " ".join(f"{option} {ranges_text(ranges)}" for option, ranges in given if ranges)

    def keep(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of selected steps and ranks; a column that the frame lacks does not filter.

        Args:
            frame: rows with `step`, `rank`, both or neither.
        """
        for column, ranges in (("step", self.steps), ("rank", self.ranks)):
            if ranges and column in frame.columns:
                frame = frame.filter(is_in_ranges(column, ranges))
        return frame

    def has_rank(self, rank: int) -> bool:
        """Return whether a rank is selected."""
        return not self.ranks or is_within(rank, self.ranks)

    def checked(self, recorded: pl.DataFrame, of: str = "") -> pl.DataFrame:
        """Return the selected rows; raise if there are none.

        Args:
            recorded: `step` and `rank` of deep windows; a step below 0 means no step.
            of: prefix of the message that names the run, where there are several.

        Raises:
            UsageError: no row is selected; the message lists the recorded steps and ranks.
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
    """Ranks as an option names them: by number, or by coordinates in the layout.

    Attributes:
        ranks: numbers of ranks.
        places: axes of the layout with coordinates along each; a rank must match all axes.
    """

    ranks: Ranges = ()
    places: tuple[tuple[str, Ranges], ...] = ()

    def __bool__(self) -> bool:
        """Return whether any ranks are named."""
        return bool(self.ranks or self.places)

    def __str__(self) -> str:
        """Return the choice as text of the option."""
        places = ",".join(f"{axis}={ranges_text(along)}" for axis, along in self.places)
        return ranges_text(self.ranks) or places


class SelectionDocument(DocumentPart, frozen=True):
    """The selected steps and ranks, as options write them: `3,5,7-9`.

    Attributes:
        steps: selected steps; absent for all.
        ranks: selected ranks; absent for all.
    """

    steps: str | UnsetType = UNSET
    ranks: str | UnsetType = UNSET


def selection_document(selection: Selection) -> SelectionDocument | UnsetType:
    """Return the value of key `selection` in `--json`; absent where everything is selected."""
    if not selection:
        return UNSET
    return SelectionDocument(ranges_text(selection.steps) or UNSET, ranges_text(selection.ranks) or UNSET)


def is_within(number: int, ranges: Ranges) -> bool:
    """Return whether a number is in any of the ranges."""
    return any(first <= number <= last for first, last in ranges)


def is_in_ranges(column: str, ranges: Ranges) -> pl.Expr:
    """Return an expression: whether a column's number is in any of the ranges, at least one."""
    import polars as pl

    return pl.any_horizontal(pl.col(column).is_between(*ends) for ends in ranges)


def parse_ranges(text: str, what: str) -> Ranges:
    """Parse `3-8` or `3,5,7-9`; return no ranges for an empty text.

    Args:
        what: what the numbers are, for the message.

    Raises:
        UsageError: the text is not such a list.
    """
    parts = [part.strip() for part in text.split(",")]
    return _merged(_ends(part, what) for part in parts if part)


def parse_rank_choice(text: str) -> RankChoice:
    """Parse `0,2-3`, `tp=0` or `dp=0-3,pp=1`; return an empty choice for an empty text.

    Raises:
        UsageError: the text is not such a list.
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
    """Parse a selection of steps; an empty text selects all.

    Args:
        steps: `3-8` or `3,5,7-9`.

    Raises:
        UsageError: the text is not such a list, or has no number.
    """
    return Selection(_some_ranges(steps, "steps"))


def _some_ranges(text: str, what: str) -> Ranges:
    ranges = parse_ranges(text, what)
    if text and not ranges:
        raise UsageError(f"{what} is empty: give for instance 3, 3-8 or 3,5,7-9")
    return ranges


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Return numbers, in any order, as ascending ranges."""
    return _merged((number, number) for number in numbers)


def ranges_text(ranges: Ranges, most: int | None = None) -> str:
    """Return ranges as text that `parse_ranges` reads: `3,5,7-9`.

    Args:
        ranges: ranges as from `parse_ranges`.
        most: list at most this many, separated by `, `; None for all, separated by `,`.
    """
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ",".join(texts) if most is None else first_few(texts, most)


def quoted(text: str) -> str:
    """Return invalid input on one line, quoted and shortened, to be repeated in a message."""
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
