"""Spans of a Kineto trace as columns, from the rows of the compiled loop, without a Python object per span.

Takes the text of lists of events; adds rows to `Columns` and returns the other events that are read. A list
with any JSON of an unusual form is refused as a whole and read by the typed decoder instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dpro.arrays import Ints
from dpro.compiled import compile_beside
from dpro.ingest.kineto import scan_kernel as kernel
from dpro.ingest.kineto.columns import (
    FRAME,
    INSTANT,
    KERNEL,
    NAME,
    PYTHON,
    SYNC_KIND,
    UNTAKEN,
    Columns,
    Memory,
    is_detailed,
)
from dpro.ingest.kineto.events import (
    NO_ARGS,
    PADDING,
    UNREADABLE,
    Scanned,
    TraceEvent,
    decode_events,
    whole_numbers,
)
from dpro.ingest.kineto.scan_kernel import scan

_ROWS = (1 << 14) + 8  # not a power of two, so that a row's columns do not share one cache set
_FLUSHED_AT = 1 << 13  # rows; leaves room for those of a list
_STRINGS = 1 << 13  # initial capacity
_WORDS_PER_STRING = 16
# Bits of a category: keep details unless the name is plain, for kernels or for others; or always.
_OF_KERNELS, _OF_OTHERS, _ALWAYS = 1, 2, 4
_MAX_REFUSED = 8  # excess of refused over accepted lists at which scanning stops
_X, _INSTANT = ord("X"), ord(INSTANT)
_MEMORY = [kernel.START, kernel.DEVICE_TYPE, kernel.DEVICE_ID, kernel.ALLOCATED, kernel.RESERVED]
_EVENT_KEYS = {
    "ph": kernel.PHASE,
    "cat": kernel.CATEGORY,
    "name": kernel.NAME,
    "pid": kernel.PID,
    "tid": kernel.TID,
    "ts": kernel.START,
    "dur": kernel.DURATION,
    "args": kernel.ARGUMENTS,
}
_ARGUMENT_KEYS = {
    "device": kernel.DEVICE,
    "stream": kernel.STREAM,
    "bytes": kernel.BYTES,
    "correlation": kernel.CORRELATION,
    "External id": kernel.EXTERNAL_ID,
    "external id": kernel.EXTERNAL_ID_2021,
    "Sequence number": kernel.SEQUENCE_NUMBER,
    "Fwd thread id": kernel.FORWARD_THREAD,
    "Device Type": kernel.DEVICE_TYPE,
    "Device Id": kernel.DEVICE_ID,
    "Total Allocated": kernel.ALLOCATED,
    "Total Reserved": kernel.RESERVED,
    "Input Dims": kernel.SHAPES,
    "Input dims": kernel.SHAPES_2020,
}
_NUMBERS = {
    "start_ns": kernel.START,
    "duration_ns": kernel.DURATION,
    "pid": kernel.PID,
    "tid": kernel.TID,
    "device": kernel.DEVICE,
    "stream": kernel.STREAM,
    "bytes": kernel.BYTES,
    "correlation": kernel.CORRELATION,
    "external_id": kernel.EXTERNAL_ID,
    "external_id_2021": kernel.EXTERNAL_ID_2021,
    "sequence_number": kernel.SEQUENCE_NUMBER,
    "forward_thread": kernel.FORWARD_THREAD,
}


class Strings:
    """Table of strings by code, as `scan` numbers them.

    Attributes:
        slots: [S] codes or -1; S is a power of two, at least twice the capacity.
        strings: [C, STRING_COLUMNS] facts about each string.
        pool: bytes of all strings, as words.
        counts: [4] numbers of strings, words in the pool, events, and marked rows.
    """

    def __init__(self, room: int) -> None:
        """Begin without strings.

        Args:
            room: capacity.
        """
        self.slots = np.full(1 << (2 * room).bit_length(), -1, np.int64)
        self.strings = np.zeros((room, kernel.STRING_COLUMNS), np.int64)
        self.strings[:, kernel.ASKS] = _ALWAYS
        self.pool = np.zeros(room * _WORDS_PER_STRING, np.uint64)
        self.counts = np.zeros(4, np.int64)

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the arguments of `scan`."""
        return self.slots, self.strings, self.pool, self.counts

    def text(self, code: int) -> bytes:
        """Return the bytes of a string."""
        _, size, place, *_ = self.strings[code].tolist()
        return self.pool[place : place + -(-size // 8)].tobytes()[:size]

    def texts(self) -> Iterator[bytes]:
        """Return the bytes of all strings, by code."""
        return map(self.text, range(int(self.counts[kernel.STRINGS])))


class Meanings:
    """A number for each string, computed when first needed."""

    def __init__(self, strings: Strings, number: Callable[[bytes], int]) -> None:
        """Begin without numbers.

        Args:
            number: computes a number from the bytes of a string.
        """
        self._strings = strings
        self._number = number
        self._known = np.full(strings.strings.shape[0], -1, np.int32)

    def of(self, codes: Ints) -> npt.NDArray[np.int32]:
        """Return [N] numbers of [N] codes."""
        numbers = self._known[codes]
        if numbers.size and numbers.min() < 0:
            for code in set(codes[numbers < 0].tolist()):
                self._known[code] = self._number(self._strings.text(code))
            numbers = self._known[codes]
        return numbers


class Scanner:
    """Reader of spans and memory events into columns."""

    def __init__(self, columns: Columns, memory: Memory) -> None:
        """Begin without rows.

        Args:
            columns: receives spans, at the latest in `flush`.
        """
        self._columns = columns
        self._memory = memory
        self._rows = np.empty((kernel.COLUMNS, _ROWS), np.int64)
        self._marked = np.empty(_ROWS, np.int64)
        self._positions = np.full(_ROWS, -1, np.int32)
        self._count = 0
        self._refused = 0  # refused lists minus accepted ones, at least 0
        self._make_room(_STRINGS)

    def _make_room(self, room: int) -> None:
        """Replace the table of strings by an empty, larger one."""
        columns, self._strings = self._columns, Strings(room)
        self._keys = _keys(self._strings)
        self._kinds = Meanings(self._strings, lambda text: columns.kinds[_decoded(text)])
        self._names = Meanings(self._strings, lambda text: columns.names[_decoded(text)])
        self._shapes = Meanings(self._strings, columns.shapes.__getitem__)
        self._detailed = Meanings(self._strings, lambda text: is_detailed(_decoded(text)))
        self._of_memory = Meanings(self._strings, lambda text: text == NAME.encode())
        self._communicate = Meanings(self._strings, lambda text: columns.communicates(_decoded(text)))

    def take(self, text: bytes) -> Scanned | None:
        """Read a list of events; None where it is refused, in which case none of it has been taken.

        Args:
            text: from bracket to bracket, and `PADDING`.
        """
        if self._refused > _MAX_REFUSED:
            return None
        if self._count >= _FLUSHED_AT:
            self.flush()
        end = self._scan(text)
        try:
            others = None if end == kernel.REFUSED else self._others(text)
        except UNREADABLE:
            others = None
        if others is None:
            self._positions[self._count :] = -1
            self._refused += 1
            return None
        self._count = end
        self._refused -= self._refused > 0
        return Scanned(others, int(self._strings.counts[kernel.EVENTS]))

    def _scan(self, text: bytes) -> int:
        """Fill rows, growing the tables as needed; return the end row or `REFUSED`."""
        array = np.frombuffer(text, np.uint8)
        while True:
            self._strings.counts[kernel.EVENTS :] = 0
            end = scan(array, self._count, self._rows, self._marked, self._keys, self._strings.arrays())
            if end != kernel.FULL:
                return end
            self.flush()
            self._make_room(2 * self._strings.strings.shape[0])
            self._rows = np.hstack([self._rows, np.empty_like(self._rows)])
            self._marked = np.append(self._marked, self._marked)
            self._positions = np.append(self._positions, np.full_like(self._positions, -1))

    def _others(self, text: bytes) -> list[TraceEvent]:
        """Return events that are neither spans nor memory events; keep details of spans that need them."""
        rows = self._marked[: self._strings.counts[kernel.MARKED]]
        if not rows.size:
            return []
        phases, categories, names = (
            self._rows[column, rows] for column in (kernel.PHASE, kernel.CATEGORY, kernel.NAME)
        )
        columnar = (phases == _X) | (phases == _INSTANT)
        others = self._events(text, rows[~columnar])
        rows, phases, categories, names = (column[columnar] for column in (rows, phases, categories, names))
        kinds = self._kinds.of(categories)
        detailed = self._detailed.of(names) > 0
        kernels = np.flatnonzero(kinds == KERNEL)
        detailed[kernels] = self._communicate.of(names[kernels])
        # From now on `scan` marks such spans only where details of them are kept.
        untold = (kinds == PYTHON) | (kinds >= UNTAKEN)
        asked = np.where(kinds == KERNEL, _OF_KERNELS, _OF_OTHERS)
        strings = self._strings.strings
        strings[categories, kernel.ASKS] = np.where(kinds == SYNC_KIND, _ALWAYS, np.where(untold, 0, asked))
        strings[names[~detailed], kernel.PLAIN] |= asked[~detailed]
        detailed |= kinds == SYNC_KIND
        explained = rows[detailed & (phases == _X) & (kinds != PYTHON) & (kinds < UNTAKEN)]
        kept = [self._columns.keep(event.args or NO_ARGS) for event in self._events(text, explained)]
        self._positions[explained] = kept
        return others

    def _events(self, text: bytes, rows: Ints) -> list[TraceEvent]:
        """Decode some rows of a list by the typed decoder."""
        places = self._rows[kernel.BEGIN : kernel.END + 1, rows].T.tolist()
        events = decode_events([text[begin:end] for begin, end in places]) if places else []
        if len(events) < len(places):
            raise msgspec.ValidationError("not an event")
        return events

    def flush(self) -> None:
        """Add the rows to the columns."""
        if not self._count:
            return
        fields = self._rows[:, : self._count]
        numbers = fields[: kernel.CATEGORY]
        if numbers[kernel.PID :].min() <= kernel.TEXT:
            # Replace codes of strings that are numbers by the numbers.
            for column in numbers[kernel.PID :]:
                rows = np.flatnonzero(column <= kernel.TEXT)
                codes = (kernel.TEXT - column[rows]).tolist()
                texts = {code: _decoded(self._strings.text(code)) for code in set(codes)}
                column[rows] = whole_numbers([texts[code] for code in codes])
        instants = np.flatnonzero(fields[kernel.PHASE] == _INSTANT)
        samples = instants[self._of_memory.of(fields[kernel.NAME][instants]) > 0]
        if samples.size:
            self._memory.add_arrays(*(fields[field, samples] for field in _MEMORY))
        spans = fields[kernel.PHASE] == _X
        kinds = np.where(spans, self._kinds.of(fields[kernel.CATEGORY]), FRAME)
        for code, count in Counter(fields[kernel.CATEGORY][kinds == UNTAKEN].tolist()).items():
            self._columns.note_untaken(_decoded(self._strings.text(code)), count)
        shapes, older = fields[kernel.SHAPES], fields[kernel.SHAPES_2020]
        self._columns.add_arrays(
            {name: numbers[field] for name, field in _NUMBERS.items()}
            | {
                "kind": kinds.astype(np.uint8),
                "name": self._names.of(fields[kernel.NAME]),
                "shapes": self._shapes.of(np.where(shapes == 0, older, shapes)),
                "position": self._positions[: self._count],
            }
        )
        self._positions[: self._count] = -1
        self._count = 0


def _keys(strings: Strings) -> Ints:
    """Return the fields that strings mean as keys, by code: [2, K] for events and for their arguments."""
    names = dict.fromkeys(["", *_EVENT_KEYS, *_ARGUMENT_KEYS])
    text = msgspec.json.encode([dict.fromkeys(names, 0)]).replace(b":0", b':""') + PADDING
    rows, marked = np.empty((kernel.COLUMNS, 1), np.int64), np.empty(1, np.int64)
    nothing = np.full((2, 0), kernel.PASSED_OVER, np.int64)
    scan(np.frombuffer(text, np.uint8), 0, rows, marked, nothing, strings.arrays())
    return np.array(
        [
            [keys.get(text.decode(), kernel.PASSED_OVER) for text in strings.texts()]
            for keys in (_EVENT_KEYS, _ARGUMENT_KEYS)
        ],
        np.int64,
    )


def _decoded(text: bytes) -> str:
    """Decode a JSON string from the bytes between its quotes."""
    return msgspec.json.decode(b'"%b"' % text, type=str)


if __name__ == "__main__":  # compiles in the background of a process that decodes
    compile_beside(lambda: Scanner(Columns(), Memory()))
