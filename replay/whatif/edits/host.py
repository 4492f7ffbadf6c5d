"""Edits of the host: launches, the CPU's speed, and its waits for the GPU.

`training_loop.py` has those of its input and its garbage collection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.errors import NothingToChange
from dpro.replay.graph import (
    CPU_KINDS,
    GPU_KINDS,
    EdgeKind,
    Edges,
    Graph,
    NodeKind,
    computed_once,
    is_one_of,
    once,
)
from dpro.replay.timeline import changed_durations, replay
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.selected_work import scaled
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import MAX_TIMES, key
from dpro.replay.whatif.graph_ops.scope import DATA_LOADING, descendants_of
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.replay.whatif.rankwise import CountedEdit, Counts, RankwiseEdit
from dpro.words import suggest

LAUNCHES = "calls that launch GPU work"
MAX_WAITS = 2  # waiting calls with candidates of their own
# A host whose own code runs for this long between a wait and the next launch works with the result, as an
# environment or a post-processing does; a loop that logs its loss launches again within a millisecond.
USED_NS = 5_000_000


@dataclass(frozen=True)
class NoLaunch(RankwiseEdit):
    """Launching GPU work costs the CPU nothing and the work is there at once."""

    name = "no-launch"
    summary = "make GPU launch calls free, without other changes on the host: an upper bound"
    example = "no-launch"
    needs = "launches, or the delays of an operation-level trace"
    assumes = "Python and operator dispatch stay unchanged"
    source = "zero duration for launch calls and zero launch latency"
    is_advice = False
    effort = "none"
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        if not (facts.graph.nodes.kind == NodeKind.DELAY).any():
            require_launches(facts.graph)
        return [cls()]

    def bound(self, facts: RunFacts) -> float:
        nodes, launch = facts.graph.nodes, facts.graph.edges.kind == EdgeKind.LAUNCH
        late = nodes.kind == NodeKind.DELAY
        if late.any():
            return facts.idle(late | facts.communication)
        return facts.on_path(launching_calls(facts.graph, launch), launch)

    def apply(self, graph: Graph) -> Graph:
        """Make launching calls and launch latencies free; a negative latency stays.

        Where launches were not recorded, but only the delays of work, these are removed with their order on
        the host, and with negative lags from clock noise.
        """
        late = graph.nodes.kind == NodeKind.DELAY
        if late.any():
            freed = graph.with_durations(np.where(late, 0, graph.nodes.duration))
            freed = freed.with_lags(np.maximum(graph.edges.lag, 0))
            return freed.without_edges(late[graph.edges.source])
        launch = graph.edges.kind == EdgeKind.LAUNCH
        calls = launching_calls(graph, launch)
        require_launches(graph)
        duration = np.where(calls, 0, graph.nodes.duration)
        return graph.with_durations(duration).with_lags(
            np.where(launch, np.minimum(graph.edges.lag, 0), graph.edges.lag)
        )

    def describe(self) -> str:
        return "GPU launch calls are free"

    def how(self) -> str:
        return "not possible by itself: bounds the gain of cheaper launch calls; see cuda-graph and free-host"


@dataclass(frozen=True)
class FreeHost(CountedEdit):
    """The host takes no time at all: only the GPU, the network and waits for them are left."""

    name = "free-host"
    summary = "make the host's CPU free: an upper bound"
    example = "free-host"
    needs = "GPU work launched by the host"
    assumes = "nothing else changes"
    source = "zero duration for CPU work and launch calls, and zero launch latency"
    is_advice = False
    effort = "none"
    doubt: float = 0.0

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        require_launches(facts.graph)
        return [cls()]

    def bound(self, facts: RunFacts) -> float:
        launch = facts.graph.edges.kind == EdgeKind.LAUNCH
        return facts.on_path(facts.on_cpu | launching_calls(facts.graph, launch), launch)

    def counts(self, graph: Graph) -> Counts:
        return {LAUNCHES: num_launches(graph)}

    def apply(self, graph: Graph) -> Graph:
        """Make all CPU work and all launches free."""
        return free_host(graph, self.counts_of_job(graph))

    def describe(self) -> str:
        return "the host is free: no Python, dispatch, launches or data loading"

    def how(self) -> str:
        return "not possible: bounds the gain of any change to the host, including CUDA graphs"


def free_host(graph: Graph, counts: Counts | None = None) -> Graph:
    """Return the graph with all CPU work of steps, all launch calls and launch latencies of 0.

    Negative latencies stay, and so does other host work before the first step, which is not part of a step.

    Args:
        counts: with `LAUNCHES` of the whole job, where the graph is only a part of it.

    Raises:
        Unanswerable: the host launches nothing, so that its work is the job's.
    """
    launch = graph.edges.kind == EdgeKind.LAUNCH
    calls = launching_calls(graph, launch)
    if not (calls.any() if counts is None else counts[LAUNCHES]):
        raise NothingToChange("the run has no GPU launches: CPU work is the job's own compute")
    on_cpu = calls | is_one_of(graph.nodes.kind, CPU_KINDS) & (graph.nodes.step >= 0)
    lag = np.where(launch, np.minimum(graph.edges.lag, 0), graph.edges.lag)
    return graph.with_durations(np.where(on_cpu, 0, graph.nodes.duration)).with_lags(lag)


@dataclass(frozen=True)
class Cpu(RankwiseEdit):
    """The host's CPU works faster, launches included."""

    name = "cpu"
    summary = "use a faster host CPU"
    example = "cpu:factor=2"
    needs = "CPU work, or the launch delays of an operation-level trace"
    assumes = "all CPU work speeds up equally, even sleeping or waiting for a disk; GPU and network do not"
    source = "CPU durations / factor"
    is_advice = False
    effort = "money"
    factor: float = key("speedup of the CPU", 2.0, least=1 / MAX_TIMES)
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        return [cls()]

    def bound(self, facts: RunFacts) -> float:
        works = facts.on_cpu | (facts.graph.nodes.kind == NodeKind.DELAY)
        return facts.on_path(works) * max(1 - 1 / self.factor, 0.0)

    def apply(self, graph: Graph) -> Graph:
        """Divide the durations of all CPU work."""
        mask = is_one_of(graph.nodes.kind, (*CPU_KINDS, NodeKind.DELAY)) & (graph.nodes.rank >= 0)
        if not mask.any():
            raise NothingToChange("the run has no CPU work: record with CPU activities")
        return graph.with_durations(scaled(graph, mask, 1 / self.factor))

    def describe(self) -> str:
        return f"a CPU {self.factor:g} times as fast"

    def how(self) -> str:
        if self.factor < 1:
            return "not a remedy: shows the cost of a slower CPU"
        return "faster cores, CPU pinning, OMP_NUM_THREADS, fewer Python calls per step"


