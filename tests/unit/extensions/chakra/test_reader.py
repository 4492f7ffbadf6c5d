"""Execution traces: their schemas, what operators need from each other, and damage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.errors import InputError
from dpro.extensions.chakra.reader import is_execution_trace, read_execution_trace, refuse_alone
from dpro.ingest.reading.files import read_head
from dpro.schema import SPANS, TABLES, conform
from tests.execution_traces import LAYER, ROOTS, SCHEMAS, Fields, needs, node, tensor, trace_file
from tests.traces import kernel


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_gives_the_same(tmp_path, schema):
    path = trace_file(tmp_path / "et_rank3.json", *LAYER, schema=schema)
    trace = read_execution_trace(path)
    spans = conform(SPANS, trace.frames["spans"]).sort("span_id")
    assert is_execution_trace(read_head(path))
    assert (trace.rank, trace.versions) == (3, {"execution trace schema": schema})
    assert spans["name"].to_list() == [each["name"] for each in LAYER]
    assert spans["external_id"].to_list() == [1, 2, 3, 4, 5, 6]
    assert spans["kind"].to_list() == ["cpu_op"] * 4 + ["annotation", "cpu_op"]
    assert set(spans["start_ns"]) == set(spans["duration_ns"]) == {-1}
    assert spans["shapes"][3] == "[[4,4],[4,4],[]]"
    assert trace.frames["workers"].row(0, named=True)["pid"] == 10
    assert needs(trace, "data") == {("aten::t", "aten::mm"), ("aten::linear", "aten::relu")}
    assert needs(trace, "control") == {
        ("aten::linear", "aten::t"),
        ("aten::t", "aten::transpose"),
        ("aten::linear", "aten::mm"),
        ("block", "aten::relu"),
    }


def test_a_tensor_in_a_list_is_read(tmp_path):
    cat = node(4, "aten::cat") | {
        "inputs": [[tensor(8), tensor(9)], 0],
        "input_types": ["GenericList[Tensor(float),Tensor(float)]", "Int"],
    }
    path = trace_file(tmp_path / "et.json", node(3, "aten::mm", writes=(9,)), cat)
    assert needs(read_execution_trace(path), "data") == {("aten::mm", "aten::cat")}


def test_the_last_writer_counts(tmp_path):
    nodes = (
        node(3, "first", writes=(5,)),
        node(4, "second", writes=(5,)),
        node(5, "reader", reads=(5,)),
        node(6, "third", writes=(5,)),
    )
    assert needs(read_execution_trace(trace_file(tmp_path / "et.json", *nodes)), "data") == {
        ("second", "reader")
    }


def test_an_operator_in_place_needs_who_wrote_before_and_not_itself(tmp_path):
    nodes = (
        node(3, "aten::ones", writes=(5,)),
        node(4, "aten::add_", reads=(5,), writes=(5,)),
        node(5, "inner", 4, reads=(5,), writes=(5,)),
        node(6, "aten::mul", reads=(5,), writes=(6,)),
    )
    assert needs(read_execution_trace(trace_file(tmp_path / "et.json", *nodes)), "data") == {
        ("aten::ones", "aten::add_"),
        ("aten::add_", "aten::mul"),
    }


def test_a_tensor_handed_to_another_thread_is_a_need(tmp_path):
    """The backward thread reads what the forward thread wrote last, though nothing began there since."""
    root = node(9, "[pytorch|profiler|execution_trace|thread]", 1, tid=2) | {"rf_id": 0}
    nodes = (
        node(3, "loss", writes=(5,)),
        node(10, "LossBackward0", 9, tid=2, scope=1, reads=(5,), writes=(6,)),
        node(11, "MmBackward0", 9, tid=2, scope=1, reads=(6,)),
        root,
    )
    assert needs(read_execution_trace(trace_file(tmp_path / "et.json", *nodes)), "data") == {
        ("loss", "LossBackward0"),
        ("LossBackward0", "MmBackward0"),
    }


def test_a_tensor_handed_over_by_operators_that_nest_comes_from_the_outermost(tmp_path):
    root = node(9, "[pytorch|profiler|execution_trace|thread]", 1, tid=2) | {"rf_id": 0}
    nodes = (
        node(3, "aten::ones_like", writes=(5,)),
        node(4, "aten::empty_like", 3, writes=(5,)),
        node(5, "aten::fill_", 3, reads=(5,), writes=(5,)),
        node(10, "LossBackward0", 9, tid=2, scope=1, reads=(5,)),
        root,
    )
    assert needs(read_execution_trace(trace_file(tmp_path / "et.json", *nodes)), "data") == {
        ("aten::empty_like", "aten::fill_"),
        ("aten::ones_like", "LossBackward0"),
    }


@st.composite
def trees(draw) -> list[Fields]:
    """Nested operators on one thread that read and write a few tensors."""
    some = st.lists(st.integers(1, 4), max_size=2, unique=True).map(tuple)
    nodes: list[Fields] = []
    stack = [2]
    for number in range(3, 3 + draw(st.integers(1, 14))):
        del stack[1 + draw(st.integers(0, len(stack) - 1)) :]
        nodes.append(node(number, f"op{number}", stack[-1], reads=draw(some), writes=draw(some)))
        stack.append(number)
    return nodes


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nodes=trees())
def test_needs_are_as_a_plain_reading_of_intervals_has_them(tmp_path, nodes):
    """Source: of those that ended before the target began and wrote the tensor, the last to end."""
    by_id = {each["id"]: each for each in nodes}

    def within(inner: int, outer: int) -> bool:
        while inner in by_id and inner != outer:
            inner = by_id[inner]["parent"]
        return inner == outer

    last_inside = {one: max(other for other in by_id if within(other, one)) for one in by_id}

    def ids(each: Fields, way: str) -> list[int]:
        return [value[0] for value in each[way] if isinstance(value, list)]

    def source(reader: int, wanted: int) -> int:
        ended = [
            (last_inside[one], -one)
            for one in by_id
            if wanted in ids(by_id[one], "outputs") and last_inside[one] < reader and one < reader
        ]
        return -max(ended)[1] if ended else -1

    expected = set()
    for reader, each in by_id.items():
        for wanted in ids(each, "inputs"):
            found, outer = source(reader, wanted), by_id.get(each["parent"], {})
            known_outside = outer and wanted in ids(outer, "inputs") and source(outer["id"], wanted) == found
            if found >= 0 and not known_outside:
                expected.add((by_id[found]["name"], each["name"]))
    trace = read_execution_trace(trace_file(tmp_path / "et.json", *nodes))
    assert needs(trace, "data") == expected


def linked(flat: Fields, ts: Any, dur: Any, **more: Any) -> Fields:
    return flat | {"ts": ts, "dur": dur} | more


def linked_kernel(number: int, parent: int, ts: Any, dur: Any) -> Fields:
    """GPU work as a linking tool adds it: the event of the profiler, with the tensors of its operator."""
    event = kernel("ncclKernel_AllReduce_RING_LL_Sum_float(args)", ts, dur, 9, stream=20)
    extra = {name: LAYER[0][name] for name in LAYER[0] if name.startswith(("input", "output"))}
    return {**event, **extra, "id": number, "parent": parent}


def test_a_trace_linked_with_times_stands_alone(tmp_path):
    path = tmp_path / "et_rank1.json"
    nodes = [
        linked(LAYER[0], 1694128201426693, 30),
        linked(LAYER[1], "@", 5),
        linked_kernel(50, 3, 1694128201426710, 20),
        LAYER[5],
        *ROOTS,
    ]
    text = json.dumps({"schema": "1.0.1", "pid": 10, "nodes": nodes})
    path.write_text(text.replace('"@"', "1694128201426700.125"))  # more digits than a float has
    trace = read_execution_trace(path)
    refuse_alone(trace, path.name)
    spans = conform(SPANS, trace.frames["spans"]).sort("span_id")
    assert spans["start_ns"].to_list() == [1694128201426693000, 1694128201426700125, 1694128201426710000]
    assert spans["duration_ns"].to_list() == [30_000, 5_000, 20_000]
    work = spans.row(2, named=True)
    assert (work["kind"], work["device"], work["stream"], work["correlation"]) == ("kernel", 0, 20, 9)
    assert (work["external_id"], work["pid"], work["tid"]) == (1, -1, -1)
    assert trace.skipped == {"operators without a time": 1}
    assert needs(trace, "control") == {("aten::linear", "aten::t"), ("aten::linear", work["name"])}
    (collective,) = conform(TABLES["collectives"], trace.frames["collectives"]).rows(named=True)
    assert (collective["op"], collective["duration_ns"], collective["span_id"]) == ("all_reduce", 20_000, 2)


def test_a_trace_without_times_is_refused_alone(tmp_path):
    trace = read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))
    with pytest.raises(
        InputError, match=r"et_rank0\.json: .*without times; import it together with the Kineto"
    ):
        refuse_alone(trace, "et_rank0.json")


def test_work_that_overlaps_on_its_stream_did_not_begin_when_the_trace_says(tmp_path):
    nodes = [linked(LAYER[0], 100, 90), linked_kernel(50, 3, 110, 20), linked_kernel(51, 3, 120, 20), *ROOTS]
    path = tmp_path / "et_rank1.json"
    path.write_text(json.dumps({"schema": "1.0.1", "pid": 10, "nodes": nodes}))
    trace = read_execution_trace(path)
    assert trace.frames["spans"]["name"].to_list() == ["aten::linear"]
    assert trace.skipped == {"GPU work with the times of its launches": 2}


def test_infinite_values_do_not_spoil_a_trace(tmp_path):
    path = trace_file(tmp_path / "et.json", *LAYER)
    path.write_text(path.read_text().replace("1.5", "-inf", 1).replace("1.5", "nan", 1))
    assert read_execution_trace(path).frames["spans"].height == len(LAYER)


def test_nodes_of_no_shape_are_counted(tmp_path):
    path = trace_file(tmp_path / "et.json", *LAYER)
    document = json.loads(path.read_text())
    document["nodes"] += [3, {"name": "aten::mm"}, None]
    path.write_text(json.dumps(document))
    assert read_execution_trace(path).skipped == {"malformed nodes": 3}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"schema": "1.0.1", "nodes": [{"id": 3', "cut short"),
        (b"nodes", "not JSON"),
        (b"[]", "not an execution trace"),
        (b'{"nodes": 3}', "not an execution trace"),
        (b'{"traceEvents": []}', "not an execution trace"),
        (b'{"nodes": []}', "without an operator"),
        (b"\x07\x0a\x050.0.4\x40", "protobuf; give the JSON"),
    ],
)
def test_what_is_no_trace_is_one_line(tmp_path, content, reason):
    path = tmp_path / "et.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"et\.json: .*({reason})") as refusal:
        read_execution_trace(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "head",
    [
        b'{"traceEvents": [], "nodes": [], "rf_id": 1}',
        b'{"nodes": []}',
        b"nodes rf_id",
        b"\x80\x02nodes",
        b"",
    ],
)
def test_other_files_are_not_execution_traces(head):
    assert not is_execution_trace(head)
