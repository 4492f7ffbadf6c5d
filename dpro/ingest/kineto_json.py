"""The JSON of a Kineto trace, decoded into typed records that hold only what dpro takes.

In: bytes of a trace file. Out: its facts and events. Times stay as the text they were (`msgspec.Raw`), so
that no digit is lost to a float, and nested lists (shapes) are never built.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from dpro.errors import InputError

_NOTHING = Raw(b"")


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments of an event that dpro takes; the rest is passed over while decoding."""

    external_id: Any = msgspec.field(default=None, name="External id")
    external_id_2021: Any = msgspec.field(default=None, name="external id")
    correlation: Any = None
    device: Any = None
    stream: Any = None
    bytes: Any = None
    sequence_number: Any = msgspec.field(default=None, name="Sequence number")
    forward_thread: Any = msgspec.field(default=None, name="Fwd thread id")
    shapes: Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    shapes_2020: Raw = msgspec.field(default=_NOTHING, name="Input dims")
    types: Raw = msgspec.field(default=_NOTHING, name="Input type")
    inputs: Raw = msgspec.field(default=_NOTHING, name="Concrete Inputs")
    collective: Any = msgspec.field(default=None, name="Collective name")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    sequence: Any = msgspec.field(default=None, name="Seq")
    source_rank: Any = msgspec.field(default=None, name="Src Rank")
    destination_rank: Any = msgspec.field(default=None, name="Dst Rank")
    wait_on_stream: Any = None
    wait_on_record: Any = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")
    wait_on_event: Any = msgspec.field(default=None, name="wait_on_cuda_event_id")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False, frozen=True):
    """One entry of `traceEvents`."""

    phase: str = msgspec.field(default="", name="ph")
    category: str | None = msgspec.field(default=None, name="cat")
    name: str = ""
    time: Raw = msgspec.field(default=_NOTHING, name="ts")
    duration: Raw = msgspec.field(default=_NOTHING, name="dur")
    pid: Any = None
    tid: Any = None
    args: Args | None = None


class Facts(msgspec.Struct):
    """What stands beside the events."""

    base_ns: Any = msgspec.field(default=0, name="baseTimeNanoseconds")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    host: Any = msgspec.field(default=None, name="host_name")
    cuda_runtime: Any = msgspec.field(default=None, name="cuda_runtime_version")
    cuda_driver: Any = msgspec.field(default=None, name="cuda_driver_version")
    hip_runtime: Any = msgspec.field(default=None, name="hip_runtime_version")


class _Document(Facts):
    events: list[Event] | None = msgspec.field(default=None, name="traceEvents")


class _LooseDocument(Facts):
    events: list[Raw] | None = msgspec.field(default=None, name="traceEvents")


def decode(data: bytes, path: Path) -> tuple[Facts, list[Event], int]:
    """Decode a trace: an object with `traceEvents`, or a bare array of events.

    Args:
        data: the file, already gunzipped.
        path: named in errors.

    Returns:
        The facts, the events, and how many entries were not of an event's shape.

    Raises:
        InputError: not JSON, cut short, not a trace, or without a single event.
    """
    malformed = 0
    try:
        facts, events = _decode_typed(data)
    except msgspec.ValidationError:
        facts, events, malformed = _decode_loose(data, path)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        facts, events = _decode_repaired(data, path, error)
    if events is None:
        raise InputError(f"{path}: JSON, but not a trace (no traceEvents); give a torch.profiler trace")
    if not events:
        raise InputError(f"{path}: a trace without events; record it again, with profiled work in the window")
    return facts, events, malformed


def _is_array(data: bytes) -> bool:
    return data[:64].lstrip().startswith(b"[")


def _decode_typed(data: bytes) -> tuple[Facts, list[Event] | None]:
    if _is_array(data):
        return Facts(), msgspec.json.decode(data, type=list[Event])
    document = msgspec.json.decode(data, type=_Document)
    return document, document.events


def _decode_loose(data: bytes, path: Path) -> tuple[Facts, list[Event] | None, int]:
    """Decode event by event; what does not look like an event is counted, not fatal."""
    try:
        if _is_array(data):
            document = _LooseDocument(events=msgspec.json.decode(data, type=list[Raw]))
        else:
            document = msgspec.json.decode(data, type=_LooseDocument)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: JSON, but not a trace ({error}); give a torch.profiler trace") from error
    decoder = msgspec.json.Decoder(Event)
    events, malformed = [], 0
    for text in document.events or []:
        try:
            events.append(decoder.decode(text))
        except msgspec.ValidationError:
            malformed += 1
    return document, events, malformed


def _decode_repaired(data: bytes, path: Path, error: Exception) -> tuple[Facts, list[Event] | None]:
    """Try once more without what some profilers write: bare inf and nan, bytes that are not UTF-8."""
    text = data.decode("utf-8", errors="replace")
    repaired = re.sub(r"(:\s*)-?(?:inf|Infinity|nan|NaN)\b", r"\1null", text).encode()
    if repaired != data:
        try:
            return _decode_typed(repaired)
        except msgspec.DecodeError as second:
            error = second
    if "truncated" in str(error):
        raise InputError(f"{path}: JSON cut short; copy or record it again") from error
    raise InputError(f"{path}: not JSON ({error}); give a torch.profiler trace") from error
