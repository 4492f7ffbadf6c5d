"""Facts about a run for its verdict: its graph, the steps that count, and the gains of changes.

Takes an `Analysis`; returns a `JobFacts`, whose parts all modules of the verdict share, each computed once.
They include what hosts do for long: they wait for a core (`HostStall`), or work for milliseconds before one
launch (`SlowLaunches`). Also shortens names of kernels for people.
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
from dpro.detect.findings import CodeLocation, Finding
from dpro.errors import DproError
from dpro.recorders import OF_LIBRARIES
from dpro.replay.attribution import innermost
from dpro.replay.cost.kernels.roofline import common_model
from dpro.replay.first_calls import first_calls
from dpro.replay.graph import Graph, NodeKind, is_one_of
from dpro.replay.steps import END, IS_GPU, recorded_steps, spans_of_steps
from dpro.replay.timeline import changed_ends, durations_of, step_lengths
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.facts import facts_of as run_facts
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import Prediction, changed_steps_ns, predict, slowdowns_of
from dpro.replay.whatif.registry import kind_named, parse_edit
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

COLD = 0.1  # share of usual steps above which first calls of a process are worth a line
STILL_NS = 2 * NS_PER_MS  # a host is stalled in a call of microseconds that lasts this long
USUALLY_NS = 200_000  # usual time of a call, below which a long one is a stall
STILL = 0.2  # share of the step above which stalls are the cause
LONG_NS = 100_000  # a launch that lasts as long as a kernel of at least this time waits for it
NEARLY_ALL = 0.9  # of such launches: the job launches with CUDA_LAUNCH_BLOCKING
FEW = 4  # calls of a name needed to know its usual time
COMES_AGAIN = 0.5  # of the launches of a kernel: without known steps, fewer slow ones may be pauses
NO_WORK = 1e-3  # of the recorded time: devices that worked less did not train
MOSTLY = 0.4  # of the stalls: a name with a larger share is itself the cause
SLOW_SHARE = 0.4  # least share of the step in which the host prepares launches of one kernel
PLACED = 0.2  # of some calls: a code location with a larger share is named

_NOT_OF_JOB = r"^(ProfilerStep|dpro::|nccl:|gloo:|DistributedDataParallel\.)"


class HostStall(NamedTuple):
    """Hosts that are stalled for lack of a core.

    Attributes:
        share: of the step, mean over ranks.
        at_once: number of ranks stalled at one time, mean over the time when any is.
        ended: the change that ends it.
    """

    share: float
    at_once: float
    ended: UsualCalls


@dataclass(frozen=True)
class UsualCalls:
    """Change that gives calls in which the host is stalled the usual time of calls of their name.

    Attributes:
        usual_ns: usual time, by name.
    """

    usual_ns: Mapping[str, int]

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with the usual times of these calls."""
        nodes = graph.nodes
        usual_ns = np.array([self.usual_ns.get(name, -1) for name in graph.names])[nodes.name]
        still = _is_call(graph) & (nodes.duration >= STILL_NS) & (usual_ns >= 0)
        return graph.with_durations(np.where(still, usual_ns, nodes.duration))


class SlowLaunches(NamedTuple):
    """A kernel that is launched late: how often per step and rank, and the host's ns before each launch."""

    kernel: str
    per_step: float
    took_ns: float

    @property
    def in_words(self) -> str:
        """The launches in words: `launching KERNEL 5 times a step`."""
        times = "once" if self.per_step < 1.5 else counted(round(self.per_step), "time")
        return f"launching {short_kernel(self.kernel)} {times} a step"


def slow_launches_of(
    launches: pl.DataFrame, rank_steps: int, step_ns: float, stepped: bool = True
) -> SlowLaunches | None:
    """Return the kernel before whose launches the host spends much of the step; None without one.

    Args:
        launches: of usual steps, as from `host_before_launches`; a step's first is left out, as the host
            prepares the input before it.
        rank_steps: number of steps of ranks that these are.
        stepped: whether steps are known; without them, nothing shows that a rare launch recurs.
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


def detect_stall(calls: pl.DataFrame, ranks: int, step_ns: float, num_steps: int) -> HostStall | None:
    """Return how long hosts are stalled, if that is most of what they do: they have no core.

    Calls of many names that usually take microseconds take milliseconds now and then, on most ranks.

    Args:
        calls: as from `JobFacts.calls`.
        ranks: number of ranks.
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
    return HostStall(share, at_once, UsualCalls(usual_ns))


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
    """Return [N] a mask of operators and calls of the runtime."""
    return is_one_of(graph.nodes.kind, (NodeKind.CPU, NodeKind.RUNTIME))


