"""Requests from outside: `dpro attach` leaves them in a file that all processes of the job look for.

Reads the latest requests, `control.json` beside the folders of the launches, once a second. Triggers the
occasion `request` once for each. A probe that has done what was asked says so with `Recorder.answer`.
"""

from __future__ import annotations

import json
from typing import Any

from ..files import REQUESTED, stamp_of
from ..recorder import Recorder


class Requests:
    """The requests that one process has seen."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._path = recorder.launch.parent / REQUESTED
        self._stamp = stamp_of(self._path)
        self._seen: set[str] = set()

    def on_open(self) -> None:
        """Skip requests made before this process began to record: they were not for it."""
        self._stamp = stamp_of(self._path)
        self._seen = {request["id"] for request in self._latest()}

    def on_second(self) -> None:
        """Look for new requests."""
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        latest = self._latest()
        new = [request for request in latest if request["id"] not in self._seen]
        self._seen = {request["id"] for request in latest}
        for request in new:
            self._recorder.on_request(request)

    def _latest(self) -> list[dict[str, Any]]:
        """Return the latest requests, oldest first; empty where there never was one."""
        try:
            latest: list[dict[str, Any]] = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return []
        return latest


def install(recorder: Recorder) -> None:
    """Listen to requests."""
    requests = Requests(recorder)
    recorder.listen("open", requests.on_open)
    recorder.listen("second", requests.on_second)
