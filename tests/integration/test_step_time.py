"""Commands, reports and the dashboard that name the same step time state the same value.

What each name means is in the glossary, "How long is a step".
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.report import html_of
from dpro.dashboards.views import verdict
from dpro.dashboards.views.breakdown import part_info
from dpro.opening import open_path
from dpro.units import NS_PER_MS, format_duration
from dpro.verdict.report import make_report, markdown_of
from tests.commands import dpro
from tests.jobs import ROOT

pytestmark = pytest.mark.usefixtures("searched_once")

SAMPLE = ROOT / "sample_traces" / "slow_rank"
PIPELINE = Path("pp_timeline") / "megatronapp_pp4"  # its first step takes five times as long as the others


class Answered:
    """What all commands say of a run."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.loaded = Loaded(open_path(run))
        self.report = make_report(self.loaded)

    def of(self, command: str, *options: str) -> dict[str, Any]:
        done = dpro(command, self.run, *options, "--json")
        assert done.returncode in (0, 1), done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module", params=[PIPELINE, SAMPLE], ids=["pipeline", "sample"])
def said(request) -> Answered:
    run = request.param if request.param == SAMPLE else request.getfixturevalue("traces") / request.param
    return Answered(run)


@pytest.mark.few(1)
def test_the_typical_step_and_the_mean_with_pauses_are_the_same_everywhere(said):
    of_info = said.of("info")["step_time"]
    assert of_info["typical_ms"] > 0
    for command in ("report", "diagnose", "replay"):
        assert said.of(command)["step_time"] == of_info, command
    words = format_duration(of_info["typical_ms"] * NS_PER_MS)
    assert any(f"typical step {words}" in value for _, value in said.report.facts)
    outside = said.of("whatif", "--edit", "no-comm")["other_steps_ms"]
    assert outside in (None, of_info["typical_ms"])


@pytest.mark.few(1)
def test_predictions_costs_and_differences_start_from_the_same_mean_step(said):
    predicted = said.of("whatif", "--edit", "no-comm")
    mean_ms = predicted["baseline_ms"]
    replayed = [each["replayed_ms"] for each in said.of("replay")["steps"]]
    of_diff = dpro("diff", said.run, said.run, "--json")
    assert json.loads(of_diff.stdout)["a_ms"] == pytest.approx(mean_ms, rel=1e-6)
    if said.loaded.built.graph is said.loaded.built.predictive:  # else waits or recording's cost are left out
        assert sum(replayed) / len(replayed) == pytest.approx(mean_ms, rel=1e-6)
    assert said.loaded.baseline_ns == pytest.approx(mean_ms * NS_PER_MS, rel=1e-6)
    words = format_duration(said.loaded.baseline_ns)
    assert said.report.of_step == words
    stated = f"The usual step takes {words} as the job runs"
    assert stated in markdown_of(said.report)
    assert stated in html_of(said.loaded, said.report)
    assert stated in str(verdict.VIEW.sections["verdict-short"](said.loaded, Link()))


def test_each_command_names_the_usual_step_before_any_other():
    usual_ms = Answered(SAMPLE).loaded.baseline_ns / NS_PER_MS
    for command in ("explain", "report", "whatif", "replay"):
        text = dpro(command, SAMPLE).stdout
        first = re.search(r"(usual|typical|mean) step (?:takes )?([\d.]+) ms", text, re.IGNORECASE)
        assert first is not None, command
        assert (first[1], float(first[2])) == ("usual", pytest.approx(usual_ms, rel=0.01)), command
    changed = dpro("diff", SAMPLE, SAMPLE).stdout
    assert "typical step of 47 and 47 steps outside deep windows" in changed


def test_a_diagnosis_without_a_fault_says_where_to_go_on():
    said = dpro("diagnose", ROOT / "sample_traces" / "healthy").stdout
    assert said.startswith("No slow rank or component found.")


@pytest.mark.few(1)
def test_the_mean_step_of_a_report_is_the_usual_step_and_its_steps_are_as_recorded(said):
    document = said.of("report")
    mean, account = document["mean_step"], document["account"]
    assert mean["duration_ms"] == pytest.approx(account["step_ms"], rel=1e-3)
    of_ranks = [each["duration_ms"] for each in document["steps"]]
    bars = part_info(said.loaded.breakdown, "step", Link())["duration_ms"]
    assert sum(of_ranks) / len(of_ranks) == pytest.approx(bars.mean(), rel=1e-6)
