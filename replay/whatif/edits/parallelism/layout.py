"""The same model cut over ranks in another way, on as many of them or on others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.errors import Unanswerable
from dpro.limits import MAX_RANKS
from dpro.replay.graph import Graph, once
from dpro.replay.layouts.layout import gpus_of, in_words
from dpro.replay.layouts.recorded.job import RecordedJob, recorded_job
from dpro.replay.layouts.recorded.ranking import changed_layout
from dpro.replay.timeline import replay, step_ends
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key

KEYS = ("dp", "tp", "pp", "cp", "ep", "vpp", "micro_batch", "micro_batches")


@dataclass(frozen=True)
class ParallelLayout(Edit):
    """Other degrees of data, tensor, pipeline, context and expert parallelism."""

    name = "layout"
    summary = "other degrees of parallelism, on as many ranks or others"
    example = "layout:dp=4,tp=8,pp=2,cp=1,ep=1,vpp=1,micro_batch=1,micro_batches=16"
    needs = "a model of equal layers, and shapes of operators (`dpro record --shapes`)"
    assumes = (
        "layers are equal, products take as many times as long as their sizes and `replay/devices` say, all "
        "collectives are rings on links like the recorded ones, and a pipeline runs one forward and one "
        "backward in turn; what of the step is in neither layers nor collectives stays"
    )
    source = "the run's own layers re-sized, the pipeline replayed: as `dpro plan RUN` (docs/plan.md)"
    effort = "flag"
    dp: int | None = key("ranks that share the batch; as it is without", None, least=1, most=MAX_RANKS)
    tp: int | None = key("ranks that share each layer", None, least=1, most=MAX_RANKS)
    pp: int | None = key("stages of the pipeline", None, least=1, most=MAX_RANKS)
    cp: int | None = key("ranks that share each sequence", None, least=1, most=MAX_RANKS)
    ep: int | None = key("ranks that share the experts", None, least=1, most=MAX_RANKS)
    vpp: int | None = key("chunks of the model on each stage", None, least=1, most=MAX_RANKS)
    micro_batch: int | None = key("sequences of a micro-batch", None, least=1, most=MAX_RANKS)
    micro_batches: int | None = key(
        "micro-batches of a step; as many as there are sequences for", None, least=1, most=65_536
    )
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """None: `dpro plan RUN` ranks all layouts at once."""
        return ()

    def bound(self, facts: RunFacts) -> float:
        return facts.base_ns

    def samples(self, graph: Graph) -> float:
        now, then = _recorded(graph).own, self._found(graph)
        sequences = [
            float((row["dp"] * row["micro_batch"] * row["micro_batches"]).to_numpy()[0])
            for row in (now, then)
        ]
        return sequences[1] / sequences[0]

    def apply(self, graph: Graph) -> Graph:
        """Stretch the steps to what they take in the layout."""
        return _stretched(graph, float(self._found(graph)["step_ms"][0]) / _recorded(graph).step_ms)

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        job, found = _recorded(graph), self._found(graph)
        if found.select(job.own.columns).equals(job.own):
            return ()
        return tuple(_stretched(graph, float(found[end][0]) / job.step_ms) for end in ("low_ms", "high_ms"))

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What the run is, what it becomes, and whether it fits."""
        job, found = _recorded(graph), self._found(graph)
        row = found.row(0, named=True)
        lines = [
            f"{in_words(job.own.row(0, named=True))} now",
            f"{in_words(row)} then, on {int(gpus_of(found)[0])} ranks",
            f"layers, output layer and collectives make up {job.explained:.0%} of the recorded step",
        ]
        times = self.samples(graph)
        if times != 1:
            lines.append(
                f"a step has {times:.3g} times the samples: what that does to the training is not predicted"
            )
        if row["pp"] > 1:
            lines.append(f"stages stand still for {row['bubble']:.1%} of the pipeline's time")
        if job.machine.memory_gb:
            lines.append(
                f"the fullest rank needs {row['memory_gb']:.3g} GB{': ' * bool(row['why'])}{row['why']}"
            )
        return tuple(lines)

    def describe(self) -> str:
        given = {name: getattr(self, name) for name in KEYS}
        return "layout of " + (
            ", ".join(f"{name} {value}" for name, value in given.items() if value) or "now"
        )

    def how(self) -> str:
        return (
            "start the job with these degrees: init_device_mesh(device, (pp, dp, cp, tp)); Megatron-LM's "
            "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size"
        )

    def _found(self, graph: Graph) -> pl.DataFrame:
        """The layout with all that is predicted of it.

        Raises:
            Unanswerable: the run shows no stack of equal layers, or the layout does not divide it or fit.
        """
        columns = (*graph.nodes.columns, graph.edges.lag, graph.messages, graph.run)

        def compute() -> pl.DataFrame:
            return changed_layout(_recorded(graph), self._whole(_recorded(graph)))

        found = once(graph, self, columns, compute)
        if found["fits"][0] == "no":
            raise Unanswerable(f"the layout does not fit: {found['why'][0]}")
        return found

    def _whole(self, job: RecordedJob) -> dict[str, int]:
        """What is given; and as many micro-batches as there are stages, where sequences allow it."""
        given = {name: value for name in KEYS if (value := getattr(self, name)) is not None}
        own = job.own.row(0, named=True)
        if "micro_batches" in given and "micro_batch" in given:
            return given
        sequences, stages = own["micro_batch"] * own["micro_batches"], given.get("pp", own["pp"])
        if "micro_batches" in given or "micro_batch" in given:
            one, other = ("micro_batches", "micro_batch")
            known, open_ = (one, other) if one in given else (other, one)
            if sequences % given[known]:
                raise Unanswerable(f"{known}={given[known]} does not divide {sequences} sequences of a rank")
            return {**given, open_: sequences // given[known]}
        if own["micro_batches"] < stages:
            counts = [count for count in range(stages, sequences + 1) if sequences % count == 0]
            if not counts:
                raise Unanswerable(f"{sequences} sequences of a rank are too few for {stages} stages")
            return {**given, "micro_batches": counts[0], "micro_batch": sequences // counts[0]}
        return given


def _recorded(graph: Graph) -> RecordedJob:
    """The job of a graph, found once."""
    columns = (*graph.nodes.columns, graph.edges.lag, graph.messages, graph.run)
    return once(graph, "recorded job", columns, lambda: recorded_job(graph))


def _stretched(graph: Graph, factor: float) -> Graph:
    """The graph whose steps take this many times as long, each from where the first of its window began."""
    if factor == 1.0:
        return graph
    nodes, edges = graph.nodes, graph.edges
    timeline = replay(graph)
    begins = step_ends(graph, timeline.start, timeline.end).group_by("window").agg(pl.col("begin_ns").min())
    begin = np.zeros(int(nodes.window.max(initial=0)) + 1, np.int64)
    begin[begins["window"].to_numpy()] = begins["begin_ns"].to_numpy()
    inside, since = nodes.step >= 0, begin[np.maximum(nodes.window, 0)]
    late = inside & (nodes.earliest > since)

    def times(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return np.where(chosen, np.rint(values * factor), values).astype(np.int64)

    changed = graph.with_durations(times(nodes.duration, inside))
    changed = changed.with_lags(times(edges.lag, inside[edges.target] & inside[edges.source]))
    earliest = np.where(late, since + times(nodes.earliest - since, late), nodes.earliest)
    earliest.setflags(write=False)
    return dataclasses.replace(changed, nodes=dataclasses.replace(changed.nodes, earliest=earliest))
