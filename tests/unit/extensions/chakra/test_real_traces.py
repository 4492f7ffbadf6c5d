"""Real execution traces, compared with plain readings of them and of their Kineto twins."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpro.extensions.chakra.reader import combine, is_execution_trace, read_execution_trace
from dpro.ingest.kineto import read_trace
from dpro.ingest.reading.files import heads
from dpro.ingest.trace import RankTrace
from tests.execution_traces import Fields, stored


def plain(path: Path) -> list[Fields]:
    """Nodes of a real trace with their attributes side by side, read without dpro."""
    nodes = json.loads(gzip.decompress(path.read_bytes()))["nodes"]
    flat = [each | {a["name"]: a["value"] for a in each.get("attrs", [])} for each in nodes]
    return sorted((each for each in flat if each.get("rf_id")), key=lambda each: each["rf_id"])


PAIRS = {
    "simple_add": (
        "single_hta/execution_trace__benchmark_simple_add_et.json.gz",
        "single_hta/execution_trace__benchmark_simple_add_trace.json.gz",
    ),
    **{
        f"dlrm rank {rank}": (
            f"multirank/param_dlrm_v100_8r/et/et_rank{rank}.json.gz",
            f"multirank/param_dlrm_v100_8r/rank{rank}.pt.trace.json.gz",
        )
        for rank in range(8)
    },
}


def paired(et: Path, trace: Path) -> list[tuple[Fields, Fields]]:
    """A plain reading: nodes with their events, since per thread both hold the same names in order."""
    events = [
        event
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        if event.get("cat") in ("cpu_op", "user_annotation") and not event["name"].startswith("ProfilerStep#")
    ]
    recorded, threads = defaultdict(list), defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], event["args"]["External id"])):
        recorded[event["tid"]].append(event)
    for each in plain(et):
        threads[each["tid"]].append(each)
    pairs = []
    for mine in threads.values():
        names = [each["name"] for each in mine]
        (theirs,) = (found for found in recorded.values() if [event["name"] for event in found] == names)
        pairs += zip(mine, theirs, strict=True)
    return sorted(pairs, key=lambda pair: pair[0]["rf_id"])


def by_number(trace: RankTrace, kind: str) -> set[tuple[int, int]]:
    """Dependencies of a kind by the numbers that Kineto gave their spans."""
    numbers = dict(trace.frames["spans"].select("span_id", "external_id").iter_rows())
    rows = trace.frames["dependencies"].filter(kind=kind).select("source_span_id", "target_span_id").rows()
    return {(numbers[source], numbers[target]) for source, target in rows}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_real_trace_is_linked_whole_to_its_twin(traces, pair):
    et, trace = (traces / name for name in PAIRS[pair])
    spans = read_trace(trace, rank=0)
    operators = read_execution_trace(et, rank=0)
    combined = combine(spans, stored(operators))
    event_of = {each["id"]: event["args"]["External id"] for each, event in paired(et, trace)}
    assert by_number(combined, "control") == {
        (event_of[each["parent"]], event_of[each["id"]]) for each in plain(et) if each["parent"] in event_of
    }
    assert combined.skipped == spans.skipped
    data = operators.frames["dependencies"].filter(kind="data").height
    assert combined.frames["dependencies"].filter(kind="data").height == data > 0


@pytest.mark.parametrize("pair", PAIRS)
def test_reads_in_a_real_trace_are_as_times_have_them(traces, pair):
    """Of those whose time was over when the reader began, and who wrote the tensor, the last to end."""
    et, trace = (traces / name for name in PAIRS[pair])
    nodes = {
        each["id"]: each
        | {"from": event["ts"], "to": event["ts"] + event["dur"], "number": event["args"]["External id"]}
        for each, event in paired(et, trace)
    }

    def callers(each: Fields) -> Iterator[Fields]:
        while each := nodes.get(each["parent"], {}):
            yield each

    def tensors(each: Fields, way: str) -> set[int]:
        kinds = list(zip(each[f"{way}s"], each[f"{way}_types"], strict=True))
        return {value[0] for value, kind in kinds if kind.startswith("Tensor")} | {
            value[0] for list_, kind in kinds if kind.startswith("GenericList[Tensor") for value in list_
        }

    writers = defaultdict(list)
    for each in nodes.values():
        for written in tensors(each, "output"):
            writers[written].append(each)

    def source(reader: Fields, wanted: int) -> Fields:
        outside = [each["id"] for each in callers(reader)]
        over = [
            each
            for each in writers[wanted]
            if each["rf_id"] < reader["rf_id"]
            and each["to"] <= reader["from"] + 2
            and each["id"] not in outside
        ]
        last = max(over, key=lambda each: (each["to"], -each["rf_id"]), default={})
        return next((each for each in reversed(list(callers(last))) if each in over), last) if last else {}

    expected = set()
    for each in nodes.values():
        caller = nodes.get(each["parent"], {})
        for wanted in tensors(each, "input"):
            found = source(each, wanted)
            known = caller and wanted in tensors(caller, "input") and source(caller, wanted) == found
            if found and not known:
                expected.add((found["number"], each["number"]))
    combined = combine(read_trace(trace, rank=0), stored(read_execution_trace(et, rank=0)))
    # Times are whole microseconds: which of two that end together was the last is not always recorded.
    assert len(by_number(combined, "data") ^ expected) <= 4


def test_a_real_step_among_many_equal_ones_is_found_on_both_threads(traces):
    folder = traces / "et"
    operators = read_execution_trace(folder / "linear_et.json.gz", rank=0)
    spans = read_trace(folder / "linear_kineto.json.gz", rank=0)
    combined = combine(spans, stored(operators))
    assert combined.warnings == [
        *spans.warnings,
        "rank 0: the execution trace fits 39 places of the trace equally well: matched to the first",
    ]
    assert combined.skipped == spans.skipped
    # Of both threads the same step: no data is read before it was written, and none is lost by that.
    counts = dict(combined.frames["dependencies"]["kind"].value_counts().iter_rows())
    assert counts == dict(operators.frames["dependencies"]["kind"].value_counts().iter_rows())
    nodes = {each["id"]: each for each in plain(folder / "linear_et.json.gz")}
    assert counts["control"] == sum(each["parent"] in nodes for each in nodes.values())


@pytest.mark.parametrize("rank", range(8))
def test_a_real_linked_trace_has_the_profilers_operators_and_no_work_at_wrong_times(traces, rank):
    """The tool that linked these traces wrote when launches returned as the start of GPU work."""
    folder = traces / "multirank" / "param_dlrm_v100_8r"
    path = folder / "et_linked" / f"et_rank{rank}_plus.json.gz"
    trace = read_execution_trace(path)
    twin = read_trace(folder / f"rank{rank}.pt.trace.json.gz").frames["spans"]
    columns = ("name", "start_ns", "duration_ns")
    operators = trace.frames["spans"].filter(kind="cpu_op").select(columns)
    assert trace.rank == rank
    assert set(operators.iter_rows()) <= set(twin.filter(kind="cpu_op").select(columns).iter_rows())
    assert operators.height == twin.filter(kind="cpu_op").height
    calls = twin.filter(kind="runtime").select("correlation", end="start_ns", more="duration_ns")
    returned = {number: start + more for number, start, more in calls.iter_rows()}
    nodes = json.loads(gzip.decompress(path.read_bytes()))["nodes"]
    work = [each for each in nodes if each.get("cat")]
    known = [each for each in work if each["args"]["correlation"] in returned]
    assert all(each["ts"] * 1000 == returned[each["args"]["correlation"]] for each in known)
    assert trace.skipped == {"GPU work with the times of its launches": len(work)}
    assert set(trace.frames["spans"]["kind"]) == {"cpu_op", "annotation"}


@pytest.mark.parametrize(
    ("name", "schema", "operators"),
    [
        ("resnet_et.json.gz", "1.1.0-chakra.0.0.4", 14389),
        ("chakra_1.0.2-chakra.0.0.4.tgz", "1.0.2-chakra.0.0.4", 261),
    ],
)
def test_real_traces_of_chakras_schemas_are_read_whole(traces, tmp_path, name, schema, operators):
    (source,) = (source for source, head in heads(traces / "et" / name) if is_execution_trace(head))
    path = tmp_path / "et.json"
    path.write_bytes(source.open().read())
    trace = read_execution_trace(path, rank=0)
    assert trace.versions == {"execution trace schema": schema}
    assert trace.frames["spans"].height == operators
    assert set(trace.frames["dependencies"]["kind"]) == {"data", "control"}
    assert trace.skipped == {}
