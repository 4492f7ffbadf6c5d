"""What the latest deep windows show, while the job runs: the detectors that replay, on a few of them.

In: a run that is being recorded. Out: findings, now and then. When all ranks have saved another window, it is
looked at with those before it, since few steps prove little; by a process of its own at the lowest priority:
building a graph takes seconds and memory that the watcher does without. Windows that are too large for that
are left to `dpro diagnose`, which is said.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from dpro.collectors.attach import training
from dpro.collectors.calls import BACKENDS
from dpro.collectors.convert import Readers
from dpro.collectors.inside.names import SHOWN
from dpro.collectors.launch import MARKERS, RAW, Launch, launches
from dpro.detect.findings import Finding
from dpro.errors import Unanswerable
from dpro.watch.tail import OPEN_NS, Tail

MAX_BYTES = 50 << 20  # of windows' files, of all ranks together: some 150,000 spans, and half a minute
SETTLED_S = 3.0  # after the last rank has saved its window: the calls that belong to it come a moment later
LONGEST_S = 300.0  # that a look may take
SHARE = 0.05  # of the time that looks may take
NICE = 19
# What a process says of itself; its records, and its calls.
_FILES = ("facts.json", "groups.json", "mesh.json", "checked", "records.bin", "flight-*.*")


class DeepLooks:
    """Looks at deep windows, one at a time."""

    def __init__(self, run: Path) -> None:
        """None was looked at yet.

        Args:
            run: the run directory of the job.
        """
        self._run = run
        self._looked = self._newest = -1
        self._newest_s = self._begun_s = self._due_s = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._told: IO[bytes] | None = None

    def look(self, tails: Sequence[Tail]) -> list[Finding] | None:
        """What the latest window shows; None where no look has just ended.

        Args:
            tails: the processes of the job.

        Raises:
            Unanswerable: the window is too large.
        """
        if self._child is not None:
            return self._ended()
        saved, now_s = saved_windows(tails), time.monotonic()
        newest = max(saved, default=-1)
        if newest != self._newest:
            self._newest, self._newest_s = newest, now_s
        if newest > self._looked and now_s >= max(self._due_s, self._newest_s + SETTLED_S):
            self._looked = newest
            self._begin(tails, sorted(saved, reverse=True))
        return None

    def close(self) -> None:
        """The job is over."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def _begin(self, tails: Sequence[Tail], latest_first: Sequence[int]) -> None:
        sizes = [_size(tails, window) for window in latest_first]
        if not sizes or sizes[0] == 0:
            return  # converted before this look: there will be another
        if sizes[0] > MAX_BYTES:
            raise Unanswerable(
                f"deep windows of {sizes[0] >> 20} MiB are not looked at while the job runs, only up to "
                f"{MAX_BYTES >> 20}: `dpro diagnose` does when it is over"
            )
        chosen = [
            ["--window", str(window)]
            for window, size, total in zip(latest_first, sizes, accumulate(sizes), strict=True)
            if size and total <= MAX_BYTES
        ]
        self._told, self._begun_s = TemporaryFile(), time.monotonic()  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-m", "dpro", "watch", str(self._run), *chain(*chosen)],
            stdin=subprocess.DEVNULL, stdout=self._told, stderr=subprocess.DEVNULL,
            env=os.environ | {"POLARS_MAX_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
        )  # fmt: skip

    def _ended(self) -> list[Finding] | None:
        assert self._child is not None
        assert self._told is not None
        took_s = time.monotonic() - self._begun_s
        status = self._child.poll()
        if status is None and took_s < LONGEST_S:
            return None
        self.close()
        self._due_s = time.monotonic() + took_s / SHARE
        self._told.seek(0)
        try:
            said = json.loads(self._told.read())
        except ValueError:
            return None  # it was killed
        finally:
            self._told.close()
        if "error" in said:  # most likely files went while it read: there will be other windows
            return None
        return [_finding(each) for each in said["findings"]]


def saved_windows(tails: Iterable[Tail]) -> set[int]:
    """The latest windows that all ranks have saved."""
    saved = [{number for number, _, end in tail.windows if end < OPEN_NS} for tail in tails]
    return set.intersection(*saved) if saved else set()


def diagnose_windows(run: Path, windows: Sequence[int], readers: Readers) -> list[Finding]:
    """What some windows show, costliest first; nothing where the replay of them does not fit.

    Args:
        run: the run directory of a job that runs.
        windows: their numbers.
        readers: how to read what PyTorch wrote.

    Raises:
        DproError: it cannot be read, or there is nothing to replay.
    """
    from dpro.analysis.graphs import make_graph
    from dpro.collectors.finish import finish
    from dpro.detect.machine.oversubscribed import crowds_of, not_crowding
    from dpro.detect.run import diagnose_graph
    from dpro.schema import COUNTERS, STEPS, WORKERS
    from dpro.store import open_run

    os.nice(NICE)
    folders = [process.folder for process in training(run)]
    with TemporaryDirectory(prefix="dpro-deep-") as scratch:
        to = Path(scratch) / "run"
        _copy(run, windows, folders, to)
        for launch in launches(to):
            finish(launch, readers, None, {})
        opened = open_run(to)
        built, trust = make_graph(opened)
        found = diagnose_graph(built.graph) if trust.answerable else []
        steps, counters = opened.table(STEPS), opened.table(COUNTERS)
        return not_crowding(found, crowds_of(steps, counters, opened.table(WORKERS)), steps, counters)


def _copy(run: Path, windows: Sequence[int], folders: Sequence[Path], to: Path) -> None:
    """What is needed of a job's files; what goes meanwhile is gone."""
    for name in {folder.parent.name for folder in folders}:
        for where in (MARKERS, RAW):
            (to / where).mkdir(parents=True, exist_ok=True)
        shutil.copy2(Launch(run, name).marker, Launch(to, name).marker)
    beside = [_name(window, what) for window in windows for what in ("window", "messages", "trace")]
    for folder in folders:
        own = to / RAW / folder.parent.name / folder.name
        own.mkdir(parents=True)
        for path in [path for pattern in (*_FILES, *beside) for path in folder.glob(pattern)]:
            with suppress(OSError):
                if ".tmp" not in path.name:
                    shutil.copy2(path, own / path.name)
        for backend in BACKENDS:
            for path in folder.glob(f"{SHOWN}{backend}.*"):
                with suppress(OSError):
                    shutil.copy2(path, own / f"flight-{backend}-shown{path.suffix}")


def _name(window: int, what: str = "window") -> str:
    return f"{what}{window:04d}.json"


def _size(tails: Iterable[Tail], window: int) -> int:
    """Bytes of a window's files; 0 where some rank's was converted before this look."""
    try:
        return sum((tail.process.folder / _name(window)).stat().st_size for tail in tails)
    except OSError:
        return 0


def document(found: Sequence[Finding]) -> dict[str, Any]:
    """Findings as JSON, to be handed to the watcher."""
    return {"findings": [dataclasses.asdict(each) for each in found]}


def _finding(told: Mapping[str, Any]) -> Finding:
    return Finding(**{**told, "ranks": tuple(told["ranks"]), "evidence": tuple(told["evidence"])})
