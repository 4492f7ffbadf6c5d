"""Detectors on a job that runs: what its deep windows show, and which ranks its calls show to be late now.

In: the context of windows, or what is known of the latest steps. Out: findings worth an alarm, by the
detectors and rules of `dpro.detect.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import polars as pl

from dpro.detect.context import Context, Need
from dpro.detect.findings import Finding
from dpro.detect.imbalance.load_model import WORKLOAD
from dpro.detect.machine.oversubscribed import crowds_of, find_crowded_hosts, not_crowding
from dpro.detect.run import IN_WINDOWS, costliest_first, run_detectors
from dpro.detect.stragglers.from_calls import NEGLIGIBLE, find_late_ranks


def diagnose_graph(context: Context) -> list[Finding]:
    """What deep windows show while the job runs, costliest first.

    Whether hosts have more threads than cores shows better in the steps between windows, so that only takes
    findings away.
    """
    found = costliest_first(run_detectors(context, IN_WINDOWS))
    if Need.STEPS not in context.has:
        return found
    crowds = crowds_of(context.steps, context.counters, context.workers)
    return not_crowding(found, crowds, context.steps, context.counters)


class LatestSteps(NamedTuple):
    """What is known of the latest steps of a job that runs.

    Attributes:
        own: own times, as `own_time` returns them, `start_ns` on each host's own clock.
        calls: as `calls_of` returns them.
        steps, workers: rows of these tables.
        amounts: rows of `counters` that say how much work steps had.
        counters: returns the rows of `counters` of ranks that are late and some others.
        messages_unseen: whether ranks may also have waited for messages, which calls do not show.
    """

    own: pl.DataFrame
    calls: pl.DataFrame
    steps: pl.DataFrame
    workers: pl.DataFrame
    amounts: pl.DataFrame
    counters: Callable[[Sequence[int]], pl.DataFrame]
    messages_unseen: bool


def diagnose_calls(latest: LatestSteps) -> list[Finding]:
    """Ranks that the others wait for while the job runs, costliest first.

    What costs nothing now raises no alarm, and a crowded host is reported only in place of its ranks.

    Args:
        latest: what is known of the latest steps.
    """
    late = _late_now(latest, latest.amounts)
    ranks = [rank for finding in late if finding.component_kind == "rank" for rank in finding.ranks]
    if not ranks:
        return late
    counters = latest.counters(ranks)
    late = _late_now(latest, pl.concat([latest.amounts, counters.filter(pl.col("counter") != WORKLOAD)]))
    crowds = crowds_of(latest.steps, counters, latest.workers)
    kept = not_crowding(late, crowds, latest.steps, counters)
    return kept if len(kept) == len(late) else [*find_crowded_hosts(crowds, counters), *kept]


def _late_now(latest: LatestSteps, counters: pl.DataFrame) -> list[Finding]:
    found = find_late_ranks(
        latest.own, latest.calls, counters, latest.workers, doubtful=latest.messages_unseen
    )
    return [each for each in found if each.severity >= NEGLIGIBLE]
