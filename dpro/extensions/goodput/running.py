"""The account of a job that is still running, over all its attempts up to now.

Takes a run that is being recorded; returns a small run of the records of some of its ranks, and its account
as in `dpro goodput`. Ranks wait for each other, so a few ranks represent all. Does not read deep windows, so
the account lacks the cost of stragglers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl

from dpro.collectors.convert.recorded import RecordedProcess, attempts, of_training, processes
from dpro.collectors.convert.tables import checkpoints, frames_of, start_parts, starts
from dpro.collectors.inside import records
from dpro.collectors.launch.recording import launches
from dpro.errors import DproError, InputError
from dpro.extensions.goodput.attempts import ATTEMPTS
from dpro.extensions.goodput.document import GoodputDocument, goodput_document
from dpro.extensions.goodput.life import life_of
from dpro.schema import CHECKPOINTS, CLOCK_SAMPLES, COUNTERS, START_PARTS, STARTS, STEPS, WORKERS
from dpro.store import Manifest, Run, open_run, write_manifest, write_part

MAX_RANKS = 8
MIN_S = 60.0  # from one account to the next
SHARE = 0.02  # of the watcher's time that accounts may take
NO_GRADIENTS = "step_no_grad_ns"  # the counter that shows evaluation


class LiveAccount:
    """The account of a watched job, renewed from time to time by a separate thread.

    Attributes:
        latest: the latest account; None before the first.
    """

    def __init__(self, run: Path) -> None:
        """Start without an account; the first begins after `MIN_S`."""
        self.latest: GoodputDocument | None = None
        self._run = run
        self._made: GoodputDocument | None = None
        self._working: threading.Thread | None = None
        self._next_s = time.monotonic() + MIN_S

    def look(self) -> bool:
        """Start the next account if it is due, collect a finished one, and return whether `latest` is new."""
        if self._working is None and time.monotonic() >= self._next_s:
            self._working = threading.Thread(target=self._work, name="account", daemon=True)
            self._working.start()
        if self._working is None or self._working.is_alive():
            return False
        self._working = None
        account, self._made = self._made, None
        self.latest = account or self.latest
        return account is not None

    def _work(self) -> None:
        begun_s = time.monotonic()
        # Files appear and disappear while they are read; the next account succeeds with others.
        with suppress(DproError, OSError, ValueError, LookupError, pl.exceptions.PolarsError):
            self._made = account_so_far(self._run)
        took_s = time.monotonic() - begun_s
        self._next_s = time.monotonic() + max(MIN_S, took_s / SHARE)


def account_so_far(run: Path) -> GoodputDocument:
    """Return the account of a running job up to now.

    Raises:
        InputError: none of its ranks has recorded anything yet.
    """
    with run_so_far(run) as small:
        return goodput_document(life_of([small]), [str(run)])


@contextmanager
def run_so_far(run: Path) -> Iterator[Run]:
    """Create a temporary run from the records of some ranks of a running job, up to now.

    Raises:
        InputError: none of its ranks has recorded anything yet.
    """
    recorded = [(process, launch) for launch in launches(run) for process in processes(launch)]
    launched = {process.folder: int(launch.facts().get("launched_ns", -1)) for process, launch in recorded}
    starts_so_far = attempts(of_training([process for process, _ in recorded]))
    if not starts_so_far:
        raise InputError(f"{run}: no rank has recorded anything yet; try again in a moment")
    ranks = [process.rank for process in starts_so_far[-1]]
    every = -(-len(ranks) // MAX_RANKS)
    chosen = set(sorted(ranks)[::every])
    with TemporaryDirectory(prefix="dpro-life-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        for number, attempt in enumerate(starts_so_far):
            to = folder if number + 1 == len(starts_so_far) else folder / ATTEMPTS / str(number)
            _write(to, [process for process in attempt if process.rank in chosen] or attempt[:1], launched)
        yield replace(open_run(folder), source=run)


def _write(to: Path, attempt: Sequence[RecordedProcess], launched: dict[Path, int]) -> None:
    for process in attempt:
        recorded = records.read_records(process.folder / "records.bin")
        frames = frames_of(process, recorded, None)
        for table in (STEPS, CLOCK_SAMPLES, WORKERS):
            write_part(to, table, process.part, frames[table.name])
        counters = frames[COUNTERS.name].filter(pl.col("counter") == NO_GRADIENTS)
        write_part(to, COUNTERS, process.part, counters)
        write_part(to, STARTS, process.part, starts(process, recorded, launched[process.folder]))
        write_part(to, START_PARTS, process.part, start_parts(process))
        write_part(to, CHECKPOINTS, process.part, checkpoints(process))
    world = max(int(process.facts["world_size"]) for process in attempt)
    ranks = sorted({process.rank for process in attempt})
    write_manifest(to, Manifest(world_size=world, ranks=ranks, created_by="dpro watch"))
