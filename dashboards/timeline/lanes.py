"""Rows of a rank's spans: a lane per CPU thread and GPU stream, a row per depth of nesting; and phases.

Takes spans of a rank on the aligned clock; returns a `RankLanes` of some 30 bytes per span. A span that
overlaps its neighbour without nesting in it moves to a deeper row, so that no two spans of a row overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.dashboards.timeline.detail import DetailLevel, levels
from dpro.dashboards.timeline.stopped import CALLS
from dpro.schema import GPU_WORK_KINDS, SPAN_KINDS
from dpro.timelines.lanes import STREAM, stream_label, stream_work
from dpro.words import shortened

MEASURED, REPLAYED = "measured", "replayed"
SIDES = {MEASURED: "measured", REPLAYED: "replayed", "both": "both"}  # the sides of the timeline to show
OTHER = "other"  # measured lanes of a second run, beside those of the first
# The kinds of bars. Measured lanes have no `gap`: where nothing is drawn, no span was recorded.
KINDS = ("cpu", "runtime", "host", "gap", "kernel", "copy", "transfer", "wait", "delay")
_KIND_OF = {"cpu_op": "cpu", "runtime": "runtime", "kernel": "kernel", "memcpy": "copy", "memset": "copy"}
# Names of spans that only the thread of the training loop has.
_STEP_MARKS = r"^ProfilerStep|^Optimizer\.step|^dpro::backward"
_MAX_MOVES = 64  # rounds of moving overlapping spans; remaining overlaps are cut
_LONGEST = 40  # characters of a span's name in the label of a thread
WAITING = "last calls"  # lane of the calls at which a job stopped; the script unfolds it


@dataclass(frozen=True)
class Lane:
    """A CPU thread or a GPU stream.

    Attributes:
        label: what runs on it, such as `stream 7 (compute)`, `main thread`, `autograd`.
        rows: first row of the lane within the rank, and the one after its last; a row is a depth of nesting.
    """

    label: str
    gpu: bool
    rows: tuple[int, int]
    spans: int


@dataclass(frozen=True)
class RankLanes:
    """All spans of one rank on one side.

    Attributes:
        rank: the rank; -1 for the critical path of all ranks.
        levels: levels of detail, the coarsest first; the last has all spans.
        name: [N] index into the names.
        ident: [N] `span_id` within the rank, or the node of a replay.
        phase: [N] index into `PHASES`.
        micro_batch: [N] -1 where unknown.
    """

    rank: int
    lanes: tuple[Lane, ...]
    levels: Sequence[DetailLevel]
    name: NDArray[np.int32]
    ident: NDArray[Any]
    phase: NDArray[np.uint8]
    micro_batch: NDArray[np.int16]

    @property
    def all(self) -> DetailLevel:
        """The level of all spans."""
        return self.levels[-1]

    def row_of(self, item: int) -> int:
        """Return the row of a span."""
        return int(np.searchsorted(self.all.first, item, "right")) - 1

    @property
    def on_gpu(self) -> NDArray[np.bool_]:
        """[N] whether each span is on a GPU lane; GPU lanes come first."""
        rows = max((lane.rows[1] for lane in self.lanes if lane.gpu), default=0)
        return np.arange(self.name.size) < int(self.all.first[rows])

    def lane_of(self, row: int) -> int:
        """Return the lane of a row."""
        return next(n for n, lane in enumerate(self.lanes) if lane.rows[0] <= row < lane.rows[1])

    def find(self, ident: int) -> int:
        """Return the span with an id, the last of its parts; -1 if there is none."""
        items = np.flatnonzero(self.ident == ident)
        return int(items[-1]) if items.size else -1

    def around(self, item: int) -> list[int]:
        """Return the spans that enclose a span, innermost first."""
        row, level, enclosing = self.row_of(item), self.all, list[int]()
        begin, end = level.start[item], level.end[item]
        for outer in range(row - 1, self.lanes[self.lane_of(row)].rows[0] - 1, -1):
            low, high = int(level.first[outer]), int(level.first[outer + 1])
            place = low + int(np.searchsorted(level.start[low:high], begin, "right")) - 1
            if place >= low and level.end[place] >= end:
                enclosing.append(place)
        return enclosing


class SpanNames:
    """Distinct names of all spans, by number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._codes: dict[str, int] = {}
        self._lock = threading.Lock()

    def codes(self, column: pl.Series) -> NDArray[np.int32]:
        """Return [N] the number of each name of a column."""
        unique = column.unique()
        with self._lock:
            for text in unique.to_list():
                if text not in self._codes:
                    self._codes[text] = len(self.texts)
                    self.texts.append(text)
        numbers = pl.Series([self._codes[text] for text in unique.to_list()], dtype=pl.Int32)
        return column.replace_strict(unique, numbers, return_dtype=pl.Int32).to_numpy()


