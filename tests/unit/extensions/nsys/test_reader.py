"""Nsight Systems exports on small databases made here, of an old and a new version."""

from __future__ import annotations

import gzip
import os
import sqlite3
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.errors import InputError
from dpro.extensions.nsys.reader import is_nsys, read_nsys
from dpro.ingest.trace import RankTrace
from dpro.schema import TABLES, conform
from tests.unit.extensions.nsys.exports import NO_EVENT, NO_STREAM, UTC, Database, session, thread

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)"


def read(database: Database, tmp_path: Path, name: str = "rank0.sqlite") -> list[RankTrace]:
    return read_nsys(database.write(tmp_path / name))


def table(trace: RankTrace, name: str) -> pl.DataFrame:
    return conform(TABLES[name], trace.frames[name])


def spans(database: Database, tmp_path: Path) -> dict[str, dict[str, Any]]:
    (trace,) = read(database, tmp_path)
    return {row["name"]: row for row in table(trace, "spans").iter_rows(named=True)}


def test_work_has_its_stream_and_calls_have_their_thread(tmp_path):
    database = session()
    database.call("cudaLaunchKernel_v7000", 100, 120, 5, pid=10, tid=11)
    database.kernel("gemm(int)", 130, 190, 5)
    found = spans(database, tmp_path)
    call, kernel = found["cudaLaunchKernel"], found["gemm(int)"]
    assert (call["kind"], call["pid"], call["tid"], call["stream"]) == ("runtime", 10, 11, -1)
    assert (kernel["kind"], kernel["device"], kernel["stream"], kernel["tid"]) == ("kernel", 0, 7, -1)
    assert call["correlation"] == kernel["correlation"] == 5
    assert (kernel["start_ns"], kernel["duration_ns"]) == (UTC + 130, 60)


def test_a_kernel_that_ends_an_hour_after_those_behind_it_is_left_out_and_named(tmp_path):
    database = session()
    for number, end in enumerate((190, 3_600_000_000_000, 290, 340)):
        database.call("cudaLaunchKernel_v7000", 100 + number, 101 + number, number + 1)
        database.kernel(f"gemm{number}", 130 + 50 * number, end, number + 1)
    (trace,) = read(database, tmp_path)
    assert "gemm1" not in table(trace, "spans")["name"]
    assert sum(trace.skipped.values()) == 1
    assert [line for line in trace.warnings if "1 span with impossible times left out" in line]


def test_an_export_whose_times_are_all_impossible_is_refused(tmp_path):
    database = session()
    for start in (17 * 10**16, 17 * 10**16 + 1):
        database.kernel("gemm", start, 17 * 10**17)
    with pytest.raises(InputError, match="no span has a possible time"):
        read(database, tmp_path)


def test_copies_and_fills_are_named_as_torch_names_them(tmp_path):
    database = session()
    where = {"deviceId": 0, "streamId": 7, "correlationId": 1, "globalPid": thread(10, 0)}
    copy = {"bytes": 4096, "copyKind": 1, "srcKind": 0, "dstKind": 2}
    database.add("CUPTI_ACTIVITY_KIND_MEMCPY", start=1, end=5, **where, **copy)
    database.add("CUPTI_ACTIVITY_KIND_MEMSET", start=6, end=7, **where, bytes=64, memKind=2)
    found = spans(database, tmp_path)
    assert found["Memcpy HtoD (Pageable -> Device)"]["bytes"] == 4096
    assert found["Memset (Device)"]["kind"] == "memset"


def test_a_graph_that_was_traced_whole_is_one_piece_of_work(tmp_path):
    database = session()
    database.call("cudaGraphLaunch_v10000", 0, 1, 7)
    database.graph(3, 1, 5, 7)
    assert spans(database, tmp_path)["CUDA graph 3"]["kind"] == "kernel"
    (trace,) = read(database, tmp_path)
    assert any("1 of 1 launches of CUDA graphs are one span" in line for line in trace.warnings)


def test_a_graph_whose_kernels_were_traced_too_does_not_count_twice(tmp_path):
    database = session()
    for correlation in (7, 8):
        database.call("cudaGraphLaunch_v10000", correlation * 10, correlation * 10 + 1, correlation)
        database.graph(3, correlation * 10 + 2, correlation * 10 + 9, correlation)
    database.kernel("gemm", 73, 78, 7)
    (trace,) = read(database, tmp_path)
    kernels = table(trace, "spans").filter(pl.col("kind") == "kernel")
    assert kernels.select("name", "correlation").rows() == [("gemm", 7), ("CUDA graph 3", 8)]
    assert any("1 of 2 launches of CUDA graphs" in line for line in trace.warnings)


