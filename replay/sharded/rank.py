"""One rank by itself: its nodes and edges, the little that others need to know of it, and its skeleton.

In: what a rank needs of a run, then what is pooled over all ranks. Out: its nodes and edges, kept as a file
until their lags are known, and a `RankSkeleton`: its graph with only the nodes that matter to others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.archive import read_archive, write_archive
from dpro.replay.condense import Cut, Skeletons, joined_graph, skeletons_of
from dpro.replay.construction.data_dependencies import recorded_dependencies
from dpro.replay.construction.graph_builder import (
    COLUMNS,
    by_place,
    coded,
    count_from,
    in_order,
    on_worker,
    steps_in,
)
from dpro.replay.construction.lags import LagFacts, Lags, facts_of, pooled, started_work, with_lags
from dpro.replay.construction.phases import CallOrder, Positions, call_order, phases_at, positions_in_steps
from dpro.replay.construction.rank_graph import RankGraph, build_rank_graph
from dpro.replay.construction.rank_view import Names, RankView, make_rank_view
from dpro.replay.graph import GPU_KINDS, Edges, Graph, NodeKind, Nodes, assembled
from dpro.replay.sharded.matched import MatchedRank
from dpro.replay.timeline import extents_of
from dpro.schema import DEPENDENCIES, SPANS, STEPS, SYNCS
from dpro.store import Run
from dpro.table import Table


@dataclass(frozen=True)
class BareRank:
    """One rank's nodes and edges in all its windows, before lags are pooled.

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


RECORDS = {kind.__name__: kind for kind in (BareRank, CallOrder, Edges, Graph, Nodes)}  # of its file


@dataclass(frozen=True)
class RankSummary:
    """What others need to know of a rank.

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


def build_rank(run: Run, matched: MatchedRank, folder: Path) -> RankSummary:
    """Build one rank without lags, and keep it in a folder.

    Args:
        folder: where: `rank_file` says as what.

    Raises:
        GraphError: the trace contradicts itself (a cycle).
        OSError: the file cannot be written.
    """
    bare, facts = bare_rank_of(run, matched)
    write_archive(rank_file(folder, matched.rank), bare, RECORDS)
    return facts


def bare_rank_of(run: Run, matched: MatchedRank) -> tuple[BareRank, RankSummary]:
    """One rank without lags, and what others need to know of it.

    Raises:
        GraphError: the trace contradicts itself (a cycle).
    """
    spans, names = coded(_rows(run, matched, SPANS, COLUMNS))
    spans, syncs, steps = map(
        matched.alignment.aligned, (spans, _sorted(run, matched, SYNCS), _sorted(run, matched, STEPS))
    )
    needs = by_place(recorded_dependencies(run, spans, matched.parts.get(DEPENDENCIES.name, ())))
    spans_of, moved_of, syncs_of, steps_of = map(by_place, (spans, matched.moved, syncs, steps))
    by_code = Names(names)
    views, parts = [], []
    stepped = run.num_rows(STEPS) > 0
    for window in matched.windows:
        place = (matched.rank, window)
        own_steps = steps_in(steps_of, *place)
        view = make_rank_view(*place, spans_of(*place), moved_of(*place), own_steps, stepped)
        views.append(view)
        parts.append(build_rank_graph(view, syncs_of(*place), needs(*place), by_code, None))
    bare = _put_together(parts, views, matched.moved, (*names.to_list(), "(no span)", "(rendezvous)"))
    graph = bare.graph
    started = started_work(graph.edges, graph.nodes, on_worker(graph.lanes))
    return bare, RankSummary(
        rank=matched.rank,
        lags=facts_of(started, graph.names),
        calls=bare.calls,
        begins=int(graph.nodes.measured_start.min()),
        background=sum(part.background for part in parts),
        steps_known=any(view.step_start.size for view in views),
        on_gpu=bool(np.isin(graph.nodes.kind, GPU_KINDS).any()),
        num_nodes=graph.num_nodes,
        num_edges=graph.edges.source.size,
    )


def _rows(run: Run, matched: MatchedRank, table: Table, columns: Sequence[str]) -> pl.DataFrame:
    """A rank's rows of a table."""
    parts = matched.parts.get(table.name, ())
    if not parts:
        return table.empty().select(columns)
    return run.read(table, parts, columns).filter(pl.col("rank") == matched.rank)


