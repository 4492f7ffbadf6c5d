"""Backward passes that reduce gradients: when each gradient is ready, and which reduction contains it.

Takes a graph and the run it was made from; returns one `Pass` per backward pass. DDP hooks the AccumulateGrad
of each parameter: the k-th of these in a pass belongs to the k-th parameter in the order in which gradients
were ready when the buckets were rebuilt, which is the order of the buckets. `gradient_buckets.py` infers
buckets that a run does not record, and passes them to `passes_at` as moments at which gradients are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.errors import Unanswerable
from dpro.replay.graph import GPU_KINDS, EdgeKind, Graph, NodeKind
from dpro.schema import BUCKETS, SPANS
from dpro.store import Run

ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
MAIN_THREAD = "main thread"
MB = 1 << 20
NO_BUCKETS = (
    "the run does not say which parameters are in which gradient bucket: record a DDP job with `dpro record`"
)


@dataclass(frozen=True)
class Parameters:
    """The gradients that a pass reduces, in order of readiness; equal on all ranks of the pass.

    Attributes:
        num_bytes: [P] size of each gradient; ns of its reduction where the run has no bytes.
        shapes: shape of each parameter; empty where unknown.
        hook: communication hook in place of a plain all-reduce; empty for none.
        is_recorded: whether the framework reported the buckets; else they are inferred.
        are_sizes_known: whether each size is known; else the size of each reduction was divided evenly.
        closes_before: whether a bucket closes before the gradient that no longer fits, as in DeepSpeed; else
            after the one that fills it, as in DDP.
        is_update_sharded: whether each rank updates a part of the parameters, in any reduction scheme.
    """

    num_bytes: Ints
    shapes: tuple[tuple[int, ...], ...]
    hook: str = ""
    is_recorded: bool = True
    are_sizes_known: bool = True
    closes_before: bool = False
    is_update_sharded: bool = False


@dataclass(frozen=True)
class Pass:
    """One backward pass of one rank.

    Attributes:
        parameters: the gradients that it reduces.
        ready: [P] the node of the thread after which each gradient is ready.
        closes: [B] index of the last parameter in each bucket.
        calls: for each bucket the nodes of the thread that call its reduction.
        arrive, transfer: [B] nodes of the reductions.
    """

    rank: int
    window: int
    step: int
    parameters: Parameters
    ready: Ints
    closes: Ints
    calls: tuple[Ints, ...]
    arrive: Ints
    transfer: Ints


def parameters_of(run: Run | None) -> Parameters:
    """Return the parameters of the run's only DDP module.

    Raises:
        Unanswerable: there is none, there are several, or their sizes are not recorded.
    """
    buckets = run.table(BUCKETS) if run is not None else BUCKETS.empty()
    if buckets.is_empty():
        raise Unanswerable(NO_BUCKETS)
    sources = buckets["source"]
    buckets = buckets.filter(pl.col("source").str.starts_with("DDP"))
    if buckets.is_empty() and sources.str.starts_with("Megatron").any():
        raise Unanswerable("Megatron-core reports the contents of buckets, not the order of readiness")
    if buckets.is_empty():
        raise Unanswerable("gradients are reduced by FSDP, which has no buckets of a size to choose")
    if buckets["module"].n_unique() > 1:
        raise Unanswerable(
            "several modules are wrapped by DDP: which bucket belongs to which is not recorded"
        )
    of_rank = buckets.filter(pl.col("rank") == pl.col("rank").min()).sort("bucket")
    sizes = of_rank["parameter_bytes"].explode(empty_as_null=False)
    if (of_rank["parameter_bytes"].list.len() == 0).any():
        raise Unanswerable(
            "sizes of single parameters are not in the run: DDP did not rebuild its buckets "
            "(find_unused_parameters), or an older dpro recorded it"
        )
    shapes = [tuple(shape) for listed in of_rank["shapes"].to_list() for shape in listed]
    return Parameters(sizes.to_numpy(), tuple(shapes), str(of_rank["hook"][0]))


def passes_of(graph: Graph, parameters: Parameters) -> list[Pass]:
    """Return the backward passes that reduce the gradients of a DDP module, in order on each rank.

    Raises:
        Unanswerable: there are none, or the calls do not fit the recorded buckets.
    """
    if graph.run is None or ACCUMULATE not in graph.names:
        raise Unanswerable("the run does not show when gradients are ready: it holds no autograd spans")
    spans = graph.run.table(SPANS, ["span_id", "rank", "window", "name", "start_ns", "duration_ns", "tid"])
    spans = spans.filter(pl.col("name") == ACCUMULATE).sort("rank", "window", "start_ns")
    moments = spans.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    launches, issued = Launches(graph), calls_of(graph)
    passes = []
    for _, of_thread in moments.group_by("rank", "window", maintain_order=True):
        passes += passes_at(graph, launches, issued, of_thread, lambda step: _each_whole(step, parameters))
    if not passes:
        raise Unanswerable("no backward pass in the run reduces gradients in buckets")
    return passes


def calls_of(graph: Graph) -> pl.DataFrame:
    """Return the spans of collective calls: `rank`, `window`, `tid`, `start_ns`, `duration_ns`, `name`."""
    assert graph.run is not None
    spans = graph.run.table(SPANS, ["rank", "window", "name", "start_ns", "duration_ns", "tid"])
    return spans.filter(pl.col("name").str.starts_with("c10d::"))


def _each_whole(step: Ints, parameters: Parameters) -> list[tuple[int, Parameters]]:
    """Return where passes begin, if the gradients of each whole step are a multiple of the parameters.

    Raises:
        Unanswerable: they are not a multiple.
    """
    num_parameters = parameters.num_bytes.size
    first = []
    for number in np.unique(step[step >= 0]).tolist():
        of_step = np.flatnonzero(step == number)
        if of_step.size % num_parameters:
            raise Unanswerable(
                f"step {number} has {of_step.size} gradients of {num_parameters} parameters: not all are used"
            )
        first += of_step[::num_parameters].tolist()
    return [(gradient, parameters) for gradient in first]


class Launches:
    """The calls of collectives in a graph.

    Attributes:
        source: [C] nodes of the calling thread.
        arrive: [C] arrivals at the rendezvous.
        transfer: [C] transfers, -1 where there is none.
    """

    def __init__(self, graph: Graph, kinds: Collection[tuple[str, str]] | None = None) -> None:
        """Find the calls by their launch edges.

        Args:
            kinds: (operation, group) of the calls to find; all if None.
        """
        nodes, edges = graph.nodes, graph.edges
        launch, moves = (
            graph.edges_into(np.flatnonzero(nodes.kind == kind))
            for kind in (NodeKind.ARRIVE, NodeKind.TRANSFER)
        )
        launch = launch[edges.kind[launch] == EdgeKind.LAUNCH]
        moves = moves[nodes.kind[edges.source[moves]] == NodeKind.ARRIVE]
        transfer = np.full(graph.num_nodes, -1)
        transfer[edges.source[moves]] = edges.target[moves]
        self.source, self.arrive = edges.source[launch], edges.target[launch]
        self.transfer = transfer[self.arrive]
        if kinds is not None:
            of_kinds = [(message.op, message.group) in kinds for message in graph.messages]
            kept = (self.transfer >= 0) & np.array([*of_kinds, False])[nodes.message[self.transfer]]
            self.source, self.arrive, self.transfer = (
                column[kept] for column in (self.source, self.arrive, self.transfer)
            )


def in_order(passes: list[Pass]) -> list[Pass]:
    """Sort passes by rank, then in the order in which they ran."""
    return sorted(passes, key=lambda one: (one.rank, one.window, one.step, int(one.ready[0])))


def passes_at(
    graph: Graph,
    launches: Launches,
    issued: pl.DataFrame,
    moments: pl.DataFrame,
    split: Callable[[Ints], list[tuple[int, Parameters]]],
) -> list[Pass]:
    """Return the passes of one thread, from the moments at which its gradients are ready.

    Args:
        issued: collective calls, from `calls_of`.
        moments: `span_id`, `start_ns` and `end_ns` of one `rank`, `window` and `tid`, in order. A reduction
            is called within the moment of its last gradient.
        split: returns the first moment and the parameters of each pass, from the steps of the moments.

    Raises:
        Unanswerable: the calls do not fit the moments.
    """
    nodes = graph.nodes
    rank, window, tid = (int(moments[name][0]) for name in ("rank", "window", "tid"))
    lane = lane_of(graph, rank, window, moments["span_id"].to_numpy())
    if lane is None:
        return []
    thread = np.flatnonzero((nodes.lane == lane[0]) & (nodes.window == window))
    thread = thread[np.argsort(nodes.measured_start[thread], kind="stable")]
    begin, end = moments["start_ns"].to_numpy() + lane[1], moments["end_ns"].to_numpy() + lane[1]
    calls = _extents(issued, rank, window, tid, lane[1])
    ready = thread[np.searchsorted(nodes.measured_end[thread], end, side="right") - 1]
    called, position = _called_within(graph, launches, thread, begin, end)
    passes = []
    for first, parameters in split(nodes.step[ready]):
        count = parameters.num_bytes.size
        inside = (position >= first) & (position < first + count)
        if not inside.any():
            continue
        chosen = called[inside]
        closes = position[inside] - first
        if closes[-1] != count - 1 or (np.diff(closes) <= 0).any():
            raise Unanswerable(
                "the reductions do not match the recorded buckets: parameters are ready in another order"
            )
        sources = launches.source[chosen].tolist()
        pieces = [_pieces(thread, nodes.measured_start, source, *calls) for source in sources]
        passes.append(
            Pass(
                rank,
                window,
                int(nodes.step[ready[first]]),
                parameters,
                ready[first : first + count],
                closes,
                tuple(pieces),
                launches.arrive[chosen],
                launches.transfer[chosen],
            )
        )
    return passes


def _called_within(
    graph: Graph, launches: Launches, thread: Ints, begin: Ints, end: Ints
) -> tuple[Ints, Ints]:
    """Return the launches of a thread within its moments, in order, and the moment each is in."""
    nodes = graph.nodes
    called = np.flatnonzero(np.isin(launches.source, thread))
    called = called[np.lexsort((launches.arrive[called], nodes.measured_start[launches.source[called]]))]
    called_ns = nodes.measured_start[launches.source[called]]
    position = np.searchsorted(begin, called_ns, side="right") - 1
    within = (position >= 0) & (called_ns <= end[np.maximum(position, 0)])
    return called[within], position[within]


def _extents(issued: pl.DataFrame, rank: int, window: int, tid: int, offset: int) -> tuple[Ints, Ints]:
    """Return start and end of the calls of a thread, on the graph's clock."""
    of_thread = issued.filter(
        (pl.col("rank") == rank) & (pl.col("window") == window) & (pl.col("tid") == tid)
    )
    start = of_thread["start_ns"].to_numpy() + offset
    return start, start + of_thread["duration_ns"].to_numpy()


