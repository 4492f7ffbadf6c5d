"""What each step of a run took and where its time went: per rank, per kernel, per kind of collective.

In: tables of a run. Out: frames in integer nanoseconds, null where nothing was measured. Nothing here is
predicted or aligned across clocks; which rank is at fault is found in `dpro.detect`.

How long a step took: table `steps` with the columns of `dpro.timed.with_times`. In runs on GPUs whose timing
events are missing (older recordings, traces) hosts that run ahead show by their synchronisation schedule:
many short steps, and at a regular distance a long one, which waits for all that was enqueued. Of these only
the mean over such a cycle is known.

Where it went: a **step** of a rank is split without remainder: duration = compute + exposed communication +
copies + host bound + idle. Work is counted in the step in whose time it *ran*.

On a rank with GPU work the split is the GPU's view, all streams together:

- communication: spans that a row of `collectives` points to; compute: every other kernel;
- exposed is communication while nothing computes, overlapped is communication while something does;
- copies: copies and fills while nothing computes or communicates;
  exposed communication is wait until all members of the collective have arrived, and transfer after that;
- host bound: the GPU idles until a span whose launch call returned only after the GPU had become idle, so
  it waited for the CPU; idle: the rest (the launch came in time, or is not recorded).

A step ends there when the work has ended that was launched until the host's end of it: a host that runs ahead
has its steps long before its GPU.

On a rank without, it is the view of the main thread, the one that computes among those that launch
collectives:

- compute: operators on it; communication: spans that a row of `collectives` points to, on any thread;
- host bound: neither, which leaves Python, the input pipeline and the optimizer's own code; idle is 0.

Waiting is separated from transfer by durations alone. All members move data together, so the transfer is the
shortest duration among them, and what a member spent before it is wait: no clock has to be known. A
collective is split only where all members of its group were matched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import MAD_TO_SIGMA, Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.alignment.match import match_collectives
from dpro.replay.intervals import Intervals, Times, covered, union
from dpro.schema import COUNTERS, GPU_WORK_KINDS, STEPS
from dpro.schema.members import num_members
from dpro.store import Run
from dpro.timed import all_hosts_ahead, disturbed, with_times

FACTS = {  # counter of a step -> column
    "step_data_wait_ns": "data_wait_ns",
    "step_gc_ns": "gc_ns",
    "step_run_queue_ns": "run_queue_ns",
    "step_training_thread_cpu_ns": "training_thread_cpu_ns",
    "step_cpu_ns": "cpu_ns",
    "step_backward_calls": "backward_calls",
    "step_checkpoint_ns": "checkpoint_ns",
    "step_no_grad_ns": "no_grad_ns",
    "step_compile_ns": "compile_ns",
}


def host_facts(steps: pl.DataFrame, counters: pl.DataFrame) -> pl.DataFrame:
    """What is known of each step.

    Args:
        counters: table `counters`; those about steps carry the start of theirs.

    Returns:
        `[rank, step, duration_ns]` and the columns of `FACTS` (ns or a count, Float64), sorted by rank and
        step, of steps that take time; no rows where nothing is known of any step.
    """
    samples = counters.filter(pl.col("counter").is_in(list(FACTS)))
    if samples.is_empty():
        steps = steps.clear()
    columns = [
        pl.col("value").filter(pl.col("counter") == counter).first().alias(column)
        for counter, column in FACTS.items()
    ]
    wide = samples.group_by("rank", pl.col("time_ns").alias("start_ns")).agg(columns)
    joined = steps.filter(pl.col("duration_ns") > 0).join(wide, on=["rank", "start_ns"], how="left")
    return joined.select("rank", "step", "duration_ns", *FACTS.values()).sort("rank", "step")


def per_rank(facts: pl.DataFrame) -> pl.DataFrame:
    """The mean step of each rank: `[rank, steps, duration_ns]` and the columns of `FACTS`, Float64.

    A time that was measured in some steps only, such as the wait for a core in the longer ones, is the same
    share of the mean step as it is of those: their mean alone could be more than a step.
    """
    times = [column for column in FACTS.values() if column.endswith("_ns")]
    duration = pl.col("duration_ns")
    shares = [_as_large_a_share(name) for name in times]
    means = [duration.mean(), *shares, pl.col("backward_calls").mean()]
    shown = ["rank", "steps", "duration_ns", *FACTS.values()]
    return (
        facts.group_by("rank").agg(pl.len().cast(pl.Int64).alias("steps"), *means).select(shown).sort("rank")
    )


def _as_large_a_share(name: str) -> pl.Expr:
    """Of the mean step, of what the steps in which it was measured say; null where there are none."""
    duration, is_sampled = pl.col("duration_ns"), pl.col(name).is_not_null()
    share = pl.col(name).sum() / duration.filter(is_sampled).sum()
    return pl.when(is_sampled.any()).then(share * duration.mean()).alias(name)


FAR = 2.0  # times the median step: what a step takes that waits for those before it
CYCLES = 3  # at least, to be a schedule
REGULAR = 0.8  # of the distances between long steps are the same
EXPLAINED = (
    0.5  # of what long steps take more: the host did something else then, and did not wait for a device
)
# What the host does in long steps that no launch queue explains.
_ASIDE = ("checkpoint_ns", "no_grad_ns", "compile_ns", "gc_ns", "data_wait_ns")


def steps_of(run: Run) -> pl.DataFrame:
    """Table `steps` of a run, with how long each step took.

    Raises:
        InputError: a part of the run cannot be read.
    """
    table = run.table(STEPS)
    steps = with_times(table)
    return steps if steps["by_device"].any() else _host_steps(run, table)


def host_steps_of(run: Run) -> pl.DataFrame:
    """The same by hosts alone: for a comparison with a run whose steps no device timed.

    Raises:
        InputError: a part of the run cannot be read.
    """
    return _host_steps(run, run.table(STEPS))


def _host_steps(run: Run, table: pl.DataFrame) -> pl.DataFrame:
    steps = with_times(table.drop("gpu_step_ns"))
    return over_cycles(steps, lambda: run.table(COUNTERS)) if run.manifest.gpus else steps


def over_cycles(steps: pl.DataFrame, read_counters: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    """Steps of hosts that wait for their device at a regular distance, each as the mean of its cycle.

    Of steps up to the first such wait, after the last, and of cycles with a deep window it is not known.

    Args:
        steps: as from `with_times`, of a run on GPUs.
        read_counters: gives table `counters`; asked only where there is such a schedule.
    """
    parts = {rank: part.sort("step") for (rank,), part in steps.group_by("rank", maintain_order=True)}
    waits = {rank: _waits(part["time_ns"].to_numpy(), _disturbed(part)) for rank, part in parts.items()}
    if not any(places.size for places in waits.values()):
        return steps
    facts = host_facts(steps, read_counters())
    for rank, places in waits.items():
        if places.size and not _is_aside(parts[rank], places, facts):
            parts[rank] = _averaged(parts[rank], places)
    return pl.concat(parts.values()).sort(STEPS.sort_by, maintain_order=True)


def _disturbed(steps: pl.DataFrame) -> Bools:
    """Which steps are no measure of others; none if all are so."""
    is_disturbed: Bools = steps.select(disturbed(steps)).to_series().to_numpy()
    return np.asarray(is_disturbed & ~is_disturbed.all())


def _waits(times: Ints, disturbed: Bools) -> Ints:
    """Where a host waited for its device: steps far longer than most, at a regular distance; else none."""
    none = np.empty(0, np.int64)
    undisturbed_times = times[(times > 0) & ~disturbed]
    if not undisturbed_times.size:
        return none
    places = np.flatnonzero((times > FAR * np.median(undisturbed_times)) & ~disturbed)
    if places.size <= CYCLES:
        return none
    distances = np.diff(places)
    usual = int(np.median(distances))
    return places if usual >= 2 and float((distances % usual == 0).mean()) >= REGULAR else none


def _is_aside(steps: pl.DataFrame, places: Ints, facts: pl.DataFrame) -> bool:
    """Whether what the host counted explains most of the long steps."""
    chosen = steps["step"][places.tolist()].implode()
    of_rank = facts.filter(pl.col("rank") == steps["rank"][0]).with_columns(
        aside=pl.sum_horizontal(pl.col(name).fill_null(0.0) for name in FACTS.values() if name in _ASIDE)
    )
    if of_rank.is_empty():
        return False
    is_long = pl.col("step").is_in(chosen)
    more = of_rank.select(
        (pl.col(name).filter(is_long).mean() - pl.col(name).filter(~is_long).median()).alias(name)
        for name in ("aside", "duration_ns")
    ).row(0)
    return None not in more and more[0] >= EXPLAINED * more[1]


def _averaged(steps: pl.DataFrame, places: Ints) -> pl.DataFrame:
    """Each step as the mean of its cycle, which ends with a wait."""
    number = np.searchsorted(places, np.arange(steps.height))  # of the cycle that the step is in
    whole = (number > 0) & (number < places.size) & ~np.isin(number, number[_disturbed(steps)])
    length = int(np.median(np.diff(places)))
    return (
        steps.with_columns(cycle_number=pl.Series(number), is_whole=pl.Series(whole))
        .with_columns(
            time_ns=pl.when("is_whole")
            .then(pl.col("time_ns").mean().over("cycle_number").round().cast(pl.Int64))
            .otherwise(-1),
            cycle=pl.lit(length, pl.Int64),
        )
        .drop("cycle_number", "is_whole")
    )


# How long the steps of a job take: the typical step, the mean step with pauses, and which steps are pauses.

AROUND = 40  # steps whose median is what a step would take, however long two in five of them are
MIN_STEPS = 12  # fewer do not show what is usual
MIN_LONGER = 0.2  # of the steps around: what is less is no pause, whatever it is
CLEAR = 6.0  # standard deviations, by the median deviation, which pauses do not sway
MIN_NOISE = 0.02  # of the step: noise is never taken to be less
MAX_RUN = 5  # steps in a row: what lasts longer is a slow spell
MAX_SHARE = 0.4  # of the steps around: what is more frequent is how the job is


@dataclass(frozen=True)
class StepSeries:
    """The steps of a job, in order.

    Attributes:
        steps: [T] int64, their numbers.
        times: [T] ns, each the median over ranks.
        usual: [T] ns, the median of the steps around each.
        paused: [T] which are pauses.
        lost: [T] ns by which pauses are longer than usual, less what the steps after them catch up; else 0.
        recorded: whether these are steps of deep windows, since there are no others.
        by_device: whether their device timed them.
        cycle: over how many steps each time is a mean: 1, but for hosts that run ahead of a device.
    """

    steps: NDArray[np.int64]
    times: Floats
    usual: Floats
    paused: Bools
    lost: Floats
    recorded: bool
    by_device: bool
    cycle: int

    @property
    def typical_ns(self) -> float:
        """The typical step."""
        return float(np.median(self.times[~self.paused]))

    @property
    def mean_ns(self) -> float:
        """The mean step with pauses."""
        return float(self.times.mean())

    @property
    def lost_share(self) -> float:
        """Share of the wall time that is lost to pauses."""
        return float(self.lost.sum() / self.times.sum())


def job_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """The job's steps, in order: `step`, `duration_ns` (median over ranks), `begin_ns` and `end_ns`.

    Of a trace that was recorded in depth all along, all steps count. When a step began and ended is by the
    host, how long it took by the device where that timed it.
    """
    timed = with_times(steps).filter(pl.col("time_ns") > 0)
    outside = timed.filter(pl.col("window") < 0)
    return (
        (timed if outside.is_empty() else outside)
        .group_by("step")
        .agg(
            duration_ns=pl.col("time_ns").median(),
            begin_ns=pl.col("start_ns").min(),
            end_ns=(pl.col("start_ns") + pl.col("duration_ns")).max(),
        )
        .sort("step")
    )


def step_series(steps: pl.DataFrame) -> StepSeries | None:
    """How long the steps of a job take; None where no step was timed."""
    usable = undisturbed(with_times(steps))
    series = job_steps(usable)
    if series.is_empty():
        return None
    times = series["duration_ns"].to_numpy().astype(np.float64)
    median = pl.Series(_full(pl.Series(times).rolling_median(min(AROUND, times.size), center=True)))
    usual = np.asarray(np.maximum(median.rolling_max(3, center=True, min_samples=1).to_numpy(), 1.0))
    noise = _noise(times / usual)
    paused = _paused(times / usual - 1, noise)
    return StepSeries(
        series["step"].to_numpy(),
        times,
        usual,
        paused,
        _lost(times - usual, paused, noise * usual),
        recorded=bool((usable["window"] >= 0).all()),
        by_device=bool(usable["by_device"].any()),
        cycle=int(usable["cycle"].to_numpy().max()),
    )


def series_outside(steps: pl.DataFrame, at_least: int = 1) -> StepSeries | None:
    """How long steps outside deep windows take; None where there are fewer."""
    series = step_series(steps)
    return None if series is None or series.recorded or series.times.size < at_least else series


def device_step_ns(steps: pl.DataFrame) -> float | None:
    """Ns of the typical step outside windows of a job whose hosts all run ahead of their devices.

    Returns:
        None where a host waits for its device in most steps, or no device timed them.
    """
    series = None if all_hosts_ahead(steps).is_empty() else series_outside(steps)
    return None if series is None else series.typical_ns


def undisturbed(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps that recording did not slow down; all, where there are no such steps."""
    outside = steps.sort("rank", "step").filter(~disturbed(steps))
    return steps if outside.is_empty() else outside


