"""Spans of a Kineto trace without a Python object for each: the rows of the compiled loop, as columns.

In: the text of lists of events. Out: rows for `Columns`; the other events that are read. A list of which
anything is not JSON of the usual form is refused as a whole: the typed decoder reads it instead.
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

_ROWS = (1 << 14) + 8  # no power of two, so that a row's columns do not compete for one place in the cache
_FLUSHED_AT = 1 << 13  # rows, so that those of a list find room
_STRINGS = 1 << 13  # of which there is room at first
_WORDS_PER_STRING = 16
# What a category asks of a name, that no details are kept of its spans: of kernels, of others, of all.
_OF_KERNELS, _OF_OTHERS, _ALWAYS = 1, 2, 4
_MAX_REFUSED = 8  # lists, after which more of them have to be taken than refused
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
    """Strings by code, as `scan` numbers them.

    Attributes:
        slots: `[S]` codes or -1, a power of two, at least twice as many as there is room for.
        strings: `[C, STRING_COLUMNS]` what is known of each.
        pool: the bytes of all.
        counts: `[4]` of strings, of words in the pool, of events, of marked rows.
    """

    def __init__(self, room: int) -> None:
        """Begin with none.

        Args:
            room: how many there may be.
        """
        self.slots = np.full(1 << (2 * room).bit_length(), -1, np.int64)
        self.strings = np.zeros((room, kernel.STRING_COLUMNS), np.int64)
        self.strings[:, kernel.ASKS] = _ALWAYS
        self.pool = np.zeros(room * _WORDS_PER_STRING, np.uint64)
        self.counts = np.zeros(4, np.int64)

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """What `scan` is given."""
        return self.slots, self.strings, self.pool, self.counts

    def text(self, code: int) -> bytes:
        """The bytes of a string."""
        _, size, place, *_ = self.strings[code].tolist()
        return self.pool[place : place + -(-size // 8)].tobytes()[:size]

    def texts(self) -> Iterator[bytes]:
        """All of them, by code."""
        return map(self.text, range(int(self.counts[kernel.STRINGS])))


class Meanings:
    """What strings stand for: a number for each, found when one is first asked for."""

    def __init__(self, strings: Strings, number: Callable[[bytes], int]) -> None:
        """Begin with none.

        Args:
            number: of the bytes of one.
        """
        self._strings = strings
        self._number = number
        self._known = np.full(strings.strings.shape[0], -1, np.int32)

    def of(self, codes: Ints) -> npt.NDArray[np.int32]:
        """The numbers of some.

        Args:
            codes: `[N]`.
        """
        numbers = self._known[codes]
        if numbers.size and numbers.min() < 0:
            for code in set(codes[numbers < 0].tolist()):
                self._known[code] = self._number(self._strings.text(code))
            numbers = self._known[codes]
        return numbers


class Scanner:
    """Reads spans and memory events into columns."""

    def __init__(self, columns: Columns, memory: Memory) -> None:
        """Begin without rows.

        Args:
            columns: to which spans are added, by `flush` at the latest.
        """
        self._columns = columns
        self._memory = memory
        self._rows = np.empty((kernel.COLUMNS, _ROWS), np.int64)
        self._marked = np.empty(_ROWS, np.int64)
        self._positions = np.full(_ROWS, -1, np.int32)
        self._count = 0
        self._refused = 0  # lists, less those that were taken
        self._make_room(_STRINGS)

    def _make_room(self, room: int) -> None:
        """Number strings anew, in a table for more of them."""
        columns, self._strings = self._columns, Strings(room)
        self._keys = _keys(self._strings)
        self._kinds = Meanings(self._strings, lambda text: columns.kinds[_decoded(text)])
        self._names = Meanings(self._strings, lambda text: columns.names[_decoded(text)])
        self._shapes = Meanings(self._strings, columns.shapes.__getitem__)
        self._detailed = Meanings(self._strings, lambda text: is_detailed(_decoded(text)))
        self._of_memory = Meanings(self._strings, lambda text: text == NAME.encode())
        self._communicate = Meanings(self._strings, lambda text: columns.communicates(_decoded(text)))

    def take(self, text: bytes) -> Scanned | None:
        """Read a list of events; None where it is refused, after which nothing of it has been taken.

        Args:
            text: from its bracket to its bracket, and `PADDING`.
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
        """Fill rows, in as much room as they need."""
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
        """Events that are neither spans nor of memory; the details of spans that have such are kept."""
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
        # Have spans like these be marked only where details of them are kept.
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
        """The typed decoder's view of some rows of a list."""
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
            # Numbers that are written as strings take the place of the codes of these strings.
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
    """What strings stand for as keys, by code: of an event, and of its arguments."""
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
    """The string of JSON whose bytes between quotes are given."""
    return msgspec.json.decode(b'"%b"' % text, type=str)


if __name__ == "__main__":  # beside a process that decodes meanwhile
    compile_beside(lambda: Scanner(Columns(), Memory()))
