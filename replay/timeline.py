"""Replay of a graph: when each node runs, the time of each step, the path that decides it, the pace of hosts.

Takes a `Graph`; returns a `Timeline` and frames made from it. It does not judge how well the replay matches
the trace: `dpro.replay.fidelity.accuracy` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools, Floats, Ints
from dpro.replay.engine import chain_of, latest_ends, longest_path, longest_path_batch
from dpro.replay.first_calls import first_calls
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind, computed_once, is_one_of, once

USUAL = 1.5  # ratio to the median, either way, beyond which a step is unusual
FEW = 5  # steps; of fewer, any may be unusual
RARE = 1 / 3  # share of the steps: a deviation in more of them is usual
COLD = 0.05  # share of first calls from which a step is unusual, where other steps have less
MAX_WARM = 7.0  # multiple of the steps that count: a longer warm-up makes no difference
CUT_OFF = 0.25  # of two steps, share of the first below which the last one is cut off
BEFORE_STEPS, AFTER_STEPS = -1, -2
NOT_BEFORE = "(start taken from the trace)"
PACES = {"rank": pl.Int64, "window": pl.Int64, "pace_ns": pl.Float64, "later": pl.Boolean}
PIECES = {"rank": pl.Int64, "name": pl.String, "kind": pl.String, "duration_ns": pl.Int64}


@dataclass(frozen=True)
class Timeline:
    """The start and end of each node.

    Attributes:
        graph: the replayed graph.
        start, end: [N] ns since the graph's origin.
        binding: [N] the edge that set each start, -1 where the node's own earliest time did.
    """

    graph: Graph
    start: Ints
    end: Ints
    binding: Ints


Stretch = tuple[Timeline, Ints]  # a part of a path: its replay, and its nodes, first to last
PathTo = Callable[[Bools], Sequence[Stretch]]  # returns the path to the end of the first node of a mask


def replay(graph: Graph) -> Timeline:
    """Start every node as soon as its predecessors allow: the longest path over the graph."""
    nodes, edges = graph.nodes, graph.edges
    start, end, binding = longest_path(nodes.duration, nodes.earliest, graph.indptr, edges.source, edges.lag)
    return Timeline(graph, start, end, binding)


def replayed(graph: Graph) -> Timeline:
    """Return the replay of a graph as recorded, made once and cached."""
    return Timeline(graph, *_times(graph))


@computed_once
def _times(graph: Graph) -> tuple[Ints, Ints, Ints]:
    timeline = replay(graph)
    return timeline.start, timeline.end, timeline.binding


def replay_durations(graph: Graph, durations: Ints) -> Ints:
    """Return [N, S] the end of each node when the graph is replayed with each column of `durations`.

    Args:
        durations: [N, S] ns, one column per scenario.
    """
    starts = longest_path_batch(
        durations, graph.nodes.earliest, graph.indptr, graph.edges.source, graph.edges.lag
    )
    return starts + durations


def step_ends(graph: Graph, start: Ints, end: Ints) -> pl.DataFrame:
    """Return when each step of the job ended: with the last of its work on any rank.

    Args:
        start, end: [N] ns of each node: replayed, or as measured.

    Returns:
        One row per window and step: `window`, `step`, `finish_ns` and `begin_ns`, the beginning of the
        window's first step. This is the end of the work before it, or the beginning of the window without
        any; or, where GPUs still ran older, unrecorded work, the end of that. Where some did, `queued` marks
        the steps that waited for much of it, which a change would have shortened, too. Where calls were the
        first of a process, `cold_ns` is their cost in each step, on the rank with the largest.
    """
    ends = _ends_of_steps(graph, start, end, ["window"])
    calls = first_calls(graph)
    if calls.is_empty():
        return ends
    cold = calls.group_by("rank", "window", "step").agg(pl.col("cold_ns").sum())
    most = cold.group_by("window", "step").agg(pl.col("cold_ns").max())
    return ends.join(most, on=["window", "step"], how="left", maintain_order="left").with_columns(
        pl.col("cold_ns").fill_null(0)
    )


def _ends_of_steps(graph: Graph, start: Ints, end: Ints, by: list[str]) -> pl.DataFrame:
    """Return `step_ends` for each group of `by`: windows, or ranks and windows."""
    extents = extents_of(graph, [*by, "step"], start, end)
    ends = extents.filter(pl.col("step") != AFTER_STEPS).sort(*by, "step")
    before = pl.col("end").filter(pl.col("step") == BEFORE_STEPS).max().over(by)
    ends = (
        ends.with_columns(
            finish_ns=pl.col("end").cum_max().over(by),
            begin_ns=pl.coalesce(before, pl.col("start").min().over(by)),
        )
        .filter(pl.col("step") >= 0)
        .select(*by, "step", "finish_ns", "begin_ns")
    )
    late = behind_older_work(graph)
    if not late.size:
        return ends
    moments = pl.DataFrame({name: getattr(graph.nodes, name)[late] for name in ("rank", "window")})
    first = moments.with_columns(began_ns=start[late]).group_by("rank", "window").min()
    last = first.group_by(by).agg(pl.col("began_ns").max())
    finish = pl.col("finish_ns")
    waited = (finish - pl.col("begin_ns")) > USUAL * (finish - pl.col("began_ns"))
    return (
        ends.join(last, on=by, how="left", maintain_order="left")
        .with_columns(
            begin_ns=pl.max_horizontal("begin_ns", "began_ns"),
            queued=waited.fill_null(False) & (pl.int_range(pl.len()).over(by) == 0),
        )
        .drop("began_ns")
    )


@computed_once
def behind_older_work(graph: Graph) -> Ints:
    """Return the nodes that waited on their GPU for unrecorded work launched before the window."""
    nodes = graph.nodes
    tied = nodes.anchored & (nodes.earliest > 0) & (nodes.step >= 0)
    return np.flatnonzero(tied & is_one_of(nodes.kind, GPU_KINDS))


def extents_of(graph: Graph, by: list[str], start: Ints, end: Ints) -> pl.DataFrame:
    """Return the extent in time of all nodes with equal values in columns `by`, without rendezvous.

    Args:
        start, end: [N] ns of its nodes.

    Returns:
        The columns, `start` (of the first) and `end` (of the last), in no order.
    """
    rows, *places = _extents_at(graph, tuple(by))
    begins, ends = _of_extents(np.minimum, start, *places), _of_extents(np.maximum, end, *places)
    return rows.with_columns(start=begins, end=ends)


def _of_extents(extreme: np.ufunc, moments: Ints, runs: Ints, order: Ints, groups: Ints) -> Ints:
    """Return the first or last moment of each group of `_extents_at`."""
    if groups.size == 0:
        return np.empty(0, np.int64)
    extremes: Ints = extreme.reduceat(extreme.reduceat(moments, runs)[order], groups)
    return extremes


def _extents_at(graph: Graph, by: tuple[str, ...]) -> tuple[pl.DataFrame, Ints, Ints, Ints]:
    """Group the nodes with equal values in some columns.

    Consecutive nodes mostly have equal values, and form a run.

    Returns:
        The columns, one row per group; the first node of each run; the runs that count, sorted by group; and
        the first of these in each group.
    """

    def compute(graph: Graph) -> tuple[pl.DataFrame, Ints, Ints, Ints]:
        keys = [getattr(graph.nodes, name) for name in by]
        real = graph.nodes.kind != NodeKind.RENDEZVOUS
        runs = np.flatnonzero(differs_from_last(*keys, real))
        counts = np.flatnonzero(real[runs])
        order = counts[np.lexsort([key[runs[counts]] for key in reversed(keys)])]
        first = runs[order]
        groups = np.flatnonzero(differs_from_last(*(key[first] for key in keys)))
        rows = pl.DataFrame({name: key[first[groups]] for name, key in zip(by, keys)})
        return rows, runs, order, groups

    return once(graph, ("extents", by), compute)


def differs_from_last(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """Return [N] whether any column differs from its previous entry; True for the first."""
    differs = np.ones(columns[0].size, np.bool_)
    differs[1:] = False
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return differs


def durations_of(ends: pl.DataFrame) -> pl.DataFrame:
    """Return `window`, `step`, `duration_ns`: the time of each step from the end of the previous one.

    Args:
        ends: rows of `step_ends`; only those with `counted`, if there is such a column.
    """
    counted = ends.filter("counted") if "counted" in ends.columns else ends
    return counted.select("window", "step", duration_ns=pl.Series(step_lengths(ends), dtype=pl.Int64))


def are_usual(lengths: Ints | Floats) -> Bools:
    """Return [S] which of consecutive steps are neither cut off by the recording, nor warm-up, nor pauses."""
    if not lengths.size:
        return np.ones(0, np.bool_)
    median = float(np.median(lengths))
    usual: Bools = (lengths <= USUAL * median) & (lengths >= median / USUAL)
    # Frequent deviations are usual, such as of a loader whose workers deliver two batches at once.
    if (lengths.size >= FEW and np.mean(~usual) > RARE) or (lengths.size > 2 and not usual.any()):
        return np.ones(lengths.size, np.bool_)
    if lengths.size == 2 and not usual.all():  # the first one warms up, unless the last one is cut off
        usual = np.array([lengths[1] < CUT_OFF * lengths[0], lengths[1] >= CUT_OFF * lengths[0]])
    return usual


def usual_steps(ends: pl.DataFrame, longest_ns: float | None = None) -> pl.DataFrame:
    """Mark the steps that represent a usual one, by `are_usual` and the columns `queued` and `cold_ns`.

    Args:
        ends: rows of `step_ends`.
        longest_ns: from `longest_deep_ns`: longer steps do not count if there are others.

    Returns:
        The rows, with `counted` where some are unusual.
    """
    usual = are_usual(step_lengths(ends))
    unlike = [ends["queued"].to_numpy()] if "queued" in ends.columns else []
    if "cold_ns" in ends.columns:
        unlike.append(ends["cold_ns"].to_numpy() >= COLD * step_lengths(ends))
    for others in unlike:
        usual = usual & ~others if (usual & ~others).any() else usual
    if longest_ns is not None:
        in_time = usual & (step_lengths(ends) <= longest_ns)
        usual = in_time if in_time.any() else usual
    return ends if usual.all() else ends.with_columns(counted=usual)


def cold_share(ends: pl.DataFrame) -> float:
    """Return the share of first calls in the steps that count.

    Args:
        ends: rows of `usual_steps`.
    """
    if "cold_ns" not in ends.columns:
        return 0.0
    counted = ends.filter("counted") if "counted" in ends.columns else ends
    return float(counted["cold_ns"].sum() / max(int(step_lengths(ends).sum()), 1))


def warm_up(ends: pl.DataFrame, stepped: bool) -> float:
    """Return the time before the first step that counts, relative to the sum of those; at most `MAX_WARM`.

    Args:
        ends: rows of `usual_steps`.
        stepped: whether steps are known; else the time before the only step is the start of a process.
    """
    lasting = _durations(ends, ends["finish_ns"].to_numpy(), ["window"])
    counted = ends["counted"].to_numpy() if "counted" in ends.columns else np.ones(lasting.size, np.bool_)
    if not counted.any():
        return 0.0
    before = lasting[: int(counted.argmax())].sum() if stepped else ends["begin_ns"][0]
    return min(float(before / max(int(step_lengths(ends).sum()), 1)), MAX_WARM)


def step_times(graph: Graph, start: Ints, end: Ints) -> pl.DataFrame:
    """Return the time of each step of the job: `durations_of` its `step_ends`.

    Args:
        start, end: [N] ns of each node: replayed, or as measured.
    """
    return durations_of(step_ends(graph, start, end))


def rank_step_times(graph: Graph, start: Ints, end: Ints) -> pl.DataFrame:
    """Return the time of each step by the work of one rank alone: `rank`, `window`, `step`, `duration_ns`.

    Args:
        start, end: [N] ns of each node: replayed, or as measured.
    """
    ends = _ends_of_steps(graph, start, end, ["rank", "window"])
    lasts = _durations(ends, ends["finish_ns"].to_numpy(), ["rank", "window"])
    return ends.select("rank", "window", "step", duration_ns=pl.Series(lasts, dtype=pl.Int64))


def changed_step_times(baseline: pl.DataFrame, graph: Graph, end: Ints) -> pl.DataFrame:
    """Return `step_times` of a changed graph, counted from the beginnings of the unchanged one's windows.

    Time that a change saves before the first step is credited to that step, so that shorter work never makes
    the sum of steps longer. A step that is alone in its window takes at least as long as its GPU works in it.

    Args:
        baseline: `step_ends` of the unchanged graph, with or without `counted`.
        end: [N] ns of its nodes.
    """
    return durations_of(changed_ends(baseline, graph, end))


def changed_durations(baseline: pl.DataFrame, graph: Graph, end: Ints) -> Ints:
    """Return [S] ns of `changed_step_times`, and 0 for a step that has moved entirely before the first one.

    A search calls this for hundreds of replays, where frames would take longer than the replay.

    Args:
        baseline: `step_ends` of the unchanged graph, with or without `counted`.
        end: [N] ns of its nodes.
    """
    finish, kept = _finish_of(baseline, graph, end)
    ends = baseline if kept.all() else baseline.filter(kept)
    return np.maximum(_counted_durations(ends, finish), 0)


def step_lengths(ends: pl.DataFrame) -> Ints:
    """Return [S] the durations of `durations_of`, in ns.

    Args:
        ends: rows of `step_ends`, in its order; only those with `counted`, if there is such a column.
    """
    return _counted_durations(ends, ends["finish_ns"].to_numpy())


def _counted_durations(ends: pl.DataFrame, finish: Ints) -> Ints:
    """Return the durations of the steps that count, in ns.

    Args:
        finish: [B] ends of the steps, in ns.
    """
    lasts = _durations(ends, finish, ["window"])
    return lasts[ends["counted"].to_numpy()] if "counted" in ends.columns else lasts


def _durations(ends: pl.DataFrame, finish: Ints, by: Sequence[str]) -> Ints:
    """Return [B] durations, in ns, of steps that follow each other where columns `by` are equal."""
    opens = differs_from_last(*(ends[name].to_numpy() for name in by))
    lasts: Ints = finish - np.where(opens, ends["begin_ns"].to_numpy(), np.append(0, finish)[: finish.size])
    return lasts


def changed_ends(baseline: pl.DataFrame, graph: Graph, end: Ints) -> pl.DataFrame:
    """Return the steps of an unchanged graph that a changed one has, with their ends in the latter.

    Args:
        baseline: `step_ends` of the unchanged graph, with or without `counted`.
        end: [N] ns of its nodes.
    """
    finish, kept = _finish_of(baseline, graph, end)
    return baseline.filter(kept).with_columns(finish_ns=finish)


def _finish_of(baseline: pl.DataFrame, graph: Graph, end: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the ends of baseline steps in a changed graph, and a mask of those that it has."""

    def compute(graph: Graph) -> tuple[Ints, Ints, Ints]:
        rows = _extents_at(graph, ("window", "step"))[0]
        counts = np.flatnonzero(rows["step"].to_numpy() != AFTER_STEPS)
        opens = np.flatnonzero(differs_from_last(rows["window"].to_numpy()[counts]))
        return counts, np.append(opens, counts.size), _ordinals(rows)[counts]

    counts, opens, there = once(graph, "steps in order", compute)
    finish = _of_extents(np.maximum, end, *_extents_at(graph, ("window", "step"))[1:])[counts]
    for first, last in pairwise(opens.tolist()):
        np.maximum.accumulate(finish[first:last], out=finish[first:last])
    wanted = _ordinals(baseline)
    place = np.searchsorted(there, wanted)
    kept = np.append(there, -1)[place] == wanted
    return np.maximum(finish[place[kept]], _earliest_ends(baseline, graph)[kept]), kept


