"""Dumps of PyTorch's flight recorder as jobs wrote them."""

from __future__ import annotations

import io
import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dpro.ingest.flight_recorder import is_dump, read_dump
from dpro.ingest.reading.files import read_head
from dpro.members import members_text
from tests.unit.ingest.flight_recorder.test_flight_recorder import rows_of

# Two processes; each dumps what it did as a pickle and as JSON, in full and what is active.
_JOB = """
import json
import sys
import time
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
pair = dist.new_group([0, 1])
x = torch.ones(8)
dist.all_reduce(x)
dist.all_reduce(x, group=pair)
dist.all_gather([torch.empty(8), torch.empty(8)], x)
dist.barrier()
while not all(entry["retired"] for entry in json.loads(c10d._dump_fr_trace_json())["entries"][:3]):
    time.sleep(0.01)  # another thread notes that they are done
open(f"{folder}/pickle_rank_{rank}", "wb").write(c10d._dump_fr_trace(includeStackTraces=True))
open(f"{folder}/json_rank_{rank}", "wb").write(c10d._dump_fr_trace_json())
open(f"{folder}/none_rank_{rank}", "wb").write(c10d._dump_fr_trace_json(includeCollectives=False))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """Dumps of a real job of two gloo processes."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("gloo")
    command = [sys.executable, "-c", _JOB]
    running = [subprocess.Popen([*command, str(rank), str(folder)]) for rank in (0, 1)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("form", ["pickle", "json"])
def test_dumps_of_a_real_gloo_job_show_what_it_did(job, form, rank):
    path = job / f"{form}_rank_{rank}"
    trace = read_dump(path)
    assert is_dump(read_head(path))
    assert trace.rank == rank
    rows = [
        (row["op"], row["group"], row["sequence"], row["bytes_in"], row["bytes_out"])
        for row in rows_of(trace)
    ]
    assert rows == [
        ("all_reduce", "0 default_pg", 1, 32, 32),
        ("all_reduce", "1", 1, 32, 32),
        ("all_gather", "0 default_pg", 2, 32, 64),
        ("barrier", "0 default_pg", 3, -1, -1),
    ]
    assert {row["state"] for row in rows_of(trace)[:3]} == {"completed"}
    assert {(row["start_ns"], row["duration_ns"]) for row in rows_of(trace)} == {(-1, -1)}


@pytest.mark.slow
def test_both_forms_of_a_real_dump_are_one_and_the_same(job):
    for rank in (0, 1):
        pickled, text = (rows_of(read_dump(job / f"{form}_rank_{rank}")) for form in ("pickle", "json"))
        for row in (pickled[-1], text[-1]):
            del row["state"]  # gloo may retire the barrier between the two dumps
        assert pickled == text


@pytest.mark.slow
def test_a_real_dump_without_collectives_is_a_dump(job):
    path = job / "none_rank_0"
    assert is_dump(read_head(path))
    assert read_dump(path).frames["collectives"].is_empty()


class _Plain(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise AssertionError(f"{module_name}.{global_name}")


def test_the_dumps_of_a_real_hang_are_read_whole(traces):
    """Compared with a plain reading: every entry, by what the dump itself says of it."""
    ops = {"_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}
    counts = Counter[str]()
    for path in sorted((traces / "flight_recorder" / "lock_gil_1st").glob("_dump_*")):
        trace = read_dump(path)
        recorded = _Plain(io.BytesIO(path.read_bytes())).load()
        rank = int(path.name.removeprefix("_dump_"))
        assert (trace.rank, trace.world_size, trace.versions) == (rank, 16, {"nccl": "2.27.3"})
        rows = {row["collective_id"]: row for row in rows_of(trace)}
        assert len(rows) == len(recorded["entries"])
        for entry in recorded["entries"]:
            row = rows[entry["record_id"]]
            name, description = entry["process_group"]
            ranks = json.loads(recorded["pg_config"][name]["ranks"])
            called = entry["profiling_name"].removeprefix("nccl:").split()
            assert row["op"] == ops.get(called[0], called[0])
            assert (row["group"], row["group_ranks"]) == (f"{name} {description}", members_text(ranks))
            assert rank in ranks
            assert row["enqueued_ns"] == entry["time_created_ns"]
            assert row["state"] == entry["state"] == "scheduled"
            assert row["sequence"] == entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
            if entry["is_p2p"] and len(called) == 2:
                _, peer = map(int, re.findall(r"\d+", called[1]))
                assert row["peer"] == ranks[peer]
            counts[row["op"]] += 1
    assert sum(counts.values()) == 142
    assert counts["send"]
    assert counts["recv"]