def bar_kind(span_kind: str) -> str:
    """Return the kind of bar (of `KINDS`) that a span in no collective is drawn as."""
    return _KIND_OF.get(span_kind, "host")


def make_lanes(spans: pl.DataFrame, names: SpanNames, window_ns: int, origin_ns: int) -> RankLanes:
    """Lay the spans of a rank in rows.

    Args:
        spans: of one rank, on the aligned clock: columns of the `spans` table, and `until_ns`: when the last
            member of its collective arrived, null for other spans.
    """
    spans = spans.filter(pl.col("kind") != "overhead").with_columns(
        lane=_lane(),
        duration_ns=pl.max_horizontal(pl.col("duration_ns"), 1),
        name_code=_name_codes(spans, names),
    )
    order = _lane_order(spans)
    places = pl.col("lane").replace_strict(order["lane"], range(order.height), return_dtype=pl.Int32)
    spans = spans.with_columns(place=places).sort(
        "place", "start_ns", "duration_ns", "span_id", descending=[False, False, True, False]
    )
    place, start = spans["place"].to_numpy(), spans["start_ns"].to_numpy() - origin_ns
    end = start + spans["duration_ns"].to_numpy()
    depth = depths(place, start, end)
    kinds = {kind: KINDS.index(bar_kind(kind)) for kind in SPAN_KINDS}
    kind = spans["kind"].cast(pl.String).replace_strict(kinds, return_dtype=pl.UInt8).to_numpy(writable=True)
    kind[spans["until_ns"].is_not_null().to_numpy()] = KINDS.index("transfer")
    columns = {
        "place": place, "depth": depth, "start": start, "end": end, "kind": kind,
        "until": spans["until_ns"].fill_null(0).to_numpy() - origin_ns,
        "name": spans["name_code"].to_numpy(), "ident": _small(spans["span_id"].to_numpy()),
        "phase": phases_of(spans, place, depth, start, names.texts),
        "micro_batch": spans["micro_batch"].clip(-1, 32_000).cast(pl.Int16).to_numpy(),
    }  # fmt: skip
    return lay_rows(
        int(spans["rank"][0]), columns, order["label"].to_list(), order["gpu"].to_list(), window_ns
    )


def _name_codes(spans: pl.DataFrame, names: SpanNames) -> pl.Series:
    kept = spans.filter(pl.col("kind") != "overhead")["name"]
    return pl.Series("name_code", names.codes(kept))


def _lane() -> pl.Expr:
    """Return an internal key of a span's lane within its rank."""
    shadow = pl.col("kind") == "gpu_annotation"
    on_gpu = pl.format("{} {} {}", pl.col("device"), pl.col("stream"), shadow.cast(pl.Int8))
    return pl.when(pl.col("stream") >= 0).then(on_gpu).otherwise(pl.format("t {}", pl.col("tid")))


def _lane_order(spans: pl.DataFrame) -> pl.DataFrame:
    """Return lanes in display order: streams, the busiest first, then the main thread, then other threads."""
    autograd = (pl.col("forward_thread") > 0) | pl.col("name").str.starts_with("autograd::engine")
    lanes = spans.group_by("lane").agg(
        pl.col("device", "stream").first(),
        shadow=(pl.col("kind") == "gpu_annotation").first(),
        gpu=(pl.col("stream") >= 0).first(),
        busy=pl.col("duration_ns").filter(pl.col("kind").is_in(GPU_WORK_KINDS)).sum(),
        marks=pl.col("name").str.contains(_STEP_MARKS).sum(),
        autograd=autograd.any(),
        loads=pl.col("name").str.contains("DataLoader|pin_memory").any(),
        longest=pl.col("name").sort_by("duration_ns").last(),
        spans=pl.len(),
        calls=(pl.col("tid") == CALLS).first() & (pl.col("stream") < 0).first(),
    )
    order = lanes.join(_stream_work(spans), on=["device", "stream"], how="left").sort(
        "gpu", "calls", "shadow", "busy", "marks", "autograd", "spans", "lane",
        descending=[True, True, False, True, True, False, True, False],
    )  # fmt: skip
    main = ~pl.col("gpu") & ~pl.col("calls") & (pl.int_range(pl.len()).over("gpu", "calls") == 0)
    library = pl.col("longest").str.replace(r"^(\w+):[a-z]\w*$", "$1")  # gloo, of `gloo:broadcast`
    longest = library.map_elements(lambda name: shortened(name, _LONGEST), return_dtype=pl.String)
    what = (
        pl.when("gpu").then(pl.col("work").fill_null(STREAM))
        .when("calls").then(pl.lit(WAITING))
        .when(main).then(pl.lit("main thread"))
        .when("autograd").then(pl.lit("autograd"))
        .when("loads").then(pl.lit("data loader"))
        .otherwise(pl.format("{} thread", longest))
    )  # fmt: skip
    order = order.with_columns(what=what)
    place = pl.int_range(1, pl.len() + 1).over("what", "device", "shadow")
    alone = ~pl.col("gpu") & (place == 1)
    thread = pl.when(alone).then("what").otherwise(pl.format("{} {}", "what", place))
    label = pl.when("gpu").then(stream_label(pl.col("what"), pl.col("stream"), place)).otherwise(thread)
    if order.filter("gpu")["device"].n_unique() > 1:
        label = pl.when("gpu").then(pl.format("GPU {} {}", "device", label)).otherwise(label)
    return order.with_columns(label=pl.when("shadow").then(pl.format("{} ranges", label)).otherwise(label))


