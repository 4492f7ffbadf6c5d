"""Requests from outside: `dpro attach` leaves them in a file, and all processes of the job look for it.

In: `control.json` beside the folders of the launches, once a second. Out: the
occasion `request`. Who has done what was asked says so with `Recorder.answer`.
"""

from __future__ import annotations

import json
from typing import Any

from ..files import stamp_of
from ..recorder import Recorder

FILE = "control.json"


class Requests:
    """The requests that one process has seen."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._path = recorder.launch.parent / FILE
        self._seen = stamp_of(self._path)

    def on_open(self) -> None:
        """What was asked before this process began to record was not asked of it."""
        self._seen = stamp_of(self._path)

    def on_second(self) -> None:
        """Look for a new request."""
        stamp = stamp_of(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        request: dict[str, Any] = json.loads(self._path.read_bytes())
        self._recorder.on_request(request)


def install(recorder: Recorder) -> None:
    """Listen to requests."""
    requests = Requests(recorder)
    recorder.listen("open", requests.on_open)
    recorder.listen("second", requests.on_second)
