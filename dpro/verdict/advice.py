"""Advice: something to do, in terms of the job, with its gain.

Takes `JobFacts`. `sources` look for reasons to give advice, `ranking` puts it in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from dpro.documents import DocumentPart
from dpro.errors import DproError
from dpro.recorders import STACKS, how_to_record, is_of_xla
from dpro.replay.timeline import warm_up
from dpro.replay.whatif.edit import EFFORTS
from dpro.replay.whatif.predict import Prediction
from dpro.units import format_duration
from dpro.verdict.facts import JobFacts
from dpro.verdict.limits import (
    BUBBLE,
    CHECKPOINT,
    COLLECTION,
    COMMUNICATION,
    COMPILATION,
    COMPUTE,
    COPIES,
    HOST,
    IMBALANCE,
    INPUT,
    SYNCHRONISATION,
)
from dpro.words import counted

RECORD_MORE = "record-more"
LITTLE = 10  # kernels and copies of a single step: fewer show no job
MAX_GAIN = 20.0  # higher gains count as this
NOTHING_LEFT = 1_000.0  # upper bound of gains, for a step of which nothing may be left
WORTH = 1.02  # least gain of advice
OFTEN = 0.5  # times per step and rank above which something is done in each
WARM = 3.0  # length of warm-up over that of all usual steps above which warm-up dominates a recording
ROUGH = "the gain is that of this change in other jobs; it was not measured on this one"


class Advice(DocumentPart, frozen=True):
    """Something to do.

    Attributes:
        kind: what is done, in one word.
        do: what to do, in terms of the job.
        gain_low, gain_high: current step time over the step time after it; null where unknown.
        effort: what it takes: `no code`, `a setting`, `a line of code`, `new code`, `other hardware`.
        assumes: assumptions of the gain.
        check: how to check whether it holds.
        edit: argument of `whatif --edit` for the same gain; empty where no edit predicts it.
    """

    kind: str
    do: str
    gain_low: float | None
    gain_high: float | None
    effort: str
    assumes: str = ""
    check: str = ""
    edit: str = ""


# What treats each limit itself, before what merely helps.
ASIDE = (COMPILATION, CHECKPOINT, COLLECTION)  # what hosts do besides training
FIRST = {
    HOST: ("cores", "launch-one", "python", *ASIDE, "allocator", "launch", "batch", "optimizer"),
    COMPUTE: ("cores", "amp", "attention", "fuse", "tune-kernel", "optimizer", "batch"),
    COMMUNICATION: (
        RECORD_MORE,
        "link",
        "reduce-last",
        "coalesce",
        "transfer",
        "overlap",
        "balance-experts",
        "compression",
    ),
    IMBALANCE: ("cores", "heal", "stages", "balance-experts", "balance-input"),
    INPUT: ("cores", "input"),
    SYNCHRONISATION: ("sync",),
    COPIES: ("copies",),
    BUBBLE: ("interleave", "microbatches", "stages"),
    **{kind: (kind,) for kind in ASIDE},
}


def partly(gain: float, part: float) -> float:
    """Return the gain of saving a part of what a gain saves in all."""
    return 1 / (1 - part * (1 - 1 / gain))


def middle_of(advice: Advice) -> float:
    """Return the middle of its gain; infinite where unknown."""
    if advice.gain_low is None or advice.gain_high is None:
        return math.inf
    return math.sqrt(min(advice.gain_low, MAX_GAIN) * min(advice.gain_high, MAX_GAIN))


def interval_of(prediction: Prediction) -> tuple[float, float]:
    """Return the speed-up after edits: lowest and highest, both finite."""
    low, high = (
        min(prediction.speedup_at(gain_ns), NOTHING_LEFT)
        for gain_ns in (prediction.gain_low_ns, prediction.gain_high_ns)
    )
    return low, high


def best_of(facts: JobFacts, texts: Sequence[str]) -> Prediction | None:
    """Return the prediction of the best change; None if the run answers none, or none gains enough."""
    predictions = []
    for text in texts:
        with suppress(DproError):
            predictions.append(facts.predict(text))
    best = max(predictions, key=lambda prediction: prediction.speedup, default=None)
    return best if best is not None and best.speedup >= WORTH else None


def by_edit(kind: str, do: str, prediction: Prediction, assumes: str = "") -> Advice:
    """Return advice to make one edit, with the gain that `dpro whatif` predicts.

    Args:
        assumes: assumptions of the gain; those of the edit if empty.
    """
    (edit,) = prediction.edits
    return Advice(
        kind,
        do,
        *interval_of(prediction),
        EFFORTS[edit.effort],
        assumes or "; ".join(filter(None, (edit.assumes, edit.training))),
        f"dpro whatif RUN --edit {edit}",
        str(edit),
    )


def record_more(facts: JobFacts) -> list[Advice]:
    """Return what to record if device work is missing, or if the process had just started."""
    if facts.lacks_device_work and not facts.device_work_ns:
        do = "record what the devices do (ProfilerActivity.CUDA, or XPU, MTIA): none of it was recorded"
    elif facts.lacks_kernels:
        do = "record kernels: none was (Nsight Systems: `-t cuda-sw,nvtx`, as root, or another version)"
    elif facts.lacks_device_work:
        worked = format_duration(facts.device_work_ns)
        do = f"record later steps: here the devices worked for {worked} in total"
    elif facts.first_call:
        name, took_ns = facts.first_call
        took = format_duration(took_ns)
        do = f"record later steps: one {name} takes {took}, as the first call of a process does"
    elif warm_up(facts.ends, not facts.analysis.steps.is_empty()) >= WARM:
        do = "record later steps: most of this recording is start-up or warm-up"
    else:
        return []
    return [Advice(RECORD_MORE, do, None, None, "a setting")]


def record_steps(facts: JobFacts) -> list[Advice]:
    """Return advice to record several steps, if none is known, or a single one whose replay fits poorly."""
    marks = "prof.step() of torch.profiler, ranges of NVTX or roctx, or dpro record"
    if is_of_xla(facts.analysis.run):
        marks = "jax.profiler.StepTraceAnnotation"
    if facts.analysis.steps.is_empty():
        do = f"record several steps, and mark them ({marks})"
    elif facts.usual.height == 1 and facts.analysis.trust.grade == "poor":
        do = "record more steps: the single one that counts here may not be typical"
    elif facts.usual.height == 1 and facts.num_device_works < LITTLE:
        few = counted(round(facts.num_device_works), "kernel or copy", "kernels and copies")
        do = f"record more steps: the only one that counts has {few} a rank"
    else:
        return []
    return [Advice(RECORD_MORE, do, None, None, "a setting")]


def record_code(facts: JobFacts) -> list[Advice]:
    """Return advice to record which code takes the time, where nothing else is known; nothing if it was."""
    if (facts.analysis.spans["kind"] == "python").any():
        return []
    do = f"{with_stacks(facts)}: nothing in this recording says what would be faster"
    return [Advice(RECORD_MORE, do, None, None, "a setting")]


def with_stacks(facts: JobFacts) -> str:
    """Return how to record with the lines of code that run."""
    return f"record with {how_to_record(STACKS, facts.analysis.run)}"
