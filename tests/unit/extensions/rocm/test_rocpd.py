"""Databases of rocprofv3 on small files made here, with the columns of its views."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dpro.errors import InputError
from dpro.extensions.rocm.importers import RPD
from dpro.ingest.formats import registry
from dpro.ingest.trace import RankTrace
from dpro.schema import TABLES, conform

_COLUMNS = {
    "kernels": "guid, pid, tid, name, agent_abs_index, stream_id, start, end, stack_id",
    "memory_copies": "guid, pid, tid, name, size, stream_id, start, end, stack_id, dst_agent_abs_index, "
    "dst_agent_type, src_agent_abs_index",
    "regions": "guid, pid, tid, category, name, start, end, stack_id, extdata",
}


class Database:
    """A file in the making: its views show tables of other names, as those of rocprofv3 do."""

    def __init__(self, path: Path) -> None:
        self.path, self.connection = path, sqlite3.connect(path)
        for view, columns in _COLUMNS.items():
            self.connection.execute(f"CREATE TABLE rocpd_{view}_0a ({columns})")
            self.connection.execute(f"CREATE VIEW {view} AS SELECT * FROM rocpd_{view}_0a")
        self.connection.execute("CREATE TABLE rocpd_info_agent_0a (type, product_name, absolute_index)")
        for index, kind in ((0, "CPU"), (4, "GPU"), (5, "GPU")):
            row = (kind, f"model {index}", index)
            self.connection.execute("INSERT INTO rocpd_info_agent_0a VALUES (?, ?, ?)", row)

    def add(self, view: str, start: int, end: int, **row: Any) -> None:
        row = {"guid": "0a", "pid": 10, "tid": 11, "start": start, "end": end} | row
        columns, marks = ", ".join(row), ", ".join("?" * len(row))
        self.connection.execute(f"INSERT INTO rocpd_{view}_0a ({columns}) VALUES ({marks})", [*row.values()])

    def call(self, name: str, start: int, end: int, call: int, **more: Any) -> None:
        self.add(
            "regions",
            start,
            end,
            **{"category": "HIP_RUNTIME_API_EXT", "name": name, "stack_id": call, **more},
        )

    def kernel(self, name: str, start: int, end: int, call: int, **more: Any) -> None:
        row = {"name": name, "stack_id": call, "agent_abs_index": 4, "stream_id": 0}
        self.add("kernels", start, end, **(row | more))

    def read(self) -> list[RankTrace]:
        self.connection.commit()
        self.connection.close()
        importer = registry().find(self.path.read_bytes()[: 1 << 16])
        assert importer is RPD
        traces = importer.read(self.path)
        assert isinstance(traces, list)
        return traces


@pytest.fixture
def database(tmp_path):
    return Database(tmp_path / "rank3_results.db")


def test_kernels_fills_and_copies_have_the_call_that_launched_them(database):
    database.call("hipLaunchKernel", 100, 110, 7)
    database.kernel("_Z4gemmi", 130, 190, 7)
    database.call("hipMemsetAsync", 112, 115, 8)
    database.kernel("__amd_rocclr_fillBufferAligned", 200, 210, 8, stream_id=2)
    database.call("hipMemcpyAsync", 120, 125, 9)
    to_gpu = {"dst_agent_abs_index": 4, "dst_agent_type": "GPU", "src_agent_abs_index": 0}
    copy = {"name": "MEMORY_COPY_HOST_TO_DEVICE", "size": 4096, "stream_id": 0, "stack_id": 9}
    database.add("memory_copies", 220, 240, **copy, **to_gpu)
    database.call("__hipRegisterFunction", 1, 2, 1, category="HIP_COMPILER_API_EXT")
    (trace,) = database.read()
    rows = conform(TABLES["spans"], trace.frames["spans"])
    work = rows.filter(rows["stream"] >= 0).select("kind", "name", "device", "stream", "correlation", "bytes")
    assert work.rows() == [
        ("kernel", "gemm(int)", 4, 0, 7, -1),
        ("memset", "FillBuffer", 4, 1, 8, -1),
        ("memcpy", "CopyHostToDevice", 4, 0, 9, 4096),
    ]
    calls = rows.filter(rows["kind"] == "runtime").select("name", "correlation", "start_ns", "duration_ns")
    assert calls["name"].to_list() == ["hipLaunchKernel", "hipMemsetAsync", "hipMemcpyAsync"]
    assert (trace.rank, trace.gpus) == (3, ["model 4"])


def test_ranges_have_the_text_that_the_job_gave_them(database):
    database.kernel("gemm", 130, 190, 7)
    text = json.dumps({"message": "step 4"})
    marked = {"category": "MARKER_CORE_RANGE_API", "extdata": text}
    database.call("roctxRangePushA", 100, 200, 3, **marked)
    (trace,) = database.read()
    assert trace.frames["steps"].select("step", "start_ns", "source").rows() == [(4, 100, "roctx step N")]


def test_each_process_with_gpu_work_is_a_rank(database):
    for pid, agent in ((12, 5), (11, 4)):
        database.call("hipLaunchKernel", 100, 110, 7, pid=pid)
        database.kernel("gemm", 130, 190, 7, pid=pid, agent_abs_index=agent)
    traces = database.read()
    assert [(trace.rank, trace.world_size, trace.gpus) for trace in traces] == [
        (0, 2, ["model 4"]),
        (1, 2, ["model 5"]),
    ]


def test_several_databases_in_one_and_one_without_gpu_work_are_refused(database, tmp_path):
    idle = Database(tmp_path / "idle.db")
    idle.call("hipInit", 1, 2, 1)
    with pytest.raises(InputError, match="no GPU work in it; record the job with `rocprofv3"):
        idle.read()
    database.kernel("gemm", 130, 190, 7)
    database.kernel("gemm", 230, 290, 8, guid="0b")
    with pytest.raises(InputError, match="2 databases in one file; give each by itself"):
        database.read()
