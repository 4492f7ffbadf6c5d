"""Let each micro-batch skip some stages of the pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.graph import Graph
from dpro.replay.pipeline.schedules import HALF, looped, partial, paths_of, table_of
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.parallelism.pipeline import PipelineShape, computes, shape_of, slowness
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.rebuilt import Wanted, rebuild


@dataclass(frozen=True)
class Skip(Edit):
    """A partial pipeline: stages are skipped in turn, each by as many micro-batches."""

    name = "skip"
    summary = "each micro-batch skips some stages of the pipeline, in turn"
    example = "skip:share=0.25"
    needs = "a trace of whole operations with four stages or more, of one chunk each"
    assumes = (
        "a stage passes on what it was given where a micro-batch skips the next, messages are never in each "
        "other's way, and only the first and the last stage cannot be skipped"
    )
    source = "SkipPipe (arXiv 2502.19913): paths that share stages evenly and do not collide, replayed"
    of_operations = True
    proof = "one of four stages skipped in turn: sleeping layers, gloo"
    effort = "code"
    training = "a sample teaches fewer layers at a time: what that does to the loss is not known from a run"
    share: float = key("of the stages that each micro-batch skips, rounded", least=0.0, most=1.0)
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """A quarter of the stages, or one."""
        shape = _shape(computes(facts.graph))
        return [cls(max(0.25, round(1 / shape.stages, 3)))]

    def bound(self, facts: RunFacts) -> float:
        """All but the work of the first stage, which no micro-batch skips."""
        rows = computes(facts.graph).filter(pl.col("stage") == 0)
        per_rank = rows.group_by("step", "rank").agg(pl.col("ns").sum())
        slowest = per_rank.group_by("step").agg(pl.col("ns").max())["ns"]
        return max(facts.base_ns - float(slowest.to_numpy().min()), 0.0)

    def apply(self, graph: Graph) -> Graph:
        """Take out the work that is skipped, and put the rest in the order that follows."""
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
            graph, rows, slowness(graph), Wanted(table_of(orders, looped), HALF, lambda work: work)
        )

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Which micro-batches skip which stages."""
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
        return f"micro-batches that skip {self.share:.0%} of the stages"

    def how(self) -> str:
        return "send past the stages that a micro-batch skips (paths: see notes), as SkipPipe does"


def _shape(rows: pl.DataFrame) -> PipelineShape:
    shape = shape_of(rows)
    if shape.stages < 4 or shape.chunks > 1:
        raise Unanswerable(
            f"{shape.stages} stages of {shape.chunks} chunks: skipping in turn needs four of one chunk each"
        )
    return shape
