"""Which runs `dpro goodput` takes for one job."""

from __future__ import annotations

import json

import pytest

from tests.commands import dpro, refused
from tests.lives import WrittenAttempt


def written(folder, begin: float, steps: int = 10):
    attempt = WrittenAttempt(begin=begin)
    return attempt.ended(attempt.trained(steps), code=0).written(folder)


def account(*paths) -> dict:
    return json.loads(dpro("goodput", *map(str, paths), "--json").stdout)


def test_folder_of_runs_is_a_job_with_its_runs_as_attempts(tmp_path):
    for element in range(4):
        written(tmp_path / "array" / f"job_{element}", 30.0 * element)
    (tmp_path / "array" / "slurm-1.out").write_text("a log")
    whole = account(tmp_path / "array")
    assert [each["steps"] for each in whole["attempts"]] == [10] * 4
    assert whole["runs"] == [str(tmp_path / "array")]
    each = account(*(tmp_path / "array" / f"job_{element}" for element in (2, 0, 3, 1)))
    assert each["classes"] == whole["classes"]


def test_run_of_a_folder_that_cannot_be_opened_is_said_and_costs_no_other(tmp_path):
    written(tmp_path / "array" / "0", 0)
    broken = written(tmp_path / "array" / "1", 30).path
    (broken / "manifest.json").write_text("{")
    done = dpro("goodput", str(tmp_path / "array"))
    assert "1 attempt" in done.stdout
    assert f"{broken}: left out: " in done.stderr
    (tmp_path / "array" / "0" / "manifest.json").write_text("{")
    said = refused(dpro("goodput", str(tmp_path / "array")), 1)
    assert "none of its runs can be opened" in said


@pytest.mark.parametrize(("begin", "together"), [(2.0, True), (13.0, False)])
def test_runs_that_ran_at_the_same_time_are_no_attempts_of_one_job(tmp_path, begin, together):
    one, other = written(tmp_path / "one", 0), written(tmp_path / "other", begin)
    if together:
        said = refused(dpro("goodput", str(one.path), str(other.path)), 1)
        assert "ran at the same time: they are no attempts of one job" in said
    else:
        assert len(account(one.path, other.path)["attempts"]) == 2