def _ordinals(steps: pl.DataFrame) -> Ints:
    """Return one number per `window` and `step`, in their order, which are not negative."""
    ordinals: Ints = (steps["window"].to_numpy() << 40) + steps["step"].to_numpy() - AFTER_STEPS
    return ordinals


def _earliest_ends(baseline: pl.DataFrame, graph: Graph) -> Ints:
    """Return [B] ns before which a step that is alone in its window cannot end; 0 for others.

    Its busiest stream needs that long. Time that a change saves before such a step is subtracted from it, and
    may be more than the step takes.
    """
    opens = differs_from_last(baseline["window"].to_numpy())
    if not (opens[:-1] & opens[1:]).any() and not opens[-1:].any():
        return np.zeros(opens.size, np.int64)

    def compute(graph: Graph) -> tuple[Ints, Ints, Ints, Ints]:
        nodes = graph.nodes
        steps = baseline.select("window", "step", "begin_ns").with_row_index("row")
        alone = steps.filter(pl.len().over("window") == 1)
        windows = alone["window"].to_numpy()
        works = np.flatnonzero(is_one_of(nodes.kind, GPU_KINDS) & np.isin(nodes.window, windows))
        where = pl.DataFrame({name: getattr(nodes, name)[works] for name in ("window", "step", "lane")})
        rows = where.join(alone, on=["window", "step"], how="left", maintain_order="left")["row"]
        within = rows.is_not_null().to_numpy()
        places = np.stack([rows.drop_nulls().to_numpy().astype(np.int64), where["lane"].to_numpy()[within]])
        streams, stream = np.unique(places, axis=1, return_inverse=True)
        begin = np.zeros(steps.height, np.int64)
        begin[alone["row"].to_numpy()] = alone["begin_ns"].to_numpy()
        return works[within], stream.reshape(-1), streams[0], begin

    works, stream, row, begin = once(graph, "work of lone steps", compute, (baseline,))
    earliest = begin.copy()
    busy_ns = np.bincount(stream, graph.nodes.duration[works], row.size).astype(np.int64)
    np.maximum.at(earliest, row, begin[row] + busy_ns)
    return earliest


