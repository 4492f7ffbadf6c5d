"""Advice: at most three things to do, in terms of the job, each with its gain.

Takes `JobFacts`, and the limit of the job; returns `Advice`, best first. Each kind of advice is a function
that looks for its own reason in the run, and yields nothing without one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import polars as pl
from msgspec.structs import replace

from dpro.analysis.analysis import Analysis
from dpro.analysis.predictions import under_any_load
from dpro.arrays import Bools, Ints
from dpro.detect import load_model, pauses
from dpro.detect.findings import PAUSES, START, CodeLocation, Finding, class_in_words
from dpro.detect.machine.oversubscribed import CAUSE as CROWDED
from dpro.documents import DocumentPart
from dpro.errors import DproError
from dpro.recorders import RECORDER_FRAMES, STACKS, how_to_record, is_of_xla
from dpro.replay.attribution import innermost
from dpro.replay.cost.kernels.roofline import GPUS, stored_as
from dpro.replay.gradient_buckets import framework_of, half_precision_setting
from dpro.replay.graph import NO_SPAN, Graph, NodeKind
from dpro.replay.steps import host_facts, step_series
from dpro.replay.timeline import warm_up
from dpro.replay.whatif.edit import EFFORTS, kind_of_job
from dpro.replay.whatif.edits.coalescing import series_of
from dpro.replay.whatif.edits.host import gpu_waits
from dpro.replay.whatif.edits.kernels import COMPILED
from dpro.replay.whatif.edits.synchronisation import redundant_reductions
from dpro.replay.whatif.graph_ops.aside import COMPILER
from dpro.replay.whatif.predict import Prediction
from dpro.schema import BUCKETS, GPU_WORK_KINDS
from dpro.units import format_bytes, format_duration
from dpro.verdict.facts import BYTES, JobFacts, exchanges_of_objects, place_of, short_kernel
from dpro.verdict.limits import (
    ALLOCATING,
    ALLOCATOR,
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
    INTO_DEVICE,
    SYNCHRONISATION,
    PromptLaunches,
    before_input,
    host_work_before_slow_launch,
    outside_operators,
)
from dpro.verdict.scores import parts_on_scores
from dpro.words import counted

MAX_ADVICE = 3
OF_FAULTS = ("heal", "cores")  # kinds of advice that treat a part at fault
OBSERVED = (COMPUTE, SYNCHRONISATION, COPIES, INPUT)  # limits that times of calls and kernels show directly
RECORD_MORE = "record-more"
LITTLE = 10  # kernels and copies of a single step: fewer show no job
MAX_GAIN = 20.0  # higher gains count as this
NOTHING_LEFT = 1_000.0  # upper bound of gains, for a step of which nothing may be left
WORTH = 1.02  # least gain of advice
WORTH_AFTER = 1.05  # least middle gain of advice for after the limit is gone
DOMINANT = 0.15  # of compute: least share of a kernel that is worth replacing
NEARLY_ALL = 0.9  # share of the time of calls that the named ones take; of a kernel's time within attention
SHOWN = 0.1  # least time of a part that is named, as a share of the longest part's
SURE_TO_SHOW = 0.08  # least share of computing time for which a family of kernels is worth a line
CASTING = 0.75  # most of their time that other kernels take on half the bytes: others cast in addition
LARGE_COPY = 1 << 18  # bytes above which a copy takes its time for the bytes rather than for the call
IN_MEMORY = ("elementwise", "memory", "reduction", "normalisation")  # families that take their time for bytes
KEPT_IN_FP32 = (
    r"(?i)softmax|layer_?norm|group_?norm|rms_?norm|loss|nll|\b(exp|log|pow)\w*_kernel"  # by autocast
)
TENSOR_CORES = (2.0, 6.0)  # least and most speed-up of matmuls over FP32 without tensor cores
EIGHT_BITS = (1.2, 2.0)  # the same in 8 bits over 16, on tensor cores
FEW_BITS, FEW_BITS_WITHOUT_FP64 = (1.0, 8.0), (8.0, 64.0)  # least and most speed-up of FP32 over FP64
HAS_FP64 = r"P100|V100|A100|A30\b|A800|H100|H200|H800|H20\b|B200|MI\d{2,3}"  # GPUs with units for it
FUSED_ATTENTION = (0.35, 0.12)  # time of a fused kernel as a share of unfused attention's: most, least
FUSED_WITH = 7  # kernels at most, with the softmax, between the two matmuls of unfused attention
WRITTEN_WITH = 16  # the same, where the softmax is written out
# Time of FlashAttention 2 as a share of version 1's, and of 3 on Hopper of 2's: most, least (their papers).
NEWER_ATTENTION = (0.75, 0.5)
EVEN_SEQUENCES = "balance:over=sequences"
LARGER = ("batch:factor=2", "batch:factor=4")
MEASURED = 0.8  # least time of convolutions whose kernels cuDNN chose by measuring, as a share of now
BEFORE_VOLTA = r"(?i)\b(tesla )?([kmp]\d+|p100|gtx (9|10)\d\d|titan xp?|quadro [kmp]\d+)\b"  # GPUs
BEFORE_AMPERE = BEFORE_VOLTA + r"|\b(v100|t4|titan|rtx 20\d\d|quadro)"
MORE_ROWS = (2.0, 8.0)  # times as many rows that products with few take in about the same time: least, most
MAINLY = 0.5  # of computing time: products that take more are what to change
MOSTLY_IDLE = 0.3  # computing share of the step below which a larger batch costs little
_DONE_ONCE = ("launch-one", "allocator")  # remedies of what a process does only once, at its start
WEIGHTS = {"cores": 2.0, "launch-one": 4.0, "batch": 0.5}  # a larger batch changes the training
EFFORT = {"new code": 2.0, "other hardware": 2.0}  # relative to a line or a setting
OFTEN = 0.5  # times per step and rank above which something is done in each
WARM = 3.0  # length of warm-up over that of all usual steps above which warm-up dominates a recording
RUNTIME_CALL = r"(cuda|hip|cu)[A-Z]"
REDUCER = r"^DistributedDataParallel\.forward|distributed(::|\.ddp\.)reducer"  # ranges of DDP
_SOFTMAX = r"(?i)softmax"
_WRITTEN_OUT = (r"(?i)\bexp_kernel", r"(?i)MaxOps|MaxNanFunctor")  # parts of a softmax; with a log, of a loss
_LOG = r"(?i)\blog_kernel"
_FEW_ROWS = r"(?i)gemv|mat_vec|nvjet_\w*?_\d+x8_"  # products of a matrix and one row, or at most 8
_OF_LOSS = r"(?i)nll|loss|log_?softmax|softmax_warp_\w+<.*\d, true"  # `true`: of the logarithm
_ROUGH = "the gain is that of this change in other jobs; it was not measured on this one"


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


def advise(facts: JobFacts, limit: str) -> list[Advice]:
    """Return everything worth doing: first what treats the limit, then what gains most for the least effort.

    If the replay does not fit, no gains follow from it. That leaves the remedies of findings, and what treats
    a limit that spans show: devices may then be idle for another reason than their hosts. If it fits, but
    nothing gains by it, what treats the limit is advised with an unknown gain.

    Args:
        limit: what limits the job, one of `limits`.
    """
    if facts.analysis.trust.answerable:
        wanted = [advice for source in _sources(facts) for advice in source(facts, limit)]
    else:
        wanted = [*remedies_of(facts.findings)]
        treating = _FIRST[limit] if limit in OBSERVED else ()
        if limit == SYNCHRONISATION:  # after a wait, devices idle until the host has launched again
            treating = (*treating, "launch")
        for source in _sources(facts):
            with suppress(DproError):
                wanted += [_without_gain(one) for one in source(facts, limit) if one.kind in treating]
    if facts.first_call:
        wanted = [advice for advice in wanted if advice.kind not in _DONE_ONCE]
    if facts.analysis.shared_hosts:
        wanted = [_widen_gain(advice) for advice in wanted]
    first, worth = _FIRST.get(limit, ()), _worth_doing(wanted)
    if not worth:  # as where hosts are recorded in part, and seem to work while they wait
        worth = [_without_gain(advice) for advice in wanted if advice.kind in first]
    best = sorted(worth, key=lambda advice: (_may_lose(advice), advice.kind not in first, -_merit(advice)))
    cores = [advice for advice in best if advice.kind == "cores"]
    return [advice for advice in best if advice not in cores[1:]]  # all of it asks for the same


def within_limit(advice: Sequence[Advice], limit: str, most: float) -> list[Advice]:
    """Return advice in which cores for the ranks gain no more than a host that takes no time.

    Args:
        most: largest gain without the limit.
    """
    return [
        replace(one, gain_low=min(one.gain_low or 1.0, most), gain_high=min(one.gain_high, most))
        if limit == HOST and one.kind == "cores" and one.gain_high is not None
        else one
        for one in advice
    ]


def _without_gain(advice: Advice) -> Advice:
    """Return the advice with an unknown gain."""
    return replace(advice, gain_low=None, gain_high=None, edit="")


def advise_of_findings(facts: JobFacts) -> list[Advice]:
    """Return what to do about parts that findings name, best first, if nothing else is known of the job."""
    wanted = [advice for source in (_crowded_hosts, _slow_parts) for advice in source(facts, "")]
    return sorted(_worth_doing(wanted), key=_merit, reverse=True)


def _worth_doing(wanted: Sequence[Advice]) -> list[Advice]:
    """Return the advice that gains enough, or whose gain is unknown."""
    return [advice for advice in wanted if advice.gain_high is None or advice.gain_high >= WORTH]


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
    do = f"{_with_stacks(facts)}: nothing in this recording says what would be faster"
    return [Advice(RECORD_MORE, do, None, None, "a setting")]


def first_of(ranked: Sequence[Advice], last: Sequence[Advice] = ()) -> list[Advice]:
    """Return the advice to show: as `advise` ranks it, but always with what treats a fault.

    Args:
        last: shown in addition, at the end, unless advice of its kind is shown already.
    """
    # All advice to record more becomes one, as it takes one recording.
    recordings = [advice for advice in ranked if advice.kind == RECORD_MORE]
    if len(recordings) > 1:
        first, *others = recordings
        joined = replace(first, do="; and ".join(advice.do for advice in recordings))
        ranked = [joined if advice is first else advice for advice in ranked if advice not in others]
    last = [advice for advice in last if advice.kind not in {shown.kind for shown in ranked[:MAX_ADVICE]}]
    most = MAX_ADVICE - len(last)
    healing = [advice for advice in ranked[most:] if advice.kind in OF_FAULTS][:1]
    return [*ranked[: most - len(healing)], *healing, *last]


def worth_after(ranked: Sequence[Advice], later: Sequence[Advice]) -> Advice | None:
    """Return what is worth doing only once the limit is gone; None if nothing is.

    Args:
        ranked: `advise` of the job as it is.
        later: `advise` of the job without its limit.
    """
    now = {advice.kind for advice in ranked if middle_of(advice) >= WORTH_AFTER}
    news = (advice for advice in later if advice.kind not in now and (advice.gain_low or 1.0) >= WORTH)
    return next((advice for advice in news if middle_of(advice) >= WORTH_AFTER), None)


def _widen_gain(advice: Advice) -> Advice:
    """Widen the gain for other loads of the host; that of an edit, which is predicted, is wide already."""
    if advice.edit or advice.gain_low is None or advice.gain_high is None:
        return advice
    low, high = under_any_load(advice.gain_low, advice.gain_high)
    return replace(advice, gain_low=low, gain_high=high)


def partly(gain: float, part: float) -> float:
    """Return the gain of saving a part of what a gain saves in all."""
    return 1 / (1 - part * (1 - 1 / gain))


def middle_of(advice: Advice) -> float:
    """Return the middle of its gain; infinite where unknown."""
    if advice.gain_low is None or advice.gain_high is None:
        return math.inf
    return math.sqrt(min(advice.gain_low, MAX_GAIN) * min(advice.gain_high, MAX_GAIN))


def _may_lose(advice: Advice) -> bool:
    """Return whether a step may become longer by it, as shown: such advice comes last."""
    return advice.gain_low is not None and round(advice.gain_low, 2) < 1


def _merit(advice: Advice) -> float:
    """Return the logarithm of the middle gain, weighted by kind and divided by effort."""
    weight = WEIGHTS.get(advice.kind, 1.0) / EFFORT.get(advice.effort, 1.0)
    return weight * math.log(middle_of(advice))


# What treats each limit itself, before what merely helps.
_ASIDE = (COMPILATION, CHECKPOINT, COLLECTION)  # what hosts do besides training
_FIRST = {
    HOST: ("cores", "launch-one", "python", *_ASIDE, "allocator", "launch", "batch", "optimizer"),
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
    **{kind: (kind,) for kind in _ASIDE},
}


def _slow_parts(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Find and end what slows down a rank that a finding names."""
    for finding in facts.findings:
        if finding.class_ == load_model.CLASS and best_of(facts, [EVEN_SEQUENCES]) is not None:
            continue
        if finding.class_ == PAUSES or finding.of_job:  # the few replayed steps do not show these
            yield from remedies_of([finding])
            continue
        if finding.component_kind != "rank" or not finding.ranks or finding.of_numbers:
            continue
        edits = [f"heal:rank={rank}" for rank in finding.ranks]
        try:
            prediction = facts.predict(*edits)
        except DproError:
            continue
        names = ", ".join(map(str, finding.ranks))
        find = _to_be_found(f"rank {names}", finding)
        yield Advice(
            "heal",
            f"{finding.remedy} (rank {names}: {finding.cause or class_in_words(finding.class_)})"
            if finding.remedy
            else find,
            *interval_of(prediction),
            _effort_of(finding),
            "its peers do the same work",
            f"dpro whatif RUN --edit heal:rank={finding.ranks[0]}",
            edits[0] if len(edits) == 1 else "",
        )


