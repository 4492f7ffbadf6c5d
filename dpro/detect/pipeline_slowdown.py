"""Causes of slow steps in pipelined jobs of whole operations: launches, workers, stages, kinds of work.

Takes the graph of such a run; returns ratios of mean step times, and findings. The method is that of
"Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al., OSDI 2025, sections 3
and 4): the job is replayed without launch delays, and again with every operation taking the typical time of
its kind over all ranks and steps; then with the own times of one group only, or with one group healed. All
replays are columns of one batch. Workers and stages are compared at equal micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding, costliest_first, ranks_of
from dpro.detect.load_model import CLASS
from dpro.detect.observations import observe, observe_replay
from dpro.detect.significance import (
    MIN_COST,
    MIN_LATEST,
    MIN_STEPS,
    clear_gain,
    confidence,
    first_of_latest,
)
from dpro.detect.stragglers.replayed import find_stragglers
from dpro.documents import DocumentPart
from dpro.errors import Unanswerable
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.pipeline.operations import BACKWARD_NAMES, FORWARD_NAMES
from dpro.replay.timeline import (
    are_usual,
    changed_step_times,
    replay,
    replay_durations,
    step_ends,
    step_lengths,
    step_times,
)
from dpro.replay.whatif.edits.host import NoLaunch

# Share of the workers that count as the slowest.
SLOWEST_WORKERS = 0.03
LATEST = 3  # stretches of steps that are analysed: all, the latest half, the latest quarter
# Factors of the confidence if only one rank of a stage is recorded, as work or worker may be slow: usually,
# and for less than a tenth of the step, which an embedding or a head may cost, too.
ONE_RANK, ONE_RANK_A_LITTLE, LITTLE = 0.7, 0.5, 0.1
# Columns of a batch are replayed in blocks of this many values at most: memory stays bounded.
BLOCK = 1 << 25
_MESSAGE = re.compile(r"^(forward|backward)\W?(send|recv)$")


class Slowdown(DocumentPart, frozen=True):
    """Factor by which the step is longer than with every operation as fast as others of its kind.

    Attributes:
        total: factor of all operations together.
        launch: factor of launch delays, which were not recorded.
        by_rank, by_stage, by_dp, by_op: factor if only that group keeps its own times.
        workers_share: share of the slowdown that the slowest 3% of workers cause; null without any slowdown.
        last_stage_share: share that the last stage causes; null without any slowdown.
        micro_batches: how micro-batches differ; null where no step has two.
    """

    total: float
    launch: float
    by_rank: dict[int, float]
    by_stage: dict[int, float]
    by_dp: dict[int, float]
    by_op: dict[str, float]
    workers_share: float | None
    last_stage_share: float | None
    micro_batches: MicroBatches | None


@dataclass(frozen=True)
class OperationsAnalysis:
    """Causes of the slowdown of a job of whole operations, and the gain of healing each rank.

    Attributes:
        slowdown: without launch delays, except `launch`; sends and receives of one direction are one kind.
        step_ns: mean step without launch delays.
        healed_ns: mean step with one rank healed, by rank.
    """

    slowdown: Slowdown
    step_ns: float
    healed_ns: Mapping[int, float]


def analyse_slowdown(graph: Graph) -> OperationsAnalysis:
    """Measure how much slower the job is than with even operations, and which ranks and stages cause it."""
    measured = replay(graph)
    delayed = float(step_times(graph, measured.start, measured.end)["duration_ns"].to_numpy().mean())
    free = without_launches(graph)
    as_recorded, typical = free.nodes.duration, typical_durations(free)
    by_rank = {rank: free.nodes.rank == rank for rank in sorted(free.places)}
    by_stage = _by_place(free, lambda place: place.stage)
    by_dp = _by_place(free, lambda place: place.dp)
    work = np.isin(free.nodes.kind, (NodeKind.KERNEL, NodeKind.TRANSFER))
    kinds: dict[str, list[int]] = {}
    for code in np.unique(free.nodes.name[work]).tolist():
        message = _MESSAGE.match(free.names[code])
        kinds.setdefault(f"{message[1]}-pp-comm" if message else free.names[code], []).append(code)
    by_op = {kind: work & np.isin(free.nodes.name, kinds[kind]) for kind in sorted(kinds)}
    masks = [*by_rank.values(), *by_stage.values(), *by_dp.values(), *by_op.values()]
    only = [np.where(mask, as_recorded, typical) for mask in masks]
    healed = [np.where(mask, typical, as_recorded) for mask in (by_stage[max(by_stage)], *by_rank.values())]
    means = replayed_steps(free, [as_recorded, typical, *only, *healed]).mean(axis=0)
    step, even = float(means[0]), float(means[1])
    ratios, after = iter((means[2:] / even).tolist()), means[2 + len(only) :].tolist()
    slowdown_by_rank = {rank: next(ratios) for rank in by_rank}
    count = int(np.ceil(len(slowdown_by_rank) * SLOWEST_WORKERS))
    workers = sorted(slowdown_by_rank, key=lambda rank: (-slowdown_by_rank[rank], rank))[:count]
    worst = replayed_steps(free, [np.where(np.isin(free.nodes.rank, workers), typical, as_recorded)]).mean()
    lost = step - even
    slowdown = Slowdown(
        total=step / even,
        launch=delayed / step,
        by_rank=slowdown_by_rank,
        by_stage={stage: next(ratios) for stage in by_stage},
        by_dp={dp: next(ratios) for dp in by_dp},
        by_op={kind: next(ratios) for kind in by_op},
        workers_share=(step - float(worst)) / lost if lost else None,
        last_stage_share=(step - after[0]) / lost if lost else None,
        micro_batches=variation_of(free),
    )
    return OperationsAnalysis(slowdown, step, dict(zip(by_rank, after[1:])))


def without_launches(graph: Graph) -> Graph:
    """Return the graph without launch delays; unchanged if there are none."""
    try:
        return NoLaunch().apply(graph)
    except Unanswerable:
        return graph


def typical_durations(graph: Graph) -> Ints:
    """Return [N] durations, in ns: the mean of its kind for computing, the median for communication."""
    nodes = graph.nodes
    frame = pl.DataFrame({"kind": nodes.kind, "name": nodes.name, "own": nodes.duration})
    typical = (
        pl.when(pl.col("kind") == NodeKind.KERNEL)
        .then(pl.col("own").mean().over("kind", "name"))
        .when(pl.col("kind") == NodeKind.TRANSFER)
        .then(pl.col("own").median().over("kind", "name"))
        .otherwise("own")
    )
    return frame.select(typical.round().cast(pl.Int64)).to_series().to_numpy()


def replayed_steps(graph: Graph, columns: Sequence[Ints]) -> Floats:
    """Return [T, S] step times, in ns, of the graph replayed with each of S columns of durations.

    Args:
        columns: [S] of [N] ns.
    """
    size = max(BLOCK // max(graph.num_nodes, 1), 1)
    times = []
    for first in range(0, len(columns), size):
        durations = np.stack(columns[first : first + size], axis=1)
        ends = replay_durations(graph, durations)
        for column in range(durations.shape[1]):
            end = np.ascontiguousarray(ends[:, column])
            times.append(step_times(graph, end - durations[:, column], end)["duration_ns"].to_numpy())
    return np.stack(times, axis=1).astype(np.float64)


def _by_place(graph: Graph, key: Callable[..., int]) -> dict[int, Bools]:
    """Return masks of nodes by a coordinate of their rank's place."""
    ranks: dict[int, list[int]] = {}
    for rank, place in graph.places.items():
        ranks.setdefault(key(place), []).append(rank)
    return {value: np.isin(graph.nodes.rank, ranks[value]) for value in sorted(ranks)}


