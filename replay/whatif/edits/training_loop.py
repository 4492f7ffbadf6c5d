"""Edits of the training loop around the model: its input, ready or from more workers, and its garbage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Floats, Ints
from dpro.errors import NothingToChange, Unanswerable
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.hosts import hosts_of
from dpro.replay.pipeline.dependencies import GARBAGE_COLLECTION
from dpro.replay.timeline import replayed, step_times
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.selected_work import first_work, scaled
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.aside import collecting, held_ns
from dpro.replay.whatif.graph_ops.scope import DATA_LOADING
from dpro.replay.whatif.graph_ops.selected import NodeSelection, fitting
from dpro.replay.whatif.rankwise import RankwiseEdit
from dpro.schema import COUNTERS
from dpro.units import NS_PER_MS, format_duration

IN_PROCESS = "enumerate(DataLoader)#_SingleProcess*"
NO_PAUSES = "no deep window has a garbage collection of 1 ms or more"
MAX_WORKERS = 16  # of each rank, at most tried
MIN_WAIT = 0.05  # of a step: shorter waits neither show that workers cannot keep up, nor matter
FETCHING_NS = 1_000_000  # time limit of taking a ready batch out of the workers' queue


@dataclass(frozen=True)
class HideInput(RankwiseEdit):
    """The training loop never waits for its input."""

    name = "hide-input"
    of_torch = True
    summary = "never wait for the DataLoader"
    example = "hide-input"
    needs = "the DataLoader annotation, recorded by torch.profiler and dpro"
    assumes = "there are free cores for workers, and the data source keeps up"
    source = "zero time in the DataLoader's `__next__`"
    proof = "slower input, gloo"
    effort = "line"
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        loading_of(facts.graph)
        return [cls()]

    def bound(self, facts: RunFacts) -> float:
        return facts.on_path(NodeSelection(within=DATA_LOADING).mask(facts.graph))

    def apply(self, graph: Graph) -> Graph:
        """Make the time inside the DataLoader's `__next__` free."""
        return graph.with_durations(scaled(graph, loading_of(graph), 0.0))

    def describe(self) -> str:
        return "the input is ready when the step asks for it"

    def how(self) -> str:
        return "DataLoader(num_workers=N, prefetch_factor=…) with enough workers"


