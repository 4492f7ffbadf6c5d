"""Perfetto's protobuf: traces of PyTorch's Cuspy (`.pftrace.gz`), and those of any other writer.

Reads a file, converts it to the events of an equivalent Kineto trace, and returns the `RankTrace` of these.
Cuspy writes each event of Kineto's JSON as a slice with its category and arguments, and GPU work as render
stages; the Kineto reader interprets them. Slices of other writers are ranges of their threads. Flows are not
read, since correlation numbers have the same information, nor are counters.
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from dpro.errors import InputError, MissingExtra
from dpro.ingest.kineto.events import kind_of
from dpro.ingest.kineto.reader import read_trace
from dpro.ingest.reading.files import HEAD_BYTES, Source, blocks
from dpro.ingest.trace import RankTrace
from dpro.limits import MAX_FACTS_BYTES
from dpro.store import CUT
from dpro.units import format_bytes

_PACKET = 0x0A  # the tag of a packet: field 1 of a trace, as bytes
_SEEN_PACKETS = 3  # packets in a row by which a trace is recognised
_BOOTTIME, _REALTIME = 6, 1  # ids of built-in clocks
_BEGIN, _END = 1, 2  # TrackEvent.Type
_CLEARED = 1  # TracePacket.SequenceFlags
_COMPUTE = 2  # RenderStageCategory
_STAGES = {
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Annotation": "gpu_user_annotation",
}
_DISPATCH = "kernel_dispatch"  # rocprofv3's category of kernels
_NUMBERS = {"stream id": "stream", "context id": "context"}  # Cuspy's keys -> Kineto's
_LISTED = 50_000  # events per write

# Time of a slice's begin or end (ns), whether it is the begin, track, and fields of the event.
_Mark: TypeAlias = tuple[int, bool, int, dict[str, Any]]


def is_perfetto(head: bytes) -> bool:
    """Return whether the first bytes of a file are packets of a trace, one after the other."""
    at, packets = 0, 0
    while packets < _SEEN_PACKETS and (framed := _framed(head, at)) is not None and framed[1] > framed[0]:
        at, packets = framed[1], packets + 1
    return packets == _SEEN_PACKETS or (packets > 0 and (at == len(head) or at > len(head) >= HEAD_BYTES))


def read_perfetto(path: Path | Source, *, rank: int | None = None) -> RankTrace:
    """Read one rank's trace, a truncated one up to its end.

    Args:
        path: the file; its name gives the rank.
        rank: the rank, where the caller knows better.

    Raises:
        InputError: the file is damaged, no span can be read from it, or rocprofv3 wrote it.
        MissingExtra: the library for Perfetto's format is not installed.
    """
    source = path if isinstance(path, Source) else Source(str(path), path)
    trace = _Trace()
    damage: list[str] = []
    for packet in _packets(source, damage):
        trace.take(packet)
        if trace.by_rocprofv3:
            lacks = "a trace of rocprofv3, whose kernels are not read"
            raise InputError(f"{source.label}: {lacks}; record with `--output-format csv`")
    events = trace.events()
    if not events:
        lacks = (
            f"{damage[0]}, before an end of any slice" if damage else "a trace without slices or work of GPUs"
        )
        raise InputError(f"{source.label}: {lacks}; copy or record it again")
    base_ns = events[0]["ts"]
    with tempfile.TemporaryDirectory(prefix="dpro-perfetto-") as folder:
        text = Path(folder) / source.name
        wall_ns = base_ns + trace.wall_ns
        encoder = msgspec.json.Encoder()
        with text.open("wb") as file:
            file.write(b'{"baseTimeNanoseconds":%d,"traceEvents":[' % wall_ns)
            for first in range(0, len(events), _LISTED):
                some = events[first : first + _LISTED]
                for event in some:
                    event["ts"] = (event["ts"] - base_ns) / 1000
                    event["dur"] = event["dur"] / 1000
                file.write((b"," if first else b"") + encoder.encode(some)[1:-1])
            file.write(b"]}")
        read = read_trace(Source(source.label, text), rank=rank)
    warnings = [f"{source.name}: {damage[0]}; read up to there"] if damage else []
    lost = dict(+trace.skipped) | ({CUT: 1} if damage else {})
    return replace(read, skipped=read.skipped | lost, warnings=read.warnings + warnings)


def _packets(source: Source, damage: list[str]) -> Iterator[Any]:
    """Yield the packets of a trace.

    Args:
        damage: a reason is appended where the trace ends early.

    Raises:
        InputError: a packet is damaged.
    """
    try:
        from google.protobuf.message import DecodeError
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket
    except ImportError as error:
        raise MissingExtra("perfetto", "perfetto") from error
    rest = bytearray()
    for block in blocks(source, damage):
        rest += block
        at = 0
        while (framed := _framed(rest, at)) is not None and framed[1] <= len(rest):
            begin, at = framed
            try:
                yield TracePacket.FromString(bytes(rest[begin:at]))
            except DecodeError as error:
                raise InputError(f"{source.label}: damaged Perfetto trace; copy the file again") from error
        del rest[:at]
        if len(rest) > MAX_FACTS_BYTES or (rest and rest[0] != _PACKET):
            what = f"no packet, or one of more than {format_bytes(MAX_FACTS_BYTES)}"
            raise InputError(f"{source.label}: damaged Perfetto trace ({what}); copy the file again")
    if rest and not damage:
        damage.append("truncated within a packet")


def _framed(content: bytes | bytearray, at: int) -> tuple[int, int] | None:
    """Return start and end of the content of the packet at an offset; None where there is no packet."""
    if at >= len(content) or content[at] != _PACKET:
        return None
    size = 0
    for place in range(at + 1, min(at + 11, len(content))):
        size |= (content[place] & 0x7F) << 7 * (place - at - 1)
        if content[place] < 0x80:
            return place + 1, place + 1 + size
    return None


@dataclass
class _Sequence:
    """State that the packets of one writer refer to by number.

    Attributes:
        names, categories, keys, texts: names and categories of slices, names and text values of arguments.
        stages: name and category of each render stage or queue.
        track, clock: defaults of packets that state none.
        clocks: conversion to ns of the trace, by clock id: unit in ns, offset in ns, and whether each value
            is relative to the previous one.
    """

    names: dict[int, str] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    stages: dict[int, tuple[str, int]] = field(default_factory=dict)
    track: int = 0
    clock: int = _BOOTTIME
    clocks: dict[int, tuple[int, int, bool]] = field(default_factory=dict)

    def intern(self, data: Any) -> None:
        self.names |= {name.iid: name.name for name in data.event_names}
        self.categories |= {name.iid: name.name for name in data.event_categories}
        self.keys |= {name.iid: name.name for name in data.debug_annotation_names}
        self.texts |= {
            text.iid: text.str.decode("utf-8", "replace") for text in data.debug_annotation_string_values
        }
        self.stages |= {stage.iid: (stage.name, int(stage.category)) for stage in data.gpu_specifications}

    def value(self, annotation: Any) -> Any:
        """Return the value of an argument; an argument without a value is an empty list."""
        if annotation.array_values:
            return [self.value(value) for value in annotation.array_values]
        if annotation.dict_entries:
            return self.arguments(annotation.dict_entries)
        kind = annotation.WhichOneof("value")
        if kind == "string_value_iid":
            return self.texts.get(annotation.string_value_iid, "")
        return [] if kind in (None, "nested_value") else getattr(annotation, kind)

    def arguments(self, annotations: Any) -> dict[str, Any]:
        return {entry.name or self.keys.get(entry.name_iid, ""): self.value(entry) for entry in annotations}


class _Trace:
    """Content of a trace that has been read so far.

    Attributes:
        wall_ns: offset of the wall clock to times of the trace.
        skipped: number of items left out, by reason.
        by_rocprofv3: whether kernels were seen as slices of rocprofv3.
    """

    def __init__(self) -> None:
        self.wall_ns = 0
        self.by_rocprofv3 = False
        self.skipped: Counter[str] = Counter()
        self._sequences: defaultdict[int, _Sequence] = defaultdict(_Sequence)
        self._threads: dict[int, tuple[int, int]] = {}  # pid and tid by track
        self._parents: dict[int, int] = {}
        self._marks: list[_Mark] = []
        self._work: list[dict[str, Any]] = []
        self._is_anchored = False

    def take(self, packet: Any) -> None:
        sequence = self._sequences[packet.trusted_packet_sequence_id]
        if packet.sequence_flags & _CLEARED:
            sequence = _Sequence(clocks=sequence.clocks)
            self._sequences[packet.trusted_packet_sequence_id] = sequence
        if packet.HasField("trace_packet_defaults"):
            defaults = packet.trace_packet_defaults
            sequence.clock = defaults.timestamp_clock_id or sequence.clock
            sequence.track = defaults.track_event_defaults.track_uuid or sequence.track
        if packet.HasField("interned_data"):
            sequence.intern(packet.interned_data)
        at_ns = self._time(packet, sequence)  # for each packet: the next may be relative to it
        kind = packet.WhichOneof("data")
        if kind == "clock_snapshot":
            self._anchor(packet.clock_snapshot, sequence)
        elif kind == "track_descriptor":
            track = packet.track_descriptor
            if track.HasField("thread"):
                self._threads[track.uuid] = track.thread.pid, track.thread.tid
            elif track.HasField("process"):
                self._threads[track.uuid] = track.process.pid, track.process.pid
            self._parents[track.uuid] = track.parent_uuid
        elif kind == "track_event":
            self._mark(packet.track_event, at_ns, sequence)
        elif kind == "gpu_render_stage_event":
            self._add_work(packet.gpu_render_stage_event, at_ns, sequence)
        elif kind == "gpu_counter_event":
            self.skipped["values of counters"] += 1

    def _anchor(self, snapshot: Any, sequence: _Sequence) -> None:
        values = {clock.clock_id: clock.timestamp for clock in snapshot.clocks}
        boot_ns = values.get(_BOOTTIME)
        if boot_ns is None:
            return
        if _REALTIME in values and not self._is_anchored:
            self.wall_ns, self._is_anchored = values[_REALTIME] - boot_ns, True
        for clock in snapshot.clocks:
            unit = clock.unit_multiplier_ns or 1
            sequence.clocks[clock.clock_id] = unit, boot_ns - clock.timestamp * unit, clock.is_incremental
            if clock.is_incremental:
                sequence.clocks[clock.clock_id] = unit, boot_ns, True

    def _time(self, packet: Any, sequence: _Sequence) -> int:
        """Return the time of a packet, ns of the trace; 0 where it has none."""
        clock = packet.timestamp_clock_id or sequence.clock
        unit, added, is_incremental = sequence.clocks.get(clock, (1, 0, False))
        if clock == _BOOTTIME or not packet.HasField("timestamp"):
            return int(packet.timestamp)
        at_ns = packet.timestamp * unit + added
        if is_incremental:
            sequence.clocks[clock] = unit, at_ns, True
        return int(at_ns)

    def _thread(self, track: int) -> tuple[int, int]:
        """Return process and thread of a track; without its own, its ancestor's process and a number."""
        if track in self._threads:
            return self._threads[track]
        above, seen = self._parents.get(track, 0), {track}
        while above and above not in self._threads and above not in seen:
            seen.add(above)
            above = self._parents.get(above, 0)
        return self._threads.get(above, (0, 0))[0], track & 0x7FFFFFFF

    def _mark(self, event: Any, at_ns: int, sequence: _Sequence) -> None:
        if event.type not in (_BEGIN, _END):
            self.skipped["instants and values of counters"] += 1
            return
        track = event.track_uuid or sequence.track
        begins = event.type == _BEGIN
        said: dict[str, Any] = {}
        if begins:
            categories = [*event.categories, *(sequence.categories.get(i, "") for i in event.category_iids)]
            self.by_rocprofv3 |= _DISPATCH in categories
            said["name"] = event.name or sequence.names.get(event.name_iid, "")
            said["args"] = arguments = sequence.arguments(event.debug_annotations)
            said["cat"] = next((name for name in categories if kind_of(name)), "user_annotation")
            if "cuda_sync_kind" in arguments:
                said["cat"] = "cuda_sync"
        self._marks.append((at_ns, begins, track, said))

    def _add_work(self, stage: Any, at_ns: int, sequence: _Sequence) -> None:
        name, category = sequence.stages.get(stage.stage_iid, ("", 0))
        kind = _STAGES.get(name, "kernel" if category == _COMPUTE else "")
        if not kind:
            self.skipped["GPU stages that are not kernels or copies"] += 1
            return
        extra = {_NUMBERS.get(item.name, item.name): item.value for item in stage.extra_data}
        queue = extra.get("stream", stage.hw_queue_iid or stage.hw_queue_id)
        self._work.append(
            {
                "ph": "X",
                "cat": kind,
                "name": sequence.names.get(stage.name_iid, "") or stage.name or name,
                "pid": stage.gpu_id,
                "tid": queue,
                "ts": at_ns,
                "dur": stage.duration,
                "args": extra | {"device": stage.gpu_id, "stream": queue},
            }
        )

    def events(self) -> list[dict[str, Any]]:
        """Return all spans as Kineto's events with times in ns, in order of time."""
        ends_ns, unmatched = _ends(self._marks)
        if unmatched:
            self.skipped["begin or end marks without a match"] += unmatched
        slices = []
        for (start_ns, _, track, said), end_ns in zip(self._marks, ends_ns, strict=True):
            if end_ns >= 0:
                pid, tid = self._thread(track)
                slices.append(
                    {"ph": "X", "pid": pid, "tid": tid, "ts": start_ns, "dur": end_ns - start_ns} | said
                )
        return sorted([*slices, *self._work], key=lambda event: event["ts"])


