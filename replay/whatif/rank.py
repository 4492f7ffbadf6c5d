"""One rank of a condensed run under edits, in any process: built again, changed, condensed again.

In: what a process has to know of the rank, and an edit. Out: its graph, or skeletons of it. Where it meets
other ranks, an edge of its own from arrival to transfer stands for the rendezvous: an edit that takes that
away takes the rank out of the collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.errors import NothingToChange, Unanswerable
from dpro.replay.graph import EdgeKind, Edges, Graph, MeshPosition, Message
from dpro.replay.sharded.matched import TABLES_OF_RANKS, MatchedRank
from dpro.replay.sharded.rank import (
    BareRank,
    PooledOfRank,
    RankSkeleton,
    build_rank,
    load_rank,
    rank_file,
    skeleton_of,
    with_pooled_lags,
)
from dpro.replay.whatif.edit import Edit, RankChange
from dpro.replay.whatif.graph_ops.kept_tables import KeptRun
from dpro.replay.whatif.job import WHOLE_ONLY
from dpro.store import Run
from dpro.table import Table

CHANGED, FASTEST = 0, -1  # 1, 2, … are the ends of what an edit leaves open


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
        run: the run.
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
