"""The HTTP requests of the timeline's page: lanes, segments of a viewport, matches, facts of a span.

In: requests with a viewport in their query. Out: JSON, and for a viewport a header in JSON followed by
little-endian arrays, so that the browser draws them as they are. Times are ns since the timeline's origin.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from flask import Flask, Response, jsonify, request
from numpy.typing import NDArray

from dpro.dashboards.loaded import Loaded
from dpro.dashboards.runs import Runs
from dpro.dashboards.timeline.detail import DetailLevel, Segments, segments
from dpro.dashboards.timeline.facts import cause_of, fact_info, place_of, span_info
from dpro.dashboards.timeline.lanes import KINDS, MEASURED, PHASES, REPLAYED, RankLanes
from dpro.dashboards.timeline.measured import MAX_UNASKED
from dpro.dashboards.timeline.replayed import PATH
from dpro.dashboards.timeline.search import FoundSpan, matching
from dpro.errors import DproError, UsageError
from dpro.export.slices import path_note
from dpro.replay.mesh import named_axes, places_along
from dpro.words import shortened

NAMED_PIXELS = 22  # minimum width of a bar that shows its name
MAX_ROWS, MAX_PIXELS = 400, 8_000
MAX_SEGMENTS, MIN_SEGMENTS = 9_000, 500  # of a viewport, so that drawing stays fast; of each rank in it
_LONGEST = 160  # characters of a name in a bar
SPAN, MATCH, ON_PATH = 0, 1, 2  # layers of a viewport
_ARRAYS = (
    ("x", "<f4"), ("width", "<f4"), ("density", "<f4"), ("row", "<i4"), ("item", "<i4"), ("name", "<i4"),
    ("count", "<i4"), ("micro", "<i2"), ("kind", "u1"), ("phase", "u1"), ("layer", "u1"),
)  # fmt: skip


class Viewport(NamedTuple):
    """The visible range: `begin` and `end` in ns, its width in pixels, and its rows: side, rank, row."""

    begin: int
    end: int
    pixels: int
    rows: list[tuple[str, int, int]]


def parse_viewport(query: Mapping[str, str]) -> Viewport:
    """Read a viewport: `begin`, `end`, `px`, and `rows` as `m0.3-5;r1.0-2`: side, rank, rows.

    Raises:
        UsageError: the query is invalid.
    """
    try:
        begin, end, pixels = (int(query[name]) for name in ("begin", "end", "px"))
        rows = []
        for part in filter(None, query["rows"].split(";")):
            rank, _, stretch = part[1:].partition(".")
            low, high = stretch.split("-")
            if not 0 <= int(low) <= int(high) <= int(low) + MAX_ROWS or part[0] not in "mr":
                raise ValueError(part)
            rows += [(part[0], int(rank), row) for row in range(int(low), int(high))]
    except (KeyError, ValueError) as error:
        raise UsageError("no such viewport: begin, end and px are numbers, rows as m0.3-5") from error
    if not (
        0 < end - begin < 1 << 60
        and abs(begin) < 1 << 60
        and 0 < pixels <= MAX_PIXELS
        and len(rows) <= MAX_ROWS
    ):
        raise UsageError("no such viewport: it is empty, or too large")
    return Viewport(begin, end, pixels, rows)


def lane_info(loaded: Loaded) -> dict[str, Any]:
    """Return all lanes that have been read so far, the clock, and the steps."""
    measured = loaded.measured
    complete, of = measured.complete, measured.clocks
    places = {axis: places_along(loaded.mesh, axis) for axis in named_axes(loaded.mesh)}
    later = loaded.replay_lanes
    state, why = later.state, later.why  # before its lanes: it may become ready meanwhile
    sides = [(MEASURED, dict(measured.ranks))]
    if later.value is not None:
        sides += [(REPLAYED, {PATH: later.value.path, **later.value.ranks})]
    return {
        "complete": complete,
        "failed": measured.failed,
        "spans": of.spans,
        "expected": len(of.parts),
        "end": of.end_ns,
        "kinds": KINDS,
        "phases": PHASES,
        "steps": [list(row) for row in of.steps.select("window", "step", "begin_ms", "end_ms").iter_rows()],
        "replay": {"state": state, "why": why, "automatic": of.spans <= MAX_UNASKED}
        | ({"note": path_note(*later.value.offset_ns)} if later.value else {}),
        "ranks": [
            {
                "side": side[0],
                "rank": rank,
                "late": of.lateness_ms.get(rank),
                "place": {axis: by_rank[rank] for axis, by_rank in places.items() if rank in by_rank},
                "lanes": [[lane.label, lane.gpu, *lane.rows, lane.spans] for lane in lanes.lanes],
            }
            for side, ranks in sides
            for rank, lanes in sorted(ranks.items())
        ],
    }


def _lanes(loaded: Loaded, side: str, rank: int) -> RankLanes | None:
    if side == "m":
        return loaded.measured.ranks.get(rank)
    replayed = loaded.replay_lanes.value
    return None if replayed is None else replayed.path if rank == PATH else replayed.ranks.get(rank)


def drawn(loaded: Loaded, view: Viewport, pattern: str = "") -> Iterator[tuple[int, RankLanes, Segments]]:
    """Segments of a viewport, rank by rank: their layer, whose they are, and the segments.

    Args:
        pattern: what is searched for; empty for nothing.

    Raises:
        UsageError: the pattern is no regular expression.
    """
    pixel_ns, window_ns = (view.end - view.begin) / view.pixels, loaded.measured.clocks.window_ns
    replayed = loaded.replay_lanes.value
    ranks = list(dict.fromkeys((side, rank) for side, rank, _ in view.rows))
    most = max(MAX_SEGMENTS // max(len(ranks), 1), MIN_SEGMENTS)
    for side, rank in ranks:
        lanes = _lanes(loaded, side, rank)
        if lanes is None:
            continue
        number = lanes.all.first.size - 1
        shown = [
            (place, row)
            for place, (s, r, row) in enumerate(view.rows)
            if (s, r) == (side, rank) and row < number
        ]
        places, rows = np.array([place for place, _ in shown], np.int64), [row for _, row in shown]
        layers: list[tuple[int, Sequence[DetailLevel]]] = [(SPAN, lanes.levels)]
        if pattern:
            layers.append((MATCH, loaded.measured.search.of_rank(pattern, lanes, window_ns)))
        if replayed is not None and side == "m":
            layers.append((ON_PATH, replayed.critical.get(rank, ())))
        for layer, detail in layers:
            if detail and rows:
                visible = segments(detail, rows, view.begin, view.end, pixel_ns, most)
                yield layer, lanes, replace(visible, row=places[visible.row])


def packed(loaded: Loaded, view: Viewport, pattern: str = "") -> bytes:
    """Segments of a viewport as the page reads them: header, arrays one after the other.

    Returns:
        Four bytes with the length of the header; the header in JSON, padded to a multiple of four bytes:
        how many segments, which arrays of which type, the names in bars; the arrays, each padded likewise.
    """
    pixel_ns = (view.end - view.begin) / view.pixels
    parts: dict[str, list[NDArray[Any]]] = {name: [np.empty(0, dtype)] for name, dtype in _ARRAYS}
    named: set[int] = set()
    for layer, lanes, visible in drawn(loaded, view, pattern):
        path = layer == ON_PATH
        length = np.maximum(visible.end - visible.start, 1)
        name = np.full(visible.row.size, -1) if path else lanes.name[visible.item]
        columns = {
            "x": (visible.start - view.begin) / pixel_ns, "width": length / pixel_ns,
            "density": np.minimum(visible.busy / length, 1), "row": visible.row, "item": visible.item,
            "name": name, "count": visible.count, "kind": visible.kind,
            "layer": np.full(visible.row.size, layer),
            "micro": name if path else lanes.micro_batch[visible.item],
            "phase": np.zeros_like(name) if path else lanes.phase[visible.item],
        }  # fmt: skip
        for array, dtype in _ARRAYS:
            parts[array].append(columns[array].astype(dtype))
        seen = np.minimum(columns["x"] + columns["width"], view.pixels) - np.maximum(columns["x"], 0)
        named.update(np.unique(name[(seen >= NAMED_PIXELS) & (visible.count == 1)]).tolist())
    arrays = {name: np.concatenate(parts[name]) for name, _ in _ARRAYS}
    texts = loaded.measured.names.texts
    header = {
        "count": int(arrays["x"].size),
        "arrays": list(_ARRAYS),
        "names": {code: shortened(texts[code], _LONGEST) for code in sorted(named - {-1})},
    }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 4)
    return len(head).to_bytes(4, "little") + head + b"".join(map(_padded, arrays.values()))


def _padded(array: NDArray[Any]) -> bytes:
    text = array.tobytes()
    return text + b"\0" * (-len(text) % 4)


def found_info(loaded: Loaded, pattern: str, rank: int, item: int, direction: str) -> dict[str, Any]:
    """Count the spans that match, and find the next one, or the one before.

    Args:
        rank: of the span to go on from, -1 for none.
        direction: `next`, `previous`, or empty: only count.

    Raises:
        UsageError: that is no regular expression.
    """
    measured = loaded.measured
    ranks = dict(measured.ranks)
    count, total = measured.search.count(pattern, ranks)
    answer: dict[str, Any] = {"count": count, "ms": total / 1e6, "complete": measured.complete}
    if direction:
        lanes = ranks.get(rank)
        is_there = lanes is not None and 0 <= item < lanes.name.size
        start = int(lanes.all.start[item]) if is_there and lanes is not None else -(1 << 62)
        place, number = measured.search.next(
            pattern, ranks, FoundSpan(start, rank, item), direction == "previous"
        )
        answer |= {"number": number, "place": place and place_of(measured, place.rank, place.item)}
    return answer


def node_info(loaded: Loaded, rank: int, item: int) -> dict[str, Any] | None:
    """Collect the facts and arrows of a replayed span, or of one on the critical path.

    Args:
        rank: whose it is, -1 for the critical path.
    """
    replayed, lanes = loaded.replay_lanes.value, _lanes(loaded, "r", rank)
    if replayed is None or lanes is None or not 0 <= item < lanes.name.size:
        return None
    node, nodes = int(lanes.ident[item]), replayed.timeline.graph.nodes
    measured, arrows = loaded.measured, []
    ends = [(node, "the same span, as measured", True)]
    cause, why = cause_of(replayed.timeline, node)
    ends += [(cause, "the replay had it wait for this", False)] if why is not None else []
    for other, words, out in ends:
        owner = measured.ranks.get(int(nodes.rank[other]))
        measured_item = -1 if owner is None or nodes.span[other] < 0 else owner.find(int(nodes.span[other]))
        if owner is not None and measured_item >= 0:
            arrows.append({"place": place_of(measured, owner.rank, measured_item), "out": out, "why": words})
    place = {
        "rank": rank, "item": item, "id": node, "row": lanes.row_of(item),
        "start": int(lanes.all.start[item]), "end": int(lanes.all.end[item]),
        "name": measured.names.texts[lanes.name[item]],
    }  # fmt: skip
    return {"place": place, "facts": fact_info(replayed.timeline, node), "stack": [], "arrows": arrows}


def _chosen(loaded: Loaded, query: Mapping[str, str]) -> dict[str, Any] | None:
    """The span that a request names: `side`, `rank`, and `item`, or `id`, which stays the same in links."""
    side, rank = query.get("side", "m"), int(query["rank"])
    lanes = _lanes(loaded, side, rank)
    if lanes is None:
        return None
    item = int(query["item"]) if "item" in query else lanes.find(int(query["id"]))
    if not 0 <= item < lanes.name.size:
        return None
    if "brief" in query:
        name = shortened(loaded.measured.names.texts[lanes.name[item]], _LONGEST)
        return {"name": name, "row": lanes.row_of(item)}
    if side == "r":
        return node_info(loaded, rank, item)
    replayed = loaded.replay_lanes.value
    return span_info(loaded.measured, rank, item, None if replayed is None else replayed.timeline)


def register(server: Flask, runs: Runs) -> None:
    """Register the routes of the timeline."""

    def answered(work: Any) -> Response:
        try:
            answer = work(runs.loaded(request.args.get("run", "")))
        except DproError as error:
            return _json({"error": str(error)}, 400)
        except (KeyError, ValueError, OverflowError):
            return _json({"error": "not understood"}, 400)
        return answer if isinstance(answer, Response) else _json(answer)

    @server.get("/timeline/lanes")
    def lanes() -> Response:
        def work(loaded: Loaded) -> Any:
            wanted = [int(rank) for rank in request.args.get("first", "").split(",") if rank.isdecimal()]
            loaded.measured.start(wanted)
            if request.args.get("replay"):
                loaded.replay_lanes.start()
            return lane_info(loaded)

        return answered(work)

    @server.get("/timeline/view")
    def view() -> Response:
        def work(loaded: Loaded) -> Any:
            seen, pattern = parse_viewport(request.args), ""
            with suppress(UsageError):  # `find` says so: an expression that is still being typed is no error
                matching(request.args.get("find", ""), ())
                pattern = request.args.get("find", "")
            content = packed(loaded, seen, pattern)
            return Response(content, mimetype="application/octet-stream")

        return answered(work)

    @server.get("/timeline/find")
    def find() -> Response:
        def work(loaded: Loaded) -> Any:
            start = int(request.args.get("rank", -1)), int(request.args.get("item", -1))
            try:
                return found_info(loaded, request.args["find"], *start, request.args.get("go", ""))
            except UsageError as error:
                return {"error": str(error)}

        return answered(work)

    @server.get("/timeline/span")
    def span() -> Response:
        return answered(lambda loaded: _chosen(loaded, request.args))


def _json(content: Any, status: int = 200) -> Response:
    answer = jsonify(content)
    answer.status_code = status
    return answer
