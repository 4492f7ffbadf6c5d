"""How a job ended, in one sentence that all answers begin with: small runs written by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

from dpro.analysis.analysis import Analysis
from dpro.analysis.end import COMPLETED, ENDED, FAILED, RUNNING, UNKNOWN, JobEnd
from dpro.analysis.summary import health_info
from dpro.cli import cli
from dpro.schema import COLLECTIVES, COUNTERS, PROCESS_GROUPS, STEPS, WORKERS, conform
from dpro.store import Manifest, open_run, write_manifest, write_part
from dpro.table import Table
from dpro.units import NS_PER_S

START_NS = 1_000 * NS_PER_S
RANKS = (0, 1)
RECORDER = {"source": "dpro recorder", "exit_code": -1, "exit_signal": -1}
INTERRUPTED = {"exit_signal": 2, "error": "KeyboardInterrupt\njob.py:7 main", "failed_at_s": 30}
BUG = {"exit_code": 1, "error": "ValueError: x is negative\njob.py:31 step", "failed_at_s": 5}
LOST = {"exit_code": 1, "error": "RuntimeError: Connection closed by peer\njob.py:9 f", "failed_at_s": 5.1}


def at(seconds: float) -> int:
    return round(START_NS + seconds * NS_PER_S)


def frame(table: Table, rows: list[dict[str, Any]]) -> pl.DataFrame:
    frames = [pl.DataFrame([row], schema={name: table.dtypes[name] for name in row}) for row in rows]
    return pl.concat([table.empty(), *(conform(table, each) for each in frames)])


def written(
    path: Path,
    *ends: dict[str, Any],
    status: int | None = 1,
    calls: tuple[int, ...] = (),
    saved_s: float = 20,
) -> Path:
    """A run of two ranks that made three steps; `calls`: who has called the second all-reduce, unfinished."""
    workers = []
    for rank, end in enumerate(ends):
        facts = dict(RECORDER | end)
        failed_s = facts.pop("failed_at_s", None)
        facts["failed_ns"] = -1 if failed_s is None else at(failed_s)
        facts["left_ns"] = at(40) if end.get("exit_code", -1) >= 0 else -1
        workers.append({"rank": rank, "ended_ns": at(40), **facts})
    steps = [
        {"rank": rank, "step": step, "window": -1, "start_ns": at(step), "duration_ns": NS_PER_S}
        for rank in RANKS
        for step in range(3)
    ]
    done = [(rank, 1, "completed") for rank in RANKS]
    rows = [
        {
            "collective_id": number, "rank": rank, "window": -1, "op": "all_reduce", "group": "0",
            "group_ranks": "0,1", "sequence": number, "enqueued_ns": at(number), "state": state,
        }
        for rank, number, state in [*done, *((rank, 2, "scheduled") for rank in calls)]
    ]  # fmt: skip
    groups = [{"rank": rank, "group": "0", "group_ranks": "0,1", "saved_ns": at(saved_s)} for rank in RANKS]
    write_part(path, WORKERS, "all", frame(WORKERS, workers))
    write_part(path, STEPS, "all", frame(STEPS, steps))
    write_part(path, COLLECTIVES, "all", frame(COLLECTIVES, rows))
    write_part(path, PROCESS_GROUPS, "all", frame(PROCESS_GROUPS, groups))
    write_manifest(path, Manifest(world_size=len(RANKS), ranks=list(RANKS), exit_status=status))
    return path


def end_of(path: Path) -> JobEnd:
    return Analysis(open_run(path)).end


def test_a_job_that_ended_well_has_no_first_line(tmp_path):
    run = written(tmp_path, {"exit_code": 0}, {"exit_code": 0}, status=0)
    end = end_of(run)
    assert (end.how, end.early, end.sentence) == (COMPLETED, False, "The job completed after 3 steps.")


def test_job_whose_ranks_ended_well_did_not_fail_though_a_signal_ended_its_launcher(tmp_path):
    end = end_of(written(tmp_path / "r", {"exit_code": 0}, {"exit_code": 0}, status=-1))
    said = "All ranks ended without an error after 3 steps; SIGHUP ended their launcher."
    assert (end.how, end.bad, end.sentence) == (ENDED, False, said)
    failed = end_of(written(tmp_path / "s", {"exit_code": 0}, {"exit_code": 0}, status=3))
    assert failed.how == FAILED


def test_the_first_line_of_a_failed_job_is_the_exception_of_the_rank_that_was_first(tmp_path):
    end = end_of(written(tmp_path, BUG, LOST))
    assert (end.how, end.hung, end.ranks, end.step) == (FAILED, False, [0], 3)
    assert end.sentence == (
        "The job failed at step 3, 00:16:45.000 UTC: rank 0 ended first, by ValueError: x is negative "
        "(job.py:31 step)."
    )


def test_a_rank_that_its_launcher_ended_is_not_what_the_job_ended_by(tmp_path):
    end = end_of(written(tmp_path, BUG, {"exit_signal": 15}))
    assert (end.how, end.ranks, end.by) == (FAILED, [0], None)


def test_what_all_ranks_fail_by_at_once_is_said_and_no_rank_named(tmp_path):
    end = end_of(written(tmp_path, BUG, BUG))
    assert (end.how, end.ranks) == (FAILED, [])
    assert "ranks 0-1 ended at once, by ValueError" in end.sentence


def test_a_hang_that_was_ended_by_ctrl_c_is_a_hang(tmp_path):
    end = end_of(written(tmp_path, INTERRUPTED, INTERRUPTED, calls=(0,)))
    assert (end.how, end.hung, end.ranks) == (ENDED, True, [1])
    assert end.sentence == (
        "The job hung at step 3 at 00:16:42.000 UTC, and was ended 28 s later by Ctrl-C (SIGINT)."
    )


def test_ctrl_c_came_when_the_first_rank_was_interrupted_and_not_when_all_were_gone(tmp_path):
    interrupted = {"exit_signal": 2, "error": "KeyboardInterrupt", "failed_at_s": 30}
    end = end_of(written(tmp_path, {"exit_signal": 2}, interrupted))
    assert "was ended at step 3, 00:17:10.000 UTC, by Ctrl-C" in end.sentence


@pytest.mark.parametrize(
    ("number", "said"),
    [(15, "SIGTERM (schedulers"), (9, "SIGKILL (schedulers"), (1, "SIGHUP")],
)
def test_a_hang_that_was_ended_by_a_signal_says_which(tmp_path, number, said):
    end = end_of(written(tmp_path, {"exit_signal": number}, {"exit_signal": number}, calls=(0,)))
    assert (end.how, end.hung) == (ENDED, True)
    assert f"by {said}" in end.sentence


def test_a_hang_in_which_a_call_timed_out_failed_though_the_launcher_ended_the_other_rank(tmp_path):
    said = "RuntimeError: [pair.cc:78] Timed out waiting 30000ms for recv operation\njob.py:9 step"
    end = end_of(written(tmp_path, {**LOST, "error": said}, {"exit_signal": 15}, calls=(0,)))
    assert (end.how, end.hung, end.ranks, end.by) == (FAILED, True, [1], None)


def test_a_job_that_moved_until_it_was_ended_did_not_hang(tmp_path):
    ended = {"exit_signal": 15, "ended_ns": at(12)}
    end = end_of(written(tmp_path, ended, ended))
    assert (end.how, end.hung, end.bad, end.early) == (ENDED, False, False, True)
    assert "its calls show no hang before that" in end.sentence


def test_a_job_whose_ranks_all_stood_still_outside_calls_says_for_how_long_and_where(tmp_path):
    ended = {"exit_signal": 2, "stack": "/usr/lib/python3.11/queue.py:171 get\njob.py:49 read"}
    end = end_of(written(tmp_path, ended, ended))
    assert end.sentence.endswith(
        "by Ctrl-C (SIGINT); no step had ended for 37 s, while a step takes 1 s, and no call waited for "
        "another rank (ranks 0-1: job.py:49 read)."
    )


def test_a_job_of_which_no_rank_has_ended_still_hangs(tmp_path):
    end = end_of(written(tmp_path, {}, {}, calls=(0,), status=None))
    assert (end.how, end.hung) == (RUNNING, True)
    assert end.sentence.startswith("The job has been hanging at step 3 since")


@pytest.mark.parametrize(
    ("sampled_s", "said"), [(24, "No step has ended for 21 s, while a step takes 1 s"), (22, "")]
)
def test_a_copy_that_was_made_just_after_steps_have_stopped_says_so(tmp_path, sampled_s, said):
    path = written(tmp_path, {}, {}, status=None)
    sampled = [{"time_ns": at(sampled_s), "counter": "cpu_user_s", "value": 1.0}]
    write_part(path, COUNTERS, "all", frame(COUNTERS, sampled))
    end = end_of(path)
    assert (end.how, end.hung) == (RUNNING, False)
    assert (end.sentence or "").startswith(said)
    assert end.comes_first == bool(said)
    first = CliRunner().invoke(cli, ["diagnose", str(path)]).output.splitlines()[0]
    assert first.startswith(said or "No slow rank")


def test_a_command_that_fails_though_no_rank_did_says_so(tmp_path):
    well = {"exit_code": 0, "ended_ns": at(4)}
    end = end_of(written(tmp_path, well, well, status=3))
    assert "the command ended with exit code 3, and no rank is known to have failed." in end.sentence


def test_a_command_that_fails_because_a_rank_did_not_leave_says_for_how_long_and_where_it_was(tmp_path):
    stuck = {"exit_code": 0, "stack": "/usr/lib/python3.11/queue.py:171 get\njob.py:49 close"}
    end = end_of(written(tmp_path, {"exit_code": 0, "ended_ns": at(4)}, stuck, status=1))
    assert "no step had ended for 37 s" in end.sentence
    assert "(rank 1: job.py:49 close)" in end.sentence


def test_a_rank_that_a_barrier_waited_for_hung_though_the_job_failed(tmp_path):
    said = "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 8000 ms\njob.py:9 step"
    end = end_of(written(tmp_path, {**LOST, "error": said}, {}))
    assert (end.how, end.hung, end.ranks) == (FAILED, True, [1])


def test_nothing_is_said_of_traces_of_which_nothing_watched_the_processes(tmp_path):
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    end = end_of(tmp_path)
    assert (end.how, end.early, end.sentence) == (UNKNOWN, False, None)


def test_commands_begin_with_the_end_and_never_say_that_nothing_is_wrong(tmp_path):
    written(tmp_path, BUG, LOST)
    for command in ("diagnose", "info"):
        lines = CliRunner().invoke(cli, [command, str(tmp_path)]).stdout.splitlines()
        assert lines[0].startswith("The job failed at step 3"), command
        assert not any("Nothing is wrong" in line for line in lines)
        document = json.loads(CliRunner().invoke(cli, [command, str(tmp_path), "--json"]).stdout)
        assert (document["end"]["how"], document["end"]["ranks"]) == ("failed", [0])
    assert lines


def test_the_second_line_of_an_ended_hang_is_its_cause_and_the_last_what_is_still_known(tmp_path):
    written(tmp_path, INTERRUPTED, INTERRUPTED, calls=(0,))
    lines = CliRunner().invoke(cli, ["diagnose", str(tmp_path)]).stdout.splitlines()
    assert lines[0].startswith("The job hung")
    assert lines[1].startswith("hang: rank 1")
    assert lines[-1].startswith("Only the times of 3 earlier steps are known")


def test_what_was_asked_of_a_job_that_died_is_refused_with_its_end_and_without_advice_to_record(tmp_path):
    written(tmp_path, BUG, LOST)
    for command in ("replay", "whatif", "report"):
        error = str(CliRunner().invoke(cli, [command, str(tmp_path)]).exception)
        assert error.startswith("The job failed at step 3"), command
        assert "record at least one deep window" not in error


@pytest.mark.parametrize("lost", [[COLLECTIVES], [COLLECTIVES, STEPS]])
def test_diagnose_does_not_refer_to_itself_where_it_cannot_say_more(tmp_path, lost):
    written(tmp_path, {}, {}, status=3)
    for table in lost:
        shutil.rmtree(tmp_path / table.name)
    error = str(CliRunner().invoke(cli, ["diagnose", str(tmp_path)]).exception)
    assert error.startswith("The job failed")
    assert "dpro diagnose" not in error
    assert Analysis(open_run(tmp_path)).end.can_say[0] in error


def test_a_job_that_was_ended_while_it_moved_is_not_called_healthy_but_what_is_known_is_said(tmp_path):
    written(tmp_path, {"exit_signal": 2}, {"exit_signal": 2})
    lines = CliRunner().invoke(cli, ["diagnose", str(tmp_path)]).stdout.splitlines()
    assert lines[0].startswith("The job was ended at step 3")
    assert lines[1] == "No slow rank or component found before that."


def test_the_verdict_of_reports_begins_with_the_end(tmp_path):
    analysis = Analysis(open_run(written(tmp_path, INTERRUPTED, INTERRUPTED, calls=(0,))))
    state, sentence = health_info(*analysis.verdict, None, analysis.end)
    assert state == "bad"
    assert sentence.startswith("The job hung at step 3")
    assert "Rank 1: its host code has not reached the call that its peers wait in" in sentence
