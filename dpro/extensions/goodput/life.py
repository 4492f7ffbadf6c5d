"""The life of a job: its attempts, the class of each second, and what its steps compute per second.

Takes the runs of a job; returns a `JobLife`, from which documents, views and predictions are made, and its
`ThroughputDocument`. Operations, samples and tokens of a step come from the mean step of its attempt
(`dpro.analysis.mean_step`); an attempt without one is assumed to do the same work per step and rank. Only
steps done for the first time count, since repeated ones compute nothing new.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.analysis.mean_step import Inputs, mfu_of, pace_ns, rate_of
from dpro.documents import DocumentPart
from dpro.errors import DproError
from dpro.extensions.goodput.account import account
from dpro.extensions.goodput.attempts import (
    HUNG,
    Attempt,
    AttemptEnd,
    attempts_of,
    clock_jumps,
    end_of_attempt,
    missing_attempts,
)
from dpro.replay.cost.work import Mfu
from dpro.schema import ITERATIONS, REQUESTS, SPANS
from dpro.store import Run
from dpro.units import NS_PER_S

NOT_IN_DEPTH = "no step was recorded in depth"


class StepAmount(NamedTuple):
    """The computation of one step of an attempt.

    Attributes:
        mfu: model FLOPs utilisation of its matmuls; None where unknown.
        no_mfu: why it is unknown; empty where it is known.
        rate: samples and tokens per second, pauses included, all ranks; None where unknown.
        no_rate: why it is unknown; empty where it is known.
        step_s: the mean step, pauses included, s; 0 without steps.
    """

    mfu: Mfu | None
    no_mfu: str
    rate: Inputs | None
    no_rate: str
    step_s: float


class DoneSteps(NamedTuple):
    """The number of steps that an attempt did for the first time, and what each computes."""

    steps: int
    ranks: int
    amount: StepAmount


class ThroughputDocument(DocumentPart, frozen=True):
    """What the job computes per second. Over its wall time only steps done for the first time count.

    Attributes:
        mfu: model FLOPs utilisation in steps, the mean of its attempts; null where unknown.
        mfu_overall: model FLOPs utilisation over the wall time of all ranks.
        mfu_unknown: why it is unknown; empty where it is known.
        samples_per_s: samples per second in steps, pauses included, all ranks; null where unknown.
        samples_per_s_overall: samples per second over the wall time.
        tokens_per_s: tokens per second in steps; null where unknown, or where inputs are images.
        tokens_per_s_overall: tokens per second over the wall time.
        rate_unknown: why samples are unknown; empty where they are known.
        attempts_measured: attempts with steps whose MFU or rate is known; others are assumed to do the same.
    """

    mfu: float | None
    mfu_overall: float | None
    mfu_unknown: str
    samples_per_s: float | None
    samples_per_s_overall: float | None
    tokens_per_s: float | None
    tokens_per_s_overall: float | None
    rate_unknown: str
    attempts_measured: int


def amount_of(analysis: Analysis) -> StepAmount:
    """Return what one step of an attempt computes."""
    try:
        mfu = mfu_of(analysis) if analysis.run.num_rows(SPANS) else (None, NOT_IN_DEPTH)
        rate, no_rate = rate_of(analysis)
        if no_rate and not analysis.run.num_rows(SPANS):
            no_rate = NOT_IN_DEPTH
        return StepAmount(*mfu, rate, no_rate, pace_ns(analysis) / NS_PER_S)
    except DproError as error:
        return StepAmount(None, str(error), None, str(error), 0.0)


def throughput_of(done: Sequence[DoneSteps], wall_s: float, rank_s: float) -> ThroughputDocument:
    """Return what a job computes per second.

    Args:
        wall_s: from the start of the job to its end, s.
        rank_s: wall time of all ranks, s.
    """
    stepped = [attempt for attempt in done if attempt.steps]
    rates = [attempt for attempt in stepped if attempt.amount.rate is not None and attempt.amount.step_s]
    samples, samples_overall = _inputs_per_s(stepped, rates, "samples", wall_s)
    tokens, tokens_overall = _inputs_per_s(stepped, rates, "tokens", wall_s)
    mfu, mfu_overall = _mfu(stepped, rank_s)
    measured = sum(attempt.amount.mfu is not None or attempt in rates for attempt in stepped)
    unknown = [attempt.amount for attempt in stepped] or [StepAmount(None, "no step", None, "no step", 0.0)]
    return ThroughputDocument(
        mfu=mfu,
        mfu_overall=mfu_overall,
        mfu_unknown="" if mfu is not None else unknown[-1].no_mfu,
        samples_per_s=samples,
        samples_per_s_overall=samples_overall,
        tokens_per_s=tokens or None,
        tokens_per_s_overall=tokens_overall or None,
        rate_unknown="" if samples is not None else unknown[-1].no_rate or "no step was timed",
        attempts_measured=measured,
    )


def _inputs_per_s(
    stepped: Sequence[DoneSteps], rates: Sequence[DoneSteps], name: str, wall_s: float
) -> tuple[float | None, float | None]:
    """Return samples or tokens per second, in steps and over the wall time."""
    if not rates or wall_s <= 0:
        return None, None
    amounts = [
        (attempt.steps, getattr(attempt.amount.rate, name), attempt.amount.step_s) for attempt in rates
    ]
    inputs = sum(steps * rate * step_s for steps, rate, step_s in amounts)
    in_steps_s = sum(steps * step_s for steps, _, step_s in amounts)
    unmeasured = sum(attempt.steps * attempt.ranks for attempt in stepped if attempt not in rates)
    # Per step and rank, since an attempt with fewer replicas works on less.
    per_rank = inputs / sum(attempt.steps * attempt.ranks for attempt in rates)
    return inputs / in_steps_s, (inputs + per_rank * unmeasured) / wall_s


def _mfu(stepped: Sequence[DoneSteps], rank_s: float) -> tuple[float | None, float | None]:
    """Return the utilisation in steps and over the wall time: time of the operations at peak over each."""
    at_peak_s, in_steps_s, ranks_steps = 0.0, 0.0, 0
    for steps, ranks, amount in stepped:
        if amount.mfu is not None:
            step_at_peak_s = amount.mfu.operations / (amount.mfu.peak_tflops * 1e12)
            at_peak_s += steps * ranks * step_at_peak_s
            in_steps_s += steps * ranks * step_at_peak_s / amount.mfu.share
            ranks_steps += steps * ranks
    if not ranks_steps or rank_s <= 0:
        return None, None
    whole = sum(attempt.steps * attempt.ranks for attempt in stepped)
    return at_peak_s / in_steps_s, at_peak_s / ranks_steps * whole / rank_s


# The life of a job.

MAX_LOST = 0.95  # of a step: bounds the cost of overlapping findings
WITHIN_RANKS = ("rank", "host", "gpu", "link", "nic")  # components that may be stragglers


@dataclass(frozen=True)
class JobLife:
    """All attempts of a job, and the class of each of their seconds.

    Attributes:
        attempts: in order.
        pieces: as `account` returns them.
        notes: what is unknown.
        amounts: what a step of each attempt computes.
        ends: how each attempt ended.
    """

    attempts: list[Attempt]
    pieces: pl.DataFrame
    notes: list[str]
    amounts: list[StepAmount]
    ends: list[AttemptEnd]


def life_of(runs: Sequence[Run], opened: Sequence[Analysis] = ()) -> JobLife:
    """Account for the time of a job.

    Args:
        runs: runs of the job; earlier attempts are found in the folder `attempts` of a run.
        opened: analyses of some of these runs, which are reused.
    """
    analyses = {analysis.run.path: analysis for analysis in opened}
    attempts = attempts_of(runs)
    lost, amounts, ends = {}, [], []
    for attempt in attempts:
        analysis = analyses.get(attempt.run.path) or Analysis(attempt.run)
        lost[attempt.number] = lost_to_stragglers(analysis)
        amounts.append(amount_of(analysis))
        ends.append(end_of_attempt(analysis, attempt))
    hung = [number for number, end in enumerate(ends) if end.how == HUNG]
    pieces, notes = account(attempts, lost, hung)
    notes += [*missing_attempts(attempts), *clock_jumps(attempts), *_no_training(attempts)]
    return JobLife(attempts, pieces, notes, amounts, ends)


def _no_training(attempts: Sequence[Attempt]) -> list[str]:
    """Return a note that names `dpro serving` if a server was recorded, without steps of training."""
    served = any(attempt.run.num_rows(table) for attempt in attempts for table in (REQUESTS, ITERATIONS))
    if served and all(attempt.steps.is_empty() for attempt in attempts):
        return ["a server without steps of training: nothing counts as progress; ask `dpro serving RUN`"]
    return []


def lost_to_stragglers(analysis: Analysis) -> float:
    """Return the share of a step that healing the most severe slow component would save; 0 where unknown."""
    with suppress(DproError):
        findings, _ = analysis.verdict
        slow = [f for f in findings if f.class_.startswith("slow.") and f.component_kind in WITHIN_RANKS]
        return min(max((finding.severity for finding in slow), default=0.0), MAX_LOST)
    return 0.0
