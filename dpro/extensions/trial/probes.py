"""Measurements of probes as documents, and the choices made by them.

Takes changes with a budget for what may be lost (`compress:budget=0.05`), and a run of the job with a probe's
measurements; returns the changes with a choice for each bucket or module, or the measurements as a document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from dpro.documents import Document, DocumentPart
from dpro.errors import Unanswerable, UsageError
from dpro.extensions.trial.changes import BUDGET, Change, parse_change
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.choices import (
    BucketChoice,
    choose,
    choose_precisions,
    expected_losses,
    usable_codecs,
    usable_sensitivities,
)
from dpro.replay.whatif.graph_ops.reductions import reductions_of
from dpro.schema import CODECS, SENSITIVITIES
from dpro.store import Run
from dpro.units import ms

MODULES_PROBE = "precision:probe"
LAST_STEP = 8  # last step that probes look at


def probes_of(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Return the probes that changes need, in the order of the changes."""
    return tuple(
        parse_change(text) for text in dict.fromkeys(change.probe for change in changes if change.probe)
    )


def ensure_probes_alone(changes: Sequence[Change], skip: int) -> None:
    """Refuse probes among changes, and probes within the measured steps.

    Args:
        skip: steps at the beginning that are not measured.

    Raises:
        UsageError: the message says which.
    """
    probing = [change for change in changes if change.is_probe]
    if probing and len(probing) < len(changes):
        raise UsageError(f"{probing[0].text} measures the job as it is: give it without other changes")
    if (probing or probes_of(changes)) and skip < LAST_STEP:
        raise UsageError(f"a probe looks at steps up to {LAST_STEP}: give --skip-steps {LAST_STEP} or more")


def options_of(changes: Sequence[Change]) -> list[str]:
    """Return options of `dpro record` with which measurements of modules can be matched to their work."""
    needs_modules = any(MODULES_PROBE in (change.text, change.probe) for change in changes)
    return ["--modules", "--shapes"] * needs_modules


def changes_nothing(text: str) -> bool:
    """Return whether an applied change, as a run names it, is a probe."""
    try:
        return parse_change(text).is_probe
    except UsageError:
        return False


def resolved(changes: Sequence[Change], graph: Graph) -> tuple[Change, ...]:
    """Choose within budgets.

    Returns:
        The changes; those with a budget contain the choice.

    Raises:
        Unanswerable: there are no measurements, or nothing is worth choosing.
    """
    return tuple(
        replace(change, arguments=_CHOSEN[change.probe](graph, change)) if change.probe else change
        for change in changes
    )


def _by_bucket(graph: Graph, change: Change) -> dict[str, Any]:
    chosen = choose(reductions_of(graph), change.arguments[BUDGET])
    if all(bucket.option.codec is None for bucket in chosen):
        raise Unanswerable(
            f"{change.text}: no codec that loses so little makes the step shorter: nothing to change"
        )
    return {"buckets": [{"names": list(bucket.names), **_hook(bucket)} for bucket in chosen]}


def _hook(chosen: BucketChoice) -> dict[str, Any]:
    codec = chosen.option.codec
    if codec is None or codec.to:
        return {"to": codec.to if codec else ""}
    if codec.powersgd_rank is not None:
        return {"to": "powersgd", "rank": codec.powersgd_rank}
    return {"to": "topk", "share": codec.topk}


def _by_module(graph: Graph, change: Change) -> dict[str, Any]:
    dtype = change.arguments.get("dtype", "bf16")
    kernels = graph.nodes.kind == NodeKind.KERNEL
    if not kernels.any():
        raise Unanswerable(
            f"{change.text}: no GPU kernel in the run: what fewer bits gain on a CPU is not known"
        )
    chosen = choose_precisions(graph, kernels, dtype, change.arguments[BUDGET])
    layers = [layer.module for layer in chosen if layer.precision]
    if not layers:
        raise Unanswerable(f"{change.text}: no module gains anything with fewer bits within it")
    return {"dtype": dtype, "layers": layers}


_CHOSEN = {"compress:probe": _by_bucket, MODULES_PROBE: _by_module}


# Documents.


class CodecDocument(DocumentPart, frozen=True):
    """A codec on the gradients of one bucket, mean over ranks and steps.

    Attributes:
        module, bucket: as in the run's table `buckets`.
        names: its parameters.
        elements: number of its gradients.
        codec: as in the edit `compress`.
        lost: norm of the loss divided by the norm of the gradients.
        ms: to compress and decompress.
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
        moved: norm of the rounding error divided by the norm of the weight.
        trace: of the Hessian of the loss with respect to the weight.
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
    """Measurements of probes on an unchanged job.

    Attributes:
        probes: as the user wrote them.
        run: its path.
        codecs: loss of gradients by codecs, per bucket; from `compress:probe`.
        sensitivities: loss of weights with fewer bits, per module; from `precision:probe`.
    """

    probes: list[str]
    run: str
    codecs: list[CodecDocument]
    sensitivities: list[WeightDocument]


def probe_document(run: Run, probes: Sequence[str]) -> ProbeDocument:
    """Return the measurements of a run.

    Raises:
        Unanswerable: there are none: the job was too short.
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
    table = usable_sensitivities(run.table(SENSITIVITIES))
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
