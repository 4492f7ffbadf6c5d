"""How far the clock of each rank is from the reference rank's, in each window.

In: matched collectives, which ranks share a clock, and comparisons of clocks that were recorded. Out: a line
per clock and window with its uncertainty and what told it, and what cannot be reconciled. Recorded times are
never rewritten: the lines are kept beside them, and the graph is built from times moved along them.

Three things tell. Recorded comparisons are best: their round trips bound the error. Else all members of a
collective end together, so the median difference of the ends is the offset, to the skew of the ends.
Causality bounds both: none leaves before the last has come, and nothing is received before it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import polars as pl

from dpro.replay.clocks import ENOUGH, Ints, Line, fit_bounded, fit_scattered
from dpro.units import NS_PER_MS, NS_PER_US, format_duration

# The skew of the ends of one collective is tens of microseconds: below this an offset cannot be told from it.
LEAST_OFFSET_NS = 50 * NS_PER_US
# Times on GPUs are converted to the host's clock to some tens of microseconds.
CONVERSION_NS = 100 * NS_PER_US
# Ranks of one host name are taken for ranks of one clock unless collectives contradict it by more than this.
ONE_HOST_NS = NS_PER_MS
# A window with fewer collectives in common is helped out by the others of the run.
FEW_IN_WINDOW = 8
# Comparisons used on each side of a window: the two latest times that clocks were compared.
NEAREST = 16
# Nobody leaves one of these before all members have come.
ALL_AWAIT_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


@dataclass(frozen=True)
class Clock:
    """The clock of a rank in a window.

    Attributes:
        name: what the ranks that share it call it: the host, or the rank where that is unknown.
        line: how far it is ahead of the reference clock.
        source: what told it.
    """

    name: str
    line: Line
    source: str


@dataclass(frozen=True)
class Alignment:
    """All clocks of a run.

    Attributes:
        clocks: by rank and window.
        conflicts: one line for each clock that no line fits, or that what is known of contradicts itself.
    """

    clocks: Mapping[tuple[int, int], Clock]
    conflicts: tuple[str, ...] = ()

    def of(self, rank: int) -> Clock:
        """A rank's clock in its first window."""
        return self.clocks[min(key for key in self.clocks if key[0] == rank)]

    def aligned(self, frame: pl.DataFrame) -> pl.DataFrame:
        """A table's rows with their times on the reference clock.

        Args:
            frame: has `rank`, `window` and `start_ns`, perhaps `duration_ns` (negative where unknown). Rows
                of no window count as the rank's first one's, those of unknown ranks are left alone.
        """
        if not any(clock.line.offset_ns or clock.line.drift_ppb for clock in self.clocks.values()):
            return frame
        first = dict(sorted(self.clocks, reverse=True))
        start, end = frame["start_ns"].to_numpy(writable=True), _ends(frame)
        place, of_row = np.unique(frame.select("rank", "window").to_numpy(), axis=0, return_inverse=True)
        rows_of_place = np.split(np.argsort(of_row, kind="stable"), np.cumsum(np.bincount(of_row))[:-1])
        for (rank, window), rows in zip(place.tolist(), rows_of_place):
            clock = self.clocks.get((rank, window), self.clocks.get((rank, first.get(rank, -1))))
            if clock is not None:
                start[rows], end[rows] = clock.line.aligned(start[rows]), clock.line.aligned(end[rows])
        moved = frame.with_columns(start_ns=pl.Series(start, dtype=pl.Int64))
        if "duration_ns" not in frame.columns:
            return moved
        lasts = pl.when(pl.col("duration_ns") < 0).then("duration_ns").otherwise(pl.Series(end - start))
        return moved.with_columns(duration_ns=lasts)


def _ends(frame: pl.DataFrame) -> Ints:
    last = frame["duration_ns"].clip(lower_bound=0) if "duration_ns" in frame.columns else 0
    return (frame["start_ns"] + last).to_numpy(writable=True)


def one_clock(places: Iterable[tuple[int, int]], why: str) -> Alignment:
    """The alignment of a trace whose times are all on one clock.

    Args:
        places: rank and window of its rows.
        why: how that is known.
    """
    return Alignment({place: Clock("", Line(), why) for place in places})


