"""A try, and the ledger of all tries, for programs."""

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
        speedup: of the throughput: samples per second changed over unchanged.
    """

    ms: float
    low_ms: float
    high_ms: float
    speedup: float


class RunsOfTry(DocumentPart, frozen=True):
    """Where the recordings are.

    Attributes:
        baseline: of the job as it is.
        changed: of the changed job.
    """

    baseline: list[str]
    changed: list[str]


class TryDocument(Document, frozen=True, kw_only=True):
    """What was predicted and measured of a change, both as times of the measured job.

    Attributes:
        edits: the changes, as the user wrote them.
        applied: what became of each change, by rank.
        baseline_ms: mean step of the job as it is.
        predicted: with the interval that the ledger has widened; null where nothing predicts it.
        not_predicted: why nothing predicts it; empty where something does.
        calibration: by what the interval was widened; empty where it was not.
        measured: with its interval.
        noise: typical difference of two recordings of the job as it is, as a share; null with one pair.
        pairs: of recordings.
        steps: of each recording, at least.
        samples: samples of a step of the changed job over those of one as it is.
        verdict: faster, slower or unclear per sample, in words; or that it is not judged, and why.
        stopped: why no more pairs were made, with --pairs; else empty.
        pairs_needed: pairs that would decide it, by what is known; null without --pairs.
        training: the losses of both; null where they cannot be compared.
        not_compared: why they cannot; empty where they can.
        inside_interval: whether the measured time is in the predicted interval; null without a prediction.
        clock: device or host.
        runs: where the recordings are.
        ledger: where the result was added; empty where nothing is judged.
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
        tries: how many there are.
        predicted: how many of them had a prediction.
        inside_interval: how many were measured within the predicted interval.
        median_error_pct, worst_error_pct: of the predictions; null without any.
        widens_by_pct: by how much further intervals are widened; null where they are not.
    """

    kind: str
    tries: int
    predicted: int
    inside_interval: int
    median_error_pct: float | None
    worst_error_pct: float | None
    widens_by_pct: float | None


class EntryDocument(LedgerEntry, frozen=True, kw_only=True):
    """One try; times are shares of the unchanged step.

    Attributes:
        is_inside: whether the measured time is in the predicted interval; null without a prediction.
    """

    run: str
    gpus: list[str]
    versions: dict[str, str]
    schema_version: int
    is_inside: bool | None


class LedgerDocument(Document, frozen=True, kw_only=True):
    """What was predicted and measured of all changes that were tried on this machine.

    Attributes:
        path: of the ledger.
        damaged: lines that cannot be read.
        kinds: how well each kind was predicted.
        entries: the tries.
    """

    path: str
    damaged: int
    kinds: list[KindDocument]
    entries: list[EntryDocument]


def times_document(ratio: Ratio | MeasuredChange, base_ms: float, samples: float) -> TimesDocument:
    """A ratio of step times as times."""
    return TimesDocument(
        ratio.ratio * base_ms, ratio.low * base_ms, ratio.high * base_ms, speedup=samples / ratio.ratio
    )


def ledger_document(entries: Sequence[LedgerEntry], damaged: int) -> LedgerDocument:
    """The ledger for programs."""
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
