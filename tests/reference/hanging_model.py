"""The parts of a simulated job that hangs: groups, calls, faults, ranks."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

NEVER = math.inf
FAULTS = ("host", "device", "comm", "size", "dtype", "op", "skip", "order", "deadlock")
TWO_HOSTS = "hosts"  # a fault that is not drawn among the others: two ranks stop
CLASSES = {
    "host": "hang.host",
    TWO_HOSTS: "hang.host",
    "device": "hang.device",
    "comm": "hang.comm",
    **dict.fromkeys(("size", "dtype", "op", "skip", "order", "deadlock"), "hang.mismatch"),
}
LAYOUTS = ("dp", "fsdp", "tp_pp", "moe")


@dataclass(frozen=True)
class Group:
    """A process group."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(eq=False)
class Work:
    """One rank's part in one collective or message."""

    rank: int
    group: Group
    op: str
    numel: tuple[int, int]
    dtype: str
    sequence: int
    p2p: bool
    enqueued: float
    peer: int = -1
    after: list[Work] = field(default_factory=list)
    batch: int = -1
    collectives: int = 0
    started: float = NEVER
    completed: float = NEVER

    @property
    def signature(self) -> tuple[Any, ...]:
        """What all parts of a collective must agree on."""
        return (self.op, self.dtype) if self.op == "all_to_all" else (self.op, self.dtype, self.numel)


@dataclass(frozen=True)
class Fault:
    """What goes wrong: which kind, on which ranks, at which of the rank's calls."""

    kind: str
    ranks: tuple[int, ...]
    at: int
    group: Group | None = None


@dataclass
class Job:
    """A job that has been run until nothing moves any more."""

    layout: str
    num_ranks: int
    groups: list[Group]
    works: dict[int, list[Work]]
    fault: Fault | None
    gloo: bool
    finished: bool
    last: float


class Rank:
    """A rank while it runs: how far its host is, what its compute stream waits for."""

    def __init__(self, number: int, job: Running) -> None:
        self.number, self.job = number, job
        self.time = job.rng.uniform(0, 2e6)
        self.frontier: list[Work] = []
        self.streams: dict[str, Work] = {}
        self.counts: dict[tuple[str, bool], int] = defaultdict(int)
        self.calls = 0
        self.blocked: list[Work] = []
        self.stuck = False
        self.ended = False

    def compute(self, ns: float) -> None:
        self.time += ns * self.job.rng.lognormvariate(0, 0.2)

    def enqueue(
        self, group: Group, op: str, numel: tuple[int, int], dtype: str, *, peer: int = -1, batch: int = -1
    ) -> Work:
        self.compute(20_000)
        p2p = peer >= 0
        key = (group.name, p2p)
        if batch < 0 or self.counts[key] == 0 or batch != self.job.last_batch.get((self.number, group.name)):
            self.counts[key] += 1
            self.job.last_batch[self.number, group.name] = batch
        stream = f"{group.name} {op} {peer}" if p2p else group.name
        before = [self.streams[stream]] if stream in self.streams else []
        work = Work(
            self.number, group, op, numel, dtype, self.counts[key], p2p, self.time, peer,
            [*self.frontier[-3:], *before], batch, self.counts[group.name, False],
        )  # fmt: skip
        self.streams[stream] = work
        self.job.works[self.number].append(work)
        return work


class Running:
    """A job while it runs."""

    def __init__(self, rng: random.Random, layout: str, num_ranks: int, gloo: bool, steps: int) -> None:
        self.rng, self.layout, self.num_ranks, self.gloo, self.steps = rng, layout, num_ranks, gloo, steps
        self.works: dict[int, list[Work]] = {rank: [] for rank in range(num_ranks)}
        self.last_batch: dict[tuple[int, str], int] = {}
        self.fault: Fault | None = None
        self.groups: list[Group] = []
        self.eager = gloo or rng.random() < 0.2
        self.batched = not gloo and rng.random() < 0.5
        self.world = self.add_group(range(num_ranks), "default_pg")
        self.layers = rng.randint(2, 3)
        self.looks = rng.choice([0.3, 0.7, 1.0])  # how often a host looks at results

    def add_group(self, ranks: Any, description: str) -> Group:
        group = Group(str(len(self.groups)), description, tuple(ranks))
        self.groups.append(group)
        return group
