"""The lanes of a replay, and the critical path: both come after the measured lanes, once the graph is there.

In: a replay and the measured lanes. Out: a `Replayed`, made in a thread when it is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.dashboards import defect_in
from dpro.dashboards.timeline.detail import DetailLevel, levels
from dpro.dashboards.timeline.lanes import KINDS, RankLanes, depths, laid
from dpro.dashboards.timeline.measured import MeasuredLanes
from dpro.errors import DproError
from dpro.export.slices import CRITICAL
from dpro.replay.graph import NodeKind
from dpro.replay.timeline import Timeline, critical_nodes

PATH = -1  # in place of a rank: the critical path of all
_INSTANTS = (NodeKind.ARRIVE, NodeKind.RENDEZVOUS, NodeKind.END)


@dataclass(frozen=True)
class Replayed:
    """The lanes that a replay adds to the measured ones.

    Attributes:
        path: a lane of what is on the critical path, when it was measured.
        critical: rank -> levels of what of its measured rows is on the critical path.
        offset_ns: smallest and largest delay of the path's spans in the replay, relative to the measured
            start.
    """

    timeline: Timeline
    ranks: Mapping[int, RankLanes]
    path: RankLanes
    critical: Mapping[int, Sequence[DetailLevel]]
    offset_ns: tuple[int, int]


def make_replayed(timeline: Timeline, measured: MeasuredLanes) -> Replayed:
    """Lay the nodes of a replay in lanes, on the clock of the measured ones."""
    nodes, ranks, of = timeline.graph.nodes, measured.all(), measured.clocks
    shift = timeline.graph.origin_ns - of.origin_ns
    windows = np.unique(nodes.window).tolist()
    path = np.unique(
        np.concatenate([np.empty(0, np.int64), *(critical_nodes(timeline, window) for window in windows)])
    )
    path = path[~np.isin(nodes.kind[path], _INSTANTS)]
    later = timeline.start[path] - nodes.measured_start[path]
    offset = (int(later.min()), int(later.max())) if later.size else (0, 0)
    codes = measured.names.codes(pl.Series(timeline.graph.names, dtype=pl.String))
    everything = {
        rank: _rank_lanes(timeline, rank, lanes, codes, shift, of.window_ns) for rank, lanes in ranks.items()
    }
    critical = {rank: _critical(timeline, path, lanes, shift, of.window_ns) for rank, lanes in ranks.items()}
    return Replayed(timeline, everything, _path(timeline, path, measured, codes), critical, offset)


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
    timeline: Timeline, rank: int, measured: RankLanes, codes: NDArray[np.int32], shift: int, window_ns: int
) -> RankLanes:
    """All nodes of a rank, with waits for other members between arrivals and transfers."""
    nodes = timeline.graph.nodes
    work = np.flatnonzero((nodes.rank == rank) & ~np.isin(nodes.kind, _INSTANTS) & (nodes.lane >= 0))
    arrived = np.flatnonzero((nodes.rank == rank) & (nodes.kind == NodeKind.ARRIVE))
    moved = work[nodes.kind[work] == NodeKind.TRANSFER]
    moved = moved[np.argsort(nodes.collective[moved], kind="stable")]
    begin = timeline.start[work] + shift
    columns = _columns(timeline, work, begin, timeline.end[work] + shift, codes)
    if moved.size:  # a transfer begins with its wait; `laid` takes the two apart
        near = np.minimum(np.searchsorted(nodes.collective[moved], nodes.collective[arrived]), moved.size - 1)
        met = nodes.collective[moved[near]] == nodes.collective[arrived]
        place = np.searchsorted(work, moved[near[met]])
        columns["until"][place] = columns["start"][place]
        columns["start"] = columns["start"].copy()
        columns["start"][place] = np.minimum(timeline.start[arrived[met]] + shift, columns["start"][place])
    lasting = np.flatnonzero(columns["end"] > columns["start"])
    lanes, columns["place"] = np.unique(columns["place"], return_inverse=True)
    order = lasting[
        np.lexsort((-columns["end"][lasting], columns["start"][lasting], columns["place"][lasting]))
    ]
    columns = {name: column[order] for name, column in columns.items()}
    columns["depth"] = depths(columns["place"], columns["start"], columns["end"])
    everything = np.arange(columns["ident"].size)
    _like(columns, everything, measured, measured_items(measured, nodes.span[columns["ident"]]))
    labels = [timeline.graph.lanes[lane][1] for lane in lanes.tolist()]
    gpu = [label.startswith(("stream", "GPU")) for label in labels]
    return laid(rank, columns, labels, gpu, window_ns)


def _like(columns: dict[str, NDArray[Any]], places: Ints, lanes: RankLanes, item: Ints) -> None:
    """Give nodes the phase and micro-batch of the spans they were measured as, where those are known."""
    is_measured = item >= 0
    columns["phase"][places[is_measured]] = lanes.phase[item[is_measured]]
    columns["micro_batch"][places[is_measured]] = lanes.micro_batch[item[is_measured]]


def measured_items(lanes: RankLanes, spans: Ints) -> Ints:
    """[N] which of the measured spans each id is, -1 for none.

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
    """What of a rank is on the critical path, each on the first row of its measured lane."""
    nodes = timeline.graph.nodes
    work = path[nodes.rank[path] == lanes.rank]
    item = measured_items(lanes, nodes.span[work])
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


def _path(timeline: Timeline, path: Ints, measured: MeasuredLanes, codes: NDArray[np.int32]) -> RankLanes:
    """The critical path as a lane of its own, when its work was measured."""
    nodes, of = timeline.graph.nodes, measured.clocks
    shift = timeline.graph.origin_ns - of.origin_ns
    start, end = nodes.measured_start[path], nodes.measured_end[path]
    lasting: Bools = end > start
    path, start, end = path[lasting], start[lasting] + shift, end[lasting] + shift
    columns = _columns(timeline, path, start, end, codes)
    columns["place"] = np.zeros(path.size, np.int64)
    for rank, lanes in measured.ranks.items():
        places = np.flatnonzero(nodes.rank[path] == rank)
        _like(columns, places, lanes, measured_items(lanes, nodes.span[path[places]]))
    order = np.argsort(start, kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    columns["depth"] = depths(columns["place"], columns["start"], columns["end"])
    return laid(PATH, columns, [CRITICAL], [True], of.window_ns)


class BackgroundResult:
    """A result that a background thread computes on request.

    Attributes:
        state: `idle`, `working`, `ready` or `refused`.
    """

    def __init__(self, make: Callable[[], Replayed]) -> None:
        self.state, self.why = "idle", ""
        self.value: Replayed | None = None
        self._make, self._lock = make, threading.Lock()

    def start(self) -> None:
        """Begin, unless that has happened."""
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
