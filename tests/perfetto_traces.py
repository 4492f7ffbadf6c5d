"""Perfetto traces as PyTorch's Cuspy writes them, from the events of a Kineto trace.

In: events. Out: the bytes of a `.pftrace`: tracks first, then names, then the slices of the CPU, all
beginnings before all ends, then work of GPUs as render stages (torch/csrc/profiler/cuspy/cuspy_pftrace.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

STAGES = {
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
    "gpu_user_annotation": "Annotation",
}
RENAMED = {"stream": "stream id", "device": "device id", "context": "context id"}
FIRST_QUEUE = 100  # of the numbers that queues have; stages have lower ones


def pftrace(events: Sequence[dict[str, Any]], base_ns: int) -> bytes:
    """The trace.

    Args:
        events: whole spans of Kineto, times in us.
        base_ns: from when these count.
    """
    trace = Trace()
    snapshot = trace.packet.add(timestamp=base_ns, trusted_packet_sequence_id=1).clock_snapshot
    for clock in (6, 1):
        snapshot.clocks.add(clock_id=clock, timestamp=base_ns)
    on_gpu = [event for event in events if event["cat"] in STAGES]
    on_cpu = [event for event in events if event["cat"] not in STAGES]
    threads = list(dict.fromkeys((event["pid"], event["tid"]) for event in on_cpu))
    for number, (pid, tid) in enumerate(threads, 1):
        track = trace.packet.add().track_descriptor
        track.uuid = number
        # A device's streams are tracks whose process and thread are its number and theirs.
        track.thread.pid, track.thread.tid = int(pid) & 0x7FFFFFFF, int(tid) & 0x7FFFFFFF
    names = {name: number for number, name in enumerate(dict.fromkeys(event["name"] for event in events), 1)}
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(event["cat"] for event in on_cpu), 1)}
    streams = list(dict.fromkeys(event["args"]["stream"] for event in on_gpu))
    packet = trace.packet.add(trusted_packet_sequence_id=1, sequence_flags=1)
    for name, number in names.items():
        packet.interned_data.event_names.add(iid=number, name=name)
    for kind, number in kinds.items():
        packet.interned_data.event_categories.add(iid=number, name=kind)
    for number, stage in enumerate(STAGES.values(), 1):
        packet.interned_data.gpu_specifications.add(iid=number, name=stage, category=2 if number == 1 else 0)
    for number, stream in enumerate(streams, FIRST_QUEUE):
        packet.interned_data.gpu_specifications.add(iid=number, name=f"[{stream}] stream {stream}")
    for event in on_cpu:
        packet = _packet(trace, at_ns(event["ts"], base_ns), 2)
        slice_ = packet.track_event
        slice_.type, slice_.track_uuid = 1, 1 + threads.index((event["pid"], event["tid"]))
        slice_.name_iid = names[event["name"]]
        if not event["cat"].endswith("sync"):
            slice_.category_iids.append(kinds[event["cat"]])
        for key, value in event.get("args", {}).items():
            argument = slice_.debug_annotations.add(name=key)
            _set(argument, value)
    for event in on_cpu:
        slice_ = _packet(trace, at_ns(event["ts"], base_ns) + at_ns(event["dur"], 0)).track_event
        slice_.type, slice_.track_uuid = 2, 1 + threads.index((event["pid"], event["tid"]))
    for event in on_gpu:
        stage = _packet(trace, at_ns(event["ts"], base_ns), 2).gpu_render_stage_event
        stage.duration, stage.gpu_id = at_ns(event["dur"], 0), event["args"]["device"]
        stage.hw_queue_iid = FIRST_QUEUE + streams.index(event["args"]["stream"])
        stage.stage_iid = 1 + list(STAGES).index(event["cat"])
        if event["cat"] in ("kernel", "gpu_user_annotation"):
            stage.name_iid = names[event["name"]]
        for key, value in event["args"].items():
            stage.extra_data.add(name=RENAMED.get(key, key), value=str(value))
    return trace.SerializeToString()


def at_ns(us: float, base_ns: int) -> int:
    return base_ns + round(us * 1000)


def _packet(trace: Trace, time_ns: int, flags: int = 0) -> Any:
    return trace.packet.add(timestamp=time_ns, trusted_packet_sequence_id=1, sequence_flags=flags)


def _set(annotation: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _set(annotation.dict_entries.add(name=key), inner)
    elif isinstance(value, list):
        for inner in value:
            _set(annotation.array_values.add(), inner)
    elif isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int):
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.string_value = str(value)
