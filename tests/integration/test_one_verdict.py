"""No face of dpro contradicts another: one step time, one limit, one list of faults, bounds that bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.verdicts import TRACES, VERDICTS
from dpro.analysis.answers.whatif import WhatIfDocument, what_if
from dpro.cli.analysis import analyse
from dpro.replay.whatif.edits.heal import Heal
from dpro.replay.whatif.registry import parse_edit
from dpro.units import ms
from dpro.verdict.advice import NOTHING_LEFT
from dpro.verdict.report import make_report
from dpro.verdict.verdict import Explanation, explain
from tests.jobs import ROOT

SAMPLES = [str(ROOT / "sample_traces" / name) for name in ("slow_rank", "slow_input", "healthy")]
COMMUNICATION = {
    "overlap",
    "network",
    "compress",
    "priority",
    "bucket",
    "local-updates",
    "split",
    "algorithm",
}


def sources() -> list[object]:
    """The samples, and the traces that an expert has judged; all but the first are slow."""
    experts = json.loads(VERDICTS.read_text()) if VERDICTS.is_file() else []
    experts = experts["verdicts"] if isinstance(experts, dict) else experts
    names = [str(TRACES / expert["source"]) for expert in experts]
    first, *others = SAMPLES
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in (*others, *names))]


def contradictions_of_bounds(document: WhatIfDocument) -> list[str]:
    """Changes of communication that would gain more than all of it costs."""
    alone = {row.edits[0]: row for row in document.predictions if len(row.edits) == 1 and row.samples == 1}
    bound = alone.get("no-comm")
    if bound is None:
        return []
    return [
        f"{edit}: {row.predicted_ms:.3f} ms, without any communication {bound.predicted_ms:.3f} ms"
        for edit, row in alone.items()
        if edit.partition(":")[0] in COMMUNICATION and row.predicted_ms < 0.999 * bound.predicted_ms
    ]


def assert_nothing_better_is_listed(verdict: Explanation, document: WhatIfDocument) -> None:
    """Hold advice to gain as much as what is sure to gain and takes a setting or a line of code.

    But for schedules of pipelines, of which a framework has few.
    """
    simple = (
        row
        for row in document.predictions
        if len(row.edits) == 1
        and row.block != "bound"
        and row.effort in ("flag", "line")
        and not row.training
        and not row.edits[0].startswith("pipeline:")
    )
    best = next((row for row in simple if row.effect == "faster" and row.speedup > 1.05), None)
    gains = [advice.gain_high for advice in verdict.advice if advice.gain_high is not None]
    assert best is None or max(gains, default=1.0) >= best.speedup, best


@pytest.mark.parametrize("source", sources(), ids=lambda source: Path(source).name)
def test_faces_of_a_run_do_not_contradict_each_other(source):
    analysis = analyse(source)
    verdict = explain(analysis)
    document = what_if(analysis).document
    report = make_report(analysis)

    assert verdict.step_ms == document.baseline_ms == ms(analysis.baseline_ns)
    recorded_ms = document.baseline_ms * analysis.trust.taken_out
    assert document.measured_ms == pytest.approx(recorded_ms, rel=0.02)
    free_host = next((row for row in document.predictions if row.edits == ["free-host"]), None)
    if free_host is not None and verdict.alternatives.get("host", 1.0) > 1:
        assert verdict.alternatives["host"] == pytest.approx(free_host.speedup, rel=0.005)
    assert contradictions_of_bounds(document) == []
    for row in document.predictions:
        edits = [parse_edit(edit) for edit in row.edits]
        assert len(edits) == 1 or not any(isinstance(edit, Heal) for edit in edits)
    assert {rank for finding in analysis.verdict[0] for rank in finding.ranks} >= set(verdict.faulty_ranks)
    if not analysis.verdict[0] and verdict.limit is not None and verdict.limit.kind != "compute":
        assert "limits the job" in report.verdict
    if not document.answerable:
        assert any("does not fit" in line for line in verdict.unsure)
        assert not verdict.shares
        assert not verdict.account.entries
        assert "heal" not in [advice.kind for advice in verdict.advice]
    most = max([*verdict.alternatives.values(), 1.0])
    for advice in verdict.advice:
        assert advice.gain_low is None or advice.gain_low <= advice.gain_high < float("inf")
        assert advice.edit or advice.gain_low is None or advice.gain_low >= 1
        if advice.kind in ("overlap", "transfer", "copies"):
            assert advice.gain_high <= most * 1.5
    if document.answerable and verdict.limit:
        assert_nothing_better_is_listed(verdict, document)
    for advice in verdict.advice:
        for row in document.predictions:
            if row.edits == [advice.edit]:
                assert row.speedup_low == pytest.approx(advice.gain_low)
                assert min(row.speedup_high or NOTHING_LEFT, NOTHING_LEFT) == pytest.approx(advice.gain_high)
    gains = {row.edits[0]: row.speedup for row in document.predictions if len(row.edits) == 1}
    limit = verdict.limit
    ending = [
        advice
        for advice in verdict.advice
        if limit and gains.get(advice.edit) == pytest.approx(limit.gain, rel=0.009)
    ]
    if ending and ending[0].gain_low <= limit.gain <= ending[0].gain_high:
        assert (limit.gain_low, limit.gain_high) == (ending[0].gain_low, ending[0].gain_high)
    assert ending or source != SAMPLES[0]