def _full(rolled: pl.Series) -> Floats:
    """The first and last steps have the value of the nearest that has enough steps around."""
    return np.asarray(rolled.fill_null(strategy="forward").fill_null(strategy="backward").to_numpy())


def _noise(ratios: Floats) -> float:
    """Standard deviation of the times, relative to the usual ones."""
    return max(float(MAD_TO_SIGMA * np.median(np.abs(ratios - np.median(ratios)))), MIN_NOISE)


def _paused(longer: Floats, noise: float) -> Bools:
    """Which steps are far longer than usual, alone or a few in a row."""
    far = longer >= max(MIN_LONGER, CLEAR * noise)
    edges = np.flatnonzero(np.diff(far.astype(np.int8), prepend=0, append=0))
    for begin, end in edges.reshape(-1, 2):
        far[begin:end] &= end - begin <= MAX_RUN
    if far.size < MIN_STEPS:
        return np.zeros_like(far)
    often = _full(pl.Series(far, dtype=pl.Float64).rolling_mean(min(AROUND, far.size), center=True))
    return np.asarray(far & (often <= MAX_SHARE))


def _lost(longer: Floats, paused: Bools, noise: Floats) -> Floats:
    """What pauses cost: a host that was ahead of its GPU goes on faster until it is ahead again."""
    lost = np.where(paused, longer, 0.0)
    caught_up = (longer < -2 * noise) & ~paused
    for pause in np.flatnonzero(paused):
        following = pause + 1
        while following < longer.size and caught_up[following] and lost[pause] > 0:
            lost[pause] = max(lost[pause] + longer[following], 0.0)
            following += 1
    return np.asarray(lost)


