"""Small runs without one thing: a few of the many that `tests.fuzz.cases` makes, for each test run."""

from __future__ import annotations

import pytest

from dpro.store import open_run
from tests.commands import dpro
from tests.fuzz.pool import Outcome
from tests.fuzz.removals import frames_of, removals_of, write_frames
from tests.fuzz.runs import in_a_pipeline, on_cpus, on_gpus

REMOVED = [
    (on_gpus, "steps: all"),
    (on_gpus, "steps: lengths"),
    (on_gpus, "steps: half of step"),
    (on_gpus, "steps: start_ns"),
    (on_gpus, "steps: numbers that follow each other"),
    (on_gpus, "spans: all but the last"),
    (on_gpus, "spans: lengths"),
    (on_gpus, "spans: distances"),
    (on_gpus, "spans: correlation"),
    (on_gpus, "spans: all on hosts"),
    (on_gpus, "collectives: duration_ns"),
    (on_gpus, "collectives: half of start_ns"),
    (on_gpus, "all ranks but one"),
    (on_cpus, "spans: all"),
    (on_cpus, "spans: the length of one"),
    (in_a_pipeline, "spans: all but the last"),
    (in_a_pipeline, "steps: all"),
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("make", "removed"), REMOVED)
def test_a_run_without_a_thing_is_answered_or_refused_in_one_line(tmp_path, make, removed):
    run = open_run(make(tmp_path))
    frames = frames_of(run)
    write_frames(removals_of(frames)[removed](frames), run.manifest, tmp_path / "without")
    for command in ("explain", "whatif"):
        done = dpro(command, tmp_path / "without")
        assert Outcome(done.returncode, done.stdout + done.stderr).fault == ""
