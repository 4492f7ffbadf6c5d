import os
import signal
import subprocess
import time

import pytest

from dpro.collectors.launch import processes
from dpro.collectors.launch.processes import LaunchedProcess, start_ticks, wait_for_any, watch_folder


@pytest.mark.parametrize(("end", "code"), [("exit 7", 7), ("kill -9 $$", -signal.SIGKILL)])
def test_status_of_a_zombie_is_known(end, code):
    child = subprocess.Popen(["sh", "-c", f"read line; {end}"], stdin=subprocess.PIPE)
    process = LaunchedProcess(child.pid)
    assert not process.ended()
    assert process.status is None
    assert child.stdin is not None
    child.stdin.close()
    wait_for_any([process], timeout_s=10)
    assert process.ended()
    assert process.status is not None
    assert os.waitstatus_to_exitcode(process.status) == code
    child.wait()


def test_kills_for_lack_of_memory_are_counted_where_the_kernel_counts_them(tmp_path, monkeypatch):
    for text, expected in (("pgfault 9\noom_kill 3\nx 1\n", 3), ("pgfault 9\n", 0)):
        (tmp_path / "vmstat").write_text(text)
        monkeypatch.setattr(processes, "VMSTAT", tmp_path / "vmstat")
        assert processes.oom_kills() == expected
    monkeypatch.setattr(processes, "VMSTAT", tmp_path / "nowhere")
    assert processes.oom_kills() == 0


def test_process_that_is_gone_has_ended():
    child = subprocess.Popen(["true"])
    child.wait()
    assert start_ticks(child.pid) == -1
    assert LaunchedProcess(child.pid).ended()


def test_waiting_stops_at_the_timeout():
    begun = time.monotonic()
    wait_for_any([LaunchedProcess(os.getpid())], timeout_s=0.05)
    assert time.monotonic() - begun >= 0.04


def test_waiting_stops_once_something_is_made_in_a_folder(tmp_path):
    changes = watch_folder(tmp_path)
    living = [LaunchedProcess(os.getpid())]
    (tmp_path / "made").mkdir()
    (tmp_path / "other").write_text("")
    wait_for_any(living, 600, changes)
    begun = time.monotonic()
    wait_for_any(living, 0.05, changes)  # nothing since
    assert time.monotonic() - begun >= 0.04
    os.close(changes)


def test_a_folder_that_cannot_be_watched_is_looked_at_all_the_same(tmp_path):
    assert watch_folder(tmp_path / "none") == -1
    wait_for_any([LaunchedProcess(os.getpid())], 0.01, -1)
