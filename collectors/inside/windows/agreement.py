"""What rank 0 announces to the other ranks, without a collective and without blocking any rank.

In: a document on rank 0. Out: the same on the others, a second or two later. It is a file where all ranks see
the same run folder, and else a key in the job's own store, which is only asked what it answers at once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..files import write_whole
from ..recorder import Recorder, identity

KEY = "dpro/windows"
STORE_EVERY = 5  # looks at the file per question to the store


class Agreement:
    """Rank 0's latest announcement, as one process sends or receives it."""

    def __init__(self, recorder: Recorder) -> None:
        """Nothing is announced yet."""
        self._recorder = recorder
        self.forget()

    def forget(self) -> None:
        """This is a forked child: it is no rank yet."""
        self._received = b""
        self._looks = 0

    @property
    def _path(self) -> Path:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return self._recorder.launch.parent / f"windows-{attempt}.json"

    @property
    def slow_s(self) -> float:
        """How long it takes at most until all ranks have received an announcement."""
        return 3.0 if _one_host() else 2.0 * STORE_EVERY

    def send(self, document: dict[str, Any]) -> None:
        """Announce something to all other ranks; it takes the place of what was announced before.

        Raises:
            OSError: the run folder cannot be written.
        """
        if identity()[1] == 1:
            return
        content = json.dumps(document).encode()
        write_whole(self._path, content)
        if not _one_host():
            self._recorder.store.ask(lambda store: store.set(KEY, content))

    def receive(self) -> dict[str, Any] | None:
        """What was announced since the last call; None for nothing."""
        content = self._read()
        if content == self._received:
            return None
        self._received = content
        document: dict[str, Any] = json.loads(content)
        return document

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            pass
        self._looks += 1
        if _one_host() or self._looks % STORE_EVERY:
            return self._received
        found = self._recorder.store.ask(lambda store: store.get(KEY) if store.check([KEY]) else None)
        return self._received if found is None else bytes(found)


def _one_host() -> bool:
    """Whether the launcher says that all ranks are on this host; they see the same folder then."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(identity()[1])
