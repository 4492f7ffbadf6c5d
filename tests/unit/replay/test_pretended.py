"""What sharing the cores of a host changes in the step of pretended ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.replay.pretended import Sharing, replayed_steps, sharing_of, without_waits_for_cores
from tests.builders import TinyRun

STEP, TRAINING, COUNTED = 1_000, 250, 300  # us: a step, computing of its training thread, of its process
WAITED = 20


def shared(folder: Path, ranks: int, cores: float, **more: float) -> Sharing:
    run = TinyRun()
    run.op("aten::mm", 0, STEP)
    run.step(0, 0, STEP)
    for name, us in (("training_thread_cpu", TRAINING), ("cpu", COUNTED), ("run_queue", WAITED)):
        run.counter(f"step_{name}_ns", 0, us * 1_000)
    run.counter("cpus", 0, cores, rank=-1)
    for name, value in more.items():
        run.counter(name, 0, value, rank=-1)
    return sharing_of(run.build(folder).graph, ranks)


def test_own_work_takes_longer_where_ranks_of_a_host_have_more_threads_than_cores(tmp_path: Path) -> None:
    found = shared(tmp_path, ranks=4, cores=2)
    # A rank has 300 / 250 threads that compute, and one that communicates: 4 x 2.2 share 2 cores, in 250 of
    # the 980 us in which it did not wait for one.
    assert found.longest == pytest.approx(1 + 250 / 980 * (8.8 / 2 - 1))
    assert "share 2 cores" in found.line


def test_ranks_with_cores_of_their_own_take_as_long_as_alone(tmp_path: Path) -> None:
    found = shared(tmp_path, ranks=4, cores=9)
    assert found == Sharing(1.0, "")


def test_a_limit_of_cores_counts_as_the_host_has_them(tmp_path: Path) -> None:
    found = shared(tmp_path, ranks=1, cores=64, cgroup_cpu_limit_cores=1)
    assert found.longest == pytest.approx(1 + 250 / 980 * (2.2 - 1))


def test_nothing_is_said_of_sharing_where_time_of_cores_was_not_counted(tmp_path: Path) -> None:
    run = TinyRun()
    run.op("aten::mm", 0, STEP)
    run.step(0, 0, STEP)
    assert sharing_of(run.build(tmp_path).graph, 8) == Sharing()


def test_what_a_rank_alone_waited_for_a_core_is_no_work_of_its_own(tmp_path: Path) -> None:
    run = TinyRun()
    for step, waited in enumerate((0, 200)):
        run.op("aten::mm", step * STEP, (step + 1) * STEP)
        run.step(step, step * STEP, (step + 1) * STEP)
        run.counter("step_run_queue_ns", step * STEP, waited * 1_000)
    graph = without_waits_for_cores(run.build(tmp_path).graph)
    assert replayed_steps(graph).tolist() == [1_000_000, 800_000]
