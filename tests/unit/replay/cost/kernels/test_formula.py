"""The formula of ten numbers, and fits of it to operations made by it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.cost.kernels.formula import (
    ASSUMED,
    NAMES,
    PRIOR,
    SPREAD,
    UNKNOWN_BANDS,
    DeviceFit,
    DeviceSample,
    KnownCoefficients,
    fit,
    formula_us,
    sizes_of,
)
from dpro.replay.cost.kernels.operations import matmuls, moves
from dpro.replay.cost.kernels.products import calibrated
from dpro.replay.cost.kernels.roofline import GPUS

GPU = GPUS["A100-SXM4-80GB"]
sizes = st.integers(1, 1 << 14)


def _numbers(**changed):
    return np.array(
        [np.log(changed[name]) if name in changed else prior for name, prior in zip(NAMES, PRIOR)]
    )


def test_an_operation_that_moves_nothing_takes_its_launch():
    numbers = _numbers(launch_us=4)
    assert formula_us(numbers, sizes_of(moves("bf16", 0, 0)), GPU, "bf16") == pytest.approx([4])


def test_a_large_copy_takes_what_the_share_of_the_bandwidth_needs():
    numbers = _numbers(memory=0.5, throttle=1e-9)
    (us,) = formula_us(numbers, sizes_of(moves("bf16", 2e9, 2e9)), GPU, "bf16")
    assert us == pytest.approx(4e9 / (GPU.gbps * 1e3) / 0.5, rel=1e-3)


def test_one_wave_more_costs_a_wave():
    numbers = _numbers(launch_us=1e-6, sharpness=1e3, memory=1e3, throttle=1e-9)
    full, more = formula_us(
        numbers, sizes_of(matmuls("bf16", [256 * 108, 256 * 108 + 1], 128, 1 << 14)), GPU, "bf16"
    )
    assert 1 < more / full < 2.2


@given(sizes, sizes, sizes)
def test_more_of_any_size_never_takes_less_and_nothing_beats_the_roofline(m, n, k):
    operations = matmuls("bf16", [m, m + 1, m, m], [n, n, n + 1, n], [k, k, k, k + 1])
    made = sizes_of(operations)
    us = formula_us(PRIOR, made, GPU, "bf16")
    assert (us[1:] >= us[0] * (1 - 1e-9)).all()
    within_cache = 1 + np.exp(PRIOR[NAMES.index("cache")])  # memory is that much faster at most
    computing = operations["operations"].to_numpy() / (GPU.tflops["bf16"] * 1e6)
    roofline = np.maximum(computing, made.moved / (GPU.gbps * 1e3))
    assert (us >= roofline / within_cache).all()


def _measured(numbers, count, seed=1):
    chance = np.random.default_rng(seed)
    operations = matmuls("bf16", *np.exp2(chance.uniform(5, 14, (3, count))).round())
    noise = np.exp(chance.normal(0, 0.02, count))
    return DeviceSample(
        operations, formula_us(numbers, sizes_of(operations), GPU, "bf16") * noise, GPU, "bf16"
    )


def _wrong(found, numbers):
    unseen = _measured(numbers, 500, seed=2)
    return np.median(
        np.abs(formula_us(found.numbers, sizes_of(unseen.operations), GPU, "bf16") / unseen.us - 1)
    )


def test_a_fit_to_operations_of_the_formula_says_others_of_it():
    numbers = _numbers(launch_us=5, compute=0.7, memory=0.6, half_edge=20)
    found = fit([_measured(numbers, 400)])
    assert _wrong(found, numbers) < 0.04
    assert (found.widths <= SPREAD).all()
    assert found.widths[NAMES.index("launch_us")] < 0.2


def test_thirty_operations_move_the_numbers_of_others_to_those_of_a_device():
    numbers = _numbers(compute=0.55, memory=0.7)
    known = KnownCoefficients(DeviceFit(PRIOR, ASSUMED.widths), UNKNOWN_BANDS, 0.3, (1e15, 1e12))
    own = calibrated(known, _measured(numbers, 30))
    assert _wrong(own.fit, numbers) < 0.05 < _wrong(known.fit, numbers)
    assert own.bias < 0.05
