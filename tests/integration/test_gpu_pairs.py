"""Predictions beside what jobs became: the benchmark of traces from before and after a change."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.gpu_pairs import FOLDER, checks, compare_step, judge, read_edits
from dpro.replay.whatif.predict import Prediction
from tests.jobs import ROOT, environment

RUN = ROOT / "sample_traces" / "slow_rank"
HELD = {"step_held", "gain_held", "sign_right", "error", "width", "steps_measured"}


def test_a_prediction_is_held_to_the_step_and_the_gain_for_as_many_samples():
    made = Prediction((), 12e6, 5 / 3, 11e6, 13e6, samples=2.0, gain_low_ns=3.5e6, gain_high_ns=4.5e6)
    right = compare_step(made, 10.0, 12.5)  # 6.25 ms for the samples of a step before
    assert right == {
        "error_pct": pytest.approx(-4.0),
        "step_held": True,
        "gain": 1.6,
        "gain_held": True,
        "has_effect": True,
        "sign_right": True,
    }
    wrong = compare_step(made, 10.0, 22.0)
    assert wrong is not None
    assert not any(wrong[key] for key in ("step_held", "gain_held", "sign_right"))
    assert compare_step(made, None, 12.5) is None


def test_several_edits_are_read_and_a_plus_sign_in_a_name_is_none_between_edits():
    assert [str(edit) for edit in read_edits("no-sync+cuda-graph")] == ["no-sync", "cuda-graph"]
    assert len(read_edits("scale:name=a+b,factor=0.5")) == 1


@pytest.mark.slow
def test_a_damaged_file_costs_its_pair_and_an_unknown_edit_its_question(tmp_path):
    (tmp_path / "damaged.json").write_text('{"traceEvents": [')
    run = [{"file": str(RUN)}]
    pairs = [
        {
            "name": "damaged",
            "clean": True,
            "edits": ["gc"],
            "before": run,
            "after": [{"file": "damaged.json"}],
        },
        {"name": "whole", "clean": True, "edits": ["heal:rank=1", "no such"], "before": run, "after": run},
        {},
    ]
    result = checks([judge(pair, tmp_path) for pair in pairs])
    answered = result["answered"]
    assert set(answered["figures"]["failed"]) == {"damaged", ""}
    assert (answered["n"], answered["figures"]["wrong"]) == (2, ["whole: no such"])
    assert answered["holds"] is False
    assert (result["step_held"]["n"], result["step_held_real"]["n"]) == (1, 0)
    assert result["step_held_real"]["holds"] is None


@pytest.mark.slow
@pytest.mark.skipif(not (FOLDER / "pairs.json").is_file(), reason="no pairs of traces: set DPRO_GPU_PAIRS")
def test_pairs_of_real_traces_are_judged():
    pairs = json.loads((FOLDER / "pairs.json").read_text())
    chosen = [pair for pair in pairs if pair["clean"]][:2]
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_pairs",
        "--json",
        "--only",
        *(pair["name"] for pair in chosen),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert all(result[name]["n"] for name in HELD)
    assert result["answered"]["n"] == sum(len(pair["edits"]) for pair in chosen)
    assert not result["answered"]["figures"]["failed"]
