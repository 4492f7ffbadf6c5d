"""Edits of the stages of a pipeline: layers that move between them, or micro-batches that skip some of them.

Layers move to where the user wants, or to where the stages are balanced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable, UsageError
from dpro.extensions.plan.edits.pipeline import PipelineShape, shape_of, share_of_weights
from dpro.extensions.plan.rebuilt import (
    RebuildPlan,
    message_counts,
    rebuild,
    recorded_orders,
    recorded_place,
    recorded_work,
)
from dpro.extensions.plan.schedules import (
    HALF,
    branched,
    branched_table,
    looped,
    partial,
    paths_of,
    table_of,
)
from dpro.replay.cost.memory import peaks_of, total_bytes_of
from dpro.replay.graph import Graph
from dpro.replay.pipeline.operations import BACKWARD, FORWARD, LAYERS_FLAGS
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.balance import computes, slowness
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.words import whole_number

GB = 1e9


@dataclass(frozen=True)
class StageLayers(Edit):
    """Other numbers of layers on the stages, in the recorded order of work."""

    name = "stages"
    of_torch = True
    summary = "change the number of layers per pipeline stage, or run branches side by side"
    example = "stages:layers=9/8/8/7,now=8/8/8/8"
    needs = "an operation-level trace with more than one stage, and the number of layers per stage"
    assumes = (
        "layers of a stage take equally long, the extra time of the first and last stage (embedding, "
        "loss) stays there, and messages have the same size at every layer"
    )
    source = (
        "contiguous partition of the run's own times, exact by dynamic programming (PipeDream, SOSP 2019); "
        "branches side by side as GraphPipe (ASPLOS 2025)"
    )
    of_operations = True
    proof = "2/2/2/2 and 3/2/2/1 layers, and two branches: sleeping layers, gloo"
    effort = "code"
    layers: str = key("layers of each stage, such as 9/8/8/7; default: balanced by layer times", "")
    now: str = key("layers of each stage as recorded; default: equal numbers", "")
    branches: str = key("stages of each branch to run side by side, such as 1-2/3", "")
    memory_gb: float | None = key("memory per rank in 1e9 bytes, if not recorded", None, least=0.0)
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return balanced stages, where the run records the number of layers."""
        shape = shape_of(computes(facts.graph))
        now = _layers_of_command(facts.graph, shape)
        return [cls(now="/".join(map(str, now.tolist())))]

    def bound(self, facts: RunFacts) -> float:
        """Return how much longer the step is than with equal work on all stages."""
        rows = computes(facts.graph)
        even = rows.join(slowness(facts.graph), on=["rank", "kind"], how="left")
        work = even.group_by("step").agg(even=(pl.col("ns") / pl.col("slowness")).sum())["even"]
        return max(facts.base_ns - float(work.to_numpy().min()) / rows["rank"].n_unique(), 0.0)

    def apply(self, graph: Graph) -> Graph:
        """Give each stage the work of its layers, wherever they were before."""
        return self._made(graph, ends_stay=True)

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Return the graph if the extra time of the model's ends is that of slower layers, which move."""
        return (self._made(graph, ends_stay=False),) if shape_of(computes(graph)).stages > 2 else ()

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report the layers of each stage, and the limits of their memory."""
        rows = computes(graph)
        if self._moves_none:
            return ()
        now, layers = self._layers(graph, rows)
        line = f"layers of stages: {_text(now)} now, {_text(layers)} then"
        most = self._most(graph, rows, now)
        if most is None:
            return (line, "memory was not recorded and is ignored here: record with `--memory`")
        return (line, f"there is memory for {_text(np.minimum(most, now.sum()))} layers")

    def _made(self, graph: Graph, ends_stay: bool) -> Graph:
        rows = computes(graph)
        if self._moves_none:
            now = layers = np.ones(shape_of(rows).stages, np.int64)
        else:
            now, layers = self._layers(graph, rows)
        if (now == layers).all() and not self.branches:
            return graph

        def resized(work: Floats) -> Floats:
            return regrouped(work, now, layers, ends_stay)

        if self.branches:
            shape, branches = shape_of(rows), self._branches(graph, rows)
            table = branched_table(branched(shape.stages, shape.batches, branches), branches)
        else:
            table = table_of(recorded_orders(rows), recorded_place(rows))
        return rebuild(
            graph, rows, slowness(graph), RebuildPlan(table, share_of_weights(rows) or HALF, resized)
        )

    @property
    def _moves_none(self) -> bool:
        return bool(self.branches) and not (self.layers or self.now)

    def _branches(self, graph: Graph, rows: pl.DataFrame) -> list[range]:
        """Return the stages of each branch; raise if branches exchanged messages."""
        shape, branches = shape_of(rows), _ranges(self.branches)
        ends = [branch.stop for branch in branches]
        begins = [branch.start for branch in branches]
        if shape.chunks > 1 or len(ends) < 2 or begins[1:] != ends[:-1] or ends[-1] >= shape.stages:
            raise UsageError(
                f"stages: branches={self.branches} must be two or more, of stages in a row before the last "
                f"of {shape.stages}, of one chunk each"
            )
        messages = message_counts(graph, rows)
        if messages is None:
            raise Unanswerable(
                "no messages between stages were recorded: dependencies between branches are unknown"
            )
        for (one, other), count in sorted(messages.items()):
            membership = [[stage in branch for branch in branches] for stage in (one, other)]
            if any(membership[0]) and any(membership[1]) and membership[0] != membership[1]:
                raise Unanswerable(
                    f"stages {one} and {other} exchanged {count} messages: they need each other"
                )
        return branches

    def _layers(self, graph: Graph, rows: pl.DataFrame) -> tuple[Ints, Ints]:
        """Return [places] layers as recorded, and as wanted."""
        shape = shape_of(rows)
        wanted = _numbers(self.layers, "layers", shape)
        now = _numbers(self.now, "now", shape)
        if now is None:
            now = _layers_of_command(graph, shape) if wanted is None else _evenly(int(wanted.sum()), shape)
        if wanted is None:
            wanted = self._balanced(graph, rows, now)
        elif wanted.sum() != now.sum():
            raise UsageError(
                f"stages: {wanted.sum()} layers are not {now.sum()}: give the present layers with now="
            )
        most = self._most(graph, rows, now)
        if most is not None and (wanted > most).any():
            stage = int(np.argmax(wanted > most))
            raise Unanswerable(
                f"stage {stage % shape.stages} has memory for {most[stage]} layers, not for {wanted[stage]}: "
                f"each is assumed to take as much as its present ones"
            )
        return now, wanted

    def _balanced(self, graph: Graph, rows: pl.DataFrame, now: Ints) -> Ints:
        """Balance layers by the median work of micro-batches, forward and backward."""
        mean = rows.group_by("step", "dp", maintain_order=True)
        works = [sum(recorded_work(of_step, kind)[0] for kind in (FORWARD, BACKWARD)) for _, of_step in mean]
        typical = np.median(np.concatenate(works, axis=1), axis=1, keepdims=True)
        layer_ns, ends_ns = layer_times(typical, now)
        fixed = np.zeros(now.size)
        fixed[[0, -1]] = ends_ns[:, 0]
        most = self._most(graph, rows, now)
        return balanced(layer_ns[:, 0], fixed, np.full(now.size, now.sum()) if most is None else most)

    def _most(self, graph: Graph, rows: pl.DataFrame, now: Ints) -> Ints | None:
        """Return [places] layers that each stage has memory for; None where that is not known.

        All memory that a rank had allocated counts as that of its layers.
        """
        try:
            peaks = peaks_of(graph.run)
        except Unanswerable:
            if self.memory_gb is not None:
                raise
            return None
        limit = self.memory_gb * GB if self.memory_gb is not None else total_bytes_of(graph.run)
        held = rows.select("stage", "rank", "place").unique().iter_rows()
        if limit is None or not set(rows["rank"].to_list()) <= peaks.keys():
            return None
        most = np.full(now.size, now.sum())
        for stage, rank, place in held:
            of_stage = rows.filter(pl.col("stage") == stage)["place"].unique().to_numpy()
            more = limit / max(peaks[rank], 1)  # factor on what it has
            most[place] = min(most[place], int(more * now[of_stage].sum() / of_stage.size))
        return most

    def describe(self) -> str:
        if self._moves_none:
            return f"stages {self.branches} side by side"
        return f"stages of {self.layers} layers" if self.layers else "stages with balanced numbers of layers"

    def how(self) -> str:
        return (
            "build each PipelineStage from these layers; Megatron-core: "
            "--pipeline-model-parallel-layout, or --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers"
        )


def _ranges(text: str) -> list[range]:
    """Parse the stages of each branch from a text such as 1-2/3."""
    branches = []
    for part in text.split("/"):
        begin, _, end = part.partition("-")
        first, last = whole_number(begin), whole_number(end or begin)
        if not 0 <= first <= last:
            raise UsageError(f"stages: branches must be stages such as 1-2/3, not {text!r}")
        branches.append(range(first, last + 1))
    return branches


def _text(layers: Ints) -> str:
    return "/".join(map(str, layers.tolist()))


def _numbers(text: str, name: str, shape: PipelineShape) -> Ints | None:
    """Parse [places] numbers from a text such as 8/8/7; None if it is empty."""
    if not text:
        return None
    parts = text.split("/")
    if any(whole_number(part) <= 0 for part in parts):
        raise UsageError(f"stages: {name} must be whole numbers such as 8/8/7, not {text!r}")
    if len(parts) != shape.stages * shape.chunks:
        raise UsageError(
            f"stages: {name} has {len(parts)} numbers for {shape.stages} stages of {shape.chunks} chunks"
        )
    return np.array(parts, np.int64)


def _evenly(layers: int, shape: PipelineShape) -> Ints:
    places = shape.stages * shape.chunks
    if layers % places:
        raise UsageError(f"stages: {layers} layers cannot be divided evenly over {places} places: give now=")
    return np.full(places, layers // places)


def _layers_of_command(graph: Graph, shape: PipelineShape) -> Ints:
    """Return [places] equal numbers of layers, from the command of the job."""
    command = graph.run.manifest.command if graph.run else []
    for flag, value in pairwise(part for word in command for part in word.split("=", 1)):
        if flag in LAYERS_FLAGS and whole_number(value) >= 0:
            return _evenly(whole_number(value), shape)
    raise Unanswerable("the layers per stage were not recorded: give now=, such as now=8/8/8/8")


# Layers in a row, divided over the stages of a pipeline so that the slowest is as fast as possible.


def balanced(layers: Floats, fixed: Floats, most: Ints) -> Ints:
    """Return [P] layers of each stage, with the least work of the slowest, then the least sum of squares.

    Args:
        layers: [N] ns of each layer, in the order of the model.
        fixed: [P] ns of other work on each stage.
        most: [P] layers that each has memory for.

    Raises:
        Unanswerable: the layers do not fit, or are fewer than the stages.
    """
    until = np.concatenate([[0.0], np.cumsum(layers)])
    count = layers.size
    ends = np.arange(count + 1)
    slowest = np.where(ends == 0, 0.0, np.inf)
    squares = slowest.copy()
    begins = np.zeros((fixed.size, count + 1), np.int64)
    for stage, fixed_ns in enumerate(fixed.tolist()):
        first, last = ends[:, None], ends[None, :]
        fits = (last > first) & (last - first <= most[stage])
        work = np.where(fits, until[None, :] - until[:, None] + fixed_ns, np.inf)
        worst = np.maximum(slowest[:, None], work)
        total = np.where(np.isfinite(worst), squares[:, None] + work**2, np.inf)
        best = worst.min(axis=0)
        begins[stage] = np.argmin(np.where(worst == best, total, np.inf), axis=0)
        slowest, squares = best, total[begins[stage], ends]
    if not np.isfinite(slowest[count]):
        raise Unanswerable(
            f"{count} layers do not fit on {fixed.size} stages that have memory for "
            f"{', '.join(map(str, np.minimum(most, count).tolist()))} of them"
        )
    cuts = [count]
    for stage in reversed(range(fixed.size)):
        cuts.append(int(begins[stage, cuts[-1]]))
    ends = np.array(cuts[::-1], np.int64)
    return ends[1:] - ends[:-1]


def layer_times(work: Floats, now: Ints, ends_stay: bool = True) -> tuple[Floats, Floats]:
    """Return the time of each layer, by the work of places, and the other work of the ends: [N, M], [2, M].

    Of three or more places, the difference of the first and the last from the median of the others per layer
    is embedding and loss, not layers; a negative one stays there too, as the first layer may have no gradient
    of its input.

    Args:
        work: [P, M] of each place and micro-batch.
        now: [P] layers of each place.
        ends_stay: whether there is such work; if not, layers of the ends are slower.
    """
    layer_ns: Floats = work / now[:, None]
    inner = np.median(layer_ns[1:-1], axis=0) if len(work) > 2 else layer_ns.max(axis=0)
    ends_ns: Floats = (layer_ns[[0, -1]] - inner) * now[[0, -1], None]
    if not ends_stay or len(work) < 3:
        ends_ns = np.zeros_like(ends_ns)
    layer_ns[[0, -1]] -= ends_ns / now[[0, -1], None]
    times: Floats = np.repeat(layer_ns, now, axis=0)
    return times, ends_ns


def regrouped(work: Floats, now: Ints, layers: Ints, ends_stay: bool = True) -> Floats:
    """Return [P, M] the work of places after layers have moved between them.

    Args:
        work: [P, M] of each place and micro-batch.
        now: [P] layers of each place.
        layers: [P] layers that each gets.
        ends_stay: as in `layer_times`.
    """
    if (now == layers).all():
        return work
    layer_ns, ends_ns = layer_times(work, now, ends_stay)
    stage_ns: Floats = np.add.reduceat(layer_ns, np.cumsum(layers) - layers, axis=0)
    stage_ns[[0, -1]] = np.maximum(stage_ns[[0, -1]] + ends_ns, 0.0)
    return stage_ns


@dataclass(frozen=True)
class Skip(Edit):
    """A partial pipeline: stages are skipped in turn, each by an equal number of micro-batches."""

    name = "skip"
    summary = "let each micro-batch skip some pipeline stages, in turn"
    example = "skip:share=0.25"
    needs = "an operation-level trace with at least four stages of one chunk each"
    assumes = (
        "a stage forwards its output past the stage that a micro-batch skips, messages never compete, "
        "and only the first and last stage cannot be skipped"
    )
    source = "SkipPipe (arXiv 2502.19913): replay of paths that share stages evenly and do not collide"
    of_operations = True
    proof = "one of four stages skipped in turn: sleeping layers, gloo"
    effort = "code"
    training = "each sample trains fewer layers; a run does not show the effect on the loss"
    share: float = key("share of stages that each micro-batch skips, rounded", least=0.0, most=1.0)
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return the edit that skips a quarter of the stages, or one."""
        shape = _shape(computes(facts.graph))
        return [cls(max(0.25, round(1 / shape.stages, 3)))]

    def bound(self, facts: RunFacts) -> float:
        """Return all but the work of the first stage, which no micro-batch skips.

        Raises:
            Unanswerable: the first stage is not recorded.
        """
        rows = computes(facts.graph).filter(pl.col("stage") == 0)
        if rows.is_empty():
            raise Unanswerable("no work of the pipeline's first stage is recorded")
        per_rank = rows.group_by("step", "rank").agg(pl.col("ns").sum())
        slowest = per_rank.group_by("step").agg(pl.col("ns").max())["ns"]
        return max(facts.base_ns - float(slowest.to_numpy().min()), 0.0)

    def apply(self, graph: Graph) -> Graph:
        """Remove the skipped work, and reorder the rest accordingly."""
        rows = computes(graph)
        shape = _shape(rows)
        skipped = self._skipped(shape)
        if not skipped:
            return graph
        orders = partial(shape.stages, shape.batches, skipped)
        if not all(orders):
            raise Unanswerable(
                f"{shape.batches} micro-batches are too few: a stage would be left without work"
            )
        return rebuild(
            graph, rows, slowness(graph), RebuildPlan(table_of(orders, looped), HALF, lambda work: work)
        )

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report which micro-batches skip which stages."""
        shape = _shape(computes(graph))
        skipped = self._skipped(shape)
        everywhere = range(shape.stages)
        by_path: dict[tuple[int, ...], list[int]] = {}
        for batch, path in enumerate(paths_of(shape.stages, shape.batches, skipped)):
            by_path.setdefault(tuple(stage for stage in everywhere if stage not in path), []).append(batch)
        count = Counter({stages: len(batches) for stages, batches in by_path.items()})
        lines = [
            f"stages {', '.join(map(str, stages)) or 'none'} are skipped by {count[stages]} micro-batches of "
            f"{shape.batches}: {', '.join(map(str, batches[:8]))}{' …' if len(batches) > 8 else ''}"
            for stages, batches in sorted(by_path.items())
        ]
        return (f"each micro-batch skips {skipped} of {shape.stages} stages", *lines[:8])

    def _skipped(self, shape: PipelineShape) -> int:
        count = round(self.share * shape.stages)
        if count > shape.stages - 3:
            raise Unanswerable(
                f"{count} of {shape.stages} stages cannot be skipped in turn: the first and the last hold "
                f"embedding and loss"
            )
        return count

    def describe(self) -> str:
        return f"micro-batches skip {self.share:.0%} of the stages"

    def how(self) -> str:
        return "send past the skipped stages (see notes for the paths), as SkipPipe does"


def _shape(rows: pl.DataFrame) -> PipelineShape:
    shape = shape_of(rows)
    if shape.stages < 4 or shape.chunks > 1:
        raise Unanswerable(
            f"{shape.stages} stages of {shape.chunks} chunks: skipping in turn needs four of one chunk each"
        )
    return shape
