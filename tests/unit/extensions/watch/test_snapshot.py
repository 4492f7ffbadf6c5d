"""What the search for a hang is given while a job runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.inside.records import ANCHOR, CLOCK, UPDATE
from dpro.detect.hang.find import find_hangs
from dpro.extensions.watch.evidence import Snapshot
from dpro.extensions.watch.job import ProcessTail
from tests.recorder_output import FlushedWriter

S = 10**9


def process(
    folder: Path, rank: int, calls: int, ahead_s: float, beats: bool = True, ranks: str = "[0, 1, 2]"
) -> ProcessTail:
    """A process of three that has called this many times, the last not over where that is the fourth."""
    own = folder / str(rank)
    own.mkdir()
    facts = {"rank": rank, "pid": 7, "host": f"node{rank}", "local_rank": 0, "world_size": 3, "gpu_uuid": ""}
    tail = ProcessTail(
        RecordedProcess(own, facts | {"gpu_name": "", "clock": f"boot{rank}", "started_ns": 5})
    )
    now = time.time_ns() + int(ahead_s * S)
    records = FlushedWriter(own / "records.bin")
    records.write(ANCHOR, 0, 0, 0, 0)
    for count in (1, 2, 3):
        records.write(UPDATE, 0, count, now - (20 - count) * S, now - (20 - count) * S)
    for ago in range(20, 0 if beats else 10, -1):
        records.write(CLOCK, now - ago * S, ago)
    tail.read_records()
    entries = [
        {
            "record_id": n, "collective_seq_id": n + 1, "profiling_name": "gloo:all_reduce", "is_p2p": False,
            "process_group": ["0", "default_pg"], "time_created_ns": now - (20 - n) * S, "retired": n < 3,
            "state": "scheduled", "input_sizes": [[4]], "input_dtypes": ["Float"],
        }
        for n in range(calls)
    ]  # fmt: skip
    path = own / "calls-fr.json"
    path.write_text(
        json.dumps(
            {"entries": entries, "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}}
        )
    )
    os.utime(path, ns=(now, now))
    return tail


def found(tails: list[ProcessTail]) -> tuple[str, tuple[int, ...], str]:
    snapshot = Snapshot()
    snapshot.read(tails)
    [finding] = find_hangs(snapshot.records(tails))
    return finding.class_, finding.ranks, " ".join(finding.evidence)


def test_a_rank_that_does_not_come_is_named_from_the_latest_dumps_and_records(tmp_path):
    tails = [process(tmp_path, rank, 3 if rank == 1 else 4, 0) for rank in range(3)]
    class_, ranks, evidence = found(tails)
    assert (class_, ranks) == ("hang.host", (1,))
    assert "has run since" not in evidence


def test_ranks_of_groups_that_only_the_processes_list_are_known(tmp_path):
    tails = [process(tmp_path, rank, 3 if rank == 1 else 4, 0, ranks="") for rank in range(3)]
    for tail in tails:
        (tail.process.folder / "groups.json").write_text(json.dumps({"0": [0, 1, 2]}))
    assert found(tails)[:2] == ("hang.host", (1,))


def test_a_host_whose_clock_is_behind_does_not_look_as_if_its_processes_stood_still(tmp_path):
    tails = [process(tmp_path, rank, 3 if rank == 1 else 4, -60 if rank == 1 else 0) for rank in range(3)]
    class_, ranks, evidence = found(tails)
    assert (class_, ranks) == ("hang.rank", (1,))  # its dump looks older
    assert "has run since" not in evidence


def test_a_process_that_stands_still_is_known_by_its_clock_whatever_that_shows(tmp_path):
    stopped = process(tmp_path, 1, 3, -60, beats=True)
    tails = [process(tmp_path, 0, 4, 0), stopped, process(tmp_path, 2, 4, 0)]
    stopped.least_age_ns = tails[0].least_age_ns + 60 * S - 10 * S  # its last second came ten seconds ago
    assert "no thread of rank 1 has run since" in found(tails)[2]


def test_a_dump_is_read_once_and_that_it_still_holds_is_noted(tmp_path, monkeypatch):
    tail, snapshot = process(tmp_path, 0, 4, 0), Snapshot()
    read = []
    monkeypatch.setattr(
        snapshot, "read_one", lambda *args, own=snapshot.read_one: read.append(1) or own(*args)
    )
    snapshot.read([tail])
    snapshot.begin()
    snapshot.read([tail])
    assert snapshot.answered() == set()
    later = time.time_ns() + 5 * S
    os.utime(tail.process.folder / "calls-fr.json", ns=(later, later))
    snapshot.read([tail])
    assert (len(read), snapshot.answered()) == (1, {tail.process.folder})
    assert snapshot.records([tail]).ranks["saved_ns"].to_list() == [later]