def correct_numbers(findings: Sequence[Finding]) -> list[Advice]:
    """Return what to do about bad losses; that shortens no step."""
    bad = [finding for finding in findings if finding.of_numbers]
    return [Advice("correct", finding.remedy, None, None, "") for finding in bad[:1]]


def remedies_of(findings: Sequence[Finding]) -> Iterator[Advice]:
    """Yield the remedies of findings, or what to look for, with the gain of the mean step without each."""
    for finding in findings:
        gain = 1 / (1 - min(finding.severity, 1 - 1 / MAX_GAIN))
        if gain < WORTH or (finding.class_, finding.component_id) == (PAUSES, START):
            continue  # a start is over once it was recorded
        is_of_data = finding.class_ == load_model.CLASS
        if finding.remedy:
            shown = finding.evidence and not is_of_data  # FAULT names the batches
            do = f"{finding.remedy} ({finding.evidence[0]})" if shown else finding.remedy
        elif finding.component_kind == "rank":
            do = _to_be_found(finding.component, finding)
        else:
            continue
        kind = "balance-input" if is_of_data else "heal"
        yield Advice(
            kind, do, partly(gain, 0.5), gain, _effort_of(finding), "of the mean step, with its pauses"
        )


def _effort_of(finding: Finding) -> str:
    """Return `no code` if a finding's remedy concerns the machine of a rank."""
    of_machine = finding.remedy and finding.component_kind in ("rank", "host") and finding.class_ != PAUSES
    return "no code" if of_machine else "new code"


