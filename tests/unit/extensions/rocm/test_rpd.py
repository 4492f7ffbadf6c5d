"""Recordings of rocmProfileData on small databases made here, with the columns of schema 2 and 3."""

from __future__ import annotations

import gzip
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dpro.errors import InputError
from dpro.extensions.rocm.importers import RPD
from dpro.extensions.rocm.rpd import read_rpd
from dpro.ingest.formats import registry
from dpro.ingest.kineto import read_trace
from dpro.ingest.trace import RankTrace
from dpro.schema import TABLES, conform

_COLUMNS = {
    "rocpd_metadata": "id INTEGER PRIMARY KEY, tag, value",
    "rocpd_string": "id INTEGER PRIMARY KEY, string",
    "rocpd_api": "id INTEGER PRIMARY KEY, pid, tid, start, end, apiName_id, args_id",
    "rocpd_op": "id INTEGER PRIMARY KEY, gpuId, queueId, sequenceId, completionSignal, start, end, "
    "description_id, opType_id",
    "rocpd_api_ops": "id INTEGER PRIMARY KEY, api_id, op_id",
    "rocpd_kernelapi": "api_ptr_id INTEGER PRIMARY KEY, stream, gridX, kernelName_id",
    "rocpd_copyapi": "api_ptr_id INTEGER PRIMARY KEY, stream, size, width, height, kind",
    "ext_autogradapi": "api_ptr_id INTEGER PRIMARY KEY, autogradName_id, seq, op_id, sizes, input_op_ids",
}


class Recording:
    """A file in the making: calls and operations are numbered from 1."""

    def __init__(self, path: Path, schema: str = "2") -> None:
        self.path = path
        self.texts = "rocpd_ustring" if schema == "3" else "rocpd_string"
        self.connection = sqlite3.connect(path)
        for table, columns in _COLUMNS.items():
            self.connection.execute(f"CREATE TABLE {table} ({columns})")
        if schema == "3":
            self.connection.execute("CREATE TABLE rocpd_ustring (id INTEGER PRIMARY KEY, string)")
        self.add("rocpd_metadata", tag="schema_version", value=schema)

    def add(self, table: str, **row: Any) -> int:
        columns, marks = ", ".join(row), ", ".join("?" * len(row))
        statement = f"INSERT INTO {table} ({columns}) VALUES ({marks})"
        return self.connection.execute(statement, list(row.values())).lastrowid or 0

    def call(self, name: str, start: int, end: int, args: str = "", pid: int = 10, tid: int = 11) -> int:
        texts = {
            "apiName_id": self.add("rocpd_string", string=name),
            "args_id": self.add(self.texts, string=args),
        }
        return self.add("rocpd_api", pid=pid, tid=tid, start=start, end=end, **texts)

    def op(
        self, kind: str, start: int, end: int, call: int, name: str = "", gpu: int = 2, queue: int = 0
    ) -> None:
        texts = {"description_id": self.add("rocpd_string", string=name)}
        texts["opType_id"] = self.add("rocpd_string", string=kind)
        number = self.add("rocpd_op", gpuId=gpu, queueId=queue, start=start, end=end, **texts)
        self.add("rocpd_api_ops", api_id=call, op_id=number)

    def kernel(self, name: str, start: int, end: int, stream: str = "0x0", **more: Any) -> None:
        call = self.call("hipLaunchKernel", start - 20, start - 10, **more)
        self.add("rocpd_kernelapi", api_ptr_id=call, stream=stream)
        self.op("KernelExecution", start, end, call, name, gpu=more.get("pid", 12) - 10)

    def read(self) -> list[RankTrace]:
        self.connection.commit()
        self.connection.close()
        importer = registry().find(self.path.read_bytes()[: 1 << 16])
        assert importer is RPD
        traces = importer.read(self.path)
        assert isinstance(traces, list)
        return traces

    def spans(self) -> dict[str, dict[str, Any]]:
        (trace,) = self.read()
        frame = conform(TABLES["spans"], trace.frames["spans"])
        return {row["name"]: row for row in frame.iter_rows(named=True)}


@pytest.fixture
def recording(tmp_path):
    return Recording(tmp_path / "rank3.rpd")


