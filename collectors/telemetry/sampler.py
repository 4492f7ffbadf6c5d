"""The sampling process beside the sidecar, which starts with it and ends with it.

Takes a launch; writes files of samples to its folder, and lines to its log. Each launch samples its own
processes; of several on one node, one is elected to sample the node. Neither the job nor the sidecar waits
for it: a call of the GPU driver may block forever when a GPU fails, so GPUs are read in threads, and a
sampler that does not end is killed.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from dpro.collectors.inside.files import pid_and_image
from dpro.collectors.launch.processes import close_descriptors
from dpro.collectors.launch.recording import Launch
from dpro.collectors.telemetry.gpus import SampledGpus, Unavailable, libraries
from dpro.collectors.telemetry.node import (
    by_peer,
    established,
    find_cgroup,
    find_ports,
    inodes_of,
    read_node,
    read_node_rarely,
    read_process,
)
from dpro.collectors.telemetry.samples import SampleWriter, TelemetrySample
from dpro.folders import lock

RARELY = 10  # samples per read of slow-changing counters
END_S = 3.0  # how long to wait for the sampler to end before it is killed
LOCK = ".sampler"
_NICENESS = 10  # ranks have priority over the sampler

Complain = Callable[[str], None]
Source = Callable[[bool], Iterable[TelemetrySample]]


class Sampler:
    """A running sampler process."""

    def __init__(self, recording: Launch, pid: int, lifeline: int) -> None:
        """Keep the id of a process that ends when the lifeline is closed."""
        self._recording, self._pid, self._lifeline = recording, pid, lifeline

    def stop(self) -> None:
        """Make the sampler end; kill it after `END_S`."""
        os.close(self._lifeline)
        deadline = time.monotonic() + END_S
        with suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(self._pid, os.WNOHANG)[0]:
                    return
                time.sleep(0.005)
            os.kill(self._pid, signal.SIGKILL)
            self._recording.log("telemetry: the sampler did not exit and was killed")


def start(recording: Launch) -> Sampler | None:
    """Start sampling with the launch's configuration; return None if telemetry is off."""
    with suppress(OSError, ValueError):
        config = json.loads((recording.raw / "config.json").read_text(encoding="utf-8"))
        period_s = float(config.get("telemetry_period_s", 0))
        return _fork(recording, period_s) if period_s > 0 else None
    return None


def _fork(recording: Launch, period_s: float) -> Sampler:
    lifeline_end, lifeline = os.pipe()
    child = os.fork()
    if child:
        os.close(lifeline_end)
        return Sampler(recording, child, lifeline)
    try:
        close_descriptors(keep={lifeline_end})  # also the marker: only the sidecar may hold its lock
        sample_until_ended(recording, period_s, lifeline_end)
    except Exception as error:
        recording.log(f"telemetry ended: {_in_words(error)}")
    finally:
        os._exit(0)


def sample_until_ended(recording: Launch, period_s: float, lifeline_end: int) -> None:
    """Sample until the sidecar closes the lifeline or dies."""
    os.nice(_NICENESS)
    host = socket.gethostname()

    def complain(line: str) -> None:
        recording.log(f"{host}: {line}")

    output = _Output(SampleWriter(recording.raw, host), complain)
    processes = LocalProcesses(recording.raw, host)
    sources: dict[str, Source] = {
        "processes": processes.read,
        "TCP connections": processes.read_connections,
    }
    election = Election(recording.raw.parent / f"{host}{LOCK}")
    lifeline = select.poll()
    lifeline.register(lifeline_end)
    due = time.monotonic()
    for number in itertools.count():
        if not election.is_won and election.try_to_win():
            sources |= _node_sources(recording, complain)
            for library in libraries():
                arguments = (library.open, period_s, output, complain)
                threading.Thread(target=sample_gpus, args=arguments, daemon=True).start()
        output.append(_read_all(sources, number % RARELY == 0, complain))
        due = max(due + period_s, time.monotonic())
        if is_over(lifeline, due):
            break
    output.end()
    election.withdraw()
    with suppress(OSError):  # it is not empty unless the run was finished meanwhile
        recording.raw.parent.rmdir()


def is_over(lifeline: select.poll, due_s: float) -> bool:
    """Wait until the next sample is due; return whether the other end of the lifeline was closed before.

    Args:
        due_s: when the next sample is due, s of the monotonic clock.
    """
    left_s = max(due_s - time.monotonic(), 0)  # a negative timeout would block forever
    return bool(lifeline.poll(1e3 * left_s))


class _Output:
    """A writer shared by threads. A full disk ends the sampler; after `end` nothing is written."""

    def __init__(self, writer: SampleWriter, complain: Complain) -> None:
        self._writer, self._complain = writer, complain
        self._lock = threading.Lock()

    def append(self, samples: Iterable[TelemetrySample]) -> None:
        with self._lock:
            try:
                self._writer.append(samples)
            except OSError as error:
                self._complain(f"telemetry ended: {_in_words(error)}")
                os._exit(0)

    def end(self) -> None:
        self._lock.acquire()  # never released: no thread writes any more
        self._writer.close()