def test_without_any_kernel_a_warning_says_that_busy_time_is_unknown(tmp_path):
    database = session()
    where = {"deviceId": 0, "streamId": 7, "correlationId": 1, "globalPid": thread(10, 0)}
    database.add("CUPTI_ACTIVITY_KIND_MEMSET", start=6, end=7, **where, bytes=64, memKind=2)
    (trace,) = read(database, tmp_path)
    assert any("no kernel was recorded, only 1 copy or fill" in line for line in trace.warnings)
    database.kernel("gemm", 8, 9)
    (trace,) = read(database, tmp_path)
    assert not any("no kernel" in line for line in trace.warnings)


def test_what_torch_emitted_for_an_operator_is_taken_apart(tmp_path):
    database = session()
    database.nvtx("aten::mm, seq = 41, op_id = 990, sizes = [[2, 3], [3, 4]]", 10, 20)
    database.nvtx("nccl:all_reduce, op_id = 991", 30, 40)
    database.nvtx("load data", 50, 60)
    found = spans(database, tmp_path)
    op = found["aten::mm"]
    assert (op["kind"], op["sequence_number"], op["shapes"]) == ("cpu_op", 41, "[[2,3],[3,4]]")
    assert found["nccl:all_reduce"]["kind"] == found["load data"]["kind"] == "annotation"


def test_marks_and_domains_are_no_ranges(tmp_path):
    database = session()
    database.nvtx("NCCL", 1, None, eventType=75, domainId=1)
    database.nvtx("mark", 2, None, eventType=34)
    database.nvtx("range", 3, 4, eventType=60)
    assert list(spans(database, tmp_path)) == ["range"]


def test_an_export_with_absolute_times_is_not_moved(tmp_path):
    database = session()
    database.tables["META_DATA_EXPORT"][1]["value"] = "true"
    database.kernel("gemm", UTC + 5, UTC + 9)
    assert spans(database, tmp_path)["gemm"]["start_ns"] == UTC + 5


def test_without_a_session_start_times_stay_and_a_warning_says_so(tmp_path):
    database = session()
    del database.tables["TARGET_INFO_SESSION_START_TIME"]
    database.kernel("gemm", 5, 9)
    (trace,) = read(database, tmp_path)
    assert table(trace, "spans")["start_ns"].to_list() == [5]
    assert any("start time of its session" in warning for warning in trace.warnings)


def test_processes_are_ranks_in_order_of_their_gpus(tmp_path):
    database = session()
    database.kernel("a", 1, 2, pid=30, device=0)
    database.kernel("b", 1, 2, pid=20, device=1)
    database.nvtx("loader", 1, 2, pid=99)
    first, second = read(database, tmp_path)
    assert [t.rank for t in (first, second)] == [0, 1]
    assert [table(t, "workers")["pid"][0] for t in (first, second)] == [30, 20]
    assert "assigned by GPU order" in first.warnings[0]
    assert first.skipped["spans of processes without GPU work"] == 1
    assert (first.world_size, first.host, first.gpus) == (2, "node7", ["NVIDIA H100"])


def test_guessed_steps_of_all_ranks_are_those_of_the_first_though_each_is_cut_elsewhere(tmp_path):
    database = session()
    names = ["embed", "gemm", "norm", "loss", "adam"]
    for pid, cut in ((10, 0), (11, 2)):
        for number in range(cut, 20):
            at = 100 * number
            database.kernel(names[number % 5], at, at + 90, pid=pid, device=pid - 10)
    first, second = read(database, tmp_path)
    steps = table(first, "steps")
    assert steps["source"].to_list() == ["repetition"] * 4
    assert steps["duration_ns"].to_list() == [500, 500, 500, 490]
    assert table(second, "steps").drop("rank").equals(steps.drop("rank"))
    assert table(second, "steps")["rank"].to_list() == [1] * 4


def test_the_hosts_numbers_of_gpus_order_processes_that_each_see_one(tmp_path):
    database = session()
    database.tables["TARGET_INFO_CUDA_DEVICE"] = []
    for pid, gpu in ((10, 1), (11, 0)):
        database.add("TARGET_INFO_CUDA_DEVICE", gpuId=gpu, cudaId=0, pid=pid)
        database.kernel("a", 1, 2, pid=pid, device=0)
    assert [table(t, "workers")["pid"][0] for t in read(database, tmp_path)] == [11, 10]


