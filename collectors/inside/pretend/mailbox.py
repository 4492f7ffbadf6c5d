"""What one pretended rank leaves for another, and whose turn it is: one process computes at a time.

In: objects, by a key that both ends know. Out: the same at the other end. A rank that has to wait gives up
its turn and says for which rank it waits, so that the launcher starts that one. Files are in the launcher's
own folder, which only this user may enter.
"""

from __future__ import annotations

import fcntl
import pickle
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..files import write_whole
from ..names import MAIL, WAITS

LOOK_S = 0.01


class Mailbox:
    """The mail of one rank, which has its turn from the beginning."""

    def __init__(self, launch: Path, rank: int, ranks: list[int]) -> None:
        """Wait for the turn."""
        self._folder, self._rank, self.ranks = launch / MAIL, rank, frozenset(ranks)
        self._folder.mkdir(0o700, exist_ok=True)
        self._turn = (self._folder / "turn").open("ab")
        fcntl.flock(self._turn, fcntl.LOCK_EX)

    def leave(self, key: str, content: Any) -> None:
        """Leave something."""
        write_whole(self._path(key), pickle.dumps(content))

    def fetch(self, key: str, sender: int) -> Any:
        """Wait for what a rank leaves under a key; others compute meanwhile."""
        path = self._path(key)
        if not path.exists():
            waits = self._folder / f"{WAITS}{self._rank}"
            write_whole(waits, str(sender).encode())
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            while not path.exists():
                time.sleep(LOOK_S)
            fcntl.flock(self._turn, fcntl.LOCK_EX)
            waits.unlink()
        return pickle.loads(path.read_bytes())  # written by a process of this very job

    def _path(self, key: str) -> Path:
        return self._folder / quote(f"mail {key}", safe="")
