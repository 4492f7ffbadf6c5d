"""The deep watch: diagnoses the latest deep windows while the job runs, by the detectors that replay.

Takes a run that is being recorded; returns findings, once per look. When all ranks have saved another window,
it is diagnosed together with earlier ones, since few steps prove little, in a separate process at the lowest
priority, since building a graph takes seconds and much memory. Windows that are too large for that are
reported, and left to `dpro diagnose`. The state is a record, and `next_state` alone decides what comes next.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, chain
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, NamedTuple

import msgspec

from dpro.collectors.attach import training_processes
from dpro.collectors.convert.calls import BACKENDS
from dpro.collectors.convert.recorded import Readers
from dpro.collectors.inside.files import SHOWN
from dpro.collectors.launch.recording import MARKERS, RAW, Launch, launches
from dpro.detect.findings import Finding
from dpro.documents import Document
from dpro.errors import DproError, Unanswerable
from dpro.extensions.watch.job import OPEN_NS, ProcessTail
from dpro.topology.file import FILE
from dpro.topology.kept import CHANNELS, PATHS
from dpro.units import ms

MAX_BYTES = 50 << 20  # of windows' files, over all ranks: some 150,000 spans, and half a minute
SETTLED_S = 3.0  # after the last rank has saved its window, since the window's calls follow a moment later
MAX_LOOK_S = 300.0  # time limit of a look
SHARE = 0.05  # share of the time that looks may take
NICE = 19
# Facts, records and calls of a process.
_FILES = ("facts.json", "groups.json", "mesh.json", "checked", "records.bin", "flight-*.*")
_OF_FABRIC = (FILE, PATHS, CHANNELS)  # by which cables and switches are named


class WindowFindings(Document, frozen=True, kw_only=True):
    """Answer of the process that diagnoses windows to the watcher.

    Attributes:
        findings: costliest first.
        limit, limit_kind: what limits the job, in words and as `explain` names it; empty where unknown.
        error: why there are no findings; empty where the windows could be diagnosed.
    """

    findings: tuple[Finding, ...] = ()
    limit: str = ""
    limit_kind: str = ""
    error: str = ""


class DeepWatchPhase(Enum):
    """Phases of the deep watch."""

    WAITING = "for another window"
    SETTLING = "a window is saved, its calls may still come, or the last look was not long ago"
    LOOKING = "a process diagnoses the latest windows"


@dataclass(frozen=True)
class DeepState:
    """State of the deep watch; times on this host's monotonic clock.

    Attributes:
        newest: the latest window that all ranks have saved, -1 for none.
        newest_s: when it was noticed.
        diagnosed: the latest window that was diagnosed, -1 for none.
        due_s: earliest time of the next look, unless its window was asked for.
        asked_after: the latest window before one that was asked for; None where none was.
        first: the first window of the last look: those before one that was asked for show another job.
    """

    phase: DeepWatchPhase = DeepWatchPhase.WAITING
    newest: int = -1
    newest_s: float = 0.0
    diagnosed: int = -1
    due_s: float = 0.0
    asked_after: int | None = None
    first: int = 0

    @property
    def was_asked_for(self) -> bool:
        """Whether the newest window was."""
        return self.asked_after is not None and self.newest > self.asked_after


def next_state(state: DeepState, newest: int, now_s: float) -> DeepState:
    """Return the state at a look of the watcher.

    Args:
        newest: the latest window that all ranks have saved, -1 for none.
    """
    if state.phase is DeepWatchPhase.LOOKING:
        return state
    if newest != state.newest:
        state = replace(state, newest=newest, newest_s=now_s)
    if newest <= state.diagnosed:
        return replace(state, phase=DeepWatchPhase.WAITING)
    if now_s < max(0.0 if state.was_asked_for else state.due_s, state.newest_s + SETTLED_S):
        return replace(state, phase=DeepWatchPhase.SETTLING)
    asked_after, first = state.asked_after, 0
    if asked_after is not None and newest > asked_after:
        first, asked_after = asked_after + 1, None
    looking = DeepWatchPhase.LOOKING
    return replace(state, phase=looking, diagnosed=newest, asked_after=asked_after, first=first)


def after_look(state: DeepState, now_s: float, took_s: float) -> DeepState:
    """Return the state after a look."""
    return replace(state, phase=DeepWatchPhase.WAITING, due_s=now_s + took_s / SHARE)


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    begun_s: float


class DeepWatch:
    """Diagnoses deep windows, one look at a time.

    Attributes:
        limit, limit_kind: as in `WindowFindings`, from the last look.
    """

    def __init__(self, run: Path) -> None:
        self.state = DeepState()
        self.limit = self.limit_kind = ""
        self._run = run
        self._child: _Child | None = None

    def look(self, tails: Sequence[ProcessTail], since_ns: int = 0) -> list[Finding] | None:
        """Return the findings of a look that has just ended, and begin looks that are due; None otherwise.

        Args:
            since_ns: windows before it are left out: the job was another one.

        Raises:
            Unanswerable: the window is too large.
        """
        if self._child is not None:
            return self._findings_of(self._child)
        saved = saved_windows(tails, max(since_ns, changed_ns(self._run / PATHS)))
        self.state = next_state(self.state, max(saved, default=-1), time.monotonic())
        if self.state.phase is DeepWatchPhase.LOOKING:
            try:
                chosen = [window for window in saved if window >= self.state.first]
                self._child = self._begin(tails, sorted(chosen, reverse=True))
            finally:
                if self._child is None:
                    self.state = replace(self.state, phase=DeepWatchPhase.WAITING)
        return None

    def hurry(self) -> None:
        """Have the next window looked at without delay, since it was asked for."""
        if not self.state.was_asked_for:  # else that one has come, and is looked at first
            self.state = replace(self.state, asked_after=self.state.newest)

    def close(self) -> None:
        """Kill the process of a running look."""
        if self._child is not None:
            self._child.process.kill()
            self._child.process.wait()
            self._child.output.close()
            self._child = None

    def _begin(self, tails: Sequence[ProcessTail], latest_first: Sequence[int]) -> _Child | None:
        """Start a process for the latest windows that fit; None if the latest was converted before."""
        sizes = [_size(tails, window) for window in latest_first]
        if sizes[0] == 0:
            return None
        if sizes[0] > MAX_BYTES:
            raise Unanswerable(
                f"deep windows of {sizes[0] >> 20} MiB are too large to diagnose while the job runs, the "
                f"limit is {MAX_BYTES >> 20}: run `dpro diagnose` when the job is over"
            )
        chosen = [
            ["--window", str(window)]
            for window, size, total in zip(latest_first, sizes, accumulate(sizes), strict=True)
            if size and total <= MAX_BYTES
        ]
        output, begun_s = TemporaryFile(), time.monotonic()  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "dpro", "watch", str(self._run), *chain(*chosen)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL,
            env=os.environ | {"POLARS_MAX_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
        )  # fmt: skip
        return _Child(process, output, begun_s)

    def _findings_of(self, child: _Child) -> list[Finding] | None:
        """Return the findings of a process once it has ended; None while it runs, or if it failed."""
        now_s = time.monotonic()
        took_s = now_s - child.begun_s
        has_ended = child.process.poll() is not None
        if not has_ended and took_s < MAX_LOOK_S:
            return None
        content = b""
        if has_ended:
            child.output.seek(0)
            content = child.output.read()
        self.close()
        self.state = after_look(self.state, now_s, took_s)
        try:
            answer = msgspec.json.decode(content, type=WindowFindings)
        except ValueError:
            return None  # the process was killed
        # Most likely, files were removed while it read. Other windows will follow.
        if answer.error:
            return None
        self.limit, self.limit_kind = answer.limit, answer.limit_kind
        return list(answer.findings)


def saved_windows(tails: Iterable[ProcessTail], since_ns: int = 0) -> set[int]:
    """Return the latest windows that all ranks have saved, and that began after a time."""
    saved = [
        {number for number, begin, end in tail.windows if end < OPEN_NS and begin > since_ns}
        for tail in tails
    ]
    return set.intersection(*saved) if saved else set()


def changed_ns(path: Path) -> int:
    """Return when a file last changed, 0 if there is none: windows before other paths show those of then."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def diagnose_windows(run: Path, windows: Sequence[int], readers: Readers) -> WindowFindings:
    """Diagnose some deep windows of a running job.

    Returns:
        Findings, and what limits the job. If the replay does not fit the measured times, only findings on the
        network, which need no replay; not even these if times cannot be compared.

    Raises:
        DproError: the windows cannot be read, or there is nothing to replay.
    """
    from dpro.analysis.analysis import Analysis
    from dpro.collectors.finish import finish
    from dpro.detect.baseline import Baseline
    from dpro.detect.context import Context
    from dpro.detect.run import diagnose_graph
    from dpro.replay.whatif.job import ReplayedJob
    from dpro.store import open_run
    from dpro.verdict.facts import JobFacts
    from dpro.verdict.verdict import limit_of
    from dpro.verdict.words import limit_in_words

    os.nice(NICE)
    folders = [process.folder for process in training_processes(run)]
    with TemporaryDirectory(prefix="dpro-deep-") as scratch:
        to = Path(scratch) / "run"
        _copy(run, windows, folders, to)
        for launch in launches(to):
            finish(launch, readers, None, {})
        opened = open_run(to)
        analysis = Analysis(opened)
        trust = analysis.trust
        if not trust.answerable:
            measured = analysis.built.graph if trust.comparable else None
            return WindowFindings(findings=tuple(diagnose_graph(Context(opened, measured=measured))))
        findings = diagnose_graph(Context(opened, Baseline(analysis.built.predictive)))
        words = kind = ""
        with suppress(DproError):  # no whole step in the windows, for example: findings remain valid
            facts = JobFacts(analysis, ReplayedJob(analysis.built.predictive))
            limit = limit_of(facts)
            if limit is not None:
                words, kind = limit_in_words(limit, ms(facts.step_ns)), limit.kind
        return WindowFindings(findings=tuple(findings), limit=words, limit_kind=kind)


