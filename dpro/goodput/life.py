"""The life of a job: all its attempts, and what each of their seconds was.

In: the runs of a job. Out: `JobLife`, from which documents, views and predictions are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.errors import DproError
from dpro.goodput.account import account
from dpro.goodput.attempts import (
    Attempt,
    AttemptEnd,
    attempts_of,
    end_of_attempt,
    missing_attempts,
    set_forward,
)
from dpro.goodput.throughput import StepAmount, amount_of
from dpro.schema import ITERATIONS, REQUESTS
from dpro.store import Run

MAX_LOST = 0.95  # of a step: findings that overlap cannot cost more
WITHIN_RANKS = ("rank", "host", "gpu", "link", "nic")  # what a straggler may be


@dataclass(frozen=True)
class JobLife:
    """All attempts of a job, and what each of their seconds was.

    Attributes:
        attempts: in order.
        pieces: as `account` returns them.
        notes: what is not known.
        amounts: what a step of each attempt computes.
        ends: how each attempt ended.
    """

    attempts: list[Attempt]
    pieces: pl.DataFrame
    notes: list[str]
    amounts: list[StepAmount]
    ends: list[AttemptEnd]


def life_of(runs: Sequence[Run], known: Sequence[Analysis] = ()) -> JobLife:
    """Account for the time of a job.

    Args:
        runs: of the job; those before a restart are found in the folder `attempts` of a run.
    """
    analyses = {each.run.path: each for each in known}
    attempts = attempts_of(runs)
    lost, amounts, ends = {}, [], []
    for attempt in attempts:
        analysis = analyses.get(attempt.run.path) or Analysis(attempt.run)
        lost[attempt.number] = lost_to_stragglers(analysis)
        amounts.append(amount_of(analysis))
        ends.append(end_of_attempt(analysis, attempt))
    pieces, notes = account(attempts, lost)
    notes += [*missing_attempts(attempts), *set_forward(attempts), *_no_training(attempts)]
    return JobLife(attempts, pieces, notes, amounts, ends)


def _no_training(attempts: Sequence[Attempt]) -> list[str]:
    """What to ask instead where a server was recorded, which has no steps of training."""
    served = any(each.run.num_rows(table) for each in attempts for table in (REQUESTS, ITERATIONS))
    if served and all(each.steps.is_empty() for each in attempts):
        return ["a server without steps of training: nothing counts as progress; ask `dpro serving RUN`"]
    return []


def lost_to_stragglers(analysis: Analysis) -> float:
    """Share of a step that healing what findings name as slow would save; 0 where they cannot be found."""
    with suppress(DproError):
        findings, _ = analysis.verdict
        slow = [f for f in findings if f.class_.startswith("slow.") and f.component_kind in WITHIN_RANKS]
        return min(max((each.severity for each in slow), default=0.0), MAX_LOST)
    return 0.0
