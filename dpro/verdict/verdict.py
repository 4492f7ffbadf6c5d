"""The verdict: the limit of a job, its cause, the part at fault, and what to do first; computed once for all.

Takes an `Analysis`; returns an `Explanation`. If the job hangs, that comes first, and no limit is searched. A
run without deep windows has no known limit, only the faults that its steps and calls show. The cause of a
limit is stated with names and numbers from the run, or omitted if the run does not show it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from typing import NamedTuple, TypeVar

import polars as pl
from msgspec import field
from msgspec.structs import replace

from dpro.account import Account, AccountedDocument, Gain, StepEntry
from dpro.analysis.analysis import Analysis
from dpro.analysis.cached import cached
from dpro.analysis.mean_step import PARTS, inputs_of_step, mfu_of
from dpro.analysis.predictions import OTHER_LOAD, predict_edits
from dpro.analysis.step_time import SIGMAS, step_time_document
from dpro.classify import OTHER
from dpro.detect.findings import START, Finding
from dpro.detect.hang.evidence import advice_in_words, verdicts_in_words
from dpro.detect.host_bound import THE_HOST
from dpro.detect.machine.oversubscribed import CAUSE as CROWDED
from dpro.detect.pauses import done_in_windows, mean_pause
from dpro.detect.regression import LONGER_SINCE
from dpro.detect.words import cost_verb, join_hangs, name_part
from dpro.documents import Document, DocumentPart, finite
from dpro.errors import DproError, Unanswerable
from dpro.replay.construction.recording_cost import SIMILAR
from dpro.replay.cost.kernels.roofline import common_model
from dpro.replay.fidelity.accuracy import (
    UNMATCHED,
    cut_in_words,
    deep_and_usual,
    taken_out_in_words,
    windows_mislead,
    without_spans,
)
from dpro.replay.phases import in_words
from dpro.replay.steps import StepSeries, kernel_totals
from dpro.replay.whatif.predict import Prediction, gain_uncertainty, measured_ns
from dpro.replay.whatif.registry import parse_edit
from dpro.replay.whatif.search import can_combine, in_order
from dpro.replay.whatif.sensitivity import HOST_MAY_WAIT
from dpro.schema import SPANS
from dpro.stages import stage
from dpro.units import NS_PER_MS, format_duration, ms
from dpro.verdict.advice import (
    MAX_GAIN,
    NOTHING_LEFT,
    RECORD_MORE,
    WORTH,
    Advice,
    interval_of,
    middle_of,
    record_code,
    record_more,
    record_steps,
)
from dpro.verdict.facts import JobFacts, facts_of
from dpro.verdict.ledger import (
    LIMIT_OF,
    LedgerRow,
    cause_of_finding,
    entries_of,
    limit_of_entries,
    shares_of_limits,
)
from dpro.verdict.limits import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    IMBALANCE,
    INPUT,
    LOADING,
)
from dpro.verdict.ranking import advise, advise_of_findings, first_of, within_limit, worth_after
from dpro.verdict.sources.parts import correct_numbers, remedies_of
from dpro.words import capitalised, counted, ranks_in_words, shortened

NAMING = ("rank", "ranks", "host", "stage")  # kinds of components whose ranks are at fault
NOTABLE = 0.2  # of GPU time: communication with a larger share is tempting
WINDOWS_ONLY = "deep windows mostly contain the overhead of recording"
NOT_RECORDED = "what devices wait for was not recorded"
EXCHANGING = r"^(c10d::|gloo:|nccl:|record_param_comms)"  # operators that call or carry out collectives
LONGEST_KERNELS = 20  # kernels that are grouped by name to find those that take most of a step
NOT_DIAGNOSED, NO_FIT = "not diagnosed", "the replay does not fit"
UNKNOWN = 0.5  # of computing time: with more in kernels of unknown kind, advice may miss what they do
UNLIKE = 1.5  # times as long: beyond this, a limit of steps in deep windows may not be that of the others
ENDED = 0.5  # share of a limit's savings from which an edit that saves it is what ends the limit
SAME_CHANGE = 0.01  # relative difference of gains up to which an advised change ends the limit
EASY = ("a setting", "a line of code")  # efforts of advice that is worth combining
SHORT_NAMES = {
    "waiting for others": "waiting",
    "communication, wait not known": "communication",
    "host bound": "host",
}


class Limit(DocumentPart, frozen=True):
    """What limits the step.

    Attributes:
        kind: host, compute, communication, imbalance, input, synchronisation, memory-copies, pipeline-bubble.
        gain: current step time over that without the limit; 1 for compute, which cannot be removed.
        gain_low, gain_high: its interval, as far as steps vary and the replay misses them; finite.
        share: share of the step lost to it, by the ledger; of compute, share in which devices compute.
        cause: what was found to be behind it, with names and numbers; empty if nothing was.
        fits: whether the replay fits; if not, `gain` is not shown.
        ranks: ranks whose healing is the gain of uneven ranks; empty where all are made equal.
    """

    kind: str
    gain: float
    share: float
    cause: str = ""
    fits: bool = True
    gain_low: float = 1.0
    gain_high: float = 1.0
    ranks: list[int] = field(default_factory=list)


class Together(DocumentPart, frozen=True):
    """Two pieces of advice that gain clearly more when both are followed.

    Attributes:
        places: numbers of both in the advice, from 1.
        edits: arguments of `whatif --edit` for the same gain, in order.
        gain_low, gain_high: current step time over the step time after both.
    """

    places: list[int]
    edits: list[str]
    gain_low: float
    gain_high: float


class Explanation(AccountedDocument, frozen=True, kw_only=True):
    """The verdict on a run.

    Attributes:
        run: as it was named.
        job: name, devices, steps and their time, on one line.
        step_ms: the mean usual step of the job as it runs, to which all gains refer; null if unknown.
        steps, left_out: number of steps in that mean, and of steps left out as unusual.
        shares: of the usual step of a rank, by part; empty if none was recorded in depth.
        limit: what limits it; null if the run does not show it.
        alternatives: current step time over that without each other thing.
        phase: phase of reinforcement learning that dominates the step, in words; empty if none does.
        fault: which ranks or parts are at fault, in words.
        faulty_ranks: ranks that findings name.
        advice: what to do, best first.
        together: which two of these gain clearly more when both are done; null if no two do.
        then: what is worth doing only once the limit is gone, and its gain then; null if nothing is.
        tempting: what looks like a remedy but is not one, a line each.
        unsure: what limits the verdict, a line each.
    """

    run: str
    job: str
    step_ms: float | None = None
    steps: int = 0
    left_out: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    limit: Limit | None = None
    alternatives: dict[str, float] = field(default_factory=dict)
    phase: str = ""
    fault: str
    faulty_ranks: list[int]
    advice: list[Advice] = field(default_factory=list)
    together: Together | None = None
    then: Advice | None = None
    tempting: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)


class ComparedRuns(Document, frozen=True, kw_only=True):
    """What limits each of several runs.

    Attributes:
        runs: in the given order.
    """

    runs: list[Explanation]


@cached
def advised_predictions(analysis: Analysis) -> list[Prediction]:
    """Return the predictions of the edits under TRY, in its order; advice without an edit has none."""
    edits = [parse_edit(advice.edit) for advice in explain(analysis).advice if advice.edit]
    return [predict_edits(analysis, [edit]) for edit in edits]


@cached
def explain(analysis: Analysis) -> Explanation:
    """Return the verdict on any run."""
    if analysis.verdict_on_hangs is not None or not analysis.run.num_rows(SPANS):
        return _by_calls(analysis)
    try:
        with facts_of(analysis) as facts:
            return _by_replay(facts)
    except DproError as error:
        verdict = _by_calls(analysis)
        why, do = _why_and_what_to_do(analysis, error)
        shown = any(advice.do == do for advice in verdict.advice)
        reasons = dict.fromkeys([why if shown or not do else f"{why}; {do}", *verdict.unsure])
        return replace(verdict, unsure=list(reasons))


def _why_and_what_to_do(analysis: Analysis, error: DproError) -> tuple[str, str]:
    """Return an error's message without the run, which is named above it, and what to do if it says so."""
    what, do = (error.what, error.do) if isinstance(error, Unanswerable) else (str(error), "")
    return what.removeprefix(f"{analysis.run.label}: "), do


