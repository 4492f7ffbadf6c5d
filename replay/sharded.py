"""Graphs of runs too large for memory: each rank is built and condensed by itself.

First, `match_run` reads a few columns of spans, one part of the run at a time, and returns a `MatchedRun`
with the facts about other ranks that building a rank requires. Then each rank is built, and stored in a file
until lags are pooled over all ranks. Finally it is condensed to a `RankSkeleton`, its graph with only the
nodes that matter to other ranks, and all skeletons are joined to a `JoinedGraph`. Its nodes are in another
order, but every start and every step equals that of the graph of the whole run, to the nanosecond. All values
passed between processes can be pickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.alignment.align import Alignment, align, first_begun
from dpro.replay.alignment.match import Matching, match_collectives
from dpro.replay.alignment.transfers import wait_and_transfer
from dpro.replay.condense import Cut, Skeletons, joined_graph, paths_beside, skeletons_of
from dpro.replay.construction.data_dependencies import recorded_dependencies
from dpro.replay.construction.graph_builder import (
    COLUMNS,
    by_place,
    coded,
    count_from,
    in_order,
    on_worker,
    places_of,
    refuse_no_work,
    steps_in,
    with_asked_after,
    with_messages,
    write_columns,
)
from dpro.replay.construction.lags import LagFacts, Lags, facts_of, pooled, started_work, with_lags
from dpro.replay.construction.rank_graph import (
    CallOrder,
    Lanes,
    Place,
    Positions,
    RankGraph,
    build_rank_graph,
    call_order,
    phases_at,
    positions_in_steps,
)
from dpro.replay.construction.rank_view import Names, make_rank_view
from dpro.replay.construction.recording_cost import (
    BY_HOSTS,
    BY_STEPS,
    Cell,
    Observed,
    cpu_work,
    host_paces_of,
    observed,
)
from dpro.replay.first_calls import with_warm_calls
from dpro.replay.graph import (
    GPU_KINDS,
    NO_SPAN,
    OF_RENDEZVOUS,
    EdgeKind,
    Edges,
    Graph,
    MeshPosition,
    Message,
    NodeKind,
    Nodes,
    assembled,
)
from dpro.replay.kept import read_archive, write_archive
from dpro.replay.steps import are_stepped, lasting_steps
from dpro.replay.timeline import PathTo, Stretch, Timeline, chain_to, extents_of, replay
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, DEPENDENCIES, SPANS, STEPS, SYNCS, WORKERS
from dpro.store import Run, rank_of
from dpro.table import Table

MapTasks = Callable[[Callable[..., Any], Iterable[Any]], Iterable[Any]]  # `map`, or that of an executor
LANE_COLUMNS = ("span_id", "rank", "window", "device", "stream")
# Tables with rows of a single rank.
TABLES_OF_RANKS = (SPANS, SYNCS, STEPS, DEPENDENCIES, COLLECTIVES, COUNTERS)


@dataclass(frozen=True)
class MatchedRank:
    """The input for building one rank.

    Attributes:
        windows: deep windows in which it has spans.
        stepped: the result of `are_stepped` for the run.
        alignment: its clock.
        moved: its rows of `MatchedRun.moved`.
        parts: files of the run with its rows, by table.
    """

    rank: int
    windows: tuple[int, ...]
    stepped: bool
    alignment: Alignment
    moved: pl.DataFrame
    parts: Mapping[str, tuple[Path, ...]]


@dataclass(frozen=True)
class MatchedRun:
    """The collectives and clocks of all ranks.

    Attributes:
        windows: by rank, the windows in which it has spans.
        stepped: the result of `are_stepped` for the run.
        matching: collectives and their instances.
        alignment: the clocks.
        moved: collectives on the aligned clock, with wait and transfer of each member, sorted by rank.
        messages: kinds of communication that `moved.message` indexes.
        places: mesh positions of ranks, where the run has them.
        parts: files of the run by rank and table.
    """

    windows: Mapping[int, tuple[int, ...]]
    stepped: bool
    matching: Matching
    alignment: Alignment
    moved: pl.DataFrame
    messages: tuple[Message, ...]
    places: Mapping[int, MeshPosition]
    parts: Mapping[int, Mapping[str, tuple[Path, ...]]]

    @property
    def ranks(self) -> list[int]:
        """All ranks, ascending."""
        return sorted(self.windows)

    def of(self, rank: int) -> MatchedRank:
        """Return the input for building one rank."""
        windows, clocks = self.windows[rank], self.alignment.clocks
        of_rank = {(rank, window): clocks[rank, window] for window in windows if (rank, window) in clocks}
        low, high = np.searchsorted(self.moved["rank"].to_numpy(), (rank, rank + 1)).tolist()
        moved, parts = self.moved.slice(low, high - low), self.parts.get(rank, {})
        return MatchedRank(rank, windows, self.stepped, Alignment(of_rank), moved, parts)


def match_run(run: Run, map_tasks: MapTasks = map) -> MatchedRun:
    """Match the collectives of all ranks, and align their clocks.

    Args:
        map_tasks: maps the reader over the parts of the spans: `map`, or that of an executor.

    Raises:
        Unanswerable: the run has no spans, or its ranks are pretended.
    """
    if run.manifest.is_pretended:
        raise Unanswerable("pretended ranks ran one after the other: their graph has to be built as a whole")
    collectives, workers = run.table(COLLECTIVES), run.table(WORKERS)
    wanted = collectives.select("rank", "span_id").unique()
    of_rank = wanted.partition_by("rank", as_dict=True)
    named = [(part, rank_of(part)) for part in run.parts(SPANS)]
    tasks = [(part, wanted if rank is None else of_rank.get((rank,), wanted.clear())) for part, rank in named]
    if not tasks:
        raise Unanswerable("the run holds no spans to replay")
    where_parts, lanes = zip(*map_tasks(partial(_read_part, run), tasks))
    where = pl.concat(where_parts).unique().sort("rank", "window").rows()
    matching = match_collectives(collectives, pl.concat(lanes))
    steps = lasting_steps(run.table(STEPS, ["rank", "step", "window", "start_ns", "duration_ns"]))
    begun = first_begun(steps)
    alignment = align(matching.rows, where, workers, run.table(CLOCK_SAMPLES), begun)
    moved, messages = with_messages(wait_and_transfer(alignment.aligned(with_asked_after(matching.rows))))
    windows: dict[int, tuple[int, ...]] = {}
    for rank, window in where:
        windows[rank] = (*windows.get(rank, ()), window)
    stepped = are_stepped(steps, windows)
    moved, parts = moved.sort("rank", maintain_order=True), parts_of(run, windows)
    return MatchedRun(windows, stepped, matching, alignment, moved, messages, places_of(workers), parts)


def _read_part(run: Run, task: tuple[Path, pl.DataFrame]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the ranks and windows in one part of the spans, and the lanes of the wanted spans."""
    part = run.read(SPANS, [task[0]], LANE_COLUMNS)
    lanes = part.join(task[1], on=["rank", "span_id"], how="semi", maintain_order="left")
    return part.select("rank", "window").unique(), lanes


