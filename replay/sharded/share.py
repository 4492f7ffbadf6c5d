"""One rank's nodes and edges by themselves, and the little that others need to know of it.

In: what a rank needs of a run. Out: its share, kept as a file, and `ShareFacts`. Lags are not set yet, since
they are pooled over all ranks, and times are as recorded, on the aligned clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.archive import read_archive, write_archive
from dpro.replay.construction.data_dependencies import recorded_dependencies
from dpro.replay.construction.graph_builder import (
    COLUMNS,
    by_place,
    coded,
    in_order,
    on_worker,
    steps_in,
)
from dpro.replay.construction.lags import LagFacts, facts_of, started_work
from dpro.replay.construction.phases import CallOrder, calls_of
from dpro.replay.construction.rank_graph import RankGraph, build_rank_graph
from dpro.replay.construction.rank_view import Names, RankView, make_rank_view
from dpro.replay.graph import GPU_KINDS, Edges, Graph, Nodes, assembled
from dpro.replay.sharded.agreed import OfRank
from dpro.schema import DEPENDENCIES, SPANS, STEPS, SYNCS
from dpro.store import Run
from dpro.table import Table


@dataclass(frozen=True)
class Share:
    """One rank's nodes and edges in all its windows.

    Attributes:
        graph: without lags; times are not counted from an origin yet, and `phase` is when work was asked for.
        instance, arrive, transfer: [K] for each collective it ran, the two nodes of it.
        calls: the collectives that it called, by window.
    """

    graph: Graph
    instance: Ints
    arrive: Ints
    transfer: Ints
    calls: tuple[CallOrder, ...]


RECORDS = {kind.__name__: kind for kind in (CallOrder, Edges, Graph, Nodes, Share)}  # of the file of a share


@dataclass(frozen=True)
class ShareFacts:
    """What others need to know of a rank's share.

    Attributes:
        rank: which.
        lags: what it shows of lags.
        calls: the collectives that it called.
        begins: when its first node began, ns.
        background: spans on threads that touch neither a stream nor a collective, left out.
        steps_known: whether the run says where its steps begin.
        on_gpu: whether it has work on a GPU.
        num_nodes, num_edges: how many it has.
    """

    rank: int
    lags: LagFacts
    calls: tuple[CallOrder, ...]
    begins: int
    background: int
    steps_known: bool
    on_gpu: bool
    num_nodes: int
    num_edges: int


def build_share(run: Run, own: OfRank, folder: Path) -> ShareFacts:
    """Build one rank's share, and keep it in a folder.

    Args:
        folder: where the share is kept: `share_file` says as what.

    Raises:
        GraphError: the trace contradicts itself (a cycle).
        OSError: the file cannot be written.
    """
    share, facts = share_of(run, own)
    write_archive(share_file(folder, own.rank), share, RECORDS)
    return facts


def share_of(run: Run, own: OfRank) -> tuple[Share, ShareFacts]:
    """One rank's share, and what others need to know of it.

    Raises:
        GraphError: the trace contradicts itself (a cycle).
    """
    spans, names = coded(_rows(run, own, SPANS, COLUMNS))
    spans, syncs, steps = map(
        own.alignment.aligned, (spans, _sorted(run, own, SYNCS), _sorted(run, own, STEPS))
    )
    needs = by_place(recorded_dependencies(run, spans, own.parts.get(DEPENDENCIES.name, ())))
    spans_of, moved_of, syncs_of, steps_of = map(by_place, (spans, own.moved, syncs, steps))
    by_code = Names(names)
    views, parts = [], []
    for window in own.windows:
        place = (own.rank, window)
        own_steps = steps_in(steps_of, *place)
        view = make_rank_view(*place, spans_of(*place), moved_of(*place), own_steps)
        views.append(view)
        parts.append(build_rank_graph(view, syncs_of(*place), needs(*place), by_code, None))
    share = _put_together(parts, views, own.moved, (*names.to_list(), "(no span)", "(rendezvous)"))
    graph = share.graph
    started = started_work(graph.edges, graph.nodes, on_worker(graph.lanes))
    return share, ShareFacts(
        rank=own.rank,
        lags=facts_of(started, graph.names),
        calls=share.calls,
        begins=int(graph.nodes.measured_start.min()),
        background=sum(part.background for part in parts),
        steps_known=any(view.step_start.size for view in views),
        on_gpu=bool(np.isin(graph.nodes.kind, GPU_KINDS).any()),
        num_nodes=graph.num_nodes,
        num_edges=graph.edges.source.size,
    )


def _rows(run: Run, own: OfRank, table: Table, columns: Sequence[str]) -> pl.DataFrame:
    """A rank's rows of a table."""
    parts = own.parts.get(table.name, ())
    if not parts:
        return table.empty().select(columns)
    return run.read(table, parts, columns).filter(pl.col("rank") == own.rank)


def _sorted(run: Run, own: OfRank, table: Table) -> pl.DataFrame:
    return _rows(run, own, table, list(table.columns)).sort(table.sort_by, maintain_order=True)


def _put_together(
    parts: Sequence[RankGraph], views: Sequence[RankView], moved: pl.DataFrame, names: tuple[str, ...]
) -> Share:
    """The windows of a rank as one graph, without rendezvous: the ranks that it meets are not known here."""
    nothing = np.empty(0, np.int64)
    alone = [dataclasses.replace(part, instance=nothing, arrive=nothing, transfer=nothing) for part in parts]
    found = in_order(alone, moved.clear(), names)
    graph = assembled(found.nodes, found.edges, names, found.lanes, 0)
    first = np.cumsum([0, *(part.begins.size for part in parts)])
    arrive, transfer = (
        found.number[np.concatenate([getattr(part, end) + at for part, at in zip(parts, first)])]
        for end in ("arrive", "transfer")
    )
    instance = np.concatenate([part.instance for part in parts])
    return Share(graph, instance, arrive, transfer, tuple(map(calls_of, views)))


def share_file(folder: Path, rank: int) -> Path:
    """Where a rank's share is kept."""
    return folder / f"rank{rank:05d}.npz"


def load_share(file: Path) -> Share:
    """Read what `build_share` wrote.

    Args:
        file: where.

    Raises:
        OSError: there is no such file, or not a whole one.
    """
    share = read_archive(file, RECORDS, None)
    if not isinstance(share, Share):
        raise OSError(f"{file}: not the share of a rank")
    return share
