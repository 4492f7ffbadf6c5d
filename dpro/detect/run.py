"""The one place where detectors are run: what each needs, and what suppresses its findings.

In: the context of a run. Out: findings. Each detector is declared once in `DETECTORS`, in the order in which
they exclude each other: a detector sees what those before it have found. It is run if the run offers what it
needs and no condition of `unless` holds; then each of its rules decides what of its findings remains. A job
that runs is looked at with the same detectors and rules (`diagnose_graph`, `diagnose_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.detect.baseline import Baseline, waits
from dpro.detect.context import Context, Need, slow_ranks
from dpro.detect.findings import NETWORK, Finding, costliest_first, ranks_of
from dpro.detect.host_bound import find_idle_gpus, find_input_bound, find_slow_input, note_idle_gpus
from dpro.detect.load_model import CLASS as UNEVEN_DATA
from dpro.detect.load_model import WORKLOAD
from dpro.detect.machine.gpu_state import with_gpus, with_links
from dpro.detect.machine.oversubscribed import (
    crowds_of,
    find_crowded_hosts,
    not_crowding,
    with_throttling,
)
from dpro.detect.network.degradation import find_communication_bound, find_slower_transfers, with_losses
from dpro.detect.network.traffic import Traffic
from dpro.detect.network.transfers import find_slow_network
from dpro.detect.pauses import EMPTY_QUEUE
from dpro.detect.pipeline_slowdown import diagnose_operations
from dpro.detect.regression import find_regression
from dpro.detect.stragglers.causes import INPUT_PIPELINE, WAITING_CODE, excess_by_cause
from dpro.detect.stragglers.from_calls import (
    NEGLIGIBLE,
    came_with,
    find_jitter,
    find_late_gpus,
    find_late_ranks,
)
from dpro.detect.stragglers.replayed import find_masked, gains_of
from dpro.detect.uneven_work import find_uneven_work_of_stages, with_doubt
from dpro.plugins import load, places
from dpro.replay.alignment.match import NUMBERED_APART
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.peers import peers_of
from dpro.replay.timeline import step_times
from dpro.replay.whatif.edits.heal import Shortened, healing_in_each_step
from dpro.schema import SPANS
from dpro.units import format_duration

ByDetector = Mapping[str, list[Finding]]  # of the detectors that have run so far, by name
Rule = Callable[[Context, ByDetector, list[Finding]], list[Finding]]
Condition = Callable[[Context, ByDetector], bool]


class Detector(NamedTuple):
    """A detector as it is declared.

    Attributes:
        name: by which rules refer to its findings.
        unless: where one of these holds it is not run.
        rules: what of its findings remains, applied in turn.
    """

    name: str
    find: Callable[[Context, ByDetector], list[Finding]]
    needs: frozenset[Need]
    unless: tuple[Condition, ...] = ()
    rules: tuple[Rule, ...] = ()


def diagnose(context: Context) -> list[Finding]:
    """What is wrong with a run, costliest first; that it became slower comes last."""
    of_extensions = map(load, places("detectors").values())
    findings = run_detectors(context, (*DETECTORS, *of_extensions))
    for explain in EXPLANATIONS:
        if Need.STEPS in context.has:
            findings = explain(context, findings)
    return [*costliest_first(findings), *run_detectors(context, OF_THE_JOB)]


def run_detectors(context: Context, detectors: Iterable[Detector]) -> list[Finding]:
    """Run detectors in turn, each under its needs, conditions and rules."""
    by_detector: dict[str, list[Finding]] = {}
    for detector in detectors:
        if detector.needs <= context.has and not any(
            holds(context, by_detector) for holds in detector.unless
        ):
            new = detector.find(context, by_detector)
            for rule in detector.rules:
                new = rule(context, by_detector, new)
            by_detector[detector.name] = new
    return [finding for findings in by_detector.values() for finding in findings]


def notes_of(context: Context, findings: Sequence[Finding]) -> list[str]:
    """What is worth a sentence though it is no finding, one line each."""
    described = context.pauses.described if Need.ALWAYS_ON in context.has else []
    if Need.GRAPH not in context.has or not context.run.num_rows(SPANS):
        return described
    assert context.breakdown is not None
    return [
        *described,
        *note_waiting(context.recorded, findings),
        *note_idle_gpus(context.recorded, context.breakdown),
    ]


# Detectors that several functions make up.


def _slow_ranks(context: Context, _: ByDetector) -> list[Finding]:
    return slow_ranks(context.at_equal_work)


def _masked_ranks(context: Context, by_detector: ByDetector) -> list[Finding]:
    return find_masked(context.at_equal_work, ranks_of(by_detector["slow ranks"]))


def _slow_input(context: Context, by_detector: ByDetector) -> list[Finding]:
    """The input of all ranks, beyond what healing single ranks saves already."""
    by_input = sum(
        finding.cost_ns for finding in by_detector["slow ranks"] if finding.cause == INPUT_PIPELINE
    )
    return find_slow_input(context.recorded, by_input)


def _idle_gpus(context: Context, by_detector: ByDetector) -> list[Finding]:
    assert context.breakdown is not None
    explained = costliest_first(_findings_of(by_detector, IN_WINDOWS))
    return find_idle_gpus(context.recorded, context.breakdown, sum(finding.cost_ns for finding in explained))


def diagnose_traffic(traffic: Traffic) -> list[Finding]:
    """What is slow in the network: against what does the same, and against what it was before.

    Transfers that became slower are left out where all their ranks are named as slow already.
    """
    if traffic.transfers.is_empty():
        return []
    slow = find_slow_network(traffic)
    named = [set(finding.ranks) for finding in slow]
    slower = find_slower_transfers(traffic)
    unnamed = (finding for finding in slower if not any(set(finding.ranks) <= ranks for ranks in named))
    return [*slow, *unnamed]


def _late_gpus(context: Context, _: ByDetector) -> list[Finding]:
    if context.calls.is_empty() or context.aligned[0].steps.is_empty():
        return []
    return find_late_gpus(
        context.tables.collectives, context.usual_steps, context.counters, context.workers,
        doubtful=context.messages_unseen,
    )  # fmt: skip


def _communication_bound(context: Context, _: ByDetector) -> list[Finding]:
    aligned, apart = context.aligned
    if context.calls.is_empty() or aligned.steps.is_empty():
        return []
    return find_communication_bound(
        context.usual_own_times, context.calls, aligned.steps, aligned.counters, apart
    )


def _jitter(context: Context, _: ByDetector) -> list[Finding]:
    """Ranks that vary; hosts of GPUs run ahead, so how these vary costs nothing by itself."""
    aligned = context.aligned[0]
    if context.on_gpus or context.calls.is_empty() or aligned.steps.is_empty():
        return []
    return find_jitter(context.usual_own_times, context.calls, aligned.counters, aligned.workers)


def _input_bound(context: Context, _: ByDetector) -> list[Finding]:
    return find_input_bound(context.usual_steps, context.counters, on_gpus=context.on_gpus)


def _operations(context: Context, _: ByDetector) -> list[Finding]:
    assert context.operations is not None
    return diagnose_operations(*context.operations)


def _regression(context: Context, _: ByDetector) -> list[Finding]:
    spans = partial(context.run.table, SPANS)
    return find_regression(context.steps, context.workers, lambda: context.counters, spans)


# Rules: what of a detector's new findings remains, given the context and what was found so far.


def not_explained_by_uneven_data(context: Context, _: ByDetector, new: list[Finding]) -> list[Finding]:
    """Without ranks that cost less than what the load model may be wrong about."""
    return context.balanced.leaves(new)


def doubted_for_uneven_stages(_: Context, by_detector: ByDetector, new: list[Finding]) -> list[Finding]:
    """Without ranks that are a stage of its own with more work; with doubt where they may be."""
    return with_doubt(new, by_detector.get("uneven stages", []))


def not_taken_in_turn(context: Context, _: ByDetector, new: list[Finding]) -> list[Finding]:
    """Without ranks that calls show to take turns: in few steps of deep windows one may always come last."""
    if Need.ALWAYS_ON not in context.has:
        return new
    in_turn = {rank for turns in context.turns for rank in turns.ranks}
    return [finding for finding in new if finding.of_job or not {*finding.ranks} <= in_turn]


def not_found_by_operations(_: Context, by_detector: ByDetector, new: list[Finding]) -> list[Finding]:
    """Without ranks that whole operations name, by themselves or with their stage."""
    ranks = _ranks_named(by_detector.get("operations", []))
    return [finding for finding in new if finding.of_job or not ranks & {*finding.ranks}]


def not_found_in_windows(_: Context, by_detector: ByDetector, new: list[Finding]) -> list[Finding]:
    """Without ranks that deep windows name, and without classes they report of the whole job."""
    of_windows = _findings_of(by_detector, IN_WINDOWS)
    ranks, classes = _ranks_named(of_windows), {finding.class_ for finding in of_windows if finding.of_job}
    return [
        finding
        for finding in new
        if not (finding.class_ in classes if finding.of_job else ranks & {*finding.ranks})
    ]


def not_part_of_slow_input(_: Context, by_detector: ByDetector, new: list[Finding]) -> list[Finding]:
    """Without ranks that wait for their data where deep windows show that all do, at no less cost.

    Where the input limits all ranks, which of them waits longest is a matter of whose workers have a core.
    """
    of_all = [finding.cost_ns for finding in by_detector.get("slow input", []) if finding.of_job]
    most_ns = max(of_all, default=0.0)
    return [finding for finding in new if finding.cause != INPUT_PIPELINE or finding.cost_ns > most_ns]


def not_late_by_messages(context: Context, by_detector: ByDetector, new: list[Finding]) -> list[Finding]:
    """Without ranks that may be late because of messages from slow ranks, or over a slow network.

    Calls of collectives do not show messages.
    """
    of_windows = _findings_of(by_detector, IN_WINDOWS)
    if (_ranks_named(of_windows) or _is_network_slow(of_windows)) and context.messages_unseen:
        return [finding for finding in new if finding.of_job]
    return new


def not_late_by_calls(context: Context, _: ByDetector, new: list[Finding]) -> list[Finding]:
    """Without ranks that are late by the times of their calls already."""
    late = ranks_of(context.late_by_calls)
    return [finding for finding in new if not late & {*finding.ranks}]


LARGER = 2.0  # times the cost of a rank: what all ranks became slower by at the same step is not its code


def not_beside_a_larger_slowdown(context: Context, _: ByDetector, new: list[Finding]) -> list[Finding]:
    """Without ranks whose code waits since the step at which the whole job became slower by far more.

    Where the network became slow, hosts wait in their calls, and not all of them for as long.
    """
    slowdown = context.slowdown if any(finding.cause == WAITING_CODE for finding in new) else None
    if slowdown is None:
        return new
    grown_ns = slowdown.after_ns - slowdown.before_ns
    return [
        finding
        for finding in new
        if finding.cause != WAITING_CODE
        or grown_ns < LARGER * finding.cost_ns
        or not came_with(context.usual_own_times, finding.ranks[0], slowdown.since)
    ]


def not_the_empty_queue_of_a_late_host(
    _: Context, by_detector: ByDetector, new: list[Finding]
) -> list[Finding]:
    """Without GPUs that wait for new work of ranks whose hosts are all named, at that cost."""
    late = ranks_of(by_detector.get("late ranks", []))
    return [
        finding
        for finding in new
        if EMPTY_QUEUE not in (finding.cause, finding.component_id) or not {*finding.ranks} <= late
    ]


# Conditions under which a detector is not run, given the same.


def windows_show_a_slow_network(_: Context, by_detector: ByDetector) -> bool:
    """Whether deep windows show that links, ports or the fabric are slow."""
    return _is_network_slow(_findings_of(by_detector, IN_WINDOWS))


def wires_show_a_slow_network(_: Context, by_detector: ByDetector) -> bool:
    """Whether sends show it: they distinguish more than calls."""
    return bool(by_detector.get("slow wires"))


def timed_calls_show_a_slow_network(_: Context, by_detector: ByDetector) -> bool:
    """Whether calls that were timed show it: they distinguish more than hosts."""
    return bool(by_detector.get("slow timed calls"))


def operations_show_stages(context: Context, _: ByDetector) -> bool:
    """Whether there are whole operations: they show stages in more steps, without what stages wait for."""
    return Need.OPERATIONS in context.has


def windows_name_ranks(_: Context, by_detector: ByDetector) -> bool:
    """Whether deep windows name ranks, which may be what hosts wait for."""
    return bool(_ranks_named(_findings_of(by_detector, IN_WINDOWS)))


def others_wait_for_ranks(context: Context, by_detector: ByDetector) -> bool:
    """Whether ranks are late, may be late by messages, or compute where their hosts do not show it."""
    return bool(
        by_detector.get("late GPUs")
        or by_detector.get("late ranks")
        or context.messages_unseen
        or context.on_gpus
    )


def windows_show_slow_input(_: Context, by_detector: ByDetector) -> bool:
    """Whether deep windows show that the input pipeline is slow, of all ranks or of one."""
    of_windows = _findings_of(by_detector, IN_WINDOWS)
    return any(INPUT_PIPELINE in (finding.component_id, finding.cause) for finding in of_windows)


def _findings_of(by_detector: ByDetector, detectors: Iterable[Detector]) -> list[Finding]:
    return [finding for detector in detectors for finding in by_detector.get(detector.name, ())]


def _ranks_named(findings: Iterable[Finding]) -> set[int]:
    """Ranks that findings name by themselves."""
    return ranks_of(finding for finding in findings if not finding.of_job and finding.class_ != "slow.fabric")


def _is_network_slow(findings: Iterable[Finding]) -> bool:
    return any(finding.class_ in NETWORK for finding in findings)


# What explains findings of several detectors.


def _with_crowded_hosts(context: Context, findings: list[Finding]) -> list[Finding]:
    """Hosts with more threads than cores, and of the findings those that are not explained by that."""
    findings = with_throttling(findings, context.steps, context.counters)
    crowds = context.crowds
    if not crowds:
        return findings
    kept = not_crowding(findings, crowds, context.steps, context.counters)
    return [*find_crowded_hosts(crowds, context.counters), *kept]


def _with_gpus(context: Context, findings: list[Finding]) -> list[Finding]:
    """The findings with what the GPUs of their ranks and the ports of their hosts reported."""
    tables = context.steps, context.counters, context.workers
    return with_links(with_gpus(findings, *tables), *tables)


def _with_losses(context: Context, findings: list[Finding]) -> list[Finding]:
    """The findings with what loses packets, by TCP's counters."""
    return with_losses(findings, context.counters, context.workers, context.run)


