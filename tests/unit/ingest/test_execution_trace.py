"""Execution traces: their schemas, what operators need from each other, and the spans of Kineto twins."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.errors import InputError
from dpro.ingest.execution_trace import combine, is_execution_trace, read_execution_trace, refuse_alone
from dpro.ingest.files import read_head
from dpro.ingest.kineto import read_trace
from dpro.ingest.trace import RankTrace
from dpro.schema import SPANS, TABLES, conform
from tests.traces import annotation, cpu_op, kernel, write

Fields = dict[str, Any]
FLOAT = "Tensor(float)"


def tensor(number: int) -> list[Any]:
    """A tensor as the observer writes it: id, storage, offset, elements, size of one, device."""
    return [number, 100 + number, 0, 16, 4, "cuda:0"]


def node(
    number: int,
    name: str,
    parent: int = 2,
    *,
    reads: tuple[int, ...] = (),
    writes: tuple[int, ...] = (),
    tid: int = 1,
    scope: int = 0,
    **more: Any,
) -> Fields:
    """An operator of schema 1.0.1; ids begin at 3, and the record function's number is the id minus 2."""
    return {
        "name": name,
        "id": number,
        "rf_id": number - 2,
        "parent": parent,
        "fw_parent": 0,
        "seq_id": -1,
        "scope": scope,
        "tid": tid,
        "fw_tid": 0,
        "op_schema": "",
        "inputs": [*map(tensor, reads), 1.5],
        "input_shapes": [[4, 4]] * len(reads) + [[]],
        "input_types": [FLOAT] * len(reads) + ["Double"],
        "outputs": list(map(tensor, writes)),
        "output_shapes": [[4, 4]] * len(writes),
        "output_types": [FLOAT] * len(writes),
        **more,
    }


ROOTS = (
    node(1, "[pytorch|profiler|execution_trace|process]", 1, scope=7, tid=0) | {"rf_id": 0},
    node(2, "[pytorch|profiler|execution_trace|thread]", 1, scope=7) | {"rf_id": 0},
)
# A layer: a transposed weight (tensor 5 seen as 6) times an input (7) gives 8, which a relu reads.
LAYER = (
    node(3, "aten::linear", reads=(7, 5), writes=(8,)),
    node(4, "aten::t", 3, reads=(5,), writes=(6,)),
    node(5, "aten::transpose", 4, reads=(5,), writes=(6,)),
    node(6, "aten::mm", 3, reads=(7, 6), writes=(8,)),
    node(7, "block", scope=7),
    node(8, "aten::relu", 7, reads=(8,), writes=(9,)),
)


def chakra(flat: Fields, version: str) -> Fields:
    """A node of schema 1.0.1 as Chakra's schemas write it."""
    attributes = ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema")
    added = {
        "1.1.0": ("kernel_backend", "kernel_file"),
        "1.1.1": ("kernel_backend", "kernel_file", "tensor_range"),
    }
    extra = added.get(version.split("-")[0], ())

    def values(way: str) -> Fields:
        told = {"values": flat[f"{way}s"], "shapes": flat[f"{way}_shapes"], "types": flat[f"{way}_types"]}
        return told | ({"strides": []} if version.startswith("1.1.1") else {})

    rest = {key: value for key, value in flat.items() if key in ("ts", "dur", "inclusive_dur", "cat", "args")}
    return {
        "id": flat["id"],
        "name": flat["name"],
        "ctrl_deps": flat["parent"],
        "inputs": values("input"),
        "outputs": values("output"),
        "attrs": [
            *({"name": name, "type": "uint64", "value": flat[name]} for name in attributes),
            *({"name": name, "type": "string", "value": ""} for name in extra),
        ],
        **rest,
    }


def trace_file(path: Path, *nodes: Fields, schema: str = "1.0.1", pid: int = 10) -> Path:
    """A trace as the observer writes it: nodes in the order in which they ended."""
    ended = sorted(nodes, key=lambda each: -each["id"])
    written = [each if schema == "1.0.1" else chakra(each, schema) for each in (*ended, *ROOTS)]
    document = {
        "schema": schema,
        "pid": pid,
        "time": "2023-07-12 12:47:27",
        "start_ts": 69838573,
        "nodes": written,
    }
    path.write_text(json.dumps(document))
    return path


def stored(trace: RankTrace) -> RankTrace:
    """The trace as it is after its tables were on disk."""
    frames = {name: conform(TABLES[name], frame) for name, frame in trace.frames.items()}
    return RankTrace(trace.rank, trace.world_size, frames)


def needs(trace: RankTrace, kind: str) -> set[tuple[str, str]]:
    """Dependencies of a kind, as (source, target) by the names of their spans."""
    names = dict(trace.frames["spans"].select("span_id", "name").iter_rows())
    rows = conform(TABLES["dependencies"], trace.frames["dependencies"]).filter(kind=kind)
    pairs = rows.select("source_span_id", "target_span_id").rows()
    return {(names[source], names[target]) for source, target in pairs}


