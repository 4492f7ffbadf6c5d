"""Programs that measure how fast and how accurate dpro is; none of them ships.

Those in folders run as `python -m benchmarks.speed.engine`, from the root of a checkout.

    speed/          engine, one answer, edits, imports, start of commands, cost of recording
    accuracy/       predictions beside real changes, real twins, kinds of edges
    diagnosis/      findings beside the injected truth: slow jobs, real jobs, hangs, whole operations
    gpu, gpu_stages/    checks that need a GPU, in stages of minutes
    gpu_pairs       predictions beside others' changed GPU jobs, by traces from before and after a change
    watch/          `dpro watch` beside real jobs, and beside the recorder's code for many ranks
    devices         times of operations, models and jobs on devices, beside measured ones (device_checks/)
    questions       users' questions on real traces, put to the tools of `dpro mcp`
    dashboard       time of views, size of answers
    timeline        first lanes, wheel and memory of the dashboard's timeline
    unchanged       all answers on every trace, before and after a change that is meant to change none
    by_hand         torch.profiler without dpro, which recording is compared with
    recording/      real jobs that several of these programs record, here or over a limited link
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[1]
TRACES = Path(os.environ.get("DPRO_TRACES", REPOSITORY.parent / "shared" / "traces"))

SETTLED_S = 0.5  # time for the processes of a load to start Python


def as_program(main: Callable[[], int | None]) -> NoReturn:
    """Run a program and exit with its code; report a faulty input in one line, as the commands do.

    Args:
        main: returns the exit code.
    """
    from dpro.errors import DproError

    try:
        sys.exit(main())
    except (DproError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


@contextmanager
def load(count: int) -> Iterator[list[int]]:
    """Run this many busy processes that never wait; yield their ids and kill them at the end."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(SETTLED_S)
        yield [other.pid for other in others]
    finally:
        for other in others:
            other.kill()
            other.wait()
