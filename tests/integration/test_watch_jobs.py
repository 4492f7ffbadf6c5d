"""`dpro watch` on real jobs with real faults: what is named while they still run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dpro.detect.stragglers.phases import PHASES
from dpro.opening import ensure_finished
from dpro.schema import SPANS
from tests.hang_jobs import kill_ranks
from tests.jobs import ROOT, TORCHRUN, complete, environment, opened, wait_for

pytest.importorskip("torch")

DPRO = [sys.executable, "-m", "dpro"]
HANGING = ROOT / "tests" / "hanging.py"
SLOWING = ROOT / "tests" / "slowing.py"
# No deep windows: they would be as long as the steps.
RECORD = [*DPRO, "record", "-o", "run", "--every", "100000", "--skip", "90000"]
LONGEST_S = 150


def launched(job: Path, num_ranks: int, *options: object) -> list[str]:
    return [*TORCHRUN[:-1], str(num_ranks), "--standalone", str(job), *map(str, options)]


@contextmanager
def watched(folder: Path, command: list[str], *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Record a job and watch it, its notices going to `notices`; ranks are killed at the end."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with (folder / "notices").open("wb") as output, (folder / "complaints").open("wb") as complaints:
        job = subprocess.Popen([*RECORD, *options, "--", *command], cwd=folder, env=environment(), **quiet)
        watcher = subprocess.Popen(
            [*DPRO, "watch", "run", "--json"], cwd=folder, env=environment(), stdout=output, stderr=complaints
        )
        try:
            yield watcher
        finally:
            kill_ranks(folder / "run")
            job.wait(60)
            watcher.wait(60)
    assert (folder / "complaints").read_text() == ""


def notices(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "notices").read_text().splitlines()]


def first_notice(folder: Path, watcher: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The first finding, once it is reported."""
    deadline = time.monotonic() + LONGEST_S
    while not (folder / "notices").read_bytes().endswith(b"\n"):
        assert watcher.poll() is None, "the watcher ended and had reported nothing"
        assert time.monotonic() < deadline, "nothing was reported"
        time.sleep(0.1)
    return notices(folder)[0]


@pytest.mark.slow
def test_a_rank_that_sleeps_for_ever_is_named_while_the_job_runs_and_its_stacks_are_kept(tmp_path):
    command = launched(HANGING, 2, "sleep", tmp_path / "mark", "--flat", "--rank", 1)
    with watched(tmp_path, command) as watcher:
        finding = first_notice(tmp_path, watcher)
        assert (finding["event"], finding["class"], finding["ranks"]) == ("begins", "hang.host", [1])
        kept = tmp_path / "run" / "findings" / "hang-1" / "stacks.json"
        wait_for(kept)
    stacks = json.loads(kept.read_text())
    assert [rank["rank"] for rank in stacks["ranks"]] == [0, 1]
    assert "hanging.py" in json.dumps(stacks["ranks"][1])
    assert [each["event"] for each in notices(tmp_path)] == ["begins", "ends"]
    again = complete([*DPRO, "diagnose", "run/findings/hang-1/dumps", "--json"], tmp_path)
    [same] = json.loads(again.stdout)["findings"]
    assert (same["class"], same["ranks"]) == ("hang.host", [1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "class_"), [("stop", "hang.host"), ("skip", "hang.mismatch"), ("size", "hang.mismatch")]
)
def test_other_hangs_are_named_while_the_job_runs(tmp_path, fault, class_):
    with watched(tmp_path, launched(HANGING, 4, fault, tmp_path / "mark")) as watcher:
        finding = first_notice(tmp_path, watcher)
    assert (finding["class"], finding["ranks"]) == (class_, [2])


@pytest.mark.slow
def test_a_rank_that_becomes_slow_is_named_while_the_job_runs_and_not_before(tmp_path):
    command = launched(SLOWING, 2, tmp_path / "mark", "--steps", 400, "--slow-rank", 1, "--times", 2)
    with watched(tmp_path, command) as watcher:
        finding = first_notice(tmp_path, watcher)
    assert (finding["event"], finding["class"], finding["ranks"]) == ("begins", "slow.host", [1])
    assert finding["cost_ms_per_step"] > 30
    assert finding["time_ns"] > int((tmp_path / "mark").read_text())
    assert finding["place"]["name"] == PHASES["before"]
    assert f"all of it in {PHASES['before']}" in finding["evidence"][0]


