"""Edits of degrees of parallelism."""

from __future__ import annotations

import pytest

from dpro.errors import Unanswerable, UsageError
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.graph import Graph
from dpro.replay.layouts.recorded.job import recorded_job
from dpro.replay.layouts.recorded.ranking import changed_layout
from dpro.replay.timeline import replay
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.predict import baseline_steps, predict
from dpro.replay.whatif.registry import parse_edit
from dpro.store import Run
from tests.builders import cpu_job


@pytest.fixture(scope="module")
def graph(layered: Run) -> Graph:
    return build_graph(layered).predictive


def predicted_ms(graph: Graph, text: str) -> tuple[float, float, float]:
    built = build_graph(graph.run)
    trust = assess(built, replay(built.graph), graph.run.manifest)
    found = predict(graph, baseline_steps(graph), [parse_edit(text)], trust)
    return found.predicted_ns / 1e6, found.low_ns / 1e6, found.high_ns / 1e6


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("layout:tp=2", {"tp": 2}),
        ("layout:dp=2", {"dp": 2}),
        ("layout:micro_batches=2", {"micro_batches": 2, "micro_batch": 1}),
    ],
)
def test_an_edit_says_what_the_plan_says(graph: Graph, text: str, layout: dict[str, int]) -> None:
    said = changed_layout(recorded_job(graph), layout).row(0, named=True)
    middle, low, high = predicted_ms(graph, text)
    assert middle == pytest.approx(said["step_ms"], rel=0.01)
    assert low <= said["low_ms"] * 1.01
    assert high >= said["high_ms"] * 0.99


def test_the_layout_as_it_is_changes_no_nanosecond(graph: Graph) -> None:
    for text in ("layout", "layout:dp=1,tp=1"):
        assert (replay(parse_edit(text).apply(graph)).end == replay(graph).end).all()


def test_twice_the_replicas_have_twice_the_samples(graph: Graph) -> None:
    assert parse_edit("layout:dp=2").samples(graph) == 2
    assert parse_edit("layout:tp=2").samples(graph) == 1
    said = [
        any("times the samples" in note for note in parse_edit(f"layout:{axis}=2").notes(graph))
        for axis in ("dp", "tp")
    ]
    assert said == [True, False]


def test_it_says_what_becomes_of_the_layout(graph: Graph) -> None:
    notes = parse_edit("layout:tp=2").notes(graph)
    assert notes[1] == "dp 1 x tp 2, micro-batch 2 x 1 then, on 2 ranks"


def test_no_gain_is_beyond_the_bound_and_none_is_searched(graph: Graph) -> None:
    facts = facts_of(graph)
    edit = parse_edit("layout:tp=4")
    assert edit.bound(facts) == facts.base_ns
    assert type(edit).candidates(facts) == ()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("layout:tp=3", "heads"),
        ("layout:pp=2", "stages"),
        ("layout:micro_batch=3", "does not divide"),
        ("layout:pp=3", "too few"),
    ],
)
def test_what_cannot_be_cut_is_refused(graph: Graph, text: str, word: str) -> None:
    with pytest.raises(Unanswerable, match=word):
        parse_edit(text).apply(graph)


def test_a_job_without_layers_is_refused(tmp_path) -> None:
    with pytest.raises(Unanswerable, match="not known"):
        parse_edit("layout:dp=4").apply(cpu_job().build(tmp_path).graph)
    with pytest.raises(UsageError, match="dp must be from 1 to 262,144, not 0"):
        parse_edit("layout:dp=0")