STUDIED_CONFIDENCE = 0.5  # less confident findings name no rank


class JobFacts:
    """Facts about a run that has a graph."""

    def __init__(self, analysis: Analysis, job: ReplayedJob, ends: pl.DataFrame | None = None) -> None:
        """Take a run and its job; nothing is computed yet.

        Args:
            ends: ends of its steps, as from `baseline_steps`; None for those of the analysis.
        """
        self.analysis, self.job = analysis, job
        self.ends = analysis.baseline if ends is None else ends

    @cached_property
    def step_ns(self) -> float:
        """Mean length of usual steps, replayed, as predictions have it."""
        return float(step_lengths(self.ends).mean())

    @cached_property
    def lengths(self) -> Floats:
        """[S] lengths of usual steps, replayed, in ns."""
        return lengths_of(self.ends)

    @cached_property
    def usual(self) -> pl.DataFrame:
        """The usual steps: `window`, `step`, `duration_ns`."""
        return durations_of(self.ends)

    @cached_property
    def counterfactuals(self) -> list[Counterfactual]:
        """What limits the step, by its gain if it cost nothing, largest first."""
        return counterfactuals(self.job, self.ends, self.analysis.trust)

    @cached_property
    def gain_of_devices(self) -> float:
        """Current step time over that if devices computed in no time."""
        free = self.job.with_change(Free(work_of_devices))
        left_ns = float(changed_steps_ns(self.ends, self.job, free, slowdowns_of(self.analysis.trust)).mean())
        return self.step_ns / left_ns if left_ns > 0 else float("inf")

    @cached_property
    def findings(self) -> list[Finding]:
        """Likely findings, costliest first."""
        return [finding for finding in self._all_findings if finding.confidence >= STUDIED_CONFIDENCE]

    @property
    def doubtful_findings(self) -> list[Finding]:
        """Findings that are less likely than not, costliest first."""
        return [finding for finding in self._all_findings if finding.confidence < STUDIED_CONFIDENCE]

    @cached_property
    def _all_findings(self) -> list[Finding]:
        try:
            findings, _ = self.analysis.verdict
        except DproError:
            return []
        return findings

    @cached_property
    def stretches(self) -> pl.DataFrame:
        """Time ranges of each rank's usual steps: `rank`, `window`, `step`, `start_ns`, `end_ns`.

        As in a replay, a step lasts from the end of the one before it, even if only a part of it was marked.
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
        """Number of steps of ranks that spans belong to, at least 1."""
        return max(self.stretches.height, 1)

    @cached_property
    def spans(self) -> pl.DataFrame:
        """Rows of table `spans` that began in usual steps."""
        return spans_of_steps(self.analysis.spans, self.stretches)

    @cached_property
    def computes_on_hosts(self) -> bool:
        """Whether no work of devices was recorded."""
        return self.analysis.spans.filter(IS_GPU).is_empty()

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """Kernels of usual steps, longest first: `name`, `count`, `total_ns`, `family` as from `classify`."""
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
        """Short distinct names of `kernels` for people, by their full names."""
        names = self.kernels["name"].to_list()
        return dict(zip(names, distinct_names([name_kernel(name) for name in names], LONGEST)))

    @cached_property
    def computing_kernels(self) -> pl.DataFrame:
        """The rows of `kernels` that move nothing between ranks."""
        return self.kernels.filter(pl.col("family") != COMMUNICATION)

    @cached_property
    def communication_kernels(self) -> pl.DataFrame:
        """The rows of `kernels` that communicate between ranks."""
        return self.kernels.filter(pl.col("family") == COMMUNICATION)

    @cached_property
    def calls(self) -> pl.DataFrame:
        """Calls of hosts in steps, by their own time: `rank`, `name`, `start`, `took_ns`."""
        return pl.concat(self.job.map_ranks(_calls))

    @cached_property
    def still(self) -> HostStall | None:
        """How long hosts are stalled for lack of a core; None if that is not most of what they do."""
        return detect_stall(self.calls, len(self.job.graph.ranks), self.step_ns, self.ends.height)

    @cached_property
    def first_call(self) -> tuple[str, float] | None:
        """The longest first call of a process in usual steps, and its ns; None if first calls take little."""
        calls = pl.concat(self.job.map_ranks(first_calls)).join(self.usual, on=["window", "step"], how="semi")
        if calls["cold_ns"].sum() < COLD * self.step_ns * self.rank_steps:
            return None
        return next(calls.sort("took_ns").tail(1).select("name", "took_ns").iter_rows(), None)

    @cached_property
    def slow_launches(self) -> SlowLaunches | None:
        """The kernel before whose launches the host spends much of the step; None without one."""
        launches = pl.concat(self.job.map_ranks(host_before_launches))
        usual = launches.join(self.usual, on=["window", "step"], how="semi")
        stepped = not self.analysis.steps.is_empty()
        return slow_launches_of(usual, self.rank_steps, self.step_ns, stepped)

    @cached_property
    def launches(self) -> pl.DataFrame:
        """Spans of usual steps that launched work of a GPU, with `launched`, its name."""
        calls = self.spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
        work = self.analysis.spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
        work = work.select("rank", "correlation", launched="name").unique(
            ["rank", "correlation"], keep="first"
        )
        return calls.join(work, on=["rank", "correlation"])

    @cached_property
    def launches_block(self) -> bool:
        """Whether launches return only once their kernels have ended (CUDA_LAUNCH_BLOCKING)."""
        kernels = self.spans.filter((pl.col("kind") == "kernel") & (pl.col("duration_ns") >= LONG_NS))
        ends = kernels.select("rank", "correlation", ends=pl.col("start_ns") + pl.col("duration_ns"))
        calls = self.launches.unique(["rank", "correlation"], keep="none")  # a graph launches several kernels
        ran = calls.join(ends, on=["rank", "correlation"])
        waited = ran.filter(pl.col("start_ns") + pl.col("duration_ns") >= pl.col("ends"))
        return ran.height >= FEW and waited.height >= NEARLY_ALL * ran.height

    @property
    def num_device_works(self) -> float:
        """Number of kernels, copies and fills of a usual step and rank."""
        return self.spans.filter(IS_GPU).height / self.rank_steps

    @cached_property
    def device_work_ns(self) -> int:
        """Time that the busiest rank's devices computed, copied and filled, as recorded, in ns."""
        work = self.analysis.spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
        of_ranks = work.group_by("rank").agg(pl.col("duration_ns").sum())["duration_ns"]
        return max(of_ranks.to_list(), default=0)

    @cached_property
    def lacks_device_work(self) -> bool:
        """Whether too little device work was recorded, although hosts launch it or no operator was recorded.

        That is next to none of it, or no kernel. What a process fills and copies at its start does not count.
        """
        spans = self.analysis.spans
        launches = spans.filter(pl.col("kind") == "runtime")["correlation"].to_numpy() >= 0
        on_devices = bool(launches.any()) or not (spans["kind"] == "cpu_op").any()
        return on_devices and (self._hardly_worked or self.lacks_kernels)

    @cached_property
    def lacks_kernels(self) -> bool:
        """Whether devices copied and filled, but kernels were not recorded: their busy time is unknown.

        Where all calls were recorded and none launches a kernel, there was none.
        """
        spans = self.analysis.spans
        if self._hardly_worked or (spans["kind"] == "kernel").any():
            return False
        calls = spans.filter(pl.col("kind") == "runtime")["name"]
        return calls.is_empty() or calls.str.contains("(?i)launch").any()

    @cached_property
    def _hardly_worked(self) -> bool:
        spans = self.analysis.spans
        start, end = spans["start_ns"].to_numpy(), (spans["start_ns"] + spans["duration_ns"]).to_numpy()
        recorded_ns = int(end.max() - start.min()) if spans.height else 0
        return self.device_work_ns <= NO_WORK * recorded_ns

    @cached_property
    def gpu(self) -> str:
        """The single model of all GPUs; empty if unknown or not single."""
        return common_model(self.analysis.run.manifest.gpus)

    @cached_property
    def shares(self) -> dict[str, float]:
        """Shares of the usual step of a rank, by the parts of `mean_step.PARTS`.

        Raises:
            Unanswerable: none of its parts takes any time.
        """
        means = means_over_all(self.analysis.usual_breakdown)
        return {part: means[part] / means["duration_ns"] for part in PARTS}

    @property
    def computing(self) -> float:
        """Share of the usual step in which anything computes, mean over ranks."""
        recorded_ns = float(step_lengths(self.analysis.baseline).mean())
        return min(self.shares["compute_ns"] * recorded_ns / self.step_ns, 1.0)

    def share_of(self, names: Sequence[str]) -> float:
        """Return the share of the computing kernels' time that some kernels take."""
        computing = self.computing_kernels
        whole = float(computing["total_ns"].sum())
        some = float(computing.filter(pl.col("name").is_in(list(names)))["total_ns"].sum())
        return some / whole if whole else 0.0

    def typical_share(self, calls: pl.DataFrame) -> float:
        """Return the share of a usual step that calls take, the median over steps of ranks."""
        parts = []
        for rank, begin, end in self.stretches.select("rank", "start_ns", "end_ns").iter_rows():
            inside = calls.filter(
                (pl.col("rank") == rank) & pl.col("start_ns").is_between(begin, end, "left")
            )
            parts.append(float(inside["duration_ns"].sum()) / max(end - begin, 1))
        return float(np.median(parts)) if parts else 0.0

    def gain_of(self, job: ReplayedJob) -> Floats:
        """Return [S] usual step times over those in a changed job."""
        return gains_of(self.job, job, self.ends, self.analysis.trust)

    def typical_gain_of(self, job: ReplayedJob) -> float:
        """Return the mean step time over that in a changed job; at least 1."""
        return typical(self.gain_of(job), self.lengths)

    def predict(self, *texts: str) -> Prediction:
        """Predict the effect of edits, as `dpro whatif` does.

        Args:
            texts: as `--edit` accepts them.

        Raises:
            Unanswerable: the run lacks what an edit needs.
        """
        edits = [parse_edit(text) for text in texts]
        if self.ends is self.analysis.baseline:
            return predict_edits(self.analysis, edits, job=self.job)
        return predict(self.job, self.ends, edits, self.analysis.trust)

    def candidates(self, name: str) -> list[str]:
        """Return the edits of a name that suit the run, as `--edit` accepts them; empty if none does."""
        with suppress(DproError, KeyError):  # an extension that would bring the edit is not installed
            return [str(edit) for edit in kind_named(name).candidates(self._shown)]
        return []

    @cached_property
    def _shown(self) -> RunFacts:
        return run_facts(self.job.graph, self.ends, self.analysis.suspects)

    def gain_of_faster(self, factors: Mapping[str, float]) -> float:
        """Return the usual step time over that if kernels, by name, took a share of their time."""
        return self.typical_gain_of(self.job.with_change(FasterKernels(factors)))

    def gain_of_rows(self, rows: float, growing: Sequence[str]) -> float:
        """Return the gain per row where a step takes more rows, and some kernels as many times as long.

        Args:
            rows: how many times as many.
            growing: names of these kernels.
        """
        gains = self.gain_of(self.job.with_change(FasterKernels(dict.fromkeys(growing, rows))))
        return rows * float(self.lengths.sum() / (self.lengths / gains).sum())

    def without(self, limit: str) -> list[ReplayedJob]:
        """Return jobs in which a limit costs nothing, one for each way to remove it that the run allows."""
        jobs = []
        for change in (change for kind, change in CHANGES if kind == limit):
            with suppress(DproError):
                jobs.append(change(self.job))
        return jobs

    def after(self, limit: str) -> JobFacts | None:
        """Return the facts once a limit costs nothing; None if the run cannot answer, or no step remains.

        Stalled hosts get their cores, which is less than a host that takes no time.
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
        """Return the largest gain of removing each limit alone."""
        most: dict[str, float] = {}
        for counterfactual in self.counterfactuals:
            most[counterfactual.limit] = max(most.get(counterfactual.limit, 1.0), counterfactual.gain)
        return most


def place_of(calls: pl.DataFrame, spans: pl.DataFrame) -> str:
    """Return the location in the job's own code that makes most calls, after a comma; empty if not recorded.

    Args:
        calls: some rows of `spans`.
        spans: with Python functions, if they were recorded, and ranges that the job names.
    """
    code = spans.filter(
        ((pl.col("kind") == "python") & ~pl.col("name").str.contains(OF_LIBRARIES))
        | ((pl.col("kind") == "annotation") & ~pl.col("name").str.contains(_NOT_OF_JOB))
    )
    around = innermost(code, calls)
    places = Counter(CodeLocation.of(name).in_words for name in code["name"].gather(around[around >= 0]))
    ((place, count),) = places.most_common(1) or [("", 0)]
    share = f"{count / max(calls.height, 1):.0%}".replace("100%", "all")
    return f", {share} in {place}" if count > PLACED * calls.height else ""


@contextmanager
def facts_of(analysis: Analysis) -> Iterator[JobFacts]:
    """Yield the facts about a run and its job: the whole graph, or condensed ranks of a large run.

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


