"""How long steps take where hosts run ahead of their devices."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.info import info_document
from dpro.analysis.step_time import step_time_document, step_time_in_words
from dpro.cli.info import in_words
from dpro.detect.regression import regression_of
from dpro.extensions.trial.measure import step_times, times_by_one_clock
from dpro.replay.steps import host_steps_of, job_steps, step_series, steps_of
from dpro.schema import COUNTERS, STEPS, conform
from dpro.store import Manifest, open_run, write_manifest, write_part
from dpro.timed import with_times

MS = 1_000_000
# A step takes 10 ms to enqueue and 50 ms on the device; every tenth waits for all that was enqueued.
QUEUED = np.tile([10.0] * 9 + [410.0], 12)


def steps(host_ms, device_ms=None, rank=0, windows=()):
    host = (np.asarray(host_ms) * MS).astype(np.int64)
    device = np.full(host.size, -1) if device_ms is None else np.asarray(device_ms)
    rows = {
        "step": np.arange(host.size),
        "window": np.where(np.isin(np.arange(host.size), windows), 0, -1),
        "start_ns": np.concatenate([[0], host.cumsum()[:-1]]),
        "duration_ns": host,
        "gpu_step_ns": np.where(device >= 0, device * MS, -1).astype(np.int64),
    }
    return conform(STEPS, pl.DataFrame(rows).with_columns(rank=pl.lit(rank)))


def run_of(folder, table, gpus=("NVIDIA H200",), counters=None):
    write_part(folder, STEPS, "all", table)
    if counters is not None:
        write_part(folder, COUNTERS, "all", counters)
    write_manifest(folder, Manifest(1, [0], gpus=list(gpus)))
    return open_run(folder)


def test_typical_step_is_the_devices_where_it_timed_the_steps():
    table = steps(QUEUED, np.full(QUEUED.size, 50.0))
    series = step_series(table)
    assert (series.typical_ns, series.mean_ns, series.by_device) == (50 * MS, 50 * MS, True)
    assert not series.paused.any()
    assert step_time_in_words(table).endswith(
        "none in a deep window or right after one, timed by the device)"
    )


def test_steps_that_a_typical_step_leaves_out_are_counted_beside_those_it_is_of():
    times = np.full(100, 50.0)
    said = step_time_in_words(steps(times, np.full(100, -1.0), windows=(40, 41)))
    document = step_time_document(steps(times, np.full(100, -1.0), windows=(40, 41)))
    assert document.recorded == 100
    assert document.steps < 98
    assert f"({document.steps} of 100 steps, none in a deep window or right after one" in said


def test_steps_that_the_device_did_not_time_are_left_out_where_it_timed_the_others():
    device = np.full(QUEUED.size, 50.0)
    device[[0, 30, 31, -1]] = -1
    series = job_steps(steps(QUEUED, device))
    assert series["step"].to_list() == [
        n for n in range(QUEUED.size) if n not in (0, 30, 31, QUEUED.size - 1)
    ]
    assert set(series["duration_ns"]) == {50 * MS}


def test_a_few_times_of_the_device_do_not_stand_for_a_whole_run():
    device = np.full(QUEUED.size, -1.0)
    device[:4] = 50
    assert not with_times(steps(QUEUED, device))["by_device"].any()


def test_each_rank_counts_by_its_own_device():
    both = pl.concat([steps(QUEUED, np.full(QUEUED.size, 50.0)), steps(np.full(QUEUED.size, 48.0), rank=1)])
    times = with_times(both)
    assert [set(times.filter(rank=rank)["time_ns"]) for rank in (0, 1)] == [{50 * MS}, {48 * MS}]


def test_begin_and_end_of_steps_stay_the_hosts():
    table = steps([10.0] * 20, [50.0] * 20)
    assert job_steps(table).select(pl.col("end_ns") - pl.col("begin_ns")).to_series().unique().to_list() == [
        10 * MS
    ]


def test_job_that_becomes_slower_on_its_device_alone_is_found():
    table = steps(QUEUED, np.repeat([50.0, 60.0], QUEUED.size // 2) + np.tile([0, 0.1], QUEUED.size // 2))
    found = regression_of(job_steps(table))
    assert found.since == QUEUED.size // 2
    assert regression_of(job_steps(table.drop("gpu_step_ns"))) is None


def test_hosts_that_run_ahead_of_gpus_are_known_by_their_cycles_and_it_is_said(tmp_path):
    run = run_of(tmp_path, steps(QUEUED))
    series = step_series(steps_of(run))
    assert (series.typical_ns, series.cycle, series.by_device) == (50 * MS, 10, False)
    assert series.steps.size == QUEUED.size - 10  # before the first wait it is not known what was enqueued
    assert not series.paused.any()
    document = info_document(Analysis(run))
    assert document.step_time.typical_ms == 50
    assert "the launch queue hides the GPU's time; mean over 10-step cycles" in "\n".join(in_words(document))
    assert step_times(run, 0).mean() == 50 * MS


def test_regular_long_steps_of_cpu_jobs_are_pauses(tmp_path):
    series = step_series(steps_of(run_of(tmp_path, steps(QUEUED), gpus=())))
    assert (series.typical_ns, series.cycle, int(series.paused.sum())) == (10 * MS, 1, 12)


def test_regular_long_steps_that_the_host_explains_are_pauses_on_gpus_too(tmp_path):
    table = steps(QUEUED)
    saved = table.select(
        "rank",
        counter=pl.lit("step_checkpoint_ns"),
        time_ns="start_ns",
        value=(pl.col("duration_ns") - 10 * MS).cast(pl.Float64),
    )
    series = step_series(steps_of(run_of(tmp_path, table, counters=conform(COUNTERS, saved))))
    assert (series.typical_ns, series.cycle, int(series.paused.sum())) == (10 * MS, 1, 12)


def test_cycles_with_a_deep_window_are_left_out(tmp_path):
    host = QUEUED.copy()
    host[[44, 45, 46]] += 300
    series = step_series(steps_of(run_of(tmp_path, steps(host, windows=(44, 45)))))
    assert series.typical_ns == 50 * MS
    assert not series.paused.any()
    assert not set(range(40, 50)) & set(series.steps.tolist())


def test_steps_beside_a_deep_window_are_no_measure_of_others(tmp_path):
    host = QUEUED.copy()
    host[[41, 42, 45]] += 300
    table = steps(host, windows=(41, 42)).with_columns(
        beside=pl.when(pl.col("step").is_in([43, 44])).then(0).otherwise(-1)
    )
    series = step_series(steps_of(run_of(tmp_path, conform(STEPS, table))))
    assert (series.typical_ns, series.cycle) == (50 * MS, 10)
    assert not set(range(40, 50)) & set(series.steps.tolist())


@pytest.mark.parametrize(
    "host",
    [np.full(120, 50.0), np.tile([40.0, 60.0], 60), np.tile([10.0, 10, 10, 410], [6]), QUEUED[:30]],
    ids=["even", "by turns", "long enough", "too short"],
)
def test_only_a_schedule_of_waits_makes_cycles(tmp_path, host):
    cycle = step_series(steps_of(run_of(tmp_path, steps(host)))).cycle
    assert cycle == (4 if host.size == 24 else 1)


def test_irregular_long_steps_make_no_cycles(tmp_path):
    host = np.full(120, 10.0)
    host[[7, 20, 25, 60, 61, 100]] = 410
    assert step_series(steps_of(run_of(tmp_path, steps(host)))).cycle == 1


def test_runs_of_which_the_devices_timed_some_are_compared_by_their_hosts(tmp_path):
    timed = run_of(tmp_path / "timed", steps(QUEUED, np.full(QUEUED.size, 50.0)))
    untimed = run_of(tmp_path / "untimed", steps(QUEUED))
    clock, same = times_by_one_clock([timed, untimed], 0)
    assert clock == "host"
    assert [len(times) for times in same] == [110, 110]  # without the first cycle
    assert np.array_equal(*same)
    clock, (times, _) = times_by_one_clock([timed, timed], 0)
    assert (clock, len(times)) == ("device", 119)
    assert step_series(host_steps_of(timed)).typical_ns == 50 * MS


def test_run_of_before_there_was_the_column_opens(tmp_path):
    write_part(tmp_path, STEPS, "all", steps(np.full(30, 20.0)))
    part = tmp_path / STEPS.name / "all.parquet"
    pl.read_parquet(part).drop("gpu_step_ns").write_parquet(part)
    write_manifest(tmp_path, Manifest(1, [0]))
    run = open_run(tmp_path)
    assert set(run.table(STEPS)["gpu_step_ns"]) == {-1}
    assert set(run.table(STEPS, ["step", "gpu_step_ns"])["gpu_step_ns"]) == {-1}
    document = step_time_document(steps_of(run))
    assert (document.typical_ms, document.clock, document.cycle) == (20, "host", 1)
