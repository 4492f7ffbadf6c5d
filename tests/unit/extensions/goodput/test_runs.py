"""Which runs `dpro goodput` takes for one job, and what it says to those who use it first."""

from __future__ import annotations

import json

import pytest

from dpro.extensions.goodput.account import CLASSES
from dpro.extensions.goodput.command import IN_WORDS
from dpro.extensions.goodput.outlook import DESIGNS
from dpro.extensions.goodput.running import account_so_far
from dpro.extensions.watch.command import _after_look
from dpro.extensions.watch.watcher import Watcher
from tests.commands import dpro, refused
from tests.lives import WrittenAttempt, job
from tests.unit.extensions.goodput.test_running import process


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
        assert "ran at the same time, so they are not attempts of one job" in said
    else:
        assert len(account(one.path, other.path)["attempts"]) == 2


def test_help_has_each_change_and_each_class():
    said = dpro("goodput", "--help").stdout
    assert set(IN_WORDS) == set(DESIGNS)
    assert [name for name in DESIGNS if f"{name}:" not in said] == []
    assert [name for name in CLASSES if name not in said] == []
    assert "\b" not in said


def test_search_says_which_change_gains_most_and_which_gain_nothing(tmp_path):
    attempts, begin = [], 0.0
    for number in range(4):
        attempt = WrittenAttempt(begin=begin)
        end = attempt.trained(40, longer={20: 2.0})
        attempt.checkpoint("save", begin + 4 + 20.5, 2.0, f"/c{number}")
        attempts.append(attempt.ended(end, code=1))
        begin = end + 5
    path = str(job(tmp_path, attempts).path)
    lines = dpro("goodput", path, "--hours", "2").stdout.splitlines()
    first = next(
        at for at, line in enumerate(lines) if line.startswith("Hours of training that a change gains")
    )
    gains = [float(line.split()[0].replace(",", "")) for line in lines[first + 1 :] if "  ETTR " in line]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0
    assert "(save in the background)" in "".join(lines)
    assert lines[-1].startswith("Unproven for this job")
    alone = dpro("goodput", path, "--preset", "bloom", "--edit", "hosts:count=1").stdout
    assert "No change that was tried gains anything:" in alone


def test_job_that_saved_nothing_is_shown_how_to_ask_for_checkpoints(tmp_path):
    said = dpro("goodput", str(written(tmp_path, 0).path), "--preset", "bloom").stdout
    assert "The job saved no checkpoint, so a failure loses all its steps: --edit checkpoint:" in said
    asked = ("--preset", "bloom", "--edit", "checkpoint:every=5,stall=1")
    assert "saved no checkpoint" not in dpro("goodput", str(tmp_path), *asked).stdout


def test_job_that_is_being_recorded_is_accounted_for_so_far(tmp_path, monkeypatch):
    for rank in range(10):
        process(tmp_path, rank, 0, 10, 5, world=10)
    monkeypatch.setattr("dpro.cli.runs.is_live", lambda _run: True)
    done = dpro("goodput", str(tmp_path))
    assert "is still being recorded: this is the account so far, of 5 of 10 ranks" in done.stderr
    assert "goodput 26.3% of 19 s on 5 ranks; 5 steps done in 1 attempt;" in done.stdout
    assert "still runs, or its end was not seen" in done.stdout


def test_watch_says_the_account_where_the_job_began_again_and_gives_prometheus_its_numbers(tmp_path):
    class Made:
        latest = None

        def look(self) -> bool:
            self.latest = account_so_far(tmp_path)
            return True

    class Server:
        def update(self, _findings, numbers) -> None:
            self.numbers = numbers

    said: list[str] = []
    server = Server()
    seen = _after_look(server, Made(), said.append)
    watcher = Watcher(tmp_path)
    process(tmp_path, 0, 0, 10, 5)
    seen(watcher)
    assert said == []
    process(tmp_path, 0, 1, 30, 6)
    seen(watcher)
    seen(watcher)
    (line,) = said
    assert " so far: Of " in line
    assert "The job was started 2 times, 1 attempt did not end well" in line
    assert server.numbers["attempts"] == 2
    assert server.numbers["goodput"] == pytest.approx(6 / 40)
