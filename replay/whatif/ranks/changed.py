"""Condensed ranks under edits: transfers change in the joined graph, other work in each rank by itself.

In: a condensed run and edits, each of which says what it looks at (`Edit.scope`). Out: the joined graph after
each. A rank in which an edit changes something is built and condensed again, in any process.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.errors import Unanswerable
from dpro.replay.fidelity.by_rank import CondensedRun
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.peers import with_calls
from dpro.replay.sharded.agreed import Spread
from dpro.replay.sharded.joined import Joined, join_skeletons, with_own_order, without_ranks
from dpro.replay.sharded.skeleton import RankSkeleton
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.counted import CountedEdit
from dpro.replay.whatif.graph_ops.shared_links import with_shared_links
from dpro.replay.whatif.ranks.rank import (
    CHANGED,
    FASTEST,
    WHOLE_ONLY,
    RankEdit,
    RankWork,
    change_rank,
    count_rank,
    work_of_rank,
)
from dpro.store import Run


@dataclass(frozen=True)
class CondensedJob:
    """A condensed run under some edits.

    Attributes:
        run: the run.
        condensed: its ranks as they were recorded.
        folder: where shares are kept meanwhile.
        joined: as they are under the edits.
        changes: what edits have changed inside ranks.
    """

    run: Run
    condensed: CondensedRun
    folder: Path
    joined: Joined
    changes: tuple[RankEdit, ...] = ()

    def work_on(self, ranks: Iterable[int]) -> Iterator[RankWork]:
        """What it takes to build ranks of it again."""
        agreed, graph = self.condensed.agreed, self.joined.graph
        nodes = graph.nodes
        moving = np.flatnonzero(nodes.kind == NodeKind.TRANSFER)
        moving = moving[np.argsort(nodes.rank[moving], kind="stable")]
        rank_of, places = nodes.rank[moving], dict(agreed.places)
        for rank in ranks:
            mine = moving[slice(*np.searchsorted(rank_of, (rank, rank + 1)))]
            yield RankWork(
                self.run, agreed.of(rank), self.condensed.pooled.of(rank), self.folder, agreed.messages,
                places, graph.products, self.changes, self.joined.node[mine],
                nodes.duration[mine],
            )  # fmt: skip


@dataclass(frozen=True)
class Changed:
    """What an edit makes of a job.

    Attributes:
        job: the changed job.
        ends: the ends of what the edit leaves open.
        least: what the changed job cannot be faster than, where that is known.
        notes: what is to be said of it.
    """

    job: CondensedJob
    ends: list[CondensedJob]
    least: list[CondensedJob]
    notes: Sequence[str]


def apply_edit(job: CondensedJob, edit: Edit, spread: Spread, with_ends: bool = True) -> Changed:
    """The job under one more edit.

    Args:
        with_ends: whether the ends of what the edit leaves open are asked for.

    Raises:
        Unanswerable: the edit needs the whole graph, or changes nothing.
    """
    if edit.scope() == "job":
        raise Unanswerable(f"{edit.name} {WHOLE_ONLY}")
    if edit.scope() != "transfers":
        return _of_ranks(job, edit, spread, with_ends)
    graph = job.joined.graph

    def made(changed: Graph) -> CondensedJob:
        return _with(job, dataclasses.replace(job.joined, graph=changed))

    changed, least = made(_with_transfers(edit, graph)), edit.limit(graph) if with_ends else None
    ends = list(map(made, edit.bounds(graph))) if with_ends else []
    return Changed(changed, ends, [] if least is None else [made(least)], edit.notes(graph))


def _of_ranks(job: CondensedJob, edit: Edit, spread: Spread, with_ends: bool) -> Changed:
    """The job under an edit that changes each rank by itself, perhaps beside its peers."""
    ranks, every = edit.ranks_changed(job.joined.graph), job.condensed.agreed.ranks
    change, lines = RankEdit(edit), tuple[str, ...]()
    if isinstance(edit, CountedEdit):
        counts = Counter[str]()
        for each in spread(partial(count_rank, edit), job.work_on(every)):
            counts.update(each)
        change, lines = RankEdit(edit, dict(counts)), edit.lines(dict(counts))
    elif edit.scope() == "peers":
        work = with_calls(pl.concat(spread(work_of_rank, job.work_on(every))), job.joined.graph)
        change = RankEdit(edit.beside_peers(job.joined.graph, work))
    skeletons: dict[int, list[RankSkeleton]] = {}
    reasons = Counter[str]()
    for found, why in spread(partial(change_rank, change, with_ends), job.work_on(ranks)):
        reasons[why] += 1
        for end, skeleton in found.items():
            skeletons.setdefault(end, []).append(skeleton)
    if CHANGED not in skeletons:
        raise Unanswerable(max(reasons, key=reasons.__getitem__, default=f"nothing in the run fits {edit}"))

    def made(end: int) -> CondensedJob:
        changes = (*job.changes, dataclasses.replace(change, end=end))
        return dataclasses.replace(_with(job, with_ranks(job, skeletons[end])), changes=changes)

    ends = [made(end) for end in sorted(skeletons) if end > CHANGED]
    return Changed(made(CHANGED), ends, [made(FASTEST)] if FASTEST in skeletons else [], lines)


def _with(job: CondensedJob, joined: Joined) -> CondensedJob:
    """The job with another joined graph, in which transfers share links as they then meet on them."""
    graph = with_shared_links(job.joined.graph, joined.graph)
    return dataclasses.replace(job, joined=dataclasses.replace(joined, graph=graph))


def with_ranks(job: CondensedJob, skeletons: Sequence[RankSkeleton]) -> Joined:
    """The joined graph of a job with other skeletons of some ranks."""
    condensed, before = job.condensed, job.joined.graph
    rest = without_ranks(job.joined, [each.rank for each in skeletons])
    joined = join_skeletons([*rest, *skeletons], condensed.agreed, condensed.pooled, job.run)
    graph = dataclasses.replace(joined.graph, network=before.network, products=before.products)
    if _taken_out(graph, before).any():
        graph = with_own_order(graph)
        graph = graph.without_edges(_taken_out(graph, before))
    return dataclasses.replace(joined, graph=graph)


def _with_transfers(edit: Edit, graph: Graph) -> Graph:
    """A joined graph under an edit of transfers, of which some take out rendezvous."""
    changed = edit.apply(graph)
    if changed.edges.source.size < graph.edges.source.size:
        changed = edit.apply(with_own_order(graph))
    return changed


def _taken_out(graph: Graph, before: Graph) -> Bools:
    """[E] edges at rendezvous that another graph of the job has not."""
    known = _members(before)[before.edges.kind == EdgeKind.RENDEZVOUS]
    missing: Bools = (graph.edges.kind == EdgeKind.RENDEZVOUS) & ~np.isin(_members(graph), known)
    return missing


def _members(graph: Graph) -> Ints:
    """[E] which member of which collective comes to its rendezvous over an edge, or leaves it."""
    nodes, edges = graph.nodes, graph.edges
    leaves = nodes.kind[edges.source] == NodeKind.RENDEZVOUS
    at = np.where(leaves, edges.target, edges.source)
    member: Ints = 2 * (nodes.collective[at] * (int(nodes.rank.max(initial=0)) + 1) + nodes.rank[at]) + leaves
    return member
