"""Links: the view and the selected steps, ranks and times as the query of an address.

Parses a query such as `?run=after&against=before&view=timeline&ranks=0,2-3&steps=5-7&time=12.5~80` into a
`Link`, and writes it. All views share one selection: one made in a view applies to the next, and a link sent
to a colleague reproduces the view. Runs are given by names, which `runs` looks up, never by paths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode

import polars as pl

from dpro.dashboards.theme import LIGHT, THEMES
from dpro.errors import UsageError
from dpro.selection import Ranges, is_in_ranges, parse_ranges, quoted, ranges_of, ranges_text

_SHARED = ("view", "run", "against", "steps", "ranks", "time", "theme")
_MAX_RANKS = 1_000_000


@dataclass(frozen=True)
class Link:
    """A view and its selection.

    Attributes:
        view: its name; empty for the first view of the run.
        run: name of the run that is shown; empty for the one that was opened.
        against: name of the run that it is compared with; empty for none.
        steps: selected steps, as ranges with first and last included; empty for all.
        ranks: selected ranks, ascending; empty for all.
        time_ms: from and to, ms since the beginning of the graph; None for the time of the selected steps.
        options: parameters of one view alone: its filter, its order, …
    """

    view: str = ""
    run: str = ""
    against: str = ""
    steps: Ranges = ()
    ranks: tuple[int, ...] = ()
    time_ms: tuple[float, float] | None = None
    theme: str = LIGHT
    options: Mapping[str, str] = field(default_factory=dict)

    def query(self, **changes: object) -> str:
        """Return the link's query, `?…`, with some fields changed."""
        link = dataclasses.replace(self, **changes)  # type: ignore[arg-type]
        pairs = [
            ("view", link.view),
            ("run", link.run),
            ("against", link.against),
            ("steps", ranges_text(link.steps)),
            ("ranks", ranges_text(ranges_of(link.ranks))),
            ("time", "" if link.time_ms is None else "~".join(f"{ms:.6f}" for ms in link.time_ms)),
            ("theme", "" if link.theme == LIGHT else link.theme),
            *sorted(link.options.items()),
        ]
        return "?" + urlencode([pair for pair in pairs if pair[1]], safe=",~:=*")

    def with_options(self, **changes: str) -> str:
        """Return the link's query with some parameters of its view changed; empty ones are left out."""
        return self.query(options={**self.options, **changes})

    def chosen(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Filter a frame by the selected ranks and steps; columns that it lacks are ignored."""
        if self.ranks and "rank" in frame.columns:
            frame = frame.filter(pl.col("rank").is_in(self.ranks))
        if self.steps and "step" in frame.columns:
            frame = frame.filter(is_in_ranges("step", self.steps))
        return frame

    def extent_ms(self, steps: pl.DataFrame) -> tuple[float, float] | None:
        """Return from and to, in ms: of the link's time, its steps or the first window; None without any.

        Args:
            steps: `window`, `step`, `begin_ms`, `end_ms`.
        """
        if self.time_ms is not None:
            return self.time_ms
        chosen = self.chosen(steps)
        if not self.steps and not chosen.is_empty():
            chosen = chosen.filter(pl.col("window") == chosen["window"].min())
        if chosen.is_empty():
            return None
        return float(chosen["begin_ms"].to_numpy().min()), float(chosen["end_ms"].to_numpy().max())


def parse_link(query: str) -> Link:
    """Parse a query.

    Raises:
        UsageError: a part is invalid; the message names it.
    """
    given = dict(parse_qsl(query.removeprefix("?")))
    return Link(
        view=given.get("view", ""),
        run=given.get("run", ""),
        against=given.get("against", ""),
        steps=parse_ranges(given.get("steps", ""), "steps"),
        ranks=parse_ranks(given.get("ranks", "")),
        time_ms=_time(given.get("time", "")),
        theme=given["theme"] if given.get("theme") in THEMES else LIGHT,
        options={key: value for key, value in given.items() if key not in _SHARED},
    )


def named_runs(query: str) -> tuple[str, str]:
    """Return the shown run and the one compared with it, even if other parts of a query are invalid."""
    given = dict(parse_qsl(query.removeprefix("?")))
    return given.get("run", ""), given.get("against", "")


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse `0,2-3` into ranks.

    Raises:
        UsageError: the text is not such a list, or has too many ranks.
    """
    ranges = parse_ranges(text, "ranks")
    if sum(last - first for first, last in ranges) > _MAX_RANKS:
        raise UsageError(f"ranks {quoted(text)} are too many: at most {_MAX_RANKS:,}")
    return tuple(rank for first, last in ranges for rank in range(first, last + 1))


def _time(text: str) -> tuple[float, float] | None:
    if not text:
        return None
    try:
        begin, end = (float(part) for part in text.split("~"))
    except ValueError as error:
        raise UsageError(f"time {quoted(text)} is invalid: give two numbers in ms, such as 1.5~20") from error
    if not -1e12 < begin < end < 1e12:
        raise UsageError(f"time {quoted(text)} is not understood: the first comes before the second")
    return begin, end
