"""Made-up curves of losses as they are in ordinary training, for the test that nothing is found in them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Random = np.random.Generator
STEPS = 1200
_T = np.arange(STEPS)


def _noise(random: Random, share: float) -> Floats:
    return np.exp(share * random.standard_normal(STEPS))


def _decay(random: Random) -> Floats:
    """From `start` to `end`, as a power of the steps, with the noise of batches."""
    start, end = random.uniform(2, 12), random.uniform(0.1, 2.5)
    power = random.uniform(0.2, 0.8)
    return (end + (start - end) * (1 + _T / 20) ** -power) * _noise(random, random.uniform(0.01, 0.3))


def _reinforcement(random: Random) -> Floats:
    """Around zero, with rare large values of both signs."""
    return 0.1 * random.standard_t(random.uniform(2.5, 4), STEPS) + random.uniform(-0.05, 0.05)


def _rewards(random: Random) -> Floats:
    """Never negative, and most of the time near nothing."""
    return random.pareto(random.uniform(2.2, 3.5), STEPS) + 0.01


def _warm_up(random: Random) -> Floats:
    rises = 1 + random.uniform(0, 1.5) * np.exp(-(((_T - 60) / 30) ** 2))
    return _decay(random) * rises


def _rate_drops(random: Random) -> Floats:
    level = random.uniform(1, 3) * np.where(_T > 400, 0.4, 1.0) * np.where(_T > 800, 0.5, 1.0)
    return level * _noise(random, random.uniform(0.02, 0.2))


def _warm_restarts(random: Random) -> Floats:
    """A cosine schedule that begins again: the loss rises within some steps, and falls again."""
    period = int(random.integers(200, 500))
    place = (_T % period) / period
    low, high = random.uniform(0.03, 0.3), random.uniform(0.4, 0.9)
    rising = 1 - np.exp(-(_T % period) / random.uniform(4, 15))
    level = low + (high - low) * rising * (1 + np.cos(np.pi * place)) / 2
    level[:period] += 2.0 * np.exp(-_T[:period] / 30)
    return level * _noise(random, random.uniform(0.03, 0.2))


def _epochs(random: Random) -> Floats:
    """Falls at the beginning of each epoch, when batches are seen again."""
    epoch = _T // int(random.integers(100, 400))
    return random.uniform(1, 3) * 0.8**epoch * _noise(random, random.uniform(0.02, 0.2))


def _tiny(random: Random) -> Floats:
    """Learnt by heart: nearly nothing, and now and then a sample that is not."""
    level = 2.3 * np.exp(-_T / 60) + 1e-5
    rare = (random.random(STEPS) < 0.01) * random.lognormal(-3.5, 0.6, STEPS)
    return level * _noise(random, 0.8) + rare


def _negative(random: Random) -> Floats:
    """A logarithm of densities, from above zero to below."""
    return (
        5 * np.exp(-_T / 200)
        - random.uniform(1, 4)
        + random.uniform(0.05, 0.5) * random.standard_normal(STEPS)
    )


def _constant(random: Random) -> Floats:
    return np.full(STEPS, random.choice([0.0, 0.6931, 2.3026, 1e-8]))


def _curriculum(random: Random) -> Floats:
    """Harder data from some step on: up to twice the loss."""
    harder = np.where(random.integers(200, 900) < _T, random.uniform(1.1, 2.0), 1.0)
    return _decay(random) * harder


def _two_tasks(random: Random) -> Floats:
    """Batches of two kinds, one of them rare."""
    return _decay(random) * np.where(random.random(STEPS) < random.uniform(0.05, 0.5), 2.5, 1.0)


ORDINARY: tuple[Callable[[Random], Floats], ...] = (
    _decay, _reinforcement, _rewards, _warm_up, _rate_drops, _warm_restarts, _epochs, _tiny, _negative,
    _constant, _curriculum, _two_tasks,
)  # fmt: skip
CALM = (_decay, _warm_up, _rate_drops, _epochs, _curriculum)  # whose level a spike is a multiple of


def curve(number: int, kinds: tuple[Callable[[Random], Floats], ...] = ORDINARY) -> Floats:
    """The curve of a number: each kind in turn, each time other."""
    return kinds[number % len(kinds)](np.random.default_rng(number))
