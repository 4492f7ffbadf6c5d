"""Who works longer than those that do alike work, or than before, told from noise.

In: own times of a team's steps. Out: the ranks that are clearly and persistently slower. Times are compared
in log-ratios to the median of the peers in the same step, so that what all have in common cancels; of these
the midmean over the latest steps is judged, in units of what it varies by. Who waits for a slow rank, and
what that costs, is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import MAD_TO_SIGMA, Floats

WINDOWS = (10, 20, 40)  # steps that are judged, the latest of: a large effect shows in few
MIN_RATIO = 0.035  # of the peers' own time: less is everywhere
# What a rank must have become slower by: half of the 5% that are to be told, since not all of a step becomes
# slower with it. Devices differ by as much; but against its own past a rank has its own device beside it.
MIN_CHANGE = 0.025
PAST_WINDOWS = WINDOWS[1:]  # ten steps are too few: the tails of their midmean are no normal ones yet
MIN_BEFORE = 20  # steps that tell how slow it was
AS_LARGE = 0.9  # of the largest effect: of windows that show as much, the one with the most steps tells
PERSISTENT = 0.8  # of the steps a rank must be slower in
# Standard errors that an effect must reach, beside all else. Every look is one more chance to be wrong, and
# a job of a week is looked at 100,000 times: of normal noise 3 in 10 million pass.
CLEAR = 5.0
MIN_NOISE = 0.01  # noise is never believed to be less
SCARCE = (
    8.0  # with few steps the noise is hardly known: its estimate is raised by this many over their number
)
MIDMEAN_ERROR = 1.093  # of normal values, in units of that of their mean


@dataclass(frozen=True)
class Team:
    """Ranks that do alike work, and what they did in the steps that all of them have.

    Attributes:
        ranks: [R] who.
        steps: [T] which.
        own: [T, R] ns of work.
        waited: [T, R] ns of waiting for others.
        start: [T, R] ns, when the steps began.
    """

    ranks: list[int]
    steps: NDArray[np.int64]
    own: Floats
    waited: Floats
    start: NDArray[np.int64]


@dataclass(frozen=True)
class Excess:
    """How much slower one rank of a team is.

    Attributes:
        column: of the team.
        num_steps: how many of the latest steps show it.
        level: of the log-ratio to its peers.
        error: standard error of what is judged.
        persistent: share of the steps in which the rank is slower than what it is judged against.
        before: the level in the steps before, where it is judged against these; else 0, that of its peers.
        against_past: whether it is.
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
        """By how much the rank is slower, in log-ratios."""
        return self.level - self.before


def late_columns(team: Team) -> list[Excess]:
    """The ranks of a team that are clearly and persistently slower: than their peers, then than they were."""
    logs = np.log(np.maximum(team.own, 1.0))
    excess = logs - median_of_others(logs)
    peers = [_against_peers(excess, size) for size in WINDOWS if size <= len(excess)]
    past = [_against_past(logs, excess, size) for size in PAST_WINDOWS if size + MIN_BEFORE <= len(excess)]
    return [*_most_telling(peers), *_most_telling(past)]


def _most_telling(windows: list[list[Excess]]) -> list[Excess]:
    """Of each rank the longest of the windows that show as much as any."""
    by_column: dict[int, list[Excess]] = {}
    for each in (each for window in windows for each in window):
        by_column.setdefault(each.column, []).append(each)
    found = []
    for column in sorted(by_column):
        enough = AS_LARGE * max(each.effect for each in by_column[column])
        found.append([each for each in by_column[column] if each.effect >= enough][-1])
    return found


def _against_peers(excess: Floats, size: int) -> list[Excess]:
    """Ranks that the latest steps show to be slower than their peers.

    Args:
        excess: [T, R] log-ratios of own times to those of the peers.
        size: how many of the latest steps are judged.
    """
    latest = excess[-size:]
    level, persistent = midmean(latest), (latest > 0).mean(axis=0)
    error = _error(excess, size)
    clear = (level >= MIN_RATIO) & (persistent >= PERSISTENT) & (level >= CLEAR * error)
    return [
        Excess(int(at), size, float(level[at]), float(error[at]), float(persistent[at]))
        for at in np.flatnonzero(clear)
    ]


def _against_past(logs: Floats, excess: Floats, size: int) -> list[Excess]:
    """Ranks that the latest steps show to be slower than their peers by more than they were before.

    If a peer became faster, all others seem slower: the rank's own time has to have grown, too.

    Args:
        logs: [T, R] logarithms of own times.
        excess: [T, R] log-ratios of own times to those of the peers.
        size: how many of the latest steps are judged.
    """
    latest, earlier = excess[-size:], excess[:-size]
    level, before = midmean(latest), midmean(earlier)
    grown = midmean(logs[-size:]) - midmean(logs[:-size])
    persistent = (latest > before).mean(axis=0)
    error = _error(excess, size) * np.sqrt(1 + size / len(earlier))
    change = level - before
    clear = (change >= MIN_CHANGE) & (persistent >= PERSISTENT) & (change >= CLEAR * error)
    clear &= (grown >= change / 2) & (level > 0)
    return [
        Excess(
            int(at), size, float(level[at]), float(error[at]), float(persistent[at]), float(before[at]), True
        )
        for at in np.flatnonzero(clear)
    ]


def midmean(values: Floats) -> Floats:
    """The mean of the middle half along the first axis.

    It is deaf to a quarter of outliers on each side, and varies less than a median: of normal values by 1.093
    instead of 1.253 times what a mean does (the variance of a trimmed mean: Huber, "Robust Statistics", 1981,
    section 3.3).
    """
    quarter = len(values) // 4
    middle = np.sort(values, axis=0)[quarter : len(values) - quarter]
    return np.asarray(middle.mean(axis=0))


def median_of_others(values: Floats) -> Floats:
    """[T, R] the median over all columns but the own."""
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
    """[R] standard error of a midmean of some successive steps.

    Noise is taken from differences of neighbours, which a lasting change does not touch; where there are
    enough steps, also from those of the midmeans of successive blocks, which tells noise that lasts for
    several steps.
    """
    error = np.maximum(noise_of(np.diff(excess, axis=0)), MIN_NOISE) * MIDMEAN_ERROR / np.sqrt(size)
    blocks = len(excess) // size
    if blocks > 4:
        cut = excess[len(excess) - blocks * size :].reshape(blocks, size, -1)
        error = np.maximum(error, noise_of(np.diff(midmean(cut.swapaxes(0, 1)), axis=0)))
    return np.asarray(error * (1 + SCARCE / len(excess)))


def noise_of(differences: Floats) -> Floats:
    """[R] standard deviation of a value, from [D, R] differences of two, by their median deviation."""
    spread = np.median(np.abs(differences - np.median(differences, axis=0)), axis=0)
    return np.asarray(MAD_TO_SIGMA * spread / np.sqrt(2))