def _sorted(run: Run, matched: MatchedRank, table: Table) -> pl.DataFrame:
    return _rows(run, matched, table, list(table.columns)).sort(table.sort_by, maintain_order=True)


def _put_together(
    parts: Sequence[RankGraph], views: Sequence[RankView], moved: pl.DataFrame, names: tuple[str, ...]
) -> BareRank:
    """The windows of a rank as one graph, without rendezvous: the ranks that it meets are not known here."""
    nothing = np.empty(0, np.int64)
    alone = [dataclasses.replace(part, instance=nothing, arrive=nothing, transfer=nothing) for part in parts]
    joined = in_order(alone, moved.clear(), names)
    graph = assembled(joined.nodes, joined.edges, names, joined.lanes, 0)
    first = np.cumsum([0, *(part.begins.size for part in parts)])
    arrive, transfer = (
        joined.number[np.concatenate([getattr(part, end) + begin for part, begin in zip(parts, first)])]
        for end in ("arrive", "transfer")
    )
    instance = np.concatenate([part.instance for part in parts])
    return BareRank(graph, instance, arrive, transfer, tuple(map(call_order, views)))


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank is kept."""
    return folder / f"rank{rank:05d}.npz"


def load_rank(file: Path) -> BareRank:
    """Read what `build_rank` wrote.

    Args:
        file: where.

    Raises:
        OSError: there is no such file, or not a whole one.
    """
    bare = read_archive(file, RECORDS, None)
    if not isinstance(bare, BareRank):
        raise OSError(f"{file}: no rank")
    return bare


# What follows for all ranks from what each shows: lags, and where in steps collectives are.


@dataclass(frozen=True)
class PooledOfRank:
    """What a rank has to know of all others to be condensed.

    Attributes:
        rank: which.
        lags: of all ranks.
        origin_ns: when the first node of any rank began.
        positions: where in its steps its collectives stand.
        on_gpu: whether any rank has work on a GPU.
    """

    rank: int
    lags: Lags
    origin_ns: int
    positions: Positions
    on_gpu: bool


@dataclass(frozen=True)
class Pooled:
    """What holds for all ranks.

    Attributes:
        lags: of work.
        origin_ns: when the first node of any rank began.
        positions: by rank, where in its steps its collectives stand.
        background: spans that were left out.
        steps_known: whether the run says where steps begin.
        on_gpu: whether any rank has work on a GPU.
        num_nodes, num_edges: how many all ranks have, without those of rendezvous.
    """

    lags: Lags
    origin_ns: int
    positions: dict[int, Positions]
    background: int
    steps_known: bool
    on_gpu: bool
    num_nodes: int
    num_edges: int

    def of(self, rank: int) -> PooledOfRank:
        """What one rank needs."""
        positions = self.positions.get(rank, {})
        return PooledOfRank(rank, self.lags, self.origin_ns, positions, self.on_gpu)


def pool(facts: Iterable[RankSummary]) -> Pooled:
    """Pool what all ranks show; the order in which they come makes no difference."""
    parts = sorted(facts, key=lambda part: part.rank)
    return Pooled(
        lags=pooled(part.lags for part in parts),
        origin_ns=min(part.begins for part in parts),
        positions=positions_in_steps(calls for part in parts for calls in part.calls),
        background=sum(part.background for part in parts),
        steps_known=any(part.steps_known for part in parts),
        on_gpu=any(part.on_gpu for part in parts),
        num_nodes=sum(part.num_nodes for part in parts),
        num_edges=sum(part.num_edges for part in parts),
    )


# A rank with only the nodes that matter to others.


@dataclass(frozen=True)
class RankSkeleton:
    """A rank between what it waits for and what others wait for.

    Attributes:
        rank: which.
        graph: the nodes kept and the longest paths between them; names are only those that they have.
        node: [M] node of the rank's graph that each is; -1 of the virtual end of a step.
        instance, arrive, transfer: [K] for each collective it ran, the two nodes of it; instance -1 where an
            edit has taken the rank out of it.
    """

    rank: int
    graph: Graph
    node: Ints
    instance: Ints
    arrive: Ints
    transfer: Ints


def condense_rank(folder: Path, of_all: PooledOfRank) -> RankSkeleton:
    """Condense the rank that `build_rank` has kept.

    Args:
        folder: where it is.

    Raises:
        OSError: it is not there.
    """
    bare = load_rank(rank_file(folder, of_all.rank))
    return skeleton_of(of_all.rank, bare, with_pooled_lags(bare, of_all))


def with_pooled_lags(bare: BareRank, of_all: PooledOfRank) -> Graph:
    """A rank's graph, with lags, phases, and times from the run's origin."""
    graph = bare.graph
    columns = {f.name: getattr(graph.nodes, f.name).copy() for f in dataclasses.fields(Nodes)}
    for calls in bare.calls:
        in_window = graph.nodes.window == calls.window
        time, step = graph.nodes.phase[in_window], graph.nodes.step[in_window]
        columns["phase"][in_window] = phases_at(calls, time, step, of_all.positions)
    nodes = Nodes(**columns)
    count_from(nodes, of_all.origin_ns)
    edges, nodes = with_lags(
        started_work(graph.edges, nodes, on_worker(graph.lanes)), of_all.lags, graph.names
    )
    return dataclasses.replace(graph, nodes=nodes, edges=edges, origin_ns=of_all.origin_ns)


def skeleton_of(rank: int, bare: BareRank, graph: Graph) -> RankSkeleton:
    """Condense a rank's graph.

    Args:
        graph: as from `with_pooled_lags`, perhaps changed since.
    """
    cut = cut_of(rank, bare, graph)
    return _kept(rank, bare, graph, cut, skeletons_of(graph, cut))


def skeletons_of_both(
    rank: int, bare: BareRank, graph: Graph, changed: Ints
) -> tuple[RankSkeleton, RankSkeleton]:
    """Two skeletons of a rank of one shape: as it is, and changed.

    Args:
        graph: as from `with_pooled_lags`, perhaps changed since.
        changed: [N] ns, how long its nodes last in the other.
    """
    cut = cut_of(rank, bare, graph)
    skeletons = skeletons_of(graph, cut, duration=np.stack([graph.nodes.duration, changed], axis=1))
    return _kept(rank, bare, graph, cut, skeletons, 0), _kept(rank, bare, graph, cut, skeletons, 1)


def _kept(
    rank: int, bare: BareRank, graph: Graph, cut: Cut, skeleton: Skeletons, scenario: int = 0
) -> RankSkeleton:
    """What is left of a rank in one of the scenarios of a skeleton."""
    small, node = joined_graph(graph, cut, skeleton, scenario)
    small = _with_measured_ends(small, graph)
    place = np.full(graph.num_nodes, -1, np.int64)
    place[node[node >= 0]] = np.flatnonzero(node >= 0)
    return RankSkeleton(
        rank, _with_own_names(small), node, bare.instance, place[bare.arrive], place[bare.transfer]
    )


def cut_of(rank: int, bare: BareRank, graph: Graph) -> Cut:
    """Where other ranks' edges would meet a rank's graph: at all its collectives, whoever else ran them."""
    size = graph.num_nodes
    joins = np.zeros(size, np.bool_)
    joins[bare.arrive] = True
    joins[bare.transfer] = True
    every = np.arange(size)
    free = joins & (graph.nodes.kind == NodeKind.TRANSFER)
    return Cut(np.array([rank]), np.array([0, size]), every, every[:0], joins, free)


def _with_measured_ends(small: Graph, graph: Graph) -> Graph:
    """Virtual ends of steps, measured for as long as the work that they stand for.

    What steps took as measured is then read from a skeleton as from its graph.
    """
    end = small.nodes.kind == NodeKind.END
    measured = extents_of(graph, ["window", "step"], graph.nodes.measured_start, graph.nodes.measured_end)
    ends = pl.DataFrame({"window": small.nodes.window[end], "step": small.nodes.step[end]})
    extents = ends.join(measured, on=["window", "step"], how="left", maintain_order="left")
    start, stop = small.nodes.measured_start.copy(), small.nodes.measured_end.copy()
    start[end], stop[end] = extents["start"], extents["end"]
    nodes = dataclasses.replace(small.nodes, measured_start=start, measured_end=stop)
    return dataclasses.replace(small, nodes=nodes)


def _with_own_names(graph: Graph) -> Graph:
    """The same graph with only the names that its nodes have."""
    nodes = graph.nodes
    used, code = np.unique(np.append(nodes.name, nodes.around), return_inverse=True)
    code -= int(np.searchsorted(used, 0))  # -1 for none comes first
    name, around = np.split(code, 2)
    names = tuple(graph.names[number] for number in used[used >= 0].tolist())
    return dataclasses.replace(graph, names=names, nodes=dataclasses.replace(nodes, name=name, around=around))