def _by_replay(facts: JobFacts) -> Explanation:
    analysis = facts.analysis
    with stage("Looking for limits"):
        entries = entries_of(facts)
    untold = _why_not_representative(analysis)
    limit = None if untold else limit_of(facts, entries)
    with stage("Trying changes"):
        ranked = [*record_more(facts), *(advise(facts, limit.kind) if limit else ())]
        then = _advice_after(facts, limit, ranked)
    if untold:
        ranked = [Advice(RECORD_MORE, untold.do, None, None, "a setting"), *remedies_of(facts.findings)]
    elif not limit and not ranked:
        do = "record launches, the host, and all ranks with their steps, to see what devices wait for"
        ranked = [*advise_of_findings(facts), Advice(RECORD_MORE, do, None, None, "a setting")]
    usual = facts.usual.height
    ranked = [*correct_numbers(facts.findings), *ranked]
    advice = first_of(ranked, record_steps(facts)) or record_code(facts)
    limit = _as_advised(facts, limit, advice) if limit else None
    if limit is not None and limit.fits:
        advice = within_limit(advice, limit.kind, limit.gain_high)
    together = best_together(facts, advice) if analysis.trust.answerable else None
    both = deep_and_usual(analysis.steps)
    if analysis.trust.answerable:
        others = both[1] if both else None
        steps = steps_in_words(analysis.steps, facts.step_ns, others, analysis.trust.pace != 1)
    else:  # a replay that does not fit shows no step
        recorded = format_duration(measured_ns(analysis.trust, facts.ends))
        steps = f"{recorded} a step as recorded ({counted(facts.ends.height, 'step')})"
    faults = [finding for finding in facts.findings if finding.component_id != THE_HOST]
    blind = analysis.run.manifest.num_cut > 0 or facts.lacks_device_work
    divided = analysis.trust.answerable and not (blind or untold)
    hosts = "".join(map(_waiting_for_hosts, (one for one in facts.findings if one not in faults)))
    apart = NOT_DIAGNOSED if UNMATCHED in analysis.trust.reasons else ""
    fits = (hosts or apart) if analysis.trust.answerable else f"{NOT_DIAGNOSED}: {NO_FIT}"
    why_not = NOT_DIAGNOSED if blind else fits or _doubtful_fault(facts.doubtful_findings)
    fault = _after_end(analysis, fault_in_words(faults, why_not, analysis.trust.answerable))
    account = _account(facts, entries if divided else (), limit, fault, advice)
    return Explanation(
        run=analysis.run.label,
        job=_job(analysis, steps),
        step_ms=account.step_ms,
        steps=account.steps,
        left_out=account.left_out,
        shares=_shares(facts) if divided else {},
        limit=limit,
        alternatives={kind: round(gain, 3) for kind, gain in facts.gains_by_limit().items()},
        phase=in_words(analysis.phases) if analysis.condensed is None else "",
        fault=fault,
        faulty_ranks=_ranks_of(facts.findings),
        advice=advice,
        together=together,
        then=then,
        tempting=_tempting(facts, limit, advice),
        unsure=[*_why_no_limit(facts, limit, untold), *_kept_busy(facts, limit), *_unsure(facts, usual)],
        account=account,
    )