def _stream_work(spans: pl.DataFrame) -> pl.DataFrame:
    """Return `device`, `stream`, and `work`: what takes most of the stream's time."""
    busy = spans.filter((pl.col("stream") >= 0) & pl.col("kind").is_in(GPU_WORK_KINDS))
    computes, moves = pl.col("kind") == "kernel", pl.col("until_ns").is_not_null()
    return stream_work(busy.with_columns(computes=computes, moves=moves), ["device", "stream"])


def depths(place: NDArray[Any], start: Ints, end: Ints) -> NDArray[np.int32]:
    """Return the depth of nesting of each span; no two spans of a lane and depth overlap.

    Args:
        place: [N] lane of each span, ascending.
        start, end: [N] ns; sorted by start within a lane, and the longest first among equal starts.

    Returns:
        [N] 0 for outermost spans. A span preceded by k spans of its lane, j of them already over, is
        within k - j others.
    """
    depth = np.zeros(start.size, np.int32)
    bounds = np.flatnonzero(np.r_[True, np.diff(place) != 0, True]) if place.size else np.zeros(1, np.int64)
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        ended = np.searchsorted(np.sort(end[low:high]), start[low:high], "right")
        depth[low:high] = _move_apart(np.arange(high - low) - ended, start[low:high], end[low:high])
    return depth


def _move_apart(depth: Ints, start: Ints, end: Ints) -> Ints:
    """Move spans that overlap another one of their depth deeper, for at most `_MAX_MOVES` rounds."""
    for _ in range(_MAX_MOVES):
        order = np.lexsort((start, depth))
        latest = end[order].copy()
        same = np.diff(depth[order]) == 0
        overlaps = np.flatnonzero(same & (start[order][1:] < latest[:-1])) + 1
        if not overlaps.size:
            break
        depth[order[overlaps]] += 1
    return depth


def lay_rows(
    rank: int, columns: dict[str, NDArray[Any]], labels: Sequence[str], gpu: Sequence[bool], window_ns: int
) -> RankLanes:
    """Put spans into rows; split each collective into its wait and its transfer.

    Args:
        columns: `place` (lane), `depth`, `start`, `end`, `kind`, `until`, `name`, `ident`, `phase`,
            `micro_batch`, each [N].
    """
    columns = _split(columns)
    key = columns["place"].astype(np.int64) << 20 | np.minimum(columns["depth"], (1 << 20) - 1)
    order = np.lexsort((columns["start"], key))
    rows, first = np.unique(key[order], return_index=True)
    start, end = columns["start"][order], columns["end"][order]
    apart = np.flatnonzero(np.diff(key[order]) == 0)
    cut = np.minimum(end[apart], start[apart + 1])  # remaining overlaps
    end[apart] = np.maximum(cut, start[apart] + 1)
    finest = DetailLevel(0.0, np.r_[first, start.size].astype(np.int64), start, end, columns["kind"][order])
    lanes = []
    for number, (label, is_gpu) in enumerate(zip(labels, gpu)):
        low, high = np.searchsorted(rows >> 20, [number, number + 1]).tolist()
        lanes.append(Lane(label, bool(is_gpu), (low, high), int(finest.first[high] - finest.first[low])))
    rest = (columns[name][order] for name in ("name", "ident", "phase", "micro_batch"))
    return RankLanes(rank, tuple(lanes), levels(finest, window_ns), *rest)