def test_a_communicator_states_the_rank(tmp_path):
    database = session()
    for pid, rank in ((10, 5), (11, 4)):
        database.kernel("a", 1, 2, pid=pid, device=pid - 10)
        payload = f'{{"NCCL communicator ID": "0xab", "No. of ranks": 8, "Rank": {rank}, "CUDA device": 0}}'
        database.nccl("ncclCommInitRank", 3, 4, payload, pid=pid)
        database.nccl(
            "ncclCommInitRank", 5, 6, payload.replace("8", "2").replace(f": {rank}", ": 0"), pid=pid
        )
    traces = read(database, tmp_path)
    assert ([t.rank for t in traces], traces[0].world_size, traces[0].warnings) == ([5, 4], 8, [])


def test_processes_of_a_later_host_come_after_those_before(tmp_path):
    database = session()
    for number, argument in enumerate(("--nnodes=2", "--node_rank=1")):
        database.add("META_DATA_CAPTURE", name=f"PROCESS_0:ARGUMENT_{number}", value=argument)
    for pid in (10, 11):
        database.kernel("a", 1, 2, pid=pid, device=pid - 10)
    assert [t.rank for t in read(database, tmp_path)] == [2, 3]


def test_the_environment_states_the_rank_of_one_process(tmp_path):
    database = session()
    for variable in ('RANK="3"', 'WORLD_SIZE="8"', 'LOCAL_RANK="1"'):
        database.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=variable)
    database.kernel("a", 1, 2)
    (trace,) = read(database, tmp_path, "report.sqlite")
    assert (trace.rank, trace.world_size) == (3, 8)


def test_one_process_with_two_gpus_is_one_rank(tmp_path):
    database = session()
    database.kernel("a", 1, 2, device=0)
    database.kernel("b", 1, 2, device=1)
    (trace,) = read(database, tmp_path)
    assert table(trace, "spans")["device"].to_list() == [0, 1]


def test_without_rank_or_name_the_caller_decides(tmp_path):
    database = session()
    database.kernel("a", 1, 2)
    path = database.write(tmp_path / "report.sqlite")
    assert read_nsys(path)[0].rank == -1
    assert read_nsys(path, rank=4)[0].rank == 4


def collective(database: Database, tmp_path: Path) -> dict[str, Any]:
    (trace,) = read(database, tmp_path)
    found = table(trace, "collectives")
    assert found.height == 1
    return found.row(0, named=True)


def test_a_communication_kernel_is_classified_by_its_name_where_nothing_else_shows_it(tmp_path):
    database = session()
    database.kernel(ALL_REDUCE, 50, 90)
    row = collective(database, tmp_path)
    assert (row["op"], row["bytes_in"], row["launch_span_id"], row["enqueued_ns"]) == (
        "all_reduce",
        -1,
        -1,
        -1,
    )


def test_the_payload_of_a_call_gives_bytes_and_group(tmp_path):
    database = session()
    payload = '{"NCCL communicator ID": "0xab", "Message size [bytes]": 4096, "Reduction operation": "Sum"}'
    database.nccl("ncclAllReduce", 10, 30, payload)
    database.call("cuLaunchKernelEx", 15, 20, 5)
    database.kernel(ALL_REDUCE, 50, 90, 5)
    row = collective(database, tmp_path)
    assert (row["op"], row["bytes_in"], row["bytes_out"], row["group"]) == ("all_reduce", 4096, 4096, "0xab")
    assert row["enqueued_ns"] == UTC + 15


@pytest.mark.parametrize(
    ("calls", "op", "moved"),
    [
        (["ncclSend"], "send", (8, 0, 1)),
        (["ncclRecv"], "recv", (0, 8, 1)),
        (["ncclSend", "ncclRecv"], "send_recv", (8, 8, 1)),
        (["ncclSend", "ncclSend", "ncclRecv"], "send_recv", (16, 8, 1)),
    ],
)
def test_calls_of_a_group_are_launched_at_its_end(tmp_path, calls, op, moved):
    database = session()
    database.nccl("ncclGroupEnd", 1, 2)  # of a group that the window cuts
    database.nccl("ncclGroupStart", 10, 11)
    for number, name in enumerate(calls):
        payload = '{"NCCL communicator ID": "1", "Message size [bytes]": 8, "Peer rank": 1}'
        database.nccl(name, 12 + number, 12 + number, payload)
    database.nccl("ncclGroupEnd", 20, 40)
    database.call("cuLaunchKernelEx", 25, 30, 5)
    database.kernel(SEND_RECV, 50, 90, 5)
    row = collective(database, tmp_path)
    assert (row["op"], (row["bytes_in"], row["bytes_out"], row["peer"])) == (op, moved)