def _waiting_for_hosts(finding: Finding) -> str:
    """Return that ranks wait for their hosts, by the finding that says so: at most one does."""
    several = len(finding.ranks) > 1
    parts = [one.values for one in finding.observations if "what" in one.values]
    mostly = bool(parts) and float(parts[0]["waited_ns"]) >= finding.cost_ns / 2  # type: ignore[arg-type]
    where = f", most of it in {parts[0]['what']}" if mostly else ""
    unnamed = "" if where and not several else f"no {'rank' if several else 'part'} stands out: "
    who = f"{unnamed}{'all wait for their hosts' if several else 'the rank waits for its host'}"
    return f"{who}, {_cost_of_step(finding)}{where}"


def _account(
    facts: JobFacts, entries: Sequence[LedgerRow], limit: Limit | None, fault: str, advice: Sequence[Advice]
) -> Account:
    """Return the figures that all answers about the run share.

    Args:
        entries: of its ledger; empty where the replay does not show where the step goes.
    """
    as_it_is, usual, analysis = facts.predict(), facts.usual.height, facts.analysis
    outside_ns = analysis.usual_ns if windows_mislead(analysis.steps) else None  # such steps are the job's
    inputs, _ = inputs_of_step(analysis)
    gains = {}
    for text in (advised.edit for advised in advice if advised.edit):
        done = facts.predict(text)
        low, high = (finite(done.speedup_at(gain_ns)) for gain_ns in (done.gain_low_ns, done.gain_high_ns))
        gains[text] = Gain(low, finite(done.speedup), high)
    return Account(
        step_ms=ms(outside_ns or facts.step_ns),
        step_low_ms=None if outside_ns else ms(as_it_is.low_ns),
        step_high_ms=None if outside_ns else ms(as_it_is.high_ns),
        recorded_step_ms=ms(measured_ns(analysis.trust, facts.ends)) or None,
        steps=usual,
        left_out=facts.ends.height - usual,
        samples=inputs.samples if inputs else None,
        tokens=(inputs.tokens or None) if inputs else None,
        entries=[
            StepEntry(entry.cause, list(entry.ranks), ms(entry.ns), entry.evidence) for entry in entries
        ],
        limit=limit.kind if limit else "",
        fault=fault,
        faulty_ranks=_ranks_of(facts.findings),
        gains=gains,
    )


@cached
def account_of(analysis: Analysis) -> Account | None:
    """Return the account of a run, which all commands' documents share; None if the run cannot be judged."""
    with suppress(DproError):
        return explain(analysis).account
    return None


AnyDocument = TypeVar("AnyDocument", bound=Document)


def with_account(document: AnyDocument, analysis: Analysis) -> AnyDocument:
    """Return a document about a run, with the account of that run.

    Args:
        document: of a kind that has an `account`.
    """
    return replace(document, account=account_of(analysis))


class NoLimit(NamedTuple):
    """Why a recording shows no limit, whatever its graph, and what to do."""

    why: str
    do: str


