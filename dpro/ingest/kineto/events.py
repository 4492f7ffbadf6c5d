"""JSON of a Kineto trace, decoded chunk by chunk into typed records of the fields that dpro uses.

Reads a source. An `EventReader` yields lists of events while it reads; at the end it has the facts around the
events, and what could not be read. At most one chunk of text is in memory. Events are not interpreted.

Numbers in any form (number, text, JSON text, or missing) become int64 arrays of exact times and ids. No value
raises an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import polars as pl
from msgspec import Raw

from dpro.arrays import Floats, Ints
from dpro.errors import InputError
from dpro.ingest.reading.files import Source, blocks
from dpro.limits import MAX_FACTS_BYTES
from dpro.schema import GPU_WORK_KINDS, SPAN_KINDS
from dpro.units import format_bytes

LAST_NS = 1 << 62  # later than any valid time
MISSING_NS = -LAST_NS
FLOAT_LOSES_NS = float(1 << 43)  # µs: above, a float no longer distinguishes neighbouring nanoseconds
_PLAIN_US = float(1 << 42)  # µs: below, the product in ns is off by less than half a ns
_LARGEST_US = float(1 << 53)  # above, a float skips whole microseconds; no valid time is that large
_NS_PER_US = 1000
_MAX_CHARACTERS = 21  # longer whole numbers do not fit int64


def nanoseconds(times: Sequence[int | float | Raw | None]) -> Ints:
    """Convert microseconds to ns, exact to the last written digit; each independent of the others.

    Returns:
        [N]; `MISSING_NS` where there is no number.
    """
    values = _floats(times)
    if values.size and values.min() > -_PLAIN_US and values.max() < _PLAIN_US:  # false if any is nan
        values *= _NS_PER_US
        return np.rint(values, out=values).astype(np.int64)
    sound = np.abs(values) < _LARGEST_US  # false for nan
    values = np.where(sound, values, 0)
    # In two parts, since the product of a large time would lose its last digits.
    whole = np.floor(values)
    ns = whole.astype(np.int64) * _NS_PER_US + np.rint((values - whole) * _NS_PER_US).astype(np.int64)
    late = [row for row in np.flatnonzero(values >= FLOAT_LOSES_NS).tolist() if isinstance(times[row], Raw)]
    ns[late] = _from_texts([times[row] for row in late])
    return np.where(sound, ns, MISSING_NS)


def _floats(times: Sequence[int | float | Raw | None]) -> Floats:
    """Return times as floats; nan where there is no number."""
    try:
        return np.fromiter(times, np.float64, len(times))
    except (TypeError, ValueError, OverflowError):
        return np.fromiter(map(_float, times), np.float64, len(times))


def _float(time: int | float | Raw | None) -> float:
    try:
        return float(msgspec.json.decode(time) if isinstance(time, Raw) else time)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, msgspec.DecodeError):
        return math.nan


def whole_numbers(values: Sequence[Any]) -> Ints:
    """Return whole numbers, also those written as text (`"7"`, `stream 7`); -1 where there is none.

    Args:
        values: [N] of any type.
    """
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.fromiter(map(_whole_number, values), np.int64, len(values))


def _whole_number(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        match = re.search(r"-?\d+", value) if isinstance(value, str) else None
        if not match:
            return -1
        number = int(match[0][:_MAX_CHARACTERS])
    return number if -(1 << 63) <= number < 1 << 63 else -1


def _from_texts(times: Sequence[Any]) -> Ints:
    """Convert JSON texts to ns through decimals: exact, but slower."""
    written = (
        pl.Series(map(bytes, times), dtype=pl.Binary).cast(pl.String, strict=False).str.strip_chars(' "')
    )
    exact = (written.cast(pl.Decimal(38, 3), strict=False) * _NS_PER_US).cast(pl.Int64, strict=False)
    return exact.fill_null(MISSING_NS).to_numpy()


_NOTHING = Raw(b"")
MISSING_TIME = -(1 << 62)  # µs
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
PADDING = bytes(64)  # follows a scanned text: no value extends beyond its first zero
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*"?(\d+)')


class EventArguments(msgspec.Struct, gc=False, frozen=True):
    """The arguments of an event that dpro uses; others are skipped while decoding."""

    external_id: Any = msgspec.field(default=-1, name="External id")
    sequence_number: Any = msgspec.field(default=-1, name="Sequence number")
    forward_thread: Any = msgspec.field(default=-1, name="Fwd thread id")
    shapes: Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    device: Any = -1
    stream: Any = -1
    correlation: Any = -1
    bytes: Any = -1
    external_id_2021: Any = msgspec.field(default=-1, name="external id")
    shapes_2020: Raw = msgspec.field(default=_NOTHING, name="Input dims")
    types: Raw = msgspec.field(default=_NOTHING, name="Input type")
    inputs: Raw = msgspec.field(default=_NOTHING, name="Concrete Inputs")
    collective: Any = msgspec.field(default=None, name="Collective name")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    sequence: Any = msgspec.field(default=None, name="Seq")
    source_rank: Any = msgspec.field(default=None, name="Src Rank")
    destination_rank: Any = msgspec.field(default=None, name="Dst Rank")
    wait_on_stream: Any = None
    wait_on_record: Any = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")
    wait_on_event: Any = msgspec.field(default=None, name="wait_on_cuda_event_id")
    allocated: Any = msgspec.field(default=-1, name="Total Allocated")  # this and the next three: memory
    reserved: Any = msgspec.field(default=-1, name="Total Reserved")
    device_type: Any = msgspec.field(default=-1, name="Device Type")
    device_id: Any = msgspec.field(default=-1, name="Device Id")
    name: Any = None  # this and the next two: metadata events
    labels: Any = None
    value: Any = None


NO_ARGS = EventArguments()


class TraceEvent(msgspec.Struct, gc=False, frozen=True):
    """An entry of `traceEvents`; times in µs, None or `MISSING_TIME` where missing."""

    phase: str = msgspec.field(default="", name="ph")
    category: str | None = msgspec.field(default=None, name="cat")
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    time: int | float | None = msgspec.field(default=MISSING_TIME, name="ts")
    duration: int | float | None = msgspec.field(default=-1, name="dur")
    args: EventArguments | None = NO_ARGS


class ExactEvent(TraceEvent, gc=False, frozen=True):
    """A `TraceEvent` with times as written, where a float would lose digits."""

    time: Raw = msgspec.field(default=_NOTHING, name="ts")  # type: ignore[assignment]
    duration: Raw = msgspec.field(default=_NOTHING, name="dur")  # type: ignore[assignment]


class Scanned(NamedTuple):
    """Result of scanning a list of events whose spans went directly into columns.

    Attributes:
        others: events that are not spans, of the phases that are read.
        events: number of all events.
    """

    others: list[TraceEvent]
    events: int


Scan: TypeAlias = Callable[[bytes], Scanned | None]
"""Takes the text of a list of events and `PADDING`; returns None where it refuses the list."""


class TraceFacts(msgspec.Struct):
    """Facts of a trace outside its events."""

    base_ns: Any = msgspec.field(default=None, name="baseTimeNanoseconds")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    host: Any = msgspec.field(default=None, name="host_name")
    cuda_runtime: Any = msgspec.field(default=None, name="cuda_runtime_version")
    cuda_driver: Any = msgspec.field(default=None, name="cuda_driver_version")
    hip_runtime: Any = msgspec.field(default=None, name="hip_runtime_version")


_FACTS = msgspec.json.Decoder(TraceFacts)
_LIST = msgspec.json.Decoder(list[Raw])
_EVENT = msgspec.json.Decoder(TraceEvent, strict=False)
_EVENTS = msgspec.json.Decoder(list[TraceEvent], strict=False)
_EXACT_EVENT = msgspec.json.Decoder(ExactEvent, strict=False)
_EXACT_EVENTS = msgspec.json.Decoder(list[ExactEvent], strict=False)


class EventReader:
    """Reader of a trace, once, from its beginning to its end or to where it is truncated.

    Attributes:
        facts: facts around the events; complete when the last event has been read.
        read: number of events so far.
        malformed: number of entries so far that are not events.
        truncated: what is wrong, where the file ends before its JSON does; else empty.
    """

    def __init__(self, source: Source, scan: Scan | None = None) -> None:
        """Prepare to read; nothing is read yet.

        Args:
            scan: takes the spans of a list of events before decoding, unless it refuses the list.
        """
        self.facts = TraceFacts()
        self.read = 0
        self.malformed = 0
        self.truncated = ""
        self._source = source
        self._scan = scan
        self._damage: list[str] = []
        self._bare = False  # a list of events without facts around it
        self._closed = False
        self._adrift = False  # within an event that never ends; skip to the next one
        self._exact = False

    def chunks(self) -> Iterator[list[TraceEvent]]:
        """Yield the events, some thousands at a time.

        Raises:
            InputError: the file cannot be read, is empty, or does not begin like a trace.
        """
        content = blocks(self._source, self._damage)
        rest, tail = b"", bytearray()
        for block in chain([self._open(content)], content):
            if self._closed:
                tail += block if len(tail) < MAX_FACTS_BYTES else b""
                continue
            events, rest = self._take(rest, block)
            self.read += len(events)
            yield events
        if not self._closed:
            events, rest = self._salvage(rest, last=True)
            self.read += len(events)
            yield events
        self._finish(rest + tail)

    def _open(self, content: Iterator[bytes]) -> bytes:
        """Read up to the list of events; return the bytes read beyond its start."""
        head, searched = bytearray(), 0
        for block in content:
            head += block
            begin = find_start(head, searched)
            if begin >= 0:
                self._bare = not head[:begin].rstrip(b"[ \t\r\n").endswith(b":")
                self.facts = TraceFacts() if self._bare else _facts(bytes(head[:begin]) + b"]}")
                return bytes(head[begin:])
            searched = len(head)
            if searched > MAX_FACTS_BYTES:
                what = f"no list of traceEvents in its first {format_bytes(MAX_FACTS_BYTES)}"
                raise InputError(f"{self._source.label}: {what}; give a torch.profiler trace")
        raise InputError(f"{self._source.label}: {_why_no_trace(bytes(head), self._damage)}")

    def _take(self, rest: bytes, block: bytes) -> tuple[list[TraceEvent], bytes]:
        """Return the events of `rest` and of the next block, and the unfinished end."""
        if self._adrift:
            rest, block = b"", rest + block
            begin = next_boundary(block, 0)
            if begin < 0:
                return [], block[-LONGEST_BOUNDARY_BYTES:]
            self._adrift, block = False, block[begin:]
        cut = last_boundary(block)
        if cut:
            whole = memoryview(block)[: cut[0]]  # a view, so that the text is copied only once
            events = self._events(b"[", rest, whole, b"]")
            if events is not None:
                return events, block[cut[1] :]
        text = rest + block
        return self._salvage(text, last=False) if cut or len(text) >= LONGEST_EVENT_BYTES else ([], text)

    def _events(self, *pieces: bytes | memoryview) -> list[TraceEvent] | None:
        """Return the events of a list, without those taken by the scan; None where the text is not a list."""
        scanned = self._scan(b"".join((*pieces, PADDING))) if self._scan else None
        if scanned is None:
            return self._decode(b"".join(pieces))
        self.read += scanned.events - len(scanned.others)
        return scanned.others

    def _salvage(self, text: bytes, *, last: bool) -> tuple[list[TraceEvent], bytes]:
        """Read event by event, at the list's end or a damaged event; return events and the unread end."""
        texts, end, closed = split(text)
        while not closed and (last or len(text) - end > LONGEST_EVENT_BYTES):
            begin = next_boundary(text, end)
            if begin < 0 and last:
                break
            self.malformed += 1
            if begin < 0:
                self._adrift, end = True, len(text) - LONGEST_BOUNDARY_BYTES
                break
            more, end, closed = split(text, begin)
            texts += more
        self._closed = closed
        return list(self._decode_each(texts)), text[end:]

    def _decode_each(self, texts: list[bytes]) -> Iterator[TraceEvent]:
        """Yield events one by one; where one lost its end and swallowed others, those too."""
        waiting = texts[::-1]
        while waiting:
            text = waiting.pop()
            event = self._decode_one(text)
            if event:
                yield event
            elif (begin := next_boundary(text, 0)) >= 0:
                waiting += split(text, begin).texts[::-1]

    def _decode(self, text: bytes, *, is_mended: bool = False) -> list[TraceEvent] | None:
        """Return a list of events; None where it cannot be decoded as a whole."""
        try:
            try:
                return self._typed(text)
            except msgspec.ValidationError:
                texts = _LIST.decode(text)
        except UNREADABLE:
            return None if is_mended else self._decode(mended(text), is_mended=True)
        return [event for entry in texts if (event := self._decode_one(bytes(entry)))]

    def _typed(self, text: bytes) -> list[TraceEvent]:
        if self._exact:
            return list(_EXACT_EVENTS.decode(text))
        events = _EVENTS.decode(text)
        self._exact = _loses_digits(events)
        return list(_EXACT_EVENTS.decode(text)) if self._exact else events

    def _decode_one(self, text: bytes, *, is_mended: bool = False) -> TraceEvent | None:
        """Return one event, with fields of unusual types converted where possible; else None."""
        try:
            event = _event(text)
        except UNREADABLE:
            if not is_mended:
                return self._decode_one(mended(text), is_mended=True)
            event = None
        self.malformed += event is None
        return event

    def _finish(self, text: bytes) -> None:
        """Read the facts after the events, or record that the file is truncated."""
        whole = self._closed and (self._bare or text.rstrip().endswith(b"}"))
        if not whole or self._damage:
            self.truncated = self._damage[0] if self._damage else "JSON cut short"
        if self._closed and text.lstrip(b" \t\r\n,}"):
            tail = _facts(b'{"traceEvents":[]' + text)
            for name in TraceFacts.__struct_fields__:
                if getattr(self.facts, name) is None:
                    setattr(self.facts, name, getattr(tail, name))


