"""Detector of memory that grows from step to step, on a host or a GPU, and when it will be full.

Reads tables `counters`, `steps` and `workers`. Returns a finding per host or rank whose memory grew steadily
over the recording. Memory grows while a job warms up, and in the allocator's increments; so the first third
of the time is left out, and the lowest values of six parts of the remainder are compared: each must exceed
the one before, and the second half must grow by at least half as much as the first. On a host, available
memory must shrink, too: pages of files that a process reads count as its own, and the kernel takes them back.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.detect.findings import Finding
from dpro.detect.hang.memory import GREW, OF_HOST
from dpro.detect.machine.telemetry import gpus_of_ranks
from dpro.detect.observations import Observation, observe
from dpro.replay.steps import step_series
from dpro.units import NS_PER_S, format_bytes, format_duration

CLASS = "memory.growth"
WARM_UP = 1 / 3  # of the time, left out
PARTS = 6  # in ascending order by chance once in 720 times
MIN_TIME_NS = 20 * NS_PER_S
MIN_BYTES = 32 << 20  # growth in that time, per process
STEADY = 0.5  # least growth of the second half, as a share of the first half's
CONFIRMED = 0.5  # least loss of the host's available memory, as a share of its processes' growth
MAX_FULL_NS = 30 * 24 * 3600 * NS_PER_S  # memory that lasts longer outlasts the job
CONFIDENCE = 0.9
_OF_GPU = (
    "look for tensors that are kept longer than a step; `dpro memory FILE` names the line in a snapshot of "
    "PyTorch's allocator"
)


@dataclass(frozen=True)
class Growth:
    """Growth of memory.

    Attributes:
        lowest: [PARTS] lowest bytes in each part of the time.
        lasted_ns: from the middle of the first part to that of the last.
    """

    lowest: Floats
    lasted_ns: float

    @property
    def grown(self) -> float:
        """Bytes by which it grew."""
        return float(self.lowest[-1] - self.lowest[0])

    @property
    def is_steady(self) -> bool:
        """Whether it grew in each part, by enough, and in the second half by `STEADY` of the first."""
        middle = (self.lowest[(PARTS - 1) // 2] + self.lowest[PARTS // 2]) / 2
        first, second = middle - self.lowest[0], self.lowest[-1] - middle
        return bool((np.diff(self.lowest) > 0).all()) and second >= STEADY * first and self.grown >= MIN_BYTES


def find_memory_growth(steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame) -> list[Finding]:
    """Find hosts and ranks whose memory grows without end; the arguments are the tables of these names."""
    if steps.is_empty():
        return []
    ends = steps["start_ns"] + steps["duration_ns"]
    begin, end = int(steps["start_ns"].min()), int(ends.max())  # type: ignore[arg-type]
    series = step_series(steps)
    return detect_growth(counters, workers, (begin, end), series.typical_ns if series else 0.0)


def detect_growth(
    counters: pl.DataFrame, workers: pl.DataFrame, time: tuple[int, int], step_ns: float
) -> list[Finding]:
    """Find hosts and ranks whose memory grows without end between two times, leaving out the first third.

    Args:
        counters, workers: the tables of these names.
        time: from and to, in ns.
        step_ns: step time; 0 unknown.
    """
    begin, end = time
    begin += int((end - begin) * WARM_UP)
    if end - begin < MIN_TIME_NS or counters.is_empty():
        return []
    return [
        *_on_hosts(counters, workers, (begin, end), step_ns),
        *_on_gpus(counters, workers, (begin, end), step_ns),
    ]


def growth_of(samples: pl.DataFrame, begin: int, end: int) -> Growth | None:
    """Return the growth of one series in a stretch of time; None if a part of it has no value.

    Args:
        samples: `time_ns` and `value`; a value holds until the next one.
    """
    ordered = samples.sort("time_ns")
    times, values = ordered["time_ns"].to_numpy(), ordered["value"].to_numpy()
    edges = np.linspace(begin, end, PARTS + 1)
    lowest = []
    for since, until in pairwise(edges):
        first, last = np.searchsorted(times, [since, until])
        part = values[max(first - 1, 0) : last]  # with the value that holds as it begins
        if part.size == 0 or times[0] > since + (until - since) / 2:
            return None
        lowest.append(part.min())
    return Growth(np.array(lowest, np.float64), (end - begin) * (PARTS - 1) / PARTS)


OF_PROCESS = "memory_bytes"  # counter: host memory of a rank's process


def needed_for_growth(part: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `counters` with the memory of processes."""
    return part.filter((pl.col("counter") == OF_PROCESS) & (pl.col("rank") >= 0))


def with_growth_of_killed(findings: Sequence[Finding], counters: pl.DataFrame) -> list[Finding]:
    """Add to findings of ranks that SIGKILL ended by how much their processes had grown, if they had.

    The kernel sends that signal when memory runs out, and does not always log it.

    Args:
        counters: as from `needed_for_growth`.
    """
    held = _split_by(counters, "rank")
    explained = []
    for finding in findings:
        killed = finding.ranks if any(map(_by_sigkill, finding.observations)) else ()
        grown = {rank: growth for rank in killed if (growth := _growth_of_all(held.get(rank))) is not None}
        seen = [
            _observed(rank, growth, "the memory of its process") for rank, growth in sorted(grown.items())
        ]
        explained.append(replace(finding.observing(*seen), cause=GREW) if seen else finding)
    return explained


