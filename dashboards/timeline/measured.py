"""The lanes of a run: measured ones, shown while they are read rank by rank, then those of a replay.

Takes a run; returns `MeasuredLanes`, which a background thread fills. It keeps some 40 bytes per span; other
columns of a span are read from its file when needed. Its clock needs the tables of collectives, clock samples
and steps, and four columns of the spans, one part in memory at a time: the timeline does not wait for the
graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.analysis.cached import Cached, cached
from dpro.arrays import Bools, Ints
from dpro.dashboards import defect_in
from dpro.dashboards.timeline.detail import DetailLevel, levels
from dpro.dashboards.timeline.lanes import KINDS, RankLanes, SpanNames, bar_kind, depths, lay_rows, make_lanes
from dpro.dashboards.timeline.search import Search
from dpro.dashboards.timeline.stopped import Stop, stop_of
from dpro.detect.findings import Finding
from dpro.errors import DproError
from dpro.replay.alignment.align import Alignment, align, one_clock
from dpro.replay.alignment.match import match_collectives
from dpro.replay.alignment.transfers import wait_and_transfer
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.pipeline.operations import consists_of_operations
from dpro.replay.timeline import Timeline, critical_nodes
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, SPANS, STEPS, WORKERS
from dpro.store import Run
from dpro.timelines.lanes import STREAM, lane_names
from dpro.timelines.slices import CRITICAL, Offset, path_offsets, step_extents
from dpro.units import NS_PER_MS

MAX_UNASKED = 1_500_000  # spans of a run up to which its graph is built before a view needs it
COLUMNS = (
    "span_id", "rank", "window", "kind", "name", "start_ns", "duration_ns", "tid", "device", "stream",
    "correlation", "forward_thread", "micro_batch",
)  # fmt: skip


class MeasuredLanes(Cached):
    """The measured lanes of a run, as read so far.

    Attributes:
        ranks: rank -> its lanes; grows until `complete`.
        failed: why reading ended early; empty if it did not.
    """

    def __init__(self, run: Run, hangs: Callable[[], Sequence[Finding]] = list) -> None:
        super().__init__()
        self.run, self.names, self._hangs = run, SpanNames(), hangs
        self.search = Search(self.names)
        self.ranks: dict[int, RankLanes] = {}
        self.failed = ""
        self._complete = threading.Event()

    @cached
    def clocks(self) -> Clocked:
        """The clock of each rank, steps, collectives."""
        hangs: Sequence[Finding] = ()
        with suppress(DproError):  # the view of hangs reports the error
            hangs = self._hangs()
        return align_run(self.run, hangs)

    def calls(self, rank: int) -> pl.DataFrame:
        """Return the calls at which a rank stopped, as spans; empty if the run does not hang."""
        stop = self.clocks.stop
        return SPANS.empty() if stop is None else stop.calls.filter(rank=rank).drop("until_ns")

    @property
    def complete(self) -> bool:
        """Whether reading has ended: all ranks are read, or it failed."""
        return self._complete.is_set()

    def start(self, first: Iterable[int] = ()) -> None:
        """Start to read in a thread, ranks of `first` first, unless reading has started."""
        reader = threading.Thread(target=self._read, args=(list(first),), daemon=True)
        self.once("started", reader.start)

    def all(self) -> dict[int, RankLanes]:
        """Return all ranks; block until they are read."""
        self.start()
        self._complete.wait()
        return self.ranks

    def _read(self, first: list[int]) -> None:
        try:
            of = self.clocks
            for rank in sorted(of.parts, key=lambda rank: (rank not in first, rank)):
                self.ranks[rank] = self._lanes(of, rank)
        except DproError as error:
            self.failed = str(error)
        except Exception:
            self.failed = defect_in("timeline")
        finally:
            self._complete.set()

    def _lanes(self, of: Clocked, rank: int) -> RankLanes:
        spans = self.run.read(SPANS, of.parts[rank], COLUMNS).filter(pl.col("rank") == rank)
        spans = of.alignment.aligned(spans)
        spans = spans.join(arrivals(of, rank), on="span_id", how="left", maintain_order="left")
        if of.stop is not None:
            spans = pl.concat([spans, of.stop.calls.filter(rank=rank).select(spans.columns)])
        return make_lanes(spans, self.names, of.window_ns, of.origin_ns)


# One clock for all ranks, steps on that clock, and arrivals of the members of each collective.

_EXTENT = ("rank", "window", "span_id", "kind", "device", "stream", "start_ns", "duration_ns")


@dataclass(frozen=True)
class Clocked:
    """Data that all lanes of a run share: clocks, collectives, steps.

    Attributes:
        members: a row per member of a collective, on the aligned clock: `rank`, `window`, `span_id`, `op`,
            `key` (its group), `instance`, `members`, `start_ns`, `duration_ns`, `rendezvous_ns`, `bytes_in`,
            `bytes_out`, `dtype`, `launch_span_id`.
        parts: rank -> the files with its spans.
        origin_ns: begin of the timeline, at the first span drawn, on the aligned clock.
        end_ns: end of the timeline, since the origin.
        window_ns: duration of the longest deep window.
        steps: `window`, `step`, `begin_ms`, `end_ms` since the origin.
        lateness_ms: rank -> mean delay behind the first member at collectives.
        stop: where a hanging job stopped; None for other jobs.
        kinds: the kinds of bars (of `KINDS`) that the measured lanes have.
    """

    alignment: Alignment
    members: pl.DataFrame
    parts: Mapping[int, list[Path]]
    origin_ns: int
    end_ns: int
    window_ns: int
    steps: pl.DataFrame
    lateness_ms: Mapping[int, float]
    spans: int
    stop: Stop | None = None
    kinds: frozenset[str] = frozenset()


def align_run(run: Run, hangs: Sequence[Finding] = ()) -> Clocked:
    """Find the clock of each rank, when collectives met, and where the job stopped.

    Raises:
        InputError: a part of the run cannot be read.
    """
    collectives = run.table(COLLECTIVES)
    wanted = collectives.filter((pl.col("window") >= 0) & (pl.col("span_id") >= 0)).select("rank", "span_id")
    parts: dict[int, list[Path]] = {}
    extents, called, spans, kinds = [], [SPANS.empty().select(_EXTENT)], 0, set[str]()
    for path, part in zip(run.parts(SPANS), run.part_by_part(SPANS, _EXTENT)):
        end = (pl.col("start_ns") + pl.col("duration_ns").clip(0)).max()
        drawn = part.filter(pl.col("kind") != "overhead")  # tools may have spans long before the job
        kinds.update(map(bar_kind, drawn["kind"].cast(pl.String).unique()))
        extents.append(drawn.group_by("rank", "window").agg(pl.col("start_ns").min(), end=end))
        called.append(drawn.join(wanted.unique(), on=["rank", "span_id"], how="semi"))
        spans += part.height
        for rank in extents[-1]["rank"].unique().to_list():
            parts.setdefault(rank, []).append(path)
    empty = pl.DataFrame(schema={"rank": pl.Int32, "window": pl.Int32, "start_ns": pl.Int64, "end": pl.Int64})
    extent = (
        pl.concat([empty, *extents])
        .group_by("rank", "window")
        .agg(pl.col("start_ns").min(), pl.col("end").max())
    )
    places = [(int(rank), int(window)) for rank, window in extent.select("rank", "window").iter_rows()]
    matched = match_collectives(collectives, pl.concat(called)).rows
    alignment = _alignment(run, matched, places)
    members = wait_and_transfer(alignment.aligned(matched)).drop("device", "stream")
    moved = alignment.aligned(extent.with_columns(duration_ns=pl.col("end") - pl.col("start_ns")))
    begin = moved["start_ns"].to_numpy()
    origin = int(begin.min(initial=np.iinfo(np.int64).max)) if begin.size else 0
    end_ns = int((begin + moved["duration_ns"].to_numpy()).max(initial=origin))
    waited_ns = max((finding.waited_ns for finding in hangs), default=0)
    stop = stop_of(run, alignment, waited_ns) if hangs and begin.size else None
    end_ns = end_ns if stop is None else max(end_ns, stop.end)
    length = moved.group_by("window").agg(
        last=(pl.col("start_ns") + pl.col("duration_ns")).max() - pl.col("start_ns").min()
    )["last"]
    return Clocked(
        alignment, members, dict(sorted(parts.items())), origin, end_ns - origin,
        int(length.to_numpy().max(initial=1)), _steps(run, alignment, moved, origin), _lateness(members),
        spans, stop, frozenset(kinds | _kinds_of_collectives(members, stop)),
    )  # fmt: skip


def _kinds_of_collectives(members: pl.DataFrame, stop: Stop | None) -> set[str]:
    """Return the kinds of bars that members of collectives are drawn as, instead of those of their spans."""
    recorded = members.filter(pl.col("span_id") >= 0)
    waited = recorded.filter(pl.col("rendezvous_ns") > pl.col("start_ns"))
    kinds = {"transfer": recorded.height > 0, "wait": waited.height > 0 or stop is not None}
    return {kind for kind, occurs in kinds.items() if occurs}


def _alignment(run: Run, matched: pl.DataFrame, places: list[tuple[int, int]]) -> Alignment:
    """Align the clocks as the graph does; traces of whole operations already share one clock."""
    first = next(iter(run.part_by_part(SPANS, ("rank", "kind", "name", "correlation"))), None)
    if first is not None and consists_of_operations(first):
        return one_clock(places, "one trace")
    return align(matched, places, run.table(WORKERS), run.table(CLOCK_SAMPLES))


def _steps(run: Run, alignment: Alignment, extent: pl.DataFrame, origin_ns: int) -> pl.DataFrame:
    """List the steps of deep windows, each from its first begin to its last end on any rank."""
    steps = run.table(STEPS).filter(pl.col("duration_ns") >= 0)
    within = steps.filter(pl.col("window") >= 0)
    steps = alignment.aligned(steps if within.is_empty() else within)
    low, high = extent["start_ns"].min(), (extent["start_ns"] + extent["duration_ns"]).max()
    end = pl.col("start_ns") + pl.col("duration_ns")
    if extent.height:
        steps = steps.filter((end > low) & (pl.col("start_ns") < high))
    return (
        steps.group_by("window", "step")
        .agg(
            begin_ms=(pl.col("start_ns").min() - origin_ns) / NS_PER_MS,
            end_ms=(end.max() - origin_ns) / NS_PER_MS,
        )
        .sort("window", "step")
    )


def _lateness(members: pl.DataFrame) -> dict[int, float]:
    """Return the mean delay of each rank behind the first member of its collectives, in ms."""
    late = pl.col("start_ns") - pl.col("start_ns").min().over("instance")
    met = members.filter(pl.col("members") > 1).with_columns(late=late)
    means = met.group_by("rank").agg(pl.col("late").mean() / NS_PER_MS)
    return {int(rank): float(ms) for rank, ms in means.iter_rows()}


def arrivals(of: Clocked, rank: int) -> pl.DataFrame:
    """Return the arrival of the last member of each collective of a rank: `span_id`, `until_ns` (aligned)."""
    members = of.members.filter((pl.col("rank") == rank) & (pl.col("span_id") >= 0))
    return members.group_by("span_id").agg(until_ns=pl.col("rendezvous_ns").max())


def wait_ns(member: dict[str, int]) -> int:
    """Return how long a member of a collective waited for the last one, in ns."""
    return int(np.clip(member["rendezvous_ns"] - member["start_ns"], 0, max(member["duration_ns"], 0)))


# Lanes of a replay, and the critical path: computed from the graph on request, in a thread, after the
# measured lanes.

PATH, REPLAYED_PATH = -1, -2  # in place of a rank: the critical path of all ranks, as measured and replayed
_INSTANTS = (NodeKind.ARRIVE, NodeKind.RENDEZVOUS, NodeKind.END)


@dataclass(frozen=True)
class Replayed:
    """The lanes that a replay adds to the measured ones.

    Attributes:
        path, replayed_path: a lane of the work on the critical path, at measured and at replayed times.
        critical: rank -> levels of the work in its measured rows that is on the critical path.
        steps: `window`, `step`, `begin_ms`, `end_ms` in the replay, since the timeline's origin.
        offsets: as from `path_offsets`.
    """

    timeline: Timeline
    ranks: Mapping[int, RankLanes]
    path: RankLanes
    replayed_path: RankLanes
    critical: Mapping[int, Sequence[DetailLevel]]
    steps: pl.DataFrame
    offsets: tuple[Offset, Offset | None]


def make_replayed(timeline: Timeline, measured: MeasuredLanes, recorded: Timeline | None = None) -> Replayed:
    """Lay the nodes of a replay in lanes, on the clock of the measured ones.

    Args:
        recorded: the replay of the graph as recorded; None where the cost of recording was not taken out.
    """
    nodes, ranks, of = timeline.graph.nodes, measured.all(), measured.clocks
    shift = timeline.graph.origin_ns - of.origin_ns
    windows = np.unique(nodes.window).tolist()
    path = np.unique(
        np.concatenate([np.empty(0, np.int64), *(critical_nodes(timeline, window) for window in windows)])
    )
    path = path[~np.isin(nodes.kind[path], _INSTANTS)]
    codes = measured.names.codes(pl.Series(timeline.graph.names, dtype=pl.String))
    names = lane_names(timeline.graph)
    everything = {
        rank: _rank_lanes(timeline, rank, lanes, codes, names, shift, of.window_ns)
        for rank, lanes in ranks.items()
    }
    critical = {rank: _critical(timeline, path, lanes, shift, of.window_ns) for rank, lanes in ranks.items()}
    as_measured = _path(PATH, timeline, path, nodes.measured_start, nodes.measured_end, measured, codes)
    as_replayed = _path(REPLAYED_PATH, timeline, path, timeline.start, timeline.end, measured, codes)
    steps = _replayed_steps(timeline, shift)
    offsets = path_offsets(timeline, path, recorded)
    return Replayed(timeline, everything, as_measured, as_replayed, critical, steps, offsets)


def _replayed_steps(timeline: Timeline, shift: int) -> pl.DataFrame:
    """List the steps of deep windows in the replay, each from the end of the one before it."""
    times = {f"{edge}_ms": (pl.col(f"{edge}_ns") + shift) / NS_PER_MS for edge in ("begin", "end")}
    extents = step_extents(timeline.graph, timeline.start, timeline.end)
    return extents.select("window", "step", **times).sort("window", "step")


def _columns(
    timeline: Timeline, chosen: Ints, start: Ints, end: Ints, codes: NDArray[np.int32]
) -> dict[str, NDArray[Any]]:
    nodes = timeline.graph.nodes
    kinds = np.array([KINDS.index(kind.name.lower()) if kind not in _INSTANTS else 0 for kind in NodeKind])
    nothing = np.zeros(chosen.size, np.int64)
    return {
        "place": nodes.lane[chosen], "start": start, "end": end, "depth": nothing,
        "kind": kinds[nodes.kind[chosen]].astype(np.uint8), "until": nothing - (1 << 62),
        "name": codes[nodes.name[chosen]],
        "ident": chosen, "phase": nothing.astype(np.uint8), "micro_batch": (nothing - 1).astype(np.int16),
    }  # fmt: skip


def _rank_lanes(
    timeline: Timeline,
    rank: int,
    measured: RankLanes,
    codes: NDArray[np.int32],
    names: Sequence[str],
    shift: int,
    window_ns: int,
) -> RankLanes:
    """Return all nodes of a rank, with waits for other members between arrivals and transfers."""
    nodes = timeline.graph.nodes
    work = np.flatnonzero((nodes.rank == rank) & ~np.isin(nodes.kind, _INSTANTS) & (nodes.lane >= 0))
    arrived = np.flatnonzero((nodes.rank == rank) & (nodes.kind == NodeKind.ARRIVE))
    moved = work[nodes.kind[work] == NodeKind.TRANSFER]
    moved = moved[np.argsort(nodes.collective[moved], kind="stable")]
    begin = timeline.start[work] + shift
    columns = _columns(timeline, work, begin, timeline.end[work] + shift, codes)
    if moved.size:  # a transfer begins with its wait; `lay_rows` splits them
        near = np.minimum(np.searchsorted(nodes.collective[moved], nodes.collective[arrived]), moved.size - 1)
        met = nodes.collective[moved[near]] == nodes.collective[arrived]
        place = np.searchsorted(work, moved[near[met]])
        columns["until"][place] = columns["start"][place]
        columns["start"] = columns["start"].copy()
        columns["start"][place] = np.minimum(timeline.start[arrived[met]] + shift, columns["start"][place])
    lasting = columns["end"] > columns["start"]
    columns = {name: column[lasting] for name, column in columns.items()}
    item = indices_of_spans(measured, nodes.span[columns["ident"]])
    labels, gpu, columns["place"] = _merge_lanes(timeline.graph, names, columns["place"], measured, item)
    _copy_phases(columns, np.arange(item.size), measured, item)
    order = np.lexsort((-columns["end"], columns["start"], columns["place"]))
    columns = {name: column[order] for name, column in columns.items()}
    columns["depth"] = depths(columns["place"], columns["start"], columns["end"])
    return lay_rows(rank, columns, labels, gpu, window_ns)


def _merge_lanes(
    graph: Graph, names: Sequence[str], lane: Ints, measured: RankLanes, item: Ints
) -> tuple[list[str], list[bool], Ints]:
    """Merge the lanes of a graph, which has some for each window, into one for each name.

    Args:
        names: [L] of the graph's lanes, for those without a measured span.
        lane: [N] the graph's lane of each node of a rank.
        measured: the rank's measured lanes, whose names and order come first.
        item: [N] index of each node's measured span, -1 for none.

    Returns:
        Names of the merged lanes, those on a GPU first; whether each is on one; [N] the lane of each node.
    """
    numbers, place = np.unique(lane, return_inverse=True)
    recorded = np.flatnonzero(item >= 0)
    places, first = np.unique(place[recorded], return_index=True)
    rows = np.searchsorted(measured.all.first, item[recorded[first]], "right") - 1
    as_measured = dict(zip(places.tolist(), map(measured.lane_of, rows.tolist())))
    labels, keys = [], []
    for number, graph_lane in enumerate(numbers.tolist()):
        at = as_measured.get(number, len(measured.lanes))
        recorded_lane = measured.lanes[at] if number in as_measured else None
        on_gpu = recorded_lane.gpu if recorded_lane else graph.lanes[graph_lane][1].startswith(STREAM)
        labels.append(recorded_lane.label if recorded_lane else names[graph_lane])
        keys.append((not on_gpu, at, labels[-1]))
    merged: dict[str, bool] = {}
    for on_cpu, _, label in sorted(keys):
        merged.setdefault(label, not on_cpu)
    position = {label: number for number, label in enumerate(merged)}
    return (
        list(merged),
        list(merged.values()),
        np.array([position[label] for label in labels], np.int64)[place],
    )


def _copy_phases(columns: dict[str, NDArray[Any]], places: Ints, lanes: RankLanes, item: Ints) -> None:
    """Give nodes the phase and micro-batch of the spans they were measured as, where known."""
    is_measured = item >= 0
    columns["phase"][places[is_measured]] = lanes.phase[item[is_measured]]
    columns["micro_batch"][places[is_measured]] = lanes.micro_batch[item[is_measured]]


def indices_of_spans(lanes: RankLanes, spans: Ints) -> Ints:
    """Return [N] the index of each id among the measured spans, -1 for none.

    Args:
        spans: [N] ids of spans, -1 for none.
    """
    if not lanes.ident.size:
        return np.full(spans.size, -1)
    order = np.argsort(lanes.ident, kind="stable")
    near = np.minimum(np.searchsorted(lanes.ident, spans, sorter=order), order.size - 1)
    item = order[near]
    return np.where((spans >= 0) & (lanes.ident[item] == spans), item, -1)


def _critical(
    timeline: Timeline, path: Ints, lanes: RankLanes, shift: int, window_ns: int
) -> Sequence[DetailLevel]:
    """Return a rank's work on the critical path, each node on the first row of its measured lane."""
    nodes = timeline.graph.nodes
    work = path[nodes.rank[path] == lanes.rank]
    item = indices_of_spans(lanes, nodes.span[work])
    top = np.concatenate(
        [np.full(lane.rows[1] - lane.rows[0], lane.rows[0]) for lane in lanes.lanes] or [work[:0]]
    )
    row = np.where(
        item >= 0, top[np.searchsorted(lanes.all.first, item, "right") - 1] if top.size else -1, -1
    )
    path_lanes, place = np.unique(nodes.lane[work[item >= 0]], return_index=True)
    for lane, of in zip(
        path_lanes.tolist(), row[item >= 0][place].tolist()
    ):  # time in no span is on its thread
        row = np.where((item < 0) & (nodes.lane[work] == lane), of, row)
    fits = (row >= 0) & (nodes.measured_end[work] > nodes.measured_start[work])
    work, row = work[fits], row[fits]
    order = np.lexsort((nodes.measured_start[work], row))
    work, row = work[order], row[order]
    first = np.searchsorted(row, np.arange(lanes.all.first.size)).astype(np.int64)
    start, end = nodes.measured_start[work] + shift, nodes.measured_end[work] + shift
    return levels(DetailLevel(0.0, first, start, end, np.zeros(work.size, np.uint8)), window_ns)