def _ends(marks: Sequence[_Mark]) -> tuple[list[int], int]:
    """Return the end of each slice that begins, ns, -1 for other marks; and the number of unmatched marks.

    Cuspy writes the begins of many slices and then their ends in the same order. Other writers write marks as
    they happen: an end belongs to the slice of its track that began last.
    """
    ends_ns = [-1] * len(marks)
    open_slices: defaultdict[int, list[int]] = defaultdict(list)
    unmatched, at = 0, 0
    while at < len(marks):
        middle = _run(marks, at, begins=True)
        end = middle + (middle - at)
        begun, ended = marks[at:middle], marks[middle:end]
        if begun and _are_columns(begun, ended):
            ends_ns[at:middle] = [time_ns for time_ns, *_ in ended]
            at = end
            continue
        for place, (time_ns, begins, track, _) in enumerate(begun or marks[at : at + 1], at):
            if begins:
                open_slices[track].append(place)
            elif open_slices[track]:
                ends_ns[open_slices[track].pop()] = time_ns
            else:
                unmatched += 1
        at = max(middle, at + 1)
    return ends_ns, unmatched + sum(map(len, open_slices.values()))


def _are_columns(begun: Sequence[_Mark], ended: Sequence[_Mark]) -> bool:
    """Return whether ends belong to begins one by one, rather than being in order of time."""
    if [mark[2] for mark in begun] != [mark[2] for mark in ended] or any(mark[1] for mark in ended):
        return False
    times = [mark[0] for mark in (*begun, *ended)]
    return any(later < earlier for earlier, later in pairwise(times))


def _run(marks: Sequence[_Mark], at: int, *, begins: bool) -> int:
    """Return the index after the run of marks from `at` that all begin slices, or all end them."""
    while at < len(marks) and marks[at][1] is begins:
        at += 1
    return at
