"""A job of condensed ranks: each is built, changed and condensed separately, in any process.

Takes a condensed run; returns a `CondensedJob`, which answers as a `ReplayedJob` does, and refuses edits that
need the whole graph. Transfers change in the joined graph, other work in each rank.
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
    """A job of condensed ranks; `graph` joins them.

    Attributes:
        node: as in `JoinedGraph`.
        condensed: its ranks as they were recorded.
        folder: where ranks are kept meanwhile.
        map_tasks: runs the work on ranks: `map`, or that of an executor whose processes see the folder.
        changes: made inside ranks, in order.
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
        """The graph, with the original node of each of its nodes."""
        return JoinedGraph(self.graph, self.node)

    @property
    def ranks(self) -> list[int]:
        """All ranks, ascending."""
        return self.condensed.matched.ranks

    def under(self, edit: Edit, in_full: bool = True) -> Changed[Self]:
        """Return the job under one more edit, as `ReplayedJob.under`."""
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
        # The joined graph shows nothing inside ranks to an edit that has not read them.
        notes = informed.notes(self.graph) if isinstance(informed, Edit) and informed is not edit else ()
        return Changed(jobs(CHANGED), notes, lambda: map(jobs, ends), lambda: map(jobs, limits))

    def _condensed_under(
        self, change: RankEdit, ranks: Iterable[int], in_full: bool
    ) -> dict[int, list[RankSkeleton]]:
        """Return skeletons of ranks under one more change, by the end of what it leaves open.

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
        """Return the job with ranks at one of the ends of what an edit leaves open."""
        job = self._with_ranks(skeletons[end], dataclasses.replace(change, end=end))
        return dataclasses.replace(job, graph=with_shared_links(self.graph, job.graph))

    def _edited(self, edit: Edit) -> Graph:
        changed = edit.apply(self.graph)
        if changed.edges.source.size < self.graph.edges.source.size:  # it removes rendezvous
            changed = edit.apply(with_own_order(self.graph))
        return changed

    def _with_ranks(self, skeletons: Sequence[RankSkeleton], change: RankEdit) -> Self:
        """Return the job with the ranks that one more change has altered."""
        joined, changes = self.with_skeletons(skeletons), (*self.changes, change)
        return dataclasses.replace(self, graph=joined.graph, node=joined.node, changes=changes)

    def with_skeletons(self, skeletons: Sequence[RankSkeleton]) -> JoinedGraph:
        """Return the joined graph with other skeletons of some ranks."""
        condensed, before = self.condensed, self.graph
        rest = without_ranks(self.joined, [skeleton.rank for skeleton in skeletons])
        joined = join_skeletons([*rest, *skeletons], condensed.matched, condensed.pooled, self.run)
        graph = dataclasses.replace(joined.graph, network=before.network, products=before.products)
        if _missing_rendezvous(graph, before).any():
            graph = with_own_order(graph)
            graph = graph.without_edges(_missing_rendezvous(graph, before))
        return dataclasses.replace(joined, graph=graph)

    def work_on(self, ranks: Iterable[int]) -> Iterator[RankWork]:
        """Yield the tasks of building ranks of the job again."""
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
        """Return True, since edits that would change nodes are refused."""
        return True

    def replays(self, after: Self, slowdowns: Sequence[float]) -> Iterator[Timeline]:
        """Return replays of a job that edits have made of this one, as `ReplayedJob.replays`."""
        timeline = replay(after.graph)
        if slowdowns:
            pairs = zip(self.work_on(self.ranks), after.work_on(self.ranks))
            met = zip(self.rendezvous(replay(self.graph)), after.rendezvous(timeline))
            if any(list(self.map_tasks(changes_overlap, zip(pairs, met)))):
                return (after._settled(timeline, slowdown) for slowdown in slowdowns)
        return iter([timeline])

    def _settled(self, first: Timeline, slowdown: float) -> Timeline:
        """Return the replay with kernels slowed down consistently with what they then overlap.

        Args:
            first: the replay with kernels as they are.
            slowdown: as in `Contention`.
        """

        def slow(last: Timeline | None) -> Graph | None:
            work = partial(slowed_rank, slowdown, last is None)
            tasks = zip(self.work_on(self.ranks), self.rendezvous(last or first))
            skeletons = [skeleton for skeleton in self.map_tasks(work, tasks) if skeleton is not None]
            return self.with_skeletons(skeletons).graph if skeletons else None

        return settled(int(first.end.max(initial=0)), slow)

    def rendezvous(self, timeline: Timeline) -> Iterator[RendezvousTimes]:
        """Return the rendezvous of each rank, ascending.

        Args:
            timeline: a replay of the job.
        """
        rendezvous, matched = rendezvous_of(timeline), self.condensed.matched
        return (
            of_collectives(rendezvous, matched.of(rank).moved["instance"].to_numpy()) for rank in self.ranks
        )

    @property
    def work(self) -> pl.DataFrame:
        """`dpro.replay.peers.phase_work` of all ranks."""
        return with_calls(pl.concat(self.map_ranks(work_without_calls)), self.graph)

    @property
    def on_gpus(self) -> bool:
        """Whether any rank has work on a GPU."""
        return self.condensed.pooled.on_gpu

    def map_ranks(self, function: Callable[[Graph], T], ranks: Iterable[int] | None = None) -> list[T]:
        """Apply a function to the graph of each rank, as `ReplayedJob.map_ranks`."""
        work = self.work_on(self.ranks if ranks is None else ranks)
        return list(self.map_tasks(partial(_result, function), work))

    @property
    def _beside_graph(self) -> tuple[object, ...]:
        return (self.changes, self.condensed)

    def with_change(self, change: RankChange) -> Self:
        """Return the job with each rank changed separately, as `ReplayedJob.with_change`."""
        rank_edit = RankEdit(change)
        skeletons = self._condensed_under(rank_edit, self.ranks, in_full=False)
        return self._with_ranks(skeletons[CHANGED], rank_edit)

    def beside_changed(self, change: RankChange, ranks: Sequence[int]) -> tuple[Graph, Graph]:
        """Return graphs of the job as it is and with ranks changed, as `ReplayedJob.beside_changed`."""
        pairs = list(self.map_tasks(partial(_as_is_and_changed, change), self.work_on(ranks)))
        one, other = (self.with_skeletons(skeletons).graph for skeletons in zip(*pairs))
        return one, other

    def path_to(self, timeline: Timeline) -> PathTo:
        """Return a function that finds deciding paths, as `ReplayedJob.path_to`."""
        inside = inside_of(timeline, lambda rank: rank_under_edits(next(self.work_on([rank]))))
        return path_through(self.joined, timeline, inside)

    def graph_of(self, rank: int, timeline: Timeline) -> Graph:
        """Return the graph of one rank as it runs beside the others."""
        bare, graph = rank_under_edits(next(self.work_on([rank])))
        return replay_inside(bare, graph, rendezvous_of(timeline)).graph


def _missing_rendezvous(graph: Graph, before: Graph) -> Bools:
    """Return [E] a mask of the edges at rendezvous that are missing in `before`."""
    there = _member_keys(before)[before.edges.kind == EdgeKind.RENDEZVOUS]
    missing: Bools = (graph.edges.kind == EdgeKind.RENDEZVOUS) & ~np.isin(_member_keys(graph), there)
    return missing


def _member_keys(graph: Graph) -> Ints:
    """Return [E] a key of the collective and member that arrives at, or leaves, a rendezvous over an edge."""
    nodes, edges = graph.nodes, graph.edges
    leaves = nodes.kind[edges.source] == NodeKind.RENDEZVOUS
    of = np.where(leaves, edges.target, edges.source)
    member: Ints = 2 * (nodes.collective[of] * (int(nodes.rank.max(initial=0)) + 1) + nodes.rank[of]) + leaves
    return member


# One rank, in any process: built again, changed, condensed again. An edge within the rank, from arrival to
# transfer, represents its rendezvous with other ranks: an edit that removes the edge removes the rank from
# the collective.


@dataclass(frozen=True)
class RankEdit:
    """An edit inside a rank.

    Attributes:
        edit: the edit, or a change that follows from it.
        end: the changed job, one of the ends of what the edit leaves open, or what it cannot be faster than.
    """

    edit: RankChange
    end: int = CHANGED

    def of(self, graph: Graph) -> Graph:
        """Return the graph of a rank under the edit, or the given one where nothing changes.

        Raises:
            Unanswerable: the run lacks what the edit needs.
        """
        try:
            return self.made(graph) if self.end == CHANGED else self.ends(graph).get(self.end, graph)
        except NothingToChange:
            return graph

    def made(self, graph: Graph) -> Graph:
        """Apply the edit to the graph of a rank.

        Raises:
            NothingToChange: it leaves the rank as it is.
            Unanswerable: the run lacks what the edit needs, or the edit adds or removes nodes.
        """
        changed = self.edit.apply(graph)
        if changed.num_nodes != graph.num_nodes:
            raise Unanswerable(f"{self.edit} {WHOLE_ONLY}")
        return changed

    def ends(self, graph: Graph) -> dict[int, Graph]:
        """Return the ends of what an edit leaves open, and its limit, by number; none of other changes."""
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
    """Inputs for a process that builds a rank again as it is in a job.

    Attributes:
        matched: the rank's part of the matched run.
        pooled: lags and facts pooled over all ranks.
        folder: where the rank is kept once built.
        messages: kinds of communication.
        places: of all ranks.
        products: measured matrix products.
        changes: made inside ranks, in order.
        transfers: [K] transfers of the rank.
        lasting: [K] ns of each of `transfers`.
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
    """Return a rank without lags, and its graph as it is in the job.

    The rank has instance -1 in collectives from which edits have removed it. Where there are edits, the graph
    has the edges of `with_rendezvous`.
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
    """Add to a rank's graph an edge for each rendezvous, from its arrival to its transfer."""
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
    """Return a rank without lags, with instance -1 in collectives from which edits have removed it."""
    waits = np.zeros(graph.num_nodes, np.bool_)
    waits[graph.edges.target[graph.edges.kind == EdgeKind.RENDEZVOUS]] = True
    return dataclasses.replace(bare, instance=np.where(waits[bare.transfer], bare.instance, -1))


