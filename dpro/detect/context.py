"""Data that the detectors of one run share, each computed on first use: tables, graph, own times, pauses.

Takes a run, and the graph of its deep windows: its replay if that can be trusted, or else its measured times
if these can be compared. Provides what `run.py` passes to the detectors. Does not decide which findings
exclude each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import cached_property

import polars as pl

from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.machine.oversubscribed import Crowd, crowds_of
from dpro.detect.network.traffic import (
    Traffic,
    traffic_as_measured,
    traffic_of,
    traffic_of_calls,
    traffic_of_sends,
)
from dpro.detect.pauses import LostTime, find_pauses
from dpro.detect.pipeline_slowdown import OperationsAnalysis
from dpro.detect.significance import LATEST_STEPS, MIN_STEPS
from dpro.detect.stragglers.from_calls import (
    NONE_AHEAD,
    AheadHosts,
    find_late_ranks,
    find_turns,
    messages_unseen,
    on_gpus,
)
from dpro.detect.stragglers.own_time import AlwaysOn, calls_of, on_one_clock, own_time_of_all, usual_ones
from dpro.detect.stragglers.replayed import find_persistent, find_stragglers, healing_gains
from dpro.detect.uneven_work import BalancedJob, rebalance
from dpro.replay.fidelity.accuracy import windows_mislead
from dpro.replay.graph import Graph
from dpro.replay.steps import host_facts, job_steps, step_series, steps_of
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, OPERATIONS, SENDS, SPANS, STEPS, WORKERS
from dpro.store import Run
from dpro.timed import hosts_ahead


class Need(Enum):
    """Data of a run that a detector requires."""

    GRAPH = auto()  # deep windows whose replay fits
    TRANSFERS = auto()  # deep windows whose measured times can be compared
    BREAKDOWN = auto()  # the breakdown of step times in deep windows
    OPERATIONS = auto()  # whole operations of a pipelined job
    ALWAYS_ON = auto()  # enough steps outside deep windows
    STEPS = auto()  # table `steps`, with counters where there are any


def has_windows(run: Run) -> bool:
    """Return whether to analyse deep windows: they have enough steps, or the run has no steps or no calls."""
    rows = run.rows()
    if not rows[STEPS.name] or not rows[COLLECTIVES.name]:
        return True
    inside = run.table(STEPS, ["step", "window"]).filter(pl.col("window") >= 0)
    return bool(rows[SPANS.name]) and inside["step"].n_unique() >= MIN_STEPS


class Context:
    """The data of a run, for its detectors.

    Attributes:
        operations: the graph of whole operations and its analysis; None where the run has none.
        breakdown: returns `step_breakdown` of the run; None where that is not known.
    """

    def __init__(
        self,
        run: Run | None = None,
        recorded: Baseline | None = None,
        operations: tuple[Graph, OperationsAnalysis] | None = None,
        breakdown: Callable[[], pl.DataFrame] | None = None,
        measured: Graph | None = None,
    ) -> None:
        """Take the run and its graphs; nothing is read or computed yet.

        Args:
            run: None to analyse the graph alone.
            recorded: the graph of deep windows; None without one whose replay fits.
            operations: the graph of whole operations and its analysis; None where the run has none.
            breakdown: returns `step_breakdown` of the run; None where that is not known.
            measured: without `recorded`, the graph whose replay does not fit if its measured times can be
                compared.
        """
        self._run = run
        self._recorded = recorded
        self._measured = measured
        self.operations = operations
        self.breakdown = breakdown

    @cached_property
    def has(self) -> frozenset[Need]:
        """The needs that this run satisfies."""
        graph = self._recorded is not None
        run = None if self._run is None or self._only_operations(self._run) else self._run
        offers = {
            Need.OPERATIONS: self.operations is not None,
            Need.GRAPH: graph,
            Need.TRANSFERS: graph or self._measured is not None,
            Need.BREAKDOWN: graph and self.breakdown is not None,
            Need.ALWAYS_ON: run is not None and self._enough_steps(run),
            Need.STEPS: run is not None,
        }
        return frozenset(need for need, there in offers.items() if there)

    def _only_operations(self, run: Run) -> bool:
        """Return whether the run was recorded as operations, so that its other tables only repeat them."""
        return self.operations is not None and not run.num_rows(OPERATIONS)

    @staticmethod
    def _enough_steps(run: Run) -> bool:
        outside = run.table(STEPS, ["step", "window"]).filter(pl.col("window") < 0)
        return outside["step"].n_unique() >= min(LATEST_STEPS) or not has_windows(run)

    @property
    def run(self) -> Run:
        """The run, for detectors that need its tables."""
        assert self._run is not None
        return self._run

    # Deep windows.

    @property
    def recorded(self) -> Baseline:
        """The graph as recorded."""
        assert self._recorded is not None
        return self._recorded

    @cached_property
    def balanced(self) -> BalancedJob:
        """The job with balanced work; as recorded where balancing explains no slow rank."""
        balanced = rebalance(self.recorded)
        if not balanced.from_steps and not slow_ranks(self.recorded):
            return BalancedJob(self.recorded, [], True, {})
        return balanced

    @property
    def at_equal_work(self) -> Baseline:
        """The baseline in which ranks are compared."""
        return self.balanced.baseline

    def saved_by_healing(self, ranks: Sequence[int]) -> tuple[float, float] | None:
        """Return what ranks as fast as their peers save of the usual step by replay, and its length, in ns.

        None without a graph, where windows slow down steps beyond correction, or where ranks have no peers.
        """
        if self._recorded is None or windows_mislead(self.steps):
            return None
        baseline = self.at_equal_work
        gains = healing_gains(baseline, baseline.work, [list(ranks)])
        return gains.of_usual_step(0) if gains else None

    @cached_property
    def traffic(self) -> Traffic:
        """Transfers in deep windows."""
        if self._recorded is None:
            assert self._measured is not None
            return traffic_as_measured(self._measured)
        return traffic_of(self._recorded)

    # Tables that are always recorded.

    @cached_property
    def steps(self) -> pl.DataFrame:
        """Table `steps`, with durations."""
        return steps_of(self.run)

    @cached_property
    def counters(self) -> pl.DataFrame:
        """Table `counters`."""
        return self.run.table(COUNTERS)

    @cached_property
    def workers(self) -> pl.DataFrame:
        """Table `workers`."""
        return self.run.table(WORKERS)

    @cached_property
    def tables(self) -> AlwaysOn:
        """The always-on tables, times on each host's own clock."""
        collectives, clock_samples = self.run.table(COLLECTIVES), self.run.table(CLOCK_SAMPLES)
        return AlwaysOn(collectives, self.steps, self.counters, self.workers, clock_samples)

    @cached_property
    def aligned(self) -> tuple[AlwaysOn, list[int]]:
        """The always-on tables on one clock, and ranks left out as their clocks were never compared."""
        return on_one_clock(self.tables)

    @cached_property
    def calls(self) -> pl.DataFrame:
        """Collective calls on one clock, as from `calls_of`."""
        return calls_of(self.aligned[0].collectives)

    @cached_property
    def own_times(self) -> pl.DataFrame:
        """Own times of ranks in all steps, as from `own_time_of_all`."""
        return own_time_of_all(self.calls, self.aligned[0].steps)

    @cached_property
    def crowds(self) -> list[Crowd]:
        """Hosts on which all ranks wait long for a core."""
        return crowds_of(self.steps, self.counters, self.workers)

    @cached_property
    def pauses(self) -> LostTime:
        """Time lost in only some of the steps."""
        return find_pauses(self.steps, self.counters, lambda: self.own_times)

    @cached_property
    def usual_own_times(self) -> pl.DataFrame:
        """Own times in usual steps, without pauses."""
        return usual_ones(self.own_times).filter(~pl.col("step").is_in(self.pauses.steps))

    def own_times_and_steps(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return own times in usual steps, and the job's steps."""
        return self.usual_own_times, job_steps(self.steps)

    @cached_property
    def usual_steps(self) -> pl.DataFrame:
        """Table `steps` without pauses."""
        return self.steps.filter(~pl.col("step").is_in(self.pauses.steps))

    @cached_property
    def messages_unseen(self) -> bool:
        """Whether ranks may also have waited for messages, which calls do not show."""
        aligned = self.aligned[0]
        return messages_unseen(aligned.collectives, aligned.workers)

    @cached_property
    def on_gpus(self) -> bool:
        """Whether the job computes on GPUs."""
        return on_gpus(self.aligned[0].workers)

    @cached_property
    def late_by_calls(self) -> list[Finding]:
        """Ranks that others wait for, from the times of their calls."""
        aligned = self.aligned[0]
        if self.calls.is_empty() or aligned.steps.is_empty():
            return []
        return find_late_ranks(
            self.usual_own_times, self.calls, aligned.counters, aligned.workers,
            doubtful=self.messages_unseen, ahead=self.ahead,
        )  # fmt: skip

    @cached_property
    def ahead(self) -> AheadHosts:
        """Hosts that finish most steps long before their GPUs do."""
        ranks = hosts_ahead(self.steps)["rank"].to_list()
        series = step_series(self.steps) if ranks else None
        return AheadHosts(ranks, self.pauses.kept_waiting, series.typical_ns) if series else NONE_AHEAD

    @cached_property
    def turns(self) -> list[Finding]:
        """Ranks that take turns, from their calls; not those of crowded hosts, which may share a core."""
        aligned = self.aligned[0]
        if self.on_gpus or self.calls.is_empty() or aligned.steps.is_empty():
            return []
        crowded = {rank for crowd in self.crowds for rank in crowd.ranks}
        facts = host_facts(self.steps, self.counters)
        turns = find_turns(self.usual_own_times, self.calls, aligned.workers, facts)
        return [finding for finding in turns if not {*finding.ranks} <= crowded]

    @cached_property
    def sends(self) -> Traffic:
        """Transfers recorded by NCCL's network threads."""
        traffic = traffic_of_sends(self.run.table(SENDS), self.steps, self.workers)
        return replace(traffic, run=self.run)

    @cached_property
    def timed_calls(self) -> Traffic:
        """Transfers of calls that were timed outside deep windows."""
        world_size = self.run.manifest.world_size
        traffic = traffic_of_calls(self.tables.collectives, self.steps, self.workers, world_size)
        return replace(traffic, run=self.run)


def slow_ranks(baseline: Baseline) -> list[Finding]:
    """Return ranks that the step waits for, and ranks that work longer though the step hardly waits."""
    findings = find_stragglers(baseline)
    return [*findings, *find_persistent(baseline, {rank for finding in findings for rank in finding.ranks})]