def measured_step_times(graph: Graph) -> pl.DataFrame:
    """Return `step_times` as measured in the trace."""
    return step_times(graph, graph.nodes.measured_start, graph.nodes.measured_end)


def share_saved(graph: Graph, changed: Graph) -> float:
    """Return the share by which the replay of a changed graph shortens the measured steps."""
    measured = float(measured_step_times(graph)["duration_ns"].sum())
    if not measured:
        return 0.0
    timeline = replay(changed)
    return 1 - float(step_times(changed, timeline.start, timeline.end)["duration_ns"].sum()) / measured


class HostsAlone(NamedTuple):
    """What the hosts of a graph do where they wait for no device and no other rank.

    Attributes:
        on_device: nodes that take no time then.
        edges: those that remain, sorted by target; `indptr` [N + 1] as in a graph.
        nodes: nodes of hosts, those of a step together.
        steps: `rank`, `window` and `step`, sorted; the nodes of row i begin at `first[i]` of `nodes`.
    """

    on_device: Ints
    edges: Ints
    indptr: Ints
    nodes: Ints
    first: Ints
    steps: pl.DataFrame


@computed_once
def _hosts_alone(graph: Graph) -> HostsAlone | None:
    """Return the hosts of a graph; None where they launch no work on devices."""
    nodes, kind = graph.nodes, graph.edges.kind
    on_gpu = is_one_of(nodes.kind, GPU_KINDS)
    on_host = np.flatnonzero(is_one_of(nodes.kind, CPU_KINDS) & (nodes.step >= 0))
    if not on_gpu.any() or not on_host.size or not (kind == EdgeKind.LAUNCH).any():
        return None
    stays = kind != EdgeKind.RENDEZVOUS
    ordered = on_host[np.lexsort((nodes.step[on_host], nodes.window[on_host], nodes.rank[on_host]))]
    places = np.stack([nodes.rank[ordered], nodes.window[ordered], nodes.step[ordered]])
    first = np.flatnonzero(np.append(True, (places[:, 1:] != places[:, :-1]).any(0)))
    return HostsAlone(
        np.flatnonzero(on_gpu | is_one_of(nodes.kind, (NodeKind.TRANSFER, NodeKind.RENDEZVOUS))),
        np.flatnonzero(stays),
        np.append(0, np.cumsum(stays))[graph.indptr],
        ordered,
        first,
        pl.DataFrame(dict(zip(("rank", "window", "step"), places[:, first]))),
    )


