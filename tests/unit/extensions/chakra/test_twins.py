"""Execution traces and the Kineto traces of the same processes: which span each operator is."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.errors import InputError
from dpro.extensions.chakra.reader import combine, read_execution_trace
from dpro.ingest.kineto import read_trace
from dpro.schema import SPANS, TABLES, conform
from tests.execution_traces import LAYER, SCHEMAS, Fields, needs, node, stored, trace_file
from tests.traces import annotation, cpu_op, write


def kineto(nodes: tuple[Fields, ...], *, first_id: int = 1, pid: int = 10, at: int = 0) -> list[Fields]:
    """Events of the same operators: they nest, and each takes 100 us more than those it calls."""
    events = []
    ends = {
        each["id"]: max([each["id"], *(n["id"] for n in nodes if n["parent"] == each["id"])])
        for each in nodes
    }
    for place, each in enumerate(nodes):
        sort = annotation if each["scope"] == 7 else cpu_op
        start = at + 100 * each["id"]
        duration = 100 * (ends[each["id"]] - each["id"]) + 60 - 10 * (each["parent"] != 2)
        more = {"External id": first_id + place}
        events.append(sort(each["name"], start, duration, pid=pid, tid=11, **more))
    return events


def test_operators_and_spans_of_the_same_number_and_name_are_one(tmp_path):
    spans = read_trace(write(tmp_path / "rank0.json", kineto(LAYER)))
    operators = read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))
    combined = combine(spans, stored(operators))
    assert needs(combined, "data") == needs(operators, "data")
    assert needs(combined, "control") == needs(operators, "control")
    assert combined.warnings == spans.warnings
    assert conform(SPANS, combined.frames["spans"]).equals(conform(SPANS, spans.frames["spans"]))


def test_without_common_numbers_the_order_on_each_thread_decides(tmp_path):
    """The profiler's own mark of the step has no operator; numbers are of another count."""
    events = [annotation("ProfilerStep#3", 0, 2000), *kineto(LAYER, first_id=500)]
    spans = read_trace(write(tmp_path / "rank0.json", events))
    operators = read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))
    combined = combine(spans, stored(operators))
    assert needs(combined, "data") == needs(operators, "data")
    assert needs(combined, "control") == needs(operators, "control")


def test_numbers_that_lead_to_other_names_are_not_believed(tmp_path):
    events = kineto(LAYER, first_id=2)  # each number is that of the next operator
    spans = read_trace(write(tmp_path / "rank0.json", events))
    operators = read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))
    assert needs(combine(spans, stored(operators)), "data") == needs(operators, "data")


def test_operators_that_only_one_side_has_are_stepped_over(tmp_path):
    many = tuple(
        node(number, f"aten::op{number}", reads=(number,), writes=(number + 1,)) for number in range(3, 40)
    )
    events = kineto(many, first_id=900)
    seen = [event for event in events if event["name"] not in ("aten::op10", "aten::op11")]
    seen.insert(20, cpu_op("aten::extra", 2155, 1, **{"External id": 5000}))
    spans = read_trace(write(tmp_path / "rank0.json", seen))
    combined = combine(spans, stored(read_execution_trace(trace_file(tmp_path / "et_rank0.json", *many))))
    names = [
        name
        for name in (f"aten::op{number}" for number in range(3, 40))
        if name not in ("aten::op10", "aten::op11")
    ]
    expected = {pair for pair in itertools.pairwise(names) if pair != ("aten::op9", "aten::op12")}
    assert needs(combined, "data") == expected
    assert combined.skipped == {"operators of an execution trace without a span": 2}


def test_a_caller_without_a_span_is_passed_over(tmp_path):
    seen = [event for event in kineto(LAYER) if event["name"] != "aten::t"]
    spans = read_trace(write(tmp_path / "rank0.json", seen))
    combined = combine(spans, stored(read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))))
    assert ("aten::linear", "aten::transpose") in needs(combined, "control")


