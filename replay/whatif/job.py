"""A job that edits change, by its whole graph; `dpro.replay.whatif.condensed` has jobs of condensed ranks.

Takes a graph; returns what predictions, searches and detectors need of a job, so that they are written once:
the job under an edit, its replays, the work of its ranks, and the path that decides when it ends. Its run
keeps the tables that were read, and the facts that edits found, as long as the given graph lives, since one
edit after another reads the same tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Self, TypeVar

import numpy as np
import polars as pl

from dpro.replay.fidelity.overlap import overlapped_before, replays_with_new_overlap
from dpro.replay.graph import GPU_KINDS, Fact, Graph, once
from dpro.replay.kept import tables_written
from dpro.replay.peers import phase_work
from dpro.replay.timeline import PathTo, Timeline, path_within, replay, slowest_pace
from dpro.replay.whatif.edit import Edit, RankChange, refuse_foreign
from dpro.replay.whatif.graph_ops.shared_links import with_shared_links
from dpro.store import Run
from dpro.table import Table


@dataclass(frozen=True)
class KeptRun(Run):
    """A run that keeps the tables that were read from it.

    Attributes:
        whole: tables that were read completely, by name.
        columns: of tables read in part, all columns read so far, by name.
    """

    whole: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)
    columns: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)

    def table(self, table: Table, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Read a table as `Run.table` does, each column once.

        Args:
            columns: those to read, where not all are needed.

        Raises:
            InputError: a part cannot be read.
        """
        if columns is None:
            if table.name not in self.whole:
                self.whole[table.name] = super().table(table)
            return self.whole[table.name]
        columns_read = self.columns.get(table.name)
        missing = [name for name in columns if columns_read is None or name not in columns_read.columns]
        if missing or columns_read is None:
            read = super().table(table, missing).select(missing)
            if columns_read is not None and read.height == columns_read.height:
                read = columns_read.hstack(read)
            elif columns_read is not None:  # a part was added meanwhile
                read = super().table(table, columns)
            self.columns[table.name] = columns_read = read
        return columns_read.select(columns)


def with_kept_tables(graph: Graph) -> Graph:
    """Return the graph with a run that keeps its tables: one run until a table is written again."""
    run = graph.run
    if run is None or isinstance(run, KeptRun):
        return graph

    kept, facts = once(graph, ("kept tables", tables_written(run)), _with_kept_tables)
    return dataclasses.replace(graph, run=kept, facts=facts)


def _with_kept_tables(graph: Graph) -> tuple[KeptRun, dict[Hashable, Fact]]:
    run = graph.run
    assert run is not None
    return KeptRun(**{f.name: getattr(run, f.name) for f in dataclasses.fields(run)}), dict(graph.facts)


T = TypeVar("T")
WHOLE_ONLY = "needs the graph of all ranks at once, which is too large for memory"


