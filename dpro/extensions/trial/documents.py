"""Documents of a trial, and of the ledger of all trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from statistics import median

from msgspec.structs import asdict

from dpro.documents import Document, DocumentPart
from dpro.extensions.trial.ledger import LedgerEntry, Ratio, ledger_path, usual_error
from dpro.extensions.trial.measure import MeasuredChange, Training
from dpro.store import AppliedChange


class TimesDocument(DocumentPart, frozen=True):
    """The step time of the changed job.

    Attributes:
        ms: mean step.
        low_ms, high_ms: its interval.
        speedup: samples per second of the changed job divided by those of the unchanged job.
    """

    ms: float
    low_ms: float
    high_ms: float
    speedup: float


class RunsOfTry(DocumentPart, frozen=True):
    """Paths of the recordings.

    Attributes:
        baseline: of the unchanged job.
        changed: of the changed job.
    """

    baseline: list[str]
    changed: list[str]


class TryDocument(Document, frozen=True, kw_only=True):
    """Prediction and measurement of a change, both as times of the measured job.

    Attributes:
        edits: the changes, as the user wrote them.
        applied: what became of each change, by rank.
        baseline_ms: mean step of the unchanged job.
        predicted: with its interval, widened by the ledger; null where nothing predicts it.
        not_predicted: why nothing predicts it; empty where something does.
        calibration: what widened the interval; empty where nothing did.
        measured: with its interval.
        noise: typical difference of two recordings of the unchanged job, as a share; null with one pair.
        pairs: number of pairs of recordings.
        steps: measured steps of the shortest recording.
        samples: samples of a step of the changed job divided by those of the unchanged job.
        verdict: faster, slower or unclear per sample, in words; or why it is not judged.
        stopped: why no more pairs were recorded, with --pairs; else empty.
        pairs_needed: estimated pairs for a decision; null without --pairs.
        training: the losses of both jobs; null where they cannot be compared.
        not_compared: why the losses cannot be compared; empty where they can.
        inside_interval: whether the measured time is in the predicted interval; null without a prediction.
        clock: device or host.
        runs: paths of the recordings.
        ledger: path of the ledger with the result; empty where nothing is judged.
    """

    edits: list[str]
    applied: list[AppliedChange]
    baseline_ms: float
    predicted: TimesDocument | None
    not_predicted: str
    calibration: str
    measured: TimesDocument
    noise: float | None
    pairs: int
    steps: int
    samples: float
    verdict: str
    stopped: str
    pairs_needed: int | None
    training: Training | None
    not_compared: str
    inside_interval: bool | None
    clock: str
    runs: RunsOfTry
    ledger: str


class KindDocument(DocumentPart, frozen=True):
    """How well changes of one kind were predicted; errors are shares of the measured step.

    Attributes:
        kind: of change.
        tries: number of trials.
        predicted: number of trials with a prediction.
        inside_interval: number of trials measured within the predicted interval.
        median_error_pct, worst_error_pct: of the predictions; null without any.
        widens_by_pct: by how much later intervals are widened; null where they are not.
    """

    kind: str
    tries: int
    predicted: int
    inside_interval: int
    median_error_pct: float | None
    worst_error_pct: float | None
    widens_by_pct: float | None


class EntryDocument(LedgerEntry, frozen=True, kw_only=True):
    """One trial; times are shares of the unchanged step.

    Attributes:
        is_inside: whether the measured time is in the predicted interval; null without a prediction.
    """

    run: str
    gpus: list[str]
    versions: dict[str, str]
    command: list[str]
    schema_version: int
    is_inside: bool | None


class LedgerDocument(Document, frozen=True, kw_only=True):
    """Predictions and measurements of all changes tried on this machine.

    Attributes:
        path: of the ledger.
        damaged: number of unreadable lines.
        kinds: how well each kind was predicted.
        entries: the trials.
    """

    path: str
    damaged: int
    kinds: list[KindDocument]
    entries: list[EntryDocument]


def times_document(ratio: Ratio | MeasuredChange, base_ms: float, samples: float) -> TimesDocument:
    """Convert a ratio of step times to times."""
    return TimesDocument(
        ratio.ratio * base_ms, ratio.low * base_ms, ratio.high * base_ms, speedup=samples / ratio.ratio
    )


def ledger_document(entries: Sequence[LedgerEntry], damaged: int) -> LedgerDocument:
    """Return the ledger as a document."""
    by_kind = sorted(entries, key=_kind_of)
    return LedgerDocument(
        path=str(ledger_path()),
        damaged=damaged,
        kinds=[_kind(kind, list(same)) for kind, same in groupby(by_kind, key=_kind_of)],
        entries=[EntryDocument(**asdict(entry), is_inside=entry.is_inside) for entry in entries],
    )


def _kind_of(entry: LedgerEntry) -> str:
    return entry.kind


def _kind(kind: str, entries: Sequence[LedgerEntry]) -> KindDocument:
    errors = [abs(math.expm1(-entry.error)) for entry in entries if entry.error is not None]
    usual, _ = usual_error(entries, kind)
    return KindDocument(
        kind=kind,
        tries=len(entries),
        predicted=len(errors),
        inside_interval=sum(bool(entry.is_inside) for entry in entries),
        median_error_pct=100 * median(errors) if errors else None,
        worst_error_pct=100 * max(errors) if errors else None,
        widens_by_pct=100 * math.expm1(usual) if usual else None,
    )
