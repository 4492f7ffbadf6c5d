"""What recording cost a job is taken out of its hosts' work: what steps outside windows show, or a prior."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.analysis.graphs import make_graph
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.construction.recording_cost import (
    BY_HOSTS,
    BY_PRIOR,
    BY_STEPS,
    CLOCK_NS,
    IMPORTED,
    MAX_FITTED,
    MAX_SHARE,
    OPERATOR,
    PYTHON_CALL,
    RUNTIME_CALL,
    WITHOUT_GRADIENT,
    Profiler,
    RecordingCost,
    cpu_work,
    find_pace,
    find_recording_cost,
    profiler_of,
)
from dpro.replay.graph import CPU_KINDS, NEVER_NS, Graph, NodeKind, is_one_of
from dpro.replay.steps import steps_of
from dpro.replay.timeline import replay, step_ends, step_lengths
from dpro.schema import STEPS
from dpro.store import open_run
from tests.builders import MAIN, US, TinyRun, cpu_job, tiny_graph

OWN = Profiler(is_own=True)
STEP_US = 80
OPERATOR_NS = OPERATOR * WITHOUT_GRADIENT * CLOCK_NS


def host_bound(steps: int = 3) -> TinyRun:
    """In each step of 80 us an operator of 78 us that calls the runtime for 10 us, for a kernel of 5 us."""
    run = TinyRun()
    for step in range(steps):
        at = step * STEP_US
        run.op("aten::mul", at, at + 78)
        run.call(at + 40, at + 50, step)
        run.kernel("k", at + 51, at + 56, step)
        run.step(step, at, at + STEP_US)
    return run


def with_steps_outside(run: TinyRun, length_us: float, number: int = 20) -> TinyRun:
    """More steps, outside the window, of one length."""
    for step in range(100, 100 + number):
        at = step * 10_000
        run.step(step, at, at + length_us, window=-1)
    return run


def built_of(run: TinyRun, folder) -> Graph:
    run.write(folder)
    return build_graph(open_run(folder)).graph


def mean_step(graph: Graph) -> float:
    timeline = replay(graph)
    return float(step_lengths(step_ends(graph, timeline.start, timeline.end)).mean())


def cost_of(graph: Graph, profiler: Profiler = OWN) -> RecordingCost:
    cost = find_recording_cost(graph, steps_of(graph.run), profiler)
    assert cost is not None
    return cost


def test_an_operator_costs_half_before_and_half_behind_it_and_a_call_inside(tmp_path):
    graph = built_of(host_bound(), tmp_path / "run")
    work = cpu_work(graph, has_shapes=False)
    names = np.array(graph.names)[graph.nodes.name[work.node]]
    mul, call, gap = (
        work.prior[names == name].sum() for name in ("aten::mul", "cudaLaunchKernel", "(no span)")
    )
    # The thread begins with an operator: half of its cost has no gap to lie in.
    assert call == pytest.approx(3 * RUNTIME_CALL * CLOCK_NS)
    assert gap == pytest.approx(2.5 * OPERATOR_NS)
    assert mul == pytest.approx(0.5 * OPERATOR_NS)


def test_steps_outside_windows_say_what_recording_cost(tmp_path):
    # Of 80 us a step the prior would take 0.5 for the operator and 3.6 for its call.
    graph = built_of(with_steps_outside(host_bound(), 72), tmp_path / "run")
    cost = cost_of(graph)
    assert cost.source == BY_STEPS
    running = graph.with_durations(cost.duration)
    assert mean_step(running) == pytest.approx(72 * US, rel=0.01)
    assert cost.table["ns"].sum() == pytest.approx(3 * 7.3 * US, rel=0.1)
    likely, least, most = cost.slowed
    assert least <= likely <= most


def test_what_is_fitted_is_never_more_than_such_a_profiler_can_take(tmp_path):
    graph = built_of(with_steps_outside(host_bound(), 20), tmp_path / "run")
    cost = cost_of(graph)
    most_ns = MAX_FITTED * (OPERATOR_NS + RUNTIME_CALL * CLOCK_NS)
    assert 0.9 * most_ns < cost.table["ns"].sum() / 3 <= 1.01 * most_ns


def test_steps_in_windows_that_are_no_longer_than_others_lose_nothing(tmp_path):
    cost = cost_of(built_of(with_steps_outside(host_bound(), 85), tmp_path / "run"))
    assert cost.table["ns"].sum() == 0
    assert cost.slowed[0] == 1.0


def test_without_other_steps_a_prior_is_taken_of_the_recorder_and_half_of_another_profiler(tmp_path):
    graph = built_of(host_bound(), tmp_path / "run")
    ours, other = cost_of(graph), cost_of(graph, Profiler())
    assert ours.source == other.source == BY_PRIOR
    per_step = (OPERATOR_NS + RUNTIME_CALL * CLOCK_NS) * 3
    assert ours.table["ns"].sum() == pytest.approx(per_step, rel=0.05)
    assert other.table["ns"].sum() == pytest.approx(IMPORTED[0] * per_step, rel=0.05)
    assert other.table["low_ns"].sum() == 0  # it may have cost nothing
    assert ours.table["low_ns"].sum() > 0


def test_stacks_cost_something_whoever_recorded_them(tmp_path):
    run = host_bound()
    for step in range(3):
        run.span("python", "train.py(7): step", step * 80 + 78.5, step * 80 + 79.5, pid=MAIN, tid=MAIN)
    cost = cost_of(built_of(run, tmp_path / "run"), Profiler())
    assert cost.table.filter(kind="Python call")["events"].sum() == 3
    assert 0 < cost.table["low_ns"].sum() <= 3 * PYTHON_CALL * CLOCK_NS


def test_the_speed_of_the_machine_scales_the_prior(tmp_path):
    run = host_bound()
    for number in range(5):
        at = 300 + number * 5
        run.op("aten::as_strided", at, at + 0.9)
    slow = cost_of(built_of(run, tmp_path / "run"))
    plain = cost_of(built_of(host_bound(), tmp_path / "plain"))
    calls = [cost.table.filter(kind="runtime call")["ns"].sum() for cost in (slow, plain)]
    assert calls[0] / calls[1] == pytest.approx(900 / CLOCK_NS, rel=0.02)


def test_no_prior_takes_more_than_a_third_of_the_host(tmp_path):
    run = TinyRun()
    for number in range(200):
        run.op("aten::add", number, number + 1)
    run.step(0, 0, 200)
    cost = cost_of(built_of(run, tmp_path / "run"))
    (hosts,) = cost.hosts.iter_rows(named=True)
    assert hosts["likely_ns"] >= (1 - MAX_SHARE) * hosts["recorded_ns"] * 0.999


def test_a_gpu_bound_step_stays_and_its_hosts_become_faster(tmp_path):
    run = TinyRun()
    for step in range(3):
        at = step * 500
        run.op("aten::mul", at, at + 100)
        run.call(at + 90, at + 100, step)
        run.kernel("k", at + 101, at + 599, step)
        run.step(step, at, at + 500)
    graph = built_of(with_steps_outside(run, 480), tmp_path / "run")
    cost = cost_of(graph)
    assert cost.source == BY_PRIOR  # steps show nothing of it: the device hides it
    running = graph.with_durations(cost.duration)
    assert mean_step(running) == pytest.approx(mean_step(graph), rel=0.01)
    assert cost.slowed[0] > 1


def test_hosts_that_run_ahead_of_their_device_say_it_by_their_own_pace(tmp_path):
    run = TinyRun()
    for step in range(4):
        at = step * 100
        run.op("aten::mul", at, at + 90)
        run.call(at + 80, at + 90, step)
        run.kernel("k", 91 + step * 300, 391 + step * 300, step)
        run.step(step, at, at + 100, gpu_step_ns=300 * US)
    for step in range(100, 120):
        at = step * 10_000
        run.step(step, at, at + 96, window=-1, gpu_step_ns=300 * US)
    cost = cost_of(built_of(run, tmp_path / "run"))
    assert cost.source == BY_HOSTS
    assert cost.hosts["recorded_ns"][0] - cost.hosts["likely_ns"][0] == pytest.approx(4 * 4 * US, rel=0.3)


def test_an_execution_trace_costs_an_unknown_amount(tmp_path):
    run = open_run(cpu_job().write(tmp_path / "run").path)
    assert profiler_of(run) is not None
    manifest = dataclasses.replace(run.manifest, options={"execution_trace": True})
    assert profiler_of(dataclasses.replace(run, manifest=manifest)) is None


def test_nothing_is_known_of_a_trace_without_operators(tmp_path):
    run = TinyRun()
    run.call(0, 10, 1)
    run.kernel("k", 11, 20, 1)
    graph = built_of(run, tmp_path / "run")
    assert find_recording_cost(graph, STEPS.empty(), OWN) is None


@pytest.mark.slow
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.floats(0, 3))
def test_no_work_becomes_negative_and_no_more_is_taken_than_asked_for(lengths, scale):
    run, at = TinyRun(), 0
    for length in lengths:
        run.op("aten::add", at, at + length)
        at += length + 1
    graph = build_graph_of(run)
    work = cpu_work(graph, has_shapes=False)
    left = work.without(graph, np.full(len(work.cells), scale))
    assert (left >= 0).all()
    assert (left <= graph.nodes.duration).all()
    taken = float((graph.nodes.duration - left).sum())
    assert taken <= scale * work.prior.sum() + work.node.size
    untouched = ~is_one_of(graph.nodes.kind, CPU_KINDS)
    assert (left[untouched] == graph.nodes.duration[untouched]).all()


def build_graph_of(run: TinyRun) -> Graph:
    """The graph of a run that is written nowhere for long."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return built_of(run, Path(folder) / "run")


