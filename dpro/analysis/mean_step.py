"""The mean step by its parts, and the utilisation and throughput of the job.

Takes an `Analysis`, or the frame of `dpro.replay.steps.step_breakdown`; returns the parts of the mean step
(of the job, of each rank, or of each step), which add up to it, the share of time in which GPUs are busy,
the MFU, and samples and tokens per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import polars as pl
from msgspec.structs import replace

from dpro.analysis.analysis import Analysis
from dpro.analysis.cached import cached
from dpro.documents import DocumentPart
from dpro.errors import DproError, Unanswerable
from dpro.members import count_of
from dpro.recorders import is_of_xla
from dpro.replay.cost.kernels.roofline import common_model
from dpro.replay.cost.work import (
    PARAMETERS,
    SHAPES,
    Mfu,
    find_inputs,
    find_mfu,
    inputs_of_calls,
    operations_of_calls,
)
from dpro.replay.steps import IS_GPU, recorded_steps, series_outside, step_series
from dpro.units import NS_PER_MS, NS_PER_S, format_duration, format_rate, ms

# Column -> title. The parts add up to `duration_ns`, and are shown in this order.
PARTS: Mapping[str, str] = {
    "compute_ns": "compute",
    "copy_ns": "copies",
    "exposed_transfer_ns": "transfer",
    "exposed_wait_ns": "waiting for others",
    "unsplit_comm_ns": "communication, wait not known",
    "host_bound_ns": "host bound",
    "idle_ns": "idle",
}
# Column -> attribute of `MeanStep`.
_KEYS = {name: f"{name.removeprefix('exposed_').removesuffix('_ns')}_ms" for name in PARTS}
COUNT_BASES = {  # basis of the count of matmul operations -> its description
    SHAPES: "matmuls as executed",
    PARAMETERS: "estimated: per weight and token 2 operations forward and 4 backward; attention and "
    "recomputation are not counted",
}


class StepShare(NamedTuple):
    """A part of the mean step: column of `mean_steps`, title, duration in ns, and share of the step."""

    name: str
    title: str
    ns: float
    share: float


class Inputs(NamedTuple):
    """Samples and tokens, per step or per second; 0 tokens for images."""

    samples: float
    tokens: float


class MfuDocument(DocumentPart, frozen=True):
    """Operations of matmuls per second as a share of the GPUs' peak.

    Attributes:
        share: share of the peak in the typical step, or in deep windows if there are no other steps.
        gpu: model of the GPUs.
        dtype: precision of the peak, the one in which matmuls take most time.
        peak_tflops: dense peak of one GPU, in 1e12 operations per second.
        tflop_per_step: matmul operations of one rank per step, in 1e12.
        basis: basis of the count: `shapes` of operators, as executed, or `parameters` of the model, six
            operations per weight and token.
    """

    share: float
    gpu: str
    dtype: str
    peak_tflops: float
    tflop_per_step: float
    basis: str


class MeanStep(DocumentPart, frozen=True):
    """The usual step of a rank as the job runs; the parts add up to its duration.

    Attributes:
        duration_ms: duration, mean over steps and ranks: `step_ms` of the account where the run has a graph;
            as recorded if steps are selected and none of them is a usual one.
        compute_ms: time in which something computes.
        copy_ms: time in which a GPU copies or fills memory, and nothing computes or communicates.
        transfer_ms: time in which data move between ranks, and nothing computes.
        wait_ms: time in which the rank waits for others in collectives.
        unsplit_comm_ms: communication that is not split into wait and transfer.
        host_bound_ms: time in which nothing runs because the next work was launched too late.
        idle_ms: time in which nothing runs for another or an unrecorded reason.
        pipelined: whether whole operations of a pipeline were recorded; `idle_ms` then contains the bubble.
        gpu_busy: share of the time in which GPUs compute, copy or communicate; null without GPU work.
        mfu: utilisation of the GPUs by matmuls; null where unknown.
        mfu_unknown: why `mfu` is unknown; empty where it is known.
        inputs_per_s: elements of batches per second, all ranks; null where not counted.
        samples_per_s: samples per second, all recorded ranks; null where unknown.
        tokens_per_s: tokens per second, all recorded ranks; null where unknown, or if inputs are images.
        rate_unknown: why `samples_per_s` is unknown; empty where it is known.
    """

    duration_ms: float
    compute_ms: float
    copy_ms: float
    transfer_ms: float
    wait_ms: float
    unsplit_comm_ms: float
    host_bound_ms: float
    idle_ms: float
    pipelined: bool
    gpu_busy: float | None
    mfu: MfuDocument | None
    mfu_unknown: str
    inputs_per_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    rate_unknown: str

    @property
    def shares(self) -> list[StepShare]:
        """The parts of the step that take any time, in the order of `PARTS`."""
        titles = dict(PARTS) | ({"idle_ns": "idle: the bubble and the rest"} if self.pipelined else {})
        parts = [(name, title, getattr(self, _KEYS[name])) for name, title in titles.items()]
        return [
            StepShare(name, title, took_ms * NS_PER_MS, took_ms / self.duration_ms)
            for name, title, took_ms in parts
            if took_ms > 0
        ]


def mean_steps(breakdown: pl.DataFrame, by: str | None = None) -> pl.DataFrame:
    """Average the parts of steps.

    Args:
        breakdown: frame of `step_breakdown`.
        by: `rank` or `step`; None for one row over all.

    Returns:
        `by`, `steps` (number of averaged rows), `duration_ns`, the columns of `PARTS`, and
        `overlapped_comm_ns` (a part of compute), Float64. Exposed communication that is not split into wait
        and transfer is in `unsplit_comm_ns`.
    """
    wait, transfer = pl.col("exposed_wait_ns"), pl.col("exposed_transfer_ns")
    unsplit = pl.when(wait.is_null()).then("exposed_comm_ns").otherwise(0)
    split = breakdown.with_columns(unsplit_comm_ns=unsplit).with_columns(
        wait.fill_null(0), transfer.fill_null(0)
    )
    names = ["duration_ns", *PARTS, "overlapped_comm_ns"]
    means = [pl.len().cast(pl.Int64).alias("steps"), *(pl.col(name).mean() for name in names)]
    if by is None:
        return split.select(means) if split.height else split.select(means).clear()
    return split.group_by(by).agg(means).sort(by)


def means_over_all(breakdown: pl.DataFrame) -> dict[str, float]:
    """Average the parts of all steps; return the columns of `mean_steps` as one row.

    Raises:
        Unanswerable: there is no step, or none takes any time.
    """
    means = mean_steps(breakdown)
    if means.is_empty() or not means["duration_ns"][0]:
        raise Unanswerable("no step was recorded in depth")
    return means.row(0, named=True)


def shown_parts(means: pl.DataFrame) -> dict[str, str]:
    """Return the parts to show, column to title: copies and unsplit communication only if there are any."""
    shown = {name: bool((means[name] > 0).any()) for name in ("copy_ns", "unsplit_comm_ns")}
    return {name: title for name, title in PARTS.items() if shown.get(name, True)}


@cached
def mean_step_of(analysis: Analysis) -> MeanStep:
    """Return the mean step of a run by its parts.

    Raises:
        Unanswerable: the run has no deep window.
    """
    row = means_over_all(analysis.usual_breakdown)
    whole = row["duration_ns"]
    of = {name: row[name] / whole for name in PARTS}
    on_gpu = not analysis.spans.filter(IS_GPU).is_empty()
    mfu, no_mfu = mfu_of(analysis)
    rate, no_rate = rate_of(analysis)
    return MeanStep(
        duration_ms=ms(whole),
        **{key: ms(row[name]) for name, key in _KEYS.items()},
        pipelined=analysis.operations is not None,
        gpu_busy=1 - of["host_bound_ns"] - of["idle_ns"] if on_gpu else None,
        mfu=mfu
        and MfuDocument(mfu.share, mfu.gpu, mfu.dtype, mfu.peak_tflops, mfu.operations / 1e12, mfu.basis),
        mfu_unknown=no_mfu,
        inputs_per_s=inputs_per_s(analysis),
        samples_per_s=rate.samples if rate else None,
        tokens_per_s=rate.tokens or None if rate else None,
        rate_unknown=no_rate,
    )


_NO_SHAPES_OF_XLA = "XLA profiles do not show what a step computes on"


def mfu_of(analysis: Analysis) -> tuple[Mfu | None, str]:
    """Return the MFU in the typical step, else in deep windows; or None, and why it is unknown."""
    gpus = analysis.run.manifest.gpus
    if analysis.spans.filter(IS_GPU).is_empty():
        return None, "no GPU work"
    if not common_model(gpus):
        return (
            None,
            f"the peak of its GPUs is not known ({', '.join(sorted(set(gpus))) or 'model not recorded'})",
        )
    if is_of_xla(analysis.run):
        return None, _NO_SHAPES_OF_XLA
    timed = analysis.spans.filter(pl.col("duration_ns") >= 0)
    by_parameters, no_parameters = 0.0, ""
    try:
        by_parameters = operations_of_calls(analysis.model_calls, analysis.counters)
    except Unanswerable as error:
        no_parameters = f"; by the model's parameters: {error}" * (not analysis.model_calls.is_empty())
    try:
        mfu = find_mfu(timed, recorded_steps(timed, analysis.steps), gpus, by_parameters)
        series = series_outside(analysis.steps)
        return (mfu if series is None else mfu.within(series.typical_ns)), ""
    except DproError as error:
        return None, f"{error}{no_parameters}"


def rate_of(analysis: Analysis) -> tuple[Inputs | None, str]:
    """Return samples and tokens per second, pauses included; or None, and the reason."""
    inputs, unknown = inputs_of_step(analysis)
    if inputs is None:
        return None, unknown
    paced_ns = pace_ns(analysis)
    if not paced_ns:
        return None, "no step was timed"
    return Inputs(*(amount / paced_ns * NS_PER_S for amount in inputs)), ""


def pace_ns(analysis: Analysis) -> float:
    """Return the time of all steps over their number, pauses included, in ns; 0 where no step was timed.

    Throughput is per this time: samples over a median would be those of a job without slow steps.
    """
    series = step_series(analysis.steps)
    return series.mean_ns if series is not None else 0.0


@cached
def inputs_of_step(analysis: Analysis) -> tuple[Inputs | None, str]:
    """Return samples and tokens per step over all recorded ranks; or None, and why they are unknown."""
    if is_of_xla(analysis.run):
        return None, _NO_SHAPES_OF_XLA
    try:
        of_rank = _inputs(analysis)
    except DproError as error:
        return None, str(error)
    if not _replicas_known(analysis):
        return None, "which ranks work on the same batch was not recorded"
    return Inputs(*(_of_replicas(analysis, of_rank, name) for name in Inputs._fields)), ""


def _inputs(analysis: Analysis) -> pl.DataFrame:
    """Return samples and tokens per step of each rank, from shapes of operators, else from model calls.

    Raises:
        Unanswerable: neither shows them.
    """
    timed = analysis.spans.filter(pl.col("duration_ns") >= 0)
    try:
        return find_inputs(timed, recorded_steps(timed, analysis.steps))
    except Unanswerable:
        if analysis.model_calls.is_empty():
            raise
        return inputs_of_calls(analysis.model_calls, analysis.counters)


def _replicas_known(analysis: Analysis) -> bool:
    """Return whether the job has one rank, a known data-parallel axis, or only collectives of all ranks."""
    workers, world = analysis.workers, analysis.run.manifest.world_size
    if world == 1 or (not workers.is_empty() and bool((workers["dp"] >= 0).all())):
        return True
    return {count_of(ranks) for ranks in analysis.collectives["group_ranks"].unique()} == {world}


def inputs_per_s(analysis: Analysis) -> float | None:
    """Return elements of batches per second, pauses included; None if not counted."""
    from dpro.detect.load_model import WORKLOAD

    counted = analysis.counters.filter((pl.col("counter") == WORKLOAD) & (pl.col("value") > 0))
    paced_ns = pace_ns(analysis)
    if counted.is_empty() or not paced_ns:
        return None
    of_rank = counted.group_by("rank").agg(pl.col("value").mean())
    return _of_replicas(analysis, of_rank, "value") / paced_ns * NS_PER_S


def _of_replicas(analysis: Analysis, of_rank: pl.DataFrame, column: str) -> float:
    """Sum a column over data-parallel replicas, with the largest value of each.

    The ranks of a replica (axes tp, pp and cp) work on the same batch.
    """
    place = pl.when(pl.col("dp") >= 0).then("dp").otherwise("rank").cast(pl.Int64)
    replica = analysis.workers.select(pl.col("rank").cast(pl.Int64), replica=place)
    placed = of_rank.with_columns(pl.col("rank").cast(pl.Int64)).join(replica, on="rank", how="left")
    largest = placed.group_by(pl.col("replica").fill_null(pl.col("rank"))).agg(pl.col(column).max())
    return float(largest[column].sum())


def legend(mean: MeanStep) -> list[str]:
    """Return the parts in words: `compute 69 ms (78%)`."""
    return [f"{part.title} {format_duration(part.ns)} ({part.share:.0%})" for part in mean.shares]


def facts_of(mean: MeanStep) -> list[tuple[str, str]]:
    """Return GPU busy share, MFU and throughput as names and values."""
    rows = (
        []
        if mean.gpu_busy is None
        else [("GPU busy", f"{mean.gpu_busy:.0%} (computing, communicating or copying)")]
    )
    if mean.mfu is not None:
        peak = f"{mean.mfu.peak_tflops:,.0f} TFLOP/s dense {mean.mfu.dtype}, {mean.mfu.gpu}"
        rows.append(("MFU", f"{mean.mfu.share:.1%} of {peak}; {COUNT_BASES[mean.mfu.basis]}"))
    elif mean.gpu_busy is not None:
        rows.append(("MFU", f"not known: {mean.mfu_unknown}"))
    if mean.samples_per_s is not None:
        samples = f"{format_rate(mean.samples_per_s)} samples"
        tokens = f"{mean.tokens_per_s:,.0f} tokens ({samples})" if mean.tokens_per_s else samples
        rows.append(("throughput", f"{tokens} per second, pauses included, all recorded ranks"))
    elif mean.inputs_per_s is not None:
        elements = f"{mean.inputs_per_s:,.0f} elements of batches per second, pauses included, all ranks"
        rows.append(("input", f"{elements}; samples and tokens are not known: {mean.rate_unknown}"))
    else:
        rows.append(("throughput", f"not known: {mean.rate_unknown}"))
    return rows


def mean_step_document(analysis: Analysis) -> MeanStep | None:
    """Return the value of key `mean_step` in `--json`, rounded; None if it is unknown."""
    try:
        mean = mean_step_of(analysis)
    except DproError:
        return None
    times = {key: round(getattr(mean, key), 6) for key in ("duration_ms", *_KEYS.values())}
    return replace(mean, **times, mfu=mean.mfu and replace(mean.mfu, share=round(mean.mfu.share, 6)))
