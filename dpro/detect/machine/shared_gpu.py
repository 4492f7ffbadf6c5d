"""Detector of GPUs shared with other processes: they idle despite queued work, repeatedly and equally long.

Takes spans and steps of deep windows; returns a finding for each rank whose GPU is shared. A driver that
shares a GPU without MPS or MIG lets one process compute at a time, for a slice of a few milliseconds (NVIDIA:
CUDA programming guide, compute modes and time slicing). In the slices of others, nothing of this process
runs, although its next kernel was launched long before. Other causes look different: a late host has
launched nothing yet, a kernel that waits for other ranks is running, and single waits differ in length.
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
MIN_GAP_NS = 500_000  # far longer than a launch takes to arrive, and shorter than a slice
MIN_GAPS = 5
EQUAL = 0.2  # a gap is a slice if it differs from the median by at most this share
MOSTLY = 0.6  # least share of gaps that are slices
MIN_SHARE = 0.1  # of the time
CONFIDENCE = 0.9
COLUMNS = ("rank", "window", "kind", "name", "start_ns", "duration_ns", "correlation")
# Calls that make a stream wait for a host, during which the GPU is idle with work queued.
_WAITS_FOR_HOST = r"(?i)LaunchHostFunc|StreamAddCallback|StreamWaitValue|BatchMemOp"


class QueuedGaps(NamedTuple):
    """Times for which a rank's GPU is idle in a part of a window despite queued work.

    Attributes:
        gaps_ns: [G] length of each.
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
    """Return the gaps of each rank's GPU, in each window.

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
    """Return the finding of a rank; None where its GPU is not seen to be shared.

    Args:
        steps: number of steps in deep windows; 0 where unknown, so that all time counts as one step.
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
        "its GPU is idle {gaps} times for {slice_ns} with its next work queued: {share} of the time",
        gaps=int(equal_ns.size), slice_ns=slice_ns, share=share,
    )  # fmt: skip
    return Finding(
        "slow.compute", "rank", str(rank), (rank,), round(share, 4), CONFIDENCE, cost_ns, (standing,), CAUSE,
        remedy=REMEDY,
    )  # fmt: skip
