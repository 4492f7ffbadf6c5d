"""Jobs that become slower, and jobs that do not."""

from __future__ import annotations

import re

import numpy as np
import polars as pl
import pytest

from dpro.detect.regression import (
    _beginning_of_growth,
    chance_to_last,
    find_regression,
    slow_periods,
)
from dpro.schema import COUNTERS, SPANS, STEPS, WORKERS, conform

MS = 1_000_000
GPUS = conform(
    WORKERS, pl.DataFrame({"rank": [0, 1], "host": "n1", "gpu_uuid": ["GPU-uuid-7", "GPU-uuid-8"]})
)
BEGIN = 1_700_000_000_000_000_000


def job(times_ms: np.ndarray, ranks: int = 2, windows: tuple[int, ...] = ()) -> pl.DataFrame:
    """Steps of a job; a window is a step that takes twice as long, being recorded."""
    duration = np.rint(times_ms * MS).astype(np.int64)
    duration[list(windows)] *= 2
    start = BEGIN + np.cumsum(duration) - duration
    window = np.full(duration.size, -1, np.int32)
    window[list(windows)] = np.arange(len(windows))
    frames = [
        pl.DataFrame(
            {"rank": rank, "step": np.arange(duration.size), "start_ns": start, "duration_ns": duration}
        ).with_columns(window=pl.Series(window))
        for rank in range(ranks)
    ]
    return conform(STEPS, pl.concat(frames).with_columns(pl.col("rank").cast(pl.Int32)))


def steady(count: int, level_ms: float = 100.0, seed: int = 0) -> np.ndarray:
    return level_ms * np.exp(np.random.default_rng(seed).normal(0, 0.02, count))


def slower_from(at: int, times: float, count: int = 300) -> np.ndarray:
    values = steady(count)
    values[at:] *= times
    return values


def counter(name: str, rows: list[tuple[int, float]], rank: int = -1, device: str = "") -> pl.DataFrame:
    """Values by time since the beginning, ns."""
    frame = pl.DataFrame(
        {"time_ns": [BEGIN + time for time, _ in rows], "value": [value for _, value in rows]},
        schema={"time_ns": pl.Int64, "value": pl.Float64},
    )
    constants = {"rank": pl.lit(rank, pl.Int32), "host": pl.lit("n1"), "device": pl.lit(device)}
    return conform(COUNTERS, frame.with_columns(counter=pl.lit(name), **constants))


def findings(steps: pl.DataFrame, counters: pl.DataFrame | None = None, spans: pl.DataFrame | None = None):
    counters = COUNTERS.empty() if counters is None else counters
    spans = SPANS.empty() if spans is None else spans
    return find_regression(steps, GPUS, lambda: counters, lambda: spans)


def unread() -> pl.DataFrame:
    raise AssertionError("read without need")


def test_job_that_becomes_slower_is_reported_with_since_when_and_by_how_much():
    (finding,) = findings(job(slower_from(200, 1.15)))
    assert finding.class_ == "slow.regression"
    assert finding.cost_ns == pytest.approx(15 * MS, rel=0.1)
    assert finding.severity == pytest.approx(0.13, abs=0.02)
    assert finding.confidence > 0.95
    since = int(finding.evidence[0].split()[2])
    assert abs(since - 200) <= 2
    assert finding.evidence[1] == "nothing else in the recording shows what changed then"


@pytest.mark.parametrize("seed", range(5))
def test_steady_job_is_left_alone(seed):
    assert findings(job(steady(1000, seed=seed))) == []


def test_slow_beginning_is_no_regression():
    values = steady(300)
    values[:40] *= 1.5
    assert findings(job(values)) == []


def test_slow_spell_that_is_over_is_no_regression():
    values = steady(300)
    values[100:150] *= 1.5
    assert findings(job(values)) == []


def test_job_that_never_gets_back_to_its_best_is_compared_with_that():
    values = steady(400)
    values[100:200] *= 1.5
    values[200:] *= 1.2
    (finding,) = findings(job(values))
    assert finding.cost_ns == pytest.approx(20 * MS, rel=0.15)
    assert abs(int(finding.evidence[0].split()[2]) - 100) <= 2


def test_a_job_that_is_back_at_its_best_for_a_while_is_slower_since_it_left_it_for_good():
    # Slower for 200 steps, then within a fiftieth of the best, and slower to the end.
    values = np.repeat([100.0, 150.0, 102.0, 130.0], 200) + np.tile([0.5, -0.5], 400)
    (finding,) = findings(job(values))
    assert finding.evidence[0].startswith("since step 600 ")
    assert finding.cost_ns == pytest.approx(30 * MS, rel=0.02)


def test_steps_that_recording_in_depth_slows_down_do_not_count():
    assert findings(job(steady(200), windows=tuple(range(100, 160)))) == []


