"""Whether a process that others wait for works on something, as far as this host's kernel shows.

In: processes. Out: whether the main thread computed, or the process wrote or read, since the look before.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dpro.watch.tail import ProcessTail

MIN_COMPUTING = 0.05  # of the time: a thread that waits takes none
MIN_BYTES_PER_S = 1 << 20


class _Sample(NamedTuple):
    at_s: float
    cpu_s: float
    moved_bytes: int
    ready: bool  # it runs, or would if there were a core


class HostActivity:
    """What the processes of this host did between the latest two looks."""

    def __init__(self) -> None:
        """No process was looked at yet."""
        self._latest: dict[int, _Sample] = {}
        self._busy: dict[int, bool] = {}

    def sample(self, tails: Iterable[ProcessTail]) -> None:
        """Look at those processes that run on this host."""
        for tail in tails:
            facts = tail.process.facts
            if facts["host"] != socket.gethostname():
                continue
            now, before = _sample(int(facts["pid"])), self._latest.get(tail.process.rank)
            if now is not None:
                self._latest[tail.process.rank] = now
                self._busy[tail.process.rank] = before is not None and _worked(before, now)

    def is_busy(self, rank: int) -> bool:
        """Return whether a rank worked; of ranks of other hosts this is not known, and False."""
        return self._busy.get(rank, False)


def _worked(before: _Sample, now: _Sample) -> bool:
    elapsed_s = max(now.at_s - before.at_s, 1e-3)
    computed = (now.cpu_s - before.cpu_s) / elapsed_s > MIN_COMPUTING
    return (
        computed
        or (before.ready and now.ready)
        or (now.moved_bytes - before.moved_bytes) / elapsed_s > MIN_BYTES_PER_S
    )


def _sample(pid: int) -> _Sample | None:
    """Return CPU time of the main thread, and bytes read and written; None where the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(words[11]) + int(words[12])
        moved = 0
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            moved = sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
        return _Sample(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), moved, words[0] == "R")
    return None
