"""HTTP requests of the timeline: lanes, segments of a viewport, totals of an area, matches, a span.

Takes requests with a viewport in their query; answers with JSON, and for a viewport with a JSON header
followed by little-endian arrays, which the browser draws without parsing. Times are ns since the timeline's
origin.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from flask import Flask, Response, jsonify, request
from numpy.typing import NDArray

from dpro.dashboards.links import parse_ranks
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.runs import Runs
from dpro.dashboards.theme import kind_words
from dpro.dashboards.timeline.area import by_lane, by_name, spans_within
from dpro.dashboards.timeline.beside import Beside, beside
from dpro.dashboards.timeline.counters import CounterTrack
from dpro.dashboards.timeline.detail import DetailLevel, Segments, segments
from dpro.dashboards.timeline.lanes import KINDS, MEASURED, OTHER, PHASES, REPLAYED, UNKNOWN, RankLanes
from dpro.dashboards.timeline.measured import (
    MAX_UNASKED,
    PATH,
    REPLAYED_PATH,
    MeasuredLanes,
    Replayed,
    wait_ns,
)
from dpro.dashboards.timeline.search import FoundSpan, matching
from dpro.errors import DproError, UsageError
from dpro.replay.construction.data_dependencies import backward_of_forward
from dpro.replay.engine import NO_NODE
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.mesh import named_axes, places_along
from dpro.replay.timeline import Timeline
from dpro.schema import SPANS
from dpro.timelines.lanes import lane_names
from dpro.timelines.slices import path_note
from dpro.units import NS_PER_MS, format_bytes, format_duration, time_in_words
from dpro.words import shortened

NAMED_PIXELS = 22  # minimum width of a bar that shows its name
MAX_ROWS, MAX_PIXELS = 800, 8_000
MAX_AREA_ROWS, MAX_NAMES = 100_000, 100  # rows in an area; names listed for it
MAX_SEGMENTS, MIN_SEGMENTS = 9_000, 500  # in a viewport, so that drawing stays fast; for each of its ranks
FIRST_DATE_NS = 10**18  # earlier times (before September 2001) count from a machine's start
_LONGEST = 160  # characters of a name in a bar
SPAN, MATCH, ON_PATH = 0, 1, 2  # layers of a viewport
_ARRAYS = (
    ("x", "<f4"), ("width", "<f4"), ("density", "<f4"), ("row", "<i4"), ("item", "<i4"), ("name", "<i4"),
    ("count", "<i4"), ("micro", "<i2"), ("kind", "u1"), ("phase", "u1"), ("layer", "u1"),
)  # fmt: skip


class Viewport(NamedTuple):
    """The visible range: `begin` and `end` in ns, width in pixels, and rows of side, rank, row.

    Sides are `m` (measured), `r` (replayed) and `o` (measured, of the other run). A row of side `c` is a
    counter, by its number among the tracks.
    """

    begin: int
    end: int
    pixels: int
    rows: list[tuple[str, int, int]]

    @property
    def counters(self) -> set[int]:
        """Numbers of the counters among the rows."""
        return {row for side, _, row in self.rows if side == "c"}


def parse_viewport(query: Mapping[str, str], most: int = MAX_ROWS) -> Viewport:
    """Parse a viewport: `begin`, `end`, `px`, and `rows` such as `m0.3-5;r1.0-2`: side, rank, rows.

    Raises:
        UsageError: the query is invalid.
    """
    try:
        begin, end, pixels = (int(query[name]) for name in ("begin", "end", "px"))
        rows = []
        for part in filter(None, query["rows"].split(";")):
            rank, _, stretch = part[1:].partition(".")
            low, high = stretch.split("-")
            if not 0 <= int(low) <= int(high) <= int(low) + most or part[0] not in "mrco":
                raise ValueError(part)
            rows += [(part[0], int(rank), row) for row in range(int(low), int(high))]
    except (KeyError, ValueError) as error:
        raise UsageError("no such viewport: begin, end and px are numbers, rows as m0.3-5") from error
    if not (
        0 < end - begin < 1 << 60 and abs(begin) < 1 << 60 and 0 < pixels <= MAX_PIXELS and len(rows) <= most
    ):
        raise UsageError("no such viewport: it is empty, or too large")
    return Viewport(begin, end, pixels, rows)


def lane_info(loaded: Loaded, other: Beside | None = None, pattern: str = "") -> dict[str, Any]:
    """Return all ranks with the lanes read so far, the clock, and the steps.

    Args:
        pattern: a regular expression for the lanes and counters to show, such as `rank 3 stream 7`.
    """
    measured = loaded.measured
    complete, of = measured.complete, measured.clocks
    places = {axis: places_along(loaded.mesh, axis) for axis in named_axes(loaded.mesh)}
    later = loaded.replay_lanes
    tracks, num_own = _tracks(loaded, other), len(_tracks(loaded))
    state, why = later.state, later.why  # read before the lanes, as it may become ready meanwhile
    read = dict(measured.ranks)
    sides: list[tuple[str, Mapping[int, RankLanes | None]]] = [
        (MEASURED, read if complete else {rank: read.get(rank) for rank in of.parts})
    ]
    if later.value is not None:
        sides += [(REPLAYED, {**_paths(later.value), **later.value.ranks})]
    if other is not None:
        whole, there = other.measured.complete, dict(other.measured.ranks)
        sides += [
            (OTHER, there if whole else {rank: there.get(rank) for rank in other.measured.clocks.parts})
        ]
        complete = complete and whole
    kept, why_all = _matching_names(pattern, tracks, sides)
    return {
        "complete": complete,
        "unfiltered": why_all,
        "failed": measured.failed or (other.measured.failed if other else ""),
        "beside": other and _beside_info(other),
        "spans": of.spans,
        "expected": len(of.parts),
        "end": of.end_ns,
        "began": time_in_words(of.origin_ns) if of.origin_ns >= FIRST_DATE_NS else "",
        "stop": of.stop and [of.stop.begin - of.origin_ns, of.stop.at - of.origin_ns],
        "counters": [
            [*_counter(track), "m" if number < num_own else "o", _name_of(track.rank, track.label) in kept]
            for number, track in enumerate(tracks)
        ],
        "fault": _at_fault(loaded),
        "kinds": KINDS,
        "words": kind_words(KINDS),
        "phases": PHASES,
        "steps": [list(row) for row in of.steps.select("window", "step", "begin_ms", "end_ms").iter_rows()],
        "replay": {"state": state, "why": why, "automatic": of.spans <= MAX_UNASKED}
        | (_replay_info(later.value) if later.value else {}),
        "ranks": [
            {
                "side": side[0],
                "rank": rank,
                "late": of.lateness_ms.get(rank) if side != OTHER else None,
                "place": {axis: by_rank[rank] for axis, by_rank in places.items() if rank in by_rank},
                "lanes": lanes and _lanes_of(rank, lanes, kept),
            }
            for side, ranks in sides
            for rank, lanes in sorted(ranks.items())
        ],
    }


def _paths(replayed: Replayed) -> dict[int, RankLanes]:
    return {PATH: replayed.path, REPLAYED_PATH: replayed.replayed_path}


def _replay_info(replayed: Replayed) -> dict[str, Any]:
    """Return how far the replay is from what was measured, in words, and its steps."""
    return {"note": path_note(*replayed.offsets), "steps": list(map(list, replayed.steps.iter_rows()))}


Sides = Sequence[tuple[str, Mapping[int, RankLanes | None]]]


def _matching_names(pattern: str, tracks: Sequence[CounterTrack], sides: Sides) -> tuple[set[str], str]:
    """Return the names of lanes and counters that match; if the pattern is invalid, all names, and why."""
    names = [_name_of(track.rank, track.label) for track in tracks]
    names += [
        _name_of(rank, lane.label)
        for _, ranks in sides
        for rank, lanes in ranks.items()
        for lane in (lanes.lanes if lanes else ())
    ]
    try:
        return set(compress(names, matching(pattern, names))), ""
    except UsageError as error:  # it may still be being typed
        return set(names), str(error)


def _name_of(rank: int, label: str) -> str:
    return f"rank {rank} {label}" if rank >= 0 else label


def _counter(track: CounterTrack) -> tuple[int, str, str, float]:
    return track.rank, track.label, track.unit, float(track.value.max())


def _lanes_of(rank: int, lanes: RankLanes, kept: Collection[str]) -> list[list[Any]]:
    """Return per lane: label, on GPU, first row, row after the last, spans, number, whether kept."""
    return [
        [lane.label, lane.gpu, *lane.rows, lane.spans, number, _name_of(rank, lane.label) in kept]
        for number, lane in enumerate(lanes.lanes)
    ]


def _at_fault(loaded: Loaded) -> list[int]:
    """Return the ranks named by findings so far, those of the first finding first; compute none."""
    findings = loaded.findings_so_far().findings
    return list(dict.fromkeys(rank for finding in findings for rank in finding.ranks))


def _beside_info(other: Beside) -> dict[str, Any]:
    """Return the other run's name, spans, steps on the page's axis, and extent of the aligned steps."""
    of = other.measured.clocks
    moved = of.steps.select("window", "step", pl.col("begin_ms", "end_ms") + other.shift_ns / NS_PER_MS)
    end = max(other.here.end, other.there.end + other.shift_ns)
    return {
        "name": other.name, "spans": of.spans, "expected": len(of.parts),
        "steps": [list(row) for row in moved.iter_rows()], "begin": other.here.begin, "end": end,
    }  # fmt: skip


def _tracks(loaded: Loaded, other: Beside | None = None) -> list[CounterTrack]:
    """Return the counters of the run, followed by those of the other run."""
    beside_it = other.tracks if other else ()
    with suppress(DproError):  # lanes are shown even if a table is damaged
        return [*loaded.counter_tracks, *beside_it]
    return [*beside_it]


def _lanes(loaded: Loaded, side: str, rank: int, other: Beside | None = None) -> RankLanes | None:
    if side == "c":
        return None
    if side == "o":
        return None if other is None else other.measured.ranks.get(rank)
    if side == "m":
        return loaded.measured.ranks.get(rank)
    replayed = loaded.replay_lanes.value
    return None if replayed is None else {**_paths(replayed), **replayed.ranks}.get(rank)


def drawn(
    loaded: Loaded, view: Viewport, pattern: str = "", other: Beside | None = None
) -> Iterator[tuple[int, RankLanes, Segments, NDArray[np.int32]]]:
    """Yield the segments of a viewport, rank by rank: layer, lanes, segments, and the numbers of their names.

    Segments on the critical path have no names.

    Args:
        pattern: the expression to search for; empty for none.
        other: the run of rows of side `o`.

    Raises:
        UsageError: the pattern is not a regular expression.
    """
    pixel_ns = (view.end - view.begin) / view.pixels
    replayed = loaded.replay_lanes.value
    ranks = list(dict.fromkeys((side, rank) for side, rank, _ in view.rows))
    most = max(MAX_SEGMENTS // max(len(ranks), 1), MIN_SEGMENTS)
    for side, rank in ranks:
        lanes = _lanes(loaded, side, rank, other)
        if lanes is None:
            continue
        measured, shift = _run_of_side(loaded, side, other)
        height = lanes.all.first.size - 1
        places = [place for place, row in enumerate(view.rows) if row[:2] == (side, rank) and row[2] < height]
        rows = [view.rows[place][2] for place in places]
        layers: list[tuple[int, Sequence[DetailLevel]]] = [(SPAN, lanes.levels)]
        if pattern:
            layers.append((MATCH, measured.search.of_rank(pattern, lanes, measured.clocks.window_ns)))
        if replayed is not None and side == "m":
            layers.append((ON_PATH, replayed.critical.get(rank, ())))
        for layer, detail in layers:
            if detail and rows:
                visible = segments(detail, rows, view.begin - shift, view.end - shift, pixel_ns, most)
                moved = {"start": visible.start + shift, "end": visible.end + shift}
                codes = lanes.name[visible.item if layer != ON_PATH else visible.item[:0]]
                names = _translate_names(loaded, measured, codes)
                yield layer, lanes, replace(visible, row=np.array(places)[visible.row], **moved), names


def _run_of_side(loaded: Loaded, side: str, other: Beside | None) -> tuple[MeasuredLanes, int]:
    """Return the run of a side, and the shift of its times in ns."""
    return (other.measured, other.shift_ns) if side == "o" and other else (loaded.measured, 0)


def _translate_names(loaded: Loaded, of: MeasuredLanes, names: NDArray[np.int32]) -> NDArray[np.int32]:
    """Translate a run's numbers of names into those of the page's run."""
    if of is loaded.measured or not names.size:
        return names
    unique, place = np.unique(names, return_inverse=True)
    texts = pl.Series(of.names.texts, dtype=pl.String).gather(unique)
    return loaded.measured.names.codes(texts)[place]


def packed(loaded: Loaded, view: Viewport, pattern: str = "", other: Beside | None = None) -> bytes:
    """Encode the segments of a viewport for the page: a header, then one array after another.

    Returns:
        Four bytes with the length of the header; the header in JSON, padded to a multiple of four bytes:
        number of segments, names and types of the arrays, names shown in bars; the arrays, also padded.
    """
    pixel_ns = (view.end - view.begin) / view.pixels
    parts: dict[str, list[NDArray[Any]]] = {name: [np.empty(0, dtype)] for name, dtype in _ARRAYS}
    named: set[int] = set()
    for layer, lanes, visible, names in drawn(loaded, view, pattern, other):
        path = layer == ON_PATH
        length = np.maximum(visible.end - visible.start, 1)
        name = np.full(visible.row.size, -1) if path else names
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
    counted = [(row, track) for row, track in enumerate(_tracks(loaded, other)) if row in view.counters]
    header = {
        "counters": {row: track.drawn(view.begin, view.end, view.pixels) for row, track in counted},
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


def area_info(loaded: Loaded, area: Viewport, other: Beside | None = None) -> dict[str, Any]:
    """Return the totals of an area: by name and kind, by lane, and of the counters.

    Args:
        area: its `pixels` do not matter.
        other: the run of rows of side `o`.
    """
    rows: dict[tuple[str, int], list[int]] = {}
    for side, rank, row in area.rows:
        rows.setdefault((side, rank), []).append(row)
    spans, busy = [], []
    for (side, rank), of in rows.items():
        lanes = _lanes(loaded, side, rank, other)
        if lanes is None:
            continue
        measured, shift = _run_of_side(loaded, side, other)
        below = [row for row in of if row < lanes.all.first.size - 1]
        inside = spans_within(lanes, below, area.begin - shift, area.end - shift)
        whose = f" of {other.name}" if side == "o" and other else ""
        busy.append(by_lane(inside, lanes).with_columns(pl.col("lane") + whose))
        codes = _translate_names(loaded, measured, inside["name"].to_numpy())
        spans.append(inside.with_columns(name=pl.Series(codes, dtype=pl.Int32)))
    named = by_name(pl.concat(spans), loaded.measured.names.texts) if spans else pl.DataFrame()
    return {
        "begin": area.begin,
        "end": area.end,
        "names": [[shortened(name, LONGEST), *rest] for name, *rest in named.head(MAX_NAMES).iter_rows()],
        "more": max(named.height - MAX_NAMES, 0),
        "lanes": [list(row) for row in pl.concat(busy).iter_rows()] if busy else [],
        "counters": [
            [track.rank, track.label, track.unit, *totals]
            for row, track in enumerate(_tracks(loaded, other))
            if row in area.counters and (totals := track.totals(area.begin, area.end))
        ],
    }


def found_info(
    loaded: Loaded, among: Collection[int], pattern: str, rank: int, item: int, direction: str, begin: int = 0
) -> dict[str, Any]:
    """Count the matching spans, and find the next or the previous one.

    Args:
        among: selected ranks; empty for all.
        rank: rank of the span to continue from; -1 to continue from `begin`, ns.
        direction: `next`, `previous`, `first` (the longest of the ranks that findings name, if any match), or
            empty to count only.

    Raises:
        UsageError: the pattern is not a regular expression.
    """
    measured = loaded.measured
    ranks = {number: lanes for number, lanes in measured.ranks.items() if not among or number in among}
    count, total = measured.search.count(pattern, ranks)
    answer: dict[str, Any] = {"count": count, "ms": total / 1e6, "complete": measured.complete}
    if direction:
        lanes = ranks.get(rank)
        is_there = lanes is not None and 0 <= item < lanes.name.size
        start = int(lanes.all.start[item]) if is_there and lanes is not None else begin
        place, number = None, 0
        if direction == "first":
            place, number = measured.search.longest(pattern, ranks, _at_fault(loaded))
        if place is None:
            after = FoundSpan(start, rank, item)
            place, number = measured.search.next(pattern, ranks, after, direction == "previous")
        answer |= {"number": number, "place": place and place_of(measured, place.rank, place.item)}
    return answer


def node_info(loaded: Loaded, rank: int, item: int) -> dict[str, Any] | None:
    """Return the facts and arrows of a replayed span, or of one on the critical path; None if there is none.

    Args:
        rank: its rank, `PATH` or `REPLAYED_PATH` for the critical path.
    """
    replayed, lanes = loaded.replay_lanes.value, _lanes(loaded, "r", rank)
    if replayed is None or lanes is None or not 0 <= item < lanes.name.size:
        return None
    node, nodes = int(lanes.ident[item]), replayed.timeline.graph.nodes
    measured, arrows = loaded.measured, []
    ends = [(node, "the same span, as measured", True)]
    cause, why = cause_of(replayed.timeline, node)
    ends += [(cause, "it waited for this in the replay", False)] if why is not None else []
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


def _requested_span(loaded: Loaded, query: Mapping[str, str], other: Beside | None) -> dict[str, Any] | None:
    """Return the span that a request names by `side`, `rank`, and `item` or, stable in links, `id`."""
    side, rank = query.get("side", "m"), int(query["rank"])
    lanes = _lanes(loaded, side, rank, other)
    if lanes is None:
        return None
    measured, shift = _run_of_side(loaded, side, other)
    item = int(query["item"]) if "item" in query else lanes.find(int(query["id"]))
    if not 0 <= item < lanes.name.size:
        return None
    if "brief" in query:
        name = shortened(measured.names.texts[lanes.name[item]], _LONGEST)
        return {"name": name, "row": lanes.row_of(item)}
    if side == "r":
        return node_info(loaded, rank, item)
    if side == "o":
        answer = span_info(measured, rank, item)
        for place in (answer["place"], *(arrow["place"] for arrow in answer["arrows"])):
            place |= {"side": "o", "start": place["start"] + shift, "end": place["end"] + shift}
        return answer
    replayed = loaded.replay_lanes.value
    return span_info(loaded.measured, rank, item, None if replayed is None else replayed.timeline)


def _requested_runs(runs: Runs, query: Mapping[str, str]) -> tuple[Loaded, Beside | None]:
    """Return the run that a request is about, and the one beside it.

    Raises:
        DproError: one of them cannot be opened, or has no such step.
    """
    loaded, against = runs.loaded(query.get("run", "")), query.get("against", "")
    if not against:
        return loaded, None
    second = runs.loaded(against)
    return loaded, beside(loaded.measured, against, second.measured, query.get("align", ""), _tracks(second))


def register(server: Flask, runs: Runs) -> None:
    """Register the routes of the timeline."""

    def answered(work: Any) -> Response:
        try:
            answer = work(*_requested_runs(runs, request.args))
        except DproError as error:
            return _json({"error": str(error)}, 400)
        except (KeyError, ValueError, OverflowError):
            return _json({"error": "not understood"}, 400)
        return answer if isinstance(answer, Response) else _json(answer)

    @server.get("/timeline/lanes")
    def lanes() -> Response:
        def work(loaded: Loaded, other: Beside | None) -> Any:
            wanted = [int(rank) for rank in request.args.get("first", "").split(",") if rank.isdecimal()]
            loaded.measured.start(wanted)
            if other is not None:
                other.measured.start(wanted)
            if request.args.get("replay"):
                loaded.replay_lanes.start()
            return lane_info(loaded, other, request.args.get("tracks", ""))

        return answered(work)

    @server.get("/timeline/view")
    def view() -> Response:
        def work(loaded: Loaded, other: Beside | None) -> Any:
            seen, pattern = parse_viewport(request.args), ""
            with suppress(UsageError):  # incomplete expressions are common while typing; `find` reports them
                matching(request.args.get("find", ""), ())
                pattern = request.args.get("find", "")
            content = packed(loaded, seen, pattern, other)
            return Response(content, mimetype="application/octet-stream")

        return answered(work)

    @server.get("/timeline/area")
    def area() -> Response:
        def work(loaded: Loaded, other: Beside | None) -> Any:
            return area_info(loaded, parse_viewport({**request.args, "px": "1"}, MAX_AREA_ROWS), other)

        return answered(work)

    @server.get("/timeline/find")
    def find() -> Response:
        def work(loaded: Loaded, _other: Beside | None) -> Any:
            start = int(request.args.get("rank", -1)), int(request.args.get("item", -1))
            try:
                begin, go = int(request.args.get("begin", -(1 << 62))), request.args.get("go", "")
                among = {*parse_ranks(request.args.get("ranks", ""))}
                return found_info(loaded, among, request.args["find"], *start, go, begin)
            except UsageError as error:
                return {"error": str(error)}

        return answered(work)

    @server.get("/timeline/span")
    def span() -> Response:
        return answered(lambda loaded, other: _requested_span(loaded, request.args, other))


def _json(content: Any, status: int = 200) -> Response:
    answer = jsonify(content)
    answer.status_code = status
    return answer


# Facts of one span or node of the replay, with arrows to the spans that it waited for and those that waited
# for it.

LONGEST = 400  # characters of a name
MAX_ARROWS = 12
_STACK = 24  # enclosing spans to name
_COLUMNS = (
    "span_id", "rank", "window", "kind", "start_ns", "tid", "correlation", "sequence_number",
    "forward_thread", "bytes", "shapes", "stream",
)  # fmt: skip


def span_info(
    measured: MeasuredLanes, rank: int, item: int, timeline: Timeline | None = None
) -> dict[str, Any]:
    """Return the facts and arrows of a measured span.

    Args:
        timeline: the replay, if it is ready.

    Returns:
        `place` (as from `place_of`), `facts` (names and values), `stack` (names of the spans around it,
        innermost first) and `arrows`: `place` of the other end, `out` (whether it leads away from this span)
        and `why`.
    """
    lanes = measured.ranks[rank]
    ident = int(lanes.ident[item])
    rows = measured.run.read(SPANS, measured.clocks.parts[rank], _COLUMNS).filter(pl.col("rank") == rank)
    rows = pl.concat([rows, measured.calls(rank).select(rows.columns)])
    (row,) = rows.filter(pl.col("span_id") == ident).head(1).to_dicts()
    launch = _launch(rows, row)
    caller = lanes.find(launch) if launch >= 0 else item
    stack = [] if caller < 0 else [*([caller] if launch >= 0 else []), *lanes.around(caller)][:_STACK]
    arrows = [*_arrows_of_launches(measured, rows, row, launch), *_arrows_of_members(measured, rank, ident)]
    if timeline is not None:
        arrows += _arrows_of_replay(measured, timeline, rank, ident)
    facts = [
        *_facts(measured, lanes, item),
        *_sizes(rows, row, lanes, stack),
        *_collective(measured, rank, ident),
    ]
    return {
        "place": place_of(measured, rank, item),
        "facts": [[name, value] for name, value in facts if value],
        "stack": [_name(measured, lanes, outer) for outer in stack],
        "arrows": _distinct(arrows),
    }


def place_of(measured: MeasuredLanes, rank: int, item: int) -> dict[str, Any]:
    """Return where a span is drawn: `rank`, `item`, `id`, `row`, `start` and `end` (ns), `name`."""
    lanes = measured.ranks[rank]
    same = np.flatnonzero(lanes.ident == lanes.ident[item])
    return {
        "rank": rank,
        "item": item,
        "id": int(lanes.ident[item]),
        "row": lanes.row_of(item),
        "start": int(lanes.all.start[same].min()),
        "end": int(lanes.all.end[same].max()),
        "name": _name(measured, lanes, item),
    }


def _name(measured: MeasuredLanes, lanes: RankLanes, item: int) -> str:
    return shortened(measured.names.texts[lanes.name[item]], LONGEST)


def _facts(measured: MeasuredLanes, lanes: RankLanes, item: int) -> Iterable[tuple[str, str]]:
    """Yield the facts known from the lanes."""
    place = place_of(measured, lanes.rank, item)
    start, end = place["start"], place["end"]
    steps = measured.clocks.steps
    step = steps.filter((pl.col("begin_ms") <= start / NS_PER_MS) & (pl.col("end_ms") > start / NS_PER_MS))
    row = place["row"]
    first = int(lanes.all.first[row])
    before = int(np.searchsorted(lanes.all.start[first : int(lanes.all.first[row + 1])], start, "left")) - 1
    lane = lanes.lanes[lanes.lane_of(row)]
    (kind,) = kind_words([KINDS[int(lanes.all.kind[item])]])
    yield "name", place["name"]
    yield "kind", kind
    yield "where", f"rank {lanes.rank}, {lane.label}"
    yield "step", str(step["step"][-1]) if step.height else ""
    yield "phase", PHASES[lanes.phase[item]] if lanes.phase[item] != UNKNOWN else ""
    yield "micro-batch", str(lanes.micro_batch[item]) if lanes.micro_batch[item] >= 0 else ""
    date_ns = measured.clocks.origin_ns + start
    at = f", {time_in_words(date_ns)}" if date_ns >= FIRST_DATE_NS else ""
    yield "starts", f"{start / NS_PER_MS:.4f} ms{at}"
    yield "takes", format_duration(end - start)
    if lane.gpu and before >= 0:
        idle = start - int(lanes.all.end[first + before])
        yield "idle before", format_duration(idle) if idle > 0 else ""


def _sizes(
    rows: pl.DataFrame, row: dict[str, Any], lanes: RankLanes, stack: Sequence[int]
) -> Iterable[tuple[str, str]]:
    if row["bytes"] >= 0:
        yield "bytes", format_bytes(row["bytes"])
    shapes = row["shapes"]
    if not shapes and row["stream"] >= 0 and stack:
        around = pl.DataFrame({"span_id": lanes.ident[list(stack)].astype(np.int64)})
        recorded = around.join(rows, on="span_id", how="left", maintain_order="left")["shapes"]
        shapes = next((text for text in recorded.to_list() if text), "")
    yield "shapes", shortened(shapes, LONGEST)


def _launch(rows: pl.DataFrame, row: dict[str, Any]) -> int:
    """Return the id of the call that launched GPU work, -1 for other spans."""
    if row["stream"] < 0 or row["correlation"] < 0:
        return -1
    calls = rows.filter((pl.col("correlation") == row["correlation"]) & (pl.col("stream") < 0))["span_id"]
    return int(calls[0]) if calls.len() else -1


def _arrows_of_launches(
    measured: MeasuredLanes, rows: pl.DataFrame, row: dict[str, Any], launch: int
) -> Iterable[dict[str, Any]]:
    """Yield arrows between launches and their GPU work, and between forward and backward operators."""
    rank = row["rank"]
    if launch >= 0:
        yield from _arrow(measured, rank, launch, False, "launched it")
    elif row["kind"] == "runtime" and row["correlation"] >= 0:
        work = rows.filter((pl.col("correlation") == row["correlation"]) & (pl.col("stream") >= 0))
        for other in work["span_id"].head(MAX_ARROWS).to_list():
            yield from _arrow(measured, rank, other, True, "was launched by it")
    if row["sequence_number"] >= 0:
        pairs = backward_of_forward(rows.filter(pl.col("sequence_number") == row["sequence_number"]))
        forward = pairs.filter(pl.col("target_span_id") == row["span_id"])["source_span_id"]
        backward = pairs.filter(pl.col("source_span_id") == row["span_id"])["target_span_id"]
        for other in forward.to_list():
            yield from _arrow(measured, rank, other, False, "is its forward operator")
        for other in backward.head(MAX_ARROWS).to_list():
            yield from _arrow(measured, rank, other, True, "is its backward operator")


def _members(measured: MeasuredLanes, rank: int, ident: int) -> list[dict[str, Any]]:
    """Return all members of the collective of a span, that span's first; empty if it is in none."""
    rows = measured.clocks.members
    asked = rows.filter((pl.col("rank") == rank) & (pl.col("span_id") == ident)).head(1)
    same = rows.filter(pl.col("instance").is_in(asked["instance"].implode())) if asked.height else asked
    return sorted(same.to_dicts(), key=lambda member: (member["rank"] != rank, member["start_ns"]))