def _split(columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Split spans of collectives into the wait for the last member's arrival and the transfer after it."""
    until = np.minimum(columns["until"], columns["end"])
    waits = np.flatnonzero((columns["kind"] == KINDS.index("transfer")) & (until > columns["start"]))
    if not waits.size:
        return columns
    parts = {name: np.concatenate([column, column[waits]]) for name, column in columns.items()}
    before = parts["start"].size - waits.size
    parts["kind"] = parts["kind"].copy()
    parts["kind"][waits] = KINDS.index("wait")
    parts["end"] = parts["end"].copy()
    parts["end"][waits] = until[waits]
    parts["start"][before:] = until[waits]
    lasting = parts["end"] > parts["start"]
    return {name: column[lasting] for name, column in parts.items()}


def _small(values: Ints) -> NDArray[Any]:
    """Return ids as int32 if they fit."""
    fits = not values.size or values.max() < np.iinfo(np.int32).max
    return values.astype(np.int32) if fits else values


# Phases: forward pass, backward pass, optimizer. A CPU span has the phase of its name, or else of the span
# around it; GPU work has the phase of the call that launched it.

PHASES = ("unknown", "forward", "backward", "optimizer")
UNKNOWN, FORWARD, BACKWARD, OPTIMIZER = range(4)
_OPTIMIZER = r"(?i)^Optimizer\.|optimizer[._ ]?step|clip_grad|zero_grad|adam|lamb"
_BACKWARD = r"(?i)backward|autograd::engine|wgrad|dgrad"
_FORWARD = r"(?i)forward"


def phases_of(
    spans: pl.DataFrame, place: NDArray[Any], depth: NDArray[Any], start: Ints, names: Sequence[str]
) -> NDArray[np.uint8]:
    """Return [N] the phase of each span.

    Args:
        spans: `name_code`, `kind`, `correlation`, `forward_thread`, by lane and start.
        place: [N] lane of each span.
        depth: [N] depth of nesting.
        start: [N] ns.
    """
    phase: NDArray[np.uint8] = _of_names(names)[spans["name_code"].to_numpy()]
    phase[(phase == UNKNOWN) & (spans["forward_thread"].to_numpy() > 0)] = BACKWARD
    kind = spans["kind"].cast(pl.String)
    _inherit(phase, place, depth, start)
    host = kind.is_in(["cpu_op", "runtime"]).to_numpy()
    phase[host & (phase == UNKNOWN)] = FORWARD
    _inherit(phase, place, depth, start)  # ranges within operators
    _inherit_from_launch(phase, spans, kind)
    return phase


def _of_names(names: Sequence[str]) -> NDArray[np.uint8]:
    texts = pl.Series(names, dtype=pl.String)
    phases = np.zeros(texts.len(), np.uint8)
    for pattern, phase in ((_FORWARD, FORWARD), (_BACKWARD, BACKWARD), (_OPTIMIZER, OPTIMIZER)):
        phases[texts.str.contains(pattern).to_numpy()] = phase
    return phases


def _inherit(phase: NDArray[np.uint8], place: NDArray[Any], depth: NDArray[Any], start: Ints) -> None:
    """Give spans without a phase that of the span around them, from the outside inwards."""
    order = np.lexsort((start, depth, place))
    edges = np.flatnonzero(np.r_[True, (np.diff(place[order]) != 0) | (np.diff(depth[order]) != 0), True])
    outer: Ints = order[:0]
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist()):
        row = order[low:high]
        if depth[row[0]] > 0 and outer.size and place[outer[0]] == place[row[0]]:
            around = outer[np.maximum(np.searchsorted(start[outer], start[row], "right") - 1, 0)]
            phase[row] = np.where(phase[row] == UNKNOWN, phase[around], phase[row])
        outer = row


def _inherit_from_launch(phase: NDArray[np.uint8], spans: pl.DataFrame, kind: pl.Series) -> None:
    """Give GPU work the phase of its launch."""
    on_gpu = kind.is_in(["kernel", "memcpy", "memset"]).to_numpy()
    correlation = spans["correlation"].to_numpy()
    calls = np.flatnonzero((kind == "runtime").to_numpy() & (correlation >= 0))
    work = np.flatnonzero(on_gpu & (correlation >= 0) & (phase != OPTIMIZER))
    if not calls.size or not work.size:
        return
    calls = calls[np.argsort(correlation[calls], kind="stable")]
    near = np.minimum(np.searchsorted(correlation[calls], correlation[work]), calls.size - 1)
    matches = correlation[calls[near]] == correlation[work]
    phase[work[matches]] = phase[calls[near[matches]]]