def test_a_kernel_has_its_device_its_stream_and_the_call_that_launched_it(recording):
    recording.kernel("_Z4gemmi", 130, 190)
    recording.kernel("beside", 200, 260, stream="0x5581")
    found = recording.spans()
    call, kernel = found["hipLaunchKernel"], found["gemm(int)"]
    assert (call["kind"], call["pid"], call["tid"]) == ("runtime", 10, 11)
    assert (kernel["kind"], kernel["device"], kernel["stream"], kernel["tid"]) == ("kernel", 2, 0, -1)
    assert (kernel["start_ns"], kernel["duration_ns"], kernel["rank"]) == (130, 60, 3)
    assert kernel["correlation"] == 1
    assert found["beside"]["stream"] == 1


def test_all_work_of_a_graph_is_launched_by_one_call(recording):
    call = recording.call("hipGraphLaunch", 100, 120, "graphExec = 0x24 | stream = 0x0")
    recording.op("Task", 130, 140, call, "first")
    recording.op("CopyDeviceToDevice", 140, 150, call)
    found = recording.spans()
    assert found["first"]["kind"] == "kernel"
    copy = found["CopyDeviceToDevice"]
    assert (copy["kind"], copy["bytes"], copy["stream"]) == ("memcpy", -1, 0)
    assert found["first"]["correlation"] == copy["correlation"] == call


def test_copies_have_their_bytes_and_barriers_are_counted(recording):
    call = recording.call("hipMemcpyAsync", 100, 110)
    recording.add("rocpd_copyapi", api_ptr_id=call, stream="0x0", size=4096, width="", height="")
    recording.op("CopyHostToDevice", 120, 130, call)
    recording.op("FillBuffer", 140, 150, recording.call("hipMemsetAsync", 130, 135))
    recording.op("Barrier", 150, 160, recording.call("hipStreamWaitEvent", 136, 138))
    (trace,) = recording.read()
    frame = conform(TABLES["spans"], trace.frames["spans"])
    work = {
        row["name"]: (row["kind"], row["bytes"]) for row in frame.iter_rows(named=True) if row["stream"] >= 0
    }
    assert work == {"CopyHostToDevice": ("memcpy", 4096), "FillBuffer": ("memset", -1)}
    assert trace.skipped == {"markers and barriers of devices": 1}


def test_ranges_are_operators_where_torch_emitted_them(recording):
    recording.kernel("gemm", 130, 190)
    recording.call("UserMarker", 10, 90, "aten::mm, seq = 41, op_id = 9, sizes = [[2, 3], [3, 4]]")
    taken_apart = recording.call("UserMarker", 20, 80, "aten::t")
    name = recording.add("rocpd_string", string="aten::t")
    recording.add("ext_autogradapi", api_ptr_id=taken_apart, autogradName_id=name, seq=42, sizes="[[2, 3]]")
    recording.call("UserMarker", 5, 95, "load data")
    recording.call("run_to_completion", 4, 96, "")
    recording.call("OpTable::writeRows", 200, 210, "count=1 | remaining=0", tid=12)
    found = recording.spans()
    matmul, transposed = found["aten::mm"], found["aten::t"]
    assert (matmul["kind"], matmul["sequence_number"], matmul["shapes"]) == ("cpu_op", 41, "[[2,3],[3,4]]")
    assert (transposed["kind"], transposed["sequence_number"]) == ("cpu_op", 42)
    assert transposed["shapes"] == "[[2,3]]"
    assert found["load data"]["kind"] == found["run_to_completion"]["kind"] == "annotation"
    assert found["OpTable::writeRows"]["kind"] == "overhead"


def test_texts_of_schema_3_are_in_a_table_of_their_own(tmp_path):
    recording = Recording(tmp_path / "rank0.rpd", "3")
    recording.kernel("gemm", 130, 190)
    recording.call("UserMarker", 10, 90, "load data")
    assert recording.spans()["load data"]["kind"] == "annotation"


def test_each_process_with_gpu_work_is_a_rank_in_the_order_of_gpus(recording):
    for pid in (12, 11):
        recording.kernel("gemm", 130, 190, pid=pid)
    recording.call("hipGetDevice", 10, 20, pid=13)
    traces = recording.read()
    assert [trace.frames["spans"]["device"].max() for trace in traces] == [1, 2]
    assert [(trace.rank, trace.world_size) for trace in traces] == [(0, 2), (1, 2)]
    assert traces[0].warnings == ["rank3.rpd: no rank information; ranks 0-1 assigned by GPU order"]
    assert traces[0].skipped == {"spans of processes without GPU work": 1}


