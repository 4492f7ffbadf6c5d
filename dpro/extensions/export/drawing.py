"""The content of exported timelines: slices with their arguments, arrows between slices, and counters.

Takes a replayed graph, findings and a selection; returns a `Drawing`. Writes no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec import UNSET, UnsetType

from dpro.arrays import Ints
from dpro.detect.findings import Finding
from dpro.documents import Document, DocumentPart
from dpro.errors import Unanswerable
from dpro.members import members_of
from dpro.replay.construction.data_dependencies import backward_of_forward
from dpro.replay.gradient_buckets import gradient_passes
from dpro.replay.gradient_passes import Pass, parameters_of, passes_of
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import Timeline, critical_nodes
from dpro.schema import COLLECTIVES, COUNTERS, GPU_WORK_KINDS, SPANS, WORKERS
from dpro.schema.members import of_each_text
from dpro.selection import ALL, Selection, SelectionDocument
from dpro.timelines.counters import sampled_counters, within
from dpro.timelines.slices import MEASURED, REPLAYED, WAIT, slices
from dpro.words import shortened

# Arrows between slices: launches, forward to backward, the rank that a collective waited for.

PLACE = ["rank", "window"]
_NO_PAIRS = np.empty(0, np.int64), np.empty(0, np.int64)


class Arrow(StrEnum):
    """Kinds of arrows."""

    LAUNCH = "launch"
    GRADIENT = "forward to backward"
    RENDEZVOUS = "rendezvous"
    CRITICAL = "critical path"


def arrows(timeline: Timeline, rows: pl.DataFrame) -> pl.DataFrame:
    """Return arrows between the slices of a timeline.

    Launches, gradients and rendezvous join measured slices; the critical path is drawn on both sides.

    Args:
        rows: frame of `dpro.timelines.slices.slices`.

    Returns:
        `kind` (of `Arrow`), `source` and `target` (rows of the slices), `leaves_ns` and `arrives_ns`: times
        within the two slices, never backwards. Sorted by kind and time.
    """
    graph = timeline.graph
    drawn = {side: _row_of_node(rows, side, graph.num_nodes) for side in (MEASURED, REPLAYED)}
    of_path = _path(timeline)
    pairs = [
        (Arrow.LAUNCH, MEASURED, _launches(graph)),
        (Arrow.GRADIENT, MEASURED, _gradients(graph)),
        (Arrow.RENDEZVOUS, MEASURED, _rendezvous(graph)),
        *((Arrow.CRITICAL, side, of_path) for side in (MEASURED, REPLAYED)),
    ]
    ends = [
        pl.DataFrame(
            {"kind": [kind.value] * source.size, "source": drawn[side][source], "target": drawn[side][target]}
        )
        for kind, side, (source, target) in pairs
    ]
    return _drawn_arrows(pl.concat(ends, how="vertical_relaxed"), rows).sort(
        "kind", "leaves_ns", "arrives_ns", "source", "target"
    )


def _row_of_node(rows: pl.DataFrame, side: str, num_nodes: int) -> Ints:
    """Return [N] row of each node's slice in the lanes of a side; -1 for none."""
    lane = pl.col("group").str.ends_with(side) & (pl.col("kind") != WAIT)
    of_side = rows.with_row_index("row").filter(lane)
    place = np.full(num_nodes, -1, np.int64)
    place[of_side["node"].to_numpy()] = of_side["row"].to_numpy()
    return place


def _path(timeline: Timeline) -> tuple[Ints, Ints]:
    """Return pairs of consecutive drawn nodes on the critical path, window by window."""
    nodes = timeline.graph.nodes
    drawn = (nodes.duration > 0) & ~np.isin(nodes.kind, (NodeKind.ARRIVE, NodeKind.RENDEZVOUS))
    paths = [critical_nodes(timeline, window) for window in np.unique(nodes.window).tolist()]
    paths = [path[drawn[path]] for path in paths] or [np.empty(0, np.int64)]
    return np.concatenate([path[:-1] for path in paths]), np.concatenate([path[1:] for path in paths])


