"""GPUs that idle on all ranks while their hosts work: a finding about the job, no rank is at fault."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.host_bound import NANOSECONDS, find_idle_gpus, note_idle_gpus
from dpro.replay.steps import step_breakdown
from dpro.schema import COLLECTIVES, SPANS, STEPS
from tests.builders import TinyRun, gpu_job
from tests.unit.detect.jobs import found_in_graph

US = 1_000


def job(op: Sequence[float], kernel: float = 40, python: bool = False) -> TinyRun:
    """Steps of two kernels that are launched one by one: an operator, a call of 10 us, a kernel behind it."""
    run = TinyRun()
    begin = free = 0.0
    for step, length in enumerate(op):
        at = begin
        for number in range(2):
            run.op("aten::index", at, at + length)
            run.call(at + length, at + length + 10, 100 * step + number)
            at += length + 10
            free = max(free, at)
            run.kernel("gemm", free, free + kernel, 100 * step + number)
            free += kernel
        run.step(step, begin, at)
        begin = at
    run.call(begin, free, 99, name="cudaDeviceSynchronize")
    if python:
        run.span("python", "train.py(3): step", 0, free, pid=10, tid=10)
    return run


def found_in(run: TinyRun, folder: Path, ask: Any = find_idle_gpus, **more: float) -> Any:
    built = run.build(folder)
    tables = (built.graph.run.table(table) for table in (SPANS, COLLECTIVES, STEPS))
    parts = step_breakdown(*tables)
    return ask(Baseline(built.graph), lambda: parts, **more)


def test_a_job_whose_hosts_launch_too_slowly_is_a_finding_about_the_job(tmp_path):
    run = job([190] * 6)
    (finding,) = found_in(run, tmp_path)
    assert isinstance(finding, Finding)
    assert (finding.class_, finding.component_kind, finding.component_id) == ("slow.host", "job", "the host")
    # A step is 400 us, of which the GPU computes 80: with hosts that take no time, that is all there is.
    assert finding.cost_ns == pytest.approx(320 * US, rel=0.1)
    assert finding.severity == pytest.approx(0.8, abs=0.05)
    # Twelve kernels, of which the last ends 40 us after the last step of the host: 480 us of 2,440.
    assert finding.evidence[0].startswith("GPU busy 20% of the time as recorded (20% computing")
    assert "with free launch calls alone" in finding.evidence[1]
    # The host works all the time; kernels, which run beside it now, would fill 80 us if it took none.
    path = next(one.values for one in finding.observations if one.kind == "host-work-in-all")
    assert path["waited_ns"] == pytest.approx(400 * US, rel=0.05)
    assert path["filled_ns"] == pytest.approx(80 * US, rel=0.2)
    assert "aten::index" in finding.evidence[3]
    assert found_in_graph(run.build(tmp_path / "again").graph) == []  # nothing else, and no rank


def test_that_stacks_were_recorded_is_said_since_they_slow_the_host_down(tmp_path):
    (finding,) = found_in(job([190] * 6, python=True), tmp_path)
    assert "Python stacks were recorded" in finding.evidence[-1]


@pytest.mark.parametrize("length", [10.0, 35.0])
def test_a_gpu_that_is_busy_most_of_the_time_is_none(length, tmp_path):
    assert found_in(job([length] * 6), tmp_path) == []


def test_a_first_step_that_takes_the_host_long_is_none(tmp_path):
    assert found_in(job([900, 10, 10, 10, 10, 10]), tmp_path) == []


def test_what_hosts_cost_is_of_usual_steps_and_not_of_their_warm_up(tmp_path):
    (finding,) = found_in(job([90_000, *[190] * 8]), tmp_path)
    assert finding.cost_ns == pytest.approx(320 * US, rel=0.1)


def test_what_other_findings_explain_is_not_said_again(tmp_path):
    assert found_in(job([190] * 6), tmp_path, explained_ns=300 * US) == []


def test_gpus_that_wait_for_a_slow_rank_are_none(tmp_path):
    assert found_in(gpu_job(), tmp_path) == []


def test_one_step_is_a_note_and_no_finding(tmp_path):
    run = job([190])
    assert found_in(run, tmp_path) == []
    (note,) = found_in(run, tmp_path / "again", note_idle_gpus)
    assert note.startswith("GPU busy ")
    assert note.endswith("one step does not show whether this is usual")
    assert found_in(job([190] * 3), tmp_path / "more", note_idle_gpus) == []


def test_a_run_without_steps_is_one_step(tmp_path):
    run = job([190])
    del run.rows[STEPS.name]
    (note,) = found_in(run, tmp_path, note_idle_gpus)
    assert note.startswith("GPU busy ")


def test_a_step_that_took_gpus_no_time_has_no_idle_share(tmp_path):
    built = job([190] * 6).build(tmp_path)
    parts = step_breakdown(*(built.graph.run.table(table) for table in (SPANS, COLLECTIVES, STEPS)))
    none = parts.with_columns(pl.lit(0).alias(name) for name in NANOSECONDS)
    assert find_idle_gpus(Baseline(built.graph), lambda: none) == []
    assert note_idle_gpus(Baseline(built.graph), lambda: none.clear()) == []
