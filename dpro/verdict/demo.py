"""Document of what `dpro demo` recorded and explained."""

from __future__ import annotations

from dpro.analysis.answers.diagnosis import DiagnosisDocument
from dpro.analysis.answers.replay import ReplayDocument
from dpro.documents import Document
from dpro.verdict.verdict import Explanation


class DemoDocument(Document, frozen=True, kw_only=True):
    """What was recorded, what limits it, and what is wrong with it.

    Attributes:
        run: of the job with the fault.
        replay: answer of `dpro replay`.
        diagnose: answer of `dpro diagnose`.
        explain: answer of `dpro explain`.
        really_saved_ms: by how much a step of the job without the fault is shorter, as recorded; null where
            no job was recorded.
    """

    run: str
    replay: ReplayDocument
    diagnose: DiagnosisDocument
    explain: Explanation
    really_saved_ms: float | None