def _loses_digits(events: list[TraceEvent]) -> bool:
    """Return whether a time or duration has decimals and is too large for a float."""
    return any(map(_lose_digits, ([event.time for event in events], [event.duration for event in events])))


def _lose_digits(times: Sequence[int | float | None]) -> bool:
    try:
        if not times or max(times) < FLOAT_LOSES_NS:  # type: ignore[type-var, operator]
            return False
    except TypeError:  # one is None
        pass
    return any(isinstance(time, float) and time >= FLOAT_LOSES_NS for time in times)


def _facts(text: bytes) -> TraceFacts:
    """Return the facts around the events of a trace; from damaged JSON, only the base of its times."""
    for attempt in (text, mended(text)):
        try:
            return _FACTS.decode(attempt)
        except UNREADABLE:
            continue
    match = _BASE.search(text)
    return TraceFacts(base_ns=int(match[1])) if match else TraceFacts()


def decode_events(texts: Sequence[bytes]) -> list[TraceEvent]:
    """Decode events given one by one as within one list; entries that are not events are left out.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: a text is not JSON.
    """
    text = b"[%b]" % b",".join(texts)
    try:
        events = _EVENTS.decode(text)
        return list(_EXACT_EVENTS.decode(text)) if _loses_digits(events) else events
    except msgspec.ValidationError:
        return [event for entry in texts if (event := _event(entry))]


