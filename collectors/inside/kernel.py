"""The lasting name of a process: the boot of its host, its pid namespace, its pid and its start.

Takes a pid; returns what the kernel says of it. Pids are used again; all four together are not. Runs inside
the job, where only the standard library may be assumed.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

START_TICKS = 19  # index among the fields after the name in brackets
ALL_PROCESSES = "pid:[4026531836]"  # the host's own namespace, which sees the pids of all others


def host_clock() -> str:
    """Return an id that only the processes on this host's clock share: the boot id of its kernel."""
    try:
        return _read("/proc/sys/kernel/random/boot_id").strip()
    except OSError:
        return socket.gethostname()


def pid_namespace() -> str:
    """Return the name of this process's pid namespace, such as its container's; may be empty."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such process."""
    with suppress(OSError):
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return []


def _read(path: str) -> str:
    """Return a small file of the kernel, without `open`, which the job may have replaced."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 12).decode(errors="replace")
    finally:
        os.close(descriptor)


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; -1 if it is gone or a zombie."""
    fields = stat_fields(pid)
    return -1 if not fields or fields[0] in "ZX" else int(fields[START_TICKS])


def process_identity(pid: int) -> dict[str, Any]:
    """Return the facts by which `is_alive` recognises a process of this host."""
    return {
        "clock": host_clock(),
        "pid_namespace": pid_namespace(),
        "pid": pid,
        "start_ticks": start_ticks(pid),
    }


def is_alive(facts: Mapping[str, Any]) -> bool | None:
    """Return whether a process lives; None where that is unknown: on another host, or from a container.

    Args:
        facts: from `process_identity`; those of older recorders lack some, and count as another host's.
    """
    if facts.get("clock") != host_clock():
        return None
    pid, ticks, namespace = int(facts["pid"]), int(facts["start_ticks"]), pid_namespace()
    if facts.get("pid_namespace") == namespace:
        return start_ticks(pid) == ticks != -1
    if namespace != ALL_PROCESSES:
        return None
    return any(start_ticks(host_pid) == ticks for host_pid in _host_pids(pid))


def _host_pids(pid: int) -> Iterator[int]:
    """Yield the pids here of processes whose pid in a container is `pid`."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            called = re.search(r"^NSpid:\s.*?(\d+)$", status.read_text(errors="replace"), re.MULTILINE)
            if called and int(called[1]) == pid:
                yield int(status.parent.name)
