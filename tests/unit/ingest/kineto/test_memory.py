"""Memory events of Kineto traces."""

from __future__ import annotations

from typing import Any

from dpro.ingest.kineto import read_trace
from dpro.schema import COUNTERS, conform
from tests.traces import cpu_op, write

CPU, GPU = {"Device Type": 0, "Device Id": -1}, {"Device Type": 1, "Device Id": 3}


def allocation(ts: float, device: dict[str, int], **totals: int) -> dict[str, Any]:
    args = (
        {"Bytes": 1, "Addr": 1} | device | {name.replace("_", " "): value for name, value in totals.items()}
    )
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts, "args": args}


def _rows(tmp_path, *events: dict[str, Any]) -> list[tuple[Any, ...]]:
    trace = read_trace(write(tmp_path / "rank2.json", [cpu_op("a", 5, 1), *events]))
    rows = conform(COUNTERS, trace.frames["counters"])
    return rows.select("rank", "device", "counter", "time_ns", "value").rows()


def test_memory_in_use_after_each_allocation_is_a_row_unless_it_is_what_it_was(tmp_path):
    events = [
        allocation(7, GPU, Total_Allocated=100, Total_Reserved=512),
        allocation(6, GPU, Total_Allocated=40, Total_Reserved=512),
        allocation(8, CPU, Total_Allocated=8, Total_Reserved=0),
        allocation(9, GPU, Total_Allocated=100, Total_Reserved=1024),
    ]
    assert _rows(tmp_path, *events) == [
        (2, "", "memory_allocated_bytes", 8000, 8.0),
        (2, "gpu 3", "memory_allocated_bytes", 6000, 40.0),
        (2, "gpu 3", "memory_allocated_bytes", 7000, 100.0),
        (2, "gpu 3", "memory_reserved_bytes", 6000, 512.0),
        (2, "gpu 3", "memory_reserved_bytes", 9000, 1024.0),
    ]


def test_memory_events_without_totals_are_counted(tmp_path):
    trace = read_trace(write(tmp_path / "rank0.json", [cpu_op("a", 5, 1), allocation(7, CPU)]))
    assert trace.skipped == {"memory events without totals": 1}
    assert "counters" not in trace.frames


def test_devices_and_counters_are_in_order_of_their_names_and_cpus_count_as_one(tmp_path):
    totals = {"Total_Allocated": 8, "Total_Reserved": 16}
    devices = [{"Device Type": 1, "Device Id": number} for number in (2, 10, -1)]
    cpus = [{"Device Type": 0, "Device Id": number} for number in (-1, 0)]
    events = [allocation(6 + at, device, **totals) for at, device in enumerate([*devices, *cpus])]
    assert [row[1:4] for row in _rows(tmp_path, *events)] == [
        ("", "memory_allocated_bytes", 9000),
        ("gpu -1", "memory_allocated_bytes", 8000),
        ("gpu -1", "memory_reserved_bytes", 8000),
        ("gpu 10", "memory_allocated_bytes", 7000),
        ("gpu 10", "memory_reserved_bytes", 7000),
        ("gpu 2", "memory_allocated_bytes", 6000),
        ("gpu 2", "memory_reserved_bytes", 6000),
    ]
