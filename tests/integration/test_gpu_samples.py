"""Runs that were recorded on a GPU say what is true of them."""

from __future__ import annotations

import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.mean_step import mean_step_of
from dpro.analysis.selected import read_selection, select
from dpro.cli.analysis import analyse
from dpro.detect.hang.evidence import MIN_SURE
from dpro.detect.hang.records import make_records
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import Prediction, predict
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, PROCESS_GROUPS, STEPS, WORKERS
from dpro.store import open_run
from dpro.verdict.facts import facts_of
from dpro.verdict.limits import COMMUNICATION, COMPUTE, HOST, INPUT
from dpro.verdict.ranking import advise
from dpro.verdict.verdict import explain


@pytest.fixture
def sample(repository):
    return lambda name: analyse(str(repository / "sample_traces" / name))


def predicted(analysis: Analysis, text: str) -> Prediction:
    return predict(analysis.built.predictive, analysis.baseline, [parse_edit(text)], analysis.trust)


def test_gains_of_the_host_are_those_outside_deep_windows(sample):
    analysis = sample("h200_gpt")
    verdict = explain(analysis)
    # Recorded steps take 44.0 ms, those outside windows 30.9; without the recorder the script took 26.1 ms,
    # with 24.2 ms of kernels: a free host gains x1.08.
    assert analysis.trust.taken_out == pytest.approx(1.425, abs=0.01)
    assert verdict.step_ms == pytest.approx(30.94, rel=0.02)
    assert 0.78 < verdict.shares["compute"] < 0.83
    assert verdict.limit.kind == COMPUTE
    assert any("recording slowed hosts" in line for line in verdict.unsure)
    graphs, free = (predicted(analysis, text) for text in ("cuda-graph", "free-host"))
    assert graphs.speedup <= 1.2
    assert free.speedup_at(free.gain_low_ns) < 1.08 < free.speedup_at(free.gain_high_ns)
    assert free.low_ns < 24.2e6 + 2e6


def test_steps_that_wait_for_their_input_by_turns_are_all_usual(sample):
    verdict = explain(sample("h200_input"))
    # Two loader workers deliver two batches at a time: steps of 46 and of 185 ms, 110 ms on the mean.
    assert verdict.left_out == 0
    assert verdict.step_ms == pytest.approx(101, abs=3)
    assert verdict.limit.kind == INPUT
    advised = {advice.kind: advice.do for advice in verdict.advice}
    assert verdict.advice[0].kind == "input"
    assert "num_workers" in advised["input"]
    assert "pin_memory" in advised["copies"]


def test_a_host_that_runs_ahead_of_its_gpu_does_not_limit_the_job(sample):
    analysis = sample("h200_graphs")
    verdict = explain(analysis)
    # The host enqueues a step in 4.1 ms; kernels take 4.9 of the 5.1 ms of each, up to 49 ms later.
    assert verdict.limit.kind == COMPUTE
    assert verdict.shares["compute"] == pytest.approx(4.9 / 5.17, abs=0.02)
    assert verdict.step_ms == pytest.approx(5.1, rel=0.03)
    assert mean_step_of(analysis).gpu_busy == pytest.approx(0.92, abs=0.03)


def test_hosts_that_limit_a_changed_job_take_what_they_do_outside_deep_windows(sample):
    analysis = sample("h200_graphs")
    # Enqueueing takes the host 3.8 ms outside deep windows, and 5.5 in them: with kernels of next to no
    # time the step of 5.1 ms would be limited by that.
    job = ReplayedJob(analysis.built.predictive)
    assert job.pace_ns == pytest.approx(3.84e6, rel=0.03)
    prediction = predicted(analysis, "scale:kind=kernel,factor=0.2")
    low, high = (base / prediction.base_ns for base in (prediction.low_ns, prediction.high_ns))
    assert low < 3.84 / 5.1 < high
    assert prediction.gain_low_ns > 0


def test_a_slow_host_that_the_queue_hides_is_named_at_what_it_costs_when_that_is_empty(sample):
    analysis = sample("h200_slow_host")
    # Rank 1 sleeps for 20 ms in each step of 72 ms; only after each fifth step, when all wait for a loss,
    # has its GPU nothing queued: there the step takes 94 to 97 ms. Steps right after a window began, for
    # which all wait, too, are no usual ones.
    assert analysis.baseline_ns == pytest.approx(72.2e6, rel=0.01)
    [finding] = analysis.verdict[0]
    assert (finding.class_, finding.ranks) == ("slow.host", (1,))
    assert finding.cost_ns == pytest.approx(22e6 / 5, rel=0.1)
    assert finding.confidence > 0.9
    assert "in every 5th step" in finding.evidence[1]


def test_fewer_launches_are_not_advised_where_a_host_mostly_sleeps(sample):
    with facts_of(sample("h200_slow_host")) as facts:
        hosts = facts.after(COMMUNICATION)
        advice = {advice.kind: advice for advice in advise(hosts, HOST)}
    # Of 27 ms rank 1 sleeps for 20, and launches for 5 or 6.
    assert not {"launch", "batch"} & advice.keys()
    assert "launch-one" in advice


def test_collectives_of_selected_steps_are_those_whose_kernels_are(sample):
    # The hosts are done with step 36 long before the GPUs begin with it.
    chosen = select(sample("h200_slow_host"), read_selection("36", ""))
    kernels = chosen.spans.filter(chosen.spans["kind"] == "kernel").select("rank", "span_id")
    assert chosen.collectives.height == 8  # four buckets on two ranks
    assert chosen.collectives.join(kernels, on=["rank", "span_id"]).height == 8


@pytest.mark.parametrize("name", ["h200_gpt", "h200_input", "h200_graphs", "h200_slow_host"])
def test_replays_of_gpu_recordings_fit(sample, name):
    trust = sample(name).trust
    assert trust.error_pct < 1
    assert trust.coverage.time_unexplained < 0.01


def test_a_kernel_that_does_not_end_is_named_where_starts_are_recorded(sample):
    analysis = sample("h200_hang")
    assert explain(analysis).job == "h200_hang   2 ranks on 1 x H200   typical step 72.2 ms (19 of 30 steps)"
    [finding] = analysis.verdict[0]
    assert (finding.class_, finding.ranks) == ("hang.device", (1,))


def test_without_starts_neither_the_network_nor_a_gpu_is_blamed(repository, tmp_path):
    import shutil

    import polars as pl

    run = tmp_path / "run"
    shutil.copytree(repository / "sample_traces" / "h200_hang", run)
    for path in (run / "collectives").glob("*.parquet"):
        calls = pl.read_parquet(path)
        calls.with_columns(pl.col("state").str.replace("started", "scheduled")).write_parquet(path)
    [finding] = analyse(str(run)).verdict[0]
    # While the job runs no table says what its GPUs timed.
    tables = (COLLECTIVES, PROCESS_GROUPS, WORKERS, STEPS, CLOCK_SAMPLES)
    calls, groups, workers, steps, clocks = map(open_run(run).table, tables)
    for known in (steps, steps.drop("gpu_step_ns")):
        assert make_records(calls, groups, workers, known, clocks, 2).starts_unknown
    assert finding.class_ == "hang.comm"
    assert finding.confidence < MIN_SURE
    assert any("--nccl-timing" in line for line in finding.evidence)
