"""Workers on the checked hosts: started through a launcher, sent commands, given limited time to answer.

Takes names of hosts, and a launcher: the words of a command that runs another one on a host; returns the
answers of the workers. A worker that does not answer in time is killed, and not asked again. The launcher
gets only the word `sh`, which no shell on the way can misread; everything else goes to its input.
"""

from __future__ import annotations

import json
import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NamedTuple

from dpro.errors import UsageError
from dpro.extensions.check.search import Exchanged, Pair, Reduced
from dpro.extensions.check.worker import MARK, PATIENCE

LAUNCHERS = {
    "ssh": "ssh -o BatchMode=yes -o ConnectTimeout=10 {host}",
    "srun": "srun --overlap --unbuffered --nodes=1 --ntasks=1 --nodelist={host}",
    "local": "env DPRO_CHECKED_HOST={host}",
}
START_S = 60.0  # to log in, start Python and import torch
WORK_S = 30.0  # for work of one host alone
EXCHANGE_S = 3.0  # for each exchange that succeeds
END_S = 3.0  # for a worker to end after its input does
CPU = "CPU"  # model of the device if a host's processors are the device
MAX_NOISE = 20  # lines of other output of a launcher that are kept
_READY = MARK + "ready"
_BOOT = (
    f'import sys;print("{_READY}",flush=True);'
    'exec(compile(sys.stdin.read(int(sys.stdin.readline())),"dpro-check","exec"))'
)


Say = Callable[[str], None]


class Unit(NamedTuple):
    """A device of a host.

    Attributes:
        device: number of the GPU; 0 if the processors are the device.
    """

    host: int
    device: int


class HostToCheck(NamedTuple):
    """A host as its workers describe it.

    Attributes:
        name: as it was given.
        machine: identifier that containers on one machine share.
        devices: number of its workers.
    """

    name: str
    machine: str
    devices: int
    model: str


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    answers: queue.Queue[dict[str, Any] | None] = field(default_factory=queue.Queue)
    noise: list[str] = field(default_factory=list)
    error: str = ""

    def read(self) -> None:
        """Sort output into answers and noise, until it ends."""
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode(errors="replace").strip()
            if line == _READY:
                self.answers.put({"number": -1})
            elif line.startswith(MARK):
                with suppress(ValueError):
                    self.answers.put(json.loads(line.removeprefix(MARK)))
            elif line:
                self.noise = [*self.noise, line][-MAX_NOISE:]
        self.answers.put(None)

    def write(self, text: str) -> None:
        """Write a text to the worker; do nothing if it has ended."""
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(text.encode())
            self.process.stdin.flush()

    def answer(self, number: int, deadline_s: float) -> dict[str, Any] | None:
        """Return the answer to a command; None if there is none in time, which ends the worker."""
        while not self.error:
            try:
                answer = self.answers.get(timeout=max(deadline_s - time.monotonic(), 0.001))
            except queue.Empty:
                self.end("does not answer")
                break
            if answer is None:
                said = self.noise[-1] if self.noise else f"exit code {self.process.wait()}"
                self.end(f"its worker ended: {said}")
            elif answer["number"] == number:
                return answer
        return None

    def end(self, error: str) -> None:
        """Kill the worker, and record why."""
        self.error = self.error or error
        self.process.kill()


