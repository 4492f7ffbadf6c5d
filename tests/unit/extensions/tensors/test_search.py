"""The search for divisions: against replays of all of them, against uniform sizes, and its parts."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.extensions.tensors import search
from dpro.extensions.tensors.edits import require_equal_passes
from dpro.extensions.tensors.search import (
    AS_GOOD,
    Part,
    Replays,
    all_divisions,
    ends_of,
    last_gradients,
    repeated,
    search_division,
    uniform_divisions,
)
from dpro.replay.graph import Graph
from dpro.replay.whatif.graph_ops.reductions import reductions_of
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import baseline_steps
from tests.ddp import KB, ddp_job, gpu_ddp_job
from tests.unit.extensions.tensors.test_edits import _of_two_types


def replays_of(graph: Graph, left: int = 1000) -> Replays:
    """Replays of a job under no other edits."""
    job = ReplayedJob(graph).with_kept_tables()
    return Replays(job, job, baseline_steps(graph), (), 1.0, left, lambda: None)


def shortest(graph: Graph) -> float:
    """The step with the best of all contiguous divisions, by replays."""
    replays = replays_of(graph)
    return min(map(replays.step_ns, all_divisions(replays.gradients, ends_of(replays.gradients))))


small_jobs = st.builds(
    lambda others, layer, latency, speed, late: ddp_job(
        (30, *others), (0, len(others)), layer=layer, latency=latency, us_per_kb=speed, late=late, num_steps=2
    ),
    st.lists(st.sampled_from([64, 300, 1024, 2500]), min_size=1, max_size=6),
    st.floats(100, 2000),
    st.floats(0, 800),
    st.floats(0.3, 4),
    st.sampled_from([0.0, 300.0]),
)


@settings(max_examples=8, deadline=None)
@given(small_jobs)
def test_of_few_gradients_the_best_of_all_divisions_is_found(tmp_path_factory, run):
    graph = run.build(tmp_path_factory.mktemp("small") / "run").graph
    replays = replays_of(graph)
    search_division(replays)
    whole = [ns for division, ns in replays.steps_ns.items() if all(part.pieces == 1 for part in division)]
    assert min(whole) == shortest(graph)
    assert replays.best_ns <= shortest(graph) * (1 + AS_GOOD)


@settings(max_examples=8, deadline=None)
@given(small_jobs)
def test_without_replaying_all_of_them_next_to_nothing_is_missed(tmp_path_factory, run):
    graph = run.build(tmp_path_factory.mktemp("local") / "run").graph
    replays = replays_of(graph)
    with mock.patch.object(search, "MAX_DIVISIONS", 0):
        search_division(replays)
    assert replays.best_ns <= shortest(graph) * 1.01


@settings(max_examples=8, deadline=None)
@given(small_jobs, st.integers(1, 30))
def test_no_uniform_size_that_was_replayed_is_better_however_few_replays_there_are(
    tmp_path_factory, run, left
):
    graph = run.build(tmp_path_factory.mktemp("uniform") / "run").graph
    replays = replays_of(graph, left)
    search_division(replays)
    assert len(replays.steps_ns) <= left
    assert replays.best_ns <= min(replays.steps_ns.values()) * (1 + AS_GOOD)
    uniform = [replays.steps_ns.get(division, np.inf) for division in uniform_divisions(replays.reductions)]
    assert replays.best_ns <= min(uniform) * (1 + AS_GOOD)


def test_two_searches_of_one_run_agree(tmp_path):
    graph = gpu_ddp_job().build(tmp_path / "run").graph
    found = []
    for _ in range(2):
        replays = replays_of(graph)
        search_division(replays)
        found.append((replays.best, list(replays.steps_ns.items())))
    assert found[0] == found[1]


def test_half_precision_is_kept_only_where_it_shortens_the_step(tmp_path):
    # All but the last gradient are moved before that one is ready.
    graph = ddp_job((128, 256, 256, KB), (0, 1, 2, 3), us_per_kb=1.0).build(tmp_path / "run").graph
    plain, halved = replays_of(graph), replays_of(graph)
    search_division(plain)
    search_division(halved, "bf16")
    assert halved.best_ns < 0.98 * plain.best_ns
    by_gradient = {
        number: part.reduce_in
        for part, first in zip(halved.best, (0, *(end + 1 for end in last_gradients(halved.best))))
        for number in range(first, part.last + 1)
    }
    assert by_gradient[3] == "bf16"
    assert "" in by_gradient.values()


def test_gradients_of_two_types_are_never_in_one_bucket(tmp_path):
    replays = replays_of(_of_two_types().build(tmp_path / "run").graph)
    search_division(replays)
    assert all(0 in last_gradients(division) for division in replays.steps_ns)


def test_passes_that_reduce_other_numbers_of_gradients_are_refused(tmp_path):
    reductions = reductions_of(ddp_job((KB, KB, KB), (0, 2)).build(tmp_path / "run").graph)
    require_equal_passes(reductions)
    first, *others = reductions.passes
    sizes = replace(first.parameters, num_bytes=first.parameters.num_bytes[:-1])
    with pytest.raises(Unanswerable, match=r"different numbers of gradients \(2 to 3\)"):
        require_equal_passes(replace(reductions, passes=[replace(first, parameters=sizes), *others]))


def test_the_buckets_that_decide_when_a_step_ends_are_found(tmp_path):
    # 64 KB are through long before the next gradient is ready.
    graph = ddp_job((64, KB, KB), (0, 1, 2), us_per_kb=2.0).build(tmp_path / "run").graph
    replays = replays_of(graph)
    assert replays.on_critical_path((Part(0), Part(1), Part(2))) == [1, 2]
    assert replays.on_critical_path((Part(0), Part(1, 2), Part(2))) == [1, 2]
    assert replays.on_critical_path((Part(2),)) == [0]


def test_uniform_sizes_that_make_the_same_buckets_are_one(tmp_path):
    graph = ddp_job().build(tmp_path / "run").graph
    sizes = uniform_divisions(replays_of(graph).reductions)
    assert {last_gradients(division): mb for division, mb in sizes.items()} == {
        (0, 1, 2, 3): 0.25,
        (1, 3): 2.0,
        (3,): 4.0,
    }


@pytest.mark.parametrize(
    ("kinds", "stretch"),
    [
        ([0, 1, 2, 1, 2, 1, 2, 3], (1, 7, 2)),
        ([1, 1, 1, 1], (0, 4, 1)),
        ([0, 1, 2, 3], (0, 0, 1)),
        ([5], (0, 0, 1)),
        ([9, 4, 5, 6, 4, 5, 6, 8, 8], (1, 7, 3)),
    ],
)
def test_blocks_that_repeat_each_other_are_found(kinds, stretch):
    assert repeated(np.array(kinds)) == stretch
