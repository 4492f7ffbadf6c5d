"""What `dpro demo` recorded and explained, as one document."""

from __future__ import annotations

from collections.abc import Sequence

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.diagnosis import Diagnosis, DiagnosisDocument, diagnosis_document
from dpro.analysis.answers.replay import ReplayDocument, replay_document
from dpro.documents import Document
from dpro.replay.whatif.documents import PredictionDocument, prediction_document
from dpro.replay.whatif.predict import Prediction


class DemoDocument(Document, frozen=True, kw_only=True):
    """What was recorded, what is wrong with it, and what would help.

    Attributes:
        run: of the job with the fault.
        replay: as `dpro replay` answers.
        diagnose: as `dpro diagnose` answers.
        predictions: of the changes that would help most.
        really_saved_ms: by how much a step of the job without the fault is shorter, as recorded; null where
            no job was recorded.
    """

    run: str
    replay: ReplayDocument
    diagnose: DiagnosisDocument
    predictions: list[PredictionDocument]
    really_saved_ms: float | None


def demo_document(
    analysis: Analysis, found: Diagnosis, predictions: Sequence[Prediction], saved_ms: float | None
) -> DemoDocument:
    """What was explained, in the documents of the commands.

    Args:
        saved_ms: what the fault really costs per step; None where that was not recorded.
    """
    return DemoDocument(
        run=analysis.run.label,
        replay=replay_document(analysis),
        diagnose=diagnosis_document(found),
        predictions=list(map(prediction_document, predictions)),
        really_saved_ms=saved_ms,
    )