_GRAPH, _ALWAYS_ON = frozenset({Need.GRAPH}), frozenset({Need.ALWAYS_ON})

IN_WINDOWS = (
    Detector("operations", _operations, frozenset({Need.OPERATIONS})),
    Detector("uneven data", lambda context, _: context.balanced.findings, _GRAPH),
    Detector(
        "uneven stages", lambda context, _: find_uneven_work_of_stages(context.at_equal_work), _GRAPH,
        unless=(operations_show_stages,),
    ),
    Detector(
        "slow ranks", _slow_ranks, _GRAPH,
        rules=(
            not_explained_by_uneven_data, doubted_for_uneven_stages, not_found_by_operations,
            not_taken_in_turn,
        ),
    ),
    Detector(
        "masked ranks", _masked_ranks, _GRAPH,
        rules=(not_explained_by_uneven_data, not_found_by_operations, not_taken_in_turn),
    ),
    Detector("slow input", _slow_input, _GRAPH),
    Detector("slow network", lambda context, _: diagnose_traffic(context.traffic), _GRAPH),
    Detector("idle GPUs", _idle_gpus, frozenset({Need.GRAPH, Need.BREAKDOWN})),
)  # fmt: skip
FROM_CALLS = (
    Detector(
        "late ranks", lambda context, _: context.late_by_calls, _ALWAYS_ON,
        rules=(
            not_found_in_windows, not_part_of_slow_input, not_late_by_messages,
            not_beside_a_larger_slowdown,
        ),
    ),
    Detector(
        "late GPUs", _late_gpus, _ALWAYS_ON,
        rules=(not_late_by_calls, not_found_in_windows, not_late_by_messages),
    ),
    Detector(
        "slow wires", lambda context, _: diagnose_traffic(context.sends), _ALWAYS_ON,
        unless=(windows_show_a_slow_network,),
    ),
    Detector(
        "slow timed calls", lambda context, _: diagnose_traffic(context.timed_calls), _ALWAYS_ON,
        unless=(windows_show_a_slow_network, wires_show_a_slow_network),
    ),
    Detector(
        "communication-bound hosts", _communication_bound, _ALWAYS_ON,
        unless=(
            windows_show_a_slow_network, windows_name_ranks, wires_show_a_slow_network,
            timed_calls_show_a_slow_network, others_wait_for_ranks,
        ),
    ),
    Detector("waiting for input", _input_bound, _ALWAYS_ON, unless=(windows_show_slow_input,)),
    Detector(
        "turns", lambda context, _: context.turns, _ALWAYS_ON,
        unless=(windows_name_ranks, others_wait_for_ranks, timed_calls_show_a_slow_network),
    ),
    Detector(
        "jitter", _jitter, _ALWAYS_ON,
        rules=(not_late_by_calls, not_found_in_windows, not_late_by_messages),
    ),
    Detector(
        "pauses", lambda context, _: context.pauses.findings, _ALWAYS_ON,
        rules=(not_the_empty_queue_of_a_late_host,),
    ),
)  # fmt: skip
DETECTORS = (*IN_WINDOWS, *FROM_CALLS)
OF_THE_JOB = (Detector("regression", _regression, frozenset({Need.STEPS})),)
EXPLANATIONS = (_with_crowded_hosts, _with_losses, _with_gpus)


