"""One clock against another: how they were compared, and a line through their differences.

In: the `clock_samples` table; differences of a clock to the reference at some of its times. Out: the
comparisons that count for one window; a `ClockLine` with its uncertainty, and times moved along it in exact
arithmetic. A clock that was set makes the comparisons on the far side of that moment worthless: they are
left out. Drift is fitted only where it stands out from the scatter of the differences; else it is zero, and
what it might be is part of the uncertainty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.units import NS_PER_MS, NS_PER_S

# Clocks of computers drift apart by less than this, also where no time service disciplines them.
WORST_DRIFT_PPB = 100_000
# A clock is taken to drift when its slope is that many standard errors (where ranks of real jobs share a
# clock it is up to 4), and it leaves at most this share of the scatter about a level one.
CLEARLY_STEEP = 6.0
CLEARLY_LESS = 0.75
ENOUGH_FOR_DRIFT = 16  # of fewer that only scatter, more than one set in a thousand lies about a steep line
ENOUGH = 3  # fewer differences cannot show how much they scatter
# Slopes are taken between all pairs of at most this many differences, evenly chosen.
_MAX_SAMPLES = 400
# Comparisons used on each side of a window: the two latest times that clocks were compared.
NEAREST = 16
# A wall clock that gains or loses more than this against the monotonic one was set, not slewed.
SET_NS = NS_PER_MS
FASTEST_SLEW = 0.001
_NONE = pl.DataFrame(schema=dict.fromkeys(("time_ns", "offset_ns", "round_trip_ns"), pl.Int64))


@dataclass(frozen=True)
class ClockLine:
    """What a clock is ahead of the reference.

    Attributes:
        reference_ns: a time on this clock.
        offset_ns: how far it is ahead then.
        drift_ppb: by how much that grows, ns per second.
        uncertainty_ns: how far the offset may be wrong at the times it is for; -1 where unknown.
    """

    reference_ns: int = 0
    offset_ns: int = 0
    drift_ppb: int = 0
    uncertainty_ns: int = 0

    def offset_at(self, times: Ints) -> Ints:
        """[N] ns by which the clock is ahead at each of its times, in integers: times keep their order."""
        seconds, rest = np.divmod(times - self.reference_ns, NS_PER_S)
        ahead: Ints = self.offset_ns + seconds * self.drift_ppb + rest * self.drift_ppb // NS_PER_S
        return ahead

    def aligned(self, times: Ints) -> Ints:
        """[N] ns on the reference clock."""
        return times - self.offset_at(times)


def fit_scattered(times: Ints, differences: Ints) -> ClockLine:
    """A line through differences that scatter, some of them wildly.

    The slope is the median of the slopes between all pairs (Theil 1950, Sen 1968). It is taken where it is
    many times its own standard error and lessens the interquartile range of what is left.

    Args:
        times: [N] ns on the clock, N > 0.
        differences: [N] ns it was ahead.
    """
    middle = int(times.min()) + int(np.median(times - times.min()))  # as floats, times of day are too coarse
    low, level, high = np.percentile(differences, (25, 50, 75))
    spread = high - low
    if times.size < ENOUGH:
        return ClockLine(middle, round(level), 0, round(abs(level) + spread))
    slope = _median_slope(times - middle, differences) if times.size >= ENOUGH_FOR_DRIFT else 0.0
    left = differences - slope * (times - middle)
    low, steep_level, high = np.percentile(left, (25, 50, 75))
    # Standard error of a mean slope, for scatter like a normal one's; that of a median is 1.25 times as much.
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


def fit_bounded(times: Ints, differences: Ints, bounds: Ints, at: tuple[int, int]) -> ClockLine:
    """A line through differences each of which is wrong by no more than a bound.

    Weighted least squares, near bounds counting most. The slope is taken where it is more than the bounds
    allow by themselves.

    Args:
        times: [N] ns on the clock, N > 0.
        differences: [N] ns it was ahead.
        bounds: [N] ns each of them may be wrong by.
        at: the times on the clock, from and to, that the line is for: the uncertainty grows towards them.
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
    beyond = max(int(times.min()) - at[0], at[1] - int(times.max()), 0)
    uncertainty = max(off, bound) + unknown * beyond
    return ClockLine(middle, round(level), round(slope * NS_PER_S), round(uncertainty))


def named(column: str, names: Mapping[int, str]) -> pl.Expr:
    """The name of each rank's clock, empty where it has none.

    Args:
        names: by rank.
    """
    return pl.col(column).replace_strict(
        list(names), list(names.values()), default="", return_dtype=pl.String
    )


