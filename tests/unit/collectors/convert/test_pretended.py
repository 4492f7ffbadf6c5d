"""Calls of pretended ranks as rows, from files of this version and of earlier ones."""

from __future__ import annotations

import json

from dpro.collectors.convert.pretended import calls_outside_windows

CALL = {
    "op": "all_reduce",
    "group": "0 default_pg",
    "sequence": 1,
    "bytes_in": 8,
    "bytes_out": 8,
    "dtype": "float32",
    "peer": -1,
    "begun_ns": 5,
    "ended_ns": 6,
}


def test_each_call_that_lists_its_ranks_is_read_as_one_whose_group_does(tmp_path):
    ranks = [0, 1, 2, 3]
    for version, saved in (
        ("now", {"groups": {"0 default_pg": ranks}, "calls": [CALL, CALL]}),
        ("before", [CALL | {"ranks": ranks}] * 2),
    ):
        (tmp_path / version).mkdir()
        (tmp_path / version / "pretended.json").write_text(json.dumps(saved))
    rows, before = (calls_outside_windows(tmp_path / version, 1) for version in ("now", "before"))
    assert rows["group_ranks"].to_list() == ["0-3"] * 2
    assert before.equals(rows)
    assert calls_outside_windows(tmp_path, 1).is_empty()