def host_paces(graph: Graph) -> pl.DataFrame:
    """Replay the hosts alone, and measure the time each needs for a step.

    Returns:
        `rank`, `window`, `pace_ns` (of one step) and `later` (whether after the window's first step, so that
        the beginning is known), a row per step; no rows where hosts launch no work on devices.
    """
    hosts = _hosts_alone(graph)
    if hosts is None:
        return pl.DataFrame(schema=PACES)
    duration, earliest = graph.nodes.duration.copy(), graph.nodes.earliest.copy()
    duration[hosts.on_device] = earliest[hosts.on_device] = 0
    start, end, _ = longest_path(
        duration, earliest, hosts.indptr, graph.edges.source[hosts.edges], graph.edges.lag[hosts.edges]
    )
    extents = hosts.steps.with_columns(
        start=np.minimum.reduceat(start[hosts.nodes], hosts.first),
        end=np.maximum.reduceat(end[hosts.nodes], hosts.first),
    )
    between = pl.col("end") - pl.col("end").shift(1).over("rank", "window")
    first = pl.col("step") == pl.col("step").min().over("rank", "window")
    return extents.with_columns(
        pace_ns=pl.coalesce(between, pl.col("end") - pl.col("start")).cast(pl.Float64), later=~first
    ).select("rank", "window", "pace_ns", "later")