def parts_of(run: Run, ranks: Iterable[int]) -> dict[int, dict[str, tuple[Path, ...]]]:
    """Return the files with rows of each rank, by table: those named after the rank, and those after none."""
    by_rank: dict[int, dict[str, tuple[Path, ...]]] = {rank: {} for rank in ranks}
    for table in TABLES_OF_RANKS:
        named: dict[int, list[Path]] = {}
        others: list[Path] = []
        for part in run.parts(table):
            number = rank_of(part)
            (others if number is None else named.setdefault(number, [])).append(part)
        for rank, by_table in by_rank.items():
            by_table[table.name] = (*named.get(rank, ()), *others)
    return by_rank


@dataclass(frozen=True)
class BareRank:
    """The nodes and edges of one rank in all its windows, before lags are pooled.

    Attributes:
        graph: without lags; times are not yet relative to an origin, and `phase` is the time of the request.
        instance, arrive, transfer: [K] instance and two nodes of each collective that it ran.
        calls: the collectives that it called, by window.
    """

    graph: Graph
    instance: Ints
    arrive: Ints
    transfer: Ints
    calls: tuple[CallOrder, ...]


RECORDS = {kind.__name__: kind for kind in (BareRank, CallOrder, Edges, Graph, Nodes)}  # in its file