def _why_not_representative(analysis: Analysis) -> NoLimit | None:
    """Return why the recording misrepresents the job: cut traces, or windows that slow steps; else None."""
    if cut := cut_in_words(analysis.run.manifest):
        return NoLimit(cut[0], "copy the truncated traces again, or record again")
    if windows_mislead(analysis.steps):
        done, again = done_in_windows(analysis.steps, analysis.counters), _fewer_windows(analysis.steps)
        if done:
            why = f"the steps in deep windows {done}, unlike others"
            return NoLimit(why, f"{again}: {why}")
        return NoLimit(WINDOWS_ONLY, f"{again}: deep windows slow such short steps too much")
    return None


def _fewer_windows(steps: pl.DataFrame) -> str:
    """Return how to record with fewer deep windows than a run has, or with a later one where it has one."""
    in_windows, recorded = steps.filter(pl.col("window") >= 0), steps["step"].n_unique()
    windows = in_windows["window"].n_unique()
    if windows > 1:
        return f"record with fewer windows (--every {2 * recorded // windows})"
    return f"record for longer, with a later window (--skip {recorded // 2})"


def _why_no_limit(facts: JobFacts, limit: Limit | None, untold: NoLimit | None) -> list[str]:
    """Return why no limit is named, in a line; empty if one is."""
    if limit is not None:
        return []
    little = f"hardly any work of devices was recorded: {format_duration(facts.device_work_ns)} in total"
    none = "no work of devices was recorded, only what the host does"
    copies = "no kernel was recorded, only copies and fills: how busy devices were is unknown"
    some = copies if facts.lacks_kernels else little
    lacking = some if facts.device_work_ns else none
    return [untold.why if untold else lacking if facts.lacks_device_work else NOT_RECORDED]


def _kept_busy(facts: JobFacts, limit: Limit | None) -> list[str]:
    """Return a line where devices limit a job whose replay would be hardly shorter without their work."""
    if limit is None or limit.kind != COMPUTE:
        return []
    if facts.gain_of_devices < WORTH:
        return [f"{HOST_MAY_WAIT}: what faster kernels gain is not known"]
    saved = 1 - 1 / facts.gain_of_devices
    if facts.computes_on_hosts or saved >= limit.share / 2 or facts.gains_by_limit().get(HOST, 1.0) < WORTH:
        return []
    alone = "faster kernels alone gain little (dpro whatif --sensitivity)"
    return [f"the host takes nearly as long as the devices: {alone}"]


def _advice_after(facts: JobFacts, limit: Limit | None, ranked: Sequence[Advice]) -> Advice | None:
    """Return what is worth doing only once the limit is gone."""
    if limit is None or limit.kind == COMPUTE or (after := facts.after(limit.kind)) is None:
        return None
    next_limit = _limit_without_cause(after, entries_of(after))
    return worth_after(ranked, advise(after, next_limit.kind)) if next_limit else None


def _by_calls(analysis: Analysis) -> Explanation:
    """Return the verdict without a graph: what hangs, or what steps and calls show."""
    try:
        findings, unknown = analysis.verdict
        diagnosed, missing = True, list[Advice]()
    except DproError as error:
        if analysis.run.manifest.unrecorded and not analysis.run.manifest.ranks:
            raise  # no part of the job was recorded
        why, do = _why_and_what_to_do(analysis, error)
        missing = [Advice(RECORD_MORE, do, None, None, "")] if do else []
        findings, unknown, diagnosed = [], [why], False
    series = step_time_document(analysis.steps)
    total = analysis.steps["step"].n_unique()
    of = counted(total, "step") if series and series.steps < total else ""
    steps = (
        f"typical step {format_duration(series.typical_ms * NS_PER_MS)} "
        f"({f'{series.steps:,} of {of}' if of else counted(series.steps, 'step')})"
        if series
        else "no steps"
    )
    hangs = join_hangs([finding for finding in findings if finding.of_hang])
    if hangs:
        fault = verdicts_in_words(hangs[:2])
        do = advice_in_words(hangs[0], analysis.workers)
        advice = [Advice("unblock", do, None, None, "")] if do else []
    else:
        fault = fault_in_words(findings, "" if diagnosed else NOT_DIAGNOSED)
        advice = missing or first_of([*correct_numbers(findings), *remedies_of(findings)])
    step_ms, said = series.typical_ms if series else None, _after_end(analysis, fault)
    return Explanation(
        run=analysis.run.label,
        job=_job(analysis, steps),
        step_ms=step_ms,
        steps=series.steps if series else 0,
        fault=said,
        faulty_ranks=_ranks_of(findings),
        advice=advice,
        unsure=list(unknown),
        account=Account(
            step_ms=step_ms,
            steps=series.steps if series else 0,
            fault=said,
            faulty_ranks=_ranks_of(findings),
        ),
    )