def diagnose_operations(graph: Graph, analysed: OperationsAnalysis) -> list[Finding]:
    """Find uneven micro-batches, slow workers and uneven stages of a run of operations, costliest first.

    Variation with the data may hide a slow worker, or look like its cost: so workers and stages are compared
    at equal micro-batches.
    """
    free = without_launches(graph)
    equal, data = equal_batches(free)
    workers, stages = find_slow_workers(graph, analysed), find_uneven_stages(equal)
    if equal is not free:
        at_equal_work = find_slow_workers(equal, analyse_slowdown(equal))
        named = ranks_of(at_equal_work)
        # A single stage does not distinguish a worker from its data: an outlier remains a finding.
        alone = len({place.stage for place in graph.places.values()}) == 1
        left = [finding for finding in workers if alone and not named & {*finding.ranks}]
        workers = [*at_equal_work, *left]
        stages = [finding for finding in stages if is_longer_in_most(free, finding)]
    return costliest_first([*data, *workers, *stages])


def find_slow_workers(graph: Graph, analysed: OperationsAnalysis) -> list[Finding]:
    """Find workers that are slower than others of their stage, with the gain of healing them.

    Peers are the other data-parallel ranks of the stage, which have equal work. The cost is that of the
    published method: the worker takes the typical times of all ranks.
    """
    findings = []
    for finding in find_stragglers(Baseline(without_launches(graph))):
        if len(finding.ranks) > 1:
            findings.append(finding)
            continue
        rank = finding.ranks[0]
        cost = analysed.step_ns - analysed.healed_ns[rank]
        place = graph.places[rank]
        finding = finding.observing(
            observe(
                "peers-of-stage",
                "rank {rank} is data-parallel rank {dp} of stage {stage}; the others of that stage are its "
                "peers",
                rank=rank, dp=place.dp, stage=place.stage,
            ),
            observe(
                "slowdown-of-rank",
                "with only its own times kept and all others typical, the step is {times:.2f} times as long",
                times=float(analysed.slowdown.by_rank[rank]),
            ),
            observe(
                "cost-of-rank",
                "the cost counts only its time above what is typical of all ranks: {cost_ns}",
                cost_ns=float(cost),
            ),
        )  # fmt: skip
        findings.append(replace(finding, cost_ns=cost, severity=round(cost / analysed.step_ns, 4)))
    return findings


