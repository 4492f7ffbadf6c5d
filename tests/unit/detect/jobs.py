"""Small made-up jobs for the tests of the detectors: what each rank does is given as arrays.

A rank's step is: the DataLoader, time in no span, and then per collective an operator and a blocking
all-reduce (gloo: the call returns at once, a worker thread moves the data, the caller goes on when it has),
and at last the optimizer. The collectives are simulated here, so ranks wait for each other as they would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.detect.baseline import Baseline
from dpro.detect.context import Context
from dpro.detect.findings import Finding
from dpro.detect.run import diagnose_graph
from dpro.members import members_text
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import Graph
from dpro.replay.timeline import replay, step_times
from dpro.schema import COLLECTIVES, SPANS, STEPS, WORKERS
from dpro.store import Manifest, open_run, write_manifest, write_part

MS = 1_000_000
CALL_NS = 50_000  # the call that hands a collective to the worker
WAKE_UP_NS = 20_000  # from the end of a collective to the next thing its caller does
FIRST_NS = 1_700_000_000 * 10**9
DATA_LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"

Floats = NDArray[np.float64]
Groups = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Work:
    """What the ranks do, in ms; never negative.

    Attributes:
        data, gap, tail: [R, T] input, time in no span, optimizer.
        compute: [R, T, C] operator before each collective.
        transfer: of each collective.
        groups: per collective, the groups of ranks that call it among themselves; a rank in none of them
            neither computes nor calls there. One group of all ranks everywhere where None.
        links: how many times as long the transfers of a group take, by its ranks.
        transfer_sigma, transfer_seed: each transfer takes a lognormal factor of its own.
        hosts: of the ranks.
    """

    data: Floats
    gap: Floats
    compute: Floats
    tail: Floats
    transfer: float = 2.0
    groups: Groups | None = None
    links: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    transfer_sigma: float = 0.0
    transfer_seed: int = 0
    hosts: Sequence[str] | None = None


def equal_work(num_ranks: int, num_steps: int = 8, num_collectives: int = 2) -> Work:
    """All ranks do the same, without any noise: 1 ms of input, 0.5 of nothing, 40 of operators, 2 at last."""
    shape = (num_ranks, num_steps)
    return Work(
        data=np.full(shape, 1.0),
        gap=np.full(shape, 0.5),
        compute=np.full((*shape, num_collectives), 40.0 / num_collectives),
        tail=np.full(shape, 2.0),
    )


def slower(work: Work, part: str, rank: int | list[int], *, plus: float = 0.0, times: float = 1.0) -> Work:
    """The same with one part of one or more ranks (every step) changed."""
    changed = getattr(work, part).copy()
    changed[rank] = changed[rank] * times + plus
    return replace(work, **{part: changed})


def noisy(work: Work, seed: int, sigma: float) -> Work:
    """Each part of each step times a lognormal factor of its own; the transfers keep their time."""
    generator = np.random.default_rng(seed)
    parts = ("data", "gap", "compute", "tail")
    factors = {part: generator.lognormal(0.0, sigma, getattr(work, part).shape) for part in parts}
    return replace(work, **{part: getattr(work, part) * factors[part] for part in parts})


def write_job(folder: Path, work: Work, clock_ms: dict[int, float] | None = None) -> Path:
    """Run the job and write what a recorder would have seen.

    Args:
        folder: the run directory to make.
        work: what the ranks do.
        clock_ms: how far each rank's clock is ahead; ranks on clocks of their own are on hosts of their own.
    """
    num_ranks, num_steps, num_collectives = work.compute.shape
    ranks = [_Rank(rank) for rank in range(num_ranks)]
    noise = np.random.default_rng(work.transfer_seed)
    for step in range(num_steps):
        for rank in ranks:
            rank.begin_step(step, work)
        for at in range(num_collectives):
            for group in work.groups[at] if work.groups else [range(num_ranks)]:
                members = [ranks[rank] for rank in group]
                for rank in members:
                    rank.run("aten::addmm", work.compute[rank.rank, step, at])
                    rank.call()
                times = work.links.get(tuple(group), 1.0) * noise.lognormal(0.0, work.transfer_sigma)
                end = max(rank.now for rank in members) + round(work.transfer * times * MS)
                for rank in members:
                    rank.move(end, list(group))
        for rank in ranks:
            rank.end_step(step, work)
    for rank in ranks:
        shift = round((clock_ms or {}).get(rank.rank, 0.0) * MS)
        host = f"host{rank.rank}" if clock_ms else work.hosts[rank.rank] if work.hosts else "host0"
        tables = ((SPANS, rank.spans), (COLLECTIVES, rank.collectives), (STEPS, rank.steps))
        for table, rows in tables:
            moved = [row | {"start_ns": row["start_ns"] + shift} for row in rows]
            write_part(folder, table, f"rank{rank.rank:05d}", pl.DataFrame(moved))
        local = list(work.hosts[: rank.rank]).count(host) if work.hosts else 0
        worker = {"rank": rank.rank, "world_size": num_ranks, "host": host, "pid": rank.pid}
        worker |= {"local_rank": local}
        write_part(folder, WORKERS, f"rank{rank.rank:05d}", pl.DataFrame([worker]))
    write_manifest(folder, Manifest(world_size=num_ranks, ranks=list(range(num_ranks))))
    return folder


def graph_of(folder: Path, work: Work, clock_ms: dict[int, float] | None = None) -> Graph:
    """The job's graph, by way of a run directory."""
    return build_graph(open_run(write_job(folder, work, clock_ms))).graph


