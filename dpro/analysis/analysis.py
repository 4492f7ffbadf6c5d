"""The analysis of a run: tables, graph, replay, findings and what-ifs, each computed once and kept.

Takes an opened run; returns an `Analysis`. Nothing is read or imported before its first use, so a command
pays only for what it needs. Several threads may use one `Analysis` concurrently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl

from dpro.analysis.cached import Cached, cached
from dpro.errors import DproError, Unanswerable
from dpro.schema import (
    CLOCK_SAMPLES,
    COLLECTIVES,
    COUNTERS,
    MODEL_CALLS,
    OUT_OF_MEMORY,
    SPANS,
    STEPS,
    WORKERS,
)
from dpro.selection import ALL, Ranges, Selection, ranges_of
from dpro.stages import stage
from dpro.store import Run
from dpro.table import Table
from dpro.units import NS_PER_MS

if TYPE_CHECKING:
    from dpro.analysis.end import JobEnd
    from dpro.detect.context import Context
    from dpro.detect.findings import Finding
    from dpro.detect.hang.case import Case
    from dpro.detect.pipeline_slowdown import OperationsAnalysis
    from dpro.replay.construction.graph_builder import Built
    from dpro.replay.cost.curves import LinkCost
    from dpro.replay.cost.transfers import CollectiveKind
    from dpro.replay.fidelity.accuracy import Trust
    from dpro.replay.fidelity.by_rank import CondensedRun
    from dpro.replay.graph import Graph
    from dpro.replay.pretended import PretendedStep
    from dpro.replay.timeline import Timeline


Verdict = tuple[list["Finding"], list[str]]  # findings, and one line for each question the run leaves open


def _table(table: Table) -> cached[Any, pl.DataFrame]:
    """Return a property that reads a table of the run once."""
    return cached(lambda analysis: analysis.run.table(table))


class Analysis(Cached):
    """A run and the results computed about it.

    Attributes:
        min_searched_elsewhere: number of spans from which another process searches for helpful changes.
    """

    min_searched_elsewhere: float = math.inf

    def __init__(
        self, run: Run, network: pl.DataFrame | None = None, products: pl.DataFrame | None = None
    ) -> None:
        """Wrap a run without reading anything yet.

        Args:
            network: measured costs of communication, for the graph; None where not measured.
            products: measured times of matrix products, for the graph; None where not measured.
        """
        super().__init__()
        self.run, self._network, self._products = run, network, products
        self._pretended: PretendedStep | None = None  # set when the graph of pretended ranks is built

    @cached
    def steps(self) -> pl.DataFrame:
        """Table `steps`, with the duration of each step."""
        from dpro.replay.steps import steps_of

        return steps_of(self.run)

    spans = _table(SPANS)
    collectives = _table(COLLECTIVES)
    counters = _table(COUNTERS)
    model_calls = _table(MODEL_CALLS)
    out_of_memory = _table(OUT_OF_MEMORY)
    workers = _table(WORKERS)

    @cached
    def waiting(self) -> Case:
        """The progress of each rank, and which ranks wait for which."""
        from dpro.detect.hang.case import examine
        from dpro.detect.hang.records import read_records

        return examine(read_records(self.run))

    @cached
    def hangs(self) -> list[Finding]:
        """Findings on what hangs in the run, or ended it, the surest first."""
        from dpro.detect.hang.find import find_causes, merge_watched
        from dpro.detect.hang.memory import with_memory
        from dpro.detect.hang.stacks import needed_for_cpu_time, with_cpu_time
        from dpro.detect.machine.gpu_state import needed_for_errors, with_broken_links, with_errors
        from dpro.detect.machine.memory_growth import needed_for_growth, with_growth_of_killed

        hangs = merge_watched(find_causes(self.waiting), self.run.path, self.steps)
        hangs = with_memory(hangs, self.out_of_memory, self.workers, self.run.manifest.warnings)
        if not hangs:
            return hangs
        needed = needed_for_errors, needed_for_cpu_time, needed_for_growth
        kept: list[list[pl.DataFrame]] = [[COUNTERS.empty()] for _ in needed]
        for part in self.run.part_by_part(COUNTERS, list(COUNTERS.columns)):
            for rows, wanted in zip(kept, needed, strict=True):
                rows.append(wanted(part))
        events, cpu_time, memory = map(pl.concat, kept)
        hangs = with_cpu_time(hangs, cpu_time, self.workers, self.waiting.now_ns)
        hangs = with_growth_of_killed(hangs, memory)
        tables = self.steps, events, self.workers
        return with_broken_links(with_errors(hangs, *tables), *tables)

    @cached
    def end(self) -> JobEnd:
        """How the job ended."""
        from dpro.analysis.end import end_of

        return end_of(self)

    @cached
    def graph_and_trust(self) -> tuple[Built, Trust]:
        """The graph, from the cache or newly built, and the trust in its replay."""
        from dpro.analysis.graphs import graph_of
        from dpro.analysis.unanswered import why_unanswerable

        with why_unanswerable(self.run, lambda: self.end), stage("Building the graph") as report:
            built, trust = graph_of(self.run, report)
        built = replace(built, graph=replace(built.graph, network=self._network, products=self._products))
        if not self.run.manifest.is_pretended:
            return built, trust
        from dpro.replay.pretended import with_communication

        graph, pretended = with_communication(built, self.run.manifest, self._network, trust.error_pct)
        answerable = trust.answerable and not pretended.unknown
        reasons = (*pretended.unknown, *trust.reasons)
        trust = replace(trust, answerable=answerable, reasons=reasons, doubt_pct=pretended.doubt_pct)
        self._pretended = pretended
        return replace(built, graph=graph), trust

    @cached
    def condensed(self) -> CondensedRun | None:
        """The ranks of a large run, condensed one by one; None for a run whose whole graph is in memory."""
        from dpro.analysis.graphs import condensed_of, is_large
        from dpro.analysis.unanswered import why_unanswerable

        if not is_large(self.run):
            return None
        with why_unanswerable(self.run, lambda: self.end), stage("Building the graph") as report:
            condensed = condensed_of(self.run, report)
        graph = replace(condensed.joined.graph, network=self._network, products=self._products)
        return replace(condensed, joined=replace(condensed.joined, graph=graph))

    @property
    def pretended(self) -> PretendedStep | None:
        """The step of pretended ranks; None if ranks were not pretended, or the run cannot be replayed."""
        if self.run.manifest.is_pretended:
            with suppress(DproError):
                _ = self.built
        return self._pretended

    @property
    def built(self) -> Built:
        """The whole graph, with the data that it was built from."""
        return self.graph_and_trust[0]

    @property
    def outline(self) -> Built:
        """The graph for questions on steps, collectives and clocks: the condensed one of a large run."""
        return self.built if self.condensed is None else self.condensed.built

    @property
    def trust(self) -> Trust:
        """The trust in the replay."""
        return self.graph_and_trust[1] if self.condensed is None else self.condensed.trust

    @cached
    def replayed(self) -> Timeline:
        """The replay of the unchanged graph as recorded, for comparison with the trace."""
        from dpro.replay.timeline import replayed

        return replayed(self.built.graph)

    @cached
    def timeline(self) -> Timeline:
        """The replay of the job as it runs without the recorder: the basis of predictions and findings."""
        from dpro.replay.timeline import replay, replayed

        return replay(self.built.predictive) if self.built.of_operations else replayed(self.built.predictive)

    @cached
    def outline_timeline(self) -> Timeline:
        """`timeline`; for a large run, the replay of the condensed graph."""
        from dpro.replay.timeline import replay

        return self.timeline if self.condensed is None else replay(self.outline.predictive)

    @cached
    def step_extents(self) -> pl.DataFrame:
        """Measured begin and end of each step: `window`, `step`, `begin_ms`, `end_ms`."""
        from dpro.replay.timeline import step_ends

        graph = self.outline_timeline.graph
        ends = step_ends(graph, graph.nodes.measured_start, graph.nodes.measured_end)
        before = pl.col("finish_ns").shift(1).over("window").fill_null(pl.col("begin_ns"))
        ms = {"begin_ms": before / NS_PER_MS, "end_ms": pl.col("finish_ns") / NS_PER_MS}
        return ends.select("window", "step", **ms)

    @property
    def operations(self) -> Analysis | None:
        """The analysis by whole operations; this one if the run has only those, None if none replay."""
        return self._operations[0]

    @property
    def why_no_operations(self) -> str:
        """Why recorded operations cannot be replayed; empty if they can, or if there are none."""
        return self._operations[1]

    @cached
    def _operations(self) -> tuple[Analysis | None, str]:
        from dpro.replay.pipeline.recorded import has_operations

        recorded = has_operations(self.run)
        view = OperationAnalysis(self.run, self._network, self._products) if recorded else self
        try:
            if view.outline.of_operations and view.trust.answerable:
                return view, ""
            why = view.trust.reasons[0] if recorded else ""
        except DproError as error:
            why = str(error)
        return None, why if recorded else ""

    @cached
    def operations_analysis(self) -> OperationsAnalysis | None:
        """The slowdown against equally fast operations; None for a run without operations."""
        from dpro.detect.pipeline_slowdown import analyse_slowdown

        return analyse_slowdown(self.operations.built.graph) if self.operations is not None else None

    @cached
    def context(self) -> Context:
        """Shared results of the detectors that run on the replayed graph."""
        from dpro.detect.baseline import Baseline
        from dpro.detect.context import Context
        from dpro.replay.whatif.predict import slowdowns_of

        if self.built.of_operations:
            return Context(self.run, operations=self._operation_graph)
        if not self.trust.answerable:
            measured = self.built.graph if self.trust.comparable else None
            return Context(self.run, operations=self._operation_graph, measured=measured)
        recorded = Baseline(self.built.predictive, slowdowns_of(self.trust))
        return Context(self.run, recorded, self._operation_graph, breakdown=lambda: self.breakdown)

    @cached
    def judged_by_rank(self) -> Verdict:
        """Findings and notes on a large run, from its condensed ranks."""
        from dpro.analysis.graphs import context_by_rank
        from dpro.detect.notes import notes_of
        from dpro.detect.run import diagnose

        assert self.condensed is not None
        with context_by_rank(self.run, self.condensed, self._operation_graph) as context:
            return (findings := diagnose(context, self.usual_ns)), notes_of(context, findings)

    @property
    def _operation_graph(self) -> tuple[Graph, OperationsAnalysis] | None:
        """The graph of operations and its slowdown; None for a run without operations."""
        view, analysed = self.operations, self.operations_analysis
        return None if view is None or analysed is None else (view.built.graph, analysed)

    @cached
    def verdict_on_hangs(self) -> Verdict | None:
        """Findings on hangs, and the data missing for them; None if nothing hangs and the run shows more."""
        from dpro.analysis.unanswered import not_read

        rows = self.run.rows()
        with stage("Looking for hangs"):
            hangs = self.hangs
        if not hangs and (rows[SPANS.name] or rows[STEPS.name] or not rows[COLLECTIVES.name]):
            return None
        return hangs, not_read(self.run.manifest)

    @cached
    def verdict_by_calls(self) -> Verdict | None:
        """Findings from steps and calls, and what they leave open; None for a run with deep windows."""
        from dpro.analysis.unanswered import not_shown_by_calls, refuse_pretended
        from dpro.detect.context import has_windows
        from dpro.detect.run import diagnose

        if has_windows(self.run):
            return None
        refuse_pretended(self.run)
        context = self.context_of_calls
        with stage("Looking for faults"):
            findings = diagnose(context, self.usual_ns)
        return findings, not_shown_by_calls(self.run, *context.aligned)

    @cached
    def context_of_calls(self) -> Context:
        """Shared results of the detectors that use steps and calls, without deep windows."""
        from dpro.detect.context import Context

        return Context(self.run, operations=self._operation_graph)

    @cached
    def verdict_by_replay(self) -> Verdict:
        """Findings of all detectors, of replay-based ones only where the replay fits, and what stays open.

        Raises:
            Unanswerable: the run has no deep windows, or its ranks were pretended.
        """
        from dpro.analysis.unanswered import not_shown_by_replay, refuse_pretended
        from dpro.detect.run import diagnose

        refuse_pretended(self.run)
        with stage("Looking for faults"):
            if self.condensed is None:
                findings = diagnose(self.context, self.usual_ns)
            else:
                findings = self.judged_by_rank[0]
        return findings, not_shown_by_replay(self.run, self.trust)

    @property
    def verdict(self) -> Verdict:
        """Findings, the costliest first, and what the run cannot show.

        Raises:
            Unanswerable: the run has no data to judge it by.
        """
        return self.verdict_on_hangs or self.verdict_by_calls or self.verdict_by_replay

    def notes(self, findings: Sequence[Finding]) -> list[str]:
        """Return remarks that are worth a line without being findings."""
        from dpro.detect.hang.memory import describe_survivors
        from dpro.detect.notes import notes_of

        of_memory = describe_survivors(self.out_of_memory, self.workers)
        with suppress(DproError):  # windows that cannot be replayed
            if self.condensed is not None:
                return [*of_memory, *self.judged_by_rank[1]]
            context = self.context if self.run.num_rows(SPANS) else self.context_of_calls
            return [*of_memory, *notes_of(context, findings)]
        return of_memory

    @cached
    def breakdown(self) -> pl.DataFrame:
        """The time of each step and rank, by its parts."""
        from dpro.analysis.unanswered import why_unanswerable
        from dpro.replay.steps import step_breakdown

        with why_unanswerable(self.run, lambda: self.end):
            spans, collectives, steps = map(self._own_time, (self.spans, self.collectives, self.steps))
            return step_breakdown(spans, collectives, steps, self.members)

    @cached
    def usual_breakdown(self) -> pl.DataFrame:
        """The usual steps of each rank without the recorder's cost: columns of `breakdown`, in ns as floats.

        As replayed if all ranks have GPU work; otherwise as recorded, scaled to the mean usual step. If the
        run cannot be replayed, or the replay does not fit: all steps as recorded.
        """
        from dpro.replay.step_parts import replayed_breakdown

        with suppress(DproError):  # a run that cannot be replayed
            if not self.trust.answerable:
                return self.breakdown
            if self.condensed is None and not self.built.of_operations:
                met = self.trust.rendezvous  # with ranks that left no record
                partial = () if met is None else met.collective.tolist()
                replayed = replayed_breakdown(self.timeline, self.baseline, partial)
                if replayed["rank"].n_unique() == len(self.built.graph.ranks):
                    return replayed
            usual = Selection(steps=self.usual_steps).keep(self.breakdown)
            usual = usual if usual.height else self.breakdown
            times = pl.col("^.*_ns$")
            return usual.with_columns(times * (self.baseline_ns / pl.col("duration_ns").mean()))
        return self.breakdown

    def breakdown_of(self, selection: Selection) -> tuple[pl.DataFrame, bool]:
        """Return the steps of a selection by their parts, and whether they are usual ones, corrected.

        They are as recorded if steps are selected some of which are not usual.
        """
        usual, recorded = selection.keep(self.usual_breakdown), selection.keep(self.breakdown)
        lacks = selection.steps and not set(recorded["step"]) <= set(usual["step"])
        is_usual = bool(usual.height and not lacks and self.usual_breakdown is not self.breakdown)
        return (usual if is_usual else recorded), is_usual

    @cached
    def usual_steps(self) -> Ranges:
        """The steps of which the usual step is the mean; empty if the run cannot be replayed."""
        from dpro.replay.timeline import durations_of

        with suppress(DproError):
            return ranges_of(durations_of(self.baseline)["step"].unique())
        return ()

    def bubbles(self, selection: Selection = ALL) -> pl.DataFrame:
        """Return `pipeline_bubbles` of selected ranks in selected steps; without any, in the usual ones."""
        from dpro.replay.pipeline.recorded import pipeline_bubbles

        steps = selection.steps or self.usual_steps
        return pipeline_bubbles(self.run, replace(selection, steps=steps))

    @cached
    def phases(self) -> pl.DataFrame:
        """Phases of reinforcement learning; empty if no annotation names one."""
        from dpro.replay.phases import phases

        return phases(self.spans, self.collectives, self.steps, self.members)

    def _own_time(self, table: pl.DataFrame) -> pl.DataFrame:
        """Return a table without the time spent on answering pretended ranks, which is not communication."""
        if not self.run.manifest.is_pretended:
            return table
        from dpro.replay.alignment.align import answers_of, without_answers

        return without_answers(table, answers_of(self.collectives))

    @cached
    def host(self) -> pl.DataFrame:
        """Counters of the host for each step."""
        from dpro.replay.steps import host_facts

        return host_facts(self.steps, self.counters)

    @cached
    def members(self) -> pl.DataFrame:
        """The members of collectives that ran, each with its wait and transfer."""
        from dpro.replay.alignment.align import align, first_begun, one_clock
        from dpro.replay.alignment.match import match_collectives
        from dpro.replay.alignment.transfers import split_members
        from dpro.replay.pipeline.operations import consists_of_operations
        from dpro.replay.steps import lasting_steps

        spans = self._own_time(self.spans)
        matched = match_collectives(self._own_time(self.collectives), spans).rows
        if self.run.manifest.is_pretended:
            return split_members(matched)
        places = spans.select("rank", "window").unique().sort("rank", "window").rows()
        if consists_of_operations(spans):
            return split_members(matched, one_clock(places, "one trace"))
        begun = first_begun(lasting_steps(self.run.table(STEPS)))
        clocks = align(matched, places, self.workers, self.run.table(CLOCK_SAMPLES), begun)
        return split_members(matched, clocks, self.run.manifest.missing_ranks)

    @cached
    def sizes(self) -> pl.DataFrame:
        """Collectives by operation and size."""
        from dpro.replay.steps import collective_totals

        return collective_totals(self.members, self.workers)

    @cached
    def costs(self) -> dict[CollectiveKind, LinkCost]:
        """Fitted cost of communication, by kind of collective."""
        from dpro.replay.cost.transfers import fit_costs

        return fit_costs(self.outline.graph)

    @cached
    def clocks(self) -> tuple[dict[str, int], int]:
        """Lead of each host's clock over the timeline's in ns, and the origin of the timeline in ns.

        Without a graph, no leads are known, and the origin is the first step or sample, 0 without either.
        """
        try:
            built = self.outline
        except DproError:
            starts = [self.steps["start_ns"].min(), self.counters["time_ns"].min()]
            return {}, min((start for start in starts if isinstance(start, int)), default=0)
        return built.alignment.ahead(self.workers), built.graph.origin_ns

    @cached
    def baseline(self) -> pl.DataFrame:
        """Ends of the steps of the unchanged graph.

        Raises:
            Unanswerable: the step time of pretended ranks is unknown.
        """
        from dpro.replay.whatif.predict import baseline_steps

        built = self.outline
        if self._pretended is not None and self._pretended.unknown:
            raise Unanswerable(
                f"{self.run.label}: not known of its pretended ranks: {self._pretended.unknown[0]}"
            )
        return baseline_steps(built.predictive, self.outline_timeline, longest_ns=self.longest_deep_ns)

    @cached
    def longest_deep_ns(self) -> float | None:
        """Length beyond which a replayed step does not represent the job, in ns; None where not known."""
        from dpro.replay.steps import longest_deep_ns

        longest_ns = longest_deep_ns(self.steps)
        return None if longest_ns is None else longest_ns * self.outline.pace

    @cached
    def baseline_ns(self) -> float:
        """Mean usual step of the job as it runs, in ns: the baseline of predictions and of costs."""
        from dpro.replay.timeline import durations_of

        return float(durations_of(self.baseline)["duration_ns"].to_numpy().mean())

    @cached
    def usual_ns(self) -> float | None:
        """The usual step of all answers, in ns: in deep windows, else the typical one; None without steps.

        It is also the typical one where windows slow down steps beyond correction.
        """
        from dpro.replay.fidelity.accuracy import windows_mislead
        from dpro.replay.steps import step_series

        if self.run.num_rows(SPANS) and not windows_mislead(self.steps):
            with suppress(DproError):  # windows that cannot be replayed
                return self.baseline_ns
        series = step_series(self.steps)
        return series.typical_ns if series else None

    @cached
    def shared_hosts(self) -> list[str]:
        """Hosts on which processes of other jobs used cores for which ranks waited."""
        from dpro.detect.machine.oversubscribed import shared_hosts

        return shared_hosts(self.steps, self.counters, self.workers)

    @cached
    def suspects(self) -> frozenset[int]:
        """Ranks that findings name as slow themselves; empty if the run cannot show it."""
        from dpro.detect.findings import ranks_of

        with suppress(DproError):
            slow = [finding for finding in self.verdict[0] if finding.class_ in ("slow.compute", "slow.host")]
            return frozenset(ranks_of(finding for finding in slow if not finding.of_job))
        return frozenset()


class OperationAnalysis(Analysis):
    """The analysis of a recorded pipeline-parallel job by its whole operations.

    Its graph has forward and backward of each micro-batch in place of kernels and CPU work, for questions on
    stages and schedules.
    """

    @property
    def operations(self) -> Analysis | None:
        """This analysis."""
        return self

    @cached
    def condensed(self) -> CondensedRun | None:
        """None: operations are too few to condense."""
        return None

    @cached
    def graph_and_trust(self) -> tuple[Built, Trust]:
        """The graph of operations and the trust in its replay; never cached on disk, since it is small."""
        from dpro.replay.construction.graph_builder import build_operation_view
        from dpro.replay.fidelity.accuracy import assess
        from dpro.replay.timeline import replay

        built = build_operation_view(self.run)
        return built, assess(built, replay(built.graph), self.run.manifest)