@dataclass(frozen=True)
class NoSync(RankwiseEdit):
    """The CPU does not wait for the GPU in selected calls."""

    name = "no-sync"
    of_torch = True
    summary = "stop selected calls from waiting for the GPU"
    example = "no-sync:within=aten::item"
    needs = "calls that wait for GPU work"
    assumes = (
        "the host does not need the awaited result, or reads it some steps later; it needs what its own code "
        "works with for 5 ms before it launches again, unless `within` names the call"
    )
    source = "the graph without the edges from GPU work to these CPU calls; streams keep their order"
    effort = "code"
    within: str = key(
        "pattern for the waiting call, or an operator or range around it; default: all not needed", ""
    )
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return the calls in which the host waits longest; all that it can do without, if it needs some."""
        if not _waits_for_gpu(facts.graph).any():
            raise NothingToChange("no call in the run makes the CPU wait for the GPU")
        if _used(facts.graph).any():
            return [cls()]
        waits = gpu_waits(facts.graph, facts.timeline.end).group_by("name").agg(pl.col("waited_ns").sum())
        longest = waits.filter(pl.col("waited_ns") > 0).sort(["waited_ns", "name"], descending=[True, False])
        return [cls(within=name) for name in longest["name"].head(MAX_WAITS)] or [cls()]

    def bound(self, facts: RunFacts) -> float:
        return facts.idle_without_communication

    def bound_on_top(self, before: RunFacts, after: RunFacts) -> float:
        """Return the gain by a replay: other changes of the job leave these waits as they are."""
        changed = after.graph.without_waits(self._dropped(after.graph))
        timeline = replay(changed)
        steps = changed_durations(after.baseline, changed, timeline.end)
        return after.base_ns - float(steps.mean())

    def apply(self, graph: Graph) -> Graph:
        """Remove the waits; the GPU keeps the order of its work."""
        dropped = self._dropped(graph)
        order = once(graph, (self, "order"), lambda graph: _order_of_streams(graph, self._dropped(graph)))
        return graph.with_edges_instead(dropped, order)

    def _dropped(self, graph: Graph) -> Bools:
        """Return [E] a mask of these waits, computed once for graphs that differ in durations or lags only.

        Raises:
            NothingToChange: there are none.
        """
        return once(graph, self, self._waits)

    def _waits(self, graph: Graph) -> Bools:
        waits = _waits_for_gpu(graph)
        if not waits.any():
            raise NothingToChange("no call in the run makes the CPU wait for the GPU")
        dropped = waits & (_waiting_in(graph, self.within) if self.within else ~_used(graph))
        if not (self.within or dropped.any()):
            raise NothingToChange("the CPU works with the result of each of its waits for the GPU")
        if not dropped.any():
            calls = {graph.names[name] for name in graph.nodes.name[graph.edges.target[waits]]}
            near = suggest(self.within, sorted(calls))
            raise NothingToChange(f"the CPU waits for the GPU nowhere in {self.within!r}{near}")
        return dropped

    def describe(self) -> str:
        return f"the CPU does not wait for the GPU {'in ' + self.within if self.within else 'anywhere'}"

    def how(self) -> str:
        return (
            "keep losses and metrics on the GPU and read them every N steps; copy with "
            "non_blocking=True from pinned memory; remove torch.cuda.synchronize()"
        )


@computed_once
def _used(graph: Graph) -> Bools:
    """Return [E] a mask of waits for the GPU, in steps, with whose results the host works for `USED_NS`.

    Until it next launches GPU work, it then runs code of its own for so long: in no operator and no call, and
    not in a DataLoader, since input can be prepared beside the step.
    """
    nodes, edges = graph.nodes, graph.edges
    own_code = is_one_of(nodes.kind, (NodeKind.HOST, NodeKind.GAP)) & (nodes.step >= 0)
    own_code &= ~NodeSelection(within=DATA_LOADING).mask(graph)
    waits = np.flatnonzero(_waits_for_gpu(graph) & (nodes.step[edges.target] >= 0))
    following = next_launches(graph)
    columns = {
        "node": np.arange(graph.num_nodes),
        "lane": nodes.lane,
        "at": nodes.measured_start,
        "took_ns": nodes.measured_end - nodes.measured_start,
        "until": np.where(following >= 0, following, -2 - nodes.window),  # that launch, or the window's end
    }
    code, waited = (
        pl.DataFrame({name: column[rows] for name, column in columns.items()}).sort("at")
        for rows in (np.flatnonzero(own_code), np.unique(edges.target[waits]))
    )
    left_ns = pl.col("took_ns").cum_sum(reverse=True).over("lane", "until")
    works = waited.drop("took_ns").join_asof(
        code.select("lane", "until", "at", worked_ns=left_ns),
        on="at", by=["lane", "until"], strategy="forward", check_sortedness=False,
    ).filter(pl.col("worked_ns") >= USED_NS)  # fmt: skip
    used = np.zeros(edges.kind.size, np.bool_)
    used[waits] = np.isin(edges.target[waits], works["node"].to_numpy())
    return used


def _order_of_streams(graph: Graph, dropped: Bools) -> Edges:
    """Return edges from awaited work to the host's next launch on each other stream of the rank.

    Without the host between them, streams would overlap work that they did in sequence: nothing shows whether
    one needs the result of the other.

    Args:
        dropped: [E] waits of the host.
    """
    nodes, edges = graph.nodes, graph.edges
    launched = (edges.kind == EdgeKind.LAUNCH) & is_one_of(nodes.kind[edges.target], GPU_KINDS)
    call, work = edges.source[launched], edges.target[launched]
    launches = pl.DataFrame(
        {"rank": nodes.rank[work], "lane": nodes.lane[work], "at": nodes.measured_start[call], "work": work}
    ).sort("at", "work")
    source, target = edges.source[dropped], edges.target[dropped]
    waits = pl.DataFrame(
        {
            "rank": nodes.rank[source],
            "of": nodes.lane[source],
            "at": nodes.measured_start[target],
            "done": source,
        }
    )
    streams = launches.select("rank", "lane").unique()
    waits = waits.join(streams, on="rank").filter(pl.col("of") != pl.col("lane")).sort("at")
    following = waits.join_asof(
        launches, on="at", by=["rank", "lane"], strategy="forward", check_sortedness=False
    )
    later = following.filter(pl.col("work") > pl.col("done"))
    pairs = later.select("done", "work").unique().sort("done", "work")
    kind = np.full(pairs.height, EdgeKind.STREAM, np.int64)
    return Edges(
        pairs["done"].to_numpy(),
        pairs["work"].to_numpy(),
        np.zeros_like(kind),
        kind,
        np.ones(kind.size, np.bool_),
    )


def gpu_waits(graph: Graph, end: Ints) -> pl.DataFrame:
    """Return calls in steps that wait for the GPU, with their waits.

    Args:
        end: [N] ns, ends of the graph's nodes.

    Returns:
        `rank`, `span_id`, `name` (of the call or its operator), `waited_ns`.
    """
    nodes, edges = graph.nodes, graph.edges
    waits = _waits_for_gpu(graph) & (nodes.step[edges.target] >= 0)
    earlier, call = _waiting_calls(graph)
    waits &= call >= 0
    since, call = end[earlier[waits]], call[waits]
    until, work = edges.target[waits], edges.source[waits]
    names = pl.Series("name", graph.names, dtype=pl.String).gather(nodes.name[call])
    return (
        pl.DataFrame({"rank": nodes.rank[until], "span_id": nodes.span[until], "name": names})
        .with_columns(waited_ns=pl.Series(np.maximum(end[work] - since, 0)))
        .group_by("rank", "span_id", "name")
        .agg(pl.col("waited_ns").max())
    )


def _waits_for_gpu(graph: Graph) -> Bools:
    """Return [E] a mask of edges from work on a GPU stream to the CPU that waits for it."""
    nodes, edges = graph.nodes, graph.edges
    on_stream = np.array([what.startswith("stream ") for _, what in graph.lanes] + [False], np.bool_)
    works = is_one_of(nodes.kind, (*GPU_KINDS, NodeKind.TRANSFER)) & on_stream[nodes.lane]
    waits: Bools = (edges.kind == EdgeKind.SYNC) & works[edges.source]
    return waits


def _waiting_calls(graph: Graph) -> tuple[Ints, Ints]:
    """Return for each edge what is before its end on that thread, and the operator or call that waits there.

    The call is mostly what is before; a call that waits at once has only a part after its wait.

    Returns:
        [E] and [E] nodes; -1 without any.
    """
    nodes, edges = graph.nodes, graph.edges
    before = np.full(graph.num_nodes, -1)
    thread = edges.kind == EdgeKind.THREAD
    before[edges.target[thread]] = edges.source[thread]
    earlier, target = before[edges.target], edges.target
    named = is_one_of(nodes.kind, (NodeKind.CPU, NodeKind.RUNTIME))[earlier]
    at_once = (nodes.kind[target] == NodeKind.RUNTIME) & (nodes.span[earlier] != nodes.span[target])
    at_once &= nodes.kind[earlier] != NodeKind.CPU  # the operator around the call
    calls = np.where(at_once, target, np.where(named, earlier, -1))
    return earlier, np.where(earlier >= 0, calls, -1)


def _waiting_in(graph: Graph, pattern: str) -> Bools:
    """Return [E] a mask of edges that end a wait in a span that fits, or in something inside one.

    The wait is between two pieces of its thread. The later one is the rest of the waiting call; where there
    is none, the earlier one is the operator around it.
    """
    nodes, edges = graph.nodes, graph.edges
    inside = descendants_of(graph, pattern)
    before = np.full(graph.num_nodes, -1)
    thread = edges.kind == EdgeKind.THREAD
    before[edges.target[thread]] = edges.source[thread]
    earlier = (before >= 0) & inside[before] & (nodes.kind != NodeKind.RUNTIME)
    waiting: Bools = (inside | earlier)[edges.target]
    return waiting


def require_launches(graph: Graph) -> None:
    """Raise for a run whose host launches no GPU work."""
    if not num_launches(graph):
        raise NothingToChange("the run has no GPU launches")


def launching_calls(graph: Graph, launch: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return [N] a mask of runtime calls from which these edges begin.

    Args:
        launch: [E] mask of edges.
    """
    calls = np.zeros(graph.num_nodes, np.bool_)
    calls[graph.edges.source[launch]] = True
    calls &= graph.nodes.kind == NodeKind.RUNTIME
    return calls


