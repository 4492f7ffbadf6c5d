"""Runs a command as ranks of a larger job, one after the other.

Takes a launch, a command and the ranks to pretend; returns their exit code. A rank that waits for mail of
another (`inside/pretend/groups.py:Mailbox`) has that one started, so several may be alive at once; one
computes at a time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpro.collectors.inside.files import MAIL, WAITS
from dpro.collectors.launch.recording import Launch
from dpro.errors import UsageError

POLL_S = 0.02
STUCK_S = 2.0  # all ranks wait for each other: longer than a rank takes to see its mail
STUCK_EXIT_CODE = 3  # exit code then
PORT = "29500"
PER_HOST = 8  # default ranks per host
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "torch.distributed.run",
             "torch.distributed.launch")  # fmt: skip


Popen = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Pretended:
    """The job that is simulated, and which of its ranks run.

    Attributes:
        ranks: the pretended ranks, ascending.
    """

    world: int
    ranks: tuple[int, ...]
    per_host: int = PER_HOST


def parse_ranks(text: str, world: int) -> tuple[int, ...]:
    """Return the ranks that a text such as `0,8` or `0-3,255` names, ascending.

    Raises:
        UsageError: it names none, or one that the job does not have.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--pretend-ranks {text}: give ranks as 0,8 or 0-3")
        low, high = int(first), int(last or first)
        if max(low, high) >= world:
            raise UsageError(
                f"--pretend-ranks {text}: rank {max(low, high)} is not in --pretend-world {world}, "
                f"whose ranks are 0 to {world - 1}"
            )
        if low > high:
            raise UsageError(f"--pretend-ranks {text}: {part.strip()} names no rank")
        ranks.update(range(low, high + 1))
    return tuple(sorted(ranks))


def refuse_launchers(command: Sequence[str]) -> None:
    """Raise if the command starts ranks itself.

    Raises:
        UsageError: it is torchrun or another launcher.
    """
    for word in command[:4]:
        if Path(word).name in LAUNCHERS:
            raise UsageError(
                f"{Path(word).name} starts ranks itself, as --pretend-ranks does: give the script alone, "
                "such as `dpro record --pretend-world 8 --pretend-ranks 0 -- python train.py`"
            )


def environment_of(rank: int, options: Pretended) -> dict[str, str]:
    """Return the environment variables that a launcher would set for a rank."""
    world, local = options.world, min(options.per_host, options.world)
    values = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": rank // local,
        "GROUP_WORLD_SIZE": -(-world // local),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": os.environ.get("MASTER_PORT", PORT),
    }
    return {name: str(value) for name, value in values.items()}


class Ranks:
    """Processes of the pretended ranks, started one after the other."""

    def __init__(self, launch: Launch, options: Pretended, start: Callable[[int], Popen]) -> None:
        self._mail, self._options, self._start = launch.raw / MAIL, options, start
        self._left, self._alive = list(options.ranks), dict[int, Popen]()
        self._code = 0
        self._stuck_s = 0.0

    def run(self) -> int:
        """Run all ranks.

        Returns:
            The exit code of the first rank that failed, after which no other is started; else 0.
        """
        before = signal.signal(signal.SIGTERM, lambda number, _: self._end(128 + number))
        try:
            while self._alive or (self._left and not self._code):
                self._reap()
                self._start_next()
                time.sleep(POLL_S)
        except KeyboardInterrupt:  # the terminal has sent it to the ranks, too
            for process in self._alive.values():
                process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
        return self._code

    def _reap(self) -> None:
        for rank in [rank for rank, process in self._alive.items() if process.poll() is not None]:
            status = self._alive.pop(rank).returncode
            if status and not self._code:
                self._say(
                    f"rank {rank} of {self._options.world} {_ending_in_words(status)}{_not_run(self._left)}"
                )
                self._end(status if status > 0 else 128 - status)

    def _start_next(self) -> None:
        """Start the next rank if all live ones wait for mail; end them if no rank is left to send it."""
        waits = self._waiting()
        if self._code or (self._alive and set(self._alive) - set(waits)):
            self._stuck_s = 0.0
        elif self._left:
            rank = next((sender for sender in waits.values() if sender in self._left), self._left[0])
            self._left.remove(rank)
            done = len(self._options.ranks) - len(self._left)
            self._say(f"rank {rank} of {self._options.world} ({done} of {len(self._options.ranks)})")
            self._alive[rank] = self._start(rank)
        elif waits:
            self._stuck_s = self._stuck_s or time.monotonic()
            if time.monotonic() - self._stuck_s > STUCK_S:
                rank, sender = next(iter(waits.items()))
                self._say(f"rank {rank} waits for an object from rank {sender}, which sends none: ended")
                self._end(STUCK_EXIT_CODE)

    def _waiting(self) -> dict[int, int]:
        """Return the ranks that wait for mail, each with the rank that sends it."""
        senders = {}
        for rank in self._alive:
            with suppress(OSError, ValueError):
                senders[rank] = int((self._mail / f"{WAITS}{rank}").read_text())
        return senders

    def _end(self, code: int) -> None:
        self._code = self._code or code
        for process in self._alive.values():  # they may wait for mail that is never sent
            process.terminate()

    def _say(self, line: str) -> None:
        print(f"dpro: {line}", file=sys.stderr, flush=True)


def run_ranks(
    launch: Launch, environment: Mapping[str, str], command: Sequence[str], pretended: Pretended
) -> int:
    """Run a command as ranks of a larger job, one after the other.

    Returns:
        The exit code of the first rank that failed, after which no other is started; else 0.
    """

    def start(rank: int) -> Popen:
        return subprocess.Popen(list(command), env={**environment, **environment_of(rank, pretended)})

    return Ranks(launch, pretended, start).run()


def _ending_in_words(status: int) -> str:
    return f"ended with exit code {status}" if status > 0 else f"was killed by signal {-status}"


def _not_run(left: Sequence[int]) -> str:
    return f"; not run: rank {', '.join(map(str, left))}" if left else ""