def _collective(measured: MeasuredLanes, rank: int, ident: int) -> Iterable[tuple[str, str]]:
    members = _members(measured, rank, ident)
    if not members:
        return
    asked = members[0]
    size, waited = max(asked["bytes_in"], asked["bytes_out"]), wait_ns(asked)
    moving = asked["duration_ns"] - waited
    yield "collective", f"{asked['op']} of {asked['members']} recorded ranks {asked['dtype']}".rstrip()
    yield "group", asked["key"]
    yield "payload", format_bytes(size) if size >= 0 else ""
    speed = f", {size / moving:.3g} GB/s" if size > 0 and moving > 0 else ""
    yield "transfer", f"{format_duration(moving)}{speed}"
    if asked["members"] > 1:
        last = max(members, key=lambda member: member["start_ns"])
        whose = "arrived last" if last is asked else f"for rank {last['rank']}, which arrived last"
        yield "waited", whose if last is asked else f"{format_duration(waited)} {whose}"


def _arrows_of_members(measured: MeasuredLanes, rank: int, ident: int) -> Iterable[dict[str, Any]]:
    """Yield an arrow from the member that arrived last, or from this one to those that waited for it."""
    members = _members(measured, rank, ident)
    if len(members) < 2:
        return
    last = max(members, key=lambda member: member["start_ns"])
    if last is members[0]:
        for other in sorted(members[1:], key=lambda member: member["start_ns"])[:MAX_ARROWS]:
            waited = f"waited {format_duration(wait_ns(other))} for it"
            yield from _arrow(measured, other["rank"], other["span_id"], True, waited)
    else:
        yield from _arrow(measured, last["rank"], last["span_id"], False, "arrived last at the collective")