def test_torchs_own_range_says_what_a_group_of_sends_is(tmp_path):
    database = session()
    database.nvtx("nccl:all_to_all, op_id = 7", 5, 60)
    database.nccl("ncclGroupEnd", 20, 40)
    database.call("cuLaunchKernelEx", 25, 30, 5)
    database.kernel(SEND_RECV, 50, 90, 5)
    assert collective(database, tmp_path)["op"] == "all_to_all"


def sync(version: str, sync_type: int, stream: int, event: int, correlation: int) -> dict[str, Any]:
    row = {"deviceId": 0, "streamId": stream, "correlationId": correlation, "globalPid": thread(10, 0)}
    row |= {"syncType": sync_type, "eventId": event}
    return row | ({"eventSyncId": 1} if version == "3.25" else {})


@pytest.mark.parametrize(("version", "first"), [("3.16", 0), ("3.25", 1)])
def test_synchronisation_is_classified_by_the_call_whatever_the_versions_numbers(tmp_path, version, first):
    database = session(version)
    table_name = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
    database.kernel("gemm", 1, 2, device=1)
    calls = (
        ("cudaEventSynchronize_v3020", NO_STREAM, 9),
        ("cudaStreamWaitEvent_v3020", 7, 9),
        ("cudaStreamSynchronize_v3020", 7, NO_EVENT),
        ("cudaDeviceSynchronize_v3020", NO_STREAM, NO_EVENT),
    )
    database.call("cudaEventRecord_v3020", 5, 6, 90)
    record = {"deviceId": 0, "streamId": 8, "correlationId": 90, "globalPid": thread(10, 0), "eventId": 9}
    database.add("CUPTI_ACTIVITY_KIND_CUDA_EVENT", **record)
    for number, (name, stream, event) in enumerate(calls):
        database.call(name, 10 * number + 10, 10 * number + 18, 100 + number)
        row = sync(version, first + number, stream, event, 100 + number)
        database.add(table_name, start=10 * number + 12, end=10 * number + 17, **row)
    database.call("cudaEventQuery_v3020", 70, 78, 200)
    database.add(table_name, start=72, end=77, **sync(version, first, NO_STREAM, 9, 200))
    (trace,) = read(database, tmp_path)
    rows = table(trace, "syncs").rows(named=True)
    kinds = ["event_record", "event_sync", "stream_wait_event", "stream_sync", "device_sync"]
    assert [row["kind"] for row in rows] == kinds
    wait = rows[2]
    assert (wait["stream"], wait["event_id"], wait["device"]) == (7, 9, 1)  # where the stream's work ran
    assert (wait["record_stream"], wait["record_correlation"]) == (8, 90)
    assert (rows[3]["record_correlation"], rows[3]["start_ns"], rows[3]["duration_ns"]) == (-1, UTC + 30, 8)


def test_a_synchronisation_without_its_call_is_classified_by_what_it_names(tmp_path):
    database = session()
    database.kernel("gemm", 1, 2)
    for number, (stream, event) in enumerate(((NO_STREAM, 9), (7, 9), (7, NO_EVENT), (NO_STREAM, NO_EVENT))):
        row = sync("3.25", 0, stream, event, number)
        database.add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", start=10 + number, end=20, **row)
    (trace,) = read(database, tmp_path)
    kinds = ["event_sync", "stream_wait_event", "stream_sync", "device_sync"]
    assert table(trace, "syncs")["kind"].to_list() == kinds


def steps_of(database: Database, tmp_path: Path) -> list[tuple[int, int, int, str]]:
    (trace,) = read(database, tmp_path)
    found = table(trace, "steps")
    return found.select("step", pl.col("start_ns") - UTC, "duration_ns", "source").rows()


@pytest.mark.parametrize("name", ["train step {}", "iter_{}", "Iteration: {}", "step[{}]"])
def test_ranges_that_count_are_steps(tmp_path, name):
    database = session()
    for step in (12, 13):
        database.nvtx(name.format(step), step * 100, step * 100 + 90)
        for batch in (0, 1):
            database.nvtx(f"micro_batch {batch}", step * 100 + batch * 10, step * 100 + batch * 10 + 5)
    source = "NVTX " + name.split("{")[0] + "N"
    assert steps_of(database, tmp_path) == [(12, 1200, 90, source), (13, 1300, 90, source)]


