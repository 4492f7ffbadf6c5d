"""Statistics of ranks that work longer than their peers, or than before, beyond noise.

Takes own times of a team's steps; returns the ranks that are clearly and persistently slower. Times are
compared as log-ratios to the median of the peers in the same step, which cancels what all have in common; the
midmean of these over the latest steps is tested, in units of its standard error. Does not compute which ranks
wait for a slow one, nor what that costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import MAD_TO_SIGMA, Floats
from dpro.detect.significance import LATEST_STEPS

MIN_RATIO = 0.035  # least excess over the peers' own time: smaller differences are everywhere
# By how much a rank must have become slower: half of the 5% to be detected, since not all of a step becomes
# slower with it. Devices differ by as much, but a rank is compared with the past of the same device.
MIN_CHANGE = 0.025
PAST_STEPS = LATEST_STEPS[1:]  # ten steps are too few: the tails of their midmean are not normal
MIN_BEFORE = 20  # earlier steps that a rank's past needs
AS_LARGE = 0.9  # of the largest effect: of the windows that show this much, the longest counts
PERSISTENT = 0.8  # share of the steps in which a rank must be slower
# Standard errors that an effect must reach. Every test is one more chance to be wrong, and a job of a week is
# tested 100,000 times: normal noise passes 3 times in 10 million.
MIN_SIGNIFICANCE = 5.0
MIN_NOISE = 0.01  # lower estimates of the noise are raised to this
SCARCE = 8.0  # over the number of steps: share by which noise is raised, as few steps hardly show it
MIDMEAN_ERROR = 1.093  # standard error for normal values, in units of that of their mean


@dataclass(frozen=True)
class Team:
    """Ranks that do equal work, and their times in the steps that all of them have.

    Attributes:
        ranks: [R] rank numbers.
        steps: [T] step numbers.
        own_ns: [T, R] own times, in ns.
        waited_ns: [T, R] waits for others, in ns.
        start_ns: [T, R] begin times of steps, in ns.
    """

    ranks: list[int]
    steps: NDArray[np.int64]
    own_ns: Floats
    waited_ns: Floats
    start_ns: NDArray[np.int64]


@dataclass(frozen=True)
class Excess:
    """How much slower one rank of a team is.

    Attributes:
        column: of the rank in its team.
        num_steps: number of latest steps that show it.
        level: log-ratio to its peers.
        error: standard error of the level, or of its change.
        persistent: share of the steps in which the rank is slower than its reference.
        before: level in the steps before, if these are the reference; 0, the level of its peers, otherwise.
        against_past: whether the reference is its own past.
    """

    column: int
    num_steps: int
    level: float
    error: float
    persistent: float
    before: float = 0.0
    against_past: bool = False

    @property
    def effect(self) -> float:
        """By how much the rank is slower, as a log-ratio."""
        return self.level - self.before


def late_columns(team: Team) -> list[Excess]:
    """Return the clearly and persistently slower ranks of a team: than their peers, then than before."""
    logs = np.log(np.maximum(team.own_ns, 1.0))
    excess = logs - median_of_peers(logs)
    peers = [_against_peers(excess, size) for size in LATEST_STEPS if size <= len(excess)]
    past = [_against_past(logs, excess, size) for size in PAST_STEPS if size + MIN_BEFORE <= len(excess)]
    return [*_longest_windows(peers), *_longest_windows(past)]


def _longest_windows(windows: list[list[Excess]]) -> list[Excess]:
    """Return for each rank the longest of the windows whose effect is about as large as any."""
    by_column: dict[int, list[Excess]] = {}
    for excess in chain.from_iterable(windows):
        by_column.setdefault(excess.column, []).append(excess)
    longest = []
    for _, of_rank in sorted(by_column.items()):
        enough = AS_LARGE * max(excess.effect for excess in of_rank)
        longest.append([excess for excess in of_rank if excess.effect >= enough][-1])
    return longest


def _against_peers(excess: Floats, size: int) -> list[Excess]:
    """Return ranks that are slower than their peers in the latest steps.

    Args:
        excess: [T, R] log-ratios of own times to those of the peers.
    """
    latest = excess[-size:]
    level, persistent = midmean(latest), (latest > 0).mean(axis=0)
    error = _error(excess, size)
    clear = (level >= MIN_RATIO) & (persistent >= PERSISTENT) & (level >= MIN_SIGNIFICANCE * error)
    return [
        Excess(column, size, level.item(column), error.item(column), persistent.item(column))
        for column in np.flatnonzero(clear).tolist()
    ]


def _against_past(logs: Floats, excess: Floats, size: int) -> list[Excess]:
    """Return ranks whose excess over their peers is larger in the latest steps than it was before.

    If a peer became faster, all others seem slower: so the rank's own time must have grown, too.

    Args:
        logs: [T, R] logarithms of own times.
        excess: [T, R] log-ratios of own times to those of the peers.
    """
    latest, earlier = excess[-size:], excess[:-size]
    level, before = midmean(latest), midmean(earlier)
    grown = midmean(logs[-size:]) - midmean(logs[:-size])
    persistent = (latest > before).mean(axis=0)
    error = _error(excess, size) * np.sqrt(1 + size / len(earlier))
    change = level - before
    clear = (change >= MIN_CHANGE) & (persistent >= PERSISTENT) & (change >= MIN_SIGNIFICANCE * error)
    clear &= (grown >= change / 2) & (level > 0)
    return [
        Excess(
            column,
            size,
            level.item(column),
            error.item(column),
            persistent.item(column),
            before.item(column),
            True,
        )
        for column in np.flatnonzero(clear).tolist()
    ]


def midmean(values: Floats) -> Floats:
    """Return the mean of the middle half along the first axis.

    It ignores a quarter of outliers on each side, and varies less than a median: 1.093 times as much as the
    mean of normal values, instead of 1.253 times (the variance of a trimmed mean: Huber, "Robust Statistics",
    1981, section 3.3).
    """
    quarter = len(values) // 4
    middle = np.sort(values, axis=0)[quarter : len(values) - quarter]
    return np.asarray(middle.mean(axis=0))


def median_of_peers(values: Floats) -> Floats:
    """Return [T, R] medians over all columns but the own."""
    size = values.shape[1]
    order = np.argsort(values, axis=1)
    place = np.argsort(order, axis=1)
    ordered = np.take_along_axis(values, order, axis=1)

    def without(index: int) -> Floats:
        after = ordered[:, min(index + 1, size - 1), None]
        return np.where(place > index, ordered[:, index, None], after)

    low, high = (size - 2) // 2, (size - 1) // 2
    return (without(low) + without(high)) / 2


def _error(excess: Floats, size: int) -> Floats:
    """Return [R] standard errors of a midmean of successive steps.

    Noise is estimated from differences of neighbours, which a lasting change does not affect; if there are
    enough steps, also from differences between midmeans of successive blocks, which shows noise that lasts
    for several steps.
    """
    error = np.maximum(noise_of(np.diff(excess, axis=0)), MIN_NOISE) * MIDMEAN_ERROR / np.sqrt(size)
    blocks = len(excess) // size
    if blocks > 4:
        cut = excess[len(excess) - blocks * size :].reshape(blocks, size, -1)
        error = np.maximum(error, noise_of(np.diff(midmean(cut.swapaxes(0, 1)), axis=0)))
    return np.asarray(error * (1 + SCARCE / len(excess)))


def noise_of(differences: Floats) -> Floats:
    """Return [R] standard deviations of a value, from [D, R] differences of two values, by their MAD."""
    spread = np.median(np.abs(differences - np.median(differences, axis=0)), axis=0)
    return np.asarray(MAD_TO_SIGMA * spread / np.sqrt(2))
