"""Change how a training loop gets its input: always ready, or loaded by so many workers."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.graph import Graph
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.scale import Scale, scaled
from dpro.replay.whatif.select import Selection, fitting
from dpro.schema import COUNTERS

Floats = NDArray[np.float64]

DATA_LOADING = "enumerate(DataLoader)*"
IN_PROCESS = "enumerate(DataLoader)#_SingleProcess*"
LEAST_WAIT = 0.05  # of a step: a loop that waits less does not show that its workers cannot keep up


@dataclass(frozen=True)
class HideInput(Edit):
    """The training loop never waits for its input."""

    name = "hide-input"
    summary = "the step never waits for its DataLoader"
    example = "hide-input"
    needs = "the DataLoader's annotation, which torch.profiler and dpro record"
    assumes = "there are free cores for the workers and a source that can keep up"
    source = "time inside the DataLoader's `__next__` of 0"
    proof = "slower input, gloo"
    doubt: float = 0.1

    def apply(self, graph: Graph) -> Graph:
        """Make the time inside the DataLoader's `__next__` free."""
        return Scale(Selection(within=DATA_LOADING), 0.0).apply(graph)

    def describe(self) -> str:
        """What is changed."""
        return "the input is ready when the step asks for it"

    def how(self) -> str:
        """How to do it."""
        return "DataLoader(num_workers=N, prefetch_factor=…, pin_memory=True) with enough workers"


@dataclass(frozen=True)
class Workers(Edit):
    """Each rank's DataLoader has so many worker processes; 0 loads in the training process."""

    name = "workers"
    summary = "the DataLoader has so many workers"
    example = "workers:count=4"
    needs = (
        "a DataLoader without workers, whose `__next__` shows what a batch takes, or one whose workers "
        "cannot keep up, which tells it, too"
    )
    assumes = "each worker has a core and its share of the source, and handing a batch over costs nothing"
    source = (
        "wait per step = max(0, time of a batch / workers - step with its input ready): workers are a queue"
    )
    proof = "0 to 1, 2 and 4 workers, CPU"
    count: int = key("how many workers each rank has", least=0)
    doubt: float = 0.25

    def apply(self, graph: Graph) -> Graph:
        """Scale each rank's time in `__next__` to what it would wait."""
        loading = Selection(within=DATA_LOADING).chosen(graph) & (graph.nodes.step >= 0)
        if not loading.any():
            raise Unanswerable("no whole step in the run: record at least two steps")
        ranks, steps = (np.unique(column[loading]) for column in (graph.nodes.rank, graph.nodes.step))
        now = _per_step(graph, loading, ranks, steps.size)
        batch, beside = _batch_and_rest(graph, loading, now)
        wait = batch if self.count == 0 else np.maximum(0.0, batch / self.count - beside)
        factor = np.ones(int(ranks.max()) + 1)
        factor[ranks] = np.where(now > 0, wait / np.maximum(now, 1.0), 1.0)
        return graph.with_durations(scaled(graph, loading, factor[graph.nodes.rank[loading]]))

    def describe(self) -> str:
        """What is changed."""
        return (
            f"{self.count} DataLoader worker{'s' * (self.count > 1)} per rank"
            if self.count
            else "the training process loads its data"
        )

    def how(self) -> str:
        """How to do it."""
        return f"DataLoader(num_workers={self.count}, persistent_workers={self.count > 0}, pin_memory=True)"


def _per_step(graph: Graph, loading: NDArray[np.bool_], ranks: NDArray[np.int64], num_steps: int) -> Floats:
    """[R] ns per step that each rank spends in its DataLoader."""
    total = np.bincount(
        graph.nodes.rank[loading], graph.nodes.duration[loading], minlength=int(ranks.max()) + 1
    )
    return total[ranks] / num_steps


def _mean_step(graph: Graph) -> float:
    timeline = replay(graph)
    return float(step_times(graph, timeline.start, timeline.end)["duration_ns"].to_numpy().mean())


def _batch_and_rest(graph: Graph, loading: NDArray[np.bool_], now: Floats) -> tuple[Floats, Floats]:
    """[R] ns that one process of each rank needs for a step's batches, and what of a step is not waiting.

    Without workers the former is the time in `__next__`, and a loop that need not load has the step that
    replay tells. Workers that are always waited for are always busy: each needs the steps of all of them for
    its own.
    """
    around = graph.nodes.around[loading]
    if fitting(graph.names, IN_PROCESS)[around].all():
        return now, np.full(now.size, _mean_step(HideInput().apply(graph)))
    workers = _num_workers(graph)
    step = _mean_step(graph)
    if workers == 0 or float(now.max()) < LEAST_WAIT * step:
        raise Unanswerable(
            "the DataLoader has workers, and what a batch takes them cannot be told: record some steps with "
            "num_workers=0, or steps in which the loop waits for them"
        )
    return np.where(now >= LEAST_WAIT * step, workers * step, 0.0), step - now


def _num_workers(graph: Graph) -> int:
    """How many DataLoader workers a rank has, by the numbers of those that were waited for; 0 unknown."""
    if graph.run is None:
        return 0
    waits = graph.run.table(COUNTERS, ["counter", "device"]).filter(pl.col("counter") == "data_wait_ns")
    numbers = [re.search(r"worker (\d+)", device) for device in waits["device"].unique().to_list()]
    return max((int(found[1]) + 1 for found in numbers if found), default=0)
