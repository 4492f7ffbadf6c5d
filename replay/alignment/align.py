"""Alignment of clocks: the offset of each rank's clock from the reference rank's, in each window.

Takes matched collectives, which ranks share a clock, and recorded comparisons of clocks. Returns a line per
clock and window with its uncertainty and source, and conflicts that cannot be reconciled. Recorded times are
never rewritten: the lines are kept beside them, and the graph is built from times moved along the lines.

There are three sources. Recorded comparisons are best, since their round trips bound the error. Else all
members of a collective end together, so the median difference of the ends is the offset, up to their skew.
Causality bounds both: no member leaves before the last has arrived, and nothing arrives before it is sent.

Pretended ranks each ran by themselves: their clocks are stopped while a collective is answered, since a real
rank would not make our answers, and all begin the first step of a window at once.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.replay.intervals import union
from dpro.units import NS_PER_MS, NS_PER_S, NS_PER_US, format_duration

# Comparisons of two clocks, and lines through their differences.

# Clocks of computers drift apart by less than this, even without a time service.
WORST_DRIFT_PPB = 100_000
# A clock drifts if its slope is this many standard errors (where ranks of real jobs share a clock, it is up
# to 4), and the residuals have at most this share of the scatter about a level line.
CLEARLY_STEEP = 6.0
CLEARLY_LESS = 0.75
ENOUGH_FOR_DRIFT = 16  # of fewer, more than one set of pure scatter in a thousand fits a steep line
ENOUGH = 3  # fewer differences cannot show how much they scatter
# Slopes are computed between all pairs of at most this many differences, evenly chosen.
_MAX_SAMPLES = 400
# Comparisons used on each side of a window: those of the two latest times that clocks were compared.
NEAREST = 16
# A wall clock that gains or loses more than this against the monotonic one was set, not slewed.
SET_NS = NS_PER_MS
FASTEST_SLEW = 0.001
_NONE = pl.DataFrame(schema=dict.fromkeys(("time_ns", "offset_ns", "round_trip_ns"), pl.Int64))


@dataclass(frozen=True)
class ClockLine:
    """The lead of a clock over the reference, as a line over time.

    Attributes:
        reference_ns: a time on this clock.
        offset_ns: how far it is ahead at that time.
        drift_ppb: by how much that grows, ns per second.
        uncertainty_ns: bound on the error of the offset at the times the line is for; -1 where unknown.
    """

    reference_ns: int = 0
    offset_ns: int = 0
    drift_ppb: int = 0
    uncertainty_ns: int = 0

    def offset_at(self, times: Ints) -> Ints:
        """Return [N] ns by which the clock is ahead at each time, in integers, which keep times in order."""
        seconds, rest = np.divmod(times - self.reference_ns, NS_PER_S)
        ahead: Ints = self.offset_ns + seconds * self.drift_ppb + rest * self.drift_ppb // NS_PER_S
        return ahead

    def aligned(self, times: Ints) -> Ints:
        """Return [N] times on the reference clock, in ns."""
        return times - self.offset_at(times)


def fit_scattered(times: Ints, differences: Ints) -> ClockLine:
    """Fit a line through differences that scatter, some of them wildly.

    The slope is the median of the slopes between all pairs (Theil 1950, Sen 1968). It is used where it is
    many times its own standard error and reduces the interquartile range of the residuals.

    Args:
        times: [N] ns on the clock, N > 0.
        differences: [N] ns by which the clock was ahead.
    """
    middle = int(times.min()) + int(np.median(times - times.min()))  # as floats, times of day are too coarse
    low, level, high = np.percentile(differences, (25, 50, 75))
    spread = high - low
    if times.size < ENOUGH:
        return ClockLine(middle, round(level), 0, round(abs(level) + spread))
    slope = _median_slope(times - middle, differences) if times.size >= ENOUGH_FOR_DRIFT else 0.0
    left = differences - slope * (times - middle)
    low, steep_level, high = np.percentile(left, (25, 50, 75))
    # Standard error of a mean slope under normal scatter; that of a median is 1.25 times as large.
    error = 1.25 * (high - low) / 1.35 / (np.std(times - middle) * np.sqrt(times.size) + 1.0)
    clear = high - low <= CLEARLY_LESS * spread and abs(slope) > CLEARLY_STEEP * error
    if not clear or abs(slope) * NS_PER_S > WORST_DRIFT_PPB:
        return ClockLine(middle, round(level), 0, round(spread))
    return ClockLine(middle, round(steep_level), round(slope * NS_PER_S), round(high - low))


def _median_slope(times: Ints, differences: Ints) -> float:
    if times.size > _MAX_SAMPLES:
        chosen = np.linspace(0, times.size - 1, _MAX_SAMPLES).round().astype(np.int64)
        times, differences = times[chosen], differences[chosen]
    i, j = np.triu_indices(times.size, 1)
    apart = times[j] != times[i]
    i, j = i[apart], j[apart]
    return float(np.median((differences[j] - differences[i]) / (times[j] - times[i]))) if i.size else 0.0


def fit_bounded(times: Ints, differences: Ints, bounds: Ints, period: tuple[int, int]) -> ClockLine:
    """Fit a line through differences with a known bound on the error of each.

    Weighted least squares, near bounds counting most. The slope is used where it exceeds what the bounds
    allow by themselves.

    Args:
        times: [N] ns on the clock, N > 0.
        differences: [N] ns by which the clock was ahead.
        bounds: [N] ns by which each difference may be wrong.
        period: (first, last) time on the clock that the line is for: the uncertainty grows towards them.
    """
    bounds = np.maximum(bounds, 1)
    weight = 1.0 / bounds.astype(np.float64) ** 2
    middle = int(times.min() + np.average(times - times.min(), weights=weight))
    since = (times - middle).astype(np.float64)
    level = float(np.average(differences, weights=weight))
    bound, extent = float(np.median(bounds)), float(np.ptp(times))
    unknown = min(2 * bound / extent, WORST_DRIFT_PPB / NS_PER_S) if extent else WORST_DRIFT_PPB / NS_PER_S
    moment = float(np.sum(weight * since**2))
    slope = float(np.sum(weight * since * (differences - level))) / moment if moment else 0.0
    if abs(slope) * extent <= 2 * bound or abs(slope) * NS_PER_S > WORST_DRIFT_PPB:
        slope = 0.0
    near = bounds <= 2 * bound
    off = float(np.abs(differences - level - slope * since)[near].max())
    beyond = max(int(times.min()) - period[0], period[1] - int(times.max()), 0)
    uncertainty = max(off, bound) + unknown * beyond
    return ClockLine(middle, round(level), round(slope * NS_PER_S), round(uncertainty))


def named(column: str, names: Mapping[int, str]) -> pl.Expr:
    """Return the name of each rank's clock, empty where it has none."""
    return pl.col(column).replace_strict(
        list(names), list(names.values()), default="", return_dtype=pl.String
    )