def _launches(graph: Graph) -> tuple[Ints, Ints]:
    """Return pairs of a call and the work it launched on a stream or worker.

    The launch of a CUDA graph is paired with the first work on each stream.
    """
    if graph.run is None:
        return _NO_PAIRS
    columns = ["rank", "window", "span_id", "kind", "start_ns", "device", "stream", "correlation"]
    spans = graph.run.table(SPANS, columns).filter(pl.col("correlation") >= 0)
    call = ["rank", "window", "correlation"]
    calls = spans.filter(pl.col("kind") == "runtime").unique(call, keep="first", maintain_order=True)
    work = spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS)).sort("start_ns", "span_id")
    work = work.unique([*call, "device", "stream"], keep="first", maintain_order=True)
    on_streams = work.join(calls, on=call, suffix="_call").select(
        *PLACE, source="span_id_call", target="span_id"
    )
    called = graph.run.table(COLLECTIVES, [*PLACE, "span_id", "launch_span_id"])
    called = called.filter((pl.col("span_id") >= 0) & (pl.col("launch_span_id") >= 0))
    on_workers = called.select(*PLACE, source="launch_span_id", target="span_id")
    pairs = pl.concat([on_streams, on_workers]).unique([*PLACE, "target"], keep="first", maintain_order=True)
    return _between_spans(graph, pairs)


def _rendezvous(graph: Graph) -> tuple[Ints, Ints]:
    """Return pairs of the transfers of each collective's last member and of every other member."""
    nodes = graph.nodes
    parts = {}
    for kind in (NodeKind.ARRIVE, NodeKind.TRANSFER):
        (members,) = np.nonzero((nodes.kind == kind) & (nodes.collective >= 0))
        columns = {"collective": nodes.collective[members], "rank": nodes.rank[members], "node": members}
        parts[kind] = pl.DataFrame(columns | {"start": nodes.measured_start[members]})
    came = parts[NodeKind.ARRIVE].sort("start", "rank").group_by("collective", maintain_order=True)
    last = came.agg(pl.col("rank").last())
    transfers = parts[NodeKind.TRANSFER].select("collective", "rank", "node")
    sources = last.join(transfers, on=["collective", "rank"]).select("collective", source="node")
    pairs = transfers.join(sources, on="collective").filter(pl.col("node") != pl.col("source")).sort("node")
    return pairs["source"].to_numpy(), pairs["node"].to_numpy()


def _gradients(graph: Graph) -> tuple[Ints, Ints]:
    """Return pairs of an operator and its first backward operator, by autograd's sequence numbers."""
    if graph.run is None:
        return _NO_PAIRS
    columns = [*PLACE, "span_id", "start_ns", "tid", "sequence_number", "forward_thread"]
    spans = graph.run.table(SPANS, columns)
    begins = spans.select(*PLACE, "start_ns", target_span_id="span_id")
    pairs = backward_of_forward(spans).join(begins, on=[*PLACE, "target_span_id"])
    first = pairs.sort("start_ns", "target_span_id").unique([*PLACE, "source_span_id"], keep="first")
    first = first.sort(*PLACE, "start_ns", "target_span_id")
    return _between_spans(graph, first.select(*PLACE, source="source_span_id", target="target_span_id"))


def _between_spans(graph: Graph, pairs: pl.DataFrame) -> tuple[Ints, Ints]:
    """Return the first nodes of both spans of each pair, dropping pairs in which a span has none."""
    nodes = _first_node_of_span(graph)
    ends = []
    for end in ("source", "target"):
        there = pairs.select(*PLACE, span=end).join(nodes, on=SPAN, how="left", maintain_order="left")
        ends.append(there["node"].fill_null(-1).to_numpy())
    both_drawn = (ends[0] >= 0) & (ends[1] >= 0)
    return ends[0][both_drawn], ends[1][both_drawn]


def _first_node_of_span(graph: Graph) -> pl.DataFrame:
    """Return `rank`, `window`, `span`, and its first `node` with a duration."""
    nodes = graph.nodes
    (lasting,) = np.nonzero((nodes.span >= 0) & (nodes.measured_end > nodes.measured_start))
    by_start = lasting[np.argsort(nodes.measured_start[lasting], kind="stable")]
    columns = {name: getattr(nodes, name)[by_start] for name in SPAN}
    frame = pl.DataFrame(columns | {"node": by_start}).unique(SPAN, keep="first", maintain_order=True)
    return frame.cast({"rank": pl.Int32, "window": pl.Int32})


