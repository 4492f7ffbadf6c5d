"""What explains that one run takes longer per step than another.

In: the `Analysis` of each. Out: a `DifferenceDocument`, and the `Difference` that it is of.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from dpro.analysis.analysis import Analysis
from dpro.analysis.selected import replayed_steps
from dpro.documents import Document, DocumentPart
from dpro.replay.difference import Difference, explain
from dpro.selection import ALL, Selection, SelectionDocument, selection_document
from dpro.units import ms


class ContributorDocument(DocumentPart, frozen=True):
    """One kind of work, and its share of the difference.

    Attributes:
        name: of the work.
        kind: of work: kernel, operator, collective and so on.
        delta_ms: by how much it makes the step of B longer.
        a_ms, b_ms: how much of it there is per rank and step in each.
    """

    name: str
    kind: str
    delta_ms: float
    a_ms: float
    b_ms: float


class DifferenceDocument(Document, frozen=True, kw_only=True):
    """Two runs compared.

    Attributes:
        a, b: the runs, as they were named.
        a_ms, b_ms: mean step in deep windows of each, replayed.
        delta_ms: their difference.
        contributors: kinds of work, the largest contribution first; with `unexplained_ms` they add up.
        unexplained_ms: what no kind of work explains.
        by_rank: what the work of each rank contributes, each taken for itself.
        doubts: what limits how far to believe it.
        selection: the steps that are compared, and the ranks whose work is; absent where all are.
    """

    a: str
    b: str
    a_ms: float
    b_ms: float
    delta_ms: float
    contributors: list[ContributorDocument]
    unexplained_ms: float
    by_rank: dict[str, float]
    doubts: list[str]
    selection: SelectionDocument | UnsetType = UNSET


def difference_of(
    a: Analysis, b: Analysis, selection: Selection = ALL
) -> tuple[DifferenceDocument, Difference]:
    """Compare two runs.

    Raises:
        UsageError: it selects nothing of one of them.
    """
    if selection:
        for name, each in (("A", a), ("B", b)):
            selection.checked(replayed_steps(each), f"{name}: ")
    found = explain(a.built.predictive, b.built.predictive, selection)
    doubts = [f"{name}: {reason}" for name, each in (("A", a), ("B", b)) for reason in each.trust.reasons]
    document = DifferenceDocument(
        a=a.run.label,
        b=b.run.label,
        a_ms=ms(found.a_ns),
        b_ms=ms(found.b_ns),
        delta_ms=ms(found.b_ns - found.a_ns),
        contributors=[
            ContributorDocument(each.name, each.kind, ms(each.delta_ns), ms(each.a_ns), ms(each.b_ns))
            for each in found.contributors
        ],
        unexplained_ms=ms(found.unexplained_ns),
        by_rank={str(rank): ms(delta) for rank, delta in found.by_rank.items()},
        doubts=doubts,
        selection=selection_document(selection),
    )
    return document, found