@dataclass(frozen=True)
class RankSummary:
    """The facts about one rank that other ranks need.

    Attributes:
        lags: its observations of lags.
        calls: the collectives that it called.
        begins: start of its first node, in ns; the largest int64 where it has none.
        steps_known: whether the run has the beginnings of its steps.
        on_gpu: whether it has work on a GPU.
        num_nodes: number of its nodes.
    """

    rank: int
    lags: LagFacts
    calls: tuple[CallOrder, ...]
    begins: int
    steps_known: bool
    on_gpu: bool
    num_nodes: int


def build_rank(run: Run, matched: MatchedRank, folder: Path) -> RankSummary:
    """Build one rank without lags, and store it in a folder.

    Args:
        folder: the folder of `rank_file`.

    Raises:
        GraphError: the trace contradicts itself (a cycle).
        OSError: the file cannot be written.
    """
    bare, facts = bare_rank_of(run, matched)
    write_archive(rank_file(folder, matched.rank), bare, RECORDS)
    return facts


def bare_rank_of(run: Run, matched: MatchedRank) -> tuple[BareRank, RankSummary]:
    """Return one rank without lags, and the facts about it that other ranks need.

    Raises:
        GraphError: the trace contradicts itself (a cycle).
    """
    spans, names = coded(_rows(run, matched, SPANS, COLUMNS))
    syncs, steps = _sorted(run, matched, SYNCS), lasting_steps(_sorted(run, matched, STEPS))
    spans, syncs, steps = map(matched.alignment.aligned, (spans, syncs, steps))
    needs = by_place(recorded_dependencies(run, spans, matched.parts.get(DEPENDENCIES.name, ())))
    spans_of, moved_of, syncs_of, steps_of = map(by_place, (spans, matched.moved, syncs, steps))
    by_code = Names(names)
    views, parts = [], []
    for window in matched.windows:
        place = (matched.rank, window)
        own_steps = steps_in(steps_of, *place)
        view = make_rank_view(*place, spans_of(*place), moved_of(*place), own_steps, matched.stepped)
        views.append(view)
        parts.append(build_rank_graph(view, syncs_of(*place), needs(*place), by_code, None))
    # Join the windows of the rank into one graph, without rendezvous: other members are unknown here.
    nothing = np.empty(0, np.int64)
    alone = [dataclasses.replace(part, instance=nothing, arrive=nothing, transfer=nothing) for part in parts]
    labels = (*names.to_list(), NO_SPAN, OF_RENDEZVOUS)
    joined = in_order(alone, matched.moved.clear(), labels)
    graph = assembled(joined.nodes, joined.edges, labels, joined.lanes, 0)
    first = np.cumsum([0, *(part.begins.size for part in parts)])
    arrive, transfer = (
        joined.number[np.concatenate([getattr(part, end) + begin for part, begin in zip(parts, first)])]
        for end in ("arrive", "transfer")
    )
    instance = np.concatenate([part.instance for part in parts])
    bare = BareRank(graph, instance, arrive, transfer, tuple(map(call_order, views)))
    started = started_work(graph.edges, graph.nodes, on_worker(graph.lanes))
    return bare, RankSummary(
        rank=matched.rank,
        lags=facts_of(started, graph.names),
        calls=bare.calls,
        begins=int(graph.nodes.measured_start.min(initial=np.iinfo(np.int64).max)),
        steps_known=any(view.step_start.size for view in views),
        on_gpu=bool(np.isin(graph.nodes.kind, GPU_KINDS).any()),
        num_nodes=graph.num_nodes,
    )