@dataclass(frozen=True, eq=False)
class ReplayedJob:
    """A job as it is, or as edits have changed it.

    Attributes:
        by_rank: whether its ranks are condensed.
        graph: the whole graph; of condensed ranks the graph that joins them: all collectives and steps, and
            no other work.
        made: graphs that single edits have made of it, where known already.
    """

    by_rank: ClassVar[bool] = False

    graph: Graph
    made: Mapping[Edit, Graph] = dataclasses.field(default_factory=dict)

    def with_kept_tables(self) -> Self:
        """Return this job with a run that reads each table once."""
        return dataclasses.replace(self, graph=with_kept_tables(self.graph))

    def under(self, edit: Edit, in_full: bool = True) -> Changed[Self]:
        """Return the job under one more edit.

        Args:
            in_full: whether to collect notes and alternatives too, or only the changed job.

        Raises:
            Unanswerable: the run lacks what the edit needs, or the edit needs the graph of all ranks.
        """
        refuse_foreign(edit, self.graph)
        graph = self.graph
        notes = edit.notes(graph) if in_full else ()
        changed = self.made[edit] if edit in self.made else self._edited(edit)

        def limits() -> list[Self]:
            limit = edit.limit(graph)
            return [] if limit is None else [self._with(limit)]

        return Changed(self._with(changed), notes, lambda: map(self._with, edit.bounds(graph)), limits)

    def _edited(self, edit: Edit) -> Graph:
        return edit.apply(self.graph)

    def _with(self, graph: Graph) -> Self:
        """Return the job with another graph, adjusted to how transfers then share links."""
        return dataclasses.replace(self, graph=with_shared_links(self.graph, graph), made={})

    def has_same_nodes(self, after: Self) -> bool:
        """Return whether facts about nodes of this job hold for a job that edits have made of it."""
        return self.graph.has_nodes_of(after.graph)

    def replays(self, after: Self, slowdowns: Sequence[float]) -> Iterator[Timeline]:
        """Return replays of a job that edits have made of this one.

        Args:
            slowdowns: of kernels during communication, as in `Contention`; empty where unknown.

        Yields:
            One for each slowdown; a single one where no kernel overlaps more or less communication than here.
        """
        if not slowdowns or not self.has_same_nodes(after):
            return iter([replay(after.graph)])
        return replays_with_new_overlap(after.graph, overlapped_before(self.graph), slowdowns)

    # For detectors.

    @property
    def work(self) -> pl.DataFrame:
        """`dpro.replay.peers.phase_work` of all ranks."""
        return phase_work(self.graph)

    @property
    def on_gpus(self) -> bool:
        """Whether any rank has work on a GPU."""
        return bool(np.isin(self.graph.nodes.kind, GPU_KINDS).any())

    def map_ranks(self, function: Callable[[Graph], T], ranks: Iterable[int] | None = None) -> list[T]:
        """Apply a function to the graph; of condensed ranks, to the graph of each.

        Args:
            function: processes find it by its name.
            ranks: those to apply it to, where each has its own graph; all where None.
        """
        return [function(self.graph)]

    @property
    def pace_ns(self) -> float:
        """Time per step of the slowest host that never waits for a device, ns; 0 without devices."""
        if not self.on_gpus:
            return 0.0
        return self.once("pace of hosts", lambda job: max(job.map_ranks(slowest_pace), default=0.0))

    def once(self, name: Hashable, compute: Callable[[Self], T], given: tuple[object, ...] = ()) -> T:
        """Return a value that follows from the job, cached as by `dpro.replay.graph.once`."""

        def compute_of(graph: Graph) -> T:
            return compute(dataclasses.replace(self, graph=graph))

        return once(self.graph, name, compute_of, (*self._beside_graph, *given))

    @property
    def _beside_graph(self) -> tuple[object, ...]:
        """What the job follows from beside its graph."""
        return ()

    def graph_of(self, rank: int, timeline: Timeline) -> Graph:
        """Return the graph that shows one rank as it runs beside the others.

        Args:
            timeline: the replay of the job's graph.
        """
        return self.graph

    def with_change(self, change: RankChange) -> Self:
        """Return the job with each rank changed separately.

        Raises:
            Unanswerable: there is nothing to change.
        """
        return dataclasses.replace(self, graph=change.apply(self.graph), made={})

    def beside_changed(self, change: RankChange, ranks: Sequence[int]) -> tuple[Graph, Graph]:
        """Return two graphs of one shape: of the job as it is, and with other durations of work in ranks.

        Args:
            ranks: those that must be changed; others may be.
        """
        return self.graph, change.apply(self.graph)

    def path_to(self, timeline: Timeline) -> PathTo:
        """Return a function that finds the path that decides when nodes of the job's graph end.

        Args:
            timeline: the replay of the graph.
        """
        return path_within(timeline)


J = TypeVar("J", bound=ReplayedJob)


@dataclass(frozen=True)
class Changed(Generic[J]):
    """Result of an edit on a job.

    Attributes:
        notes: findings of the edit about the job before it, a line each.
        ends: returns the jobs at both ends of what the edit leaves open.
        limits: returns jobs that the changed one cannot be faster than; none where unknown.
    """

    job: J
    notes: Sequence[str]
    ends: Callable[[], Iterable[J]]
    limits: Callable[[], Iterable[J]]


def job_of(graph: Graph | ReplayedJob) -> ReplayedJob:
    """Return the job of a whole graph, or the given job."""
    return graph if isinstance(graph, ReplayedJob) else ReplayedJob(graph)
