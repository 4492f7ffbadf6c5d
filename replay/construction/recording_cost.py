"""The cost of recording, taken out of a job's graph, which then shows the job as it runs.

Takes the graph of a run as recorded, and its steps; returns a `RecordingCost`: the duration of each node
without it, and the cost by rank, window and kind of event. Only work of CPU threads is shortened, where the
profiler runs; waits, kernels and transfers keep their durations.

The profiler times an operator between two pieces of its bookkeeping, so half of an operator's cost is before
it and half behind it, in the surrounding work; a call of the CUDA runtime contains its own cost. The amount
follows from steps outside deep windows: their length, or that of their hosts where these run ahead of
devices. Without them it is a prior, measured on other machines and scaled by the speed of this one. What then
still differs between steps in windows and the others is their pace, which `find_pace` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.replay.engine import compiled
from dpro.replay.graph import CPU_KINDS, Graph, NodeKind, is_one_of
from dpro.replay.steps import StepSeries, longest_deep_ns, series_outside
from dpro.replay.timeline import durations_of, host_paces, replay, step_ends, step_lengths, usual_steps
from dpro.schema import SPANS
from dpro.store import Run
from dpro.timed import all_hosts_ahead, disturbed, with_times

# Costs of an event, as multiples of a call of `aten::as_strided`, which shows the speed of the machine:
# medians of ten jobs on a CPU (270 ns a call), and of one on an H200 machine (675 ns a call).
CLOCK, CLOCK_NS = "aten::as_strided", 450.0  # the time of two H100 machines, used where none was called
OPERATOR, WITHOUT_GRADIENT, WITH_SHAPES = 2.35, 0.46, 1.3  # the last two are factors of the first
RUNTIME_CALL, PYTHON_CALL = 8.0, 1.85
EVENTS = ("operator", "runtime call", "Python call")
# Error of the prior, as multiples of it. The settings of the profiler of an imported trace are unknown: it
# may have cost next to nothing, except for stacks, which cost what Python takes to call the profiler.
OWN, IMPORTED = (1.0, 0.5), (0.5, 0.0)  # likely, and at least
AT_MOST, AT_MOST_WITHOUT_CLOCK = 1.5, 2.0
OF_PYTHON = 0.5  # at least, of the prior of Python calls
MAX_SHARE = 1 / 3  # share of a host's time that a prior may take
MAX_FITTED = 3.0  # largest multiple of the prior that is fitted; the first window takes 2.9 at times
SHOWS = 0.01  # share of the step that the prior has to take for steps to show the cost
REACHED = 0.001  # share of the step below which a difference is none
STEADY = 0.3  # share of the typical step: with a wider middle half, steps are not a reference
MIN_STEPS = 5  # steps outside windows that a reference needs
WARM_UP, MIN_EARLY = 10, 30  # first steps that do not count, and number of early steps needed after them
SIMILAR = 0.1  # relative difference up to which steps in deep windows and the others count as equally long
FAR = 3.0  # times as long: beyond this, windows slow down steps by more than can be corrected
LASTING = 1.2  # factor by which a window may slow down later steps of a launch-bound GPU job
SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, MAX_FITTED)  # multiples at which steps are replayed
PYTHON_NAMES = r"\.py\(\d+\)|^<built-in|^nn\.Module: "
BACKWARD = r"^autograd::|Backward\d*$"

BY_STEPS, BY_HOSTS, BY_PRIOR = "steps outside windows", "hosts outside windows", "prior"
SCHEMA = {
    "rank": pl.Int64, "window": pl.Int64, "kind": pl.String, "events": pl.Int64, "ns": pl.Float64,
    "low_ns": pl.Float64, "high_ns": pl.Float64, "source": pl.String,
}  # fmt: skip

Cell = tuple[int, int]  # a rank, and a window of it


@dataclass(frozen=True)
class RecordingCost:
    """The cost of recording a job.

    Attributes:
        table: cost by rank, window and kind of event: `ns`, at least `low_ns` and at most `high_ns`, and
            `source` of the estimate.
        hosts: by `rank`, the work of its CPU threads: `recorded_ns`, and without the cost `likely_ns`, at
            least `least_ns` and at most `most_ns`.
        scales: by rank and window, the multiple of the prior that was taken out.
        duration: [N] durations of the recorded graph's nodes without the cost, in ns; None where that graph
            is not in memory as a whole.
    """

    table: pl.DataFrame
    hosts: pl.DataFrame
    scales: Mapping[Cell, float]
    duration: Ints | None = None

    @property
    def source(self) -> str:
        """The source of the estimate; of several, the weakest."""
        sources = set(self.table["source"].to_list())
        return next((source for source in (BY_PRIOR, BY_STEPS, BY_HOSTS) if source in sources), BY_PRIOR)

    @property
    def slowed(self) -> tuple[float, float, float]:
        """Factors by which recording slowed the hosts: likely, at least, at most."""
        recorded, likely, least, most = (
            max(float(self.hosts[f"{name}_ns"].sum()), 1.0)
            for name in ("recorded", "likely", "most", "least")
        )
        return recorded / likely, recorded / least, recorded / most

    @property
    def host_factors(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """By `rank`, the `factor` by which CPU work may be shorter, and longer, than it likely is."""
        likely = pl.col("likely_ns").clip(lower_bound=1)
        shorter, longer = (
            self.hosts.select("rank", factor=pl.col(f"{end}_ns") / likely) for end in ("least", "most")
        )
        return shorter, longer


class CpuWork(NamedTuple):
    """The work of CPU threads, which contains the cost of recording.

    Attributes:
        node: [C] nodes, thread by thread and in order of time.
        opens: [C] mask of those that follow no other directly: cost not yet taken out is dropped there.
        cell: [C] index in `cells` of the rank and window of each.
        cells: ranks and windows.
        prior: [C] expected cost of recording at each, in ns.
        events: `rank`, `window`, `kind` (index in `EVENTS`), `events`, `ns` (of the prior).
        has_clock: [cells] whether the speed of the machine is known.
    """

    node: Ints
    opens: Bools
    cell: Ints
    cells: list[Cell]
    prior: Floats
    events: pl.DataFrame
    has_clock: Bools

    def without(self, graph: Graph, scales: Floats) -> Ints:
        """Return [N] durations of the graph's nodes without the prior times a scale for each cell, in ns."""
        duration = graph.nodes.duration.copy()
        left = duration[self.node]
        _subtract(left, self.prior * scales[self.cell], self.opens)
        duration[self.node] = left
        return duration

    def at_scales(self, graph: Graph) -> list[Ints]:
        """Return [N] durations without the prior times each of `SCALES`, in ns."""
        return [self.without(graph, np.full(len(self.cells), scale)) for scale in SCALES]

    def sums(self, duration: Ints) -> Floats:
        """Return [cells] CPU work under the given durations, in ns."""
        return np.bincount(self.cell, duration[self.node], len(self.cells)).astype(np.float64)


