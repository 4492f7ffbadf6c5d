"""Exports of Nsight Systems, written by hand."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
UTC = 1_700_000_000_000_000_000


NO_STREAM = NO_EVENT = 0xFFFFFFFF


class Database:
    """A database in the making: texts are numbered, and times are as the exporter writes them."""

    def __init__(self) -> None:
        self.tables: dict[str, Rows] = {}
        self.texts: dict[str, int] = {}

    def add(self, table: str, **row: Any) -> None:
        self.tables.setdefault(table, []).append(row)

    def text(self, value: str) -> int:
        return self.texts.setdefault(value, len(self.texts) + 1)

    def call(self, name: str, start: int, end: int, correlation: int, pid: int = 10, tid: int = 10) -> None:
        row = {"globalTid": thread(pid, tid), "nameId": self.text(name), "correlationId": correlation}
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, **row)

    def kernel(
        self, name: str, start: int, end: int, correlation: int = 1, pid: int = 10, device: int = 0
    ) -> None:
        where = {"deviceId": device, "streamId": 7, "correlationId": correlation, "globalPid": thread(pid, 0)}
        names = {"demangledName": self.text(name), "shortName": self.text(name.split("(")[0])}
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, **where, **names)

    def graph(self, number: int, start: int, end: int, correlation: int = 1) -> None:
        where = {"deviceId": 0, "streamId": 7, "correlationId": correlation, "globalPid": thread(10, 0)}
        self.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=start, end=end, **where, graphId=number)

    def nvtx(self, text: str | None, start: int, end: int | None, pid: int = 10, **more: Any) -> None:
        row = {"eventType": 59, "text": text, "textId": None, "domainId": 0, "jsonText": None} | more
        self.add("NVTX_EVENTS", start=start, end=end, globalTid=thread(pid, pid), **row)

    def nccl(self, name: str, start: int, end: int, payload: str | None = None, pid: int = 10) -> None:
        self.nvtx(None, start, end, pid, textId=self.text(name), domainId=1, jsonText=payload)

    def write(self, path: Path) -> Path:
        self.tables["StringIds"] = [{"id": number, "value": text} for text, number in self.texts.items()]
        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as connection:
            for table, rows in self.tables.items():
                columns = list(rows[0]) if rows else ["id"]
                quoted = ", ".join(f'"{column}"' for column in columns)
                connection.execute(f"CREATE TABLE {table} ({quoted})")
                marks = ", ".join("?" * len(columns))
                values = [[row[column] for column in columns] for row in rows]
                connection.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
        connection.close()
        return path


def thread(pid: int, tid: int) -> int:
    """A globalTid as Nsight Systems serialises it, of machine 1."""
    return (1 << 48) | (pid << 24) | tid


def session(version: str = "3.25") -> Database:
    """The facts of a session: the newer versions list GPUs per process, with more facts of each."""
    database = Database()
    database.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2026.2.1")
    database.add("META_DATA_EXPORT", name="EXPORT_PARAM_TIME_NORMALIZE", value="false")
    database.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=UTC)
    database.add("TARGET_INFO_SYSTEM_ENV", name="Hostname", value="node7")
    database.add("TARGET_INFO_GPU", id=0, name="NVIDIA H100", uuid="GPU-0")
    if version == "3.25":
        database.add("TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=0, pid=10)
    return database
