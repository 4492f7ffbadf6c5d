"""What names a process for good: the boot of its host, its namespace of pids, its pid and when it started.

In: a pid. Out: what the kernel says of it. Pids come back; all four together do not. Runs inside the job,
where only the standard library may be assumed.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

START_TICKS = 19  # of the fields after the name in brackets
ALL_PROCESSES = "pid:[4026531836]"  # the namespace of the host itself, which sees those of all others


def host_clock() -> str:
    """What all processes that share this host's clock call it, and no others: this boot of its kernel."""
    try:
        return _read("/proc/sys/kernel/random/boot_id").strip()
    except OSError:
        return socket.gethostname()


def pid_namespace() -> str:
    """The name of the namespace that pids of this process are in, as of its container; may be empty."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    with suppress(OSError):
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return []


def _read(path: str) -> str:
    """What the kernel says in a small file; without `open`, which the job may have replaced."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 12).decode(errors="replace")
    finally:
        os.close(descriptor)


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 if it is gone or only waits to be reaped."""
    fields = stat_fields(pid)
    return -1 if not fields or fields[0] in "ZX" else int(fields[START_TICKS])


def name_of(pid: int) -> dict[str, Any]:
    """The facts by which `lives` knows a process of this host again."""
    return {
        "clock": host_clock(),
        "pid_namespace": pid_namespace(),
        "pid": pid,
        "start_ticks": start_ticks(pid),
    }


def lives(facts: Mapping[str, Any]) -> bool | None:
    """Whether a process lives; None where that cannot be seen: on another host, or from within a container.

    Args:
        facts: as of `name_of`; those of older recorders lack some, as if they were of another host.
    """
    if facts.get("clock") != host_clock():
        return None
    pid, ticks, namespace = int(facts["pid"]), int(facts["start_ticks"]), pid_namespace()
    if facts.get("pid_namespace") == namespace:
        return start_ticks(pid) == ticks != -1
    if namespace != ALL_PROCESSES:
        return None
    return any(start_ticks(host_pid) == ticks for host_pid in _called(pid))


def _called(pid: int) -> Iterator[int]:
    """The pids here of processes that have a pid within a container."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            called = re.search(r"^NSpid:\s.*?(\d+)$", status.read_text(errors="replace"), re.MULTILINE)
            if called and int(called[1]) == pid:
                yield int(status.parent.name)