class Observed(NamedTuple):
    """Observations of ranks and windows about the cost of recording.

    Attributes:
        cells: ranks and windows.
        prior_ns: [cells] expected cost.
        has_clock: [cells] whether the speed of the machine is known.
        left_ns: [scales, cells] CPU work that is left without the prior times each of `SCALES`.
        events: see `CpuWork`.
    """

    cells: list[Cell]
    prior_ns: Floats
    has_clock: Bools
    left_ns: Floats
    events: pl.DataFrame


class Reference(NamedTuple):
    """The times that windows are compared with.

    Attributes:
        source: their kind, `BY_STEPS` or `BY_HOSTS`.
        times: typical, high and low time of a step, in ns, by rank; of steps under key -1, for all ranks.
    """

    source: str
    times: Mapping[int, tuple[float, float, float]]

    def targets(self, cells: Sequence[Cell]) -> Floats:
        """Return [3, cells] ns that a step of each should take: likely, at most and at least by chance."""
        by_chance = np.sqrt(len({window for _, window in cells}))
        typical, high, low = np.array(
            [self.times.get(rank, self.times.get(-1, (np.nan,) * 3)) for rank, _ in cells]
        ).T
        return np.stack(
            [typical, typical + (high - typical) / by_chance, typical - (typical - low) / by_chance]
        )


class Profiler(NamedTuple):
    """The profiler that recorded operators.

    Attributes:
        has_shapes: whether it recorded shapes of arguments.
        is_own: whether it was dpro's, whose settings are those of the measurements.
    """

    has_shapes: bool = False
    is_own: bool = False


def profiler_of(run: Run) -> Profiler | None:
    """Return the profiler of a run's operators; None where its cost is unknown.

    An execution trace costs 11 us and more per operator, and differs too much from job to job.
    """
    if run.manifest.options.get("execution_trace"):
        return None
    part = next(iter(run.part_by_part(SPANS, ["shapes"])), None)
    has_shapes = part is not None and bool((part["shapes"] != "").any())
    return Profiler(has_shapes, run.manifest.created_by.startswith("dpro record"))


