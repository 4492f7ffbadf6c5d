"""Detectors of work spread unevenly over the ranks of a job, or over its pipeline's stages, in deep windows.

Takes a graph and its run. Returns the graph with work scaled as if all ranks with equal work had equally
large batches, and findings of `imbalance.data` and `imbalance.stage`, for which no rank is at fault.
Workloads of ranks are in `[rank, step, workload]`, one frame per kind of evidence: what loaders returned,
what other ranks sent (to experts, to embeddings), and sizes of the inputs of operators where shapes are
recorded. A rank that is still slower than its peers with balanced work has another cause. Does not cover runs
of whole operations; `pipeline_slowdown.py` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.detect.baseline import Baseline, ScaledWork
from dpro.detect.findings import Finding
from dpro.detect.load_model import (
    ELEMENTS,
    MODEL_ERROR,
    RECEIVED,
    SHAPES,
    WORKLOAD,
    Uneven,
    describe_uneven_work,
    explain,
)
from dpro.detect.observations import Observation, observe, observe_replay
from dpro.detect.significance import MIN_STEPS, clear_gain, confidence, first_of_latest
from dpro.replay.experts import (
    imbalances,
    loads_of_ranks,
    member_in_words,
    stretches_of,
    uneven_layers,
    within_steps,
)
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, Graph, NodeKind
from dpro.replay.peers import ON_CPU, ON_GPU, teams_by_work
from dpro.replay.steps import END
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS, WORKERS
from dpro.store import Run


@dataclass(frozen=True)
class BalancedJob:
    """A job with balanced work.

    Attributes:
        baseline: the balanced job.
        findings: of uneven work.
        from_steps: whether single steps show the dependence on workloads. If only ranks that always have more
            do, it explains why they are slow, if they are.
        explained: ns per step that ranks typically work longer because of their workloads, by rank.
    """

    baseline: Baseline
    findings: list[Finding]
    from_steps: bool
    explained: Mapping[int, float]

    def leaves(self, findings: list[Finding]) -> list[Finding]:
        """Return the findings about this job that cost more than the error of the load model."""
        return [
            finding
            for finding in findings
            if finding.cost_ns >= MODEL_ERROR * max(self.explained.get(rank, 0.0) for rank in finding.ranks)
        ]


def rebalance(baseline: Baseline) -> BalancedJob:
    """Return the job with balanced work; as recorded where workloads explain nothing."""
    run, work = baseline.graph.run, baseline.work
    as_it_is = BalancedJob(baseline, [], True, {})
    if run is None:
        return as_it_is
    resource = ON_GPU if (work["resource"] == ON_GPU).any() else ON_CPU
    summed = work.filter(resource=resource).group_by("rank", "step").agg(pl.col("work_ns").sum())
    workloads = workloads_in_windows(run)
    of_teams = [
        explained
        for team in teams_by_work(work)
        if (explained := _explained(summed.filter(pl.col("rank").is_in(team)), workloads)) is not None
    ]
    if not of_teams:
        return as_it_is
    # The multiple of its time that work takes at equal workloads.
    frames = [
        pl.DataFrame(
            {
                "rank": np.tile(np.array(ranks, np.int64), steps.size),
                "step": np.repeat(steps, len(ranks)),
                "factor": (uneven.equal_ns / uneven.own_ns).ravel(),
            }
        )
        for ranks, steps, uneven in of_teams
    ]
    even = baseline.under(ScaledWork(GPU_KINDS if resource == ON_GPU else CPU_KINDS, pl.concat(frames)))
    before, after = baseline.step_ns, baseline.changed_step_ns(even.graph)
    if before.size < MIN_STEPS:
        return as_it_is
    ranks, _, most = max(of_teams, key=lambda of_team: of_team[2].model.significance)
    cost = float((before - after).mean())
    findings = describe_uneven_work(most, cost, float(before.mean()), ranks)
    if findings and run.num_rows(SPANS) <= MAX_NAMED:
        findings = [finding.observing(*_uneven_layers(run)) for finding in findings]
    by_rank = {
        rank: float(value) for ranks, _, uneven in of_teams for rank, value in zip(ranks, uneven.explained)
    }
    return BalancedJob(even, findings, most.model.significance > 0, by_rank)


def _uneven_layers(run: Run) -> list[Observation]:
    """Return observations of the most uneven layer of each source."""
    layers = imbalances(run.table(SPANS), run.table(COLLECTIVES), run.table(STEPS))
    return [
        observe(
            "uneven-layer",
            "of {layer}, {member} has {imbalance:.2f} times the mean of {members}, by {source}",
            member=member_in_words(**row),
            **{name: row[name] for name in ("layer", "imbalance", "members", "source")},
        )
        for row in uneven_layers(layers).iter_rows(named=True)
    ]


def _explained(
    team: pl.DataFrame, workloads: Mapping[str, pl.DataFrame]
) -> tuple[list[int], Ints, Uneven] | None:
    """Return the ranks of a team, their steps, and what workloads explain; None if that is nothing.

    Args:
        team: `rank`, `step` and `work_ns` of their steps.
        workloads: as from `workloads_in_windows`; the kind that explains times best counts.
    """
    ranks: list[int] = sorted(team["rank"].unique().to_list())
    common = team.filter(pl.len().over("step") == len(ranks)).sort("step", "rank")
    if len(ranks) < 2 or common.is_empty():
        return None
    columns: dict[str, NDArray[Any]] = {
        name: common[name].to_numpy().reshape(-1, len(ranks)) for name in ("step", "work_ns")
    }
    steps, work_ns = columns["step"][:, 0], columns["work_ns"].astype(float)
    explained = []
    for what, frame in workloads.items():
        rows = common.join(frame, on=["rank", "step"], how="left", maintain_order="left")
        workload = rows["workload"].fill_null(np.nan).to_numpy().reshape(work_ns.shape)
        explained.append(explain(work_ns, workload, steps, what))
    uneven = max(filter(None, explained), key=lambda uneven: uneven.model.significance, default=None)
    return None if uneven is None else (ranks, steps, uneven)


MAX_NAMED = 4_000_000  # spans of a run up to which uneven layers are named: they are read at once
MAX_ELEMENTS = 1 << 48  # in the inputs of one operator: no memory is larger


def workloads_in_windows(run: Run) -> Mapping[str, pl.DataFrame]:
    """Return the workloads by what they count; kinds without rows are left out."""
    steps = run.table(STEPS, ["rank", "step", "window", "start_ns", "duration_ns"])
    steps = steps.filter(pl.col("window") >= 0).sort("start_ns")
    counters = run.table(COUNTERS).filter(pl.col("counter") == WORKLOAD)
    loaded = counters.select("rank", start_ns="time_ns", workload="value")
    loaded = loaded.join(steps, on=["rank", "start_ns"])
    # Operators whose shapes are recorded, with one part at a time in memory.
    columns = ["rank", "window", "kind", "start_ns", "shapes"]
    parts = chain([SPANS.empty().select(columns)], run.part_by_part(SPANS, columns))
    stretches, of_parts = stretches_of(steps.with_columns(END)), []
    for part in parts:
        operators = part.filter((pl.col("kind") == "cpu_op") & (pl.col("shapes") != ""))
        elements = operators.select(pl.col("shapes").unique()).with_columns(
            workload=pl.col("shapes").map_elements(_elements_of_text, return_dtype=pl.Int64, skip_nulls=False)
        )
        rows = operators.join(elements, on="shapes").select("rank", "window", "start_ns", "workload")
        inside = within_steps(rows, stretches)
        of_parts.append(inside.group_by("rank", "step").agg(pl.col("workload").sum().cast(pl.Float64)))
    sums = pl.concat(of_parts)
    frames = {
        ELEMENTS: loaded.select("rank", "step", "workload"),
        RECEIVED: loads_of_ranks(run.table(COLLECTIVES), steps),
        SHAPES: sums.group_by("rank", "step").agg(pl.col("workload").sum()),
    }
    return {what: frame.filter(pl.col("workload") > 0) for what, frame in frames.items() if frame.height}


def _elements_of_text(text: str) -> int:
    """Return the number of elements of inputs from shapes as a trace writes them; 0 if that is invalid."""
    with suppress(ValueError, RecursionError):
        elements = _elements(json.loads(text))
        return elements if 0 <= elements <= MAX_ELEMENTS else 0
    return 0


def _elements(shapes: Any) -> int:
    """Return the number of elements of inputs with these shapes; lists of tensors are lists of shapes."""
    if not isinstance(shapes, list) or not shapes:
        return 0
    if all(isinstance(size, int) for size in shapes):
        return math.prod(shapes)
    return sum(_elements(part) for part in shapes)


# Pipeline stages that have more work than others: every rank of theirs computes longer. A stage's work is
# that of its fastest rank: any excess of another rank is due to that rank. The cost is what the replay saves
# with all work spread evenly over the stages. A stage of one rank, or alone on its hosts, that does as many
# operations as the others may be slow instead, as the finding says.

CLASS = "imbalance.stage"
MIN_MORE = 0.5  # of a stage's relative excess in time: least excess in operations that shows more work
DOUBTED = 0.5  # confidence where another cause would look the same
SLOW_RANK = observe(
    "slow-or-uneven",
    "only one rank of the stage is recorded, and it does as many operations: a slow rank would look the same",
)
SLOW_HOSTS = observe(
    "slow-or-uneven",
    "the stage is alone on its hosts and does as many operations as others: slow hosts look the same",
)


def find_uneven_work_of_stages(baseline: Baseline) -> list[Finding]:
    """Find whether the step would be shorter with work spread evenly over the pipeline's stages.

    All recorded steps are tested, then the latest ones: the imbalance may have begun while the job ran.
    """
    if len({place.stage for place in baseline.graph.places.values()}) < 2:
        return []
    steps = baseline.steps
    if steps.size < MIN_STEPS:
        return []
    judged = (_uneven_since(baseline, first, int((steps >= first).sum())) for first in first_of_latest(steps))
    return next(filter(None, judged), [])


def _uneven_since(baseline: Baseline, first: int, num_steps: int) -> list[Finding]:
    """Return the finding of uneven stages, by the steps from a first one on."""
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
    before, after = (step_ns[-num_steps:] for step_ns in times)
    saved = before - after
    if not clear_gain(saved, before):
        return []
    sure, cost, step = confidence(saved, before), float(saved.mean()), float(before.mean())
    longest = stages.sort("work_ns").row(-1, named=True)
    others = stages.filter(pl.col("stage") != longest["stage"])
    doubt = _doubt(graph, longest, others)
    theirs = {name: float(others[name].to_numpy().mean()) for name in ("work_ns", "operations")}
    observations = (
        observe(
            "work-of-stage",
            "every rank of stage {stage} computes {work_ns} or more per step, those of the other stages "
            "{others_work_ns} on average",
            stage=longest["stage"], work_ns=longest["work_ns"], others_work_ns=theirs["work_ns"],
        ),
        observe(
            "operations-of-stage",
            "it carries out {operations:.0f} operations per step, the others {others_operations:.0f}",
            operations=longest["operations"], others_operations=theirs["operations"],
        ),
        observe_replay(f"the same work spread evenly over {stages.height} stages", step - cost, step),
        doubt or observe("no-rank-at-fault", "the work is uneven: its ranks do more, they are not slower"),
    )  # fmt: skip
    sure = min(sure, DOUBTED) if doubt else sure
    return [
        Finding(
            CLASS, "stage", str(longest["stage"]), tuple(longest["ranks"]), round(cost / step, 4),
            round(sure, 3), cost, observations,
        )
    ]  # fmt: skip


def with_doubt(stragglers: list[Finding], stages: list[Finding]) -> list[Finding]:
    """Add doubt to findings of slow ranks that are a stage by themselves, which may have more work.

    Ranks whose stage clearly has more work are left out.
    """
    kept = []
    for finding in stragglers:
        stage = next((uneven for uneven in stages if uneven.ranks == finding.ranks), None)
        if stage is None:
            kept.append(finding)
        elif stage.confidence <= DOUBTED:
            doubt = observe(
                "slow-or-uneven",
                "either the rank is slow, or its stage ({stage}) has too much work",
                stage=stage.component_id,
            )
            sure = min(finding.confidence, DOUBTED)
            kept.append(replace(finding, confidence=sure).observing(doubt))
    return kept


def _kinds(on_gpus: bool) -> tuple[NodeKind, ...]:
    """Return the kinds of nodes with which ranks compute: GPU work where there is any."""
    return GPU_KINDS if on_gpus else CPU_KINDS


def _computed(on_gpus: bool, graph: Graph) -> pl.DataFrame:
    """Return `rank`, `step`, `work_ns` and `operations`: computing time, and number of operations."""
    nodes = graph.nodes
    works = np.isin(nodes.kind, _kinds(on_gpus)) & (nodes.step >= 0)
    single = np.isin(nodes.kind[works], (NodeKind.CPU, *GPU_KINDS))
    places = {"rank": nodes.rank[works], "step": nodes.step[works]}
    frame = pl.DataFrame({**places, "work_ns": nodes.duration[works], "operations": single})
    return frame.group_by("rank", "step").agg(pl.col("work_ns").sum(), pl.col("operations").sum())


def _stages(computed: pl.DataFrame, stage_of: Mapping[int, int]) -> pl.DataFrame:
    """Return `stage`, `work_ns` of its fastest rank and `operations` per step, `ranks`; in order.

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


def _doubt(graph: Graph, longest: dict[str, Any], others: pl.DataFrame) -> Observation | None:
    """Return what else may make the stage compute longer; None if uneven work is clear."""
    longer = longest["work_ns"] / float(others["work_ns"].to_numpy().mean()) - 1
    more = longest["operations"] / max(float(others["operations"].to_numpy().mean()), 1.0) - 1
    if more >= MIN_MORE * longer:
        return None
    if len(longest["ranks"]) == 1:
        return SLOW_RANK
    hosts = graph.run.table(WORKERS, ["rank", "host"]) if graph.run is not None else WORKERS.empty()
    of_stage = pl.col("rank").is_in(longest["ranks"])
    own_hosts, other_hosts = (set(hosts.filter(part)["host"]) - {""} for part in (of_stage, ~of_stage))
    if own_hosts and not own_hosts & other_hosts:
        return SLOW_HOSTS
    return None
