"""Uneven micro-batches in a job of whole operations: forward and backward of each vary together.

In: the graph of such a run, without launch delays. Out: the same job with equal micro-batches, and a finding
of `imbalance.data`. A micro-batch with longer sequences takes longer forward and backward, and on every stage
that it passes: what varies so is its data, and what varies on one stage alone is not. The criterion, a
correlation of at least 0.9, is that of "Understanding Stragglers in Large Model Training Using What-if
Analysis" (Lin et al., OSDI 2025). Runs of one micro-batch per step cannot show it.
"""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.detect.findings import Finding
from dpro.detect.imbalance.load_model import CLASS
from dpro.detect.significance import MIN_COST, MIN_LATEST
from dpro.documents import DocumentPart
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.pipeline.operations import BACKWARD_NAMES, FORWARD_NAMES
from dpro.replay.timeline import changed_step_times, replay, step_ends, step_lengths
from dpro.units import format_duration

BATCHES = "the micro-batches"
MIN_CORRELATION = 0.9
MIN_VARIATION = 0.05  # of forward, standard deviation over mean: clocks of GPUs vary both directions by less
MIN_SIGNIFICANCE = 3.0  # standard errors of what it costs
APART = (
    4.0  # standard errors by which a rank's mean micro-batch has to differ to be the rank's, not its data's
)
MIN_FREEDOM = 20  # micro-batches beyond the first of each step: fewer do not show a correlation
UNUSUAL = 1.5  # times the median step
_BATCH = re.compile(r"(.*)micro-batch \d+$")
ONE = ["rank", "chunk", "step"]  # within which micro-batches are compared


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
    """The job with equal micro-batches in each step, and what that would save; as it is where they are.

    Where they differ at no clear cost (a slow worker is waited for anyway) there is no finding, but what else
    is slow shows better with equal ones.

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
    even = graph.with_durations(_evened(graph, _batches(graph)))
    before, after = _steps_before_and_after(graph, even)
    saved = before - after
    if before.size < MIN_LATEST or not _costs(saved, before):
        return even, []
    cost, step = float(saved.mean()), float(before.mean())
    evidence = (
        f"forward and backward of a micro-batch vary together: correlation {varied.correlation:.2f} within "
        f"ranks and steps, over {varied.freedom} micro-batches; forward times vary by {varied.forward:.0%}",
        f"in a typical step the longest micro-batch takes {varied.longest:.1f} times the mean",
        f"replayed with equal micro-batches in each step, the step takes {format_duration(step - cost)} "
        f"instead of {format_duration(step)}; no rank is at fault: distribute sequences by their cost",
    )
    ranks = tuple(sorted(graph.places))
    error = float(saved.std(ddof=1)) / np.sqrt(saved.size) / cost
    sure = round((1 - error) * varied.correlation, 3)
    return even, [Finding(CLASS, "job", BATCHES, ranks, round(cost / step, 4), sure, cost, evidence)]


def _steps_before_and_after(graph: Graph, changed: Graph) -> tuple[Ints, Ints]:
    """[S] ns, how long each step takes in a graph, and [S] ns in a changed one."""
    before, after = replay(graph), replay(changed)
    baseline = step_ends(graph, before.start, before.end)
    steps = changed_step_times(baseline, changed, after.end)
    return step_lengths(baseline), steps["duration_ns"].to_numpy()


def variation_of(graph: Graph) -> MicroBatches | None:
    """How micro-batches differ within their steps; None where no step of a rank has two."""
    batches = _batches(graph)
    varied = variation(batches) if batches.height else None
    return varied if varied and varied.freedom else None


def _costs(saved: Ints, base: Ints) -> bool:
    """Whether the mean gain is worth a finding, and clear: that there is one, the correlation has shown."""
    error = float(saved.std(ddof=1)) / np.sqrt(saved.size)
    return bool(saved.mean() >= max(MIN_COST * base.mean(), MIN_SIGNIFICANCE * error))


def _batches(graph: Graph) -> pl.DataFrame:
    """A row per rank, step and micro-batch that has both directions.

    Returns:
        `rank`, `dp`, `stage`, `chunk`, `step`, `batch` (codes), `forward`, `backward` ns (both above 0).
    """
    nodes, names = graph.nodes, [name.lower() for name in graph.names]
    directions = {FORWARD_NAMES: "forward", BACKWARD_NAMES: "backward"}
    direction = {
        code: way for code, name in enumerate(names) for known, way in directions.items() if name in known
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
    both = frame.group_by(*ONE, batch="around").agg(**times).filter(pl.min_horizontal(*times) > 0)
    return both.join(places, on="rank").sort(*ONE, "batch")


def variation(batches: pl.DataFrame) -> MicroBatches:
    """How the micro-batches of a step differ on a rank; times are in units of the rank's mean.

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
    own = several.height - several.select(ONE).n_unique()
    longest = several.group_by(ONE).agg(longest=total.max() / total.mean())["longest"].median()
    return MicroBatches(
        correlation,
        float(np.sqrt(squares[0] / max(own, 1))),
        freedom,
        longest if isinstance(longest, float) else 1.0,
    )


def _evened(graph: Graph, batches: pl.DataFrame) -> Ints:
    """[N] ns, durations with each micro-batch scaled to the mean size of its step.

    A micro-batch's size is its time in units of what its rank usually takes, in the (lower) middle of the
    stages that it passes, times the mean size that its data-parallel rank gets.
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
    known = batches.join(sizes, on=["dp", "chunk", "step", "batch"])
    factors = known.select("rank", "step", "batch", "factor")
    nodes = graph.nodes
    works = np.flatnonzero(nodes.kind == NodeKind.KERNEL)
    keys = pl.DataFrame({"rank": nodes.rank[works], "step": nodes.step[works], "batch": nodes.around[works]})
    joined = keys.join(factors, on=["rank", "step", "batch"], how="left", maintain_order="left")
    duration = nodes.duration.copy()
    scaled = duration[works] * joined["factor"].fill_null(1.0).to_numpy()
    duration[works] = np.rint(scaled).astype(np.int64)
    return duration


def _mean_sizes(batches: pl.DataFrame) -> pl.DataFrame:
    """The mean size of micro-batches of each data-parallel rank: `dp`, `chunk`, `mean_size` (1 is usual).

    What a rank takes in the mean is compared with its stage's, of which one in the lower middle is usual. A
    slow worker makes one stage of its pipeline longer, more data make all: the (lower) middle of them counts.
    With a single stage it is attributed to data as far as chance explains it.
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
