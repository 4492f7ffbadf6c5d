"""Tiny runs written down span by span, and tiny graphs node by node; times of runs are in microseconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpro.replay.construction.graph_builder import Built, build_graph
from dpro.replay.graph import EdgeKind, Edges, Graph, NodeKind, Nodes, make_graph
from dpro.replay.timeline import Timeline, replay
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS, SYNCS, TABLES, WORKERS
from dpro.store import Manifest, Run, open_run, write_manifest, write_part

US = 1_000
MAIN, WORKER, BACKWARD = 10, 20, 30  # threads
COMPUTE, COMM = 7, 20  # streams


class TinyRun:
    """Rows of a run in the making. Every method that adds a span returns its id."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._last_id = 0

    def span(self, kind: str, name: str, start: float, end: float, rank: int = 0, **more: Any) -> int:
        self._last_id += 1
        row = {"span_id": self._last_id, "rank": rank, "window": 0, "kind": kind, "name": name}
        row |= {"start_ns": round(start * US), "duration_ns": round((end - start) * US)}
        self.rows[SPANS.name].append(row | more)
        return self._last_id

    def op(self, name: str, start: float, end: float, rank: int = 0, **more: Any) -> int:
        return self.span("cpu_op", name, start, end, rank, **{"pid": MAIN, "tid": MAIN, **more})

    def mark(self, name: str, start: float, end: float, rank: int = 0, **more: Any) -> int:
        return self.span("annotation", name, start, end, rank, **{"pid": MAIN, "tid": MAIN, **more})

    def call(
        self,
        start: float,
        end: float,
        correlation: int,
        rank: int = 0,
        name: str = "cudaLaunchKernel",
        **more: Any,
    ) -> int:
        more = {"pid": MAIN, "tid": MAIN, "correlation": correlation, **more}
        return self.span("runtime", name, start, end, rank, **more)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        correlation: int = -1,
        rank: int = 0,
        stream: int = COMPUTE,
        kind: str = "kernel",
        **more: Any,
    ) -> int:
        more = {"device": 0, "stream": stream, "correlation": correlation, **more}
        return self.span(kind, name, start, end, rank, **more)

    def member(self, span_id: int, op: str = "all_reduce", launched_by: int = -1, **more: Any) -> None:
        """What a span ran was its rank's part in a collective."""
        ran = next(row for row in self.rows[SPANS.name] if row["span_id"] == span_id)
        copied = {key: ran[key] for key in ("rank", "window", "span_id", "start_ns", "duration_ns")}
        number = len(self.rows[COLLECTIVES.name]) + 1
        row = {"collective_id": number, "op": op, "launch_span_id": launched_by, **copied, **more}
        self.rows[COLLECTIVES.name].append(row)

    def nccl(
        self, start: float, end: float, correlation: int, rank: int = 0, op: str = "all_reduce", **more: Any
    ) -> int:
        """A collective's kernel on the communication stream."""
        span_id = self.kernel("ncclDevKernel", start, end, correlation, rank, stream=COMM)
        self.member(span_id, op, **more)
        return span_id

    def gloo(
        self, call: tuple[float, float], ran: tuple[float, float], rank: int = 0, **more: Any
    ) -> tuple[int, int]:
        """A collective called on the main thread that runs on a worker thread."""
        called = self.op("c10d::allreduce_", *call, rank)
        span_id = self.mark("gloo:all_reduce", *ran, rank, tid=WORKER)
        self.member(span_id, launched_by=called, **more)
        return called, span_id

    def sync(self, kind: str, start: float, rank: int = 0, **more: Any) -> None:
        row = {"rank": rank, "window": 0, "kind": kind, "device": 0, "start_ns": round(start * US)}
        self.rows[SYNCS.name].append(row | more)

    def step(self, number: int, start: float, end: float, rank: int = 0, **more: Any) -> None:
        row = {"rank": rank, "step": number, "window": 0, "start_ns": round(start * US)}
        self.rows[STEPS.name].append(row | {"duration_ns": round((end - start) * US)} | more)

    def worker(self, rank: int, host: str, **more: Any) -> None:
        self.rows[WORKERS.name].append({"rank": rank, "host": host} | more)

    def counter(self, counter: str, time: float, value: float, rank: int = 0, device: str = "") -> None:
        row = {
            "rank": rank,
            "device": device,
            "counter": counter,
            "time_ns": round(time * US),
            "value": value,
        }
        self.rows[COUNTERS.name].append(row)

    def write(self, folder: Path) -> Run:
        ranks = sorted({row["rank"] for row in self.rows[SPANS.name]})
        for name, rows in self.rows.items():
            table = TABLES[name]
            defaults = {key: [] if c.default is None else c.default for key, c in table.columns.items()}
            frame = pl.DataFrame([defaults | row for row in rows], schema=table.dtypes)
            write_part(folder, table, "rows", frame)
        write_manifest(folder, Manifest(world_size=len(ranks), ranks=ranks))
        return open_run(folder)

    def build(self, folder: Path) -> Built:
        return build_graph(self.write(folder))


