"""Findings of a watched job are told once, and once more when they are over."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dpro.analysis.told import BEGINS, ENDS, FILE, read_findings
from dpro.cli.job.watch import in_words
from dpro.detect.findings import Finding
from dpro.watch.ledger import FindingsFile, Ledger, Notice


def slow(rank: int, class_: str = "slow.host") -> Finding:
    return Finding(class_, "rank", str(rank), (rank,), 0.2, 0.9, 5e6, ("evidence",))


def told(notices: list[Notice]) -> list[tuple[str, int, str]]:
    return [(notice.event, notice.number, notice.finding.component_id) for notice in notices]


def test_a_finding_is_told_once_while_it_lasts_and_again_when_it_is_over():
    ledger = Ledger()
    assert told(ledger.observe("late", [slow(1)], 10, 5, "over")) == [(BEGINS, 1, "1")]
    assert ledger.observe("late", [slow(1)], 14, 5, "over") == []
    assert ledger.observe("late", [], 19, 5, "over") == []  # may just be missing
    [end] = ledger.observe("late", [], 20, 5, "over")
    assert (end.event, end.number, end.why) == (ENDS, 1, "over")
    assert told(ledger.observe("late", [slow(1)], 30, 5, "over")) == [(BEGINS, 2, "1")]


def test_another_cause_within_the_same_rank_is_the_same_finding():
    ledger = Ledger()
    ledger.observe("late", [slow(1)], 10, 5, "")
    assert ledger.observe("late", [slow(1, "slow.compute")], 11, 5, "") == []


def test_what_one_detector_does_not_find_another_may_have_found():
    ledger = Ledger()
    ledger.observe("late", [slow(1)], 10, 0, "")
    hang = Finding("hang.host", "rank", "2", (2,), 1.0, 0.9, 0.0, ())
    assert told(ledger.observe("hangs", [hang], 50, 0, "")) == [(BEGINS, 2, "2")]
    assert told(ledger.close("hangs", 51, "moves on")) == [(ENDS, 2, "2")]
    assert told(ledger.close(None, 52, "ended")) == [(ENDS, 1, "1")]
    assert ledger.findings == []


def test_findings_are_kept_in_the_run_by_the_first_watcher_alone(tmp_path):
    first, second = FindingsFile(tmp_path), FindingsFile(tmp_path)
    assert (first.is_mine, second.is_mine) == (True, False)
    [begin] = Ledger(7).observe("late", [slow(3)], 12, 5, "")
    for each in (first, second):
        each.write(begin)
    [line] = read_findings(tmp_path)
    assert (line["number"], line["event"], line["class"], line["ranks"]) == (7, BEGINS, "slow.host", [3])
    assert line["cost_ms_per_step"] == 5.0


def test_a_watcher_that_takes_over_tells_nothing_twice_and_ends_what_another_began(tmp_path):
    first, ledger = FindingsFile(tmp_path), Ledger()
    told = [
        *ledger.observe("late", [slow(1), slow(3)], 10, 5, ""),
        *ledger.observe("late", [slow(1)], 20, 5, "over"),
    ]
    for notice in told:
        first.write(notice)
    del first  # killed
    again = Ledger()
    again.resume(read_findings(tmp_path))
    assert again.observe("late", [slow(1)], 21, 5, "") == []
    assert [(each.number, each.finding) for each in again.observe("late", [slow(3)], 22, 5, "")] == [
        (3, slow(3))
    ]
    [end] = again.observe("late", [slow(3)], 30, 5, "over")
    assert (end.event, end.number, end.finding) == (ENDS, 1, slow(1))


def test_a_line_that_the_disk_had_no_room_for_spoils_none_that_follows(tmp_path, monkeypatch):
    ledger, kept = Ledger(), FindingsFile(tmp_path)
    notices = ledger.observe("late", [slow(1), slow(2), slow(3)], 10, 5, "")
    kept.write(notices[0])
    whole, kept._file = kept._file, Full(kept._file)
    with pytest.raises(OSError, match="No space"):
        kept.write(notices[1])
    kept._file = whole
    kept.write(notices[2])
    assert [each["number"] for each in read_findings(tmp_path)] == [1, 3]


class Full:
    """A file on a disk that is full in the middle of a line."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def tell(self) -> int:
        return self._file.tell()

    def write(self, content: bytes) -> int:
        return self._file.write(content[:10])


def test_lines_that_were_cut_off_are_left_out(tmp_path):
    FindingsFile(tmp_path)
    (tmp_path / "findings" / FILE).write_text(json.dumps({"number": 1}) + '\n{"num')
    assert read_findings(tmp_path) == [{"number": 1}]
    assert read_findings(tmp_path / "nowhere") == []


def test_numbers_that_are_none_are_null_and_are_read_again():
    odd = Finding("slow.host", "rank", "1", (1,), math.inf, math.nan, math.nan, ())
    [begin] = Ledger().observe("late", [odd], 10, 5, "")
    document = json.loads(json.dumps(begin.document(), allow_nan=False))
    assert (document["severity"], document["confidence"], document["cost_ms_per_step"]) == (None, None, None)
    ledger = Ledger()
    ledger.resume([document])
    assert ledger.findings[0].ranks == (1,)
    assert in_words(begin)[0].endswith("slow.host: rank 1; confidence nan")