def find_recording_cost(graph: Graph, steps: pl.DataFrame, profiler: Profiler | None) -> RecordingCost | None:
    """Find the cost of recording a job whose graph is in memory as a whole.

    Args:
        graph: as recorded.
        steps: table `steps` of its run.
        profiler: the profiler of its operators.

    Returns:
        None where the cost is unknown, for example without operators of PyTorch's profiler.
    """
    if profiler is None or not (graph.nodes.kind == NodeKind.CPU).any():
        return None
    work = cpu_work(graph, profiler.has_shapes)
    durations = work.at_scales(graph)
    reference, at = reference_of(steps), None
    if reference is not None:
        measure = host_paces_of if reference.source == BY_HOSTS else steps_of_cells
        at = np.stack([measure(graph.with_durations(duration), work.cells) for duration in durations])
    cost = judge_cost(observed(work, durations), profiler, reference, at)
    scales = np.array([cost.scales[cell] for cell in work.cells])
    duration = work.without(graph, scales)
    duration.setflags(write=False)
    return replace(cost, duration=duration)


def observed(work: CpuWork, durations: Sequence[Ints]) -> Observed:
    """Return what CPU work shows, by its durations at each of `SCALES`."""
    prior_ns = np.bincount(work.cell, work.prior, len(work.cells)).astype(np.float64)
    return Observed(work.cells, prior_ns, work.has_clock, np.stack([*map(work.sums, durations)]), work.events)


def join_observations(parts: Sequence[Observed]) -> Observed:
    """Join the observations of several ranks."""
    return Observed(
        [cell for part in parts for cell in part.cells],
        np.concatenate([part.prior_ns for part in parts]),
        np.concatenate([part.has_clock for part in parts]),
        np.concatenate([part.left_ns for part in parts], axis=1),
        pl.concat([part.events for part in parts]),
    )


def judge_cost(
    seen: Observed, profiler: Profiler, reference: Reference | None, at: Floats | None
) -> RecordingCost:
    """Estimate the cost of recording.

    Args:
        at: [scales, cells] time of a step of each cell at each of `SCALES`, in ns; None without a reference.
    """
    recorded_ns = seen.left_ns[0]
    calls = seen.events.filter(pl.col("kind") == EVENTS.index("Python call")).select("rank", "window", "ns")
    python_ns = {(rank, window): ns for rank, window, ns in calls.iter_rows()}
    of_python = np.array([python_ns.get(cell, 0.0) for cell in seen.cells]) / np.maximum(seen.prior_ns, 1.0)
    likely, at_least = OWN if profiler.is_own else IMPORTED
    at_most = np.where(seen.has_clock, AT_MOST, AT_MOST_WITHOUT_CLOCK)
    least = np.maximum(at_least, OF_PYTHON * of_python)
    scales = np.stack([np.maximum(likely, least), least, at_most])
    scales = np.minimum(scales, MAX_SHARE * recorded_ns / np.maximum(seen.prior_ns, 1.0))
    sources = np.full(len(seen.cells), BY_PRIOR, object)
    if reference is not None and at is not None:
        shown = _fitted(at, reference.targets(seen.cells))
        fits = ~np.isnan(shown[0])
        scales[:, fits], sources[fits] = shown[:, fits], reference.source
    likely_ns, most_ns, least_ns = (
        np.array([np.interp(scale, SCALES, left) for scale, left in zip(row, seen.left_ns.T)])
        for row in scales
    )
    by_cell = pl.DataFrame(
        {
            "rank": pl.Series([rank for rank, _ in seen.cells], dtype=pl.Int64),
            "window": pl.Series([window for _, window in seen.cells], dtype=pl.Int64),
            "source": pl.Series(sources.tolist(), dtype=pl.String),
            "prior_ns": np.maximum(seen.prior_ns, 1.0),
            **{"recorded_ns": recorded_ns, "likely_ns": likely_ns, "least_ns": least_ns, "most_ns": most_ns},
        }
    )
    taken = {
        name: pl.col("ns") / pl.col("prior_ns") * (pl.col("recorded_ns") - pl.col(f"{left}_ns"))
        for name, left in (("ns", "likely"), ("low_ns", "most"), ("high_ns", "least"))
    }
    of_events = seen.events.join(by_cell, on=["rank", "window"], maintain_order="left")
    kinds = pl.Series(EVENTS, dtype=pl.String).gather(of_events["kind"])
    table = of_events.with_columns(kind=kinds, **taken).select(list(SCHEMA)).cast(SCHEMA)  # type: ignore[arg-type]
    hosts = by_cell.group_by("rank").agg(pl.col("^(recorded|likely|least|most)_ns$").sum()).sort("rank")
    return RecordingCost(table, hosts, dict(zip(seen.cells, scales[0].tolist())))


