"""Liveness and end of processes that are not children of this one.

Takes a pid; returns whether the process lives and, where the kernel reports it (Linux 6.15 and later for any
process, earlier versions only for zombies), its wait status.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import select
import struct
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from dpro.collectors.inside.kernel import START_TICKS, start_ticks, stat_fields
from dpro.errors import InputError

VMSTAT = Path("/proc/vmstat")
_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80
_PIDFD_INFO = struct.Struct("<QQ11Ii")  # struct pidfd_info: mask, cgroup id, eleven ids, exit status
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = (
    (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11
)  # _IOWR(0xFF, 11, struct pidfd_info)


class LaunchedProcess:
    """A process to watch.

    Attributes:
        status: its wait status once it has ended, as from `os.waitpid`; None where unknown.
        descriptor: its pidfd; -1 where the kernel gives none.
    """

    def __init__(self, pid: int) -> None:
        """Begin to watch a process, which may have ended already."""
        self.status: int | None = None
        self.pid = pid
        self._started = start_ticks(pid)
        self._ended = self._started < 0
        self.descriptor = -1
        with suppress(OSError):
            self.descriptor = os.pidfd_open(pid)

    def ended(self) -> bool:
        """Return whether the process has ended; stores its status."""
        if not self._ended and start_ticks(self.pid) != self._started:
            self._ended = True
        if self._ended and self.status is None:
            self.status = self._read_status()
        return self._ended

    def _read_status(self) -> int | None:
        fields = stat_fields(self.pid)
        if fields and fields[0] == "Z" and int(fields[START_TICKS]) == self._started:
            return int(fields[49])
        if self.descriptor < 0:
            return None
        info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        with suppress(OSError):
            fcntl.ioctl(self.descriptor, _PIDFD_GET_INFO, info)
            mask, *_, status = _PIDFD_INFO.unpack(info)
            return status if mask & _PIDFD_INFO_EXIT else None
        return None


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with.

    Raises:
        InputError: there is no such process, or it belongs to another user.
    """
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except FileNotFoundError as error:
        raise InputError(f"process {pid}: there is none on this host") from error
    except OSError as error:
        raise InputError(f"process {pid}: {error.strerror}") from error
    pairs = (variable.partition(b"=") for variable in variables)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def close_descriptors(keep: Collection[int]) -> None:
    """Close all descriptors of this process except the standard streams and those to keep."""
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > 2 and int(entry) not in keep:
            with suppress(OSError):
                os.close(int(entry))


def oom_kills() -> int:
    """Return the number of out-of-memory kills on this host since boot; 0 where unknown."""
    with suppress(OSError):
        match = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0


def watch_folder(folder: Path) -> int:
    """Return an inotify descriptor, readable once this host creates something in a folder; -1 on failure."""
    libc = ctypes.CDLL(None)
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    events = _IN_CREATE | _IN_MOVED_TO
    if descriptor >= 0 and libc.inotify_add_watch(descriptor, os.fsencode(folder), events) < 0:
        os.close(descriptor)
        return -1
    return descriptor


def wait_for_any(processes: Sequence[LaunchedProcess], timeout_s: float, changes: int = -1) -> None:
    """Sleep until one of the live processes ends, a folder changes, or the timeout expires.

    Args:
        changes: descriptor of the folder, from `watch_folder`; -1 for none.
    """
    poll = select.poll()
    descriptors = [process.descriptor for process in processes if not process.ended()]
    for descriptor in (*descriptors, changes):
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
    blind = any(descriptor < 0 for descriptor in descriptors)  # kernels before 5.3 have no pidfd
    poll.poll(1000 * min(timeout_s, 0.2 if blind else timeout_s))
    if changes >= 0:
        with suppress(BlockingIOError):
            os.read(changes, 1 << 16)
