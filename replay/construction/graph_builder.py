"""The global graph, built from the tables of a run.

Takes an opened run; returns a `Built`: the graph, the matching of collectives and the clocks behind it. The
steps: match collectives across ranks, align clocks, build each rank's graph, join them with one rendezvous
per collective, and pool the lags over all ranks. GPU starts are derived from the edges; starts taken from the
trace are marked as anchored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.errors import Unanswerable
from dpro.replay.alignment.align import (
    Alignment,
    align,
    answers_of,
    first_begun,
    one_after_the_other,
    one_clock,
    without_answers,
)
from dpro.replay.alignment.match import Matching, match_collectives
from dpro.replay.alignment.transfers import wait_and_transfer, without_transfers
from dpro.replay.construction.data_dependencies import recorded_dependencies
from dpro.replay.construction.lags import pooled_lags
from dpro.replay.construction.rank_graph import (
    COMMUNICATION_THREAD,
    Place,
    RankGraph,
    build_rank_graph,
    call_order,
    positions_in_steps,
)
from dpro.replay.construction.rank_view import Names, RankView, make_rank_view
from dpro.replay.construction.recording_cost import RecordingCost
from dpro.replay.first_calls import with_warm_calls
from dpro.replay.graph import (
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
    make_graph,
    order_of,
    renumbered,
    with_own_facts,
)
from dpro.replay.pipeline.operations import consists_of_operations
from dpro.replay.pipeline.oplevel import build_operations, with_typical_delays
from dpro.replay.pipeline.recorded import has_operations, operations_of
from dpro.replay.steps import LOADS, are_stepped, lasting_steps
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, SPANS, STEPS, SYNCS, WORKERS
from dpro.schema.members import num_members
from dpro.stages import Progress, ignore, progress_counter, stage
from dpro.store import Run

# Columns of the `spans` table that are read; not the shapes, which are most of it.
COLUMNS = (
    "span_id", "rank", "window", "kind", "name", "start_ns", "duration_ns", "pid", "tid", "device", "stream",
    "correlation", "sequence_number", "forward_thread",
)  # fmt: skip
RowsOf = Callable[[int, int], pl.DataFrame]  # returns the rows of a rank in a window
# Names of annotations by the thread that drives the training loop.
STEP_MARKS = r"^ProfilerStep|^Optimizer\.step|^dpro::backward"


@dataclass(frozen=True)
class Built:
    """A graph and its basis.

    Attributes:
        graph: the graph as recorded.
        matching: collectives and their instances.
        alignment: the clock of each rank.
        steps_known: whether the run has the beginnings of steps; else each window counts as one step.
        of_operations: whether the nodes are whole operations, whose roles imply their dependencies.
        unknown: open questions about the trace, one line each.
        assumed: assumptions, one line each.
        recording: cost of recording the job; None where unknown.
        pace: from `find_pace`.
    """

    graph: Graph
    matching: Matching
    alignment: Alignment
    steps_known: bool
    of_operations: bool = False
    unknown: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    recording: RecordingCost | None = None
    pace: float = 1.0

    @cached_property
    def predictive(self) -> Graph:
        """The graph of the job as it runs, on which all predictions and judgements are based.

        The cost of recording and of the first calls of a process is taken out, and a step is as long as those
        outside deep windows; from a graph of operations, waits that only look like launch delays are removed.
        """
        if self.of_operations:
            return with_typical_delays(self.graph)
        graph = self.graph
        if self.recording is not None and self.recording.duration is not None:
            nodes = dataclasses.replace(graph.nodes, duration=self.recording.duration)  # not a copy
            graph = dataclasses.replace(graph, nodes=nodes)
        warm = with_warm_calls(graph).at_pace(self.pace)
        return warm if warm is self.graph else with_own_facts(warm)


def build_graph(run: Run, report: Progress = ignore) -> Built:
    """Build the global graph of a run.

    Args:
        report: called with the work done and the work in total: matching, aligning and joining count one
            each, and each window of a rank two.

    Raises:
        Unanswerable: the run has no spans, or none of them is work.
        GraphError: the trace contradicts itself (a cycle).
    """
    spans = run.table(SPANS, COLUMNS)
    if spans.height == 0:
        raise Unanswerable(
            "the run holds no spans to replay",
            "record at least one deep window (`dpro record --skip S --every N --window-steps K`), or import "
            "a trace",
        )
    if consists_of_operations(spans):
        return build_operation_view(run)
    spans, names = coded(spans)
    places = spans.select("rank", "window").unique().sort("rank", "window").rows()
    done = progress_counter(3 + 2 * len(places), report)
    spans, collectives, syncs, steps = _tables_of_run(run, spans)
    matching = match_collectives(collectives, spans)
    done()
    workers = run.table(WORKERS)
    if run.manifest.is_pretended:
        alignment, taken_apart = one_after_the_other(places, steps), without_transfers
    else:
        alignment = align(matching.rows, places, workers, run.table(CLOCK_SAMPLES), first_begun(steps))
        taken_apart = wait_and_transfer
    spans, syncs, steps = map(alignment.aligned, (spans, syncs, steps))
    moved, messages = with_messages(taken_apart(alignment.aligned(with_asked_after(matching.rows))))
    needs = recorded_dependencies(run, spans)
    spans_of, moved_of, steps_of, syncs_of, needs_of = map(by_place, (spans, moved, steps, syncs, needs))
    done()
    views: list[RankView] = []
    stepped = are_stepped(steps, (rank for rank, _ in places))
    for rank, window in places:
        of_place = (spans_of(rank, window), moved_of(rank, window), steps_in(steps_of, rank, window))
        views.append(make_rank_view(rank, window, *of_place, stepped))
        done()
    positions = positions_in_steps(map(call_order, views))
    rank_graphs: list[RankGraph] = []
    by_code = Names(names)
    for view in views:
        place, calls = (view.rank, view.window), positions.get(view.rank, {})
        rank_graphs.append(build_rank_graph(view, syncs_of(*place), needs_of(*place), by_code, calls))
        done()
    labels = (*names.to_list(), NO_SPAN, OF_RENDEZVOUS)
    with stage("Joining the ranks"):
        graph = _join(rank_graphs, moved, labels)
    done()
    graph = dataclasses.replace(graph, messages=messages, places=places_of(workers), run=run)
    steps_known = any(view.step_start.size for view in views)
    return Built(graph, matching, alignment, steps_known)


def coded(spans: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
    """Replace span names by `code`, with `marks` (of steps) and `loads` (of input); also return the names."""
    names = spans["name"].unique().sort()
    code = spans["name"].cast(pl.Enum(names)).to_physical()
    marks, loads = (names.str.contains(pattern).gather(code) for pattern in (STEP_MARKS, LOADS))
    return spans.drop("name").with_columns(code=code.cast(pl.Int64), marks=marks, loads=loads), names


def steps_in(steps_of: RowsOf, rank: int, window: int) -> pl.DataFrame:
    """Return the steps of a rank in a window.

    Args:
        steps_of: from `by_place`.
    """
    steps = steps_of(rank, window)
    if steps.is_empty() and window == 0:
        return steps_of(rank, -1)  # steps whose window is unknown
    return steps


def _tables_of_run(run: Run, spans: pl.DataFrame) -> list[pl.DataFrame]:
    """Return spans, collectives, syncs and steps; of pretended ranks without the time of answers."""
    tables = [spans, run.table(COLLECTIVES), run.table(SYNCS), lasting_steps(run.table(STEPS))]
    if not run.manifest.is_pretended:
        return tables
    answers = answers_of(tables[1])
    return [without_answers(table, answers) for table in tables]


def by_place(table: pl.DataFrame) -> RowsOf:
    """Return a function from rank and window to their rows of a table."""
    rank, window = (table[name].cast(pl.Int64).to_numpy() for name in ("rank", "window"))
    opens = np.flatnonzero(np.append(True, (np.diff(rank) != 0) | (np.diff(window) != 0))[: rank.size])
    lengths = np.diff(np.append(opens, rank.size))
    places = list(zip(rank[opens].tolist(), window[opens].tolist()))
    if len(set(places)) < len(places):  # rows of a place are not consecutive
        parts = table.partition_by("rank", "window", as_dict=True)
        return lambda rank, window: parts.get((rank, window), table.clear())
    runs = dict(zip(places, zip(opens.tolist(), lengths.tolist())))
    return lambda rank, window: table.slice(*runs.get((rank, window), (0, 0)))


def places_of(workers: pl.DataFrame) -> dict[int, MeshPosition]:
    """Return the mesh positions of the ranks that have any."""
    placed = workers.filter((pl.col("dp") >= 0) | (pl.col("pp") >= 0)).select("rank", "dp", "pp")
    return {rank: MeshPosition(max(dp, 0), max(stage, 0)) for rank, dp, stage in placed.iter_rows()}


def build_operation_view(run: Run) -> Built:
    """Build the graph of a run's whole operations, alone or derived from its kernels and CPU work.

    Operations have one clock and no other threads.

    Raises:
        Unanswerable: the run has no operations, or no step can be understood.
    """
    operations = operations_of(run)
    if operations is None:
        raise Unanswerable(
            "the run has no micro-batch forwards and backwards",
            "record a pipeline-parallel job, or import a trace of whole operations",
        )
    made = build_operations(run, operations)
    how = "moved onto one clock" if has_operations(run) else "one trace"
    alignment = one_clock(((rank, 0) for rank in made.graph.places), how)
    steps_known = made.steps_known
    return Built(made.graph, made.matching, alignment, steps_known, True, made.unknown, made.assumed)


def without_rendezvous(built: Built) -> Built:
    """Return the graph without waits of ranks for each other, as pretended ranks ran and are judged."""
    graph = built.graph.without_edges(built.graph.edges.kind == EdgeKind.RENDEZVOUS)
    return dataclasses.replace(built, graph=graph)


def with_asked_after(matched: pl.DataFrame) -> pl.DataFrame:
    """Add `asked_after_ns` to rows of `Matching`: the time from start to request, -1 where unknown."""
    after = pl.when(pl.col("asked_ns") >= 0).then(pl.col("asked_ns") - pl.col("start_ns")).otherwise(-1)
    return matched.with_columns(asked_after_ns=after)


def with_messages(matched: pl.DataFrame) -> tuple[pl.DataFrame, tuple[Message, ...]]:
    """Add the communication of each member.

    Args:
        matched: rows of `Matching`.

    Returns:
        The rows with `payload` (bytes, -1 unknown) and `message`, and the messages that the latter indexes.
    """
    members = pl.max_horizontal(num_members(), "expected").max()
    rows = matched.with_columns(
        num_ranks=members.over("key"), payload=pl.max_horizontal("bytes_in", "bytes_out")
    )
    columns = ["op", "key", "num_ranks", "dtype"]
    kinds = rows.select(columns).unique().sort(columns).with_row_index("message")
    rows = rows.join(kinds.cast({"message": pl.Int64}), on=columns, how="left", maintain_order="left")
    return rows, tuple(Message(*kind) for kind in kinds.select(columns).iter_rows())


@dataclass(frozen=True)
class InOrder:
    """Nodes and edges of several parts, numbered in topological order.

    Attributes:
        nodes, edges: without lags between work.
        lanes: (rank, name) that `nodes.lane` indexes.
        number: [N] new number of each node, part by part, with the rendezvous last.
    """

    nodes: Nodes
    edges: Edges
    lanes: tuple[tuple[int, str], ...]
    number: Ints


def refuse_no_work(num_nodes: int) -> None:
    """Raise if a graph has no nodes.

    Raises:
        Unanswerable: there are none.
    """
    if not num_nodes:
        raise Unanswerable(
            "the run holds no work to replay: its spans launch nothing, wait for nothing and communicate "
            "nothing",
            "record operators, CUDA calls and kernels",
        )


def _join(rank_graphs: list[RankGraph], moved: pl.DataFrame, names: tuple[str, ...]) -> Graph:
    """Join the graphs of all ranks by their rendezvous, and pool the lags.

    Raises:
        Unanswerable: they have no nodes.
    """
    joined = in_order(rank_graphs, moved, names)
    nodes, lanes = joined.nodes, joined.lanes
    refuse_no_work(nodes.measured_start.size)
    origin = int(nodes.measured_start.min())
    count_from(nodes, origin)
    edges, nodes = pooled_lags(joined.edges, nodes, on_worker(lanes), names)
    return assembled(nodes, edges, names, lanes, origin)


def on_worker(lanes: tuple[tuple[int, str], ...]) -> Bools:
    """Return [L] which lanes are threads that run CPU collectives."""
    return np.array([what.startswith(COMMUNICATION_THREAD) for _, what in lanes], np.bool_)


def count_from(nodes: Nodes, origin: int) -> None:
    """Subtract an origin from the times of nodes, in place.

    Args:
        nodes: nodes to change.
        origin: ns.
    """
    nodes.earliest[nodes.anchored] -= origin
    for times in (nodes.measured_start, nodes.measured_end):
        times -= origin


def in_order(rank_graphs: Sequence[RankGraph], moved: pl.DataFrame, names: tuple[str, ...]) -> InOrder:
    """Concatenate parts, add the rendezvous between them, and number all nodes in topological order.

    Args:
        names: names of the graph; the last two are for nodes without a span, and for rendezvous.

    Raises:
        GraphError: there is a cycle.
    """
    first = np.cumsum([0] + [part.begins.size for part in rank_graphs])
    met, rendezvous = _rendezvous(rank_graphs, first, moved, len(names) - 1)
    columns: dict[str, Any] = {}
    for f in dataclasses.fields(Edges):
        chunks = [getattr(part.edges, f.name) for part in rank_graphs]
        if f.name in ("source", "target"):
            chunks = [chunk + shift for chunk, shift in zip(chunks, first)]
        columns[f.name] = np.concatenate([*chunks, getattr(rendezvous, f.name)])
    edges = Edges(**columns)
    # Nodes are numbered first, so that their columns are written in order and not copied.
    total = int(first[-1]) + met.duration.size
    order, stuck = order_of(
        edges, np.concatenate([*(part.begins for part in rank_graphs), met.measured_start])
    )
    number = np.arange(total)
    if not stuck.size:
        number[order] = np.arange(total)
    nodes = Nodes(**{f.name: np.empty(total, getattr(met, f.name).dtype) for f in dataclasses.fields(Nodes)})
    lanes: list[tuple[int, str]] = []
    for part, begin in zip(rank_graphs, first.tolist()):
        where = number[begin : begin + part.begins.size]
        lanes += part.nodes(Place(nodes, where, len(lanes), len(names) - 2))
    write_columns(met, nodes, number[first[-1] :])
    if stuck.size:
        make_graph(nodes, edges, names, tuple(lanes), 0)  # raises with the cycle
    return InOrder(nodes, renumbered(edges, order), tuple(lanes), number)


def write_columns(some: Nodes, nodes: Nodes, number: Ints) -> None:
    """Write the columns of some nodes into those of all nodes.

    Args:
        some: [K] the nodes to write.
        nodes: [N] all nodes.
        number: [K] index of each in `nodes`.
    """
    for f in dataclasses.fields(Nodes):
        getattr(nodes, f.name)[number] = getattr(some, f.name)


def _rendezvous(
    rank_graphs: Sequence[RankGraph], first: Ints, moved: pl.DataFrame, name: int
) -> tuple[Nodes, Edges]:
    """Return a node per collective of several ranks, with edges from each arrival and to each transfer."""
    instance = np.concatenate([part.instance for part in rank_graphs])
    arrive = np.concatenate([part.arrive + shift for part, shift in zip(rank_graphs, first)])
    transfer = np.concatenate([part.transfer + shift for part, shift in zip(rank_graphs, first)])
    instances, which, members = np.unique(instance, return_inverse=True, return_counts=True)
    shared = members > 1
    number = np.cumsum(shared) - 1 + first[-1]
    several = shared[which]
    node = number[which][several]
    facts = moved.group_by("instance").agg(pl.col("rendezvous_ns").first(), pl.col("window").first())
    facts = facts.filter(pl.col("instance").is_in(instances[shared].tolist())).sort("instance")
    time = facts["rendezvous_ns"].to_numpy()
    none = np.full(int(shared.sum()), -1, np.int64)
    unknown = dict.fromkeys(("rank", "step", "lane", "around", "span", "bytes", "message", "phase"), none)
    nodes = Nodes(
        kind=np.full_like(none, NodeKind.RENDEZVOUS),
        duration=np.zeros_like(none),
        earliest=np.zeros_like(none),
        anchored=np.zeros(none.size, np.bool_),
        window=facts["window"].cast(pl.Int64).to_numpy(),
        name=np.full_like(none, name),
        collective=instances[shared],
        measured_start=time,
        measured_end=time,
        **unknown,
    )
    num_edges = 2 * node.size
    edges = Edges(
        source=np.concatenate([arrive[several], node]),
        target=np.concatenate([node, transfer[several]]),
        lag=np.zeros(num_edges, np.int64),
        kind=np.full(num_edges, EdgeKind.RENDEZVOUS, np.int64),
        inferred=np.zeros(num_edges, np.bool_),
    )
    return nodes, edges
