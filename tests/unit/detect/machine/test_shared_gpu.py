"""A GPU that another process has for slices of time stands still with work queued, equally long each time."""

from __future__ import annotations

import pytest

from dpro.detect.context import Context
from dpro.detect.machine.oversubscribed import MIN_GAPS, OTHER_PROCESS, find_shared_gpus
from dpro.detect.run import diagnose
from tests.builders import TinyRun

SLICE = 2_400.0  # us


def gpu_job(gaps, launched_early=True, rank=0, run=None) -> TinyRun:
    """Kernels of 200 us with gaps between them (us), whose launches come before the gap or at its end."""
    run, at = run or TinyRun(), 1_000.0
    for number, gap in enumerate([0.0, *gaps]):
        start = at + gap
        call = at - 500 if launched_early else start - 10
        run.call(call, call + 8, number, rank)
        run.kernel("gemm", start, start + 200, number, rank)
        at = start + 200
    run.step(0, 0, at + 10, rank)
    return run


def test_a_rank_whose_gpu_is_shared_is_named_with_what_that_costs(tmp_path):
    run = gpu_job([SLICE] * 10)
    (finding,) = find_shared_gpus(gpu_job([2.0] * 10, rank=1, run=run).write(tmp_path / "run"))
    assert (finding.class_, finding.component, finding.cause) == ("slow.compute", "rank 0", OTHER_PROCESS)
    assert finding.cost_ns == 10 * SLICE * 1000
    assert finding.severity == pytest.approx(10 * SLICE / (10 * SLICE + 11 * 200), abs=1e-3)
    assert finding.evidence == (
        "its GPU is idle 10 times for 2.4 ms with its next work queued: 92% of the time",
    )


@pytest.mark.parametrize(
    "job",
    [
        gpu_job([SLICE] * 10, launched_early=False),  # the host is late
        gpu_job([SLICE] * (MIN_GAPS - 1)),  # too few to be more than chance
        gpu_job([600, 1_300, 2_900, 6_000, 13_000, 28_000]),  # not equally long: it waits for something
        gpu_job([*[SLICE] * 10, 300_000]),  # little of the time
        gpu_job([2.0] * 10),  # it never stands still
    ],
)
def test_other_reasons_to_stand_still_are_none(tmp_path, job):
    assert find_shared_gpus(job.write(tmp_path / "run")) == []


def test_a_stream_that_may_wait_for_a_host_proves_nothing(tmp_path):
    run = gpu_job([SLICE] * 10)
    run.call(5, 6, 900, name="cudaLaunchHostFunc")
    assert find_shared_gpus(run.write(tmp_path / "run")) == []


def test_steps_share_what_is_lost_and_the_time_between_windows_is_none(tmp_path):
    run = gpu_job([SLICE] * 10)
    for name in ("spans", "steps"):
        for row in run.rows[name][:]:
            numbers = {"step": 1} if name == "steps" else {"span_id": row["span_id"] + 1000}
            run.rows[name].append(row | {"window": 1, "start_ns": row["start_ns"] + 10**10} | numbers)
    (finding,) = find_shared_gpus(run.write(tmp_path / "run"))
    assert finding.cost_ns == 10 * SLICE * 1000
    assert finding.severity == pytest.approx(0.916, abs=1e-3)


def test_it_is_found_without_a_replay(tmp_path):
    run = gpu_job([SLICE] * 10).write(tmp_path / "run")
    assert [finding.cause for finding in diagnose(Context(run))] == [OTHER_PROCESS]
