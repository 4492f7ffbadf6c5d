"""The one place where detectors run: their needs, their order, and what is explained before each.

Takes the context of a run; returns findings. Detectors run in the order of `DETECTORS`, stronger evidence
first: whole operations, deep windows, calls, and counters of hosts. Each receives what is `Explained` by
earlier findings, whichever detector made them; findings that blame the same again are left out. So each cause
is reported once, from the strongest evidence, and a new detector need not know the others. Jobs that are
still running use the same detectors (`diagnose_graph`, `diagnose_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import polars as pl

from dpro.detect.bad_numbers import ComparedTables, find_bad_numbers
from dpro.detect.context import Context, Need, slow_ranks
from dpro.detect.findings import NETWORK, PAUSES, Finding, costliest_first, ranks_of
from dpro.detect.host_bound import find_idle_gpus, find_input_bound, find_slow_input
from dpro.detect.load_model import WORKLOAD
from dpro.detect.machine.gpu_state import with_gpus, with_links
from dpro.detect.machine.memory_growth import find_memory_growth
from dpro.detect.machine.oversubscribed import (
    crowds_of,
    find_crowded_hosts,
    find_shared_gpus,
    with_throttling,
    without_crowded,
)
from dpro.detect.network.degradation import find_communication_bound, find_slower_transfers, with_losses
from dpro.detect.network.traffic import Traffic
from dpro.detect.network.transfers import find_slow_network
from dpro.detect.observations import observe_replay
from dpro.detect.pauses import EMPTY_QUEUE
from dpro.detect.pipeline_slowdown import diagnose_operations
from dpro.detect.regression import find_regression
from dpro.detect.stragglers.causes import INPUT_PIPELINE, WAITING_CODE
from dpro.detect.stragglers.code import with_code
from dpro.detect.stragglers.from_calls import (
    NEGLIGIBLE,
    find_jitter,
    find_late_gpus,
    find_late_ranks,
    on_gpus,
    slowdown_with,
)
from dpro.detect.stragglers.phases import with_phases
from dpro.detect.stragglers.replayed import find_masked
from dpro.detect.uneven_work import find_uneven_work_of_stages, with_doubt
from dpro.plugins import load, places
from dpro.schema import CHECKPOINTS, COUNTERS, LOSSES, PASSES, SPANS, STEPS
from dpro.words import as_fast_as_peers


@dataclass(frozen=True)
class Explained:
    """What findings from stronger evidence account for.

    Attributes:
        findings: all of them.
        in_windows: those from whole operations or deep windows.
    """

    findings: tuple[Finding, ...] = ()
    in_windows: tuple[Finding, ...] = ()

    @cached_property
    def ranks(self) -> set[int]:
        """Ranks that are blamed, by themselves or with their link or stage."""
        return _blamed(self.findings)

    @cached_property
    def network(self) -> bool:
        """Whether links, ports or the fabric are blamed."""
        return _blames_network(self.findings)

    @cached_property
    def waits_in_windows(self) -> bool:
        """Whether deep windows show what hosts may wait for in calls: slow ranks, or a slow network."""
        return bool(_blamed(self.in_windows)) or _blames_network(self.in_windows)

    @cached_property
    def input(self) -> list[Finding]:
        """Findings that blame the input pipeline, of all ranks or of one."""
        return [one for one in self.findings if INPUT_PIPELINE in (one.component_id, one.cause)]

    @property
    def cost_ns(self) -> float:
        """Total cost of the findings per step, in ns."""
        return sum(finding.cost_ns for finding in self.findings)

    def covers(self, finding: Finding) -> bool:
        """Return whether what a finding blames is blamed already; never for pauses, outside usual steps."""
        if finding.class_ == PAUSES:
            return False
        if finding.class_ in NETWORK:
            return self.network
        if finding.of_job:
            return _subject_of(finding) in {_subject_of(one) for one in self.findings if one.of_job}
        return not self.ranks.isdisjoint(finding.ranks)

    def with_more(self, findings: Sequence[Finding], *, in_windows: bool) -> Explained:
        """Return what is explained with more findings."""
        return Explained(
            (*self.findings, *findings), (*self.in_windows, *findings) if in_windows else self.in_windows
        )


def _blamed(findings: Iterable[Finding]) -> set[int]:
    return ranks_of(one for one in findings if not one.of_job and one.class_ != "slow.fabric")


def _blames_network(findings: Iterable[Finding]) -> bool:
    return any(finding.class_ in NETWORK for finding in findings)


def _subject_of(finding: Finding) -> str:
    """Return what a finding of the job is about: its class, or the component of slow hosts (many causes)."""
    return finding.component_id if finding.class_ == "slow.host" else finding.class_


class Detector(NamedTuple):
    """Declaration of a detector.

    Attributes:
        name: its name.
        find: returns its findings, given the run and what is explained already.
        needs: what the run must offer; without it, the detector does not run.
    """

    name: str
    find: Callable[[Context, Explained], list[Finding]]
    needs: frozenset[Need]


def diagnose(context: Context, step_ns: float | None = None) -> list[Finding]:
    """Return what is wrong with a run: bad numbers, costs of time (costliest first), then what became worse.

    Args:
        step_ns: the usual step, to which costs are related; None where it is not known.
    """
    of_extensions = map(load, places("detectors").values())
    findings = run_detectors(context, (*DETECTORS, *of_extensions))
    for explain in EXPLANATIONS:
        if Need.STEPS in context.has:
            findings = explain(context, findings)
    worse = run_detectors(context, OF_THE_JOB)
    if step_ns:
        findings, worse = ([one.of_usual_step(step_ns) for one in some] for some in (findings, worse))
    return [*run_detectors(context, OF_NUMBERS), *costliest_first(findings), *worse]


def run_detectors(context: Context, detectors: Iterable[Detector]) -> list[Finding]:
    """Run detectors in turn, leaving out what is explained already."""
    explained = Explained()
    for detector in detectors:
        if detector.needs <= context.has:
            new = [one for one in detector.find(context, explained) if not explained.covers(one)]
            in_windows = not detector.needs.isdisjoint({Need.GRAPH, Need.TRANSFERS, Need.OPERATIONS})
            explained = explained.with_more(new, in_windows=in_windows)
    return list(explained.findings)


# Deep windows: what ranks, the input and the network take of the replayed step.


def _operations(context: Context, _: Explained) -> list[Finding]:
    assert context.operations is not None
    return diagnose_operations(*context.operations)


def _uneven_work_and_slow_ranks(context: Context, _: Explained) -> list[Finding]:
    """Return uneven data and stages, and ranks that take longer for equal work.

    Ranks that take turns, by their calls, are left out: in few deep steps one of them may always come last.
    """
    balanced, at_equal_work = context.balanced, context.at_equal_work
    stages = find_uneven_work_of_stages(at_equal_work) if Need.OPERATIONS not in context.has else []
    slow = with_doubt(balanced.leaves(slow_ranks(at_equal_work)), stages)
    masked = balanced.leaves(find_masked(at_equal_work, ranks_of(slow)))
    named = [*slow, *masked]
    if named and Need.ALWAYS_ON in context.has:
        in_turn = ranks_of(context.turns)
        named = [finding for finding in named if finding.of_job or not {*finding.ranks} <= in_turn]
    return [*balanced.findings, *stages, *named]


def _slow_input(context: Context, explained: Explained) -> list[Finding]:
    """Return the finding of slow input on all ranks, beyond what healing single ranks saves already."""
    return find_slow_input(context.recorded, sum(finding.cost_ns for finding in explained.input))


def diagnose_traffic(traffic: Traffic) -> list[Finding]:
    """Return what is slow in the network, compared with similar transfers and with earlier ones.

    Transfers that became slower are left out if all their ranks are named as slow already.
    """
    if traffic.transfers.is_empty():
        return []
    slow = find_slow_network(traffic)
    named = [set(finding.ranks) for finding in slow]
    slower = find_slower_transfers(traffic)
    unnamed = (finding for finding in slower if not any(set(finding.ranks) <= ranks for ranks in named))
    return [*slow, *unnamed]


def _idle_gpus(context: Context, explained: Explained) -> list[Finding]:
    """Return the finding of GPUs that wait for their hosts, beyond the cost of all other findings."""
    assert context.breakdown is not None
    return find_idle_gpus(context.recorded, context.breakdown, explained.cost_ns)


# Calls and counters of steps: hosts that wait in a call may wait for anything that makes another one late.

AGREEING = 2.0  # ratio of a cost by replay to that by calls, or its inverse, up to which the former counts
LARGER = 2.0  # times a rank's cost: if all ranks became slower by this at the same step, its code is not why


def _late_ranks(context: Context, explained: Explained) -> list[Finding]:
    late = [one for one in context.late_by_calls if not _is_part_of_slow_input(one, explained)]
    late = [one for one in late if not came_with_larger_slowdown(one, context.own_times_and_steps)]
    late = _not_by_messages(late, context, explained)
    return [_as_replayed(one, context.saved_by_healing) for one in late]


def _as_replayed(late: Finding, saved: Callable[[Sequence[int]], tuple[float, float] | None]) -> Finding:
    """Give late ranks the cost that their healing saves by replay, where that is about what calls show.

    Args:
        saved: as `Context.saved_by_healing`.
    """
    replayed = None if late.costs_pauses or late.of_job else saved(late.ranks)
    if replayed is None or not 1 / AGREEING <= replayed[0] / late.cost_ns <= AGREEING:
        return late
    cost_ns, step_ns = replayed
    shown = observe_replay(as_fast_as_peers(late.ranks), step_ns - cost_ns, step_ns)
    return replace(late.observing(shown), cost_ns=cost_ns, severity=round(cost_ns / step_ns, 4))


def _is_part_of_slow_input(late: Finding, explained: Explained) -> bool:
    """Return whether a rank waits for its data where all do, at no less cost.

    If the input limits all ranks, which of them waits longest depends on whose workers have a core.
    """
    of_all = max((one.cost_ns for one in explained.input if one.of_job), default=0.0)
    return late.cause == INPUT_PIPELINE and late.cost_ns <= of_all


def came_with_larger_slowdown(late: Finding, read: Callable[[], tuple[pl.DataFrame, pl.DataFrame]]) -> bool:
    """Return whether a rank's code waits since the step at which the whole job became slower by far more.

    When the network becomes slow, hosts wait in their calls, though not all for as long.

    Args:
        read: returns own times of ranks, as from `own_time`, and steps, as from `job_steps`.
    """
    if late.cause != WAITING_CODE:
        return False
    own_times, steps = read()
    return slowdown_with(own_times, steps, late.ranks[0]) >= LARGER * late.cost_ns


def _not_by_messages(late: list[Finding], context: Context, explained: Explained) -> list[Finding]:
    """Drop ranks that may be late because of a message, which calls of collectives do not show."""
    if context.messages_unseen and explained.waits_in_windows:
        return [finding for finding in late if finding.of_job]
    return late


def _late_gpus(context: Context, explained: Explained) -> list[Finding]:
    if context.calls.is_empty() or context.aligned[0].steps.is_empty():
        return []
    late = find_late_gpus(
        context.tables.collectives, context.usual_steps, context.counters, context.workers,
        doubtful=context.messages_unseen,
    )  # fmt: skip
    return _not_by_messages(late, context, explained)


def _others_are_waited_for(context: Context, explained: Explained) -> bool:
    """Return whether hosts wait in calls for ranks, messages or the network, or only GPUs wait."""
    return bool(explained.ranks) or explained.network or context.messages_unseen or context.on_gpus


def _communication_bound(context: Context, explained: Explained) -> list[Finding]:
    if _others_are_waited_for(context, explained):
        return []
    aligned, apart = context.aligned
    if context.calls.is_empty() or aligned.steps.is_empty():
        return []
    return find_communication_bound(
        context.usual_own_times, context.calls, aligned.steps, aligned.counters, apart
    )


def _input_bound(context: Context, explained: Explained) -> list[Finding]:
    """Return the finding of ranks that wait for data, where deep windows do not show its cost."""
    if explained.input:
        return []
    return find_input_bound(context.usual_steps, context.counters, on_gpus=context.on_gpus)


def _turns(context: Context, explained: Explained) -> list[Finding]:
    return [] if _others_are_waited_for(context, explained) else context.turns


def _jitter(context: Context, explained: Explained) -> list[Finding]:
    """Return ranks that vary; none on GPUs, whose hosts run ahead, so that their variation costs nothing."""
    aligned = context.aligned[0]
    if context.on_gpus or context.calls.is_empty() or aligned.steps.is_empty():
        return []
    jitter = find_jitter(context.usual_own_times, context.calls, aligned.counters, aligned.workers)
    return _not_by_messages(jitter, context, explained)


def _pauses(context: Context, explained: Explained) -> list[Finding]:
    """Return pauses, except of GPUs that wait for new work from hosts that are all named already."""
    return [
        finding
        for finding in context.pauses.findings
        if EMPTY_QUEUE not in (finding.cause, finding.component_id) or not {*finding.ranks} <= explained.ranks
    ]


def _regression(context: Context, _: Explained) -> list[Finding]:
    spans = partial(context.run.table, SPANS)
    return find_regression(context.steps, context.workers, lambda: context.counters, spans)


def _bad_numbers(context: Context, _: Explained) -> list[Finding]:
    losses = context.run.table(LOSSES)
    if losses.is_empty():
        return []
    around = ComparedTables(context.steps, context.counters, context.run.table(CHECKPOINTS))
    return find_bad_numbers(losses, context.workers, around)


def _growing_memory(context: Context, _: Explained) -> list[Finding]:
    return find_memory_growth(context.steps, context.counters, context.workers)


# Explanations of findings of several detectors.


def _with_crowded_hosts(context: Context, findings: list[Finding]) -> list[Finding]:
    """Add hosts with more threads than cores, and drop findings that these explain."""
    findings = with_throttling(findings, context.steps, context.counters)
    crowds = context.crowds
    if not crowds:
        return findings
    kept = without_crowded(findings, crowds, context.steps, context.counters)
    return [*find_crowded_hosts(crowds, context.counters), *kept]


def _with_gpus(context: Context, findings: list[Finding]) -> list[Finding]:
    """Add to findings what the GPUs of their ranks and the ports of their hosts reported."""
    tables = context.steps, context.counters, context.workers
    return with_links(with_gpus(findings, *tables), *tables)


def _with_phases(context: Context, findings: list[Finding]) -> list[Finding]:
    """Add to findings of late ranks the part of the step, and the code, in which they take longer."""
    passes, collectives = context.run.table(PASSES), context.tables.collectives
    ahead = context.ahead.ranks
    placed = with_phases(findings, passes, context.steps, collectives, on_gpus=context.on_gpus, ahead=ahead)
    return with_code(placed, context.at_equal_work) if Need.GRAPH in context.has else placed


def _with_losses(context: Context, findings: list[Finding]) -> list[Finding]:
    return with_losses(findings, context.counters, context.workers, context.run)


_GRAPH, _TRANSFERS = frozenset({Need.GRAPH}), frozenset({Need.TRANSFERS})
_ALWAYS_ON = frozenset({Need.ALWAYS_ON})

IN_WINDOWS = (
    Detector("operations", _operations, frozenset({Need.OPERATIONS})),
    Detector("shared GPUs", lambda context, _: find_shared_gpus(context.run), frozenset({Need.STEPS})),
    Detector("work", _uneven_work_and_slow_ranks, _GRAPH),
    Detector("slow input", _slow_input, _GRAPH),
    Detector("slow network", lambda context, _: diagnose_traffic(context.traffic), _TRANSFERS),
    Detector("idle GPUs", _idle_gpus, frozenset({Need.GRAPH, Need.BREAKDOWN})),
)
FROM_CALLS = (
    Detector("late ranks", _late_ranks, _ALWAYS_ON),
    Detector("late GPUs", _late_gpus, _ALWAYS_ON),
    Detector("slow wires", lambda context, _: diagnose_traffic(context.sends), _ALWAYS_ON),
    Detector("slow timed calls", lambda context, _: diagnose_traffic(context.timed_calls), _ALWAYS_ON),
    Detector("communication-bound hosts", _communication_bound, _ALWAYS_ON),
    Detector("waiting for input", _input_bound, _ALWAYS_ON),
    Detector("turns", _turns, _ALWAYS_ON),
    Detector("jitter", _jitter, _ALWAYS_ON),
    Detector("pauses", _pauses, _ALWAYS_ON),
)
DETECTORS = (*IN_WINDOWS, *FROM_CALLS)
OF_NUMBERS = (Detector("bad numbers", _bad_numbers, frozenset({Need.STEPS})),)
OF_THE_JOB = (
    Detector("regression", _regression, frozenset({Need.STEPS})),
    Detector("growing memory", _growing_memory, frozenset({Need.STEPS})),
)
EXPLANATIONS = (_with_crowded_hosts, _with_phases, _with_losses, _with_gpus)


# A running job: what its deep windows show, and which ranks are late now by their calls.


def diagnose_graph(context: Context) -> list[Finding]:
    """Return what deep windows show while the job runs, costliest first.

    Steps between windows show better whether hosts have more threads than cores, so crowding only removes
    findings here.
    """
    findings = costliest_first(run_detectors(context, IN_WINDOWS))
    if Need.STEPS not in context.has:
        return findings
    crowds = context.crowds
    return without_crowded(findings, crowds, context.steps, context.counters)


class LatestSteps(NamedTuple):
    """The latest steps of a running job.

    Attributes:
        own_times: as from `own_time`, `start_ns` on each host's own clock.
        calls: as from `calls_of`.
        collectives: `rank` and `enqueued_ns` of calls, on each host's own clock.
        amounts: rows of `counters` with the amount of work of steps.
        tables: returns `steps`, `passes` and `counters` of ranks that are late and some others.
        messages_unseen: whether ranks may also have waited for messages, which calls do not show.
    """

    own_times: pl.DataFrame
    calls: pl.DataFrame
    collectives: pl.DataFrame
    steps: pl.DataFrame
    workers: pl.DataFrame
    amounts: pl.DataFrame
    tables: Callable[[Sequence[int]], Mapping[str, pl.DataFrame]]
    messages_unseen: bool


def diagnose_calls(latest: LatestSteps) -> list[Finding]:
    """Return ranks that the others wait for while the job runs, costliest first.

    Ranks at a negligible cost are left out, and a crowded host is reported only in place of its ranks.
    """
    late = _late_now(latest, latest.amounts)
    ranks = [rank for finding in late if finding.component_kind != "job" for rank in finding.ranks]
    if not ranks:
        return late
    tables = latest.tables(ranks)
    counters = tables[COUNTERS.name]
    late = _late_now(latest, pl.concat([latest.amounts, counters.filter(pl.col("counter") != WORKLOAD)]))
    crowds = crowds_of(latest.steps, counters, latest.workers)
    kept = without_crowded(late, crowds, latest.steps, counters)
    placed = with_phases(
        kept, tables[PASSES.name], tables[STEPS.name], latest.collectives,
        on_gpus=on_gpus(latest.workers), ahead=(),
    )  # fmt: skip
    return placed if len(kept) == len(late) else [*find_crowded_hosts(crowds, counters), *placed]


def _late_now(latest: LatestSteps, counters: pl.DataFrame) -> list[Finding]:
    findings = find_late_ranks(
        latest.own_times, latest.calls, counters, latest.workers, doubtful=latest.messages_unseen
    )
    return [finding for finding in findings if finding.severity >= NEGLIGIBLE]