_RETURNED = re.compile(r"^(void|static|auto|std::enable_if<[^>]*>::type) ")
_WRAPPERS = re.compile(r"(AUnary|BUnary|Binary|Unary)Functor$")
_LAUNCHERS = re.compile(r"(?i)^(device_kernel|kernel2?|kentry|enable_\w+)$")  # launch a template argument
_UNCLEAR = re.compile(r"(?i)^(gemm|\w{0,3})_?kernel$")  # names that only their namespace makes clear
_CLASS = re.compile(
    r"^(?!true|false|\w*Params)[a-zA-Z_][\w:]*(?<!int)(?<!float)(?<!double)(?<!bool)(?<!char)(?<!long)(?<!half)$"
)


def short_kernel(name: str) -> str:
    """Return the name of a kernel as from `name_kernel`, shortened."""
    return shortened(name_kernel(name), LONGEST)


def name_kernel(name: str) -> str:
    """Return the function's own name; for a pointwise kernel, what it computes for each element.

    Kernels that launch another one, given as an argument of their template, get the name of that one.
    """
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", name).strip()
    head, *arguments = re.split(r"[<(,>]", _RETURNED.sub("", plain))
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


# Python objects that ranks exchange: pickled, sent as bytes, unpickled, and read in Python. PyTorch sends
# objects in two successive calls of one kind: the lengths, as int64, then the pickled bytes.

