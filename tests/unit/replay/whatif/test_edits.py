"""Edits on two tiny jobs, one on CPUs and one on GPUs: what must hold of any edit, and small ones by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import Trust, assess
from dpro.replay.graph import CPU_KINDS, EdgeKind, Graph, NodeKind
from dpro.replay.peers import phase_work
from dpro.replay.timeline import (
    changed_durations,
    durations_of,
    replay,
    replay_durations,
    step_lengths,
    step_times,
)
from dpro.replay.whatif.edits.communication import Network, NoCommunication
from dpro.replay.whatif.edits.heal import Heal, RanksAt, Shortened, healing, healing_in_each_step
from dpro.replay.whatif.edits.host import NoLaunch
from dpro.replay.whatif.edits.selected_work import Scale
from dpro.replay.whatif.edits.training_loop import HideInput
from dpro.replay.whatif.graph_ops.selected import KINDS, NodeSelection
from dpro.replay.whatif.predict import baseline_steps, predict, ranked
from dpro.replay.whatif.registry import parse_edit
from dpro.replay.whatif.search import explore
from tests.builders import COMM, COMPUTE, US, Seen, TinyRun, cpu_job, gpu_job, tiny_graph


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, tuple[Graph, Trust]]:
    """Both jobs with how well they replay."""
    found = {}
    for name, job in (("cpu", cpu_job()), ("gpu", gpu_job())):
        run = job.write(tmp_path_factory.mktemp(name) / "run")
        built = build_graph(run)
        found[name] = built.graph, assess(built, replay(built.graph), run.manifest)
    return found


job_names = st.sampled_from(["cpu", "gpu"])
selections = st.builds(
    NodeSelection,
    name=st.sampled_from(["", "*", "aten::*", "gemm", "*mm*", "nccl*", "nothing at all"]),
    within=st.sampled_from(["", "*", "dpro::backward", "enumerate(DataLoader)*"]),
    kind=st.sampled_from(["", *KINDS]),
    rank=st.none() | st.integers(0, 3),
    step=st.none() | st.integers(0, 4),
    stream=st.sampled_from([None, COMPUTE, COMM]),
    op=st.sampled_from(["", "all_*"]),
)


def _steps(graph: Graph) -> list[int]:
    timeline = replay(graph)
    return step_times(graph, timeline.start, timeline.end)["duration_ns"].to_list()


def _same(a: Graph, b: Graph) -> bool:
    left, right = replay(a), replay(b)
    return bool((left.start == right.start).all() and (left.end == right.end).all())


@given(job_names, selections)
def test_work_scaled_by_one_changes_nothing(jobs, job, selection):
    graph, _ = jobs[job]
    if not selection.mask(graph).any():
        return
    changed = Scale(selection, 1.0).apply(graph)
    assert (changed.nodes.duration == graph.nodes.duration).all()
    assert _same(changed, graph)


@pytest.mark.parametrize("job", ["cpu", "gpu"])
def test_a_network_as_fast_as_it_was_changes_nothing(jobs, job):
    assert _same(Network(1.0).apply(jobs[job][0]), jobs[job][0])


@given(job_names, selections, selections, st.integers(0, 30), st.integers(0, 30))
def test_scaling_disjoint_selections_in_either_order_is_the_same(jobs, job, one, other, a, b):
    graph, _ = jobs[job]
    mask, mask_of_other = one.mask(graph), other.mask(graph)
    if not mask.any() or not mask_of_other.any() or (mask & mask_of_other).any():
        return
    first, second = Scale(one, a / 10), Scale(other, b / 10)
    assert _same(second.apply(first.apply(graph)), first.apply(second.apply(graph)))


@given(job_names, selections, st.integers(0, 10))
def test_taking_work_away_lets_nothing_end_later(jobs, job, selection, tenths):
    graph, _ = jobs[job]
    if not selection.mask(graph).any():
        return
    faster = Scale(selection, tenths / 10).apply(graph)
    assert (replay(faster).end <= replay(graph).end).all()
    assert sum(_steps(faster)) <= sum(_steps(graph))


@given(job_names, st.data())
def test_removing_dependencies_lets_nothing_start_later(jobs, job, data):
    graph, _ = jobs[job]
    seed = data.draw(st.integers(0, 1_000_000))
    drop = np.random.default_rng(seed).random(graph.edges.lag.size) < 0.3
    assert (replay(graph.without_edges(drop)).start <= replay(graph).start).all()


@pytest.mark.parametrize("job", ["cpu", "gpu"])
@pytest.mark.parametrize("rank", [0, 1])
def test_healing_never_lengthens_any_step_nor_any_node(jobs, job, rank):
    graph, _ = jobs[job]
    healed = Heal(RanksAt(rank)).apply(graph)
    assert (healed.nodes.duration <= graph.nodes.duration).all()
    assert (healed.nodes.duration == graph.nodes.duration)[graph.nodes.rank != rank].all()
    assert all(after <= before for after, before in zip(_steps(healed), _steps(graph)))


def test_healing_the_slow_rank_takes_its_slowness_away_and_healing_another_does_not(jobs):
    graph, _ = jobs["cpu"]
    before = np.mean(_steps(graph))
    # Rank 1's input takes 400 longer than its peers', give or take the noise of 30 per piece.
    assert before - np.mean(_steps(Heal(RanksAt(1)).apply(graph))) == pytest.approx(400 * US, abs=45 * US)
    assert before - np.mean(_steps(Heal(RanksAt(0)).apply(graph))) < 15 * US


def test_healing_leaves_the_noise_of_single_steps_alone(tmp_path):
    # Rank 1 is slow once in five steps: not its nature, so its median is its peers'.
    run = TinyRun()
    begin = 0.0
    for step in range(5):
        lengths = [100, 100 + (500 if step == 2 else 0), 100]
        moved = begin + max(lengths) + 50
        for rank, length in enumerate(lengths):
            run.op("work", begin, begin + length, rank)
            run.gloo((begin + length, begin + length + 5), (begin + length + 2, moved), rank, sequence=step)
            run.op("rest", moved + 1, moved + 20, rank)
            run.step(step, begin, moved + 20, rank)
        begin = moved + 20
    graph = run.build(tmp_path / "r").graph
    assert _steps(Heal(RanksAt(1)).apply(graph)) == _steps(graph)


def _work(rows: list[tuple[int, int, int, int, int]]) -> pl.DataFrame:
    """Work of phases on the CPU: rank, step, position, a code of its name, ns."""
    frame = pl.DataFrame(rows, ["rank", "step", "position", "name", "work_ns"], orient="row")
    same = {"resource": 0, "around": -1, "calls": 1}
    return frame.with_columns(pl.lit(value, pl.Int64).alias(name) for name, value in same.items())


def test_healing_takes_no_more_from_work_than_that_work_is_longer(jobs):
    # In each step another piece of three is longer on rank 1: none of them typically. The fourth always is.
    rows = [
        (rank, step, 0, name, 100 + 100 * (rank == 1 and name == step))
        for rank in (0, 1) for step in range(3) for name in range(3)
    ] + [(rank, step, 0, 3, 50 + 10 * rank) for rank in (0, 1) for step in range(3)]  # fmt: skip
    healed = healing(jobs["cpu"][0], [1], _work(rows))
    assert healed.select("name", "ratio").rows() == [(3, pytest.approx(1 - 10 / 60))]


def test_healing_in_each_step_takes_nothing_where_the_step_as_a_whole_is_shorter():
    longer, shorter = [(1, 0, 0, 0, 130), (1, 0, 1, 0, 100)], [(1, 1, 0, 0, 110), (1, 1, 1, 0, 70)]
    usual = [(0, step, position, 0, 100) for step in (0, 1, 2) for position in (0, 1)]
    equal = [(1, 2, 0, 0, 100), (1, 2, 1, 0, 100)]
    healed = healing_in_each_step(1, _work([*usual, *longer, *shorter, *equal])).sort("step", "position")
    assert healed["ratio"].to_list() == pytest.approx([100 / 130, 1, 1, 1, 1, 1])


def test_healing_many_ranks_at_once_gives_each_as_by_itself(jobs):
    graph, _ = jobs["cpu"]
    healed = Shortened(healing(graph, [0, 1, 2], phase_work(graph)))
    together = healed.durations(graph)
    for rank in [0, 1, 2]:
        alone, mine = Heal(RanksAt(rank)).apply(graph).nodes.duration, graph.nodes.rank == rank
        assert (np.where(mine, together, graph.nodes.duration) == alone).all()
        assert (healed.of(rank).durations(graph) == alone).all()


def test_a_rank_that_is_not_there_cannot_be_healed(jobs):
    with pytest.raises(Unanswerable, match="rank 17 is not in the run, which has ranks 0, 1"):
        Heal(RanksAt(17)).apply(jobs["cpu"][0])


def test_a_rank_without_peers_cannot_be_healed(tmp_path):
    run = TinyRun()
    run.step(0, 0, 100)
    run.op("alone", 0, 100)
    with pytest.raises(Unanswerable, match="no peer"):
        Heal(RanksAt(0)).apply(run.build(tmp_path / "r").graph)


def test_twice_the_bandwidth_halves_transfers_and_touches_nothing_else(jobs):
    for graph, _ in jobs.values():
        faster = Network(2.0).apply(graph)
        transfer = graph.nodes.kind == NodeKind.TRANSFER
        assert (faster.nodes.duration[transfer] * 2 == graph.nodes.duration[transfer]).all()
        assert (faster.nodes.duration == graph.nodes.duration)[~transfer].all()
        assert faster.edges is graph.edges


def test_faster_transfers_shorten_an_exposed_collective_by_as_much(jobs):
    graph, _ = jobs["gpu"]
    # The all-reduce of 120 from the last arrival is not hidden by anything.
    gain = np.array(_steps(graph)) - np.array(_steps(Network(2.0).apply(graph)))
    assert gain.tolist() == [60 * US] * 3


def test_without_communication_each_rank_is_alone(jobs):
    for graph, _ in jobs.values():
        alone = NoCommunication().apply(graph)
        assert not (alone.edges.kind == EdgeKind.RENDEZVOUS).any()
        slower = alone.nodes.duration.copy()
        slower[(alone.nodes.rank == 1) & np.isin(alone.nodes.kind, (*CPU_KINDS, NodeKind.KERNEL))] *= 7
        others = (alone.nodes.rank != 1) & (alone.nodes.rank >= 0)
        assert (replay(alone.with_durations(slower)).end == replay(alone).end)[others].all()
        # With communication they are not.
        slower_graph = graph.with_durations(
            np.where(alone.nodes.kind == NodeKind.TRANSFER, graph.nodes.duration, slower)
        )
        assert (replay(slower_graph).end > replay(graph).end)[others].any()


def test_free_launches_cost_nothing_and_a_negative_latency_stays(jobs):
    graph, _ = jobs["gpu"]
    free = NoLaunch().apply(graph)
    launch = free.edges.kind == EdgeKind.LAUNCH
    assert (free.edges.lag[launch] <= 0).all()
    calls = np.unique(free.edges.source[launch])
    assert (free.nodes.duration[calls] == 0).all()
    untouched = np.setdiff1d(np.arange(graph.num_nodes), calls)
    assert (free.nodes.duration == graph.nodes.duration)[untouched].all()


def test_a_launch_latency_that_was_negative_is_not_made_longer(tmp_path):
    run = TinyRun()
    run.step(0, 0, 700)
    for index in range(3):
        begin = 200 * index
        run.call(begin, begin + 60, index)
        run.kernel("gemm", begin + 40, begin + 90, index)
    free = NoLaunch().apply(run.build(tmp_path / "r").graph)
    assert (free.edges.lag[free.edges.kind == EdgeKind.LAUNCH] == -20 * US).all()


@pytest.mark.parametrize(
    ("job", "edit", "reason"),
    [
        ("cpu", NoLaunch(), "no GPU launches"),
        ("gpu", HideInput(), "the run has no DataLoader"),
        ("gpu", Scale(NodeSelection(name="aten::conv2d"), 0.5), "nothing in the run fits name=aten::conv2d"),
    ],
)
def test_what_the_run_lacks_is_refused_with_the_reason(jobs, job, edit, reason):
    with pytest.raises(Unanswerable, match=reason):
        edit.apply(jobs[job][0])


def test_communication_cannot_be_changed_where_there_is_none():
    graph = tiny_graph([1, 2], [(0, 1, 0)])
    for edit in (Network(2.0), NoCommunication()):
        with pytest.raises(Unanswerable, match="no communication"):
            edit.apply(graph)


def test_hiding_the_input_makes_the_step_start_with_forward(jobs):
    graph, _ = jobs["cpu"]
    hidden = Seen(HideInput().apply(graph))
    assert hidden.start("aten::mm", rank=1) == hidden.start("aten::mm", rank=0) == 0


def test_an_edit_never_changes_the_graph_it_is_given(jobs):
    for graph, _ in jobs.values():
        before = replay(graph)
        for edit in (Heal(RanksAt(1)), Network(4.0), NoCommunication(), Scale(NodeSelection(), 0.1)):
            edit.apply(graph)
        assert (replay(graph).end == before.end).all()


def _selected(graph: Graph, **conditions) -> set[str]:
    mask = NodeSelection(**conditions).mask(graph)
    return {graph.names[name] for name in graph.nodes.name[mask]}


def test_selections_by_name_kind_rank_step_and_surrounding_annotation(jobs):
    graph, _ = jobs["cpu"]
    assert _selected(graph, name="aten::mm") == {"aten::mm"}
    assert _selected(graph, name="aten::*mm*") == {"aten::mm", "aten::mm_backward"}
    assert _selected(graph, kind="collective") == {"gloo:all_reduce"}
    assert _selected(graph, within="Optimizer.step#*", kind="cpu") == {"aten::addcmul"}
    assert _selected(graph, name="ATEN::MM") == set()  # names are not folded
    mask = NodeSelection(rank=1, step=2).mask(graph)
    assert set(graph.nodes.rank[mask]) == {1}
    assert set(graph.nodes.step[mask]) == {2}
    assert not (NodeSelection().mask(graph) & (graph.nodes.kind == NodeKind.RENDEZVOUS)).any()
    gpu, _ = jobs["gpu"]
    assert _selected(gpu, kind="kernel") == {"gemm", "softmax", "norm", "adam"}
    assert _selected(gpu, name="ncclDevKernel") == {"ncclDevKernel"}


def test_a_name_with_brackets_selects_itself():
    graph = tiny_graph([1, 2], [], names=["copy[0]", "copy0"])
    assert _selected(graph, name="copy[0]") == {"copy[0]", "copy0"}  # as a pattern it also means copy0


conditions = st.lists(
    st.sampled_from(
        ["heal:rank=1", "network:bandwidth=3", "scale:rank=0,factor=0.3", "no-comm", "scale:factor=2"]
    ),
    max_size=3,
)


@given(job_names, conditions, st.floats(0, 20))
def test_the_interval_contains_the_prediction(jobs, job, edits, error_pct):
    graph, trust = jobs[job]
    trust = dataclasses.replace(trust, error_pct=error_pct)
    prediction = predict(graph, baseline_steps(graph), [parse_edit(text) for text in edits], trust)
    assert 0 <= prediction.low_ns <= prediction.predicted_ns <= prediction.high_ns
    if not edits:
        assert prediction.speedup == 1.0


def test_a_poorer_fit_widens_the_interval(jobs):
    graph, trust = jobs["cpu"]
    baseline, edit = baseline_steps(graph), [Heal(RanksAt(1))]
    sure = predict(graph, baseline, edit, dataclasses.replace(trust, error_pct=0.0))
    unsure = predict(graph, baseline, edit, dataclasses.replace(trust, error_pct=10.0))
    assert unsure.predicted_ns == sure.predicted_ns
    assert unsure.high_ns - unsure.low_ns > sure.high_ns - sure.low_ns


def test_another_recording_may_differ_by_more_where_steps_do(jobs):
    graph, trust = jobs["cpu"]
    unchanged = predict(graph, baseline_steps(graph), [], dataclasses.replace(trust, error_pct=0.0))
    steps = np.array(_steps(graph), np.float64)
    deviation = steps.std(ddof=1)
    assert deviation > 0
    half = 2 * np.hypot(deviation / np.sqrt(steps.size), 0.6 * deviation)
    fit = abs(unchanged.predicted_ns / float(trust.steps["measured_ns"].mean()) - 1) * unchanged.predicted_ns
    assert unchanged.high_ns - unchanged.predicted_ns == pytest.approx(half + fit)


def test_what_an_edit_assumes_widens_the_interval(jobs):
    graph, trust = jobs["cpu"]
    trust = dataclasses.replace(trust, error_pct=0.0)
    baseline = baseline_steps(graph)
    widths = []
    for doubt in (0.0, 0.5):
        prediction = predict(graph, baseline, [Heal(RanksAt(1), doubt=doubt)], trust)
        widths.append(prediction.high_ns - prediction.low_ns)
    gain = np.mean(_steps(graph)) - np.mean(_steps(Heal(RanksAt(1)).apply(graph)))
    assert widths[1] - widths[0] == pytest.approx(2 * 0.5 * gain)


def test_edits_compose_in_the_order_given(jobs):
    graph, trust = jobs["cpu"]
    baseline = baseline_steps(graph)
    changed = Network(2.0).apply(Heal(RanksAt(1)).apply(graph))
    both = predict(graph, baseline, [Heal(RanksAt(1)), Network(2.0)], trust)
    by_hand = changed_durations(baseline, changed, replay(changed).end).mean()
    assert both.predicted_ns == by_hand
    assert both.edits == (Heal(RanksAt(1)), Network(2.0))
    assert both.speedup == pytest.approx(step_lengths(baseline).mean() / by_hand)


@pytest.mark.parametrize("job", ["cpu", "gpu"])
def test_searching_twice_finds_the_same_ranked_and_each_can_be_asked_for(jobs, job):
    graph, trust = jobs[job]
    first, second = explore(graph, trust), explore(graph, trust)
    assert (first.predictions, first.refused) == (second.predictions, second.refused)
    assert first.predictions == ranked(first.predictions)
    assert all(parse_edit(str(edit)) == edit for prediction in first.predictions for edit in prediction.edits)


def test_the_search_finds_what_was_made_slow_and_says_what_it_cannot_answer(jobs):
    graph, trust = jobs["cpu"]
    found = explore(graph, trust)
    predictions, refused = found.predictions, found.refused
    assert str(predictions[0].edits[0]) == "hide-input"
    assert ["heal:rank=1"] in [list(map(str, prediction.edits)) for prediction in predictions]
    assert "no-launch" in [refusal.edit for refusal in refused]
    gpu, gpu_trust = jobs["gpu"]
    largest = max(explore(gpu, gpu_trust).predictions, key=lambda prediction: prediction.speedup)
    assert str(largest.edits[0]) == "heal:rank=1"


def test_without_a_whole_step_nothing_is_predicted(tmp_path):
    run = TinyRun()
    run.op("work", 0, 100)
    run.step(0, 500, 600)  # lies after everything that was recorded
    with pytest.raises(Unanswerable, match="complete step"):
        baseline_steps(run.build(tmp_path / "r").graph)


def test_a_run_without_step_marks_counts_each_window_as_one_step(tmp_path):
    run = TinyRun()
    run.op("work", 0, 100)
    assert durations_of(baseline_steps(run.build(tmp_path / "r").graph)).rows() == [(0, 0, 100 * US)]


def test_batched_healing_predicts_the_same_step_times_as_one_replay_each(jobs):
    graph, _ = jobs["cpu"]
    alone = [Heal(RanksAt(rank)).apply(graph) for rank in [0, 1, 2]]
    durations = np.stack([each.nodes.duration for each in alone], axis=1)
    ends = replay_durations(graph, durations)
    for column in range(3):
        frame = step_times(graph, ends[:, column] - durations[:, column], ends[:, column])
        assert frame.equals(pl.DataFrame(step_times(graph, *_times(alone[column]))))


def _times(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    timeline = replay(graph)
    return timeline.start, timeline.end
