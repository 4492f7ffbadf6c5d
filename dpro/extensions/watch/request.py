"""The deep window that the watcher asks for by itself, when a rank turns late or the job slows down.

In: findings of late ranks that begin and end, and the latest steps. Out: a request for one window, which the
recorder grants where the budget pays for it, and lines that say what became of it. All ranks take it: where
some are missing from a window, waiting for them looks like transfers. What was put off is asked for
again for as long as the reason for it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dpro.collectors.attach import SentRequest, outcome_in_words
from dpro.detect.findings_log import BEGINS, Notice
from dpro.errors import InputError
from dpro.extensions.watch.job import Job, ProcessTail
from dpro.extensions.watch.pace import Pace, has_window_since
from dpro.units import ms

SLOWER_S = 10.0  # from one look at whether the job slows down to the next; two in a row have to show it
BESIDE = 20  # steps: what begins so soon after a window is shown by it, or caused
PATIENCE_S = 300.0  # for the window to be taken
AGAIN_S = 600.0  # until what is over and begins again gets another window
SLOWER = "the job"  # the reason that no finding gives


class _Sent(NamedTuple):
    request: SentRequest
    reasons: frozenset[str]
    sent_s: float


class WindowRequests:
    """Asks for one deep window for each reason, one at a time."""

    def __init__(self, run: Path, say: Callable[[str], None]) -> None:
        """There is no reason for a window yet.

        Args:
            say: is called with what became of each request, in a line.
        """
        self._run, self._say = run, say
        self.forget()

    def forget(self) -> None:
        """The job begins, or begins again."""
        self._reasons: dict[str, str] = {}  # those that hold, in words, by what they are about
        self._served: dict[str, float] = {}  # when they had their window, or were refused it
        self._put_off: set[str] = set()  # those of which that was said
        self._sent: _Sent | None = None
        self._due_s = self._looked_s = 0.0
        self._pace = Pace()
        self._is_suspected = False  # that the job slows down, by one look

    def look(self, job: Job, notices: Sequence[Notice]) -> None:
        """Ask for a window where a reason has had none, or see what became of the one asked for.

        Args:
            notices: of late ranks, since the last look.
        """
        now_s = time.monotonic()
        first = min(job.tails.values(), key=lambda tail: tail.process.rank)
        self._pace.read(first)
        for notice in notices:
            about = notice.finding.title
            if notice.event == BEGINS:
                late_ns = first.last_update_ns - BESIDE * self._pace.step_ns
                self._add(about, f"{notice.finding.component} is late", first, late_ns)
            else:
                self._drop(about)
        if now_s - self._looked_s > SLOWER_S:
            self._looked_s = now_s
            self._look_at_pace(first)
        if self._sent is not None:
            self._follow(self._sent, now_s)
        elif self._reasons.keys() - self._served and now_s >= self._due_s:
            with suppress(InputError, OSError):  # nothing trains at the moment, or the disk is full
                request = SentRequest(self._run, "window", within_budget=True)
                self._sent = _Sent(request, frozenset(self._reasons), now_s)

    def _look_at_pace(self, first: ProcessTail) -> None:
        slower = self._pace.slowdown()
        if slower is None:
            self._drop(SLOWER)
        elif self._is_suspected:
            before, after = ms(slower.before_ns), ms(slower.after_ns)
            words = f"steps take {after:.3g} ms since step {slower.since}, {before:.3g} before"
            since_ns = slower.after.begin_ns - BESIDE * round(slower.after_ns)
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
        """See what the ranks have answered: rank 0 alone where it puts a window off."""
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