def align(
    matched: pl.DataFrame, places: Iterable[tuple[int, int]], workers: pl.DataFrame, samples: pl.DataFrame
) -> Alignment:
    """Find the clock of every rank in every window.

    Args:
        matched: rows of `dpro.replay.match.Matching`.
        places: rank and window of all that is to be aligned.
        workers: the `workers` table, for which ranks share a clock.
        samples: the `clock_samples` table.

    Returns:
        The clocks against that of the lowest rank. One that nothing connects to it keeps 0, with
        uncertainty -1.
    """
    places = sorted(places)
    seen = _moments(matched)
    names = _names(sorted({*workers["rank"], *(rank for rank, _ in places)}), workers, seen)
    compared = samples.filter(pl.col("peer_rank") >= 0).with_columns(
        clock=_named("rank", names), peer=_named("peer_rank", names)
    )
    compared = compared.filter((pl.col("clock") != "") & (pl.col("peer") != ""))
    seen = seen.with_columns(clock=_named("rank", names))
    clocks: dict[tuple[int, int], Clock] = {}
    conflicts: list[str] = []
    for window in sorted({window for _, window in places}):
        ranks = [rank for rank, where in places if where == window]
        here = seen.filter(pl.col("window") == window)
        found = _Window(here, seen, compared, list(dict.fromkeys(names[rank] for rank in ranks)))
        found.solve()
        conflicts += [f"window {window}: {conflict}" for conflict in found.conflicts()]
        for rank in ranks:
            clock = found.known[names[rank]]
            shared = rank != ranks[0] and clock.source == "reference"
            clocks[rank, window] = Clock(clock.name, clock.line, "same host" if shared else clock.source)
    return Alignment(clocks, tuple(conflicts))


def _moments(matched: pl.DataFrame) -> pl.DataFrame:
    """Collectives of several ranks: `end`, and by causality what others await (`begin`) and what awaits them.

    `begin` is null where nobody has to await the row, `finish` where the row awaits nobody. `way` is 1 where
    data only come, -1 where they only go.
    """
    start, end = pl.col("start_ns"), pl.col("start_ns") + pl.col("duration_ns")
    mutual = pl.col("op").is_in(ALL_AWAIT_ALL)
    return matched.filter(pl.col("members") > 1).select(
        "rank",
        "window",
        "instance",
        end=end,
        begin=pl.when(mutual | (pl.col("op") == "send")).then(start),
        finish=pl.when(mutual | (pl.col("op") == "recv")).then(end),
        way=(pl.col("op") == "recv").cast(pl.Int8) - (pl.col("op") == "send").cast(pl.Int8),
    )


def _names(ranks: list[int], workers: pl.DataFrame, seen: pl.DataFrame) -> dict[int, str]:
    """What each rank's clock is called: by its kernel's boot, by its host, or by the rank itself.

    A host's name proves little (`localhost`): it is not believed where its ranks' collectives contradict it.
    """
    names = {rank: f"rank {rank}" for rank in ranks}
    boots: dict[str, str] = {}
    by_host: dict[str, list[int]] = {}
    for rank, boot, host in workers.sort("rank").select("rank", "clock", "host").iter_rows():
        if boot:
            again = not host or host in boots.values()
            names[rank] = boots.setdefault(boot, f"{host} ({boot[:8]})" if again else host)
        elif host:
            names[rank] = host
            by_host.setdefault(host, []).append(rank)
    for members in by_host.values():
        own = seen.filter(pl.col("rank").is_in(members)).with_columns(clock=pl.col("rank").cast(pl.String))
        if any(low > ONE_HOST_NS or high < -ONE_HOST_NS for low, high in _feasible(own).values()):
            names |= {rank: f"rank {rank}" for rank in members}
    return names


def _named(column: str, names: Mapping[int, str]) -> pl.Expr:
    return pl.col(column).replace_strict(
        list(names), list(names.values()), default="", return_dtype=pl.String
    )


def _feasible(seen: pl.DataFrame) -> dict[str, tuple[float, float]]:
    """How far each clock may be ahead of the others by causality, ns from and to; or infinite."""
    own = seen.group_by("instance", "clock").agg(pl.col("begin").max(), pl.col("finish").min())
    of_instance = own.group_by("instance").agg(
        first_finish=pl.col("finish").min(),
        next_finish=pl.col("finish").bottom_k(2).max(),
        first_at=pl.col("clock").sort_by("finish", nulls_last=True).first(),
        last_begin=pl.col("begin").max(),
        next_begin=pl.col("begin").top_k(2).min(),
        last_at=pl.col("clock").sort_by("begin", descending=True, nulls_last=True).first(),
        begins=pl.col("begin").count(),
        finishes=pl.col("finish").count(),
    )
    both = own.join(of_instance, on="instance")
    first, last = pl.col("clock") == pl.col("first_at"), pl.col("clock") == pl.col("last_at")
    their_finish = (
        pl.when(~first).then("first_finish").otherwise(pl.when(pl.col("finishes") > 1).then("next_finish"))
    )
    their_begin = (
        pl.when(~last).then("last_begin").otherwise(pl.when(pl.col("begins") > 1).then("next_begin"))
    )
    bounds = both.group_by("clock").agg(
        low=(pl.col("begin") - their_finish).max(), high=(pl.col("finish") - their_begin).min()
    )
    unbounded = bounds.with_columns(pl.col("low").cast(pl.Float64), pl.col("high").cast(pl.Float64))
    filled = unbounded.with_columns(
        pl.col("low").fill_null(float("-inf")), pl.col("high").fill_null(float("inf"))
    )
    return {clock: (low, high) for clock, low, high in filled.select("clock", "low", "high").iter_rows()}


