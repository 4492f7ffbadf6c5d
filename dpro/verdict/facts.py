"""A run as the verdict looks at it: its graph, the steps that count, and what changes of it would give.

In: an `Analysis`. Out: a `JobFacts`, whose parts everything of the verdict shares, each computed once. Among
them is what hosts do for long: they stand still for want of a core (`StandStill`), or work for milliseconds
before one launch (`SlowLaunches`). Names of kernels are shortened so that a person can read them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.analysis.graphs import condensed_job
from dpro.analysis.mean_step import PARTS, means_over_all
from dpro.analysis.predictions import predict_edits
from dpro.arrays import Bools, Floats
from dpro.classify import COMMUNICATION, classify
from dpro.detect.findings import CodePlace, Finding
from dpro.detect.machine.oversubscribed import shared_hosts
from dpro.errors import DproError
from dpro.recorders import OF_RECORDER
from dpro.replay.attribution import innermost
from dpro.replay.cost.kernels.roofline import common_model
from dpro.replay.first_calls import first_calls
from dpro.replay.graph import Graph, NodeKind, is_of
from dpro.replay.steps import IS_GPU, recorded_steps, spans_of_steps
from dpro.replay.timeline import changed_ends, durations_of, step_lengths
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.facts import facts_of as run_facts
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import Prediction, changed_steps_ns, predict, slowdowns_of
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import GPU_WORK_KINDS
from dpro.units import NS_PER_MS
from dpro.verdict.limits import (
    CHANGES,
    HOST,
    SLOW_LAUNCH_NS,
    Counterfactual,
    FasterKernels,
    Free,
    counterfactuals,
    gains_of,
    host_before_launches,
    lengths_of,
    typical,
    work_of_devices,
)
from dpro.words import counted, distinct_names, shortened

COLD = 0.1  # share of the steps that count, from which on first calls of a process are worth a line
STILL_NS = 2 * NS_PER_MS  # a host that ends nothing for so long in a call of microseconds stands still
USUALLY_NS = 200_000  # a call that takes less, usually
STILL = 0.2  # share of the step from which on standing still is the cause
FEW = 4  # calls of a name, from which on it is known how long one usually takes
COMES_AGAIN = 0.5  # of the launches of a kernel: fewer slow ones may be pauses, where no steps are known
NO_WORK = 1e-3  # of the recorded time: devices that worked for less did not train
MOSTLY = 0.4  # of the pauses: a name that has more of them is itself the cause
SLOW_SHARE = 0.4  # of the host's time: what one kernel's launches take of it
PLACED = 0.2  # of some calls: a place in the code that has more of them is named

_LIBRARIES = (
    OF_RECORDER + r"|(^|/)(torch|torch_xla|threading\.py|contextlib\.py|functools\.py)\b|^<|^nn\.Module"
)
_NOT_OF_JOB = r"^(ProfilerStep|dpro::|nccl:|gloo:|DistributedDataParallel\.)"


class StandStill(NamedTuple):
    """Hosts that stand still.

    Attributes:
        share: of the step, mean of ranks.
        at_once: how many ranks do at the same time, mean over the time when any does.
        ended: the change that ends it.
    """

    share: float
    at_once: float
    ended: UsualCalls


@dataclass(frozen=True)
class UsualCalls:
    """Calls in which the host stands still take what calls of their name usually do.

    Attributes:
        usual_ns: by name.
    """

    usual_ns: Mapping[str, int]

    def apply(self, graph: Graph) -> Graph:
        """As of `RankChange`."""
        nodes = graph.nodes
        usual_ns = np.array([self.usual_ns.get(name, -1) for name in graph.names])[nodes.name]
        still = _is_call(graph) & (nodes.duration >= STILL_NS) & (usual_ns >= 0)
        return graph.with_durations(np.where(still, usual_ns, nodes.duration))


class SlowLaunches(NamedTuple):
    """Work of a GPU, how many times a step and rank it is launched late, and ns of the host before each."""

    kernel: str
    per_step: float
    took_ns: float

    @property
    def in_words(self) -> str:
        """`launching KERNEL 5 times a step`."""
        times = "once" if self.per_step < 1.5 else counted(round(self.per_step), "time")
        return f"launching {short_kernel(self.kernel)} {times} a step"


def slow_launches_of(
    launches: pl.DataFrame, rank_steps: int, step_ns: float, stepped: bool = True
) -> SlowLaunches | None:
    """The kernel before whose launches the host spends much of the step; None where it does before none.

    Args:
        launches: of usual steps, as of `host_before_launches`; before a step's first it prepares the input.
        rank_steps: how many steps of ranks these are.
        stepped: whether steps are known. Where they are not, nothing shows that a rare one comes again.
    """
    is_slow = pl.col("took_ns") >= SLOW_LAUNCH_NS
    comes_again = pl.lit(stepped) | (is_slow.mean().over("kernel") >= COMES_AGAIN)
    slow = (
        launches.filter(is_slow & ~pl.col("is_first") & comes_again)
        .group_by("kernel")
        .agg(
            count=pl.len() / rank_steps,
            mean_ns=pl.col("took_ns").mean(),
            total_ns=pl.col("took_ns").sum() / rank_steps,
        )
        .sort("total_ns", descending=True)
    )
    if slow.is_empty() or slow["total_ns"][0] < SLOW_SHARE * step_ns:
        return None
    return SlowLaunches(str(slow["kernel"][0]), float(slow["count"][0]), float(slow["mean_ns"][0]))


def stand_still(calls: pl.DataFrame, ranks: int, step_ns: float, num_steps: int) -> StandStill | None:
    """How long hosts stand still, where that is what they mostly do: they have no core.

    Calls of many names that usually take microseconds take milliseconds now and then, on most ranks.

    Args:
        calls: as of `JobFacts.calls`.
        ranks: how many there are.
    """
    usual = calls.group_by("name").agg(usual_ns=pl.col("took_ns").median(), count=pl.len())
    pauses = calls.join(usual, on="name").filter(
        (pl.col("usual_ns") < USUALLY_NS) & (pl.col("count") >= FEW) & (pl.col("took_ns") >= STILL_NS)
    )
    paused_ns = float(pauses["took_ns"].sum())
    share = paused_ns / max(step_ns * num_steps * ranks, 1.0)
    if share < STILL or ranks < 2 or pauses["rank"].n_unique() <= ranks / 2:
        return None
    of_one_name = pauses.group_by("name").agg(pl.col("took_ns").sum())["took_ns"].max()
    if float(of_one_name or 0) > MOSTLY * paused_ns:  # type: ignore[arg-type]
        return None
    starts = pauses["start"].to_numpy()
    moments = np.concatenate([starts, starts + pauses["took_ns"].to_numpy()])
    order = np.argsort(moments, kind="stable")
    standing = np.cumsum(np.repeat([1, -1], starts.size)[order])[:-1]
    between = np.diff(moments[order])
    some = standing > 0
    at_once = float((standing * between)[some].sum() / max(between[some].sum(), 1))
    usual_ns = dict(pauses.select("name", pl.col("usual_ns").cast(pl.Int64)).iter_rows())
    return StandStill(share, at_once, UsualCalls(usual_ns))


def _calls(graph: Graph) -> pl.DataFrame:
    nodes = graph.nodes
    calls = np.flatnonzero(_is_call(graph) & (nodes.step >= 0))
    return pl.DataFrame(
        {
            "rank": nodes.rank[calls],
            "name": pl.Series(graph.names, dtype=pl.String).gather(nodes.name[calls]),
            "start": nodes.measured_start[calls],
            "took_ns": nodes.duration[calls],
        }
    )


def _is_call(graph: Graph) -> Bools:
    """[N] operators and calls of the runtime."""
    return is_of(graph.nodes.kind, (NodeKind.CPU, NodeKind.RUNTIME))


STUDIED_CONFIDENCE = 0.5  # findings that are less sure name no rank


class JobFacts:
    """What is known of a run that has a graph."""

    def __init__(self, analysis: Analysis, job: ReplayedJob, ends: pl.DataFrame | None = None) -> None:
        """Nothing is computed yet.

        Args:
            ends: when its steps end, as of `baseline_steps`; those of the analysis where None.
        """
        self.analysis, self.job = analysis, job
        self.ends = analysis.baseline if ends is None else ends

    @cached_property
    def step_ns(self) -> float:
        """How long a usual step takes, replayed: the mean, as predictions have it."""
        return float(step_lengths(self.ends).mean())

    @cached_property
    def lengths(self) -> Floats:
        """[S] ns, how long each usual step takes, replayed."""
        return lengths_of(self.ends)

    @cached_property
    def usual(self) -> pl.DataFrame:
        """The usual steps: `window`, `step`, `duration_ns`."""
        return durations_of(self.ends)

    @cached_property
    def counterfactuals(self) -> list[Counterfactual]:
        """What limits the step, by what it would give if it cost nothing, the most first."""
        return counterfactuals(self.job, self.ends, self.analysis.trust)

    @cached_property
    def gain_of_devices(self) -> float:
        """How many times as long the step takes now as if what devices compute took no time."""
        free = self.job.with_change(Free(work_of_devices))
        left_ns = float(changed_steps_ns(self.ends, self.job, free, slowdowns_of(self.analysis.trust)).mean())
        return self.step_ns / left_ns if left_ns > 0 else float("inf")

    @cached_property
    def findings(self) -> list[Finding]:
        """What is wrong, costliest first, as far as it is likely."""
        return [finding for finding in self._all_findings if finding.confidence >= STUDIED_CONFIDENCE]

    @property
    def doubtful_findings(self) -> list[Finding]:
        """What may be wrong, costliest first, but is less likely than not."""
        return [finding for finding in self._all_findings if finding.confidence < STUDIED_CONFIDENCE]

    @cached_property
    def _all_findings(self) -> list[Finding]:
        try:
            findings, _ = self.analysis.verdict
        except DproError:
            return []
        return findings

    @cached_property
    def shared_hosts(self) -> list[str]:
        """Hosts on which processes of other jobs used cores for which ranks waited."""
        return shared_hosts(self.analysis.steps, self.analysis.counters, self.analysis.workers)

    @cached_property
    def stretches(self) -> pl.DataFrame:
        """When each rank went through each usual step: `rank`, `window`, `step`, `start_ns`, `end_ns`.

        As in a replay a step lasts from the end of the one before it, also where it was marked only in part.
        """
        steps = self.usual.select("window", "step")
        stretches = recorded_steps(self.analysis.spans, self.analysis.steps).sort("rank", "window", "step")
        before = stretches.select(
            pl.col("end_ns").shift(1).over("rank", "window"),
            last=pl.col("step").shift(1).over("rank", "window"),
        )
        follows = (before["last"] + 1 == stretches["step"]) & (before["end_ns"] < stretches["start_ns"])
        stretches = stretches.with_columns(
            start_ns=pl.when(follows.fill_null(False)).then(before["end_ns"]).otherwise("start_ns")
        )
        steps = steps.cast({name: stretches.schema[name] for name in steps.columns})
        usual = stretches.join(steps, on=["window", "step"], how="semi")
        return usual if usual.height else stretches

    @property
    def rank_steps(self) -> int:
        """How many steps of ranks spans are of, at least 1."""
        return max(self.stretches.height, 1)

    @cached_property
    def spans(self) -> pl.DataFrame:
        """Table `spans`, as far as they began in usual steps."""
        return spans_of_steps(self.analysis.spans, self.stretches)

    @cached_property
    def computes_on_hosts(self) -> bool:
        """Whether no work of devices was recorded."""
        return self.analysis.spans.filter(IS_GPU).is_empty()

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """Kernels of usual steps, longest first: `name`, `count`, `total_ns`, `family` as of `classify`."""
        spans = self.spans.filter((pl.col("kind") == "kernel") & (pl.col("duration_ns") >= 0))
        ran = self.analysis.collectives.select("rank", "span_id", ran=pl.lit(True)).unique()
        totals = (
            spans.join(ran, on=["rank", "span_id"], how="left")
            .group_by("name")
            .agg(count=pl.len(), total_ns=pl.col("duration_ns").sum(), ran=pl.col("ran").any())
        )
        kinds = [
            COMMUNICATION if ran else classify(name).kind
            for name, ran in totals.select("name", "ran").iter_rows()
        ]
        families = pl.Series(kinds, dtype=pl.String)
        return totals.with_columns(family=families).sort(["total_ns", "name"], descending=[True, False])

    @cached_property
    def short_names(self) -> dict[str, str]:
        """Names of `kernels` as a person reads them, by their own, cut so that they differ."""
        names = self.kernels["name"].to_list()
        return dict(zip(names, distinct_names([name_kernel(name) for name in names], LONGEST)))

    @cached_property
    def computing_kernels(self) -> pl.DataFrame:
        """Those of `kernels` that move nothing between ranks."""
        return self.kernels.filter(pl.col("family") != COMMUNICATION)

    @cached_property
    def communication_kernels(self) -> pl.DataFrame:
        """Those of `kernels` that do."""
        return self.kernels.filter(pl.col("family") == COMMUNICATION)

    @cached_property
    def calls(self) -> pl.DataFrame:
        """Calls of hosts in steps, by their own time: `rank`, `name`, `start`, `took_ns`."""
        return pl.concat(self.job.map_ranks(_calls))

    @cached_property
    def still(self) -> StandStill | None:
        """How long hosts stand still; None where they do not mostly do that."""
        return stand_still(self.calls, len(self.job.graph.ranks), self.step_ns, self.ends.height)

    @cached_property
    def first_call(self) -> tuple[str, float] | None:
        """The longest first call of a process in usual steps, and its ns; None where such take little."""
        calls = pl.concat(self.job.map_ranks(first_calls)).join(self.usual, on=["window", "step"], how="semi")
        if calls["cold_ns"].sum() < COLD * self.step_ns * self.rank_steps:
            return None
        return next(calls.sort("took_ns").tail(1).select("name", "took_ns").iter_rows(), None)

    @cached_property
    def slow_launches(self) -> SlowLaunches | None:
        """The kernel before whose launches the host spends much of the step; None where there is none."""
        launches = pl.concat(self.job.map_ranks(host_before_launches))
        usual = launches.join(self.usual, on=["window", "step"], how="semi")
        stepped = not self.analysis.steps.is_empty()
        return slow_launches_of(usual, self.rank_steps, self.step_ns, stepped)

    @cached_property
    def launches(self) -> pl.DataFrame:
        """Spans of usual steps that launched work of a GPU, with `launched`: its name."""
        calls = self.spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
        work = self.analysis.spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
        work = work.select("rank", "correlation", launched="name").unique(
            ["rank", "correlation"], keep="first"
        )
        return calls.join(work, on=["rank", "correlation"])

    @cached_property
    def device_work_ns(self) -> int:
        """What the busiest rank's devices computed, copied and filled, as recorded."""
        work = self.analysis.spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
        of_ranks = work.group_by("rank").agg(pl.col("duration_ns").sum())["duration_ns"]
        return max(of_ranks.to_list(), default=0)

    @cached_property
    def lacks_device_work(self) -> bool:
        """Whether no work was recorded: of devices that hosts launch it on next to none, or else no operator.

        What a process fills and copies as it starts does not count.
        """
        spans = self.analysis.spans
        launches = spans.filter(pl.col("kind") == "runtime")["correlation"].to_numpy() >= 0
        on_devices = bool(launches.any()) or not (spans["kind"] == "cpu_op").any()
        start, end = spans["start_ns"].to_numpy(), (spans["start_ns"] + spans["duration_ns"]).to_numpy()
        recorded_ns = int(end.max() - start.min()) if spans.height else 0
        return on_devices and self.device_work_ns <= NO_WORK * recorded_ns

    @cached_property
    def gpu(self) -> str:
        """The one model of all GPUs; empty where it is not known."""
        return common_model(self.analysis.run.manifest.gpus)

    @cached_property
    def shares(self) -> dict[str, float]:
        """Where the usual step of a rank goes: share of each part, as `mean_step.PARTS` names them.

        Raises:
            Unanswerable: none of its parts takes any time.
        """
        means = means_over_all(self.analysis.usual_breakdown)
        return {part: means[part] / means["duration_ns"] for part in PARTS}

    @property
    def computing(self) -> float:
        """Share of the usual step for which something computes, mean of ranks."""
        recorded_ns = float(step_lengths(self.analysis.baseline).mean())
        return min(self.shares["compute_ns"] * recorded_ns / self.step_ns, 1.0)

    def share_of(self, names: Sequence[str]) -> float:
        """Share of computing kernels' time that some take."""
        computing = self.computing_kernels
        whole = float(computing["total_ns"].sum())
        some = float(computing.filter(pl.col("name").is_in(list(names)))["total_ns"].sum())
        return some / whole if whole else 0.0

    def typical_share(self, calls: pl.DataFrame) -> float:
        """Share of a usual step that calls take, the median of steps of ranks."""
        parts = []
        for rank, begin, end in self.stretches.select("rank", "start_ns", "end_ns").iter_rows():
            inside = calls.filter(
                (pl.col("rank") == rank) & pl.col("start_ns").is_between(begin, end, "left")
            )
            parts.append(float(inside["duration_ns"].sum()) / max(end - begin, 1))
        return float(np.median(parts)) if parts else 0.0

    def gain_of(self, job: ReplayedJob) -> Floats:
        """[S] how many times as long each usual step takes as in a changed job."""
        return gains_of(self.job, job, self.ends, self.analysis.trust)

    def typical_gain_of(self, job: ReplayedJob) -> float:
        """The same of the mean step; 1 where it would take longer."""
        return typical(self.gain_of(job), self.lengths)

    def gain_under(self, edit: Edit) -> Floats:
        """The same, under an edit.

        Raises:
            Unanswerable: the run lacks what the edit needs.
        """
        return self.gain_of(self.job.under(edit, in_full=False).job)

    def predict(self, *texts: str) -> Prediction:
        """What edits would change, as `dpro whatif` has it.

        Args:
            texts: as `--edit` accepts them.

        Raises:
            Unanswerable: the run lacks what an edit needs.
        """
        edits = [parse_edit(text) for text in texts]
        if self.ends is self.analysis.baseline:
            return predict_edits(self.analysis, edits, job=self.job)
        return predict(self.job, self.ends, edits, self.analysis.trust)

    def candidates(self, kind: type[Edit]) -> list[str]:
        """What a kind of edit proposes for the run, as `--edit` accepts it; nothing where it has no use."""
        with suppress(DproError):
            return [str(edit) for edit in kind.candidates(self._shown)]
        return []

    @cached_property
    def _shown(self) -> RunFacts:
        return run_facts(self.job.graph, self.ends, self.analysis.suspects)

    def gain_of_faster(self, factors: Mapping[str, float]) -> float:
        """How many times as long a usual step takes as when kernels, by name, take a share of their time."""
        return self.typical_gain_of(self.job.with_change(FasterKernels(factors)))

    def without(self, limit: str) -> list[ReplayedJob]:
        """The job in which a limit costs nothing, in each way in which that is to be had of this run."""
        jobs = []
        for change in (change for kind, change in CHANGES if kind == limit):
            with suppress(DproError):
                jobs.append(change(self.job))
        return jobs

    def after(self, limit: str) -> JobFacts | None:
        """The job's facts once a limit costs nothing; None where this run cannot say, or nothing is left.

        Hosts that stand still get their cores, which is less than a host that takes no time.
        """
        jobs = self.without(limit)
        if limit == HOST and self.still is not None:
            jobs = [self.job.with_change(self.still.ended)]
        if not jobs:
            return None
        slowdowns = slowdowns_of(self.analysis.trust)[:1]
        timelines = [next(self.job.replays(job, slowdowns)) for job in jobs]
        ends = [changed_ends(self.ends, timeline.graph, timeline.end) for timeline in timelines]
        job, sooner = min(zip(jobs, ends, strict=True), key=lambda way: step_lengths(way[1]).mean())
        return JobFacts(self.analysis, job, sooner) if step_lengths(sooner).any() else None

    def gains_by_limit(self) -> Mapping[str, float]:
        """The most that each limit gives by itself."""
        most: dict[str, float] = {}
        for counterfactual in self.counterfactuals:
            most[counterfactual.limit] = max(most.get(counterfactual.limit, 1.0), counterfactual.gain)
        return most


