"""Evidence of hangs: the latest calls, errors that GPUs reported, and copies kept in the run.

Takes findings, the processes of the job, their folders, and the files of samplers; returns the calls as the
search for hangs needs them, and findings with GPU errors; opens the findings log for writing, and fills a
folder per hang with dumps and stacks. Reads only the latest samples of nodes with ranks in findings: the
files of all nodes of a large job are too many.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dpro.collectors.attach import read_stacks
from dpro.collectors.convert.calls import BACKENDS, message_rows, with_group_ranks, with_known_ranks
from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.convert.tables import counters
from dpro.collectors.launch.recording import ensure_mine, launches
from dpro.collectors.telemetry.samples import read_samples, sample_files
from dpro.detect.findings import Finding, ranks_of
from dpro.detect.findings_log import FOLDER, FindingsLog
from dpro.detect.hang.records import Records, make_records
from dpro.detect.machine.gpu_state import needed_for_errors, with_errors
from dpro.errors import DproError, InputError
from dpro.extensions.watch.job import ProcessTail, heartbeats_of, steps_of, workers_of
from dpro.ingest.flight_recorder import read_dump
from dpro.schema import COLLECTIVES, COUNTERS, PROCESS_GROUPS, conform
from dpro.schema.members import GROUP_RANKS
from dpro.words import from_json

MAX_NODES = 8  # whose files are read
STACKS_S = 3.0  # time for ranks to answer
_STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "Z": "it has ended, but its parent has not reaped it (zombie)",
    "D": "it waits in the kernel for a disk, file server or device (state D)",
}


def open_log(run: Path) -> FindingsLog:
    """Open the findings log of a run.

    Raises:
        InputError: the run belongs to another user, or its folder of findings contains links.
    """
    folder = run / FOLDER
    ensure_mine([run.resolve()], within=False)
    folder.mkdir(exist_ok=True)
    ensure_mine([folder])
    return FindingsLog(run)


def with_gpu_errors(findings: Sequence[Finding], run: Path, tails: Sequence[ProcessTail]) -> list[Finding]:
    """Add errors of GPUs to findings of hangs; return these unchanged if the errors cannot be read."""
    if not findings:
        return []
    named = ranks_of(findings)
    hosts = sorted({tail.process.facts["host"] for tail in tails if tail.process.rank in named})
    with suppress(DproError, OSError, ValueError, LookupError, pl.exceptions.PolarsError):
        rows = pl.concat([COUNTERS.empty(), *_sampled(run, hosts[:MAX_NODES])])
        return with_errors(findings, steps_of(tails), rows, workers_of(tails))
    return list(findings)


def _sampled(run: Path, hosts: Sequence[str]) -> Iterator[pl.DataFrame]:
    """Yield errors in the latest file of each launch on some hosts."""
    for launch in launches(run):
        if launch.facts()["host"] in hosts:
            for path in sample_files(launch.raw)[-1:]:
                host, samples = read_samples(path)
                frame = counters(host, samples)
                yield needed_for_errors(frame.select(*COUNTERS.columns))


def keep_hang(run: Path, folder: Path, tails: Sequence[ProcessTail]) -> None:
    """Keep dumps and stacks of all ranks, since the job may be killed soon.

    Args:
        folder: destination, which is created. Files that cannot be written there are left out.
    """
    with suppress(OSError, DproError):
        dumps = folder / "dumps"
        dumps.mkdir(parents=True, exist_ok=True)
        for tail in tails:
            for backend, dump in latest_dumps(tail.process.folder).items():
                if dump.suffix != ".parquet":
                    _keep(dump, dumps / f"{backend}-rank{tail.process.rank:05d}{dump.suffix}")
        document = _stacks(run, {tail.process.rank: tail.process for tail in tails})
        (folder / "stacks.json").write_text(json.dumps(document), encoding="utf-8")


def _stacks(run: Path, processes: Mapping[int, RecordedProcess]) -> dict[str, object]:
    """Return the stacks of all ranks that answer, and why the others may not."""
    answers = read_stacks(run, STACKS_S)
    silent = [rank for rank in answers.silent if rank in processes]
    return {
        "ranks": [answers.given[rank] for rank in sorted(answers.given)],
        "silent_ranks": answers.silent,
        "why_silent": {str(rank): why_silent(processes[rank]) for rank in silent},
    }


def _keep(path: Path, to: Path) -> None:
    """Link or copy a file as it is now; writers replace files and never change them in place."""
    try:
        os.link(path, to)
    except OSError:  # some file systems have no hard links
        shutil.copy2(path, to)


def why_silent(process: RecordedProcess) -> str:
    """Return why a process may not have sent its stacks, judging by this host's kernel."""
    host, pid = process.facts["host"], int(process.facts["pid"])
    if host != socket.gethostname():
        held = "a thread holds the interpreter lock (GIL)"
        return f"it is stopped, or {held}: it runs on {host}, where no signal reaches it from here"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "it has ended"
    return _STATES.get(state, f"it does not answer; the kernel calls its state {state}")