def find_uneven_stages(graph: Graph) -> list[Finding]:
    """Find stages on which every rank computes longer than on others: uneven work, with no rank at fault.

    The latest half and quarter of the steps are analysed as well: a stage may have become slow meanwhile.
    """
    free = without_launches(graph)
    by_stage: dict[str, Finding] = {}
    for since in first_of_latest(np.unique(free.nodes.step[free.nodes.step >= 0]))[:LATEST]:
        for finding in _uneven_since(free, since):
            by_stage.setdefault(finding.component_id, finding)
    return list(by_stage.values())


def _uneven_since(free: Graph, since: int) -> list[Finding]:
    """Return the uneven stages in the steps from `since` on."""
    ratios = _stage_ratios(free, since)
    stages = sorted(ratios["stage"].unique().to_list())
    if not stages:
        return []
    columns = [
        free.nodes.duration,
        *(_healed(free, ratios.filter(pl.col("stage") == stage)) for stage in stages),
        _evened(free, since),
    ]
    steps = np.unique(free.nodes.step[free.nodes.step >= 0])
    times = replayed_steps(free, columns)[-int((steps >= since).sum()) :]
    if times.shape[0] < MIN_STEPS:
        return []
    usual = are_usual(times[:, 0])
    times = times[usual] if usual.sum() >= MIN_STEPS else times
    base, saved = times[:, 0], times[:, :1] - times[:, 1:]
    return [
        _describe_stage(free, ratios.filter(pl.col("stage") == stage), base, saved[:, column], saved[:, -1])
        for column, stage in enumerate(stages)
        if clear_gain(saved[:, column], base)
    ]


