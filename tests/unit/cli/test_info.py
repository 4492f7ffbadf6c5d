"""What `dpro info` says of recordings, on made-up runs."""

import dataclasses
import signal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.info import info_document
from dpro.analysis.unanswered import why_no_window
from dpro.cli import cli
from dpro.cli.info import in_words
from dpro.collectors.convert.process import DROPPED, OCCUPIED, UNFINISHED
from dpro.errors import InputError
from dpro.schema import SPANS, STEPS, WORKERS
from dpro.store import AppliedChange, ChangedPlace, Manifest, Run, open_run, write_manifest, write_part
from tests.builders import TinyRun

OPTIONS = {"skip": 5, "window_steps": 2, "every": 200}


def recorded(
    folder: Path,
    ends: list[tuple[int, int]],
    world_size: int = 4,
    status: int | None = 1,
    steps: int = 0,
    **facts: Any,
) -> Run:
    ranks = list(range(len(ends)))
    codes, signals = zip(*ends, strict=True) if ends else ((), ())
    frame = pl.DataFrame({"rank": ranks, "exit_code": codes, "exit_signal": signals})
    write_part(folder, WORKERS, "rank00000-1", frame)
    numbers = list(range(1, steps))
    write_part(folder, STEPS, "rank00000-1", pl.DataFrame({"rank": [0] * len(numbers), "step": numbers}))
    facts = {"options": OPTIONS} | facts
    write_manifest(folder, Manifest(world_size, ranks, exit_status=status, **facts))
    return open_run(folder)


def line(run: Run, begin: str) -> str:
    [found] = [each for each in in_words(info_document(Analysis(run))) if each.startswith(begin)]
    return found


def test_ranks_that_ended_the_same_way_are_named_together(tmp_path):
    run = recorded(tmp_path, [(0, -1), (0, -1), (-1, signal.SIGKILL), (-1, -1)])
    assert line(run, "ended") == (
        "ended      ranks 0-1: exit code 0; rank 2: killed by SIGKILL; rank 3: not known; "
        "the job: exit code 1"
    )


def test_job_that_a_signal_killed_is_said_to_be(tmp_path):
    run = recorded(tmp_path, [(-1, signal.SIGTERM)], status=-signal.SIGTERM)
    assert line(run, "ended") == "ended      rank 0: killed by SIGTERM; the job: killed by SIGTERM"


def test_missing_ranks_are_named(tmp_path):
    assert line(recorded(tmp_path, [(0, -1)] * 2), "ranks") == "ranks      2 of 4, missing 2, 3"
    many = recorded(tmp_path / "many", [(0, -1)], world_size=64)
    assert line(many, "ranks") == "ranks      1 of 64, missing 1, 2, 3, 4, 5, 6, 7, 8 …"


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        (
            {"count": 3, "cost_ms": 104.1, "share": 0.0365},  # of a version that counted windows alone
            "windows    3 deep windows cost 104 ms each, 3.65% of the time",
        ),
        (
            {"count": 1, "cost_ms": 104.1, "share": 0.0365, "ends_share": 0.001},
            "recording  cost 3.75% of the time in steps: 0.10% at the ends of steps, 3.65% by 1 deep "
            "window that cost 104 ms",
        ),
    ],
)
def test_what_recording_cost_is_said_of_older_runs_as_of_new_ones(tmp_path, costs, said):
    run = recorded(tmp_path, [(0, -1)], steps=20, windows=costs)
    assert [line for line in in_words(info_document(Analysis(run))) if " of the time" in line] == [said]


