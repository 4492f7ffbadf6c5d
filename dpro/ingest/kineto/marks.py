"""Events of a Kineto trace that are not whole spans: begin and end marks, and metadata.

In: decoded events, chunk by chunk. Out: a span for each begin with its end; the rank that metadata state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

from dpro.ingest.kineto.events import NO_ARGS, EventArguments, TraceEvent
from dpro.ingest.kineto.kinds import kind_of
from dpro.ingest.kineto.numbers import MISSING_NS, nanoseconds, whole_numbers

_BEGIN, _END, _METADATA = "B", "E", "M"
_MARKS = frozenset((_BEGIN, _END, _METADATA))
_RANK_MARKS = ("global_rank", "rank")
_NAME_MARKS = ("process_name", "process_labels")


class Marks:
    """Marks that were added.

    Attributes:
        rank: the rank that metadata state, -1 where they do not.
        rank_source: name of the metadata that state it.
    """

    def __init__(self) -> None:
        """Begin without marks."""
        self.rank = -1
        self.rank_source = ""
        self._ends: list[TraceEvent] = []

    def add(self, events: Iterable[TraceEvent]) -> None:
        """Take the marks of a chunk."""
        for event in [event for event in events if event.phase in _MARKS]:  # most are others: flow arrows
            if event.phase == _METADATA:
                self._note_rank(event)
            else:
                args = event.args or NO_ARGS
                self._ends.append(msgspec.structs.replace(event, args=unbound(args)))

    def _note_rank(self, event: TraceEvent) -> None:
        if self.rank < 0 and event.args:
            rank = _stated_rank(event.name, event.args)
            if rank >= 0:
                self.rank, self.rank_source = rank, event.name

    def spans(self) -> tuple[list[TraceEvent], int]:
        """Spans from each begin to its end, and the number of marks without the other.

        An end belongs to the last open begin on its thread, of its own name where it has one. What is neither
        a known category is a named range: that is what such marks are for.
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
            begin = _matching(opened, self._ends, event.name)
            if begin is None or times[begin] == MISSING_NS:
                unmatched += 1
                continue
            opened.remove(begin)
            spans.append(_span(self._ends[begin], times[begin], times[mark] - times[begin]))
        return spans, unmatched + sum(map(len, open_marks.values()))


def unbound(args: EventArguments) -> EventArguments:
    """The same arguments, of which nothing refers to the text of the chunk, so that it can be freed."""
    raw = {
        name: value.copy()
        for name in ("shapes", "shapes_2020", "types", "inputs")
        if isinstance(value := getattr(args, name), Raw) and bytes(value)
    }
    return msgspec.structs.replace(args, **raw) if raw else args


def _matching(opened: list[int], events: list[TraceEvent], name: str) -> int | None:
    return next((mark for mark in reversed(opened) if not name or events[mark].name == name), None)


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
    """As JSON text, which loses no digit."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return Raw(f"{sign}{ns // 1000}.{ns % 1000:03}".encode())


def _stated_rank(mark: str, args: EventArguments) -> int:
    """The rank in one piece of metadata, -1 where it states none."""
    if mark in _RANK_MARKS and args.value is not None:
        (rank,) = whole_numbers([args.value]).tolist()
        return int(rank)
    if mark in _NAME_MARKS:
        found = re.search(r"\brank[ _:=-]?(\d{1,9})\b", f"{args.name} {args.labels}", re.IGNORECASE)
        return int(found[1]) if found else -1
    return -1
