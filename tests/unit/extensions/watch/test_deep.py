"""When deep windows are looked at while a job runs."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.detect.findings import Finding
from dpro.detect.observations import observe
from dpro.errors import Unanswerable
from dpro.extensions.watch import deep
from dpro.extensions.watch.command import _after_look
from dpro.extensions.watch.deep import (
    SETTLED_S,
    DeepState,
    DeepWatch,
    DeepWatchPhase,
    after_look,
    next_state,
    saved_windows,
)
from dpro.extensions.watch.job import OPEN_NS, ProcessTail
from dpro.topology.file import FILE
from dpro.topology.kept import PATHS

SLOW = Finding("slow.link", "link", "0-1", (0, 1), 0.2, 0.9, 5e6, (observe("test", "evidence"),))


def tail(folder: Path, rank: int, *windows: int, still_open: int = -1) -> ProcessTail:
    own = folder / str(rank)
    own.mkdir()
    one = ProcessTail(RecordedProcess(own, {"rank": rank}))
    one.windows.extend((number, number, number + 1) for number in windows)
    if still_open >= 0:
        one.windows.append((still_open, 5, OPEN_NS))
    for number in windows:
        (own / f"window{number:04d}.json").write_text("0123456789")
    return one


def test_only_windows_that_all_ranks_have_saved_count(tmp_path):
    tails = [tail(tmp_path, 0, 1, 2, 3), tail(tmp_path, 1, 2, still_open=3)]
    assert saved_windows(tails) == {2}
    assert saved_windows([]) == set()
    assert saved_windows(tails, since_ns=1) == {2}  # it began at 2
    assert saved_windows(tails, since_ns=2) == set()


def test_a_window_is_looked_at_when_its_calls_have_had_time_to_come():
    settling = next_state(DeepState(), 3, 100.0)
    assert settling == DeepState(DeepWatchPhase.SETTLING, newest=3, newest_s=100.0)
    assert next_state(settling, 3, 100.0 + 0.9 * SETTLED_S) == settling
    again = next_state(settling, 4, 100.0 + 0.9 * SETTLED_S)  # another one is saved: its calls are to come
    assert next_state(again, 4, 100.0 + SETTLED_S).phase is DeepWatchPhase.SETTLING
    looking = next_state(settling, 3, 100.0 + SETTLED_S)
    assert (looking.phase, looking.diagnosed) == (DeepWatchPhase.LOOKING, 3)
    assert next_state(looking, 4, 200.0) == looking  # one look at a time


def test_a_window_is_looked_at_once_and_looks_take_a_share_of_the_time():
    state = after_look(
        DeepState(DeepWatchPhase.LOOKING, newest=3, newest_s=100.0, diagnosed=3), 110.0, took_s=5.0
    )
    assert (state.phase, state.due_s) == (DeepWatchPhase.WAITING, 210.0)
    assert next_state(state, 3, 300.0) == state
    assert next_state(state, 4, 150.0).phase is DeepWatchPhase.SETTLING
    assert next_state(next_state(state, 4, 150.0), 4, 210.0).phase is DeepWatchPhase.LOOKING


def test_a_window_that_was_asked_for_is_looked_at_before_the_next_look_is_due():
    state = DeepState(newest=3, newest_s=100.0, diagnosed=3, due_s=900.0, asked_after=3)
    settling = next_state(state, 4, 200.0)
    assert settling.phase is DeepWatchPhase.SETTLING
    looking = next_state(settling, 4, 200.0 + SETTLED_S)
    assert (looking.phase, looking.asked_after) == (DeepWatchPhase.LOOKING, None)
    later = after_look(looking, 210.0, took_s=5.0)  # one without a request waits again
    assert next_state(next_state(later, 5, 220.0), 5, 300.0).phase is DeepWatchPhase.SETTLING


def test_a_window_that_was_saved_before_the_request_waits_until_a_look_is_due():
    state = DeepState(newest=4, newest_s=100.0, diagnosed=3, due_s=900.0, asked_after=4)
    assert next_state(state, 4, 200.0).phase is DeepWatchPhase.SETTLING


def test_another_request_does_not_delay_the_window_that_was_asked_for_before_it(tmp_path):
    watch = DeepWatch(tmp_path)
    watch.state = DeepState(newest=3, diagnosed=3, due_s=900.0)
    watch.hurry()
    watch.state = next_state(watch.state, 4, 200.0)
    watch.hurry()  # for another reason, while the calls of window 4 are to come
    assert next_state(watch.state, 4, 200.0 + SETTLED_S).phase is DeepWatchPhase.LOOKING


@pytest.fixture
def looks(tmp_path, monkeypatch) -> DeepWatch:
    """Looks that a stand-in for the command answers, with its arguments as evidence."""
    observed = "[{'kind': 'test', 'text': word, 'values': {'shown': word}} for word in sys.argv[5:]]"
    said = f"{{'findings': [{dataclasses.asdict(SLOW)!r} | {{'observations': {observed}}}]}}"
    code = f"import json, sys; print(json.dumps({said}))"
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\n{code}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setattr(deep, "SETTLED_S", 0.0)
    return DeepWatch(tmp_path / "run")


def found_by(looks: DeepWatch, tails: list[ProcessTail]) -> list[Finding]:
    deadline = time.monotonic() + 60
    while (found := looks.look(tails)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_windows_are_looked_at_together_when_there_is_a_new_one_and_not_again(looks, tmp_path, monkeypatch):
    monkeypatch.setattr(deep, "SHARE", 1e9)
    tails = [tail(tmp_path, 0, 1, 2), tail(tmp_path, 1, 1, 2)]
    [found] = found_by(looks, tails)
    words = ("--window", "2", "--window", "1")
    observed = tuple(observe("test", "{shown}", shown=word) for word in words)
    assert found == dataclasses.replace(SLOW, observations=observed)
    assert [looks.look(tails) for _ in range(3)] == [None] * 3
    assert looks.state.phase is DeepWatchPhase.WAITING
    for one in tails:
        one.windows.append((4, 4, 5))
        (one.process.folder / "window0004.json").touch()
        (one.process.folder / "window0004.json").write_text("x")
        (one.process.folder / "window0001.json").unlink()  # was converted
    assert found_by(looks, tails)[0].evidence == ("--window", "4", "--window", "2")


def test_windows_from_before_the_job_slowed_down_or_took_other_paths_are_left_out(looks, tmp_path):
    tails = [tail(tmp_path, 0, 1, 2), tail(tmp_path, 1, 1, 2)]
    for one in tails:
        one.windows[-1] = (2, 50, 60)
    assert looks.look(tails, since_ns=60) is None
    assert looks.state.phase is DeepWatchPhase.WAITING
    (tmp_path / "run").mkdir()
    paths = tmp_path / "run" / PATHS
    paths.touch()
    assert looks.look(tails) is None  # both are older than the file
    os.utime(paths, ns=(40, 40))
    assert found_by(looks, tails)[0].evidence == ("--window", "2")


def test_windows_from_before_a_request_are_left_out_since_something_changed_after_them(looks, tmp_path):
    tails = [tail(tmp_path, 0, 1, 2), tail(tmp_path, 1, 1, 2)]
    looks.state = DeepState(newest=1, diagnosed=1, due_s=900.0)
    looks.hurry()
    assert found_by(looks, tails)[0].evidence == ("--window", "2")


def test_the_fabric_of_a_run_goes_with_its_windows(tmp_path):
    run, to = tmp_path / "run", tmp_path / "to"
    run.mkdir()
    to.mkdir()
    (run / FILE).write_text("fabric")
    (run / PATHS).write_text("paths")
    deep._copy(run, [1], [], to)
    assert {file.name: file.read_text() for file in to.iterdir()} == {FILE: "fabric", PATHS: "paths"}


def test_a_look_whose_files_were_removed_meanwhile_finds_nothing(looks, tmp_path):
    tails = [tail(tmp_path, 0, 1)]
    (tmp_path / "python").write_text('#!/bin/sh\necho \'{"error": "the run holds no spans"}\'\n')
    assert looks.look(tails) is None
    assert looks.state.phase is DeepWatchPhase.LOOKING
    deadline = time.monotonic() + 60
    while looks.state.phase is DeepWatchPhase.LOOKING:
        assert time.monotonic() < deadline
        assert looks.look(tails) is None
        time.sleep(0.01)


def test_of_windows_as_many_are_looked_at_as_can_be_and_one_that_is_too_large_is_said(
    looks, tmp_path, monkeypatch
):
    tails = [tail(tmp_path, 0, 1, 2), tail(tmp_path, 1, 1, 2)]
    monkeypatch.setattr(deep, "MAX_BYTES", 30)
    assert found_by(looks, tails)[0].evidence == ("--window", "2")
    monkeypatch.setattr(deep, "MAX_BYTES", 10)
    with pytest.raises(Unanswerable, match="are too large to diagnose while the job runs"):
        DeepWatch(tmp_path / "run").look(tails)


def test_what_limits_the_job_is_said_when_it_is_known_and_another_one():
    lines: list[str] = []
    life = SimpleNamespace(look=lambda: False, latest=None)
    seen = _after_look(None, life, lines.append)
    for kind, limit in (
        ("", ""),
        ("host", "the host (9 launches). 2 ms"),
        ("host", "the host (8 launches). 2 ms"),
        ("", ""),
        ("compute", "compute: 90% (gemm)."),
    ):
        seen(SimpleNamespace(deep=SimpleNamespace(limit=limit, limit_kind=kind)))
    assert lines == [
        "What limits the job is the host (9 launches). 2 ms",
        "What limits the job is compute: 90% (gemm).",
    ]
