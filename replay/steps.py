"""Step times of a run and their breakdown: per rank, per kernel, per kind of collective.

Takes tables of a run; returns frames in integer nanoseconds, null where nothing was measured. Nothing is
predicted or aligned across clocks; `dpro.detect` finds the rank at fault.

Duration: table `steps` with the columns of `dpro.timed.with_times`. In runs on GPUs without timing events
(older recordings, traces), hosts that run ahead are recognised by their synchronisation schedule: many short
steps and, at regular distances, a long one that waits for all enqueued work. Only a cycle's mean is known.

Breakdown: a **step** of a rank is split without remainder: duration = compute + exposed communication +
copies + host bound + idle. Work counts in the step during which it *ran*.

On a rank with GPU work the split is the GPU's view, all streams together:

- communication: spans that a row of `collectives` points to; compute: every other kernel;
- exposed is communication while nothing computes, overlapped is communication while something does;
  exposed communication is wait until all members of the collective have arrived, and transfer after that;
- copies: copies and fills while nothing computes or communicates;
- host bound: the GPU is idle until a span whose launch call returned only after the GPU had become idle, so
  it waited for the CPU; idle: the rest (the launch came in time, or is not recorded).

A GPU step ends when all work has ended that was launched before the host's end of the step: the steps of a
host that runs ahead end long before those of its GPU.

On a rank without GPU work the split is the view of the main thread, the one that computes among those that
launch collectives:

- compute: operators on it; communication: spans that a row of `collectives` points to, on any thread;
- host bound: neither, which leaves Python, the input pipeline and the optimizer's own code; idle is 0.

Wait is separated from transfer as in the graph, by `dpro.replay.alignment.transfers.split_members`. A
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
from dpro.replay.alignment.transfers import split_members
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
    """Return the host's counters of each step.

    Args:
        counters: table `counters`; those about steps carry the start of their step.

    Returns:
        `[rank, step, duration_ns]` and the columns of `FACTS` (ns or a count, Float64), sorted by rank and
        step, for steps that take time; no rows where no step has counters.
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
    """Return the mean step of each rank: `[rank, steps, duration_ns]` and the columns of `FACTS`, Float64.

    A time measured in some steps only, such as the wait for a core in the longer ones, is scaled to its share
    of these steps: the mean of its values alone could exceed a step.
    """
    times = [column for column in FACTS.values() if column.endswith("_ns")]
    duration = pl.col("duration_ns")
    shares = []
    for name in times:
        is_sampled = pl.col(name).is_not_null()
        share = pl.col(name).sum() / duration.filter(is_sampled).sum()
        shares.append(pl.when(is_sampled.any()).then(share * duration.mean()).alias(name))
    means = [duration.mean(), *shares, pl.col("backward_calls").mean()]
    shown = ["rank", "steps", "duration_ns", *FACTS.values()]
    return (
        facts.group_by("rank").agg(pl.len().cast(pl.Int64).alias("steps"), *means).select(shown).sort("rank")
    )


FAR = 2.0  # multiple of the median step from which a step waits for those before it
CYCLES = 3  # waits that a schedule has to exceed
REGULAR = 0.8  # share of the distances between long steps that are equal
EXPLAINED = 0.5  # share of the excess of long steps from which other work of the host explains them
# Other work of the host in long steps, which no launch queue explains.
_ASIDE = ("checkpoint_ns", "no_grad_ns", "compile_ns", "gc_ns", "data_wait_ns")


def steps_of(run: Run) -> pl.DataFrame:
    """Return table `steps` of a run with the duration of each step.

    Raises:
        InputError: a part of the run cannot be read.
    """
    table = run.table(STEPS)
    steps = with_times(table)
    return steps if steps["by_device"].any() else _host_steps(run, table)


def host_steps_of(run: Run) -> pl.DataFrame:
    """Return table `steps` as timed by hosts alone, for a comparison with a run that no device timed.

    Raises:
        InputError: a part of the run cannot be read.
    """
    return _host_steps(run, run.table(STEPS))


def _host_steps(run: Run, table: pl.DataFrame) -> pl.DataFrame:
    steps = with_times(table.drop("gpu_step_ns"))
    return over_cycles(steps, lambda: run.table(COUNTERS)) if run.manifest.gpus else steps


