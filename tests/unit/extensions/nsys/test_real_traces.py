"""Nsight Systems exports of real jobs, against plain SQL."""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from dpro.extensions.nsys.reader import is_nsys, read_nsys
from dpro.ingest.reading.files import read_head
from dpro.ingest.trace import RankTrace
from dpro.schema import TABLES, conform

NAMES = ("mfu_2gpu_before", "a100_1gpu_nvtx_llm", "mock_rtx3080")


class Export:
    """A real export: read by dpro, and open for SQL."""

    def __init__(self, path: Path, database: Path) -> None:
        database.write_bytes(gzip.decompress(path.read_bytes()))
        self.path = path
        self.connection = sqlite3.connect(database)
        self.traces: list[RankTrace] = read_nsys(path)

    def sql(self, query: str) -> list[tuple[int, ...]]:
        return self.connection.execute(query).fetchall()

    def has(self, table: str) -> bool:
        return bool(self.sql(f"SELECT 1 FROM sqlite_master WHERE name = '{table}'"))

    def table(self, name: str) -> pl.DataFrame:
        return pl.concat([conform(TABLES[name], trace.frames[name]) for trace in self.traces])


@pytest.fixture(scope="module", params=NAMES)
def export(request, traces, tmp_path_factory) -> Iterator[Export]:
    opened = Export(
        traces / "nsys" / f"{request.param}.sqlite.gz", tmp_path_factory.mktemp("nsys") / "plain.sqlite"
    )
    yield opened
    opened.connection.close()


def test_a_real_export_is_recognised_by_its_head(export):
    assert is_nsys(read_head(export.path))


@pytest.mark.parametrize("kind", ["kernel", "memcpy", "memset"])
def test_gpu_work_of_each_process_is_all_there(export, kind):
    name = f"CUPTI_ACTIVITY_KIND_{kind.upper()}"
    grouped = f"SELECT (globalPid >> 24) & 16777215, count(*), sum(end - start) FROM {name} GROUP BY 1"
    truth = {row[0]: row[1:] for row in (export.sql(grouped) if export.has(name) else [])}
    pids = export.table("workers").select("rank", worker="pid")
    found = (
        export.table("spans")
        .filter(pl.col("kind") == kind)
        .join(pids, on="rank")
        .group_by("worker")
        .agg(count=pl.len(), total=pl.col("duration_ns").sum())
    )
    assert {row[0]: row[1:] for row in found.rows()} == truth


def test_calls_and_ranges_are_all_there(export):
    kinds = dict(export.table("spans").group_by("kind").len().rows())
    calls = export.sql("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_RUNTIME")[0][0]
    assert kinds["runtime"] == calls
    ranges = "SELECT count(*) FROM NVTX_EVENTS WHERE end IS NOT NULL AND eventType IN (59, 60)"
    truth = export.sql(ranges)[0][0] if export.has("NVTX_EVENTS") else 0
    assert kinds.get("annotation", 0) + kinds.get("cpu_op", 0) == truth


def test_times_are_on_the_wall_clock(export):
    (began,) = export.sql("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")[0]
    (first,) = export.sql("SELECT min(start) FROM CUPTI_ACTIVITY_KIND_KERNEL")[0]
    kernels = export.table("spans").filter(pl.col("kind") == "kernel")
    assert kernels["start_ns"].min() == began + first


def test_every_nccl_kernel_is_one_collective(export):
    truth = export.sql(
        "SELECT count(*), coalesce(sum(end - start), 0) FROM CUPTI_ACTIVITY_KIND_KERNEL k "
        "JOIN StringIds s ON s.id = k.demangledName WHERE s.value LIKE 'nccl%'"
    )
    collectives = export.table("collectives")
    assert [(collectives.height, collectives["duration_ns"].sum())] == truth


def test_collectives_are_called_what_torch_called_them(export):
    if not export.has("NVTX_EVENTS"):
        assert export.table("collectives").is_empty()
        return
    within = export.sql(
        "SELECT count(DISTINCT k.globalPid || ' ' || k.correlationId) FROM CUPTI_ACTIVITY_KIND_KERNEL k "
        "JOIN StringIds s ON s.id = k.demangledName AND s.value LIKE 'nccl%' "
        "JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId "
        "AND (r.globalTid >> 24) = (k.globalPid >> 24) "
        "JOIN NVTX_EVENTS n ON n.globalTid = r.globalTid AND n.start <= r.start AND n.end >= r.end "
        "AND n.text LIKE 'nccl:all_to_all%'"
    )[0][0]
    ops = dict(export.table("collectives").group_by("op").len().rows())
    assert ops.get("all_to_all", 0) == within
    assert sum(ops.values()) - within <= 2  # launched before the window


def test_synchronising_calls_are_all_there(export):
    truth = export.sql(
        "SELECT CASE WHEN s.value LIKE 'cudaEventRecord%' THEN 'event_record' "
        "WHEN s.value LIKE 'cudaStreamWaitEvent%' THEN 'stream_wait_event' "
        "WHEN s.value LIKE 'cudaEventSynchronize%' THEN 'event_sync' "
        "WHEN s.value LIKE 'cudaStreamSynchronize%' THEN 'stream_sync' "
        "WHEN s.value LIKE 'cudaDeviceSynchronize%' THEN 'device_sync' END AS kind, count(*) "
        "FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId "
        "GROUP BY 1 HAVING kind NOT NULL"
    )
    assert sorted(export.table("syncs").group_by("kind").len().rows()) == sorted(truth)


def test_jobs_that_mark_no_steps_have_their_busiest_phase_or_what_repeats(export):
    counting = "SELECT count(*) FROM NVTX_EVENTS WHERE text LIKE '%step %' OR text LIKE '%iter%'"
    assert not export.has("NVTX_EVENTS") or export.sql(counting) == [(0,)]
    found = {"a100_1gpu_nvtx_llm": ["NVTX benchmark_loop"], "mfu_2gpu_before": ["repetition"] * 2 * 16}
    expected = next((steps for name, steps in found.items() if name in export.path.name), [])
    assert export.table("steps")["source"].to_list() == expected


def test_the_process_with_the_first_gpu_is_rank_0(traces):
    first, second = read_nsys(traces / "nsys" / "mfu_2gpu_before.sqlite.gz")
    used = [
        trace.frames["spans"].filter(pl.col("kind") == "kernel")["device"].unique()
        for trace in (first, second)
    ]
    assert [trace.rank for trace in (first, second)] == [0, 1]
    assert [devices.to_list() for devices in used] == [[0], [1]]