# What is worth a sentence though nothing is wrong: a rank that causes most waiting, at no cost.

MIN_WAITING = 0.1  # of the step, mean over ranks
ONCE = 0.8  # of what a rank is waited for: in one step
REMAINS = 0.5  # of the waiting, with the rank healed: then others are as late


def note_waiting(baseline: Baseline, findings: Sequence[Finding]) -> list[str]:
    """Say which rank the others wait for in collectives, where it is mostly one that no finding names.

    Most is halfway from an equal share to all.
    """
    if any(finding.class_ == UNEVEN_DATA for finding in findings):
        return []
    graph = baseline.graph
    measured = _in_whole_groups(graph, waits(graph, graph.nodes.measured_start))
    ranks, steps = measured["rank"].n_unique(), measured["step"].n_unique()
    total = float(measured["wait_ns"].sum())
    if not total:
        return []
    caused = measured.group_by("last").agg(pl.col("wait_ns").sum()).sort("wait_ns", "last")
    rank, most = caused.row(-1)
    named = ranks_of(finding for finding in findings if not finding.of_job)
    if rank in named or most < (1 + 1 / ranks) / 2 * total:
        return []
    per = ranks * steps
    if total < MIN_WAITING * per * _mean_step(graph):
        return []
    for_it = measured.filter(pl.col("last") == rank)
    by_step = for_it.group_by("step").agg(pl.col("wait_ns").sum()).sort("wait_ns")
    step, worst = by_step.row(-1)
    once = f", nearly all in step {step}" if steps > 1 and worst >= ONCE * most else ""
    seen = (
        f"each rank waits {format_duration(total / per)} per step for others in collectives, "
        f"{format_duration(most / per)} ({most / total:.0%}) of it for rank {rank}{once}; it comes last to "
        f"{for_it['instance'].n_unique()} of {measured['instance'].n_unique()}"
    )
    return [f"{seen}; {_why_it_costs_little(baseline, rank, most / per)}"]


