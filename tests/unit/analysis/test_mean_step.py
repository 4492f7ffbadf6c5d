"""Where the mean step goes, and how busy the GPUs are."""

from __future__ import annotations

import json

import polars as pl
import pytest
from click.testing import CliRunner

from dpro.analysis.analysis import Analysis
from dpro.analysis.mean_step import (
    PARTS,
    facts_of,
    mean_step_document,
    mean_step_of,
    mean_steps,
    shown_parts,
)
from dpro.errors import Unanswerable
from dpro.extensions.goodput.command import goodput
from dpro.replay.steps import STEP_SCHEMA, step_series
from dpro.store import Manifest, open_run, write_manifest
from dpro.units import NS_PER_MS
from dpro.verdict.verdict import explain
from tests.builders import TinyRun, cpu_job
from tests.jobs import ROOT


def _gpu_run(folder, busy: int) -> Analysis:
    """Three steps of 1,000 us, in each a kernel of `busy` us that was launched at once, and then nothing."""
    run = TinyRun()
    for step in range(3):
        at = 1000 * step
        run.call(at, at + 5, step)
        run.kernel("gemm", at + 10, at + 10 + busy, step)
        run.step(step, at, at + 1000)
    return Analysis(run.write(folder))


def test_the_parts_add_up_to_the_mean_step(tmp_path):
    mean = mean_step_of(Analysis(cpu_job().write(tmp_path)))
    assert sum(share.ns for share in mean.shares) == pytest.approx(mean.duration_ms * 1e6)
    assert sum(share.share for share in mean.shares) == pytest.approx(1)


def test_a_gpu_that_stands_still_is_said_to(tmp_path):
    assert mean_step_of(_gpu_run(tmp_path, 200)).gpu_busy == pytest.approx(0.2)


def test_why_the_utilisation_is_not_known_is_said(tmp_path):
    mean = mean_step_of(_gpu_run(tmp_path, 200))
    assert mean.mfu is None
    assert "peak of its GPUs is not known" in dict(facts_of(mean))["MFU"]


@pytest.mark.parametrize("name", ["slow_rank", "h200_gpt"])
def test_its_shares_are_those_of_the_verdict_and_it_is_as_long_as_the_usual_step(name):
    analysis = Analysis(open_run(ROOT / "sample_traces" / name))
    mean, verdict = mean_step_of(analysis), explain(analysis)
    assert mean.duration_ms == pytest.approx(verdict.step_ms, rel=1e-3)
    assert [share.share for share in mean.shares] == pytest.approx(
        [share for share in verdict.shares.values() if share > 0], abs=1e-4
    )


def test_the_document_has_all_parts_in_ms(tmp_path):
    document = mean_step_document(_gpu_run(tmp_path, 600))
    parts = (
        document.compute_ms,
        document.copy_ms,
        document.transfer_ms,
        document.wait_ms,
        document.unsplit_comm_ms,
    )
    assert sum(parts) + document.host_bound_ms + document.idle_ms == pytest.approx(document.duration_ms)
    assert document.compute_ms == pytest.approx(0.6)


def test_a_run_without_windows_has_no_mean_step(tmp_path):
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    analysis = Analysis(open_run(tmp_path))
    with pytest.raises(Unanswerable):
        mean_step_of(analysis)
    assert mean_step_document(analysis) is None


# step, rank, duration, compute, copies, exposed (= wait + transfer), wait, transfer, overlapped, host, idle
ROWS = [
    (0, 0, 100, 35, 5, 30, 20, 10, 5, 20, 10),
    (0, 1, 100, 60, 0, 10, 0, 10, 5, 20, 10),
    (1, 0, 200, 40, 0, 60, None, None, 0, 50, 50),
]


@pytest.fixture
def split() -> pl.DataFrame:
    return pl.DataFrame(ROWS, schema=STEP_SCHEMA, orient="row")


@pytest.mark.parametrize("by", [None, "rank", "step"])
def test_parts_of_a_split_add_up_to_its_mean_step(split, by):
    means = mean_steps(split, by)
    parts = means.select(pl.sum_horizontal(*PARTS)).to_series().to_list()
    assert parts == pytest.approx(means["duration_ns"].to_list())


def test_communication_of_steps_that_are_not_split_is_a_part_of_its_own(split):
    (row,) = mean_steps(split, "rank").filter(rank=0).to_dicts()
    assert (row["steps"], row["duration_ns"], row["compute_ns"], row["overlapped_comm_ns"]) == (
        2,
        150,
        37.5,
        2.5,
    )
    assert (row["exposed_wait_ns"], row["exposed_transfer_ns"], row["unsplit_comm_ns"]) == (10, 5, 30)


def test_that_part_is_not_shown_where_all_is_split(split):
    assert "unsplit_comm_ns" in shown_parts(mean_steps(split))
    assert "unsplit_comm_ns" not in shown_parts(mean_steps(split.filter(step=0)))


def test_no_steps_have_no_mean(split):
    assert mean_steps(split.clear()).is_empty()
    assert mean_steps(split.clear(), "rank").is_empty()


def test_a_step_begins_where_the_one_before_it_ends(tmp_path):
    extents = Analysis(cpu_job(num_steps=4).write(tmp_path / "run")).step_extents
    ends = extents["end_ms"].to_list()
    assert extents["begin_ms"].to_list() == [0.0, *ends[:-1]]
    assert ends == sorted(ends)


def test_the_utilisation_is_of_the_typical_step_as_rates_are_and_not_of_one_that_recording_slows_down():
    analysis = Analysis(open_run(ROOT / "sample_traces" / "h200_gpt"))
    mean, typical_ns = mean_step_of(analysis), step_series(analysis.steps).typical_ns
    assert typical_ns < 0.8 * explain(analysis).account.recorded_step_ms * NS_PER_MS
    tflops = mean.mfu.tflop_per_step / (typical_ns / 1e9)
    assert mean.mfu.share == pytest.approx(tflops / mean.mfu.peak_tflops)
    done = CliRunner().invoke(goodput, [str(ROOT / "sample_traces" / "h200_gpt"), "--json"])
    found = json.loads(done.stdout)["throughput"]
    assert found["mfu_overall"] < found["mfu"]


def test_throughput_is_samples_over_the_time_of_all_steps_wherever_it_is_printed():
    path = ROOT / "sample_traces" / "h200_input"  # half of its steps take 46 ms, the others 185
    analysis = Analysis(open_run(path))
    mean, series = mean_step_of(analysis), step_series(analysis.steps)
    assert series.mean_ns > 1.8 * series.typical_ns
    per_s = explain(analysis).account.samples / series.mean_ns * 1e9
    assert mean.samples_per_s == pytest.approx(per_s)
    assert dict(facts_of(mean))["throughput"].endswith("per second, pauses included, all recorded ranks")
    done = CliRunner().invoke(goodput, [str(path), "--json"])
    assert json.loads(done.stdout)["throughput"]["samples_per_s"] == pytest.approx(per_s)