def _by_sigkill(one: Observation) -> bool:
    return one.values.get("exit_signal") == signal.SIGKILL


def _growth_of_all(samples: pl.DataFrame | None) -> Growth | None:
    """Return how a process grew while it was sampled, after the first third; None unless it grew steadily."""
    if samples is None:
        return None
    first, last = int(samples["time_ns"].min()), int(samples["time_ns"].max())  # type: ignore[arg-type]
    begin = first + int((last - first) * WARM_UP)
    growth = growth_of(samples, begin, last) if last - begin >= MIN_TIME_NS / 2 else None
    return growth if growth is not None and growth.is_steady else None


def _on_hosts(
    counters: pl.DataFrame, workers: pl.DataFrame, time: tuple[int, int], step_ns: float
) -> list[Finding]:
    hosts = dict(workers.select("rank", "host").iter_rows())
    of_processes = needed_for_growth(counters)
    growing: dict[str, dict[int, Growth]] = {}
    for rank, samples in _split_by(of_processes, "rank").items():
        growth = growth_of(samples, *time)
        if growth is not None and growth.is_steady:
            growing.setdefault(hosts.get(rank, ""), {})[rank] = growth
    findings = []
    sampled = counters.filter((pl.col("counter") == "memory_available_bytes") & (pl.col("rank") < 0))
    of_host = _split_by(sampled, "host")
    for host, by_rank in growing.items():
        left = of_host.get(host, sampled.clear())
        available = growth_of(left.with_columns(-pl.col("value")), *time)  # negated: available memory shrinks
        grown = sum(growth.grown for growth in by_rank.values())
        if available is not None and available.grown >= CONFIRMED * grown:
            findings += _finding_of("host", host, by_rank, -float(available.lowest[-1]), step_ns, OF_HOST)
    return findings


def _on_gpus(
    counters: pl.DataFrame, workers: pl.DataFrame, time: tuple[int, int], step_ns: float
) -> list[Finding]:
    findings = []
    gpus = gpus_of_ranks(counters, workers).unique("rank", keep="first", maintain_order=True)
    used, sizes = (
        counters.filter(pl.col("counter") == name).partition_by("host", "device", as_dict=True)
        for name in ("memory_used_bytes", "memory_total_bytes")
    )
    for rank, *gpu in gpus.select("rank", "host", "device").iter_rows():
        key = tuple(gpu)
        growth = growth_of(used[key], *time) if key in used and key in sizes else None
        if growth is not None and growth.is_steady:
            left = float(sizes[key]["value"][-1]) - float(growth.lowest[-1])
            findings += _finding_of("rank", str(rank), {rank: growth}, left, step_ns, _OF_GPU)
    return findings


def _split_by(samples: pl.DataFrame, column: str) -> dict[Any, pl.DataFrame]:
    """Return samples by the values of a column, in order of these."""
    parts = samples.sort(column, maintain_order=True).partition_by(column, as_dict=True, maintain_order=True)
    return {key: part for (key,), part in parts.items()}


def _finding_of(
    kind: str, name: str, by_rank: dict[int, Growth], left: float, step_ns: float, remedy: str
) -> list[Finding]:
    """Return the finding of one host or GPU; none if its memory lasts for long."""
    ranks = tuple(sorted(by_rank))
    pace = sum(growth.grown / growth.lasted_ns for growth in by_rank.values())  # bytes per ns
    full_in_ns = max(left, 0.0) / pace
    if full_in_ns > MAX_FULL_NS:
        return []
    of = "GPU memory" if kind == "rank" else "memory"
    a_step = f"{format_bytes(pace * step_ns)} a step" if step_ns else f"{format_bytes(pace * NS_PER_S)}/s"
    observed = [_observed(rank, growth, of) for rank, growth in sorted(by_rank.items())]
    room = observe(
        "memory-left", "{left_bytes} are left: full in {full_in_ns} at this rate",
        left_bytes=left, full_in_ns=full_in_ns,
    )  # fmt: skip
    cause = f"{of} grows by {a_step}, full in {format_duration(full_in_ns)}"
    return [Finding(CLASS, kind, name, ranks, 0.0, CONFIDENCE, 0.0, (*observed, room), cause, remedy=remedy)]


def _observed(rank: int, growth: Growth, of: str) -> Observation:
    from_to = f"{of} grew from {{first_bytes}} to {{last_bytes}} in {{lasted_ns}}"
    return observe(
        "memory-grows", f"rank {{rank}}: {from_to}, with growth in each sixth of that time",
        rank=rank, first_bytes=float(growth.lowest[0]), last_bytes=float(growth.lowest[-1]),
        lasted_ns=growth.lasted_ns,
    )  # fmt: skip
