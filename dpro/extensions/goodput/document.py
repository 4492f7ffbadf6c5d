"""The answer of `dpro goodput`: where all the time of a job went.

Takes the life of a job; returns a `GoodputDocument`, or its summary in a few sentences.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
from msgspec import field

from dpro.analysis.recording import RecordingShare, mean_share, recording_share
from dpro.documents import Document, DocumentPart
from dpro.extensions.goodput.account import EVALUATION, PRODUCTIVE, STRAGGLER, totals
from dpro.extensions.goodput.attempts import Attempt
from dpro.extensions.goodput.life import DoneSteps, JobLife, ThroughputDocument, throughput_of
from dpro.extensions.goodput.outlook import OutlookDocument
from dpro.extensions.goodput.starts import StartDocument, start_of
from dpro.extensions.goodput.target import TargetDocument
from dpro.units import NS_PER_H, NS_PER_MS, NS_PER_S, format_duration

IN_WORDS = {  # class -> its name in sentences and legends; several stages are one start
    "productive": "training", "straggler": "waiting for stragglers", "evaluation": "evaluation",
    "checkpoint": "saving checkpoints", "repeated": "steps done again",
    "hang": "hanging", "shutdown": "ending after a failure", "warm_up": "starting", "load": "starting",
    "launch": "starting", "imports": "starting", "process_group": "starting", "set_up": "starting",
    "finish": "finishing", "recording": "recording", "down": "no process",
}  # fmt: skip
MIN_NAMED, MAX_NAMED = 0.01, 4  # losses named in a sentence: minimum share of the time, maximum number


class ClassShare(DocumentPart, frozen=True):
    """The wall time of all ranks in one class.

    Attributes:
        class: as listed in docs/goodput.md.
        rank_hours: of all ranks.
        share: of the wall time of all ranks.
    """

    class_: str = field(name="class")
    rank_hours: float
    share: float


class AttemptDocument(DocumentPart, frozen=True):
    """One start of the job.

    Attributes:
        run: path of its run.
        begin_ns: the earliest recorded start of its processes.
        ranks: number of its ranks.
        first_step: the first step of the job that it did; without steps, the one that it began at.
        steps: number of steps that it did.
        repeated: steps of these that an earlier attempt had done.
        lost: steps of these from the step that the job resumed from on.
        ended_well: whether all its processes ended with exit code 0; null where unknown, as in imports.
        end: how it ended: completed, failed, hung, ended (from outside), running or unknown.
        cause: the end and its cause, in words.
        step_ms: its typical step; null without steps.
    """

    run: str
    begin_ns: int
    ranks: int
    first_step: int
    steps: int
    repeated: int
    lost: int
    ended_well: bool | None
    end: str
    cause: str
    step_ms: float | None


class GoodputDocument(Document, frozen=True, kw_only=True):
    """Where all the time of a job went.

    Attributes:
        runs: runs as the user named them.
        ranks: number of ranks of the job, at most.
        wall_s: from its start to the last moment of any rank.
        rank_hours: wall time of all ranks.
        goodput: share of it in which steps were done for the first time, without waiting for stragglers.
        ettr: effective training time ratio: `goodput` with stragglers and evaluation counted as training,
            over the wall time (arXiv 2410.21680).
        steps: steps of the job that were done.
        throughput: MFU, samples and tokens per second, in steps and over the wall time.
        saving_background_s: time of saving in the background, all ranks; in no class.
        recording: cost of recording on the most affected rank, as a share of the time of steps, as in `dpro
            info`, with the part inside of steps, which is in no class; null where unknown.
        classes: largest first; each second of each rank is in one.
        attempts: in order.
        starts: starts of the attempts that reached a first step.
        notes: what is unknown.
        outlook: what changes to its recovery would give; null where that was not requested.
        target: the time to the loss of `--target-loss`; null without that option.
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
    recording: RecordingShare | None
    classes: list[ClassShare]
    attempts: list[AttemptDocument]
    starts: list[StartDocument]
    notes: list[str]
    outlook: OutlookDocument | None = None
    target: TargetDocument | None = None