def change_rank(change: RankEdit, with_ends: bool, work: RankWork) -> tuple[dict[int, RankSkeleton], str]:
    """Condense a rank under one more edit.

    Args:
        with_ends: whether to return the ends of what the edit leaves open too.
        work: the rank without the edit.

    Returns:
        Skeletons of the rank in the changed job and at the ends, where they differ; and the reason where the
        changed job has none.
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
    """Return whether kernels of a rank overlap other communication after the change; save shares before."""
    (before, after), met = task
    (bare, old), (_, new) = rank_under_edits(before), rank_under_edits(after)
    one, other = _overlap(bare, old, met[0]), _overlap(bare, new, met[1])
    np.save(_file(before, "before"), one)
    return bool(differs(one, other).any())


def slowed_rank(
    slowdown: float, is_first: bool, task: tuple[RankWork, RendezvousTimes]
) -> RankSkeleton | None:
    """Condense a rank with kernels slowed down by what they overlap; None where nothing changes.

    Args:
        is_first: whether to start from the changed rank rather than from the result of the previous round.
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
    """Return [N] `overlapped_share` of a rank replayed by itself."""
    timeline = replay_inside(bare, graph, met)
    return overlapped_share(timeline.graph, timeline.start, timeline.end)


def _file(work: RankWork, what: str) -> Path:
    return work.folder / f"rank{work.matched.rank:05d}-{what}.npy"


# A run as one of its ranks sees it: only its own rows of tables with rows of every rank.


@dataclass(frozen=True)
class RankTables(KeptRun):
    """Tables of one rank, each read once.

    Attributes:
        matched: the rank, with the files that contain its rows.
    """

    matched: MatchedRank | None = None

    def table(self, table: Table, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Read a table as `Run.table` does, limited to the rank's rows in tables with rows of every rank.

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
        """Return the files that contain the rank's rows of a table."""
        return super().parts(table) if self.matched is None else list(self.matched.parts.get(table.name, ()))


def tables_of(run: Run, matched: MatchedRank) -> RankTables:
    """Return a run limited to one of its ranks."""
    return RankTables(run.path, run.manifest, run.source, matched=matched)
