"""The account of a job that still runs."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from dpro.collectors.inside.files import STARTED
from dpro.collectors.inside.records import ANCHOR, UPDATE
from dpro.collectors.launch.recording import MARKERS, RAW
from dpro.errors import InputError
from dpro.extensions.goodput import running as life
from dpro.extensions.goodput.running import MAX_RANKS, LiveAccount, account_so_far, run_so_far
from dpro.schema import STEPS
from tests.recorder_output import FlushedWriter

S = 10**9
PATIENCE_S = 120  # with a machine that does much else


def process(run: Path, rank: int, attempt: int, began_s: int, steps: int, world: int = 2) -> None:
    """A process that has done some steps of 1 s, 4 s after it began."""
    (run / MARKERS).mkdir(exist_ok=True)
    marker = {"host": "n0", "pid": 1, "start_ticks": 1, "launched_ns": 0}
    (run / MARKERS / "a.json").write_text(json.dumps(marker))
    own = run / RAW / "a" / f"n0-{began_s}-{rank}"
    own.mkdir(parents=True)
    facts = {"rank": rank, "host": "n0", "pid": rank, "local_rank": rank, "world_size": world}
    facts |= {
        "started_ns": began_s * S,
        "attempt": str(attempt),
        "gpu_uuid": "",
        "gpu_name": "",
        "clock": "b",
    }
    (own / "facts.json").write_text(json.dumps(facts | {"environment": {}, "versions": {}}))
    moments = ("process", "imported", "group_begin", "group", "work")
    started = {f"{name}_ns": (began_s + at) * S for name, at in zip(moments, (0, 2, 2, 3, 4), strict=True)}
    (own / STARTED).write_text(json.dumps(started))
    records = FlushedWriter(own / "records.bin")
    records.write(ANCHOR, 0, 0, 0, 0)
    for step in range(1, steps + 1):
        records.write(UPDATE, 0, step, (began_s + 4 + step) * S, (began_s + 4 + step) * S)


def test_account_so_far_is_of_all_attempts(tmp_path):
    for rank in (0, 1):
        process(tmp_path, rank, 0, 10, 6)
        process(tmp_path, rank, 1, 30, 9)
    document = account_so_far(tmp_path)
    assert [(each.steps, each.repeated, each.end) for each in document.attempts] == [
        (6, 0, "failed"),
        (9, 6, "running"),
    ]
    assert document.wall_s == pytest.approx(43)
    assert document.goodput == pytest.approx(9 / 43)
    assert sum(each.share for each in document.classes) == pytest.approx(1)


def test_few_ranks_stand_for_many(tmp_path):
    for rank in range(10):
        process(tmp_path, rank, 0, 10, 3, world=10)
    with run_so_far(tmp_path) as run:
        assert run.manifest.ranks == [0, 2, 4, 6, 8]
        assert len(run.manifest.ranks) <= MAX_RANKS
        assert run.manifest.world_size == 10
        assert run.table(STEPS)["rank"].n_unique() == 5
        assert run.label == str(tmp_path)


def test_recording_without_a_rank_is_refused(tmp_path):
    (tmp_path / MARKERS).mkdir()
    with pytest.raises(InputError, match="no rank has recorded anything yet"), run_so_far(tmp_path):
        pass


def test_account_is_made_aside_and_what_cannot_be_read_is_no_account(tmp_path, monkeypatch):
    monkeypatch.setattr(life, "MIN_S", 0.0)
    monkeypatch.setattr(life, "SHARE", 1e9)
    asked, answer = threading.Event(), threading.Event()

    def account(_run):
        asked.set()
        answer.wait(PATIENCE_S)
        return account_so_far(_run)

    monkeypatch.setattr(life, "account_so_far", account)
    watch = LiveAccount(tmp_path)
    assert not watch.look()  # begins
    assert asked.wait(PATIENCE_S)
    assert not watch.look()  # does not wait for it
    answer.set()
    until = time.monotonic() + PATIENCE_S
    while watch._working is not None and time.monotonic() < until:
        assert not watch.look()  # nothing is recorded
    assert watch.latest is None
    process(tmp_path, 0, 0, 10, 3)
    while not watch.look():
        assert time.monotonic() < until
    assert watch.latest is not None
    assert watch.latest.steps == 3