def _why_it_costs_little(baseline: Baseline, rank: int, waited_ns: float) -> str:
    """What healing a rank would save, and what the others then wait for."""
    graph, work = baseline.graph, baseline.work
    if not peers_of(baseline.teams, rank):
        return "no other rank makes the same calls, which would show what that costs"
    healed = Shortened(healing_in_each_step(rank, work))
    gains = gains_of(baseline, work, [[rank]], healed)
    step, saved = float(gains.base.mean()), float(gains.saved.mean())
    said = (
        f"replayed with rank {rank} as fast as its peers in each step, the step takes "
        f"{format_duration(step - saved)} instead of {format_duration(step)}"
    )
    before = _in_whole_groups(graph, waits(graph, baseline.timeline.start))
    changed = baseline.under(healed)
    after = _in_whole_groups(changed.graph, waits(changed.graph, changed.timeline.start))
    left = float(after["wait_ns"].sum())
    if left < REMAINS * float(before["wait_ns"].sum()):
        return f"{said}: what runs during this waiting takes as long"
    after_it, most = after.group_by("last").agg(pl.col("wait_ns").sum()).sort("wait_ns", "last").row(-1)
    if after_it == rank:
        return f"{said}: {_why_late(baseline, rank, waited_ns)}"
    per = before["rank"].n_unique() * before["step"].n_unique()
    return (
        f"{said}: they would then wait {format_duration(left / per)}, {format_duration(most / per)} of it "
        f"for rank {after_it}"
    )


