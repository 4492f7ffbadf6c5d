"""A profile of a job that was started without dpro, but with `KINETO_USE_DAEMON=1`.

Takes a process of the job, or its launcher; returns one Kineto file per process. PyTorch asks a daemon every
five seconds, by datagrams over a Unix socket, whether to profile; this module is that daemon for one request.
A datagram is a size, a type in 32 bytes, and a body of that size: `req` carries a kind and the pids of the
asking process and its ancestors, and is answered by settings as text.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dpro.collectors.launch.processes import environment_of
from dpro.errors import InputError

HEAD = struct.Struct("<Q32s")
REQUEST = b"req"
ASKS_EVERY_S = 5.0
LOOK_S = 0.2
ROUND_UP = 100  # ranks that get the request within this many steps begin at the same step
_FACTS = struct.Struct("<iiq")  # kind, number of pids, job
_LARGEST = 1 << 16


def listens(pid: int) -> bool:
    """Return whether a process asks a daemon.

    Raises:
        InputError: there is no such process, or it belongs to another user.
    """
    return environment_of(pid).get("KINETO_USE_DAEMON", "") not in ("", "0")


def profile(pid: int, steps: int, folder: Path, timeout_s: float) -> list[Path]:
    """Have a process and its descendants profile some steps.

    Returns:
        Kineto files, one per process, named after ranks.

    Raises:
        InputError: no process asked for a profile, not all wrote in time, or another daemon runs.
    """
    traces = folder / "trace.json"
    several = int(environment_of(pid).get("WORLD_SIZE", "0") or 0) != 1
    settings = {
        "ACTIVITIES_LOG_FILE": traces,
        "PROFILE_START_ITERATION": 0,
        "PROFILE_START_ITERATION_ROUNDUP": ROUND_UP if several else 1,
        "ACTIVITIES_ITERATIONS": steps,
    }
    text = "".join(f"{name}={value}\n" for name, value in settings.items()).encode()
    deadline = time.monotonic() + timeout_s
    with _daemon(environment_of(pid).get("KINETO_IPC_SOCKET_DIR", "")) as daemon:
        asked = _answer(daemon, pid, text, min(deadline, time.monotonic() + 4 * ASKS_EVERY_S))
    if not asked:
        raise InputError(f"process {pid}: it did not ask for a profile; did it import torch?")
    written = [_written(traces.with_name(f"trace_{asking}.json"), asking, deadline) for asking in asked]
    return [_named(trace, asking) for trace, asking in zip(written, asked, strict=True)]


def parse_request(datagram: bytes) -> list[int]:
    """Return the pids in a request: the asking process, then its ancestors; empty for other datagrams."""
    if len(datagram) < HEAD.size + _FACTS.size:
        return []
    _, kind = HEAD.unpack_from(datagram)
    _, count, _ = _FACTS.unpack_from(datagram, HEAD.size)
    whole = 0 < count <= (len(datagram) - HEAD.size - _FACTS.size) // 4
    if kind.rstrip(b"\0") != REQUEST or not whole:
        return []
    return list(struct.unpack_from(f"<{count}i", datagram, HEAD.size + _FACTS.size))


def _answer(daemon: socket.socket, pid: int, text: bytes, deadline: float) -> list[int]:
    """Answer the training processes once all have asked, since launchers ask, too; return their pids."""
    asking: dict[int, None] = {}
    complete_s = deadline
    while time.monotonic() < min(complete_s, deadline):
        for asking_pid, _ in _requests(daemon, pid):
            complete_s = min(complete_s, time.monotonic() + 1.2 * ASKS_EVERY_S)
            asking[asking_pid] = None
    chosen = [asking_pid for asking_pid in asking if "RANK" in environment_of(asking_pid)] or list(asking)
    waiting = set(chosen)
    while waiting and time.monotonic() < deadline:
        for asking_pid, answer in _requests(daemon, pid):
            if asking_pid in waiting:
                answer(text)
                waiting.discard(asking_pid)
    return chosen


def _requests(daemon: socket.socket, pid: int) -> Iterator[tuple[int, Callable[[bytes], object]]]:
    """Yield the pid and reply function of the next request, if it comes from a process or its descendants.

    A process that asks blocks until it is answered; one that the caller does not answer gets an empty reply.
    """
    try:
        datagram, address = daemon.recvfrom(_LARGEST)
    except TimeoutError:
        return
    pids = parse_request(datagram)
    answers: list[bytes] = []
    if pid in pids:
        yield pids[0], answers.append
    answer = b"".join(answers)
    if pids:
        daemon.sendto(HEAD.pack(len(answer), REQUEST) + answer, address)


def _written(trace: Path, pid: int, deadline: float) -> Path:
    """Wait until a trace is complete: Kineto writes the closing bracket last."""
    while time.monotonic() < deadline:
        if trace.exists() and trace.read_bytes()[-16:].rstrip().endswith(b"}"):
            return trace
        if not Path(f"/proc/{pid}").exists():
            raise InputError(f"process {pid}: ended before it had profiled")
        time.sleep(LOOK_S)
    raise InputError(f"process {pid}: wrote no profile in time; does it make steps?")


def _named(trace: Path, pid: int) -> Path:
    """Name a trace after the rank in its process's environment; else only the trace itself has the rank."""
    rank = environment_of(pid).get("RANK") if Path(f"/proc/{pid}").exists() else None
    return trace.rename(trace.with_name(f"rank{rank}.json")) if rank is not None else trace


@contextmanager
def _daemon(folder: str) -> Iterator[socket.socket]:
    """Open the socket that processes ask."""
    address = f"{folder}/dynolog" if folder else "\0dynolog\0"  # the name includes C's terminating null
    daemon = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        try:
            daemon.bind(address)
        except OSError as error:
            what = (
                "another daemon already listens on this address"
                if error.errno == errno.EADDRINUSE
                else error.strerror
            )
            raise InputError(f"{address.strip(chr(0))}: {what}") from error
        try:
            daemon.settimeout(LOOK_S)
            yield daemon
        finally:
            if folder:
                os.unlink(address)
    finally:
        daemon.close()
