"""What a process leaves when it stands still, as tables."""

from __future__ import annotations

import json

import polars as pl

from dpro.collectors.convert.calls import (
    as_delivered,
    keep_groups,
    message_rows,
    messages_in_window,
    process_groups,
    stack_of,
    with_stalled_states,
    without_evicted_states,
)
from dpro.schema import COLLECTIVES, PROCESS_GROUPS, conform

MESSAGE = {
    "op": "recv", "group": "4", "peer": 0, "sequence": 3, "bytes": 16, "dtype": "float32", "enqueued_ns": 70,
    "state": "scheduled",
}  # fmt: skip
GROUPS = {"4": [2, 5]}


def test_a_message_is_a_row_with_its_peer_as_a_global_rank(tmp_path):
    (tmp_path / "stall.json").write_text(
        json.dumps({"groups": GROUPS, "messages": [MESSAGE], "stack": ["job.py:3 main"]})
    )
    (row,) = conform(COLLECTIVES, message_rows(tmp_path, 5)).to_dicts()
    assert (row["rank"], row["op"], row["peer"], row["sequence"]) == (5, "recv", 2, 3)
    assert (row["bytes_in"], row["bytes_out"], row["state"]) == (0, 16, "scheduled")
    assert stack_of(tmp_path) == "job.py:3 main"


def test_messages_of_a_window_are_rows_with_ids_of_their_own(tmp_path):
    (tmp_path / "messages0003.json").write_text(
        json.dumps({"groups": GROUPS, "messages": [MESSAGE, MESSAGE | {"sequence": 4}]})
    )
    rows = messages_in_window(tmp_path / "messages0003.json", 5, 3)
    assert rows.select("peer", "sequence", "group_ranks").rows() == [(2, 3, "2,5"), (2, 4, "2,5")]
    (tmp_path / "stall.json").write_text(json.dumps({"groups": GROUPS, "messages": [MESSAGE], "stack": []}))
    ids = [*rows["collective_id"], *message_rows(tmp_path, 5)["collective_id"]]
    assert len(set(ids)) == 3
    assert messages_in_window(tmp_path / "messages0004.json", 5, 4).is_empty()


def test_messages_that_an_earlier_version_saved_are_read(tmp_path):
    saved = [MESSAGE | {"ranks": [2, 5]}]
    (tmp_path / "messages0003.json").write_text(json.dumps(saved))
    (tmp_path / "stall.json").write_text(json.dumps({"messages": saved, "stack": []}))
    for rows in (messages_in_window(tmp_path / "messages0003.json", 5, 3), message_rows(tmp_path, 5)):
        assert rows.select("peer", "group_ranks").rows() == [(2, "2,5")]


def test_a_process_that_never_stood_still_has_neither_messages_nor_stack(tmp_path):
    assert message_rows(tmp_path, 0).is_empty()
    assert stack_of(tmp_path) == ""
    assert process_groups(tmp_path, 0).is_empty()


def test_the_latest_dump_gives_groups_and_when_it_was_last_found_unchanged(tmp_path):
    for saved_ns, enqueued in ((20, 8), (10, 7)):
        said = pl.DataFrame({"rank": [-1], "group": ["3 dp"], "enqueued": [enqueued], "saved_ns": [saved_ns]})
        keep_groups(tmp_path, "fr", conform(PROCESS_GROUPS, said))
    (tmp_path / "groups.json").write_text(json.dumps({"3": [0, 2]}))
    (tmp_path / "checked").write_text("50")
    (row,) = process_groups(tmp_path, 2).to_dicts()
    assert (row["rank"], row["group_ranks"], row["enqueued"], row["saved_ns"]) == (2, "0,2", 8, 50)


def test_what_a_later_dump_has_lost_unfinished_is_unknown():
    frame = pl.DataFrame(
        {
            "collective_id": [0, 2, 4, 2, 4, 6],
            "state": ["scheduled", "scheduled", "completed", "completed", "completed", "scheduled"],
            "saved_ns": [10, 10, 10, 20, 20, 20],
        }
    )
    assert without_evicted_states(frame)["state"].to_list() == [
        "", "scheduled", "completed", "completed", "completed", "scheduled"
    ]  # fmt: skip


def test_what_a_process_that_failed_stood_still_in_stays_unfinished_unless_its_group_went_on():
    def entries(*rows: tuple[int, str, str]) -> pl.DataFrame:
        return pl.DataFrame(rows, schema=["collective_id", "group", "state"], orient="row")

    stalls = entries((0, "a", "completed"), (2, "a", "scheduled"), (4, "b", "started"), (6, "c", "scheduled"))
    latest = entries(
        (0, "a", "completed"),
        (2, "a", "completed"),  # failed: PyTorch calls that completed
        (4, "b", "completed"),
        (6, "c", "completed"),
        (8, "c", "completed"),  # c went on
    )
    states = with_stalled_states(latest, stalls)["state"].to_list()
    assert states == ["completed", "scheduled", "started", "completed", "completed"]


def test_a_message_whose_handle_went_while_it_stood_still_is_unfinished_only_if_it_is_the_last(tmp_path):
    closed = MESSAGE | {"state": "closed", "enqueued_ns": 70}
    (tmp_path / "stall.json").write_text(json.dumps({"messages": [closed], "stack": []}))
    assert message_rows(tmp_path, 5, 60)["state"].to_list() == ["scheduled"]
    assert message_rows(tmp_path, 5, 80)["state"].to_list() == ["completed"]
    assert message_rows(tmp_path, 5)["state"].to_list() == ["completed"]


def test_a_message_that_a_process_waited_for_has_come_if_it_ended_well(tmp_path):
    (tmp_path / "stall.json").write_text(json.dumps({"groups": GROUPS, "messages": [MESSAGE], "stack": []}))
    assert as_delivered(message_rows(tmp_path, 5))["state"].to_list() == ["completed"]


def test_a_stack_from_before_the_last_step_is_ignored(tmp_path):
    (tmp_path / "stall.json").write_text(json.dumps({"saved_ns": 50, "messages": [], "stack": ["a.py:1 f"]}))
    assert (stack_of(tmp_path, 40), stack_of(tmp_path, 60)) == ("a.py:1 f", "")
