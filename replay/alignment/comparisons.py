"""Recorded comparisons of hosts' clocks, and those of them that count for one window.

In: the `clock_samples` table. Out: times on a clock, what the other showed meanwhile, and the bounds. A clock
that was set in between makes comparisons worthless: those on the far side of it are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.units import NS_PER_MS

# Comparisons used on each side of a window: the two latest times that clocks were compared.
NEAREST = 16
# A wall clock that gains or loses more than this against the monotonic one was set, not slewed.
SET_NS = NS_PER_MS
FASTEST_SLEW = 0.001


def named(column: str, names: Mapping[int, str]) -> pl.Expr:
    """The name of each rank's clock, empty where it has none.

    Args:
        column: has the ranks.
        names: by rank.
    """
    return pl.col(column).replace_strict(
        list(names), list(names.values()), default="", return_dtype=pl.String
    )


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
            clock: its name.
            begin, end: ns on that clock, half open.
        """
        times = self._set.get(clock, np.empty(0, np.int64))
        return bool(((times >= begin) & (times < end)).any())

    def around(self, clock: str, peer: str, moment: int) -> tuple[Ints, Ints, Ints]:
        """The comparisons of two clocks nearest to a moment, as many before it as after it if there are.

        Args:
            clock, peer: names of the two.
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


_NONE = pl.DataFrame(schema=dict.fromkeys(("time_ns", "offset_ns", "round_trip_ns"), pl.Int64))


def _times_set(own: pl.DataFrame) -> Ints:
    """Times on a clock just before it was set, by its samples next to the monotonic clock."""
    own = own.unique("monotonic_ns").sort("monotonic_ns")
    wall, untouched = own["time_ns"].to_numpy(), own["monotonic_ns"].to_numpy()
    gained = np.abs(np.diff(wall - untouched))
    return np.sort(wall[:-1][gained > SET_NS + FASTEST_SLEW * np.diff(untouched)])