def num_launches(graph: Graph) -> int:
    """Return the number of calls that launch GPU work."""
    return int(launching_calls(graph, graph.edges.kind == EdgeKind.LAUNCH).sum())


@computed_once
def next_launches(graph: Graph) -> Ints:
    """Return [N] the call by which a rank next launches GPU work, for CPU work of steps; -1 elsewhere."""
    nodes, edges = graph.nodes, graph.edges
    launches = np.flatnonzero(launching_calls(graph, edges.kind == EdgeKind.LAUNCH) & (nodes.step >= 0))
    on_cpu = np.flatnonzero(is_one_of(nodes.kind, CPU_KINDS) & (nodes.step >= 0))
    columns = ("rank", "window", "measured_start")
    work, calls = (
        pl.DataFrame({name: getattr(nodes, name)[rows] for name in columns}).with_columns(
            node=pl.Series(rows)
        )
        for rows in (on_cpu, launches)
    )
    following = work.sort("measured_start").join_asof(
        calls.sort("measured_start").rename({"node": "launch"}),
        on="measured_start",
        by=["rank", "window"],
        strategy="forward",
        check_sortedness=False,  # polars cannot check it with `by`
    )
    launch = np.full(graph.num_nodes, -1)
    launch[following["node"].to_numpy()] = following["launch"].fill_null(-1).to_numpy()
    return launch
