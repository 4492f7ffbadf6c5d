"""What a job gains when one thing costs nothing, on small jobs worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.replay.fidelity.accuracy import assess
from dpro.replay.timeline import replay
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import baseline_steps
from dpro.verdict.limits import (
    BUBBLE,
    COMMUNICATION,
    HOST,
    IMBALANCE,
    INPUT,
    before_batches,
    before_first_launch,
    counterfactuals,
    input_of,
)
from tests.builders import US, TinyRun


def gains_of(run: TinyRun, folder) -> dict[str, float]:
    built = run.build(folder / "run")
    trust = assess(built, replay(built.graph), built.graph.run.manifest)
    gains: dict[str, float] = {}
    for result in counterfactuals(ReplayedJob(built.graph), baseline_steps(built.graph), trust):
        gains[result.limit] = max(gains.get(result.limit, 0.0), result.gain)
    return gains


def launch_bound(folder) -> TinyRun:
    """Three steps of 1,000, in which the host launches ten kernels of 20, one each 100."""
    run = TinyRun()
    for step in range(3):
        for number in range(10):
            at, correlation = 1000 * step + 100 * number, 100 * step + number
            run.op("aten::mul", at, at + 95)
            run.call(at + 80, at + 90, correlation)
            run.kernel("mul", at + 92, at + 112, correlation)
        run.step(step, 1000 * step, 1000 * (step + 1))
    return run


def test_a_job_whose_host_launches_too_slowly_gains_by_a_free_host_alone(tmp_path):
    gains = gains_of(launch_bound(tmp_path), tmp_path)
    assert gains[HOST] == pytest.approx(5.0, rel=0.2)  # ten kernels of 20 in 1,000
    assert {kind for kind, gain in gains.items() if gain > 1.12} == {HOST}


def test_a_pipeline_whose_work_takes_no_time_gains_a_finite_amount(tmp_path, monkeypatch):
    monkeypatch.setattr("dpro.verdict.limits.without_bubble", lambda *_: np.zeros(3))
    gains = gains_of(launch_bound(tmp_path), tmp_path)
    assert np.isfinite(gains[BUBBLE])


def ranks_that_wait(late: tuple[int, ...], transfer: float = 10) -> TinyRun:
    """Three steps of three ranks that compute 100, late ones 300, and then reduce."""
    run = TinyRun()
    begin = 0.0
    for step in range(3):
        slow = late[step % len(late)]
        moved = begin + 320 + transfer
        for rank in range(3):
            number = 10 * step
            work = 300 if rank == slow else 100
            run.call(begin, begin + 5, number, rank)
            run.kernel("gemm", begin + 10, begin + 10 + work, number, rank)
            run.call(begin + 5, begin + 10, number + 1, rank)
            run.nccl(begin + 10 + work, moved, number + 1, rank, sequence=step)
            run.call(begin + 10, moved + 5, number + 2, rank, name="cudaDeviceSynchronize")
            run.step(step, begin, moved + 10, rank)
        begin = moved + 10
    return run


@pytest.mark.parametrize("late", [(1,), (0, 1, 2)])
def test_ranks_that_are_late_alone_or_by_turns_are_equal_together(tmp_path, late):
    gains = gains_of(ranks_that_wait(late), tmp_path)
    assert gains[IMBALANCE] == pytest.approx(340 / 140, rel=0.1)
    assert gains[COMMUNICATION] < 1.1


def test_transfers_that_are_free_still_wait_for_the_last_rank(tmp_path):
    gains = gains_of(ranks_that_wait((1,), transfer=400), tmp_path)
    assert gains[COMMUNICATION] == pytest.approx(740 / 330, rel=0.1)


def with_preparation() -> TinyRun:
    """Three steps: 600 of preparation, a launch, and 300 on the GPU that the host waits for."""
    run = TinyRun()
    for step in range(3):
        begin = 1000.0 * step
        run.span("python", "normalize", begin, begin + 600, pid=10, tid=10)
        run.call(begin + 600, begin + 610, 10 * step)
        run.kernel("gemm", begin + 612, begin + 912, 10 * step)
        run.call(begin + 610, begin + 915, 10 * step + 1, name="cudaDeviceSynchronize")
        run.op("log", begin + 915, begin + 1000)
        run.step(step, begin, begin + 1000)
    return run


def test_work_before_the_first_launch_of_a_step_is_its_input(tmp_path):
    graph = with_preparation().build(tmp_path / "a").graph
    before = before_first_launch(graph)
    assert graph.nodes.duration[before].sum() == pytest.approx(3 * 600 * US, rel=0.05)
    assert gains_of(with_preparation(), tmp_path)[INPUT] == pytest.approx(1000 / 400, rel=0.1)


@pytest.mark.parametrize(("loading_us", "input_us"), [(550, 550), (300, 600)], ids=["nearly all", "half"])
def test_where_loading_is_nearly_all_work_before_a_step_it_alone_is_the_input(tmp_path, loading_us, input_us):
    run = with_preparation()
    for step in range(3):
        begin = 1000.0 * step
        run.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, begin + loading_us)
    graph = run.build(tmp_path).graph
    assert graph.nodes.duration[input_of(graph)].sum() == pytest.approx(3 * input_us * US, rel=0.01)


@pytest.mark.parametrize(
    ("copy_us", "lane", "steps", "share"),
    [(50, 10, 3, 0.6), (3, 10, 3, 0.0), (50, 11, 3, 0.0), (50, 10, 1, 0.0)],
    ids=["batch", "size", "other", "once"],
)
def test_waiting_long_before_a_batch_is_copied_in_each_step_is_input(tmp_path, copy_us, lane, steps, share):
    """A thread does nothing that is known for 600 of 1,000 us, and then copies what the next kernels need."""
    run = TinyRun()
    for step in range(steps):
        at = 1000.0 * step
        run.call(at, at + 10, 10 * step)
        run.kernel("gemm", at + 12, at + 250, 10 * step)
        run.span("python", "poll", at + 10, at + 610, pid=10, tid=10)
        run.call(at + 610, at + 615, 10 * step + 1, name="cudaMemcpyAsync", tid=lane)
        end = at + 617 + copy_us
        run.span("memcpy", "Memcpy HtoD", at + 617, end, 0, stream=7, device=0, correlation=10 * step + 1)
        run.op("log", at + 615, at + 1000)
        run.step(step, at, at + 1000)
    graph = run.build(tmp_path).graph
    waited = graph.nodes.duration[before_batches(graph)].sum() / US / (1000 * steps)
    assert waited == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("launched", ["kernel", "copy"])
def test_what_an_operator_does_before_it_launches_is_no_input_unless_it_copies_it(tmp_path, launched):
    run = TinyRun()
    for step in range(3):
        at = 1000.0 * step
        run.mark("tokenize", at, at + 100)
        run.op("aten::mul", at + 100, at + 500)  # 350 before its call, and 40 after
        run.call(at + 450, at + 460, step)
        if launched == "kernel":
            run.kernel("mul", at + 465, at + 800, step)
        else:
            run.span("memcpy", "Memcpy HtoD", at + 465, at + 800, 0, stream=7, device=0, correlation=step)
        run.step(step, at, at + 1000)
    graph = run.build(tmp_path / "run").graph
    input_us = graph.nodes.duration[before_first_launch(graph)].sum() / US / 3
    assert input_us == pytest.approx(100 if launched == "kernel" else 450, abs=12)
