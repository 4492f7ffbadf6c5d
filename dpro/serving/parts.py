"""What iterations in deep windows spend their time on.

In: spans and iterations of all ranks. Out: ms per iteration of each part, mean over ranks. A moment belongs
to the first of these that happens in it: attention, matrix products, sampling, other work, communication
(so only what is exposed counts), else the host. Without GPU work the operators of the CPU count. What lies
between two iterations is idle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.classify import classify
from dpro.schema import GPU_WORK_KINDS
from dpro.units import NS_PER_MS

WORK = ("attention", "matmul", "sampling", "other", "communication")
HOST, IDLE = "host", "idle"
PARTS = (*WORK, HOST, IDLE)
_SAMPLING = re.compile(r"(?i)sampl|multinomial|argmax|penalt|top_?[kp]_?(mask|renorm)|logits_?process")
_MATMUL = re.compile(
    r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm)$|^_C::\w*(linear|mm)$|^mkldnn|^onednn"
)
_NAMES = {"attention": "attention", "gemm": "matmul", "communication": "communication"}


def part_of(name: str) -> str:
    """The part that a kernel or an operator belongs to, by its name."""
    if _SAMPLING.search(name):
        return "sampling"
    if _MATMUL.search(name):
        return "matmul"
    return _NAMES.get(classify(name).kind, "other")


def parts_of_iterations(spans: pl.DataFrame, iterations: pl.DataFrame) -> tuple[dict[str, float], int]:
    """Mean ms of each part in an iteration, and of how many iterations; nothing without spans in one.

    Args:
        spans: with `rank`, `window`, `kind`, `name`, `start_ns`, `duration_ns`.
        iterations: rows of `iterations`.
    """
    total, count = dict.fromkeys(PARTS, 0.0), 0
    gpu = spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
    work = gpu if gpu.height else spans.filter(pl.col("kind") == "cpu_op")
    for (rank,), own in work.partition_by("rank", as_dict=True).items():
        begun, ended = own["start_ns"].min(), (own["start_ns"] + own["duration_ns"]).max()
        covered = iterations.filter(
            (pl.col("rank") == rank)
            & (pl.col("duration_ns") > 0)
            & (pl.col("start_ns") + pl.col("duration_ns") > begun)
            & (pl.col("start_ns") < ended)
        )
        seen = _whole(_with_work(covered, own), spans.filter(pl.col("rank") == rank))
        if seen.height:
            count += seen.height
            for part, ns in _of_rank(own, seen).items():
                total[part] += ns / NS_PER_MS
    return ({part: ms / count for part, ms in total.items()} if count else {}), count


def _with_work(iterations: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """The iterations in which some work begins: those in a window."""
    starts = work["start_ns"].sort().to_numpy()
    low = np.searchsorted(starts, iterations["start_ns"].to_numpy())
    high = np.searchsorted(starts, (iterations["start_ns"] + iterations["duration_ns"]).to_numpy())
    return iterations.filter(pl.Series(high > low))


def _whole(iterations: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Those that lie within a window, unless none does: the others hold its beginning and its end as well."""
    windows = spans.group_by("window").agg(
        first=pl.col("start_ns").min(), last=(pl.col("start_ns") + pl.col("duration_ns").clip(0)).max()
    )
    end = pl.col("start_ns") + pl.col("duration_ns")
    within = [
        (pl.col("start_ns") >= first) & (end <= last) for _, first, last in windows.sort("window").iter_rows()
    ]
    whole = iterations.filter(pl.any_horizontal(within)) if within else iterations
    return whole if whole.height else iterations


def _of_rank(work: pl.DataFrame, iterations: pl.DataFrame) -> dict[str, float]:
    """ns of each part over all iterations of a rank."""
    names = work["name"].unique().to_list()
    parts = work["name"].replace_strict(names, [part_of(name) for name in names], return_dtype=pl.String)
    start = work["start_ns"].to_numpy()
    end = start + work["duration_ns"].clip(0).to_numpy()
    begin = iterations["start_ns"].to_numpy()
    until = begin + iterations["duration_ns"].to_numpy()
    edges = np.unique(np.concatenate([start, end, begin, until]))
    lengths = np.diff(edges)
    inside = _covered(edges, begin, until)
    found, free = dict.fromkeys(PARTS, 0.0), inside.copy()
    for part in WORK:
        chosen = (parts == part).to_numpy()
        here = _covered(edges, start[chosen], end[chosen]) & free
        found[part] = float(lengths[here].sum())
        free &= ~here
    found[HOST] = float(lengths[free].sum())
    found[IDLE] = _between(iterations)
    return found


def _between(iterations: pl.DataFrame) -> float:
    """ns between iterations that follow each other; those of two windows do not."""
    ordered = iterations.sort("start_ns")
    gaps = ordered["start_ns"].shift(-1) - ordered["start_ns"] - ordered["duration_ns"]
    follows = ordered["iteration"].diff().shift(-1) == 1
    return float(gaps.filter(follows.fill_null(False)).clip(0).sum())


def _covered(
    edges: NDArray[np.int64],
    starts: NDArray[np.int64] | Sequence[int],
    ends: NDArray[np.int64] | Sequence[int],
) -> NDArray[np.bool_]:
    """Which stretches between edges some interval covers."""
    change = np.zeros(edges.size, np.int64)
    np.add.at(change, np.searchsorted(edges, starts), 1)
    np.add.at(change, np.searchsorted(edges, ends), -1)
    return np.cumsum(change)[:-1] > 0
