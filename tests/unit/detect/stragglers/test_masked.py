"""Ranks whose host is far slower than its peers', which the step shows only now and then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dpro.detect.baseline import Baseline
from dpro.detect.stragglers.replayed import find_masked
from tests.unit.detect.jobs import MS, Work, equal_work, found_in_graph, graph_of, noisy

STEPS = 8
EVEN, ODD = np.arange(STEPS) % 2 == 0, np.arange(STEPS) % 2 == 1
ALL, PAIRS = [(0, 1, 2, 3)], [(0, 1), (2, 3)]


def half_hidden(plus: float = 20.0, others: np.ndarray = ODD) -> Work:
    """Rank 2 works longer before its pair meets; in some steps rank 0 does elsewhere, and hides that."""
    work = equal_work(4, STEPS, num_collectives=4)
    compute = work.compute.copy()
    compute[2, :, 1] += plus
    compute[0, others, 2] += plus
    return replace(work, compute=compute, groups=[ALL, PAIRS, PAIRS, ALL])


def test_rank_that_is_far_slower_is_named_with_what_it_costs_on_average(tmp_path):
    graph = graph_of(tmp_path, half_hidden())
    (finding,) = found_in_graph(graph)
    assert (finding.class_, finding.component_kind, finding.component_id) == ("slow.host", "rank", "2")
    assert finding.cost_ns == pytest.approx(10 * MS, rel=0.05)
    assert "20 ms longer per step than the slowest of its peers" in finding.evidence[0]
    assert finding.observations[0].values["longer_ns"] == pytest.approx(20 * MS)


def test_rank_that_is_named_already_is_not_named_again(tmp_path):
    assert find_masked(Baseline(graph_of(tmp_path, half_hidden())), named=[2]) == []


def test_what_costs_nothing_is_not_said(tmp_path):
    work = half_hidden(others=ODD | EVEN)
    compute = work.compute.copy()
    compute[0, EVEN, 2], compute[0, EVEN, 3] = 10.0, 30.0  # never long in one place: no rank's fault
    assert find_masked(Baseline(graph_of(tmp_path, replace(work, compute=compute)))) == []


def test_a_first_step_in_which_all_ranks_work_longer_does_not_hide_a_rank(tmp_path):
    # As where the first step allocates memory: what is 20 ms beside 10 is little beside 110.
    work = half_hidden()
    compute = work.compute[:, :4].copy()  # 4 steps: three of four are less than nearly all
    compute[:, 0] += 100.0
    few = replace(work, compute=compute, data=work.data[:, :4], gap=work.gap[:, :4], tail=work.tail[:, :4])
    (finding,) = find_masked(Baseline(graph_of(tmp_path, few)))
    assert finding.ranks == (2,)
    assert "comes last" in finding.evidence[1]


def test_work_that_is_only_somewhat_longer_is_not_said(tmp_path):
    assert find_masked(Baseline(graph_of(tmp_path, half_hidden(plus=4.0)))) == []


def test_one_peer_does_not_show_what_is_usual(tmp_path):
    work = equal_work(2, STEPS, 4)
    compute = work.compute.copy()
    compute[0, :, 1] += 20.0
    assert find_masked(Baseline(graph_of(tmp_path, replace(work, compute=compute)))) == []


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_far_longer_work(seed, tmp_path):
    assert find_masked(Baseline(graph_of(tmp_path, noisy(equal_work(4, STEPS, 4), seed, 0.2)))) == []
