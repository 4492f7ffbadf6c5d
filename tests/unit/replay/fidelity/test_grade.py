"""How far to believe predictions: graded, with each figure and its bars, and no turning over at a bar."""

from __future__ import annotations

import dataclasses
import json

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.documents import plain
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import (
    Criterion,
    assess,
    criterion,
    figures_of,
    grade_of,
    grade_sentence,
    score_of,
    trust_document,
    windows_to_usual,
)
from dpro.replay.timeline import replay
from dpro.schema import STEPS, conform
from dpro.units import NS_PER_MS as MS_NS
from tests.builders import TinyRun, cpu_job


def _figures(copied: float = 0.0, windows: float | None = 1.0, **other: float) -> tuple[Criterion, ...]:
    steps = pl.DataFrame({"measured_ns": [100.0, 101.0, 99.0], "error_pct": [0.1, -0.1, 0.0]})
    return figures_of(
        steps, other.get("starts", {50: 0.0, 95: 0.0}), other.get("unexplained", 0.0), copied, windows
    )


def _table(usual_ms: float, deep_ms: float, num_usual: int = 30) -> pl.DataFrame:
    rows = [(step, -1, usual_ms) for step in range(num_usual)] + [
        (num_usual + step, 0, deep_ms) for step in range(4)
    ]
    frame = pl.DataFrame(rows, schema=["step", "window", "ms"], orient="row")
    duration = (pl.col("ms") * MS_NS).cast(pl.Int64)
    return conform(
        STEPS, frame.select("step", "window", duration_ns=duration).with_columns(rank=0, start_ns=0)
    )


@pytest.mark.parametrize(("value", "score"), [(0.0, 1.0), (5.0, 1.0), (12.5, 0.5), (20.0, 0.0), (22.0, 0.0)])
def test_a_figure_scores_in_a_straight_line_between_its_bars(value, score):
    assert criterion("starts", value, 5.0, 20.0).score == pytest.approx(score)
    assert criterion("starts", None, 5.0, 20.0).score is None


@given(st.floats(0, 0.5), st.floats(0, 0.01))
def test_a_little_more_changes_the_score_a_little(copied, more):
    before, after = score_of(_figures(copied)), score_of(_figures(copied + more))
    assert 0 <= before - after <= more / 0.15 + 1e-9


def test_20_and_22_percent_of_copied_starts_say_the_same_in_nearly_the_same_words():
    said = [
        grade_sentence(score_of(figures), figures)
        for figures in (_figures(0.199), _figures(0.2), _figures(0.22))
    ]
    assert {each.split(" (")[0] for each in said} == {"Predictions from this run: poor"}
    assert [each.split(" of starts are explained by nothing")[0].split()[-1] for each in said] == [
        "19.9%",
        "20%",
        "22%",
    ]


def test_the_worst_figure_decides_and_is_named_with_its_bars():
    figures = _figures(copied=0.11, windows=1.3)
    assert score_of(figures) == pytest.approx(0.5)
    assert grade_of(score_of(figures)) == "fair"
    words = grade_sentence(score_of(figures), figures)
    weakest = "Weakest point: median (not mean) steps in and outside deep windows differ by 1.3x (good up"
    assert weakest in words
    assert (
        "at least 11% of starts are explained by nothing in the graph and keep their recorded time (good up"
        in words
    )


@pytest.mark.parametrize(
    ("deep_ms", "grade"), [(10.0, "good"), (13.0, "fair"), (16.0, "poor"), (6.0, "poor")]
)
def test_windows_that_are_unlike_the_other_steps_are_no_ground_for_predictions(deep_ms, grade):
    assert grade_of(score_of(_figures(windows=windows_to_usual(_table(10.0, deep_ms))))) == grade


def test_a_trace_without_other_steps_says_that_it_does_not_know(tmp_path):
    assert windows_to_usual(_table(10.0, 10.0, num_usual=2)) is None
    assert windows_to_usual(STEPS.empty()) is None
    (unknown,) = [figure for figure in _figures(windows=None) if figure.value is None]
    assert ": unknown" in str(unknown)
    assert grade_sentence(1.0, _figures(windows=None)).endswith(f" Unknown: {unknown.name}.")


def test_a_trust_has_a_grade_and_its_figures_as_json(tmp_path):
    run = cpu_job().write(tmp_path / "r")
    built = build_graph(run)
    trust = assess(built, replay(built.graph), run.manifest)
    document = json.loads(json.dumps(plain(trust_document(trust))))
    assert trust.answerable is True
    assert document["grade"] == trust.grade
    assert len(document["figures"]) == 7
    assert dataclasses.replace(trust, answerable=False).grade == "poor"


@pytest.mark.parametrize("recorded", [True, False])
def test_nothing_is_predicted_of_devices_whose_work_was_not_recorded(tmp_path, recorded):
    run = TinyRun()
    for step in range(3):
        at = step * 100
        run.op("aten::mul", at, at + 90)
        run.call(at + 10, at + 20, step)
        if recorded:
            run.kernel("mul", at + 22, at + 80, step)
        run.step(step, at, at + 100)
    built = run.build(tmp_path / "r")
    trust = assess(built, replay(built.graph), built.graph.run.manifest)
    assert trust.answerable == recorded
    assert trust.reasons == (() if recorded else ("hosts launch GPU work, but none was recorded",))
