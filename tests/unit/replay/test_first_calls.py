"""Calls that are the first of a process, and steps that have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.first_calls import COLD_NS, first_calls, with_warm_calls
from dpro.replay.timeline import cold_share, step_ends, usual_steps, warm_up
from tests.builders import US, TinyRun
from tests.unit.replay.whatif.test_baseline import ends_of


def _steps(cold_us: dict[int, float], *, queued: bool = False, known: bool = False) -> TinyRun:
    """Steps of 20 launches of 10 us, and some with one that takes longer.

    Args:
        cold_us: what it takes, by step.
        queued: whether the device has work for as long.
        known: whether its kernel was launched before.
    """
    run = TinyRun()
    at = 0.0
    for step in range(4):
        begin = at
        free = at + 20
        for number in range(20):
            is_last = number == 19
            took = cold_us.get(step, 10.0) if is_last else 10.0
            longest = 2 * max(cold_us.values()) if queued and number == 18 else 5
            starts = max(at + took + 5, free)
            run.call(at, at + took, 100 * step + number)
            free = starts + longest
            name = "add" if known or not is_last else f"reduce {step}"
            run.kernel(name, starts, free, 100 * step + number)
            at += took
        run.step(step, begin, max(at, free) + 20)
        at = max(at, free) + 20
    return run


def _named(run: TinyRun, folder: Path) -> list[tuple[int, int]]:
    return first_calls(run.build(folder).graph).select("step", "took_ns").rows()


def test_a_first_launch_that_takes_far_longer_while_its_device_waits_loads_code(tmp_path):
    assert _named(_steps({1: 900.0}), tmp_path) == [(1, 900 * US)]


def test_a_launch_that_waits_for_room_in_the_queue_loads_nothing(tmp_path):
    assert _named(_steps({1: 900.0}, queued=True), tmp_path) == []


def test_a_launch_of_a_kernel_that_ran_before_loads_nothing(tmp_path):
    assert _named(_steps({1: 900.0}, known=True), tmp_path) == []


@pytest.mark.parametrize(
    ("took_ms", "works", "is_first"), [(100, False, True), (100, True, False), (5, False, False)]
)
def test_a_free_that_takes_long_and_waits_for_nothing_sets_up_its_device(tmp_path, took_ms, works, is_first):
    run = TinyRun()
    run.call(0, 10, 1)
    run.kernel("gemm", 20, 1000 * took_ms if works else 40, 1)
    run.call(50, 50 + 1000 * took_ms, -1, name="cudaFree")
    run.step(0, 0, 100 + 1000 * took_ms)
    assert bool(_named(run, tmp_path)) is is_first


def test_what_is_compiled_in_the_first_step_is_a_start_and_later_it_is_not(tmp_path):
    run = _steps({})
    run.mark("compile_inner (dynamo_timed)", 210, 219)
    run.mark("compile_inner (dynamo_timed)", 440, 449)
    steps = {step for step, _ in _named(run, tmp_path)}
    assert steps == {0}


def test_a_step_with_a_first_call_is_no_usual_one_where_others_have_none(tmp_path):
    graph = _steps({0: 600.0, 2: 600.0}).build(tmp_path).graph
    usual = usual_steps(step_ends(graph, graph.nodes.measured_start, graph.nodes.measured_end))
    assert usual["counted"].to_list() == [False, True, False, True]
    assert cold_share(usual) == 0.0


def test_where_all_steps_have_first_calls_they_count_and_their_share_is_known(tmp_path):
    graph = _steps(dict.fromkeys(range(4), 900.0)).build(tmp_path).graph
    usual = usual_steps(step_ends(graph, graph.nodes.measured_start, graph.nodes.measured_end))
    assert "counted" not in usual.columns
    assert 0.7 < cold_share(usual) < 0.9


def test_steps_before_the_first_usual_one_warm_up():
    assert warm_up(usual_steps(ends_of(43, 5, 5)), True) == 4.3
    assert warm_up(usual_steps(ends_of(500, 5, 5)), True) == 7.0
    assert warm_up(usual_steps(ends_of(5, 5, 43)), True) == 0.0
    assert warm_up(usual_steps(ends_of(5, 5, 5)), True) == 0.0


def test_what_precedes_a_step_that_nothing_marks_is_the_start_of_a_process(tmp_path):
    run = TinyRun()
    run.op("import", 0, 20_000)
    run.call(20_000, 20_010, 1)
    run.kernel("gemm", 20_020, 24_000, 1)
    graph = run.build(tmp_path).graph
    ends = step_ends(graph, graph.nodes.measured_start, graph.nodes.measured_end)
    assert warm_up(ends, False) == 5.0


@pytest.mark.slow
@given(st.lists(st.sampled_from([10.0, 150.0, 600.0, 30_000.0]), min_size=4, max_size=4))
def test_calls_that_are_warm_take_no_longer_than_first_ones_and_others_the_same(tmp_path_factory, took):
    graph = _steps(dict(enumerate(took))).build(tmp_path_factory.mktemp("run")).graph
    before, after = graph.nodes.duration, with_warm_calls(graph).nodes.duration
    assert (after <= before).all()
    assert (before[after != before] >= COLD_NS).all()
    assert np.sum(after != before) == sum(us * US >= COLD_NS for us in took)
