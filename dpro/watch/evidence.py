"""Evidence of hangs: errors that GPUs reported, and what a watcher keeps in the run: dumps and stacks.

In: findings, the processes of the job, and the files that samplers append to. Out: the findings with these
errors; the findings log, open for writing; a folder per hang. Only what the nodes of the ranks in findings
have sampled lately is read: the files of all nodes of a large job are much.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import polars as pl

from dpro.collectors.attach import stacks
from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.convert.tables import counters
from dpro.collectors.launch.ownership import ensure_mine
from dpro.collectors.launch.recording import launches
from dpro.collectors.telemetry.samples import read_samples, sample_files
from dpro.detect.findings import Finding, ranks_of
from dpro.detect.findings_log import FOLDER, FindingsLog
from dpro.detect.machine.gpu_state import needed_for_errors, with_errors
from dpro.errors import DproError
from dpro.schema import COUNTERS
from dpro.watch.snapshot import latest_dumps
from dpro.watch.tail import ProcessTail, steps_of, workers_of

MAX_NODES = 8  # whose files are read
STACKS_S = 3.0  # for the ranks to answer
_STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "Z": "it has ended, and its parent has not noticed",
    "D": "it waits in the kernel, for a disk, a file server or a device",
}


def open_log(run: Path) -> FindingsLog:
    """Open the findings log of a run.

    Raises:
        InputError: the run is another user's, or its folder of findings holds links.
    """
    folder = run / FOLDER
    ensure_mine([run.resolve()], within=False)
    folder.mkdir(exist_ok=True)
    ensure_mine([folder])
    return FindingsLog(run)


def with_gpu_errors(findings: Sequence[Finding], run: Path, tails: Sequence[ProcessTail]) -> list[Finding]:
    """Add errors of GPUs to findings of hangs; these stay as they are where the errors cannot be read."""
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
    """Keep dumps and stacks of all ranks: the job may be killed soon.

    Args:
        folder: where to; it is made. What cannot be written there is left out.
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
    answers = stacks(run, STACKS_S)
    silent = [rank for rank in answers.silent if rank in processes]
    return {
        "ranks": [answers.given[rank] for rank in sorted(answers.given)],
        "silent_ranks": answers.silent,
        "why_silent": {str(rank): why_silent(processes[rank]) for rank in silent},
    }


def _keep(path: Path, to: Path) -> None:
    """Keep what a file has now: its writers never write into it, they put another in its place."""
    try:
        os.link(path, to)
    except OSError:  # some file systems cannot
        shutil.copy2(path, to)


def why_silent(process: RecordedProcess) -> str:
    """Return why a process may not have answered where its threads are, as far as this host shows."""
    host, pid = process.facts["host"], int(process.facts["pid"])
    if host != socket.gethostname():
        held = "a thread keeps the interpreter's lock (GIL)"
        return f"it is stopped, or {held}: it runs on {host}, where no signal reaches it from here"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "it has ended"
    return _STATES.get(state, f"it does not answer; the kernel calls its state {state}")
