"""GPU work that deep windows should have seen and did not.

In: what was recorded of a rank's window on a GPU. Out: what is missing, and sentences that say so for all
windows of the rank. Kineto itself says nothing: its messages would be part of the job's output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from dpro.schema import GPU_WORK_KINDS
from dpro.words import few

KERNELS, CALLS, TAIL = "kernels", "calls", "tail"
_SILENT = 0.25  # of a window: no call to the GPU for this long at its end is suspicious,
_LONGER = 3.0  # where it is this many times the longest time without one before,
_OPERATORS = 20  # and this many operators began meanwhile
_NAMED = 8
_SAID = {
    KERNELS: (
        "{windows} no work of {gpu}: either its steps ran on the CPU, or CUPTI was refused, "
        "by another profiler that is attached (Nsight, DCGM), by the driver's "
        "NVreg_RestrictProfilingToAdminUsers=1, or by MPS or MIG"
    ),
    CALLS: (
        "{windows} no call to {gpu} near the end, though operators go on: the profiler's "
        "buffers were full; record fewer steps with --window-steps"
    ),
    TAIL: (
        "{windows} perhaps not all work of {gpu}, which had not done it ten steps later, or "
        "when the next window began or the job ended: its last work may be missing"
    ),
}


def lost_in(spans: pl.DataFrame) -> list[str]:
    """What a window lacks of a process that uses a GPU: `KERNELS`, `CALLS`."""
    operators = spans.filter(pl.col("kind") == "cpu_op")
    if operators.is_empty():
        return []
    if spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS)).is_empty():
        return [KERNELS]
    return [CALLS] if _calls_stop(spans, operators["start_ns"]) else []


def _calls_stop(spans: pl.DataFrame, begun: pl.Series) -> bool:
    """Whether calls to the GPU end long before operators do."""
    calls = spans.filter(pl.col("kind") == "runtime")["start_ns"].sort()
    if calls.is_empty():
        return False
    first, last, end = int(calls[0]), int(calls[-1]), int(begun.max())  # type: ignore[arg-type]
    silent = end - last
    before = calls.diff().max()
    longest = before if isinstance(before, int) else 0
    return (
        silent > _SILENT * (end - min(first, int(begun.min())))  # type: ignore[arg-type]
        and silent > _LONGER * longest
        and int((begun > last).sum()) >= _OPERATORS
    )


def sentences(rank: int, gpu: str, lost: Mapping[str, Sequence[int]]) -> list[str]:
    """What is missing in the windows of a rank.

    Args:
        gpu: what its GPU is called.
    """
    return [
        said.format(windows=_have(lost[what], rank), gpu=gpu)
        for what, said in _SAID.items()
        if lost.get(what)
    ]


def _have(windows: Sequence[int], rank: int) -> str:
    named = few(sorted(windows), _NAMED)
    if len(windows) == 1:
        return f"deep window {named} of rank {rank} has"
    return f"{len(windows)} deep windows ({named}) of rank {rank} have"
