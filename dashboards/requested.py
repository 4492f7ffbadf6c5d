"""The deep window that the page asks a running job for.

In: the run directory of a job that is recorded now. Out: the request that `dpro attach RUN --steps K` makes,
and what became of it. All readers of the page share it, and there is one at a time.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from dpro.collectors.attach import SentRequest, outcome_in_words
from dpro.errors import DproError

STEPS = 3
PATIENCE_S = 300.0  # for the window to be taken


class RequestedWindow:
    """A window that may be asked for, again once it is known what became of the one before."""

    def __init__(self, run: Path) -> None:
        """Nothing was asked for yet."""
        self._run = run
        self._lock = threading.Lock()
        self._sent: SentRequest | None = None
        self._sent_s = 0.0
        self._said = ""

    def ask(self) -> None:
        """Ask for one, unless one is waited for."""
        with self._lock:
            if self._sent is not None:
                return
            try:
                self._sent, self._sent_s = SentRequest(self._run, "window", steps=STEPS), time.monotonic()
                self._said = f"waiting for {STEPS} steps …"
            except (DproError, OSError) as error:
                self._said = str(error)

    def follow(self) -> tuple[bool, str]:
        """Whether one is waited for, and what became of the latest, in words."""
        with self._lock:
            if self._sent is not None:
                answers = self._sent.answers()
                is_late = time.monotonic() > self._sent_s + PATIENCE_S
                if not answers.silent or self._sent.is_over() or is_late:
                    self._sent, self._said = None, outcome_in_words(answers)
            return self._sent is not None, self._said