class HostWorkers:
    """Workers of some hosts, one for each device.

    Attributes:
        hosts: hosts that answer, by number.
        failed: why a host does not answer, by number; it is not asked again.
    """

    def __init__(
        self, names: Sequence[str], launcher: str, python: str, interface: str, timeout_s: float, say: Say
    ) -> None:
        """Start a worker for each device of each host; put those that answer into `hosts`.

        Args:
            launcher: one of `LAUNCHERS`, or the words of a command with `{host}` in them.
            interface: of the network; empty for that of the default route.
            timeout_s: of an exchange.

        Raises:
            UsageError: the launcher cannot be started.
        """
        self.hosts: dict[int, HostToCheck] = {}
        self.failed: dict[int, str] = {}
        self._names, self._timeout_s = names, timeout_s
        self._command = launcher_words(launcher)
        self._python, self._interface, self._say = python, interface, say
        self._workers: dict[Unit, _Worker] = {}
        self._where: dict[Unit, dict[str, Any]] = {}
        self._number = 0
        try:
            self._start_all([Unit(number, 0) for number in range(len(names))])
            self._start_all([unit for unit in self.units() if unit.device > 0])
        except BaseException:
            self.close()
            raise

    def _start_all(self, units: Sequence[Unit]) -> None:
        """Start workers and get their descriptions."""
        for unit in units:
            self._workers[unit] = self._started(self._names[unit.host])
        deadline_s = time.monotonic() + START_S
        program = files("dpro.extensions.check").joinpath("worker.py").read_text(encoding="ascii")
        # A shell may read ahead, so the program is sent only after Python has replaced it.
        for unit in units:
            if self._workers[unit].answer(-1, deadline_s) is not None:
                self._workers[unit].write(f"{len(program)}\n{program}")
        greeting = {"do": "hello", "interface": self._interface, "timeout_s": self._timeout_s}
        for unit, said in self.ask(
            {unit: {**greeting, "device": unit.device} for unit in units}, START_S
        ).items():
            if "error" in said:
                self.failed[unit.host] = said["error"]
                continue
            self._where[unit] = said
            if unit.device == 0:
                self.hosts[unit.host] = HostToCheck(
                    self._names[unit.host], said["machine"], max(said["devices"], 1), said["model"]
                )
        for number in self.failed:
            self.hosts.pop(number, None)

    def _started(self, name: str) -> _Worker:
        command = [word.replace("{host}", name) for word in self._command] + ["sh"]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"--launcher: {command[0]}: {error.strerror}") from error
        worker = _Worker(process)
        threading.Thread(target=worker.read, name=f"worker {name}", daemon=True).start()
        worker.write(f"exec {shlex.quote(self._python)} -u -c {shlex.quote(_BOOT)}\n")
        return worker

    def units(self) -> list[Unit]:
        """Return the devices of the hosts that answer."""
        return [Unit(number, device) for number, host in self.hosts.items() for device in range(host.devices)]

    def ask(self, commands: Mapping[Unit, Mapping[str, Any]], within_s: float) -> dict[Unit, dict[str, Any]]:
        """Run commands on workers at the same time.

        Args:
            within_s: time limit in seconds; a worker without an answer by then is not asked again.

        Returns:
            Their answers, with `error` if a command failed, or if the worker is gone.
        """
        self._number += 1
        for unit, command in commands.items():
            self._workers[unit].write(json.dumps({"number": self._number, **command}) + "\n")
        deadline_s = time.monotonic() + within_s
        answers = {}
        for unit in commands:
            answer = self._workers[unit].answer(self._number, deadline_s)
            if answer is None:
                self.failed.setdefault(unit.host, self._workers[unit].error)
                answer = {"error": self._workers[unit].error}
            answers[unit] = answer
        return answers

    def exchange(self, steps: Sequence[Sequence[Pair]]) -> Mapping[Pair, Exchanged]:
        """Exchange, step by step, with all devices at the same time; see `Transport`."""
        self._say(f"network: {sum(map(len, steps))} pairs exchange in {len(steps)} steps")
        lanes = {pair: min(self._devices(host) for host in pair) for step in steps for pair in step}
        commands: dict[Unit, list[dict[str, Any]]] = {}
        asked: dict[Unit, list[Pair]] = {}
        for number, step in enumerate(steps):
            for pair in step:
                for device in range(lanes[pair]):
                    for rank, unit in enumerate(Unit(host, device) for host in pair):
                        key = f"{self._number}/{number}/{pair}/{device}"
                        meeting = self._meeting(Unit(pair[0], device), key, rank)
                        other = self._where[Unit(pair[1 - rank], device)]
                        meeting["other"] = other["address"], other["port"]
                        commands.setdefault(unit, []).append(meeting)
                        asked.setdefault(unit, []).append(pair)
        within_s = WORK_S + len(steps) * EXCHANGE_S + PATIENCE * self._timeout_s
        answers = self.ask(
            {unit: {"do": "exchanges", "partners": meetings} for unit, meetings in commands.items()}, within_s
        )
        reached: dict[Pair, list[Exchanged]] = {pair: [] for pair in lanes}
        for unit, answer in answers.items():
            exchanges = answer.get("exchanges") or [answer] * len(asked[unit])
            for pair, one in zip(asked[unit], exchanges, strict=True):
                reached[pair].append(Exchanged(one.get("gbps", 0.0), unit.device, one.get("error", "")))
        none = Exchanged(0.0, 0, "does not answer")
        return {pair: min(of_pair, key=_worst, default=none) for pair, of_pair in reached.items()}

    def all_reduce(self, groups: Sequence[Sequence[int]]) -> list[Reduced]:
        """Reduce over groups of hosts at the same time, with all devices; see `Transport`."""
        self._say(f"network: all-reduces of {max(map(len, groups))} hosts")
        commands: dict[Unit, dict[str, Any]] = {}
        of: dict[Unit, int] = {}
        for number, group in enumerate(groups):
            for device in range(min(self._devices(host) for host in group)):
                for rank, unit in enumerate(Unit(host, device) for host in group):
                    meeting = self._meeting(Unit(group[0], device), f"{self._number}/{number}/{device}", rank)
                    commands[unit] = {"do": "all_reduce", "num_ranks": len(group), **meeting}
                    of[unit] = number
        answers = self.ask(commands, WORK_S + (PATIENCE + 1) * self._timeout_s)
        reduced = []
        for number, group in enumerate(groups):
            of_group = [answer for unit, answer in answers.items() if of[unit] == number]
            errors = [answer["error"] for answer in of_group if "error" in answer]
            slowest = min(of_group, key=lambda answer: answer.get("gbps", 0.0), default={})
            gbps, size = (0.0, 0) if errors or not of_group else (slowest["gbps"], slowest["bytes"])
            reduced.append(Reduced(tuple(group), gbps, size, errors[0] if errors else ""))
        return reduced

    def _devices(self, host: int) -> int:
        return self.hosts[host].devices if host in self.hosts and host not in self.failed else 0

    def _meeting(self, first: Unit, key: str, rank: int) -> dict[str, Any]:
        where = self._where[first]
        return {"address": where["address"], "port": where["port"], "key": key, "rank": rank}

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            with suppress(OSError):
                assert worker.process.stdin is not None
                worker.process.stdin.close()
        deadline_s = time.monotonic() + END_S
        for worker in self._workers.values():
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(deadline_s - time.monotonic(), 0.01))
            worker.process.kill()
            worker.process.wait()


def _worst(one: Exchanged) -> tuple[bool, float]:
    return not one.error, one.gbps


def launcher_words(launcher: str) -> list[str]:
    """Return the words of a launcher, given by name or as a command.

    Raises:
        UsageError: the host is missing in it.
    """
    try:
        words = shlex.split(LAUNCHERS.get(launcher, launcher))
    except ValueError as error:
        raise UsageError(f"--launcher {launcher!r}: {error}") from error
    if not any("{host}" in word for word in words):
        names = ", ".join(LAUNCHERS)
        raise UsageError(f"--launcher {launcher!r}: give {names}, or a command with {{host}} in it")
    return words


def take_turns(hosts: Mapping[int, HostToCheck]) -> Iterable[list[int]]:
    """Return lists of hosts that can work at the same time; hosts that share a machine take turns."""
    turns: dict[str, int] = {}
    by_turn: dict[int, list[int]] = {}
    for number, host in hosts.items():
        turn = turns.get(host.machine, 0)
        turns[host.machine] = turn + 1
        by_turn.setdefault(turn, []).append(number)
    return by_turn.values()
