"""What a run of pretended ranks says of the job that they belong to, for programs and for people.

In: an `Analysis`. Out: a `PretendedDocument`, or lines. Nothing of it was measured on that job.
"""

from __future__ import annotations

from contextlib import suppress

from dpro.analysis.analysis import Analysis
from dpro.analysis.unanswered import pretended_in_words
from dpro.documents import DocumentPart
from dpro.errors import DproError
from dpro.units import ms


class PretendedDocument(DocumentPart, frozen=True):
    """What a step of the pretended job would take.

    Attributes:
        ranks, world_size: how many ranks were pretended, and how many the job has.
        compute_ms: the mean step if communication took no time.
        step_ms: the mean step; null where what communication takes is not known.
        low_ms, high_ms: interval of it; null likewise.
        how: from what communication was predicted.
        unknown: what keeps it from being known.
    """

    ranks: int
    world_size: int
    compute_ms: float
    step_ms: float | None
    low_ms: float | None
    high_ms: float | None
    how: list[str]
    unknown: list[str]


def pretended_document(analysis: Analysis) -> PretendedDocument | None:
    """What `--json` calls `pretended`; None of a run whose ranks were there, or that cannot be replayed."""
    if not analysis.run.manifest.is_pretended:
        return None
    with suppress(DproError):
        _ = analysis.built
    found = analysis.pretended
    if found is None:
        return None
    times = (found.step_ns, found.low_ns, found.high_ns)
    step, low, high = (None if each is None else ms(each) for each in times)
    return PretendedDocument(
        found.ranks, found.world, ms(found.compute_ns), step, low, high, list(found.how), list(found.unknown)
    )


def in_words(analysis: Analysis) -> list[str]:
    """The same for people, a line each; none of a run whose ranks were there."""
    manifest, found = analysis.run.manifest, pretended_document(analysis)
    if not manifest.is_pretended:
        return []
    lines = [f"{pretended_in_words(manifest)}: what follows is their own work, and no waiting was measured"]
    if found is None:
        return lines
    if found.step_ms is None:
        lines.append(f"mean step without communication {found.compute_ms:.2f} ms; with it, not known:")
        return lines + [f"  - {reason}" for reason in found.unknown]
    lines.append(
        f"mean step {found.step_ms:.2f} ms ({found.low_ms:.2f} to {found.high_ms:.2f}), of which "
        f"{found.compute_ms:.2f} ms without communication"
    )
    return lines + [f"  - {line}" for line in found.how]
