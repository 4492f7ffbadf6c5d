"""Each finding of a watched job is reported once when it begins and once when it ends."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from dpro.detect.findings import Finding
from dpro.detect.findings_log import (
    BEGINS,
    ENDS,
    FILE,
    JOB_ENDED,
    FindingsLog,
    Notice,
    NoticeDocument,
    OpenFindings,
    describe_logged,
    logged_findings,
    read_log,
    watch_document,
)
from dpro.detect.observations import observe
from dpro.documents import encode
from dpro.extensions.watch.command import in_words


def slow(rank: int, class_: str = "slow.host") -> Finding:
    return Finding(
        class_,
        "rank",
        str(rank),
        (rank,),
        0.2,
        0.9,
        5e6,
        (observe("waits", "it waits {waited_ns}", waited_ns=5e6),),
    )


def events(notices: list[Notice]) -> list[tuple[str, int, str]]:
    return [(notice.event, notice.number, notice.finding.component_id) for notice in notices]


def test_a_finding_is_reported_once_while_it_lasts_and_again_when_it_ends():
    findings = OpenFindings()
    assert events(findings.observe("late", [slow(1)], 10, 5, "over")) == [(BEGINS, 1, "1")]
    assert findings.observe("late", [slow(1)], 14, 5, "over") == []
    assert findings.observe("late", [], 19, 5, "over") == []  # may just be missing
    [end] = findings.observe("late", [], 20, 5, "over")
    assert (end.event, end.number, end.why) == (ENDS, 1, "over")
    assert events(findings.observe("late", [slow(1)], 30, 5, "over")) == [(BEGINS, 2, "1")]


def test_another_cause_within_the_same_rank_is_the_same_finding():
    findings = OpenFindings()
    findings.observe("late", [slow(1)], 10, 5, "")
    assert findings.observe("late", [slow(1, "slow.compute")], 11, 5, "") == []


def test_what_one_detector_does_not_find_another_may_have_found():
    findings = OpenFindings()
    findings.observe("late", [slow(1)], 10, 0, "")
    hang = Finding("hang.host", "rank", "2", (2,), 1.0, 0.9, 0.0, ())
    assert events(findings.observe("hangs", [hang], 50, 0, "")) == [(BEGINS, 2, "2")]
    assert events(findings.close("hangs", 51, "moves on")) == [(ENDS, 2, "2")]
    assert events(findings.close(None, 52, "ended")) == [(ENDS, 1, "1")]
    assert findings.findings == []


def test_findings_are_kept_in_the_run_by_the_first_watcher_alone(tmp_path):
    first, second = FindingsLog(tmp_path), FindingsLog(tmp_path)
    assert (first.is_writer, second.is_writer) == (True, False)
    [begin] = OpenFindings(7).observe("late", [slow(3)], 12, 5, "")
    for each in (first, second):
        each.write(begin)
    [line] = read_log(tmp_path)
    assert (line.number, line.event, line.class_, line.ranks) == (7, BEGINS, "slow.host", [3])
    assert line.cost_ms_per_step == 5.0


def test_a_watcher_that_takes_over_reports_nothing_twice_and_ends_what_another_began(tmp_path):
    first, findings = FindingsLog(tmp_path), OpenFindings()
    notices = [
        *findings.observe("late", [slow(1), slow(3)], 10, 5, ""),
        *findings.observe("late", [slow(1)], 20, 5, "over"),
    ]
    for notice in notices:
        first.write(notice)
    del first  # killed
    again = OpenFindings()
    again.resume(read_log(tmp_path))
    assert again.observe("late", [slow(1)], 21, 5, "") == []
    assert [(each.number, each.finding) for each in again.observe("late", [slow(3)], 22, 5, "")] == [
        (3, slow(3))
    ]
    [end] = again.observe("late", [slow(3)], 30, 5, "over")
    assert (end.event, end.number, end.finding) == (ENDS, 1, slow(1))


def test_a_line_that_the_disk_had_no_room_for_spoils_none_that_follows(tmp_path, monkeypatch):
    findings, kept = OpenFindings(), FindingsLog(tmp_path)
    notices = findings.observe("late", [slow(1), slow(2), slow(3)], 10, 5, "")
    kept.write(notices[0])
    whole, kept._file = kept._file, Full(kept._file)
    with pytest.raises(OSError, match="No space"):
        kept.write(notices[1])
    kept._file = whole
    kept.write(notices[2])
    assert [each.number for each in read_log(tmp_path)] == [1, 3]


class Full:
    """A file on a disk that is full in the middle of a line."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: bytes) -> int:
        return self._file.write(content[:10])


def test_lines_that_were_cut_off_are_left_out(tmp_path):
    [begin] = OpenFindings().observe("late", [slow(1)], 10, 5, "")
    FindingsLog(tmp_path).write(begin)
    with (tmp_path / "findings" / FILE).open("ab") as file:
        file.write(b'{"number": 1}\n{"num\xff')
    assert read_log(tmp_path) == [begin.document()]
    assert read_log(tmp_path / "nowhere") == []


def test_numbers_that_are_none_are_null_and_are_read_again():
    odd = Finding("slow.host", "rank", "1", (1,), math.inf, math.nan, math.nan, ())
    [begin] = OpenFindings().observe("late", [odd], 10, 5, "")
    document = msgspec.json.decode(encode(begin.document()), type=NoticeDocument)
    assert (document.severity, document.confidence, document.cost_ms_per_step) == (None, None, None)
    findings = OpenFindings()
    findings.resume([document])
    assert findings.findings[0].ranks == (1,)
    assert in_words(begin)[0].endswith("slow host work: rank 1; confidence nan")


def test_a_line_of_the_watch_is_that_of_the_log_with_its_run(tmp_path):
    [begin] = OpenFindings().observe("late", [slow(1)], 10, 5, "")
    line = json.loads(encode(watch_document(tmp_path, begin)))
    assert line == {"run": str(tmp_path), **json.loads(encode(begin.document()))}
    assert (line["class"], line["component"]) == ("slow.host", {"kind": "rank", "id": "1"})
    assert (line["event"], line["detector"], line["cause"], line["why"]) == (BEGINS, "late", "", "")


def test_how_a_finding_ended_is_said(tmp_path):
    log, findings = FindingsLog(tmp_path), OpenFindings()
    notices = findings.observe("late", [slow(1), slow(2)], 10, 0, "")
    notices += findings.observe("late", [slow(2)], 11, 0, "it is hardly later than its peers now")
    notices += findings.close(None, 12, JOB_ENDED)
    for notice in notices:
        log.write(notice)
    gone, held = describe_logged(logged_findings(tmp_path))
    assert "slow host work: rank 1, withdrawn at" in gone
    assert gone.endswith("because it is hardly later than its peers now")
    assert "slow host work: rank 2, held until the job ended at" in held
