"""A run that is still being recorded, as a run: copies of what there is of it, one after the other.

In: a run directory that a job is being recorded into. Out: an opened copy now and then, and the run itself
when the job is over. The job is not asked for anything and does not notice.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dpro.errors import DproError

if TYPE_CHECKING:
    from dpro.store import Run

MIN_S = 2.0  # from one copy to the next
SHARE = 0.1  # of the time that copies may take
KEPT = 2  # the latest may still be read when the next is there


def is_live(run: Path) -> bool:
    """Whether a job is being recorded into a folder."""
    from dpro.collectors.launch.recording import launches
    from dpro.collectors.liveness import job_lives

    return any(job_lives(each) for each in launches(run.resolve()))


def copies(run: Path, least_s: float = MIN_S) -> Iterator[Run]:
    """Copies of a recording, the run itself last.

    Args:
        least_s: from one copy to the next, at least.

    Raises:
        InputError: the run cannot be opened when its job is over.
    """
    import polars as pl

    from dpro.opening import open_path

    with TemporaryDirectory(prefix="dpro-live-", ignore_cleanup_errors=True) as folder:
        for number in count():
            if not is_live(run):
                break
            began = time.monotonic()
            shutil.rmtree(Path(folder) / str(number - KEPT), ignore_errors=True)
            with suppress(DproError, OSError, ValueError, pl.exceptions.PolarsError):  # it changes meanwhile
                yield replace(_copied(run.resolve(), Path(folder) / str(number)), source=run)
            took = time.monotonic() - began
            time.sleep(max(least_s, took / SHARE))
        yield open_path(run)


def _copied(run: Path, to: Path) -> Run:
    """A copy of what there is so far, with what was found while the job ran."""
    from dpro.collectors.attach import copy_run
    from dpro.collectors.finish import finish
    from dpro.detect.findings_log import FOLDER
    from dpro.opening import readers
    from dpro.store import open_run

    copy_run(run, to, lambda launch: finish(launch, readers(), None, {}))
    if (run / FOLDER).is_dir():
        shutil.copytree(run / FOLDER, to / FOLDER)
    return open_run(to)
