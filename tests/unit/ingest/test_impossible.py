"""Spans whose times cannot be are left out, or moved with their device; what may be is never touched."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.ingest.impossible import (
    ABSURD,
    BELATED,
    CLOCKS_NS,
    EARLY,
    LONGEST_NS,
    MOVED,
    OVERLAP_NS,
    UNORDERED,
    ascending,
    drop_impossible,
    impossible_in_words,
)
from dpro.opening import open_path
from dpro.schema import SPANS
from tests.builders import COMM, COMPUTE, TinyRun
from tests.commands import dpro

DAY_US, HOUR_US = LONGEST_NS // 1000, 3.6e9


def queue(lengths=(50.0,) * 8) -> TinyRun:
    """Kernels that are launched every 12 us and run one after the other on a stream."""
    run, free = TinyRun(), 20.0
    for number, length in enumerate(lengths):
        run.call(12 * number, 12 * number + 10, number + 1)
        run.kernel(f"kernel {number}", free, free + length, number + 1)
        free += length
    return run


def kept_of(run: TinyRun) -> tuple[list[str], dict[str, int], pl.DataFrame]:
    """The names of GPU work that is kept, the counts of the rest, and all spans that are kept."""
    rows = [{"tid": -1, "device": -1, "stream": -1, "correlation": -1} | row for row in run.rows[SPANS.name]]
    columns = {name: dtype for name, dtype in SPANS.dtypes.items() if name in rows[0]}
    spans, counts = drop_impossible(pl.DataFrame(rows, schema_overrides=columns))
    return spans.filter(pl.col("stream") >= 0)["name"].to_list(), dict(counts), spans


def changed(run: TinyRun, name: str, **values: float) -> TinyRun:
    """The run with other times (us) of a span."""
    row = next(row for row in run.rows[SPANS.name] if row["name"] == name)
    row.update({f"{key}_ns": round(value * 1000) for key, value in values.items()})
    return run


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ({"start": -31 * DAY_US}, ABSURD),
        ({"duration": 7.4e15}, ABSURD),
        ({"duration": 600e6}, UNORDERED),
        ({"start": HOUR_US}, UNORDERED),
        ({"start": -100e6}, EARLY),
    ],
)
def test_one_kernel_of_impossible_times_is_left_out_and_no_other(times, reason):
    names, counts, _ = kept_of(changed(queue(), "kernel 3", **times))
    assert names == [f"kernel {number}" for number in (0, 1, 2, 4, 5, 6, 7)]
    assert counts == {reason: 1}


def test_kernels_that_follow_each_other_an_hour_late_are_all_found():
    run = changed(queue(), "kernel 3", start=HOUR_US)
    names, counts, _ = kept_of(changed(run, "kernel 4", start=HOUR_US + 50))
    assert names == [f"kernel {number}" for number in (0, 1, 2, 5, 6, 7)]
    assert counts == {UNORDERED: 2}


def test_the_last_kernels_an_hour_after_all_else_are_left_out_and_one_behind_a_long_queue_is_not():
    run = changed(queue(), "kernel 6", start=HOUR_US)
    names, counts, _ = kept_of(changed(run, "kernel 7", start=HOUR_US + 50))
    assert names == [f"kernel {number}" for number in range(6)]
    assert counts == {BELATED: 2}
    run = queue()
    for number in range(8):  # behind what was launched before recording began
        changed(run, f"kernel {number}", start=60e6 + 50 * number)
    assert kept_of(run)[1] == {}


def test_an_operator_of_centuries_is_left_out_and_one_that_waits_for_an_hour_is_not():
    run = queue()
    run.op("waits", 0, HOUR_US)
    run.op("centuries", 5, 7.4e15)
    _, counts, spans = kept_of(run)
    assert counts == {ABSURD: 1}
    assert "waits" in spans["name"]


def test_an_annotation_of_the_device_that_lasts_as_long_as_an_impossible_kernel_goes_with_it():
    run = changed(queue(), "kernel 3", duration=600e6)
    run.kernel("range of it", 20, 600e6, kind="gpu_annotation", stream=COMPUTE)
    run.kernel("range of others", 20, 420, kind="gpu_annotation", stream=COMPUTE)
    assert "range of it" not in kept_of(run)[0]
    assert "range of others" in kept_of(run)[0]


def test_what_may_be_is_left_as_it_is():
    run = queue()
    run.kernel("beside it on another stream", 30, 9_000, 3, stream=COMM)
    run.call(100, 110, 100, name="cudaGraphLaunch")
    for number, end in enumerate((9_000, 4_000, 7_000)):  # parallel branches of a graph
        run.kernel(f"branch {number}", 420 + number, end, 100)
    run.kernel("launched ahead of time", 8_990, 9_000 + OVERLAP_NS // 1000, 101)
    run.kernel("on a clock that is not quite the host's", 18_000 - CLOCKS_NS // 2000, 14_000, 102)
    run.call(18_000, 18_010, 102)
    run.op("outer", 0, 20_000)
    run.op("inner, longer by rounding", 19_000, 20_001)
    _, counts, spans = kept_of(run)
    assert counts == {}
    assert spans.height == len(run.rows[SPANS.name])


def test_a_device_whose_clock_is_a_day_early_is_moved_as_a_whole():
    run = queue()
    for row in run.rows[SPANS.name]:
        row["start_ns"] -= LONGEST_NS * ("device" in row)
    _, counts, spans = kept_of(run)
    assert counts == {MOVED: 8}
    work = spans.filter(pl.col("stream") >= 0)["start_ns"]
    assert work.diff().drop_nulls().to_list() == [50_000] * 7
    assert 0 <= work[0] < 1_000_000


def test_one_line_says_what_was_left_out_and_moved():
    assert impossible_in_words("a.json", {"malformed events": 3}) == []
    (line,) = impossible_in_words("a.json", {EARLY: 1, UNORDERED: 2, MOVED: 8})
    assert line.startswith("a.json: 3 spans with impossible times left out, and 8 spans moved")


@given(st.lists(st.integers(0, 9), max_size=12))
def test_the_longest_ascending_subsequence_is_as_long_as_trying_all_finds(values):
    chosen = np.array(values, np.int64)[ascending(np.array(values, np.int64))].tolist()
    assert chosen == sorted(chosen)
    longest = [0] * len(values)
    for place, value in enumerate(values):
        longest[place] = 1 + max((longest[at] for at in range(place) if values[at] <= value), default=0)
    assert len(chosen) == max(longest, default=0)


def kineto_of(run: TinyRun, at_us: float) -> str:
    """The JSON of a run's spans, which begin at a time of the clock."""
    category = {"runtime": "cuda_runtime", "kernel": "kernel", "annotation": "user_annotation"}
    events = [
        {"ph": "X", "cat": category[row["kind"]], "name": row["name"], "ts": at_us + row["start_ns"] / 1000,
         "dur": row["duration_ns"] / 1000, "pid": row.get("device", 1), "tid": row.get("stream", 1),
         "args": {"correlation": row.get("correlation", -1)}}
        for row in run.rows[SPANS.name]
    ]  # fmt: skip
    return json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0, "world_size": 1}})


