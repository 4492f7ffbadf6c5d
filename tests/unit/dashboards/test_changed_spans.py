"""Spans that a change acts on are marked by their names, where no others have these."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.dashboards.changed_spans import changed_spans
from dpro.dashboards.command import load
from dpro.dashboards.timeline.search import LONGEST, matching
from dpro.replay.graph import Graph
from dpro.replay.whatif.registry import parse_edit
from tests.builders import TinyRun, gpu_job


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(gpu_job().write(tmp_path_factory.mktemp("run")))


def kernels(folder, *names: str) -> Graph:
    """A graph of one rank with kernels of these names, 400 us each, in every step."""
    run = TinyRun()
    for step in range(3):
        for number, name in enumerate(names):
            at = 1000 * step * len(names) + 500 * number
            run.call(at, at + 5, 100 * step + number)
            run.kernel(name, at + 10, at + 410, 100 * step + number)
        run.step(step, 1000 * step * len(names), 1000 * (step + 1) * len(names) - 10)
    return load(run.write(folder)).built.graph


def shortened(graph: Graph, *wanted: str, every: int = 1) -> Graph:
    """The graph with work of some names half as long; or only every second, third, … piece of it."""
    numbers = [graph.names.index(name) for name in wanted]
    chosen = np.flatnonzero(np.isin(graph.nodes.name, numbers) & (graph.nodes.step >= 0))[::every]
    duration = graph.nodes.duration.copy()
    duration[chosen] //= 2
    return graph.with_durations(duration)


def test_names_of_what_is_changed_are_an_expression_that_matches_no_others(tmp_path):
    graph = kernels(tmp_path, "gemm(float)", "softmax", "gemm(half)")
    spans = changed_spans(graph, shortened(graph, "gemm(float)", "softmax"))
    names = [name for name in graph.names if name]
    matched = {name for name, hit in zip(names, matching(spans.find, names)) if hit}
    assert matched == {"gemm(float)", "softmax"}
    assert spans.share == pytest.approx(1.0)
    assert spans.ranks == ()


def test_a_name_of_which_only_some_spans_change_marks_nothing(tmp_path):
    graph = kernels(tmp_path, "gemm", "softmax")
    assert changed_spans(graph, shortened(graph, "gemm")).find == "^(gemm)"
    assert changed_spans(graph, shortened(graph, "gemm", every=2)) is None


def test_names_with_a_small_part_of_the_change_are_left_out(tmp_path):
    graph = kernels(tmp_path, "gemm", "softmax", "copy")
    duration = graph.nodes.duration.copy()
    for name, saved in (("gemm", 0.9), ("softmax", 0.1), ("copy", 0.05)):
        changed = graph.nodes.name == graph.names.index(name)
        duration[changed] = (duration[changed] * (1 - saved)).astype(np.int64)
    assert changed_spans(graph, graph.with_durations(duration)).find == "^(gemm)"


def test_what_changes_no_span_or_adds_work_is_not_marked(loaded):
    graph = loaded.built.graph
    assert changed_spans(graph, graph) is None
    applied = loaded.changed([parse_edit("accumulate:steps=2")])
    assert changed_spans(applied.before.graph, applied.after.graph) is None


def test_many_long_names_are_shortened_until_the_search_takes_them(tmp_path):
    begin = "void at::native::vectorized_elementwise_kernel<4, at::native::"
    long = [f"{begin}{letter * 90}>" for letter in "abcdef"]
    graph = kernels(tmp_path, *long, "gemm")
    spans = changed_spans(graph, shortened(graph, *long))
    assert len(spans.find) <= LONGEST
    assert not matching(spans.find, ["gemm"])[0]
    assert matching(spans.find, long).all()


def test_of_a_healed_rank_its_own_spans_are_marked(loaded):
    applied = loaded.changed([parse_edit("heal:rank=1")])
    spans = changed_spans(applied.before.graph, applied.after.graph)
    assert spans.ranks == (1,)
    assert spans.share >= 0.5