def _why_late(baseline: Baseline, rank: int, waited_ns: float) -> str:
    """What is known of a rank that is late even with what it works longer taken away."""
    longer = excess_by_cause(baseline, rank, peers_of(baseline.teams, rank), 0)
    excess = float(longer["excess_ns"].clip(lower_bound=0).sum())
    if excess < waited_ns / 2:
        return "it works hardly longer than its peers: the trace does not show why it is late"
    first = longer.row(0, named=True)
    return (
        f"it works {format_duration(excess)} longer per step than its peers (most in {first['cause']}: "
        f"{first['example'][:80]}), but other ranks do where it counts"
    )


def _mean_step(graph: Graph) -> float:
    """Mean measured step, ns."""
    steps = step_times(graph, graph.nodes.measured_start, graph.nodes.measured_end)
    return float(steps["duration_ns"].to_numpy().mean())


def _in_whole_groups(graph: Graph, waited: pl.DataFrame) -> pl.DataFrame:
    """Waits in collectives all of whose members are recorded; waiting for messages is how pipelines work."""
    nodes = graph.nodes
    moved = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & (nodes.message >= 0))
    kinds = [graph.messages[message] for message in nodes.message[moved].tolist()]
    kinds_of_calls = pl.DataFrame(
        {
            "instance": nodes.collective[moved],
            "op": [kind.op for kind in kinds],
            "size": [kind.num_ranks for kind in kinds],
        },
        schema={"instance": pl.Int64, "op": pl.String, "size": pl.Int64},
    ).unique("instance")
    return (
        waited.join(kinds_of_calls.filter(~pl.col("op").is_in(NUMBERED_APART)), on="instance")
        .filter(pl.len().over("instance") >= pl.col("size"))
        .drop("op", "size")
    )