def _after_end(analysis: Analysis, fault: str) -> str:
    """Return what is at fault, after how the job ended if it hangs or did not complete."""
    end = analysis.end
    return f"{end.sentence} {capitalised(fault)}" if end.comes_first else fault


def _job(analysis: Analysis, steps: str) -> str:
    devices = _devices(analysis)
    name = os.path.basename(os.path.abspath(analysis.run.label))
    mfu, _ = mfu_of(analysis)
    return "   ".join([shortened(name, 34), devices, steps, *([f"MFU {mfu.share:.1%}"] if mfu else [])])


def steps_in_words(
    steps: pl.DataFrame, step_ns: float, others: StepSeries | None, is_scaled: bool = False
) -> str:
    """Return how long a step is, how many were timed, and how many of them in deep windows.

    Args:
        steps: as from `steps_of`; empty for traces of one step.
        step_ns: the usual step in deep windows, as the job runs.
        others: the other steps; None if there are too few.
        is_scaled: whether `step_ns` is the length of the others.
    """
    took = f"usual step {format_duration(step_ns)}"
    total = max(steps["step"].n_unique(), 1)
    deep = steps.filter(pl.col("window") >= 0)["step"].n_unique()
    if others is None or deep in (0, total):
        return f"{took} ({counted(total, 'step')})"
    if is_scaled or abs(others.typical_ns / step_ns - 1) <= SIMILAR:
        added_ns, error_ns = mean_pause(others)
        if added_ns > max(SIMILAR * step_ns, SIGMAS * error_ns):
            took += f", mean with pauses {format_duration(others.mean_ns)}"
        return f"{took} ({total:,} steps, {deep} in depth)"
    outside, in_depth = counted(total - deep, "step"), f"{deep} in depth: {format_duration(step_ns)}"
    kind = "step:" if _is_skewed(others) else "typical step"
    return f"{kind} {_typical_in_words(others)} ({outside}; {in_depth})"


def _devices(analysis: Analysis) -> str:
    """Return the number of ranks, of the total if some left no record, and of GPUs, fewer if shared."""
    manifest = analysis.run.manifest
    gpu = common_model(manifest.gpus)
    if not gpu and len({*manifest.gpus}) == 1:  # a card whose figures are not known
        gpu = manifest.gpus[0].removeprefix("NVIDIA ").removeprefix("GeForce ")
    ranks = counted(len(manifest.ranks), "rank")
    if len(manifest.ranks) < manifest.world_size and not manifest.is_pretended:
        ranks = f"{len(manifest.ranks):,} of {counted(manifest.world_size, 'rank')}"
        return f"{ranks}, {gpu}" if gpu else ranks
    if not gpu:
        return ranks
    of_ranks = analysis.workers.filter(pl.col("rank").is_in(manifest.ranks))
    gpus = of_ranks.filter(pl.concat_str("gpu_uuid", "gpu_pci") != "").select("host", "gpu_uuid", "gpu_pci")
    if gpus.height == len(manifest.ranks) > gpus.n_unique() and not manifest.is_pretended:
        return f"{ranks} on {gpus.n_unique()} x {gpu}"
    return f"{len(manifest.ranks)} x {gpu}"


def _shares(facts: JobFacts) -> dict[str, float]:
    names = {part: SHORT_NAMES.get(title, title) for part, title in PARTS.items()}
    return {names[part]: round(share, 4) for part, share in facts.shares.items()}


def _ranks_of(findings: list[Finding]) -> list[int]:
    named = [finding for finding in findings if finding.of_hang or finding.component_kind in NAMING]
    return sorted({rank for finding in named for rank in finding.ranks})


def fault_in_words(findings: Sequence[Finding], why_not: str = "", fits: bool = True) -> str:
    """Return which parts are at fault, the costliest two by name.

    Args:
        why_not: what to say without findings; empty where the run could have shown some.
        fits: whether the replay fits, which costs come from; else they are marked.
    """
    if not findings:
        return f"{why_not or 'no slow rank or component found'}."
    perhaps = "" if fits else "perhaps "
    named = findings[:2]
    words = [_longer_since(one) or _costs_in_words(one, perhaps) for one in named]
    more = len(findings) - len(words)
    overlap = ["these costs overlap"] if sum(one.severity for one in named if one.cost_ns) > 1 else []
    return "; ".join([*words, *overlap, *([f"{more} more (dpro diagnose)"] if more else [])]) + "."


def _costs_in_words(finding: Finding, perhaps: str) -> str:
    """Return which part is at fault, and its cost."""
    first = next((one for one in finding.observations if one.kind == START), None)
    if finding.component_id == START and first:  # once: a mean over the recorded steps says nothing of others
        return f"{finding.cause or START}: {first.text}"
    costs = f" {cost_verb(finding)} {perhaps}{_cost_of_step(finding)}" if finding.cost_ns else ""
    return f"{name_part(finding)}{costs}"


