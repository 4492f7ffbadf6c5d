"""How far to believe a replay, for programs: the parts of documents that every answer from a graph has.

In: a `Trust`. Out: a `TrustDocument`.
"""

from __future__ import annotations

from dpro.documents import Part
from dpro.replay.fidelity.accuracy import Trust


class FigureDocument(Part, frozen=True):
    """One figure that predictions stand or fall with.

    Attributes:
        name: what was measured.
        value: in `unit`; null where the run does not show it.
        good, poor: bars in `unit`: good up to the first, poor from the second on.
        unit: % or x (times).
        score: 0 to 1; null where it is not known.
    """

    name: str
    value: float | None
    good: float
    poor: float
    unit: str
    score: float | None


class TrustDocument(Part, frozen=True):
    """How far predictions from this run can be believed.

    Attributes:
        grade: good, fair or poor.
        score: 0 to 1, what the worst figure scores.
        verdict: all of this in a sentence.
        figures: what it is measured by, worst first.
    """

    grade: str
    score: float
    verdict: str
    figures: list[FigureDocument]


def trust_document(trust: Trust) -> TrustDocument:
    """How far to believe what follows from a replay, for programs."""
    figures = [
        FigureDocument(each.name, each.value, each.good, each.poor, each.unit, each.score)
        for each in trust.figures
    ]
    return TrustDocument(trust.grade, trust.score, trust.verdict, figures)