def test_ranges_that_repeat_at_the_top_level_are_steps_together(tmp_path):
    database = session()
    database.nvtx("setup", 0, 50)
    for start in (100, 200):
        database.nvtx("forward", start, start + 40)
        database.nvtx("attention", start + 5, start + 10)
        database.nvtx("backward", start + 40, start + 80)
    source = "NVTX forward, backward"
    assert steps_of(database, tmp_path) == [(0, 100, 80, source), (1, 200, 80, source)]


def test_ranges_of_one_name_in_which_different_kernels_run_are_no_steps(tmp_path):
    database = session()
    for number, start in enumerate((100, 200)):
        database.nvtx("compile and run", start, start + 80)
        database.kernel(f"fused_{number}", start + 60, start + 75)
    assert steps_of(database, tmp_path) == []


def test_what_repeats_only_inside_other_ranges_is_no_step(tmp_path):
    database = session()
    database.nvtx("benchmark", 0, 500)
    for start in (100, 200):
        database.nvtx("attention", start, start + 40)
    assert steps_of(database, tmp_path) == []


def test_of_phases_that_come_once_the_one_in_which_most_kernels_run_is_the_step(tmp_path):
    database = session()
    database.nvtx("setup", 0, 500)
    database.nvtx("loop", 500, 800)
    database.nvtx("attention", 510, 520)
    database.kernel("copied", 100, 150)
    database.kernel("gemm", 520, 780)
    assert steps_of(database, tmp_path) == [(0, 500, 300, "NVTX loop")]


def test_phases_that_share_the_kernels_are_no_steps(tmp_path):
    database = session()
    for number, name in enumerate(("first", "second", "third")):
        database.nvtx(name, 100 * number, 100 * number + 90)
        database.kernel("gemm", 100 * number + 10, 100 * number + 80)
    assert steps_of(database, tmp_path) == []


def test_ranges_of_libraries_are_no_steps(tmp_path):
    database = session()
    database.nvtx("CCCL", 1, None, eventType=75, domainId=5)
    for start in (100, 200):
        database.nccl("ncclAllReduce", start, start + 40)
        database.nvtx("aten::mm, op_id = 3", start + 50, start + 60)
        database.nvtx("cub::DeviceScan::InclusiveScan", start + 65, start + 70)
        database.nvtx("sum", start + 75, start + 80, domainId=5)
    assert steps_of(database, tmp_path) == []


def launch_graphs(database: Database, every: int, ran_every: int, graph_ns: int) -> None:
    """Launch graph 3 five times, and the much shorter graph 4 before each time."""
    for number in range(5):
        call, run = 1000 + number * every, 1010 + number * ran_every
        for graph, place, end in ((4, 0, 2), (3, 5, graph_ns)):
            correlation = 100 + 10 * number + graph
            database.call("cudaGraphLaunch_v10000", call + place, call + place + 1, correlation)
            database.graph(graph, run + place, run + place + end, correlation)


def test_launches_of_the_graph_with_most_of_the_time_begin_steps_behind_a_long_start_up(tmp_path):
    database = session()
    for number in range(20):
        database.kernel(f"warm up {number}", 10 * number, 10 * number + 5)
    launch_graphs(database, 100, 100, 80)
    expected = [(step, 1005 + 100 * step, 100, "CUDA graph launches") for step in range(4)]
    assert steps_of(database, tmp_path) == expected


@pytest.mark.parametrize(("every", "graph_ns"), [(100, 10), (20, 80)], ids=["few of the time", "queued"])
def test_graphs_that_are_not_most_of_the_work_or_wait_in_a_queue_are_no_steps(tmp_path, every, graph_ns):
    database = session()
    for number in range(20):
        database.kernel(f"warm up {number}", 10 * number, 10 * number + 5)
    launch_graphs(database, every, 100, graph_ns)
    assert steps_of(database, tmp_path) == []


def test_an_export_is_known_by_its_content(tmp_path):
    database = session()
    database.kernel("gemm", 1, 2)
    assert is_nsys(database.write(tmp_path / "a.sqlite").read_bytes())
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE runs (id)")
    other.commit()
    other.close()
    assert not is_nsys((tmp_path / "other.sqlite").read_bytes())