def _event(text: bytes) -> TraceEvent | None:
    """Decode one event; None where it is not an event.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: the text is not JSON.
    """
    try:
        event = _EVENT.decode(text)
        return _EXACT_EVENT.decode(text) if _loses_digits([event]) else event
    except msgspec.ValidationError:
        return _lenient(text)


def _lenient(text: bytes) -> TraceEvent | None:
    """Return an event whose fields have unusual types; None without a phase, or if not an object."""
    fields = msgspec.json.decode(text)
    name = fields.get("name", "") if isinstance(fields, dict) else None
    if not isinstance(name, str) or not isinstance(fields.get("ph"), str):
        return None
    category, args = fields.get("cat"), fields.get("args")
    return TraceEvent(
        phase=fields["ph"],
        category=category if isinstance(category, str) else None,
        name=name,
        pid=_id(fields.get("pid")),
        tid=_id(fields.get("tid")),
        time=_number(fields.get("ts")),
        duration=_number(fields.get("dur")),
        args=msgspec.json.decode(msgspec.json.encode(args), type=EventArguments)
        if isinstance(args, dict)
        else NO_ARGS,
    )


def _id(value: Any) -> int | str | None:
    return value if isinstance(value, int | str) else None


def _number(value: Any) -> int | float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _why_no_trace(text: bytes, damage: list[str]) -> str:
    """Word why a file is not read, and what to do."""
    if damage:
        return f"truncated or damaged before the first event ({damage[0]}); copy the file again"
    if not text:
        return "empty file; record it again"
    try:
        msgspec.json.decode(text)
    except UNREADABLE as error:
        if "truncated" in str(error):
            return "JSON cut short before the first event; copy or record it again"
        return f"not JSON ({error}); give a torch.profiler trace"
    return "JSON, but not a trace (no list of traceEvents); give a torch.profiler trace"


