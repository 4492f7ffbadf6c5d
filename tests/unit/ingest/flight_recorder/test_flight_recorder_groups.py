"""What dumps say of whole groups, and how far the parts of coalesced calls are."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from dpro.ingest.flight_recorder import read_dump

CONFIG = {
    "0": {"desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
    "35": {"desc": "TP", "ranks": "[0, 1]"},
    "108": {"desc": "PP", "ranks": "[0, 2]"},
}


def status(enqueued: int, completed: int) -> dict[str, int]:
    return {"last_enqueued_collective": enqueued, "last_completed_collective": completed}


STATUS = {"0": status(9, 8), "4": status(5, 5), "11": status(7, 7)}


def entry(number: int, name: str, *, sequence: int, p2p: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": 11,
        "process_group": ("108", "PP"),
        "collective_seq_id": 0 if p2p else sequence,
        "p2p_seq_id": sequence if p2p else 0,
        "profiling_name": name,
        "state": "scheduled",
        "retired": False,
        "is_p2p": p2p,
    } | more


def read(folder: Path, entries: list[dict[str, Any]], **facts: Any) -> dict[str, list[dict[str, Any]]]:
    path = folder / "_dump_0"
    dump = {"version": "2.9", "pg_config": CONFIG, "pg_status": STATUS, "entries": entries} | facts
    path.write_bytes(pickle.dumps(dump))
    os.utime(path, ns=(5_000, 5_000))
    return {name: frame.to_dicts() for name, frame in read_dump(path).frames.items()}


def test_the_status_of_groups_that_no_entry_names_goes_by_the_order_they_were_made_in(tmp_path):
    groups = read(tmp_path, [])["process_groups"]
    assert [(row["group"], row["group_ranks"], row["enqueued"], row["completed"]) for row in groups] == [
        ("0 default_pg", "0-3", 9, 8),
        ("35 TP", "0,1", 5, 5),
        ("108 PP", "0,2", 7, 7),
    ]
    assert {row["saved_ns"] for row in groups} == {5_000}


def test_an_entry_that_names_its_group_is_believed_before_any_order(tmp_path):
    groups = read(tmp_path, [entry(0, "nccl:all_reduce", sequence=1, p2p=False, pg_id=4)])["process_groups"]
    by_name = {row["group"]: row["enqueued"] for row in groups}
    assert by_name["108 PP"] == 5
    assert "" in by_name  # the others are not guessed then


def test_a_dump_that_knows_no_group_still_was_saved(tmp_path):
    (group,) = read(tmp_path, [], pg_config={}, pg_status={})["process_groups"]
    assert (group["group"], group["saved_ns"]) == ("", 5_000)


@pytest.mark.parametrize("state", ["scheduled", "completed"])
def test_parts_of_a_coalesced_call_are_as_far_as_its_end(tmp_path, state):
    entries = [
        entry(0, "nccl:send 0->1", sequence=3),
        entry(1, "nccl:recv 0<-1", sequence=3),
        entry(2, "nccl:coalesced", sequence=3, state=state),
    ]
    rows = read(tmp_path, entries, pg_status={})["collectives"]
    assert [row["state"] for row in rows] == [state] * 3


def test_parts_whose_end_is_left_out_because_it_is_finished_are_finished(tmp_path):
    entries = [
        entry(number, f"nccl:{op}", sequence=3) for number, op in enumerate(("send 0->1", "recv 0<-1"))
    ]
    rows = read(tmp_path, entries, pg_status={})["collectives"]
    assert [row["state"] for row in rows] == ["completed"] * 2


@pytest.mark.parametrize(
    ("enqueued", "completed", "collectives", "state"),
    [(7, 7, 0, "completed"), (7, 6, 0, "scheduled"), (7, 7, 7, "scheduled"), (9, 8, 0, "scheduled")],
)
def test_a_message_is_finished_if_the_group_is_further_and_counts_messages(
    tmp_path, enqueued, completed, collectives, state
):
    message = entry(0, "nccl:send 0->1", sequence=7, collective_seq_id=collectives)
    (row,) = read(tmp_path, [message], pg_status={"11": status(enqueued, completed)})["collectives"]
    assert row["state"] == state
