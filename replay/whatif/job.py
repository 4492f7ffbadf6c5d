"""A job that edits change, by its whole graph; `dpro.replay.whatif.condensed` has those of condensed ranks.

In: a graph. Out: what predictions, searches and detectors ask of a job, so that they are written once: the
job under an edit, its replays, what its ranks hold, and what decides when it ends. Its run keeps the tables
that were read of it, and what edits found out, as long as the given graph lives: edits ask the same tables
for what nodes do not hold, one after another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import polars as pl

from dpro.replay.fidelity.overlap import overlapped_before, replays_with_new_overlap
from dpro.replay.graph import GPU_KINDS, Graph, once
from dpro.replay.kept import tables_written
from dpro.replay.pace import slowest_pace
from dpro.replay.peers import phase_work
from dpro.replay.timeline import PathTo, Timeline, path_within, replay
from dpro.replay.whatif.edit import Edit, RankChange, refuse_foreign
from dpro.replay.whatif.graph_ops.shared_links import with_shared_links
from dpro.store import Run
from dpro.table import Table


@dataclass(frozen=True)
class KeptRun(Run):
    """A run that keeps the tables that were read of it.

    Attributes:
        whole: tables that were read as a whole, by name.
        columns: of tables of which some columns were read, all of these, by name.
    """

    whole: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)
    columns: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)

    def table(self, table: Table, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """As `Run.table`, each column read once.

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
    """The graph, of a run that keeps its tables: the same one until a table is written again."""
    run = graph.run
    if run is None or isinstance(run, KeptRun):
        return graph

    def begin() -> tuple[KeptRun, dict[Hashable, tuple[Sequence[object], Any]]]:
        of_run = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
        return KeptRun(**of_run), dict(graph.facts)

    kept, facts = once(graph, ("kept tables", tables_written(run)), (run,), begin)
    return dataclasses.replace(graph, run=kept, facts=facts)


T = TypeVar("T")
WHOLE_ONLY = "needs the graph of all ranks at once, which is too large to be held"


@dataclass(frozen=True, eq=False)
class ReplayedJob:
    """A job as it is, or as edits have changed it.

    Attributes:
        by_rank: whether its ranks are condensed.
        graph: the whole graph; of condensed ranks that which joins them: all collectives and steps, and no
            other work.
        made: graphs that single edits have made of it, where they are at hand.
    """

    by_rank: ClassVar[bool] = False

    graph: Graph
    made: Mapping[Edit, Graph] = dataclasses.field(default_factory=dict)

    def with_kept_tables(self) -> Self:
        """The same job, each table of whose run is read once."""
        return dataclasses.replace(self, graph=with_kept_tables(self.graph))

    def under(self, edit: Edit, in_full: bool = True) -> Changed[Self]:
        """The job under one more edit.

        Args:
            in_full: whether all there is to say of it is asked for, or only the job.

        Raises:
            Unanswerable: the run lacks what the edit needs, or the job is not held in the way that it needs.
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
        """The job with another graph, in which transfers share links as they then meet on them."""
        return dataclasses.replace(self, graph=with_shared_links(self.graph, graph), made={})

    def has_same_nodes(self, after: Self) -> bool:
        """Whether what is known of nodes of this job holds for a job that edits have made of it."""
        return self.graph.has_nodes_of(after.graph)

    def replays(self, after: Self, slowdowns: Sequence[float]) -> Iterator[Timeline]:
        """Replays of a job that edits have made of this one.

        Args:
            slowdowns: of kernels during communication, as of `Contention`; none where that is not known.

        Yields:
            One for each slowdown; a single one where no kernel overlaps more or less communication than here.
        """
        if not slowdowns or not self.has_same_nodes(after):
            return iter([replay(after.graph)])
        return replays_with_new_overlap(after.graph, overlapped_before(self.graph), slowdowns)

    # What detectors ask.

    @property
    def work(self) -> pl.DataFrame:
        """`dpro.replay.peers.phase_work` of all ranks."""
        return phase_work(self.graph)

    @property
    def on_gpus(self) -> bool:
        """Whether any rank has work on a GPU."""
        return bool(np.isin(self.graph.nodes.kind, GPU_KINDS).any())

    def map_ranks(self, function: Callable[[Graph], T], ranks: Iterable[int] | None = None) -> list[T]:
        """What a function returns of the graph; of condensed ranks, of the graph of each.

        Args:
            function: processes find it by its name.
            ranks: those that are asked where each has a graph of its own; all where None.
        """
        return [function(self.graph)]

    @property
    def pace_ns(self) -> float:
        """Ns per step that the slowest host needs if it never waits for a device; 0 without devices."""
        if not self.on_gpus:
            return 0.0
        return once(self.graph, "pace of hosts", self._decide_hosts, self._slowest_pace)

    @property
    def _decide_hosts(self) -> Sequence[object]:
        """What the pace of hosts depends on, for `once`."""
        nodes, edges = self.graph.nodes, self.graph.edges
        return nodes.duration, nodes.earliest, *edges.columns

    def _slowest_pace(self) -> float:
        return max(self.map_ranks(slowest_pace), default=0.0)

    def graph_of(self, rank: int, timeline: Timeline) -> Graph:
        """The graph that shows one rank as it runs beside the others.

        Args:
            timeline: the replay of its graph.
        """
        return self.graph

    def with_change(self, change: RankChange) -> Self:
        """The job with a change of each rank by itself.

        Raises:
            Unanswerable: there is nothing that it changes.
        """
        return dataclasses.replace(self, graph=change.apply(self.graph), made={})

    def beside_changed(self, change: RankChange, ranks: Sequence[int]) -> tuple[Graph, Graph]:
        """Two graphs of one shape: of the job as it is, and with ranks changed in how long they work.

        Args:
            ranks: those that have to be changed; others may be.
        """
        return self.graph, change.apply(self.graph)

    def path_to(self, timeline: Timeline) -> PathTo:
        """How to find what decides when nodes of its graph end.

        Args:
            timeline: the replay of the graph.
        """
        return path_within(timeline)


J = TypeVar("J", bound=ReplayedJob)


@dataclass(frozen=True)
class Changed(Generic[J]):
    """What an edit makes of a job.

    Attributes:
        notes: what the edit found in the job before it, a line each.
        ends: returns the jobs at both ends of what the edit leaves open.
        limits: returns what the changed job cannot be faster than; nothing where that is not known.
    """

    job: J
    notes: Sequence[str]
    ends: Callable[[], Iterable[J]]
    limits: Callable[[], Iterable[J]]


def job_of(graph: Graph | ReplayedJob) -> ReplayedJob:
    """A job, which may be given by its whole graph."""
    return graph if isinstance(graph, ReplayedJob) else ReplayedJob(graph)