@pytest.mark.slow
def test_deep_windows_show_the_slow_rank_while_the_job_runs(tmp_path):
    job = ["--steps", 400, "--slow-rank", 1, "--times", 3, "--since", 0]
    windows = ["--skip", "5", "--every", "8", "--window-steps", "4"]
    with watched(tmp_path, launched(SLOWING, 2, tmp_path / "mark", *job), *windows):
        deadline = time.monotonic() + LONGEST_S
        while len(list((tmp_path / "run").glob(".raw/*/*/window0004.json"))) < 2:
            assert time.monotonic() < deadline, "no windows came"
            time.sleep(0.1)
        chosen = [word for number in range(4) for word in ("--window", str(number))]
        said = complete([*DPRO, "watch", "run", *chosen], tmp_path)
    [finding] = json.loads(said.stdout)["findings"]
    assert (finding["class_"], finding["ranks"]) == ("slow.host", [1])
    assert finding["cost_ns"] > 100e6


@pytest.mark.slow
def test_a_healthy_job_raises_nothing_for_its_whole_life(tmp_path):
    with watched(tmp_path, launched(SLOWING, 2, tmp_path / "mark")) as watcher:
        assert watcher.wait(LONGEST_S) == 0
    assert notices(tmp_path) == []


@pytest.mark.slow
def test_record_watch_reports_on_stderr_and_in_the_run_and_leaves_the_output_and_exit_code_of_the_job_alone(
    tmp_path,
):
    job = launched(SLOWING, 2, tmp_path / "mark", "--steps", 60, "--slow-rank", 1, "--times", 2, "--since", 3)
    done = complete([*RECORD, "--watch", "--", *job], tmp_path)
    assert done.returncode == 0
    assert done.stdout == b""
    assert b"dpro: " in done.stderr
    assert b" slow host work: rank 1 (host code that waits) costs " in done.stderr
    for command in ("diagnose", "info"):
        document = json.loads(complete([*DPRO, command, "run", "--json"], tmp_path).stdout)
        [finding] = document["while_it_ran"]
        assert (finding["class"], finding["ranks"], finding["over_ns"] > finding["time_ns"]) == (
            "slow.host",
            [1],
            True,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said", "windows"),
    [
        (["--on-request", "--budget", "20%"], b"rank 1 is late: steps ", 1),
        (["--on-request", "--budget", "0.1%"], b"rank 1 is late: a deep window is postponed for ", 0),
        (["--on-request", "--no-ask"], b"", 0),
        (["--no-windows"], b"", 0),
    ],
)
def test_a_rank_that_turns_late_gets_a_deep_window_by_itself_where_the_budget_pays_for_it(
    tmp_path, options, said, windows
):
    job = launched(SLOWING, 2, tmp_path / "mark", "--steps", 150, "--slow-rank", 1, "--times", 2)
    done = complete([*DPRO, "record", "-o", "run", "--watch", *options, "--", *job], tmp_path)
    assert (done.returncode, done.stdout) == (0, b"")
    assert b" slow host work: rank 1 (host code that waits) costs " in done.stderr
    assert (b"rank 1 is late" in done.stderr) == bool(said)
    assert said in done.stderr
    run = opened(tmp_path / "run")
    deep = run.table(SPANS, ["rank", "window"]).unique().sort("rank").rows()
    assert deep == [(rank, window) for rank in (0, 1) for window in range(windows)]


def test_outlets_that_cannot_be_are_refused_before_the_job_starts(tmp_path):
    for outlet in (["--webhook", "nowhere"], ["--metrics", "http"]):
        done = complete([*RECORD, *outlet, "--", "touch", "started"], tmp_path)
        assert done.returncode == 2
    assert not (tmp_path / "started").exists()


def test_a_run_that_is_not_being_recorded_cannot_be_watched(tmp_path):
    done = complete([*DPRO, "watch", str(ROOT / "sample_traces" / "healthy")], tmp_path)
    assert done.returncode == 1
    assert b"is not being recorded now" in done.stderr


def command_lines() -> list[bytes]:
    """Those of all processes of this machine, as anyone can see them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append((process / "cmdline").read_bytes())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "secret"),
    [("--webhook", b"http://127.0.0.1:9/secret-of-a-webhook"), ("--on-finding", b"echo secret-of-a-command")],
)
def test_what_may_be_secret_is_in_no_command_line_and_not_in_the_run(tmp_path, option, secret):
    command = [*RECORD, option, secret, "--", "sleep", "20"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment()) as job:
        watcher = b"watch\0" + os.fsencode(tmp_path / "run")
        while not any(watcher in line for line in command_lines()):
            assert job.poll() is None, "the watcher was not seen"
            time.sleep(0.1)
        assert b"sleep\x0020\0" in command_lines()
        assert not [line for line in command_lines() if secret in line]
        job.kill()
    ensure_finished(tmp_path / "run")
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if secret in file.read_bytes()]