def _longer_since(finding: Finding) -> str:
    """Return since when steps are longer, if that is the finding and nothing explains it; else empty."""
    longer = next((one for one in finding.observations if one.kind == LONGER_SINCE), None)
    if longer is None or finding.cause:
        return ""
    return f"since step {longer.values['step']} steps are {format_duration(finding.cost_ns)} longer"


def _doubtful_fault(doubtful: Sequence[Finding]) -> str:
    """Return what may be at fault where nothing is certain, in words; empty if nothing may be."""
    costly = [finding for finding in doubtful if finding.cost_ns]
    if not costly:
        return ""
    may = f"{name_part(costly[0])} may cost {_cost_of_step(costly[0])}"
    return f"none is certain; {may} (confidence {costly[0].confidence:.2f})"


def _cost_of_step(finding: Finding) -> str:
    """Return the cost of a finding, noting if it is outside the usual step."""
    cost = f"{format_duration(finding.cost_ns)} a step"
    return f"{cost} on average, all of it in pauses" if finding.costs_pauses else cost


def limit_of(facts: JobFacts, entries: Sequence[LedgerRow] | None = None) -> Limit | None:
    """Return what limits the step, with its cause; None if most was not recorded.

    Args:
        entries: of its ledger, if already computed.
    """
    limit = _limit_without_cause(facts, entries_of(facts) if entries is None else entries)
    fits = facts.analysis.trust.answerable
    if limit is None:
        return None
    low, high = _interval_of_limit(facts, limit)
    limit = replace(limit, cause=cause_of(facts, limit.kind), fits=fits, gain_low=low, gain_high=high)
    return _as_edited(facts, limit) if fits else limit


def _as_edited(facts: JobFacts, limit: Limit) -> Limit:
    """Give a limit the gain of an edit that saves most of it: one change has one gain."""
    ranks = _named_ranks(facts) if limit.kind == IMBALANCE else []
    edits = ["hide-input"] if limit.kind == INPUT else [f"heal:rank={rank}" for rank in ranks]
    least = LOADING if limit.kind == INPUT else ENDED
    with suppress(DproError):  # the run cannot answer it
        done = facts.predict(*edits) if edits else None
        if done is not None and 1 - 1 / done.speedup >= least * (1 - 1 / limit.gain):
            low, high = interval_of(done)
            return replace(limit, gain=finite(done.speedup), gain_low=low, gain_high=high, ranks=ranks)
    return limit


def _named_ranks(facts: JobFacts) -> list[int]:
    """Return the ranks of the costliest finding about ranks that the others wait for; empty without any."""
    of_ranks = (one for one in facts.findings if LIMIT_OF.get(cause_of_finding(one), "") == IMBALANCE)
    finding = next((one for one in of_ranks if one.ranks and not one.costs_pauses), None)
    return list(finding.ranks) if finding else []


def _interval_of_limit(facts: JobFacts, limit: Limit) -> tuple[float, float]:
    """Return the interval of a limit's gain, by the same uncertainties as those of predictions."""
    trust, of_limit = facts.analysis.trust, [one for one in facts.counterfactuals if one.limit == limit.kind]
    if not of_limit:
        return limit.gain, limit.gain
    best = max(of_limit, key=lambda one: one.gain)
    saved_ns = best.lengths - best.lengths / best.gains
    step_ns, gain_ns = float(best.lengths.mean()), float(saved_ns.mean())
    unsure_ns = gain_uncertainty(best.lengths, saved_ns, 0.0)
    unsure_ns += (trust.error_pct + trust.doubt_pct) / 100 * gain_ns
    low, high = (
        step_ns / max(step_ns - saved, step_ns / NOTHING_LEFT)
        for saved in (gain_ns - unsure_ns, gain_ns + unsure_ns)
    )
    return min(max(low, 1.0), limit.gain), max(high, limit.gain)


def _as_advised(facts: JobFacts, limit: Limit, advice: Sequence[Advice]) -> Limit:
    """Give a limit the interval of the advised change that ends it, if one does: one change has one gain."""
    for one in advice:
        if not one.edit or one.gain_low is None or one.gain_high is None:
            continue
        if abs(facts.predict(one.edit).speedup / limit.gain - 1) <= SAME_CHANGE:
            low, high = min(one.gain_low, limit.gain), max(one.gain_high, limit.gain)
            return replace(limit, gain_low=low, gain_high=high)
    return limit


