"""What ends the jobs of tests that failed."""

from __future__ import annotations

import os
import signal
import subprocess

from tests.jobs import PATIENCE_S, kill_left


def test_processes_that_inherited_the_mark_are_killed_and_no_others():
    marked, other = (
        subprocess.Popen(["sh", "-c", "sleep 1000; true"], env=os.environ | {"TESTED_BY": mark})
        for mark in ("1 job", "1 job of others")
    )
    try:
        kill_left("TESTED_BY=1 job")
        assert marked.wait(PATIENCE_S) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        kill_left("TESTED_BY=1 job of others")
    assert other.wait(PATIENCE_S) == -signal.SIGKILL
