"""The watcher: what five watches find of one job, each thing reported once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpro.detect.findings import Finding
from dpro.detect.findings_log import BEGINS, ENDS, Notice
from dpro.errors import Unanswerable
from dpro.extensions.watch import watcher as watching
from dpro.extensions.watch.watcher import Watcher, watch

STUCK = Finding("hang.host", "rank", "1", (1,), 1.0, 0.98, 0.0, ())


def slow(rank: int) -> Finding:
    return Finding("slow.host", "rank", str(rank), (rank,), 0.2, 0.9, 5e6, ())


class PlayedJob:
    """A job of which a test says what is seen."""

    def __init__(self, run: Path) -> None:
        self.run, self.tails, self.step, self.still_s, self.begins_again = run, {run: object()}, 5, 0.0, False

    def follow(self) -> bool:
        return self.begins_again

    def read(self) -> None:
        pass

    def lives(self) -> bool:
        return self.step < 8


class PlayedWatch:
    """A watch that finds what a test says."""

    def __init__(self, *_: Any) -> None:
        self.found: list[Finding] | None = None
        self.error: Exception | None = None
        self.since_ns, self.hurries = 0, 0
        self.unclear: list[Finding] = []

    def look(self, _: object, since_ns: int = 0) -> list[Finding] | None:
        self.since_ns = since_ns
        if self.error is not None:
            raise self.error
        return self.found

    def close(self) -> None:
        pass

    def hurry(self) -> None:
        self.hurries += 1


@pytest.fixture
def watcher(tmp_path, monkeypatch) -> Watcher:
    for name in ("HangWatch", "LateWatch", "DeepWatch", "MemoryWatch", "NumberWatch"):
        monkeypatch.setattr(watching, name, PlayedWatch)
    monkeypatch.setattr(watching, "Job", PlayedJob)
    return Watcher(tmp_path)


def events(notices: list[Notice]) -> list[tuple[str, str, str]]:
    return [(each.event, each.source, each.finding.component_id) for each in notices]


def test_an_error_in_one_watch_loses_no_notice_of_those_before_it(watcher):
    watcher.late.found, watcher.memory.error = [slow(1)], OSError("no process can be started")
    reported, errors = [], []

    def after_look(watcher):
        watcher.job.step = 8

    watch(watcher, 0.001, reported.append, after_look, errors.append)
    assert events(reported) == [(BEGINS, "late", "1"), (ENDS, "late", "1")]
    assert [str(error) for error in errors] == ["no process can be started"]


def test_a_hang_is_over_when_the_job_moves_on(watcher):
    watcher.job.still_s, watcher.hang.found = 20.0, [STUCK]
    assert events([*watcher.look()]) == [(BEGINS, "hangs", "1")]
    watcher.hang.found = None
    assert [*watcher.look()] == []
    watcher.job.still_s = 0.0
    [end] = [*watcher.look()]
    assert (end.event, end.why) == (ENDS, "the job moves on")


def test_late_ranks_and_windows_are_not_looked_at_while_the_job_stands_still(watcher):
    watcher.late.found = watcher.deep.found = [slow(1)]
    watcher.job.still_s = 20.0
    assert [*watcher.look()] == []
    watcher.job.still_s = 0.0
    assert events([*watcher.look()]) == [(BEGINS, "late", "1")]


def test_a_rank_that_one_watch_has_found_another_does_not_report_once_more(watcher):
    watcher.deep.found = [slow(1)]
    assert events([*watcher.look()]) == [(BEGINS, "deep", "1")]
    watcher.deep.found, watcher.late.found = None, [slow(1), slow(2)]
    assert events([*watcher.look()]) == [(BEGINS, "late", "2")]
    watcher.late.found, watcher.deep.found = None, [slow(1), slow(2)]
    assert [*watcher.look()] == []


def test_a_job_that_begins_again_ends_all_findings_and_is_looked_at_again(watcher):
    watcher.late.found = [slow(1)]
    [*watcher.look()]
    before, watcher.job.begins_again = watcher.late, True
    [end] = [*watcher.look()]
    assert (end.event, end.why) == (ENDS, "the job began again")
    assert watcher.late is not before


def test_late_ranks_are_a_reason_to_ask_for_a_window_and_what_windows_show_is_none(watcher):
    asked = []
    watcher._requests = SimpleNamespace(
        look=lambda _, notices, unclear: asked.append(events(notices)),
        forget=lambda: asked.append("forgotten"),
        slower_since_ns=0,
    )
    watcher.late.found, watcher.deep.found = [slow(1)], [slow(2)]
    [*watcher.look()]
    watcher.job.still_s = 20.0
    [*watcher.look()]
    watcher.job.begins_again = True
    [*watcher.look()]
    assert asked == [[(BEGINS, "late", "1")], "forgotten"]


def test_a_window_that_is_asked_for_is_looked_at_soon_without_those_before_the_slowdown(watcher):
    watcher._requests = SimpleNamespace(look=lambda *_: True, slower_since_ns=70)
    [*watcher.look()]
    assert (watcher.deep.since_ns, watcher.deep.hurries) == (70, 1)


def test_windows_that_are_too_large_are_remarked_and_end_no_look(watcher):
    watcher.deep.error, watcher.late.found = Unanswerable("too large"), [slow(1)]
    assert events([*watcher.look()]) == [(BEGINS, "late", "1")]
    assert [str(each) for each in watcher.remarks] == ["too large"]


def test_all_findings_end_with_the_job_and_what_ended_a_look_is_complained_of(watcher):
    watcher.late.found = [slow(1)]
    reported, complaints = [], []

    def seen(_: Watcher) -> None:
        watcher.job.step += 1
        watcher.hang.error = OSError("no space")

    watch(watcher, 0.01, reported.append, seen, complaints.append)
    assert events(reported) == [(BEGINS, "late", "1"), (ENDS, "late", "1")]
    assert [str(each) for each in complaints] == ["no space", "no space"]


def test_watching_needs_no_torch():
    """It may run on a machine that has none, and would take seconds to start."""
    modules = "dpro.extensions.watch.watcher, dpro.extensions.watch.outlets"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_memory_that_grows_is_a_notice_of_its_own(watcher):
    watcher.memory.found = [Finding("memory.growth", "host", "n1", (0,), 0.0, 0.9, 0.0, ())]
    assert events([*watcher.look()]) == [(BEGINS, "memory", "n1")]
    watcher.memory.found, watcher.job.step = [], 30
    assert events([*watcher.look()]) == [(ENDS, "memory", "n1")]


def test_numbers_that_go_bad_are_a_notice_of_their_own(watcher):
    watcher.numbers.found = [Finding("loss.not_finite", "rank", "1", (1,), 0.0, 0.98, 0.0, ())]
    assert events([*watcher.look()]) == [(BEGINS, "numbers", "1")]
    watcher.numbers.found = None
    assert [*watcher.look()] == []
