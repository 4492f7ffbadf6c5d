"""A job by its condensed ranks: each is built, changed and condensed by itself, in any process.

In: a condensed run. Out: a `CondensedJob`, which answers as a `ReplayedJob` does, and refuses edits that look
at the whole graph. Transfers change in the joined graph, other work in each rank.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import NothingToChange, Unanswerable
from dpro.replay.fidelity.by_rank import CondensedRun
from dpro.replay.fidelity.overlap import differs, overlapped_share, settled, slowed
from dpro.replay.graph import EdgeKind, Edges, Graph, MeshPosition, Message, NodeKind
from dpro.replay.peers import with_calls, work_without_calls
from dpro.replay.sharded import (
    TABLES_OF_RANKS,
    BareRank,
    JoinedGraph,
    MapTasks,
    MatchedRank,
    PooledOfRank,
    RankSkeleton,
    RendezvousTimes,
    build_rank,
    inside_of,
    join_skeletons,
    load_rank,
    of_collectives,
    path_through,
    rank_file,
    rendezvous_of,
    replay_inside,
    skeleton_of,
    skeletons_of_both,
    with_own_order,
    with_pooled_lags,
    without_ranks,
)
from dpro.replay.timeline import PathTo, Timeline, replay
from dpro.replay.whatif.edit import Edit, RankChange, refuse_foreign
from dpro.replay.whatif.graph_ops.shared_links import with_shared_links
from dpro.replay.whatif.job import WHOLE_ONLY, Changed, KeptRun, ReplayedJob, T
from dpro.store import Run
from dpro.table import Table

CHANGED, FASTEST = 0, -1  # 1, 2, … are the ends of what an edit leaves open


@dataclass(frozen=True, eq=False, kw_only=True)
class CondensedJob(ReplayedJob):
    """A job by its condensed ranks; `graph` joins them.

    Attributes:
        node: as of `JoinedGraph`.
        condensed: its ranks as they were recorded.
        folder: where ranks are kept meanwhile.
        map_tasks: has the work on ranks done: `map`, or that of an executor whose processes see the folder.
        changes: what was changed inside ranks, in order.
    """

    by_rank: ClassVar[bool] = True

    node: Ints
    run: Run
    condensed: CondensedRun
    folder: Path
    map_tasks: MapTasks
    changes: tuple[RankEdit, ...] = ()

    @property
    def joined(self) -> JoinedGraph:
        """The graph, and which nodes its nodes are."""
        return JoinedGraph(self.graph, self.node)

    @property
    def ranks(self) -> list[int]:
        """All of them, ascending."""
        return self.condensed.matched.ranks

    def under(self, edit: Edit, in_full: bool = True) -> Changed[Self]:
        """As of `ReplayedJob`."""
        refuse_foreign(edit, self.graph)
        within = edit.within_ranks()
        if within is None:
            raise Unanswerable(f"{edit.name} {WHOLE_ONLY}")
        if within.ranks is None:
            return super().under(edit, in_full)
        informed = edit if within.change is None else within.change(self)
        change = RankEdit(informed)
        skeletons = self._condensed_under(change, within.ranks(self.graph), in_full)
        jobs = partial(self._at_end, skeletons, change)
        ends, limits = [end for end in sorted(skeletons) if end > CHANGED], [FASTEST] * (FASTEST in skeletons)
        # The graph that joins ranks shows nothing of their inside to an edit that has not asked them.
        notes = informed.notes(self.graph) if isinstance(informed, Edit) and informed is not edit else ()
        return Changed(jobs(CHANGED), notes, lambda: map(jobs, ends), lambda: map(jobs, limits))

    def _condensed_under(
        self, change: RankEdit, ranks: Iterable[int], in_full: bool
    ) -> dict[int, list[RankSkeleton]]:
        """Skeletons of ranks under one more change, by the end of what it leaves open.

        Raises:
            Unanswerable: it changes none of them.
        """
        skeletons, why = dict[int, list[RankSkeleton]](), Counter[str]()
        for by_end, reason in self.map_tasks(partial(change_rank, change, in_full), self.work_on(ranks)):
            why[reason] += 1
            for end, skeleton in by_end.items():
                skeletons.setdefault(end, []).append(skeleton)
        if CHANGED not in skeletons:
            raise Unanswerable(
                max(why, key=why.__getitem__, default=f"nothing in the run fits {change.edit}")
            )
        return skeletons

    def _at_end(self, skeletons: dict[int, list[RankSkeleton]], change: RankEdit, end: int) -> Self:
        """The job with ranks as they are at one of the ends of what an edit leaves open."""
        job = self._with_ranks(skeletons[end], dataclasses.replace(change, end=end))
        return dataclasses.replace(job, graph=with_shared_links(self.graph, job.graph))

    def _edited(self, edit: Edit) -> Graph:
        changed = edit.apply(self.graph)
        if changed.edges.source.size < self.graph.edges.source.size:  # it takes rendezvous out
            changed = edit.apply(with_own_order(self.graph))
        return changed

    def _with_ranks(self, skeletons: Sequence[RankSkeleton], change: RankEdit) -> Self:
        """The job with ranks that one more change has made other ones."""
        joined, changes = self.with_skeletons(skeletons), (*self.changes, change)
        return dataclasses.replace(self, graph=joined.graph, node=joined.node, changes=changes)

    def with_skeletons(self, skeletons: Sequence[RankSkeleton]) -> JoinedGraph:
        """The joined graph with other skeletons of some ranks."""
        condensed, before = self.condensed, self.graph
        rest = without_ranks(self.joined, [skeleton.rank for skeleton in skeletons])
        joined = join_skeletons([*rest, *skeletons], condensed.matched, condensed.pooled, self.run)
        graph = dataclasses.replace(joined.graph, network=before.network, products=before.products)
        if _taken_out(graph, before).any():
            graph = with_own_order(graph)
            graph = graph.without_edges(_taken_out(graph, before))
        return dataclasses.replace(joined, graph=graph)

    def work_on(self, ranks: Iterable[int]) -> Iterator[RankWork]:
        """What it takes to build ranks of it again."""
        matched, graph = self.condensed.matched, self.graph
        nodes = graph.nodes
        moving = np.flatnonzero(nodes.kind == NodeKind.TRANSFER)
        moving = moving[np.argsort(nodes.rank[moving], kind="stable")]
        rank_of, places = nodes.rank[moving], dict(matched.places)
        for rank in ranks:
            of_rank = moving[slice(*np.searchsorted(rank_of, (rank, rank + 1)))]
            yield RankWork(
                self.run, matched.of(rank), self.condensed.pooled.of(rank), self.folder, matched.messages,
                places, graph.products, self.changes, self.node[of_rank], nodes.duration[of_rank],
            )  # fmt: skip

    def has_same_nodes(self, after: Self) -> bool:
        """As of `ReplayedJob`: edits that would not are refused."""
        return True

    def replays(self, after: Self, slowdowns: Sequence[float]) -> Iterator[Timeline]:
        """As of `ReplayedJob`."""
        timeline = replay(after.graph)
        if slowdowns:
            pairs = zip(self.work_on(self.ranks), after.work_on(self.ranks))
            met = zip(self.rendezvous(replay(self.graph)), after.rendezvous(timeline))
            if any(list(self.map_tasks(changes_overlap, zip(pairs, met)))):
                return (after._settled(timeline, slowdown) for slowdown in slowdowns)
        return iter([timeline])

    def _settled(self, first: Timeline, slowdown: float) -> Timeline:
        """Its replay with kernels as slow as goes with the communication that they then overlap.

        Args:
            first: its replay with kernels as they are.
            slowdown: as of `Contention`.
        """

        def slow(last: Timeline | None) -> Graph | None:
            work = partial(slowed_rank, slowdown, last is None)
            tasks = zip(self.work_on(self.ranks), self.rendezvous(last or first))
            skeletons = [skeleton for skeleton in self.map_tasks(work, tasks) if skeleton is not None]
            return self.with_skeletons(skeletons).graph if skeletons else None

        return settled(int(first.end.max(initial=0)), slow)

    def rendezvous(self, timeline: Timeline) -> Iterator[RendezvousTimes]:
        """The rendezvous of each rank, ascending.

        Args:
            timeline: a replay of it.
        """
        rendezvous, matched = rendezvous_of(timeline), self.condensed.matched
        return (
            of_collectives(rendezvous, matched.of(rank).moved["instance"].to_numpy()) for rank in self.ranks
        )

    @property
    def work(self) -> pl.DataFrame:
        """As of `ReplayedJob`."""
        return with_calls(pl.concat(self.map_ranks(work_without_calls)), self.graph)

    @property
    def on_gpus(self) -> bool:
        """As of `ReplayedJob`."""
        return self.condensed.pooled.on_gpu

    def map_ranks(self, function: Callable[[Graph], T], ranks: Iterable[int] | None = None) -> list[T]:
        """As of `ReplayedJob`."""
        work = self.work_on(self.ranks if ranks is None else ranks)
        return list(self.map_tasks(partial(_result, function), work))

    @property
    def _decide_hosts(self) -> Sequence[object]:
        return (self.changes,)

    def with_change(self, change: RankChange) -> Self:
        """As of `ReplayedJob`."""
        rank_edit = RankEdit(change)
        skeletons = self._condensed_under(rank_edit, self.ranks, in_full=False)
        return self._with_ranks(skeletons[CHANGED], rank_edit)

    def beside_changed(self, change: RankChange, ranks: Sequence[int]) -> tuple[Graph, Graph]:
        """As of `ReplayedJob`."""
        pairs = list(self.map_tasks(partial(_as_is_and_changed, change), self.work_on(ranks)))
        one, other = (self.with_skeletons(skeletons).graph for skeletons in zip(*pairs))
        return one, other

    def path_to(self, timeline: Timeline) -> PathTo:
        """As of `ReplayedJob`."""
        inside = inside_of(timeline, lambda rank: rank_under_edits(next(self.work_on([rank]))))
        return path_through(self.joined, timeline, inside)

    def graph_of(self, rank: int, timeline: Timeline) -> Graph:
        """As of `ReplayedJob`."""
        bare, graph = rank_under_edits(next(self.work_on([rank])))
        return replay_inside(bare, graph, rendezvous_of(timeline)).graph


def _taken_out(graph: Graph, before: Graph) -> Bools:
    """[E] edges at rendezvous that another graph of the job has not."""
    there = _members(before)[before.edges.kind == EdgeKind.RENDEZVOUS]
    missing: Bools = (graph.edges.kind == EdgeKind.RENDEZVOUS) & ~np.isin(_members(graph), there)
    return missing


def _members(graph: Graph) -> Ints:
    """[E] which member of which collective comes to its rendezvous over an edge, or leaves it."""
    nodes, edges = graph.nodes, graph.edges
    leaves = nodes.kind[edges.source] == NodeKind.RENDEZVOUS
    of = np.where(leaves, edges.target, edges.source)
    member: Ints = 2 * (nodes.collective[of] * (int(nodes.rank.max(initial=0)) + 1) + nodes.rank[of]) + leaves
    return member


# One rank, in any process: built again, changed, condensed again. Where it meets other ranks, an edge of its
# own from arrival to transfer stands for the rendezvous: an edit that takes that away takes it out of the
# collective.


@dataclass(frozen=True)
class RankEdit:
    """What an edit makes of a rank.

    Attributes:
        edit: the edit, or what follows from it.
        end: the changed job, one of the ends of what the edit leaves open, or what it cannot be faster than.
    """

    edit: RankChange
    end: int = CHANGED

    def of(self, graph: Graph) -> Graph:
        """The graph of a rank as it is then, itself where it stays as it is.

        Raises:
            Unanswerable: the run lacks what the edit needs.
        """
        try:
            return self.made(graph) if self.end == CHANGED else self.ends(graph).get(self.end, graph)
        except NothingToChange:
            return graph

    def made(self, graph: Graph) -> Graph:
        """What the edit makes of a rank.

        Raises:
            NothingToChange: it stays as it is.
            Unanswerable: the run lacks what the edit needs.
        """
        changed = self.edit.apply(graph)
        if changed.num_nodes != graph.num_nodes:
            raise Unanswerable(f"{self.edit} {WHOLE_ONLY}")
        return changed

    def ends(self, graph: Graph) -> dict[int, Graph]:
        """The ends of what an edit leaves open, and what it cannot be faster than; none of other changes."""
        edit, graphs = self.edit, dict[int, Graph]()
        if not isinstance(edit, Edit):
            return graphs
        with suppress(NothingToChange):
            graphs |= dict(enumerate(edit.bounds(graph), CHANGED + 1))
        with suppress(NothingToChange):
            least = edit.limit(graph)
            graphs |= {} if least is None else {FASTEST: least}
        return graphs


@dataclass(frozen=True)
class RankWork:
    """What a process has to know to build a rank again as a job has it.

    Attributes:
        matched: what the rank needs of it.
        pooled: over all ranks.
        folder: where it is kept once it was built.
        messages: kinds of communication.
        places: of all ranks.
        products: measured matrix products.
        changes: what was changed inside ranks, in order.
        transfers: [K] its transfers, and
        lasting: [K] ns that they take.
    """

    run: Run
    matched: MatchedRank
    pooled: PooledOfRank
    folder: Path
    messages: tuple[Message, ...]
    places: dict[int, MeshPosition]
    products: pl.DataFrame | None
    changes: tuple[RankEdit, ...]
    transfers: Ints
    lasting: Ints


def rank_under_edits(work: RankWork) -> tuple[BareRank, Graph]:
    """A rank without lags, and its graph as the job has it.

    Of collectives that edits have taken it out of, it has instance -1. Where there are edits,
    the graph has edges `with_rendezvous`.
    """
    file = rank_file(work.folder, work.matched.rank)
    if not file.exists():
        build_rank(work.run, work.matched, work.folder)
    bare = load_rank(file)
    graph = dataclasses.replace(
        with_pooled_lags(bare, work.pooled),
        messages=work.messages,
        places=work.places,
        run=tables_of(work.run, work.matched),
        products=work.products,
    )
    if work.changes:
        graph = with_rendezvous(graph, bare)
        for change in work.changes:
            graph = change.of(graph)
        bare = with_memberships(bare, graph)
    duration = graph.nodes.duration.copy()
    duration[work.transfers] = work.lasting
    return bare, graph.with_durations(duration)


def with_rendezvous(graph: Graph, bare: BareRank) -> Graph:
    """A rank's graph with an edge for each rendezvous, from its arrival to its transfer."""
    edges, count = graph.edges, bare.instance.size
    place = graph.indptr[bare.transfer + 1]
    zero = np.zeros(count, np.int64)
    columns = {
        "source": bare.arrive,
        "target": bare.transfer,
        "lag": zero,
        "kind": np.full(count, EdgeKind.RENDEZVOUS, np.int64),
        "inferred": zero != 0,
    }
    met = Edges(**{name: np.insert(getattr(edges, name), place, new) for name, new in columns.items()})
    more = np.bincount(bare.transfer, minlength=graph.num_nodes)
    return dataclasses.replace(graph, edges=met, indptr=graph.indptr + np.append(0, np.cumsum(more)))


