"""What a run of pretended ranks says of the job that they belong to, for programs and for people.

In: an `Analysis`. Out: a `PretendedStep`, or lines. Nothing of it was measured on that job.
"""

from __future__ import annotations

from contextlib import suppress

from dpro.analysis.analysis import Analysis
from dpro.analysis.unanswered import pretended_in_words
from dpro.errors import DproError
from dpro.replay.pretended import PretendedStep
from dpro.store import Manifest


def pretended_step(analysis: Analysis) -> PretendedStep | None:
    """What `--json` calls `pretended`; None of a run whose ranks were there, or that cannot be replayed."""
    if not analysis.run.manifest.is_pretended:
        return None
    with suppress(DproError):
        _ = analysis.built
    return analysis.pretended


def in_words(manifest: Manifest, found: PretendedStep | None) -> list[str]:
    """The same for people, a line each; none of a run whose ranks were there."""
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
