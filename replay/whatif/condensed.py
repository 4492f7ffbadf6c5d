"""A job by its condensed ranks: each is built, changed and condensed by itself, in any process.

In: a condensed run. Out: a `CondensedJob`, which answers as a `ReplayedJob` does, and refuses edits that look
at the whole graph. Transfers change in the joined graph, other work in each rank.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.fidelity.by_rank import CondensedRun
from dpro.replay.fidelity.overlap import differs, overlapped_share, settled, slowed
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.peers import with_calls, work_without_calls
from dpro.replay.sharded.joined import (
    JoinedGraph,
    RendezvousTimes,
    inside_of,
    join_skeletons,
    of_collectives,
    path_through,
    rendezvous_of,
    replay_inside,
    with_own_order,
    without_ranks,
)
from dpro.replay.sharded.matched import MapTasks
from dpro.replay.sharded.rank import BareRank, RankSkeleton, skeleton_of, skeletons_of_both
from dpro.replay.timeline import PathTo, Timeline, replay
from dpro.replay.whatif.edit import Edit, RankChange
from dpro.replay.whatif.graph_ops.shared_links import with_shared_links
from dpro.replay.whatif.job import WHOLE_ONLY, Changed, ReplayedJob, T
from dpro.replay.whatif.rank import (
    CHANGED,
    FASTEST,
    RankEdit,
    RankWork,
    change_rank,
    rank_under_edits,
)
from dpro.store import Run


@dataclass(frozen=True, eq=False, kw_only=True)
class CondensedJob(ReplayedJob):
    """A job by its condensed ranks; `graph` joins them.

    Attributes:
        node: as of `JoinedGraph`.
        run: the run.
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
        if edit.scope() == "job":
            raise Unanswerable(f"{edit.name} {WHOLE_ONLY}")
        if edit.scope() == "transfers":
            return super().under(edit, in_full)
        informed: RankChange = edit
        if edit.compares_ranks:
            informed = edit.knowing(self.map_ranks(edit.seen_of), self.graph)
        change = RankEdit(informed)
        skeletons = self._condensed_under(change, edit.ranks_changed(self.graph), in_full)
        jobs = partial(self._at_end, skeletons, change)
        ends, limits = [end for end in sorted(skeletons) if end > CHANGED], [FASTEST] * (FASTEST in skeletons)
        notes = informed.notes(self.graph) if isinstance(informed, Edit) and edit.compares_ranks else ()
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

    def keeps_nodes(self, after: Self) -> bool:
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


# What processes do with a rank.


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
