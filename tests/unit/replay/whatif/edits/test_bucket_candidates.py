"""Which bucket sizes are worth a replay: the theorem against all ways to cut, sizes against replays."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpro.replay.cost.curves import LinkCost
from dpro.replay.timeline import replay
from dpro.replay.whatif.graph_ops.divisions import (
    MAX_SIZES,
    SIZES_MB,
    ReadyGradients,
    is_better_changed,
    reductions_end,
    sizes_worth_replaying,
)
from dpro.replay.whatif.graph_ops.reductions import reductions_of
from dpro.replay.whatif.registry import parse_edit
from tests.ddp import ddp_job

gradients = st.builds(
    lambda parts, latency, per_byte, workers: ReadyGradients(
        np.cumsum([gap for gap, _ in parts]).astype(np.float64),
        np.array([size for _, size in parts], np.float64),
        LinkCost(latency, per_byte, 0, 0, 9, 0, False),
        workers,
    ),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 100)), min_size=1, max_size=6),
    st.floats(0, 100),
    st.floats(0.01, 3),
    st.integers(1, 2),
)


def _all_cuts(count: int) -> list[tuple[int, ...]]:
    return [(*cuts, count - 1) for number in range(count) for cuts in combinations(range(count - 1), number)]


@given(gradients)
def test_what_ends_first_of_all_ways_to_cut_is_never_better_changed_in_its_last_bucket(gradients):
    cuts = _all_cuts(gradients.ready.size)
    best = min(cuts, key=lambda closes: (reductions_end(gradients, closes)[-1], len(closes)))
    last = reductions_end(gradients, best)[-1]
    for other in cuts:
        assert reductions_end(gradients, other)[-1] >= last
    if gradients.workers > 1:  # two that take turns: neighbours alone do not show what is best of all
        return
    # Some best way of cutting keeps to the condition everywhere: what is better changed can be changed.
    equal = [closes for closes in cuts if reductions_end(gradients, closes)[-1] <= last * 1.01]
    assert any(not is_better_changed(gradients, closes) for closes in equal)


@given(gradients)
def test_a_pair_that_is_better_fused_ends_earlier_fused(gradients):
    for closes in _all_cuts(gradients.ready.size):
        ends = reductions_end(gradients, closes)
        for at in range(1, len(closes)):
            fused = (*closes[: at - 1], *closes[at:])
            size = gradients.num_bytes[closes[at - 1] + 1 : closes[at] + 1].sum()
            both = gradients.num_bytes[(closes[at - 2] if at > 1 else -1) + 1 : closes[at] + 1].sum()
            ready, free = gradients.ready[closes[at]], ends[at - 2] if at > 1 else 0.0
            theorem = (
                ends[at - 1] > ready + gradients.line.time_ns(both) - gradients.line.time_ns(size) + 1e-6
            )
            if theorem and free <= ready and gradients.workers == 1:
                assert reductions_end(gradients, fused)[at - 1] < ends[at]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([64, 300, 1024, 2500]), min_size=2, max_size=6),
    st.floats(100, 2000),
    st.floats(0, 800),
    st.floats(0.3, 4),
)
def test_the_best_size_by_replay_is_among_those_that_are_left(
    tmp_path_factory, others, layer, latency, speed
):
    # Recorded in two buckets of different sizes, the first through before the second: both costs are known.
    sizes, count = (30, *others), len(others) + 1
    assume(speed * 30 + latency < layer * (count - 1))
    run = ddp_job(sizes, (0, count - 1), layer=layer, latency=latency, us_per_kb=speed, num_steps=3)
    graph = run.build(tmp_path_factory.mktemp("sizes") / "run").graph
    left = sizes_worth_replaying(reductions_of(graph))
    assert 1 <= len(left) <= MAX_SIZES
    ends = {mb: int(replay(parse_edit(f"bucket:mb={mb}").apply(graph)).end.max()) for mb in SIZES_MB}
    assert min(ends[mb] for mb in left) <= 1.02 * min(ends.values())


def test_without_latency_the_smallest_are_as_good_as_any(tmp_path):
    graph = ddp_job().build(tmp_path / "run").graph
    assert sizes_worth_replaying(reductions_of(graph))[0] == pytest.approx(min(SIZES_MB))
