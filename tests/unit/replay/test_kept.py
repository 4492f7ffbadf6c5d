"""Facts about a saved graph are found once, and only for what was saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from dpro.analysis import graphs
from dpro.analysis.graphs import graph_of, make_graph
from dpro.errors import Unanswerable
from dpro.replay.construction.graph_builder import Built
from dpro.replay.cost.transfers import fit_costs
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.gradient_buckets import gradient_passes
from dpro.replay.graph import Fact, Graph, once
from dpro.replay.kept import kept, read_archive, write_archive
from dpro.replay.mesh import axes_of_messages
from dpro.replay.peers import phase_work
from dpro.replay.whatif.graph_ops.scope import optimizing, rows_of
from dpro.replay.whatif.predict import Prediction, baseline_steps, predict
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import SPANS
from dpro.store import Run, open_run
from tests.builders import cpu_job
from tests.unit.replay.fidelity.test_saved import equal

HEALTHY = Path(__file__).parents[3] / "sample_traces" / "healthy"


class Named(NamedTuple):
    value: int


@pytest.fixture
def run(empty_cache, tmp_path, monkeypatch) -> Run:
    monkeypatch.setattr(graphs, "WORTH_SAVING", 1)
    return cpu_job().write(tmp_path / "run")


def loaded(run: Run) -> Graph:
    """The graph of the job as it runs, as the next command loads it."""
    return graph_of(run)[0].predictive


def total(graph: Graph, calls: list[int]) -> Any:
    """A fact about durations and tables, and that it was computed."""

    def compute(graph: Graph) -> tuple[int, np.ndarray]:
        calls.append(graph.run.num_rows(SPANS))
        return int(graph.nodes.duration.sum()), graph.nodes.duration * 2

    return kept(graph, "total", compute)


def facts(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "graphs").glob("*.total.fact"))


def test_a_fact_is_found_once_for_all_commands(run):
    calls: list[int] = []
    first = total(loaded(run), calls)
    assert equal(total(loaded(run), calls), first)
    assert len(calls) == 1


def test_a_changed_graph_has_facts_of_its_own(run, tmp_path):
    graph, calls = loaded(run), []
    total(graph, calls)
    changed = graph.with_durations(graph.nodes.duration + 1)
    assert total(changed, calls)[0] == int(changed.nodes.duration.sum())
    assert len(calls) == 2
    assert len(facts(tmp_path)) == 1


def test_a_table_that_is_written_later_makes_facts_void(run):
    graph, calls = loaded(run), []
    total(graph, calls)
    (run.path / "network").mkdir()
    fresh = dataclasses.replace(graph, run=open_run(run.path))
    total(fresh, calls)
    assert len(calls) == 2


def num_names(graph: Graph, calls: list[int]) -> int:
    """A fact about names alone."""

    def compute(graph: Graph) -> int:
        calls.append(1)
        return len(graph.names)

    return kept(graph, "total", compute)


def test_a_fact_is_read_for_a_changed_graph_if_it_follows_from_what_did_not_change(run, tmp_path):
    calls: list[int] = []
    for _ in range(2):
        graph = loaded(run)
        num_names(graph.with_durations(graph.nodes.duration + 1), calls)
    assert len(calls) == len(facts(tmp_path)) == 1
    graph = loaded(run)
    names = dataclasses.replace(graph, names=(*graph.names, "more"))
    assert [num_names(each, calls) for each in (names, graph)] == [len(names.names), len(graph.names)]
    assert len(calls) == 2


def test_what_follows_from_a_fact_that_was_read_follows_from_its_columns(run):
    num_names(loaded(run), [])
    graph = loaded(run)
    once(graph, "outer", lambda graph: num_names(graph, []))
    assert [*graph.facts["outer"].columns] == ["names"]


@pytest.mark.parametrize("content", [(7,), 7, Fact({"nodes.unknown": None}, (), 7), Fact({"3": None}, (), 7)])
def test_a_fact_in_another_form_is_found_again(run, tmp_path, content):
    calls: list[int] = []
    num_names(loaded(run), calls)
    (file,) = facts(tmp_path)
    write_archive(file, content, {"Fact": Fact})
    graph = loaded(run)
    assert num_names(graph, calls) == len(graph.names)
    assert len(calls) == 2


def test_a_damaged_fact_is_found_again(run, tmp_path):
    calls: list[int] = []
    first = total(loaded(run), calls)
    (file,) = facts(tmp_path)
    file.write_bytes(file.read_bytes()[:-20])
    assert equal(total(loaded(run), calls), first)
    assert equal(total(loaded(run), calls), first)
    assert len(calls) == 2


def test_facts_are_removed_with_their_graph(run, tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "KEPT", 1)
    total(loaded(run), [])
    assert len(facts(tmp_path)) == 1
    loaded(cpu_job(extra=500).write(tmp_path / "other"))
    assert facts(tmp_path) == []


FACTS = [
    axes_of_messages,
    fit_costs,
    gradient_passes,
    optimizing,
    phase_work,
    rows_of,
]


@pytest.mark.few(2)
@pytest.mark.parametrize("fact", FACTS)
def test_what_is_read_of_a_recorded_job_is_what_was_found(fact, empty_cache, monkeypatch):
    monkeypatch.setattr(graphs, "WORTH_SAVING", 1)
    run = open_run(HEALTHY)
    found = fact(loaded(run))
    assert list(empty_cache.rglob("*.fact"))
    as_read = fact(loaded(run))
    pairs = zip(found, as_read, strict=True) if isinstance(found, list) else [(found, as_read)]
    assert all(equal(one, other) for one, other in pairs)


EDITS = [
    "bucket:mb=0.1", "compress:to=fp16", "priority:mb=0.1", "data-parallel:ranks=4", "heal:rank=1",
    "batch:factor=2", "accumulate:steps=2", "split:op=all_reduce,chunks=2",
]  # fmt: skip


def answer(built: Built, trust: Trust, text: str) -> object:
    """What is predicted, or why nothing is."""
    graph = built.predictive
    try:
        return predict(graph, baseline_steps(graph), [parse_edit(text)], trust)
    except Unanswerable as error:
        return str(error)


@pytest.mark.slow
def test_predictions_from_kept_facts_are_those_without(empty_cache, monkeypatch):
    monkeypatch.setattr(graphs, "WORTH_SAVING", 1)
    run = open_run(HEALTHY)
    without = [answer(*make_graph(run), text) for text in EDITS]
    assert any(isinstance(each, Prediction) for each in without)
    for _ in range(2):  # the first writes what the second reads
        assert [answer(*graph_of(run), text) for text in EDITS] == without


def test_a_record_that_would_be_read_as_something_else_is_not_written(tmp_path):
    with pytest.raises(TypeError, match="Named would be read as a plain tuple"):
        write_archive(tmp_path / "file", Named(1), {})
    write_archive(tmp_path / "file", Named(1), {"Named": Named})
    assert read_archive(tmp_path / "file", {"Named": Named}, None) == Named(1)
