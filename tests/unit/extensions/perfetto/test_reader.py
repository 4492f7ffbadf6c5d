"""Perfetto's protobuf: as PyTorch writes it, and as others do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from dpro.errors import InputError
from dpro.extensions.perfetto.reader import is_perfetto, read_perfetto
from dpro.ingest.formats import registry
from dpro.ingest.kineto.reader import read_trace
from dpro.ingest.trace import RankTrace
from tests.perfetto_traces import STAGES, pftrace
from tests.traces import annotation, cpu_op, event, kernel, launch

BASE_NS = 1_700_000_000_000_000_000


def both(events: list[dict[str, Any]], folder: Path) -> tuple[RankTrace, RankTrace]:
    """The same events, read from Kineto's JSON and from Perfetto's protobuf."""
    text, packed = folder / "rank3.json", folder / "rank3.pftrace.gz"
    text.write_text(json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": events}))
    packed.write_bytes(gzip.compress(pftrace(events, BASE_NS)))
    return read_trace(text), read_perfetto(packed)


def assert_same(one: RankTrace, other: RankTrace) -> None:
    assert (one.rank, one.skipped) == (other.rank, other.skipped)
    assert one.frames.keys() == other.frames.keys()
    for name in one.frames:
        frames = [_plain(trace.frames[name]) for trace in (one, other)]
        assert frames[0].equals(frames[1]), name


def _plain(frame: pl.DataFrame) -> pl.DataFrame:
    """Without ids that follow the order in the file, and what the protobuf lacks: how a copy goes."""
    frame = frame.drop([name for name in frame.columns if name.endswith("_id") and name != "external_id"])
    if {"kind", "name"} <= {*frame.columns}:
        moves = pl.col("kind").cast(pl.String)
        frame = frame.with_columns(
            name=pl.when(moves.is_in(["memcpy", "memset"])).then(moves).otherwise(pl.col("name"))
        )
    return frame.sort([name for name in frame.columns if frame[name].dtype != pl.List])


def job() -> list[dict[str, Any]]:
    """Two steps of nested operators, launches, kernels, a collective, a copy and a wait for an event."""
    facts = {"Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "dtype": "Float"}
    facts |= {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": 4}
    wait = {"stream": 7, "correlation": 9, "wait_on_stream": 9, "wait_on_cuda_event_record_corr_id": 2}
    events = []
    for step in range(2):
        at = 1000.0 * step + 0.125
        events += [
            annotation(f"ProfilerStep#{step}", at, 900),
            cpu_op("aten::linear", at + 1, 100, **{"Input Dims": [[2, 3], [], [3]], "Sequence number": step}),
            cpu_op("aten::addmm", at + 1, 90, **{"External id": 7}),  # begins with the one around it
            cpu_op("aten::relu", at + 101, 0),  # where that ends, and takes no time
            cpu_op("aten::mul", at + 101, 10, tid=12),
            launch(at + 20, 5, 10 * step + 1),
            launch(at + 30, 5, 10 * step + 2, name="cudaMemcpyAsync"),
            kernel("gemm", at + 40, 50, 10 * step + 1),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 95, 20, 10 * step + 3, stream=20, **facts),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at + 92, 2, pid=0, tid=7)
            | {"args": {"device": 0, "stream": 7, "correlation": 10 * step + 2, "bytes": 4096}},
            event("cuda_sync", "Stream Wait Event", at + 60, 1, pid=0, tid=7)
            | {"args": {**wait, "cuda_sync_kind": "Stream Wait Event"}},
        ]
    return events


def test_a_trace_of_cuspy_says_what_the_same_trace_of_kineto_says(tmp_path):
    by_text, by_packets = both(job(), tmp_path)
    assert_same(by_text, by_packets)
    assert by_packets.rank == 3
    assert by_packets.frames["steps"].height == 2
    (call,) = by_packets.frames["collectives"].head(1).to_dicts()
    assert (call["op"], call["bytes_in"]) == ("all_reduce", 256)
    assert by_packets.frames["spans"]["start_ns"].min() == BASE_NS + 125


@pytest.mark.parametrize(
    "trace", ["nanogpt_h100_8r_rs_ag", "torchrec_v100_4r_a2a_ar", "lightllm_h200_8r_deepep_cudagraph"]
)
def test_real_traces_in_the_layout_of_cuspy_are_read_as_they_are_in_json(tmp_path, traces, trace):
    source = next((traces / "multirank" / trace).glob("*.json.gz"))
    events = [
        event
        for event in json.loads(gzip.decompress(source.read_bytes()))["traceEvents"]
        if event.get("ph") == "X"
        and event["cat"] not in ("Trace", "overhead")
        and isinstance(event["pid"], int)
        if event["cat"] not in STAGES or "stream" in event["args"]
    ]
    assert_same(*both(events, tmp_path))


def writer(path: Path) -> Trace:
    """A trace of another writer: a clock of its own that counts from value to value, and no categories."""
    trace = Trace()
    snapshot = trace.packet.add(timestamp=1000, trusted_packet_sequence_id=4).clock_snapshot
    snapshot.clocks.add(clock_id=6, timestamp=1_000)
    snapshot.clocks.add(clock_id=1, timestamp=BASE_NS + 1_000)
    snapshot.clocks.add(clock_id=64, timestamp=77, is_incremental=True, unit_multiplier_ns=1000)
    first = trace.packet.add(trusted_packet_sequence_id=4, sequence_flags=1)
    first.trace_packet_defaults.timestamp_clock_id = 64
    first.trace_packet_defaults.track_event_defaults.track_uuid = 2
    first.interned_data.event_names.add(iid=1, name="step")
    for uuid, parent in ((1, 0), (2, 1)):
        track = trace.packet.add().track_descriptor
        track.uuid, track.parent_uuid = uuid, parent
        if uuid == 1:
            track.process.pid = 42
    for since_us, kind, name in (
        (5, 1, "step"),
        (2, 1, "load"),
        (3, 2, ""),
        (1, 3, "now"),
        (4, 2, ""),
        (1, 2, ""),
    ):
        packet = trace.packet.add(timestamp=since_us, trusted_packet_sequence_id=4)
        packet.track_event.type = kind
        if name == "step":
            packet.track_event.name_iid = 1
        elif name:
            packet.track_event.name = name
    path.write_bytes(trace.SerializeToString())
    return trace


def test_slices_of_another_writer_are_ranges_of_its_threads_on_the_wall_clock(tmp_path):
    writer(tmp_path / "trace.pftrace")
    read = read_perfetto(tmp_path / "trace.pftrace")
    rows = (
        read.frames["spans"].select("kind", "name", "start_ns", "duration_ns", "pid", "tid").sort("start_ns")
    )
    assert rows.rows() == [
        ("annotation", "step", BASE_NS + 6_000, 10_000, 42, 2),
        ("annotation", "load", BASE_NS + 8_000, 3_000, 42, 2),
    ]
    assert read.skipped == {"instants and values of counters": 1, "begin or end marks without a match": 1}


def test_a_trace_that_is_cut_is_read_as_far_as_it_goes(tmp_path):
    content = pftrace(job(), BASE_NS)
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(content[:-30])
    read = read_perfetto(path)
    assert read.warnings[-1] == "rank0.pftrace: truncated within a packet; read up to there"
    assert read.frames["spans"].height == len(job()) - 2 - 1  # waits are no spans; the last copy is lost


def test_a_trace_that_is_cut_before_the_end_of_any_slice_says_so(tmp_path):
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(pftrace(job(), BASE_NS)[:1000])
    with pytest.raises(InputError, match=r"rank0\.pftrace: truncated within a packet, before an end of any"):
        read_perfetto(path)
    path.write_bytes(pftrace([], BASE_NS))
    with pytest.raises(InputError, match=r"rank0\.pftrace: a trace without slices or work of GPUs"):
        read_perfetto(path)


@pytest.mark.parametrize("damaged", [b"\x0a\x03\xff\xff\xff", b"\x0a\x02\x08\x01rubbish"])
def test_what_is_no_packet_is_one_line(tmp_path, damaged):
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(pftrace(job(), BASE_NS) + damaged)
    with pytest.raises(InputError, match=r"rank0\.pftrace: damaged Perfetto trace"):
        read_perfetto(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\n\n", b"\nloss 3.1\nloss 2.9\n", b'\n{"traceEvents": []}']
)
def test_text_that_begins_with_an_empty_line_is_no_trace_of_perfetto(content):
    assert not is_perfetto(content)


def test_a_trace_is_known_by_its_packets_and_not_by_its_name(tmp_path):
    content = pftrace(job(), BASE_NS)
    assert registry().find(content[:65536]).name == "Perfetto"
    assert registry().find(writer(tmp_path / "any").SerializeToString()).name == "Perfetto"


def test_a_trace_of_rocprofv3_is_refused_by_the_option_that_writes_what_is_read(tmp_path):
    path = tmp_path / "job_results.pftrace"
    path.write_bytes(pftrace([event("kernel_dispatch", "gemm", 10, 5)], BASE_NS))
    with pytest.raises(InputError, match=r"trace of rocprofv3, .*; record with `--output-format csv`"):
        read_perfetto(path)
