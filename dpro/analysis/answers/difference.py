"""What explains that one run takes longer per step than another.

In: the `Analysis` of each. Out: a `DifferenceDocument`.
"""

from __future__ import annotations

from dpro.analysis.analysis import Analysis
from dpro.analysis.selected import replayed_steps
from dpro.replay.difference import DifferenceDocument, explain
from dpro.selection import ALL, Selection


def difference_of(a: Analysis, b: Analysis, selection: Selection = ALL) -> DifferenceDocument:
    """Compare two runs.

    Raises:
        UsageError: it selects nothing of one of them.
    """
    sides = (("A", a), ("B", b))
    if selection:
        for name, analysis in sides:
            selection.checked(replayed_steps(analysis), f"{name}: ")
    doubts = [f"{name}: {reason}" for name, analysis in sides for reason in analysis.trust.reasons]
    names = a.run.label, b.run.label
    return explain(a.built.predictive, b.built.predictive, selection, names, doubts)