def goodput_document(life: JobLife, names: Sequence[str]) -> GoodputDocument:
    """Return where the time of a job went; `names` are its runs as the user named them."""
    shares = totals(life.pieces)
    by_class = dict(shares.select("class", "share").iter_rows())
    trained = sum(by_class.get(name, 0.0) for name in (PRODUCTIVE, STRAGGLER, EVALUATION))
    num_ranks = life.pieces["rank"].n_unique()
    total_ns = int(life.pieces["duration_ns"].sum())
    classes = shares.sort("duration_ns", descending=True).iter_rows()
    attempts = _attempts(life)
    done = [
        DoneSteps(attempt.steps - attempt.repeated, attempt.ranks, amount)
        for attempt, amount in zip(attempts, life.amounts, strict=True)
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
        saving_background_s=sum(_background_ns(attempt) for attempt in life.attempts) / NS_PER_S,
        recording=mean_share(
            [
                (recording_share(attempt.run.manifest), attempt.typical_ns * document.steps)
                for attempt, document in zip(life.attempts, attempts, strict=True)
            ]
        ),
        classes=[
            ClassShare(class_=name, rank_hours=ns / NS_PER_H, share=share) for name, ns, share in classes
        ],
        attempts=attempts,
        starts=[start for attempt in life.attempts if (start := start_of(attempt, life.pieces))],
        notes=life.notes,
    )


def in_words(document: GoodputDocument) -> str:
    """Describe how much of a job's time was productive, its largest losses, and how often it failed."""
    if not document.classes:
        return "No moment of any rank was recorded."
    lost: dict[str, float] = {}
    for part in document.classes:
        if part.class_ != PRODUCTIVE:
            lost[IN_WORDS[part.class_]] = lost.get(IN_WORDS[part.class_], 0.0) + part.share
    named = [part for part in sorted(lost.items(), key=lambda item: -item[1]) if part[1] >= MIN_NAMED]
    most = ", ".join(f"{what} {share:.0%} ({_time(document, share)})" for what, share in named[:MAX_NAMED])
    wall = format_duration(document.wall_s * NS_PER_S)
    said = [
        f"Of {wall}, {document.goodput:.1%} ({_time(document, document.goodput)}) was training that counts"
    ]
    said += [f"; the rest went to {most}"] if most else []
    again = sum(attempt.repeated for attempt in document.attempts)
    starts = len(document.attempts)
    if starts > 1:
        failed = sum(attempt.ended_well is False for attempt in document.attempts)
        ended = f"{failed:,} attempt{'s' * (failed != 1)} did not end well"
        said.append(f". The job was started {starts:,} times, {ended}")
        said.append(f", and {again:,} steps were done again" if again else "")
    return "".join(said) + "."


def _time(document: GoodputDocument, share: float) -> str:
    return format_duration(share * document.wall_s * NS_PER_S)


def _background_ns(attempt: Attempt) -> int:
    whole = attempt.checkpoints.filter(pl.col("duration_ns") >= 0)
    return int((whole["duration_ns"] - whole["stall_ns"]).clip(lower_bound=0).sum())


def _attempts(life: JobLife) -> list[AttemptDocument]:
    done: set[int] = set()
    documents = []
    resumed = _resumed_after(life)
    for attempt, end in zip(life.attempts, life.ends, strict=True):
        steps = _steps(life, attempt)
        reached = max(steps, default=-1) + 1
        documents.append(
            AttemptDocument(
                run=str(attempt.run.path),
                begin_ns=attempt.begin_ns,
                ranks=attempt.workers.height or attempt.starts.height,
                first_step=min(steps, default=attempt.first_step),
                steps=len(steps),
                repeated=len(steps & done),
                lost=sum(step >= resumed.get(attempt.number, reached) for step in steps),
                ended_well=attempt.ended_well,
                end=end.how,
                cause=end.words,
                step_ms=attempt.typical_ns / NS_PER_MS if attempt.typical_ns else None,
            )
        )
        done |= steps
    return documents


def _steps(life: JobLife, attempt: Attempt) -> set[int]:
    of_attempt = life.pieces.filter((pl.col("attempt") == attempt.number) & (pl.col("step") >= 0))
    return set(of_attempt["step"].to_list())


def _resumed_after(life: JobLife) -> dict[int, int]:
    """Map attempts before the last that trained to the step that the job resumed from after them."""
    resumed: dict[int, int] = {}
    following: int | None = None
    for attempt in reversed(life.attempts):
        if following is not None:
            resumed[attempt.number] = following
        if _steps(life, attempt):
            following = attempt.first_step
    return resumed