def lane_of(graph: Graph, rank: int, window: int, span_ids: Ints) -> tuple[int, int] | None:
    """Return the lane on which gradients accumulate, and the offset from recorded to graph times.

    Args:
        span_ids: accumulations of gradients on the rank.
    """
    nodes = graph.nodes
    accumulating = np.flatnonzero((nodes.rank == rank) & (nodes.window == window))
    accumulating = accumulating[np.isin(nodes.span[accumulating], span_ids)]
    if accumulating.size == 0 or graph.run is None:
        return None
    first = accumulating[np.argmin(nodes.measured_start[accumulating])]
    spans = graph.run.table(SPANS, ["span_id", "rank", "start_ns"])
    start = spans.filter((pl.col("rank") == rank) & (pl.col("span_id") == int(nodes.span[first])))["start_ns"]
    return int(nodes.lane[first]), int(nodes.measured_start[first]) - int(start[0])


def _pieces(thread: Ints, start: Ints, source: int, call_start: Ints, call_end: Ints) -> Ints:
    """Return the nodes of a thread within the call around node `source`; only `source` where no call is."""
    start_ns = start[source]
    around = np.flatnonzero((call_start <= start_ns) & (start_ns < np.maximum(call_end, call_start + 1)))
    if around.size == 0:
        return np.array([source])
    begin, end = call_start[around[0]], call_end[around[0]]
    on_thread = start[thread]
    return thread[np.searchsorted(on_thread, begin) : np.searchsorted(on_thread, end)]


