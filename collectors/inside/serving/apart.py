"""Where an engine writes that runs in a process without a rank, beside those of its workers.

In: which engine it is. Out: a folder in that of the launch, with records, and the lines of its requests,
which a thread of ours writes: a full disk or a slow one must not hold up the engine.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from .. import records
from ..files import write_whole
from ..names import ENGINE, ENGINES

SECOND_S, JOIN_S = 1.0, 5.0


class ApartEngine:
    """The output of an engine without a rank.

    Attributes:
        folder: where it writes.
        records: its records.
    """

    def __init__(self, launch: Path, facts: dict[str, int], write_lines: Callable[[], None]) -> None:
        """Make the folder.

        Args:
            facts: `rank`, the first of its workers; `replica`.
            write_lines: writes the lines of requests that are there; called about once a second.

        Raises:
            OSError: it cannot be made.
        """
        self.folder = launch / f"{ENGINES}{socket.gethostname()}-{os.getpid()}"
        self.folder.mkdir()
        self.records = records.RecordWriter(self.folder / "records.bin")
        write_whole(self.folder / ENGINE, json.dumps({**facts, "pid": os.getpid()}).encode())
        self._write_lines = write_lines
        self._idle = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="dpro-requests", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """No request is in work: the process may be ended."""
        self._idle.set()

    def end(self) -> None:
        """The interpreter will exit now: write what is left."""
        self._ending = True
        self._idle.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._ending:
            self._idle.wait(SECOND_S)
            self._idle.clear()
            self._write_lines()