def test_steps_that_look_equal_are_taken_for_the_first_with_a_warning(tmp_path):
    events = [
        event for step in range(3) for event in kineto(LAYER, first_id=100 * step + 50, at=10_000 * step)
    ]
    spans = read_trace(write(tmp_path / "rank0.json", events))
    combined = combine(spans, stored(read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))))
    assert combined.warnings == [
        "rank 0: the execution trace fits 3 places of the trace equally well: matched to the first"
    ]
    linked = combined.frames["spans"].filter(
        combined.frames["spans"]["span_id"].is_in(combined.frames["dependencies"]["target_span_id"].to_list())
    )
    assert linked["start_ns"].max() < 10_000_000


def test_a_read_that_began_before_the_write_had_ended_is_left_out(tmp_path):
    nodes = (node(3, "writer", writes=(5,)), node(4, "reader", reads=(5,)))
    both = [
        cpu_op("writer", 0, 100, **{"External id": 1}),
        cpu_op("reader", 50, 10, tid=12, **{"External id": 2}),
    ]
    spans = read_trace(write(tmp_path / "rank0.json", both))
    combined = combine(spans, stored(read_execution_trace(trace_file(tmp_path / "et_rank0.json", *nodes))))
    assert combined.frames["dependencies"].is_empty()


def test_traces_of_two_processes_are_not_combined(tmp_path):
    spans = read_trace(write(tmp_path / "rank0.json", kineto(LAYER)))
    other = read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER, pid=77))
    combined = combine(spans, stored(other))
    assert "dependencies" not in combined.frames
    assert combined.warnings == ["rank 0: the execution trace is of process 77, not of 10: left out"]


def test_traces_of_different_work_are_not_combined(tmp_path):
    spans = read_trace(write(tmp_path / "rank0.json", [cpu_op("aten::conv2d", 0, 5, **{"External id": 1})]))
    combined = combine(spans, stored(read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))))
    assert combined.warnings == ["rank 0: the execution trace has no operator of this trace: left out"]


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.lists(st.integers(), max_size=2)), max_size=3),
    st.dictionaries(
        st.sampled_from(["values", "types", "shapes", "name", "device"]), st.integers(), max_size=2
    ),
)
KEYS = st.sampled_from([*LAYER[0], "ts", "cat", "args", "attrs", "ctrl_deps", "dur", "stream"])


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    odd=st.dictionaries(KEYS, ODD, max_size=4),
    facts=st.dictionaries(st.sampled_from(["schema", "pid", "nodes"]), ODD, max_size=1),
    schema=st.sampled_from(SCHEMAS[:3]),
    cut=st.integers(0, 3000),
    put=st.binary(max_size=4),
)
def test_mangled_traces_give_a_trace_or_a_refusal(tmp_path, odd, facts, schema, cut, put):
    path = trace_file(tmp_path / "et_rank0.json", *LAYER, schema=schema)
    document = json.loads(path.read_text())
    document["nodes"][2] |= odd
    content = json.dumps(document | facts).encode()
    path.write_bytes(content[:cut] + put + content[cut + len(put) :])
    try:
        trace = read_execution_trace(path)
    except InputError:
        return
    twin = read_trace(write(tmp_path / "rank0.json", kineto(LAYER, pid=trace.frames["workers"]["pid"][0])))
    combined = combine(twin, stored(trace))
    for name, frame in combined.frames.items():
        conform(TABLES[name], frame)


_JOB = """
import sys
import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

folder = sys.argv[1]
observer = ExecutionTraceObserver().register_callback(f"{folder}/et_rank0.json")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
with profile(activities=[ProfilerActivity.CPU], execution_trace_observer=observer) as profiler:
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
profiler.export_chrome_trace(f"{folder}/rank0.json")
observer.unregister_callback()
"""


@pytest.mark.slow
def test_a_trace_that_this_pytorch_records_is_linked_whole(tmp_path):
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", _JOB, str(tmp_path)], check=True, timeout=120, capture_output=True)
    operators = read_execution_trace(tmp_path / "et_rank0.json")
    spans = read_trace(tmp_path / "rank0.json", rank=0)
    combined = combine(spans, stored(operators))
    assert operators.frames["spans"].height > 80
    assert combined.skipped == spans.skipped  # every operator has its span
    assert {
        ("aten::t", "aten::addmm"),
        ("aten::linear", "aten::relu"),
        ("aten::linear", "aten::addmm"),
    } <= needs(combined, "data") | needs(combined, "control")