@dataclass(frozen=True)
class Workers(Edit):
    """Each rank's DataLoader has this many worker processes; 0 loads in the training process."""

    name = "workers"
    of_torch = True
    summary = "set the number of DataLoader workers"
    example = "workers:count=4"
    needs = "the loading time of a batch, which shows without workers, or with workers that cannot keep up"
    assumes = (
        "each worker has its share of the data source and, where cores were not sampled, a core; passing a "
        "batch on costs nothing"
    )
    source = (
        "step = max(step without input wait, time per batch / workers, step x share of time in which the "
        "cores work now), for workers as a queue"
    )
    proof = "0 to 1, 2 and 4 workers, CPU"
    effort = "flag"
    count: int = key("workers per rank", least=0)
    doubt: float = 0.25

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return edits to one worker, and to the fewest that hide a batch behind the step."""
        graph = facts.graph
        loading = loading_of(graph) & (graph.nodes.step >= 0)
        if not loading.any():
            raise Unanswerable("no complete step in the run: record at least two steps")
        ranks, steps = (np.unique(column[loading]) for column in (graph.nodes.rank, graph.nodes.step))
        now = _per_step(graph, loading, ranks, steps.size)
        batch, rest = _batch_and_rest(graph, loading, now)
        least = np.maximum(rest, busy_share(graph) * (now + rest))
        enough = int(np.ceil(batch / np.maximum(least, 1.0) - MIN_WAIT).max())
        return [cls(count) for count in sorted({1, min(max(enough, 1), MAX_WORKERS)})]

    def bound(self, facts: RunFacts) -> float:
        return facts.on_path(NodeSelection(within=DATA_LOADING).mask(facts.graph))

    def apply(self, graph: Graph) -> Graph:
        """Scale each rank's time in `__next__` to its expected wait."""
        loading = loading_of(graph) & (graph.nodes.step >= 0)
        if not loading.any():
            raise Unanswerable("no complete step in the run: record at least two steps")
        ranks, steps = (np.unique(column[loading]) for column in (graph.nodes.rank, graph.nodes.step))
        now = _per_step(graph, loading, ranks, steps.size)
        batch, rest = _batch_and_rest(graph, loading, now)
        least = np.maximum(rest, busy_share(graph) * (now + rest))
        wait = batch if self.count == 0 else np.maximum(least, batch / self.count) - rest
        factor = np.ones(int(ranks.max()) + 1)
        factor[ranks] = np.where(now > 0, wait / np.maximum(now, 1.0), 1.0)
        return graph.with_durations(scaled(graph, loading, factor[graph.nodes.rank[loading]]))

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Warn of hosts with fewer cores than workers."""
        return tuple(
            f"{host.ranks * self.count:,} workers on host {host.name or '?'}, which has {host.cores:g} cores"
            + (
                ": unless they mostly wait for data, expect no more than from "
                f"{max(int(host.cores // host.ranks), 1)} per rank"
                if host.busy is None
                else f": {host.busy:.0%} of their time is already used"
            )
            for host in hosts_of(graph)
            if host.ranks * self.count > host.cores
        )

    def describe(self) -> str:
        return (
            f"{self.count} DataLoader worker{'s' * (self.count > 1)} per rank"
            if self.count
            else "the training process loads its data"
        )

    def how(self) -> str:
        return f"DataLoader(num_workers={self.count}, persistent_workers={self.count > 0})"


def busy_share(graph: Graph) -> float:
    """Return the share of their time that the busiest host's cores work; 0 where it was not sampled.

    With enough workers, a step still takes this share of its time: the cores then work all the time.
    """
    return max((host.busy or 0.0 for host in hosts_of(graph)), default=0.0)


def loading_of(graph: Graph) -> NDArray[np.bool_]:
    """Return [N] a mask of nodes within a DataLoader's `__next__`.

    Raises:
        Unanswerable: there is none.
    """
    loading = NodeSelection(within=DATA_LOADING).mask(graph)
    if not loading.any():
        raise NothingToChange(
            "the run has no DataLoader: no span is inside PyTorch's range enumerate(DataLoader)"
        )
    return loading


def fetched_ready(graph: Graph) -> NDArray[np.bool_]:
    """Return [N] a mask of nodes in which a rank fetches batches that its DataLoader's workers have ready.

    Ranks that wait for slow workers, longer than fetching takes, are left out.
    """
    loading = NodeSelection(within=DATA_LOADING).mask(graph)
    in_process = fitting(graph.names, IN_PROCESS)[graph.nodes.around[loading]]
    if not loading.any() or in_process.any():
        return np.zeros(graph.num_nodes, np.bool_)
    ranks, steps = (np.unique(column[loading]) for column in (graph.nodes.rank, graph.nodes.step))
    waits = _per_step(graph, loading, ranks, steps.size) > max(FETCHING_NS, MIN_WAIT * _mean_step(graph))
    return loading & ~np.isin(graph.nodes.rank, ranks[waits])


def _per_step(graph: Graph, loading: NDArray[np.bool_], ranks: NDArray[np.int64], num_steps: int) -> Floats:
    """Return [R] ns per step of each rank in its DataLoader."""
    total = np.bincount(
        graph.nodes.rank[loading], graph.nodes.duration[loading], minlength=int(ranks.max()) + 1
    )
    return total[ranks] / num_steps


def _mean_step(graph: Graph) -> float:
    timeline = replayed(graph)
    return float(step_times(graph, timeline.start, timeline.end)["duration_ns"].to_numpy().mean())


def _batch_and_rest(graph: Graph, loading: NDArray[np.bool_], now: Floats) -> tuple[Floats, Floats]:
    """Return [R] ns that one process needs for a step's batches, and [R] ns of a step without waiting.

    Without workers, the former is the time in `__next__`, and the latter the replayed step without loading.
    Workers that are always awaited are always busy: each needs as many steps as there are workers for a
    batch.
    """
    around = graph.nodes.around[loading]
    if fitting(graph.names, IN_PROCESS)[around].all():
        return now, np.full(now.size, _mean_step(HideInput().apply(graph)))
    workers = _num_workers(graph)
    step = _mean_step(graph)
    if workers == 0 or float(now.max()) < MIN_WAIT * step:
        raise Unanswerable(
            "the DataLoader has workers, and their time per batch is unknown: record some steps with "
            "num_workers=0, or steps in which the loop waits for them"
        )
    return np.where(now >= MIN_WAIT * step, workers * step, 0.0), step - now


def _num_workers(graph: Graph) -> int:
    """Return the number of a rank's DataLoader workers, by those that were awaited; 0 where unknown."""
    if graph.run is None:
        return 0
    waits = graph.run.table(COUNTERS, ["counter", "device"]).filter(pl.col("counter") == "data_wait_ns")
    numbers = [re.search(r"worker (\d+)", device) for device in waits["device"].unique().to_list()]
    return max((int(number[1]) + 1 for number in numbers if number), default=0)