# Text of a Kineto trace: boundaries between events, and repair of invalid JSON.

LONGEST_EVENT_BYTES = 1 << 20  # an event that is longer is damaged
LONGEST_BOUNDARY_BYTES = 1 << 11  # separator of two events, with the beginning of the second

_START = re.compile(rb'"traceEvents"\s*:\s*\[')
# Boundary of two events; the key nearly always distinguishes it from one of objects in a list within an
# event.
_BOUNDARY = re.compile(rb'\}\s*+,\s*+(?=\{\s*+"(?:ph|cat|name|pid|tid|ts|dur|args|id|bp|s)"\s*+:)')
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRUCTURE = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)
_NOT_JSON = re.compile(
    _STRING
    + rb"|-?\b(?:inf|Infinity|nan|NaN|N/A|None|undefined)\b|,(?=[\s,]*+[}\]])|[\x00-\x08\x0b\x0c\x0e-\x1f]",
    re.DOTALL,
)
_CONTROL = re.compile(rb"[\x00-\x1f]")


class JsonObjects(NamedTuple):
    """Whole objects found in a text.

    Attributes:
        texts: one text per object.
        end: end of the last object, or of the list around them.
        closed: whether that list ends there.
    """

    texts: list[bytes]
    end: int
    closed: bool


def find_start(text: bytes | bytearray, searched: int = 0) -> int:
    """Return where the list of events begins, after its bracket; -1 where it does not (yet).

    Args:
        searched: number of bytes that were searched before.
    """
    if text[:64].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return text.index(b"[") + 1
    match = _START.search(text, max(0, searched - 64))
    return match.end() if match else -1