def _path(
    rank: int,
    timeline: Timeline,
    path: Ints,
    start: Ints,
    end: Ints,
    measured: MeasuredLanes,
    codes: NDArray[np.int32],
) -> RankLanes:
    """Return the critical path as a lane.

    Args:
        rank: `PATH` or `REPLAYED_PATH`.
        path: nodes on the path.
        start, end: [N] ns of each node of the graph: as measured, or replayed.
    """
    nodes, of = timeline.graph.nodes, measured.clocks
    shift = timeline.graph.origin_ns - of.origin_ns
    start, end = start[path], end[path]
    lasting: Bools = end > start
    path, start, end = path[lasting], start[lasting] + shift, end[lasting] + shift
    columns = _columns(timeline, path, start, end, codes)
    columns["place"] = np.zeros(path.size, np.int64)
    for rank, lanes in measured.ranks.items():
        places = np.flatnonzero(nodes.rank[path] == rank)
        _copy_phases(columns, places, lanes, indices_of_spans(lanes, nodes.span[path[places]]))
    order = np.argsort(start, kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    columns["depth"] = depths(columns["place"], columns["start"], columns["end"])
    return lay_rows(rank, columns, [CRITICAL], [True], of.window_ns)


class BackgroundResult:
    """A result that a background thread computes on request.

    Attributes:
        state: `idle`, `working`, `ready` or `refused`.
        why: why it is refused; else empty.
    """

    def __init__(self, make: Callable[[], Replayed]) -> None:
        self.state, self.why = "idle", ""
        self.value: Replayed | None = None
        self._make, self._lock = make, threading.Lock()

    def start(self) -> None:
        """Start to compute, unless that has started."""
        with self._lock:
            if self.state != "idle":
                return
            self.state = "working"
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        try:
            self.value = self._make()
            self.state = "ready"
        except DproError as error:
            self.why, self.state = str(error), "refused"
        except Exception:
            self.why, self.state = defect_in("timeline"), "refused"
