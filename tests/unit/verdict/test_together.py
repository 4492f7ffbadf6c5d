"""Two things to try that gain clearly more when both are done."""

from __future__ import annotations

import pytest

from dpro.analysis.analysis import Analysis
from dpro.store import open_run
from dpro.verdict.advice import interval_of
from dpro.verdict.facts import facts_of
from dpro.verdict.verdict import best_together, explain
from dpro.verdict.words import lines_of
from tests.jobs import ROOT

GPT = ROOT / "sample_traces" / "h200_gpt"


@pytest.fixture(scope="module")
def gpt() -> Analysis:
    return Analysis(open_run(GPT))


def test_two_changes_that_may_gain_nothing_alone_are_named_as_a_pair_with_the_gain_of_both(gpt):
    verdict = explain(gpt)
    both = verdict.together
    assert both.places == [1, 2]
    assert both.edits == ["cuda-graph", "compile"]
    assert {verdict.advice[0].edit, verdict.advice[1].edit} == {*both.edits}
    assert verdict.advice[0].gain_low < 1 < both.gain_low
    with facts_of(gpt) as facts:
        assert (both.gain_low, both.gain_high) == interval_of(facts.predict(*both.edits))
    assert "BOTH   1 and 2 together: x1.05 to 1.57 (--edit cuda-graph --edit compile)" in lines_of(verdict)


def test_new_code_and_what_has_no_edit_is_in_no_pair(gpt):
    advice = explain(gpt).advice
    with facts_of(gpt) as facts:
        assert best_together(facts, advice[1:]) is None
        assert best_together(facts, advice[:1]) is None


def test_a_pair_that_gains_no_more_than_one_of_it_is_not_named():
    assert explain(Analysis(open_run(ROOT / "sample_traces" / "slow_rank"))).together is None
