"""Which processes are those of a job, and whether it moves."""

from __future__ import annotations

import json
from pathlib import Path

from dpro.collectors.inside.records import ANCHOR, UPDATE
from dpro.collectors.launch.recording import MARKERS, RAW
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
