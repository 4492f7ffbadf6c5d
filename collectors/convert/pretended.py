"""Collective calls of a pretended rank as tables; nothing waited and nothing was transferred.

Reads `pretendedNNNN.json` (the calls of a deep window), `pretended.json` (all other calls) and the spans of
the window; returns rows of `collectives`, and a span for each call of a window, as long as its answer took.
Each row has the time at which its caller asked for the result; a caller that waits for a future, as DDP does,
is assumed to ask at the end of its backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpro.collectors.convert.recorded import saved
from dpro.collectors.inside.files import PRETENDED
from dpro.members import members_text
from dpro.schema import COLLECTIVES, SPANS, conform

SOURCE = "pretended"
CALL_IDS = 1 << 60  # first id of calls outside windows
_WINDOW_SHARE = 1 << 31  # offset of these calls among the ids of a window: Kineto's are below
_LANES = 1 << 40  # first pseudo thread id: one per ordered lane of communication


def is_pretended(folder: Path) -> bool:
    """Return whether a process was a pretended rank."""
    return (folder / f"{PRETENDED}.json").exists() or any(folder.glob(f"{PRETENDED}[0-9]*.json"))


def calls_outside_windows(folder: Path, rank: int) -> pl.DataFrame:
    """Return the calls outside windows, as rows of `collectives`."""
    calls = _read(folder / f"{PRETENDED}.json")
    rows = [_row(call, rank, -1) | {"collective_id": CALL_IDS + number} for number, call in enumerate(calls)]
    return _frame(rows)


def with_pretended_calls(
    frames: Mapping[str, pl.DataFrame], path: Path, rank: int, window: int, first: int
) -> dict[str, pl.DataFrame]:
    """Add pretended calls to the tables of a window.

    Args:
        path: `pretendedNNNN.json`.
        first: the first id of the window.
    """
    spans = frames[SPANS.name]
    calls = _read(path)
    if not calls or spans.is_empty():
        return dict(frames)
    end = (spans["start_ns"] + spans["duration_ns"]).max()
    begin = spans["start_ns"].min()
    calls = [call for call in calls if begin <= call["begun_ns"] <= end]
    if not calls:
        return dict(frames)
    begun = np.array([call["begun_ns"] for call in calls], np.int64)
    issuers = spans.filter(pl.col("name").str.starts_with("c10d::"))
    issued = _last_enclosing(issuers, begun)
    backward = spans.filter(name="dpro::backward")
    backward_ends = backward["start_ns"] + backward["duration_ns"]
    within = _last_enclosing(backward, begun)
    lanes = {name: _LANES + number for number, name in enumerate(sorted(set(map(_lane, calls))))}
    pid, ids = int(spans["pid"][0]), first + _WINDOW_SHARE
    rows, made = [], []
    for number, call in enumerate(calls):
        lasts = max(call["ended_ns"] - call["begun_ns"], 0)
        asked = call["asked_ns"]
        if asked < 0:
            inside = call["future"] and within[number] >= 0
            asked = int(backward_ends[int(within[number])]) if inside else end
        rows.append(
            _row(call, rank, window)
            | {"collective_id": ids + number, "span_id": ids + number, "start_ns": call["begun_ns"]}
            | {"duration_ns": lasts, "asked_ns": max(asked, call["begun_ns"] + lasts)}
            | {"launch_span_id": issuers["span_id"][int(issued[number])] if issued[number] >= 0 else -1}
        )
        made.append(
            {"span_id": ids + number, "rank": rank, "window": window, "kind": "annotation", "pid": pid}
            | {"name": f"pretended:{call['op']}", "start_ns": call["begun_ns"], "duration_ns": lasts}
            | {"tid": lanes[_lane(call)]}
        )
    answers = conform(SPANS, pl.DataFrame(made))
    return {
        **frames,
        SPANS.name: pl.concat([spans.filter(~_computes_answer(spans, calls)), answers]),
        COLLECTIVES.name: pl.concat([frames[COLLECTIVES.name], _frame(rows)]),
    }


def _computes_answer(spans: pl.DataFrame, calls: Sequence[Mapping[str, Any]]) -> pl.Series:
    """Return [S] whether each span is an operator that computed an answer, which is not part of the job."""
    begun = np.array([call["begun_ns"] for call in calls], np.int64)
    ended = np.array([call["ended_ns"] for call in calls], np.int64)
    order = np.argsort(begun, kind="stable")
    start = spans["start_ns"].to_numpy()
    latest = np.searchsorted(begun[order], start, side="right") - 1
    over = ended[order][np.maximum(latest, 0)]
    made = (latest >= 0) & (start + spans["duration_ns"].to_numpy() <= over)
    return pl.Series(made & (spans["kind"] == "cpu_op").to_numpy())


def _lane(call: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return the lane in which calls run in order: collectives of a group, messages to or from a peer."""
    return call["group"], call["op"] if call["peer"] >= 0 else "", call["peer"]


def _last_enclosing(spans: pl.DataFrame, times: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, Any]:
    """Return [T] index of the last span that began before each time, if it had not ended; else -1."""
    starts = spans["start_ns"].to_numpy()
    order = np.argsort(starts, kind="stable")
    place = np.searchsorted(starts[order], times, side="right") - 1
    if not order.size:
        return np.full(times.size, -1)
    latest = order[np.maximum(place, 0)]
    ends = (spans["start_ns"] + spans["duration_ns"]).to_numpy()[latest]
    return np.where((place >= 0) & (ends >= times), latest, -1)


def _row(call: Mapping[str, Any], rank: int, window: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "window": window,
        "op": call["op"],
        "group": call["group"],
        "group_ranks": call["ranks"],
        "sequence": call["sequence"],
        "bytes_in": call["bytes_in"],
        "bytes_out": call["bytes_out"],
        "dtype": call["dtype"],
        "peer": call["peer"],
        "enqueued_ns": call["begun_ns"],
        "source": SOURCE,
        "state": "completed",
    }


def _frame(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    if not rows:
        return COLLECTIVES.empty()
    schema = {name: dtype for name, dtype in COLLECTIVES.dtypes.items() if name in rows[0]}
    return conform(COLLECTIVES, pl.DataFrame(rows, schema=schema, orient="row"))


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the calls of a file, each with the ranks of its group as text."""
    content = saved(path, [])
    if isinstance(content, list):  # written by an earlier version
        return [call | {"ranks": members_text(call["ranks"])} for call in content]
    texts = {name: members_text(ranks) for name, ranks in content["groups"].items()}
    return [call | {"ranks": texts[call["group"]]} for call in content["calls"]]
