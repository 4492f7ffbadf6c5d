"""What explains the difference of two runs, on jobs whose difference is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpro.errors import Unanswerable
from dpro.replay.difference import MAX_KINDS, REST, DifferenceDocument, explain
from tests.builders import TinyRun
from tests.unit.detect.jobs import Work, equal_work, graph_of, noisy, slower


def compared(tmp_path, a: Work, b: Work) -> DifferenceDocument:
    return explain(graph_of(tmp_path / "a", a), graph_of(tmp_path / "b", b))


def adds_up(found: DifferenceDocument) -> bool:
    whole = sum(each.delta_ms for each in found.contributors) + found.unexplained_ms
    return whole == pytest.approx(found.b_ms - found.a_ms, abs=1e-6)


def test_run_does_not_differ_from_itself(tmp_path):
    found = compared(tmp_path, equal_work(2), equal_work(2))
    assert found.contributors == []
    assert found.unexplained_ms == 0
    assert set(found.by_rank.values()) == {0.0}


def test_slow_rank_contributes_what_the_others_wait_for_it_and_not_their_mean(tmp_path):
    found = compared(tmp_path, equal_work(4), slower(equal_work(4), "data", 2, plus=25.0))
    first = found.contributors[0]
    assert first.name.startswith("enumerate(DataLoader)")
    assert first.delta_ms == pytest.approx(25, rel=0.01)
    assert found.by_rank[2] == pytest.approx(25, rel=0.01)
    assert max(abs(found.by_rank[rank]) for rank in (0, 1, 3)) < 1
    assert adds_up(found)


def test_difference_the_other_way_round_has_the_other_sign(tmp_path):
    plain, slow = equal_work(2), slower(equal_work(2), "tail", [0, 1], plus=7.0)
    forth, back = compared(tmp_path / "1", plain, slow), compared(tmp_path / "2", slow, plain)
    assert forth.contributors[0].delta_ms == pytest.approx(7, rel=0.01)
    assert back.contributors[0].delta_ms == pytest.approx(-7, rel=0.01)


def test_work_that_another_rank_hides_contributes_nothing(tmp_path):
    before = slower(equal_work(2), "compute", 1, plus=30.0)  # rank 0 waits 30 ms per operator
    found = compared(tmp_path, before, slower(before, "compute", 0, plus=10.0))
    assert abs(found.b_ms - found.a_ms) < 0.1
    assert sum(abs(each.delta_ms) for each in found.contributors) < 0.1


def test_slower_network_is_distinguished_from_slower_work(tmp_path):
    plain = equal_work(2)
    found = compared(tmp_path, plain, replace(slower(plain, "gap", [0, 1], plus=3.0), transfer=6.0))
    shares = {each.kind: each.delta_ms for each in found.contributors}
    assert shares["collective"] == pytest.approx(8, rel=0.02)  # two collectives, 4 ms each
    assert shares["host code"] == pytest.approx(3, rel=0.05)
    assert adds_up(found)


def test_runs_of_other_length_and_other_ranks_are_compared_per_step_and_rank(tmp_path):
    found = compared(tmp_path, equal_work(2, 5), slower(equal_work(4, 9), "tail", [0, 1, 2, 3], plus=5.0))
    assert found.b_ms - found.a_ms == pytest.approx(5, rel=0.02)
    assert found.contributors[0].delta_ms == pytest.approx(5, rel=0.02)


def test_work_that_only_one_run_has_is_taken_out_of_that(tmp_path):
    def run(more: bool) -> TinyRun:
        made = TinyRun()
        for step in range(3):
            begin = 1000 * step
            made.op("work", begin, begin + 600)
            made.op("extra" if more else "work", begin + 600, begin + 1000)
            made.step(step, begin, begin + 1000)
        return made

    found = explain(run(False).build(tmp_path / "a").graph, run(True).build(tmp_path / "b").graph)
    shares = {each.name: each.delta_ms for each in found.contributors}
    assert shares["extra"] == pytest.approx(0.4)
    assert shares["work"] == pytest.approx(-0.4)
    assert adds_up(found)


def test_many_kinds_of_work_that_differ_little_are_taken_together(tmp_path):
    def run(times: float) -> TinyRun:
        made = TinyRun()
        at = 0.0
        for step in range(2):
            begin = at
            for kind in range(MAX_KINDS + 10):
                made.op(f"op{kind}", at, at + 10 * times)
                at += 10 * times
            made.step(step, begin, at)
        return made

    found = explain(run(1.0).build(tmp_path / "a").graph, run(1.5).build(tmp_path / "b").graph)
    assert len(found.contributors) == MAX_KINDS + 1
    assert next(each for each in found.contributors if each.name == REST).delta_ms == pytest.approx(0.05)
    assert adds_up(found)


def test_noise_adds_up_too(tmp_path):
    found = compared(
        tmp_path, noisy(equal_work(3), 1, 0.1), noisy(slower(equal_work(3), "data", 1, plus=4.0), 2, 0.1)
    )
    assert adds_up(found)
    assert abs(found.unexplained_ms) < 0.1 * found.a_ms


def test_run_without_a_whole_step_cannot_be_compared(tmp_path):
    run = TinyRun()
    run.op("work", 0, 100)
    run.step(0, 500, 600)
    graph = run.build(tmp_path / "r").graph
    with pytest.raises(Unanswerable, match="complete step"):
        explain(graph, graph)


def test_a_run_whose_steps_take_no_time_is_not_compared(tmp_path):
    run = TinyRun()
    run.op("forward", 5, 5)
    run.call(5, 5, 1)
    run.kernel("gemm", 5, 5, 1)
    none = run.build(tmp_path / "none").graph
    with pytest.raises(Unanswerable, match="takes any time"):
        explain(none, graph_of(tmp_path / "b", equal_work(2)))
