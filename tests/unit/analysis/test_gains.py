"""What would help, what noise hides, and intervals that say little."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dpro.analysis.predictions import calibrated, under_any_load
from dpro.analysis.summary import (
    effort_in_words,
    gain_in_words,
    group_of,
    interval_doubts,
    shown_grade,
    step_in_words,
    what_helps,
)
from dpro.detect.findings import HIDDEN, Finding
from dpro.detect.observations import observe
from dpro.replay.fidelity.accuracy import TraceCoverage
from dpro.replay.whatif.predict import Prediction
from dpro.replay.whatif.registry import parse_edit

MS = 1_000_000
BASE = 100.0 * MS


def _prediction(edit: str, predicted: float, low: float, high: float) -> Prediction:
    ns = predicted * MS
    gain = {"gain_low_ns": BASE - high * MS, "gain_high_ns": BASE - low * MS}
    return Prediction((parse_edit(edit),), ns, BASE / ns, low * MS, high * MS, **gain)


HEAL = _prediction("heal:rank=1", 95, 80, 110)
GRAPHS = _prediction("cuda-graph", 90, 85, 95)
UNCLEAR = _prediction("compile", 99, 90, 108)
SLOWER = _prediction("bucket:mb=1", 101, 95, 107)
BOUND = _prediction("no-comm", 50, 45, 55)


def test_what_noise_hides_is_kept_from_what_is_clear_and_what_does_not_help_is_left_out():
    helpful = what_helps([GRAPHS, HEAL, UNCLEAR, SLOWER, BOUND])
    assert helpful == ([GRAPHS], [UNCLEAR])  # what a rank costs is no advice
    sure = _prediction("heal:rank=1", 95, 90, 98)
    assert what_helps([GRAPHS, sure, UNCLEAR], [sure]) == ([sure, GRAPHS], [UNCLEAR])  # but TRY may advise it


def test_a_gain_that_rounds_to_nothing_is_within_noise_however_sure_it_is():
    tiny = _prediction("cuda-graph", 99.8, 99.7, 99.9)
    assert tiny.effect == "faster"
    assert what_helps([tiny]) == ([], [tiny])


def test_a_prediction_is_in_one_group_and_said_with_its_interval():
    rows = (GRAPHS, UNCLEAR, SLOWER, BOUND, HEAL)
    groups = [group_of(row, answerable=True, advised=False) for row in rows]
    assert groups == ["faster", "unclear", "unclear", "bound", "bound"]
    assert group_of(HEAL, answerable=True, advised=True) == "advised"
    assert group_of(GRAPHS, answerable=False, advised=False) == "unfit"
    assert group_of(_prediction("bucket:mb=1", 110, 105, 115), answerable=True, advised=False) == "slower"
    assert gain_in_words(GRAPHS) == "x1.11 (1.05 to 1.18)"
    assert (
        gain_in_words(_prediction("cuda-graph", 10, 0, 90)) == "x10.00 (1.11 or more)"
    )  # nothing may be left
    assert step_in_words(GRAPHS) == "90.00 ms"
    assert step_in_words(replace(GRAPHS, samples=2.0)) == "90.00 ms for x2 the samples"
    assert effort_in_words(GRAPHS) == "a line of code; unproven"
    assert effort_in_words(replace(GRAPHS, proven=True)) == "a line of code; proven on real jobs"


class Fit:
    grade = "good"

    def __init__(self, starts_anchored: float = 0.0) -> None:
        self.coverage = TraceCoverage(None, None, None, 0.0, 0.0, starts_anchored)


@pytest.mark.parametrize(
    ("predicted", "low", "high", "doubt"),
    [
        (90, 85, 95, ""),
        (90, 0, 95, "reaches 0"),
        (60, 55, 91, "±50%"),
        (60, 29, 65, "±50%"),
        (60, 31, 89, ""),
    ],
)
def test_wide_intervals_and_those_that_reach_0_are_in_doubt(predicted, low, high, doubt):
    doubts = interval_doubts(Fit(), [_prediction("cuda-graph", predicted, low, high)])
    assert len(doubts) == bool(doubt)
    assert all(doubt in line for line in doubts)
    assert shown_grade(Fit(), doubts) == ("fair" if doubt else "good")


def test_more_than_a_fifth_of_starts_from_the_trace_is_in_doubt():
    assert interval_doubts(Fit(0.2), []) == []
    (line,) = interval_doubts(Fit(0.21), [])
    assert line.startswith("21% of start times come from the trace")
    assert shown_grade(SimpleNamespace(grade="poor"), [line]) == "poor"


def _slow_rank(cost_ms: float) -> Finding:
    return Finding("slow.host", "rank", "1", (1,), 0.5, 1.0, cost_ms * MS, ())


def test_a_healed_rank_may_gain_what_the_finding_on_it_costs():
    costly = calibrated(SimpleNamespace(verdict=([_slow_rank(40)], []), shared_hosts=[]), HEAL)
    assert (costly.gain_low_ns, costly.gain_high_ns) == (HEAL.gain_low_ns, 40 * MS)
    assert (costly.low_ns, costly.high_ns, costly.speedup) == (60 * MS, HEAL.high_ns, HEAL.speedup)
    pauses = replace(_slow_rank(40), observations=(observe(HIDDEN, "in every 5th step"),))
    other = replace(_slow_rank(40), component_id="0", ranks=(0,))
    for findings in ([], [other]):
        assert calibrated(SimpleNamespace(verdict=(findings, []), shared_hosts=[]), HEAL) == HEAL
    rare = calibrated(SimpleNamespace(verdict=([pauses], []), shared_hosts=[]), HEAL)
    assert replace(rare, notes=HEAL.notes) == HEAL
    assert rare.notes == ("usual steps only: the 40 ms a step that rank 1 costs are in pauses",)


def test_what_a_finding_costs_but_healing_does_not_change_is_said_to_be_in_the_interval_only():
    costly = SimpleNamespace(verdict=([_slow_rank(40)], []), shared_hosts=[])
    assert calibrated(costly, _prediction("heal:rank=1", 70, 65, 75)).notes == ()
    (said,) = calibrated(costly, HEAL).notes
    assert said.startswith("rank 1 costs 40 ms a step, of which this edit models 5 ms")


def test_where_other_jobs_take_cores_a_gain_holds_for_other_loads_too():
    shared = calibrated(SimpleNamespace(verdict=([], []), shared_hosts=["a"]), GRAPHS)
    low, high = map(GRAPHS.speedup_at, (GRAPHS.gain_low_ns, GRAPHS.gain_high_ns))
    assert shared.speedup_at(shared.gain_low_ns) == pytest.approx(low**0.5)
    assert shared.speedup_at(shared.gain_high_ns) == pytest.approx(high**1.5)
    assert shared.low_ns < GRAPHS.low_ns < GRAPHS.high_ns < shared.high_ns
    assert under_any_load(0.9, 1.1)[0] == 0.9  # never narrower
