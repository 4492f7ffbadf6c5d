"""What the views ask of a run, each thing worked out once and kept: tables, graph, replay, findings.

In: an opened run, and how the command line finds its graph and what is wrong with it. Out: a `Loaded`.
Requests come from several threads at once; the first that asks for something works it out while the others
wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import polars as pl

from dpro.dashboards.segments import Tracks, make_tracks
from dpro.detect.findings import Finding
from dpro.detect.hang.find import Case, examine
from dpro.detect.hang.records import read_records
from dpro.errors import DproError
from dpro.export.slices import slices
from dpro.replay.accuracy import Trust
from dpro.replay.breakdown import collective_totals, step_breakdown
from dpro.replay.build import Built
from dpro.replay.costs import Line, Sort, fit_costs
from dpro.replay.host import host_facts
from dpro.replay.timeline import Timeline, replay, step_ends
from dpro.replay.whatif.predict import Prediction, Refusal, baseline_steps
from dpro.replay.whatif.search import search
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS, WORKERS
from dpro.store import Run
from dpro.units import NS_PER_MS

T = TypeVar("T")
Graph = tuple[Built, Trust]
Verdict = tuple[list[Finding], list[str]]


class once(Generic[T]):  # noqa: N801, used like `property`
    """A property that is worked out once, whoever asks and however many at a time; so is its failure."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        """Remember how it is worked out."""
        self._work, self.__doc__ = work, work.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        """Told by Python under which name it is a property."""
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once[T]: ...

    @overload
    def __get__(self, instance: Loaded, owner: type) -> T: ...

    def __get__(self, instance: Loaded | None, owner: type) -> Any:
        """The value.

        Raises:
            DproError: as when it was worked out.
        """
        if instance is None:
            return self
        with instance.lock_of(self._name):
            if self._name not in instance.known:
                try:
                    instance.known[self._name] = self._work(instance)
                except DproError as error:
                    instance.known[self._name] = error
        value = instance.known[self._name]
        if isinstance(value, DproError):
            raise value
        return value


class Loaded:
    """A run and what has been worked out of it so far."""

    def __init__(self, run: Run, graph: Callable[[Run], Graph], verdict: Callable[[Loaded], Verdict]) -> None:
        """Nothing is read yet.

        Args:
            run: the run.
            graph: finds or builds its graph, and judges how far to believe it.
            verdict: finds what is wrong.
        """
        self.run = run
        self._find_graph, self._find_verdict = graph, verdict
        self.known: dict[str, Any] = {}
        self._locks: dict[str, threading.RLock] = {}
        self._lock = threading.Lock()

    def lock_of(self, name: str) -> threading.RLock:
        """Held while that is worked out."""
        with self._lock:
            return self._locks.setdefault(name, threading.RLock())

    def warm(self) -> None:
        """Work out what takes long, in the order in which it is likely to be asked for."""
        for name in ("graph", "verdict", "search", "tracks", "breakdown"):
            try:
                getattr(self, name)
            except DproError:
                continue  # said by the view that asks for it

    @once
    def steps(self) -> pl.DataFrame:
        """Table `steps`."""
        return self.run.table(STEPS)

    @once
    def spans(self) -> pl.DataFrame:
        """Table `spans`."""
        return self.run.table(SPANS)

    @once
    def collectives(self) -> pl.DataFrame:
        """Table `collectives`."""
        return self.run.table(COLLECTIVES)

    @once
    def counters(self) -> pl.DataFrame:
        """Table `counters`."""
        return self.run.table(COUNTERS)

    @once
    def workers(self) -> pl.DataFrame:
        """Table `workers`."""
        return self.run.table(WORKERS)

    @once
    def waiting(self) -> Case:
        """Who had come how far, and who waits for whom."""
        return examine(read_records(self.run))

    @once
    def graph(self) -> Graph:
        """The graph, and how far to believe it."""
        return self._find_graph(self.run)

    @property
    def built(self) -> Built:
        """The graph and what it rests on."""
        return self.graph[0]

    @property
    def trust(self) -> Trust:
        """How far to believe its replay."""
        return self.graph[1]

    @once
    def timeline(self) -> Timeline:
        """The replay of the unchanged graph, without waits that only look like late launches."""
        return replay(self.built.predictive)

    @once
    def tracks(self) -> Tracks:
        """What there is to draw of it."""
        return make_tracks(slices(self.timeline), self.timeline.graph.origin_ns)

    @once
    def step_extents(self) -> pl.DataFrame:
        """When each step began and ended, as measured: `window`, `step`, `begin_ms`, `end_ms`."""
        graph = self.timeline.graph
        ends = step_ends(graph, graph.nodes.measured_start, graph.nodes.measured_end)
        before = pl.col("finish_ns").shift(1).over("window").fill_null(pl.col("begin_ns"))
        ms = {"begin_ms": before / NS_PER_MS, "end_ms": pl.col("finish_ns") / NS_PER_MS}
        return ends.select("window", "step", **ms)

    @once
    def verdict(self) -> Verdict:
        """What is wrong, costliest first, and what the run cannot show."""
        return self._find_verdict(self)

    @once
    def breakdown(self) -> pl.DataFrame:
        """Where the time of each step and rank went."""
        return step_breakdown(self.spans, self.collectives, self.steps)

    @once
    def host(self) -> pl.DataFrame:
        """What the host did in each step."""
        return host_facts(self.steps, self.counters)

    @once
    def sizes(self) -> pl.DataFrame:
        """Collectives by operation and size."""
        return collective_totals(self.collectives, self.spans)

    @once
    def costs(self) -> dict[Sort, Line]:
        """What communication costs, as fitted."""
        return fit_costs(self.built.graph)

    @once
    def clocks(self) -> tuple[dict[str, int], int]:
        """By how many ns the clock of each host is ahead of the timeline's, and when that begins.

        Without a graph no clock is known to be off, and time begins with the first step or sample.
        """
        try:
            built = self.built
        except DproError:
            starts = [self.steps["start_ns"].min(), self.counters["time_ns"].min()]
            return {}, min((start for start in starts if isinstance(start, int)), default=0)
        ahead: dict[str, int] = {}
        aligned = {rank for rank, _ in built.alignment.clocks}
        for rank, host in self.workers.sort("rank").select("rank", "host").iter_rows():
            if rank in aligned:
                ahead.setdefault(host, built.alignment.of(rank).line.offset_ns)
        return ahead, built.graph.origin_ns

    @once
    def baseline(self) -> pl.DataFrame:
        """When the steps of the unchanged graph end."""
        return baseline_steps(self.built.predictive)

    @once
    def search(self) -> tuple[list[Prediction], list[Refusal]]:
        """What would help, largest gain first."""
        return search(self.built.predictive, self.trust)