def slowest_pace(graph: Graph) -> float:
    """Return the ns per step that the slowest host of a graph needs if it never waits; 0 without devices."""
    paces = host_paces(graph)
    counted = paces.filter("later") if paces["later"].any() else paces
    of_ranks = counted.group_by("rank").agg(pl.col("pace_ns").median())
    return float(of_ranks["pace_ns"].max() or 0.0)  # type: ignore[arg-type]


def slack_of(timeline: Timeline) -> Ints:
    """Return [N] ns by which each node may be delayed without delaying its window; 0 on the critical path."""
    nodes, edges = timeline.graph.nodes, timeline.graph.edges
    windows, which = np.unique(nodes.window, return_inverse=True)
    end = np.zeros(windows.size, np.int64)
    np.maximum.at(end, which, timeline.end)
    latest = latest_ends(nodes.duration, timeline.graph.indptr, edges.source, edges.lag, end[which])
    slack: Ints = latest - timeline.end
    return slack


def critical_nodes(timeline: Timeline, window: int) -> Ints:
    """Return the chain of nodes that decides when a window ends, first to last.

    Each starts exactly when the one before it has ended and the edge's lag has passed, so their durations
    and lags and the first one's earliest time add up to the window's end.
    """
    in_window = timeline.graph.nodes.window == window
    return chain_to(timeline, int(np.argmax(np.where(in_window, timeline.end, -1))))


