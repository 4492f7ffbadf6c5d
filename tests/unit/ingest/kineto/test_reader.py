"""The Kineto reader on small hand-written traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.errors import InputError
from dpro.ingest.kineto import read_trace
from dpro.schema import TABLES, conform
from tests.traces import annotation, cpu_op, event, kernel, launch, write

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"


def _read(
    tmp_path: Path, events: list[Any], name: str = "rank0.json", **facts: Any
) -> dict[str, pl.DataFrame]:
    trace = read_trace(write(tmp_path / name, events, **facts))
    return {table: conform(TABLES[table], frame) for table, frame in trace.frames.items()}


def _only(frame: pl.DataFrame) -> dict[str, Any]:
    assert frame.height == 1
    return frame.row(0, named=True)


def test_no_nanosecond_is_lost_of_a_time_with_a_base(tmp_path):
    events = [cpu_op("a", 6322354305173.787, 1.001)]
    span = _only(_read(tmp_path, events, baseTimeNanoseconds=1759300074000000000)["spans"])
    assert span["start_ns"] == 6322354305173787 + 1759300074000000000
    assert span["duration_ns"] == 1001


def test_no_nanosecond_is_lost_of_an_absolute_time_with_decimals(tmp_path):
    path = write(tmp_path / "rank0.json", [cpu_op("a", 5, 1)])
    path.write_text(path.read_text().replace('"ts": 5', '"ts": 1709000000000001.123'))
    assert _only(read_trace(path).frames["spans"])["start_ns"] == 1709000000000001123


@pytest.mark.parametrize("ts", [1694128201437756, 1694128201437756.0, "1694128201437756"])
def test_times_without_a_base_are_absolute_microseconds_however_written(tmp_path, ts):
    span = _only(_read(tmp_path, [cpu_op("a", ts, "7")])["spans"])
    assert (span["start_ns"], span["duration_ns"]) == (1694128201437756000, 7000)


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("cpu_op", "cpu_op"),
        ("Operator", "cpu_op"),
        ("cuda_driver", "runtime"),
        ("Runtime", "runtime"),
        ("Kernel", "kernel"),
        ("gpu_memcpy", "memcpy"),
        ("Memset", "memset"),
        ("user_annotation", "annotation"),
        ("gpu_user_annotation", "gpu_annotation"),
        ("python_function", "python"),
        ("overhead", "overhead"),
        ("hip_runtime", "runtime"),
        ("mtia_runtime", "runtime"),
        ("xpu_runtime", "runtime"),
        ("privateuse1_runtime", "runtime"),
        ("privateuse1_driver", "runtime"),
        ("mtia_ccp_events", "kernel"),
        ("hpu_op", "kernel"),
    ],
)
def test_every_category_of_old_and_new_profilers_has_its_kind(tmp_path, category, kind):
    assert _only(_read(tmp_path, [event(category, "a", 1, 2)])["spans"])["kind"] == kind


def test_a_span_of_the_gpu_has_device_and_stream_and_no_thread(tmp_path):
    spans = _read(tmp_path, [kernel("k", 5, 2, stream=20), cpu_op("a", 1, 2, pid=3, tid=4)])["spans"]
    cpu, gpu = spans.rows(named=True)
    assert (cpu["pid"], cpu["tid"], cpu["device"], cpu["stream"]) == (3, 4, -1, -1)
    assert (gpu["pid"], gpu["tid"], gpu["device"], gpu["stream"]) == (-1, -1, 0, 20)


def test_ids_written_as_text_are_numbers(tmp_path):
    events = [
        cpu_op("a", 1, 2, tid="3340707648"),
        event("gpu_user_annotation", "b", 2, 2, pid=1, tid="stream 7"),
    ]
    spans = _read(tmp_path, events)["spans"]
    assert spans["tid"].to_list() == [3340707648, -1]
    assert spans["stream"].to_list() == [-1, 7]


def test_spans_are_numbered_by_start_and_the_longer_first(tmp_path):
    spans = _read(tmp_path, [cpu_op("late", 9, 1), cpu_op("inner", 1, 2), cpu_op("outer", 1, 5)])["spans"]
    assert spans["name"].to_list() == ["outer", "inner", "late"]
    assert spans["span_id"].to_list() == [0, 1, 2]


def test_arguments_that_join_spans_are_kept(tmp_path):
    args = {"External id": 5, "Sequence number": 6, "Fwd thread id": 7, "Input Dims": [[2, 3], []]}
    span = _only(_read(tmp_path, [cpu_op("a", 1, 2, **args)])["spans"])
    assert (span["external_id"], span["sequence_number"], span["forward_thread"]) == (5, 6, 7)
    assert json.loads(span["shapes"]) == [[2, 3], []]


def test_a_bare_array_of_events_is_a_trace(tmp_path):
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps([cpu_op("a", 1, 2)]))
    assert read_trace(path).frames["spans"].height == 1


def test_bare_infinity_and_bytes_that_are_not_utf8_do_not_stop_the_reader(tmp_path):
    path = write(tmp_path / "rank0.json", [cpu_op("name", 1, 2, bandwidth=3)])
    path.write_bytes(
        path.read_bytes().replace(b'"bandwidth": 3', b'"bandwidth": inf').replace(b"name", b"n\xffe")
    )
    assert read_trace(path).frames["spans"].height == 1


def test_what_is_not_taken_is_counted_by_reason(tmp_path):
    events = [
        cpu_op("a", 1, 2),
        cpu_op("unfinished", 1, None),
        event("invented", "b", 1, 2),
        {"ph": "X", "name": 3},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1, "id": 1},
        {"ph": "M", "name": "process_name"},
    ]
    trace = read_trace(write(tmp_path / "rank0.json", events))
    assert trace.skipped == {
        "category invented": 1,
        "malformed events": 1,
        "spans without a time or duration": 1,
    }


def test_the_rank_is_what_the_trace_says_else_its_name_else_unknown(tmp_path):
    events = [cpu_op("a", 1, 2)]
    trace = read_trace(write(tmp_path / "rank7.json", events, distributedInfo={"rank": 3, "world_size": 8}))
    assert (trace.rank, trace.world_size) == (3, 8)
    assert read_trace(write(tmp_path / "rank-3.json", events)).rank == 3
    assert read_trace(write(tmp_path / "worker5_step.json", events)).rank == 5
    assert read_trace(write(tmp_path / "trace.json", events)).rank == -1
    assert read_trace(tmp_path / "trace.json", rank=6, window=2).frames["spans"]["window"].to_list() == [2]


def test_metadata_state_the_rank_where_distributed_info_does_not(tmp_path):
    mark = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "Rank 5 training loop"}}
    trace = read_trace(write(tmp_path / "rank0.json", [mark, cpu_op("a", 1, 2)]))
    assert trace.rank == 5
    assert trace.warnings == ["rank0.json: no distributedInfo; rank 5 by its process_name"]
    path = write(tmp_path / "rank0.json", [mark, cpu_op("a", 1, 2)], distributedInfo={"rank": 3})
    assert (read_trace(path).rank, read_trace(path).warnings) == (3, [])


def test_a_begin_and_its_end_are_one_span(tmp_path):
    def mark(phase: str, name: str, ts: float, tid: int = 1, **more: Any) -> dict[str, Any]:
        return {"ph": phase, "name": name, "ts": ts, "pid": 9, "tid": tid, **more}

    events = [
        mark("B", "outer", 1.001),
        mark("B", "other thread", 2, tid=2),
        mark("B", "inner", 3, cat="cpu_op"),
        mark("E", "", 4.5),
        mark("E", "other thread", 5, tid=2),
        mark("E", "outer", 8),
        mark("E", "never begun", 9),
        mark("B", "never ended", 10),
    ]
    trace = read_trace(write(tmp_path / "rank0.json", events))
    rows = trace.frames["spans"].select("name", "kind", "start_ns", "duration_ns", "tid").rows()
    assert rows == [
        ("outer", "annotation", 1001, 6999, 1),
        ("other thread", "annotation", 2000, 3000, 2),
        ("inner", "cpu_op", 3000, 1500, 1),
    ]
    assert trace.skipped == {"begin or end marks without a match": 2}


def test_kernels_of_one_graph_launch_share_its_correlation(tmp_path):
    events = [launch(1, 2, 5, "cudaGraphLaunch"), *(kernel(f"k{n}", 10 + n, 1, 5) for n in range(4))]
    spans = _read(tmp_path, events)["spans"]
    assert spans.filter(kind="kernel")["correlation"].to_list() == [5] * 4


def test_the_gpu_of_a_rank_is_the_one_its_kernels_ran_on(tmp_path):
    devices = [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}]
    events = [event("kernel", "k", 1, 2, pid=1, tid=7, device=1, stream=7)]
    worker = _only(_read(tmp_path, events, deviceProperties=devices, host_name="h")["workers"])
    assert (worker["gpu_name"], worker["host"]) == ("B", "h")


@pytest.mark.parametrize(("models", "name"), [(["A", "A"], "A"), (["A"], "A"), (["A", "B"], ""), ([], "")])
def test_a_gpu_that_is_numbered_otherwise_than_in_the_list_is_of_its_only_model(tmp_path, models, name):
    devices = [{"id": number, "name": model} for number, model in enumerate(models)]
    events = [event("kernel", "k", 1, 2, pid=1, tid=7, device=2, stream=7)]
    assert _only(_read(tmp_path, events, deviceProperties=devices)["workers"])["gpu_name"] == name


def test_a_kernel_that_says_what_it_moves_is_believed(tmp_path):
    recorded = {
        "Collective name": "_allgather_base",
        "dtype": "BFloat16",
        "In msg nelems": 10,
        "Out msg nelems": 40,
        "Process Group Name": "3",
        "Process Group Ranks": "[0, 2, 4, 6]",
        "Seq": 9,
    }
    frames = _read(tmp_path, [launch(1, 2, 5), kernel(NCCL, 9, 8, 5, **recorded)])
    row = _only(frames["collectives"])
    assert (row["op"], row["bytes_in"], row["bytes_out"], row["dtype"]) == ("all_gather", 20, 80, "bfloat16")
    assert (row["group"], row["group_ranks"], row["sequence"]) == ("3", "0-6:2", 9)
    assert (row["algorithm"], row["protocol"]) == ("RING", "LL")
    assert (row["span_id"], row["launch_span_id"], row["enqueued_ns"]) == (1, 0, 1000)


@pytest.mark.parametrize(
    ("said", "group"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "3 TENSOR_MODEL_PARALLEL_GROUP"),
        ("undefined", "3"),
        ("", "3"),
        (7, "3"),
    ],
)
def test_a_group_has_in_its_name_what_the_job_says_of_it(tmp_path, said, group):
    recorded = {"Collective name": "allreduce", "Process Group Name": "3", "Process Group Ranks": "[0, 1]"}
    event = kernel(NCCL, 9, 8, **recorded, **{"Process Group Description": said})
    row = _only(_read(tmp_path, [event])["collectives"])
    assert (row["group"], row["group_ranks"]) == (group, "0,1")


def test_a_list_of_ranks_that_is_cut_short_is_looked_up(tmp_path):
    recorded = {
        "Collective name": "allreduce",
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1, ..., 4]",
    }
    groups = [{"pg_name": "0", "ranks": [0, 1, 2, 3, 4]}, {"pg_name": "1", "ranks": [0, 1]}]
    info = {"rank": 0, "world_size": 5, "pg_config": groups}
    row = _only(_read(tmp_path, [kernel(NCCL, 9, 8, **recorded)], distributedInfo=info)["collectives"])
    assert row["group_ranks"] == "0-4"


def test_in_a_job_with_one_group_that_group_is_meant(tmp_path):
    info = {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    row = _only(_read(tmp_path, [kernel(NCCL, 9, 8)], distributedInfo=info)["collectives"])
    assert (row["group"], row["group_ranks"]) == ("0", "0,1")


def test_a_kernel_that_says_nothing_is_known_by_the_range_that_launched_it(tmp_path):
    shaped = {"Input Dims": [[3, 4], [2]], "Input type": ["float", "float"]}
    events = [
        cpu_op("c10d::alltoall_base_", 1, 20),
        annotation("nccl:all_to_all", 2, 10, **shaped),
        launch(4, 2, 5),
        annotation("nccl:all_reduce", 2, 10, tid=99),  # another thread
        kernel("ncclDevKernel_SendRecv(args)", 30, 8, 5),
    ]
    row = _only(_read(tmp_path, events)["collectives"])
    assert (row["op"], row["bytes_in"], row["bytes_out"], row["dtype"]) == ("all_to_all", 56, 56, "float32")


def test_a_range_that_ended_before_the_launch_did_not_launch_it(tmp_path):
    events = [
        annotation("nccl:all_to_all", 2, 10),
        launch(14, 2, 5),
        kernel("ncclDevKernel_SendRecv(args)", 30, 8, 5),
    ]
    row = _only(_read(tmp_path, events)["collectives"])
    assert (row["op"], row["bytes_in"]) == ("send_recv", -1)


def test_a_kernel_whose_launch_is_not_in_the_window_is_kept_without_it(tmp_path):
    row = _only(_read(tmp_path, [kernel(NCCL, 9, 8, 5)])["collectives"])
    assert (row["op"], row["launch_span_id"], row["enqueued_ns"]) == ("all_reduce", -1, -1)


def test_the_peer_of_a_send_is_a_global_rank(tmp_path):
    call = cpu_op("c10d::send", 1, 20, **{"Concrete Inputs": ["", "", "1", "0"]})
    recorded = {"Collective name": "send", "Process Group Ranks": "[0, 8]", "Process Group Name": "2"}
    events = [call, launch(4, 2, 5), kernel("ncclDevKernel_SendRecv(args)", 30, 8, 5, **recorded)]
    row = _only(_read(tmp_path, events)["collectives"])
    assert (row["op"], row["peer"]) == ("send", 8)


def _gloo(tmp_path: Path, events: list[Any]) -> list[tuple[str, int, int]]:
    rows = _read(tmp_path, events)["collectives"].sort("start_ns")
    return list(rows.select("op", "launch_span_id", "enqueued_ns").iter_rows())


def test_a_gloo_range_belongs_to_the_call_of_its_place_in_the_queue(tmp_path):
    events = [
        cpu_op("c10d::allreduce_", 1, 2),
        cpu_op("c10d::barrier", 5, 2),
        annotation("gloo:all_reduce", 10, 9, tid=50),
        annotation("gloo:barrier", 20, 9, tid=51),
    ]
    assert _gloo(tmp_path, events) == [("all_reduce", 0, 1000), ("barrier", 1, 5000)]


def test_a_gloo_range_called_before_the_window_has_no_call(tmp_path):
    events = [
        annotation("gloo:all_reduce", 1, 9, tid=50),
        cpu_op("c10d::allreduce_", 5, 2),
        annotation("gloo:all_reduce", 20, 9, tid=50),
    ]
    assert _gloo(tmp_path, events) == [("all_reduce", -1, -1), ("all_reduce", 1, 5000)]


def test_gloo_carries_a_reduce_scatter_out_as_an_all_reduce(tmp_path):
    events = [cpu_op("c10d::_reduce_scatter_base_", 1, 2), annotation("gloo:all_reduce", 10, 9, tid=50)]
    assert _gloo(tmp_path, events) == [("reduce_scatter", 0, 1000)]


def test_a_gloo_send_does_not_wait_in_the_queue_of_collectives(tmp_path):
    events = [
        cpu_op("c10d::allreduce_", 1, 2),
        cpu_op("c10d::send", 4, 2),
        annotation("gloo:send", 5, 1),
        annotation("gloo:all_reduce", 10, 9, tid=50),
    ]
    assert _gloo(tmp_path, events) == [("send", 1, 4000), ("all_reduce", 0, 1000)]


@pytest.mark.parametrize(
    ("record", "known"),
    [(4, (20, 4)), (12, (-1, -1))],  # Kineto may name the event's latest record, which follows the wait
)
def test_a_sync_event_explains_the_call_of_its_correlation(tmp_path, record, known):
    details = {
        "correlation": 9,
        "device": 0,
        "stream": 24,
        "wait_on_stream": 20,
        "wait_on_cuda_event_record_corr_id": record,
        "wait_on_cuda_event_id": 19,
    }
    events = [
        launch(1, 2, 9, "cudaStreamWaitEvent"),
        event("cuda_sync", "Stream Wait Event", 2, 1, pid=0, tid=24, **details),
    ]
    frames = _read(tmp_path, events)
    row = _only(frames["syncs"])
    assert frames["spans"].height == 1
    assert (row["kind"], row["span_id"], row["stream"], row["event_id"]) == ("stream_wait_event", 0, 24, 19)
    assert (row["record_stream"], row["record_correlation"]) == known


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("cudaStreamSynchronize", "stream_sync"),
        ("cudaDeviceSynchronize", "device_sync"),
        ("cudaThreadSynchronize", "device_sync"),
        ("cudaEventSynchronize", "event_sync"),
        ("cudaStreamWaitEvent", "stream_wait_event"),
        ("cudaEventRecordWithFlags", "event_record"),
        ("hipDeviceSynchronize", "device_sync"),
        ("hipEventRecord", "event_record"),
    ],
)
def test_a_sync_that_no_event_explains_is_known_by_its_call(tmp_path, call, kind):
    row = _only(_read(tmp_path, [launch(1, 2, 9, call)])["syncs"])
    assert (row["kind"], row["stream"], row["span_id"], row["start_ns"]) == (kind, -1, 0, 1000)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty file"),
        (b"\x1f\x8b\x08\x00garbage", "gzip"),
        (b'{"traceEvents": [{"ph": "X"', "cut short"),
        (b"hello", "not JSON"),
        (b'{"weather": "fine"}', "not a trace"),
        (b'{"traceEvents": 3}', "not a trace"),
        (b'{"traceEvents": []}', "without events"),
        (b'{"traceEvents": [{"ph": "M"}]}', "no operator"),
        # jax.profiler's spans have no category.
        (
            b'{"traceEvents": [{"ph": "X", "pid": 7, "tid": 1, "ts": 8, "dur": 4, "name": "dot"}]}',
            "no operator",
        ),
    ],
)
def test_a_bad_file_is_one_line_that_says_what_is_wrong(tmp_path, content, what):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert what in message
    assert str(path) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("shapes", "types"),
    [
        ('[["X"], [4]]', '["float", "float"]'),
        ("[[4, null]]", '["float"]'),
        ("[[-1]]", '["float"]'),
        ("[4]", '["float"]'),
        ("[[4], [4]]", '["float"]'),
        ("[[4]]", '{"float": 1}'),
        ("[[4]]", "[4]"),
        (f"[[{1 << 40}, {1 << 40}]]", '["float"]'),
    ],
)
def test_shapes_that_are_none_leave_the_bytes_unknown(tmp_path, shapes, types):
    shaped = {"Input Dims": json.loads(shapes), "Input type": json.loads(types)}
    events = [annotation("nccl:all_reduce", 0, 20, **shaped), launch(5, 5, 1), kernel(NCCL, 30, 5, 1)]
    row = _only(_read(tmp_path, events)["collectives"])
    assert (row["op"], row["bytes_in"], row["bytes_out"]) == ("all_reduce", -1, -1)


def test_counts_that_no_column_can_hold_are_unknown(tmp_path):
    counts = {"In msg nelems": 1 << 70, "Out msg nelems": 1 << 62}
    recorded = {"Collective name": "allreduce", "dtype": "Float", **counts}
    row = _only(_read(tmp_path, [kernel(NCCL, 30, 5, **recorded)])["collectives"])
    assert (row["bytes_in"], row["bytes_out"]) == (-1, -1)


def test_messages_called_one_by_one_and_launched_together_are_a_row_each(tmp_path):
    def message(op: str, ts: float, **peer: int) -> Any:
        recorded = {"Collective name": op, "In msg nelems": 256, "Out msg nelems": 256, "dtype": "Float"}
        group = {"Process Group Name": "3", "Process Group Ranks": "[0, 1, 2]"}
        return cpu_op("record_param_comms", ts, 5, **recorded, **group, **peer)

    def names(peer: str, rank: int) -> dict[str, int]:
        return {peer: rank}

    events = [
        # One send of its own, which launches its kernel itself.
        message("send", 0, **names("Dst Rank", 2)) | {"dur": 20},
        launch(10, 5, 1),
        kernel("ncclDevKernel_SendRecv(args)", 30, 10, 1, stream=20),
        # A batch: three calls, then one kernel for all.
        message("send", 50, **names("Dst Rank", 2)),
        message("recv", 60, **names("Src Rank", 0)),
        message("recv", 70, **names("Src Rank", 2)),
        launch(90, 5, 2),
        kernel("ncclDevKernel_SendRecv(args)", 100, 10, 2, stream=20),
        # On another thread: none of this batch.
        message("send", 80, **names("Dst Rank", 0)) | {"tid": 99},
    ]
    distributed = {"rank": 1, "world_size": 3, "backend": "nccl"}
    rows = _read(tmp_path, events, distributedInfo=distributed)["collectives"]
    found = rows.select("op", "peer", "bytes_in", "bytes_out", "group", "start_ns").rows()
    assert found == [
        ("send", 2, 1024, 0, "3", 30_000),
        ("send", 2, 1024, 0, "3", 100_000),
        ("recv", 0, 0, 1024, "3", 100_000),
        ("recv", 2, 0, 1024, "3", 100_000),
    ]
    assert rows["span_id"].n_unique() == 2


@pytest.mark.parametrize("odd", [1 << 31, 1 << 70, -5, "many", [1], None, 1e300])
def test_ranks_that_no_job_has_are_unknown(tmp_path, odd):
    groups = [{"pg_name": "0", "ranks": [0, odd]}]
    facts = {"rank": odd, "world_size": odd, "pg_config": groups}
    path = write(tmp_path / "a.json", [cpu_op("aten::mm", 1, 2)], distributedInfo=facts)
    trace = read_trace(path)
    assert max(trace.rank, trace.world_size) < 1
    assert trace.frames["spans"].height == 1
