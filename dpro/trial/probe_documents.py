"""What a probe measured, for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import polars as pl

from dpro.documents import Document, DocumentPart
from dpro.errors import Unanswerable
from dpro.replay.whatif.choices.by_bucket import usable_rows as usable_codecs
from dpro.replay.whatif.choices.by_module import expected_losses, usable_rows
from dpro.schema import CODECS, SENSITIVITIES
from dpro.store import Run
from dpro.units import ms


class CodecDocument(DocumentPart, frozen=True):
    """A codec on the gradients of one bucket, mean over ranks and steps.

    Attributes:
        module, bucket: which, as in the run's table `buckets`.
        names: its parameters.
        elements: its gradients.
        codec: as the edit `compress` has it.
        lost: norm of what it loses over the norm of the gradients.
        ms: to compress and back.
    """

    module: int
    bucket: int
    names: list[str]
    elements: int
    codec: str
    lost: float
    ms: float


class WeightDocument(DocumentPart, frozen=True):
    """A precision of the weight of one module, mean over ranks.

    Attributes:
        module: its name.
        precision: bf16, fp16, fp8 or int8.
        moved: norm of what rounding changes over the norm of the weight.
        trace: of the Hessian of the loss over the weight.
        method: hutchinson or fisher, or both where ranks differ.
        loss: what the precision may add to the loss, as a share of it.
    """

    module: str
    precision: str
    moved: float
    trace: float
    method: str
    loss: float


class ProbeDocument(Document, frozen=True, kw_only=True):
    """What probes measured of a job as it is.

    Attributes:
        probes: as the user wrote them.
        run: where it is.
        codecs: what codecs lose of gradients, by bucket; of `compress:probe`.
        sensitivities: what weights lose with fewer bits, by module; of `precision:probe`.
    """

    probes: list[str]
    run: str
    codecs: list[CodecDocument]
    sensitivities: list[WeightDocument]


def probe_document(run: Run, probes: Sequence[str]) -> ProbeDocument:
    """What was measured in a run.

    Raises:
        Unanswerable: nothing was: the job was too short.
    """
    codecs, sensitivities = _codecs(run), _sensitivities(run)
    if not (codecs or sensitivities):
        raise Unanswerable(f"{run.path}: nothing was measured: let the job run for ten steps or more")
    return ProbeDocument(probes=list(probes), run=str(run.path), codecs=codecs, sensitivities=sensitivities)


def _codecs(run: Run) -> list[CodecDocument]:
    by = ["module", "bucket", "codec"]
    means = ("square_norm", "square_error", "encode_ns", "decode_ns")
    rows = usable_codecs(run.table(CODECS)).group_by(by).agg(
        pl.col("names", "elements").first(), *(pl.col(name).mean() for name in means)
    )  # fmt: skip
    return [
        CodecDocument(
            row["module"],
            row["bucket"],
            row["names"],
            row["elements"],
            row["codec"],
            math.sqrt(row["square_error"] / row["square_norm"]) if row["square_norm"] else 0.0,
            ms(row["encode_ns"] + row["decode_ns"]),
        )
        for row in rows.sort(by).iter_rows(named=True)
    ]


def _sensitivities(run: Run) -> list[WeightDocument]:
    table = usable_rows(run.table(SENSITIVITIES))
    if table.is_empty():
        return []
    by = ["module", "precision"]
    rows = table.group_by(by).agg(
        pl.col("square_norm", "square_error", "trace").mean(), pl.col("method").unique().sort()
    )
    return [
        WeightDocument(
            row["module"],
            row["precision"],
            math.sqrt(row["square_error"] / row["square_norm"]) if row["square_norm"] else 0.0,
            row["trace"],
            " and ".join(row["method"]),
            row["loss"],
        )
        for row in rows.join(expected_losses(run), on=by).sort(by).iter_rows(named=True)
    ]
