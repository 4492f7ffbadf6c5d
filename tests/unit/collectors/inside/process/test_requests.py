"""Requests from outside reach each process once, in order, also where several come within a second."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from types import SimpleNamespace

from dpro.collectors import attach as attaching
from dpro.collectors.inside.process import requests


@pytest.fixture
def seen(tmp_path):
    """A process that looks for requests, and the kinds of those that it has seen."""
    listening, kinds = {}, []
    recorder = SimpleNamespace(
        launch=tmp_path / "launch",
        listen=listening.__setitem__,
        on_request=lambda request: kinds.append(request["kind"]),
    )
    requests.install(recorder)
    return SimpleNamespace(open=listening["open"], look=listening["second"], kinds=kinds)


def send(folder, number, kind):
    attaching._send(folder, {"id": str(number), "kind": kind})


def test_all_requests_of_a_second_are_seen_once(tmp_path, seen):
    seen.open()
    for number, kind in enumerate(("stacks", "window", "off")):
        send(tmp_path, number, kind)
    seen.look()
    send(tmp_path, 3, "on")
    seen.look()
    seen.look()
    assert seen.kinds == ["stacks", "window", "off", "on"]


def test_what_was_asked_before_a_process_began_is_not_asked_of_it(tmp_path, seen):
    send(tmp_path, 0, "window")
    seen.open()
    seen.look()
    send(tmp_path, 1, "stacks")
    seen.look()
    assert seen.kinds == ["stacks"]


def test_requests_that_are_long_over_are_forgotten(tmp_path, seen):
    for number in range(3 * attaching.KEPT_REQUESTS):
        send(tmp_path, number, "stacks")
        seen.look()
    assert len(seen.kinds) == 3 * attaching.KEPT_REQUESTS
    assert (tmp_path / "control.json").read_text().count("id") == attaching.KEPT_REQUESTS
