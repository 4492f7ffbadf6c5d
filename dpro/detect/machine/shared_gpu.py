"""GPUs that stand still though work is queued, again and again for equally long: another process has them.

In: spans and steps of deep windows. Out: a finding for each rank whose GPU is shared. A driver that shares a
GPU without MPS or MIG lets one process compute at a time, for a slice of a few milliseconds (NVIDIA: CUDA
programming guide, compute modes and time slicing). In the slices of others nothing of this one runs, though
its next kernel was launched long before. A late host has launched nothing yet, a kernel that waits for other
ranks runs, and what is waited for once is not equally long each time: none of these looks like that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.detect.findings import TIME_SLICES, Finding
from dpro.detect.observations import observe
from dpro.schema import GPU_WORK_KINDS, SPANS, STEPS
from dpro.store import Run

CAUSE = "another process uses its GPU"
REMEDY = (
    "find what else computes on its GPU (`nvidia-smi` on its host) and end it, or share the GPU by MIG or MPS"
)
MIN_GAP_NS = 500_000  # far more than a launch takes to arrive, and less than a slice
MIN_GAPS = 5
EQUAL = 0.2  # by which a gap may differ from the usual one to be one more slice
MOSTLY = 0.6  # of the gaps that are slices
MIN_SHARE = 0.1  # of the time
CONFIDENCE = 0.9
COLUMNS = ("rank", "window", "kind", "name", "start_ns", "duration_ns", "correlation")
# What makes a stream wait for a host: then a GPU stands still with work queued for that.
_WAITS_FOR_HOST = r"(?i)LaunchHostFunc|StreamAddCallback|StreamWaitValue|BatchMemOp"


class QueuedGaps(NamedTuple):
    """For how long a rank's GPU stands still in a part of a window though work is queued.

    Attributes:
        gaps_ns: `[G]` each time.
        lasted_ns: from the first work of the GPU to the last.
        waits_for_host: whether a stream may wait for a host instead.
    """

    rank: int
    gaps_ns: Floats
    lasted_ns: int
    waits_for_host: bool


def find_shared_gpus(run: Run) -> list[Finding]:
    """Find ranks whose GPU is shared with another process.

    Raises:
        InputError: a table cannot be read.
    """
    seen: dict[int, list[QueuedGaps]] = {}
    for part in run.part_by_part(SPANS, COLUMNS):
        for gaps in queued_gaps_of(part):
            seen.setdefault(gaps.rank, []).append(gaps)
    steps = run.table(STEPS, ["rank", "window"]).filter(pl.col("window") >= 0)
    findings = (
        _finding(rank, parts, steps.filter(pl.col("rank") == rank).height)
        for rank, parts in sorted(seen.items())
    )
    return [finding for finding in findings if finding is not None]


def queued_gaps_of(spans: pl.DataFrame) -> list[QueuedGaps]:
    """How each rank's GPU stands still, in each window.

    Args:
        spans: `COLUMNS` of table `spans`.
    """
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0)).select(
        "rank", "correlation", launched_ns=pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0)
    )
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    busy_until = end_ns.cum_max().shift().over("rank", "window")
    work = (
        spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS) & (pl.col("duration_ns") >= 0))
        .join(calls.unique(["rank", "correlation"], keep="first"), on=["rank", "correlation"], how="left")
        .sort("rank", "window", "start_ns")
        .with_columns(gap_ns=pl.col("start_ns") - pl.max_horizontal(busy_until, "launched_ns"))
    )
    seen = work.filter(busy_until.is_not_null() & pl.col("launched_ns").is_not_null())
    waiting = spans.filter(pl.col("name").str.contains(_WAITS_FOR_HOST))["rank"].unique().to_list()
    extents = work.group_by("rank", "window").agg(lasted_ns=end_ns.max() - pl.col("start_ns").min())
    gaps = seen.filter(pl.col("gap_ns") >= MIN_GAP_NS).group_by("rank", "window").agg("gap_ns")
    return [
        QueuedGaps(rank, np.asarray(gaps_ns or (), np.float64), lasted_ns, rank in waiting)
        for rank, lasted_ns, gaps_ns in extents.join(gaps, on=["rank", "window"], how="left")
        .select("rank", "lasted_ns", "gap_ns")
        .iter_rows()
    ]


def _finding(rank: int, parts: list[QueuedGaps], steps: int) -> Finding | None:
    """What a rank's GPU shows; None where it is not shared, as far as that can be seen.

    Args:
        steps: in deep windows; 0 where none is known: then all of it counts as one.
    """
    gaps_ns = np.concatenate([part.gaps_ns for part in parts])
    lasted_ns = sum(part.lasted_ns for part in parts)
    if gaps_ns.size < MIN_GAPS or any(part.waits_for_host for part in parts):
        return None
    slice_ns = float(np.median(gaps_ns))
    equal_ns = gaps_ns[np.abs(gaps_ns - slice_ns) <= EQUAL * slice_ns]
    share = float(equal_ns.sum()) / max(lasted_ns, 1)
    if equal_ns.size < MOSTLY * gaps_ns.size or equal_ns.size < MIN_GAPS or share < MIN_SHARE:
        return None
    cost_ns = float(equal_ns.sum()) / max(steps, 1)
    standing = observe(
        TIME_SLICES,
        "its GPU stands still {gaps} times for {slice_ns} with its next work queued: {share} of the time",
        gaps=int(equal_ns.size), slice_ns=slice_ns, share=share,
    )  # fmt: skip
    return Finding(
        "slow.compute", "rank", str(rank), (rank,), round(share, 4), CONFIDENCE, cost_ns, (standing,), CAUSE,
        remedy=REMEDY,
    )  # fmt: skip