# The latest calls of a job's processes, in memory, in the form that the search for hangs needs. A dump that
# has not changed is not read again, and no file is written.


@dataclass(frozen=True)
class _Dump:
    """Calls and groups of one dump."""

    stamp: tuple[int, int]
    place: int  # index of the backend
    calls: pl.DataFrame
    groups: pl.DataFrame


class Snapshot:
    """The latest dumps of a job's processes, each read once."""

    def __init__(self) -> None:
        self._dumps: dict[Path, _Dump] = {}
        self._saved_ns: dict[Path, int] = {}
        self._before: dict[Path, int] = {}

    def read(self, tails: Sequence[ProcessTail]) -> None:
        """Read dumps that are new."""
        before, self._dumps, self._saved_ns = self._dumps, {}, {}
        for tail in tails:
            for backend, path in latest_dumps(tail.process.folder).items():
                with suppress(OSError, InputError, pl.exceptions.PolarsError):
                    status = path.stat()
                    # The time is no part of it: a process also sets it to record that nothing has changed.
                    stamp = status.st_ino, status.st_size
                    dump = before.get(path)
                    if dump is None or dump.stamp != stamp:
                        dump = self.read_one(tail, backend, path, stamp)
                    self._dumps[path] = dump
                    self._saved_ns[path] = max(status.st_mtime_ns, _checked_ns(tail.process.folder))

    def begin(self) -> None:
        """Mark the time of a request: dumps saved so far do not count as answers."""
        self._before = self._saved_ns

    def answered(self) -> set[Path]:
        """Return the folders of processes that have saved their calls since the request."""
        return {path.parent for path, at_ns in self._saved_ns.items() if self._before.get(path) != at_ns}

    def records(self, tails: Sequence[ProcessTail]) -> Records:
        """Return what the latest dumps and records contain."""
        messages = [message_rows(t.process.folder, t.process.rank) for t in tails if _has_messages(t)]
        groups = self._groups()
        calls = pl.concat([self._calls(), *(conform(COLLECTIVES, rows) for rows in messages)])
        return make_records(
            calls,
            groups,
            workers_of(tails),
            steps_of(tails),
            heartbeats_of(tails),
            max((int(tail.process.facts["world_size"]) for tail in tails), default=0),
        )

    def read_one(self, tail: ProcessTail, backend: str, path: Path, stamp: tuple[int, int]) -> _Dump:
        """Read one dump."""
        frames = read_dump(path, rank=tail.process.rank).frames
        calls = frames[COLLECTIVES.name]
        groups = frames.get(PROCESS_GROUPS.name, PROCESS_GROUPS.empty())
        if not (groups[GROUP_RANKS] != "").all():
            groups = with_known_ranks(conform(PROCESS_GROUPS, groups), tail.process.folder)
        if not (calls[GROUP_RANKS] != "").all():
            calls = with_group_ranks(calls, tail.process.folder)
        return _Dump(stamp, BACKENDS.index(backend), calls, groups)

    def _calls(self) -> pl.DataFrame:
        held = [dump for dump in self._dumps.values() if dump.calls.height]
        if not held:
            return COLLECTIVES.empty()
        rows = pl.concat([dump.calls for dump in held], how="diagonal_relaxed")
        place = np.repeat([dump.place for dump in held], [dump.calls.height for dump in held])
        return conform(COLLECTIVES, rows.with_columns(collective_id=pl.col("collective_id") * 2 + place))

    def _groups(self) -> pl.DataFrame:
        held = [(dump, self._saved_ns[path]) for path, dump in self._dumps.items() if dump.groups.height]
        if not held:
            return PROCESS_GROUPS.empty()
        rows = pl.concat([dump.groups for dump, _ in held], how="diagonal_relaxed")
        saved_ns = np.repeat([at_ns for _, at_ns in held], [dump.groups.height for dump, _ in held])
        return conform(PROCESS_GROUPS, rows.with_columns(saved_ns=pl.Series(saved_ns)))


def latest_dumps(folder: Path) -> dict[str, Path]:
    """Return the latest dump of each PyTorch backend of a process, by backend."""
    latest: dict[str, tuple[int, Path]] = {}
    with suppress(OSError), os.scandir(folder) as files:
        for file in files:
            what, _, rest = file.name.partition("-")
            if what not in ("flight", "calls") or not rest.endswith((".json", ".pickle")):
                continue
            backend = rest.partition(".")[0].partition("-")[0]
            with suppress(OSError):  # it was converted meanwhile
                dump = file.stat().st_mtime_ns, Path(file.path)
                latest[backend] = max(latest.get(backend, dump), dump)
    return {backend: latest[backend][1] for backend in BACKENDS if backend in latest}


def _checked_ns(folder: Path) -> int:
    """Return when a process last recorded that nothing had changed since its dump, in ns; -1 for never."""
    with suppress(OSError, ValueError):
        return int((folder / "checked").read_text())
    return -1


def _has_messages(tail: ProcessTail) -> bool:
    with suppress(OSError, ValueError):
        stall: Mapping[str, object] = from_json((tail.process.folder / "stall.json").read_bytes())
        return bool(stall.get("messages"))
    return False