def test_trace_that_is_one_long_window_is_judged_by_all_its_steps():
    steps = job(slower_from(60, 1.3, count=100)).with_columns(window=pl.lit(0, pl.Int32))
    assert [finding.class_ for finding in findings(steps)] == ["slow.regression"]


def test_telemetry_that_changed_with_the_steps_is_evidence_and_the_rest_is_not():
    steps = job(slower_from(150, 1.3))
    change = int(steps.filter(pl.col("step") == 150)["start_ns"][0]) - BEGIN
    counters = pl.concat(
        [
            counter("sm_clock_mhz", [(0, 1980.0), (change, 1200.0)], device="uuid-7"),
            counter("sm_clock_mhz", [(0, 1980.0)], device="uuid-8"),
            counter("sm_clock_mhz", [(0, 1980.0), (change, 300.0)], device="uuid-9"),  # another job's
            *[counter("sampling_us", [(0, 50.0)], device=f"uuid-{number}") for number in (7, 8, 9)],
            counter("clocks_hw_thermal_slowdown", [(0, 0.0), (change, 1.0)], device="uuid-7"),
            counter("temperature_c", [(0, 60.0), (change // 2, 63.0)], device="uuid-7"),
            counter("tcp_retransmitted_segments", [(0, 5.0), (change, 9.0)]),
        ]
    )
    (finding,) = findings(steps, counters)
    assert sorted(line.partition(" before")[0] for line in finding.evidence[1:]) == [
        "GPU uuid-7 on n1 (rank 0): SM clock 1.98e+03",
        "GPU uuid-7 on n1 (rank 0): clocks held down by heat 0",
    ]


def test_throttling_that_begins_with_the_slower_steps_is_the_cause_and_has_a_remedy():
    steps = job(slower_from(150, 1.3))
    change = int(steps.filter(pl.col("step") == 150)["start_ns"][0]) - BEGIN
    end = int(steps["start_ns"].max()) - BEGIN
    held_s = (end - change) / 1e9
    parts = [
        counter("throttled_power_s", [(0, 0.0), (change, 0.0), (end, held_s)], device=f"uuid-{number}")
        for number in (7, 8)  # on both: no rank is slower than the other
    ]
    parts += [counter("sampling_us", [(0, 50.0)], device=f"uuid-{number}") for number in (7, 8)]
    clocks = [counter("sm_clock_mhz", [(0, 1980.0), (change, 1500.0)], device="uuid-7")]
    (finding,) = findings(steps, pl.concat(parts + clocks))
    assert finding.cause == "GPU clocks held down by the power cap"
    assert finding.remedy.startswith("raise its power limit")
    steady = [counter("sm_clock_mhz", [(0, 1980.0)], device="uuid-7")]  # held down to no effect
    (finding,) = findings(steps, pl.concat(parts + steady))
    assert finding.cause == ""


def test_errors_that_gpus_report_only_since_then_are_evidence():
    steps = job(slower_from(150, 1.3))
    change = int(steps.filter(pl.col("step") == 150)["start_ns"][0]) - BEGIN
    second = 1_000_000_000
    parts = [counter("sampling_us", [(0, 50.0)], device=f"uuid-{number}") for number in (7, 8, 9)]
    parts.append(counter("xid", [(change + second, 92.0), (change + 2 * second, 92.0)], device="uuid-8"))
    parts.append(counter("xid", [(-3600 * second, 63.0), (change + second, 63.0)], device="uuid-7"))
    parts.append(counter("xid", [(change + second, 79.0)], device="uuid-9"))  # another job's
    (finding,) = findings(steps, pl.concat(parts))
    assert len(finding.evidence) == 2
    assert "the GPU of rank 1 (uuid-8 on n1): XID 92 2 times, first at" in finding.evidence[1]


def test_growing_counters_are_compared_by_their_rate_through_resets():
    steps = job(slower_from(150, 1.3))
    change = int(steps.filter(pl.col("step") == 150)["start_ns"][0]) - BEGIN
    rows = [(0, 100.0), (change // 2, 101.0), (change, 0.0), (change + 5_000_000_000, 4000.0)]
    (finding,) = findings(steps, counter("tcp_retransmitted_segments", rows))
    assert "retransmitted TCP segments" in finding.evidence[1]


def test_what_the_host_does_longer_is_evidence():
    steps = job(slower_from(150, 1.3))
    waits = [
        (int(start) - BEGIN, 30e6 if step >= 150 else 1e6)
        for step, start in steps.filter(pl.col("rank") == 1).select("step", "start_ns").iter_rows()
    ]
    (finding,) = findings(steps, counter("step_data_wait_ns", waits, rank=1))
    assert finding.evidence[1:] == ("rank 1: waiting for the DataLoader 1 ms per step before, 30 ms since",)


def test_work_that_takes_longer_in_windows_since_then_is_evidence():
    steps = job(slower_from(150, 1.3), ranks=1, windows=(50, 250))
    spans = conform(
        SPANS,
        pl.DataFrame(
            {
                "rank": [0, 0, 0, 0],
                "window": [0, 0, 1, 1],
                "span_id": [0, 1, 2, 3],
                "kind": ["kernel"] * 4,
                "name": ["gemm", "copy", "gemm", "copy"],
                "start_ns": [BEGIN] * 4,
                "duration_ns": [50 * MS, 10 * MS, 80 * MS, 10 * MS],
            },
            schema_overrides={"rank": pl.Int32, "window": pl.Int32, "kind": SPANS.columns["kind"].dtype},
        ),
    )
    (finding,) = findings(steps, spans=spans)
    assert finding.evidence[1:] == ("gemm: 50 ms per rank and step before, 80 ms since",)


def test_job_that_is_as_fast_as_ever_has_its_large_tables_left_unread():
    assert find_regression(job(steady(200)), GPUS, unread, unread) == []


def test_spans_are_left_unread_where_no_window_is_on_either_side_of_the_change():
    (finding,) = find_regression(job(slower_from(150, 1.3)), GPUS, COUNTERS.empty, unread)
    assert finding.class_ == "slow.regression"


def test_few_steps_show_no_regression():
    assert findings(job(np.array([100.0] * 5 + [200.0] * 5))) == []
    assert findings(STEPS.empty()) == []


def test_steps_that_become_longer_and_longer_are_found_with_where_that_begins():
    times = steady(120)
    times[30:] *= np.linspace(1, 2, 90)
    (finding,) = findings(job(times))
    assert finding.class_ == "slow.regression"
    since = int(re.match(r"since step (\d+) ", finding.evidence[0])[1])
    assert 24 <= since <= 48
    assert " in the end; before it took 100 ms" in finding.evidence[0]


@pytest.mark.parametrize(
    "levels",
    [
        np.linspace(2, 1, 120),  # a slow beginning
        np.linspace(1, 1.15, 120),  # a drift
        1 + 0.5 * np.abs(np.sin(np.linspace(0, 6, 120))),  # by turns
    ],
)
def test_a_slow_beginning_a_drift_and_what_goes_by_turns_are_no_growth(levels):
    assert _beginning_of_growth(steady(120) * levels) == []


def levels_of(period: np.ndarray, steps: int, times: float, begin: int) -> np.ndarray:
    """[steps] One period after the other: 0 is fast, 1 slow by this factor."""
    return np.where(np.resize(np.roll(period, -begin), steps), times, 1.0)


@pytest.mark.parametrize("slow_steps", [5, 20, 100, 300])
@pytest.mark.parametrize("fast_steps", [5, 20, 100, 300])
def test_slow_phases_that_come_and_go_are_no_regression(fast_steps, slow_steps):
    period = np.repeat([0, 1], [fast_steps, slow_steps])
    random = np.random.default_rng(fast_steps + slow_steps)
    called_slower = 0
    for seed in range(40):
        steps = 3 * period.size + int(random.integers(period.size))
        levels = levels_of(period, steps, random.uniform(1.05, 2), int(random.integers(period.size)))
        called_slower += bool(findings(job(steady(steps, seed=seed) * levels, ranks=1)))
    assert called_slower == 0


def test_a_job_that_lasts_at_a_level_it_only_once_touched_is_slower():
    times = steady(1000)
    times[100:120] *= 1.3  # traffic of another job
    times[500:] *= 1.3
    (finding,) = findings(job(times))
    assert abs(int(finding.evidence[0].split()[2]) - 500) <= 2


@pytest.mark.parametrize("seed", range(20))
def test_a_job_that_stays_slower_is_found_also_in_noise_that_wanders(seed):
    random = np.random.default_rng(seed)
    noise = np.zeros(1000)
    for step in range(1, noise.size):
        noise[step] = 0.5 * noise[step - 1] + random.normal(0, 0.04)
    times = 100 * np.exp(noise)
    times[int(random.integers(200, 800)) :] *= 1.2
    assert len(findings(job(times, ranks=1))) == 1


def test_how_long_a_slow_phase_lasts_by_chance_follows_from_those_before():
    assert chance_to_last(50, np.array([], np.int64)) == 0
    assert chance_to_last(100, np.array([100])) == pytest.approx(1 / 2)
    assert chance_to_last(300, np.array([100, 200])) == pytest.approx(1 / 4)


def test_slow_periods_are_those_that_began_and_ended():
    # A slow beginning; a period of 30 steps; one of 40 that is slow for another reason; the latest of 50.
    times = np.repeat([110.0, 100.0, 110.0, 100.0, 150.0, 100.0, 110.0], [20, 40, 30, 40, 40, 40, 50])
    earlier, latest = slow_periods(times, 100.0, 110.0)
    assert earlier.tolist() == [30]
    assert abs(latest - 50) <= 1
