"""Deep windows that the page requests from a running job.

Takes the run directory of a job under recording; sends the request of `dpro attach RUN --steps K`, and says
how it was answered. All readers of the page share one request at a time.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from dpro.collectors.attach import SentRequest, outcome_in_words
from dpro.errors import DproError

STEPS = 3
PATIENCE_S = 300.0  # how long a request may wait for its window


class RequestedWindow:
    """A deep window that can be requested, and again once the previous request was answered."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._sent: SentRequest | None = None
        self._sent_s = 0.0
        self._said = ""

    def ask(self) -> None:
        """Request a window, unless a request is pending."""
        with self._lock:
            if self._sent is not None:
                return
            try:
                self._sent, self._sent_s = SentRequest(self._run, "window", steps=STEPS), time.monotonic()
                self._said = f"waiting for {STEPS} steps …"
            except (DproError, OSError) as error:
                self._said = str(error)

    def follow(self) -> tuple[bool, str]:
        """Return whether a request is pending, and the outcome of the latest one in words."""
        with self._lock:
            if self._sent is not None:
                answers = self._sent.answers()
                is_late = time.monotonic() > self._sent_s + PATIENCE_S
                if not answers.silent or self._sent.is_over() or is_late:
                    self._sent, self._said = None, outcome_in_words(answers)
            return self._sent is not None, self._said
