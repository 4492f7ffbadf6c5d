"""Pairs of advice that gain clearly more when both are followed.

Takes `JobFacts`, and the advice that is shown; returns at most one pair, with the gain that `whatif`
predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations

from dpro.documents import DocumentPart
from dpro.errors import DproError
from dpro.replay.whatif.registry import parse_edit
from dpro.replay.whatif.search import can_combine, in_order
from dpro.verdict.advice import WORTH, Advice, interval_of, middle_of
from dpro.verdict.facts import JobFacts


class Together(DocumentPart, frozen=True):
    """Two pieces of advice that gain clearly more when both are followed.

    Attributes:
        places: numbers of both in the advice, from 1.
        edits: arguments of `whatif --edit` for the same gain, in order.
        gain_low, gain_high: current step time over the step time after both.
    """

    places: list[int]
    edits: list[str]
    gain_low: float
    gain_high: float


_EASY = ("a setting", "a line of code")


def best_together(facts: JobFacts, advice: Sequence[Advice]) -> Together | None:
    """Return the best pair of easy advice that certainly gains, and gains more together than either alone.

    Args:
        advice: the advice that is shown.
    """
    best: Together | None = None
    if facts.shared_hosts:  # gains hold only under that load
        return None
    easy = [place for place, one in enumerate(advice) if one.edit and one.effort in _EASY]
    for first, second in combinations(easy, 2):
        alone = advice[first], advice[second]
        edits = in_order(parse_edit(one.edit) for one in alone)
        if not can_combine(edits[0], edits[1:]):
            continue
        with suppress(DproError):
            done = facts.predict(*map(str, edits))
            low, high = interval_of(done)
            adds = done.speedup >= WORTH * max(map(middle_of, alone))
            if done.effect == "faster" and adds and low > max(one.gain_low or 1.0 for one in alone):
                both = Together([first + 1, second + 1], [str(edit) for edit in edits], low, high)
                best = both if best is None or both.gain_low > best.gain_low else best
    return best