def _limit_without_cause(facts: JobFacts, entries: Sequence[LedgerRow]) -> Limit | None:
    """Return what takes most of the usual step, by its ledger; None if most was not recorded."""
    if facts.lacks_device_work:
        return None

    def gain_of(kind: str) -> float:
        if kind == COMPUTE:
            return facts.gain_of_devices
        # A finding may show a cost that no replay of the limit does; a part costs no more than its kind.
        causes = [(one, cause_of_finding(one)) for one in facts.findings]
        costs = [one.severity for one, cause in causes if LIMIT_OF.get(cause, cause) == kind]
        costs += [one.severity for one, _ in causes if kind == HOST and one.component_id == THE_HOST]
        of_findings = 1 / (1 - min(max(costs, default=0.0), 1 - 1 / MAX_GAIN))
        return max(facts.gains_by_limit().get(kind, 1.0), of_findings)

    of_operations = facts.analysis.outline.of_operations
    kind = limit_of_entries(entries, of_operations, lambda kind: of_operations or gain_of(kind) >= WORTH)
    if kind in ("", COMPUTE):
        return Limit(COMPUTE, 1.0, facts.computing) if kind else None
    return Limit(kind, gain_of(kind), shares_of_limits(entries)[kind])


def _tempting(facts: JobFacts, limit: Limit | None, advice: Sequence[Advice]) -> list[str]:
    """Return what has a large share of the time but no gain, or a smaller one than all that is advised."""
    whole = float(facts.kernels["total_ns"].sum())
    if not whole or limit is None or limit.kind == COMMUNICATION or not facts.analysis.trust.answerable:
        return []
    moving = float(facts.communication_kernels["total_ns"].sum())
    gain = facts.gains_by_limit().get(COMMUNICATION, 1.0)
    if moving < NOTABLE * whole or 1 - 1 / gain > moving / whole / 2:
        return []
    if gain >= min((one.gain_high for one in advice if one.gain_high is not None), default=math.inf):
        return []
    waiting = facts.shares["exposed_wait_ns"] * facts.step_ns * facts.rank_steps
    why = "most of that time is waiting; " if waiting > moving / 2 else ""
    return [
        f"tune communication: it is {moving / whole:.0%} of GPU time, but {why}free transfers give "
        f"x{gain:.2f} now"
    ]


def _unsure(facts: JobFacts, usual: int) -> list[str]:
    manifest, trust = facts.analysis.run.manifest, facts.analysis.trust
    missing = len(manifest.missing_ranks)
    left_out, impossible = facts.ends.height - usual, manifest.num_impossible
    stepped = facts.analysis.steps["rank"].unique()
    stepless = sorted({*manifest.ranks} - {*stepped}) if stepped.len() else []
    why, cut = next(iter(trust.reasons), trust.grade), manifest.num_cut > 0
    unknown = facts.share_of(facts.kernels.filter(pl.col("family") == OTHER)["name"].to_list())
    both, another = deep_and_usual(facts.analysis.steps), ""
    if both is not None and trust.pace != 1:
        deep, others = (format_duration(ns) for ns in (facts.step_ns / trust.pace, facts.step_ns))
        another = f"all figures come from steps in deep windows ({deep} each), scaled to the others' {others}"
    elif both is not None and abs(both[1].typical_ns / facts.step_ns - 1) > SIMILAR:
        another = f"{_deep_and_others(facts.step_ns, both[1])}: all figures are of those in deep windows"
    reasons = {
        f"the replay does not fit, so do not rely on these figures: {why}": not (
            trust.answerable or cut or facts.lacks_device_work
        ),
        UNMATCHED: UNMATCHED in trust.reasons and trust.answerable,
        f"ranks missing: {missing} of {manifest.world_size}": missing > 0,
        f"no steps are known for {ranks_in_words(stepless)}": len(stepless) > 0,
        **dict.fromkeys(without_spans(facts.job.graph, manifest), True),
        f"{counted(impossible, 'span')} with impossible times left out or moved": impossible > 0,
        "no steps are known: the whole recording counts as one": facts.analysis.steps.is_empty(),
        "one step: it is not known whether this persists": usual == 1 and not facts.analysis.steps.is_empty(),
        f"{counted(left_out, 'unusual step')} left out of these figures": left_out > 0,
        (taken_out := taken_out_in_words(trust)): bool(taken_out),
        (unlike := unlike_the_others(facts.analysis)): bool(unlike),
        another: bool(another) and not unlike,
        f"gains are rated poor: {trust.weakest}": trust.answerable and trust.grade == "poor" and not unlike,
        "launches wait for their kernels: hosts and devices cannot overlap here": facts.launches_block,
        OTHER_LOAD: bool(facts.analysis.shared_hosts),
        f"kernels that take {unknown:.0%} of compute are of unknown kind, by their names": unknown >= UNKNOWN,
    }
    return [reason for reason, holds in reasons.items() if holds]


def unlike_the_others(analysis: Analysis) -> str:
    """Return a line if steps in deep windows take far longer or shorter than the others; else empty."""
    both = deep_and_usual(analysis.steps)
    if both is None:
        return ""
    with suppress(DproError):  # windows that cannot be replayed
        least_ns, most_ns = sorted((both[1].typical_ns, both[1].mean_ns))
        deep_ns = analysis.baseline_ns / analysis.trust.pace
        if not least_ns / UNLIKE < deep_ns < most_ns * UNLIKE:
            return f"{_deep_and_others(deep_ns, both[1])}: what limits those is not known"
    return ""


