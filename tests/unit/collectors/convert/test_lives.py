"""Rows of `starts` and `checkpoints`, from what a process left."""

from __future__ import annotations

import json

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.convert.tables import checkpoints, starts
from dpro.collectors.inside.records import UPDATE, Record
from dpro.schema import CHECKPOINTS, STARTS, conform


def test_start_has_its_moments_and_when_its_first_step_ended(tmp_path):
    (tmp_path / "started.json").write_text(json.dumps({"process_ns": 10, "imported_ns": 20, "surprise": 1}))
    process = RecordedProcess(tmp_path, {"rank": 3, "attempt": "2"})
    updates = [Record(0, 1, 60, 61, UPDATE), Record(0, 2, 90, 91, UPDATE)]
    (row,) = conform(STARTS, starts(process, updates, launched_ns=5)).to_dicts()
    assert row == {
        "rank": 3, "scheduled_ns": -1, "launched_ns": 5, "process_ns": 10, "imported_ns": 20,
        "group_begin_ns": -1, "group_ns": -1, "work_ns": -1, "first_update_ns": 60, "restart": 2,
    }  # fmt: skip


def test_process_that_said_nothing_has_no_start(tmp_path):
    process = RecordedProcess(tmp_path, {"rank": 3})
    assert starts(process, [], 5).is_empty()
    (tmp_path / "started.json").write_text("[1")
    assert starts(process, [], 5).is_empty()


def test_what_went_on_in_the_background_has_the_duration_of_its_later_line(tmp_path):
    begun = {"kind": "save", "path": "/c", "start_ns": 7, "stall_ns": 2, "duration_ns": -1, "source": "s"}
    whole = begun | {"duration_ns": 40, "bytes": 9, "inode": 1, "modified_ns": 2}
    other = {"kind": "load", "path": "/c", "start_ns": 99, "stall_ns": 1, "duration_ns": 1, "source": "l"}
    lines = [json.dumps(each) for each in (begun, whole, other)]
    (tmp_path / "checkpoints.jsonl").write_text("\n".join([*lines, lines[0][:20]]))
    found = conform(CHECKPOINTS, checkpoints(RecordedProcess(tmp_path, {"rank": 1})))
    assert found.select("kind", "duration_ns", "bytes").rows() == [("save", 40, 9), ("load", 1, -1)]


def test_process_that_saved_nothing_has_no_rows(tmp_path):
    assert conform(CHECKPOINTS, checkpoints(RecordedProcess(tmp_path, {"rank": 1}))).is_empty()
