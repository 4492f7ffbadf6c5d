"""The compiled scanner against the typed decoder: both have to read the same of everything."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.ingest.kineto import scan_kernel as kernel_module
from dpro.ingest.kineto import scanner
from dpro.ingest.kineto.columns import Columns, Memory
from dpro.ingest.kineto.scanner import Scanner
from dpro.ingest.reading import files
from tests.scanned import differences, read_both, taken_lists
from tests.traces import cpu_op, event, kernel, launch

NAMES = [
    "aten::mm",
    "nccl:all_reduce",
    "c10d::send",
    "[memory]",
    "record_param_comms",
    "gemm",
    "größe",
    "ncclDevKernel_Sum(x)",
]
CATEGORIES = [
    "cpu_op",
    "cuda_runtime",
    "kernel",
    "python_function",
    "user_annotation",
    "gpu_memcpy",
    "cuda_sync",
    "Trace",
    "new",
]
NUMBER_KEYS = [
    "device",
    "stream",
    "bytes",
    "correlation",
    "External id",
    "external id",
    "Sequence number",
    "Fwd thread id",
]
VALUE_KEYS = [
    "Input Dims",
    "Input dims",
    "Input type",
    "Concrete Inputs",
    "Collective name",
    "name",
    "unknown",
]
VALUES = [[], [[2, 3], []], [[1, [2, 3]], "a]", [], None, True], "", 7, "all_reduce", [["x", [4]], 1.5]]
NUMBERS = [-2, 0, 7, 1 << 59, "7", "stream 12", "", "Spans", "1_0"]
TIMES = [0, 1.5, 12345.678, 1 << 40, (1 << 43) + 0.125, (1 << 52) + 0.5]
ODD_NUMBERS = [1 << 62, 1 << 70, 7.0, 1e30, None, True, -0.5, [1]]
ODD_TIMES = [None, "12.5", -3, 1e-3, 1.23456, 1 << 60, 0.0005, "text"]


def events_with(numbers: list[Any], times: list[Any], values: list[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Events with some of these values."""
    arguments = st.builds(
        lambda numbered, valued: numbered | valued,
        st.dictionaries(st.sampled_from(NUMBER_KEYS), st.sampled_from(numbers)),
        st.dictionaries(st.sampled_from(VALUE_KEYS), st.sampled_from(values)),
    )
    return st.fixed_dictionaries(
        {"ph": st.sampled_from("XXXXXXXXiMBEsf"), "ts": st.sampled_from(times)},
        optional={
            "cat": st.sampled_from(CATEGORIES),
            "name": st.sampled_from([*NAMES, "", 'with "quotes" and a \\']),
            "pid": st.sampled_from(numbers),
            "tid": st.sampled_from(numbers),
            "dur": st.sampled_from(times),
            "args": arguments,
            "id": st.integers(0, 9),
        },
    )


EVENTS = events_with(NUMBERS, TIMES, VALUES)
ODD_EVENTS = events_with(
    ODD_NUMBERS, ODD_TIMES, [{"a": {"b": [1]}}, 1e-5, "größe", "\x7f"]
) | st.sampled_from(
    [{"ph": "X", "name": 5}, {"ph": "", "args": 3}, {"ph": "XX", "args": None}, {"cat": None}, 7, [], {}]
)
MEMORY = {"Device Type": 1, "Device Id": 0, "Total Allocated": 512, "Total Reserved": 1024}
USUAL = [
    cpu_op("aten::mm", 10.125, 30, **{"External id": 4, "Input Dims": [[2, 3], []], "Sequence number": 9}),
    launch(15, 5.5, 1),
    kernel(
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 25, 10, 1, **{"In msg nelems": 64, "dtype": "Float"}
    ),
    {
        "ph": "i",
        "s": "t",
        "name": "[memory]",
        "pid": 1,
        "tid": 1,
        "ts": 3.5,
        "args": {"Device Type": 1, "Device Id": 0, "Total Allocated": 512, "Total Reserved": 1024},
    },
    {"ph": "s", "id": 3, "pid": 1, "tid": 2, "ts": 1, "cat": "ac2g", "name": "ac2g"},
    event("cuda_sync", "Stream Sync", 40, 2, stream=7, wait_on_stream=7, cuda_sync_kind="Stream Sync"),
]


