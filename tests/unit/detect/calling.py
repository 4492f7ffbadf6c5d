"""Made-up jobs of which only the calls of collectives are known: hosts that work, call, and wait or go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.detect.findings import Finding
from dpro.detect.stragglers.from_calls import find_late_ranks, messages_unseen
from dpro.detect.stragglers.own_time import calls_of, own_time
from dpro.members import members_text
from dpro.schema import COLLECTIVES, COUNTERS, STEPS, WORKERS, conform

MS = 1_000_000
FIRST_NS = 1_700_000_000 * 10**9
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Section:
    """Work, and the call that follows it.

    Attributes:
        ms: how long the work takes.
        groups: the groups of ranks that call among themselves.
        blocks: whether the call returns only when all have come; else it is waited for at the end of the
            step.
        op: what is called.
    """

    ms: float
    groups: Sequence[Sequence[int]]
    blocks: bool
    op: str = "all_reduce"


@dataclass(frozen=True)
class Job:
    """A job: its sections, and factors of their work.

    Attributes:
        sections: of each step.
        factors: [R, T, C] of each section's work.
        hosts_wait: whether hosts ever wait for what runs (with NCCL they need not).
        tail_ms: the optimizer.
        counters: rows of `counters` per step: name and [R, T] ms.
    """

    sections: Sequence[Section]
    factors: Floats
    hosts_wait: bool = True
    tail_ms: float = 1.0
    counters: dict[str, Floats] = field(default_factory=dict)


def late_ranks(
    collectives: pl.DataFrame, steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """The ranks that the others wait for by the times of their calls, from tables on one clock."""
    calls = calls_of(collectives)
    unseen = messages_unseen(collectives, workers)
    return find_late_ranks(own_time(calls, steps), calls, counters, workers, doubtful=unseen)


def data_parallel(
    num_ranks: int, num_steps: int, *, buckets: int = 3, ms: float = 40.0, blocks: bool = False
) -> Job:
    """Gradients in buckets that are waited for at the end of the step; or, blocking, layer by layer."""
    section = Section(ms / buckets, [range(num_ranks)], blocks)
    return Job([section] * buckets, np.ones((num_ranks, num_steps, buckets)))


def tensor_and_data_parallel(num_steps: int) -> Job:
    """Four ranks: pairs that exchange activations, blocking, and gradients across the pairs."""
    pairs, across = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    sections = [Section(10.0, pairs, True, "all_gather")] * 3 + [Section(10.0, across, False)]
    return Job(sections, np.ones((4, num_steps, 4)))


def noisy(job: Job, seed: int, sigma: float, tail: float = 0.0) -> Job:
    """The same with noise on all work: lognormal, or with heavy tails (Student's t with `tail` degrees)."""
    generator = np.random.default_rng(seed)
    shape = job.factors.shape
    draws = generator.standard_t(tail, shape).clip(-8, 60) if tail else generator.standard_normal(shape)
    return replace(job, factors=job.factors * np.exp(sigma * draws).clip(0.2, 30))


def slower(job: Job, rank: int, times: float, since: int = 0) -> Job:
    """The same with a rank whose work takes longer, from a step on."""
    factors = job.factors.copy()
    factors[rank, since:] *= times
    return replace(job, factors=factors)


def counted(job: Job, **counters: Floats) -> Job:
    """The same with counters of its steps, [R, T] ms."""
    return replace(job, counters=counters)


def tables(
    job: Job, workers: pl.DataFrame | None = None
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Run the job: its `collectives`, `steps`, `counters` and `workers`."""
    num_ranks, num_steps, _ = job.factors.shape
    now = np.full(num_ranks, float(FIRST_NS))
    calls: list[dict[str, object]] = []
    steps: list[dict[str, object]] = []
    counters: list[dict[str, object]] = []
    numbers: dict[str, int] = {}
    for step in range(num_steps):
        began, open_until = now.copy(), now.copy()
        for place, section in enumerate(job.sections):
            now = now + job.factors[:, step, place] * section.ms * MS
            for group in section.groups:
                members = list(group)
                name = ",".join(map(str, members))
                number = numbers[name] = numbers.get(name, -1) + 1
                released = now[members].max() + MS / 10
                for rank in members:
                    row = {
                        "rank": rank,
                        "window": -1,
                        "op": section.op,
                        "group": name,
                        "group_ranks": members_text(members),
                    }
                    calls.append(row | {"sequence": number, "enqueued_ns": int(now[rank]), "start_ns": -1})
                if section.blocks and job.hosts_wait:
                    now[members] = released
                open_until[members] = np.maximum(open_until[members], released)
        if job.hosts_wait:
            now = np.maximum(now, open_until)
        now = now + job.tail_ms * MS
        for rank in range(num_ranks):
            start = int(began[rank])
            row = {"rank": rank, "step": step, "window": -1, "start_ns": start}
            steps.append(row | {"duration_ns": int(now[rank]) - start, "source": "optimizer"})
            counters += [
                {"rank": rank, "counter": name, "time_ns": start, "value": float(ms[rank, step]) * MS}
                for name, ms in job.counters.items()
            ]
    facts = pl.DataFrame({"rank": range(num_ranks)}) if workers is None else workers
    return (
        conform(COLLECTIVES, pl.DataFrame(calls)),
        conform(STEPS, pl.DataFrame(steps)),
        conform(COUNTERS, pl.DataFrame(counters)) if counters else COUNTERS.empty(),
        conform(WORKERS, facts),
    )
