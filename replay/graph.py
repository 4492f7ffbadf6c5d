"""The global dataflow graph: read-only arrays, one entry per node and per edge.

Takes nodes and edges from `construction/graph_builder.py`; returns a validated `Graph`, numbered in
topological order. `dpro.replay.timeline` replays it; `dpro.replay.whatif` changes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import wraps
from operator import attrgetter
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.errors import DproError
from dpro.markup import table
from dpro.replay.engine import by_target, distinct, topological_order
from dpro.store import Run

NO_SPAN, OF_RENDEZVOUS = "(no span)", "(rendezvous)"  # names of nodes without a span


class NodeKind(IntEnum):
    """The kind of work of a node."""

    CPU = 0  # an operator's own time on a CPU thread
    RUNTIME = 1  # a CUDA/HIP runtime call's own time
    HOST = 2  # CPU time inside an annotation or Python function, but in no operator
    GAP = 3  # CPU time that no span explains
    KERNEL = 4
    COPY = 5  # memcpy and memset
    ARRIVE = 6  # a member of a collective is ready; lasts no time
    RENDEZVOUS = 7  # the last member of a collective is ready; lasts no time, belongs to no rank
    TRANSFER = 8  # one member's part of a collective after the rendezvous
    DELAY = 9  # an unrecorded launch: the time between the last dependency of an operation and its start
    END = 10  # the work of a rank in a step is over; lasts no time, only in condensed graphs


class EdgeKind(IntEnum):
    """The reason why a node cannot start earlier."""

    THREAD = 0  # program order on a CPU thread
    HANDOVER = 1  # one thread continues what another began (forward -> backward -> optimizer)
    LAUNCH = 2  # a runtime call, or the call of a CPU collective, puts work on a stream or worker
    STREAM = 3  # order on a GPU stream or communication worker
    EVENT = 4  # one stream waits for an event on another
    SYNC = 5  # the CPU waits for the GPU or for a collective
    RENDEZVOUS = 6  # a collective moves data once all its members are ready
    CONTENTION = 7  # a kernel starts once the work that fills the device drains
    PATH = 8  # the longest path over nodes that a condensed graph leaves out


NEVER_NS = -(1 << 62)  # the lag of an edge that delays no node

CPU_KINDS = (NodeKind.CPU, NodeKind.RUNTIME, NodeKind.HOST, NodeKind.GAP)
GPU_KINDS = (NodeKind.KERNEL, NodeKind.COPY)


class MeshPosition(NamedTuple):
    """The position of a rank in the job: its index on the data-parallel axis, and its pipeline stage."""

    dp: int
    stage: int


class Message(NamedTuple):
    """The kind of communication of a transfer: everything that its time may depend on, except bytes.

    Attributes:
        op: operation, as in table `collectives`.
        group: the process group, by any unique name.
        num_ranks: number of ranks in the group, where known.
        dtype: element type, empty where unknown.
    """

    op: str
    group: str
    num_ranks: int
    dtype: str


class GraphError(DproError):
    """The graph breaks an invariant; a defect of dpro or a trace that contradicts itself."""


def is_one_of(kind: Ints, kinds: Sequence[int]) -> Bools:
    """Return [N] whether each kind of node or edge is one of `kinds`.

    Args:
        kind: [N] kinds, not negative.
    """
    table = np.zeros(max(len(NodeKind), len(EdgeKind)), np.bool_)
    table[list(kinds)] = True
    return table[kind]


class _Columns:
    """Arrays of one length, a field each."""

    @property
    def columns(self) -> tuple[Ints | Bools, ...]:
        """All columns, in the order of the fields."""
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self))  # type: ignore[arg-type]

    def taken(self, which: Ints) -> Self:
        """Return the entries at indices `which` [K], in that order."""
        return self.__class__(*(column[which] for column in self.columns))


@dataclass(frozen=True)
class Nodes(_Columns):
    """The columns of the nodes, each [N].

    Attributes:
        kind: `NodeKind`.
        duration: ns.
        earliest: ns; a node may not start before. 0 unless the node is anchored.
        anchored: whether its start was taken from the trace, since no dependency explains it.
        rank: rank, -1 for a rendezvous.
        window: deep window.
        step: step number; -1 before the first whole step, -2 after the last.
        lane: index into `Graph.lanes`, -1 for a rendezvous.
        name: index into `Graph.names`.
        around: index into `Graph.names` of the innermost annotation around CPU work, -1 for none.
        span: span_id within the rank, -1 for none.
        collective: instance of a collective, -1 for none.
        bytes: payload of a transfer, the larger of input and output of its rank; -1 where unknown or none.
        message: index into `Graph.messages` of a transfer, -1 for other nodes.
        phase: number of collectives with other ranks that the rank has called in the step before this node, 0
            before the first; the numbering is common to all ranks; -1 outside steps.
        measured_start, measured_end: ns on the aligned clock, as recorded.
    """

    kind: Ints
    duration: Ints
    earliest: Ints
    anchored: Bools
    rank: Ints
    window: Ints
    step: Ints
    lane: Ints
    name: Ints
    around: Ints
    span: Ints
    collective: Ints
    bytes: Ints
    message: Ints
    phase: Ints
    measured_start: Ints
    measured_end: Ints


@dataclass(frozen=True)
class Edges(_Columns):
    """The columns of the edges, each [E]: source, target, lag in ns, `EdgeKind`, and whether inferred."""

    source: Ints
    target: Ints
    lag: Ints
    kind: Ints
    inferred: Bools

    def extended(self, *more: Edges) -> Edges:
        """Append more edges between the same nodes."""
        return Edges(*map(np.concatenate, zip(*(edges.columns for edges in (self, *more)))))


Columns = TypeVar("Columns", Nodes, Edges)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order, and their incoming edges in compressed rows.

    Attributes:
        nodes: columns of the nodes.
        edges: columns of the edges, sorted by target.
        indptr: [N + 1] edges into node i are indptr[i]:indptr[i + 1].
        names: names that `nodes.name` and `nodes.around` index.
        lanes: (rank, name of the thread or stream) that `nodes.lane` indexes.
        origin_ns: ns on the aligned clock that were subtracted from all times.
        messages: kinds of communication that `nodes.message` indexes.
        places: mesh positions of ranks, where the run has them.
        run: the run the graph was made from; edits read tables of it that nodes lack (shapes, buckets). None
            for a graph made by hand.
        network: measured table of communication times, from `tables.read_frame`.
        facts: values cached by `once`; graphs that differ only in some columns share them.
        products: measured times of matrix products on devices, as rows of `cost.kernels.products.PRODUCTS`.
        step_bytes: the most bytes that a step allocates beyond those allocated before it, in a job whose
            edits change that; None where it is as recorded.
    """

    nodes: Nodes
    edges: Edges
    indptr: Ints
    names: tuple[str, ...]
    lanes: tuple[tuple[int, str], ...]
    origin_ns: int
    messages: tuple[Message, ...] = ()
    places: Mapping[int, MeshPosition] = field(default_factory=dict)
    run: Run | None = None
    network: pl.DataFrame | None = None
    facts: dict[Hashable, Fact] = field(default_factory=dict, repr=False, compare=False)
    products: pl.DataFrame | None = None
    step_bytes: int | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return int(self.nodes.measured_start.size)  # which no edit changes by itself, unlike durations

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return int(self.edges.source.size)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have nodes, ascending."""
        ranks = once(self, "ranks", lambda graph: distinct(graph.nodes.rank)[0])
        return [rank for rank in ranks.tolist() if rank >= 0]

    def has_nodes_of(self, graph: Graph) -> bool:
        """Return whether both graphs have the same nodes, and so share their measured times."""
        return self.nodes.measured_start is graph.nodes.measured_start

    def edges_into(self, nodes: Ints) -> Ints:
        """Return the indices of the edges into some nodes, node by node."""
        first, count = self.indptr[nodes], self.indptr[nodes + 1] - self.indptr[nodes]
        until = np.cumsum(count)
        return np.repeat(first - until + count, count) + np.arange(count.sum())

    def _repr_html_(self) -> str:
        """Return a table of the number of nodes of each kind, for notebooks."""
        kinds, counts = np.unique(self.nodes.kind, return_counts=True)
        rows = [(NodeKind(kind).name.lower(), f"{count:,}") for kind, count in zip(kinds, counts)]
        ranks = np.unique(self.nodes.rank[self.nodes.rank >= 0]).size
        title = f"{self.num_nodes:,} nodes on {ranks} ranks, {self.num_edges:,} edges"
        return table(title, rows, ("kind of node", "nodes"))

    def with_durations(self, duration: Ints) -> Graph:
        """Return the graph with other durations, [N] ns."""
        return dataclasses.replace(self, nodes=dataclasses.replace(self.nodes, duration=frozen(duration)))

    def with_lags(self, lag: Ints) -> Graph:
        """Return the graph with other lags, [E] ns."""
        return dataclasses.replace(self, edges=dataclasses.replace(self.edges, lag=frozen(lag)))

    def at_pace(self, pace: float) -> Graph:
        """Return the graph in which all takes this many times as long; measured times stay as they are."""
        if pace == 1:
            return self
        nodes = dataclasses.replace(
            self.nodes,
            duration=np.rint(self.nodes.duration * pace).astype(np.int64),
            earliest=np.rint(self.nodes.earliest * pace).astype(np.int64),
        )
        lag, delays = self.edges.lag.copy(), self.edges.lag != NEVER_NS
        lag[delays] = np.rint(lag[delays] * pace)
        edges = dataclasses.replace(self.edges, lag=lag)
        return dataclasses.replace(self, nodes=_freeze(nodes), edges=_freeze(edges))

    def with_job_of(self, graph: Graph) -> Graph:
        """Return this graph with the facts about the job (run, network, messages, …) of another."""
        names = ("messages", "places", "run", "network", "products", "step_bytes")
        return dataclasses.replace(self, **{name: getattr(graph, name) for name in names})

    def without_waits(self, drop: Bools) -> Graph:
        """Return the graph with no waiting along the edges marked in `drop` [E], to be replayed faster.

        The edges remain, so this graph is only for a replay; edits and critical paths need `without_edges`.
        """
        return self.with_lags(np.where(drop, NEVER_NS, self.edges.lag))

    def without_edges(self, drop: Bools) -> Graph:
        """Return the graph without the edges marked in `drop` [E]; the node order stays valid."""
        edges = self.edges.taken(np.flatnonzero(~drop))
        kept_before = np.append(0, np.cumsum(~drop))
        return dataclasses.replace(self, edges=_freeze(edges), indptr=frozen(kept_before[self.indptr]))

    def with_edges_instead(self, drop: Bools, more: Edges) -> Graph:
        """Return the graph with `more` edges in place of those marked in `drop` [E]; the order stays valid.

        Args:
            more: edges to nodes with larger numbers than their sources.
        """
        edges = self.edges.taken(np.flatnonzero(~drop)).extended(more)
        indptr, order = by_target(edges.source, edges.target, self.num_nodes)
        return dataclasses.replace(self, edges=_freeze(edges.taken(order)), indptr=frozen(indptr))


# Facts of graphs: values that are computed once for all graphs from which the same is read.


class Fact(NamedTuple):
    """A value that was computed from a graph.

    Attributes:
        columns: what was read of the graph, by name: `nodes.rank`, `messages`, …
        given: further objects that the value follows from.
    """

    columns: Mapping[str, object]
    given: tuple[object, ...]
    value: Any

    def of(self, graph: Graph | None) -> Fact:
        """Return the fact with the columns of a graph; with only their names for None, as files have it."""
        return self._replace(columns={name: graph and attrgetter(name)(graph) for name in self.columns})


def once(
    graph: Graph, name: Hashable, compute: Callable[[Graph], Value], given: tuple[object, ...] = ()
) -> Value:
    """Return a value that follows from a graph, cached for all graphs from which the same is read.

    Edits need the same facts of one graph repeatedly, and of graphs that differ from it only in durations.
    `compute` is called with a view of the graph that notes which columns are read, so it must read no other
    graph. One value per name is cached, so the cache does not grow with the number of changed graphs. The
    value must not contain a graph: that would make a reference cycle, which is freed late. Arrays become
    read-only.

    Args:
        given: objects beside the graph that the value follows from, compared by identity.
    """
    fact = recall(graph, name, given)
    if fact is None:
        fact = observe(graph, compute, given)
        graph.facts.setdefault(name, fact)
    value: Value = fact.value
    return value


def computed_once(compute: Callable[[Graph], Value]) -> Callable[[Graph], Value]:
    """Make a function of a graph return its value by `once`."""
    name = f"{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def recalled(graph: Graph) -> Value:
        return once(graph, name, compute)

    return recalled


def recall(graph: Graph, name: Hashable, given: tuple[object, ...] = ()) -> Fact | None:
    """Return the cached fact of this name if it holds for the graph, else None."""
    fact = graph.facts.get(name)
    if fact is None or not all(one is other for one, other in zip(fact.given, given, strict=True)):
        return None
    plain = unwatched(graph)
    if not all(attrgetter(column)(plain) is content for column, content in fact.columns.items()):
        return None
    _reads_of(graph).update(fact.columns)
    return fact


def observe(graph: Graph, compute: Callable[[Graph], Any], given: tuple[object, ...] = ()) -> Fact:
    """Compute a value, and return it with the columns that were read for it."""
    plain, read = unwatched(graph), set[str]()
    nodes, edges = _watched(plain.nodes, read), _watched(plain.edges, read)
    try:
        value = compute(_watched(plain, read, nodes=nodes, edges=edges, facts=plain.facts))
    finally:
        _reads_of(graph).update(read)  # what a fact follows from, those computed from it do, too
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    return Fact(dict.fromkeys(sorted(read)), given, value).of(plain)


T = TypeVar("T")


def _noting_reads(kind: type[T], prefix: str) -> type[T]:
    """Return a class whose instances take their columns from another object, and note which are read.

    They say that they are of the class itself, so that `dataclasses.replace` makes a plain object of them.
    """

    def noting(name: str) -> property:
        def read(self: Any) -> Any:
            self._read.add(prefix + name)
            return getattr(self._plain, name)

        return property(read)

    names = {f.name for f in dataclasses.fields(kind)} - {"nodes", "edges", "facts"}  # type: ignore[arg-type]
    members = {"__class__": property(lambda self: kind), **{name: noting(name) for name in names}}
    return type(kind.__name__, (kind,), members)


_VIEWS: Mapping[type, type] = {
    kind: _noting_reads(kind, prefix) for kind, prefix in ((Nodes, "nodes."), (Edges, "edges."), (Graph, ""))
}


def _watched(plain: T, read: set[str], **fields: Any) -> T:
    """Return a view of an object that notes in `read` which columns are read."""
    view: T = object.__new__(_VIEWS[plain.__class__])
    vars(view).update(fields, _plain=plain, _read=read)
    return view


def unwatched(graph: Graph) -> Graph:
    """Return the graph itself, of which this may be a view."""
    plain: Graph = vars(graph).get("_plain", graph)
    return plain


def _reads_of(graph: Graph) -> set[str]:
    """Return where the columns that are read of a view are noted; an unused set for a graph itself."""
    read: set[str] = vars(graph).get("_read", set())
    return read


class _LayeredFacts(dict[Hashable, Fact]):
    """Cached facts of one graph, on top of those of another."""

    def __init__(self, below: Mapping[Hashable, Fact]) -> None:
        super().__init__()
        self._below = below

    def get(self, name: Hashable, default: Any = None) -> Any:
        return super().get(name, self._below.get(name, default))


def with_own_facts(graph: Graph) -> Graph:
    """Return the graph with its own cache for `once`, on top of the facts already cached."""
    return dataclasses.replace(graph, facts=_LayeredFacts(graph.facts))


def make_graph(
    nodes: Nodes, edges: Edges, names: tuple[str, ...], lanes: tuple[tuple[int, str], ...], origin_ns: int
) -> Graph:
    """Order the nodes topologically, sort the edges, and check the invariants.

    Args:
        nodes: in any order.
        names: names that `nodes.name` indexes.
        lanes: (rank, name of the lane) that `nodes.lane` indexes.

    Raises:
        GraphError: an edge points outside the graph, a duration is negative, or there is a cycle; the
            message names some nodes on it.
    """
    ends = np.concatenate([edges.source, edges.target])
    if ends.size and (ends.min() < 0 or ends.max() >= nodes.duration.size):
        raise GraphError("an edge points outside the graph")
    order, stuck = order_of(edges, nodes.measured_start)
    if stuck.size:
        raise GraphError(f"the graph has a cycle: {_describe_cycle(stuck, edges, nodes, names)}")
    return assembled(nodes.taken(order), renumbered(edges, order), names, lanes, origin_ns)


def order_of(edges: Edges, begins: Ints) -> tuple[Ints, Ints]:
    """Return the nodes in an order in which every edge goes forward, and the nodes on or behind a cycle.

    Args:
        begins: [N] ns; nodes without predecessors come in this order.
    """
    roots = np.flatnonzero(np.bincount(edges.target, minlength=begins.size) == 0)
    preference = roots[np.argsort(begins[roots], kind="stable")]
    return topological_order(begins.size, edges.source, edges.target, preference)


def renumbered(edges: Edges, order: Ints) -> Edges:
    """Return the edges with nodes renumbered by their position in `order`.

    Args:
        order: [N] the old number of each node, in the new order.
    """
    number = np.empty(order.size, np.int64)
    number[order] = np.arange(order.size)
    return dataclasses.replace(edges, source=number[edges.source], target=number[edges.target])


def assembled(
    nodes: Nodes, edges: Edges, names: tuple[str, ...], lanes: tuple[tuple[int, str], ...], origin_ns: int
) -> Graph:
    """Make a graph of nodes numbered in topological order; edges may be in any order.

    Args:
        nodes: in topological order.
        edges: between these nodes, in any order.
        names: names that `nodes.name` indexes.
        lanes: (rank, name of the lane) that `nodes.lane` indexes.

    Raises:
        GraphError: an edge goes backwards, or a duration is negative.
    """
    num_nodes = nodes.duration.size
    if not (edges.source < edges.target).all():
        raise GraphError("an edge goes from a node to one that is numbered before it")
    if num_nodes and nodes.duration.min() < 0:
        raise GraphError(f"negative duration on node {names[nodes.name[nodes.duration.argmin()]]!r}")
    indptr, order = by_target(edges.source, edges.target, num_nodes)
    return Graph(_freeze(nodes), _freeze(edges.taken(order)), frozen(indptr), names, lanes, origin_ns)


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Return a contiguous read-only view of an array, for the compiled loops."""
    view = np.ascontiguousarray(array).view()  # the caller's own array stays writable
    view.setflags(write=False)
    return view


def _freeze(columns: Columns) -> Columns:
    for f in dataclasses.fields(columns):
        getattr(columns, f.name).setflags(write=False)
    return columns


def _describe_cycle(stuck: Ints, edges: Edges, nodes: Nodes, names: tuple[str, ...]) -> str:
    """Return the names along one cycle: walk backwards among the stuck nodes until one repeats."""
    inside = np.isin(edges.source, stuck) & np.isin(edges.target, stuck)
    before = dict(zip(edges.target[inside].tolist(), edges.source[inside].tolist()))
    seen: list[int] = []
    node = int(edges.target[inside][0])
    while node not in seen:
        seen.append(node)
        node = before[node]
    cycle = seen[seen.index(node) :]
    shown = [f"{names[nodes.name[n]]} (rank {nodes.rank[n]})" for n in reversed(cycle[:8])]
    return " -> ".join(shown)