def write(path: Path, events: list[Any], **how: Any) -> Path:
    """The trace, of which all but the last event stand in lists that are scanned."""
    text = json.dumps({"schemaVersion": 1, "traceEvents": [*events, cpu_op("last", 1, 1)]}, **how)
    path.write_text(text)
    return path


def test_usual_events_are_taken_however_they_are_laid_out(tmp_path):
    for indent in (None, 0, 2, "\t"):
        path = write(tmp_path / "rank0.json", USUAL * 3, indent=indent)
        assert differences(path) == []
        assert set(taken_lists(path)) == {True}


def test_a_span_has_the_numbers_that_its_text_says(tmp_path):
    (trace,) = read_both(write(tmp_path / "rank0.json", USUAL))[1:]
    spans = trace.frames["spans"].filter(name="aten::mm").row(0, named=True)
    expected = {
        "start_ns": 10125,
        "duration_ns": 30000,
        "external_id": 4,
        "sequence_number": 9,
        "shapes": "[[2,3],[]]",
    }
    assert {name: spans[name] for name in expected} == expected
    assert trace.frames["counters"]["value"].to_list() == [512.0, 1024.0]


@pytest.mark.slow
@given(st.lists(EVENTS, min_size=1, max_size=12), st.sampled_from([None, 1]))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_ways_read_the_same_of_any_events(tmp_path, events, indent):
    path = write(tmp_path / "rank0.json", events, indent=indent, ensure_ascii=False)
    assert differences(path) == []
    assert taken_lists(path) == [True]


@given(st.lists(EVENTS | ODD_EVENTS, max_size=12), st.booleans())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_ways_read_the_same_where_some_events_are_odd(tmp_path, events, is_ascii):
    assert differences(write(tmp_path / "rank0.json", events, ensure_ascii=is_ascii)) == []


@given(st.lists(EVENTS | EVENTS | EVENTS | ODD_EVENTS, min_size=3, max_size=12))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_learnt_from_one_list_does_not_change_the_next(tmp_path, events):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_BLOCK_BYTES", 400)
        assert differences(write(tmp_path / "rank0.json", events * 3)) == []


def test_tables_grow_with_names_and_rows(tmp_path, monkeypatch):
    events = [cpu_op(f"op {number} {'x' * (number % 40)}", number, 1) for number in range(1000)]
    path = write(tmp_path / "rank0.json", events)
    monkeypatch.setattr(scanner, "_ROWS", 4)
    monkeypatch.setattr(scanner, "_STRINGS", 100)
    assert differences(path) == []
    assert set(taken_lists(path)) == {True}


