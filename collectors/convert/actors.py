"""Method calls of Ray actors as spans in deep windows: the process's own, and those of others it waits for.

Reads the calls that the actors of a launch recorded and the spans of a window; returns the spans plus one for
each call, on the thread that made it, and one for each call of another actor while that thread is in no call.
So the phases of a driver that calls its actors in turn appear in the windows of each actor. Clocks of hosts
are not aligned here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import polars as pl

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.inside.files import ACTOR
from dpro.schema import MEANWHILE, SPANS, conform
from dpro.words import from_json

_SHARE = 3 << 30  # offset of these spans among the ids of a window


class Call(NamedTuple):
    """A call of an actor's method."""

    start_ns: int
    end_ns: int
    name: str
    tid: int


def calls_of(path: Path) -> Iterator[Call]:
    """Yield the calls that an actor recorded; damaged lines are skipped."""
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, LookupError, TypeError):
            said = from_json(line)
            call = Call(*(said[name] for name in Call._fields))
            if [type(value) for value in call] == [int, int, str, int]:
                yield call


def with_actor_calls(
    spans: pl.DataFrame, process: RecordedProcess, window: int, first: int, begin_ns: int | None
) -> pl.DataFrame:
    """Add the calls of actors to the spans of a window; unchanged where the process recorded no call in it.

    Args:
        first: the first id of the window.
        begin_ns: when the window began; None for the start of its first span.
    """
    its_path = process.folder.parent / f"{ACTOR}{process.facts['host']}-{process.facts['pid']}.jsonl"
    if spans.is_empty() or not its_path.is_file():
        return spans
    ends = spans["start_ns"] + spans["duration_ns"].clip(0)
    begin, end = int(spans["start_ns"].to_numpy().min()), int(ends.to_numpy().max())
    begin = begin if begin_ns is None else begin_ns
    calls = _within(calls_of(its_path), begin, end)
    if not calls:
        return spans
    paths = [path for path in sorted(process.folder.parent.glob(f"{ACTOR}*.jsonl")) if path != its_path]
    others = _within((call for path in paths for call in calls_of(path)), begin, end)
    rows = [
        {"span_id": first + _SHARE + number, "rank": process.rank, "window": window, "kind": "annotation"}
        | {"name": call.name, "start_ns": call.start_ns, "duration_ns": call.end_ns - call.start_ns}
        | {"pid": process.facts["pid"], "tid": call.tid}
        for number, call in enumerate([*calls, *waits(calls, others, begin, end)])
    ]
    return pl.concat([spans, conform(SPANS, pl.DataFrame(rows))]).sort(SPANS.sort_by, maintain_order=True)


def _within(noted: Iterator[Call], begin: int, end: int) -> list[Call]:
    """Return the calls that overlap [begin, end), clipped to it and ordered by start."""
    cut = (call._replace(start_ns=max(call.start_ns, begin), end_ns=min(call.end_ns, end)) for call in noted)
    return sorted(call for call in cut if call.start_ns < call.end_ns)


def waits(calls: Sequence[Call], others: Sequence[Call], begin: int, end: int) -> list[Call]:
    """Return the calls of other actors while an actor is in no call; of overlapping calls, the earliest.

    Args:
        calls: calls of the actor; its thread with the most time in calls is the one that waits.
        others: calls of other actors; like `calls`, ordered by start.
    """
    tids = {call.tid for call in calls}
    tid = max(tids, key=lambda tid: sum(call.end_ns - call.start_ns for call in calls if call.tid == tid))
    busy = [(call.start_ns, call.end_ns) for call in calls if call.tid == tid]
    rows, free = [], begin
    for start, stop in [*busy, (end, end)]:
        for call in others:
            since, until = max(call.start_ns, free), min(call.end_ns, start)
            if since < until:
                rows.append(Call(since, until, f"{MEANWHILE}{call.name}", tid))
                free = until
        free = max(free, stop)
    return rows
