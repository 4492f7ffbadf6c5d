"""How long after a fault `dpro watch` names it, in real jobs on gloo on this machine.

    python -m benchmarks.watch.latency --repeats 3

For a hang, the time since the rank hung, just after its last step; for a rank that becomes slow, the time and
the steps since its first slow step. A healthy job is watched to its end and has to raise nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.recording import ENVIRONMENT, ROOT, TORCHRUN
from dpro.collectors.liveness import wait_until_finished

DPRO = [sys.executable, "-m", "dpro"]
# Name, number of ranks, program and its arguments; MARK is the file in which it records the moment.
SINCE = 20
CASES: dict[str, tuple[int, list[str]]] = {
    "sleeps for ever, 2 ranks": (2, ["hanging.py", "sleep", "MARK", "--flat", "--rank", "1"]),
    "is stopped, 4 ranks": (4, ["hanging.py", "stop", "MARK", "--flat", "--rank", "1"]),
    "1.5 times as slow, steps of 1 s": (2, ["slowing.py", "MARK", "--ms", "1000", "--slow-rank", "1"]),
    "1.5 times as slow, steps of 200 ms": (2, ["slowing.py", "MARK", "--ms", "200", "--slow-rank", "1"]),
    "healthy, 300 steps of 100 ms": (2, ["slowing.py", "MARK"]),
}


def main() -> None:
    """Try each case several times, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for repeat in range(options.repeats):
        for name, (ranks, job) in CASES.items():
            print(f"{repeat + 1}: {name}: {latency(ranks, job)}", flush=True)


def latency(ranks: int, job: list[str]) -> str:
    """Run one job; return the first report and its delay."""
    with TemporaryDirectory(prefix="dpro-latency-") as folder:
        mark = Path(folder) / "mark"
        words = [str(mark) if word == "MARK" else word for word in job]
        slowing = job[0] == "slowing.py"
        steps = ["--steps", "300", "--since", str(SINCE)] if slowing else []
        command = [*TORCHRUN, str(ranks), str(ROOT / "tests" / words[0]), *words[1:], *steps]
        recording, watcher = start(folder, command)
        line = watcher.stdout.readline()  # type: ignore[union-attr]
        document = json.loads(line) if line else {}
        kill(Path(folder) / "run")
        recording.wait()
        watcher.communicate()
        wait_until_finished(Path(folder) / "run")  # its tables are still written when the job has ended
        if not document:
            return "nothing was reported"
        if not mark.exists():
            return f"{document['class']} of {document['ranks']} without a fault"
        at_ns = int(mark.read_text()) if slowing else mark.stat().st_mtime_ns
        later = f"{(document['time_ns'] - at_ns) / 1e9:.1f} s"
        steps_later = f", {document['step'] + 1 - SINCE} steps" if slowing else ""
        return f"{document['class']} of {document['ranks']} after {later}{steps_later}"


def start(folder: str, command: list[str]) -> tuple[subprocess.Popen[bytes], subprocess.Popen[str]]:
    """Start a job, recorded without deep windows, and its watcher."""
    facts: dict[str, Any] = {
        "cwd": folder,
        "env": ENVIRONMENT,
    }
    record = [*DPRO, "record", "-o", "run", "--every", "100000", "--skip", "90000", "--", *command]
    nowhere = subprocess.DEVNULL
    recording = subprocess.Popen(record, stdout=nowhere, stderr=nowhere, **facts)
    watch = [*DPRO, "watch", "run", "--json"]
    return recording, subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=nowhere, text=True, **facts)


def kill(run: Path) -> None:
    """Kill the ranks of a job, whose launcher then ends by itself."""
    for path in run.glob(".raw/*/*/facts.json"):
        with suppress(OSError, ValueError):
            os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)


if __name__ == "__main__":
    main()