def test_earlier_attempts_are_named(tmp_path):
    run = recorded(tmp_path, [(0, -1)])
    recorded(tmp_path / "attempts" / "0", [(5, -1)])
    assert line(run, "attempt") == f"attempt    before this one: {tmp_path / 'attempts' / '0'}"


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (4, "the job ended after 4 steps, before its first deep window (steps 5 to 6) was complete"),
        (6, "the job ended after 6 steps"),
        (7, "no deep window was kept: the recording does not say why"),
    ],
)
def test_run_without_a_window_says_why_in_every_command_that_needs_one(tmp_path, steps, why):
    run = recorded(tmp_path, [(0, -1)], steps=steps)
    assert why in line(run, "windows")
    for command in ("report", "replay"):
        done = CliRunner().invoke(cli, [command, str(tmp_path)])
        assert why in str(done.exception)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (
            {"warnings": ["a word", "process 7 continues without windows: TypeError: __init__()"]},
            "process 7 continues without windows: TypeError: __init__()",
        ),
        ({"warnings": ["rank 0: window 0 is lost: it is cut off"]}, "window 0 is lost: it is cut off"),
        (
            {"skipped": {UNFINISHED: 1, OCCUPIED: 2, "calls": 1}},
            "1 deep windows begun and never ended; 2 deep windows not started, since another profiler ran",
        ),
        (
            {"skipped": {DROPPED: 2}},
            "2 deep windows dropped, since another profiler or a process was started",
        ),
    ],
)
def test_what_kept_windows_away_is_what_the_recorder_says(tmp_path, facts, why):
    run = recorded(tmp_path, [(0, -1)], steps=30, **facts)
    assert f"no deep window was kept: {why}" in why_no_window(run).replace("rank 0: ", "")


ON_REQUEST = {"options": {"skip": 5, "window_steps": 2, "on_request": True}}


@pytest.mark.parametrize(
    ("skipped", "why"),
    [
        ({}, "ask for one with `dpro attach RUN --steps K` while it runs"),
        ({DROPPED: 2}, "no deep window was kept: 2 deep windows dropped"),
    ],
)
def test_run_on_request_without_a_window_says_how_to_ask_for_one(tmp_path, skipped, why):
    run = recorded(tmp_path, [(0, -1)], steps=3, skipped=skipped, **ON_REQUEST)
    assert why in line(run, "windows")


def test_run_on_request_with_a_window_says_that_it_was(tmp_path):
    recorded(tmp_path, [(0, -1)], steps=30, **ON_REQUEST)
    write_part(tmp_path, SPANS, "rank00000-1-x", pl.DataFrame({"span_id": [0], "rank": [0]}))
    assert line(open_run(tmp_path), "windows") == "windows    on request only (--on-request)"


def test_run_with_a_window_needs_no_excuse(tmp_path):
    run = recorded(tmp_path, [(0, -1)])
    write_part(tmp_path, SPANS, "rank00000-1-x", pl.DataFrame({"span_id": [0], "rank": [0]}))
    assert why_no_window(run) == ""


def test_imported_run_has_no_ends_and_no_window_to_excuse(tmp_path):
    write_manifest(tmp_path, Manifest(1, [0]))
    words = in_words(info_document(Analysis(open_run(tmp_path))))
    assert [each for each in words if each.startswith(("ended", "windows", "attempt"))] == []


def test_recording_that_was_copied_without_its_hidden_folders_is_recognised(tmp_path):
    recorded(tmp_path, [(0, -1)])
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"copied without its hidden folders \.recording and \.raw"):
        open_run(tmp_path)
    done = CliRunner().invoke(cli, ["info", str(tmp_path)])
    assert "hidden folders" in str(done.exception)


def test_what_was_changed_in_the_job_is_said_with_the_ranks_that_have_it_in_common(tmp_path):
    place = ChangedPlace("DistributedDataParallel at train.py:3", "bucket_cap_mb=25", 2)
    made = [AppliedChange("bucket:mb=1", rank, [place], []) for rank in (0, 1)]
    lost = AppliedChange("gc", 1, [], ["the job has no steps"])
    run = recorded(tmp_path, [(0, -1)] * 2, world_size=2)
    write_manifest(tmp_path, dataclasses.replace(run.manifest, applied=[*made, lost]))
    assert [
        each for each in in_words(info_document(Analysis(open_run(tmp_path)))) if each.startswith("changed")
    ] == [
        "changed    bucket:mb=1: DistributedDataParallel at train.py:3, instead of bucket_cap_mb=25, 2 times "
        "(on 2 ranks)",
        "changed    gc: not made: the job has no steps (on rank 1)",
    ]


def test_numbers_agree_with_what_they_count_and_no_step_is_no_number(tmp_path):
    run = TinyRun()
    run.op("aten::mm", 0, 10)
    lines = in_words(info_document(Analysis(run.write(tmp_path))))
    assert "steps      none" in lines
    assert "rows       1 span" in lines
    assert "kernels    none" in lines