class _Window:
    """One window's clocks while they are found; `known` grows until it has all of them."""

    def __init__(
        self, here: pl.DataFrame, seen: pl.DataFrame, compared: pl.DataFrame, names: list[str]
    ) -> None:
        self._here, self._seen, self._compared, self._names = here, seen, compared, names
        self.known: dict[str, Clock] = {}
        self._contradicted: list[str] = []

    def solve(self) -> None:
        """From the lowest rank's clock outwards; what it cannot reach is uncertain."""
        for root in self._names:
            if root in self.known:
                continue
            first = not self.known
            self.known[root] = Clock(
                root, Line(uncertainty_ns=0 if first else -1), "reference" if first else "nothing"
            )
            while self._by_comparison() or self._by_ends():
                pass

    def _on_reference(self, name: str, times: Ints) -> Ints:
        return self.known[name].line.aligned(times)

    def _add(self, name: str, line: Line, source: str, others: Iterable[str]) -> None:
        """Uncertainties add up on the way from the reference."""
        before = [self.known[other].line.uncertainty_ns for other in others]
        total = -1 if min(before) < 0 else line.uncertainty_ns + max(before)
        self.known[name] = Clock(name, Line(line.reference_ns, line.offset_ns, line.drift_ppb, total), source)

    def _by_comparison(self) -> bool:
        """Add the clocks that were compared with known ones."""
        extent = self._extent()
        added = False
        pairs = self._compared.select("clock", "peer").unique(maintain_order=True).rows()
        for clock, peer in chain(pairs, [(b, a) for a, b in pairs]):
            if clock in self.known or peer not in self.known:
                continue
            times, ahead, bounds = self._points(clock, peer)
            chosen = _nearest(times, sum(extent) // 2)
            line = fit_bounded(times[chosen], ahead[chosen], bounds[chosen], extent)
            if line.uncertainty_ns > ONE_HOST_NS:
                self._contradicted.append(
                    f"comparisons of the clocks of {clock} and {peer} lie on no line, by "
                    f"{format_duration(line.uncertainty_ns)}: was one of them set?"
                )
            self._add(clock, line, "clock samples", [peer])
            added = True
        return added

    def _points(self, clock: str, peer: str) -> tuple[Ints, Ints, Ints]:
        """Times on a clock, how far it was ahead of the reference, and half the round trips, all in ns."""
        own = self._compared.filter((pl.col("clock") == clock) & (pl.col("peer") == peer))
        their = self._compared.filter((pl.col("clock") == peer) & (pl.col("peer") == clock))
        times = np.concatenate([own["time_ns"], their["time_ns"] - their["offset_ns"]])
        meanwhile = np.concatenate([own["time_ns"] - own["offset_ns"], their["time_ns"]])
        bounds = np.concatenate([own["round_trip_ns"], their["round_trip_ns"]]) // 2
        return times, times - self._on_reference(peer, meanwhile), bounds

    def _extent(self) -> tuple[int, int]:
        """From when to when the window's collectives ran; clocks differ by less than matters here."""
        rows = self._here if self._here.height else self._seen
        if rows.height == 0:
            return (0, 0)
        return int(rows["end"].min()), int(rows["end"].max())  # type: ignore[arg-type]

    def _by_ends(self) -> bool:
        """Add the clocks that have collectives in common with known ones."""
        known = list(self.known)
        added: list[tuple[str, Line, str, list[str]]] = []
        for name in self._names:
            if name in self.known:
                continue
            shared = self._in_common(self._here, name, known)
            if shared["instance"].n_unique() < FEW_IN_WINDOW:
                more = self._in_common(self._seen, name, known)
                shared = more if more.height else shared
            if shared.height:
                others = shared["clock_right"].unique().to_list()
                added.append((name, *self._of_ends(name, shared), others))
        for name, line, source, others in added:
            self._add(name, line, source, others)
        return bool(added)

    def _in_common(self, seen: pl.DataFrame, name: str, known: list[str]) -> pl.DataFrame:
        """Ends on a clock beside those on the known clock that has most collectives in common with it."""
        # The middle one as it is: a mean of two would be a float, too coarse for times of day.
        per_clock = [pl.col("end").sort().get((pl.len() - 1) // 2), pl.col("way").first()]
        mine = seen.filter(pl.col("clock") == name).group_by("instance").agg(per_clock)
        theirs = seen.filter(pl.col("clock").is_in(known)).group_by("instance", "clock").agg(per_clock)
        both = mine.join(theirs.rename({"clock": "clock_right"}), on="instance")
        if both.height == 0:
            return both
        order = {clock: number for number, clock in enumerate(known)}
        counts = both.group_by("clock_right").len().rows()
        best = min(counts, key=lambda count: (-count[1], order[count[0]]))[0]
        return both.filter(pl.col("clock_right") == best).sort("end", "instance")

    def _of_ends(self, name: str, shared: pl.DataFrame) -> tuple[Line, str]:
        together = shared.filter(pl.col("way") == 0)
        shared = together if together.height >= ENOUGH else shared
        times, peer = shared["end"].to_numpy(), str(shared["clock_right"][0])
        ahead = times - self._on_reference(peer, shared["end_right"].to_numpy())
        line, source = fit_scattered(times, ahead), "collective ends"
        low, high = self._left_by_causality(name, line, peer)
        if np.isfinite([low, high]).all() and low <= high and _apart(ahead, shared["way"].to_numpy()):
            middle, half = round((low + high) / 2), round((high - low) / 2)
            line = Line(line.reference_ns, line.offset_ns + middle, line.drift_ppb, half)
            source = "causality of sends"
        few = times.size < ENOUGH
        agree = not line.drift_ppb and abs(line.offset_ns) <= max(line.uncertainty_ns, LEAST_OFFSET_NS)
        if few or agree:
            most = max(line.uncertainty_ns, abs(line.offset_ns))
            return Line(
                line.reference_ns, 0, 0, most
            ), "too few collectives in common" if few else f"{source}: clocks agree"
        return line, source

    def _left_by_causality(self, name: str, line: Line, peer: str) -> tuple[float, float]:
        """What causality allows a clock to be ahead of a known one once its line is taken off, ns."""
        lines = {name: line, peer: self.known[peer].line}
        return _feasible(_aligned_moments(self._here, lines)).get(name, (-np.inf, np.inf))

    def conflicts(self) -> list[str]:
        """What contradicts itself: comparisons on no line, and collectives left before others had come."""
        found = list(self._contradicted)
        lines = {name: clock.line for name, clock in self.known.items()}
        for name, (low, high) in sorted(_feasible(_aligned_moments(self._here, lines)).items()):
            own = lines[name].uncertainty_ns
            others = max((line.uncertainty_ns for other, line in lines.items() if other != name), default=0)
            missed = max(low, -high) > CONVERSION_NS + max(own, others)
            never_met = low - high > 2 * (CONVERSION_NS + others)
            if own >= 0 and (missed or never_met):
                early = format_duration(max(low, -high))
                found.append(
                    f"the clock of {name} cannot be reconciled with the others: as best it fits, a "
                    f"collective is left {early} before all have come, or data received before it is sent"
                )
        return found


def _aligned_moments(seen: pl.DataFrame, lines: Mapping[str, Line]) -> pl.DataFrame:
    """Rows of some clocks with what causality binds moved along their lines."""
    parts = []
    for name, line in lines.items():
        rows = seen.filter(pl.col("clock") == name)
        moved = [
            pl.Series(column, line.aligned(rows[column].fill_null(line.reference_ns).to_numpy()))
            for column in ("begin", "finish")
        ]
        known = [pl.when(pl.col(s.name).is_not_null()).then(s).alias(s.name) for s in moved]
        parts.append(rows.with_columns(known))
    return pl.concat(parts)


def _apart(ahead: Ints, way: Ints) -> bool:
    """Whether sends and receives do not end together: a buffered send ends as soon as it is on its way."""
    there, back = ahead[way > 0], ahead[way < 0]
    return bool(there.size and back.size and np.median(there) - np.median(back) > CONVERSION_NS)


def _nearest(times: Ints, moment: int) -> Ints:
    """The comparisons around a moment: the same number before and after it, if there are."""
    order = np.argsort(times, kind="stable")
    at = int(np.searchsorted(times[order], moment))
    return order[max(at - NEAREST, 0) : at + NEAREST]