def place_of(calls: pl.DataFrame, spans: pl.DataFrame) -> str:
    """Where in the job's own code most calls are made, behind a comma; empty where it is not recorded.

    Args:
        calls: some rows of `spans`.
        spans: among them Python's functions, if they were recorded, and ranges that the job names.
    """
    code = spans.filter(
        ((pl.col("kind") == "python") & ~pl.col("name").str.contains(_LIBRARIES))
        | ((pl.col("kind") == "annotation") & ~pl.col("name").str.contains(_NOT_OF_JOB))
    )
    around = innermost(code, calls)
    places = Counter(CodePlace.of(name).in_words for name in code["name"].gather(around[around >= 0]))
    ((place, count),) = places.most_common(1) or [("", 0)]
    share = f"{count / max(calls.height, 1):.0%}".replace("100%", "all")
    return f", {share} in {place}" if count > PLACED * calls.height else ""


@contextmanager
def facts_of(analysis: Analysis) -> Iterator[JobFacts]:
    """What is known of a run, with its job: its whole graph, or its condensed ranks where it is large.

    Raises:
        Unanswerable: the run has no graph.
        DproError: a process that works on ranks was killed, or there is no room for them.
    """
    condensed = analysis.condensed
    if condensed is None:
        yield JobFacts(analysis, ReplayedJob(analysis.built.predictive))
        return
    with condensed_job(analysis.run, condensed) as job:
        yield JobFacts(analysis, job)