NO_STEP = 0  # the number of the step that stands for a whole window where no steps were recorded
OF_WINDOW = ["rank", "window"]
LANE = [*OF_WINDOW, "pid", "tid"]
QUEUED_NS = 50_000  # work that begins so much later than it was launched waited for other work
END = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
START_NS = 10_000_000  # before a first launch: a start of a process takes longer, a step mostly less
LOADS = r"^enumerate\(DataLoader"  # torch's range around reading a batch
IS_GPU = pl.col("kind").is_in(GPU_WORK_KINDS)
MAX_UNSPLIT = 0.05  # of exposed communication whose rendezvous is not known, which then counts as transfer
STEP_SCHEMA = {
    "step": pl.Int64,
    "rank": pl.Int32,
    "duration_ns": pl.Int64,
    "compute_ns": pl.Int64,
    "copy_ns": pl.Int64,
    "exposed_comm_ns": pl.Int64,
    "exposed_wait_ns": pl.Int64,
    "exposed_transfer_ns": pl.Int64,
    "overlapped_comm_ns": pl.Int64,
    "host_bound_ns": pl.Int64,
    "idle_ns": pl.Int64,
}


class RankActivity(NamedTuple):
    """What one rank did in one window."""

    compute: Intervals
    copies: Intervals
    communication: Intervals
    transfer: Intervals  # communication after its rendezvous, or of which no rendezvous is known
    unsplit: Intervals  # communication of which no rendezvous is known
    host_bound: Intervals | None  # None: whenever it neither computed nor communicated


