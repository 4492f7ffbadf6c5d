"""The best divisions on one link: against all ways to cut, and when neighbours lose nothing."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.cost.curves import LinkCost
from dpro.replay.whatif.graph_ops.divisions import (
    ReadyGradients,
    best_divisions,
    gradients_of,
    reductions_end,
)
from dpro.replay.whatif.graph_ops.reductions import reductions_of
from tests.ddp import KB, ddp_job, gpu_ddp_job

parts = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 100)), min_size=1, max_size=7)


def _gradients(
    parts: list[tuple[int, int]], latency: float, workers: int, call: float = 0.0, ends: tuple[int, ...] = ()
) -> ReadyGradients:
    gaps, sizes = np.array(parts, np.float64).T
    line = LinkCost(latency, 1.0, 0, 0, 9, 0, False)
    return ReadyGradients(np.cumsum(gaps), sizes, line, workers, call, ends)


@given(parts, st.integers(0, 100), st.integers(1, 2), st.integers(0, 30), st.sets(st.integers(0, 5)))
def test_for_each_number_of_buckets_no_other_way_to_cut_ends_earlier(parts, latency, workers, call, ends):
    last = len(parts) - 1
    forced = tuple(sorted(end for end in ends if end < last))
    gradients = _gradients(parts, latency, workers, call, forced)
    earliest: dict[int, float] = {}
    for count in range(last + 1):
        for cuts in combinations(range(last), count):
            closes = (*cuts, last)
            if set(forced) <= set(closes):
                end = reductions_end(gradients, closes)[-1]
                earliest[len(closes)] = min(earliest.get(len(closes), np.inf), end)
    best = best_divisions(gradients)
    assert [len(closes) for closes in best] == sorted(earliest)
    for closes in best:
        assert set(forced) <= set(closes)
        assert reductions_end(gradients, closes)[-1] == pytest.approx(earliest[len(closes)])


@given(parts, st.integers(0, 100))
def test_buckets_end_only_where_they_may(parts, latency):
    gradients = _gradients(parts, latency, 2)
    allowed = {*range(0, len(parts), 2), len(parts) - 1}
    for closes in best_divisions(gradients, most=3, closes=sorted(allowed)):
        assert len(closes) <= 3
        assert set(closes) <= allowed


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=5), st.integers(0, 60)
)
def test_on_one_worker_no_buckets_of_others_than_neighbours_end_earlier(parts, latency):
    gradients = _gradients(parts, latency, 1)
    best = min(reductions_end(gradients, closes)[-1] for closes in best_divisions(gradients))
    for bucket_of in product(range(len(parts)), repeat=len(parts)):
        end, called = 0.0, 0.0
        for bucket in range(len(parts)):
            members = [number for number, of in enumerate(bucket_of) if of == bucket]
            if members:
                called = max(called, gradients.ready[max(members)])
                end = max(end, called) + latency + float(gradients.num_bytes[members].sum())
        assert end >= best - 1e-6


def test_gradients_are_ready_on_the_last_rank_and_without_the_calls_that_were_recorded(tmp_path):
    graph = ddp_job((KB,) * 3, (0, 1, 2), late=500, call=40, latency=5).build(tmp_path / "run").graph
    gradients = gradients_of(reductions_of(graph))
    first, second, third = gradients.ready.tolist()
    assert second - first == pytest.approx(1e6, rel=0.01)
    assert third - second == pytest.approx(1e6, rel=0.01)
    assert first == pytest.approx(0.5e6, rel=0.02)  # since the first rank had its first gradient
    assert gradients.call_ns == pytest.approx(40e3, rel=0.1)


def test_on_gpus_gradients_are_ready_when_their_kernels_end(tmp_path):
    gradients = gradients_of(reductions_of(gpu_ddp_job((0, 1, 2, 3)).build(tmp_path / "run").graph))
    assert np.diff(gradients.ready) == pytest.approx([1e6] * 3, rel=0.01)
    assert gradients.call_ns == 0
