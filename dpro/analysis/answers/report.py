"""The answer of `dpro report`: time by step, kernel, collective and phase, and the activity of the host.

Takes an `Analysis`; returns the tables that `dpro report` prints, in ns, and their document, in ms.
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
from dpro.replay.pretended import PretendedStep
from dpro.replay.steps import kernel_totals, per_rank
from dpro.selection import ALL, Selection, SelectionDocument, selection_document
from dpro.units import NS_PER_MS


class StepParts(DocumentPart, frozen=True):
    """A step of a rank, the sum of compute, copies, exposed communication, host bound and idle time.

    Attributes:
        step: number of the step; 0 if a trace has no steps.
        rank: the rank.
        duration_ms: duration of the step.
        compute_ms: kernels that are not communication; operators in a job on CPUs.
        copy_ms: copies and fills of a GPU while nothing computes or communicates.
        exposed_comm_ms: communication while nothing computes, the sum of the next two.
        exposed_wait_ms: exposed communication before all members of the collective had arrived; null if more
            than 5% of it belongs to collectives that were not found on all of their ranks.
        exposed_transfer_ms: exposed communication after that; null if `exposed_wait_ms` is.
        overlapped_comm_ms: communication while something computes; part of `compute_ms`.
        host_bound_ms: time in which nothing runs because the next work was launched too late.
        idle_ms: time in which nothing runs for another or an unrecorded reason.
        data_wait_ms: time for which the training thread waited for its DataLoader; null if not recorded.
        gc_ms: time in Python's garbage collection; null if not recorded.
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
    """A kernel over all ranks; without GPU work, a CPU operator by its self time.

    Attributes:
        name: name of the kernel or operator.
        count: number of executions.
        total_ms: total time.
    """

    name: str
    count: int
    total_ms: float


class ModuleTotal(DocumentPart, frozen=True):
    """The kernels of one operator of a module, over all ranks and layers.

    Attributes:
        module: path or class of the module, numbers as `*`; empty if not recorded or unknown.
        operator: operator that launched the kernels; empty if unknown.
        count: number of kernels.
        total_ms: total time.
    """

    module: str
    operator: str
    count: int
    total_ms: float


class LayerLoad(DocumentPart, frozen=True):
    """The distribution of work over ranks or experts in one layer.

    Attributes:
        source: what the load was read from: all_to_all, grouped products, or products of experts.
        layer: module, or number of the call or the product in a step.
        members: number of ranks or experts that share the work.
        mean: mean load of a member in a step: bytes of all_to_all, else rows.
        most: largest load of a member in a step, in the same unit.
        busiest: rank or expert that typically has the largest load.
        imbalance: largest load over the mean, averaged over steps.
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
        duration_ms: time of the phase in a step.
        share: share of the step.
        limit: its largest part: compute, communication, transfer, waiting, host, idle, or copies.
        limit_share: share of the phase that this part takes.
        latest: rank that the others wait for; -1 if they do not wait.
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
        bytes: payload, for gather and scatter the whole buffer; -1 unknown.
        hosts: number of hosts of the members; null if unknown.
        count: number of collectives.
        total_ms: total time.
        matched: number of collectives found on all of their ranks.
        wait_ms: time of matched collectives before all members had arrived; null if none is matched.
        transfer_ms: time of matched collectives after that; null if none is matched.
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
    """Activity of a rank's host in its mean step, pauses included; null where not recorded.

    Attributes:
        rank: the rank.
        steps: number of steps in the means.
        duration_ms: mean step.
        data_wait_ms: time for which the training thread waited for its DataLoader.
        gc_ms: time in Python's garbage collection.
        run_queue_ms: time for which the training thread was ready to run without a core.
        training_thread_cpu_ms: CPU time of the training thread.
        cpu_ms: CPU time of the process.
        backward_calls: number of micro-batches.
        checkpoint_ms: time in checkpoints.
        no_grad_ms: time under `torch.no_grad`.
        compile_ms: time in compilation.
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
    """The bubble of a pipeline stage, averaged over usual (or selected) steps and the ranks of the stage.

    Attributes:
        stage: number of the stage.
        ranks: number of ranks of the stage.
        steps: number of steps in the means.
        pipeline_ms: time from the first forward to the last backward on any stage.
        compute_ms: time in forward and backward.
        bubble_ms: `pipeline_ms` without `compute_ms`.
        bubble_share: bubble as a share of `pipeline_ms`.
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
        kernels: kernels, the largest total first.
        modules: kernels by module and operator, the largest total first; empty without a GPU.
        attribution: number of kernels by how their operator was found: `launch`; for CUDA graphs `eager`, by
            an equal sequence of kernels that operators launched elsewhere; else `ambiguous` or `unknown`.
        layers: layers that distribute work over ranks or experts, the most uneven first.
        phases: phases of reinforcement learning, the longest first; empty if none are named.
        collectives: collectives by operation and size, the largest total first.
        host: activity of the host, by rank; empty if not recorded.
        pipeline: bubble of each stage; only for traces of whole operations.
        step_time: time of a step; null if no step was timed.
        mean_step: the usual step of a rank by its parts; null if unknown.
        end: how the job ended.
        selection: selected steps and ranks, which all keys but `end` cover; absent for all.
        pretended: step of the job whose ranks were pretended; null if they were not.
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
    """Written report files.

    Attributes:
        run: the run, as the user named it.
        files: paths of the files.
    """

    run: str
    files: Sequence[str]


@dataclass(frozen=True)
class ReportTables:
    """The tables that `dpro report` prints, times in ns.

    Attributes:
        steps: frame of `step_breakdown`.
        kernels: frame of `kernel_totals`.
        modules: kernels by module and operator: frame of `dpro.replay.attribution.totals`.
        attribution: number of kernels by `how` their operator was found.
        layers: frame of `imbalances`.
        phases: frame of `phases`.
        collectives: frame of `collective_totals`.
        facts: frame of `host_facts`, by step.
        host: frame of `per_rank`, the means of `facts` by rank.
        stages: frame of `pipeline_bubbles`.
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
    """Return the tables of the report.

    Args:
        analysis: analysis of the selected steps and ranks, from `dpro.analysis.selected.select`.

    Raises:
        Unanswerable: the run has no spans.
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
        stages=analysis.bubbles(selection),
        on_gpu=bool((analysis.spans["kind"] == "kernel").any()),
    )


def report_document(
    analysis: Analysis, tables: ReportTables, top: int | None = None, selection: Selection = ALL
) -> ReportDocument:
    """Return the tables of the report as a document.

    Args:
        top: number of kernels and of modules to list; None for all.
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
    """Return rows as dictionaries, with columns `*_ns` converted to float columns `*_ms`."""
    times = [name for name in frame.columns if name.endswith("_ns")]
    renamed = {name: name.removesuffix("_ns") + "_ms" for name in times}
    return frame.with_columns((pl.col(times) / NS_PER_MS).round(6)).rename(renamed).to_dicts()
