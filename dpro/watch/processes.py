"""The processes of a job that is being recorded, as they come.

In: a run directory. Out: what each process says of itself. There may be a thousand of them: what they say is
read when it has changed, which their files' time stamps tell.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dpro.collectors.convert import Process
from dpro.collectors.launch import launches
from dpro.collectors.sidecar import process_facts


class Processes:
    """The processes that have recorded so far.

    Attributes:
        found: who they are.
    """

    def __init__(self, run: Path) -> None:
        """Nobody is known."""
        self.found: list[Process] = []
        self._run = run
        self._known: dict[str, tuple[int, Process]] = {}

    def look(self) -> bool:
        """Meet who is new; whether anything has changed."""
        before = self._known
        self._known = {}
        for launch in launches(self._run):
            with suppress(OSError), os.scandir(launch.raw) as folders:
                for folder in folders:
                    self._meet(folder.path, before)
        changed = self._known.keys() != before.keys() or any(
            self._known[path][1] is not before[path][1] for path in before
        )
        self.found = [process for _, process in self._known.values()]
        return changed

    def _meet(self, folder: str, before: dict[str, tuple[int, Process]]) -> None:
        with suppress(OSError, ValueError):  # no process, or one that is about to say who it is
            stamp = os.stat(f"{folder}/facts.json").st_mtime_ns
            known = before.get(folder)
            if known is None or known[0] != stamp:
                known = stamp, Process(Path(folder), process_facts(Path(folder)))
            self._known[folder] = known
