"""Real jobs that benchmarks record, with commands to start them, here or over a limited link, and to record.

cpu_job         layers of known time: one option for each change that can be made to a job
model_job       a GPT, a ResNet or a DLRM: real layers, parameters and messages
models          these models
groups_job      layers that communicate in the middle of their work, whole or in chunks
pipeline_job    stages whose layers sleep, in any schedule
orders_job      stages whose layers sleep, in any order that a file lists
exchanges       gradients after backward, a step late, or by priority
limited_link    ranks that talk over a link of a known speed
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def cable(rate_mbit: int, delay_us: int = 0, ranks: int = 2) -> tuple[str, ...]:
    """Return the command that runs another one as ranks that talk over a limited link.

    Args:
        rate_mbit: of the link.
        delay_us: of the link, each way, between two ranks.
        ranks: how many there are.
    """
    delay = ["--delay-us", str(delay_us)] if delay_us else []
    many = ["--ranks", str(ranks)] if ranks != 2 else []
    return sys.executable, str(HERE / "limited_link.py"), str(rate_mbit), *delay, *many, "--"


def cpu_job(arguments: Sequence[object], ranks: int = 2, over: Sequence[str] = ()) -> list[str]:
    """Return the command of `cpu_job.py`.

    Args:
        arguments: of `cpu_job.py`.
        ranks: how many there are.
        over: a `cable` between them; none for ranks on this host.
    """
    return job("cpu_job.py", arguments, ranks, over)


def job(program: str, arguments: Sequence[object], ranks: int = 2, over: Sequence[str] = ()) -> list[str]:
    """Return the command of a job.

    Args:
        program: a file of this folder.
        arguments: of it.
        ranks: how many there are.
        over: a `cable` between them; none for ranks on this host.
    """
    launcher = [*over, sys.executable] if over else [*TORCHRUN, str(ranks)]
    return [*launcher, str(HERE / program), *map(str, arguments)]


def dpro(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of dpro, with this checkout and one thread per rank."""
    command = [sys.executable, "-m", "dpro", *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def record_window(
    run: Path, command: Sequence[str], skip: int, window_steps: int, options: Sequence[str] = ()
) -> None:
    """Record a job with one deep window; a job that fails ends the benchmark.

    Args:
        run: the folder to make.
        command: the job.
        skip: steps before the window.
        window_steps: steps in it.
        options: more of `dpro record`.
    """
    window = ["--skip", skip, "--every", 10**6, "--window-steps", window_steps]
    done = dpro("record", "-o", run, *window, *options, "--", *command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
