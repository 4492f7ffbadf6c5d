"""Dependencies that the trace records: forward and backward, operators and data, calls and streams."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import EdgeCounts, count_starts, evidence_of
from dpro.replay.graph import EdgeKind, Graph
from dpro.replay.timeline import replay
from dpro.schema import DEPENDENCIES
from tests.builders import BACKWARD, US, Seen, TinyRun

OTHER = 40  # a thread


def _handovers(graph: Graph) -> list[bool]:
    """Whether each hand-over between threads is inferred."""
    return graph.edges.inferred[graph.edges.kind == EdgeKind.HANDOVER].tolist()


def _trained(numbered: bool) -> TinyRun:
    """Forward of three operators on the main thread, their backward in turn on another one, an update."""
    run = TinyRun()
    run.step(0, 0, 500)
    for index in range(3):
        run.op(f"forward {index}", 50 * index, 50 * index + 50, sequence_number=index if numbered else -1)
    for place, index in enumerate((2, 1, 0)):
        numbers = {"sequence_number": index, "forward_thread": 1} if numbered else {}
        begin = 150 + 60 * place
        run.op(f"autograd::engine::evaluate_function: {index}", begin, begin + 60, tid=BACKWARD, **numbers)
    run.op("update", 330, 400)
    return run


@pytest.mark.parametrize("numbered", [True, False])
def test_forward_to_backward_is_recorded_where_sequence_numbers_show_it_and_inferred_where_not(
    tmp_path, numbered
):
    seen = Seen(_trained(numbered).build(tmp_path / "r").graph)
    assert set(_handovers(seen.graph)) == {not numbered}
    assert seen.misses() == 0
    assert seen.lasting("forward 2", 30).start("update") - seen.start("update") == 30


def test_what_a_thread_was_handed_is_not_handed_to_it_again(tmp_path):
    # The last forward was handed over first; with it came all that had been done before.
    with_numbers = _trained(True).build(tmp_path / "a").graph
    without = _trained(False).build(tmp_path / "b").graph
    assert len(_handovers(with_numbers)) == len(_handovers(without)) + 1


def _two_models(numbered: bool) -> TinyRun:
    """A thread beside the main one runs a forward whose backward comes late; the main thread is at work."""
    run = TinyRun()
    run.step(0, 0, 900)
    run.op("main work", 0, 800)
    run.call(800, 805, 1)
    run.op("side forward", 0, 300, tid=OTHER, sequence_number=7 if numbered else -1)
    run.call(300, 305, 2, tid=OTHER)
    run.op(
        "autograd::engine::evaluate_function: side",
        400,
        500,
        tid=BACKWARD,
        forward_thread=2,
        sequence_number=7,
    )
    run.call(500, 505, 3, tid=BACKWARD)
    for number, begin in ((1, 810), (2, 310), (3, 510)):
        run.kernel(f"k{number}", begin, begin + 5, number, stream=number)
    return run


@pytest.mark.parametrize("numbered", [True, False])
def test_backward_of_what_another_thread_computed_waits_for_that_thread(tmp_path, numbered):
    seen = Seen(_two_models(numbered).build(tmp_path / "r").graph)
    late = seen.lasting("side forward", 500)
    name = "autograd::engine::evaluate_function: side"
    assert (late.start(name) > seen.start(name)) == numbered


def test_a_number_that_two_threads_share_shows_nothing(tmp_path):
    run = _two_models(True)
    run.op("also seven", 20, 30, tid=50, sequence_number=7)
    seen = Seen(run.build(tmp_path / "r").graph)
    late = seen.lasting("side forward", 500)
    assert late.start("autograd::engine::evaluate_function: side") == seen.start(
        "autograd::engine::evaluate_function: side"
    )


def _on_two_streams(is_recorded: bool) -> TinyRun:
    """A consumer on stream 8 is launched long after its producer on stream 7 has ended."""
    run = TinyRun()
    run.step(0, 0, 2000)
    made = run.op("producer", 0, 40)
    run.call(10, 20, 1)
    run.kernel("make", 25, 300, 1, stream=7)
    used = run.op("consumer", 800, 900)
    run.call(810, 820, 2)
    run.kernel("use", 825, 900, 2, stream=8)
    if is_recorded:
        row = {"rank": 0, "window": 0, "kind": "data", "source_span_id": made, "target_span_id": used}
        run.rows[DEPENDENCIES.name].append(row)
    return run


@pytest.mark.parametrize("is_recorded", [True, False])
def test_work_waits_for_the_work_elsewhere_whose_result_it_reads_where_an_execution_trace_has_it(
    tmp_path, is_recorded
):
    seen = Seen(_on_two_streams(is_recorded).build(tmp_path / "r").graph)
    assert seen.misses() == 0
    assert seen.edges(EdgeKind.EVENT) == ([("make", "use")] if is_recorded else [])
    late = seen.lasting("make", 1000)
    assert late.start("use") == (1300 if is_recorded else 825)
    counted = evidence_of(count_starts(replay(seen.graph))).edges
    event = [each for each in counted if each.kind == "event"]
    assert event == ([EdgeCounts("event", 1, 0)] if is_recorded else [])


def test_a_dependency_that_contradicts_the_times_is_left_out(tmp_path):
    run = _on_two_streams(True)
    row = run.rows[DEPENDENCIES.name][0]
    row["source_span_id"], row["target_span_id"] = row["target_span_id"], row["source_span_id"]
    assert Seen(run.build(tmp_path / "r").graph).edges(EdgeKind.EVENT) == []


@pytest.mark.parametrize("kind", ["stream_sync", "event_sync"])
def test_a_call_waits_for_the_stream_that_the_trace_says_it_waits_for(tmp_path, kind):
    # Work of both streams ends just before the call returns; the trace records that 8 was waited for.
    run = TinyRun()
    run.step(0, 0, 500)
    run.call(0, 5, 1)
    run.kernel("seven", 10, 299, 1, stream=7)
    run.call(5, 10, 2)
    run.kernel("eight", 15, 297, 2, stream=8)
    run.call(10, 12, 3, name="cudaEventRecord")
    name = "cudaStreamSynchronize" if kind == "stream_sync" else "cudaEventSynchronize"
    call = run.call(20, 300, 4, name=name)
    run.op("after", 300, 400)
    run.sync("event_record", 10, correlation=3)
    facts = {"stream": 8} if kind == "stream_sync" else {"record_stream": 8, "record_correlation": 3}
    run.sync(kind, 20, span_id=call, correlation=4, **facts)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.edges(EdgeKind.SYNC) == [("eight", name)]
    assert not seen.graph.edges.inferred[seen.graph.edges.kind == EdgeKind.SYNC].any()
    assert seen.lasting("seven", 50).start("after") == seen.start("after") == 300
    assert seen.lasting("eight", 50).start("after") == 350


@pytest.mark.slow
def test_what_execution_traces_record_of_a_real_job_is_in_the_graph_and_moves_no_start_it_had_right(
    traces, tmp_path, monkeypatch
):
    from dpro.ingest.importer import import_sources
    from dpro.replay.construction import graph_builder as build
    from dpro.store import open_run

    folder = traces / "multirank" / "param_dlrm_v100_8r"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    import_sources([folder], tmp_path / "run")
    run = open_run(tmp_path / "run")
    with_traces = build_graph(run).graph
    dependencies = build.recorded_dependencies
    monkeypatch.setattr(build, "recorded_dependencies", lambda run, spans: dependencies(run, spans).clear())
    without_traces = build_graph(run).graph
    recorded = ~with_traces.edges.inferred & (with_traces.edges.kind == EdgeKind.EVENT)
    assert recorded.sum() >= 40
    assert not (~without_traces.edges.inferred & (without_traces.edges.kind == EdgeKind.EVENT)).any()
    assert (~with_traces.edges.inferred & (with_traces.edges.kind == EdgeKind.HANDOVER)).sum() >= 40
    misses = [
        np.abs(replay(graph).start - graph.nodes.measured_start)[graph.nodes.span >= 0]
        for graph in (with_traces, without_traces)
    ]
    assert np.percentile(misses[0], 95) <= np.percentile(misses[1], 95) + US
