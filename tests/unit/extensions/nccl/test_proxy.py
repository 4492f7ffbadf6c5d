"""What NCCL's proxy sent, from the Inspector's records in each of their shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from dpro.extensions.nccl.inspector import read_inspector_log
from dpro.schema import SENDS, conform
from tests.unit.extensions.nccl.test_inspector import coll, log, whose

START_US = 1_752_867_229_235_000


def step(number: int, wire_us: int = 10, size: int = 100, **more: Any) -> dict[str, Any]:
    """A step that was on the wire for this long, after waiting for the GPU and the peer."""
    at = START_US + 1000 * number
    times = {"proxy_step_start_ts": at, "send_gpu_wait_ts": at + 5, "send_peer_wait_ts": at + 80,
             "send_wait_ts": at + 100, "proxy_step_stop_ts": at + 100 + wire_us}  # fmt: skip
    return {"step": number, "trans_size_bytes": size, "event_trace_ts": times, **more}


def record(kind: str, operation: int = 12, *, peer: int = 3, direction: str = "send", **more: Any) -> Any:
    facts = {"record_type": kind, "parent_type": "coll", "parent_sn": 7, "proxy_op_sn": operation,
             "channel_id": 1, "peer": peer, "direction": direction}  # fmt: skip
    return {"proxy_trace": facts | more}


def sends(tmp_path: Path, *lines: Any) -> tuple[pl.DataFrame, dict[str, int]]:
    (trace,) = read_inspector_log(log(tmp_path / "node0.log", whose() | {"dump_stats": {}}, *lines))
    found = trace.frames.get("sends", SENDS.empty())
    return conform(SENDS, found), trace.skipped


def test_steps_of_their_own_make_one_row_of_their_operation(tmp_path):
    lines = [record("proxy_step", **step(number)) for number in range(3)]
    rows, skipped = sends(tmp_path, *lines, record("proxy_op", n_steps=3, n_steps_dropped=0))
    (row,) = rows.rows(named=True)
    assert (row["rank"], row["member"], row["peer_member"], row["group"]) == (2, 2, 3, "0xabc")
    assert (row["sequence"], row["channel"], row["operation"]) == (7, 1, 12)
    assert (row["steps"], row["bytes"], row["wire_ns"]) == (3, 300, 30_000)  # no waiting in it
    assert row["time_ns"] == (START_US + 100) * 1000
    assert skipped == {}


def test_steps_within_their_operation_make_the_same_row(tmp_path):
    segments = [
        record("proxy_op_start", is_final=False, steps=[]),
        record("proxy_op_segment", is_final=False, steps=[step(0), step(1, wire_us=20)]),
        record("proxy_op", is_final=True, n_steps_dropped=0, steps=[step(2) | {"wire_us": 30}]),
    ]
    rows, _ = sends(tmp_path, *segments)
    assert rows.select("steps", "bytes", "wire_ns").rows() == [(3, 300, 60_000)]


def test_channels_and_peers_are_rows_of_their_own(tmp_path):
    lines = [record("proxy_op", number, peer=number, steps=[step(0)]) for number in (4, 5)]
    rows, _ = sends(tmp_path, *lines)
    assert rows["peer_member"].to_list() == [4, 5]


def test_what_does_not_describe_a_whole_send_is_counted(tmp_path):
    rows, skipped = sends(
        tmp_path,
        coll(),
        record("proxy_op", 1, direction="recv", steps=[step(0)]),
        record("proxy_op", 2, steps=[step(0)], n_steps_dropped=1),
        record("proxy_op", 3),  # steps were not asked for
        record("proxy_op", 4, steps=[step(0, wire_us=-200)]),
    )
    assert rows.is_empty()
    assert skipped == {
        "records of NCCL's proxy that are not sends": 1,
        "sends of NCCL's proxy with missing steps": 3,
    }


def test_damaged_records_raise_nothing(tmp_path):
    lines = [
        record("proxy_op", "x", steps={"a": 1}),
        record("proxy_step", peer="y", **step(0)),
        record("proxy_op", 5, steps=[1, None, {"event_trace_ts": [3]}]),
        {"proxy_trace": []},
    ]
    rows, _ = sends(tmp_path, coll(), *lines)
    assert rows.is_empty()