SCHEMAS = ("1.0.1", "1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.1.0-chakra.0.0.4", "1.1.1-chakra.0.0.4")


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_tells_the_same(tmp_path, schema):
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
            told_outside = outer and wanted in ids(outer, "inputs") and source(outer["id"], wanted) == found
            if found >= 0 and not told_outside:
                expected.add((by_id[found]["name"], each["name"]))
    trace = read_execution_trace(trace_file(tmp_path / "et.json", *nodes))
    assert needs(trace, "data") == expected


def kineto(
    path: Path, nodes: tuple[Fields, ...], *, first_id: int = 1, pid: int = 10, at: int = 0
) -> list[Fields]:
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
    spans = read_trace(write(tmp_path / "rank0.json", kineto(tmp_path, LAYER)))
    operators = read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))
    combined = combine(spans, stored(operators))
    assert needs(combined, "data") == needs(operators, "data")
    assert needs(combined, "control") == needs(operators, "control")
    assert combined.warnings == spans.warnings
    assert conform(SPANS, combined.frames["spans"]).equals(conform(SPANS, spans.frames["spans"]))


def test_without_common_numbers_the_order_on_each_thread_tells(tmp_path):
    """The profiler's own mark of the step has no operator; numbers are of another count."""
    events = [annotation("ProfilerStep#3", 0, 2000), *kineto(tmp_path, LAYER, first_id=500)]
    spans = read_trace(write(tmp_path / "rank0.json", events))
    operators = read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))
    combined = combine(spans, stored(operators))
    assert needs(combined, "data") == needs(operators, "data")
    assert needs(combined, "control") == needs(operators, "control")


def test_numbers_that_lead_to_other_names_are_not_believed(tmp_path):
    events = kineto(tmp_path, LAYER, first_id=2)  # each number is that of the next operator
    spans = read_trace(write(tmp_path / "rank0.json", events))
    operators = read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))
    assert needs(combine(spans, stored(operators)), "data") == needs(operators, "data")


def test_operators_that_only_one_side_has_are_stepped_over(tmp_path):
    many = tuple(
        node(number, f"aten::op{number}", reads=(number,), writes=(number + 1,)) for number in range(3, 40)
    )
    events = kineto(tmp_path, many, first_id=900)
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
    seen = [event for event in kineto(tmp_path, LAYER) if event["name"] != "aten::t"]
    spans = read_trace(write(tmp_path / "rank0.json", seen))
    combined = combine(spans, stored(read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))))
    assert ("aten::linear", "aten::transpose") in needs(combined, "control")


def test_steps_that_look_alike_are_taken_for_the_first_and_told(tmp_path):
    events = [
        event
        for step in range(3)
        for event in kineto(tmp_path, LAYER, first_id=100 * step + 50, at=10_000 * step)
    ]
    spans = read_trace(write(tmp_path / "rank0.json", events))
    combined = combine(spans, stored(read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))))
    assert combined.warnings == [
        "rank 0: the execution trace fits 3 places of the trace alike: taken for the first"
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
    spans = read_trace(write(tmp_path / "rank0.json", kineto(tmp_path, LAYER)))
    other = read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER, pid=77))
    combined = combine(spans, stored(other))
    assert "dependencies" not in combined.frames
    assert combined.warnings == ["rank 0: the execution trace is of process 77, not of 10: left out"]


def test_traces_of_different_work_are_not_combined(tmp_path):
    spans = read_trace(write(tmp_path / "rank0.json", [cpu_op("aten::conv2d", 0, 5, **{"External id": 1})]))
    combined = combine(spans, stored(read_execution_trace(trace_file(tmp_path / "et_rank0.json", *LAYER))))
    assert combined.warnings == ["rank 0: the execution trace has no operator of this trace: left out"]


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


def archive(path: Path, **files: bytes) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{name}.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_an_archive_of_one_trace_is_read(tmp_path):
    content = trace_file(tmp_path / "et.json", *LAYER).read_bytes()
    path = archive(tmp_path / "et.tgz", finder=b"\x00\x05\x16\x07", trace=content)
    assert is_execution_trace(read_head(path))
    assert read_execution_trace(path).frames["spans"].height == len(LAYER)


def test_an_archive_of_several_traces_is_refused(tmp_path):
    content = trace_file(tmp_path / "et.json", *LAYER).read_bytes()
    path = archive(tmp_path / "et.tgz", one=content, two=content)
    with pytest.raises(InputError, match=r"et\.tgz: an archive of 2 JSON files; unpack it"):
        read_execution_trace(path)


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
        (b"\0" * 257 + b"ustar" + b"\xff" * 300, "tar archive|0 JSON files"),
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
    twin = read_trace(
        write(tmp_path / "rank0.json", kineto(tmp_path, LAYER, pid=trace.frames["workers"]["pid"][0]))
    )
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
