"""What the host did in each step, from the recorder's running totals.

In: records of one process, and its step boundaries. Out: rows of `counters`; times of steps on the device.

Counters that begin with `step_` are about one whole step, the one of that rank that starts at `time_ns`.
`data_wait_ns`, `gc_pause_ns` and `checkpoint_save_ns` are single intervals of a millisecond or more that
start at `time_ns`, `loader_start_ns` is one of any length; `loss` is a number whose gradients were asked for.
What was not measured at both ends of a step has no row.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from dpro.collectors.inside import records
from dpro.collectors.inside.steps.stepping import Boundary
from dpro.schema import COUNTERS

LOSS = "loss"
FLOAT, INTEGER = struct.Struct("<d"), struct.Struct("<q")
_TOTALS = {  # kind of record -> what its values after the time are
    records.CPU: ("step_cpu_ns", "step_training_thread_cpu_ns", "step_run_queue_ns"),
    records.WORK: ("step_backward_calls", "step_gc_ns", "step_data_wait_ns"),
    records.INPUT: ("step_input_elements",),
    records.ASIDE: ("step_checkpoint_ns", "step_no_grad_ns", "step_compile_ns"),
}
_SCHEMA = {name: COUNTERS.dtypes[name] for name in ("device", "counter", "time_ns", "value")}


def host_counters(recorded: Sequence[records.Record], boundaries: Mapping[int, Boundary]) -> pl.DataFrame:
    """What a process measured of its host.

    Returns:
        `[device, counter, time_ns, value]`.
    """
    frames = [_intervals(recorded)]
    for kind, counters in _TOTALS.items():
        totals = np.array([tuple(each[:4]) for each in recorded if each.kind == kind], np.int64)
        if len(totals) and boundaries:
            frames.append(_per_step(totals, boundaries, counters))
    return pl.concat(frames)


def device_times(recorded: Sequence[records.Record], boundaries: Mapping[int, Boundary]) -> dict[int, int]:
    """How long steps took on the device, ns, by number; those that it did not time are missing.

    The process numbers steps before it knows for sure what ends them: its records say when a step began and
    ended, and count where that is at two boundaries in a row.
    """
    timed = np.array([tuple(each[:3]) for each in recorded if each.kind == records.GPU_STEP], np.int64)
    if not len(timed) or not boundaries:
        return {}
    numbers = np.array(list(boundaries), np.int64)
    ends, resumes = np.array([tuple(each) for each in boundaries.values()], np.int64).T
    begun, ended = (np.searchsorted(resumes, timed[:, column]) for column in (0, 1))
    last = len(numbers) - 1
    at_ends = (ended == begun + 1) & (ended <= last)
    begun, ended, timed = begun[at_ends], ended[at_ends], timed[at_ends]
    follows = (
        (numbers[ended] == numbers[begun] + 1) & (timed[:, 0] >= ends[begun]) & (timed[:, 1] >= ends[ended])
    )
    return dict(zip(numbers[ended][follows].tolist(), timed[follows, 2].tolist(), strict=True))


def _intervals(recorded: Sequence[records.Record]) -> pl.DataFrame:
    """Single long intervals."""
    rows = [row for each in recorded for row in _interval(each)]
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def _interval(record: records.Record) -> list[tuple[str, str, int, float]]:
    """`device`, `counter`, `time_ns`, `value` of a record that is about one interval."""
    start, duration = record.a, float(record.b)
    if record.kind == records.LOADED:
        worker = "" if record.c < 0 else f"DataLoader worker {record.c}"
        return [(worker, "data_wait_ns", start, duration)]
    if record.kind == records.COLLECTED:
        return [("", "gc_pause_ns", start, duration)]
    if record.kind == records.BEGUN:
        persist = "persistent " if record.d else ""
        return [(f"{record.c} {persist}workers", "loader_start_ns", start, duration)]
    if record.kind == records.LOSS:
        return [("", LOSS, start, FLOAT.unpack(INTEGER.pack(record.b))[0])]
    if record.kind == records.SAVED:
        size = [("", "checkpoint_save_bytes", start, float(record.c))] if record.c >= 0 else []
        return [("", "checkpoint_save_ns", start, duration), *size]
    return []


def _per_step(
    totals: np.ndarray, boundaries: Mapping[int, Boundary], counters: Sequence[str]
) -> pl.DataFrame:
    """Differences of totals from one boundary to the next.

    Args:
        totals: `[N, 4]` int64: time, then the totals so far; -1 where unknown.
    """
    numbers = np.array(list(boundaries), np.int64)
    ends, resumes = np.array([tuple(each) for each in boundaries.values()], np.int64).T
    times = totals[:, 0]
    # At a boundary there is one sample, or two where our own work was long: the first ends a step, the last
    # begins the next.
    first, last = np.searchsorted(times, ends), np.searchsorted(times, resumes, side="right") - 1
    sampled = first <= last
    whole = sampled[1:] & sampled[:-1] & (np.diff(numbers) == 1)
    begin, end = totals[last[:-1][whole]], totals[first[1:][whole]]
    frames = []
    for column, counter in enumerate(counters, start=1):
        known = (begin[:, column] >= 0) & (end[:, column] >= 0)
        value = (end[:, column] - begin[:, column])[known]
        columns = {
            "device": pl.repeat("", len(value), eager=True),
            "counter": pl.repeat(counter, len(value), eager=True),
            "time_ns": resumes[:-1][whole][known],
            "value": value.astype(np.float64),
        }
        frames.append(pl.DataFrame(columns, schema=_SCHEMA))
    return pl.concat(frames)