def test_the_table_says_of_each_rank_and_window_what_was_taken_out(tmp_path):
    cost = cost_of(built_of(host_bound(), tmp_path / "run"))
    assert cost.table.select("rank", "window", "kind", "events").rows() == [
        (0, 0, "operator", 3),
        (0, 0, "runtime call", 3),
    ]
    assert isinstance(cost.hosts, pl.DataFrame)
    assert cost.table["ns"].sum() == pytest.approx(
        (cost.hosts["recorded_ns"] - cost.hosts["likely_ns"]).sum(), rel=1e-6
    )


@pytest.mark.parametrize(
    ("outside_us", "number", "pace"),
    [
        (40, 20, 40 / 80),  # more than recording can have taken
        (120, 20, 120 / 80),
        (85, 20, 1),  # about as long
        (40, 4, 1),  # too few
        (20, 20, 1),  # too far from them to be the same steps
    ],
)
def test_steps_are_as_long_as_outside_windows(tmp_path, outside_us, number, pace):
    run = with_steps_outside(host_bound(), outside_us, number).write(tmp_path / "run")
    unscaled = build_graph(run).graph
    assert find_pace(unscaled, steps_of(run)) == pytest.approx(pace, rel=0.02)


@pytest.mark.parametrize(("outside_us", "pace"), [(120, 1), (40, 40 / 80)])
def test_devices_that_windows_slowed_for_good_set_no_longer_step(tmp_path, outside_us, pace):
    job = with_steps_outside(host_bound(), outside_us)
    for row in job.rows[STEPS.name]:
        row["gpu_step_ns"] = row["duration_ns"]
    run = job.write(tmp_path / "run")
    assert steps_of(run)["by_device"].all()
    assert find_pace(build_graph(run).graph, steps_of(run)) == pytest.approx(pace, rel=0.02)


