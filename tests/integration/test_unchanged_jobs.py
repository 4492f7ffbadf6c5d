"""Jobs of a hundred kinds show the same when they are recorded as when they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.schema import STEPS
from tests.jobs import opened
from tests.odd_jobs import OddJob, outcome
from tests.odd_kinds import JOBS

pytest.importorskip("torch")


def _parameters() -> list[object]:
    return [pytest.param(job, id=job.kind, marks=[] if job.is_quick else pytest.mark.slow) for job in JOBS]


@pytest.mark.few(4)
@pytest.mark.parametrize("job", _parameters())
def test_job_shows_the_same_recorded_as_plain(job: OddJob, tmp_path: Path) -> None:
    if job.lacks():
        pytest.skip(job.lacks())
    place = tmp_path / "place"
    run = place / job.run_name
    plain = outcome(job, tmp_path / "job", place, None)
    recorded = outcome(job, tmp_path / "job", place, run)
    assert recorded == plain
    assert plain.code != "hung"
    if not job.steps:  # there may be no run at all
        return
    opened_run = opened(run)
    assert len(opened_run.table(STEPS)) >= job.steps
    trouble = [line for line in opened_run.manifest.warnings if line.startswith("process ")]
    assert len(trouble) <= job.lines, trouble
