"""What a process has recorded since the last look."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dpro.collectors.convert import Process
from dpro.collectors.inside.records import _RECORD, ANCHOR, CLOCK, UPDATE, RecordWriter
from dpro.schema import STEPS
from dpro.watch.tail import RECENT, Tail


@pytest.fixture
def tail(tmp_path: Path) -> Tail:
    facts = {"rank": 3, "pid": 7, "host": "here", "local_rank": 3, "world_size": 4, "gpu_uuid": ""}
    return Tail(Process(tmp_path, facts | {"gpu_name": "", "started_ns": 5}))


def dump(folder: Path, name: str, numbers: range, stamp: int) -> None:
    entry = {"profiling_name": "gloo:all_reduce", "process_group": ["0", "default_pg"], "is_p2p": False}
    entries = [
        entry | {"record_id": n, "collective_seq_id": n, "time_created_ns": 1000 + n, "state": "scheduled"}
        for n in numbers
    ]
    (folder / name).write_text(json.dumps({"entries": entries, "pg_config": {}}))
    os.utime(folder / name, ns=(stamp, stamp))


def test_records_are_read_once_and_steps_follow_from_them(tail):
    assert not tail.read_records()  # there is no file yet
    own = RecordWriter(tail.process.folder / "records.bin")
    own.write(ANCHOR, 0, 0, 0, 0)
    for count in (1, 2, 3):
        own.write(UPDATE, 0, count, count * 100, count * 100 + 10)
    assert tail.read_records()
    assert not tail.read_records()
    own.write(UPDATE, 0, 4, 400, 410)
    assert tail.read_records()
    assert (tail.num_updates, tail.last_update_ns) == (4, 400)
    assert tail.frames()[STEPS.name].select("step", "start_ns", "duration_ns").rows() == [
        (1, 110, 90), (2, 210, 90), (3, 310, 90)
    ]  # fmt: skip


def test_a_place_that_another_thread_is_about_to_write_is_waited_for_once(tail):
    path = tail.process.folder / "records.bin"
    own = RecordWriter(path)
    own.write(CLOCK, 1)
    next(own._slots)  # taken, and not yet written
    own.write(CLOCK, 3)
    tail.read_records()
    assert [record.a for record in tail.recorded] == [1]
    with path.open("r+b") as file:
        file.seek(_RECORD.size)
        file.write(_RECORD.pack(2, 0, 0, 0, CLOCK))
    tail.read_records()
    assert [record.a for record in tail.recorded] == [1, 2, 3]
    next(own._slots)  # by a thread that is no more
    own.write(CLOCK, 5)
    tail.read_records()
    tail.read_records()
    assert [record.a for record in tail.recorded] == [1, 2, 3, 5]


def test_memory_is_bounded_and_what_numbers_steps_is_kept(tail):
    own = RecordWriter(tail.process.folder / "records.bin")
    own.write(ANCHOR, 0, 0, 0, 0)
    for count in range(1, 3 * RECENT):
        own.write(UPDATE, 0, count, count * 100, count * 100)
    tail.read_records()
    assert len(tail.recorded) == RECENT + 1
    assert tail.frames()[STEPS.name]["step"].max() == 3 * RECENT - 2


def test_each_call_is_taken_once_from_overlapping_dumps(tail):
    folder = tail.process.folder
    dump(folder, "flight-fr-000001.json", range(0, 6), 10)
    assert tail.read_calls()
    assert not tail.read_calls()
    dump(folder, "calls-fr.json", range(3, 9), 20)
    assert tail.read_calls()
    dump(folder, "calls-fr.json", range(5, 12), 30)
    assert tail.read_calls()
    assert (tail.collectives["collective_id"] // 2).to_list() == list(range(12))
    assert tail.collectives["rank"].unique().to_list() == [3]


def test_a_damaged_dump_is_passed_over(tail):
    (tail.process.folder / "calls-fr.json").write_text('{"entries": [')
    assert not tail.read_calls()
    dump(tail.process.folder, "calls-fr.json", range(2), 30)
    assert tail.read_calls()