# The first use of each gradient's parameter in the forward pass, on the thread or on the GPU.

COLUMNS = ["span_id", "kind", "name", "start_ns", "sequence_number", "forward_thread"]


def first_uses(graph: Graph, passes: Sequence[Pass], on_gpu: bool) -> list[Ints]:
    """Return for each pass [P] the nodes of its own forward pass that use its parameters first.

    Args:
        on_gpu: True for work of the GPU, False for work of the thread.

    Raises:
        Unanswerable: the run has no sequence numbers, or lacks the forward pass.
    """
    first_use: list[Ints] = [np.empty(0, np.int64)] * len(passes)
    for place in sorted({(pass_.rank, pass_.window) for pass_ in passes}):
        here = [which for which, pass_ in enumerate(passes) if (pass_.rank, pass_.window) == place]
        nodes, begins = _work_of(graph, *place, on_gpu)
        for which, starts in zip(here, _forward_starts(graph, *place, [passes[which] for which in here])):
            piece = np.searchsorted(begins, starts)
            if (piece == begins.size).any():
                raise Unanswerable("no work of the forward pass follows the operator that uses a parameter")
            first_use[which] = nodes[piece]
    return first_use


def _work_of(graph: Graph, rank: int, window: int, on_gpu: bool) -> tuple[Ints, Ints]:
    """Return the main thread's work or the work it launched, ordered by when it was done or launched."""
    nodes, edges = graph.nodes, graph.edges
    lanes = [lane for lane, what in enumerate(graph.lanes) if what == (rank, MAIN_THREAD)]
    on_thread = np.isin(nodes.lane, lanes) & (nodes.window == window)
    if on_gpu:
        launch = (edges.kind == EdgeKind.LAUNCH) & on_thread[edges.source]
        launch &= np.isin(nodes.kind[edges.target], GPU_KINDS)
        source, target = edges.source[launch], edges.target[launch]
    else:
        source = target = np.flatnonzero(on_thread)
    order = np.lexsort((target, nodes.measured_start[source]))
    return target[order], nodes.measured_start[source[order]]