def with_memberships(bare: BareRank, graph: Graph) -> BareRank:
    """A rank without lags, with instance -1 for collectives that edits have taken the rank out of."""
    waits = np.zeros(graph.num_nodes, np.bool_)
    waits[graph.edges.target[graph.edges.kind == EdgeKind.RENDEZVOUS]] = True
    return dataclasses.replace(bare, instance=np.where(waits[bare.transfer], bare.instance, -1))


def change_rank(change: RankEdit, with_ends: bool, work: RankWork) -> tuple[dict[int, RankSkeleton], str]:
    """Condense a rank under one more edit.

    Args:
        with_ends: whether the ends of what the edit leaves open are asked for, too.
        work: the rank without it.

    Returns:
        Skeletons of the rank in the changed job and at the ends, where it is another one; and why it is none
        in the changed job.
    """
    bare, graph = rank_under_edits(work)
    if not work.changes:
        graph = with_rendezvous(graph, bare)
    made, why = dict[int, Graph](), ""
    try:
        made[change.end] = change.made(graph)
    except NothingToChange as error:
        why = str(error)
    if with_ends:
        made |= change.ends(graph)
    skeletons = {
        end: skeleton_of(work.matched.rank, with_memberships(bare, changed), changed)
        for end, changed in made.items()
    }
    return skeletons, why


