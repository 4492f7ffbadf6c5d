"""Runs of whole operations: small pipelines worked out by hand, the slow twin, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.detect.pipeline_slowdown import without_launches
from dpro.errors import Unanswerable
from dpro.replay.construction.graph_builder import Built, build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.timeline import critical_nodes, measured_step_times, replay, step_times
from dpro.replay.whatif.registry import parse_edit
from tests.pipelines import MS, Job, written
from tests.reference.event_driven import simulate

# 2 stages x 2 micro-batches x 2 data-parallel ranks with the times of `Job`, by hand, in ms. Gathered at 3.
# Stage 0: F0 3-13, F1 13-23. F0 arrives on stage 1 at 14: F0 14-24, B0 24-44; B0 arrives on stage 0 at 45.
# Stage 1: F1 44-54, B1 54-74. Stage 0: B0 45-65; B1 arrives at 75: B1 75-95.
# Scatter ends at 95 + 5 = 100, the norm at 102, the update at 106.
BY_HAND = 106


def built(rows: list[dict[str, Any]], folder: Path) -> Built:
    return build_graph(written(rows, folder))


def changed(graph: Graph, *edits: str) -> list[float]:
    """Step times in ms under edits."""
    for edit in edits:
        graph = parse_edit(edit).apply(graph)
    timeline = replay(graph)
    return (step_times(graph, timeline.start, timeline.end)["duration_ns"] / MS).to_list()


def test_two_stages_and_two_micro_batches_end_when_worked_out_by_hand(tmp_path):
    graph = built(Job().run(), tmp_path).graph
    assert changed(graph) == [BY_HAND]
    assert (replay(graph).start == graph.nodes.measured_start).all()


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        # F0 and F1 of stage 0 twice as long: 3-23, 23-43. Stage 1: F0 24-34, B0 34-54, F1 54-64, B1 64-84;
        # stage 0: B1 85-105, then 11 more.
        ("scale:name=forward-compute,stage=0,factor=2", 116),
        # Stage 1 without backward: F0 14-24; F1's receive is posted then: F1 25-35. B0 arrives on stage 0 at
        # 25: B0 25-45. B1's receive is posted then: B1 46-66, then 11 more.
        ("scale:name=backward-compute,stage=1,factor=0", 77),
        # One of two data-parallel ranks twice as fast changes nothing: the other scatters last.
        ("scale:dp=0,name=*-compute,factor=0.5", BY_HAND),
        # One rank's forward 5 ms longer each: 116 - 106 is 10, half of it.
        ("scale:name=forward-compute,rank=1,factor=1.5", 111),
        # Messages for nothing: the three on the path (F0 up, B1 down, and none else) save 1 each.
        ("scale:name=*-send,factor=0", BY_HAND),
        ("scale:name=*-recv,factor=0", BY_HAND - 2),
        ("scale:name=forward-compute,factor=0.5,within=micro-batch 0,stage=1", BY_HAND - 5),
        # Gather, both messages, scatter and norm are 12 in all; computes stay in their order across stages.
        ("no-comm", BY_HAND - 12),
    ],
)
def test_an_edit_moves_the_end_as_worked_out_by_hand(edit, expected, tmp_path):
    assert changed(built(Job().run(), tmp_path).graph, edit) == [expected]


def test_steps_follow_one_another_and_are_edited_one_by_one(tmp_path):
    graph = built(Job(num_steps=3).run(), tmp_path).graph
    assert changed(graph) == [BY_HAND] * 3
    assert changed(graph, "scale:name=optimizer,step=1,factor=0") == [BY_HAND, BY_HAND - 4, BY_HAND]


def test_launch_delays_are_replayed_and_are_free_under_an_edit(tmp_path):
    late = built(Job(late=0.5).run(), tmp_path / "late").graph
    prompt = built(Job().run(), tmp_path / "prompt").graph
    assert changed(late) == pytest.approx([float(measured_step_times(late)["duration_ns"][0]) / MS], abs=0)
    assert changed(late)[0] > BY_HAND
    assert changed(late, "no-launch") == pytest.approx(changed(prompt), abs=1e-5)


def test_transfers_are_separated_from_waiting_and_gathers_are_of_one_stage_over_its_ranks(tmp_path):
    graph = built(Job().run(), tmp_path).graph
    moving = graph.nodes.kind == NodeKind.TRANSFER
    names = np.array(graph.names)[graph.nodes.name]
    assert set(graph.nodes.duration[moving & (names == "forward-recv")] // MS) == {1}
    together = np.bincount(graph.nodes.collective[moving & (names == "params-all-gather")])
    assert set(together[together > 0]) == {2}
    assert (together > 0).sum() == 2


@pytest.mark.parametrize(
    ("num_stages", "num_dp", "num_batches"), [(1, 1, 1), (1, 3, 2), (3, 1, 2), (4, 2, 7)]
)
def test_any_number_of_stages_and_ranks_replays_exactly_without_what_was_measured(
    num_stages, num_dp, num_batches, tmp_path
):
    job = Job(num_stages, num_dp, num_batches, num_steps=2, noise=0.2)
    graph = built(job.run(), tmp_path).graph
    measured = (measured_step_times(graph)["duration_ns"] / MS).to_list()
    assert changed(without_launches(graph)) == pytest.approx(measured, abs=1e-4)


@pytest.mark.parametrize(
    "missing", ["params-all-gather", "grads-reduce-scatter", "optimizer-clip-main-grad", "optimizer"]
)
def test_a_trace_without_an_optional_operation_replays(missing, tmp_path):
    rows = [row for row in Job(num_steps=2).run() if row["optype"] != missing]
    graph = built(rows, tmp_path).graph
    assert (replay(graph).start == graph.nodes.measured_start).all()


def test_steps_whose_messages_do_not_fit_are_left_out_and_named(tmp_path):
    rows = Job(num_steps=3).run()
    cut = next(i for i, row in enumerate(rows) if row["step"] == 1 and row["optype"] == "forward-recv")
    run = written(rows[:cut] + rows[cut + 1 :], tmp_path)
    whole = build_graph(run)
    assert measured_step_times(whole.graph)["step"].to_list() == [0, 2]
    trust = assess(whole, replay(whole.graph), run.manifest)
    assert any(
        "step 1 is left out: rank 2 (stage 1) has 1 forward receives for 2" in line for line in trust.reasons
    )


def test_a_trace_in_which_no_step_fits_is_refused_with_what_is_wrong(tmp_path):
    rows = Job().run()
    cut = next(i for i, row in enumerate(rows) if row["optype"] == "backward-send")
    with pytest.raises(
        Unanswerable, match=r"rank 2 \(stage 1\) has 1 backward sends for 2 backward computes"
    ):
        built(rows[:cut] + rows[cut + 1 :], tmp_path)


def test_messages_whose_peer_is_unknown_are_counted(tmp_path):
    rows = [row | {"dp_rank": 0} for row in Job(num_steps=2).run()]  # two ranks on each stage: which is it?
    run = written(rows, tmp_path)
    whole = build_graph(run)
    trust = assess(whole, replay(whole.graph), run.manifest)
    assert any("32 sends and receives do not name their peer" in line for line in trust.reasons)


def test_a_graph_is_the_same_each_time_it_is_built(tmp_path):
    run = written(Job(3, 2, 4, num_steps=2, late=0.2, noise=0.1).run(), tmp_path)
    one, two = build_graph(run).graph, build_graph(run).graph
    assert (one.nodes.name == two.nodes.name).all()
    assert (one.edges.source == two.edges.source).all()


def interleaved(idle: bool) -> list[dict[str, Any]]:
    """Two stages, two chunks, one micro-batch, forward then backward: 10 ms each, messages 1 ms.

    With `idle`, messages that were never sent are recorded as well: of the first chunk's input and the last's
    output, lasting no time.
    """
    job = Job(num_dp=1)
    at = 0.0
    for way in ("forward", "backward"):
        places = [(chunk, stage) for chunk in (0, 1) for stage in (0, 1)]
        for index, (chunk, stage) in enumerate(places if way == "forward" else places[::-1]):
            if idle and index == 0:
                job._add(0, stage, 0, f"{way}-recv", at, at)
            job._add(0, stage, 0, f"{way}-compute", at, at + 10, mc=chunk, mb_id=0, seq_id=chunk)
            at += 10
            if index < 3:
                job._add(0, stage, 0, f"{way}-send", at, at + 1)
                job._add(0, 1 - stage, 0, f"{way}-recv", at, at + 1)
                at += 1
            elif idle:
                job._add(0, stage, 0, f"{way}-send", at, at)
    return job.rows


@pytest.mark.parametrize("idle", [False, True])
def test_chunks_go_round_the_stages_whether_or_not_idle_messages_are_recorded(idle, tmp_path):
    graph = built(interleaved(idle), tmp_path).graph
    assert changed(graph) == [86]
    assert changed(graph, "no-launch") == [86]
    # The second chunk on stage 0 comes from stage 1's first: all computes of a direction are on the path.
    assert changed(graph, "no-launch", 'scale:within="chunk 1*",stage=0,factor=0') == [66]


def test_a_pipeline_timeline_hands_micro_batches_from_stage_to_stage(tmp_path):
    rows = [row for row in Job(num_dp=1, num_steps=3).run() if row["optype"].endswith("-compute")]
    graph = built(rows, tmp_path).graph
    assert (graph.edges.kind == EdgeKind.HANDOVER).sum() == 3 * 4
    # The gather is not recorded: a step begins with the first forward and ends with the last backward.
    assert changed(graph) == [92] * 3
    assert changed(graph, "scale:name=forward-compute,stage=0,factor=2") == [102] * 3


def test_a_slower_stage_lengthens_the_step_of_a_real_pipeline_timeline(traces):
    from dpro.opening import open_path

    run = open_path(traces / "pp_timeline" / "primus_pp8")
    made = build_graph(run)
    trust = assess(made, replay(made.graph), run.manifest)
    assert trust.answerable
    assert trust.error_pct == 0
    assert trust.coverage.time_unexplained < 0.03
    base, slower = changed(made.predictive), changed(made.predictive, "scale:stage=7,factor=1.2")
    # 16 forwards and backwards of some 140 ms together, all on the critical path: 0.45 s more.
    assert np.median(np.array(slower) - base) == pytest.approx(450, rel=0.1)


ANY_PIPELINE = st.builds(
    Job,
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    num_steps=st.just(2),
    late=st.sampled_from([0.0, 0.3]),
    noise=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)


@pytest.mark.slow
@given(ANY_PIPELINE)
@settings(max_examples=12)
def test_a_pipeline_replays_as_the_slow_twin_and_as_measured(tmp_path_factory, job):
    _replay_as_the_twin(tmp_path_factory, job)


@pytest.mark.slow
@given(ANY_PIPELINE)
@settings(max_examples=40)
def test_any_pipeline_replays_as_the_slow_twin_and_as_measured(tmp_path_factory, job):
    _replay_as_the_twin(tmp_path_factory, job)


def _replay_as_the_twin(tmp_path_factory, job):
    graph = built(job.run(), tmp_path_factory.mktemp("job")).graph
    nodes, edges = graph.nodes, graph.edges
    timeline = replay(graph)
    assert (timeline.start == nodes.measured_start).all()
    for each in (graph, without_launches(graph)):
        links = list(zip(each.edges.source.tolist(), each.edges.target.tolist(), each.edges.lag.tolist()))
        twin = simulate(each.nodes.duration.tolist(), each.nodes.earliest.tolist(), links)
        assert replay(each).start.tolist() == twin
    path = critical_nodes(timeline, 0)
    lag = edges.lag[timeline.binding[path[1:]]].sum() if edges.lag.size else 0
    assert nodes.duration[path].sum() + lag == timeline.end.max()
    assert nodes.duration[nodes.kind == NodeKind.TRANSFER].min() >= 0
    assert pl.Series(graph.names).is_unique().all()


def test_communication_between_operations_knows_its_sort_but_not_its_bytes(tmp_path):
    graph = built(Job().run(), tmp_path).graph
    moves = graph.nodes.kind == NodeKind.TRANSFER
    assert (graph.nodes.bytes == -1).all()
    assert (graph.nodes.message[~moves] == -1).all()
    ops = {graph.messages[message].op for message in graph.nodes.message[moves]}
    assert {"all_gather", "reduce_scatter", "send", "recv"} <= ops