# A job that runs: what its deep windows show, and which ranks its calls show to be late now.


def diagnose_graph(context: Context) -> list[Finding]:
    """What deep windows show while the job runs, costliest first.

    Whether hosts have more threads than cores shows better in the steps between windows, so that only takes
    findings away.
    """
    findings = costliest_first(run_detectors(context, IN_WINDOWS))
    if Need.STEPS not in context.has:
        return findings
    crowds = context.crowds
    return not_crowding(findings, crowds, context.steps, context.counters)


class LatestSteps(NamedTuple):
    """What is known of the latest steps of a job that runs.

    Attributes:
        own_times: as `own_time` returns them, `start_ns` on each host's own clock.
        calls: as `calls_of` returns them.
        amounts: rows of `counters` that say how much work steps had.
        counters: returns the rows of `counters` of ranks that are late and some others.
        messages_unseen: whether ranks may also have waited for messages, which calls do not show.
    """

    own_times: pl.DataFrame
    calls: pl.DataFrame
    steps: pl.DataFrame
    workers: pl.DataFrame
    amounts: pl.DataFrame
    counters: Callable[[Sequence[int]], pl.DataFrame]
    messages_unseen: bool


def diagnose_calls(latest: LatestSteps) -> list[Finding]:
    """Ranks that the others wait for while the job runs, costliest first.

    What costs nothing now raises no alarm, and a crowded host is reported only in place of its ranks.
    """
    late = _late_now(latest, latest.amounts)
    ranks = [rank for finding in late if finding.component_kind != "job" for rank in finding.ranks]
    if not ranks:
        return late
    counters = latest.counters(ranks)
    late = _late_now(latest, pl.concat([latest.amounts, counters.filter(pl.col("counter") != WORKLOAD)]))
    crowds = crowds_of(latest.steps, counters, latest.workers)
    kept = not_crowding(late, crowds, latest.steps, counters)
    return kept if len(kept) == len(late) else [*find_crowded_hosts(crowds, counters), *kept]


def _late_now(latest: LatestSteps, counters: pl.DataFrame) -> list[Finding]:
    findings = find_late_ranks(
        latest.own_times, latest.calls, counters, latest.workers, doubtful=latest.messages_unseen
    )
    return [finding for finding in findings if finding.severity >= NEGLIGIBLE]