def time_on_critical_path(timeline: Timeline) -> Ints:
    """Return [N] ns that each node, with the lag before it, contributes to its window's critical path."""
    spent = np.zeros(timeline.graph.num_nodes, np.int64)
    for window in np.unique(timeline.graph.nodes.window):
        path = critical_nodes(timeline, int(window))
        before = np.append(timeline.start[path[0]], timeline.end[path[:-1]])
        spent[path] = timeline.end[path] - before
    return spent


def chain_to(timeline: Timeline, node: int) -> Ints:
    """Return the nodes that decide when a node ends, first to last."""
    return chain_of(timeline.binding, timeline.graph.edges.source, node)


def path_of_steps(timeline: Timeline, windows: Sequence[int]) -> Ints:
    """Return the nodes that decide when the last step of each window ends, window by window."""

    def compute(graph: Graph) -> list[Bools]:
        nodes = graph.nodes
        in_steps = (nodes.step != AFTER_STEPS) & (nodes.kind != NodeKind.RENDEZVOUS)
        return [in_steps & (nodes.window == window) for window in windows]

    in_windows = once(timeline.graph, ("in steps", *windows), compute)
    last = (int(np.argmax(np.where(in_window, timeline.end, -1))) for in_window in in_windows)
    return np.concatenate([chain_to(timeline, node) for node in last])


def path_within(timeline: Timeline) -> PathTo:
    """Return a function that finds paths in a graph with all work."""
    return lambda last: [(timeline, chain_to(timeline, int(np.argmax(last))))]