def last_boundary(text: bytes) -> tuple[int, int] | None:
    """Return the end of the last event that is surely whole and the start of the next; None without one."""
    window = LONGEST_BOUNDARY_BYTES
    while True:
        boundaries = list(_BOUNDARY.finditer(text, max(0, len(text) - window)))
        if boundaries:
            return boundaries[-1].start() + 1, boundaries[-1].end()
        if window >= len(text):
            return None
        window *= 8


def next_boundary(text: bytes, position: int) -> int:
    """Return where the next event begins; -1 where none does."""
    match = _BOUNDARY.search(text, position)
    return match.end() if match else -1


def split(text: bytes, position: int = 0) -> JsonObjects:
    """Split a list into its objects, up to one that does not end."""
    texts: list[bytes] = []
    depth, begin, end = 0, position, position
    for match in _STRUCTURE.finditer(text, position):
        mark = text[match.start()]
        if mark in b"{[":
            if not depth:
                begin = match.start()
            depth += 1
        elif mark in b"}]" and depth:
            depth -= 1
            if not depth:
                end = match.end()
                texts.append(text[begin:end])
        elif mark == ord("]") and not re.match(rb"\s*,\s*\{", text[match.end() : match.end() + 256]):
            return JsonObjects(texts, match.end(), closed=True)
        if depth and match.end() - begin > LONGEST_EVENT_BYTES:
            break
    return JsonObjects(texts, end, closed=False)


def mended(text: bytes) -> bytes:
    """Repair what some profilers write and JSON forbids.

    Bare inf, nan and N/A become null, control characters in strings become blanks, bytes that are not UTF-8
    become replacement characters; trailing commas are removed.
    """
    valid = text.decode("utf-8", errors="replace").encode()
    return _NOT_JSON.sub(_mend, valid)


def _mend(match: re.Match[bytes]) -> bytes:
    text = match[0]
    if text.startswith(b'"'):
        return _CONTROL.sub(b" ", text)
    return b" " if text == b"," or text < b" " else b"null"


# Kinds of spans by category of event.

SYNC = "sync"  # events that explain a runtime call and are not spans
KINDS = (*SPAN_KINDS, SYNC)
GPU_KINDS = (*GPU_WORK_KINDS, "gpu_annotation")

_KINDS = {
    "cpu_op": "cpu_op",
    "operator": "cpu_op",
    "runtime": "runtime",
    "driver": "runtime",
    "kernel": "kernel",
    "hpu_op": "kernel",
    "mtia_ccp_events": "kernel",
    "memcpy": "memcpy",
    "memset": "memset",
    "user_annotation": "annotation",
    "python_function": "python",
    "overhead": "overhead",
}
_ENDINGS = {
    "_runtime": "runtime",
    "_driver": "runtime",
    "_kernel": "kernel",
    "_memcpy": "memcpy",
    "_memset": "memset",
    "_user_annotation": "gpu_annotation",
    "_sync": SYNC,
}


