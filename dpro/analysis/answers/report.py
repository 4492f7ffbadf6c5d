"""Where the time of each step went, on which kernels, on which collectives, and what the host did.

In: an `Analysis`. Out: the tables that `dpro report` prints, and their document, in ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from msgspec import UNSET, UnsetType

from dpro.account import AccountedDocument
from dpro.analysis.analysis import Analysis
from dpro.analysis.end import JobEnd
from dpro.analysis.mean_step import MeanStep, mean_step_document
from dpro.analysis.step_time import StepTimeDocument, step_time_document
from dpro.documents import Document, DocumentPart
from dpro.replay.attribution import attributed as attributed_kernels
from dpro.replay.attribution import totals
from dpro.replay.experts import imbalances
from dpro.replay.phases import PARTS, limit_of
from dpro.replay.pipeline.recorded import pipeline_bubbles
from dpro.replay.pretended import PretendedStep
from dpro.replay.steps import kernel_totals, per_rank
from dpro.selection import ALL, Selection, SelectionDocument, selection_document
from dpro.units import NS_PER_MS


class StepParts(DocumentPart, frozen=True):
    """Where a step of a rank went: compute, exposed communication, copies, host bound and idle add up to it.

    Attributes:
        step: its number; 0 where a trace has no steps.
        rank: the rank.
        duration_ms: how long it took.
        compute_ms: kernels that are not communication; on a CPU job, operators.
        copy_ms: copies and fills of a GPU while nothing computes or communicates.
        exposed_comm_ms: communication while nothing computes, the sum of the next two.
        exposed_wait_ms: before all members of the collective had arrived; null where more than a twentieth of
            the exposed communication is of collectives that were not found on all of their ranks.
        exposed_transfer_ms: after they had; null likewise.
        overlapped_comm_ms: communication while something computes; part of `compute_ms`.
        host_bound_ms: nothing runs, and the work that ends it was launched too late.
        idle_ms: nothing runs, for another reason or for an unrecorded one.
        data_wait_ms: the training thread waited for its DataLoader; null where that was not recorded.
        gc_ms: Python collected garbage; likewise.
    """

    step: int
    rank: int
    duration_ms: float
    compute_ms: float
    copy_ms: float
    exposed_comm_ms: float
    exposed_wait_ms: float | None
    exposed_transfer_ms: float | None
    overlapped_comm_ms: float
    host_bound_ms: float
    idle_ms: float
    data_wait_ms: float | None
    gc_ms: float | None


class KernelTotal(DocumentPart, frozen=True):
    """A kernel, or without GPU work a CPU operator by its own time, over all ranks.

    Attributes:
        name: of the kernel.
        count: how often it ran.
        total_ms: its time.
    """

    name: str
    count: int
    total_ms: float


class ModuleTotal(DocumentPart, frozen=True):
    """The kernels of one operator of a module, over all ranks; layers count together.

    Attributes:
        module: its path or class, numbers as `*`; empty where none was recorded, or it is not known.
        operator: that launched them; empty where it is not known.
        count: how many ran.
        total_ms: their time.
    """

    module: str
    operator: str
    count: int
    total_ms: float


class LayerLoad(DocumentPart, frozen=True):
    """How work that is sent to ranks or experts is spread in one layer.

    Attributes:
        source: what says it: all_to_all, grouped products, or products of experts.
        layer: module, or number of the call or the product in a step.
        members: how many ranks, or experts, it is spread over.
        mean, most: of one member in a step: bytes of all_to_all, else rows.
        busiest: which rank or expert has most, typically.
        imbalance: the most of a member over the mean, averaged over steps.
    """

    source: str
    layer: str
    members: int
    mean: float
    most: float
    busiest: int
    imbalance: float


class PhasePart(DocumentPart, frozen=True):
    """A phase of a step of reinforcement learning, averaged over ranks and steps.

    Attributes:
        phase: rollout, reward, log probabilities, advantage, training, weight sync, or rest.
        duration_ms: its time in a step.
        share: of the step.
        limit: what most of it is: compute, communication, transfer, waiting, host, idle, or copies.
        limit_share: how much of it that is.
        latest: the rank that others wait for; -1 where they do not.
    """

    phase: str
    duration_ms: float
    share: float
    limit: str
    limit_share: float
    latest: int


class CollectiveTotal(DocumentPart, frozen=True):
    """Collectives of one operation and size, over all ranks.

    Attributes:
        op: the operation.
        bytes: the payload, of a gather and a scatter the whole buffer; -1 unknown.
        hosts: how many hosts the members are on; null if unknown.
        count: how many there are.
        total_ms: their time.
        matched: how many of them were found on all of their ranks.
        wait_ms, transfer_ms: the time of those, split; null without any.
        busbw_gbps: bus bandwidth as in the NCCL tests, 1e9 bytes per second; null if unknown.
    """

    op: str
    bytes: int
    hosts: int | None
    count: int
    total_ms: float
    matched: int
    wait_ms: float | None
    transfer_ms: float | None
    busbw_gbps: float | None


class HostMeans(DocumentPart, frozen=True):
    """What the host of a rank did in its mean step, pauses included; null where it was not recorded.

    Attributes:
        rank: the rank.
        steps: that the means are of.
        duration_ms: mean step.
        data_wait_ms: the training thread waited for its DataLoader.
        gc_ms: Python collected garbage.
        run_queue_ms: the training thread was ready to run and had no core.
        training_thread_cpu_ms: CPU time of the training thread.
        cpu_ms: CPU time of the process.
        backward_calls: micro-batches.
        checkpoint_ms: in checkpoints.
        no_grad_ms: under `torch.no_grad`.
        compile_ms: in compilation.
    """

    rank: int
    steps: int
    duration_ms: float
    data_wait_ms: float | None
    gc_ms: float | None
    run_queue_ms: float | None
    training_thread_cpu_ms: float | None
    cpu_ms: float | None
    backward_calls: float | None
    checkpoint_ms: float | None
    no_grad_ms: float | None
    compile_ms: float | None


class StageBubble(DocumentPart, frozen=True):
    """The bubble of a pipeline stage, averaged over steps and the ranks of the stage.

    Attributes:
        stage: its number.
        ranks: ranks of the stage.
        steps: that the means are of.
        pipeline_ms: from the first forward on any stage to the last backward on any.
        compute_ms: forward and backward.
        bubble_ms: the rest.
        bubble_share: the rest as a share.
    """

    stage: int
    ranks: int
    steps: int
    pipeline_ms: float
    compute_ms: float
    bubble_ms: float
    bubble_share: float


class ReportDocument(AccountedDocument, frozen=True, kw_only=True):
    """Where the time of each step went.

    Attributes:
        steps: every step of every rank in deep windows, as recorded.
        kernels: the largest total first.
        modules: kernels by module and operator, the largest total first; empty without a GPU.
        attribution: kernels by how their operator is known: `launch`, or of CUDA graphs `eager`, by the same
            kernels in the same order that operators launched elsewhere; else `ambiguous` or `unknown`.
        layers: in which work is sent to ranks or experts, the most uneven first.
        phases: of reinforcement learning, the longest first; empty where none are named.
        collectives: the largest total first.
        host: what the host did, by rank; empty where it was not recorded.
        pipeline: the bubble of each stage, of traces of whole operations only.
        step_time: how long a step takes; null where none was timed.
        mean_step: where the usual step of a rank goes.
        end: how the job ended.
        selection: the steps and ranks that all but `end` is of; absent where it is of all.
        pretended: what a step of the job takes whose ranks were pretended; null where they were there.
    """

    steps: list[StepParts]
    kernels: list[KernelTotal]
    modules: list[ModuleTotal]
    attribution: dict[str, int]
    layers: list[LayerLoad]
    phases: list[PhasePart]
    collectives: list[CollectiveTotal]
    host: list[HostMeans]
    pipeline: list[StageBubble]
    step_time: StepTimeDocument | None
    mean_step: MeanStep | None
    end: JobEnd
    selection: SelectionDocument | UnsetType = UNSET
    pretended: PretendedStep | None = None


class ReportFilesDocument(Document, frozen=True, kw_only=True):
    """Reports that were written.

    Attributes:
        run: as it was named.
        files: where they are.
    """

    run: str
    files: Sequence[str]


@dataclass(frozen=True)
class ReportTables:
    """What `dpro report` prints, times in ns.

    Attributes:
        steps: as `step_breakdown`.
        kernels: as `kernel_totals`.
        modules: kernels as `totals` of `dpro.replay.attribution` has them.
        attribution: how many of them by `how`.
        layers: as `imbalances`.
        phases: as `phases`.
        collectives: as `collective_totals`.
        facts: as `host_facts`.
        host: the same by rank.
        stages: as `pipeline_bubbles`.
        on_gpu: whether `kernels` are kernels rather than CPU operators.
    """

    steps: pl.DataFrame
    kernels: pl.DataFrame
    modules: pl.DataFrame
    attribution: dict[str, int]
    layers: pl.DataFrame
    phases: pl.DataFrame
    collectives: pl.DataFrame
    facts: pl.DataFrame
    host: pl.DataFrame
    stages: pl.DataFrame
    on_gpu: bool


def report_tables(analysis: Analysis, selection: Selection = ALL) -> ReportTables:
    """Where the time went.

    Args:
        analysis: of the selected steps and ranks, as from `dpro.analysis.selected.select`.

    Raises:
        Unanswerable: the run holds no spans.
    """
    facts, attributed = analysis.host, attributed_kernels(analysis.spans, analysis.steps)
    return ReportTables(
        steps=analysis.breakdown,
        kernels=kernel_totals(analysis.spans),
        modules=totals(attributed),
        attribution=dict(attributed.group_by("how").len().sort("how").iter_rows()),
        layers=imbalances(analysis.spans, analysis.collectives, analysis.steps),
        phases=analysis.phases,
        collectives=analysis.sizes,
        facts=facts,
        host=per_rank(facts),
        stages=pipeline_bubbles(analysis.run, selection),
        on_gpu=bool((analysis.spans["kind"] == "kernel").any()),
    )


def report_document(
    analysis: Analysis, tables: ReportTables, top: int | None = None, selection: Selection = ALL
) -> ReportDocument:
    """The tables for programs.

    Args:
        top: how many kernels and modules to list; None for all.
    """
    waits = tables.facts.select("rank", "step", "data_wait_ns", "gc_ns")
    steps = tables.steps.join(waits, on=["rank", "step"], how="left", maintain_order="left")
    kernels = tables.kernels.head(top or tables.kernels.height)
    return ReportDocument(
        steps=[StepParts(**row) for row in _in_ms(steps)],
        kernels=[KernelTotal(**row) for row in _in_ms(kernels)],
        modules=[ModuleTotal(**row) for row in _in_ms(tables.modules.head(top or tables.modules.height))],
        attribution=tables.attribution,
        phases=[
            PhasePart(
                row["phase"],
                round(row["duration_ns"] / NS_PER_MS, 6),
                row["share"],
                PARTS[part := limit_of(row)],
                row[part] / max(row["duration_ns"], 1.0),
                row["latest"],
            )
            for row in tables.phases.iter_rows(named=True)
        ],
        layers=[LayerLoad(**row) for row in tables.layers.iter_rows(named=True)],
        collectives=[CollectiveTotal(**row) for row in _in_ms(tables.collectives)],
        host=[HostMeans(**row) for row in _in_ms(tables.host)],
        pipeline=[StageBubble(**row) for row in _in_ms(tables.stages)],
        step_time=step_time_document(analysis.steps),
        mean_step=mean_step_document(analysis),
        end=analysis.end,
        selection=selection_document(selection),
        pretended=analysis.pretended,
    )


def _in_ms(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Rows with nanosecond columns as float milliseconds, renamed to say so."""
    times = [name for name in frame.columns if name.endswith("_ns")]
    renamed = {name: name.removesuffix("_ns") + "_ms" for name in times}
    return frame.with_columns((pl.col(times) / NS_PER_MS).round(6)).rename(renamed).to_dicts()