def _to_be_found(part: str, finding: Finding) -> str:
    """Return what to do about a part that is slow for a reason that the finding does not know."""
    where = f", in {finding.place.in_words}" if finding.place else ""
    return f"find what makes {part} slower than its peers{where}, and remove it"


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


# Changes advised for their gain alone: the edit, the kind of advice, and what to do.
_EDITS: Sequence[tuple[str, str, str]] = (
    ("optimizer:impl=fused", "optimizer", "a fused optimizer (fused=True)"),
    (EVEN_SEQUENCES, "balance-input", "spread long and short samples evenly over the ranks"),
)


def _predicted(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Advise edits that take a line or a setting, if they certainly gain, or treat the limit."""
    for text, kind, do in _EDITS:
        prediction = best_of(facts, [text])
        if prediction is not None and (prediction.effect == "faster" or kind in _FIRST.get(limit, ())):
            yield by_edit(kind, do, prediction)
    prediction = best_of(facts, ["compress:to=bf16"])
    if prediction is not None and (prediction.effect == "faster" or "compression" in _FIRST.get(limit, ())):
        do, effort = reducing_in_bf16(facts.analysis)
        yield replace(by_edit("compression", do, prediction), effort=effort)
    prediction = best_of(facts, facts.candidates("bucket"))
    if prediction is not None and prediction.effect == "faster":
        (bucket,) = prediction.edits
        yield by_edit("buckets", f"{bucket.describe()}: {bucket.how()}", prediction)


def reducing_in_bf16(analysis: Analysis) -> tuple[str, str]:
    """Return how to reduce gradients in bf16 with what reduces them in the job, and the effort.

    DDP shows itself by its ranges, or by its buckets.
    """
    buckets = analysis.run.table(BUCKETS, ["source"])["source"]
    framework = framework_of(analysis.run)
    if framework:
        return f"reduce gradients in bf16: {half_precision_setting(framework, 'bf16')}", EFFORTS["line"]
    if buckets.str.starts_with("DDP").any() or analysis.spans["name"].str.contains(REDUCER).any():
        return "reduce gradients in bf16 (a communication hook of DDP)", EFFORTS["line"]
    return "reduce gradients in bf16, in the code that reduces them", EFFORTS["code"]


def interval_of(prediction: Prediction) -> tuple[float, float]:
    """Return the speed-up after edits: lowest and highest, both finite."""
    low, high = (
        min(prediction.speedup_at(gain_ns), NOTHING_LEFT)
        for gain_ns in (prediction.gain_low_ns, prediction.gain_high_ns)
    )
    return low, high


def _crowded_hosts(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Give ranks that wait for a core fewer threads, or more cores.

    If other processes take the cores, fewer threads may leave these more of them, and gain nothing.
    """
    for finding in facts.findings:
        if finding.cause == CROWDED and finding.cost_ns > 0:
            left_ns = max(facts.step_ns - finding.cost_ns, 1.0)
            gain = max(facts.step_ns / left_ns, 1.0)
            shared = finding.component_id in facts.analysis.shared_hosts
            wait = (
                f"ranks on {finding.component_id} wait {format_duration(finding.cost_ns)} a step for a core"
            )
            yield Advice(
                "cores",
                f"{finding.remedy}: {wait}",
                1.0 if shared else partly(gain, 0.5),
                gain,
                "a setting",
                "" if shared else "no other process takes the cores",
            )


def _hosts(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Give hosts their cores, or shorten what they do for long before one launch."""
    if limit != HOST:  # else a free host only bounds the gain of something else
        return
    host = facts.gains_by_limit().get(HOST, 1.0)
    if facts.still is not None:
        gain = facts.typical_gain_of(facts.job.with_change(facts.still.ended))
        yield Advice(
            "cores",
            "give each rank CPU cores of its own (more cores, fewer threads, pinned)",
            partly(gain, 0.75),
            max(gain, host),
            "a setting",
            "calls then take as long as they usually do",
        )
    launches, slow = facts.launches, facts.slow_launches
    if slow is None:
        return
    before = _work_by_name(facts, partial(host_work_before_slow_launch, slow.kernel))
    most = min(1 / (1 - min(slow.per_step * slow.took_ns / facts.step_ns, 0.95)), host)
    copies_input = re.search(INTO_DEVICE, slow.kernel)
    way = "prepare the input beside the step: " if copies_input else "shorten "
    yield Advice(
        "input" if copies_input else "launch-one",
        f"{way}what the host does for {format_duration(slow.took_ns)} before {slow.in_words}"
        f"{place_of(launches.filter(pl.col('launched') == slow.kernel), facts.spans)}"
        f"{_longest_names(before, facts.rank_steps)}",
        partly(most, 0.5),
        most,
        "new code",
        "launching it can cost what other launches cost",
        _with_stacks(facts),
    )


def _with_stacks(facts: JobFacts) -> str:
    return f"record with {how_to_record(STACKS, facts.analysis.run)}"


def _outside_operators(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Shorten what ranks that compute on their hosts do outside operators."""
    if limit != HOST or not facts.computes_on_hosts:
        return
    gain = facts.gains_by_limit().get(HOST, 1.0)
    outside = _longest_names(_work_by_name(facts, outside_operators), facts.rank_steps)
    do = f"shorten what ranks do outside operators{outside}"
    yield Advice("python", do, partly(gain, 0.5), gain, "new code", check=_with_stacks(facts))


def _launches(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Reduce the host's work per launch, or give the GPU more work for each.

    Yields nothing if the host mostly does something else for long, which is then to be shortened, or if
    launches last as long as their kernels, which hides their cost.
    """
    launches = facts.launches
    if facts.launches_block or (facts.slow_launches is not None and facts.still is None):
        return
    by_graph = launches.filter(pl.col("name").str.contains("(?i)graphlaunch"))
    if launches.is_empty() or (by_graph.height and facts.kernels["count"].sum() > 4 * launches.height):
        return
    captured = best_of(facts, ["cuda-graph"])
    surely = captured is not None and (captured.effect == "faster" or limit in (HOST, SYNCHRONISATION))
    # Else, what CUDA graphs may gain is another thing than launching, if free launches gain next to nothing.
    if captured is not None and (surely or best_of(facts, ["no-launch"]) is not None):
        count = launches.height / facts.rank_steps
        fused = " or a fused optimizer" if kind_of_job(facts.job.graph).trains is not False else ""
        yield by_edit(
            "launch",
            f'reduce launch overhead with CUDA graphs (torch.compile(mode="reduce-overhead")){fused}: '
            f"{count:,.0f} launches a step and rank{place_of(launches, facts.spans)}",
            captured,
            "shapes are static, and nothing in the captured part waits for the GPU",
        )
    larger = best_of(facts, LARGER) if limit == HOST and facts.computing < MOSTLY_IDLE else None
    if larger is not None:
        (batch,) = larger.edits
        yield by_edit(
            "batch",
            f"give each step more work ({batch.describe()}): GPUs compute {facts.computing:.0%} of it",
            larger,
        )


def _blocking(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Let launches return before their kernels end."""
    if not facts.launches_block:
        return
    gain = facts.typical_gain_of(facts.job.with_change(PromptLaunches()))
    do = "unset CUDA_LAUNCH_BLOCKING, and record again: each launch returns only once its kernel has ended"
    yield Advice("sync", do, partly(gain, 0.5), gain, "a setting", "no code needs launches that block")


def _input(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Have the input ready before the step needs it."""
    gain = facts.gains_by_limit().get(INPUT, 1.0)
    if gain < 1.1:
        return
    crowded = any(finding.cause == CROWDED for finding in facts.findings)
    prepared = _work_by_name(facts, before_input)
    longest_name = str(prepared.sort("took_ns")["name"].last() or "")
    if facts.first_call and longest_name == facts.first_call[0]:
        return  # later steps do not repeat a first call
    if re.search(_OF_MODULES, longest_name):
        return  # the model itself works before its first launch
    or_on_gpu = "" if facts.computes_on_hosts else " or on the GPU"
    in_workers = prepared["name"].str.contains("_MultiProcessingDataLoaderIter").any()
    if crowded:
        how = f"prepare less input per sample{or_on_gpu}"
    elif in_workers:
        how = "more DataLoader workers (num_workers), or less work per sample"
    else:
        how = f"prepare the input beside the step{or_on_gpu}"
    longest = _longest_names(prepared.filter(~pl.col("name").str.contains(_OF_MODULES)), facts.rank_steps)
    loading = None if crowded else best_of(facts, facts.candidates("workers"))
    is_hidden = _hides_input(facts, gain)
    if loading is not None:
        or_prepare = "" if facts.computes_on_hosts else ", or prepare it on the GPU"
        do = f"have {loading.what()} (num_workers) load the input{or_prepare}{longest}"
        advice = by_edit("input", do, loading)
        yield replace(advice, gain_low=1.0) if is_hidden else advice
        return
    yield Advice(
        "input",
        f"{how}{longest}",
        1.0 if is_hidden else partly(gain, 0.5),
        gain,
        "a setting" if in_workers and not crowded else "a line of code",
        "preparing it can be made cheaper"
        if crowded
        else "there are free cores for it, and the source can keep up",
    )


_OF_MODULES = r"\): (_call_impl|_wrapped_call_impl|forward)$|^nn\.Module"  # the model's calls, in stacks


def _hides_input(facts: JobFacts, gain: float) -> bool:
    """Return whether devices may hide the input of a single step: they work longer behind the last launch.

    In the next step they still work off this one while the input is loaded, unless the host waits for them.
    """
    if facts.usual.height > 1 or facts.launches.is_empty():
        return False
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    works = facts.analysis.spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
    lead_ns = works.select(end_ns.max()).item() - facts.launches.select(end_ns.max()).item()
    return bool(lead_ns >= (1 - 1 / gain) * facts.step_ns)


_RANGES = {NO_SPAN: "code outside any recorded range", "dpro::backward": "the backward pass"}  # in words


def _longest_names(work: pl.DataFrame, rank_steps: int) -> str:
    """Return the two names that take longest in some work of the host, per step and rank.

    Args:
        work: `name` and `took_ns`, of all steps and ranks.
    """
    longest = work.filter(pl.col("took_ns") >= SHOWN * pl.col("took_ns").max()).sort(
        "took_ns", descending=True
    )
    shown = ", ".join(
        f"{_RANGES.get(name) or CodeLocation.of(name).in_words} takes {format_duration(took_ns / rank_steps)}"
        for name, took_ns in longest.select("name", "took_ns").head(2).iter_rows()
    )
    return f": {shown}" if shown else ""


def _work_by_name(facts: JobFacts, work_of: Callable[[Graph], Bools]) -> pl.DataFrame:
    """Return some work of hosts in usual steps, without that of the recorder: `name`, `took_ns`.

    Args:
        work_of: returns [N] a mask of a graph's nodes that count; must be picklable by name.
    """
    steps = facts.usual["step"].to_list()
    work = pl.concat(facts.job.map_ranks(partial(_named, work_of, steps)))
    of_job = work.filter(~pl.col("name").str.contains(RECORDER_FRAMES))
    return of_job.group_by("name").agg(pl.col("took_ns").sum())


def _named(work_of: Callable[[Graph], Bools], steps: Sequence[int], graph: Graph) -> pl.DataFrame:
    nodes = graph.nodes
    work = np.flatnonzero(work_of(graph) & (nodes.duration > 0) & np.isin(nodes.step, steps))
    names = pl.Series("name", graph.names, dtype=pl.String).gather(nodes.name[work])
    return pl.DataFrame({"name": names, "took_ns": nodes.duration[work]})


# Work that no update needs: kind, counter of the time that each step of a rank spent on it, remedy.
_BESIDE: Sequence[tuple[str, str, str, str]] = (
    (COMPILATION, "compile_ns", "compile code once, not in steps", pauses.DO[pauses.COMPILATION]),
    (CHECKPOINT, "checkpoint_ns", "do not wait for checkpoints in steps", pauses.DO[pauses.CHECKPOINT]),
    (COLLECTION, "gc_ns", "collect garbage less often", pauses.DO[pauses.COLLECTION]),
)


def _extra_work(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """End what hosts do in steps besides training, by replay, and by counters of all steps but pauses.

    A host that runs ahead of its GPU may hide it: there, the replay shows its cost, if it knows.
    """
    series = step_series(facts.analysis.steps)
    paused = [] if series is None else series.steps[series.paused].tolist()
    counts = host_facts(facts.analysis.steps, facts.analysis.counters)
    counts = counts.filter(~pl.col("step").is_in(paused))
    replayed = facts.gains_by_limit()
    for kind, column, do, how in _BESIDE:
        spent_ns = pl.col(column).fill_null(0.0)
        share = spent_ns.sum() / pl.col("duration_ns").sum()
        ranks = counts.group_by("rank").agg(share=share, took_ns=spent_ns.mean())
        shares = ranks["share"].to_numpy().clip(0.0, 1 - 1 / MAX_GAIN)
        gains = [replayed[kind]] if kind in replayed else [] if facts.kernels.is_empty() else [1.0]
        if shares.size and (facts.kernels.is_empty() or kind not in replayed):
            gains += [1 / (1 - float(shares.mean())), 1 / (1 - float(shares.max()))]
        if max(gains, default=1.0) < WORTH:
            continue
        took_ns = max([*ranks["took_ns"], 0.0]) or (1 - 1 / gains[0]) * facts.step_ns
        compiling = facts.spans.filter((kind == COMPILATION) & pl.col("name").str.contains(COMPILER))
        yield Advice(
            kind,
            f"{do} ({how}): {format_duration(took_ns)} a step on average{place_of(compiling, facts.spans)}",
            min(gains),
            max(gains),
            "a line of code",
            "ranks that do not do it wait for those that do",
        )


def _fewer_collectives(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Communicate once per update what is sent several times, or in several pieces."""
    again = best_of(facts, ["reduce-last"])
    if again is not None:
        graph = facts.job.graph
        vain = np.flatnonzero(redundant_reductions(graph) & (graph.nodes.kind == NodeKind.TRANSFER))
        do = "reduce gradients in the last backward pass of an update only (DDP: no_sync; FSDP2: "
        do += f"set_requires_gradient_sync): {counted(_per_step(graph, vain), 'reduction')} a step "
        yield by_edit("reduce-last", f"{do}are repeated by a later pass", again)
    joined = best_of(facts, ["coalesce"])
    if joined is not None and (joined.effect == "faster" or limit == COMMUNICATION):
        yield by_edit("coalesce", _series_in_words(facts), joined)


def _objects(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Exchange tensors instead of Python objects, which each step pickles and unpickles."""
    collectives = facts.analysis.collectives.filter(pl.col("window") >= 0)
    if not (collectives["dtype"] == BYTES).any():
        return
    exchanges = exchanges_of_objects(collectives, facts.spans)
    if exchanges.height < OFTEN * facts.rank_steps:
        return
    # The last rank to come waits for no other: its time is the least that an exchange takes.
    of_ranks = exchanges.group_by("rank").agg(pl.col("took_ns").sum())["took_ns"]
    took_ns = float(of_ranks.min()) / facts.rank_steps * of_ranks.len()  # type: ignore[arg-type]
    least = 1 / (1 - min(took_ns / facts.step_ns, 1 - 1 / MAX_GAIN))
    sent = format_bytes(float(exchanges["bytes"].sum()) / facts.rank_steps)
    yield Advice(
        "python",
        f"exchange tensors, not Python objects, or do it less often: {exchanges['op'].mode().sort()[0]} of "
        f"{sent} of pickled objects a step and rank takes {format_duration(took_ns)} or more, beside what "
        "makes and reads them",
        least,
        max(least, facts.gains_by_limit().get(HOST, 1.0)),
        "new code",
        "at most, all host work outside operators makes or reads the objects",
    )


def _series_in_words(facts: JobFacts) -> str:
    """Return which collectives are called in series, and where."""
    graph = facts.job.graph
    nodes, series = graph.nodes, series_of(graph)
    ops = pl.Series([graph.messages[message].op for message in nodes.message[series["transfer"]]])
    op = str(ops.mode().sort()[0])
    of_op = series.filter(ops == op)
    count = _per_step(graph, np.concatenate([of_op["transfer"], of_op["last"].unique()]))
    called = of_op.select(pl.col("rank").cast(facts.spans.schema["rank"]), span_id=nodes.span[of_op["call"]])
    calls = facts.spans.join(called, on=["rank", "span_id"], how="semi")
    return (
        f"one {op} for all (torch.cat what they send; of objects, one list): {count:,} of "
        f"{format_bytes(float(np.median(of_op['bytes'])))} a step in a row, each waited for"
        f"{place_of(calls, facts.spans)}"
    )


def _per_step(graph: Graph, transfers: Ints) -> int:
    """Return how many of some transfers are in a step of a rank that has any."""
    nodes = graph.nodes
    steps = np.stack([nodes.rank[transfers], nodes.window[transfers], nodes.step[transfers]])
    return int(np.rint(transfers.size / max(np.unique(steps, axis=1).shape[1], 1)))


def _matmuls(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Multiply in FP32 rather than FP64, and on tensor cores rather than in FP32."""
    families = facts.kernels.filter(pl.col("family").is_in(["gemm", "convolution", "attention"]))
    matmuls = families["name"].to_list()
    doubled = [name for name in matmuls if re.search(r"(?i)(?<![a-z])dgemm|d884|_f64|<double|double>", name)]
    if facts.share_of(doubled) >= SURE_TO_SHOW:
        may_have_fp64 = not facts.gpu or re.search(HAS_FP64, facts.gpu)
        factors = FEW_BITS if may_have_fp64 else FEW_BITS_WITHOUT_FP64
        low, high = (facts.gain_of_faster(dict.fromkeys(doubled, 1 / factor)) for factor in factors)
        share = facts.share_of(doubled)
        do = f"matmuls in FP32, not FP64 ({short_kernel(doubled[0])}): {share:.0%} of compute"
        yield Advice("amp", do, low, high, "a line of code", "the job needs no more than 24 bits")
    names = [name for name in matmuls if without_tensor_cores(name)]
    on_tensor_cores = [name for name in matmuls if name not in names and stored_as(name) == "tf32"]
    times = _times_of_tensor_cores(facts.gpu, [*names, *on_tensor_cores])
    if times < TENSOR_CORES[0]:
        return
    computing = facts.computing_kernels.select("name", "family").iter_rows()
    floats = [name for name, family in computing if _is_halved(name, family, of_compiled=bool(names))]
    least, most = (min(factor, part * times) for factor, part in zip(TENSOR_CORES, (0.75, 1.0)))
    autocast = dict.fromkeys([*on_tensor_cores, *floats], 0.5) | dict.fromkeys(names, 1 / most)
    if facts.share_of(names) >= SURE_TO_SHOW:
        gpu = GPUS.get(facts.gpu)
        has_tf32 = gpu is None or gpu.tflops["tf32"] > gpu.tflops["fp32"]
        how = 'torch.set_float32_matmul_precision("high"), or autocast' if has_tf32 else "autocast"
        do = f"matmuls on tensor cores ({how}): {short_kernel(names[0])} and others are FP32, "
        do += f"{facts.share_of(names):.0%} of compute"
        at_least = dict.fromkeys(names, 1 / least)
    elif facts.share_of(on_tensor_cores) >= SURE_TO_SHOW:
        do = f"autocast to 16 bits: {short_kernel(on_tensor_cores[0])} and others are TF32, other kernels "
        do += f"FP32, together {facts.share_of([*on_tensor_cores, *floats]):.0%} of compute"
        at_least = dict.fromkeys(floats, CASTING)
    else:
        return
    low, high = (facts.gain_of_faster(factors) for factors in (at_least, autocast))
    assumes = "the model works as well with fewer bits; at most, other kernels move half the bytes, too"
    yield Advice("amp", do, low, high, "a line of code", assumes)


def _quantised(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Multiply in 8 bits rather than 16, where no gradient needs more."""
    if limit != COMPUTE or kind_of_job(facts.job.graph).trains is not False:
        return
    families = facts.kernels.filter(pl.col("family").is_in(["gemm", "convolution"]))
    names = [name for name in families["name"] if stored_as(name) in ("fp16", "bf16")]
    if facts.share_of(names) < MAINLY:
        return
    low, high = (facts.gain_of_faster(dict.fromkeys(names, 1 / factor)) for factor in EIGHT_BITS)
    do = f"weights and activations in 8 bits (INT8, FP8): {short_kernel(names[0])} and others "
    do += f"multiply in 16, {facts.share_of(names):.0%} of compute"
    assumes = "the model, calibrated for that, works as well; the GPU multiplies in 8 bits"
    yield Advice("amp", do, low, high, "new code", assumes)


def _is_halved(kernel: str, family: str, of_compiled: bool) -> bool:
    """Return whether a kernel moves half the bytes in 16 bits, as autocast runs it.

    Args:
        of_compiled: whether kernels made by torch.compile count, whose names do not show their type.
    """
    if kernel.startswith(COMPILED):
        return of_compiled and not re.search(r"16|half", kernel)
    is_moved = family in IN_MEMORY and stored_as(kernel) == "fp32"
    return is_moved and not re.search(KEPT_IN_FP32, kernel)


def without_tensor_cores(kernel: str) -> bool:
    """Return whether the name of a matmul, convolution or attention says that it multiplies in FP32."""
    fp32 = r"(?i)fmha\w*_f32|sgemm|scudnn|_f32f32_f32f32|simt|(engine|convolve\w*|winograd\w*)<float"
    return bool(re.search(fp32, kernel)) and not re.search(
        r"(?i)tensorop|tf32|s1688|s884|s16816|hmma|h884|bf16|half", kernel
    )


def _times_of_tensor_cores(gpu: str, names: Sequence[str]) -> float:
    """Return a GPU's best matmul rate over its FP32 rate; infinite if unknown, 1 without tensor cores."""
    if gpu in GPUS and GPUS[gpu].tflops:
        peaks = GPUS[gpu].tflops
        return max(peaks.values()) / peaks["fp32"] if "fp32" in peaks else math.inf
    has = gpu or any(re.search(r"volta|turing|ampere|sm[789]\d|sm1\d\d", name) for name in names)
    return math.inf if has else 1.0


def _attention(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Fuse attention, or use the version for the GPU at hand."""
    computing = facts.computing_kernels
    by_shapes = parts_on_scores(facts.spans, facts.analysis.steps)
    unfused = by_shapes or dict.fromkeys(_unfused_attention(facts), 1.0)
    share = sum(part * facts.share_of([name]) for name, part in unfused.items())
    if share >= SURE_TO_SHOW:
        low, high = (
            facts.gain_of_faster({name: 1 - part * (1 - factor) for name, part in unfused.items()})
            for factor in FUSED_ATTENTION
        )
        named = f"{short_kernel(next(iter(unfused)))} and {'others on them' if by_shapes else 'its matmuls'}"
        yield Advice(
            "attention",
            f"scaled_dot_product_attention: scores are written to memory ({named}, {share:.0%} of compute)",
            low,
            high,
            "a line of code",
            _ROUGH,
        )
    for version, kernels, runs_newer in _VERSIONS:
        older = [name for name in computing["name"] if re.search(kernels, name) and "sm90" not in name]
        if facts.share_of(older) < SURE_TO_SHOW or not runs_newer(facts):
            continue
        low, high = (facts.gain_of_faster(dict.fromkeys(older, factor)) for factor in NEWER_ATTENTION)
        yield Advice(
            "attention",
            f"FlashAttention {version + 1}: {short_kernel(older[0])} is FlashAttention {version}, "
            f"{facts.share_of(older):.0%} of compute",
            low,
            high,
            "a line of code",
            _ROUGH,
        )


def _unfused_attention(facts: JobFacts) -> list[str]:
    """Return kernels of unfused attention, a softmax or an exp first; empty without any.

    These are each softmax, and what mostly runs from the product before one to the product after it: both
    products, scaling, masks. A softmax may also be written out, with a maximum, an exp and a sum.
    """
    families = facts.computing_kernels.select("name", "family")
    of_softmax = pl.col("name").str.contains(_SOFTMAX) & ~pl.col("name").str.contains(_OF_LOSS)
    has_log = pl.col("name").str.contains(_LOG).any()
    is_product, lane = pl.col("family") == "gemm", ["rank", "stream"]
    kernels = (
        facts.spans.filter(pl.col("kind") == "kernel")
        .join(families, on="name")
        .sort(*lane, "start_ns")
        .with_columns(stretch=is_product.cum_sum().over(lane))
    )
    written = pl.all_horizontal(pl.col("name").str.contains(part).any() for part in _WRITTEN_OUT) & ~has_log
    between = (~is_product).sum()
    is_last = pl.col("stretch").shift(-1).over(lane).is_null()
    stretches = (
        kernels.group_by(*lane, "stretch")
        .agg(attends=(of_softmax.any() & (between <= FUSED_WITH)) | (written & (between <= WRITTEN_WITH)))
        .sort(*lane, "stretch")
        .with_columns(attends=pl.col("attends") & (pl.col("stretch") > 0) & ~is_last)
        .with_columns(ends=pl.col("attends").shift(1).over(lane).fill_null(False))
    )
    inside = pl.col("attends") | (pl.col("ends") & is_product)
    took_ns = pl.col("duration_ns")
    parts = (
        kernels.join(stretches, on=[*lane, "stretch"])
        .group_by("name")
        .agg(part=took_ns.filter(inside).sum() / took_ns.sum(), is_softmax=of_softmax.any())
    )
    mostly = parts.filter((pl.col("part") >= NEARLY_ALL) | "is_softmax")
    is_exp = pl.col("name").str.contains(_WRITTEN_OUT[0])
    return mostly.sort("is_softmax", is_exp, "name", descending=[True, True, False])["name"].to_list()


def _is_hopper(facts: JobFacts) -> bool:
    if facts.gpu:
        return bool(re.search(r"H100|H200|GH200|H800|H20", facts.gpu))
    return bool(facts.kernels["name"].str.contains(r"sm90|nvjet").any())


def _is_ampere_or_later(facts: JobFacts) -> bool:
    if facts.gpu:
        return not re.search(BEFORE_AMPERE, facts.gpu)
    return bool(facts.kernels["name"].str.contains(r"ampere|sm[89]\d").any())


# FlashAttention's versions before the latest: their kernels, and whether a GPU runs the next one.
_VERSIONS: Sequence[tuple[int, str, Callable[[JobFacts], bool]]] = (
    (1, r"fmha_(fwd|bwd)\w*loop", _is_ampere_or_later),
    (2, r"flash_(fwd|bwd)\w*kernel", _is_hopper),
)


def _pointwise(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Fuse pointwise kernels, on GPUs for which torch.compile makes code."""
    computing = facts.kernels.filter(pl.col("family").is_in(["elementwise", "memory", "normalisation"]))
    names = computing["name"].to_list()
    share = facts.share_of(names)
    count = int(computing["count"].sum()) / facts.rank_steps
    is_old = any(re.search(BEFORE_VOLTA, gpu) for gpu in facts.analysis.run.manifest.gpus)
    if share < SURE_TO_SHOW or count < 10 or is_old:
        return
    fused = best_of(facts, ["compile"])
    if fused is not None:
        yield by_edit(
            "fuse",
            f"torch.compile: {count:,.0f} pointwise and copying kernels a step and rank, {share:.0%} of "
            "compute",
            fused,
        )


# Kernels of libraries, which a job can choose, but not change.
_OF_A_LIBRARY = re.compile(
    r"(?i)\bat::|at_cuda_detail|cutlass|cublas|cudnn|\bcub::|thrust::|nvjet|xmma|gemv(2|N|NSP)|split_?k"
    r"|^(maxwell|pascal|volta|turing|ampere|hopper|sm\d+)_|flash_(fwd|bwd)|\bflash::|fmha|nccl|rccl"
    r"|Cijk_|miopen|convertTensor_kernel|n[ch]?hwTo|magma|fbgemm|transformer_engine|cufft|regular_fft"
)


def _dominant_kernel(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Where compute limits, a faster kernel in place of the one that takes most, or for convolutions."""
    if limit != COMPUTE or facts.computing_kernels.is_empty():
        return
    of_short = facts.computing_kernels.with_columns(short=pl.col("name").replace_strict(facts.short_names))
    totals = of_short.group_by("short").agg("name", pl.col("total_ns").sum())
    short, names, _ = totals.sort("total_ns", "short", descending=[True, False]).row(0)
    families = facts.computing_kernels.group_by("family").agg("name", pl.col("total_ns").sum())
    family, of_family, _ = families.sort("total_ns", "family", descending=[True, False]).row(0)
    share, is_chosen = facts.share_of(names), any(map(_OF_A_LIBRARY.search, names))
    if family == "convolution" and (is_chosen or share < DOMINANT):
        many, taken = counted(len(of_family), "kernel"), facts.share_of(of_family)
        do = "let cuDNN measure which kernels are fastest (torch.backends.cudnn.benchmark = True): "
        do += f"convolutions are {taken:.0%} of compute, in {many}"
        high = facts.gain_of_faster(dict.fromkeys(of_family, MEASURED))
        yield Advice("tune-kernel", do, 1.0, high, "a line of code", f"sizes of input are fixed; {_ROUGH}")
    elif share >= DOMINANT:
        faster = f"a faster kernel than {short} (shapes, layout, library)" if is_chosen else f"tune {short}"
        high = facts.gain_of_faster(dict.fromkeys(names, 0.5))
        yield Advice("tune-kernel", f"{faster}: {share:.0%} of compute", 1.0, high, "new code", _ROUGH)


def _rows(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Multiply several rows at a time, where products with few rows read all weights for them.

    Within what a step of products with few rows takes, they multiply more rows. At worst all other kernels
    take as many times as long; at best, none.
    """
    has_few, is_product = pl.col("name").str.contains(_FEW_ROWS), pl.col("family") == "gemm"
    few, products, others = (
        facts.computing_kernels.filter(kind)["name"].to_list()
        for kind in (has_few, has_few | is_product, ~has_few)
    )
    share = facts.share_of(products)
    trains = kind_of_job(facts.job.graph).trains
    if limit != COMPUTE or trains or facts.share_of(few) < SURE_TO_SHOW or share < MAINLY:
        return
    least, most = MORE_ROWS
    low = facts.gain_of_rows(least, others)
    do = f"larger batches: {facts.short_names[few[0]]} reads all weights for few rows; "
    do += f"products are {share:.0%} of compute"
    assumes = "gains are per sample or token, as more rows share what is read"
    yield Advice("batch", do, low, most, "a setting", assumes)


def _transfers(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Shorten or hide transfers."""
    gain = facts.gains_by_limit().get(COMMUNICATION, 1.0)
    if gain < 1.03 and limit != COMMUNICATION:
        return
    exposed = 1 - 1 / gain  # share of the step
    manifest = facts.analysis.run.manifest
    missing = len(manifest.ranks) < manifest.world_size
    kernels = facts.communication_kernels
    what = facts.short_names[kernels["name"][0]] if kernels.height else "transfers"
    if missing and limit == COMMUNICATION:
        yield Advice(
            RECORD_MORE,
            "record all ranks: without those that are missing it is not known whether the time in "
            f"{what} is waiting for late peers or slow transfers",
            None,
            None,
            "a setting",
        )
    if limit == COMMUNICATION:
        yield Advice(
            "transfer",
            f"shorten {what}: another algorithm, path or placement",
            partly(gain, 0.3),
            gain,
            "new code",
            "its transfers do not reach the bandwidth of the links",
        )
    hidden = 1 / max(1 / gain, exposed)  # other work of the step hides no more than it lasts
    yield Advice(
        "overlap",
        f"overlap {what} with compute",
        partly(hidden, 0.4),
        hidden,
        "new code",
        "there is compute that does not depend on it",
    )


def _experts(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Balance the experts of a mixture."""
    exchanged = facts.communication_kernels.filter(pl.col("name").str.contains("(?i)dispatch|combine"))
    gain = facts.gains_by_limit().get(IMBALANCE, 1.0)
    if exchanged.height and gain >= WORTH:
        yield Advice(
            "balance-experts",
            "balance the load of the experts: which rank is last differs from layer to layer",
            partly(gain, 0.7),
            1 + (gain - 1) * 2,
            "new code",
            "ranks wait in dispatch and combine for experts with more tokens",
        )


def _stages(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Even out the stages of a pipeline, or shrink its bubble."""
    if not facts.analysis.outline.of_operations:
        return
    even = best_of(facts, ["balance:over=stages"])
    if even is not None:
        do = "distribute layers evenly over the stages"
        yield by_edit("stages", do, even, "layers can be moved in small pieces")
    if facts.gains_by_limit().get(BUBBLE, 1.0) < 1.1:
        return
    schedules = facts.candidates("pipeline")
    interleaved = best_of(facts, [text for text in schedules if "interleaved" in text])
    if interleaved is not None:
        do = "interleave two chunks of layers per stage, which halves the bubble"
        yield by_edit("interleave", do, interleaved)
    more = best_of(facts, [text for text in schedules if "micro_batches=" in text])
    if more is not None:
        yield by_edit("microbatches", f"{more.what()}, which shrinks the bubble's share of the step", more)


def _waits(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Remove calls that wait for the GPU."""
    gain = facts.gains_by_limit().get(SYNCHRONISATION, 1.0)
    if gain < 1.03:
        return
    waits = pl.concat(facts.job.map_ranks(_measured_waits))
    waits = waits.select("rank", "span_id", "waited_ns", call="name")
    usual = facts.spans.join(waits, on=["rank", "span_id"]).sort("waited_ns", "span_id", descending=True)
    before_ns = pl.col("waited_ns").cum_sum() - pl.col("waited_ns")
    longest = usual.filter(before_ns < NEARLY_ALL * pl.col("waited_ns").sum())
    count = longest.height / facts.rank_steps
    if count < OFTEN:
        return
    ended = best_of(facts, ["no-sync"])
    if ended is not None:
        yield by_edit(
            "sync",
            f"remove waits for the GPU ({_waiting_in_words(longest, facts.spans)}), "
            f"{counted(max(round(count), 1), 'call')} a step"
            f"{place_of(longest, facts.spans)}",
            ended,
            "the results can be read later",
        )


def _waiting_in_words(waits: pl.DataFrame, spans: pl.DataFrame) -> str:
    """Return the two calls that wait longest, each with its operator: `cudaMemcpyAsync in aten::copy_`.

    Args:
        waits: some rows of `spans`, with `call`, the name of what waits, and `waited_ns`.
    """
    operators = spans.filter(pl.col("kind") == "cpu_op")
    around = pl.Series(innermost(operators, waits))
    names = operators["name"].gather(around.replace(-1, None))
    operator = pl.when(pl.col("name") != pl.col("call")).then("name").otherwise(names)
    named = waits.group_by("call", operator=operator).agg(pl.col("waited_ns").sum())
    longest = named.sort("waited_ns", "call", "operator", descending=[True, False, False]).head(2)
    pairs = longest.select("call", "operator").iter_rows()
    # Where it is the operator that waits, the other name is that of its call.
    ordered = (
        (other, one) if other and re.match(RUNTIME_CALL, other) else (one, other) for one, other in pairs
    )
    return " and ".join(f"{call} in {operator}" if operator else call for call, operator in ordered)


def _measured_waits(graph: Graph) -> pl.DataFrame:
    return gpu_waits(graph, graph.nodes.measured_end)


def _allocations(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Keep device memory instead of allocating it again."""
    calls = facts.spans.filter((pl.col("kind") == "runtime") & pl.col("name").str.contains(ALLOCATING))
    share = facts.typical_share(calls)  # typical, as a first step allocates what the others reuse
    if share < 0.03:
        return
    yield Advice(
        "allocator",
        "keep device memory (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, fewer sizes): cudaMalloc "
        f"and cudaFree take {share:.0%} of the step{place_of(calls, facts.spans)}",
        1.0,
        facts.gains_by_limit().get(ALLOCATOR, 1.0),
        "a setting",
    )


def _copies(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Keep on the GPU what is copied repeatedly, or copy it from pinned memory."""
    gain = facts.gains_by_limit().get(COPIES, 1.0)
    if gain < 1.05:
        return
    copies = facts.spans.filter(pl.col("kind") == "memcpy")
    totals = (
        copies.group_by("name")
        .agg(total_ns=pl.col("duration_ns").sum(), moved=pl.col("bytes").clip(lower_bound=0).sum())
        .sort("total_ns", descending=True)
    )
    if totals.is_empty():
        return
    name, total_ns, moved = totals.row(0)
    time = format_duration(total_ns / facts.rank_steps)
    moves = f"moves {format_bytes(moved / facts.rank_steps)} in" if moved else "takes"
    figures = f"{name} {moves} {time} a step and rank"
    of_loader = facts.spans["name"].str.contains("DataLoader").any()
    if "Pageable" in name and (
        of_loader or moved >= LARGE_COPY * copies.filter(pl.col("name") == name).height
    ):
        pin, effort = ("pin_memory=True", "a setting") if of_loader else ("pin_memory()", "a line of code")
        do = f"copy from pinned memory ({pin}, non_blocking=True), beside what is computed: {figures}"
        yield Advice("copies", do, partly(gain, 0.5), gain, effort, "the host has memory to pin")
        return
    yield Advice(
        "copies",
        f"keep on the GPU what is copied: {figures}",
        partly(gain, 0.6),
        gain,
        "new code",
        "memory has room for it",
    )


Source = Callable[[JobFacts, str], Iterator[Advice]]  # of advice, given the limit of the job
_SOURCES: Sequence[Source] = (
    _slow_parts,
    _predicted,
    _extra_work,
    _fewer_collectives,
    _objects,
    _crowded_hosts,
    _hosts,
    _outside_operators,
    _launches,
    _blocking,
    _input,
    _matmuls,
    _quantised,
    _attention,
    _pointwise,
    _dominant_kernel,
    _rows,
    _transfers,
    _experts,
    _stages,
    _waits,
    _allocations,
    _copies,
)
_OF_TORCH = (_matmuls, _attention, _allocations)


def _sources(facts: JobFacts) -> list[Source]:
    """Return the sources of advice, without those about PyTorch where XLA compiled the program."""
    of_xla = is_of_xla(facts.analysis.run)
    return [source for source in _SOURCES if not (of_xla and source in _OF_TORCH)]
