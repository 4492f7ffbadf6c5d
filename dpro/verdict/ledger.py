"""Ledger of the usual step of a job: every nanosecond of it belongs to exactly one cause.

Takes `JobFacts`; returns entries that add up to the step. They are a waterfall: one thing after another costs
nothing any more, from specific causes to general ones, and each entry is what its removal saves by replay in
addition to those before it. So sizes depend on the order, which is `ORDER`. What remains in the end is
unexplained. The limit of the job follows from the entries by one rule, `limit_of_entries`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from dpro.detect.findings import NETWORK, Finding
from dpro.detect.machine.oversubscribed import CAUSE as CROWDED
from dpro.detect.stragglers.causes import INPUT_PIPELINE
from dpro.errors import DproError
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import changed_steps_ns, slowdowns_of
from dpro.replay.whatif.registry import parse_edit
from dpro.verdict.facts import JobFacts
from dpro.verdict.limits import (
    ALLOCATOR,
    BUBBLE,
    CHANGES,
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
    Free,
    without_bubble,
    work_of_devices,
)

NO_CORE, RANK, UNEXPLAINED = "no-core", "rank", "unexplained"
ORDER = (
    COMPILATION, CHECKPOINT, COLLECTION, NO_CORE, RANK, INPUT, SYNCHRONISATION, ALLOCATOR,
    IMBALANCE, BUBBLE, COMMUNICATION, COPIES, HOST, COMPUTE, UNEXPLAINED,
)  # fmt: skip
# Limits that entries of other names are part of.
LIMIT_OF = {NO_CORE: HOST, ALLOCATOR: HOST, RANK: IMBALANCE}
OF_OPERATIONS = (INPUT, SYNCHRONISATION, IMBALANCE)  # causes that are replayed for whole operations
HIDDEN = 1e-3  # a cause whose removal saves a smaller share of the step is hidden behind others
LARGE = 0.2  # least share of the step for a limit other than compute

Change = Callable[[ReplayedJob], ReplayedJob]


class LedgerRow(NamedTuple):
    """The share of the usual step that one cause takes.

    Attributes:
        cause: one of `ORDER`.
        ranks: ranks that the cause concerns, if it is about particular ones.
        ns: of the step.
        evidence: what shows it.
    """

    cause: str
    ranks: tuple[int, ...]
    ns: float
    evidence: str


def entries_of(facts: JobFacts) -> list[LedgerRow]:
    """Return the entries of the usual step; causes that take nothing are left out, except the unexplained.

    A cause that is hidden behind others stays in the job until one of them is removed, so that each entry is
    what its removal saves in the job as it is then: the first entry, in the job as it runs.
    """
    job, left_ns, entries = facts.job, facts.step_ns, list[LedgerRow]()
    waiting, hidden = deque(_changes(facts)), deque[Cause]()
    while waiting or hidden:
        is_alone = bool(waiting)  # the last ones hide each other, and are removed one after the other
        removed = waiting.popleft() if is_alone else hidden.popleft()
        with suppress(DproError):  # the run does not show it, or has none of it
            changed, now_ns = _removed(facts, job, left_ns, removed)
            has_entry = removed.cost_ns is not None or removed.cause in {entry.cause for entry in entries}
            if is_alone and not has_entry and left_ns - now_ns < HIDDEN * facts.step_ns:
                hidden.append(removed)
                continue
            entries.append(LedgerRow(removed.cause, removed.ranks, left_ns - now_ns, removed.evidence))
            job, left_ns = changed, now_ns
            if is_alone:
                waiting.extendleft(reversed(hidden))
                hidden.clear()
    if not facts.analysis.outline.of_operations:
        with suppress(DproError):
            _, now_ns = _removed(facts, job, left_ns, WORK_OF_DEVICES)
            # Without launches, work begins when it did, whatever is removed; its own time is known.
            busy_ns = min(facts.computing * facts.step_ns, left_ns)
            evidence = WORK_OF_DEVICES.evidence if left_ns - now_ns >= busy_ns else "time of kernels"
            now_ns = min(now_ns, left_ns - busy_ns)
            entries.append(LedgerRow(COMPUTE, (), left_ns - now_ns, evidence))
            left_ns = now_ns
    elif (busiest_ns := without_bubble(job.graph, facts.ends)) is not None:
        now_ns = min(float(np.mean(busiest_ns)), left_ns)
        entries.append(LedgerRow(BUBBLE, (), left_ns - now_ns, "work of the busiest rank"))
        entries.append(LedgerRow(COMPUTE, (), now_ns, "work of the busiest rank"))
        left_ns = 0.0
    kept = [entry for entry in entries if entry.ns > 0]
    return [*kept, LedgerRow(UNEXPLAINED, (), left_ns, "what is left")]


def _removed(facts: JobFacts, job: ReplayedJob, left_ns: float, cause: Cause) -> tuple[ReplayedJob, float]:
    """Return a job without a cause, and how long its usual step is, at most `left_ns`.

    Raises:
        DproError: the run does not show the cause, or has none of it.
    """
    changed = cause.change(job)
    if cause.cost_ns is not None:
        now_ns = left_ns - cause.cost_ns
    else:
        slowdowns = slowdowns_of(facts.analysis.trust)
        now_ns = float(changed_steps_ns(facts.ends, facts.job, changed, slowdowns).mean())
    return changed, min(max(now_ns, 0.0), left_ns)


class Cause(NamedTuple):
    """A possible cause of time in a step.

    Attributes:
        cause: one of `ORDER`.
        ranks: ranks that the cause concerns, if it is about particular ones.
        change: makes a job without the cause.
        evidence: what shows that it is present.
        cost_ns: its cost in the usual step, if a finding knows it.
    """

    cause: str
    ranks: tuple[int, ...]
    change: Change
    evidence: str
    cost_ns: float | None = None


WORK_OF_DEVICES = Cause(
    COMPUTE, (), lambda job: job.with_change(Free(work_of_devices)), "replayed without it"
)  # what is left once nothing is lost


def _changes(facts: JobFacts) -> Iterator[Cause]:
    """Yield causes in the order in which they are removed; what devices have to do is none."""
    if facts.still is not None:
        ended = facts.still.ended
        longer = "calls that take longer than such usually do"
        yield Cause(NO_CORE, (), lambda job: job.with_change(ended), longer)
    by_findings = [(cause_of_finding(finding), finding) for finding in facts.findings]
    if facts.still is not None:
        by_findings = [(cause, finding) for cause, finding in by_findings if cause != NO_CORE]
    of_operations = facts.analysis.outline.of_operations
    for cause in ORDER:
        for finding in (finding for of, finding in by_findings if of == cause):
            healed = partial(_healed, finding.ranks) if cause == RANK else _unchanged
            if not finding.costs_pauses:
                yield Cause(cause, finding.ranks, healed, f"finding {finding.class_}", finding.cost_ns)
        for change in (change for of, change in CHANGES if of == cause):
            if not of_operations or cause in OF_OPERATIONS:
                yield Cause(cause, (), change, "replayed without it")


def cause_of_finding(finding: Finding) -> str:
    """Return the entry that a finding is part of; empty if it is part of none.

    Pauses are outside the usual step, and a host that keeps GPUs waiting is a bound on all that hosts cost.
    """
    if finding.class_ in NETWORK:
        return COMMUNICATION
    if finding.class_.startswith("imbalance."):
        return IMBALANCE
    if finding.cause == CROWDED:
        return NO_CORE
    if finding.component_id == INPUT_PIPELINE:
        return INPUT
    slow = finding.class_ in ("slow.host", "slow.compute")
    return RANK if slow and finding.component_kind in ("rank", "ranks") else ""


def _unchanged(job: ReplayedJob) -> ReplayedJob:
    """Return the job itself: the cost of a finding is known, and no edit removes exactly that."""
    return job


def _healed(ranks: Sequence[int], job: ReplayedJob) -> ReplayedJob:
    for rank in ranks:
        job = job.under(parse_edit(f"heal:rank={rank}"), in_full=False).job
    return job


def shares_of_limits(entries: Sequence[LedgerRow]) -> dict[str, float]:
    """Return the share of the step that each limit takes, and under its own name the unexplained share."""
    whole = sum(entry.ns for entry in entries) or 1.0
    shares: dict[str, float] = {}
    for entry in entries:
        limit = LIMIT_OF.get(entry.cause, entry.cause)
        shares[limit] = shares.get(limit, 0.0) + entry.ns / whole
    return shares


def limit_of_entries(
    entries: Sequence[LedgerRow], of_operations: bool, gains: Callable[[str], bool] = bool
) -> str:
    """Return the limit of a job: the largest part of its step except compute, if that is large; else compute.

    If devices and hosts work side by side, little may be left for the host after the work of the devices. If
    the step were as long with free devices, the host is the limit nevertheless, unless these work for nearly
    all of it. Stages of a pipeline wait for
    each other: there, the largest share other than compute is the limit, however small.

    Args:
        gains: returns whether removing a limit gains anything; otherwise it is not one.

    Returns:
        Empty if most of the step is unexplained.
    """
    shares = shares_of_limits(entries)
    if max(shares, key=shares.__getitem__, default=UNEXPLAINED) == UNEXPLAINED:
        return ""
    others = {limit: share for limit, share in shares.items() if limit not in (COMPUTE, UNEXPLAINED)}
    most = next(filter(gains, sorted(others, key=others.__getitem__, reverse=True)), COMPUTE)
    is_large = others.get(most, 0.0) >= (0.0 if of_operations else LARGE)
    has_room = shares.get(COMPUTE, 0.0) <= 1 - LARGE
    return most if is_large or (has_room and not gains(COMPUTE)) else COMPUTE