def _arrows_of_replay(
    measured: MeasuredLanes, timeline: Timeline, rank: int, ident: int
) -> Iterable[dict[str, Any]]:
    """Yield arrows for the dependencies in the replay."""
    nodes = timeline.graph.nodes
    parts = np.flatnonzero((nodes.rank == rank) & (nodes.span == ident))
    if not parts.size:
        return
    parts = parts[np.argsort(nodes.measured_start[parts], kind="stable")]
    cause, why = cause_of(timeline, int(parts[0]))
    place = next((arrow["place"] for arrow in _arrow(measured, rank, ident, False, "")), None)
    ends = [(cause, why, False)] if why is not None else []
    ends += [(node, kind, True) for node, kind in waiters_of(timeline, int(parts[-1]), MAX_ARROWS)]
    for node, kind, out in ends:
        if node >= 0 and nodes.span[node] >= 0 and (nodes.rank[node], nodes.span[node]) != (rank, ident):
            words = why_in_words(kind, out)
            for arrow in _arrow(measured, int(nodes.rank[node]), int(nodes.span[node]), out, words):
                if kind != EdgeKind.THREAD or place is None or not _is_around(arrow["place"], place):
                    yield arrow  # what is around it, is named under `within`


def _is_around(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    """Return whether the interval of a place contains that of another."""
    return bool(outer["start"] <= inner["start"] and inner["end"] <= outer["end"])


def _arrow(measured: MeasuredLanes, rank: int, ident: int, out: bool, why: str) -> Iterable[dict[str, Any]]:
    lanes = measured.ranks.get(rank)
    item = -1 if lanes is None else lanes.find(ident)
    if item >= 0:
        yield {"place": place_of(measured, rank, item), "out": out, "why": why}


def _distinct(arrows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep one arrow per other end and direction."""
    kept: dict[Any, dict[str, Any]] = {}
    for arrow in arrows:
        kept.setdefault((arrow["place"]["rank"], arrow["place"]["id"], arrow["out"]), arrow)
    return list(kept.values())


# Facts of a node of the replay, its binding dependency, and the nodes that waited for it.

_WHY = {
    EdgeKind.THREAD: "before it on its thread",
    EdgeKind.HANDOVER: "handed over by another thread",
    EdgeKind.LAUNCH: "launched by",
    EdgeKind.STREAM: "before it on its stream",
    EdgeKind.EVENT: "an event on another stream",
    EdgeKind.SYNC: "the CPU waits for it",
    EdgeKind.RENDEZVOUS: "the last member to arrive",
    EdgeKind.CONTENTION: "the device was full",
}
_WHY_OUT = {
    EdgeKind.THREAD: "came after it on its thread",
    EdgeKind.HANDOVER: "was handed over by it",
    EdgeKind.LAUNCH: "was launched by it",
    EdgeKind.STREAM: "came after it on its stream",
    EdgeKind.EVENT: "waited for its event",
    EdgeKind.SYNC: "waited on the CPU for it",
    EdgeKind.RENDEZVOUS: "waited for it to arrive",
    EdgeKind.CONTENTION: "waited for room on the device",
}


def cause_of(timeline: Timeline, node: int) -> tuple[int, EdgeKind | None]:
    """Return the work whose end let a node start in the replay, and the kind of edge; -1 and None if none.

    Nodes without duration, such as the rendezvous of a collective, are skipped: the cause is then the work of
    the last member before it arrived.
    """
    nodes, edges = timeline.graph.nodes, timeline.graph.edges
    why: EdgeKind | None = None
    while timeline.binding[node] != NO_NODE:
        edge = int(timeline.binding[node])
        kind = EdgeKind(int(edges.kind[edge]))
        why = kind if why is None or kind == EdgeKind.RENDEZVOUS else why
        node = int(edges.source[edge])
        if nodes.kind[node] not in (NodeKind.ARRIVE, NodeKind.RENDEZVOUS) and nodes.duration[node] > 0:
            return node, why
    return -1, None


def waiters_of(timeline: Timeline, node: int, most: int) -> list[tuple[int, EdgeKind]]:
    """Return the nodes delayed by a node in the replay, and the kind of edge; skip nodes without duration."""
    nodes, edges = timeline.graph.nodes, timeline.graph.edges
    waiters: list[tuple[int, EdgeKind]] = []
    ahead = [(node, EdgeKind.THREAD)]
    while ahead and len(waiters) < most:
        source, before = ahead.pop(0)
        for edge in np.flatnonzero(edges.source == source).tolist():
            target, kind = int(edges.target[edge]), EdgeKind(int(edges.kind[edge]))
            if timeline.binding[target] != edge:
                continue
            kind = EdgeKind.RENDEZVOUS if before == EdgeKind.RENDEZVOUS else kind
            instant = nodes.kind[target] in (NodeKind.ARRIVE, NodeKind.RENDEZVOUS)
            (ahead if instant else waiters).append((target, kind))
    return waiters[:most]


def why_in_words(kind: EdgeKind, out: bool) -> str:
    """Describe an edge from the side of its source (`out`) or of its target."""
    return (_WHY_OUT if out else _WHY)[kind]


def fact_info(timeline: Timeline, node: int) -> list[tuple[str, str]]:
    """Return the facts of a node as names and values."""
    graph, nodes = timeline.graph, timeline.graph.nodes
    arrive, node = _member(graph, node)
    kind = NodeKind(int(nodes.kind[node]))
    measured = int(nodes.measured_end[node] - nodes.measured_start[node])
    rows = [
        ("name", graph.names[nodes.name[node]][:LONGEST]),
        ("kind", *kind_words([kind.name.lower()])),
        (
            "where",
            f"rank {nodes.rank[node]}, {lane_names(graph)[nodes.lane[node]]}"
            if nodes.lane[node] >= 0
            else "",
        ),
        ("within", graph.names[nodes.around[node]][:LONGEST] if nodes.around[node] >= 0 else ""),
        ("step", str(nodes.step[node]) if nodes.step[node] >= 0 else ""),
        ("starts", f"{_ms(nodes.measured_start[node])} (replayed {_ms(timeline.start[node])})"),
        ("takes", f"{format_duration(measured)} (replayed {format_duration(int(nodes.duration[node]))})"),
    ]
    if arrive >= 0:
        waited = int(nodes.measured_start[node] - nodes.measured_start[arrive])
        rows += [("waited", f"{format_duration(waited)} for the other members, before that")]
    if nodes.message[node] >= 0:
        message = graph.messages[nodes.message[node]]
        rows += [("collective", f"{message.op} of {message.num_ranks} ranks, {message.dtype}".rstrip(", "))]
        rows += [("group", message.group)]
    if nodes.bytes[node] >= 0:
        rows += [("bytes", format_bytes(int(nodes.bytes[node])))]
        if kind == NodeKind.TRANSFER and measured > 0:
            rows += [("speed", f"{nodes.bytes[node] / measured:.3g} GB/s of payload")]
    if nodes.anchored[node]:
        rows += [("start", "taken from the trace, which does not explain it")]
    return [(name, value) for name, value in rows if value]


def _ms(ns: np.int64) -> str:
    return f"{ns / NS_PER_MS:.4f} ms"


def _member(graph: Graph, node: int) -> tuple[int, int]:
    """Return arrival and transfer of a member of a collective; -1 and the node itself for other nodes."""
    nodes = graph.nodes
    if nodes.kind[node] not in (NodeKind.ARRIVE, NodeKind.TRANSFER):
        return -1, node
    same = np.flatnonzero((nodes.collective == nodes.collective[node]) & (nodes.rank == nodes.rank[node]))
    parts = {int(nodes.kind[other]): int(other) for other in same}
    return parts.get(NodeKind.ARRIVE, -1), parts.get(NodeKind.TRANSFER, node)