def step_breakdown(spans: pl.DataFrame, collectives: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Split every recorded step of every rank into where its time went.

    Steps outside deep windows are left out, since nothing is known about their inside.

    Args:
        steps: table `steps`; may be empty, then each window is one step with the number 0.

    Returns:
        One row per step and rank, `duration_ns = compute_ns + exposed_comm_ns + copy_ns + host_bound_ns +
        idle_ns`, and `exposed_comm_ns = exposed_wait_ns + exposed_transfer_ns`, all int64 ns, sorted by step
        and rank. The last two are null where more than `MAX_UNSPLIT` of the exposed communication is of
        collectives that were not found on all ranks of their group.

    Raises:
        Unanswerable: the run holds no spans.
    """
    spans = spans.filter(pl.col("duration_ns") >= 0).with_columns(END)
    if spans.height == 0:
        raise Unanswerable("the run holds no spans: record at least one deep window, or import a trace")
    spans = _marked(spans, collectives, "span_id", "is_comm")
    spans = _marked(spans, collectives, "launch_span_id", "is_launch")
    ready = ready_times(collectives, spans)
    spans = spans.join(ready, on=["rank", "span_id"], how="left", maintain_order="left")
    on_gpu = set(spans.filter(IS_GPU)["rank"].unique())
    stretches = device_steps(spans, recorded_steps(spans, steps)).partition_by("rank", "window", as_dict=True)
    parts = [pl.DataFrame(schema=STEP_SCHEMA)]
    for key, inside in spans.partition_by("rank", "window", as_dict=True).items():
        if key in stretches:
            begin = min(_ints(stretches[key], "start_ns").min(), _ints(inside, "start_ns").min())
            activity = gpu_activity(inside, int(begin)) if key[0] in on_gpu else _cpu_activity(inside)
            parts.append(split_steps(stretches[key], activity))
    return pl.concat(parts).sort("step", "rank", "duration_ns")


def _marked(spans: pl.DataFrame, collectives: pl.DataFrame, link: str, mark: str) -> pl.DataFrame:
    """The spans with a boolean column: does a collective of the same rank point to it by `link`."""
    pointed = collectives.select("rank", pl.col(link).alias("span_id")).unique()
    pointed = pointed.with_columns(pl.lit(True).alias(mark))
    return spans.join(pointed, on=["rank", "span_id"], how="left").with_columns(pl.col(mark).fill_null(False))


def lasting_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """Keep the steps that have a number, a time and a length: a mark without one of them divides nothing.

    Args:
        steps: table `steps`, some of its columns.
    """
    return steps.filter(pl.col("duration_ns") > 0, pl.col("step") >= 0, pl.col("start_ns") != -1)


def are_stepped(steps: pl.DataFrame, ranks: Iterable[int]) -> bool:
    """Find out whether a step is known of some rank; else each window is taken as one.

    Args:
        steps: as from `lasting_steps`.
        ranks: that have spans.
    """
    return bool(steps["rank"].is_in(list(ranks)).any())


def recorded_steps(spans: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Find the steps that windows with spans hold.

    An importer that knows no windows leaves the steps at -1 and puts all spans into window 0. Where no rank
    has steps, each window is one, as of `begins_of_work`.

    Returns:
        `[rank, window, step, start_ns, end_ns]`.
    """
    columns = ["rank", "window", "step", "start_ns", "end_ns"]
    lasting = lasting_steps(steps).with_columns(END)
    deep = lasting.filter(pl.col("window") >= 0)
    undivided = lasting.join(deep, on="rank", how="anti").with_columns(pl.lit(0, pl.Int32).alias("window"))
    stepped = are_stepped(lasting, spans["rank"].unique())
    lasting_spans = spans if stepped else without_last_wait(spans)
    windows = lasting_spans.group_by("rank", "window").agg(pl.col("start_ns").min(), END.max())
    loads = pl.col("name").str.contains(LOADS)
    whole = windows.clear() if stepped else begins_of_work(windows, spans.with_columns(loads=loads))
    whole = whole.with_columns(step=pl.lit(NO_STEP, pl.Int64))
    stretches = pl.concat([deep.select(columns), undivided.select(columns), whole.select(columns)])
    return stretches.join(windows, on=["rank", "window"], how="semi")


def without_last_wait(spans: pl.DataFrame) -> pl.DataFrame:
    """Let windows without steps end with the GPU's last work, not with the call that waits for it.

    A profiler that stops waits for the device, which may take it long: on that rank the one step that the
    window is would last longer than on its peers.

    Args:
        spans: `rank`, `window`, `kind`, `start_ns`, `duration_ns` and others.
    """
    ends = spans.with_columns(END)
    last = pl.col("end_ns") == pl.col("end_ns").max().over(OF_WINDOW)
    works_ns = pl.col("end_ns").filter(IS_GPU).max().over(OF_WINDOW)
    others_ns = pl.col("end_ns").filter(~last).max().over(OF_WINDOW)
    alone = last & (last.sum().over(OF_WINDOW) == 1) & (pl.col("kind") == "runtime")
    waits = (alone & (pl.col("start_ns") < works_ns) & (works_ns < pl.col("end_ns"))).fill_null(False)
    lasts_ns = pl.when(waits).then(others_ns - pl.col("start_ns")).otherwise("duration_ns")
    return ends.with_columns(duration_ns=lasts_ns).drop("end_ns")


def begins_of_work(windows: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Let windows without steps begin when work of a GPU is first launched, or input loaded before that.

    What the program does before it is its start, which no step has: it imports, compiles, sets its device up.
    Where a device works long before, it was given that before the window, and has not just started.

    Args:
        windows: `rank`, `window`, `start_ns` and others.
        spans: with `loads`: whether one reads input, as names that match `LOADS` do.
    """
    on_gpu = spans.filter(IS_GPU & (pl.col("correlation") >= 0)).select(*OF_WINDOW, "correlation").unique()
    calls = spans.filter(pl.col("kind") == "runtime")
    launches = calls.join(on_gpu, on=[*OF_WINDOW, "correlation"], how="semi")
    loads = spans.filter("loads")
    launched, loaded = (
        part.group_by(OF_WINDOW).agg(at=pl.col("start_ns").min()) for part in (launches, loads)
    )
    begins = launched.join(loaded, on=OF_WINDOW, how="left").select(
        *OF_WINDOW, begin_ns=pl.min_horizontal("at", "at_right")
    )
    works = spans.filter(IS_GPU).group_by(OF_WINDOW).agg(works_ns=pl.col("start_ns").min())
    placed = windows
    for part in (begins, works):
        placed = placed.join(part, on=OF_WINDOW, how="left", maintain_order="left")
    nothing_before = pl.col("begin_ns") - pl.col("start_ns") >= START_NS
    is_late = (nothing_before & (pl.col("begin_ns") - pl.col("works_ns") < START_NS)).fill_null(False)
    return placed.with_columns(start_ns=pl.when(is_late).then("begin_ns").otherwise("start_ns")).drop(
        "begin_ns", "works_ns"
    )


def device_steps(spans: pl.DataFrame, stretches: pl.DataFrame) -> pl.DataFrame:
    """When the GPU of each rank went through its steps: the work launched in one step after that of another.

    Work that was queued before a window is not recorded. Where the first that is recorded began long after
    it was launched, the GPU had such work until then, and the first step begins there.

    Args:
        stretches: as from `recorded_steps`.

    Returns:
        The same rows; those of ranks without GPU work, or without its launches, as they are.
    """
    timed = IS_GPU & (pl.col("duration_ns") >= 0)
    work = spans.filter(timed).join(_launches(spans), on=[*OF_WINDOW, "correlation"], how="inner")
    if work.is_empty():
        return stretches
    work = work.sort("called_ns").select(
        *OF_WINDOW, "called_ns", "launched_ns", began_ns="start_ns", done_ns=END.cum_max().over(OF_WINDOW)
    )
    first = work.sort("began_ns").group_by(OF_WINDOW).first()
    queued = pl.col("began_ns") - pl.col("launched_ns") > QUEUED_NS
    backlog = first.filter(queued).select(*OF_WINDOW, until_ns="began_ns")
    keys = [pl.col(name).cast(spans.schema[name]) for name in OF_WINDOW]
    placed = stretches.with_row_index("row").with_columns(keys)
    placed = placed.join(backlog, on=OF_WINDOW, how="left", maintain_order="left")
    for column in ("start_ns", "end_ns"):
        done = placed.select("row", *OF_WINDOW, at=column).sort("at")
        done = done.join_asof(
            work, left_on="at", right_on="called_ns", by=OF_WINDOW, allow_exact_matches=False,
            check_sortedness=False,
        )  # fmt: skip
        placed = placed.join(done.select("row", "done_ns"), on="row", how="left", maintain_order="left")
        placed = placed.with_columns(pl.max_horizontal(column, "done_ns", "until_ns").alias(column))
        placed = placed.drop("done_ns")
    return stretches.with_columns(placed["start_ns"], placed["end_ns"])


def _launches(spans: pl.DataFrame) -> pl.DataFrame:
    """`rank`, `window`, `correlation`; when the call that launched began, `called_ns`, and ended."""
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
    return calls.group_by(*OF_WINDOW, "correlation").agg(
        called_ns=pl.col("start_ns").min(), launched_ns=END.max()
    )


def spans_of_steps(spans: pl.DataFrame, stretches: pl.DataFrame) -> pl.DataFrame:
    """Keep the spans that begin within steps: of the host by its steps, of GPUs by theirs.

    Args:
        stretches: as from `recorded_steps`, all or some of them.

    Returns:
        The rows, in their order.
    """
    places = spans.select("rank", "start_ns", on_gpu=IS_GPU).with_row_index("place")  # a whole table is large
    inside = np.zeros(spans.height, np.bool_)
    for on_gpu, steps in ((True, device_steps(spans, stretches)), (False, stretches)):
        inside[within_stretches(places.filter(on_gpu=on_gpu), steps)["place"].to_numpy()] = True
    return spans.filter(pl.Series(inside))


def within_stretches(
    rows: pl.DataFrame, stretches: pl.DataFrame, time_column: str = "start_ns"
) -> pl.DataFrame:
    """Keep the rows that begin within a stretch of their rank.

    Args:
        rows: with `rank` and a time on that rank's clock.
        stretches: `rank`, `start_ns`, `end_ns`, such as those of `recorded_steps`.

    Returns:
        The rows, in their order.
    """
    begins = stretches.select("rank", begin="start_ns", end="end_ns").sort("begin")
    places = (
        rows.select(pl.col("rank").cast(begins.schema["rank"]), time=time_column)
        .with_row_index("row")
        .sort("time")
    )
    inside = places.join_asof(begins, left_on="time", right_on="begin", by="rank", check_sortedness=False)
    return rows[inside.filter(pl.col("time") < pl.col("end"))["row"].sort()]


def gpu_activity(spans: pl.DataFrame, begin_ns: int) -> RankActivity:
    """The GPU's view; before its first span it has been idle since `begin_ns`."""
    gpu = spans.filter(IS_GPU).sort("start_ns", "span_id")
    launches = _launches(spans).select("correlation", "launched_ns")
    idle_since = pl.col("end_ns").cum_max().shift(1, fill_value=begin_ns)
    late = (
        gpu.with_columns(idle_ns=idle_since)
        .join(launches, on="correlation", how="left")
        .filter((pl.col("idle_ns") < pl.col("start_ns")) & (pl.col("launched_ns") > pl.col("idle_ns")))
    )
    return RankActivity(
        compute=_union(gpu.filter(~pl.col("is_comm") & (pl.col("kind") == "kernel"))),
        copies=_union(gpu.filter(~pl.col("is_comm") & (pl.col("kind") != "kernel"))),
        **_communication(gpu.filter("is_comm")),
        host_bound=union(_ints(late, "idle_ns"), _ints(late, "start_ns")),
    )


def _cpu_activity(spans: pl.DataFrame) -> RankActivity:
    """The main thread's view, for a rank that has no GPU work."""
    ops = spans.filter((pl.col("kind") == "cpu_op") & ~pl.col("is_comm"))
    threads = ops.group_by("pid", "tid").agg(pl.col("is_launch").any(), pl.col("duration_ns").sum())
    main = threads.sort("is_launch", "duration_ns", "tid", descending=True).head(1)
    on_main = ops.join(main, on=["pid", "tid"], how="semi")
    return RankActivity(
        _union(on_main), _union(ops.clear()), **_communication(spans.filter("is_comm")), host_bound=None
    )


def _communication(spans: pl.DataFrame) -> dict[str, Intervals]:
    """Return when anything is communicated, when data move, and when it is not known which of both."""
    begins = pl.max_horizontal("start_ns", pl.col("ready_ns").fill_null(pl.col("start_ns")))
    return {
        "communication": _union(spans),
        "transfer": _union(spans.with_columns(start_ns=begins)),
        "unsplit": _union(spans.filter(pl.col("ready_ns").is_null())),
    }


def split_steps(stretches: pl.DataFrame, activity: RankActivity) -> pl.DataFrame:
    """Split stretches; |communication without compute| = |both together| - |compute|, and so on."""
    starts, ends = _ints(stretches, "start_ns"), _ints(stretches, "end_ns")
    duration = ends - starts
    compute = covered(activity.compute, starts, ends)

    def exposed(intervals: Intervals) -> Times:
        return covered(_either(activity.compute, intervals), starts, ends) - compute

    communication = covered(activity.communication, starts, ends)
    exposed_comm, transfer = exposed(activity.communication), exposed(activity.transfer)
    copies = exposed(_either(activity.communication, activity.copies)) - exposed_comm
    free = duration - compute - exposed_comm - copies
    host_bound = free if activity.host_bound is None else covered(activity.host_bound, starts, ends)
    parts = {
        "duration_ns": duration,
        "compute_ns": compute,
        "copy_ns": copies,
        "exposed_comm_ns": exposed_comm,
        "exposed_wait_ns": exposed_comm - transfer,
        "exposed_transfer_ns": transfer,
        "overlapped_comm_ns": communication - exposed_comm,
        "host_bound_ns": host_bound,
        "idle_ns": free - host_bound,
    }
    split = pl.Series(exposed(activity.unsplit) <= MAX_UNSPLIT * exposed_comm)
    columns = {name: pl.Series(values) for name, values in parts.items()}
    for name in ("exposed_wait_ns", "exposed_transfer_ns"):
        columns[name] = columns[name].set(~split, None)
    return stretches.select("step", "rank").with_columns(**columns)


def _either(some: Intervals, others: Intervals) -> Intervals:
    both = np.concatenate([some, others])
    return union(both[:, 0], both[:, 1])


def _union(spans: pl.DataFrame) -> Intervals:
    return union(_ints(spans, "start_ns"), _ints(spans, "end_ns"))


def _ints(frame: pl.DataFrame, column: str) -> Times:
    return frame[column].to_numpy()


def kernel_totals(spans: pl.DataFrame) -> pl.DataFrame:
    """GPU kernels by name over all ranks and windows; where no GPU was used, operators by their own time.

    Returns:
        `[name, count, total_ns]`, the largest total first.
    """
    kernels = spans.filter((pl.col("kind") == "kernel") & (pl.col("duration_ns") >= 0))
    timed = kernels.with_columns(self_ns=pl.col("duration_ns")) if kernels.height else _self_times(spans)
    totals = timed.group_by("name").agg(
        pl.len().cast(pl.Int64).alias("count"), pl.col("self_ns").sum().alias("total_ns")
    )
    return totals.sort(["total_ns", "name"], descending=[True, False])


def _self_times(spans: pl.DataFrame) -> pl.DataFrame:
    """CPU operators with `self_ns`: their duration less that of the operators directly inside them.

    How deep an operator lies is how many of its thread are open when it begins; what it lies in is the
    latest to have begun one level up.
    """
    ops = spans.filter((pl.col("kind") == "cpu_op") & (pl.col("duration_ns") > 0)).with_columns(END)
    level = [*LANE, "depth"]
    opening = ops.select(*LANE, "span_id", "name", size="duration_ns", at="start_ns", turn=1)
    closing = ops.select(*LANE, "span_id", "name", size="duration_ns", at="end_ns", turn=-1)
    opened = (
        pl.concat([opening, closing])
        .sort([*LANE, "at", "turn", "size", "span_id"], descending=[False] * 6 + [True, False])
        .with_columns(pl.col("turn").cum_sum().over(LANE).alias("depth"))
        .filter(pl.col("turn") > 0)
        .sort("at", maintain_order=True)
    )
    parents = opened.select(*LANE, pl.col("depth") + 1, "at", parent="span_id")
    inside = (
        opened.join_asof(parents, on="at", by=level, check_sortedness=False)
        .group_by("rank", pl.col("parent").alias("span_id"))
        .agg(pl.col("size").sum().alias("inside_ns"))
    )
    outside = pl.col("size") - pl.col("inside_ns").fill_null(0)
    timed = opened.join(inside, on=["rank", "span_id"], how="left")
    return timed.select("name", outside.clip(lower_bound=0).alias("self_ns"))


def collective_totals(
    collectives: pl.DataFrame,
    spans: pl.DataFrame,
    workers: pl.DataFrame,
    keep: Callable[[pl.DataFrame], pl.DataFrame] = lambda rows: rows,
) -> pl.DataFrame:
    """Collectives that ran, by operation, size and hosts of the group, over all ranks and windows.

    A rank's duration is waiting for the others plus moving data. All members move together, so the transfer
    is the shortest duration among them and the rest of each is someone else's lateness. Both are known only
    where every rank of the group that left a record was matched; if the late rank left none, its lateness
    counts as transfer.

    The bus bandwidth is that of the NCCL tests (nccl-tests, doc/PERFORMANCE.md): bytes moved per second of
    transfer, times a factor that makes it comparable with the speed of a link whatever the group's size.

    Args:
        spans: table `spans`, for the stream that a collective ran on.
        workers: table `workers`, for the host of each rank.
        keep: selects the members to count, of rows with the columns of `collectives`; wait and transfer of
            each still follow from all members.

    Returns:
        `[op, bytes, hosts, count, total_ns, matched, wait_ns, transfer_ns, busbw_gbps]`, the largest total
        first. `hosts` is how many the members that left a record are on, 1 is within a host; null where that
        is not known. `bytes` is the payload, as in the graph and the NCCL tests: of a gather and a scatter
        the whole buffer; -1 where unknown. `matched` is how many of the `count` the split into wait and
        transfer rests on; nulls where it is 0. `busbw_gbps` is in 1e9 bytes per second, null where the bytes,
        the transfer or the size of the group is not known.
    """
    members = matched_members(collectives, spans).with_columns(hosts=_hosts(workers))
    rows = keep(members).with_columns(
        wait_ns=pl.col("duration_ns") - pl.col("transfer_ns"),
        bus_bytes=pl.when("complete").then(_bus_bytes()),
    )
    timed = pl.col("transfer_ns").filter(pl.col("bus_bytes").is_not_null())
    payload = pl.max_horizontal("bytes_in", "bytes_out").alias("bytes")
    totals = rows.group_by("op", payload, "hosts").agg(
        pl.len().cast(pl.Int64).alias("count"),
        pl.col("duration_ns").sum().alias("total_ns"),
        pl.col("complete").sum().cast(pl.Int64).alias("matched"),
        _sum_or_null("wait_ns"),
        _sum_or_null("transfer_ns"),
        pl.when(timed.sum() > 0).then(pl.col("bus_bytes").sum() / timed.sum()).alias("busbw_gbps"),
    )
    return totals.sort(["total_ns", "op", "bytes", "hosts"], descending=[True, False, False, False])


def _hosts(workers: pl.DataFrame) -> pl.Expr:
    """How many hosts the members of a row's group, or the two ends of a message, are on."""
    host_of = {rank: host for rank, host in workers.select("rank", "host").iter_rows() if host}
    host = pl.col("rank").replace_strict(host_of, default=None, return_dtype=pl.String)
    count = pl.when(host.is_null().any().over("key")).then(None).otherwise(host.n_unique().over("key"))
    return count.cast(pl.Int64)


def _sum_or_null(column: str) -> pl.Expr:
    """A sum that is null, not 0, where nothing is known."""
    return pl.when(pl.col(column).is_not_null().any()).then(pl.col(column).sum()).alias(column)


def _bus_bytes() -> pl.Expr:
    """Bytes that cross one rank's link, by the convention of the NCCL tests, from what the rank puts in."""
    n = num_members().cast(pl.Float64)
    per_byte = (
        pl.when(pl.col("op") == "all_reduce")
        .then(2 * (n - 1) / n)
        .when(pl.col("op").is_in(["reduce_scatter", "all_to_all"]))
        .then((n - 1) / n)
        .when(pl.col("op") == "all_gather")
        .then(n - 1)  # (n - 1) / n of the larger side, which is n times what goes in
        .when(pl.col("op").is_in(["send", "recv", "send_recv", "broadcast", "reduce"]))
        .then(1.0)
    )
    return pl.when((n > 1) & (pl.col("bytes_in") >= 0)).then(per_byte * pl.col("bytes_in"))


def matched_members(collectives: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Find the members of each collective that ran, and what of their time was transfer.

    Args:
        spans: table `spans`, for the stream that a collective ran on.

    Returns:
        The rows of `dpro.replay.alignment.match.Matching` with `complete` (all members are here) and
        `transfer_ns` (null where they are not).
    """
    rows = match_collectives(collectives, spans).rows
    size = pl.max_horizontal("expected", num_members(), 2)
    transfer = pl.col("duration_ns").min().over("instance")
    rows = rows.with_columns(complete=pl.col("members") >= size)
    return rows.with_columns(transfer_ns=pl.when("complete").then(transfer))


def ready_times(collectives: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Find until when each span of communication waited for other ranks.

    Returns:
        `rank`, `span_id`, `ready_ns` (on the rank's own clock; null where not known), one row per span that
        ran a collective. A span that ran several collectives at once is ready when the last of them is.
    """
    rows = matched_members(collectives, spans)
    alone = num_members() == 1  # a group of one rank waits for no other
    transfer = pl.when(alone).then("duration_ns").otherwise("transfer_ns")
    ready = pl.col("start_ns") + pl.col("duration_ns") - transfer
    last = pl.when(ready.is_null().any()).then(None).otherwise(ready.max())
    return rows.group_by("rank", "span_id").agg(ready_ns=last)