def is_longer_in_most(graph: Graph, finding: Finding) -> bool:
    """Return whether a stage computes longer than the others in most data-parallel ranks, each by itself.

    All stages of one data-parallel rank have the same micro-batches: if these differ, that distinguishes a
    slow stage from a slow worker.
    """
    nodes = graph.nodes
    work = (nodes.kind == NodeKind.KERNEL) & (nodes.step >= 0)
    total = np.bincount(nodes.rank[work], nodes.duration[work], minlength=max(graph.places) + 1)
    by_dp: dict[int, dict[int, float]] = {}
    for rank, place in graph.places.items():
        by_dp.setdefault(place.dp, {})[place.stage] = float(total[rank])
    stage = graph.places[finding.ranks[0]].stage
    longer = [
        bool(
            stages[stage]
            > (1 + finding.severity / 2) * np.median([v for k, v in stages.items() if k != stage])
        )
        for stages in by_dp.values()
        if stage in stages and len(stages) > 1
    ]
    return 2 * sum(longer) > len(longer)


def _stage_ratios(graph: Graph, since: int) -> pl.DataFrame:
    """Return `stage`, `name`, `own`, `others` (ns per operation), `ratio` (< 1) where a stage takes longer.

    A stage's time is that of its fastest rank: any excess of another rank of the stage is due to that rank. A
    rank's time is its median over steps of the mean over an operation's micro-batches.
    """
    nodes = graph.nodes
    work = np.flatnonzero((nodes.kind == NodeKind.KERNEL) & (nodes.step >= since))
    frame = pl.DataFrame(
        {
            "rank": nodes.rank[work],
            "step": nodes.step[work],
            "name": nodes.name[work],
            "duration": nodes.duration[work],
        }
    )
    stage = {rank: place.stage for rank, place in graph.places.items()}
    per_rank = (
        frame.group_by("rank", "step", "name")
        .agg(pl.col("duration").mean())
        .group_by("rank", "name")
        .agg(pl.col("duration").median())
        .with_columns(stage=pl.col("rank").replace_strict(stage, return_dtype=pl.Int64))
    )
    of_stage = per_rank.group_by("stage", "name").agg(own=pl.col("duration").min())
    others = (
        of_stage.join(of_stage.select("name", peer="stage", peers="own"), on="name")
        .filter(pl.col("peer") != pl.col("stage"))
        .group_by("stage", "name")
        .agg(others=pl.col("peers").median())
    )
    longer = of_stage.join(others, on=["stage", "name"]).filter(pl.col("own") > pl.col("others"))
    return longer.with_columns(ratio=pl.col("others") / pl.col("own")).sort("stage", "name")


def _evened(graph: Graph, since: int) -> Ints:
    """Return durations with the total computing spread evenly over the stages; slower ranks remain slower."""
    nodes = graph.nodes
    work = np.flatnonzero((nodes.kind == NodeKind.KERNEL) & (nodes.step >= since))
    stage = {rank: place.stage for rank, place in graph.places.items()}
    frame = pl.DataFrame({"node": work, "rank": nodes.rank[work], "name": nodes.name[work]}).with_columns(
        duration=pl.Series(nodes.duration[work]),
        stage=pl.col("rank").replace_strict(stage, return_dtype=pl.Int64),
    )
    of_stage = pl.col("duration").mean().over("name", "stage")
    even = frame.with_columns(
        even=pl.col("duration") * (pl.col("duration").mean().over("name") / of_stage).fill_nan(1.0)
    )
    duration = nodes.duration.copy()
    duration[even["node"].to_numpy()] = np.rint(even["even"].to_numpy()).astype(np.int64)
    return duration


def _healed(graph: Graph, ratios: pl.DataFrame) -> Ints:
    """Return durations with one stage's computing scaled down to that of other stages."""
    nodes = graph.nodes
    stage = ratios["stage"][0]
    in_stage = np.isin(nodes.rank, [rank for rank, place in graph.places.items() if place.stage == stage])
    duration = nodes.duration.copy()
    for name, ratio in ratios.select("name", "ratio").iter_rows():
        scaled = in_stage & (nodes.kind == NodeKind.KERNEL) & (nodes.name == name)
        duration[scaled] = np.rint(duration[scaled] * ratio).astype(np.int64)
    return duration


