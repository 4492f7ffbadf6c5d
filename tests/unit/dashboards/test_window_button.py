"""The button that asks a running job for a deep window: where it is, and what it says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dpro.collectors.attach import Answers
from dpro.dashboards import command, requested
from dpro.dashboards.app import make_app
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.requested import PATIENCE_S, RequestedWindow
from dpro.dashboards.runs import ShownRun
from dpro.errors import InputError
from tests.builders import cpu_job
from tests.pressed import pressed

TAKEN = {"window": 4, "steps": [20, 23], "why_not": ""}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return cpu_job().write(tmp_path_factory.mktemp("run"))


class PlayedJob:
    """A job of two ranks, whose answers a test gives, and whose clock it moves."""

    def __init__(self):
        self.sent, self.given, self.now_s, self.trains = [], {}, 100.0, True

    def send(self, _run, kind, **facts):
        if not self.trains:
            raise InputError("run: is not being recorded now")
        self.sent.append((kind, facts))
        self.given = {}
        silent = lambda: [rank for rank in (0, 1) if rank not in self.given]  # noqa: E731
        return SimpleNamespace(answers=lambda: Answers(self.given, silent()), is_over=lambda: False)


@pytest.fixture
def job(monkeypatch):
    played = PlayedJob()
    monkeypatch.setattr(requested, "SentRequest", played.send)
    monkeypatch.setattr(requested, "time", SimpleNamespace(monotonic=lambda: played.now_s))
    return played


def shown_live(run, window):
    return ShownRun(Loaded(run), iter(()), window)


def test_a_press_asks_for_one_window_and_says_what_became_of_it(run, job, tmp_path):
    app = make_app(shown_live(run, RequestedWindow(tmp_path)), "token")
    assert pressed(app, "shown") == (False, False, "", True)
    assert pressed(app) == (False, True, "waiting for 3 steps …", False)
    assert pressed(app)[1:3] == (True, "waiting for 3 steps …")  # another reader of the page
    assert job.sent == [("window", {"steps": 3})]
    job.given[0] = TAKEN
    assert pressed(app, "asking")[1]
    job.given[1] = TAKEN
    said = "steps 20 to 22 were recorded in depth, as window 4"
    assert pressed(app, "asking") == (False, False, said, True)
    pressed(app)
    assert len(job.sent) == 2


def test_ranks_without_the_window_and_silent_ones_are_named(run, job, tmp_path):
    app = make_app(shown_live(run, RequestedWindow(tmp_path)), "token")
    pressed(app)
    job.given[0], job.now_s = TAKEN, job.now_s + PATIENCE_S + 1
    assert pressed(app, "asking")[2].endswith("as window 4, but not on rank 1")
    pressed(app)
    job.given |= {0: TAKEN | {"why_not": "another profiler was already running"}, 1: TAKEN}
    assert pressed(app, "asking")[2] == (
        "no deep window was recorded, since another profiler was already running"
    )
    pressed(app)
    job.now_s += PATIENCE_S + 1
    assert pressed(app, "asking")[2] == "no deep window was recorded, since no rank answered"


def test_a_job_that_does_not_train_now_is_said_to(run, job, tmp_path):
    app = make_app(shown_live(run, RequestedWindow(tmp_path)), "token")
    job.trains = False
    assert pressed(app) == (False, False, "run: is not being recorded now", True)


def test_there_is_no_button_where_the_job_takes_no_windows_or_is_over(run, tmp_path):
    over = shown_live(run, RequestedWindow(tmp_path))
    app = make_app(over, "token")
    over.follow()
    for nothing in (make_app(shown_live(run, None), "token"), app):
        assert pressed(nothing) == (True, True, "", True)


def test_who_needs_no_token_may_only_look(run, tmp_path):
    app = make_app(shown_live(run, RequestedWindow(tmp_path)))
    assert pressed(app) is None


@pytest.mark.parametrize("takes_windows", [False, True])
def test_only_a_job_that_records_windows_can_be_asked(run, monkeypatch, takes_windows):
    run.manifest.options["windows"] = takes_windows
    monkeypatch.setattr(command, "_lives", lambda _: True)
    monkeypatch.setattr(command, "copies", lambda _: iter((run, run)))
    shown = command._shown_run(str(run.path), lambda _: run)
    assert isinstance(shown.window, RequestedWindow) is takes_windows
