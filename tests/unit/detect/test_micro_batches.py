"""Micro-batches whose data differ: forward and backward vary together, on every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.detect.findings import Finding
from dpro.detect.pipeline_slowdown import analyse_slowdown, diagnose_operations, variation
from dpro.replay.construction.graph_builder import build_graph
from tests.pipelines import MS, Job, written

DATA = ("imbalance.data", "the micro-batches")
Times = Callable[[int, int, int], tuple[float, float]]


def named(job: Job, folder: Path) -> dict[tuple[str, str], Finding]:
    graph = build_graph(written(job.run(), folder)).graph
    found = diagnose_operations(graph, analyse_slowdown(graph))
    return {(finding.class_, finding.component_id): finding for finding in found}


def long_tail(seed: int, apart: bool = False) -> Times:
    """Sizes of micro-batches; `apart`: what forward takes says nothing of backward."""
    sizes = np.minimum(np.random.default_rng(seed).lognormal(-1.0, 0.7, (16, 4, 12, 2)), 1.0) / 0.4
    return lambda step, dp, batch: (sizes[step, dp, batch, 0], sizes[step, dp, batch, int(apart)])


def batches(forward: list[list[float]], backward: list[list[float]]) -> pl.DataFrame:
    """Times of one rank's micro-batches, by step."""
    rows = [
        {"rank": 0, "dp": 0, "chunk": "", "step": step, "batch": batch, "forward": ahead, "backward": back}
        for step, times in enumerate(zip(forward, backward, strict=True))
        for batch, (ahead, back) in enumerate(zip(*times, strict=True))
    ]
    return pl.DataFrame(rows)


def test_correlation_is_pearsons_of_what_micro_batches_differ_by_within_their_steps():
    # Forward 1 2 3 and 5 6 7 (mean 4), backward 1 3 2 and 2 4 3: within each step -1 0 1 and -1 1 0, r = 1/2.
    varied = variation(batches([[1, 2, 3], [5, 6, 7]], [[1, 3, 2], [2, 4, 3]]))
    assert varied.correlation == pytest.approx(0.5)
    assert varied.freedom == 4
    assert varied.forward == pytest.approx(np.sqrt(4 / 4) / 4)
    assert varied.longest == pytest.approx(np.median([5 / 4, 10 / 9]))


def test_what_a_rank_takes_longer_in_a_whole_step_is_no_correlation():
    varied = variation(batches([[10, 11], [30, 31]], [[21, 20], [61, 60]]))
    assert varied.correlation == pytest.approx(-1)


def test_a_first_step_that_takes_far_longer_decides_nothing():
    usual = [[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]]
    varied = variation(batches([[100.0, 1.0, 1.0], *[usual[0]] * 4], [[100.0, 1.0, 1.0], *[usual[1]] * 4]))
    assert varied.correlation == pytest.approx(0.5)


def test_cost_of_uneven_micro_batches_is_that_worked_out_by_hand(tmp_path):
    # One stage. A rank has micro-batches of sizes 0.5, 1 and 1.5, the other three of 1.5, in turns; a size
    # of 1 takes 30 ms. The step waits for 4.5 of them; evenly spread over both ranks it would be 3.75.
    def times(step: int, dp: int, batch: int) -> tuple[float, float]:
        size = 0.5 + batch / 2 if (step + dp) % 2 else 1.5
        return size, size

    found = named(Job(1, 2, 3, num_steps=12, times=times), tmp_path)
    assert [*found] == [DATA]
    assert found[DATA].cost_ns == pytest.approx(0.75 * 30 * MS)
    assert found[DATA].ranks == (0, 1)
    assert "correlation 1.00 within ranks and steps, over 48 micro-batches" in found[DATA].evidence[0]


@pytest.mark.parametrize("stages", [1, 3])
def test_sequences_of_a_long_tail_are_uneven_data_and_nothing_else(stages, tmp_path):
    job = Job(stages, 3, 6, num_steps=8, times=long_tail(stages), noise=0.02)
    assert [*named(job, tmp_path)] == [DATA]


def test_uneven_data_and_an_uneven_stage_are_two_findings(tmp_path):
    def backward(stage: int, dp: int) -> float:
        return 40.0 if stage == 2 else 20.0

    found = named(Job(3, 2, 6, num_steps=8, times=long_tail(1), backward=backward), tmp_path)
    assert {*found} == {DATA, ("imbalance.stage", "2")}


def test_a_slow_worker_is_named_beside_uneven_data(tmp_path):
    def backward(stage: int, dp: int) -> float:
        return 32.0 if (stage, dp) == (1, 0) else 20.0

    found = named(Job(2, 3, 6, num_steps=10, times=long_tail(2), backward=backward), tmp_path)
    assert {*found} == {DATA, ("slow.compute", "3")}


def test_forwards_and_backwards_that_vary_each_on_its_own_are_no_uneven_data(tmp_path):
    assert DATA not in named(Job(2, 2, 6, num_steps=8, times=long_tail(3, apart=True)), tmp_path)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_worker_that_became_slow_is_no_uneven_data(stages, tmp_path):
    def times(step: int, dp: int, batch: int) -> tuple[float, float]:
        return (2.0, 2.0) if step >= 5 and dp == 1 else (1.0, 1.0)

    assert DATA not in named(Job(stages, 3, 6, num_steps=10, times=times, noise=0.02), tmp_path)


def test_variation_of_one_percent_is_no_finding_however_correlated(tmp_path):
    def times(step: int, dp: int, batch: int) -> tuple[float, float]:
        size = 1 + 0.02 * ((step + dp + batch) % 2)
        return size, size

    assert named(Job(2, 2, 4, num_steps=10, times=times), tmp_path) == {}