def over_cycles(steps: pl.DataFrame, read_counters: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    """Replace the steps of hosts that wait for their device at regular distances by cycle means.

    Steps up to the first such wait, after the last, and in cycles with a deep window get -1.

    Args:
        steps: from `with_times`, of a run on GPUs.
        read_counters: returns table `counters`; called only where there is such a schedule.
    """
    parts = {rank: part.sort("step") for (rank,), part in steps.group_by("rank", maintain_order=True)}
    waits = {
        rank: _device_waits(part["time_ns"].to_numpy(), _disturbed(part)) for rank, part in parts.items()
    }
    if not any(places.size for places in waits.values()):
        return steps
    facts = host_facts(steps, read_counters())
    for rank, places in waits.items():
        if places.size and not _explained_by_host(parts[rank], places, facts):
            parts[rank] = _cycle_means(parts[rank], places)
    return pl.concat(parts.values()).sort(STEPS.sort_by, maintain_order=True)


def _disturbed(steps: pl.DataFrame) -> Bools:
    """Return a mask of the steps that do not represent others; all False if all would be marked."""
    is_disturbed: Bools = steps.select(disturbed(steps)).to_series().to_numpy()
    return np.asarray(is_disturbed & ~is_disturbed.all())


def _device_waits(times: Ints, disturbed: Bools) -> Ints:
    """Return the long steps, at regular distances, in which a host waited for its device; else empty."""
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


def _explained_by_host(steps: pl.DataFrame, places: Ints, facts: pl.DataFrame) -> bool:
    """Return whether other work that the host recorded explains most of the long steps."""
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


def _cycle_means(steps: pl.DataFrame, places: Ints) -> pl.DataFrame:
    """Replace each step by the mean of its cycle, which ends with a wait."""
    number = np.searchsorted(places, np.arange(steps.height))  # of the cycle of each step
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


# Step times of a job: the typical step, the mean step with pauses, and which steps are pauses.

AROUND = 40  # steps in the running median, which is valid even if two in five of them are pauses
MIN_STEPS = 12  # fewer do not show the usual step
MIN_LONGER = 0.2  # excess over the steps around below which a step is never a pause
CLEAR = 6.0  # standard deviations, from the median deviation, which pauses do not affect
MIN_NOISE = 0.02  # smallest noise that is assumed, as a share of the step
MAX_RUN = 5  # steps in a row: a longer run is a slow spell, not a pause
IN_TIME = 1.1  # multiple of a step outside windows: steps of a window up to this wait for no host either
NEARLY_ALL = 0.95  # share of the steps outside windows that a delayed step of a window exceeds
DELAYED = 1.5  # multiple of nearly all steps outside windows beyond which a step of a window was delayed
MAX_SHARE = 0.4  # share of the steps around: more frequent long steps are normal for the job


@dataclass(frozen=True)
class StepSeries:
    """The steps of a job, in order.

    Attributes:
        steps: [T] int64 step numbers.
        times: [T] ns, each the median over ranks.
        usual: [T] ns, the median of the steps around each.
        paused: [T] mask of pauses.
        lost: [T] ns by which a pause is longer than usual, less what later steps catch up; else 0.
        recorded: whether these are steps of deep windows, as there are no others.
        by_device: whether their device timed them.
        cycle: number of steps that each time is a mean of: 1, except for hosts that run ahead of a device.
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
        """The typical step, in ns."""
        return float(np.median(self.times[~self.paused]))

    @property
    def mean_ns(self) -> float:
        """The mean step with pauses, in ns."""
        return float(self.times.mean())

    @property
    def lost_share(self) -> float:
        """Share of the wall time lost to pauses."""
        return float(self.lost.sum() / self.times.sum())


def job_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the job's steps, in order: `step`, `duration_ns` (median over ranks), `begin_ns` and `end_ns`.

    In a trace that is one deep window, all steps count. Begin and end are by the host, the duration by the
    device where it timed the steps.
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
    """Return the step times of a job; None where no step was timed."""
    usable = undisturbed(with_times(steps))
    series = job_steps(usable)
    if series.is_empty():
        return None
    times = series["duration_ns"].to_numpy().astype(np.float64)
    median = pl.Series(_fill_ends(pl.Series(times).rolling_median(min(AROUND, times.size), center=True)))
    usual = np.asarray(np.maximum(median.rolling_max(3, center=True, min_samples=1).to_numpy(), 1.0))
    ratios = times / usual
    noise = max(float(MAD_TO_SIGMA * np.median(np.abs(ratios - np.median(ratios)))), MIN_NOISE)
    paused = _paused(ratios - 1, noise)
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
    """Return the step times outside deep windows; None where there are fewer than `at_least`."""
    series = step_series(steps)
    return None if series is None or series.recorded or series.times.size < at_least else series


def longest_deep_ns(steps: pl.DataFrame) -> float | None:
    """Return the length beyond which a step in a deep window does not represent the job, in ns.

    A window begins with a wait for its devices. Where all hosts run ahead of them otherwise, they have no
    lead in its first steps, which take longer than the others. Elsewhere, something delayed a step in a
    window if it takes far longer than nearly all others.

    Returns:
        None where steps outside windows do not show it.
    """
    if not all_hosts_ahead(steps).is_empty():
        series = series_outside(steps)
        return None if series is None else IN_TIME * series.typical_ns
    series = series_outside(steps, MIN_STEPS)
    if series is None or series.cycle > 1:
        return None
    return DELAYED * float(np.quantile(series.times, NEARLY_ALL))


def undisturbed(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the steps that recording did not slow down, or all steps if there are none."""
    outside = steps.sort("rank", "step").filter(~disturbed(steps))
    return steps if outside.is_empty() else outside


def _fill_ends(rolled: pl.Series) -> Floats:
    """Fill the ends of a rolling statistic with the nearest value."""
    return np.asarray(rolled.fill_null(strategy="forward").fill_null(strategy="backward").to_numpy())


def _paused(longer: Floats, noise: float) -> Bools:
    """Return a mask of steps far longer than usual, single ones or a few in a row."""
    far = longer >= max(MIN_LONGER, CLEAR * noise)
    edges = np.flatnonzero(np.diff(far.astype(np.int8), prepend=0, append=0))
    for begin, end in edges.reshape(-1, 2):
        far[begin:end] &= end - begin <= MAX_RUN
    if far.size < MIN_STEPS:
        return np.zeros_like(far)
    often = _fill_ends(pl.Series(far, dtype=pl.Float64).rolling_mean(min(AROUND, far.size), center=True))
    return np.asarray(far & (often <= MAX_SHARE))


def _lost(longer: Floats, paused: Bools, noise: Floats) -> Floats:
    """Return the cost of each pause: a host that was ahead of its GPU runs faster until it is ahead again."""
    lost = np.where(paused, longer, 0.0)
    caught_up = (longer < -2 * noise) & ~paused
    for pause in np.flatnonzero(paused):
        following = pause + 1
        while following < longer.size and caught_up[following] and lost[pause] > 0:
            lost[pause] = max(lost[pause] + longer[following], 0.0)
            following += 1
    return np.asarray(lost)


NO_STEP = 0  # the step number of a whole window without recorded steps
OF_WINDOW = ["rank", "window"]
LANE = [*OF_WINDOW, "pid", "tid"]
QUEUED_NS = 50_000  # work that begins later than this after its launch waited for other work
END = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
START_NS = 10_000_000  # time before a first launch that a process start exceeds, but a step mostly does not
LOADS = r"^enumerate\(DataLoader"  # torch's range around reading a batch
IS_GPU = pl.col("kind").is_in(GPU_WORK_KINDS)
MAX_UNSPLIT = 0.05  # share of exposed communication without a known rendezvous that may count as transfer
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
    """The activity of one rank in one window."""

    compute: Intervals
    copies: Intervals
    communication: Intervals
    transfer: Intervals  # communication after its rendezvous, or without a known one
    unsplit: Intervals  # communication without a known rendezvous
    host_bound: Intervals | None  # None: whenever it neither computed nor communicated


def step_breakdown(
    spans: pl.DataFrame, collectives: pl.DataFrame, steps: pl.DataFrame, members: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Split every recorded step of every rank into the parts of its time.

    Steps outside deep windows are left out, since their contents are not recorded.

    Args:
        steps: table `steps`; if empty, each window is one step with number 0.
        members: from `split_members`; None to match and split the collectives here, by durations alone.

    Returns:
        One row per step and rank, `duration_ns = compute_ns + exposed_comm_ns + copy_ns + host_bound_ns +
        idle_ns`, and `exposed_comm_ns = exposed_wait_ns + exposed_transfer_ns`, all int64 ns, sorted by step
        and rank. The last two are null where more than `MAX_UNSPLIT` of the exposed communication belongs to
        collectives that were not found on all ranks of their group.

    Raises:
        Unanswerable: the run has no spans.
    """
    spans = spans.filter(pl.col("duration_ns") >= 0).with_columns(END)
    if spans.height == 0:
        raise Unanswerable("the run holds no spans", "record at least one deep window, or import a trace")
    spans = _marked(spans, collectives, "span_id", "is_comm")
    spans = _marked(spans, collectives, "launch_span_id", "is_launch")
    if members is None:
        members = split_members(match_collectives(collectives, spans).rows)
    ready = ready_times(members)
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
    """Add a boolean column: whether a collective of the rank points to the span by column `link`."""
    pointed = collectives.select("rank", pl.col(link).alias("span_id")).unique()
    pointed = pointed.with_columns(pl.lit(True).alias(mark))
    return spans.join(pointed, on=["rank", "span_id"], how="left").with_columns(pl.col(mark).fill_null(False))


def lasting_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """Keep the steps with a number, a start and a duration; a mark without one of them delimits no step.

    Args:
        steps: table `steps`, or some of its columns.
    """
    return steps.filter(pl.col("duration_ns") > 0, pl.col("step") >= 0, pl.col("start_ns") != -1)


def are_stepped(steps: pl.DataFrame, ranks: Iterable[int]) -> bool:
    """Return whether any rank has steps; else each window is taken as one step.

    Args:
        steps: rows of `lasting_steps`.
        ranks: ranks that have spans.
    """
    return bool(steps["rank"].is_in(list(ranks)).any())


def recorded_steps(spans: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the steps in windows with spans.

    An importer without windows leaves steps at -1 and puts all spans into window 0. Where no rank has steps,
    each window is one step, which begins as in `begins_of_work`.

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
    """End windows without steps with the last work of the GPU, not with the call that waits for it.

    A profiler that stops waits for the device, which may take long: the single step of the window would then
    last longer on that rank than on its peers.

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
    """Begin windows without steps with the launch of the first kernel, or the input loading before it.

    Earlier time is the start of the program, which belongs to no step: it imports, compiles, sets up its
    device and copies weights to it; without any kernel, the first copy counts. Where a device works long
    before the first launch, its work was queued before the window, and the program has not just started.

    Args:
        windows: `rank`, `window`, `start_ns` and others.
        spans: with `loads`: whether a span reads input, as names that match `LOADS` do.
    """
    has_kernels = (pl.col("kind") == "kernel").any().over(OF_WINDOW)
    is_work = (pl.col("kind") == "kernel") | (IS_GPU & ~has_kernels)
    on_gpu = spans.filter(is_work & (pl.col("correlation") >= 0)).select(*OF_WINDOW, "correlation").unique()
    calls = spans.filter(pl.col("kind") == "runtime")
    launches = calls.join(on_gpu, on=[*OF_WINDOW, "correlation"], how="semi")
    loads = spans.filter("loads")
    launched, loaded = (
        part.group_by(OF_WINDOW).agg(at=pl.col("start_ns").min()) for part in (launches, loads)
    )
    begins = launched.join(loaded, on=OF_WINDOW, how="left").select(
        *OF_WINDOW, begin_ns=pl.min_horizontal("at", "at_right")
    )
    works = spans.filter(is_work).group_by(OF_WINDOW).agg(works_ns=pl.col("start_ns").min())
    placed = windows
    for part in (begins, works):
        placed = placed.join(part, on=OF_WINDOW, how="left", maintain_order="left")
    nothing_before = pl.col("begin_ns") - pl.col("start_ns") >= START_NS
    is_late = (nothing_before & (pl.col("begin_ns") - pl.col("works_ns") < START_NS)).fill_null(False)
    return placed.with_columns(start_ns=pl.when(is_late).then("begin_ns").otherwise("start_ns")).drop(
        "begin_ns", "works_ns"
    )


def device_steps(spans: pl.DataFrame, stretches: pl.DataFrame) -> pl.DataFrame:
    """Shift steps to when the GPU of each rank ran the work launched in them.

    Work queued before a window is not recorded. Where the first recorded work began long after its launch,
    the GPU had such a backlog until then, and the first step begins there.

    Args:
        stretches: rows of `recorded_steps`.

    Returns:
        The rows with shifted times; unchanged for ranks without GPU work, or without its launches.
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
    """Return `rank`, `window`, `correlation`, and the begin `called_ns` and end `launched_ns` of the call."""
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
    return calls.group_by(*OF_WINDOW, "correlation").agg(
        called_ns=pl.col("start_ns").min(), launched_ns=END.max()
    )


def spans_of_steps(spans: pl.DataFrame, stretches: pl.DataFrame) -> pl.DataFrame:
    """Keep the spans that begin within steps: host spans by the host's steps, GPU spans by the GPU's.

    Args:
        stretches: rows of `recorded_steps`, all or some of them.

    Returns:
        The rows, in their order.
    """
    places = spans.select("rank", "start_ns", on_gpu=IS_GPU).with_row_index("place")  # not all columns
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
    """Return the activity of the GPU, idle from `begin_ns` until its first span."""
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
    """Return the activity of the main thread, for a rank without GPU work."""
    ops = spans.filter((pl.col("kind") == "cpu_op") & ~pl.col("is_comm"))
    threads = ops.group_by("pid", "tid").agg(pl.col("is_launch").any(), pl.col("duration_ns").sum())
    main = threads.sort("is_launch", "duration_ns", "tid", descending=True).head(1)
    on_main = ops.join(main, on=["pid", "tid"], how="semi")
    return RankActivity(
        _union(on_main), _union(ops.clear()), **_communication(spans.filter("is_comm")), host_bound=None
    )


def _communication(spans: pl.DataFrame) -> dict[str, Intervals]:
    """Return the intervals of communication, of its transfer, and of communication that is unsplit."""
    begins = pl.max_horizontal("start_ns", pl.col("ready_ns").fill_null(pl.col("start_ns")))
    return {
        "communication": _union(spans),
        "transfer": _union(spans.with_columns(start_ns=begins)),
        "unsplit": _union(spans.filter(pl.col("ready_ns").is_null())),
    }


def split_steps(stretches: pl.DataFrame, activity: RankActivity) -> pl.DataFrame:
    """Split stretches by set algebra, such as |communication without compute| = |either| - |compute|."""
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
    """Sum up GPU kernels by name over all ranks and windows; without GPU, operators by their own time.

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
    """Return CPU operators with `self_ns`: their duration less that of the operators directly inside them.

    The depth of an operator is the number of operators open on its thread when it begins; its parent is the
    latest one to begin one level up.
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
    members: pl.DataFrame,
    workers: pl.DataFrame,
    keep: Callable[[pl.DataFrame], pl.DataFrame] = lambda rows: rows,
) -> pl.DataFrame:
    """Sum up the collectives that ran by operation, size and number of hosts, over all ranks and windows.

    The bus bandwidth is that of the NCCL tests (nccl-tests, doc/PERFORMANCE.md): bytes moved per second of
    transfer, times a factor that makes it comparable with the speed of a link whatever the group's size.

    Args:
        members: from `split_members`.
        workers: table `workers`, for the host of each rank.
        keep: selects the members to count.

    Returns:
        `[op, bytes, hosts, count, total_ns, matched, wait_ns, transfer_ns, busbw_gbps]`, the largest total
        first. `hosts` is the number of hosts of the recorded members, 1 within a host, null where unknown.
        `bytes` is the payload, as in the graph and the NCCL tests: for a gather and a scatter the whole
        buffer; -1 where unknown. `matched` is the number of calls, of the `count`, that were split into wait
        and transfer; both are null where it is 0. `busbw_gbps` is in 1e9 bytes per second, null where the
        bytes, the transfer or the size of the group is unknown.
    """
    rows = keep(members.with_columns(hosts=_hosts(workers)))
    rows = rows.with_columns(bus_bytes=pl.when("complete").then(_bus_bytes()))
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
    """Return the number of hosts of a group's members, or of the two ends of a message."""
    host_of = {rank: host for rank, host in workers.select("rank", "host").iter_rows() if host}
    host = pl.col("rank").replace_strict(host_of, default=None, return_dtype=pl.String)
    count = pl.when(host.is_null().any().over("key")).then(None).otherwise(host.n_unique().over("key"))
    return count.cast(pl.Int64)


def _sum_or_null(column: str) -> pl.Expr:
    """Return a sum that is null, not 0, where all values are null."""
    return pl.when(pl.col(column).is_not_null().any()).then(pl.col(column).sum()).alias(column)


def _bus_bytes() -> pl.Expr:
    """Return the bytes over one rank's link, by the convention of the NCCL tests, from its input bytes."""
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


def ready_times(members: pl.DataFrame) -> pl.DataFrame:
    """Return the moment until which each span of communication waited for other ranks.

    Args:
        members: from `split_members`.

    Returns:
        `rank`, `span_id`, `ready_ns` (on the rank's own clock; null where unknown), one row per span that
        ran a collective. A span that ran several collectives at once is ready when the last of them is.
    """
    alone = num_members() == 1  # a group of one rank waits for no other
    transfer = pl.when(alone).then("duration_ns").otherwise("transfer_ns")
    ready = pl.col("start_ns") + pl.col("duration_ns") - transfer
    last = pl.when(ready.is_null().any()).then(None).otherwise(ready.max())
    return members.group_by("rank", "span_id").agg(ready_ns=last)