def _fitted(at: Floats, targets: Floats) -> Floats:
    """Return [3, cells] multiples of the prior: likely, at least, at most; NaN where the cost does not show.

    Args:
        at: see `judge_cost`.
        targets: from `Reference.targets`.
    """
    at = np.minimum.accumulate(at, axis=0)  # monotonic, as the choice of usual steps may change
    fitted = np.full(targets.shape, np.nan)
    one = SCALES.index(1.0)
    for cell in range(at.shape[1]):
        of_cell = at[:, cell]
        if np.isnan(of_cell).any() or not of_cell[0] - of_cell[one] >= SHOWS * of_cell[0]:
            continue
        # Where larger scales gain nothing, the host is hidden: use the smallest scale that gets there.
        reached = np.maximum(targets[:, cell], of_cell[-1] * (1 + REACHED))
        fitted[:, cell] = np.interp(-reached, -of_cell, SCALES)
    return fitted


def cpu_work(graph: Graph, has_shapes: bool) -> CpuWork:
    """Return the work of CPU threads, and the expected cost of recording in it."""
    nodes, names = graph.nodes, pl.Series(graph.names, dtype=pl.String)
    node = np.flatnonzero(is_one_of(nodes.kind, CPU_KINDS))
    keys = (nodes.measured_end, nodes.measured_start, nodes.window, nodes.lane)
    node = node[np.lexsort([key[node] for key in keys])]
    lane, window, rank, kind, span, name = (
        getattr(nodes, column)[node] for column in ("lane", "window", "rank", "kind", "span", "name")
    )
    opens = np.ones(node.size, np.bool_)
    opens[1:] = (lane[1:] != lane[:-1]) | (window[1:] != window[:-1])
    opens[1:] |= nodes.measured_start[node][1:] > nodes.measured_end[node][:-1]
    cells, cell = np.unique(np.stack([rank, window]), axis=1, return_inverse=True)
    cell = cell.reshape(-1)
    clocks, has_clock = _clocks(rank, nodes.duration[node], (names == CLOCK).to_numpy()[name])
    operator = np.full(clocks.size, OPERATOR * WITHOUT_GRADIENT)
    operator[np.unique(rank[names.str.contains(BACKWARD).to_numpy()[name]])] = OPERATOR
    operator *= WITH_SHAPES if has_shapes else 1.0
    # An event is a span with own time: it begins with its first piece and ends with its last.
    spanned = np.flatnonzero(span >= 0)
    by_span = spanned[np.lexsort((spanned, span[spanned], cell[spanned]))]
    begins = np.append(True, (np.diff(span[by_span]) != 0) | (np.diff(cell[by_span]) != 0))[: by_span.size]
    first, last = by_span[begins], by_span[np.append(begins[1:], True)[: by_span.size]]
    is_python = names.str.contains(PYTHON_NAMES).to_numpy()[name[first]] & (kind[first] == NodeKind.HOST)
    event = np.select([kind[first] == NodeKind.RUNTIME, is_python], [1, 2], 0)
    units = np.select([event == 1, event == 2], [RUNTIME_CALL, PYTHON_CALL], operator[rank[first]])
    ns = units * clocks[rank[first]]
    inside = event == 1
    before = np.where(inside | opens[first], first, first - 1)
    following = np.minimum(last + 1, node.size - 1)
    behind = np.where(inside | opens[following], last, following)
    prior = np.zeros(node.size)
    for where_half in (before, behind):
        prior += np.bincount(where_half, ns / 2, node.size)
    where = {"rank": cells[0][cell[first]], "window": cells[1][cell[first]], "kind": event}
    events = (
        pl.DataFrame({**where, "ns": ns})
        .group_by("rank", "window", "kind")
        .agg(events=pl.len().cast(pl.Int64), ns=pl.col("ns").sum())
        .sort("rank", "window", "kind")
    )
    listed = [(int(of_rank), int(of_window)) for of_rank, of_window in cells.T]
    return CpuWork(node, opens, cell, listed, prior, events, has_clock[cells[0]])


def _clocks(rank: Ints, duration: Ints, is_clock: Bools) -> tuple[Floats, Bools]:
    """Return [R] ns of the `CLOCK` call, which shows the speed of a rank's machine, and if it was seen."""
    precise = is_clock & (duration % 1000 != 0)  # whole microseconds are too coarse
    calls = pl.DataFrame({"rank": rank[precise], "ns": duration[precise]})
    medians = calls.group_by("rank").agg(pl.col("ns").median())
    clocks = np.full(int(rank.max(initial=0)) + 1, CLOCK_NS)
    clocks[medians["rank"].to_numpy()] = medians["ns"].to_numpy()
    has_clock = np.zeros(clocks.size, np.bool_)
    has_clock[medians["rank"].to_numpy()] = True
    return clocks, has_clock


