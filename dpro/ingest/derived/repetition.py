"""Steps of a trace that marks none, inferred from the repetition of the main thread's work.

In: spans of one rank. Out: where each repetition begins and ends, or nothing where that is not clear. Layers
of a model repeat too: what counts as a step must explain the window from its first operator to its last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

SOURCE = "repetition"

_MIN_REPETITIONS = 3
_MIN_SPANS = 5  # in one of them
_MIN_AGREEING = 0.95  # share of spans with the name of the one a period later
_MAX_OF_TYPICAL = 2.0  # duration of one repetition against the median
_MAX_NAMES = 64

Array = npt.NDArray[Any]


def repetitions(spans: pl.DataFrame) -> list[tuple[int, int]]:
    """Start and end of each whole repetition, ns; empty where the work does not clearly repeat.

    They are counted from the first operator of the window, which is where a loop of steps is usually cut.

    Args:
        spans: with `kind`, `name`, `start_ns`, `duration_ns`, `pid`, `tid`, `stream`, `forward_thread`.
    """
    lane = _outermost(_main_lane(spans))
    names = lane["name"].rank("dense").to_numpy()
    period = _period(names)
    if not period:
        return []
    starts, ends = lane["start_ns"].to_numpy(), lane["end_ns"].to_numpy()
    bounds = np.append(starts, ends[-1:])[: len(starts) + 1 : period].astype(np.int64)
    durations = np.diff(bounds)
    typical = float(np.median(durations))
    if durations.max() > _MAX_OF_TYPICAL * typical or durations.min() * _MAX_OF_TYPICAL < typical:
        return []
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist()))


def _main_lane(spans: pl.DataFrame) -> pl.DataFrame:
    """Operators of the thread that runs most of the forward pass; without operators, the busiest stream."""
    spans = spans.select(
        "kind",
        "name",
        "start_ns",
        "pid",
        "tid",
        "stream",
        "forward_thread",
        end_ns=pl.col("start_ns") + pl.col("duration_ns"),
    )
    operators = spans.filter((pl.col("kind") == "cpu_op") & (pl.col("forward_thread") <= 0))
    lane = ["pid", "tid"] if operators.height else ["stream"]
    work = operators if operators.height else spans.filter(pl.col("kind") == "kernel")
    busiest = work.group_by(lane).len().sort("len", *lane, descending=[True] + [False] * len(lane)).head(1)
    return work.join(busiest.select(lane), on=lane, how="semi").sort(
        "start_ns", "end_ns", descending=[False, True], maintain_order=True
    )


def _outermost(lane: pl.DataFrame) -> pl.DataFrame:
    """The spans of a lane that lie in no other."""
    ends_before = pl.col("end_ns").cum_max().shift(1)
    return lane.filter(ends_before.is_null() | (pl.col("start_ns") >= ends_before))


def _period(names: Array) -> int:
    """The smallest number of spans after which all names repeat, 0 where there is none.

    Args:
        names: `[N]` one number per span, the same for the same name.
    """
    size = len(names)
    for period in _candidates(names):
        if not _MIN_SPANS <= period <= size // _MIN_REPETITIONS:
            continue
        agree = names[:-period] == names[period:]
        # At both ends too: layers repeat in the middle of a step, but not in its head and tail.
        if min(agree.mean(), agree[:period].mean(), agree[-period:].mean()) >= _MIN_AGREEING:
            return period
    return 0


def _candidates(names: Array) -> list[int]:
    """Distances between neighbours of the same, rare name: some operators run once per step."""
    found, counts = np.unique(names, return_counts=True)
    often = np.flatnonzero(counts >= _MIN_REPETITIONS)
    rare = often[np.argsort(counts[often], kind="stable")][:_MAX_NAMES]
    return sorted({int(np.median(np.diff(np.flatnonzero(names == found[which])))) for which in rare})