def test_batches_of_an_engine_that_replay_a_graph_decode_and_others_prefill(recording):
    for at, launch in ((1000, "hipLaunchKernel"), (2000, "hipGraphLaunch"), (3000, "hipGraphLaunch")):
        recording.call("UserMarker", at, at + 500, "execute_model")
        call = recording.call(launch, at + 10, at + 20)
        for layer in range(2):
            recording.op("Task", at + 30 + 300 * layer, at + 300 + 400 * layer, call, "paged_attention")
    (trace,) = recording.read()
    found = conform(TABLES["iterations"], trace.frames["iterations"])
    assert found.select("kind", "start_ns", "duration_ns").rows() == [
        ("prefill", 1000, 700),
        ("decode", 2000, 700),
        ("decode", 3000, 700),
    ]


def test_work_without_its_call_is_on_its_queue_and_of_the_process_that_used_its_device(recording):
    recording.kernel("gemm", 130, 190)
    recording.call("hipGetDevice", 10, 20, pid=9)
    recording.op("KernelExecution", 200, 260, 99, "lost", queue=4)
    (trace,) = recording.read()
    rows = conform(TABLES["spans"], trace.frames["spans"]).rows_by_key("name", named=True, unique=True)
    assert (rows["gemm"]["stream"], rows["lost"]["stream"]) == (0, 1)


def test_calls_that_name_no_process_are_of_one_that_is_not_known(recording):
    call = recording.call("hipLaunchKernel", 100, 110, pid="garbled")
    recording.op("KernelExecution", 130, 190, call, "gemm")
    assert recording.spans()["gemm"]["kind"] == "kernel"


def test_calls_that_wait_are_synchronisations(recording):
    recording.kernel("gemm", 130, 190)
    recording.call("hipEventQuery", 150, 160)
    recording.call("hipStreamSynchronize", 160, 195)
    (trace,) = recording.read()
    syncs = conform(TABLES["syncs"], trace.frames["syncs"])
    assert syncs.select("kind", "start_ns", "duration_ns").rows() == [("stream_sync", 160, 35)]


def test_a_newer_schema_and_a_file_without_gpu_work_are_refused_in_one_line(tmp_path):
    newer = Recording(tmp_path / "newer.rpd", "4")
    newer.kernel("gemm", 130, 190)
    with pytest.raises(InputError, match="schema 4 of rocmProfileData, which is newer than 3"):
        newer.read()
    idle = Recording(tmp_path / "idle.rpd")
    idle.call("hipGetDevice", 10, 20)
    with pytest.raises(InputError, match="no GPU work in it; record"):
        idle.read()


def test_damaged_files_and_those_of_other_tools_are_refused_in_one_line(recording, tmp_path):
    recording.kernel("gemm", 130, 190)
    recording.read()
    content = recording.path.read_bytes()
    cut = tmp_path / "cut.rpd"
    cut.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cut short"):
        read_rpd(cut)
    garbled = tmp_path / "garbled.rpd"
    garbled.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(InputError, match="damaged SQLite database"):
        read_rpd(garbled)
    other = tmp_path / "results.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE rocpd_info_node_00 (id)")
        connection.execute("CREATE VIEW broken AS SELECT id FROM missing")
    connection.close()
    assert RPD.matches(other.read_bytes())
    with pytest.raises(InputError, match=r"no table rocpd_op or kernels.*give an .rpd file, or a database"):
        read_rpd(other)


def test_a_gzipped_file_is_read(recording, tmp_path):
    recording.kernel("gemm", 130, 190)
    recording.read()
    packed = tmp_path / "rank3.rpd.gz"
    packed.write_bytes(gzip.compress(recording.path.read_bytes()))
    assert read_rpd(packed)[0].frames["spans"].height == 2


def test_what_rpd2tracing_made_names_the_file_to_import(tmp_path):
    made = tmp_path / "trace.json"
    event = '{"pid":"2","tid":"0","name":"gemm","ts":"34893892.157","dur":"5.4","ph":"X","args":{}}'
    made.write_text('{"traceEvents": [ {}\n,' + event + "\n]\n} ")
    with pytest.raises(InputError, match=r"made from an \.rpd file by rpd2tracing.*; import the \.rpd file"):
        read_trace(made)
