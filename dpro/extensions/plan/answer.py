"""The answer of `dpro plan`: all layouts of a model on a number of GPUs, ranked.

Takes a model, or a run whose layers were found, GPUs, a batch and optionally measured steps; returns a
`PlanDocument`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import polars as pl

from dpro.documents import Document, DocumentPart
from dpro.errors import UsageError
from dpro.extensions.plan.layout import (
    COLUMNS,
    RECOMPUTE,
    USUAL_SCHEDULES,
    candidates,
    in_words,
    layouts,
    schedule_of,
)
from dpro.extensions.plan.memory import KINDS
from dpro.extensions.plan.model import Model, framework_named
from dpro.extensions.plan.plan import MeasuredLayout, plan
from dpro.extensions.plan.recorded_job import RecordedJob, own_layout, ranked
from dpro.replay.cost.kernels.roofline import GPUS, model_named
from dpro.replay.cost.machine import machine_of

SELECTIVE = RECOMPUTE.index("selective")


@dataclass(frozen=True, kw_only=True)
class AskedRunPlan:
    """What to plan for a recorded job.

    Attributes:
        global_batch: sequences per step.
        keep: columns of layouts that are fixed, with their values.
        measured: steps to calibrate with, besides the run's own.
        assumed: assumptions made before, one line each.
        schedules: pipeline schedules to rank.
    """

    gpus: int
    global_batch: int
    keep: dict[str, int] = field(default_factory=dict)
    measured: Sequence[MeasuredLayout] = ()
    assumed: Sequence[str] = ()
    schedules: Sequence[str] = USUAL_SCHEDULES


@dataclass(frozen=True, kw_only=True)
class AskedPlan(AskedRunPlan):
    """What to plan for a model.

    Attributes:
        memory_gb: of each GPU; None for that of the data sheet.
    """

    model: Model
    per_host: int
    device: str
    memory_gb: float | None
    framework: str = "megatron"
    precision: str = "bf16"


class LayoutDocument(DocumentPart, frozen=True):
    """One layout and its prediction.

    Attributes:
        layout: on one line.
        dp, tp, pp, cp, ep: degrees of data, tensor, pipeline, context and expert parallelism.
        vpp: model chunks per stage.
        micro_batch, micro_batches: sequences of a micro-batch, and micro-batches per pipeline and step.
        zero: stage of ZeRO; 3 shards parameters, as FSDP does.
        recompute: recomputed activations: none, selective (attention), full (layers).
        schedule: of the pipeline; empty without one.
        tokens_per_s_per_gpu, tokens_per_s_per_gpu_low, tokens_per_s_per_gpu_high: throughput, with a 90%
            interval.
        step_ms, low_ms, high_ms: the step, with a 90% interval.
        mfu: operations that the model needs, over the peak of the data sheet; null for a CPU.
        bubble: share of the pipeline's time in which the mean stage is idle.
        exposed: share of the step with exposed communication.
        memory_gb: of the fullest GPU, 1e9 bytes.
        memory: `memory_gb` by kind.
        fits: yes; tight: above 90% of the memory; no.
        why: why it does not fit; empty where it does.
        replayed: whether the pipeline was replayed; otherwise its closed form was used.
    """

    layout: str
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    vpp: int
    micro_batch: int
    micro_batches: int
    zero: int
    recompute: str
    schedule: str
    tokens_per_s_per_gpu: float
    tokens_per_s_per_gpu_low: float
    tokens_per_s_per_gpu_high: float
    step_ms: float
    low_ms: float
    high_ms: float
    mfu: float | None
    bubble: float
    exposed: float
    memory_gb: float
    memory: dict[str, float]
    fits: str
    why: str
    replayed: bool


class PlanDocument(Document, frozen=True, kw_only=True):
    """All layouts of a job, ranked.

    Attributes:
        device, gpus, gpus_per_host: GPU model, number of GPUs, GPUs per host.
        memory_gb: of each GPU, 1e9 bytes; null where unknown, so that everything fits.
        run: the run that it starts from; empty for a model alone.
        found: what was found in the run, one line each.
        own: the run's own layout, at its measured step.
        explained: share of the run's step that its layers, output layer and collectives make up.
        parameters: of the model.
        sequence: tokens per sequence.
        global_batch: sequences per step.
        framework, precision: how it trains.
        calibrated: whether measured steps were given.
        trust: how far to trust it, one sentence.
        assumed: assumptions, one line each.
        num_layouts: number of ranked layouts.
        num_fitting: number of these that fit.
        layouts: layouts that fit, fastest first, as many as requested.
        unfitting: as many layouts that do not fit: fastest first, or if none fits by least memory.
    """

    device: str
    gpus: int
    gpus_per_host: int
    memory_gb: float | None
    parameters: int
    sequence: int
    global_batch: int
    framework: str
    precision: str
    calibrated: bool
    trust: str
    assumed: list[str]
    num_layouts: int
    num_fitting: int
    layouts: list[LayoutDocument]
    unfitting: list[LayoutDocument]
    run: str = ""
    run_facts: list[str] = msgspec.field(name="found", default_factory=list)
    run_layout: LayoutDocument | None = msgspec.field(name="own", default=None)
    explained: float | None = None


def plan_model(asked: AskedPlan, top: int) -> PlanDocument:
    """Rank all layouts of a model.

    Args:
        top: number of layouts to return that fit, and that do not.

    Raises:
        UsageError: the device, the framework or a layout is unknown, or no layout divides model and batch.
    """
    device = asked.device if asked.device in GPUS else model_named(asked.device)
    if not device:
        raise UsageError(f"no data sheet of {asked.device!r}: there are {', '.join(GPUS)}")
    machine = machine_of(device, asked.per_host, asked.memory_gb)
    software = replace(framework_named(asked.framework), dtype=asked.precision)
    if asked.precision not in machine.sheet.tflops:
        raise UsageError(f"{device} does not multiply in {asked.precision}")
    rows = candidates(
        asked.model, asked.gpus, asked.per_host, asked.global_batch, asked.keep, asked.schedules
    )
    if software.flash and "recompute" not in asked.keep:  # no scores are kept, so none can be recomputed
        rows = rows.filter(pl.col("recompute") != SELECTIVE)
    ranks = plan(asked.model, rows, machine, software, asked.measured)
    return _plan_document(asked, ranks, top, device, machine.memory_gb, _trust(asked))


def plan_run(job: RecordedJob, label: str, asked: AskedRunPlan, top: int) -> PlanDocument:
    """Rank all layouts of a recorded job.

    Args:
        top: number of layouts to return that fit, and that do not.

    Raises:
        UsageError: no layout divides model and batch.
    """
    ranks = ranked(job, asked.gpus, asked.global_batch, asked.keep, asked.measured, asked.schedules)
    layout = _document(own_layout(job).row(0, named=True))
    machine, memory_gb = job.machine, job.machine.memory_gb or None
    of_job = AskedPlan(
        **vars(asked), model=job.model, per_host=machine.per_host, device=machine.gpu, memory_gb=memory_gb,
        framework="as recorded", precision=job.software.dtype,
    )  # fmt: skip
    more = f", and by {_rows_in_words(asked.measured)}" if asked.measured else ""
    trust = (
        f"calibrated by the run itself: {layout.layout}: {job.step_ms:.4g} ms{more}; what was found in it "
        f"makes up {job.explained:.0%} of its step"
    )
    document = _plan_document(of_job, ranks, top, machine.gpu, memory_gb, trust)
    return msgspec.structs.replace(
        document, calibrated=True, run=label, run_facts=list(job.said), run_layout=layout,
        explained=job.explained,
    )  # fmt: skip


def _plan_document(
    asked: AskedPlan, ranks: pl.DataFrame, top: int, device: str, memory_gb: float | None, trust: str
) -> PlanDocument:
    fits = pl.col("fits") != "no"
    others = ranks.filter(~fits)
    if others.height == ranks.height:
        others = others.sort("memory_gb", maintain_order=True)
    return PlanDocument(
        device=device,
        gpus=asked.gpus,
        gpus_per_host=asked.per_host,
        memory_gb=memory_gb,
        parameters=asked.model.parameters(),
        sequence=asked.model.sequence,
        global_batch=asked.global_batch,
        framework=asked.framework,
        precision=asked.precision,
        calibrated=bool(asked.measured),
        trust=trust,
        assumed=list(asked.assumed),
        num_layouts=ranks.height,
        num_fitting=ranks.filter(fits).height,
        layouts=[_document(row) for row in ranks.filter(fits).head(top).iter_rows(named=True)],
        unfitting=[_document(row) for row in others.head(top).iter_rows(named=True)],
    )


def _trust(asked: AskedPlan) -> str:
    if not asked.measured:
        return (
            "not calibrated: times are from data sheets and published measurements of other clusters; "
            "give a measured step with --calibrate LAYOUT:MS"
        )
    return f"calibrated by {_rows_in_words(asked.measured)}"


def _rows_in_words(measured: Sequence[MeasuredLayout]) -> str:
    rows = layouts([layout.layout for layout in measured])
    return "; ".join(
        f"{in_words(row)}: {layout.step_ms:g} ms" for row, layout in zip(rows.iter_rows(named=True), measured)
    )


def _document(row: dict[str, Any]) -> LayoutDocument:
    names = [name for name in COLUMNS if name not in ("recompute", "schedule")]
    figures = ("step_ms", "low_ms", "high_ms", "mfu", "bubble", "exposed", "memory_gb")
    rates = [f"tokens_per_s_per_gpu{end}" for end in ("", "_low", "_high")]
    return LayoutDocument(
        **{name: row[name] for name in (*names, *figures, *rates, "layout", "fits", "why", "replayed")},
        recompute=RECOMPUTE[row["recompute"]],
        schedule=schedule_of(row),
        memory={kind: row[kind] for kind in KINDS},
    )
