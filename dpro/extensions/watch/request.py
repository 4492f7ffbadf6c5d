"""Deep windows that the watcher requests by itself, when a rank turns late or the job slows down.

Takes findings of late ranks that begin and end, and the latest steps; requests one window, which the recorder
grants when the budget allows it, and reports the outcome in lines. All ranks record it: if some are missing
from a window, waiting for them looks like transfers. A postponed window is requested again as long as its
reason persists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dpro.collectors.attach import SentRequest, outcome_in_words
from dpro.detect.findings import Finding
from dpro.detect.findings_log import BEGINS, Notice
from dpro.errors import InputError
from dpro.extensions.watch.job import Job, ProcessTail
from dpro.extensions.watch.pace import ANOTHER, Pace, has_window_since
from dpro.units import format_duration

SLOWER_S = 10.0  # between two checks whether the job slows down; two in a row must show it
BESIDE = 10  # steps: a reason that begins so soon after a window is shown by it, or caused
REPORTED = 10  # steps after which a rank that turned late is reported
PATIENCE_S = 300.0  # how long a request may wait for its window
AGAIN_S = 600.0  # until a reason that ended and begins again gets another window
SLOWER, UNCLEAR = "the job", "late ranks"  # reasons without a finding


class _Sent(NamedTuple):
    request: SentRequest
    reasons: frozenset[str]
    sent_s: float


class WindowRequests:
    """Requests one deep window for each reason, one at a time.

    Attributes:
        slower_since_ns: when the steps became slower, on the first rank's clock; 0 where they did not.
    """

    def __init__(self, run: Path, say: Callable[[str], None]) -> None:
        """Begin without reasons.

        Args:
            say: called with one line about the outcome of each request.
        """
        self._run, self._say = run, say
        self.forget()

    def forget(self) -> None:
        """Forget everything: the job begins, or begins again."""
        self._reasons: dict[str, str] = {}  # current reasons, in words, by subject
        self._served: dict[str, float] = {}  # when each had its window, or was refused one
        self._put_off: set[str] = set()  # subjects whose postponement was reported
        self._sent: _Sent | None = None
        self._due_s = self._looked_s = 0.0
        self._pace = Pace()
        self._is_suspected = False  # one check has shown a slowdown
        self.slower_since_ns = 0

    def look(self, job: Job, notices: Sequence[Notice], unclear: Sequence[Finding]) -> bool:
        """Request a window for reasons that have had none, or follow the pending request.

        Args:
            notices: of late ranks, since the last look.
            unclear: ranks that are late now without being findings.

        Returns:
            Whether one was requested now.
        """
        now_s = time.monotonic()
        first = min(job.tails.values(), key=lambda tail: tail.process.rank)
        self._pace.read(first)
        latest = first.steps[-REPORTED - BESIDE :]
        late_ns = int(latest[0, 1]) if len(latest) else 0
        for notice in notices:
            about = notice.finding.title
            if notice.event == BEGINS:
                how = "late" if notice.finding.component_kind == "rank" else "slow"
                self._add(about, f"{notice.finding.component} is {how}", first, late_ns)
            else:
                self._drop(about)
        if unclear:
            self._add(UNCLEAR, f"{unclear[0].component} is late, and all steps take longer", first, late_ns)
        else:
            self._drop(UNCLEAR)
        if now_s - self._looked_s > SLOWER_S:
            self._looked_s = now_s
            self._look_at_pace(first)
        if self._sent is not None:
            self._follow(self._sent, now_s)
        elif self._reasons.keys() - self._served and now_s >= self._due_s:
            with suppress(InputError, OSError):  # no process trains at the moment, or the disk is full
                request = SentRequest(self._run, "window", within_budget=True)
                self._sent = _Sent(request, frozenset(self._reasons), now_s)
                return True
        return False

    def _look_at_pace(self, first: ProcessTail) -> None:
        change = self._pace.slowdown(ANOTHER)
        self.slower_since_ns = 0 if change is None else change.after.begin_ns
        slower = self._pace.slowdown()
        if slower is None:
            self._drop(SLOWER)
        elif self._is_suspected:
            before, after = format_duration(slower.before_ns), format_duration(slower.after_ns)
            words = f"steps take {after} since step {slower.since}, {before} before"
            since_ns = slower.after.begin_ns - BESIDE * round(slower.before_ns)
            self._add(SLOWER, words, first, since_ns)
        self._is_suspected = slower is not None

    def _add(self, about: str, words: str, first: ProcessTail, since_ns: int) -> None:
        now_s = time.monotonic()
        if about not in self._reasons and now_s - self._served.get(about, now_s) > AGAIN_S:
            del self._served[about]
        self._reasons[about] = words
        if has_window_since(first, since_ns):
            self._served[about] = now_s

    def _drop(self, about: str) -> None:
        self._reasons.pop(about, None)
        self._put_off.discard(about)

    def _follow(self, sent: _Sent, now_s: float) -> None:
        """Read the answers of the ranks; rank 0 alone answers if it postpones the window."""
        answers = sent.request.answers()
        first = answers.given[min(answers.given)] if answers.given else {}
        is_waiting = answers.silent and not sent.request.is_over() and now_s < sent.sent_s + PATIENCE_S
        if is_waiting and ("window" in first or not first):
            return
        self._sent = None
        why = " and ".join(self._reasons.get(about, about) for about in sorted(sent.reasons))
        if "paid_in_s" not in first:
            self._served |= dict.fromkeys(sent.reasons, now_s)
            self._say(f"{why}: {outcome_in_words(answers)}")
            return
        self._due_s = now_s + first["paid_in_s"]
        if not sent.reasons <= self._put_off:
            self._put_off |= sent.reasons
            self._say(f"{why}: {outcome_in_words(answers)}")
