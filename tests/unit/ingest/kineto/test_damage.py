"""Damaged Kineto files are read as far as they go, and say what was lost."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import InputError
from dpro.ingest.kineto import read_trace
from dpro.ingest.trace import RankTrace
from dpro.schema import TABLES, conform
from tests.traces import annotation, cpu_op, event, kernel, launch, write

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
TRUNCATED = {"truncated tail": 1}


def _many(count: int) -> list[dict[str, Any]]:
    return [cpu_op(f"op {number}", number * 10, 5) for number in range(count)]


def _names(path: Path) -> list[str]:
    names: list[str] = read_trace(path).frames["spans"]["name"].to_list()
    return names


def _mangled(path: Path, *changes: tuple[bytes, bytes]) -> RankTrace:
    text = path.read_bytes()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path.write_bytes(text)
    return read_trace(path)


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
def test_json_cut_anywhere_keeps_what_stands_before_the_cut(tmp_path, kept):
    path = write(tmp_path / "rank0.json", _many(1000))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    trace = read_trace(path)
    assert trace.frames["spans"]["name"].to_list() == [
        f"op {number}" for number in range(trace.frames["spans"].height)
    ]
    assert trace.frames["spans"].height == pytest.approx(1000 * kept, rel=0.1)
    assert trace.skipped == TRUNCATED
    assert "cut short" in trace.warnings[0]
    assert f"{trace.frames['spans'].height} events" in trace.warnings[0]


def test_a_gzip_file_cut_in_the_middle_keeps_what_can_be_decompressed(tmp_path):
    path = write(tmp_path / "rank0.json.gz", _many(5000))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    trace = read_trace(path)
    assert 1000 < trace.frames["spans"].height < 5000
    assert trace.skipped == TRUNCATED
    assert "gzip stream cut short" in trace.warnings[0]


def test_a_gzip_file_damaged_in_the_middle_keeps_what_stands_before_the_damage(tmp_path):
    path = write(tmp_path / "rank0.json.gz", _many(5000))
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = b"\xff" * (len(content) - len(content) // 2)
    path.write_bytes(content)
    trace = read_trace(path)
    assert 1000 < trace.frames["spans"].height < 5000
    assert trace.skipped["truncated tail"] == 1


def test_facts_behind_the_events_that_are_cut_off_are_a_loss_too(tmp_path):
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": _many(3), "host_name": "node0"})[:-4])
    trace = read_trace(path)
    assert trace.frames["spans"].height == 3
    assert trace.skipped == TRUNCATED


def test_an_event_that_lost_its_end_costs_no_other_event(tmp_path):
    path = write(tmp_path / "rank0.json", _many(100))
    trace = _mangled(
        path, (b'"op 50", "ts": 500, "dur": 5, "pid": 10, "tid": 11, "args": {}}', b'"op 50", "ts')
    )
    assert trace.frames["spans"].height == 98  # the next one lost its beginning
    assert trace.skipped == {"malformed events": 1}
    assert "1 malformed event" in trace.warnings[0]


@pytest.mark.parametrize("token", [b"inf", b"-inf", b"nan", b"NaN", b"-Infinity", b"N/A"])
def test_words_that_are_no_json_numbers_cost_nothing(tmp_path, token):
    path = write(
        tmp_path / "rank0.json", [cpu_op(f"nan, {number}", number, 1, speed=7) for number in range(9)]
    )
    trace = _mangled(path, (b'"speed": 7', b'"speed": ' + token))
    assert trace.frames["spans"]["name"].to_list() == [f"nan, {number}" for number in range(9)]
    assert (trace.skipped, trace.warnings) == ({}, [])


def test_control_characters_and_foreign_bytes_in_a_name_cost_nothing(tmp_path):
    path = write(tmp_path / "rank0.json", [cpu_op("bell here", 1, 1), cpu_op("fine", 5, 1)])
    trace = _mangled(path, (b"bell here", b"bell\x07\n\xff"))
    assert trace.frames["spans"]["name"].to_list() == ["bell  \ufffd", "fine"]
    assert trace.skipped == {}


def test_trailing_commas_cost_nothing(tmp_path):
    path = write(tmp_path / "rank0.json", _many(3))
    assert _mangled(path, (b"}]", b"}, ]"), (b"{}}", b"{},}")).frames["spans"].height == 3


def test_a_time_that_is_no_number_costs_only_its_own_span(tmp_path):
    path = write(tmp_path / "rank0.json", [cpu_op("a", 1, 1), cpu_op("b", "soon", 1), cpu_op("c", 3, None)])
    trace = read_trace(path)
    assert trace.frames["spans"]["name"].to_list() == ["a"]
    assert trace.skipped == {"spans without a time or duration": 2}


def test_facts_that_are_not_json_still_give_the_base_of_times(tmp_path):
    path = write(tmp_path / "rank0.json", [cpu_op("a", 1, 1)], baseTimeNanoseconds=1000, host_name="h")
    trace = _mangled(path, (b'"host_name": "h"', b'"host_name": }'))
    assert trace.frames["spans"]["start_ns"].to_list() == [2000]


def test_a_list_of_objects_within_an_event_does_not_end_it(tmp_path):
    frames = [{"name": "outer"}, {"name": "inner"}]
    events = [cpu_op(f"op {number}", number, 1, frames=frames) for number in range(20_000)]
    trace = read_trace(write(tmp_path / "rank0.json", events))
    assert (trace.frames["spans"].height, trace.skipped) == (20_000, {})


@pytest.mark.parametrize("indent", [None, 0, 2, "\t"])
def test_a_file_of_many_blocks_is_read_whole_however_it_is_laid_out(tmp_path, indent):
    path = tmp_path / "rank0.json"
    document = {
        "traceEvents": _many(12_000),
        "deviceProperties": [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}],
    }
    path.write_text(json.dumps(document, indent=indent))
    assert path.stat().st_size > 1 << 20
    trace = read_trace(path)
    assert trace.frames["spans"]["name"].to_list() == [f"op {number}" for number in range(12_000)]
    assert trace.skipped == {}


# What hypothesis mangles: one event of every sort that is read with care.
EVENTS = [
    cpu_op("c10d::allreduce_", 1, 20, **{"Concrete Inputs": ["", "1"], "Sequence number": 3}),
    annotation("nccl:all_reduce", 2, 10, **{"Input Dims": [[3, 4]], "Input type": ["float"]}),
    launch(4, 2, 5),
    kernel(
        NCCL, 30, 8, 5, **{"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 4, "Seq": 1}
    ),
    annotation("gloo:all_reduce", 40, 9, tid=50),
    launch(60, 2, 9, "cudaStreamWaitEvent"),
    event(
        "cuda_sync", "Stream Wait Event", 61, 1, pid=0, tid=24, correlation=9, stream=24, wait_on_stream=20
    ),
    event("gpu_memcpy", "Memcpy", 70, 1, pid=0, tid=7, device=0, stream=7, bytes=100),
    annotation("ProfilerStep#1", 0, 90),
    {"ph": "B", "name": "range", "ts": 1, "pid": 1, "tid": 1},
    {"ph": "E", "name": "range", "ts": 5, "pid": 1, "tid": 1},
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "rank 3"}},
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1, "id": 1},
]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["X", "stream 7", "1e400", "-5", "[0, 1, ..., 5]", 1 << 70, 1709000000000001.123]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def _reads_or_refuses(path: Path) -> None:
    """What every file must do: give tables that fit their declarations, or one line."""
    try:
        trace = read_trace(path)
    except InputError:
        return
    for name, frame in trace.frames.items():
        conform(TABLES[name], frame)
    assert all("\n" not in warning for warning in trace.warnings)


@st.composite
def _odd_events(draw: Any) -> list[Any]:
    """Events with fields dropped or of other types, repeated, and in any order."""
    events: list[Any] = json.loads(json.dumps(draw(st.permutations(EVENTS + EVENTS[:4]))))
    for _ in range(draw(st.integers(0, 6))):
        chosen = draw(st.sampled_from(events))
        if not isinstance(chosen, dict):
            continue
        part = chosen["args"] if isinstance(chosen.get("args"), dict) and draw(st.booleans()) else chosen
        if part:
            key = draw(st.sampled_from(sorted(part)))
            if draw(st.booleans()):
                del part[key]
            else:
                part[key] = draw(ODD)
    return [*events, *draw(st.lists(ODD, max_size=2))]


@given(events=_odd_events(), facts=st.dictionaries(st.sampled_from(["distributedInfo", "baseTimeNanoseconds",
       "deviceProperties", "host_name"]), ODD))  # fmt: skip
@settings(max_examples=60)
def test_events_of_any_shape_are_read_or_refused(events, facts, tmp_path_factory):
    _reads_or_refuses(write(tmp_path_factory.mktemp("odd") / "rank0.json", events, **facts))


@pytest.mark.parametrize("recorded", [[0], True, {}, 7])
def test_an_operation_that_is_no_text_is_taken_from_the_call_instead(recorded, tmp_path):
    events = [*EVENTS[:3], kernel(NCCL, 30, 8, 5, **{"Collective name": recorded, "Seq": 1})]
    trace = read_trace(write(tmp_path / "rank0.json", events))
    assert trace.frames["collectives"]["op"].to_list() == ["all_reduce"]


@given(
    gzipped=st.booleans(),
    cut=st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
)
@settings(max_examples=60)
def test_bytes_cut_and_flipped_anywhere_are_read_or_refused(gzipped, cut, flips, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("cut") / f"rank0.json{'.gz' * gzipped}", EVENTS * 5)
    content = bytearray(path.read_bytes())
    for place, value in flips:
        content[int(place * len(content))] = value
    path.write_bytes(content[: round(cut * len(content))])
    _reads_or_refuses(path)


REAL = [
    "single/h100_bert_pystack.json.gz",
    "multirank/torchrec_v100_2r_kjt/rank0.pt.trace.json.gz",
    "single_hta/amd_trace__mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "single_hta/critical_path__cuda_event_sync_multi_stream__event_sync_trace.json.gz",
    "robust/composer_rank0.trace.json.gz",
]


@pytest.mark.slow  # tests/fuzz does more of it
@pytest.mark.parametrize("name", REAL)
def test_real_files_damaged_in_many_ways_are_read_or_refused(name, traces, tmp_path):
    chance = random.Random(name)
    packed = (traces / name).read_bytes()
    text = gzip.decompress(packed)
    for number in range(6):
        mangled = bytearray(packed if number % 2 else text)
        for _ in range(chance.randrange(4)):
            place = chance.randrange(len(mangled))
            mangled[place : place + chance.choice((0, 1, 300))] = chance.choice(
                (b"", b"{", b"}", b'"', b"\x00")
            )
        path = tmp_path / f"{number}.json"
        path.write_bytes(mangled[: chance.randrange(len(mangled))] if number > 1 else mangled)
        _reads_or_refuses(path)


def test_a_real_file_cut_in_half_gives_the_first_half_of_its_spans(traces, tmp_path):
    packed = (traces / "single" / "h100_bert_pystack.json.gz").read_bytes()
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    half = read_trace(path)
    whole = read_trace(traces / "single" / "h100_bert_pystack.json.gz")
    assert 0 < half.frames["spans"].height < whole.frames["spans"].height
    assert set(half.frames["spans"]["name"]) <= set(whole.frames["spans"]["name"])
    assert half.skipped == TRUNCATED
