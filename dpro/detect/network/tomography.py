"""What in a network is at fault, from what its flows show end to end: network tomography.

In: how likely each flow crosses each component (a cable, a switch, a port), and evidence of each flow: the
log-likelihood ratio of what it showed if it crosses something faulty, against if not. Out: components, each
with what fits as well, the runner-up, and how sure that is. Whoever asks decides what evidence is.

The model is that of Flock (Harsh, Meng, Agrawal and Godfrey, CoNEXT 2023, arXiv 2305.03348): a flow whose
path is known in part crosses a faulty component with probability q, so a faulty component changes the
likelihood of flow f by 1 + q (exp(evidence) - 1). The set of components of the highest likelihood is sought
greedily: each further one has to explain what the earlier ones do not. With known paths and one vote per flow
this is the vote of 007 (Arzani et al., NSDI 2018), in which flows that are well vote against, too. Components
that the same flows cross cannot be distinguished by any method, and are named together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpro.arrays import Bools, Floats, Ints

SHOWS = 0.9  # of flows that cross a faulty component: how many show it
FALSE = 0.02  # of the others
SURER = np.log(1000.0)  # than by chance a component has to be, for each that could be named
ODDS = np.log(20.0)  # what is less than this many times as likely is not distinguished
MAX_CONFIDENCE = 0.99  # confidence: the model itself may be wrong
MAX_FAULTS = 8
CONGESTION = 0.002  # of segments that a flow sends again where links are full and none is broken
BURST = 4.0  # segments that are lost, or held to be, at a time
HARMFUL = 0.01  # of segments that a broken link loses


class FaultVerdict(NamedTuple):
    """A component at fault.

    Attributes:
        suspects: components that fit (nearly) as well, the best first; one if the flows distinguish it.
        runner_up: the next best, -1 where no other fits at all.
        behind: logarithm of how many times less likely that is.
        confidence: 0 to 1, that it is among the suspects.
        explained: [F] flows that show something and are likely to cross it.
    """

    suspects: tuple[int, ...]
    runner_up: int
    behind: float
    confidence: float
    explained: Bools


def votes(shows: Bools) -> Floats:
    """[F] evidence of flows that either show a fault or do not."""
    for_it, against_it = float(np.log(SHOWS / FALSE)), float(np.log((1 - SHOWS) / (1 - FALSE)))
    return np.where(shows, for_it, against_it)


def votes_of_losses(sent: Ints, again: Ints) -> Floats:
    """[F] evidence of flows that count segments, and how many of them they had to send again.

    The log-likelihood ratio of a binomial with a loss that harms against what congestion causes, over the
    dispersion (quasi-likelihood: Wedderburn, Biometrika 61, 1974), since segments are lost several at a time;
    and no more than a vote for each flow.

    Args:
        sent: [F] segments, with those sent again.
        again: [F] of these, sent again.
    """
    usual = float(np.median(again[sent > 0] / sent[sent > 0])) if (sent > 0).any() else 0.0
    background = max(CONGESTION, 2 * usual)
    lossy = max(HARMFUL, 4 * background)
    if lossy >= 1:
        return np.zeros(sent.size)
    ratio = again * np.log(lossy / background) + (sent - again) * np.log((1 - lossy) / (1 - background))
    least, most = votes(np.array([False, True]))
    capped: Floats = np.clip(ratio.astype(np.float64) / BURST, least, most)
    return capped


def at_fault(crossing: Floats, evidence: Floats) -> list[FaultVerdict]:
    """Components at fault, the surest first; none where nothing is beyond chance.

    Args:
        crossing: [F, C] probability that a flow crosses a component, 0 to 1.
        evidence: [F] log-likelihood ratios: above 0 where a flow shows a fault.
    """
    found: list[FaultVerdict] = []
    if not crossing.size:
        return found
    least = SURER + np.log(crossing.shape[1])
    known = np.zeros(evidence.size)  # that a flow crosses what is at fault already
    ratio = np.expm1(np.clip(evidence, -30, 30))
    gain, either = _gains(crossing, ratio, known)
    while len(found) < MAX_FAULTS and gain.max() >= least:
        best = int(np.argmax(gain))
        explained = (crossing[:, best] > 0) & (evidence > 0) & (known < 0.5)
        known = either[:, best]
        left, either = _gains(crossing, ratio, known)
        # What has as much to explain when this is known is another fault, and not an alternative to it.
        alternative = np.flatnonzero((left < least) & (gain > 0))
        order = alternative[np.argsort(-gain[alternative], kind="stable")]
        suspects = order[gain[order] >= gain[best] - ODDS]
        rest = order[suspects.size :]
        runner_up = int(rest[0]) if rest.size else -1
        behind = float(gain[best] - gain[runner_up]) if rest.size else np.inf
        chance = np.exp(least - SURER - gain[best])
        weights = np.exp(gain[order] - gain[best])
        sure = float(weights[: suspects.size].sum() / (weights.sum() + chance))
        found.append(
            FaultVerdict(
                tuple(suspects.tolist()), runner_up, behind, round(min(sure, MAX_CONFIDENCE), 3), explained
            )
        )
        gain = left
    return found


def _gains(crossing: Floats, ratio: Floats, known: Floats) -> tuple[Floats, Floats]:
    """[C] log-likelihood gained by each component beyond what is known; [F, C] probability to cross either.

    Args:
        crossing: [F, C] as of `at_fault`.
        ratio: [F] likelihood ratio of each flow, less 1.
        known: [F] probability that it crosses what is at fault already.
    """
    either = 1 - (1 - known[:, None]) * (1 - crossing)
    gained: Floats = (np.log1p(either * ratio[:, None]) - np.log1p(known * ratio)[:, None]).sum(axis=0)
    return gained, either
