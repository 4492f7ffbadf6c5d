"""What a host that others wait for does, as its kernel shows."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.extensions.watch.hang import HostActivity
from dpro.extensions.watch.job import ProcessTail


@pytest.fixture
def process() -> Iterator[Callable[[str], ProcessTail]]:
    running: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> ProcessTail:
        running.append(subprocess.Popen([sys.executable, "-c", code]))
        facts = {"rank": len(running), "host": socket.gethostname(), "pid": running[-1].pid}
        return ProcessTail(RecordedProcess(Path(), facts))

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
    tails, activity = [computing, writing, sleeping], HostActivity()
    deadline = time.monotonic() + 60
    activity.sample(tails)
    assert not any(activity.is_busy(rank) for rank in (1, 2, 3))  # nothing is known yet
    while not (activity.is_busy(1) and activity.is_busy(2) and not activity.is_busy(3)):
        assert time.monotonic() < deadline
        time.sleep(0.5)
        activity.sample(tails)


def test_of_processes_of_other_hosts_nothing_is_known(tmp_path):
    activity = HostActivity()
    tail = ProcessTail(RecordedProcess(tmp_path, {"rank": 0, "host": "elsewhere", "pid": 1}))
    activity.sample([tail])
    activity.sample([tail])
    assert not activity.is_busy(0)
