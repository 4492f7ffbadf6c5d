"""What was seen while a job hung is its verdict, unless the records of the run are surer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from dpro.detect.findings import CodeLocation, Finding
from dpro.detect.findings_log import BEGINS, ENDS, FILE, FOLDER, JOB_ENDED
from dpro.detect.hang.find import merge_watched
from dpro.detect.hang.stacks import main_threads
from dpro.detect.observations import observe
from dpro.schema import STEPS
from dpro.store import Manifest, Run, open_run, write_manifest
from dpro.units import NS_PER_S

SEEN_NS = 1_000 * NS_PER_S
NO_STEPS = STEPS.empty()


def notice(event: str = BEGINS, **more: Any) -> dict[str, Any]:
    return {
        "event": event, "number": 1, "time_ns": SEEN_NS, "step": 8, "class": "hang.host",
        "component": {"kind": "rank", "id": "2"}, "ranks": [2], "severity": 1.0, "confidence": 0.98,
        "cost_ms_per_step": None, "evidence": ["rank 2 never entered"], "why": "", "cause": "",
        "detector": "hangs", **more,
    }  # fmt: skip


def watched(path: Path, *notices: dict[str, Any]) -> Run:
    write_manifest(path, Manifest(world_size=4, ranks=[0, 1, 2, 3]))
    (path / FOLDER).mkdir()
    (path / FOLDER / FILE).write_text("".join(json.dumps(each) + "\n" for each in notices))
    return open_run(path)


def victim(confidence: float = 0.9, class_: str = "dead.rank", rank: int = 1) -> Finding:
    return Finding(
        class_, "rank", str(rank), (rank,), 1.0, confidence, 0.0, (observe("test", "rank 1 was ended"),)
    )


def test_what_was_seen_to_hang_until_the_job_ended_is_the_verdict(tmp_path):
    run = watched(tmp_path, notice(), notice(ENDS, why=JOB_ENDED, time_ns=SEEN_NS + NS_PER_S))
    (finding,) = merge_watched([victim()], run.path, NO_STEPS)
    assert (finding.class_, finding.ranks) == ("hang.host", (2,))
    assert finding.evidence[0] == "rank 2 never entered"
    assert "while the job hung" in finding.evidence[1]


def test_the_stacks_that_were_kept_are_evidence(tmp_path):
    run = watched(tmp_path, notice())
    frames = [
        {"file": "job.py", "line": 7, "function": "load"},
        {"file": "job.py", "line": 30, "function": "main"},
    ]
    (tmp_path / FOLDER / "hang-1").mkdir()
    stacks = {"ranks": [{"rank": 2, "threads": [{"name": "MainThread", "frames": frames}]}], "why_silent": {}}
    (tmp_path / FOLDER / "hang-1" / "stacks.json").write_text(json.dumps(stacks))
    (finding,) = merge_watched([], run.path, NO_STEPS)
    assert "the main thread of rank 2 was in job.py:7 load < job.py:30 main" in finding.evidence
    assert finding.place == CodeLocation("load", "job.py", 7)
    there = (main_threads([2], ["job.py:7 load", "job.py:30 main"], "is"),)
    (finding,) = merge_watched([replace(finding, confidence=1.0, observations=there)], run.path, NO_STEPS)
    assert [one.kind for one in finding.observations] == ["main-thread", "seen-by-watch"]


def test_a_hang_that_was_over_is_no_verdict(tmp_path):
    run = watched(tmp_path, notice(), notice(ENDS, why="the job moves on", time_ns=SEEN_NS + NS_PER_S))
    assert merge_watched([], run.path, NO_STEPS) == []


def test_a_hang_after_which_steps_ended_is_no_verdict_though_the_watcher_was_killed(tmp_path):
    step = {
        "rank": [0],
        "step": [9],
        "window": [-1],
        "start_ns": [SEEN_NS + NS_PER_S],
        "duration_ns": [NS_PER_S],
    }
    assert merge_watched([], watched(tmp_path, notice()).path, pl.DataFrame(step)) == []


def test_records_that_are_surer_stay_and_say_that_it_was_seen(tmp_path):
    run = watched(tmp_path, notice(confidence=0.5, **{"class": "hang.rank"}))
    (finding,) = merge_watched([victim(0.98, "hang.host", 2)], run.path, NO_STEPS)
    assert (finding.class_, finding.confidence) == ("hang.host", 0.98)
    assert "`dpro watch` saw it" in finding.evidence[-1]


def test_what_was_slow_while_the_job_ran_is_no_hang(tmp_path):
    run = watched(tmp_path, notice(**{"class": "slow.host", "cost_ms_per_step": 3.0}))
    assert merge_watched([victim()], run.path, NO_STEPS) == [victim()]
