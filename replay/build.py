"""From the tables of a run to one global graph.

In: an opened run. Out: a `Built`: the graph, the matching of collectives and the clocks behind it.
The steps: match collectives across ranks, align clocks, build each rank's part, join the parts with one
rendezvous per collective, and pool the lags over all ranks. GPU start times are derived from the edges;
what had to be taken from the trace is marked as anchored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.align import Alignment, align, one_clock
from dpro.replay.columns import COMMUNICATION_THREAD
from dpro.replay.dataflow import told_dependencies
from dpro.replay.graph import (
    GPU_KINDS,
    EdgeKind,
    Edges,
    Graph,
    Message,
    NodeKind,
    Nodes,
    Place,
    assembled,
    make_graph,
    order_of,
    renumbered,
)
from dpro.replay.local import Local, make_local
from dpro.replay.match import POINT_TO_POINT, Matching, match_collectives
from dpro.replay.operations import consists_of_operations
from dpro.replay.oplevel import build_operations, with_typical_delays
from dpro.replay.part import Part, build_part
from dpro.replay.sections import positions_in_steps
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, SPANS, STEPS, SYNCS, WORKERS
from dpro.store import Run

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Of the `spans` table; not the shapes, which are most of it.
COLUMNS = (
    "span_id", "rank", "window", "kind", "name", "start_ns", "duration_ns", "pid", "tid", "device", "stream",
    "correlation", "sequence_number", "forward_thread",
)  # fmt: skip
# What the thread says that drives the training loop.
STEP_MARKS = r"^ProfilerStep|^Optimizer\.step|^dpro::backward"
# Gaps between queued pieces of work longer than this are waits for something, not the cost of going on.
BACK_TO_BACK_NS = 20_000
# Of so many launches onto an idle stream the median is the rank's own; a GPU that hardly idles tells nothing.
ENOUGH_IDLE_LAUNCHES = 20
# Work that nothing in the trace explains the start of, and that starts later by more than this, is anchored.
UNEXPLAINED_NS = 50_000
# Within this time of its call a worker thread begins with a CPU collective, unless it finds no core.
NO_CORE_NS = 1_000_000


@dataclass(frozen=True)
class Built:
    """A graph and what it rests on.

    Attributes:
        graph: the graph.
        matching: collectives and their instances.
        alignment: the clock of each rank.
        background: spans on threads that touch neither a stream nor a collective, left out.
        steps_known: whether the run tells where steps begin; else each window counts as one step.
        of_operations: whether the nodes are whole operations, whose roles tell what depends on what.
        unknown: what the trace leaves open, one line each.
        assumed: what was taken for granted, one line each.
    """

    graph: Graph
    matching: Matching
    alignment: Alignment
    background: int
    steps_known: bool
    of_operations: bool = False
    unknown: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def predictive(self) -> Graph:
        """The graph to change: where launches are not recorded, without waits that only look like them."""
        return with_typical_delays(self.graph) if self.of_operations else self.graph


def build_graph(run: Run) -> Built:
    """Build the global graph of a run.

    Raises:
        Unanswerable: the run has no spans.
        GraphError: the trace contradicts itself (a cycle).
    """
    spans = run.table(SPANS, COLUMNS)
    if spans.height == 0:
        raise Unanswerable(
            "the run holds no spans to replay: record at least one deep window "
            "(`dpro record --skip S --every N --window-steps K`), or import a trace"
        )
    if consists_of_operations(spans):
        return _of_operations(run)
    names = spans["name"].unique().sort()
    code = spans["name"].cast(pl.Enum(names)).to_physical()
    marks = names.str.contains(STEP_MARKS).gather(code)
    spans = spans.drop("name").with_columns(code=code.cast(pl.Int64), marks=marks)
    matching = match_collectives(run.table(COLLECTIVES), spans)
    places = spans.select("rank", "window").unique().sort("rank", "window").rows()
    workers = run.table(WORKERS)
    alignment = align(matching.rows, places, workers, run.table(CLOCK_SAMPLES))
    spans, syncs, steps = map(alignment.aligned, (spans, run.table(SYNCS), run.table(STEPS)))
    moved, messages = with_messages(wait_and_transfer(alignment.aligned(matching.rows)))

    needs = told_dependencies(run, spans)
    spans_of, moved_of, steps_of, syncs_of, needs_of = map(_by_place, (spans, moved, steps, syncs, needs))
    locals_: list[Local] = []
    for rank, window in places:
        own_steps = steps_of(rank, window)
        if own_steps.is_empty() and window == 0:
            own_steps = steps_of(rank, -1)  # known, but not which window they were in
        locals_.append(make_local(rank, window, spans_of(rank, window), moved_of(rank, window), own_steps))
    positions = positions_in_steps(locals_)
    parts = [
        build_part(
            local,
            syncs_of(local.rank, local.window),
            needs_of(local.rank, local.window),
            names,
            positions.get(local.rank, {}),
        )
        for local in locals_
    ]
    labels = (*names.to_list(), "(no span)", "(rendezvous)")
    graph = _join(parts, moved, labels)
    graph = dataclasses.replace(graph, messages=messages, places=_places(workers), run=run)
    known = any(local.step_start.size for local in locals_)
    return Built(graph, matching, alignment, sum(part.background for part in parts), known)


def _by_place(table: pl.DataFrame) -> Callable[[int, int], pl.DataFrame]:
    """A function from rank and window to the rows of a table that are theirs."""
    parts = table.partition_by("rank", "window", as_dict=True)
    return lambda rank, window: parts.get((rank, window), table.clear())


def _places(workers: pl.DataFrame) -> dict[int, Place]:
    """Where in the job the ranks stand that are known to be on an axis of it."""
    known = workers.filter((pl.col("dp") >= 0) | (pl.col("pp") >= 0)).select("rank", "dp", "pp")
    return {rank: Place(max(dp, 0), max(stage, 0)) for rank, dp, stage in known.iter_rows()}


def _of_operations(run: Run) -> Built:
    """What `build_graph` makes of a run of whole operations; those have one clock and no other threads."""
    made = build_operations(run)
    alignment = one_clock(((rank, 0) for rank in made.graph.places), "one trace")
    known = made.steps_known
    return Built(made.graph, made.matching, alignment, 0, known, True, made.unknown, made.assumed)


def wait_and_transfer(matched: pl.DataFrame) -> pl.DataFrame:
    """Take each member's time in a collective apart into waiting and moving.

    All members move once the last has arrived: a member's transfer is its own end minus the latest start in
    the group (Lin et al., OSDI 2025, section 3.2).

    A message of CPU tensors lasts in the trace until its caller asks for it: it took as long as on the side
    that asked first.

    Args:
        matched: rows of `Matching`, on the aligned clock.

    Returns:
        The rows with `rendezvous_ns` (aligned), `transfer_ns` and `is_message`.
    """
    transfer = (pl.col("start_ns") + pl.col("duration_ns") - pl.col("rendezvous_ns")).clip(lower_bound=0)
    is_message = pl.col("op").is_in(POINT_TO_POINT) & (pl.col("device") < 0)
    rows = matched.with_columns(
        rendezvous_ns=pl.col("start_ns").max().over("instance"), is_message=is_message.fill_null(False)
    )
    shortest = transfer.min().over("instance")
    return rows.with_columns(transfer_ns=pl.when("is_message").then(shortest).otherwise(transfer))


def with_messages(matched: pl.DataFrame) -> tuple[pl.DataFrame, tuple[Message, ...]]:
    """What each member moves.

    Args:
        matched: rows of `Matching`.

    Returns:
        The rows with `payload` (bytes, -1 unknown) and `message`, and the messages that the latter numbers.
    """
    known = pl.max_horizontal(pl.col("group_ranks").list.len().cast(pl.Int64), "expected").max()
    rows = matched.with_columns(
        num_ranks=known.over("key"), payload=pl.max_horizontal("bytes_in", "bytes_out")
    )
    columns = ["op", "key", "num_ranks", "dtype"]
    kinds = rows.select(columns).unique().sort(columns).with_row_index("message")
    rows = rows.join(kinds.cast({"message": pl.Int64}), on=columns, how="left", maintain_order="left")
    return rows, tuple(Message(*kind) for kind in kinds.select(columns).iter_rows())


def _join(parts: list[Part], moved: pl.DataFrame, names: tuple[str, ...]) -> Graph:
    """Put the parts behind one another, add the rendezvous between them, and pool the lags."""
    first = np.cumsum([0] + [part.begins.size for part in parts])
    met, meetings = _rendezvous(parts, first, moved, len(names) - 1)
    edges = _edges_of_all(parts, first, meetings)
    # Columns are written where they stay: what is in order need not be copied into order.
    total = int(first[-1]) + met.duration.size
    order, stuck = order_of(edges, np.concatenate([*(part.begins for part in parts), met.measured_start]))
    number = np.arange(total)
    if not stuck.size:
        number[order] = np.arange(total)
    nodes = Nodes(**{f.name: np.empty(total, getattr(met, f.name).dtype) for f in dataclasses.fields(Nodes)})
    lanes: list[tuple[int, str]] = []
    for part, begin in zip(parts, first.tolist()):
        own, own_lanes = part.nodes()
        own.lane[:] += len(lanes)
        _write(own, nodes, number[begin : begin + part.begins.size])
        lanes += own_lanes
    _write(met, nodes, number[first[-1] :])
    origin = int(nodes.measured_start.min())
    nodes.name[nodes.name < 0] = len(names) - 2
    nodes.earliest[nodes.anchored] -= origin
    for times in (nodes.measured_start, nodes.measured_end):
        times -= origin
    if stuck.size:
        return make_graph(nodes, edges, names, tuple(lanes), origin)  # says what the cycle is
    on_worker = np.array([what.startswith(COMMUNICATION_THREAD) for _, what in lanes])
    edges, nodes = _pooled_lags(renumbered(edges, order), nodes, on_worker)
    return assembled(nodes, edges, names, tuple(lanes), origin)


def _write(part: Nodes, nodes: Nodes, number: Ints) -> None:
    """Write the columns of a part into those of all nodes, at their numbers there."""
    for f in dataclasses.fields(Nodes):
        getattr(nodes, f.name)[number] = getattr(part, f.name)


def _edges_of_all(parts: list[Part], first: Ints, meetings: Edges) -> Edges:
    """The edges of all parts, in the numbers of all nodes, and those at rendezvous."""
    columns: dict[str, Any] = {}
    for f in dataclasses.fields(Edges):
        chunks = [getattr(part.edges, f.name) for part in parts]
        if f.name in ("source", "target"):
            chunks = [chunk + shift for chunk, shift in zip(chunks, first)]
        columns[f.name] = np.concatenate([*chunks, getattr(meetings, f.name)])
    return Edges(**columns)


def _rendezvous(parts: list[Part], first: Ints, moved: pl.DataFrame, name: int) -> tuple[Nodes, Edges]:
    """One node per collective that several ranks hold, with edges from each arrival and to each transfer."""
    instance = np.concatenate([part.instance for part in parts])
    arrive = np.concatenate([part.arrive + shift for part, shift in zip(parts, first)])
    transfer = np.concatenate([part.transfer + shift for part, shift in zip(parts, first)])
    found, at, members = np.unique(instance, return_inverse=True, return_counts=True)
    shared = members > 1
    number = np.cumsum(shared) - 1 + first[-1]
    several = shared[at]
    node = number[at][several]
    facts = moved.group_by("instance").agg(pl.col("rendezvous_ns").first(), pl.col("window").first())
    facts = facts.filter(pl.col("instance").is_in(found[shared].tolist())).sort("instance")
    time = facts["rendezvous_ns"].to_numpy()
    count = int(shared.sum())

    def constant(value: int) -> Ints:
        return np.full(count, value, np.int64)

    nodes = Nodes(
        kind=constant(NodeKind.RENDEZVOUS),
        duration=constant(0),
        earliest=constant(0),
        anchored=np.zeros(count, np.bool_),
        rank=constant(-1),
        window=facts["window"].cast(pl.Int64).to_numpy(),
        step=constant(-1),
        lane=constant(-1),
        name=constant(name),
        around=constant(-1),
        span=constant(-1),
        collective=found[shared],
        bytes=constant(-1),
        message=constant(-1),
        section=constant(-1),
        measured_start=time,
        measured_end=time,
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


def _pooled_lags(edges: Edges, nodes: Nodes, on_worker: Bools) -> tuple[Edges, Nodes]:
    """The graph with lags. Only work that is started has any, and most edges lead to other nodes."""
    chosen = np.flatnonzero(_on_stream(nodes)[edges.target])
    to_work = Edges(**{f.name: getattr(edges, f.name)[chosen] for f in dataclasses.fields(Edges)})
    to_work, nodes = _lags_of_work(to_work, nodes, on_worker)
    lag = edges.lag.copy()
    lag[chosen] = to_work.lag
    return dataclasses.replace(edges, lag=lag), nodes


def _lags_of_work(edges: Edges, nodes: Nodes, on_worker: Bools) -> tuple[Edges, Nodes]:
    """Lags of launches, stream order and events, each one number per kind of work for all ranks.

    A launch's latency shows where the stream was idle when the call returned (median over those); the cost
    of going on with queued work, where the launch was long past (mean over gaps short enough to be that: a
    median would add up its bias over thousands of kernels). One rank alone cannot tell: a GPU that never
    idles shows no latency. Work whose launch is not in the trace and that nothing else explains keeps its
    distance from the work before it, and counts as anchored.
    """
    slack = nodes.measured_start[edges.target] - nodes.measured_end[edges.source]
    launch, stream = edges.kind == EdgeKind.LAUNCH, edges.kind == EdgeKind.STREAM
    event = edges.kind == EdgeKind.EVENT
    group = np.where(nodes.kind == NodeKind.COPY, 1, np.where(nodes.kind == NodeKind.ARRIVE, 2, 0))
    group = np.where(on_worker[nodes.lane], 3, group)[edges.target]
    others = _latest_end(edges, nodes, ~launch)
    called = _latest_end(edges, nodes, launch)
    # A call that let go before it returned (copies that block, CUDA graphs) has a latency of its own, but
    # never more than was seen: the moment may have been taken from the work.
    returned, early = launch & ~edges.inferred, launch & edges.inferred
    free = others[edges.target] <= nodes.measured_end[edges.source]
    lag = edges.lag.copy()
    for code in range(4):
        idle = returned & (group == code) & free
        if idle.any():
            lag[returned & (group == code)] = round(float(np.median(slack[idle])))
        idle = (
            early & (group == code) & (slack > 0) & (others[edges.target] <= nodes.measured_end[edges.source])
        )
        if idle.any():
            mine = early & (group == code)
            lag[mine] = np.clip(slack[mine], 0, round(float(np.median(slack[idle]))))
        queued = (
            stream
            & (group == code)
            & (called[edges.target] < nodes.measured_end[edges.source] - BACK_TO_BACK_NS)
        )
        queued &= slack <= BACK_TO_BACK_NS
        if queued.any():
            lag[stream & (group == code)] = round(float(slack[queued].mean()))
    lag += _gpu_clocks(nodes, edges, slack - lag, returned & (group < 3), free)
    bound = event & (slack >= 0) & (slack <= BACK_TO_BACK_NS)
    if bound.any():
        lag[event] = round(float(np.median(slack[bound])))
    # A dependency that is only inferred must not contradict what happened.
    lag[edges.inferred & event] = np.minimum(lag, slack)[edges.inferred & event]
    contention = edges.kind == EdgeKind.CONTENTION
    lag[contention] = slack[contention]
    edges = dataclasses.replace(edges, lag=lag)
    return _anchor_unexplained(edges, nodes, launch, stream, on_worker)


def _gpu_clocks(nodes: Nodes, edges: Edges, left: Ints, launch: Bools, free: Bools) -> Ints:
    """[E] by how much launches of a rank arrive later than those of all ranks, where it has enough to tell.

    Profilers read the clock of each GPU to some 10 us only, for all its launches alike: on one rank kernels
    begin before the calls that launch them return, on another long after.

    Args:
        nodes, edges: the graph so far.
        left: [E] ns that the pooled latency leaves of a launch.
        launch: [E] launches onto streams, by calls that had returned.
        free: [E] whether nothing else holds up what an edge leads to.
    """
    later = np.zeros(left.size, np.int64)
    launches = np.flatnonzero(launch)
    rank, window = nodes.rank[edges.target[launches]], nodes.window[edges.target[launches]]
    order = np.lexsort((window, rank))
    changes = np.flatnonzero(np.diff(rank[order]) | np.diff(window[order])) + 1
    for mine in np.split(launches[order], changes):
        told = mine[free[mine]]
        if told.size >= ENOUGH_IDLE_LAUNCHES:
            later[mine] = round(float(np.median(left[told])))
    return later


def _anchor_unexplained(
    edges: Edges, nodes: Nodes, launch: Bools, stream: Bools, on_worker: Bools
) -> tuple[Edges, Nodes]:
    """Tie down GPU work that starts later than anything in the trace explains.

    Work without a launch keeps its distance from the work before it, and a worker thread that found no core
    its distance from what it had waited for. Work that was ready before its GPU did anything inside the
    window may have queued behind work from before it: it keeps its time.
    """
    ready = _latest_end(edges, nodes, np.ones(edges.lag.size, np.bool_))
    late = _on_stream(nodes) & (nodes.measured_start - ready > UNEXPLAINED_NS) & ~nodes.anchored
    without_core = late & on_worker[nodes.lane] & (nodes.measured_start - ready > NO_CORE_NS)
    has_launch, has_before = np.zeros(late.size, np.bool_), np.zeros(late.size, np.bool_)
    has_launch[edges.target[launch]] = True
    has_before[edges.target[stream]] = True
    on_gpu = np.isin(nodes.kind, GPU_KINDS)
    lowest = int(nodes.rank.min())
    first_work = np.full(int(nodes.rank.max()) - lowest + 1, np.iinfo(np.int64).max)
    np.minimum.at(first_work, nodes.rank[on_gpu] - lowest, nodes.measured_start[on_gpu])
    first = late & ~has_before & ~on_worker[nodes.lane] & (ready < first_work[nodes.rank - lowest])
    fitted = stream & (late & ~has_launch)[edges.target]
    fitted |= without_core[edges.target] & (nodes.measured_end[edges.source] == ready[edges.target])
    lag = edges.lag.copy()
    lag[fitted] = (nodes.measured_start[edges.target] - nodes.measured_end[edges.source])[fitted]
    anchored = nodes.anchored | first
    anchored[edges.target[fitted]] = True
    earliest = np.where(first, nodes.measured_start, nodes.earliest)
    return dataclasses.replace(edges, lag=lag), dataclasses.replace(
        nodes, anchored=anchored, earliest=earliest
    )


def _on_stream(nodes: Nodes) -> Bools:
    """[N] GPU work and collectives' arrivals; arrivals of CPU collectives too, which behave alike."""
    return np.isin(nodes.kind, (NodeKind.KERNEL, NodeKind.COPY, NodeKind.ARRIVE))


def _latest_end(edges: Edges, nodes: Nodes, chosen: Bools) -> Ints:
    """[N] measured end of the latest predecessor over the chosen edges, long ago where there is none."""
    latest = np.full(nodes.duration.size, np.iinfo(np.int64).min // 2)
    np.maximum.at(latest, edges.target[chosen], nodes.measured_end[edges.source[chosen]])
    return latest
