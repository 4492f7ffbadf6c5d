"""Real Kineto files against a plain reading with nothing but dictionaries."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.ingest.derived import repetitions
from dpro.ingest.kineto import read_trace
from dpro.ingest.reading.symbols import demangled
from dpro.ingest.trace import RankTrace


def _large(name: str) -> Any:
    """A file whose plain reading takes seconds."""
    return pytest.param(name, marks=pytest.mark.slow)


FILES = [
    "et/linear_kineto.json.gz",
    _large("nccl_meta/mi300x_ddp_rank0of8.json.gz"),
    _large("nccl_meta/nanogpt_h100_current_rank0of8.json.gz"),
    "nccl_meta/nanogpt_h100_hook_rank0of8.json.gz",
    _large("perf/h100_owlv2_132k_pystack.json.gz"),
    "perf/h100_timesformer_50k_pystack.json.gz",
    _large("robust/kineto2020_barearray.json.gz"),
    _large("robust/kineto2021_v100.json.gz"),
    "robust/mi210_gpu_only.json.gz",
    "single/h100_bert_pystack.json.gz",
    "single/mi300x_bert_pystack.json.gz",
    "single_hta/amd_trace__mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "single_hta/critical_path__alexnet__benchmark_result_2869224_1695835535_trace.json.gz",
    "single_hta/critical_path__cuda_event_sync__event_sync_trace.json.gz",
    "single_hta/critical_path__cuda_event_sync_multi_stream__event_sync_trace.json.gz",
    "single_hta/distributed_info_unavailable__distributed_info_not_found.json.gz",
    "single_hta/execution_trace__benchmark_simple_add_trace.json.gz",
    "single_hta/nccl_parser_config__nccl_data.json.gz",
    "single_hta/rank_unavailable__rank_not_found.json.gz",
    "single_hta/trace_compare__base__base.json.gz",
    "single_hta/trace_compare__test__test.json.gz",
    _large("single_hta/trace_diff__control__control.json.gz"),
    "single_hta/trace_diff__test__test.json.gz",
    "single_hta/triton_example__triton_example.json.gz",
]
CLOSE_US = 0.002  # per span: a float of the plain reading may round a nanosecond


def _events(path: Path) -> list[dict[str, Any]]:
    """All events, in no more than the standard library's words."""
    document = json.loads(gzip.decompress(path.read_bytes()), strict=False)
    events: list[dict[str, Any]] = document if isinstance(document, list) else document["traceEvents"]
    return events


def _plain(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Complete events with a time."""
    return [event for event in events if event.get("ph") == "X" and "ts" in event and "dur" in event]


def _of(events: list[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    return [event for event in events if str(event.get("cat")).lower() in categories]


@pytest.fixture(scope="module", params=FILES)
def read(request, traces) -> tuple[RankTrace, list[dict[str, Any]]]:
    """What dpro reads of a file, and what a plain reading does."""
    return read_trace(traces / request.param, rank=0), _events(traces / request.param)


@pytest.mark.few(4)
def test_a_plain_reading_finds_the_same_work(read):
    trace, everything = read
    spans, events = trace.frames["spans"], _plain(everything)
    for kind, categories in {
        "kernel": ("kernel",),
        "memcpy": ("gpu_memcpy", "memcpy"),
        "memset": ("gpu_memset", "memset"),
        "cpu_op": ("cpu_op", "operator"),
        "runtime": ("cuda_runtime", "cuda_driver", "hip_runtime", "runtime"),
        "python": ("python_function",),
    }.items():
        plain, mine = _of(events, *categories), spans.filter(pl.col("kind") == kind)
        assert mine.height == len(plain), kind
        total_us = sum(float(event["dur"]) for event in plain)
        assert mine["duration_ns"].sum() / 1000 == pytest.approx(total_us, abs=CLOSE_US * max(1, len(plain)))
        assert sorted(mine["name"]) == sorted(demangled(event["name"]) for event in plain)
    memory = [event["args"] for event in everything if event.get("name") == "[memory]"]
    untold = sum("Total Allocated" not in args for args in memory)
    assert trace.skipped == ({"memory events without totals": untold} if untold else {})


def test_a_plain_reading_finds_the_same_communication_and_steps(read):
    trace, everything = read
    events = _plain(everything)
    communication = [event for event in _of(events, "kernel") if "nccl" in event["name"].lower()]
    ranges = [event for event in _of(events, "user_annotation") if event["name"].startswith("gloo:")]
    assert trace.frames["collectives"].height == len(communication) + len(ranges)
    marks = _of(events, "user_annotation", "cpu_op", "operator")
    steps = {int(event["name"][13:]) for event in marks if event["name"].startswith("ProfilerStep#")}
    marked = trace.frames["steps"].filter(pl.col("source") == "ProfilerStep")
    assert set(marked["step"]) == steps


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("et/linear_kineto.json.gz", 39),  # the first one of 40 sets up the optimizer, too
        ("robust/kineto2020_barearray.json.gz", 6),
        ("robust/kineto2021_v100.json.gz", 6),
        ("single_hta/nccl_parser_config__nccl_data.json.gz", 3),
        ("multirank/torchrec_v100_2r_kjt/rank0.pt.trace.json.gz", 3),
        ("perf/h100_owlv2_132k_pystack.json.gz", 0),  # one step, with many equal layers in it
        ("robust/mi210_gpu_only.json.gz", 0),
        ("multirank/lightllm_h200_8r_deepep_cudagraph/rank0.pt.trace.json.gz", 0),
    ],
)
def test_repetition_alone_finds_the_steps_or_none(name, count, traces):
    spans = read_trace(traces / name, rank=0).frames["spans"]
    unmarked = spans.filter(
        ~pl.col("kind").is_in(["annotation"]) & ~pl.col("name").str.starts_with("Profiler")
    )
    assert len(repetitions(unmarked)) == count
