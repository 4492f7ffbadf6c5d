"""Where all the time of a job went, as a document.

In: the runs of a job. Out: `GoodputDocument`, and the pieces that views draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import polars as pl
from msgspec import field

from dpro.analysis.analysis import Analysis
from dpro.documents import Document, DocumentPart
from dpro.errors import DproError
from dpro.goodput.account import EVALUATION, PRODUCTIVE, STRAGGLER, account, totals
from dpro.goodput.attempts import Attempt, attempts_of
from dpro.goodput.throughput import DoneSteps, StepAmount, ThroughputDocument, amount_of, throughput_of
from dpro.store import Run
from dpro.units import NS_PER_H, NS_PER_MS, NS_PER_S

MAX_LOST = 0.95  # of a step: findings that overlap cannot cost more
WITHIN_RANKS = ("rank", "host", "gpu", "link", "nic")  # what a straggler may be


class ClassShare(DocumentPart, frozen=True):
    """What one class takes of the wall time of all ranks.

    Attributes:
        class: as docs/goodput.md lists them.
        rank_hours: of all ranks.
        share: of the wall time of all ranks.
    """

    class_: str = field(name="class")
    rank_hours: float
    share: float


class AttemptDocument(DocumentPart, frozen=True):
    """One start of the job.

    Attributes:
        run: where it is recorded.
        begin_ns: when the first of its processes was seen.
        ranks: how many ranks it had.
        first_step: of the job; steps before it are not done again.
        steps: that it did.
        repeated: of these, steps that an earlier attempt had done.
        ended_well: whether all its processes ended with exit code 0; null where nothing says it, as in
            imports.
        step_ms: its typical step; null without steps.
    """

    run: str
    begin_ns: int
    ranks: int
    first_step: int
    steps: int
    repeated: int
    ended_well: bool | None
    step_ms: float | None


class GoodputPrediction(DocumentPart, frozen=True):
    """What the job would get done in the time that was asked about.

    Attributes:
        edits: what was changed; none for the job as it is.
        goodput: share of the time in which steps are done for good: mean, and within which nine of ten
            simulated jobs are.
        low, high: that interval.
        gain_h: hours of training that the change gives, mean; null for the job as it is.
        gain_low_h, gain_high_h: its interval.
        failures: in that time.
        shares: of the time, by class.
    """

    edits: list[str]
    goodput: float
    low: float
    high: float
    gain_h: float | None
    gain_low_h: float | None
    gain_high_h: float | None
    failures: float
    shares: dict[str, float]


class OutlookDocument(DocumentPart, frozen=True):
    """What the job would get done if its hosts fail so often, and what changes would give. Unproven.

    Attributes:
        hours: that are simulated.
        rate: where the rate of failures comes from.
        job_failures_per_h: of the job as a whole.
        host_failures_per_h: of each host.
        hosts: of the job.
        stages: of the job as measured, s and steps, that the simulation starts from.
        predictions: the job as it is, then changes, largest gain first.
    """

    hours: float
    rate: str
    job_failures_per_h: float
    host_failures_per_h: float
    hosts: int
    stages: dict[str, float]
    predictions: list[GoodputPrediction]


class GoodputDocument(Document, frozen=True, kw_only=True):
    """Where all the time of a job went.

    Attributes:
        runs: as they were named.
        ranks: how many ranks the job had, at most.
        wall_s: from its start to the last moment of any rank.
        rank_hours: wall time of all ranks.
        goodput: share of it in which steps were done for the first time, and no straggler was waited for.
        ettr: effective training time ratio, the time of training that is not lost over the wall time: the
            same with stragglers and evaluation counted as training (arXiv 2410.21680).
        steps: of the job that were done.
        throughput: MFU, samples and tokens per second, in steps and over the wall time.
        saving_background_s: time that saves went on in the background, all ranks; in no class.
        classes: each second of each rank is in one; largest first.
        attempts: in order.
        notes: what is not known.
        outlook: what changes to its recovery would give; null where that was not asked for.
    """

    runs: list[str]
    ranks: int
    wall_s: float
    rank_hours: float
    goodput: float
    ettr: float
    steps: int
    throughput: ThroughputDocument
    saving_background_s: float
    classes: list[ClassShare]
    attempts: list[AttemptDocument]
    notes: list[str]
    outlook: OutlookDocument | None = None


@dataclass(frozen=True)
class JobLife:
    """All attempts of a job, and what each of their seconds was.

    Attributes:
        attempts: in order.
        pieces: as `account` returns them.
        notes: what is not known.
        amounts: what a step of each attempt computes.
    """

    attempts: list[Attempt]
    pieces: pl.DataFrame
    notes: list[str]
    amounts: list[StepAmount]


def life_of(runs: Sequence[Run]) -> JobLife:
    """Account for the time of a job.

    Args:
        runs: of the job; those before a restart are found in the folder `attempts` of a run.
    """
    attempts = attempts_of(runs)
    lost, amounts = {}, []
    for attempt in attempts:
        analysis = Analysis(attempt.run)
        lost[attempt.number] = lost_to_stragglers(analysis)
        amounts.append(amount_of(analysis))
    pieces, notes = account(attempts, lost)
    return JobLife(attempts, pieces, notes, amounts)


def lost_to_stragglers(analysis: Analysis) -> float:
    """Share of a step that healing what findings name as slow would save; 0 where they cannot be found.

    Args:
        analysis: of an attempt.
    """
    with suppress(DproError):
        findings, _ = analysis.verdict
        slow = [f for f in findings if f.class_.startswith("slow.") and f.component_kind in WITHIN_RANKS]
        return min(max((each.severity for each in slow), default=0.0), MAX_LOST)
    return 0.0


def goodput_document(life: JobLife, names: Sequence[str]) -> GoodputDocument:
    """Where the time of a job went, for programs.

    Args:
        life: of the job.
        names: of its runs, as the user gave them.
    """
    shares = totals(life.pieces)
    by_class = dict(shares.select("class", "share").iter_rows())
    trained = sum(by_class.get(name, 0.0) for name in (PRODUCTIVE, STRAGGLER, EVALUATION))
    num_ranks = life.pieces["rank"].n_unique()
    total_ns = int(life.pieces["duration_ns"].sum())
    classes = shares.sort("duration_ns", descending=True).iter_rows()
    attempts = _attempts(life)
    done = [
        DoneSteps(each.steps - each.repeated, each.ranks, amount)
        for each, amount in zip(attempts, life.amounts, strict=True)
    ]
    wall_s = total_ns / max(num_ranks, 1) / NS_PER_S
    return GoodputDocument(
        runs=list(names),
        ranks=num_ranks,
        wall_s=wall_s,
        rank_hours=total_ns / NS_PER_H,
        goodput=by_class.get(PRODUCTIVE, 0.0),
        ettr=trained,
        steps=life.pieces.filter(pl.col("step") >= 0)["step"].n_unique(),
        throughput=throughput_of(done, wall_s, total_ns / NS_PER_S),
        saving_background_s=sum(_background_ns(each) for each in life.attempts) / NS_PER_S,
        classes=[
            ClassShare(class_=name, rank_hours=ns / NS_PER_H, share=share) for name, ns, share in classes
        ],
        attempts=attempts,
        notes=life.notes,
    )


def _background_ns(attempt: Attempt) -> int:
    whole = attempt.checkpoints.filter(pl.col("duration_ns") >= 0)
    return int((whole["duration_ns"] - whole["stall_ns"]).clip(lower_bound=0).sum())


def _attempts(life: JobLife) -> list[AttemptDocument]:
    done: set[int] = set()
    found = []
    for attempt in life.attempts:
        own = life.pieces.filter((pl.col("attempt") == attempt.number) & (pl.col("step") >= 0))
        steps = set(own["step"].to_list())
        found.append(
            AttemptDocument(
                run=str(attempt.run.path),
                begin_ns=attempt.begin_ns,
                ranks=attempt.workers.height or attempt.starts.height,
                first_step=attempt.first_step,
                steps=len(steps),
                repeated=len(steps & done),
                ended_well=attempt.ended_well,
                step_ms=attempt.typical_ns / NS_PER_MS if attempt.typical_ns else None,
            )
        )
        done |= steps
    return found
