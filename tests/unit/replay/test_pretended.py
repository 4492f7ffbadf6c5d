"""What sharing the cores of a host changes in the step of pretended ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.replay.pretended import Sharing, sharing_of
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
    # A rank has 300 / 250 threads that compute, and one that communicates: 4 x 2.2 share 2 cores, in a
    # quarter of the step.
    assert found.longest == pytest.approx(1 + 0.25 * (8.8 / 2 - 1))
    assert found.waited == pytest.approx(0.02)
    assert "share 2 cores" in found.line


def test_ranks_with_cores_of_their_own_take_as_long_as_alone(tmp_path: Path) -> None:
    found = shared(tmp_path, ranks=4, cores=9)
    assert (found.longest, found.line) == (1.0, "")


def test_a_limit_of_cores_counts_as_the_host_has_them(tmp_path: Path) -> None:
    found = shared(tmp_path, ranks=1, cores=64, cgroup_cpu_limit_cores=1)
    assert found.longest == pytest.approx(1 + 0.25 * (2.2 - 1))


def test_nothing_is_said_of_sharing_where_time_of_cores_was_not_counted(tmp_path: Path) -> None:
    run = TinyRun()
    run.op("aten::mm", 0, STEP)
    run.step(0, 0, STEP)
    assert sharing_of(run.build(tmp_path).graph, 8) == Sharing()
