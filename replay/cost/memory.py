"""Memory of a step, by the reports of the job's allocator.

Reads a run recorded with `--memory`, or a trace of torch.profiler with memory; returns the bytes that steps
allocate on top of what is allocated when they begin, and the bytes left. Memory kept between steps is in the
totals of a GPU's allocator; those of a CPU count from the beginning of its window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.errors import Unanswerable
from dpro.recorders import MEMORY, how_to_record
from dpro.replay.attribution import MODULE
from dpro.replay.graph import Graph
from dpro.schema import COUNTERS, SPANS, STEPS
from dpro.store import Run

ALLOCATED = "memory_allocated_bytes"
FREE = {"gpu": "memory_total_bytes", "cpu": "memory_available_bytes"}


@dataclass(frozen=True)
class Footprint:
    """Memory of the rank that takes most.

    Attributes:
        within_step_bytes: largest rise of the allocated bytes within a step: activations and gradients.
        free_bytes: bytes left of the device at the peak; of a CPU, available bytes of its host. None where
            the run does not record them.
    """

    within_step_bytes: int
    free_bytes: int | None


def footprint_of(run: Run | None) -> Footprint:
    """Return the footprint of a run's steps.

    Raises:
        Unanswerable: the run has no allocations within whole steps.
    """
    allocated = _allocated(run)
    assert run is not None
    steps = run.table(STEPS).filter(pl.col("window") >= 0)["rank", "start_ns", "duration_ns"]
    within, peak = [], 0
    for rank, start, duration in steps.iter_rows():
        time, value = allocated.get(rank, (np.empty(0, np.int64), np.empty(0)))
        inside = (time >= start) & (time < start + duration)
        if inside.any():
            within.append(int(value[inside].max() - value[inside].min()))
            peak = max(peak, int(value[inside].max()))
    if not within:
        raise Unanswerable(
            f"the run has no allocations within whole steps: record with {how_to_record(MEMORY, run)}"
        )
    # Free memory is that of the smallest GPU at the peak; without GPUs, the host's available memory.
    total = total_bytes_of(run)
    on_gpu = (run.table(COUNTERS).filter(pl.col("counter") == ALLOCATED)["device"] != "").any()
    return Footprint(max(within), max(total - peak, 0) if on_gpu and total is not None else total)


def step_bytes_of(graph: Graph, footprint: Footprint | None = None) -> int:
    """Return the most bytes that a step allocates on top of its start, after the edits applied so far.

    Args:
        footprint: of the graph's run, where known already.

    Raises:
        Unanswerable: the run has no allocations within whole steps.
    """
    if graph.step_bytes is not None:
        return graph.step_bytes
    return (footprint or footprint_of(graph.run)).within_step_bytes


def peaks_of(run: Run | None) -> dict[int, int]:
    """Return the peak allocated bytes of each rank.

    Raises:
        Unanswerable: the run has no allocations.
    """
    return {rank: int(value.max()) for rank, (_, value) in _allocated(run).items()}


def freed_by_recomputing(run: Run | None, names: list[str]) -> int:
    """Estimate the bytes saved at a step's peak if backward recomputed modules one after the other.

    Of the bytes that their forward passes leave allocated, only those of one module are needed at a time.

    Raises:
        Unanswerable: the run has no allocations.
    """
    allocated = _allocated(run)
    assert run is not None
    rank = min(allocated)
    time, value = allocated[rank]
    of_rank = pl.col("rank") == rank
    calls = run.table(SPANS, ["rank", "name", "start_ns", "duration_ns"]).filter(
        of_rank & pl.col("name").is_in([MODULE + name for name in names])
    )
    begins = calls["start_ns"].to_numpy()
    samples = [
        np.searchsorted(time, moment, side="right") - 1 for moment in (begins, begins + calls["duration_ns"])
    ]
    kept = np.where(samples[0] >= 0, np.maximum(value[samples[1]] - value[samples[0]], 0), 0)
    freed = []
    for start, lasts in (
        run.table(STEPS).filter(of_rank & (pl.col("window") >= 0))["start_ns", "duration_ns"].iter_rows()
    ):
        inside = kept[(begins >= start) & (begins < start + lasts)]
        freed.append(float(inside.sum() - inside.max(initial=0)))
    return round(float(np.median(freed))) if freed else 0


def _allocated(run: Run | None) -> dict[int, tuple[Ints, NDArray[np.float64]]]:
    """Return times and totals of allocated bytes of each rank; of the GPU where there is one."""
    rows = run.table(COUNTERS) if run is not None else COUNTERS.empty()
    rows = rows.filter((pl.col("counter") == ALLOCATED) & (pl.col("rank") >= 0))
    if rows.is_empty():
        raise Unanswerable(
            f"the run has no record of its allocator: record with {how_to_record(MEMORY, run)}"
        )
    if (rows["device"] != "").any():
        rows = rows.filter(pl.col("device") != "")
    # Of several devices of one rank, the one that its model fills.
    peaks = rows.group_by("rank", "device").agg(pl.col("value").max()).sort("value", "device")
    rows = rows.join(peaks.unique("rank", keep="last"), on=["rank", "device"], how="semi")
    return {
        int(rank): (of_rank["time_ns"].to_numpy(), of_rank["value"].to_numpy())
        for (rank,), of_rank in rows.sort("time_ns").group_by("rank", maintain_order=True)
    }


def total_bytes_of(run: Run | None) -> int | None:
    """Return the memory of the smallest GPU of the run; without GPUs, the available memory of its hosts."""
    rows = run.table(COUNTERS) if run is not None else COUNTERS.empty()
    on_gpu = (rows.filter(pl.col("counter") == ALLOCATED)["device"] != "").any()
    reported = rows.filter(
        (pl.col("counter") == FREE["gpu" if on_gpu else "cpu"])
        & ((pl.col("device") != "") if on_gpu else (pl.col("device") == ""))
    )
    return None if reported.is_empty() else int(reported["value"].to_numpy().min())
