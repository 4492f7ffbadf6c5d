"""Writers of drawings as Perfetto's protobuf, and as Chrome's trace JSON.

Take a drawing and a path; write the file, always compressed for Perfetto, by the suffix `.gz` for Chrome.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
from isal import igzip

from dpro.errors import MissingExtra
from dpro.extensions.export.drawing import ARGUMENTS, Drawing

SEQUENCE = 1  # one sequence, since one writer makes all packets
_FIRST_PACKET, _NEEDS_NAMES = 1, 2  # TracePacket.SequenceFlags
_SLICE_FIELDS = ("step", "node", "rank", "slack_ns", "later_ns", "lane")


def write_perfetto(drawn: Drawing, path: Path) -> None:
    """Write a drawing as Perfetto's protobuf: exact nanoseconds, arguments, arrows and counters.

    Packets are slices in order of time, then counters; https://ui.perfetto.dev and Perfetto's trace processor
    open the compressed file directly. An arrow is a flow: an id that two slices share, leading from the one
    written first to the other.

    Raises:
        OSError: the file cannot be written.
        MissingExtra: the library `perfetto` is not installed.
    """
    try:
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError as error:
        raise MissingExtra("perfetto", "perfetto") from error
    with (
        path.open("wb") as written,
        igzip.IGzipFile(
            "", "wb", 1, written, mtime=0
        ) as file,  # no timestamp, so that a run always gives the same bytes
    ):
        builder = StreamingTraceProtoBuilder(file)
        names = _write_names(builder, drawn.rows)
        tracks = _write_tracks(builder, drawn.rows)
        _write_slices(builder, drawn, names, tracks)
        _write_counters(builder, drawn.counters, max(tracks.values(), default=0) + 1)


def _write_names(builder: Any, rows: pl.DataFrame) -> dict[str, int]:
    """Write the names of slices once, and return the number by which slices refer to each."""
    packet = builder.create_packet()
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.sequence_flags = _FIRST_PACKET
    names = {name: number for number, name in enumerate(rows["name"].unique().sort(), start=1)}
    for name, number in names.items():
        packet.interned_data.event_names.add(iid=number, name=name)
    builder.write_packet(packet)
    return names


def _write_tracks(builder: Any, rows: pl.DataFrame) -> dict[tuple[str, str], int]:
    """Write a process per group and a track per lane; return the number of each track."""
    tracks = rows.select("group", "track").unique(maintain_order=True)
    groups = {
        group: number for number, group in enumerate(tracks["group"].unique(maintain_order=True), start=1)
    }
    for group, number in groups.items():
        packet = builder.create_packet()
        packet.track_descriptor.uuid = number
        packet.track_descriptor.process.pid = number
        packet.track_descriptor.process.process_name = group
        packet.track_descriptor.sibling_order_rank = number
        builder.write_packet(packet)
    numbers = {}
    for number, (group, track) in enumerate(tracks.iter_rows(), start=len(groups) + 1):
        numbers[group, track] = number
        packet = builder.create_packet()
        packet.track_descriptor.uuid = number
        packet.track_descriptor.parent_uuid = groups[group]
        packet.track_descriptor.name = track
        packet.track_descriptor.sibling_order_rank = number
        builder.write_packet(packet)
    return numbers


def _write_slices(
    builder: Any, drawn: Drawing, names: dict[str, int], tracks: dict[tuple[str, str], int]
) -> None:
    """Write a packet at the begin and one at the end of each slice."""
    moments = _begins_and_ends(drawn)
    rows = drawn.rows.with_columns(_arrows(drawn))[moments["row"]]
    for fact in rows.with_columns(moments["begins"]).iter_rows(named=True):
        track = tracks[fact["group"], fact["track"]]
        packet = _packet(builder, fact["start_ns" if fact["begins"] else "end_ns"], track)
        if fact["begins"]:
            _begin(packet, fact, names)
        else:
            packet.track_event.type = packet.track_event.TYPE_SLICE_END
        builder.write_packet(packet)


def _write_counters(builder: Any, counters: pl.DataFrame, first: int) -> None:
    """Write a process per host, a track per counter and series, numbered from `first`, a packet per value."""
    hosts = {host: first + number for number, host in enumerate(counters["host"].unique(maintain_order=True))}
    for host, number in hosts.items():
        packet = builder.create_packet()
        packet.track_descriptor.uuid = packet.track_descriptor.sibling_order_rank = number
        packet.track_descriptor.process.pid = number
        packet.track_descriptor.process.process_name = f"telemetry {host}"
        builder.write_packet(packet)
    tracks = counters.group_by("host", "counter", "label", "unit", "series", maintain_order=True)
    for number, ((host, _, label, unit, series), values) in enumerate(tracks, start=first + len(hosts)):
        packet = builder.create_packet()
        packet.track_descriptor.uuid = packet.track_descriptor.sibling_order_rank = number
        packet.track_descriptor.parent_uuid = hosts[str(host)]
        packet.track_descriptor.name = f"{label}: {series}"
        packet.track_descriptor.counter.SetInParent()
        if unit:
            packet.track_descriptor.counter.unit_name = str(unit)
        builder.write_packet(packet)
        for time_ns, value in values.select("time_ns", "value").iter_rows():
            packet = _packet(builder, time_ns, number)
            packet.track_event.type = packet.track_event.TYPE_COUNTER
            packet.track_event.double_counter_value = value
            builder.write_packet(packet)


def _begins_and_ends(drawn: Drawing) -> pl.DataFrame:
    """Return begins and ends of slices, as `begins` and `row`, in order of time.

    At equal times, ends come before begins, and slices without an incoming arrow before those with one.
    """
    rows = drawn.rows.with_row_index("row").select(pl.col("row").cast(pl.Int64), "start_ns", "end_ns")
    target = pl.col("row").is_in(drawn.arrows["target"].unique().implode())
    begins = rows.select("row", time="start_ns", begins=pl.lit(True), last=target)
    ends = rows.select("row", time="end_ns", begins=pl.lit(False), last=pl.lit(False))
    return pl.concat([begins, ends]).sort("time", "begins", "last", "row").select("begins", "row")


def _begin(packet: Any, fact: dict[str, Any], names: dict[str, int]) -> None:
    packet.sequence_flags = _NEEDS_NAMES
    event = packet.track_event
    event.type = event.TYPE_SLICE_BEGIN
    event.name_iid = names[fact["name"]]
    event.categories.extend([fact["kind"], "critical"] if fact["critical"] else [fact["kind"]])
    event.flow_ids.extend(fact["arrows"])
    for key in (*_SLICE_FIELDS, *ARGUMENTS):
        value = fact[key]
        if isinstance(value, str):
            event.debug_annotations.add(name=key, string_value=value)
        elif value is not None:
            event.debug_annotations.add(name=key, int_value=value)


def _packet(builder: Any, time_ns: int, track: int) -> Any:
    packet = builder.create_packet()
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.timestamp = max(time_ns, 0)  # the format has no negative times; -1 is an unknown one
    packet.track_event.track_uuid = track
    return packet


def _arrows(drawn: Drawing) -> pl.Series:
    """Return [S] lists of the numbers of arrows, from 1, that leave each slice or arrive there."""
    numbered = drawn.arrows.with_row_index("arrow", offset=1)
    ends = pl.concat([numbered.select("arrow", row=end) for end in ("source", "target")])
    of_row = ends.group_by("row").agg(arrows=pl.col("arrow").sort())
    rows = drawn.rows.select(row=pl.int_range(pl.len(), dtype=pl.Int64))
    joined = rows.join(of_row, on="row", how="left", maintain_order="left")
    return joined.select(pl.col("arrows").fill_null([]))["arrows"]


_NO_TRACKS = pl.DataFrame(schema={"tid": pl.Int64, "group": pl.String, "track": pl.String, "pid": pl.Int64})
_EVENT_FIELDS = ("rank", "lane", "step", "node", "waited_for", "slack_ns", "later_ns", "critical")


def write_chrome(drawn: Drawing, path: Path) -> None:
    """Write a drawing as Chrome's trace JSON, which Perfetto, chrome://tracing and most other viewers open.

    Times are microseconds since `baseTimeNanoseconds`, as in the traces of torch.profiler, since a double
    cannot represent nanoseconds since 1970. Slices are complete events (`X`). An arrow is a flow: a start
    (`s`) within one slice and a finish (`f`) within another that share category, name and id (Trace Event
    Format, "Flow Events"); `bp: e` binds the finish to its enclosing slice. Telemetry is counter events (`C`)
    in a process per host.

    Args:
        path: the file; compressed if its name ends in `.gz`.

    Raises:
        OSError: the file cannot be written.
    """
    rows = drawn.rows
    origin = int(rows["start_ns"].to_numpy().min()) if rows.height else 0
    tracks = rows.select("group", "track").unique(maintain_order=True)
    groups = {group: pid for pid, group in enumerate(tracks["group"].unique(maintain_order=True))}
    numbered = tracks.with_row_index("tid").with_columns(
        pid=pl.col("group").replace_strict(groups, return_dtype=pl.Int64)
    )
    placed = rows.join(numbered, on=["group", "track"], maintain_order="left")
    lines = [*map(json.dumps, _metadata(groups, numbered))]
    lines += _events(placed, origin)
    lines += _flows(drawn.arrows, placed, origin)
    lines += _counter_events(drawn.counters, origin, len(groups))
    header = f'{{"displayTimeUnit":"ms","baseTimeNanoseconds":{origin},"traceEvents":[\n'
    content = (header + ",\n".join(lines) + "\n]}\n").encode()
    if path.suffix == ".gz":
        content = igzip.compress(content, 1)
    path.write_bytes(content)


def _metadata(groups: dict[str, int], tracks: pl.DataFrame) -> list[dict[str, Any]]:
    """Return metadata events: names of groups and tracks, and their order."""
    events = []
    for group, pid in groups.items():
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": group}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    for tid, _, track, pid in tracks.select("tid", "group", "track", "pid").iter_rows():
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
        order = {"sort_index": tid}
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": order})
    return events


def _events(rows: pl.DataFrame, origin: int) -> list[str]:
    """Return one line of JSON per slice."""
    line = pl.format(
        '{{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"name":{},"cat":{},"args":{{{}}}}}',
        "pid",
        "tid",
        _microseconds(pl.col("start_ns") - origin),
        _microseconds(pl.col("end_ns") - pl.col("start_ns")),
        _quoted(rows, "name"),
        _quoted(rows, "kind"),
        pl.concat_str(
            [_argument(rows, name) for name in (*_EVENT_FIELDS, *ARGUMENTS)], separator=",", ignore_nulls=True
        ),
    )
    return rows.select(line).to_series().to_list()


def _argument(rows: pl.DataFrame, name: str) -> pl.Expr:
    """Return an expression: `"name":value`; null without a value."""
    value = _quoted(rows, name) if rows[name].dtype == pl.String else pl.col(name).cast(pl.String)
    return pl.when(pl.col(name).is_not_null()).then(pl.format('"{}":{}', pl.lit(name), value))


def _flows(arrows: pl.DataFrame, rows: pl.DataFrame, origin: int) -> list[str]:
    """Return two consecutive lines of JSON per arrow: its start and its finish."""
    places = rows.with_row_index("row").select(pl.col("row").cast(pl.Int64), "pid", "tid")
    flows = arrows.with_row_index("id")
    ends = []
    for end, moment, event in (
        ("source", "leaves_ns", '"ph":"s"'),
        ("target", "arrives_ns", '"ph":"f","bp":"e"'),
    ):
        there = flows.join(places, left_on=end, right_on="row", how="left", maintain_order="left")
        line = pl.format(
            '{{{},"pid":{},"tid":{},"ts":{},"id":{},"name":{},"cat":"flow"}}',
            pl.lit(event), "pid", "tid", _microseconds(pl.col(moment) - origin), "id", _quoted(flows, "kind"),
        )  # fmt: skip
        ends.append(there.select(line).to_series().to_list())
    return [line for pair in zip(*ends) for line in pair]


def _counter_events(counters: pl.DataFrame, origin: int, first: int) -> list[str]:
    """Return one line of JSON per value, after the names of the hosts' processes, numbered from `first`."""
    hosts = {host: pid for pid, host in enumerate(counters["host"].unique(maintain_order=True), start=first)}
    named = _metadata({f"telemetry {host}": pid for host, pid in hosts.items()}, _NO_TRACKS)
    values = counters.with_columns(
        pid=pl.col("host").replace_strict(hosts, return_dtype=pl.Int64),
        name=pl.format("{}: {}", _title(), "series"),
    )
    line = pl.format(
        '{{"ph":"C","pid":{},"tid":0,"ts":{},"name":{},"args":{{"value":{}}}}}',
        "pid", _microseconds(pl.col("time_ns") - origin), _quoted(values, "name"), "value",
    )  # fmt: skip
    return [*map(json.dumps, named), *values.select(line).to_series().to_list()]


def _title() -> pl.Expr:
    """Return an expression: a counter's label with its unit, which this format has no field for."""
    unit = pl.col("unit")
    return pl.concat_str("label", pl.when(unit != "").then(pl.format(", {}", unit)).otherwise(pl.lit("")))


def _quoted(rows: pl.DataFrame, column: str) -> pl.Expr:
    """Return an expression: texts as JSON strings, each distinct text encoded once."""
    texts = rows[column].drop_nulls().unique().to_list()
    return pl.col(column).replace_strict(
        texts, [json.dumps(text) for text in texts], default=None, return_dtype=pl.String
    )


def _microseconds(ns: pl.Expr) -> pl.Expr:
    """Return an expression: nanoseconds as microseconds with three decimals."""
    return pl.format("{}.{}", ns // 1000, (ns % 1000).cast(pl.String).str.zfill(3))
