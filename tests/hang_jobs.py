"""Real jobs that hang: recorded, ended when their ranks have saved what they wait for, and diagnosed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.jobs import PATIENCE_S, ROOT, TORCHRUN, TWO_RANKS, environment, head_start

JOB = ROOT / "tests" / "hanging.py"


def torchrun(_folder: Path, num_ranks: int) -> list[str]:
    return [*TORCHRUN[:-1], str(num_ranks), "--standalone", str(JOB)]


def quickly(folder: Path, num_ranks: int) -> list[str]:
    return [*TWO_RANKS[:-1], str(num_ranks), head_start(folder, JOB)]


def diagnosed(
    folder: Path,
    fault: str,
    *options: str,
    num_ranks: int = 4,
    spawn: bool = False,
    launch: Callable[[Path, int], list[str]] = torchrun,
    end: Callable[[subprocess.Popen[bytes]], None] | None = None,
    record: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Record a job with a fault, end it when it hangs, and diagnose the recording.

    Args:
        folder: where to.
        fault: what goes wrong.
        options: of the job.
        num_ranks: number of ranks.
        spawn: start ranks by `torch.multiprocessing`.
        launch: how to start them otherwise.
        end: ends the job when it hangs; kills its ranks where not given.
        record: options of `dpro record`.
    """
    run, mark = folder / "run", folder / "went-wrong"
    job = [sys.executable, str(JOB), "--spawn", str(num_ranks)] if spawn else launch(folder, num_ranks)
    recorder = [sys.executable, "-m", "dpro", "record", "-o", str(run), *record]
    command = [*recorder, "--", *job, fault, str(mark), *options]
    port = {"MASTER_PORT": str(20000 + os.getpid() % 20000)} if spawn else {}
    recording = subprocess.Popen(
        command, env=environment(**port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_until_ended_or_saved(recording, run, mark)
        if end is not None and recording.poll() is None:
            end(recording)
            recording.wait(90)
    finally:
        kill_ranks(run)
        recording.wait(30)
    done = subprocess.run(
        [sys.executable, "-m", "dpro", "diagnose", str(run), "--json"],
        env=environment(), capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def ctrl_c(recording: subprocess.Popen[bytes]) -> None:
    """What a terminal does: SIGINT to all processes of the job."""
    os.killpg(recording.pid, signal.SIGINT)


def terminate(recording: subprocess.Popen[bytes]) -> None:
    """What `kill` does: SIGTERM to the launcher."""
    recording.terminate()


def scancel(recording: subprocess.Popen[bytes]) -> None:
    """What a scheduler does: SIGTERM to all, and SIGKILL to who is left."""
    os.killpg(recording.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        recording.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(recording.pid, signal.SIGKILL)


def wait_until_ended_or_saved(recording: subprocess.Popen[bytes], run: Path, mark: Path) -> None:
    """Until the job is over, or two of its ranks have saved what they wait for, well after the fault."""
    deadline = time.monotonic() + PATIENCE_S
    while recording.poll() is None and time.monotonic() < deadline:
        saved = [path.stat().st_mtime for path in run.glob(".raw/*/*/stall.json")]
        if mark.exists() and sum(each > mark.stat().st_mtime + 10 for each in saved) >= 2:
            return
        time.sleep(0.2)
    assert recording.poll() is not None, "the job neither ended nor hung"


def kill_ranks(run: Path) -> None:
    """Kill the ranks at once, and nothing else: their launcher then ends by itself."""
    pids = []
    for path in run.glob(".raw/*/*/facts.json"):
        with suppress(OSError, ValueError):
            pids.append(json.loads(path.read_text())["pid"])
    launchers = {parent for pid in pids if (parent := _parent_of(pid)) > 1}
    # Launchers stand still meanwhile: else they end those that are left by another signal.
    for number, targets in ((signal.SIGSTOP, launchers), (signal.SIGKILL, pids), (signal.SIGCONT, launchers)):
        for pid in targets:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _parent_of(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
