"""Flight recorder dumps."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from dpro.errors import InputError
from dpro.ingest.flight_recorder import is_dump, read_dump
from dpro.schema import COLLECTIVES, conform

GROUPS = {
    "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
    "7": {"name": "7", "desc": "PIPELINE", "ranks": "[1, 3]"},
}
GATHER = {
    "record_id": 5,
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 12,
    "p2p_seq_id": 0,
    "profiling_name": "nccl:_all_gather_base",
    "time_created_ns": 1000,
    "input_sizes": [[2, 3]],
    "input_dtypes": ["BFloat16"],
    "output_sizes": [[8, 3]],
    "output_dtypes": ["BFloat16"],
    "state": "completed",
    "time_discovered_started_ns": 2000,
    "time_discovered_completed_ns": 5000,
    "is_p2p": False,
}
SEND = GATHER | {
    "record_id": 6,
    "process_group": ("7", "PIPELINE"),
    "p2p_seq_id": 4,
    "profiling_name": "nccl:send 0->1",
    "output_sizes": [[2, 3]],
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": None,
    "is_p2p": True,
}
DUMP = {"version": "2.9", "pg_config": GROUPS, "nccl_version": "2.27.3", "entries": [GATHER, SEND]}


@pytest.fixture(params=["pickle", "json"])
def dump(request, tmp_path) -> Path:
    path = tmp_path / "nccl_trace_rank_1"
    path.write_bytes(
        pickle.dumps(DUMP, protocol=2) if request.param == "pickle" else json.dumps(DUMP).encode()
    )
    return path


def test_each_entry_is_one_row(dump):
    trace = read_dump(dump)
    gather, send = sorted(
        conform(COLLECTIVES, trace.frames["collectives"]).rows(named=True), key=lambda r: r["op"]
    )
    assert (trace.rank, trace.world_size, trace.versions) == (1, 4, {"nccl": "2.27.3"})
    assert (gather["op"], gather["sequence"], gather["collective_id"]) == ("all_gather", 12, 5)
    assert (gather["group"], gather["group_ranks"]) == ("0 default_pg", [0, 1, 2, 3])
    assert (gather["bytes_in"], gather["bytes_out"], gather["dtype"]) == (12, 48, "bfloat16")
    assert (gather["enqueued_ns"], gather["start_ns"], gather["duration_ns"]) == (1000, -1, -1)
    assert (send["op"], send["sequence"], send["start_ns"], send["duration_ns"]) == ("send", 4, -1, -1)
    assert {gather["window"], send["window"]} == {-1}


def test_a_peer_numbered_within_the_group_becomes_a_global_rank(dump):
    send = read_dump(dump).frames["collectives"].filter(op="send").row(0, named=True)
    assert (send["peer"], send["bytes_in"], send["bytes_out"]) == (3, 12, 0)


def test_a_dump_is_known_by_its_content(dump):
    assert is_dump(dump.read_bytes())
    assert not is_dump(b'{"traceEvents": [], "distributedInfo": {"pg_config": []}}')


def test_a_dump_that_wants_to_run_code_is_refused(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    path = tmp_path / "_dump_0"
    path.write_bytes(pickle.dumps({"entries": [Bomb()]}))
    with pytest.raises(InputError, match=r"_dump_0.*mkdir"):
        read_dump(path)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("content", [b"\x80\x02garbage", b"{", b"[1]", b'{"entries": [3]}'])
def test_a_damaged_dump_is_one_line(tmp_path, content):
    path = tmp_path / "_dump_0"
    path.write_bytes(content)
    with pytest.raises(InputError, match="_dump_0"):
        read_dump(path)


def test_the_dumps_of_a_real_hang_are_read_whole(traces):
    folder = traces / "flight_recorder" / "lock_gil_1st"
    dumps = [read_dump(path) for path in sorted(folder.glob("_dump_*"))]
    rows = [row for dump in dumps for row in dump.frames["collectives"].rows(named=True)]
    assert sorted(dump.rank for dump in dumps) == list(range(16))
    assert {dump.world_size for dump in dumps} == {16}
    assert len(rows) == 142
    assert all(row["rank"] in row["group_ranks"] and row["bytes_in"] >= 0 for row in rows)
    sends = [row for row in rows if row["op"] in ("send", "recv")]
    assert sends
    assert all(abs(row["peer"] - row["rank"]) == 8 for row in sends)  # two pipeline stages of eight ranks
