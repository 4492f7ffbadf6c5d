"""Events before a job hung, in order of time: last steps, last calls, waiting ranks, ranks that were gone.

Takes a `Case`; returns a frame of events. Each is one of the job's own records, by the clock of the host that
made it. Does not say what caused what; findings do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import polars as pl

from dpro.detect.hang.case import Case, is_frozen
from dpro.detect.hang.evidence import name_of
from dpro.detect.hang.operations import Operation
from dpro.units import NS_PER_S, format_duration

MAX_AWAITED = 2  # operations listed per cause, besides the first
DAY_NS = 24 * 3600 * NS_PER_S
APART_NS = 1e6  # how far apart calls are is shown above this


class _Event(NamedTuple):
    time_ns: int
    ranks: tuple[int, ...]
    what: str


def story_info(case: Case) -> pl.DataFrame:
    """Return the events: `time_ns` (-1 unknown, first), `ranks` (list), `what`; in order of time."""
    events = [*_last_steps(case), *_waits(case), *_last_calls_of_absent(case), *_ends(case), *_saved(case)]
    schema = pl.Schema({"time_ns": pl.Int64(), "ranks": pl.List(pl.Int64()), "what": pl.String()})
    rows = [(one.time_ns, list(one.ranks), one.what) for one in events]
    return pl.DataFrame(rows, schema=schema, orient="row").unique().sort("time_ns", "what")


def last_calls(case: Case) -> pl.DataFrame:
    """Return the last call of each rank: `rank`, `time_ns` (-1 unknown), `call` in words."""
    number = pl.when(pl.col("sequence") >= 0).then(pl.format(" #{}", "sequence")).otherwise(pl.lit(""))
    group = pl.when(pl.col("group") == "").then(pl.lit("")).otherwise(pl.format(' of group "{}"', "group"))
    finished = (
        pl.when(pl.col("state") == "completed").then(pl.lit("finished")).otherwise(pl.lit("not finished"))
    )
    last = case.records.calls.sort("order").group_by("rank", maintain_order=True).last().sort("rank")
    return last.select(
        pl.col("rank").cast(pl.Int64),
        time_ns=pl.col("enqueued_ns"),
        call=pl.format("{}{}{}, {}", "op", number, group, finished),
    )


def _last_steps(case: Case) -> Iterator[_Event]:
    rows = case.records.ranks.filter((pl.col("last_step") >= 0) & (pl.col("last_step_ns") > 0))
    by_step = rows.group_by("last_step").agg(pl.col("rank").sort(), pl.col("last_step_ns").max())
    for step, ranks, time_ns in by_step.select("last_step", "rank", "last_step_ns").iter_rows():
        yield _Event(time_ns, tuple(ranks), f"step {step:,} ends, the last step")


def _awaited(case: Case) -> list[Operation]:
    """Return the operations that most ranks wait in, and the first of each cause, from which times count."""
    listed: dict[int, Operation] = {}
    for root in case.roots:
        first = [one for one in root.operations if one.since_ns == root.since_ns >= 0][:1]
        listed |= {id(one): one for one in (*root.operations[:MAX_AWAITED], *first)}
    return [*listed.values()]


def _waits(case: Case) -> Iterator[_Event]:
    for operation in _awaited(case):
        times = [call.enqueued_ns for call in operation.unfinished.values() if call.enqueued_ns > 0]
        apart = max(times, default=0) - min(times, default=0)
        later = f"; the last of them {format_duration(apart)} later" if apart > APART_NS else ""
        ranks = tuple(sorted(operation.unfinished))
        call = "calls" if len(ranks) == 1 else "call"  # a host may call it long before its GPU is that far
        if ranks:
            what = f"{call} {name_of(operation)}, which never finishes{later}"
            yield _Event(min(times, default=-1), ranks, what)


def _last_calls_of_absent(case: Case) -> Iterator[_Event]:
    absent = {rank: one for one in reversed(_awaited(case)) for rank in one.absent}
    last = {rank: (time_ns, call) for rank, time_ns, call in last_calls(case).iter_rows()}
    for rank, operation in absent.items():
        number = case.progress.issued.get((rank, operation.key), -1)
        if rank in last:
            time_ns, call = last[rank]
            yield _Event(time_ns, (rank,), f"makes its last call: {call}")
        elif number >= 0:  # its dump reports its progress but lists no calls
            yield _Event(-1, (rank,), f'makes its last call of group "{operation.group}": #{number}')


def _ends(case: Case) -> Iterator[_Event]:
    for death in case.deaths.values():
        yield _Event(death.ended_ns, (death.rank,), f"is gone: {death.how}")
    for rank, time_ns in case.left.items():
        yield _Event(time_ns, (rank,), "exits: its script ended without an error")
    beats: Sequence[tuple[int, int]] = case.records.ranks.select("rank", "heartbeat_ns").rows()
    for rank, time_ns in beats:
        if time_ns > 0 and is_frozen(rank, case):
            yield _Event(time_ns, (rank,), "runs for the last time: none of its threads runs later")


def _saved(case: Case) -> Iterator[_Event]:
    ranks = tuple(sorted(case.progress.current))
    since_ns = min((root.since_ns for root in case.roots if root.since_ns > 0), default=0)
    if ranks and 0 <= case.now_ns - since_ns < DAY_NS:  # else the time may be that of a copy of the dumps
        yield _Event(case.now_ns, ranks, "the latest record of their calls")
