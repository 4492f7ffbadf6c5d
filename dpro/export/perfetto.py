"""Timelines as Perfetto's own protobuf: exact nanoseconds, and arrows along the critical path.

In: slices. Out: a file of trace packets for https://ui.perfetto.dev and Perfetto's trace processor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from dpro.errors import MissingExtra
from dpro.export.slices import CRITICAL, REPLAYED

SEQUENCE = 1  # all packets come from one writer
_FIRST_PACKET, _NEEDS_NAMES = 1, 2  # TracePacket.SequenceFlags


def write_perfetto(rows: pl.DataFrame, path: Path) -> None:
    """Write slices.

    Args:
        rows: as from `dpro.export.slices`.
        path: the file.

    Raises:
        OSError: it cannot be written.
        MissingExtra: the library that knows Perfetto's format is not installed.
    """
    try:
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError as error:
        raise MissingExtra("perfetto", "perfetto") from error
    with path.open("wb") as file:
        builder = StreamingTraceProtoBuilder(file)
        names = _write_names(builder, rows)
        tracks = _write_tracks(builder, rows)
        _write_slices(builder, rows, names, tracks)


def _write_names(builder: Any, rows: pl.DataFrame) -> dict[str, int]:
    """Names of slices and categories are written once and then numbered."""
    packet = builder.create_packet()
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.sequence_flags = _FIRST_PACKET
    names = {name: number for number, name in enumerate(rows["name"].unique().sort(), start=1)}
    for name, number in names.items():
        packet.interned_data.event_names.add(iid=number, name=name)
    builder.write_packet(packet)
    return names


def _write_tracks(builder: Any, rows: pl.DataFrame) -> dict[tuple[str, str], int]:
    """A process per group, a track per lane; the number of each track."""
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
    builder: Any, rows: pl.DataFrame, names: dict[str, int], tracks: dict[tuple[str, str], int]
) -> None:
    """A packet where each slice begins and one where it ends."""
    for row in rows.with_columns(_arrows(rows)).iter_rows(named=True):
        begin = _packet(builder, row["start_ns"], tracks[row["group"], row["track"]])
        begin.sequence_flags = _NEEDS_NAMES
        event = begin.track_event
        event.type = event.TYPE_SLICE_BEGIN
        event.name_iid = names[row["name"]]
        event.categories.extend([row["kind"], "critical"] if row["critical"] else [row["kind"]])
        event.flow_ids.extend(row["arrows"])
        for key in ("step", "node", "rank", "slack_ns"):
            event.debug_annotations.add(name=key, int_value=row[key])
        event.debug_annotations.add(name="lane", string_value=row["lane"])
        builder.write_packet(begin)
        end = _packet(builder, row["end_ns"], tracks[row["group"], row["track"]])
        end.track_event.type = event.TYPE_SLICE_END
        builder.write_packet(end)


def _packet(builder: Any, time_ns: int, track: int) -> Any:
    packet = builder.create_packet()
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.timestamp = time_ns
    packet.track_event.track_uuid = track
    return packet


def _arrows(rows: pl.DataFrame) -> pl.Series:
    """Numbers of the arrows at each slice: one from each piece of the critical path to the next.

    They link the replayed timelines, where a piece and what waited for it can stand on different ranks.
    """
    path = rows.filter(pl.col("group") == CRITICAL).sort("start_ns", "end_ns")
    ends = path.select("node", arrows=pl.concat_list(pl.row_index() + 1, pl.row_index() + 2))
    replayed = pl.col("group").str.ends_with(REPLAYED) & pl.col("critical")
    arrows = pl.when(replayed).then("arrows").fill_null([])
    return rows.join(ends, on="node", how="left", maintain_order="left").select(arrows=arrows).to_series()
