"""The order of advice: first what treats the limit, then what gains most for the least effort.

Takes `JobFacts`, and the limit of the job; returns `Advice`, best first. Each kind of advice is a function
of `sources` that looks for its own reason in the run, and yields nothing without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from msgspec.structs import replace

from dpro.analysis.predictions import under_any_load
from dpro.errors import DproError
from dpro.recorders import is_of_xla
from dpro.verdict.advice import FIRST, RECORD_MORE, WORTH, Advice, middle_of
from dpro.verdict.facts import JobFacts
from dpro.verdict.limits import (
    COMPUTE,
    COPIES,
    HOST,
    INPUT,
    SYNCHRONISATION,
)
from dpro.verdict.sources.edits import make_sure_edits
from dpro.verdict.sources.hosts import (
    avoid_copies,
    end_extra_work,
    keep_memory,
    let_launches_return,
    prepare_input_early,
    reduce_launches,
    remove_waits,
    shorten_code_outside_operators,
    shorten_host_work,
)
from dpro.verdict.sources.kernels import (
    fuse_attention,
    fuse_pointwise,
    multiply_more_rows,
    replace_dominant_kernel,
    use_eight_bits,
    use_fewer_bits,
)
from dpro.verdict.sources.parts import give_cores, heal_slow_parts, remedies_of
from dpro.verdict.sources.transfers import (
    balance_experts,
    even_out_stages,
    exchange_tensors,
    join_collectives,
    shorten_transfers,
)

MAX_ADVICE = 3
OF_FAULTS = ("heal", "cores")  # kinds of advice that treat a part at fault
OBSERVED = (COMPUTE, SYNCHRONISATION, COPIES, INPUT)  # limits that times of calls and kernels show directly
WORTH_AFTER = 1.05  # least middle gain of advice for after the limit is gone
_DONE_ONCE = ("launch-one", "allocator")  # remedies of what a process does only once, at its start
WEIGHTS = {"cores": 2.0, "launch-one": 4.0, "batch": 0.5}  # a larger batch changes the training
EFFORT = {"new code": 2.0, "other hardware": 2.0}  # relative to a line or a setting


def advise(facts: JobFacts, limit: str) -> list[Advice]:
    """Return everything worth doing: first what treats the limit or a fault, then what gains most.

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
        observed = FIRST[limit] if limit in OBSERVED else ()
        if limit == SYNCHRONISATION:  # after a wait, devices idle until the host has launched again
            observed = (*observed, "launch")
        for source in _sources(facts):
            with suppress(DproError):
                wanted += [_without_gain(one) for one in source(facts, limit) if one.kind in observed]
    if facts.first_call:
        wanted = [advice for advice in wanted if advice.kind not in _DONE_ONCE]
    if facts.analysis.shared_hosts:
        wanted = [_widen_gain(advice) for advice in wanted]
    first, worth = FIRST.get(limit, ()), _worth_doing(wanted)
    if not worth:  # as where hosts are recorded in part, and seem to work while they wait
        worth = [_without_gain(advice) for advice in wanted if advice.kind in first]
    treating = {*first, *OF_FAULTS}
    best = sorted(worth, key=lambda advice: (_may_lose(advice), advice.kind not in treating, -_merit(advice)))
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
    wanted = [advice for source in (give_cores, heal_slow_parts) for advice in source(facts, "")]
    return sorted(_worth_doing(wanted), key=_merit, reverse=True)


def _worth_doing(wanted: Sequence[Advice]) -> list[Advice]:
    """Return the advice that gains enough, or whose gain is unknown."""
    return [advice for advice in wanted if advice.gain_high is None or advice.gain_high >= WORTH]


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


def _may_lose(advice: Advice) -> bool:
    """Return whether a step may become longer by it, as shown: such advice comes last."""
    return advice.gain_low is not None and round(advice.gain_low, 2) < 1


def _merit(advice: Advice) -> float:
    """Return the logarithm of the middle gain, weighted by kind and divided by effort."""
    weight = WEIGHTS.get(advice.kind, 1.0) / EFFORT.get(advice.effort, 1.0)
    return weight * math.log(middle_of(advice))


Source = Callable[[JobFacts, str], Iterator[Advice]]  # of advice, given the limit of the job
_SOURCES: Sequence[Source] = (
    heal_slow_parts,
    make_sure_edits,
    end_extra_work,
    join_collectives,
    exchange_tensors,
    give_cores,
    shorten_host_work,
    shorten_code_outside_operators,
    reduce_launches,
    let_launches_return,
    prepare_input_early,
    use_fewer_bits,
    use_eight_bits,
    fuse_attention,
    fuse_pointwise,
    replace_dominant_kernel,
    multiply_more_rows,
    shorten_transfers,
    balance_experts,
    even_out_stages,
    remove_waits,
    keep_memory,
    avoid_copies,
)
_OF_TORCH = (use_fewer_bits, fuse_attention, keep_memory)


def _sources(facts: JobFacts) -> list[Source]:
    """Return the sources of advice, without those about PyTorch where XLA compiled the program."""
    of_xla = is_of_xla(facts.analysis.run)
    return [source for source in _SOURCES if not (of_xla and source in _OF_TORCH)]