def test_details_are_kept_of_a_kernel_whose_name_an_operator_had_before(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK_BYTES", 400)  # lists of few events
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
    details = {"Seq": 5, "Collective name": "allreduce"}
    events = [cpu_op(name if at % 2 else "aten::mm", at, 1) for at in range(9)]
    events += [kernel("gemm" if at % 2 else name, 10 + at, 1, at, **details) for at in range(9)]
    events += [event("cuda_sync", name, 30 + at, 1, stream=7) for at in range(9)]
    path = write(tmp_path / "rank0.json", [*events, *events])
    assert differences(path) == []
    assert set(taken_lists(path)) == {True}
    assert read_both(path)[0].frames["collectives"]["sequence"].to_list() == [5] * 10


def test_a_name_that_looks_like_a_list_is_no_json(tmp_path):
    text = json.dumps([*USUAL, cpu_op("aten::mm", 9, 1, **{"Input Dims": "[memory]"}), cpu_op("last", 1, 1)])
    path = tmp_path / "rank0.json"
    path.write_text(text.replace('"Input Dims": "[memory]"', '"Input Dims": [memory]'))
    assert differences(path) == []
    assert taken_lists(path) == [False]


@pytest.mark.parametrize("late", ["9007199254740991.999", "9007199254740990.999", "17592186044416.001"])
@pytest.mark.parametrize("key", ["ts", "dur"])
def test_both_ways_read_the_same_of_times_that_a_float_cannot_hold(tmp_path, key, late):
    path = write(tmp_path / "rank0.json", [*USUAL, cpu_op("late", 1, 1) | {key: "LATE"}])
    path.write_text(path.read_text().replace('"LATE"', late))
    assert differences(path) == []


@pytest.mark.parametrize("odd", [True, False, "12.5", "true", None])
def test_odd_times_mean_the_same_behind_times_that_a_float_cannot_hold(tmp_path, monkeypatch, odd):
    late = [cpu_op("late", (1 << 43) + 0.125, 1) for _ in range(8)]
    monkeypatch.setattr(files, "_BLOCK_BYTES", 400)
    assert differences(write(tmp_path / "rank0.json", [*late, cpu_op("odd", odd, odd), *late])) == []


def test_numbers_written_as_strings_may_be_any(tmp_path):
    # Strings stand for numbers near these until they are read.
    numbers = ["12", "stream 7", *(str(kernel_module.TEXT - code) for code in range(200))]
    events = [cpu_op("aten::mm", 1, 1, **{"External id": number, "correlation": "5"}) for number in numbers]
    path = write(tmp_path / "rank0.json", events)
    assert differences(path) == []
    assert taken_lists(path) == [True]


@pytest.mark.parametrize("number", ["5.3e-05", "1E+2", "-7e9", "0e0"])
def test_numbers_with_an_exponent_that_are_passed_over_are_not_odd(tmp_path, number):
    small = cpu_op("aten::mm", 1, 2, **{"memory bandwidth": "NUMBER", "unused": ["NUMBER", 1]})
    path = write(tmp_path / "rank0.json", [*USUAL, small, *USUAL])
    path.write_text(path.read_text().replace('"NUMBER"', number))
    assert all(taken_lists(path))
    assert differences(path) == []


@pytest.mark.parametrize("number", ["1e", "1e+", "e5", "1e-", "1e400", "1e5.5", "1.e5"])
def test_what_only_looks_like_an_exponent_is_left_to_the_decoder(tmp_path, number):
    odd = cpu_op("aten::mm", 1, 2, **{"memory bandwidth": "NUMBER"})
    path = write(tmp_path / "rank0.json", [*USUAL, odd, *USUAL])
    path.write_text(path.read_text().replace('"NUMBER"', number))
    assert not all(taken_lists(path))
    assert differences(path) == []


def test_a_list_with_one_odd_event_is_left_to_the_decoder(tmp_path):
    odd = cpu_op("aten::mm", 1e-3, {"no": "number"})
    path = write(tmp_path / "rank0.json", [*USUAL, odd, *USUAL])
    assert differences(path) == []
    assert not any(taken_lists(path))


@pytest.mark.parametrize("text", [b"[]", b"[{}]", b'[{"ph":"X","args":{}}]', b'[ { "ph" : "X" } , { } ]'])
def test_lists_are_taken(text):
    assert Scanner(Columns(), Memory()).take(text + bytes(64)) is not None


@pytest.mark.parametrize(
    "text",
    [
        *(b"[{},]", b"[{}{}]", b"[{}", b"[{}]]", b"[1]", b'[{"ph"}]', b'[{"ph":}]', b'[{"ph":"X",}]'),
        *(b'[{"ts":01}]', b'[{"ts":1.}]', b'[{"pid":1 2}]', b'[{"zz":-}]', b'[{"zz":tru}]'),
        *(b'[{"zz":"\x01"}]', b'[{"zz":"\\q"}]', b'[{"zz":[1,]}]', b'[{"zz":[1 2]}]', b'[{"args":{"a":1}]'),
        *(b'[{"args":{"a":1}}}]', b'[{"zz":{"a":{"b":1}}}]', b'[{"args":[{"pid":7}]}]'),
        *(b'[{"name":"\xff","ph":"X"}]', b'[{"args":{},"args":{}}]', b'[{"zz":' + b"9" * 400 + b"}]"),
        b'[{"zz":' + b"[" * 70 + b"]" * 70 + b"}]",
    ],
)
def test_lists_are_refused(text):
    assert Scanner(Columns(), Memory()).take(text + bytes(64)) is None


@pytest.mark.slow
def test_both_ways_read_the_same_of_real_traces(traces):
    for path in sorted(traces.rglob("*.json.gz")):
        assert differences(path) == [], path


@pytest.mark.slow
def test_no_place_outside_of_an_array_is_read(tmp_path):
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1"}
    tests = [__file__, "tests/fuzz/test_scanner.py"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-k",
            "not outside and not real",
            *tests,
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]


def test_compressed_traces_are_read_too(tmp_path):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(write(tmp_path / "rank1.json", USUAL).read_bytes()))
    assert differences(path) == []