def test_a_gzipped_export_is_read_like_a_plain_one_and_leaves_nothing_behind(tmp_path, monkeypatch):
    database = session()
    database.kernel("gemm", 1, 2)
    plain = database.write(tmp_path / "rank0.sqlite")
    packed = tmp_path / "rank0.sqlite.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    (one,), (other,) = read_nsys(plain), read_nsys(packed)
    assert table(one, "spans").equals(table(other, "spans"))
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_export_cut_short_is_refused(tmp_path, suffix):
    database = session()
    for start in range(2000):
        database.kernel(f"kernel {start}", start, start + 1)
    whole = database.write(tmp_path / "whole.sqlite").read_bytes()
    path = tmp_path / f"rank0.sqlite{suffix}"
    path.write_bytes(gzip.compress(whole)[:-200] if suffix else whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"rank0.*(cut short|truncated).*again") as refused:
        read_nsys(path)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("damage", [b"CREATE TABLE \xfc\x1c\n", b"\xff" * 3000])
def test_a_damaged_database_is_refused_in_one_line(tmp_path, damage):
    path = tmp_path / "rank0.sqlite"
    database = session()
    database.kernel("gemm", 1, 2)
    whole = bytearray(database.write(path).read_bytes())
    at = whole.index(b"CREATE TABLE")
    whole[at : at + len(damage)] = damage
    path.write_bytes(whole)
    with pytest.raises(
        InputError, match=r"rank0.sqlite: damaged SQLite database .* export it again"
    ) as refused:
        read_nsys(path)
    assert str(refused.value).isprintable()


def test_a_database_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE runs (id)")
    connection.commit()
    connection.close()
    with pytest.raises(InputError, match=r"other.sqlite: not an export of Nsight Systems .*nsys export"):
        read_nsys(path)


def test_an_export_without_activity_is_refused(tmp_path):
    database = session()
    database.text("anything")
    with pytest.raises(InputError, match=r"no CUDA or NVTX activity.*nsys profile"):
        read(database, tmp_path)


def test_tables_without_the_columns_of_this_version_are_read_all_the_same(tmp_path):
    database = Database()
    database.add("CUPTI_ACTIVITY_KIND_KERNEL", start=5, end=9, deviceId=0, streamId=7, shortName=1)
    database.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=1, end=2, globalTid=thread(10, 10), nameId=1)
    database.text("gemm")
    (trace,) = read(database, tmp_path)
    assert sorted(table(trace, "spans")["kind"].to_list()) == ["kernel", "runtime"]
    assert table(trace, "workers")["pid"][0] == 10


def test_a_cell_of_another_type_than_its_column_is_unknown(tmp_path):
    """SQLite lets any cell hold anything."""
    database = session()
    database.kernel("gemm", 100, 200, correlation=3)
    row = database.tables["CUPTI_ACTIVITY_KIND_KERNEL"][0]
    for odd in ({"streamId": "seven"}, {"streamId": b"\xff"}, {"streamId": 0.5}):
        database.tables["CUPTI_ACTIVITY_KIND_KERNEL"] = [row, row | {"start": 300, "end": 400} | odd]
        (trace,) = read(database, tmp_path)
        assert table(trace, "spans")["stream"].to_list() == [7, -1]


def test_a_file_may_be_called_anything(tmp_path):
    database = session()
    database.kernel("gemm", 100, 200)
    (trace,) = read(database, tmp_path, os.fsdecode(b"rank3 \xff%20?#.sqlite"))
    assert trace.rank == 3


def test_a_table_with_more_rows_than_its_pages_can_hold_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr("dpro.extensions.nsys.sqlite.MIN_ROW_BYTES", 1 << 14)
    database = session()
    for number in range(9):
        database.kernel("gemm", 100 * number, 100 * number + 50)
    with pytest.raises(InputError, match="more rows than its pages can hold"):
        read(database, tmp_path)


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_damage_within_a_gzipped_export_is_named(tmp_path, at):
    database = session()
    for number in range(500):
        database.kernel(f"gemm_{number * 7919}", 100 * number, 100 * number + 50)
    packed = bytearray(gzip.compress(database.write(tmp_path / "plain").read_bytes()))
    begin = int(at * len(packed))
    packed[begin : begin + 20] = b"\xff" * 20
    path = tmp_path / "rank0.sqlite.gz"
    path.write_bytes(packed)
    with pytest.raises(InputError, match=r"rank0\.sqlite\.gz: .*(damaged|cut short)"):
        read_nsys(path)
