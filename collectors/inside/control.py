"""Requests from outside: `dpro attach` leaves them in a file, and all processes of the job look for it.

In: `control.json` beside the folders of the launches, once a second. Out: the
occasion `request`. Who has done what was asked says so with `Recorder.answer`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from .recorder import Recorder

FILE = "control.json"


class Control:
    """The requests that one process has seen."""

    def __init__(self, recorder: Recorder) -> None:
        """None was seen yet."""
        self._recorder = recorder
        self._path = recorder.launch.parent / FILE
        self._seen = self._stamp()

    def on_open(self) -> None:
        """What was asked before this process began to record was not asked of it."""
        self._seen = self._stamp()

    def on_second(self) -> None:
        """Look for a new request."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        request: dict[str, Any] = json.loads(self._path.read_bytes())
        self._recorder.on_request(request)

    def _stamp(self) -> tuple[int, int]:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return 0, 0
        return status.st_mtime_ns, status.st_ino


def install(recorder: Recorder) -> None:
    """Listen to requests."""
    control = Control(recorder)
    recorder.listen("open", control.on_open)
    recorder.listen("second", control.on_second)