def _copy(run: Path, windows: Sequence[int], folders: Sequence[Path], to: Path) -> None:
    """Copy the files that a diagnosis of windows needs; skip files that are removed meanwhile."""
    for name in {folder.parent.name for folder in folders}:
        for where in (MARKERS, RAW):
            (to / where).mkdir(parents=True, exist_ok=True)
        shutil.copy2(Launch(run, name).marker, Launch(to, name).marker)
    for name in _OF_FABRIC:
        with suppress(FileNotFoundError):
            shutil.copy2(run / name, to / name)
    of_windows = [_name(window, what) for window in windows for what in ("window", "messages", "trace")]
    for folder in folders:
        copies = to / RAW / folder.parent.name / folder.name
        copies.mkdir(parents=True)
        for path in [path for pattern in (*_FILES, *of_windows) for path in folder.glob(pattern)]:
            with suppress(OSError):
                if ".tmp" not in path.name:
                    shutil.copy2(path, copies / path.name)
        for backend in BACKENDS:
            for path in folder.glob(f"{SHOWN}{backend}.*"):
                with suppress(OSError):
                    shutil.copy2(path, copies / f"flight-{backend}-shown{path.suffix}")


def _name(window: int, what: str = "window") -> str:
    return f"{what}{window:04d}.json"


def _size(tails: Iterable[ProcessTail], window: int) -> int:
    """Return the bytes of a window's files; 0 if a rank's file was converted before this look."""
    try:
        return sum((tail.process.folder / _name(window)).stat().st_size for tail in tails)
    except OSError:
        return 0