def _describe_stage(graph: Graph, ratios: pl.DataFrame, base: Floats, saved: Floats, even: Floats) -> Finding:
    """Return the finding about a stage.

    Args:
        base: [T] step times, in ns.
        saved: [T] savings with the stage as fast as the others, in ns.
        even: [T] savings with all work spread evenly, in ns: the cost of having more work than others.
    """
    stage = int(ratios["stage"][0])
    ranks = tuple(sorted(rank for rank, place in graph.places.items() if place.stage == stage))
    step, healed = float(base.mean()), float(saved.mean())
    observations = [
        observe(
            "longer-operations",
            "on stage {stage} every {operation} takes {stage_ns}, on the others typically {others_ns}",
            stage=stage, operation=graph.names[name], stage_ns=own_ns, others_ns=others_ns,
        )
        for name, own_ns, others_ns in ratios.sort("ratio").select("name", "own", "others").iter_rows()
        if own_ns - others_ns > 0.01 * others_ns
    ]  # fmt: skip
    observations.append(observe_replay(f"stage {stage} as fast as the others", step - healed, step))
    sure, cost = confidence(saved, base), healed
    if len(ranks) == 1:
        sure *= ONE_RANK if healed >= LITTLE * step else ONE_RANK_A_LITTLE
        doubt = "only one rank of the stage is recorded: a slow worker would look the same"
        observations.append(observe("one-rank-of-stage", doubt))
    else:
        cost = min(max(float(even.mean()), 0.0), healed)
        observations.append(
            observe(
                "uneven-work",
                "all {num_ranks_of_stage} ranks of the stage take equally long: the work is uneven, no rank "
                "is at fault; spread evenly over the stages, the step takes {even_ns}",
                num_ranks_of_stage=len(ranks), even_ns=step - cost,
            )
        )  # fmt: skip
    return Finding(
        "imbalance.stage", "stage", str(stage), ranks, round(cost / step, 4), round(sure, 3), cost,
        tuple(observations),
    )  # fmt: skip


# Uneven micro-batches. One with longer sequences takes longer forward and backward, and on every stage that
# it passes: such variation is due to data, variation on a single stage is not. The criterion, a correlation
# of at least 0.9, is that of the paper above. Runs of one micro-batch per step cannot show it.

BATCHES = "the micro-batches"
MIN_CORRELATION = 0.9
MIN_VARIATION = 0.05  # of forward, standard deviation over mean: clocks of GPUs cause less in both directions
MIN_SIGNIFICANCE = 3.0  # least cost, in its standard errors
APART = (
    4.0  # standard errors by which a rank's mean micro-batch must differ to blame the rank rather than data
)
MIN_FREEDOM = 20  # micro-batches beyond one per step: fewer do not show a correlation
UNUSUAL = 1.5  # longer steps, as a multiple of the median, are left out
_BATCH = re.compile(r"(.*)micro-batch \d+$")
ONE = ["rank", "chunk", "step"]  # keys within which micro-batches are compared


class MicroBatches(DocumentPart, frozen=True):
    """How the micro-batches of a step differ.

    Attributes:
        correlation: Pearson's, of forward and backward within a rank and step.
        forward: standard deviation of forward times over their mean.
        freedom: degrees of freedom of the comparison.
        longest: typical ratio of the longest micro-batch of a step to the mean one.
    """

    correlation: float
    forward: float
    freedom: int
    longest: float


