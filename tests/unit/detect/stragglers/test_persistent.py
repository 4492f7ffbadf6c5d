"""Ranks whose work is longer than their peers', where the step waits for them only now and then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dpro.detect.baseline import Baseline
from dpro.detect.stragglers.replayed import clearly_longer, find_persistent, find_stragglers
from dpro.replay.construction.graph_builder import build_graph
from dpro.schema import COUNTERS, STEPS, conform
from dpro.store import open_run, write_part
from tests.unit.detect.jobs import MS, Work, equal_work, found_in_graph, graph_of, write_job

NUM_STEPS = 12


def hidden_by_others(plus: float = 10.0) -> Work:
    """Rank 2 works longer in every step; in one of three another rank does, too."""
    work = equal_work(4, NUM_STEPS, num_collectives=1)
    compute = work.compute.copy()
    compute[2] += plus
    for step in range(NUM_STEPS):
        if step % 3 == 0:
            compute[(0, 1, 3)[step // 3 % 3], step] += plus
    return replace(work, compute=compute)


def test_rank_whose_work_is_longer_is_named_with_what_it_costs_on_average(tmp_path):
    graph = graph_of(tmp_path, hidden_by_others())
    assert find_stragglers(Baseline(graph)) == []
    (finding,) = found_in_graph(graph)
    assert (finding.class_, finding.ranks) == ("slow.compute", (2,))
    assert finding.cost_ns == pytest.approx(10 * MS * 2 / 3, rel=0.05)
    assert finding.evidence[-1].startswith("its work is longer than its peers' typically is in 100% of 12")
    assert finding.observations[-1].values == {"longer_share": 1.0, "steps": 12}


def test_rank_whose_work_is_longer_because_it_is_always_handed_more_is_not_named(tmp_path):
    run = open_run(write_job(tmp_path, hidden_by_others()))
    elements = pl.when(pl.col("rank") == 2).then(1250).otherwise(1000)  # as much more as its work is longer
    counted = run.table(STEPS).select("rank", time_ns="start_ns", value=elements.cast(pl.Float64))
    constants = {"counter": pl.lit("step_input_elements"), "device": pl.lit("host")}
    write_part(run.path, COUNTERS, "rows", conform(COUNTERS, counted.with_columns(**constants)))
    graph = build_graph(open_run(run.path)).graph
    assert find_persistent(Baseline(graph))
    (finding,) = found_in_graph(graph)
    assert (finding.class_, finding.component_kind) == ("imbalance.data", "job")


def test_rank_that_is_named_already_is_not_named_again(tmp_path):
    assert find_persistent(Baseline(graph_of(tmp_path, hidden_by_others())), named=[2]) == []


def test_work_that_is_less_than_a_tenth_longer_is_not_said(tmp_path):
    assert find_persistent(Baseline(graph_of(tmp_path, hidden_by_others(plus=3.0)))) == []


def test_longer_work_of_which_the_step_never_waits_is_not_said(tmp_path):
    work = hidden_by_others()
    compute = work.compute.copy()
    compute[0] = 60.0  # always
    (finding,) = find_persistent(Baseline(graph_of(tmp_path, replace(work, compute=compute))))
    assert finding.ranks == (0,)


@pytest.mark.parametrize("num_ranks", [2, 16])
@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.4])
def test_noise_makes_nobodys_work_longer(sigma, num_ranks):
    random = np.random.default_rng(3)
    for size in (4, 7, 14):
        for _ in range(200):
            assert clearly_longer(1e8 * np.exp(random.normal(0, sigma, (size, num_ranks))), size) == []


def test_a_fifth_more_work_is_clear_in_fourteen_noisy_steps():
    random = np.random.default_rng(4)
    for _ in range(50):
        spent = 1e8 * np.exp(random.normal(0, 0.05, (14, 16)))
        spent[:, 3] *= 1.2
        assert [each.column for each in clearly_longer(spent, 14)] == [3]