def on_lines(
    frame: pl.DataFrame, clock: str, lines: Mapping[Any, ClockLine], times: Sequence[str]
) -> pl.DataFrame:
    """Move times onto the reference clock as `ClockLine.aligned` does, for all clocks at once.

    Args:
        clock: the column with the clock of each row.
        lines: lines by the values of that column; times on other clocks stay as they are.
        times: the columns to move, in ns.
    """
    fields = {"reference_": "reference_ns", "offset_": "offset_ns", "drift_": "drift_ppb"}
    columns = {name: [getattr(line, field) for line in lines.values()] for name, field in fields.items()}
    by_clock = pl.DataFrame({clock: pl.Series(list(lines), dtype=frame.schema[clock]), **columns})
    joined = frame.join(by_clock, on=clock, how="left", maintain_order="left")
    moved = []
    for time in map(pl.col, times):
        seconds, rest = (time - pl.col("reference_")) // NS_PER_S, (time - pl.col("reference_")) % NS_PER_S
        drifted = seconds * pl.col("drift_") + rest * pl.col("drift_") // NS_PER_S
        moved.append((time - (pl.col("offset_") + drifted)).fill_null(time))
    return joined.with_columns(moved).drop(*fields)


class Comparisons:
    """Recorded comparisons of the clocks of a run."""

    def __init__(self, samples: pl.DataFrame, names: Mapping[int, str]) -> None:
        """Sort the samples by clock."""
        rows = samples.with_columns(clock=named("rank", names), peer=named("peer_rank", names))
        between = rows.filter((pl.col("peer") != "") & (pl.col("clock") != "") & (pl.col("peer_rank") >= 0))
        self._pairs: dict[tuple[str, str], pl.DataFrame] = {
            (str(clock), str(peer)): part
            for (clock, peer), part in between.group_by("clock", "peer", maintain_order=True)
            if clock != peer
        }
        settings = rows.filter((pl.col("peer_rank") < 0) & (pl.col("monotonic_ns") >= 0))
        self._set = {str(clock): _times_set(part) for (clock,), part in settings.group_by("clock")}

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of clocks that were compared, in both orders."""
        return list(dict.fromkeys([*self._pairs, *((peer, clock) for clock, peer in self._pairs)]))

    def was_set(self, clock: str, begin: int, end: int) -> bool:
        """Return whether a clock was set between two of its times.

        Args:
            begin, end: ns on that clock, half open.
        """
        times = self._set.get(clock, np.empty(0, np.int64))
        return bool(((times >= begin) & (times < end)).any())

    def around(self, clock: str, peer: str, moment: int) -> tuple[Ints, Ints, Ints]:
        """Return the comparisons of two clocks nearest to a moment, up to `NEAREST` before it and after it.

        Args:
            moment: ns on `clock`.

        Returns:
            [N] ns each: times on the clock, simultaneous times on the peer, and error bounds of the latter.
        """
        ours = self._pairs.get((clock, peer), _NONE)
        their = self._pairs.get((peer, clock), _NONE)
        times = np.concatenate([ours["time_ns"], their["time_ns"] - their["offset_ns"]])
        meanwhile = np.concatenate([ours["time_ns"] - ours["offset_ns"], their["time_ns"]])
        bounds = np.concatenate([ours["round_trip_ns"], their["round_trip_ns"]]) // 2
        same = self._as_then(clock, times, moment) & self._as_then(peer, meanwhile, moment)
        order = np.flatnonzero(same)[np.argsort(times[same], kind="stable")]
        place = int(np.searchsorted(times[order], moment))
        chosen = order[max(place - NEAREST, 0) : place + NEAREST]
        return times[chosen], meanwhile[chosen], bounds[chosen]

    def _as_then(self, clock: str, times: Ints, moment: int) -> NDArray[np.bool_]:
        """Return [N] whether a clock was not set between each of `times` and `moment`."""
        when_set = self._set.get(clock, np.empty(0, np.int64))
        same: NDArray[np.bool_] = np.searchsorted(when_set, times) == np.searchsorted(when_set, moment)
        return same


def _times_set(rows: pl.DataFrame) -> Ints:
    """Return the times on a clock just before it was set, by its samples of the monotonic clock."""
    rows = rows.unique("monotonic_ns").sort("monotonic_ns")
    wall, untouched = rows["time_ns"].to_numpy(), rows["monotonic_ns"].to_numpy()
    gained = np.abs(np.diff(wall - untouched))
    return np.sort(wall[:-1][gained > SET_NS + FASTEST_SLEW * np.diff(untouched)])


# The ends of one collective are skewed by tens of microseconds, which hides smaller offsets.
MIN_OFFSET_NS = 50 * NS_PER_US
# Times on GPUs are converted to the host's clock to some tens of microseconds.
CONVERSION_NS = 100 * NS_PER_US
# Ranks of one host name share a clock unless collectives contradict it by more than this.
ONE_HOST_NS = NS_PER_MS
# A window with fewer collectives in common also uses those of the run's other windows.
FEW_IN_WINDOW = 8
# No member leaves one of these before all members have arrived.
ALL_AWAIT_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
NOT_BEGUN: Mapping[tuple[int, int], int] = {}  # without known steps


@dataclass(frozen=True)
class Clock:
    """The clock of a rank in a window.

    Attributes:
        name: its name, shared by the ranks that share it: the host, or the rank where that is unknown.
        line: its lead over the reference clock.
        source: what the line was inferred from.
    """

    name: str
    line: ClockLine
    source: str


@dataclass(frozen=True)
class Alignment:
    """All clocks of a run.

    Attributes:
        clocks: by rank and window.
        conflicts: one line for each clock that no line fits, or whose sources contradict each other.
    """

    clocks: Mapping[tuple[int, int], Clock]
    conflicts: tuple[str, ...] = ()

    def of(self, rank: int) -> Clock:
        """Return a rank's clock in its first window."""
        return self.clocks[min(key for key in self.clocks if key[0] == rank)]

    def ahead(self, workers: pl.DataFrame) -> dict[str, int]:
        """Return by how many ns the clock of each host is ahead, as that of its first rank shows."""
        first, ahead_ns = dict(sorted(self.clocks, reverse=True)), dict[str, int]()
        for rank, host in workers.sort("rank").select("rank", "host").iter_rows():
            if rank in first:
                ahead_ns.setdefault(host, self.clocks[rank, first[rank]].line.offset_ns)
        return ahead_ns

    def aligned(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return a table's rows with their times on the reference clock.

        Args:
            frame: has `rank`, `window` and `start_ns`, optionally `duration_ns` (negative where unknown).
                Rows of no window use the clock of the rank's first one; those of unknown ranks stay.
        """
        if not any(clock.line.offset_ns or clock.line.drift_ppb for clock in self.clocks.values()):
            return frame
        first = dict(sorted(self.clocks, reverse=True))
        lasts_ns = frame["duration_ns"].clip(lower_bound=0) if "duration_ns" in frame.columns else 0
        start = frame["start_ns"].to_numpy(writable=True)
        end = (frame["start_ns"] + lasts_ns).to_numpy(writable=True)
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


def one_clock(places: Iterable[tuple[int, int]], why: str) -> Alignment:
    """Return the alignment of a trace with all times on one clock."""
    return Alignment({place: Clock("", ClockLine(), why) for place in places})


def align(
    matched: pl.DataFrame,
    places: Iterable[tuple[int, int]],
    workers: pl.DataFrame,
    samples: pl.DataFrame,
    begun: Mapping[tuple[int, int], int] = NOT_BEGUN,
) -> Alignment:
    """Find the clock of every rank in every window.

    Args:
        matched: rows of `dpro.replay.alignment.match.Matching`.
        places: ranks and windows.
        workers: the `workers` table, which shows which ranks share a clock.
        samples: recorded comparisons of clocks.
        begun: start of the first step, ns on the rank's clock, by rank and window.

    Returns:
        The clocks against that of the lowest rank. A clock that nothing connects to it has uncertainty -1: no
        work of one side waits for the other, so both are taken to begin their first step at once.
    """
    places = sorted(places)
    seen = _moments(matched)
    names = _names(sorted({*workers["rank"], *(rank for rank, _ in places)}), workers, seen)
    compared = Comparisons(samples, names)
    seen = seen.with_columns(clock=named("rank", names))
    clocks: dict[tuple[int, int], Clock] = {}
    conflicts: list[str] = []
    for window in sorted({window for _, window in places}):
        ranks = [rank for rank, where in places if where == window]
        here = seen.filter(pl.col("window") == window)
        solved = _Window(here, seen, compared)
        starts: dict[str, int] = {}
        for rank in ranks:
            if (rank, window) in begun:
                starts[names[rank]] = min(begun[rank, window], starts.get(names[rank], begun[rank, window]))
        solved.solve(dict.fromkeys(names[rank] for rank in ranks), starts)
        conflicts += [f"window {window}: {conflict}" for conflict in solved.conflicts()]
        for rank in ranks:
            clock = solved.clocks[names[rank]]
            shared = rank != ranks[0] and clock.source == "reference"
            clocks[rank, window] = Clock(clock.name, clock.line, "same host" if shared else clock.source)
    return Alignment(clocks, tuple(conflicts))


def _moments(matched: pl.DataFrame) -> pl.DataFrame:
    """Return `end` of collectives of several ranks, and by causality `begin` and `finish`.

    `begin` is when a row is ready, null where no other member awaits it; `finish` is when it is over, null
    where it awaits no other. `way` is 1 where data only arrive, -1 where they only leave.
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
    """Return the name of each rank's clock: by its kernel's boot, its host, or the rank itself.

    A host's name alone proves little (`localhost`): it is ignored where its ranks' collectives contradict it.
    """
    names = {rank: f"rank {rank}" for rank in ranks}
    boots: dict[str, str] = {}
    hosts: dict[int, str] = {}
    for rank, boot, host in workers.sort("rank").select("rank", "clock", "host").iter_rows():
        if boot:
            again = not host or host in boots.values()
            names[rank] = boots.setdefault(boot, f"{host} ({boot[:8]})" if again else host)
        elif host:
            hosts[rank] = names[rank] = host
    # Collectives that a host's ranks have in common show whether these can share a clock.
    here = seen.with_columns(host=named("rank", hosts), clock=pl.col("rank").cast(pl.String))
    placed = here.filter(pl.col("host") != "").with_columns(
        instance=pl.struct("instance", "host").rank("dense").cast(pl.Int64)
    )
    bounds = _feasible(placed).items()
    contradicted = {
        hosts[int(rank)] for rank, (low, high) in bounds if low > ONE_HOST_NS or high < -ONE_HOST_NS
    }
    return names | {rank: f"rank {rank}" for rank, host in hosts.items() if host in contradicted}


def _feasible(seen: pl.DataFrame) -> dict[str, tuple[float, float]]:
    """Return the interval of each clock's lead over the others that causality allows, in ns; or infinite."""
    # Merge the members of each collective on one clock: the last to begin, and the first to leave.
    extents = seen.group_by("instance", "clock").agg(pl.col("begin").max(), pl.col("finish").min())
    # Per collective, find the first clock to leave and the last to begin, with the runner-up of each: only
    # others bound a clock, so where it is itself the extreme, the runner-up counts.
    of_instance = extents.group_by("instance").agg(
        first_finish=pl.col("finish").min(),
        next_finish=pl.col("finish").bottom_k(2).max(),
        first_at=pl.col("clock").sort_by("finish", nulls_last=True).first(),
        last_begin=pl.col("begin").max(),
        next_begin=pl.col("begin").top_k(2).min(),
        last_at=pl.col("clock").sort_by("begin", descending=True, nulls_last=True).first(),
        begins=pl.col("begin").count(),
        finishes=pl.col("finish").count(),
    )
    beside_others = extents.join(of_instance, on="instance")
    first, last = pl.col("clock") == pl.col("first_at"), pl.col("clock") == pl.col("last_at")
    their_finish = (
        pl.when(~first).then("first_finish").otherwise(pl.when(pl.col("finishes") > 1).then("next_finish"))
    )
    their_begin = (
        pl.when(~last).then("last_begin").otherwise(pl.when(pl.col("begins") > 1).then("next_begin"))
    )
    # No member leaves before another began: begin - offset <= their finish, their begin <= finish - offset.
    # The tightest bound of all collectives counts; without any it is infinite.
    bounds = beside_others.group_by("clock").agg(
        low=(pl.col("begin") - their_finish).max(), high=(pl.col("finish") - their_begin).min()
    )
    unbounded = bounds.with_columns(pl.col("low").cast(pl.Float64), pl.col("high").cast(pl.Float64))
    filled = unbounded.with_columns(
        pl.col("low").fill_null(float("-inf")), pl.col("high").fill_null(float("inf"))
    )
    return {clock: (low, high) for clock, low, high in filled.select("clock", "low", "high").iter_rows()}


class _Window:
    """The clocks of one window while they are solved; `clocks` grows until it has all of them."""

    def __init__(self, here: pl.DataFrame, everywhere: pl.DataFrame, compared: Comparisons) -> None:
        self._here, self._compared = here, compared
        self._ends, self._all_ends = _ends_by_clock(here), _ends_by_clock(everywhere)
        ends = (here if here.height else everywhere)["end"].to_list()
        self._extent = (min(ends, default=0), max(ends, default=0))
        self.clocks: dict[str, Clock] = {}
        self._off_line: list[str] = []

    def solve(self, names: Iterable[str], starts: Mapping[str, int]) -> None:
        """Solve clocks from the first one outwards; unconnected ones begin their first step with it.

        Args:
            starts: start of the first step of each clock's ranks, on that clock.
        """
        names = list(names)
        for root in names:
            if root in self.clocks:
                continue
            first = not self.clocks
            both_begun = root in starts and names[0] in starts
            ahead_ns = starts[root] - starts[names[0]] if both_begun else 0
            line = ClockLine(offset_ns=ahead_ns, uncertainty_ns=0 if first else -1)
            solved = {root: Clock(root, line, "reference" if first else "nothing")}
            while solved:
                self.clocks |= solved
                # Each clock comes from the source with the least uncertainty.
                solved = self._by_comparison()
                poor = [
                    name
                    for name in names
                    if name not in self.clocks
                    and (name not in solved or solved[name].line.uncertainty_ns > MIN_OFFSET_NS)
                ]
                for name, clock in self._by_ends(poor).items():
                    if name not in solved or clock.line.uncertainty_ns < solved[name].line.uncertainty_ns:
                        solved[name] = clock

    def _through(self, peer: str, line: ClockLine) -> ClockLine:
        """Add the uncertainty of the peer's line, which accumulates on the way from the reference."""
        before = self.clocks[peer].line.uncertainty_ns
        return dataclasses.replace(line, uncertainty_ns=-1 if before < 0 else before + line.uncertainty_ns)

    def _by_comparison(self) -> dict[str, Clock]:
        """Return the clocks that were compared with solved ones."""
        clocks: dict[str, Clock] = {}
        for clock, peer in self._compared.pairs():
            if clock in self.clocks or clock in clocks or peer not in self.clocks:
                continue
            times, meanwhile, bounds = self._compared.around(clock, peer, sum(self._extent) // 2)
            if not times.size:
                continue
            ahead = times - self.clocks[peer].line.aligned(meanwhile)
            line = fit_bounded(times, ahead, bounds, self._extent)
            off = int((np.abs(ahead - line.offset_at(times)) - bounds).max())
            if off > ONE_HOST_NS:
                self._off_line.append(
                    f"comparisons of the clocks of {clock} and {peer} are {format_duration(off)} off any line"
                )
            clocks[clock] = Clock(clock, self._through(peer, line), "clock samples")
        return clocks

    def _by_ends(self, names: list[str]) -> dict[str, Clock]:
        """Return those of `names` that have collectives in common with solved clocks."""
        shared = _in_common(self._ends, names, list(self.clocks))
        few = [name for name in names if name not in shared or shared[name].height < FEW_IN_WINDOW]
        shared |= _in_common(self._all_ends, few, list(self.clocks))
        clocks = {}
        for name, rows in shared.items():
            line, source = self._of_ends(name, rows)
            clocks[name] = Clock(name, self._through(str(rows["peer"][0]), line), source)
        return clocks

    def _of_ends(self, name: str, shared: pl.DataFrame) -> tuple[ClockLine, str]:
        together = shared.filter(pl.col("way") == 0)
        shared = together if together.height >= ENOUGH else shared
        times, peer = shared["end"].to_numpy(), str(shared["peer"][0])
        ahead = times - self.clocks[peer].line.aligned(shared["peer_end"].to_numpy())
        line, source = fit_scattered(times, ahead), "collective ends"
        # A buffered send ends before its data arrive: sends and receives then do not end together.
        way = shared["way"].to_numpy()
        there, back = ahead[way > 0], ahead[way < 0]
        if there.size and back.size and np.median(there) - np.median(back) > CONVERSION_NS:
            lines = {name: line, peer: self.clocks[peer].line}
            low, high = _feasible(self._aligned(lines)).get(name, (-np.inf, np.inf))
            if np.isfinite([low, high]).all() and low <= high:
                offset, half = line.offset_ns + round((low + high) / 2), round((high - low) / 2)
                line, source = (
                    ClockLine(line.reference_ns, offset, line.drift_ppb, half),
                    "causality of sends",
                )
        most = max(line.uncertainty_ns, abs(line.offset_ns))
        if times.size < ENOUGH:
            return ClockLine(line.reference_ns, 0, 0, most), "too few collectives in common"
        if not line.drift_ppb and abs(line.offset_ns) <= max(line.uncertainty_ns, MIN_OFFSET_NS):
            return ClockLine(line.reference_ns, 0, 0, most), f"{source}: clocks agree"
        return line, source

    @cached_property
    def _here_by_clock(self) -> dict[str, pl.DataFrame]:
        parts = self._here.partition_by("clock", as_dict=True)
        return {str(name): rows for (name,), rows in parts.items()}

    def _aligned(self, lines: Mapping[str, ClockLine]) -> pl.DataFrame:
        """Return the rows of some clocks with `begin` and `finish` moved along their lines."""
        rows = [self._here_by_clock.get(name, self._here.clear()) for name in lines]
        return on_lines(pl.concat(rows), "clock", lines, ("begin", "finish"))

    def conflicts(self) -> list[str]:
        """Return contradictions: comparisons on no line, and collectives left before all had arrived."""
        lines_off = list(self._off_line)
        for name, clock in self.clocks.items():
            begin, end = (moment + clock.line.offset_ns for moment in self._extent)
            if self._compared.was_set(name, begin, end):
                lines_off.append(
                    f"the clock of {name} was set during the window: no line fits times before and after it"
                )
        lines = {name: clock.line for name, clock in self.clocks.items()}
        worst = heapq.nlargest(2, ((line.uncertainty_ns, name) for name, line in lines.items()))
        for name, (low, high) in sorted(_feasible(self._aligned(lines)).items()):
            uncertainty = lines[name].uncertainty_ns
            others = next((ns for ns, other in worst if other != name), 0)
            missed = max(low, -high) > CONVERSION_NS + max(uncertainty, others)
            never_met = low - high > 2 * (CONVERSION_NS + others)
            if uncertainty >= 0 and (missed or never_met):
                early = format_duration(max(low, -high))
                lines_off.append(
                    f"the clock of {name} cannot be reconciled with the others: at the best fit, a "
                    f"collective is left {early} before all have arrived, or data received before it is sent"
                )
        return lines_off


def _ends_by_clock(seen: pl.DataFrame) -> pl.DataFrame:
    """Return the end of each collective on each clock: the middle one of its ranks' ends."""
    # No mean of two: it would be a float, which is too coarse for times of day.
    middle = pl.col("end").sort().get((pl.len() - 1) // 2)
    return seen.group_by("clock", "instance").agg(middle, pl.col("way").first())


def _in_common(ends: pl.DataFrame, names: list[str], solved: list[str]) -> dict[str, pl.DataFrame]:
    """Return by clock its ends, joined with those on the solved clock with most collectives in common.

    Args:
        ends: rows of `_ends_by_clock`.
        names: clocks; those that have nothing in common with a solved one are left out.
        solved: the solved clocks, best first.
    """
    order = pl.col("peer").replace_strict(solved, range(len(solved)), default=-1, return_dtype=pl.Int64)
    theirs = ends.filter(pl.col("clock").is_in(solved))
    theirs = theirs.select("instance", peer="clock", peer_end="end").with_columns(order=order)
    pairs = ends.filter(pl.col("clock").is_in(names)).join(theirs, on="instance")
    counts = pairs.group_by("clock", "peer", "order").len().sort("len", "order", descending=[True, False])
    best = counts.unique("clock", keep="first", maintain_order=True).select("clock", "peer")
    chosen = pairs.join(best, on=["clock", "peer"]).sort("clock", "end", "instance")
    return {str(name): rows for (name,), rows in chosen.group_by("clock", maintain_order=True)}


Answers = Mapping[int, tuple[Ints, Ints]]  # by rank: when answers began and ended, ns, disjoint and ascending


def answers_of(collectives: pl.DataFrame) -> Answers:
    """Return the intervals in which each rank was being answered."""
    ran = collectives.filter((pl.col("start_ns") >= 0) & (pl.col("duration_ns") > 0))
    answers = {}
    for (rank,), calls in ran.group_by("rank"):
        start = calls["start_ns"].to_numpy()
        begins, ends = union(start, start + calls["duration_ns"].to_numpy()).T
        answers[int(str(rank))] = begins, ends
    return answers


def without_answers(frame: pl.DataFrame, answers: Answers) -> pl.DataFrame:
    """Move a table's rows onto clocks that are stopped during answers.

    Args:
        frame: has `rank` and `start_ns`, optionally `duration_ns` and `asked_ns` (negative where unknown).
        answers: from `answers_of`.
    """
    rank, start = frame["rank"].to_numpy(), frame["start_ns"].to_numpy()
    has_end = "duration_ns" in frame.columns
    columns = {"start_ns": _without_answers(rank, start, answers)}
    if has_end:
        lasts = frame["duration_ns"].to_numpy()
        end = _without_answers(rank, start + np.maximum(lasts, 0), answers)
        columns["duration_ns"] = np.where(lasts < 0, lasts, end - columns["start_ns"])
    if "asked_ns" in frame.columns:
        asked = frame["asked_ns"].to_numpy()
        columns["asked_ns"] = np.where(asked < 0, asked, _without_answers(rank, asked, answers))
    return frame.with_columns(pl.Series(name, column, pl.Int64) for name, column in columns.items())


def _without_answers(rank: Ints, time: Ints, answers: Answers) -> Ints:
    """Return [N] times of ranks less the answers before each, in ns."""
    moved = time.astype(np.int64)
    for number, (begin, end) in answers.items():
        of_rank = np.flatnonzero(rank == number)
        before = np.append(0, np.cumsum(end - begin))
        place = np.searchsorted(begin, time[of_rank], side="right")
        inside = np.maximum(end[np.maximum(place - 1, 0)] - time[of_rank], 0) * (place > 0)
        moved[of_rank] -= before[place] - inside
    return moved


def one_after_the_other(places: Iterable[tuple[int, int]], steps: pl.DataFrame) -> Alignment:
    """Return the alignment of ranks that ran in turn: all begin the first step of a window at once."""
    begun = first_begun(steps)
    clocks: dict[tuple[int, int], Clock] = {}
    reference: dict[int, int] = {}
    for rank, window in sorted(places):
        start = begun.get((rank, window), 0)
        zero = reference.setdefault(window, start)
        clocks[rank, window] = Clock(f"rank {rank}", ClockLine(start, start - zero), "pretended")
    return Alignment(clocks)


def first_begun(steps: pl.DataFrame) -> dict[tuple[int, int], int]:
    """Return the start of the first step by rank and window, in ns.

    Args:
        steps: `rank`, `window`, `start_ns`.
    """
    begun = steps.filter(pl.col("window") >= 0).group_by("rank", "window").agg(pl.col("start_ns").min())
    return {(rank, window): start for rank, window, start in begun.iter_rows()}
