"""Events of a Kineto trace as compact columns.

Takes decoded events, chunk by chunk; returns frames, sorted by time, with the columns of `spans`, and the
rarer arguments of the few events that communicate or synchronise. Nothing else of an event is kept. Rows are
not related to each other.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from dpro.arrays import Ints
from dpro.classify import is_communication
from dpro.ingest.kineto.events import (
    GPU_KINDS,
    KINDS,
    MISSING_NS,
    NO_ARGS,
    SYNC,
    EventArguments,
    TraceEvent,
    is_frame,
    kind_of,
    nanoseconds,
    unbound,
    whole_numbers,
)
from dpro.ingest.reading.symbols import demangled

Array = npt.NDArray[Any]

_CODES = {kind: code for code, kind in enumerate(KINDS)}
UNTAKEN, FRAME = len(KINDS), len(KINDS) + 1  # codes of events that are not spans
KERNEL, PYTHON, SYNC_KIND = (_CODES[kind] for kind in ("kernel", "python", SYNC))
_ON_GPU = np.isin(np.arange(len(KINDS)), [_CODES[kind] for kind in GPU_KINDS])
_ON_CPU = ~_ON_GPU & (np.arange(len(KINDS)) != SYNC_KIND)
_DETAILED = re.compile(r"nccl:|gloo:|c10d::|record_param_comms$")


class ValueCodes(dict[Any, int]):
    """A code for every value: the result of a function, else the order of first appearance."""

    def __init__(self, number: Callable[[Any], int] | None = None) -> None:
        """Begin without values."""
        self._number = number

    def __missing__(self, value: Any) -> int:
        """Assign a code to a new value."""
        number = self[value] = len(self) if self._number is None else self._number(value)
        return number

    def of(self, values: Sequence[Any], dtype: type[np.generic]) -> Array:
        """Return [N] codes of [N] values."""
        return np.fromiter(map(self.__getitem__, values), dtype, len(values))


class Columns:
    """Columns of all events that were added.

    Attributes:
        details: rare arguments, by a frame's `position`.
        lost: number of events left out, by reason.
        names: codes of names.
        shapes: codes of JSON texts.
        kinds: codes of kinds, by category; `UNTAKEN` and `FRAME` are not spans.
    """

    def __init__(self) -> None:
        """Begin without rows."""
        self.details: list[EventArguments] = []
        self.lost: Counter[str] = Counter()
        self._parts: defaultdict[str, list[Array]] = defaultdict(list)
        self.names = ValueCodes()
        self.shapes = ValueCodes()
        self.kinds = ValueCodes(_kind_code)
        self._texts: list[str] = []  # this and the next are indexed by code of a name
        self._detailed: Array = np.zeros(0, dtype=np.bool_)
        self._communicates = ValueCodes(is_communication)

    def add(self, spans: list[TraceEvent]) -> None:
        """Add the complete events (phase X) of a chunk."""
        kinds = self.kinds.of([event.category for event in spans], np.uint8)
        if kinds.size and kinds.max() >= UNTAKEN:
            for event, kind in zip(spans, kinds.tolist()):
                if kind == UNTAKEN:
                    self.note_untaken(event.category, 1)
            spans = [event for event, kind in zip(spans, kinds.tolist()) if kind < UNTAKEN]
            kinds = kinds[kinds < UNTAKEN]
        if not spans:
            return
        pids = whole_numbers([event.pid for event in spans])
        tids = whole_numbers([event.tid for event in spans])
        names = self.names.of([event.name for event in spans], np.int32)
        on_cpu = _ON_CPU[kinds]
        self._add(
            kind=kinds,
            name=names,
            start_ns=nanoseconds([event.time for event in spans]),
            duration_ns=nanoseconds([event.duration for event in spans]),
            pid=np.where(on_cpu, pids, -1),
            tid=np.where(on_cpu, tids, -1),
        )
        on_gpu = np.flatnonzero(_ON_GPU[kinds])
        self._add_gpu([spans[row].args or NO_ARGS for row in on_gpu.tolist()], pids[on_gpu], tids[on_gpu])
        self._add_arguments(spans, kinds, names)

    def add_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Add spans by columns, without `UNTAKEN` and `FRAME`.

        Args:
            arrays: [N] by column of `spans`, and `external_id_2021`; names and shapes are codes.
        """
        taken = np.flatnonzero(arrays["kind"] < UNTAKEN)
        kind = arrays["kind"][taken]
        on_cpu, on_gpu, rich = _ON_CPU[kind], taken[_ON_GPU[kind]], taken[kind != PYTHON]
        self._add(kind=kind, **{name: arrays[name][taken] for name in ("name", "start_ns", "duration_ns")})
        self._add(**{name: np.where(on_cpu, arrays[name][taken], -1) for name in ("pid", "tid")})
        self._add_places(*(arrays[name][on_gpu] for name in ("device", "stream", "bytes", "pid", "tid")))
        external = arrays["external_id"][rich]
        self._add(
            external_id=np.where(external < 0, arrays["external_id_2021"][rich], external),
            **{name: arrays[name][rich] for name in _RICH},
        )

    def note_untaken(self, category: str | None, count: int) -> None:
        """Count events of a category that is left out."""
        self.lost[f"category {category or '(none)'}"] += count

    def communicates(self, kernel: str) -> bool:
        """Return whether a kernel communicates, by its name."""
        return bool(self._communicates[kernel])

    def keep(self, args: EventArguments) -> int:
        """Keep the details of a span; return their position."""
        self.details.append(unbound(args))
        return len(self.details) - 1

    def _add(self, **columns: Array) -> None:
        for name, part in columns.items():
            self._parts[name].append(part)

    def _add_gpu(self, args: list[EventArguments], pids: Array, tids: Array) -> None:
        device, stream = whole_numbers([a.device for a in args]), whole_numbers([a.stream for a in args])
        self._add_places(device, stream, whole_numbers([a.bytes for a in args]), pids, tids)

    def _add_places(self, device: Array, stream: Array, moved: Array, pids: Array, tids: Array) -> None:
        """Add device and stream of GPU work; where arguments lack them, process and thread are used."""
        device = np.where(device < 0, pids, device)
        self._add(
            device=np.where(np.abs(device) < 1 << 31, device, -1).astype(np.int32),
            stream=np.where(stream < 0, tids, stream),
            bytes=moved,
        )

    def _add_arguments(self, spans: list[TraceEvent], kinds: Array, names: Array) -> None:
        """Add columns of all spans but Python calls, and details of communication and synchronisation."""
        chosen = kinds != PYTHON
        args = [event.args or NO_ARGS for event in compress(spans, chosen.tolist())]
        external = whole_numbers([a.external_id for a in args])
        unknown = np.flatnonzero(external < 0)
        external[unknown] = whole_numbers([args[row].external_id_2021 for row in unknown.tolist()])
        self._add(
            correlation=whole_numbers([a.correlation for a in args]),
            external_id=external,
            sequence_number=whole_numbers([a.sequence_number for a in args]),
            forward_thread=whole_numbers([a.forward_thread for a in args]),
            shapes=self.shapes.of(_shapes(args), np.int32),
            position=self._positions(args, kinds[chosen], names[chosen]),
        )

    def _positions(self, args: list[EventArguments], kinds: Array, names: Array) -> Array:
        """Keep the details of relevant events; return their positions, -1 where none are kept."""
        if len(self._texts) < len(self.names):
            self._texts.extend(islice(self.names, len(self._texts), None))
            new = self._texts[self._detailed.size :]
            self._detailed = np.append(self._detailed, [is_detailed(text) for text in new])
        detailed = self._detailed[names] | (kinds == SYNC_KIND)
        kernels = np.flatnonzero(kinds == KERNEL)
        kernel_names = [self._texts[name] for name in names[kernels].tolist()]
        detailed[kernels] = self._communicates.of(kernel_names, np.bool_)
        positions = np.full(len(args), -1, dtype=np.int32)
        kept = np.flatnonzero(detailed)
        positions[kept] = np.arange(len(self.details), len(self.details) + kept.size)
        self.details.extend(unbound(args[row]) for row in kept.tolist())
        return positions

    def frames(self, base_ns: int) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return spans, and the events that explain synchronising calls, by start and then the longer first.

        Columns are built one after the other and their source is freed, so this may be called once.

        Args:
            base_ns: added to every time, ns.
        """
        if not self._parts:
            return _empty(), _empty()
        start, duration = self._take("start_ns"), self._take("duration_ns")
        timed = (start != MISSING_NS) & (duration >= 0)
        if not timed.all():
            self.lost["spans without a time or duration"] += int((~timed).sum())
        kind = self._take("kind")
        start += base_ns
        orders = [
            _by_time(start, duration, np.flatnonzero(timed & which))
            for which in (kind != SYNC_KIND, kind == SYNC_KIND)
        ]
        # Row of each span in the columns that only part of the spans have; -1 where it has none.
        parts = {"gpu": _ON_GPU[kind], "rich": kind != PYTHON}
        rows = {"all": list(orders)}
        for name, has in parts.items():
            places = np.where(has, np.cumsum(has, dtype=np.int64) - 1, -1)
            rows[name] = [places[order] for order in orders]
        frames: tuple[list[pl.Series], ...] = ([], [])
        for name, part_of in _LAYOUT.items():
            column = {"kind": kind, "start_ns": start, "duration_ns": duration}.get(name)
            if column is None:
                column = self._take(name, *([] if part_of == "all" else [-1]))
            for part, series in zip(rows[part_of], frames):
                series.append(self._series(name, column[part]))
            del column
        spans, syncs = (pl.DataFrame(series) for series in frames)
        return spans, syncs

    def _take(self, name: str, *more: int) -> Array:
        """Return a whole column with more values appended, and free its parts."""
        parts = self._parts.pop(name)
        return np.concatenate([*parts, np.array(more, dtype=parts[0].dtype)])

    def _series(self, name: str, column: Array) -> pl.Series:
        """Replace codes by their values; -1 by an empty text."""
        if name == "shapes":
            column = np.where(column < 0, len(self.shapes), column)
        series = pl.Series(name, column)
        if name == "kind":
            return pl.Series(name, KINDS, dtype=pl.Enum(KINDS)).gather(series)
        if name == "name":
            return pl.Series(name, [*map(demangled, self.names)], dtype=pl.String).gather(series)
        if name == "shapes":
            return pl.Series(name, [*map(_dense, self.shapes), ""], dtype=pl.String).gather(series)
        return series


_RICH = ("correlation", "sequence_number", "forward_thread", "shapes", "position")
# Columns in order, and the part of the rows that has them.
_LAYOUT = {
    "kind": "all",
    "name": "all",
    "start_ns": "all",
    "duration_ns": "all",
    "pid": "all",
    "tid": "all",
    "device": "gpu",
    "stream": "gpu",
    "correlation": "rich",
    "external_id": "rich",
    "sequence_number": "rich",
    "forward_thread": "rich",
    "bytes": "gpu",
    "shapes": "rich",
    "position": "rich",
}


def is_detailed(name: str) -> bool:
    """Return whether the details of CPU spans with a name are kept."""
    return bool(_DETAILED.match(name))


def _shapes(args: list[EventArguments]) -> list[bytes]:
    """Return shapes as written; empty where there are none, the most common case, which is tested first."""
    none = NO_ARGS.shapes
    return [
        b"" if a.shapes is none and a.shapes_2020 is none else bytes(a.shapes) or bytes(a.shapes_2020)
        for a in args
    ]


def _kind_code(category: str | None) -> int:
    kind = kind_of(category)
    return _CODES[kind] if kind else FRAME if is_frame(category) else UNTAKEN


def _by_time(start: Array, duration: Array, rows: Array) -> Array:
    """Return the rows by start; of those with equal starts, the longer first."""
    rows = rows[np.argsort(start[rows], kind="stable")]
    tied = start[rows[1:]] == start[rows[:-1]]
    if tied.any():
        together = np.flatnonzero(np.append(tied, False) | np.append(False, tied))
        among = rows[together]
        rows[together] = among[np.lexsort((-duration[among], start[among]))]
    return rows


def _dense(text: bytes) -> str:
    """Return JSON without blanks; empty for null."""
    dense = b"".join(text.split()).decode("utf-8", errors="replace")
    return "" if dense == "null" else dense


def _empty() -> pl.DataFrame:
    return pl.DataFrame(schema=dict.fromkeys(_LAYOUT, pl.Int64) | {"name": pl.String, "shapes": pl.String})


# Memory events of a Kineto trace: bytes allocated and reserved after each call of the allocator.

ALLOCATED, RESERVED = "memory_allocated_bytes", "memory_reserved_bytes"
INSTANT = "i"
NAME = "[memory]"
_CPU = 0  # PyTorch's number of that device type
_COLUMNS = {"device": pl.String, "counter": pl.String, "time_ns": pl.Int64, "value": pl.Float64}


class Memory:
    """Memory events that were added.

    Attributes:
        without_total: number of events with an allocation but without the total in use, as in PyTorch before
            2022.
    """

    def __init__(self) -> None:
        """Begin without events."""
        self.without_total = 0
        self._parts: list[tuple[Ints, ...]] = []

    def add(self, events: Iterable[TraceEvent]) -> None:
        """Add the memory events of a chunk."""
        samples = [event for event in events if event.phase == INSTANT and event.name == NAME]
        if not samples:
            return
        args = [event.args or NO_ARGS for event in samples]
        columns = [nanoseconds([event.time for event in samples])]
        columns += [
            whole_numbers(event)
            for event in (
                [a.device_type for a in args],
                [a.device_id for a in args],
                [a.allocated for a in args],
                [a.reserved for a in args],
            )
        ]
        self.add_arrays(*columns)

    def add_arrays(
        self,
        time_ns: Ints,
        kind: Ints,
        number: Ints,
        allocated: Ints,
        reserved: Ints,
    ) -> None:
        """Add memory events by columns.

        Args:
            time_ns: [N]; `MISSING_NS` without a time.
            kind: [N] PyTorch's number of the device type.
            number: [N] number of the device among those of its type.
            allocated: [N] bytes in use; negative where unknown.
            reserved: [N] bytes that the allocator holds.
        """
        columns = time_ns, kind, number, allocated, reserved
        is_known = (time_ns != MISSING_NS) & (allocated >= 0)
        self.without_total += int((~is_known).sum())
        self._parts.append(tuple(column[is_known] for column in columns))

    def rows(self, base_ns: int) -> pl.DataFrame:
        """Return rows of `counters`, without those that repeat the previous value.

        Args:
            base_ns: added to every time, ns.
        """
        if not self._parts:
            return pl.DataFrame(schema=_COLUMNS)
        time, kind, number, allocated, reserved = map(np.concatenate, zip(*self._parts, strict=True))
        on_cpu = kind == _CPU
        wide = pl.DataFrame(
            {
                "on_cpu": on_cpu,
                "number": np.where(on_cpu, -1, number),
                "time_ns": time + base_ns,
                ALLOCATED: allocated,
                RESERVED: reserved,
            }
        )
        devices = {
            "" if is_cpu else f"gpu {device}": events.sort("time_ns", maintain_order=True)
            for (is_cpu, device), events in wide.partition_by("on_cpu", "number", as_dict=True).items()
        }
        changes = [
            _changes(events, device, counter)
            for device, events in sorted(devices.items())
            for counter in ([ALLOCATED, RESERVED] if device else [ALLOCATED])  # CPUs reserve none
        ]
        return pl.concat([pl.DataFrame(schema=_COLUMNS), *changes])


def _changes(events: pl.DataFrame, device: str, counter: str) -> pl.DataFrame:
    value = pl.col(counter)
    return events.filter(value.ne_missing(value.shift(1))).select(
        device=pl.lit(device),
        counter=pl.lit(counter),
        time_ns="time_ns",
        value=value.cast(pl.Float64),
    )
