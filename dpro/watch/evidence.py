"""What a watcher keeps in the run: the findings log.

In: a run directory. Out: the log, open for writing.
"""

from __future__ import annotations

from pathlib import Path

from dpro.collectors.ownership import ensure_mine
from dpro.detect.findings_log import FOLDER, FindingsLog


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
