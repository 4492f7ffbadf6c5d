"""The runs of a folder over time: what is said of each, and which differ from the one before."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.dashboards.app import make_app
from dpro.dashboards.command import offered_runs
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.runs import OfferedRun
from dpro.dashboards.theme import colour
from dpro.dashboards.views import over_time
from dpro.dashboards.views.over_time import VIEW, InBackground, judged_run, runs_figure, runs_info, timed_run
from dpro.detect.findings import Finding
from dpro.detect.host_bound import THE_HOST
from dpro.detect.observations import observe
from dpro.errors import InputError
from dpro.schema import STEPS
from dpro.store import MANIFEST, open_run, write_manifest
from dpro.units import NS_PER_S
from dpro.verdict.verdict import Explanation
from tests.builders import TinyRun, cpu_job
from tests.jobs import ROOT
from tests.unit.dashboards.test_app import navigate

PATIENCE_S = 60


def write(folder, step_us: float, began_s: int, command: str = "train.py", spread: float = 0.01):
    """A run of 40 steps of one length, whose command was started at a time."""
    run = TinyRun()
    at = 0.0
    for step in range(40):
        lasts = step_us * (1 + spread * (step % 5 - 2))
        run.op("aten::mm", at, at + lasts * 0.9)
        run.step(step, at, at + lasts)
        at += lasts
    written = run.write(folder)
    write_manifest(folder, replace(written.manifest, command=command.split()))
    os.utime(folder / MANIFEST, (began_s, began_s))
    return written


@pytest.fixture
def offers(tmp_path):
    write(tmp_path / "first", 1000, 100)
    write(tmp_path / "second", 1005, 200)
    write(tmp_path / "slower", 1500, 300)
    write(tmp_path / "other", 1500, 400, "other.py --lr <b>1</b>")
    (tmp_path / "damaged").mkdir()
    names = ("first", "second", "slower", "other")
    return [
        *(OfferedRun(name, str(tmp_path / name)) for name in names),
        OfferedRun("damaged", str(tmp_path / "damaged"), "manifest.json: not a run manifest"),
        OfferedRun("live", str(tmp_path / "live"), lives=True),
    ]


def when_known(offers) -> pl.DataFrame:
    """The table when all that is computed in the background is there."""
    end = time.monotonic() + PATIENCE_S
    while (runs := runs_info(offers))["limit"].count() < 4:
        assert time.monotonic() < end
        time.sleep(0.05)
    return runs


def test_the_list_is_there_at_once_and_what_takes_long_comes_later(offers, monkeypatch):
    monkeypatch.setattr(over_time, "_FACTS", InBackground())
    at_once = dict(runs_info(offers).select("run", "state").iter_rows())
    assert at_once["damaged"] == "manifest.json: not a run manifest"
    assert at_once["live"] == "being recorded"
    assert at_once["first"] in ("…", "")
    runs = when_known(offers)
    assert runs["run"].to_list() == [
        "other",
        "slower",
        "second",
        "first",
        "damaged",
        "live",
    ]  # the latest first
    assert runs["began"][0] == datetime(1970, 1, 1, 0, 6, 40)
    assert runs["state"].to_list() == ["", "", "", "", "manifest.json: not a run manifest", "being recorded"]


def test_a_run_differs_from_the_one_before_it_of_the_same_job_where_the_intervals_are_apart(offers):
    runs = {row["run"]: row for row in when_known(offers).iter_rows(named=True)}
    assert (runs["first"]["before"], runs["first"]["change"]) == (None, None)
    assert (runs["second"]["before"], runs["second"]["change"]) == ("first", 0)  # 0.5% is within the spread
    assert runs["slower"]["before"] == "second"
    assert runs["slower"]["change"] == pytest.approx(1500 / 1005 - 1)
    assert runs["other"]["before"] is None  # another command
    assert runs["second"]["step_ms"] == pytest.approx(1.005)
    assert runs["second"]["step_low_ms"] < 1.005 < runs["second"]["step_high_ms"]


def test_the_picture_has_a_line_per_job_and_marks_the_run_shown(offers):
    runs = when_known(offers).filter(pl.col("step_ms").is_not_null())
    job, other = runs_figure(runs, "order", "slower", "light").data
    assert list(job.customdata) == ["first", "second", "slower"]
    assert job.marker.size[2] > job.marker.size[1]
    assert other.name.startswith("other.py --lr")
    assert "&lt;b&gt;1&lt;/b&gt;" in other.name
    assert other.line.color == colour("soft", "light")  # colours and the legend are for jobs with several
    legend = str(over_time._legend(runs_figure(runs, "order", "slower", "light")))
    assert "train.py" in legend
    assert "other.py" not in legend


def test_what_fails_for_one_run_costs_the_others_nothing():
    def fail():
        raise InputError("damaged")

    def crash():
        raise ZeroDivisionError

    background, end = InBackground(), time.monotonic() + PATIENCE_S
    wanted = {"a": fail, "b": crash, "c": lambda: 3}
    while len(known := background.of(wanted)) < 3:
        assert time.monotonic() < end
    assert known == {"a": "damaged", "b": "cannot be read: ZeroDivisionError", "c": 3}


def test_what_an_interrupt_cuts_off_is_computed_when_asked_for_again():
    def interrupted():
        if not calls:
            calls.append(1)
            raise KeyboardInterrupt
        return 1

    calls: list[int] = []
    background, end = InBackground(), time.monotonic() + PATIENCE_S
    while background.of({"a": interrupted}) != {"a": 1}:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert calls


def test_the_verdict_is_that_of_explain(tmp_path):
    cpu_job(num_steps=12).write(tmp_path / "run")
    assert judged_run(tmp_path / "run").limit
    assert timed_run(tmp_path / "run").steps == 12
    assert open_run(tmp_path / "run").manifest.command == []


def test_the_step_of_a_run_in_the_list_includes_its_pauses(tmp_path):
    run, at = TinyRun(), 0.0
    for step in range(80):
        lasts = 5000.0 if step % 4 == 3 else 1000.0
        run.op("aten::mm", at, at + lasts)
        run.step(step, at, at + lasts)
        at += lasts
    run.write(tmp_path / "run")
    timed = timed_run(tmp_path / "run")
    assert timed.step_ns == pytest.approx(2_000_000, rel=0.05)
    assert 1_000_000 < timed.low_ns < timed.step_ns < timed.high_ns


@pytest.mark.parametrize(
    ("part", "confidence", "fault"),
    [("the input pipeline", 0.9, "at fault."), (THE_HOST, 0.9, ""), ("the input pipeline", 0.3, "")],
)
def test_a_part_that_belongs_to_no_rank_is_a_fault_too(tmp_path, monkeypatch, part, confidence, fault):
    found = Finding("slow.host", "part", part, (), 0.3, confidence, 3e7, (observe("late", "late"),))
    monkeypatch.setattr(Analysis, "verdict", ([found], []))
    explained = Explanation(run="r", job="j", fault="at fault.", faulty_ranks=[])
    monkeypatch.setattr("dpro.dashboards.views.over_time.explain", lambda _: explained)
    cpu_job(num_steps=12).write(tmp_path / "run")
    assert judged_run(tmp_path / "run").fault == fault


def test_a_page_of_one_run_says_how_to_see_several_and_one_of_several_links_to_them(several, tmp_path):
    write(tmp_path / "alone", 1000, 100)
    alone = offered_runs([str(tmp_path / "alone")])
    assert "One run is offered" in VIEW.missing(alone.opened.loaded, Link())
    assert not VIEW.missing(several.opened.loaded, Link())
    end = time.monotonic() + PATIENCE_S
    while "…" in (shown := str(VIEW.sections["runs-table"](several.opened.loaded, parse_link("?view=runs")))):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert "href='?run=before'" in shown
    assert "manifest.json: not a run manifest" in shown
    assert "runs-table" in json.dumps(navigate(make_app(several), "?view=runs")["content"])


def test_a_run_of_which_no_start_is_known_began_with_its_first_step_and_not_when_its_files_were_written():
    run = ROOT / "sample_traces" / "slow_rank"
    first_ns = open_run(run).table(STEPS)["start_ns"].min()
    began = datetime.fromtimestamp(timed_run(run).began_ns / NS_PER_S, UTC)
    assert timed_run(run).began_ns == first_ns
    assert (began.year, began.month, began.day) == (2026, 11, 22)