LONGEST = 32


_WRAPPERS = re.compile(r"(AUnary|BUnary|Binary|Unary)Functor$")
_LAUNCHERS = re.compile(r"(?i)^(device_kernel|kernel2?|kentry|enable_\w+)$")  # of another kernel, an argument
_UNCLEAR = re.compile(r"(?i)^(gemm|\w{0,3})_?kernel$")  # which one it is, its namespace says
_CLASS = re.compile(r"^[a-zA-Z_][\w:]*(?<!int)(?<!float)(?<!double)(?<!bool)(?<!char)(?<!long)(?<!half)$")


def short_kernel(name: str) -> str:
    """The name of a kernel as `name_kernel` has it, cut."""
    return shortened(name_kernel(name), LONGEST)


def name_kernel(name: str) -> str:
    """The function's own name; of a pointwise kernel what it computes of each element.

    Of a kernel that launches another one, which is an argument of its template, that one's name.
    """
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", name).strip()
    head, *arguments = re.split(r"[<(,>]", re.sub(r"^(void|static|auto) ", "", plain))
    for argument in map(str.strip, arguments if "<" in plain else ()):
        if _LAUNCHERS.match(head.rsplit("::", 1)[-1].strip()) and _CLASS.match(argument):
            head = argument
    *outer, function = head.split("::")
    if outer and _UNCLEAR.match(function):
        function = f"{outer[-1]}::{function}"
    if "elementwise" in function:
        computed = re.findall(r"\w*Functor\w*|\w+?(?=_kernel_cuda|_kernel_impl)", plain)
        function = next((part for part in reversed(computed) if not _WRAPPERS.match(part)), function)
    return function.strip() or head
