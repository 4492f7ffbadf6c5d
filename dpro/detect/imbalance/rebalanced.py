"""A job in deep windows as it would be with balanced work, and what that would save.

In: a graph and its run. Out: the same graph with work scaled to what it would be if all ranks with the same
work had as large batches, and findings of `imbalance.data`. The workload of each rank is in `[rank, step,
workload]`, one frame per kind of evidence: what loaders returned, what other ranks sent (to experts, to
embeddings), and how large the inputs of operators are where shapes are recorded. A rank that is slower than
its peers with balanced work is so for another reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.detect.baseline import Baseline, ScaledWork
from dpro.detect.findings import Finding
from dpro.detect.imbalance.load_model import ELEMENTS, REST, WORKLOAD, Uneven, describe_uneven_work, explain
from dpro.detect.significance import MIN_STEPS
from dpro.replay.graph import CPU_KINDS, GPU_KINDS
from dpro.replay.peers import ON_CPU, ON_GPU, teams_by_work
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS
from dpro.store import Run


@dataclass(frozen=True)
class BalancedJob:
    """A job with balanced work.

    Attributes:
        baseline: its graph and replay.
        findings: what uneven work costs.
        from_steps: whether that follows from single steps. If only from ranks that always have more, it
            explains why they are slow, if they are.
        explained: ns per step that ranks typically work longer because of their workloads.
    """

    baseline: Baseline
    findings: list[Finding]
    from_steps: bool
    explained: Mapping[int, float]

    def leaves(self, findings: list[Finding]) -> list[Finding]:
        """The findings about this job that cost more than what the load model may be wrong about."""
        return [
            each
            for each in findings
            if each.cost_ns >= REST * max(self.explained.get(rank, 0.0) for rank in each.ranks)
        ]


def rebalance(baseline: Baseline) -> BalancedJob:
    """The job with balanced work; as it is where workloads explain nothing."""
    run, work = baseline.graph.run, baseline.work
    as_it_is = BalancedJob(baseline, [], True, {})
    if run is None:
        return as_it_is
    resource = ON_GPU if (work["resource"] == ON_GPU).any() else ON_CPU
    own = work.filter(pl.col("resource") == resource).group_by("rank", "step").agg(pl.col("work_ns").sum())
    workloads = workloads_in_windows(run)
    found = [
        each
        for team in teams_by_work(work)
        if (each := _explained(own.filter(pl.col("rank").is_in(team)), workloads)) is not None
    ]
    if not found:
        return as_it_is
    even = baseline.under(ScaledWork(GPU_KINDS if resource == ON_GPU else CPU_KINDS, _factors(found)))
    before, after = baseline.step_ns, baseline.changed_step_ns(even.graph)
    if before.size < MIN_STEPS:
        return as_it_is
    ranks, _, most = max(found, key=lambda each: each[2].model.significance)
    cost = float((before - after).mean())
    findings = describe_uneven_work(most, cost, float(before.mean()), ranks)
    explained = {
        rank: float(value) for ranks, _, uneven in found for rank, value in zip(ranks, uneven.explained)
    }
    return BalancedJob(even, findings, most.model.significance > 0, explained)


def _explained(
    team: pl.DataFrame, workloads: Mapping[str, pl.DataFrame]
) -> tuple[list[int], Ints, Uneven] | None:
    """Of a team of ranks: which ranks, in which steps, and why their times differ.

    Args:
        team: `rank`, `step` and `work_ns` of their steps.
        workloads: as `workloads_in_windows` returns them; those that explain times best count.
    """
    ranks: list[int] = sorted(team["rank"].unique().to_list())
    common = team.filter(pl.len().over("step") == len(ranks)).sort("step", "rank")
    if len(ranks) < 2 or common.is_empty():
        return None
    columns: dict[str, NDArray[Any]] = {
        name: common[name].to_numpy().reshape(-1, len(ranks)) for name in ("step", "work_ns")
    }
    steps, own = columns["step"][:, 0], columns["work_ns"].astype(float)
    explained = []
    for what, frame in workloads.items():
        rows = common.join(frame, on=["rank", "step"], how="left", maintain_order="left")
        workload = rows["workload"].fill_null(np.nan).to_numpy().reshape(own.shape)
        explained.append(explain(own, workload, steps, what))
    uneven = max(filter(None, explained), key=lambda each: each.model.significance, default=None)
    return None if uneven is None else (ranks, steps, uneven)


def _factors(found: list[tuple[list[int], Ints, Uneven]]) -> pl.DataFrame:
    """`rank`, `step` and `factor`: what multiple of its time work takes with equal workloads."""
    frames = [
        pl.DataFrame(
            {
                "rank": np.tile(np.array(ranks, np.int64), steps.size),
                "step": np.repeat(steps, len(ranks)),
                "factor": (uneven.equal / uneven.own).ravel(),
            }
        )
        for ranks, steps, uneven in found
    ]
    return pl.concat(frames)


RECEIVED, SHAPES = "bytes from all_to_all", "elements in the inputs of its operators"
MAX_ELEMENTS = 1 << 48  # of the inputs of one operator: no memory holds more


def workloads_in_windows(run: Run) -> Mapping[str, pl.DataFrame]:
    """The frames by what is counted; those with no row are left out."""
    steps = run.table(STEPS, ["rank", "step", "window", "start_ns", "duration_ns"])
    steps = steps.filter(pl.col("window") >= 0).sort("start_ns")
    counters = run.table(COUNTERS).filter(pl.col("counter") == WORKLOAD)
    loaded = counters.select("rank", start_ns="time_ns", workload="value")
    loaded = loaded.join(steps, on=["rank", "start_ns"])
    frames = {
        ELEMENTS: loaded.select("rank", "step", "workload"),
        RECEIVED: _per_step(_received(run), steps),
        SHAPES: _shapes(run, steps),
    }
    return {what: frame.filter(pl.col("workload") > 0) for what, frame in frames.items() if frame.height}


def _received(run: Run) -> pl.DataFrame:
    """`rank`, `window`, `start_ns` and `workload` of calls that gather the next work of ranks."""
    calls = run.table(COLLECTIVES, ["rank", "window", "op", "start_ns", "bytes_out"])
    known = calls.filter((pl.col("op") == "all_to_all") & (pl.col("bytes_out") >= 0))
    return known.select("rank", "window", "start_ns", workload="bytes_out")


def _shapes(run: Run, steps: pl.DataFrame) -> pl.DataFrame:
    """`_per_step` of operators whose shapes are recorded, of which one part is in memory at a time."""
    columns = ["rank", "window", "kind", "start_ns", "shapes"]
    parts = chain([SPANS.empty().select(columns)], run.part_by_part(SPANS, columns))
    sums = pl.concat([_per_step(_elements_of_operators(part), steps) for part in parts])
    return sums.group_by("rank", "step").agg(pl.col("workload").sum())


def _elements_of_operators(spans: pl.DataFrame) -> pl.DataFrame:
    """`rank`, `window`, `start_ns` and `workload` of operators."""
    spans = spans.filter((pl.col("kind") == "cpu_op") & (pl.col("shapes") != ""))
    known = spans.select(pl.col("shapes").unique()).with_columns(
        workload=pl.col("shapes").map_elements(_elements_of_text, return_dtype=pl.Int64, skip_nulls=False)
    )
    return spans.join(known, on="shapes").select("rank", "window", "start_ns", "workload")


def _elements_of_text(text: str) -> int:
    """How many elements inputs have whose shapes a trace writes so; 0 where that is no number of a tensor."""
    with suppress(ValueError, RecursionError):
        elements = _elements(json.loads(text))
        return elements if 0 <= elements <= MAX_ELEMENTS else 0
    return 0


def _elements(shapes: Any) -> int:
    """How many elements inputs of these shapes have; lists of tensors are lists of shapes."""
    if not isinstance(shapes, list) or not shapes:
        return 0
    if all(isinstance(size, int) for size in shapes):
        return math.prod(shapes)
    return sum(_elements(each) for each in shapes)


def _per_step(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """`rank`, `step` and `workload`: the sum of those rows that begin in the step."""
    joined = rows.sort("start_ns").join_asof(
        steps.rename({"start_ns": "begun_ns"}), left_on="start_ns", right_on="begun_ns",
        by=["rank", "window"], check_sortedness=False,
    )  # fmt: skip
    inside = joined.filter(pl.col("start_ns") < pl.col("begun_ns") + pl.col("duration_ns"))
    return inside.group_by("rank", "step").agg(pl.col("workload").sum().cast(pl.Float64))
