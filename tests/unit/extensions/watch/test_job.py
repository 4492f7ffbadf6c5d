"""Which processes are those of a job, and whether it moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpro.collectors.inside.records import ANCHOR, CLOCK, UPDATE
from dpro.collectors.launch.recording import MARKERS, RAW
from dpro.errors import InputError
from dpro.extensions.watch import command
from dpro.extensions.watch.command import watched_in_words
from dpro.extensions.watch.job import MAX_PAUSES, Job, Progress, advance
from tests.recorder_output import FlushedWriter

S = 10**9


def test_a_job_moves_when_a_step_ends_and_the_time_between_ends_is_a_pause():
    still = Progress(8, 100.0, (1.0,))
    assert advance(still, 8, None, 107.0) == still
    assert advance(still, 9, None, 107.0) == Progress(9, 107.0, (1.0,))  # on another rank than the first
    assert advance(still, 9, 2.5, 107.0) == Progress(9, 107.0, (1.0, 2.5))


def test_only_the_latest_pauses_are_remembered():
    progress = Progress()
    for step in range(1, MAX_PAUSES + 3):
        progress = advance(progress, step, float(step), 0.0)
    assert len(progress.pauses_s) == MAX_PAUSES
    assert progress.pauses_s[0] == 3.0


def process(run: Path, rank: int, attempt: str, started_ns: int) -> FlushedWriter:
    """A process that has made an anchor record."""
    (run / MARKERS).mkdir(exist_ok=True)
    (run / MARKERS / "a.json").write_text(json.dumps({"host": "n0", "pid": 1, "start_ticks": 1}))
    own = run / RAW / "a" / f"n0-{started_ns}-{rank}"
    own.mkdir(parents=True)
    facts = {"rank": rank, "host": "n0", "pid": rank, "local_rank": rank, "world_size": 2}
    facts |= {"started_ns": started_ns, "attempt": attempt, "gpu_uuid": "", "gpu_name": "", "clock": "b"}
    (own / "facts.json").write_text(json.dumps(facts | {"environment": {}, "versions": {}}))
    records = FlushedWriter(own / "records.bin")
    records.write(ANCHOR, 0, 0, 0, 0)
    return records


def test_a_job_that_stood_still_before_it_was_watched_has_done_so_since_its_latest_step(tmp_path):
    job = Job(tmp_path)
    for rank in (0, 1):
        records = process(tmp_path, rank, "0", 1 * S)
        for count in (1, 2, 3):
            records.write(UPDATE, 0, count, (count + 10) * S, (count + 10) * S)
        records.write(CLOCK, (73 + 6 * rank) * S, 0, 0, 0)  # rank 0 shows 60 s after its latest step
    assert watched_in_words(Path("RUN"), job) == "dpro: watching RUN: no process of it trains yet"
    job.follow()
    assert watched_in_words(Path("RUN"), job) == "dpro: watching RUN: 2 ranks, no step yet"
    job.read()
    assert 60 <= job.still_s < 65
    assert watched_in_words(Path("RUN"), job) == "dpro: watching RUN: 2 ranks, the latest step is 2, 60 s ago"


def test_a_run_that_does_not_exist_is_said_to_be_waited_for_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "BEGIN_S", 0.2)
    heard: list[str] = []
    with pytest.raises(InputError, match="no such file or folder"):
        command._wait_for_recording(tmp_path / "RUN", heard.append)
    assert heard == [f"dpro: waiting 0 s for {tmp_path / 'RUN'} to appear"]


def test_a_job_that_begins_again_is_another_one_whose_steps_count_from_the_first(tmp_path):
    first = [process(tmp_path, rank, "0", 1 * S) for rank in (0, 1)]
    job = Job(tmp_path)
    assert not job.follow()
    assert len(job.tails) == 2
    for count in (1, 2, 3):
        for records in first:
            records.write(UPDATE, 0, count, (count + 10) * S, (count + 10) * S)
        job.read()
    assert (job.step, job.progress.updates, job.progress.pauses_s) == (2, 6, (1.0, 1.0))
    assert not job.follow()
    assert job.workers["rank"].to_list() == [0, 1]

    again = [process(tmp_path, rank, "1", 50 * S) for rank in (0, 1)]
    assert job.follow()
    assert len(job.tails) == 2
    again[0].write(UPDATE, 0, 1, 60 * S, 60 * S)
    job.read()
    assert (job.step, job.progress.updates) == (0, 1)
