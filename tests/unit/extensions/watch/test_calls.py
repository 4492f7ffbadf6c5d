"""The latest calls of all processes of a job."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.inside.records import ANCHOR, UPDATE
from dpro.extensions.watch.job import ProcessTail
from dpro.extensions.watch.late import CallTable
from tests.recorder_output import FlushedWriter

SHOWN, KEPT = "calls-fr.json", "flight-fr-000001.json"
WORLD = ["0", "default_pg"]
MAKE = Callable[[int], ProcessTail]


@pytest.fixture
def make(tmp_path: Path) -> MAKE:
    def tail(rank: int) -> ProcessTail:
        folder = tmp_path / str(rank)
        folder.mkdir()
        return ProcessTail(RecordedProcess(folder, {"rank": rank}))

    return tail


def entry(number: int, **facts: Any) -> dict[str, Any]:
    call = {"profiling_name": "gloo:all_reduce", "process_group": WORLD, "is_p2p": False}
    times = {"record_id": number, "collective_seq_id": number, "time_created_ns": 1000 + number}
    return call | times | {"state": "scheduled"} | facts


def dump(
    tail: ProcessTail, name: str, entries: Iterable[Mapping[str, Any]], stamp: int, ranks: str = "[0, 1]"
) -> None:
    path = tail.process.folder / name
    document = {"entries": list(entries), "pg_config": {"0": {"name": "0", "ranks": ranks}}}
    path.write_bytes(pickle.dumps(document) if name.endswith("pickle") else json.dumps(document).encode())
    os.utime(path, ns=(stamp, stamp))


def numbers(calls: CallTable, rank: int = 0) -> list[int]:
    return calls.frame.filter(pl.col("rank") == rank).sort("sequence")["sequence"].to_list()


def test_each_call_is_taken_once_from_overlapping_dumps(make):
    tail, calls = make(0), CallTable()
    dump(tail, SHOWN, map(entry, range(3, 9)), 20)
    assert calls.read([tail])
    assert not calls.read([tail])
    dump(tail, SHOWN, map(entry, range(5, 12)), 30)
    assert calls.read([tail])
    assert numbers(calls) == list(range(3, 12))


def test_calls_of_one_group_have_one_key_on_all_ranks_whatever_they_write(make):
    listed, silent, pickled = make(0), make(1), make(2)
    dump(listed, SHOWN, [entry(1)], 1, "[0, 1, 2]")
    dump(silent, SHOWN, [entry(1)], 1, "")
    (silent.process.folder / "groups.json").write_text(json.dumps({"0": [2, 1, 0]}))
    dump(pickled, "calls-fr.pickle", [entry(1)], 1, "[0, 1, 2]")
    calls = CallTable()
    calls.read([listed, silent, pickled])
    assert calls.frame.sort("rank").drop("key", "enqueued_ns").rows() == [
        (rank, 1, "all_reduce", 3) for rank in range(3)
    ]
    assert calls.frame["key"].n_unique() == 1


def test_messages_and_calls_of_a_group_of_one_say_nothing_of_who_is_late_and_messages_are_noted(make):
    tail, calls = make(0), CallTable()
    alone = entry(2, process_group=["1", "undefined"])
    message = entry(3, profiling_name="nccl:send 0->1", is_p2p=True)
    document = {
        "entries": [entry(1), alone, message],
        "pg_config": {"0": {"ranks": "[0, 1]"}, "1": {"ranks": "[0]"}},
    }
    (tail.process.folder / SHOWN).write_text(json.dumps(document))
    calls.read([tail])
    assert numbers(calls) == [1]
    assert calls.messages


def test_a_damaged_dump_is_passed_over(make):
    tail, calls = make(0), CallTable()
    (tail.process.folder / SHOWN).write_text('{"entries": [')
    assert not calls.read([tail])
    dump(tail, SHOWN, map(entry, range(2)), 30)
    assert calls.read([tail])


def test_where_a_ring_holds_less_than_a_few_steps_the_dumps_made_meanwhile_fill_the_hole(make):
    tail, calls = make(0), CallTable()
    own = FlushedWriter(tail.process.folder / "records.bin")
    own.write(ANCHOR, 0, 0, 0, 0)
    for count in (1, 2):  # steps of 100 ns
        own.write(UPDATE, 0, count, 100 * count, 100 * count)
    tail.read_records()
    dump(tail, SHOWN, map(entry, range(10)), 1010)
    calls.read([tail])
    dump(tail, KEPT, map(entry, range(15, 40)), 1040)
    dump(tail, SHOWN, map(entry, range(30, 50)), 1050)
    calls.read([tail])
    assert numbers(calls) == [*range(10), *range(15, 50)]
    dump(tail, "flight-fr-000002.json", map(entry, range(50, 700)), 1700)
    dump(tail, SHOWN, map(entry, range(60, 700)), 1701)  # holds six steps: enough
    calls.read([tail])
    assert numbers(calls) == [*range(10), *range(15, 50), *range(60, 700)]


def test_calls_before_a_moment_are_forgotten_rank_by_rank(make):
    tails, calls = [make(0), make(1), make(2)], CallTable()
    for tail in tails:
        dump(tail, SHOWN, map(entry, range(5)), 1)
    calls.read(tails)
    since = pl.DataFrame(
        {"rank": [0, 1], "since_ns": [1003, 1001]}, schema={"rank": pl.Int32, "since_ns": pl.Int64}
    )
    calls.forget_before(since)
    assert (numbers(calls, 0), numbers(calls, 1), numbers(calls, 2)) == ([3, 4], [1, 2, 3, 4], [])