def test_a_job_runs_at_the_pace_of_its_steps_outside_windows(tmp_path):
    run = with_steps_outside(host_bound(), 40).write(tmp_path / "run")
    built, trust = make_graph(run)
    assert mean_step(built.predictive) == pytest.approx(40 * US, rel=0.01)
    shares = [
        replay(graph).start[graph.nodes.kind == NodeKind.KERNEL].tolist()
        for graph in (replace(built, pace=1.0).predictive, built.predictive)
    ]
    assert shares[1] == pytest.approx(np.array(shares[0]) * built.pace, abs=10)
    # What recording cost is separate from what else was slower in windows.
    assert trust.taken_out * trust.pace == pytest.approx(built.recording.slowed[0], rel=0.05)


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=20),
    st.integers(-(10**8), 10**8),
    st.floats(0.4, 2.5),
)
def test_at_another_pace_all_takes_so_many_times_as_long(durations, lag, pace):
    edges = [(node - 1, node, lag if node % 3 else NEVER_NS) for node in range(1, len(durations))]
    earliest = [number * 10**8 for number, _ in enumerate(durations)]
    graph = tiny_graph(durations, edges, earliest=earliest)
    expected = replay(graph).end * pace
    assert replay(graph.at_pace(pace)).end.tolist() == pytest.approx(expected, abs=3 * len(durations))