def _result(function: Callable[[Graph], T], work: RankWork) -> T:
    return function(rank_under_edits(work)[1])


def _as_is_and_changed(change: RankChange, work: RankWork) -> tuple[RankSkeleton, RankSkeleton]:
    bare, graph = rank_under_edits(work)
    return skeletons_of_both(work.matched.rank, bare, graph, change.apply(graph).nodes.duration)


def changes_overlap(task: tuple[tuple[RankWork, RankWork], tuple[RendezvousTimes, RendezvousTimes]]) -> bool:
    """Whether kernels of a rank overlap communication otherwise in the changed job; keeps how they did."""
    (before, after), met = task
    (bare, old), (_, new) = rank_under_edits(before), rank_under_edits(after)
    one, other = _overlap(bare, old, met[0]), _overlap(bare, new, met[1])
    np.save(_file(before, "before"), one)
    return bool(differs(one, other).any())


def slowed_rank(
    slowdown: float, is_first: bool, task: tuple[RankWork, RendezvousTimes]
) -> RankSkeleton | None:
    """Condense a rank with kernels as slow as goes with what they overlap; None where that is as it was.

    Args:
        is_first: whether it starts from the changed rank, and not from where the round before ended.
    """
    work, met = task
    bare, graph = rank_under_edits(work)
    before, kept = np.load(_file(work, "before")), _file(work, f"slowed-{slowdown:g}")
    now = _overlap(bare, graph if is_first else graph.with_durations(np.load(kept)), met)
    duration: Any = slowed(graph.nodes.duration, before, now, slowdown)
    np.save(kept, duration)
    if not differs(before, now).any():
        return None
    return skeleton_of(work.matched.rank, bare, graph.with_durations(duration))