def on_lines(
    frame: pl.DataFrame, clock: str, lines: Mapping[Any, ClockLine], times: Sequence[str]
) -> pl.DataFrame:
    """Rows with times on the reference clock, as `ClockLine.aligned` computes them, of all clocks at once.

    Args:
        clock: the column that says whose clock a row's times are on.
        lines: by the values of that column; times on other clocks stay as they are.
        times: the columns to move, ns.
    """
    fields = {"reference_": "reference_ns", "offset_": "offset_ns", "drift_": "drift_ppb"}
    columns = {name: [getattr(line, field) for line in lines.values()] for name, field in fields.items()}
    known = pl.DataFrame({clock: pl.Series(list(lines), dtype=frame.schema[clock]), **columns})
    joined = frame.join(known, on=clock, how="left", maintain_order="left")
    moved = [(pl.col(name) - _offset_at(pl.col(name))).fill_null(pl.col(name)) for name in times]
    return joined.with_columns(moved).drop(*fields)


def _offset_at(time: pl.Expr) -> pl.Expr:
    since = time - pl.col("reference_")
    seconds, rest = since // NS_PER_S, since % NS_PER_S
    return pl.col("offset_") + seconds * pl.col("drift_") + rest * pl.col("drift_") // NS_PER_S


class Comparisons:
    """What is known of the clocks of a run from their being compared."""

    def __init__(self, samples: pl.DataFrame, names: Mapping[int, str]) -> None:
        """Sort the samples by clock.

        Args:
            samples: the `clock_samples` table.
            names: what each rank's clock is called.
        """
        rows = samples.with_columns(clock=named("rank", names), peer=named("peer_rank", names))
        between = rows.filter((pl.col("peer") != "") & (pl.col("clock") != "") & (pl.col("peer_rank") >= 0))
        self._pairs: dict[tuple[str, str], pl.DataFrame] = {
            (str(clock), str(peer)): part
            for (clock, peer), part in between.group_by("clock", "peer", maintain_order=True)
            if clock != peer
        }
        own = rows.filter((pl.col("peer_rank") < 0) & (pl.col("monotonic_ns") >= 0))
        self._set = {str(clock): _times_set(part) for (clock,), part in own.group_by("clock")}

    def pairs(self) -> list[tuple[str, str]]:
        """Clocks that were compared, either way round."""
        return list(dict.fromkeys([*self._pairs, *((peer, clock) for clock, peer in self._pairs)]))

    def was_set(self, clock: str, begin: int, end: int) -> bool:
        """Whether a clock was set between two of its times.

        Args:
            begin, end: ns on that clock, half open.
        """
        times = self._set.get(clock, np.empty(0, np.int64))
        return bool(((times >= begin) & (times < end)).any())

    def around(self, clock: str, peer: str, moment: int) -> tuple[Ints, Ints, Ints]:
        """The comparisons of two clocks nearest to a moment, as many before it as after it if there are.

        Args:
            moment: ns on `clock`.

        Returns:
            [N] ns each: times on the clock, what the peer showed then, and how far that may be wrong.
        """
        own = self._pairs.get((clock, peer), _NONE)
        their = self._pairs.get((peer, clock), _NONE)
        times = np.concatenate([own["time_ns"], their["time_ns"] - their["offset_ns"]])
        meanwhile = np.concatenate([own["time_ns"] - own["offset_ns"], their["time_ns"]])
        bounds = np.concatenate([own["round_trip_ns"], their["round_trip_ns"]]) // 2
        same = self._as_then(clock, times, moment) & self._as_then(peer, meanwhile, moment)
        order = np.flatnonzero(same)[np.argsort(times[same], kind="stable")]
        at = int(np.searchsorted(times[order], moment))
        chosen = order[max(at - NEAREST, 0) : at + NEAREST]
        return times[chosen], meanwhile[chosen], bounds[chosen]

    def _as_then(self, clock: str, times: Ints, moment: int) -> NDArray[np.bool_]:
        """[N] whether a clock was not set between each of the times and a moment."""
        when_set = self._set.get(clock, np.empty(0, np.int64))
        same: NDArray[np.bool_] = np.searchsorted(when_set, times) == np.searchsorted(when_set, moment)
        return same


def _times_set(own: pl.DataFrame) -> Ints:
    """Times on a clock just before it was set, by its samples next to the monotonic clock."""
    own = own.unique("monotonic_ns").sort("monotonic_ns")
    wall, untouched = own["time_ns"].to_numpy(), own["monotonic_ns"].to_numpy()
    gained = np.abs(np.diff(wall - untouched))
    return np.sort(wall[:-1][gained > SET_NS + FASTEST_SLEW * np.diff(untouched)])