def _drawn_arrows(ends: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Return arrows between drawn slices, from the start of the source to the target, never backwards."""
    numbered = rows.with_row_index("row").select(pl.col("row").cast(pl.Int64), "start_ns", "end_ns")
    target = numbered.rename({"start_ns": "begins", "end_ns": "over"})
    return (
        ends.join(numbered.select("row", "start_ns"), left_on="source", right_on="row")
        .join(target, left_on="target", right_on="row")
        .with_columns(leaves_ns="start_ns", arrives_ns=pl.max_horizontal("start_ns", "begins"))
        .filter(pl.col("arrives_ns") < pl.col("over"))
        .select("kind", "source", "target", "leaves_ns", "arrives_ns")
    )


class Drawing(NamedTuple):
    """The content of an exported timeline.

    Attributes:
        rows: frame of `dpro.timelines.slices.slices`, with the columns of `ARGUMENTS`.
        arrows: frame of function `arrows`.
        counters: frame of `dpro.timelines.counters.sampled_counters`, from the first slice to the last.
    """

    rows: pl.DataFrame
    arrows: pl.DataFrame
    counters: pl.DataFrame


def drawing(
    timeline: Timeline,
    findings: Sequence[Finding] = (),
    ahead: Mapping[str, int] | None = None,
    selection: Selection = ALL,
) -> Drawing:
    """Return the drawing of a replayed graph.

    Args:
        ahead: lead of each host's clock over the timeline's, in ns; None if all clocks agree.
    """
    rows = slices(timeline, findings, selection)
    described = rows.join(arguments_of(timeline.graph), on="node", how="left", maintain_order="left")
    return Drawing(described, arrows(timeline, rows), _counters(timeline, rows, ahead or {}, selection))


def _counters(
    timeline: Timeline, rows: pl.DataFrame, ahead: Mapping[str, int], selection: Selection
) -> pl.DataFrame:
    run = timeline.graph.run
    if run is None or rows.is_empty():
        return sampled_counters(COUNTERS.empty(), WORKERS.empty(), ahead)
    workers = run.table(WORKERS)
    ranks = selection.keep(workers)["rank"].to_list() if selection.ranks else ()
    values = sampled_counters(run.table(COUNTERS), workers, ahead, ranks)
    return within(values, int(rows["start_ns"].to_numpy().min()), int(rows["end_ns"].to_numpy().max()))


# Arguments of spans besides their times: shapes, bytes, and communication.

MAX_TEXT = 200  # characters of an argument
SPAN = ["rank", "window", "span"]
# Argument of a slice -> type; null where unknown or not applicable.
ARGUMENTS = {
    "shapes": pl.String,
    "bytes": pl.Int64,
    "dtype": pl.String,
    "op": pl.String,
    "process_group": pl.String,
    "group_ranks": pl.String,
    "seq": pl.Int64,
    "peer": pl.Int64,
    "bucket": pl.Int64,
    "algorithm": pl.String,
    "protocol": pl.String,
}
_COMMUNICATION = (NodeKind.ARRIVE, NodeKind.TRANSFER)


def arguments_of(graph: Graph) -> pl.DataFrame:
    """Return the arguments of the nodes of a graph.

    Returns:
        `node` and the columns of `ARGUMENTS`, in order of the nodes, without nodes that have none. `bytes` is
        the larger of input and output for communication, and the bytes copied or set for other spans.
    """
    schema = pl.Schema({"node": pl.Int64, **ARGUMENTS})
    empty = schema.to_frame()
    if graph.run is None:
        return empty
    nodes = graph.nodes
    (of_spans,) = np.nonzero(nodes.span >= 0)
    places = pl.DataFrame({"node": of_spans, **{name: getattr(nodes, name)[of_spans] for name in SPAN}})
    moves = np.isin(nodes.kind[of_spans], _COMMUNICATION)
    work = places.filter(~pl.Series(moves)).join(_of_spans(graph), on=SPAN)
    moved = places.filter(pl.Series(moves)).join(_of_communication(graph), on=SPAN)
    moved = moved.join(_buckets(graph), on="node", how="left")
    frames = [frame.select(pl.exclude("rank", "window", "span")) for frame in (work, moved)]
    return pl.concat([empty, *frames], how="diagonal_relaxed").sort("node").cast(schema)


def _of_spans(graph: Graph) -> pl.DataFrame:
    """Return shapes of operators and bytes of copies, by span."""
    assert graph.run is not None
    spans = graph.run.table(SPANS, ["rank", "window", "span_id", "shapes", "bytes"])
    said = spans.filter((pl.col("shapes") != "") | (pl.col("bytes") >= 0))
    return said.select(
        pl.col("rank", "window").cast(pl.Int64),
        span="span_id",
        shapes=_short(pl.col("shapes")),
        bytes=_if_known(pl.col("bytes")),
    )


def _of_communication(graph: Graph) -> pl.DataFrame:
    """Return arguments from `collectives` by span; of several messages, those of the first, and all bytes."""
    assert graph.run is not None
    rows = graph.run.table(COLLECTIVES).filter((pl.col("span_id") >= 0) & (pl.col("window") >= 0))
    payload = _if_known(pl.max_horizontal("bytes_in", "bytes_out"))
    first = (
        rows.with_columns(pl.col("rank", "window").cast(pl.Int64), span="span_id", payload=payload)
        .sort("collective_id")
        .group_by(SPAN)
        .agg(
            pl.exclude("payload").first(),
            pl.when(pl.col("payload").count() > 0).then(pl.col("payload").sum()),
        )
    )
    return first.select(
        *SPAN,
        bytes="payload",
        dtype=_short(pl.col("dtype")),
        op=_short(pl.col("op")),
        process_group=_short(pl.col("group")),
        group_ranks=of_each_text("group_ranks", _ranks_in_words, pl.String()),
        seq=_if_known(pl.col("sequence")),
        peer=_if_known(pl.col("peer")),
        algorithm=_short(pl.col("algorithm")),
        protocol=_short(pl.col("protocol")),
    )


def _buckets(graph: Graph) -> pl.DataFrame:
    """Return `node` and `bucket` of transfers that reduce gradients; `bucket` is their order in the pass."""
    buckets: dict[int, int] = {}
    with suppress(Unanswerable):
        for of_pass in _passes(graph):
            buckets |= {node: bucket for bucket, node in enumerate(of_pass.transfer.tolist())}
            buckets |= {node: bucket for bucket, node in enumerate(of_pass.arrive.tolist())}
    return pl.DataFrame(
        {"node": [*buckets], "bucket": [*buckets.values()]}, schema={"node": pl.Int64, "bucket": pl.Int64}
    )


def _passes(graph: Graph) -> list[Pass]:
    """Return the backward passes of DDP, even with a communication hook, else those of any framework."""
    with suppress(Unanswerable):
        return passes_of(graph, parameters_of(graph.run))
    return gradient_passes(graph)


def _ranks_in_words(text: str) -> str | None:
    return in_ranges(members_of(text)) or None


def in_ranges(ranks: Sequence[int]) -> str:
    """Return ranks as text: `0-7`, `0-56 by 8`, or a list, shortened if it is long."""
    steps = set(np.diff(ranks).tolist())
    if len(ranks) > 2 and len(steps) == 1 and (step := steps.pop()) > 0:
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return shortened(", ".join(map(str, ranks)), MAX_TEXT)


def _if_known(number: pl.Expr) -> pl.Expr:
    return pl.when(number >= 0).then(number)


def _short(text: pl.Expr) -> pl.Expr:
    """Return an expression: the text cut to `MAX_TEXT` characters; null if empty."""
    cut = pl.concat_str(text.str.slice(0, MAX_TEXT - 1), pl.lit("…"))
    return pl.when(text.str.len_chars() > MAX_TEXT).then(cut).when(text != "").then(text)


# Documents on written files.


class FileDocument(DocumentPart, frozen=True):
    """A written file.

    Attributes:
        format: chrome or perfetto.
        path: path of the file.
    """

    format: str
    path: str


class PathOffset(DocumentPart, frozen=True):
    """Replayed minus measured starts of spans on the critical path.

    Attributes:
        earliest_ms: smallest difference, negative if the replay is earlier.
        latest_ms: largest difference.
    """

    earliest_ms: float
    latest_ms: float


class ExportDocument(Document, frozen=True, kw_only=True):
    """Written timelines.

    Attributes:
        run: the run, as the user named it.
        slices: number of slices in each file.
        arrows: number of arrows in each file.
        files: the written files.
        critical_path_replayed_later: how much later the replay begins spans of the critical path.
        selection: selected steps and ranks; absent for all.
    """

    run: str
    slices: int
    arrows: int
    files: list[FileDocument]
    critical_path_replayed_later: PathOffset
    selection: SelectionDocument | UnsetType = UNSET