def steps_of(count: int = 40) -> TinyRun:
    """Steps of three kernels each, marked by the profiler."""
    run = TinyRun()
    for step in range(count):
        at = 500 * step
        run.mark(f"ProfilerStep#{step}", at, at + 490)
        for number in range(3):
            run.call(at + 20 * number, at + 20 * number + 10, 10 * step + number + 1)
            run.kernel("gemm", at + 30 + 130 * number, at + 150 + 130 * number, 10 * step + number + 1)
    return run


@pytest.mark.usefixtures("empty_cache")
def test_a_trace_with_impossible_times_gives_the_answer_of_the_others_and_is_trusted_less(tmp_path):
    sound, damaged = tmp_path / "sound.json", tmp_path / "damaged.json"
    sound.write_text(kineto_of(steps_of(), 1.7e15))
    run = steps_of()
    kernels = [row for row in run.rows[SPANS.name] if row["kind"] == "kernel"]
    for number, (start, duration) in enumerate(((-1.7e18, 0), (None, 6e11), (3.6e12, None))):
        row = kernels[30 * (number + 1)]
        row["start_ns"] = row["start_ns"] if start is None else round(start)
        row["duration_ns"] = row["duration_ns"] if duration is None else round(duration)
    damaged.write_text(kineto_of(run, 1.7e15))
    answers = [json.loads(dpro("explain", path, "--json").stdout) for path in (sound, damaged)]
    assert answers[1]["step_ms"] == pytest.approx(answers[0]["step_ms"], rel=0.02)
    assert answers[1]["limit"]["kind"] == answers[0]["limit"]["kind"]
    assert any("3 spans with impossible times left out or moved" in line for line in answers[1]["unsure"])
    manifest = open_path(damaged).manifest
    assert manifest.num_impossible == 3
    assert [line for line in manifest.warnings if "impossible" in line] == [
        "damaged.json: 3 spans with impossible times left out; record again before relying on it"
    ]
    scores = [
        json.loads(dpro("replay", path, "--json").stdout)["trust"]["score"] for path in (sound, damaged)
    ]
    assert scores[1] < scores[0]