def _rows(run: Run, matched: MatchedRank, table: Table, columns: Sequence[str]) -> pl.DataFrame:
    parts = matched.parts.get(table.name, ())
    if not parts:
        return table.empty().select(columns)
    return run.read(table, parts, columns).filter(pl.col("rank") == matched.rank)


def _sorted(run: Run, matched: MatchedRank, table: Table) -> pl.DataFrame:
    return _rows(run, matched, table, list(table.columns)).sort(table.sort_by, maintain_order=True)


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file of a stored rank."""
    return folder / f"rank{rank:05d}.npz"


def load_rank(file: Path) -> BareRank:
    """Read a rank written by `build_rank`.

    Raises:
        OSError: the file is missing or incomplete.
    """
    bare = read_archive(file, RECORDS, None)
    if not isinstance(bare, BareRank):
        raise OSError(f"{file}: no rank")
    return bare


# Facts pooled over all ranks: lags, and the positions of collectives in steps.


@dataclass(frozen=True)
class PooledOfRank:
    """The input for condensing one rank.

    Attributes:
        lags: lags pooled over all ranks.
        origin_ns: start of the first node of any rank.
        positions: positions of its collectives in its steps.
        on_gpu: whether any rank has work on a GPU.
        has_shapes: whether shapes of arguments were recorded.
        scales: `Pooled.scales` of this rank, by window.
        pace: as of `Pooled`.
    """

    rank: int
    lags: Lags
    origin_ns: int
    positions: Positions
    on_gpu: bool
    has_shapes: bool
    scales: Mapping[int, float]
    pace: float


@dataclass(frozen=True)
class Pooled:
    """Values pooled over all ranks.

    Attributes:
        lags: lags of work.
        origin_ns: start of the first node of any rank.
        positions: by rank, the positions of its collectives in its steps.
        steps_known: whether the run has the beginnings of steps.
        on_gpu: whether any rank has work on a GPU.
        num_nodes: number of nodes of all ranks, without rendezvous.
        has_shapes: whether shapes of arguments were recorded.
        scales: by rank and window, the multiple of the prior of `recording_cost` that is taken out of CPU
            work; empty where ranks are as recorded.
        pace: from `recording_cost.find_pace`.
    """

    lags: Lags
    origin_ns: int
    positions: dict[int, Positions]
    steps_known: bool
    on_gpu: bool
    num_nodes: int
    has_shapes: bool = False
    scales: Mapping[Cell, float] = dataclasses.field(default_factory=dict)
    pace: float = 1.0

    def of(self, rank: int) -> PooledOfRank:
        """Return the input for condensing one rank."""
        positions = self.positions.get(rank, {})
        scales = {window: scale for (of_rank, window), scale in self.scales.items() if of_rank == rank}
        return PooledOfRank(
            rank, self.lags, self.origin_ns, positions, self.on_gpu, self.has_shapes, scales, self.pace
        )


def pool(facts: Iterable[RankSummary]) -> Pooled:
    """Pool the summaries of all ranks, in any order.

    Raises:
        Unanswerable: no rank has any work.
    """
    parts = sorted(facts, key=lambda part: part.rank)
    refuse_no_work(sum(part.num_nodes for part in parts))
    return Pooled(
        lags=pooled(part.lags for part in parts),
        origin_ns=min(part.begins for part in parts),
        positions=positions_in_steps(calls for part in parts for calls in part.calls),
        steps_known=any(part.steps_known for part in parts),
        on_gpu=any(part.on_gpu for part in parts),
        num_nodes=sum(part.num_nodes for part in parts),
    )


# A rank with only the nodes that matter to other ranks.


@dataclass(frozen=True)
class RankSkeleton:
    """The condensed graph of one rank.

    Attributes:
        graph: the kept nodes and the longest paths between them, with only the names of these nodes.
        node: [M] original node of each in the rank's graph; -1 for the virtual end of a step.
        instance, arrive, transfer: [K] instance and two nodes of each collective that it ran; instance -1
            where an edit has taken the rank out of it.
    """

    rank: int
    graph: Graph
    node: Ints
    instance: Ints
    arrive: Ints
    transfer: Ints


def condense_rank(folder: Path, of_all: PooledOfRank) -> RankSkeleton:
    """Condense a rank stored by `build_rank`.

    Raises:
        OSError: its file is missing or incomplete.
    """
    bare = load_rank(rank_file(folder, of_all.rank))
    return skeleton_of(of_all.rank, bare, with_pooled_lags(bare, of_all))


def with_pooled_lags(bare: BareRank, of_all: PooledOfRank) -> Graph:
    """Return the graph of a rank with lags, phases and times from the run's origin.

    Where `of_all.scales` are known, the cost of recording and of first calls is taken out, and all is at the
    pace of the job.
    """
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
    whole = dataclasses.replace(graph, nodes=nodes, edges=edges, origin_ns=of_all.origin_ns)
    if not of_all.scales:
        return whole.at_pace(of_all.pace)
    work = cpu_work(whole, of_all.has_shapes)
    scales = np.array([of_all.scales.get(window, 0.0) for _, window in work.cells])
    return with_warm_calls(whole.with_durations(work.without(whole, scales))).at_pace(of_all.pace)


@dataclass(frozen=True)
class ObservedRank:
    """Observations of one rank about the cost of recording.

    Attributes:
        seen: its share of the observations.
        at: [scales, cells] ns of a step of its hosts at each of `SCALES`; None unless hosts are compared.
        skeletons: the rank condensed at each of `SCALES`; empty unless steps are compared.
    """

    seen: Observed
    at: Floats | None
    skeletons: tuple[RankSkeleton, ...]


def observe_rank(folder: Path, of_all: PooledOfRank, source: str) -> ObservedRank | None:
    """Return what a rank stored by `build_rank` shows of the cost of recording; None without CPU operators.

    Args:
        of_all: without `scales`.
        source: the measure it is compared with, of `dpro.replay.construction.recording_cost`.

    Raises:
        OSError: its file is missing or incomplete.
    """
    bare = load_rank(rank_file(folder, of_all.rank))
    graph = with_pooled_lags(bare, of_all)
    if not (graph.nodes.kind == NodeKind.CPU).any():
        return None
    work = cpu_work(graph, of_all.has_shapes)
    durations = work.at_scales(graph)
    seen = observed(work, durations)
    if source == BY_HOSTS:
        paces = [host_paces_of(graph.with_durations(duration), work.cells) for duration in durations]
        return ObservedRank(seen, np.stack(paces), ())
    if source != BY_STEPS:
        return ObservedRank(seen, None, ())
    cut = cut_of(of_all.rank, bare, graph)
    skeletons = skeletons_of(graph, cut, duration=np.stack(durations, axis=1))
    kept = (
        _rank_skeleton(of_all.rank, bare, graph, cut, skeletons, number) for number in range(len(durations))
    )
    return ObservedRank(seen, None, tuple(kept))


def skeleton_of(rank: int, bare: BareRank, graph: Graph) -> RankSkeleton:
    """Condense a rank's graph.

    Args:
        graph: the graph of `with_pooled_lags`, possibly changed since.
    """
    cut = cut_of(rank, bare, graph)
    return _rank_skeleton(rank, bare, graph, cut, skeletons_of(graph, cut))


def skeletons_of_both(
    rank: int, bare: BareRank, graph: Graph, changed: Ints
) -> tuple[RankSkeleton, RankSkeleton]:
    """Return two skeletons of a rank with equal shape: as it is, and changed.

    Args:
        graph: the graph of `with_pooled_lags`, possibly changed since.
        changed: [N] durations of its nodes in the changed skeleton, in ns.
    """
    cut = cut_of(rank, bare, graph)
    skeletons = skeletons_of(graph, cut, duration=np.stack([graph.nodes.duration, changed], axis=1))
    return _rank_skeleton(rank, bare, graph, cut, skeletons, 0), _rank_skeleton(
        rank, bare, graph, cut, skeletons, 1
    )


def _rank_skeleton(
    rank: int, bare: BareRank, graph: Graph, cut: Cut, skeleton: Skeletons, scenario: int = 0
) -> RankSkeleton:
    """Return the rank's skeleton in one of the scenarios of `skeleton`."""
    small, node = joined_graph(graph, cut, skeleton, scenario)
    small = _with_measured_ends(small, graph)
    place = np.full(graph.num_nodes, -1, np.int64)
    place[node[node >= 0]] = np.flatnonzero(node >= 0)
    return RankSkeleton(
        rank, _with_own_names(small), node, bare.instance, place[bare.arrive], place[bare.transfer]
    )


