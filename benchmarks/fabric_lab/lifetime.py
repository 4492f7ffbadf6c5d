"""Lifetime of a lab's namespaces: exactly that of the process that made them.

In: nothing. Out: a name for a lab that identifies its process, and the namespaces left over by earlier labs.
A process that gets a signal to end removes its lab first; the lab of a killed process is removed by the next
one. Only namespaces that a lab named are ever removed, and only if its process is gone. Since process numbers
are reused, the name also has the time at which the process began.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

NAMED = re.compile(r"dpro(\d+)t(\d+)[hls]\d+")
ENDING = (signal.SIGTERM, signal.SIGHUP)
_BEGAN = 19  # position after the name in /proc/PID/stat: proc_pid_stat(5)


def lab_name() -> str:
    """Return the prefix of the names of this process's namespaces."""
    pid = os.getpid()
    return f"dpro{pid}t{_began(pid)}"


def _began(pid: int) -> int:
    """Return when a process began, in clock ticks since boot; -1 where there is no such process."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(facts.rpartition(")")[2].split()[_BEGAN])


def left_over(names: list[str]) -> list[str]:
    """Return the names of namespaces that a lab gave whose process is gone."""
    found = ((name, NAMED.fullmatch(name)) for name in names)
    return [name for name, match in found if match and _began(int(match[1])) != int(match[2])]


def remove_left_over() -> None:
    """Remove the namespaces of labs whose process was killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    remove(left_over([line.split()[0] for line in listed.splitlines() if line.strip()]))


def remove(names: list[str]) -> None:
    """Remove namespaces; missing ones are ignored."""
    for name in names:
        with suppress(OSError):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Turn signals that end this process into SystemExit, so that `finally` blocks run.

    Ignored signals stay ignored. Handlers belong to the main thread: in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        for each in ENDING:  # a second signal does not interrupt the clean-up of the first
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {each: signal.getsignal(each) for each in ENDING}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