def _overlap(bare: BareRank, graph: Graph, met: RendezvousTimes) -> Floats:
    """[N] `overlapped_share` of a rank that is replayed by itself."""
    timeline = replay_inside(bare, graph, met)
    return overlapped_share(timeline.graph, timeline.start, timeline.end)


def _file(work: RankWork, what: str) -> Path:
    return work.folder / f"rank{work.matched.rank:05d}-{what}.npy"


# A run as one of its ranks sees it: of tables that every rank has rows of, its own alone.


@dataclass(frozen=True)
class RankTables(KeptRun):
    """The tables of one rank, each read once.

    Attributes:
        matched: the rank, with the files that hold its rows.
    """

    matched: MatchedRank | None = None

    def table(self, table: Table, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """As `Run.table`, with the rank's rows alone of tables that every rank has rows of.

        Args:
            columns: those to read, where not all are needed.

        Raises:
            InputError: a part cannot be read.
        """
        if self.matched is None or table not in TABLES_OF_RANKS:
            return super().table(table, columns)
        wanted = table.columns if columns is None else columns
        read = super().table(table, None if columns is None else list(dict.fromkeys([*columns, "rank"])))
        return read.filter(pl.col("rank") == self.matched.rank).select(list(wanted))

    def parts(self, table: Table) -> list[Path]:
        """The files that hold the rank's rows of a table."""
        return super().parts(table) if self.matched is None else list(self.matched.parts.get(table.name, ()))


def tables_of(run: Run, matched: MatchedRank) -> RankTables:
    """A run as one of its ranks sees it."""
    return RankTables(run.path, run.manifest, run.source, matched=matched)