def found_in_graph(graph: Graph) -> list[Finding]:
    """What the detectors of deep windows find in a graph, costliest first."""
    return diagnose_graph(Context(recorded=Baseline(graph)))


def mean_step_ns(graph: Graph) -> float:
    """The mean replayed step."""
    timeline = replay(graph)
    return float(step_times(graph, timeline.start, timeline.end)["duration_ns"].to_numpy().mean())


class _Rank:
    """A rank as it runs: its main thread's clock, and the rows recorded so far."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = 100 + 10 * rank
        self.now = FIRST_NS
        self.step_began = FIRST_NS
        self.spans: list[dict[str, Any]] = []
        self.collectives: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []

    def span(self, name: str, kind: str, start: int, duration: int, thread: int = 0) -> int:
        row = {"span_id": len(self.spans), "rank": self.rank, "window": 0, "kind": kind, "name": name}
        row |= {"start_ns": start, "duration_ns": duration, "pid": self.pid, "tid": self.pid + thread}
        self.spans.append(row)
        return row["span_id"]

    def run(self, name: str, length_ms: float, kind: str = "cpu_op") -> None:
        duration = round(length_ms * MS)
        self.span(name, kind, self.now, duration)
        self.now += duration

    def begin_step(self, step: int, work: Work) -> None:
        self.step_began = self.now
        self.run(DATA_LOADER, work.data[self.rank, step], "annotation")
        self.now += round(work.gap[self.rank, step] * MS)

    def call(self) -> None:
        self.called = self.span("c10d::allreduce_", "cpu_op", self.now, CALL_NS)
        self.now += CALL_NS

    def move(self, end: int, members: list[int]) -> None:
        moved = self.span("gloo:all_reduce", "annotation", self.now, end - self.now, thread=1)
        row = {"collective_id": len(self.collectives), "rank": self.rank, "window": 0, "op": "all_reduce"}
        before = [row["group_ranks"] for row in self.collectives]
        row |= {
            "group": str(members),
            "group_ranks": members_text(members),
            "sequence": before.count(members_text(members)),
        }
        row |= {"bytes_in": 1 << 20, "bytes_out": 1 << 20, "dtype": "float32", "start_ns": self.now}
        row |= {"duration_ns": end - self.now, "span_id": moved, "launch_span_id": self.called}
        self.collectives.append(row)
        self.now = end + WAKE_UP_NS

    def end_step(self, step: int, work: Work) -> None:
        self.run("Optimizer.step#SGD.step", work.tail[self.rank, step], "annotation")
        row = {"rank": self.rank, "step": step, "window": 0, "start_ns": self.step_began}
        self.steps.append(row | {"duration_ns": self.now - self.step_began, "source": "optimizer"})
