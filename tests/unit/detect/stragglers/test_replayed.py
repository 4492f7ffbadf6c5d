"""Which rank is blamed, for what, and at which cost, on made-up jobs whose truth is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.detect import baseline as baselines
from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.significance import MIN_SHARE
from dpro.detect.stragglers import replayed
from dpro.detect.stragglers.replayed import healing_gains
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.whatif.edits.heal import Shortened, healing
from dpro.schema import COUNTERS, STEPS
from dpro.store import open_run, write_part
from tests.unit.detect.jobs import (
    MS,
    Work,
    equal_work,
    found_in_graph,
    graph_of,
    mean_step_ns,
    noisy,
    slower,
    write_job,
)

EVERYONE = pytest.mark.parametrize("num_ranks", [2, 4, 8])
PARTS = pytest.mark.parametrize(
    ("part", "class_", "where"),
    [
        ("compute", "slow.compute", "aten::addmm"),
        ("data", "slow.host", "the input pipeline"),
        ("gap", "slow.host", "host code outside any operator; record with `dpro record --stacks` to name it"),
        ("tail", "slow.host", "Optimizer.step"),
    ],
)


def diagnosed(tmp_path: Path, work: Work, clock_ms: dict[int, float] | None = None) -> list[Finding]:
    return found_in_graph(graph_of(tmp_path / "run", work, clock_ms))


def blamed(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(finding.class_, finding.component_kind, finding.component_id) for finding in findings]


def test_healing_saves_what_a_replay_of_the_whole_graph_with_healed_ranks_does(tmp_path):
    work = slower(noisy(equal_work(4), 3, 0.05), "compute", 1, plus=10)
    baseline = Baseline(graph_of(tmp_path / "run", work))
    gains = healing_gains(baseline, baseline.work, [[0], [1], [1, 2]])
    assert gains.saved[:, 1].min() > 5 * MS
    for column, ranks in enumerate(gains.ranks):
        healed = Shortened(healing(baseline.graph, ranks, baseline.work))
        after = baseline.changed_step_ns(healed.apply(baseline.graph))
        assert (gains.base - after == gains.saved[:, column]).all()


@pytest.mark.parametrize("few", [0, 8])
@pytest.mark.parametrize("ranks", [[1], [1, 3], [0, 1, 2, 3, 4]])
def test_sets_left_out_because_they_cannot_save_enough_do_not(few, ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "MAX_SETS_UNCONDENSED", few)
    baseline = Baseline(
        graph_of(tmp_path / "run", slower(noisy(equal_work(6), 3, 0.1), "compute", ranks, plus=6))
    )
    sets = [[0], [1], [2], [3], [4], [5], [0, 1], [1, 3], [2, 5], [0, 1, 2, 3, 4, 5]]
    every = healing_gains(baseline, baseline.work, sets)
    large = replayed.large_gains(baseline, baseline.work, sets)
    assert len(large.ranks) < len(sets)
    for ranks_of_set, saved in zip(every.ranks, every.saved.T):
        if ranks_of_set in large.ranks:
            assert (large.saved[:, large.ranks.index(ranks_of_set)] == saved).all()
        else:
            assert saved.mean() < MIN_SHARE * every.base.mean()


@EVERYONE
def test_nothing_is_said_about_ranks_that_do_the_same(num_ranks, tmp_path):
    assert diagnosed(tmp_path, equal_work(num_ranks)) == []


@EVERYONE
@PARTS
def test_the_slow_rank_is_named_and_those_that_wait_for_it_are_not(num_ranks, part, class_, where, tmp_path):
    (finding,) = diagnosed(tmp_path, slower(equal_work(num_ranks), part, 1, plus=10))
    assert (finding.class_, finding.component_kind, finding.component_id) == (class_, "rank", "1")
    assert finding.ranks == (1,)
    assert where in finding.evidence[0]
    assert (finding.place is None) == (part == "gap")  # no span shows what is between operators
    assert finding.place is None or finding.evidence[0].endswith(f": {finding.place.name}")


@PARTS
@pytest.mark.parametrize("rank", [0, 3])
def test_any_rank_can_be_the_slow_one(rank, part, class_, where, tmp_path):
    findings = diagnosed(tmp_path, slower(equal_work(4), part, rank, plus=10))
    assert blamed(findings) == [(class_, "rank", str(rank))]


@pytest.mark.few(12)
@EVERYONE
@PARTS
@pytest.mark.parametrize("plus_ms", [3.0, 12.0, 200.0])
def test_the_cost_is_what_the_job_without_the_fault_saves(num_ranks, part, class_, where, plus_ms, tmp_path):
    work = equal_work(num_ranks)
    slow = graph_of(tmp_path / "slow", slower(work, part, 1, plus=plus_ms))
    healthy = graph_of(tmp_path / "healthy", work)
    (finding,) = found_in_graph(slow)
    saved = mean_step_ns(slow) - mean_step_ns(healthy)
    assert finding.cost_ns == pytest.approx(saved, rel=0.02)
    assert finding.severity == pytest.approx(saved / mean_step_ns(slow), rel=0.02)


def test_the_cost_is_less_than_the_excess_where_the_others_would_have_waited_anyway(tmp_path):
    # In the second section rank 0 is the later one in both jobs, so only part of rank 1's excess counts.
    work = equal_work(2)
    work.compute[0, :, 1] += 8
    slow = work.compute.copy()
    slow[1] += 10
    before = graph_of(tmp_path / "slow", replace(work, compute=slow))
    after = graph_of(tmp_path / "healthy", work)
    saved = mean_step_ns(before) - mean_step_ns(after)
    assert saved == pytest.approx(12 * MS)
    findings = {finding.component_id: finding for finding in found_in_graph(before)}
    # Healed, rank 1 takes what rank 0 takes: 10 ms less in the first section, 2 ms in the second.
    assert findings["1"].cost_ns == pytest.approx(12 * MS, rel=0.02)


def test_the_evidence_names_how_late_the_rank_was_and_what_the_step_would_take(tmp_path):
    (finding,) = diagnosed(tmp_path, slower(equal_work(4), "data", 1, plus=12))
    assert len(finding.evidence) == 3
    assert "rank 1 works 12 ms longer per step" in finding.evidence[0]
    assert finding.evidence[1] == (
        "100% of all waiting in collectives is for rank 1, which comes last to 16 of 16"
    )
    assert "the step takes 47.6 ms instead of 59.6 ms" in finding.evidence[2]
    values = {one.kind: one.values for one in finding.observations}
    assert values["longer-work"]["longer_ns"] == pytest.approx(12 * MS)
    assert values["lateness"]["times"] == 16
    assert values["step-without-it"]["changed_ns"] == pytest.approx(47.6 * MS, rel=0.01)


def test_a_rank_slow_in_one_step_only_is_not_blamed(tmp_path):
    work = equal_work(4)
    work.compute[1, 3] += 200
    assert diagnosed(tmp_path, work) == []


@pytest.mark.parametrize("steps_slow", [1, 2, 4, 6])
def test_a_rank_slow_in_some_steps_only_is_not_blamed(steps_slow, tmp_path):
    work = equal_work(4, num_steps=8)
    work.gap[2, :steps_slow] += 30
    assert diagnosed(tmp_path, work) == []


def test_a_rank_whose_delay_varies_a_lot_but_is_there_in_every_step_is_blamed(tmp_path):
    work = equal_work(4, num_steps=8)
    work.gap[2] += np.array([5, 25, 10, 15, 8, 22, 12, 15])
    (finding,) = diagnosed(tmp_path, work)
    assert finding.component_id == "2"
    assert 0.8 < finding.cost_ns / (14 * MS) < 1.2
    assert finding.confidence < 1


def test_the_cost_of_a_delay_that_varies_is_what_the_job_without_it_saves(tmp_path):
    work = equal_work(4, num_steps=8)
    work.gap[2] += np.array([5, 25, 10, 15, 8, 22, 12, 15])
    (finding,) = diagnosed(tmp_path, work)
    assert finding.cost_ns == pytest.approx(14 * MS, rel=0.05)


def test_each_step_held_up_by_another_rank_blames_no_rank(tmp_path):
    work = equal_work(4, num_steps=8)
    for step in range(8):
        work.compute[step % 4, step] += 10
    assert diagnosed(tmp_path, work) == []


def test_two_ranks_slow_in_different_places_are_both_named_with_their_own_cost(tmp_path):
    # One is late to the first collective, the other to the second: healing either saves its own part.
    work = slower(equal_work(4), "data", 1, plus=12)
    work.compute[3, :, 1] += 6
    findings = diagnosed(tmp_path, work)
    assert blamed(findings) == [("slow.host", "rank", "1"), ("slow.compute", "rank", "3")]
    assert [finding.cost_ns for finding in findings] == pytest.approx([12 * MS, 6 * MS], rel=0.02)


def test_of_two_slow_ranks_the_slower_is_named_and_healing_it_alone_saves_less(tmp_path):
    work = slower(slower(equal_work(8), "compute", 1, plus=6), "compute", 2, plus=4)
    (finding,) = diagnosed(tmp_path, work)
    assert finding.component_id == "1"
    assert finding.cost_ns == pytest.approx(4 * MS, rel=0.02)
    assert "works 12 ms longer" in finding.evidence[0]
    assert "fixing this one alone saves less" in finding.evidence[-1]


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_two_equally_slow_ranks_are_both_named(num_ranks, tmp_path):
    findings = diagnosed(tmp_path, slower(equal_work(num_ranks), "compute", [1, 2], plus=6))
    assert {rank for finding in findings for rank in finding.ranks} == {1, 2}
    assert any("alone saves" in line for finding in findings for line in finding.evidence)


def test_two_ranks_that_hold_each_other_up_in_turn_are_both_named(tmp_path):
    work = equal_work(2)
    work.data[0] += 12
    work.compute[1, :, 1] += 12
    assert {finding.component_id for finding in diagnosed(tmp_path, work)} == {"0", "1"}


def test_one_step_cannot_blame_a_rank(tmp_path):
    assert diagnosed(tmp_path, slower(equal_work(4, num_steps=1), "compute", 1, plus=20)) == []


def test_a_run_of_one_rank_has_no_straggler(tmp_path):
    assert diagnosed(tmp_path, slower(equal_work(1), "compute", 0, plus=20)) == []


def test_ranks_that_call_different_collectives_by_design_are_not_compared(tmp_path):
    # Ranks 0 and 1 call three times among themselves, ranks 2 and 3 twice, with three times the work.
    work = equal_work(4, num_collectives=3)
    work = replace(work, groups=[[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1]]])
    assert diagnosed(tmp_path, slower(work, "compute", [2, 3], times=3)) == []


def test_a_rank_that_calls_what_no_other_calls_is_compared_with_none(tmp_path):
    work = replace(equal_work(3), groups=[[[0, 1, 2]], [[0, 1]]])
    assert diagnosed(tmp_path, slower(work, "compute", 2, plus=30)) == []


def test_a_clock_that_is_ahead_changes_nothing(tmp_path):
    work = noisy(slower(equal_work(4), "data", 1, plus=12), seed=3, sigma=0.02)
    plain = found_in_graph(graph_of(tmp_path / "plain", work, {0: 0, 1: 0, 2: 0, 3: 0}))
    for rank in range(4):
        clocks = {other: 5.0 * (other == rank) for other in range(4)}
        moved = found_in_graph(graph_of(tmp_path / f"moved{rank}", work, clocks))
        assert blamed(moved) == blamed(plain) == [("slow.host", "rank", "1")]
        assert moved[0].cost_ns == pytest.approx(plain[0].cost_ns, rel=0.01)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_slow_rank_of_one_group_is_named_where_ranks_call_in_groups_and_all_together(num_ranks, tmp_path):
    # As with tensor parallelism inside pairs and data parallelism across them.
    pairs = [[rank, rank + 1] for rank in range(0, num_ranks, 2)]
    work = replace(equal_work(num_ranks, num_collectives=3), groups=[pairs, pairs, [list(range(num_ranks))]])
    work = noisy(slower(work, "compute", 1, times=1.5), seed=1, sigma=0.02)
    assert blamed(diagnosed(tmp_path, work)) == [("slow.compute", "rank", "1")]


def test_ranks_that_make_as_many_calls_in_other_groups_are_no_peers(tmp_path):
    """Stages of a pipeline, of which one has more to do."""
    groups = [[[0, 1, 2], [3, 4]]] * 2 + [[range(5)]]
    uneven = slower(equal_work(5, num_collectives=3), "compute", [3, 4], times=1.5)
    assert diagnosed(tmp_path, replace(uneven, groups=groups)) == []


def test_rank_that_became_slow_while_the_job_was_recorded_is_named(tmp_path):
    work = noisy(equal_work(4, num_steps=12), 4, 0.02)
    work.compute[2, 6:] *= 1.5
    (finding,) = diagnosed(tmp_path, work)
    assert (finding.class_, finding.ranks) == ("slow.compute", (2,))
    assert finding.cost_ns == pytest.approx(20 * MS, rel=0.25)  # per step since then
    assert "latest 6 recorded steps" in " ".join(finding.evidence)


def test_rank_that_was_slow_for_a_while_and_no_longer_is_blamed_for_nothing(tmp_path):
    work = noisy(equal_work(4, num_steps=12), 4, 0.02)
    work.compute[2, :6] *= 1.5
    assert diagnosed(tmp_path, work) == []


@pytest.mark.parametrize(
    ("part", "computes", "class_", "cause"),
    [
        ("compute", 1.0, "slow.host", "host code that waits"),
        ("compute", 18.0, "slow.compute", "operators"),
        ("gap", 1.0, "slow.host", "host code that waits"),
        ("gap", 18.0, "slow.host", "host code outside any operator"),
    ],
)
def test_rank_whose_host_takes_longer_and_does_not_compute_is_said_to_wait(
    tmp_path, part, computes, class_, cause
):
    run = write_job(tmp_path / "run", slower(noisy(equal_work(3), 1, 0.01), part, 1, plus=18))
    steps = open_run(run).table(STEPS)
    thread = steps.select(
        "rank", time_ns="start_ns", counter=pl.lit("step_training_thread_cpu_ns")
    ).with_columns(value=(20.0 + pl.when(pl.col("rank") == 1).then(computes).otherwise(0.0)) * MS)
    write_part(run, COUNTERS, "rows", thread)
    (finding,) = found_in_graph(build_graph(open_run(run)).graph)
    assert (finding.class_, finding.cause, finding.ranks) == (class_, cause, (1,))


def test_rank_whose_operators_wait_for_a_core_is_slow_by_its_host(tmp_path):
    run = write_job(tmp_path / "run", slower(noisy(equal_work(3), 1, 0.01), "compute", 1, times=1.5))
    steps = open_run(run).table(STEPS)
    queued = steps.select("rank", time_ns="start_ns", counter=pl.lit("step_run_queue_ns")).with_columns(
        value=pl.when(pl.col("rank") == 1).then(18.0 * MS).otherwise(1.0 * MS)
    )
    write_part(run, COUNTERS, "rows", queued)
    (finding,) = found_in_graph(build_graph(open_run(run)).graph)
    assert (finding.class_, finding.cause, finding.ranks) == ("slow.host", "CPU contention", (1,))
    assert "waits for a CPU core" in finding.evidence[1]