def cpu_job(num_ranks: int = 3, num_steps: int = 4, slow_rank: int = 1, extra: float = 400) -> TinyRun:
    """A job on CPUs: input, forward, a bucket reduced beside backward, optimizer; one input is slow."""
    run = TinyRun()
    noise = np.random.default_rng(7)
    lengths = noise.integers(0, 30, (num_ranks, num_steps, 4))
    begin = 0.0
    for step in range(num_steps):
        fetched = begin + 50 + lengths[:, step, 0] + extra * (np.arange(num_ranks) == slow_rank)
        forward = fetched + 200 + lengths[:, step, 1]
        called = forward + 100 + lengths[:, step, 2]
        backward = called + 150 + lengths[:, step, 3]
        moved = called.max() + 300
        for rank in range(num_ranks):
            run.mark("enumerate(DataLoader)#_Iter.__next__", begin, fetched[rank], rank)
            run.op("aten::stack", begin + 5, fetched[rank] - 5, rank)
            run.op("aten::mm", fetched[rank], forward[rank], rank)
            run.mark("dpro::backward", forward[rank], moved + 10, rank)
            run.op("aten::mm_backward", forward[rank] + 1, called[rank], rank)
            run.gloo((called[rank], called[rank] + 10), (called[rank] + 5, moved), rank, sequence=step)
            run.op("aten::add_backward", called[rank] + 11, backward[rank], rank)
            run.mark("Optimizer.step#SGD.step", moved + 10, moved + 60, rank)
            run.op("aten::addcmul", moved + 15, moved + 55, rank)
            run.step(step, begin, moved + 60, rank)
        begin = moved + 60
    return run


def gpu_job(num_ranks: int = 2, num_steps: int = 3, slow_rank: int = 1, extra: float = 300) -> TinyRun:
    """A job on GPUs: three kernels, an all-reduce on its own stream, an update that waits for it, a sync."""
    run = TinyRun()
    noise = np.random.default_rng(11)
    lengths = noise.integers(100, 140, (num_ranks, num_steps, 3))
    lengths[slow_rank, :, 1] += round(extra)
    begin = 0.0
    for step in range(num_steps):
        ready = begin + 16 + lengths[:, step].sum(axis=1)
        moved = float(ready.max()) + 120
        for rank in range(num_ranks):
            call = iter(range(1000 * step, 1000 * (step + 1)))
            at = begin
            free = begin + 16
            for index, name in enumerate(("gemm", "softmax", "norm")):
                correlation = next(call)
                run.call(at, at + 10, correlation, rank)
                run.kernel(name, free, free + lengths[rank, step, index], correlation, rank)
                at += 12
                free += lengths[rank, step, index]
            correlation = next(call)
            run.call(at, at + 10, correlation, rank)
            run.nccl(free, moved, correlation, rank, sequence=step)
            run.call(at + 10, at + 12, next(call), rank, name="cudaStreamWaitEvent")
            correlation = next(call)
            run.call(at + 12, at + 20, correlation, rank)
            run.kernel("adam", moved + 2, moved + 52, correlation, rank)
            run.call(at + 20, moved + 56, next(call), rank, name="cudaDeviceSynchronize")
            run.op("log", moved + 56, moved + 70, rank)
            run.step(step, begin, moved + 70, rank)
        begin = moved + 70
    return run


