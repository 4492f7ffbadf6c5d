"""How long a watched job may stand still, and what a host that others wait for does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpro.collectors.convert import Process
from dpro.detect.findings import Finding
from dpro.watch.activity import Activity, why_silent
from dpro.watch.tail import Tail
from dpro.watch.watcher import BUSY_S, LONGER, MIN_PATIENCE_S, STARTING_S, Watcher

STUCK = Finding("hang.host", "rank", "1", (1,), 1.0, 0.98, 0.0, ())


def watcher_of(folder: Path, num_steps: int, *pauses_s: float) -> Watcher:
    """A watcher of a job that has made some steps, with these pauses between them."""
    watcher = Watcher(folder)
    tail = Tail(Process(folder, {"rank": 1, "host": "elsewhere", "pid": 1}))
    tail.num_updates = num_steps
    watcher.tails = {folder: tail}
    watcher._pauses.extend(pauses_s)
    return watcher


def test_a_job_that_has_made_no_two_steps_may_still_be_compiling(tmp_path):
    assert watcher_of(tmp_path, 1)._patience_s() == STARTING_S


def test_a_job_may_stand_still_as_long_as_its_steps_and_pauses_suggest(tmp_path):
    assert watcher_of(tmp_path, 50, *[0.1] * 50)._patience_s() == MIN_PATIENCE_S
    assert watcher_of(tmp_path, 50, *[4.0] * 50)._patience_s() == 12.0
    assert watcher_of(tmp_path, 50, *[0.1] * 49, 40.0)._patience_s() == LONGER * 40.0


def test_a_host_that_works_is_waited_for_longer_and_others_are_not(tmp_path):
    watcher = watcher_of(tmp_path, 50, *[0.1] * 50)
    watcher.moved_s = time.monotonic() - MIN_PATIENCE_S - 1
    assert not watcher._may_go_on(STUCK)
    watcher._activity._busy = {1: True}
    assert watcher._may_go_on(STUCK)
    assert not watcher._may_go_on(Finding("hang.comm", "group", "0", (1,), 1.0, 0.9, 0.0, ()))
    watcher.moved_s -= BUSY_S
    assert not watcher._may_go_on(STUCK)


def test_a_job_is_judged_when_no_more_answers_come_and_not_while_they_do(tmp_path, monkeypatch):
    now, answered = [1000.0], set()
    monkeypatch.setattr("dpro.watch.watcher.time.monotonic", lambda: now[0])
    watcher = watcher_of(tmp_path, 50, *[0.1] * 50)
    watcher.tails = {
        tmp_path / str(rank): Tail(
            Process(tmp_path / str(rank), {"rank": rank, "host": "elsewhere", "pid": 1})
        )
        for rank in range(3)
    }
    monkeypatch.setattr(watcher._snapshot, "answered", lambda: answered)
    watcher._asked_s = now[0]

    def may_answer(after_s: float, *ranks: int) -> bool:
        now[0] += after_s
        answered.update(tmp_path / str(rank) for rank in ranks)
        for tail in watcher.tails.values():
            tail.heard_s = now[0]
        return watcher._some_may_answer()

    assert may_answer(3.0)
    assert may_answer(0.9, 0)
    assert may_answer(3.9)  # long since it was asked, but not since one answered
    assert may_answer(0.0, 1)
    assert not may_answer(4.1)
    assert not may_answer(0.0, 2)  # all have


@pytest.fixture
def process() -> Iterator[Any]:
    running: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> Tail:
        running.append(subprocess.Popen([sys.executable, "-c", code]))
        facts = {"rank": len(running), "host": socket.gethostname(), "pid": running[-1].pid}
        return Tail(Process(Path(), facts))

    yield start
    for each in running:
        each.kill()
        each.wait()


def test_a_process_that_computes_or_writes_is_busy_and_one_that_sleeps_is_not(process):
    computing = process("while True: pass")
    writing = process(
        "f = open('/dev/null', 'wb')\nimport time\nwhile True: f.write(bytes(1 << 20)); time.sleep(.01)"
    )
    sleeping = process("import time; time.sleep(100)")
    tails, activity = [computing, writing, sleeping], Activity()
    deadline = time.monotonic() + 60
    activity.sample(tails)
    assert not any(activity.is_busy(rank) for rank in (1, 2, 3))  # nothing is known yet
    while not (activity.is_busy(1) and activity.is_busy(2) and not activity.is_busy(3)):
        assert time.monotonic() < deadline
        time.sleep(0.5)
        activity.sample(tails)


def test_why_a_process_says_nothing_is_what_the_kernel_knows_of_it(process):
    stopped = process("import time; time.sleep(100)").process
    os.kill(stopped.facts["pid"], signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while why_silent(stopped) != "it is stopped (SIGSTOP)":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ended = process("").process
    while "has ended" not in why_silent(ended):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "runs on elsewhere" in why_silent(Process(Path(), {"rank": 0, "host": "elsewhere", "pid": 1}))


def test_of_processes_of_other_hosts_nothing_is_known(tmp_path):
    activity = Activity()
    tail = Tail(Process(tmp_path, {"rank": 0, "host": "elsewhere", "pid": 1}))
    activity.sample([tail])
    activity.sample([tail])
    assert not activity.is_busy(0)


def test_watching_needs_no_torch():
    """It may run on a machine that has none, and would take seconds to start."""
    code = "import sys, dpro.watch.watcher, dpro.watch.outlets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
