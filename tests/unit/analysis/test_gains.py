"""What would help: fixes of findings first, noise apart, and intervals that say little."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dpro.analysis.summary import interval_doubts, shown_grade, what_helps
from dpro.detect.findings import Finding
from dpro.replay.fidelity.accuracy import TraceCoverage
from dpro.replay.whatif.predict import Prediction
from dpro.replay.whatif.registry import parse_edit

MS = 1_000_000
BASE = 100.0 * MS


def _prediction(edit: str, predicted: float, low: float, high: float) -> Prediction:
    ns = predicted * MS
    gain = {"gain_low_ns": BASE - high * MS, "gain_high_ns": BASE - low * MS}
    return Prediction((parse_edit(edit),), ns, BASE / ns, low * MS, high * MS, **gain)


def _finding(class_: str, kind: str, name: str, cost: float, cause: str = "") -> Finding:
    ranks = (int(name),) if kind == "rank" else (0, 1)
    return Finding(class_, kind, name, ranks, cost / 100, 1.0, cost * MS, ("seen",), cause)


HEAL = _prediction("heal:rank=1", 95, 80, 110)
GRAPHS = _prediction("cuda-graph", 90, 85, 95)
UNCLEAR = _prediction("compile", 99, 90, 108)
SLOWER = _prediction("bucket:mb=1", 101, 95, 107)
BOUND = _prediction("no-comm", 50, 45, 55)


def test_the_fix_of_a_finding_comes_first_even_where_noise_hides_it():
    found = [_finding("slow.compute", "rank", "1", 5)]
    helpful = what_helps(found, [GRAPHS, HEAL, UNCLEAR, SLOWER, BOUND], BASE)
    assert [row.edits for row in helpful.rows] == [("heal:rank=1",), ("cuda-graph",)]
    assert helpful.rows[0].fixes == "slow.compute: rank 1"
    assert "clocks" in helpful.rows[0].how


def test_what_noise_hides_is_apart_and_what_does_not_help_is_left_out():
    helpful = what_helps([], [GRAPHS, HEAL, UNCLEAR, SLOWER, BOUND], BASE)
    assert [row.edits for row in helpful.rows] == [("cuda-graph",)]
    assert [row.edits for row in helpful.within_noise] == [("compile",)]  # what a rank costs is no advice


def test_a_gain_that_rounds_to_nothing_is_apart_however_sure_it_is():
    tiny = _prediction("cuda-graph", 99.8, 99.7, 99.9)
    assert tiny.effect == "faster"
    helpful = what_helps([], [tiny], BASE)
    assert (helpful.rows, len(helpful.within_noise)) == ([], 1)


def test_a_slow_input_pipeline_is_fixed_by_loading_ahead():
    ahead = _prediction("hide-input", 80, 75, 85)
    for finding in (
        _finding("slow.host", "job", "the input pipeline", 20),
        _finding("slow.host", "rank", "3", 20, "the input pipeline"),
    ):
        (row,) = what_helps([finding], [ahead], BASE).rows
        assert (row.edits, row.how[:10]) == (("hide-input",), "DataLoader")


def test_a_finding_without_an_edit_is_worth_its_cost():
    (row,) = what_helps([_finding("slow.link", "link", "0-1", 20)], [], BASE).rows
    assert (row.predicted_ns, row.interval, row.block) == (80 * MS, None, "finding")
    assert row.speedup == pytest.approx(1.25)


def test_a_hang_has_no_gain():
    assert what_helps([_finding("hang.host", "rank", "1", 5)], [], BASE).rows == []


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
    rows = what_helps([], [_prediction("cuda-graph", predicted, low, high)], BASE).rows
    doubts = interval_doubts(Fit(), rows)
    assert len(doubts) == bool(doubt)
    assert all(doubt in line for line in doubts)
    assert shown_grade(Fit(), doubts) == ("fair" if doubt else "good")


def test_more_than_a_fifth_of_starts_from_the_trace_is_in_doubt():
    assert interval_doubts(Fit(0.2), []) == []
    (line,) = interval_doubts(Fit(0.21), [])
    assert line.startswith("21% of starts are tied to the trace")
    assert shown_grade(SimpleNamespace(grade="poor"), [line]) == "poor"
