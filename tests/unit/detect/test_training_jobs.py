"""What is found in simulated training jobs of usual layouts; `benchmarks/diagnosis` has many more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpro.detect.findings import Finding
from dpro.detect.stragglers.own_time import AlwaysOn, on_one_clock
from dpro.replay.construction.graph_builder import build_graph
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, STEPS, WORKERS
from dpro.store import open_run
from tests.reference.training_jobs import LAYOUTS, Job, run_job
from tests.reference.training_records import Recording, frames_of, write_run
from tests.unit.detect.calling import late_ranks
from tests.unit.detect.jobs import found_in_graph

WINDOWS = ((4, 2), (9, 2), (14, 2))


def found_in_windows(folder: Path, job: Job) -> list[Finding]:
    return found_in_graph(
        build_graph(open_run(write_run(folder / "run", job, run_job(job), Recording()))).graph
    )


def found_in_calls(job: Job, recording: Recording) -> list[Finding]:
    frames = frames_of(job, run_job(job), recording)
    tables = (COLLECTIVES, STEPS, COUNTERS, WORKERS, CLOCK_SAMPLES)
    rows, _ = on_one_clock(AlwaysOn(*(frames.get(table.name, table.empty()) for table in tables)))
    return late_ranks(rows.collectives, rows.steps, rows.counters, rows.workers)


def length_ms(job: Job) -> float:
    return float(run_job(job).steps[-1]["end"].max()) / job.num_steps


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slow_rank_of_each_layout_is_named_with_about_what_it_costs(layout, gpu, tmp_path):
    job = Job(layout, 16, 16, gpu, noise="1%", windows=WINDOWS, fault="compute", severity=1.5, victim=2)
    (finding,) = found_in_windows(tmp_path, job)
    cost = length_ms(job) - length_ms(replace(job, fault=""))
    assert (finding.class_, finding.ranks) == ("slow.compute", (2,))
    assert finding.cost_ns / 1e6 == pytest.approx(cost, rel=0.2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_healthy_job_of_each_layout_raises_nothing(layout, tmp_path):
    assert found_in_windows(tmp_path, Job(layout, 4, 16, gpu=True, windows=WINDOWS)) == []
    assert found_in_calls(Job(layout, 16, 30), Recording("compared")) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slow_rank_of_each_layout_is_named_by_calls_on_clocks_that_were_compared(layout):
    job = Job(layout, 16, 30, noise="1%", fault="compute", severity=1.5, victim=5)
    (finding,) = found_in_calls(job, Recording("compared", missing=0.3))
    assert finding.ranks == (5,)
    cost = length_ms(job) - length_ms(replace(job, fault=""))
    assert finding.cost_ns / 1e6 == pytest.approx(cost, rel=0.35)