class Seen:
    """A graph's replay, asked by name; times in microseconds since the graph's origin."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.timeline: Timeline = replay(graph)

    def nodes(self, name: str, rank: int = 0, kind: NodeKind | None = None) -> list[int]:
        """Nodes of that name on the rank, in measured order; of a collective its transfer."""
        nodes = self.graph.nodes
        fits = (nodes.name == self.graph.names.index(name)) & (nodes.rank == rank)
        fits &= nodes.kind != NodeKind.ARRIVE if kind is None else nodes.kind == kind
        found = np.flatnonzero(fits)
        return found[np.lexsort((nodes.measured_end[found], nodes.measured_start[found]))].tolist()

    def start(self, name: str, rank: int = 0, kind: NodeKind | None = None) -> float:
        return self.timeline.start[self.nodes(name, rank, kind)[0]] / US

    def end(self, name: str, rank: int = 0, kind: NodeKind | None = None) -> float:
        return self.timeline.end[self.nodes(name, rank, kind)[-1]] / US

    def lasting(self, name: str, by: float, rank: int = 0, kind: NodeKind | None = None) -> Seen:
        """The replay when the first node of that name takes so much longer."""
        duration = self.graph.nodes.duration.copy()
        duration[self.nodes(name, rank, kind)[0]] += round(by * US)
        return Seen(self.graph.with_durations(duration))

    def edges(self, kind: EdgeKind) -> list[tuple[str, str]]:
        """Names at the ends of the edges of a kind."""
        edges, nodes, names = self.graph.edges, self.graph.nodes, self.graph.names
        of_kind = np.flatnonzero(edges.kind == kind)
        return sorted(
            (names[nodes.name[edges.source[e]]], names[nodes.name[edges.target[e]]]) for e in of_kind
        )

    def misses(self) -> float:
        """Largest distance of a replayed start from the measured one; ends of threads are no work."""
        nodes = self.graph.nodes
        counted = (nodes.kind != NodeKind.RENDEZVOUS) & ((nodes.kind != NodeKind.GAP) | (nodes.duration > 0))
        return float(np.abs(self.timeline.start - nodes.measured_start)[counted].max()) / US


UNKNOWN = ("around", "collective", "bytes", "message")  # columns of nodes that are -1 unless given


def tiny_graph(
    durations: Sequence[int],
    edges: Sequence[tuple[int, int, int]],
    names: Sequence[str] | None = None,
    **columns: Sequence[int],
) -> Graph:
    """A graph of nodes numbered as given (`names[i]` finds node i again) and (from, to, lag) edges."""
    size = len(durations)
    defaults = dict.fromkeys(Nodes.__dataclass_fields__, 0) | dict.fromkeys(UNKNOWN, -1)
    filled = {name: np.full(size, value, np.int64) for name, value in defaults.items()}
    filled |= {"duration": np.array(durations, np.int64), "name": np.arange(size), "span": np.arange(size)}
    filled |= {name: np.array(values, np.int64) for name, values in columns.items()}
    filled["anchored"] = filled["anchored"].astype(np.bool_)
    ends = np.array(edges, np.int64).reshape(-1, 3).T
    kind = np.full(ends.shape[1], EdgeKind.THREAD, np.int64)
    joined = Edges(ends[0], ends[1], ends[2], kind, np.zeros(ends.shape[1], np.bool_))
    labels = tuple(names or map(str, range(size)))
    return make_graph(Nodes(**filled), joined, labels, ((0, "main thread"),), 0)