def equal_batches(graph: Graph) -> tuple[Graph, list[Finding]]:
    """Return the job with equal micro-batches in each step, and the finding of what that would save.

    The job is unchanged if micro-batches hardly differ. If they differ at no clear cost (others wait for a
    slow worker anyway), there is no finding, but equal ones show other causes better.

    Args:
        graph: of a run of operations, without launch delays.
    """
    varied = variation_of(graph)
    if varied is None or not (
        varied.correlation >= MIN_CORRELATION
        and varied.forward >= MIN_VARIATION
        and varied.freedom >= MIN_FREEDOM
    ):
        return graph, []
    even = graph.with_durations(_with_equal_batches(graph, _batches(graph)))
    recorded, evened = replay(graph), replay(even)
    baseline = step_ends(graph, recorded.start, recorded.end)
    steps = changed_step_times(baseline, even, evened.end)
    before, after = step_lengths(baseline), steps["duration_ns"].to_numpy()
    saved = before - after
    if before.size < MIN_LATEST:
        return even, []
    error = float(saved.std(ddof=1)) / np.sqrt(saved.size)
    # Correlation has shown that the gain exists.
    is_clear = saved.mean() >= max(MIN_COST * before.mean(), MIN_SIGNIFICANCE * error)
    if not is_clear:
        return even, []
    cost, step = float(saved.mean()), float(before.mean())
    observations = (
        observe(
            "micro-batches-vary",
            "forward and backward of a micro-batch vary together: correlation {correlation:.2f} within ranks "
            "and steps, over {micro_batches} micro-batches; forward times vary by {varied_share}",
            correlation=varied.correlation, micro_batches=varied.freedom, varied_share=varied.forward,
        ),
        observe(
            "longest-micro-batch",
            "in a typical step the longest micro-batch takes {times:.1f} times the mean",
            times=varied.longest,
        ),
        observe_replay("equal micro-batches in each step", step - cost, step).then(": all ranks are delayed"),
    )  # fmt: skip
    ranks = tuple(sorted(graph.places))
    sure = round((1 - error / cost) * varied.correlation, 3)
    share = round(cost / step, 4)
    return even, [
        Finding(
            CLASS, "job", BATCHES, ranks, share, sure, cost, observations,
            remedy="distribute sequences by their cost",
        )
    ]  # fmt: skip


def variation_of(graph: Graph) -> MicroBatches | None:
    """Return how micro-batches differ within their steps; None where no step of a rank has two."""
    batches = _batches(graph)
    varied = variation(batches) if batches.height else None
    return varied if varied and varied.freedom else None


def _batches(graph: Graph) -> pl.DataFrame:
    """Return a row per rank, step and micro-batch that has both directions.

    Returns:
        `rank`, `dp`, `stage`, `chunk`, `step`, `batch` (codes), `forward`, `backward` ns (both above 0).
    """
    nodes, names = graph.nodes, [name.lower() for name in graph.names]
    directions = {FORWARD_NAMES: "forward", BACKWARD_NAMES: "backward"}
    direction = {
        code: way for code, name in enumerate(names) for group, way in directions.items() if name in group
    }
    chunk = {code: match[1] for code, name in enumerate(names) if (match := _BATCH.match(name))}
    work = np.flatnonzero(
        (nodes.kind == NodeKind.KERNEL) & (nodes.step >= 0) & np.isin(nodes.around, list(chunk))
    )
    columns = ("rank", "step", "name", "around", "duration")
    frame = pl.DataFrame({name: getattr(nodes, name)[work] for name in columns}).with_columns(
        way=pl.col("name").replace_strict(direction, default=None, return_dtype=pl.String),
        chunk=pl.col("around").replace_strict(chunk, default="", return_dtype=pl.String),
    )
    places = pl.DataFrame(
        [(rank, *place) for rank, place in graph.places.items()],
        schema={"rank": pl.Int64, "dp": pl.Int64, "stage": pl.Int64}, orient="row",
    )  # fmt: skip
    times = {way: pl.col("duration").filter(pl.col("way") == way).sum() for way in directions.values()}
    whole = frame.group_by(*ONE, batch="around").agg(**times).filter(pl.min_horizontal(*times) > 0)
    return whole.join(places, on="rank").sort(*ONE, "batch")