def cut_of(rank: int, bare: BareRank, graph: Graph) -> Cut:
    """Return the cut of a rank's graph at all its collectives, whichever other ranks ran them."""
    size = graph.num_nodes
    joins = np.zeros(size, np.bool_)
    joins[bare.arrive] = True
    joins[bare.transfer] = True
    every = np.arange(size)
    free = joins & (graph.nodes.kind == NodeKind.TRANSFER)
    return Cut(np.array([rank]), np.array([0, size]), every, every[:0], joins, free)


def _with_measured_ends(small: Graph, graph: Graph) -> Graph:
    """Give virtual ends of steps the measured start and end of the work in their step.

    The measured duration of steps can then be read from a skeleton as from its graph.
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
    """Return the graph with only the names that its nodes use."""
    nodes = graph.nodes
    used, code = np.unique(np.append(nodes.name, nodes.around), return_inverse=True)
    code -= int(np.searchsorted(used, 0))  # -1 for none comes first
    name, around = np.split(code, 2)
    names = tuple(graph.names[number] for number in used[used >= 0].tolist())
    return dataclasses.replace(graph, names=names, nodes=dataclasses.replace(nodes, name=name, around=around))


@dataclass(frozen=True)
class JoinedGraph:
    """The condensed graph of a run.

    Attributes:
        graph: its skeletons, joined.
        node: [M] original node of each in its rank; -1 for rendezvous and virtual ends of steps.
    """

    graph: Graph
    node: Ints


def join_skeletons(
    skeletons: Sequence[RankSkeleton], matched: MatchedRun, pooled: Pooled, run: Run | None = None
) -> JoinedGraph:
    """Join the skeletons of all ranks at their rendezvous.

    A collective of several ranks keeps no edge from arrival to transfer, since the rendezvous is between
    them. An edit that removes the collective starts from `with_own_order`.

    Args:
        skeletons: of all ranks, in any order.
    """
    skeletons = sorted(skeletons, key=lambda skeleton: skeleton.rank)
    names = sorted({name for skeleton in skeletons for name in skeleton.graph.names})
    code = {name: number for number, name in enumerate(names)}
    labels = (*names, NO_SPAN, OF_RENDEZVOUS)
    origin = pooled.origin_ns
    as_parts = [_as_part(skeleton, code, origin) for skeleton in skeletons]
    parts = in_order(as_parts, matched.moved, labels)
    for times in (parts.nodes.measured_start, parts.nodes.measured_end):
        times -= origin
    edges, size = parts.edges, parts.nodes.duration.size
    stays = edges.kind == EdgeKind.RENDEZVOUS
    inside, between = np.flatnonzero(~stays), edges.taken(np.flatnonzero(stays))
    lag = edges.lag[inside, None]
    stays[inside[paths_beside(edges.source[inside], edges.target[inside], lag, between, size)]] = True
    edges = edges.taken(np.flatnonzero(stays))
    graph = assembled(parts.nodes, edges, labels, parts.lanes, origin)
    node = np.full(graph.num_nodes, -1, np.int64)
    of_ranks = np.concatenate([skeleton.node for skeleton in skeletons])
    node[parts.number[: of_ranks.size]] = of_ranks
    graph = dataclasses.replace(graph, messages=matched.messages, places=matched.places, run=run)
    return JoinedGraph(graph, node)


def with_own_order(graph: Graph) -> Graph:
    """Add an edge from each arrival to its transfer: without rendezvous no other edge orders them."""
    nodes, edges = graph.nodes, graph.edges
    arrive, transfer = (_members(nodes, kind) for kind in (NodeKind.ARRIVE, NodeKind.TRANSFER))
    number, zeros = len(arrive), np.zeros(len(arrive), np.int64)
    order = Edges(arrive, transfer, zeros, np.full(number, EdgeKind.PATH), np.zeros(number, np.bool_))
    all_edges = edges.extended(order)
    return assembled(nodes, all_edges, graph.names, graph.lanes, graph.origin_ns).with_job_of(graph)


def without_ranks(joined: JoinedGraph, ranks: Collection[int]) -> list[RankSkeleton]:
    """Return a joined graph without some ranks, as one skeleton of all others; empty if no rank is left."""
    graph = with_own_order(joined.graph)  # also for collectives that lose their other members
    nodes, edges = graph.nodes, graph.edges
    kept = ~np.isin(nodes.rank, list(ranks)) & (nodes.kind != NodeKind.RENDEZVOUS)
    rest_nodes = np.flatnonzero(kept)
    if rest_nodes.size == 0:
        return []
    place = np.cumsum(kept) - 1
    inside = edges.taken(np.flatnonzero(kept[edges.source] & kept[edges.target]))
    inside = dataclasses.replace(inside, source=place[inside.source], target=place[inside.target])
    columns = nodes.taken(rest_nodes)
    rest = assembled(columns, inside, graph.names, graph.lanes, graph.origin_ns)
    arrive, transfer = (_members(columns, kind) for kind in (NodeKind.ARRIVE, NodeKind.TRANSFER))
    return [RankSkeleton(-1, rest, joined.node[rest_nodes], columns.collective[transfer], arrive, transfer)]


def _members(nodes: Nodes, kind: NodeKind) -> Ints:
    """Return the nodes of one kind, sorted by collective and rank."""
    members = np.flatnonzero(nodes.kind == kind)
    return members[np.lexsort((nodes.rank[members], nodes.collective[members]))]


def _as_part(skeleton: RankSkeleton, code: dict[str, int], origin: int) -> RankGraph:
    """Return a skeleton as a part of a graph, with times as recorded, as those of rendezvous are."""
    graph, members = skeleton.graph, skeleton.instance >= 0
    begins = graph.nodes.measured_start + origin

    def nodes(into: Place) -> Lanes:
        kept = graph.nodes
        codes = np.array([*(code[name] for name in graph.names), -1], np.int64)
        as_recorded = dataclasses.replace(
            kept, name=codes[kept.name], around=codes[kept.around],
            lane=np.where(kept.lane < 0, -1, kept.lane + into.lane),
            measured_start=begins, measured_end=kept.measured_end + origin,
        )  # fmt: skip
        write_columns(as_recorded, into.nodes, into.number)
        return list(graph.lanes)

    columns = (skeleton.instance, skeleton.arrive, skeleton.transfer)
    instance, arrive, transfer = (column[members] for column in columns)
    return RankGraph(begins, nodes, graph.edges, instance, arrive, transfer)


# The nodes of one rank, replayed by themselves with the rendezvous of the joined graph.


class RendezvousTimes(NamedTuple):
    """The times of rendezvous.

    Attributes:
        collective: [K] collective of each, ascending.
        start: [K] ns at which each happens.
    """

    collective: Ints
    start: Ints


def rendezvous_of(timeline: Timeline) -> RendezvousTimes:
    """Return the rendezvous of a joined graph."""
    met = np.flatnonzero(timeline.graph.nodes.kind == NodeKind.RENDEZVOUS)
    collective = timeline.graph.nodes.collective[met]
    order = np.argsort(collective, kind="stable")
    return RendezvousTimes(collective[order], timeline.start[met][order])


def of_collectives(rendezvous: RendezvousTimes, instance: Ints) -> RendezvousTimes:
    """Return the rendezvous of some collectives.

    Args:
        rendezvous: from `rendezvous_of`.
        instance: [K] the collectives; those that one rank ran alone have no rendezvous.
    """
    place = np.searchsorted(rendezvous.collective, np.sort(instance))
    place = place[place < rendezvous.collective.size]
    wanted = place[np.isin(rendezvous.collective[place], instance)]
    return RendezvousTimes(rendezvous.collective[wanted], rendezvous.start[wanted])


def replay_inside(bare: BareRank, graph: Graph, rendezvous: RendezvousTimes) -> Timeline:
    """Replay one rank by itself, with transfers that begin no earlier than their rendezvous.

    Args:
        graph: its graph, from `with_pooled_lags`.
        rendezvous: at least the rendezvous of its collectives.
    """
    met = np.flatnonzero(np.isin(bare.instance, rendezvous.collective))
    begins = rendezvous.start[np.searchsorted(rendezvous.collective, bare.instance[met])]
    earliest, transfers = graph.nodes.earliest.copy(), bare.transfer[met]
    earliest[transfers] = np.maximum(earliest[transfers], begins)
    return replay(dataclasses.replace(graph, nodes=dataclasses.replace(graph.nodes, earliest=earliest)))


# Critical paths through condensed ranks: the nodes of a rank are replayed where a path visits it.

InsideOf = Callable[[int], Timeline]  # returns the replay of a rank by itself, from `replay_inside`


def inside_of(timeline: Timeline, built: Callable[[int], tuple[BareRank, Graph]]) -> InsideOf:
    """Return a function that replays a rank by itself, once per rank.

    Args:
        built: returns a rank without lags, and its graph.
    """
    rendezvous = rendezvous_of(timeline)
    return cache(lambda rank: replay_inside(*built(rank), rendezvous))


def path_through(joined: JoinedGraph, timeline: Timeline, inside: InsideOf) -> PathTo:
    """Return a function that finds paths to the ends of nodes of a joined graph, through its ranks."""
    return partial(_path_to_last, joined, timeline, inside)


def _path_to_last(joined: JoinedGraph, timeline: Timeline, inside: InsideOf, last: Bools) -> list[Stretch]:
    """Return the path to the end of the first kept node in `last`, or of the work it represents."""
    kept = int(np.argmax(last))
    nodes = joined.graph.nodes
    rank = int(nodes.rank[kept])
    inner = inside(rank).graph.nodes
    ends = inside(rank).end == timeline.end[kept]
    ends &= inner.window == nodes.window[kept]
    if nodes.kind[kept] == NodeKind.END:
        ends &= inner.step == nodes.step[kept]
    return path_inside(joined, timeline, inside, rank, int(np.argmax(ends)))


def path_inside(
    joined: JoinedGraph, timeline: Timeline, inside: InsideOf, rank: int, node: int
) -> list[Stretch]:
    """Return the path that decides when a node of a rank ends."""
    stretches: list[Stretch] = []
    edges, kind = joined.graph.edges, joined.graph.nodes.kind
    met = np.flatnonzero(kind == NodeKind.RENDEZVOUS)
    met_by = {int(joined.graph.nodes.collective[meeting_node]): int(meeting_node) for meeting_node in met}
    while True:
        inner = inside(rank)
        path = chain_to(inner, node)
        stretches.append((inner, path))
        first, nodes = int(path[0]), inner.graph.nodes
        meeting = (
            met_by.get(int(nodes.collective[first]), -1) if nodes.kind[first] == NodeKind.TRANSFER else -1
        )
        if meeting < 0 or timeline.start[meeting] < inner.start[first] or timeline.binding[meeting] < 0:
            return stretches[::-1]
        last_arrived = edges.source[timeline.binding[meeting]]
        rank, node = int(joined.graph.nodes.rank[last_arrived]), int(joined.node[last_arrived])