BYTES, LENGTHS = "uint8", "int64"
_OF_THREAD = ["rank", "window", "tid"]


def exchanges_of_objects(collectives: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the exchanges of objects that threads wait for in deep windows.

    Args:
        collectives, spans: the tables, or rows of them.

    Returns:
        `rank`, `window`, `op`, `bytes` (that the rank sends), `took_ns`: from the end of the last span before
        pickling to the start of the first span after unpickling.
    """
    calls = (
        collectives.filter((pl.col("launch_span_id") >= 0) & (pl.col("duration_ns") >= 0))
        .select("rank", "window", "group", "op", "dtype", "bytes_in", END, span_id="launch_span_id")
        .join(spans.select(*_OF_THREAD, "span_id", called_ns="start_ns"), on=["rank", "window", "span_id"])
        .sort(*_OF_THREAD, "called_ns")
    )
    before = {name: pl.col(name).shift(1).over(_OF_THREAD) for name in ("group", "op", "dtype")}
    exchanges = calls.with_columns(
        first_called_ns=pl.col("called_ns").shift(1).over(_OF_THREAD),
        is_exchange=(pl.col("dtype") == BYTES)
        & (before["dtype"] == LENGTHS)
        & (before["op"] == pl.col("op"))
        & (before["group"] == pl.col("group")),
    ).filter("is_exchange")
    ends = spans.select(*_OF_THREAD, began_ns=END).sort("began_ns")
    starts = spans.select(*_OF_THREAD, over_ns="start_ns").sort("over_ns")
    return (
        exchanges.sort("first_called_ns")
        .join_asof(
            ends, left_on="first_called_ns", right_on="began_ns", by=_OF_THREAD, check_sortedness=False
        )
        .sort("end_ns")
        .join_asof(
            starts, left_on="end_ns", right_on="over_ns", by=_OF_THREAD, strategy="forward",
            check_sortedness=False,
        )
        .select(
            "rank", "window", "op", bytes="bytes_in",
            took_ns=pl.col("over_ns").fill_null(pl.col("end_ns"))
            - pl.col("began_ns").fill_null(pl.col("first_called_ns")),
        )
    )  # fmt: skip
