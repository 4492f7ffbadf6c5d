"""Pipeline stages that have more work than others, in deep windows: every rank of them computes longer.

In: a graph whose ranks have known stages. Out: at most one finding of `imbalance.stage`, of which no rank is
the cause. A stage's work is that of its fastest rank: what another rank of it needs more is due to that rank.
The cost is what the replay saves with the same work spread evenly over the stages. A stage of one rank, or of
hosts of its own, that does as many operations as the others may as well be slow: the finding says so. Runs of
whole operations have `pipeline_slowdown.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from dpro.detect.baseline import Baseline, ScaledWork
from dpro.detect.findings import Finding
from dpro.detect.significance import MIN_STEPS, clear_gain, confidence, first_of_latest
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, Graph, NodeKind
from dpro.schema import WORKERS
from dpro.units import format_duration

CLASS = "imbalance.stage"
MIN_MORE = 0.5  # of what a stage takes longer: how many more operations show that it has more work
DOUBTED = 0.5  # confidence, where something else would look the same


def find_uneven_work_of_stages(baseline: Baseline) -> list[Finding]:
    """The finding, if the step would be shorter with the work spread evenly over the pipeline's stages.

    All recorded steps are examined, then the latest: it may have begun while the job ran.
    """
    if len({place.stage for place in baseline.graph.places.values()}) < 2:
        return []
    steps = baseline.steps
    if steps.size < MIN_STEPS:
        return []
    judged = (_uneven_since(baseline, first, int((steps >= first).sum())) for first in first_of_latest(steps))
    return next(filter(None, judged), [])


def _uneven_since(baseline: Baseline, first: int, num_steps: int) -> list[Finding]:
    """The same by the steps from a first one on."""
    graph = baseline.graph
    stage_of = {rank: place.stage for rank, place in graph.places.items()}
    computed = pl.concat(baseline.job.map_ranks(partial(_computed, baseline.job.on_gpus)))
    stages = _stages(computed.filter(pl.col("step") >= first), stage_of)
    if stages.height < 2:
        return []
    work = stages["work_ns"].to_numpy()
    factor = dict(zip(stages["stage"].to_list(), (work.mean() / work).tolist()))
    of_ranks = {rank: factor.get(stage, 1.0) for rank, stage in stage_of.items()}
    steps_of_ranks = computed.select("rank", "step").filter(pl.col("rank").is_in(list(of_ranks)))
    factors = steps_of_ranks.with_columns(
        factor=pl.col("rank").replace_strict(of_ranks, return_dtype=pl.Float64)
    )
    even = baseline.under(ScaledWork(_kinds(baseline.job.on_gpus), factors))
    times = baseline.step_ns, baseline.changed_step_ns(even.graph)
    before, after = (each[-num_steps:] for each in times)
    saved = before - after
    if not clear_gain(saved, before):
        return []
    sure, cost, step = confidence(saved, before), float(saved.mean()), float(before.mean())
    longest = stages.sort("work_ns").row(-1, named=True)
    others = stages.filter(pl.col("stage") != longest["stage"])
    doubt = _doubt(graph, longest, others)
    evidence = (
        f"every rank of stage {longest['stage']} computes {format_duration(longest['work_ns'])} or more per "
        f"step, those of the other stages {format_duration(others['work_ns'].to_numpy().mean())} on average",
        f"it carries out {longest['operations']:.0f} operations per step, the others "
        f"{others['operations'].to_numpy().mean():.0f}",
        f"replayed with the same work spread evenly over {stages.height} stages, the step takes "
        f"{format_duration(step - cost)} instead of {format_duration(step)}",
        doubt or "the work is uneven, no rank is at fault",
    )
    sure = min(sure, DOUBTED) if doubt else sure
    return [
        Finding(
            CLASS, "stage", str(longest["stage"]), tuple(longest["ranks"]), round(cost / step, 4),
            round(sure, 3), cost, evidence,
        )
    ]  # fmt: skip


def with_doubt(stragglers: list[Finding], stages: list[Finding]) -> list[Finding]:
    """Findings of slow ranks, with doubt where the rank is a stage of its own that may have more work.

    Left out are ranks whose stage clearly has more work.
    """
    kept = []
    for finding in stragglers:
        stage = next((each for each in stages if each.ranks == finding.ranks), None)
        if stage is None:
            kept.append(finding)
        elif stage.confidence <= DOUBTED:
            doubt = f"one of two: the rank is slow, or stage {stage.component_id}, its own, has too much work"
            sure = min(finding.confidence, DOUBTED)
            kept.append(replace(finding, confidence=sure, evidence=(*finding.evidence, doubt)))
    return kept


def _kinds(on_gpus: bool) -> tuple[NodeKind, ...]:
    """Kinds of nodes that ranks compute with: GPUs where there are any."""
    return GPU_KINDS if on_gpus else CPU_KINDS


def _computed(on_gpus: bool, graph: Graph) -> pl.DataFrame:
    """`rank`, `step`, `work_ns` and `operations`: how long ranks compute, and how many operations."""
    nodes = graph.nodes
    works = np.isin(nodes.kind, _kinds(on_gpus)) & (nodes.step >= 0)
    single = np.isin(nodes.kind[works], (NodeKind.CPU, *GPU_KINDS))
    places = {"rank": nodes.rank[works], "step": nodes.step[works]}
    frame = pl.DataFrame({**places, "work_ns": nodes.duration[works], "operations": single})
    return frame.group_by("rank", "step").agg(pl.col("work_ns").sum(), pl.col("operations").sum())


def _stages(computed: pl.DataFrame, stage_of: Mapping[int, int]) -> pl.DataFrame:
    """`stage`, `work_ns` of its fastest rank and `operations` per step, `ranks`; in order.

    Args:
        computed: as from `_computed`, of the steps that count.
    """
    schema: dict[str, pl.DataType | type[pl.DataType]] = {
        "stage": pl.Int64,
        "work_ns": pl.Float64,
        "operations": pl.Float64,
        "ranks": pl.List(pl.Int64),
    }
    per_step = computed.filter(pl.col("rank").is_in(list(stage_of)))
    per_rank = per_step.group_by("rank").agg(pl.col("work_ns", "operations").median())
    return (
        per_rank.with_columns(stage=pl.col("rank").replace_strict(stage_of, return_dtype=pl.Int64))
        .group_by("stage")
        .agg(pl.col("work_ns").min(), pl.col("operations").median(), ranks=pl.col("rank").sort())
        .select(pl.col(name).cast(dtype) for name, dtype in schema.items())
        .sort("stage")
    )


def _doubt(graph: Graph, longest: dict[str, Any], others: pl.DataFrame) -> str:
    """What else it may be that the stage computes longer; empty if that is clear."""
    longer = longest["work_ns"] / float(others["work_ns"].to_numpy().mean()) - 1
    more = longest["operations"] / max(float(others["operations"].to_numpy().mean()), 1.0) - 1
    if more >= MIN_MORE * longer:
        return ""
    if len(longest["ranks"]) == 1:
        return "one rank of the stage is recorded, and it does as many operations: a slow rank looks the same"
    hosts = graph.run.table(WORKERS, ["rank", "host"]) if graph.run is not None else WORKERS.empty()
    mine = pl.col("rank").is_in(longest["ranks"])
    own, theirs = (set(hosts.filter(each)["host"]) - {""} for each in (mine, ~mine))
    if own and not own & theirs:
        return (
            "the stage is alone on its hosts and does as many operations as others: slow hosts look the same"
        )
    return ""
