"""What a GPU holds, worked out by hand, and what sharding and recomputing change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.extensions.plan.layout import SCHEDULE_NAMES, layouts
from dpro.extensions.plan.memory import KINDS, in_flight, memory_of, refusals, verdicts
from dpro.extensions.plan.model import Model, Software
from dpro.extensions.plan.schedules import SCHEDULES, most_in_flight
from dpro.replay.cost.machine import machine_of

# Weights: per layer 2048 x 2048 x (4 + 3 x 4) = 67.1 million; two tables of 32000 x 2048.
MODEL = Model(16, 2048, 16, 16, 128, 8192, 32000, 2048)
WEIGHTS = 16 * 16 * 2048**2 + 2 * 32000 * 2048
STATES = ("parameters", "gradients", "optimizer")


def held(software: Software | None = None, **columns: int) -> dict[str, float]:
    """1e9 bytes by kind of one layout."""
    found: dict[str, float] = memory_of(MODEL, layouts([columns]), software or Software()).row(0, named=True)
    return found


def test_weights_gradients_and_states_of_one_gpu_are_eighteen_bytes_a_parameter() -> None:
    parts = held(zero=0)
    assert sum(parts[kind] for kind in STATES) == pytest.approx(18 * WEIGHTS / 1e9)


@pytest.mark.parametrize(
    ("zero", "factors"), list(enumerate([(2, 4, 12), (2, 4, 1.5), (2, 0.5, 1.5), (0.25, 0.5, 1.5)]))
)
def test_each_stage_of_zero_shards_one_kind_more(zero: int, factors: tuple[float, float, float]) -> None:
    parts = held(zero=zero, dp=8)
    assert [parts[kind] * 1e9 / WEIGHTS for kind in STATES] == pytest.approx(factors)


def test_a_layer_with_dropout_keeps_thirty_four_bytes_a_token_and_element() -> None:
    # Korthikanti et al., equation 1 without scores: 34 s b h; two matrices of 4 h.
    plain = replace(MODEL, gated=False)
    tokens = 2048
    found = memory_of(plain, layouts([{}]), Software(dropout=True, sequence_parallel=False))["activations"][0]
    # Theirs has a mask of the dropout after attention's scores, which fused attention does not keep.
    assert found * 1e9 / (16 * tokens * 2048) == pytest.approx(34, abs=1)


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    arrays = [np.array([float(n)]) for n in (4, 1, 16)]
    assert in_flight(*arrays, np.array([0.0]))[0] == 4
    assert in_flight(*arrays, np.array([3.0]))[0] == 1
    assert in_flight(*arrays, np.array([0.0]), "gpipe")[0] == 16


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (4, 16)])
def test_stages_hold_what_the_generated_schedule_holds(schedule: str, stages: int, count: int) -> None:
    chunks = SCHEDULES[schedule].chunks
    orders = SCHEDULES[schedule].orders(stages, count, chunks)
    shape = [np.array([float(each)]) for each in (stages, chunks, count)]
    for stage in (0, stages - 1):
        found = in_flight(*shape, np.array([float(stage)]), schedule)
        assert found[0] == most_in_flight(orders[stage])


def test_two_copies_of_the_model_take_twice_the_parameters() -> None:
    shape = {"pp": 2, "micro_batches": 8}
    rows = layouts([shape, {**shape, "schedule": SCHEDULE_NAMES.index("dualpipe")}])
    plain, both = memory_of(MODEL, rows, Software())["parameters"].to_list()
    assert both == pytest.approx(plain + (WEIGHTS / 2) * 2 / 1e9)


def test_the_first_stage_of_zb_v_has_both_ends_of_the_model() -> None:
    uneven = replace(MODEL, layers=15)  # chunks of 4, 4, 4 and 3 layers
    rows = layouts([{"pp": 2, "vpp": 2, "micro_batches": 8, "schedule": SCHEDULE_NAMES.index("zbv")}])
    expected = 2 * (7 * 16 * 2048**2 + 2 * 32000 * 2048) / 1e9
    assert memory_of(uneven, rows, Software())["parameters"].to_list() == pytest.approx([expected])


def test_recomputing_layers_keeps_only_their_inputs() -> None:
    parts = held(recompute=2)
    assert parts["activations"] == pytest.approx(16 * 2 * 2048 * 2048 / 1e9)


def test_what_does_not_fit_says_what_needs_most() -> None:
    machine = replace(machine_of("H100"), memory_gb=10.0)
    word, why = verdicts(memory_of(MODEL, layouts([{"zero": 0}]), Software()), machine)[0]
    assert word == "no"
    assert "optimizer" in why


def test_stages_without_layers_are_refused() -> None:
    rows = layouts(
        [{"pp": 32, "micro_batches": 64}, {"pp": 16, "micro_batches": 64}, {"pp": 8, "micro_batches": 2}]
    )
    reasons = refusals(MODEL, rows, Software())
    assert "stages empty" in reasons[0]
    assert not reasons[1]
    assert "too few" in reasons[2]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(0, 2), st.integers(1, 8))
def test_sharding_more_never_needs_more(dp: int, tp: int, zero: int, micro_batch: int) -> None:
    columns = {"dp": dp, "micro_batch": micro_batch}
    less, more = held(tp=tp, zero=zero + 1, **columns), held(tp=tp, zero=zero, **columns)
    assert sum(less[kind] for kind in STATES) <= sum(more[kind] for kind in STATES) + 1e-9
    assert sum(held(tp=2 * tp, zero=zero, **columns)[kind] for kind in KINDS) <= more["memory_gb"] + 1e-9