def _read_all(sources: dict[str, Source], everything: bool, complain: Complain) -> list[TelemetrySample]:
    """Return the samples of all sources; a source that fails is removed."""
    samples: list[TelemetrySample] = []
    for name, read in list(sources.items()):
        try:
            samples += read(everything)
        except Exception as error:
            del sources[name]
            complain(f"telemetry continues without {name}: {_in_words(error)}")
    return samples


def _node_sources(recording: Launch, complain: Complain) -> dict[str, Source]:
    """Return the sources that only the elected sampler of a node reads, besides GPUs."""
    cgroup = find_cgroup()
    ports = find_ports()

    def node(everything: bool) -> list[TelemetrySample]:
        now = time.time_ns()
        values = read_node() | cgroup.read() | {"telemetry_cpu_s": time.process_time()}
        return [
            TelemetrySample(now, -1, "", values | (read_node_rarely(recording.run) if everything else {}))
        ]

    def network(everything: bool) -> list[TelemetrySample]:
        return [TelemetrySample(time.time_ns(), -1, port.device, port.read(everything)) for port in ports]

    return {"the node": node, "the network": network}


def sample_gpus(
    open_: Callable[[Complain], SampledGpus], period_s: float, output: _Output, complain: Complain
) -> None:
    """Sample the GPUs of one library until the process ends."""
    try:
        try:
            gpus = open_(complain)
        except Unavailable as reason:
            if str(reason):
                complain(str(reason))
            return
        due = time.monotonic()
        for number in itertools.count():
            output.append(gpus.read(number % RARELY == 0))
            due = max(due + period_s, time.monotonic())
            output.append(gpus.wait(due - time.monotonic()))
    except Exception as error:
        complain(f"telemetry continues without GPUs: {_in_words(error)}")


class LocalProcesses:
    """Recorded processes of a launch on this host."""

    def __init__(self, folder: Path, host: str) -> None:
        """Begin without any process.

        Args:
            folder: where processes that record write `HOST-PID/facts.json`.
        """
        self._folder, self._host = folder, host
        self._there: set[int] = set()  # inodes of all connections at the last reading
        self._sockets: dict[int, set[int]] = {}  # inodes of its sockets, by pid
        self._ranks: dict[Path, tuple[int, int]] = {}  # modification time of the facts, and the rank in them
        self._ended: set[Path] = set()

    def read(self, everything: bool) -> list[TelemetrySample]:
        """Return one sample per process that still runs."""
        samples = []
        for path, pid in self._running():
            values = read_process(pid)
            if values:
                samples.append(TelemetrySample(time.time_ns(), self._rank(path), "", values))
            else:
                self._ended.add(path)
        return samples

    def read_connections(self, everything: bool) -> list[TelemetrySample]:
        """Return one sample per process and TCP peer."""
        running = [(self._rank(path), pid) for path, pid in self._running()]
        connections = established() if running else []
        there = {connection.inode for connection in connections}
        if there != self._there:  # look up owners only when the connections changed
            self._there, self._sockets = there, {pid: inodes_of(pid) for _, pid in running}
        now = time.time_ns()
        return [
            TelemetrySample(now, rank, peer, values)
            for rank, pid in running
            for peer, values in by_peer(connections, self._sockets.get(pid, set())).items()
        ]

    def _running(self) -> Iterator[tuple[Path, int]]:
        """Yield latest facts and pid of each process that was running at the last reading."""
        paths = self._folder.glob(f"{self._host}-*/facts.json")
        images = sorted((*pid_and_image(path.parent.name), path) for path in paths)
        latest = {pid: path for pid, _, path in images}
        for pid, path in latest.items():
            if path not in self._ended:
                yield path, pid

    def _rank(self, path: Path) -> int:
        """Return the current rank of a process, which may change when it creates its process group."""
        written_ns = path.stat().st_mtime_ns
        if self._ranks.get(path, (0, 0))[0] != written_ns:
            self._ranks[path] = (written_ns, int(json.loads(path.read_text(encoding="utf-8"))["rank"]))
        return self._ranks[path][1]


class Election:
    """Election of one sampler on a node by the lock of a file; when the winner ends, another can win."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    @property
    def is_won(self) -> bool:
        """Whether this sampler has won."""
        return self._descriptor >= 0

    def try_to_win(self) -> bool:
        """Win if no other sampler has; return whether this one did."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # A winner that withdrew just now has removed the file: its lock does not count.
            if lock(descriptor, wait=False) and os.fstat(descriptor).st_ino == self._path.stat().st_ino:
                self._descriptor = descriptor
                return True
        except OSError:
            pass
        os.close(descriptor)
        return False

    def withdraw(self) -> None:
        """Release the lock and remove its file."""
        if self.is_won:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def forget_elections(folder: Path) -> None:
    """Remove lock files left behind by samplers that were killed."""
    for path in folder.glob(f"*{LOCK}"):
        election = Election(path)
        with suppress(OSError):
            if election.try_to_win():
                election.withdraw()


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