def kind_of(category: str | None) -> str:
    """Return the kind of an event, or `SYNC`; empty for other categories."""
    lower = (category or "").lower()
    by_ending = (kind for ending, kind in _ENDINGS.items() if lower.endswith(ending))
    return _KINDS.get(lower) or next(by_ending, "")


def is_frame(category: str | None) -> bool:
    """Return whether an event is only the profiler's own frame around the recording."""
    return (category or "").lower() == "trace"


# Events that are not whole spans: begin and end marks, and metadata.

_BEGIN, _END, _METADATA = "B", "E", "M"
_MARKS = frozenset((_BEGIN, _END, _METADATA))


class Marks:
    """Begin and end marks and metadata that were added.

    Attributes:
        rank: rank in the metadata; -1 where they state none.
        rank_source: name of the metadata event that states it.
    """

    def __init__(self) -> None:
        """Begin without marks."""
        self.rank = -1
        self.rank_source = ""
        self._ends: list[TraceEvent] = []

    def add(self, events: Iterable[TraceEvent]) -> None:
        """Add the marks of a chunk."""
        for event in [event for event in events if event.phase in _MARKS]:  # most events are flow arrows
            if event.phase == _METADATA:
                if self.rank < 0 and event.args:
                    rank = _stated_rank(event.name, event.args)
                    if rank >= 0:
                        self.rank, self.rank_source = rank, event.name
            else:
                args = event.args or NO_ARGS
                self._ends.append(msgspec.structs.replace(event, args=unbound(args)))

    def spans(self) -> tuple[list[TraceEvent], int]:
        """Return spans from each begin to its end, and the number of unmatched marks.

        An end matches the last open begin on its thread, with the same name if the end has one. A span of
        unknown category becomes a named range, the usual purpose of such marks.
        """
        times = nanoseconds([event.time for event in self._ends]).tolist()
        pids = whole_numbers([event.pid for event in self._ends]).tolist()
        tids = whole_numbers([event.tid for event in self._ends]).tolist()
        order = sorted(range(len(times)), key=times.__getitem__)
        open_marks: dict[tuple[int, int], list[int]] = {}
        spans, unmatched = [], 0
        for mark in order:
            event, opened = self._ends[mark], open_marks.setdefault((pids[mark], tids[mark]), [])
            if event.phase == _BEGIN:
                opened.append(mark)
                continue
            begin = next(
                (mark for mark in reversed(opened) if not event.name or self._ends[mark].name == event.name),
                None,
            )
            if begin is None or times[begin] == MISSING_NS:
                unmatched += 1
                continue
            opened.remove(begin)
            spans.append(_span(self._ends[begin], times[begin], times[mark] - times[begin]))
        return spans, unmatched + sum(map(len, open_marks.values()))


def unbound(args: EventArguments) -> EventArguments:
    """Copy arguments so that none refers to the text of the chunk, which can then be freed."""
    raw = {
        name: value.copy()
        for name in ("shapes", "shapes_2020", "types", "inputs")
        if isinstance(value := getattr(args, name), Raw) and bytes(value)
    }
    return msgspec.structs.replace(args, **raw) if raw else args


def _span(begin: TraceEvent, start_ns: int, duration_ns: int) -> TraceEvent:
    return TraceEvent(
        phase="X",
        category=begin.category if kind_of(begin.category) else "user_annotation",
        name=begin.name,
        pid=begin.pid,
        tid=begin.tid,
        time=_microseconds(start_ns),
        duration=_microseconds(duration_ns),
        args=begin.args,
    )


def _microseconds(ns: int) -> Any:
    """Return ns as JSON text in µs, which loses no digit."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return Raw(f"{sign}{ns // 1000}.{ns % 1000:03}".encode())


def _stated_rank(mark: str, args: EventArguments) -> int:
    """Return the rank in one metadata event; -1 where it states none."""
    if mark in ("global_rank", "rank") and args.value is not None:
        (rank,) = whole_numbers([args.value]).tolist()
        return int(rank)
    if mark in ("process_name", "process_labels"):
        match = re.search(r"\brank[ _:=-]?(\d{1,9})\b", f"{args.name} {args.labels}", re.IGNORECASE)
        return int(match[1]) if match else -1
    return -1
