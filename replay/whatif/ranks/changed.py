"""Condensed ranks under edits: transfers change in the joined graph, other work in each rank by itself.

In: a condensed run and edits, each of which says what it looks at (`Edit.scope`). Out: the joined graph after
each. A rank in which an edit changes something is built and condensed again, in any process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.errors import Unanswerable
from dpro.replay.fidelity.by_rank import CondensedRun
from dpro.replay.graph import EdgeKind, Graph, MeshPosition, Message, NodeKind
from dpro.replay.peers import with_calls, work_without_calls
from dpro.replay.sharded.agreed import OfRank, Spread
from dpro.replay.sharded.joined import Joined, join_skeletons, with_own_order, without_ranks
from dpro.replay.sharded.pooled import PooledOfRank
from dpro.replay.sharded.share import Share, build_share, load_share, share_file
from dpro.replay.sharded.skeleton import RankSkeleton, finished, skeleton_of_share
from dpro.replay.whatif.edit import Edit, RankChange
from dpro.replay.whatif.graph_ops.shared_links import with_shared_links
from dpro.store import Run

WHOLE_ONLY = "needs the graph of all ranks at once, which is too large to be held"


@dataclass(frozen=True)
class RankWork:
    """What a process has to know to build a rank again as a job has it.

    Attributes:
        run: the run.
        own: what the rank needs of it.
        known: what is pooled.
        folder: where its share is kept once it was built.
        messages: kinds of communication.
        places: of all ranks.
        edits: what was changed inside ranks, in order.
        transfers: [K] transfers of its share, and
        lasting: [K] ns that they take.
    """

    run: Run
    own: OfRank
    known: PooledOfRank
    folder: Path
    messages: tuple[Message, ...]
    places: dict[int, MeshPosition]
    edits: tuple[RankChange, ...]
    transfers: Ints
    lasting: Ints


@dataclass(frozen=True)
class CondensedJob:
    """A condensed run under some edits.

    Attributes:
        run: the run.
        condensed: its ranks as they were recorded.
        folder: where shares are kept meanwhile.
        joined: as they are under the edits.
        edits: those of them that changed something inside ranks.
    """

    run: Run
    condensed: CondensedRun
    folder: Path
    joined: Joined
    edits: tuple[RankChange, ...] = ()

    def work_on(self, ranks: Iterable[int]) -> Iterator[RankWork]:
        """What it takes to build ranks of it again.

        Args:
            ranks: which.
        """
        agreed, nodes = self.condensed.agreed, self.joined.graph.nodes
        moving = np.flatnonzero(nodes.kind == NodeKind.TRANSFER)
        moving = moving[np.argsort(nodes.rank[moving], kind="stable")]
        for rank in ranks:
            mine = moving[slice(*np.searchsorted(nodes.rank[moving], (rank, rank + 1)))]
            yield RankWork(
                self.run, agreed.of(rank), self.condensed.pooled.of(rank), self.folder, agreed.messages,
                dict(agreed.places), self.edits, self.joined.node[mine], nodes.duration[mine],
            )  # fmt: skip


def rank_under_edits(work: RankWork) -> tuple[Share, Graph]:
    """A rank's share, and its graph as the job has it.

    Args:
        work: which rank of which job.
    """
    file = share_file(work.folder, work.own.rank)
    if not file.exists():
        build_share(work.run, work.own, work.folder)
    share = load_share(file)
    graph = finished(share, work.known)
    graph = dataclasses.replace(graph, messages=work.messages, places=work.places, run=work.run)
    for edit in work.edits:
        graph = _changed(graph, edit) or graph
    duration = graph.nodes.duration.copy()
    duration[work.transfers] = work.lasting
    return share, graph.with_durations(duration)


def _changed(graph: Graph, edit: RankChange) -> Graph | None:
    """A rank's graph under an edit; None where it holds nothing that the edit changes."""
    try:
        changed = edit.apply(graph)
    except Unanswerable:
        return None
    if changed.num_nodes != graph.num_nodes:
        raise Unanswerable(f"{edit} {WHOLE_ONLY}")
    return changed


def change_rank(edit: RankChange, work: RankWork) -> RankSkeleton | None:
    """Condense a rank under one more edit; None where it changes nothing of the rank.

    Args:
        edit: what to change.
        work: the rank without it.
    """
    share, graph = rank_under_edits(work)
    changed = _changed(graph, edit)
    return None if changed is None else skeleton_of_share(work.own.rank, share, changed)


def apply_edit(job: CondensedJob, edit: Edit, spread: Spread) -> CondensedJob:
    """The job under one more edit.

    Args:
        job: the job.
        edit: what to change.
        spread: has the work on ranks done.

    Raises:
        Unanswerable: the edit needs the whole graph, or changes nothing.
    """
    graph, edits = job.joined.graph, job.edits
    if edit.scope() == "job":
        raise Unanswerable(f"{edit.name} {WHOLE_ONLY}")
    if edit.scope() == "transfers":
        made = dataclasses.replace(job.joined, graph=_with_transfers(edit, graph))
    else:
        ranks = edit.ranks_changed(graph)
        change = edit.beside_peers(graph, work_by_phase(job, spread)) if edit.scope() == "peers" else edit
        found = spread(partial(change_rank, change), job.work_on(ranks))
        skeletons = [each for each in found if each is not None]
        if not skeletons:
            edit.apply(graph)  # says what is missing, as far as the condensed graph shows it
            raise Unanswerable(f"nothing in the run fits {edit}")
        made, edits = with_ranks(job, skeletons), (*edits, change)
    linked = with_shared_links(graph, made.graph)
    return dataclasses.replace(job, joined=dataclasses.replace(made, graph=linked), edits=edits)


def work_by_phase(job: CondensedJob, spread: Spread) -> pl.DataFrame:
    """As `dpro.replay.peers.phase_work`, of all ranks of a job.

    Args:
        job: the job.
        spread: has the work on ranks done.
    """
    found = spread(work_of_rank, job.work_on(job.condensed.agreed.ranks))
    return with_calls(pl.concat(found), job.joined.graph)


def work_of_rank(work: RankWork) -> pl.DataFrame:
    """How long a rank works in each phase.

    Args:
        work: which rank of which job.
    """
    return work_without_calls(rank_under_edits(work)[1])


def with_ranks(job: CondensedJob, skeletons: Sequence[RankSkeleton]) -> Joined:
    """The joined graph of a job with other skeletons of some ranks.

    Args:
        job: the job.
        skeletons: of these ranks.
    """
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