def variation(batches: pl.DataFrame) -> MicroBatches:
    """Return how the micro-batches of a step differ on a rank; times are in units of the rank's mean.

    Steps that take far longer than usual (the first) are left out: a few outliers would decide.

    Args:
        batches: `rank`, `dp`, `chunk`, `step`, `batch`, `forward`, `backward`.
    """
    ways = ("forward", "backward")
    total = pl.col("forward") + pl.col("backward")
    steps = batches.group_by("step").agg(total=total.mean())
    usual = steps.filter(pl.col("total") <= UNUSUAL * pl.col("total").median())
    several = batches.join(usual, on="step", how="semi").filter(pl.len().over(ONE) > 1)
    relative = several.with_columns(pl.col(way) / pl.col(way).mean().over("rank", "chunk") for way in ways)
    left = relative.select(pl.col(way) - pl.col(way).mean().over(ONE) for way in ways)
    forward, backward = (left[way].to_numpy() for way in ways)
    squares = float((forward**2).sum()), float((backward**2).sum())
    correlation = float((forward * backward).sum() / max(np.sqrt(squares[0] * squares[1]), 1e-12))
    # The stages of a pipeline see the same micro-batches.
    distinct = several.select("dp", "chunk", "step", "batch").n_unique()
    freedom = distinct - several.select("dp", "chunk", "step").n_unique()
    freedom_of_ranks = several.height - several.select(ONE).n_unique()
    longest = several.group_by(ONE).agg(longest=total.max() / total.mean())["longest"].median()
    return MicroBatches(
        correlation,
        float(np.sqrt(squares[0] / max(freedom_of_ranks, 1))),
        freedom,
        longest if isinstance(longest, float) else 1.0,
    )


def _with_equal_batches(graph: Graph, batches: pl.DataFrame) -> Ints:
    """Return [N] durations, in ns, with each micro-batch scaled to the mean size of its step.

    A micro-batch's size is its time relative to what its rank usually takes, in the lower median over its
    stages, times the mean size that its data-parallel rank gets.
    """
    total, ranks = pl.col("forward") + pl.col("backward"), ["rank", "chunk"]
    sizes = (
        batches.with_columns(relative=total / total.mean().over(ranks))
        .group_by("dp", "chunk", "step", "batch")
        .agg(pl.col("relative").quantile(0.5, "lower"))
        .join(_mean_sizes(batches), on=["dp", "chunk"])
        .with_columns(size=pl.col("relative") * pl.col("mean_size"))
        .with_columns(factor=pl.col("size").mean().over("chunk", "step") / pl.col("size"))
    )
    sized = batches.join(sizes, on=["dp", "chunk", "step", "batch"])
    factors = sized.select("rank", "step", "batch", "factor")
    nodes = graph.nodes
    works = np.flatnonzero(nodes.kind == NodeKind.KERNEL)
    keys = pl.DataFrame({"rank": nodes.rank[works], "step": nodes.step[works], "batch": nodes.around[works]})
    joined = keys.join(factors, on=["rank", "step", "batch"], how="left", maintain_order="left")
    duration = nodes.duration.copy()
    scaled = duration[works] * joined["factor"].fill_null(1.0).to_numpy()
    duration[works] = np.rint(scaled).astype(np.int64)
    return duration


def _mean_sizes(batches: pl.DataFrame) -> pl.DataFrame:
    """Return the mean size of micro-batches of data-parallel ranks: `dp`, `chunk`, `mean_size` (usually 1).

    A rank's mean time is compared with the lower median of its stage. A slow worker makes one stage of its
    pipeline longer, more data make all stages longer: so the lower median over its stages counts. With a
    single stage, a difference counts as data only if chance may explain it.
    """
    total = pl.col("forward") + pl.col("backward")
    ranks = batches.group_by("rank", "dp", "stage", "chunk").agg(
        mean=total.mean(), error=total.std() / pl.len().sqrt()
    )
    usual = pl.col("mean").quantile(0.5, "lower").over("stage", "chunk")
    ranks = ranks.with_columns(mean_size=pl.col("mean") / usual)
    if batches["stage"].n_unique() == 1:
        drawn = (pl.col("mean") - usual).abs() <= APART * pl.col("error")
        ranks = ranks.with_columns(mean_size=pl.when(drawn).then("mean_size").otherwise(1.0))
    return ranks.group_by("dp", "chunk").agg(pl.col("mean_size").quantile(0.5, "lower"))