def _deep_and_others(deep_ns: float, others: StepSeries) -> str:
    """Return how long both kinds of steps take."""
    return f"steps in deep windows take {format_duration(deep_ns)}, the others {_typical_in_words(others)}"


def _typical_in_words(series: StepSeries) -> str:
    """Return the median of steps, and their mean if it differs."""
    typical, mean = format_duration(series.typical_ns), format_duration(series.mean_ns)
    return f"median {typical}, mean {mean}" if _is_skewed(series) else typical


def _is_skewed(series: StepSeries) -> bool:
    """Return whether the mean of steps is not about their median."""
    return abs(series.mean_ns / series.typical_ns - 1) > SIMILAR


def cause_of(facts: JobFacts, limit: str) -> str:
    """Return what is behind a limit, in words; empty if the run does not show it."""
    if limit == HOST:
        still = facts.still
        crowded_ns = sum(finding.cost_ns for finding in facts.findings if finding.cause == CROWDED)
        free_ns = (1 - 1 / facts.gains_by_limit().get(HOST, 1.0)) * facts.step_ns
        if crowded_ns > (0.0 if still else free_ns):  # FAULT has how long, as counted
            return "threads of ranks wait for a CPU core"
        if still is None:
            return _launching(facts)
        ranks = len(facts.job.graph.ranks)
        return (
            f"threads of ranks wait for a CPU core {still.share:.0%} of the step, on average "
            f"{still.at_once:.0f} of {ranks} ranks at a time"
        )
    if limit == COMPUTE and facts.computes_on_hosts:
        return longest_operators(facts.spans)
    if limit == COMPUTE:
        of_short: dict[str, list[str]] = {}  # short name -> kernels that do one thing per element
        for name in facts.computing_kernels["name"].head(LONGEST_KERNELS):
            of_short.setdefault(facts.short_names[name], []).append(name)
        shares = {short: facts.share_of(names) for short, names in of_short.items()}
        longest = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
        several = {short: f" in {len(names)} kernels" for short, names in of_short.items() if len(names) > 1}
        return ", ".join(f"{short} {shares[short]:.0%}{several.get(short, '')}" for short in longest)
    if limit == COMMUNICATION:
        names = [facts.short_names[name] for name in facts.communication_kernels["name"].head(1)]
        may_wait = facts.analysis.trust.rendezvous is not None
        return "; ".join([*names, *(["part of it may be waits for missing ranks"] if may_wait else [])])
    return ""


def longest_operators(spans: pl.DataFrame) -> str:
    """Return the operators of hosts that compute longest, with their shares of compute, by their own time."""
    totals = kernel_totals(spans)
    computing = totals.filter(~pl.col("name").str.contains(EXCHANGING))
    whole = max(computing["total_ns"].sum(), 1)
    longest = computing.select("name", "total_ns").head(2).iter_rows()
    return ", ".join(f"{name} {total_ns / whole:.0%}" for name, total_ns in longest)


def _launching(facts: JobFacts) -> str:
    slow = facts.slow_launches
    if slow is not None:
        return f"{format_duration(slow.took_ns)} before {slow.in_words}"
    launches = facts.launches.height / facts.rank_steps
    gpu_ns = float(facts.kernels["total_ns"].sum()) / facts.rank_steps
    if facts.computes_on_hosts:
        return "its code outside operators"
    if not launches:
        return ""
    beside = " that overlap" if gpu_ns > facts.step_ns else ""
    kernels = f"{format_duration(gpu_ns)} of kernels{beside}"
    return f"{counted(round(launches), 'launch', 'launches')} a rank for {kernels}"


def best_together(facts: JobFacts, advice: Sequence[Advice]) -> Together | None:
    """Return the best pair of easy advice that certainly gains, and gains more together than either alone.

    Args:
        advice: the advice that is shown.
    """
    best: Together | None = None
    if facts.analysis.shared_hosts:  # gains hold only under that load
        return None
    easy = [place for place, one in enumerate(advice) if one.edit and one.effort in EASY]
    for first, second in combinations(easy, 2):
        alone = advice[first], advice[second]
        edits = in_order(parse_edit(one.edit) for one in alone)
        if not can_combine(edits[0], edits[1:]):
            continue
        with suppress(DproError):
            done = facts.predict(*map(str, edits))
            low, high = interval_of(done)
            adds = done.speedup >= WORTH * max(map(middle_of, alone))
            if done.effect == "faster" and adds and low > max(one.gain_low or 1.0 for one in alone):
                both = Together([first + 1, second + 1], [str(edit) for edit in edits], low, high)
                best = both if best is None or both.gain_low > best.gain_low else best
    return best
