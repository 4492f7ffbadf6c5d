"""When deep windows are looked at while a job runs."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import pytest

from dpro.collectors.convert import Process
from dpro.detect.findings import Finding
from dpro.errors import Unanswerable
from dpro.watch import deep
from dpro.watch.deep import DeepLooks, saved_windows
from dpro.watch.tail import OPEN_NS, Tail

SLOW = Finding("slow.link", "link", "0-1", (0, 1), 0.2, 0.9, 5e6, ("evidence",))


def tail(folder: Path, rank: int, *windows: int, still_open: int = -1) -> Tail:
    own = folder / str(rank)
    own.mkdir()
    one = Tail(Process(own, {"rank": rank}))
    one.windows.extend((number, number, number + 1) for number in windows)
    if still_open >= 0:
        one.windows.append((still_open, 5, OPEN_NS))
    for number in windows:
        (own / f"window{number:04d}.json").write_text("0123456789")
    return one


def test_only_windows_that_all_ranks_have_saved_count(tmp_path):
    tails = [tail(tmp_path, 0, 1, 2, 3), tail(tmp_path, 1, 2, still_open=3)]
    assert saved_windows(tails) == {2}
    assert saved_windows([]) == set()


@pytest.fixture
def looks(tmp_path, monkeypatch) -> DeepLooks:
    """Looks that a stand-in for the command answers, with its arguments as evidence."""
    said = f"{{'findings': [{dataclasses.asdict(SLOW)!r} | {{'evidence': sys.argv[5:]}}]}}"
    code = f"import json, sys; print(json.dumps({said}))"
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\n{code}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setattr(deep, "SETTLED_S", 0.0)
    return DeepLooks(tmp_path / "run")


def told(looks: DeepLooks, tails: list[Tail]) -> list[Finding]:
    deadline = time.monotonic() + 60
    while (found := looks.look(tails)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_windows_are_looked_at_together_when_there_is_a_new_one_and_not_again(looks, tmp_path, monkeypatch):
    monkeypatch.setattr(deep, "SHARE", 1e9)
    tails = [tail(tmp_path, 0, 1, 2), tail(tmp_path, 1, 1, 2)]
    [found] = told(looks, tails)
    assert found == dataclasses.replace(SLOW, evidence=("--window", "2", "--window", "1"))
    assert [looks.look(tails) for _ in range(3)] == [None] * 3
    assert looks._child is None
    for one in tails:
        one.windows.append((4, 4, 5))
        (one.process.folder / "window0004.json").touch()
        (one.process.folder / "window0004.json").write_text("x")
        (one.process.folder / "window0001.json").unlink()  # was converted
    assert told(looks, tails)[0].evidence == ("--window", "4", "--window", "2")


def test_a_look_whose_files_went_meanwhile_says_nothing(looks, tmp_path):
    tails = [tail(tmp_path, 0, 1)]
    (tmp_path / "python").write_text('#!/bin/sh\necho \'{"error": "the run holds no spans"}\'\n')
    assert looks.look(tails) is None
    assert looks._child is not None
    looks._child.wait()
    assert looks.look(tails) is None
    assert looks._child is None


def test_of_windows_as_many_are_looked_at_as_can_be_and_one_that_is_too_large_is_said(
    looks, tmp_path, monkeypatch
):
    tails = [tail(tmp_path, 0, 1, 2), tail(tmp_path, 1, 1, 2)]
    monkeypatch.setattr(deep, "MAX_BYTES", 30)
    assert told(looks, tails)[0].evidence == ("--window", "2")
    monkeypatch.setattr(deep, "MAX_BYTES", 10)
    with pytest.raises(Unanswerable, match="are not looked at while the job runs"):
        DeepLooks(tmp_path / "run").look(tails)
