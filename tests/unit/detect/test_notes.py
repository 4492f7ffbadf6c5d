"""Waits in collectives, and the sentence where most of them are for one rank at no cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dpro.detect.baseline import Baseline, waits
from dpro.detect.notes import note_waiting
from dpro.replay.peers import phase_work
from dpro.replay.timeline import replay
from dpro.replay.whatif.edits.heal import Shortened, healing_in_each_step
from tests.unit.detect.jobs import MS, Work, equal_work, found_in_graph, graph_of, noisy

STEPS = 8


def late_in_turns(plus: float = 10.0, rank: int = 2) -> Work:
    """A rank works longer before another collective in each step: nowhere is that typical."""
    work = equal_work(4, STEPS, num_collectives=4)
    compute = work.compute.copy()
    for step in range(STEPS):
        compute[rank, step, step % 4] += plus
    return replace(work, compute=compute)


def nearly_as_late() -> Work:
    """Rank 2 works longer in turns, and two other ranks nearly as long in the same places."""
    work = late_in_turns(30.0)
    compute = work.compute.copy()
    for step in range(STEPS):
        compute[step % 2, step, step % 4] += 29.9
        compute[3, step, step % 4] += 29.9 * (step % 2)
    return replace(work, compute=compute)


def test_waits_are_until_the_last_member_arrives(tmp_path):
    work = equal_work(3, 2, num_collectives=1)
    work.compute[1, 0, 0] += 5.0
    work.compute[2, 0, 0] += 3.0
    graph = graph_of(tmp_path, work)
    first = waits(graph, graph.nodes.measured_start).filter(step=0).sort("rank")
    assert first["wait_ns"].to_list() == [5 * MS, 0, 2 * MS]
    assert first["last"].to_list() == [1, 1, 1]


def test_rank_that_is_longer_in_another_place_of_each_step_is_named_with_its_cost(tmp_path):
    (finding,) = found_in_graph(graph_of(tmp_path, late_in_turns()))
    assert finding.ranks == (2,)
    assert finding.cost_ns == pytest.approx(10 * MS, rel=0.02)


def test_healing_in_each_step_takes_away_what_the_rank_works_longer_in_that_step(tmp_path):
    graph = graph_of(tmp_path, late_in_turns())
    healed = Shortened(healing_in_each_step(2, phase_work(graph))).durations(graph)
    assert (graph.nodes.duration - healed).sum() == pytest.approx(STEPS * 10 * MS, rel=0.001)
    assert (healed <= graph.nodes.duration).all()
    assert (healed == graph.nodes.duration)[graph.nodes.rank != 2].all()


@pytest.mark.parametrize("seed", range(3))
def test_healing_a_rank_that_is_like_its_peers_in_each_step_saves_hardly_anything(seed, tmp_path):
    graph = graph_of(tmp_path, noisy(equal_work(4, STEPS, 4), seed, 0.05))
    healed = Shortened(healing_in_each_step(1, phase_work(graph))).durations(graph)
    assert replay(graph.with_durations(healed)).end.max() >= 0.98 * replay(graph).end.max()


def test_who_is_waited_for_is_said_with_the_reason_why_it_costs_nothing(tmp_path):
    graph = graph_of(tmp_path, nearly_as_late())
    found = found_in_graph(graph)
    assert found == []
    (note,) = note_waiting(Baseline(graph), found)
    assert "of it for rank 2; it comes last to 8 of 32" in note
    assert "they would then wait" in note


def test_nothing_is_said_of_a_rank_that_a_finding_names(tmp_path):
    graph = graph_of(tmp_path, late_in_turns())
    assert note_waiting(Baseline(graph), found_in_graph(graph)) == []
    assert note_waiting(Baseline(graph), []) != []


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_said_where_all_ranks_are_last_now_and_then(seed, tmp_path):
    graph = graph_of(tmp_path, noisy(equal_work(4, STEPS, 4), seed, 0.2))
    assert note_waiting(Baseline(graph), []) == []


def test_nothing_is_said_where_ranks_hardly_wait(tmp_path):
    assert note_waiting(Baseline(graph_of(tmp_path, late_in_turns(1.0))), []) == []


def test_waiting_for_a_rank_in_one_step_alone_is_said_to_be_so(tmp_path):
    work = equal_work(4, STEPS, 2)
    work.compute[3, 5, 0] += 100.0
    (note,) = note_waiting(Baseline(graph_of(tmp_path, work)), [])
    assert "of it for rank 3, nearly all in step 5" in note


def test_two_ranks_that_are_late_by_turns_give_no_note(tmp_path):
    work = equal_work(4, STEPS, 2)
    compute = work.compute.copy()
    compute[1, np.arange(STEPS) % 2 == 0, 0] += 20.0
    compute[2, np.arange(STEPS) % 2 == 1, 0] += 20.0
    assert note_waiting(Baseline(graph_of(tmp_path, replace(work, compute=compute))), []) == []
