"""A small run of what a job's processes have recorded last, made while the job runs.

In: the folders they write to, and their latest records. Out: a run directory that opens like any other, so
that detectors need not know that the job still runs. It holds no history.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dpro.collectors.calls import BACKENDS
from dpro.collectors.convert import Readers
from dpro.collectors.finish import finish
from dpro.collectors.inside.records import RecordWriter
from dpro.collectors.launch import MARKERS, RAW, Launch
from dpro.store import Run, open_run
from dpro.watch.tail import Tail

# What a process says of itself and of what it waits for; how it ended, if it has.
_FILES = ("facts.json", "groups.json", "checked", "stall.json", "mesh.json", "exit", "reaped", "gone")


def snapshot(run: Path, tails: Sequence[Tail], to: Path, readers: Readers) -> Run:
    """Make a run of the latest records and the latest dump of each process.

    Args:
        run: the run directory of the job.
        tails: its processes.
        to: a folder to make.
        readers: how to read what PyTorch wrote.
    """
    names = {tail.process.folder.parent.name for tail in tails}
    for name in names:
        for folder in (MARKERS, RAW):
            (to / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy2(Launch(run, name).marker, Launch(to, name).marker)
    for tail in tails:
        _copy(tail, to / RAW / tail.process.folder.parent.name / tail.process.folder.name)
    for name in sorted(names):
        finish(Launch(to, name), readers, None, {})
    return open_run(to)


def latest_dumps(folder: Path) -> dict[str, Path]:
    """The latest dump of each backend of a process, by backend."""
    found = {}
    for backend in BACKENDS:
        dumps = [*folder.glob(f"flight-{backend}-*.*"), *folder.glob(f"calls-{backend}.*")]
        times = {}
        for dump in dumps:
            with suppress(OSError):  # converted meanwhile
                if ".tmp" not in dump.name:
                    times[dump] = dump.stat().st_mtime_ns
        if times:
            found[backend] = max(times, key=lambda dump: times[dump])
    return found


def _copy(tail: Tail, to: Path) -> None:
    source = tail.process.folder
    to.mkdir(parents=True)
    for name in _FILES:
        with suppress(OSError):
            shutil.copy2(source / name, to / name)
    for backend, dump in latest_dumps(source).items():
        with suppress(OSError):
            shutil.copy2(dump, to / f"flight-{backend}-latest{dump.suffix}")
    own = RecordWriter(to / "records.bin")
    for record in tail.recorded:
        own.write(record.kind, *record[:4])