def critical_stretches(timeline: Timeline, path_to: PathTo | None = None) -> Iterator[Stretch]:
    """Yield the critical paths of all windows, stretch by stretch.

    Args:
        path_to: finds paths, where the graph is condensed; `path_within` if None.
    """
    nodes, path_to = timeline.graph.nodes, path_to or path_within(timeline)
    for window in np.unique(nodes.window).tolist():
        ends = np.where(nodes.window == window, timeline.end, -1)
        yield from path_to(ends == ends.max())


def critical_path(timeline: Timeline, path_to: PathTo | None = None) -> pl.DataFrame:
    """Return the contents of the critical paths of all windows, largest first.

    Args:
        path_to: finds paths, as in `critical_stretches`.

    Returns:
        `rank`, `name`, `kind`, `duration_ns`: time on the path, with the lags that lead to it.
    """
    return _summed([_pieces(stretch, 0) for stretch in critical_stretches(timeline, path_to)])


def critical_path_of_steps(
    timeline: Timeline,
    steps: pl.DataFrame,
    baseline: pl.DataFrame | None = None,
    path_to: PathTo | None = None,
) -> pl.DataFrame:
    """Return the `critical_path` of some steps, each from the end of the previous step.

    The parts of a step add up to its duration, to the nanosecond: the time before the first work on the path
    of its end may start is a separate part.

    Args:
        steps: `window` and `step` of each.
        baseline: `step_ends` of the unchanged graph, if this is the replay of a changed one: windows then
            begin where they began there, as in `changed_step_times`.
        path_to: finds paths, as in `critical_stretches`.
    """
    nodes, path_to, pieces = timeline.graph.nodes, path_to or path_within(timeline), list[pl.DataFrame]()
    ends = step_ends(timeline.graph, timeline.start, timeline.end)
    if baseline is not None:
        of_windows = baseline.select("window", "step", "begin_ns")
        ends = ends.drop("begin_ns").join(of_windows, on=["window", "step"], maintain_order="left")
    begin = pl.col("finish_ns").shift(1).over("window").fill_null(pl.col("begin_ns"))
    wanted = ends.with_columns(begin_ns=begin).join(steps.select("window", "step"), on=["window", "step"])
    between = wanted.sort("window", "step").select("window", "step", "finish_ns", "begin_ns")
    for window, step, finish, begins in between.iter_rows():
        last = (nodes.window == window) & (nodes.step == step) & (timeline.end == finish)
        last &= nodes.kind != NodeKind.RENDEZVOUS
        # A step that ends with earlier work has no node at its end, and so no path.
        path = path_to(last) if last.any() else []
        of_step = [_pieces(stretch, begins) for stretch in path]
        # The first piece is the time before the first work on the path may start.
        rest = (finish - begins) - sum(int(piece["duration_ns"].sum()) for piece in of_step)
        rank = int(path[0][0].graph.nodes.rank[path[0][1][0]]) if path else -1
        first = {"rank": rank, "name": NOT_BEFORE, "kind": "start", "duration_ns": rest}
        pieces += [*of_step, pl.DataFrame([first], schema=PIECES)]
    return _summed(pieces)


def _pieces(stretch: Stretch, since: int) -> pl.DataFrame:
    """Return the nodes of a stretch with the time that each adds to the path after `since`.

    Args:
        since: ns.
    """
    timeline, path = stretch
    graph = timeline.graph
    before = np.append(timeline.start[path[:1]], timeline.end[path[:-1]])
    kinds = {int(kind): kind.name.lower() for kind in NodeKind}
    return pl.DataFrame(
        {
            "rank": graph.nodes.rank[path],
            "name": pl.Series(graph.names, dtype=pl.String).gather(graph.nodes.name[path]),
            "kind": pl.Series(graph.nodes.kind[path]).replace_strict(kinds, return_dtype=pl.String),
            "duration_ns": np.maximum(timeline.end[path], since) - np.maximum(before, since),
        }
    )


def _summed(pieces: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Sum up the pieces of paths, largest first."""
    return (
        pl.concat([pl.DataFrame(schema=PIECES), *pieces])
        .group_by("rank", "name", "kind")
        .agg(pl.col("duration_ns").sum())
        .filter(pl.col("duration_ns") != 0)
        .sort(["duration_ns", "rank", "name", "kind"], descending=[True, False, False, False])
    )
