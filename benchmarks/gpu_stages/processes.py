"""Ends all processes of a check: ranks and sidecars are in separate sessions, which no group signal reaches.

Every process that the benchmark starts has a mark in its environment, which its children inherit. A process
that has the mark of a finished check is a leftover of it, whatever its parent is then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

MARK = "DPRO_GPU_CHECK"


def new_mark() -> str:
    """Return a mark that no other process has."""
    return uuid.uuid4().hex


def marked(environment: dict[str, str], mark: str | None = None) -> dict[str, str]:
    """Return an environment with a mark: the given one, or that of this process."""
    mark = mark or os.environ.get(MARK, "")
    return environment | ({MARK: mark} if mark else {})


def carriers(mark: str) -> list[int]:
    """Return the live processes that have a mark, without this one."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def end_carriers(mark: str, patience_s: float = 0.0) -> int:
    """Kill all processes that have a mark.

    Args:
        mark: theirs.
        patience_s: how long they may take to end by themselves: a sidecar has tables to write.

    Returns:
        How many had to be killed.
    """
    deadline = time.monotonic() + patience_s
    while (left := carriers(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    killed = set()
    for _ in range(20):  # a process that is being started shows at the next look
        if not left:
            break
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.05)
        left = carriers(mark)
    return len(killed)


def run_to_limit(
    command: Sequence[object],
    limit_s: float,
    environment: dict[str, str],
    folder: Path,
    stdout: BinaryIO,
    stderr: BinaryIO,
) -> int | None:
    """Run a process in a new session to its end, or to a limit, and kill the rest of its group.

    Args:
        command: the words of it.
        limit_s: after which it is ended.
        environment: of the process.
        folder: that it works in.
        stdout, stderr: files that it writes to.

    Returns:
        Its exit code; None where it was ended at the limit.
    """
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the rest of a process's group, and wait up to 10 s for the process."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process within the driver may not end at all
        process.wait(10)