@compiled
def _subtract(left: Any, cost: Any, opens: Any) -> None:
    # Work shorter than its cost owes the rest, which is taken from the work behind it.
    owed = 0.0
    for i in range(left.size):
        if opens[i]:
            owed = 0.0
        owed += cost[i]
        taken = min(owed, float(left[i]))
        left[i] -= int(taken)
        owed -= taken


def reference_of(steps: pl.DataFrame) -> Reference | None:
    """Return the reference for windows: hosts that run ahead of their devices, else steps outside windows.

    Args:
        steps: table `steps`.
    """
    timed = with_times(steps)
    hosts = all_hosts_ahead(timed)
    if hosts.height:
        outside = timed.filter(pl.col("by_device") & (pl.col("time_ns") > 0) & ~disturbed(timed))
        quantiles = [
            pl.col("duration_ns").quantile(q).alias(name) for q, name in ((0.75, "high"), (0.25, "low"))
        ]
        spread = hosts.join(outside.group_by("rank").agg(quantiles), on="rank")
        rows = spread.select("rank", "pace_ns", "high", "low").iter_rows()
        return Reference(BY_HOSTS, {rank: (pace, high, low) for rank, pace, high, low in rows})
    series = series_outside(steps, MIN_STEPS)
    if series is None:
        return None
    times, early = series.times[~series.paused], _early_times(series, timed)
    lasting = LASTING if series.by_device and early.size < MIN_EARLY else 1.0
    times = early if early.size >= MIN_EARLY else times
    typical = float(np.median(times))
    low, high = np.percentile(times, (25, 75))
    if high - low >= STEADY * typical:
        return None
    return Reference(BY_STEPS, {-1: (typical, float(high), float(low) / lasting)})


def _early_times(series: StepSeries, timed: pl.DataFrame) -> Floats:
    """Return the times of steps before the first window, without warm-up and pauses, in ns.

    Launches stay slow after a window, since CUPTI stays attached: on an H200 steps took 1.19 times as long.
    """
    recorded = timed.filter(pl.col("window") >= 0)["step"].min()
    is_early = series.steps[~series.paused] < (recorded or 0)  # type: ignore[operator]
    early: Floats = series.times[~series.paused][is_early][WARM_UP:]
    return early


def find_pace(graph: Graph, steps: pl.DataFrame) -> float:
    """Return how long steps outside deep windows are, as a multiple of those in them.

    Deep windows show what a step consists of, all steps show how long it is. Where a window happened to be in
    a slow stretch of the job, or recording cost more than `find_recording_cost` finds, both differ.

    Args:
        graph: of the job as it runs.
        steps: table `steps` of its run.

    Returns:
        1 where steps outside windows are about as long, too few, or not comparable.
    """
    series = series_outside(steps, MIN_STEPS)
    if series is None or series.cycle > 1:
        return 1.0
    timeline = replay(graph)
    ends = step_ends(graph, timeline.start, timeline.end)
    lengths = step_lengths(usual_steps(ends, longest_deep_ns(steps)))
    if not lengths.any():
        return 1.0
    times, early = series.times[~series.paused], _early_times(series, with_times(steps))
    if series.by_device and early.size >= MIN_EARLY:
        times = early
    paces = np.array([times.mean(), np.median(times)]) / lengths.mean()
    is_like = (np.abs(paces - 1) <= SIMILAR).any() or not 1 / FAR < paces[0] < FAR
    may_last = series.by_device and early.size < MIN_EARLY and paces[0] > 1  # what windows cost later steps
    return 1.0 if is_like or may_last else float(paces[0])


def host_paces_of(graph: Graph, cells: Sequence[Cell]) -> Floats:
    """Return [cells] ns that the host of each needs for a step; NaN where its window has only one step."""
    paces = host_paces(graph).filter("later").group_by("rank", "window").agg(pl.col("pace_ns").median())
    measured = {(rank, window): pace_ns for rank, window, pace_ns in paces.iter_rows()}
    return np.array([measured.get(cell, np.nan) for cell in cells])


def steps_of_cells(graph: Graph, cells: Sequence[Cell]) -> Floats:
    """Return [cells] the mean usual step of each one's window, replayed, in ns; NaN where it has none."""
    timeline = replay(graph)
    lengths = durations_of(usual_steps(step_ends(graph, timeline.start, timeline.end)))
    of_window = dict(lengths.group_by("window").agg(pl.col("duration_ns").mean()).iter_rows())
    return np.array([of_window.get(window, np.nan) for _, window in cells])