def _forward_starts(graph: Graph, rank: int, window: int, passes: list[Pass]) -> list[Ints]:
    """Return for each pass [P] start of the forward operator that each gradient comes from, in ns."""
    assert graph.run is not None
    spans = graph.run.table(SPANS, ["rank", "window", *COLUMNS])
    spans = spans.filter((pl.col("rank") == rank) & (pl.col("window") == window)).sort("start_ns", "span_id")
    lane = lane_of(graph, rank, window, spans.filter(pl.col("name") == ACCUMULATE)["span_id"].to_numpy())
    numbered = spans.filter(
        (pl.col("kind") == "cpu_op")
        & (pl.col("sequence_number") >= 0)
        & ~pl.col("name").str.ends_with("AccumulateGrad")
    )
    backward = numbered.filter(pl.col("forward_thread") > 0)
    forward = numbered.filter(pl.col("forward_thread") <= 0)
    if lane is None or backward.is_empty():
        raise Unanswerable(
            "the run does not say which forward operator a gradient comes from: it has no sequence numbers"
        )
    ends = np.concatenate([graph.nodes.measured_end[pass_.ready] for pass_ in passes])
    made = pl.DataFrame({"ready": ends - lane[1] - 1})  # an operator that begins at the end is the next one
    asked = (
        made.with_row_index("gradient")
        .sort("ready")
        .join_asof(
            backward.select("start_ns", "sequence_number"),
            left_on="ready",
            right_on="start_ns",
            strategy="backward",
        )
    )
    used = asked.sort("start_ns").join_asof(
        forward.select("start_ns", "sequence_number", began="start_ns"),
        on="start_ns",
        by="sequence_number",
        strategy="backward",
        check_sortedness=False,
    )
    if used["began"].null_count():
        raise Unanswerable(
            "the window does not hold the forward operator that a gradient comes from: `dpro record` begins "
            "windows where a step begins"
        )
    began = used.sort("gradient")["began"].to_numpy() + lane[1]
    return np.split(began, np.cumsum([pass_.ready.size for pass_ in passes])[:-1])