@dataclass(frozen=True)
class Garbage(Edit):
    """Python's garbage collector does not run by itself; planned, it runs at one step on all ranks."""

    name = "gc"
    summary = "turn off automatic garbage collection, or collect at the same step on all ranks"
    example = "gc:every=100"
    needs = "pauses of 1 ms or more in deep windows recorded by `dpro record`, or operations named gc"
    assumes = (
        "a planned collection takes as long as the longest recorded one, and memory suffices "
        "between collections"
    )
    source = "planned garbage collection, as in Lin et al., OSDI 2025"
    proof = "a GPT that creates 10,000 objects per step, CPU"
    effort = "line"
    every: int = key("steps between collections; 0 means never", 0, least=0)
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        if not paused_ns(facts.graph).any():
            raise Unanswerable(NO_PAUSES + _collection_in_all_steps(facts.graph))
        return [cls(100)]

    def bound(self, facts: RunFacts) -> float:
        return facts.on_path(paused_ns(facts.graph).astype(np.float64))

    def apply(self, graph: Graph) -> Graph:
        """Remove the pauses from the CPU work around them, and add the planned ones evenly."""
        paused = paused_ns(graph)
        if not paused.any():
            raise Unanswerable(NO_PAUSES + _collection_in_all_steps(graph))
        duration = graph.nodes.duration - paused
        if self.every:
            ranks = graph.ranks
            noted = [end - begin for _, begin, end in collecting(graph)]
            duration[first_work(graph, ranks)] += round(
                float(max(noted, default=int(paused.max(initial=0)))) / self.every
            )
        return graph.with_durations(duration)

    def describe(self) -> str:
        return (
            f"garbage is collected every {self.every} steps on all ranks"
            if self.every
            else "no garbage collection"
        )

    def how(self) -> str:
        if self.every:
            return f"gc.disable(), and gc.collect() after every {self.every} steps on all ranks"
        return "gc.disable() or gc.freeze() after setup, if the loop creates no reference cycles"


def paused_ns(graph: Graph) -> Ints:
    """Return [N] ns of each node's time spent on garbage collection, as recorded or as an operation."""
    nodes, paused = graph.nodes, held_ns(graph, collecting(graph))
    if GARBAGE_COLLECTION in graph.names:
        named = (nodes.name == graph.names.index(GARBAGE_COLLECTION)) & (nodes.kind == NodeKind.KERNEL)
        paused[named] = nodes.duration[named]
    return paused


def _collection_in_all_steps(graph: Graph) -> str:
    """Word the time of garbage collection over all steps, where it was counted."""
    if graph.run is None:
        return ""
    counted = graph.run.table(COUNTERS, ["counter", "value"]).filter(pl.col("counter") == "step_gc_ns")[
        "value"
    ]
    mean = counted.mean()
    if not isinstance(mean, float):
        return ": `dpro record` records them"
    share = f"in all recorded steps it takes {format_duration(mean)} per step"
    return (
        f"; {share}: record more or longer windows (--every, --window-steps)"
        if mean > NS_PER_MS / 100
        else f"; {share}"
    )
