"""One prediction of each change for each run, whichever answer asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.whatif import what_if
from dpro.analysis.predictions import predict_edits
from dpro.replay.whatif.registry import parse_edit
from dpro.selection import parse_selection
from dpro.store import open_run
from dpro.verdict.facts import facts_of

SAMPLE = Path(__file__).resolve().parents[3] / "sample_traces" / "slow_input"


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return Analysis(open_run(SAMPLE))


def test_the_verdict_and_what_if_give_the_same_prediction(analysis):
    edit = parse_edit("no-comm")
    predicted = predict_edits(analysis, [edit])
    with facts_of(analysis) as facts:
        assert facts.predict("no-comm") is predicted
    assert what_if(analysis, [edit]).predictions[0].predicted_ns == predicted.predicted_ns


def test_selected_steps_have_a_prediction_of_their_own(analysis):
    edit, some = parse_edit("no-comm"), parse_selection(str(int(analysis.baseline["step"][0])))
    assert predict_edits(analysis, [edit], some) is not predict_edits(analysis, [edit])
    assert predict_edits(analysis, [edit]) is predict_edits(analysis, [edit])
