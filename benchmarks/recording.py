"""What benchmarks do with real jobs: start `cpu_job.py`, here or over a limited link, and `dpro` on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def cable(rate_mbit: int, delay_us: int = 0) -> tuple[str, ...]:
    """The command that runs another one as two ranks over a limited link."""
    delay = ["--delay-us", str(delay_us)] if delay_us else []
    return sys.executable, str(HERE / "limited_link.py"), str(rate_mbit), *delay, "--"


def cpu_job(arguments: Sequence[object], ranks: int = 2, over: Sequence[str] = ()) -> list[str]:
    """The command of a job.

    Args:
        arguments: of `cpu_job.py`.
        ranks: how many there are.
        over: a `cable` between two; none for ranks on this host.
    """
    launcher = [*over, sys.executable] if over else [*TORCHRUN, str(ranks)]
    return [*launcher, str(HERE / "cpu_job.py"), *map(str, arguments)]


def dpro(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of dpro, with this checkout and one thread per rank."""
    command = [sys.executable, "-m", "dpro", *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def record_window(run: Path, command: Sequence[str], skip: int, window_steps: int) -> None:
    """Record a job with one deep window; a job that fails ends the benchmark."""
    window = ["--skip", skip, "--every", 10**6, "--window-steps", window_steps]
    done = dpro("record", "-o", run, *window, "--", *command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
