"""The window that the watcher asks for: one for each reason, asked for again where it was put off."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from dpro.collectors.attach import Answers, outcome_in_words
from dpro.detect.findings import Finding
from dpro.detect.findings_log import BEGINS, ENDS, Notice
from dpro.errors import InputError
from dpro.extensions.watch import request as requesting
from dpro.extensions.watch.job import OPEN_NS
from dpro.extensions.watch.request import WindowRequests

MS = 10**6
SLOWER = SimpleNamespace(
    before_ns=10 * MS, after_ns=20 * MS, since=100, after=SimpleNamespace(begin_ns=1000 * MS)
)
TAKEN = {"window": 4, "steps": [20, 22], "why_not": ""}
PUT_OFF = {"why_not": "the budget does not allow another window yet", "paid_in_s": 90.0}
REFUSED = {"why_not": "the job is recorded without deep windows (--no-windows)"}


def noticed(event: str, rank: int = 1, step: int = 500) -> Notice:
    finding = Finding("slow.host", "rank", str(rank), (rank,), 0.2, 0.9, 5e6, ())
    return Notice(event, 1, 0, step, finding)


class PlayedJob:
    """A job of two ranks, whose answers and pace a test gives, and whose clock it moves.

    Attributes:
        sent: facts of each request.
        given: the answers to the latest, by rank.
        slower: since when it is slower, as `Pace.slowdown` says it; None where it is not.
        windows: of its first rank.
    """

    def __init__(self) -> None:
        self.sent: list[dict[str, object]] = []
        self.said: list[str] = []
        self.given: dict[int, dict[str, object]] = {}
        self.now_s, self.trains, self.slower = 1000.0, True, None
        self.windows: list[tuple[int, int, int]] = []
        process = SimpleNamespace(rank=0)
        steps = np.array([[step, step * 10 * MS, 10 * MS, -1] for step in range(500)])
        first = SimpleNamespace(process=process, windows=self.windows, steps=steps)
        self.tails = {"rank 0": first}

    def send(self, _run: object, kind: str, **facts: object) -> object:
        if not self.trains:
            raise InputError("run: none of its processes trains yet")
        self.sent.append({"kind": kind, **facts})
        self.given = {}
        return SimpleNamespace(answers=self.answers, is_over=lambda: False)

    def answers(self) -> Answers:
        return Answers(dict(self.given), [rank for rank in (0, 1) if rank not in self.given])


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> PlayedJob:
    played = PlayedJob()
    monkeypatch.setattr(requesting, "SentRequest", played.send)
    pace = SimpleNamespace(read=lambda _: None, slowdown=lambda *_: played.slower)
    monkeypatch.setattr(requesting, "Pace", lambda: pace)
    monkeypatch.setattr(requesting, "time", SimpleNamespace(monotonic=lambda: played.now_s))
    return played


def look(
    requests: WindowRequests,
    job: PlayedJob,
    *notices: Notice,
    after_s: float = 1.0,
    unclear: Sequence[Finding] = (),
) -> list[str]:
    """What is said after a look some time after the last."""
    job.now_s += after_s
    requests.look(job, notices, unclear)
    said, job.said[:] = [*job.said], []
    return said


def test_rank_that_turns_late_gets_one_window_within_the_budget(job, tmp_path):
    requests = WindowRequests(tmp_path, job.said.append)
    assert look(requests, job) == []
    assert look(requests, job, noticed(BEGINS)) == []
    assert job.sent == [{"kind": "window", "within_budget": True}]
    job.given = {0: {"rank": 0, **TAKEN}}
    assert look(requests, job) == []  # rank 1 still saves it
    job.given[1] = {"rank": 1, **TAKEN}
    assert look(requests, job) == ["rank 1 is late: steps 20 to 21 were recorded in depth, as window 4"]
    assert look(requests, job, after_s=1000) == []
    assert len(job.sent) == 1


def test_rank_of_which_it_is_unclear_why_it_is_late_gets_a_window_once(job, tmp_path):
    requests, unclear = WindowRequests(tmp_path, job.said.append), [noticed(BEGINS).finding]
    assert look(requests, job, unclear=unclear) == []
    assert len(job.sent) == 1
    job.given = dict.fromkeys((0, 1), TAKEN)
    [said] = look(requests, job, unclear=unclear)
    assert said.startswith("rank 1 is late, and all steps take longer: steps 20 to 21 were recorded")
    look(requests, job, unclear=unclear)
    assert len(job.sent) == 1


def test_rank_that_is_late_again_soon_gets_no_second_window_and_later_it_does(job, tmp_path):
    requests = WindowRequests(tmp_path, job.said.append)
    for after_s, count in ((1, 1), (60, 1), (requesting.AGAIN_S, 2)):
        look(requests, job, noticed(BEGINS), after_s=after_s)
        assert len(job.sent) == count
        job.given = dict.fromkeys((0, 1), TAKEN)
        look(requests, job)
        look(requests, job, noticed(ENDS))


def test_window_that_is_put_off_is_said_once_and_asked_for_again_when_it_may_be_paid(job, tmp_path):
    requests = WindowRequests(tmp_path, job.said.append)
    look(requests, job, noticed(BEGINS))
    job.given = {0: PUT_OFF}
    [said] = look(requests, job)
    assert said == f"rank 1 is late: a deep window is postponed for 90 s, since {PUT_OFF['why_not']}"
    look(requests, job, after_s=80)
    assert len(job.sent) == 1
    look(requests, job, after_s=20)
    assert len(job.sent) == 2
    job.given = {0: PUT_OFF}
    assert look(requests, job) == []
    look(requests, job, noticed(ENDS), after_s=100)  # nothing is late any more
    assert len(job.sent) == 2


def test_job_without_windows_is_asked_once_and_says_why(job, tmp_path):
    requests = WindowRequests(tmp_path, job.said.append)
    look(requests, job, noticed(BEGINS))
    job.given = {0: REFUSED}
    assert look(requests, job) == [f"rank 1 is late: no deep window was recorded, since {REFUSED['why_not']}"]
    assert look(requests, job, after_s=100) == []
    assert len(job.sent) == 1


def test_ranks_that_do_not_answer_are_not_waited_for_for_ever(job, tmp_path):
    requests = WindowRequests(tmp_path, job.said.append)
    look(requests, job, noticed(BEGINS))
    [said] = look(requests, job, after_s=requesting.PATIENCE_S)
    assert said == "rank 1 is late: no deep window was recorded, since no rank answered"


def test_job_that_begins_again_has_no_reason_for_a_window(job, tmp_path):
    requests = WindowRequests(tmp_path, job.said.append)
    look(requests, job, noticed(BEGINS))
    requests.forget()
    assert look(requests, job) == []
    assert len(job.sent) == 1
    look(requests, job, noticed(BEGINS))
    assert len(job.sent) == 2


def test_nothing_is_asked_while_nothing_trains(job, tmp_path):
    requests = WindowRequests(tmp_path, job.said.append)
    job.trains = False
    assert look(requests, job, noticed(BEGINS)) == []
    job.trains = True
    look(requests, job)
    assert len(job.sent) == 1


@pytest.mark.parametrize(("end_ns", "count"), [(4799 * MS, 1), (4801 * MS, 0), (OPEN_NS, 0)])
def test_late_rank_that_a_window_shows_gets_no_other(job, tmp_path, end_ns, count):
    requests = WindowRequests(tmp_path, job.said.append)
    job.windows.append((0, 4700 * MS, end_ns))
    look(requests, job, noticed(BEGINS))
    assert len(job.sent) == count


def test_job_that_slows_down_gets_a_window_once_two_looks_show_it(job, tmp_path):
    requests = WindowRequests(tmp_path, job.said.append)
    look(requests, job, after_s=11)
    assert requests.slower_since_ns == 0
    job.slower = SLOWER
    look(requests, job, after_s=11)
    assert not job.sent
    assert requests.slower_since_ns == SLOWER.after.begin_ns
    job.now_s += 11
    assert requests.look(job, [], [])  # it asks now
    assert not requests.look(job, [], [])
    assert len(job.sent) == 1
    job.given = dict.fromkeys((0, 1), TAKEN)
    [said] = look(requests, job)
    assert said.startswith("steps take 20 ms since step 100, 10 ms before: steps 20 to 21 were recorded")
    look(requests, job, after_s=11)
    assert len(job.sent) == 1


@pytest.mark.parametrize(("end_ns", "count"), [(899 * MS, 1), (901 * MS, 0), (1500 * MS, 0)])
def test_slow_steps_that_follow_a_window_or_that_one_shows_get_none(job, tmp_path, end_ns, count):
    requests = WindowRequests(tmp_path, job.said.append)
    job.slower = SLOWER
    job.windows.append((0, end_ns - 40 * MS, end_ns))
    for _ in range(4):
        look(requests, job, after_s=11)
    assert len(job.sent) == count


def test_a_window_is_never_postponed_for_no_time():
    for paid_in_s, words in ((0.2, "for 1 s"), (90.0, "for 90 s")):
        answers = Answers({0: PUT_OFF | {"paid_in_s": paid_in_s}}, ())
        assert words in outcome_in_words(answers)
