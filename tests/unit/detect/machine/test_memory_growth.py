"""Memory that grows is named with when it is full, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
import pytest

from dpro.detect.findings import Finding
from dpro.detect.hang.evidence import advice_in_words
from dpro.detect.hang.memory import GREW
from dpro.detect.machine.memory_growth import (
    find_memory_growth,
    growth_of,
    needed_for_growth,
    with_growth_of_killed,
)
from dpro.detect.observations import observe
from dpro.detect.words import describe
from dpro.schema import COUNTERS, STEPS, WORKERS, conform
from dpro.units import NS_PER_S
from dpro.verdict.verdict import fault_in_words

GB = 1e9
Curve = Callable[[float], float]


def job(
    of_ranks: Sequence[Curve],
    available: Curve = lambda s: 100 * GB,
    gpu: Curve | None = None,
    lasts_s: int = 120,
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """A job on one host with a step a second; each curve is bytes by seconds."""
    rows: list[tuple[int, str, str, int, float]] = []
    for second in range(lasts_s):
        at = second * NS_PER_S
        rows += [(rank, "", "memory_bytes", at, curve(second)) for rank, curve in enumerate(of_ranks)]
        rows += [(-1, "", "memory_available_bytes", at, available(second))]
        rows += [(-1, "g0", "memory_used_bytes", at, gpu(second))] if gpu else []
    rows += [(-1, "g0", "memory_total_bytes", 0, 80 * GB), (-1, "g0", "sampling_us", 0, 90.0)] if gpu else []
    columns = dict(
        zip(("rank", "device", "counter", "time_ns", "value"), zip(*rows, strict=True), strict=True)
    )
    counters = conform(COUNTERS, pl.DataFrame({**columns, "host": ["n1"] * len(rows)}))
    of_rank = [(rank, step) for rank in range(len(of_ranks)) for step in range(lasts_s)]
    table = {"rank": [rank for rank, _ in of_rank], "step": [step for _, step in of_rank]}
    times = {"start_ns": [step * NS_PER_S for _, step in of_rank], "duration_ns": [NS_PER_S] * len(of_rank)}
    steps = conform(STEPS, pl.DataFrame({**table, **times}))
    ranks = [*range(len(of_ranks))]
    workers = {
        "rank": ranks,
        "host": ["n1"] * len(ranks),
        "pid": ranks,
        "gpu_uuid": ["g0" if gpu else ""] * len(ranks),
    }
    return steps, counters, conform(WORKERS, pl.DataFrame(workers))


def flat(_: float) -> float:
    return 3 * GB


def leaks(s: float) -> float:
    return 3 * GB + 0.1 * GB * s


def test_a_process_that_leaks_is_named_with_when_the_host_is_full():
    (finding,) = find_memory_growth(*job([flat, leaks], lambda s: 90 * GB - 0.1 * GB * s))
    assert (finding.class_, finding.component, finding.ranks) == ("memory.growth", "host n1", (1,))
    assert finding.cost_ns == 0
    # The lowest of the first and the last part are 66.7 s apart; 80 GB are left where the last begins.
    (grows, left) = finding.observations
    assert grows.values["last_bytes"] - grows.values["first_bytes"] == pytest.approx(6.7 * GB, rel=0.02)
    assert left.values["full_in_ns"] == pytest.approx(80 / 0.1 * NS_PER_S, rel=0.03)
    words = describe(finding)
    assert words.title == "growing memory: host n1 (memory grows by 100.5 MB a step, full in 13.2 min)"
    assert "costs" not in words.headline
    assert fault_in_words([finding]) == "host n1 (memory grows by 100.5 MB a step, full in 13.2 min)."


def test_a_gpu_that_fills_is_named_by_its_rank():
    used = lambda s: 20 * GB + 2.0 * GB * (s // 12)  # noqa: E731
    (finding,) = find_memory_growth(*job([flat], gpu=used))
    assert (finding.component, finding.ranks) == ("rank 0", (0,))
    assert "GPU memory grows by" in finding.cause
    assert "dpro memory FILE" in finding.remedy


def sawtooth(s: float) -> float:
    return 3 * GB + 2 * GB * (s % 17 / 17) + 0.1 * GB * s


@pytest.mark.parametrize(
    ("curve", "available", "lasts_s", "named"),
    [
        (sawtooth, lambda s: 90 * GB - 0.1 * GB * s, 120, True),
        (leaks, lambda s: 90 * GB, 120, False),  # pages of files: the kernel takes them back
        (leaks, lambda s: 90 * GB - 0.1 * GB * s, 20, False),  # too short
        (lambda s: 3 * GB + 10 * GB * (1 - np.exp(-s / 40)), lambda s: 50 * GB - 0.1 * GB * s, 120, False),
        (lambda s: 3 * GB + 0.1 * GB * min(s, 70), lambda s: 90 * GB - 0.1 * GB * s, 120, False),
        (lambda s: 3 * GB + 2 * GB * (s % 17 / 17), lambda s: 90 * GB - 0.1 * GB * s, 120, False),
        (lambda s: 3 * GB + 1e6 * s, lambda s: 5e12 - 1e6 * s, 120, False),  # full in 58 days
        (lambda s: 3 * GB + 1e5 * s, lambda s: 90 * GB - 1e5 * s, 120, False),  # 12 MB
        (lambda s: 30 * GB - 0.1 * GB * s, lambda s: 90 * GB + 0.1 * GB * s, 120, False),
    ],
)
def test_only_growth_without_end_is_named(curve, available, lasts_s, named):
    assert bool(find_memory_growth(*job([flat, curve], available, lasts_s=lasts_s))) == named


def test_a_part_without_a_value_shows_no_growth():
    late = pl.DataFrame({"time_ns": [40, 60], "value": [1.0, 2.0]})
    assert growth_of(late, 0, 60) is None
    held = pl.DataFrame({"time_ns": [-5, 60], "value": [1.0, 2.0]})
    growth = growth_of(held, 0, 60)
    assert growth is not None
    assert growth.lowest.tolist() == [1.0] * 6


def test_a_run_without_samples_is_silent():
    assert find_memory_growth(STEPS.empty(), COUNTERS.empty(), WORKERS.empty()) == []


@pytest.mark.parametrize(
    ("curve", "exit_signal", "cause"), [(leaks, 9, GREW), (flat, 9, ""), (leaks, 11, "")]
)
def test_a_rank_that_is_killed_after_its_memory_grew_is_said_to_be(curve, exit_signal, cause) -> None:
    _, counters, workers = job([flat, curve])
    death = observe("death", "rank {rank} was ended", rank=1, exit_signal=exit_signal)
    dead = Finding("dead.rank", "rank", "1", (1,), 1.0, 0.9, 0.0, (death,))
    (finding,) = with_growth_of_killed([dead], needed_for_growth(counters))
    assert finding.cause == cause
    grown = [
        line for line in finding.evidence if line.startswith("rank 1: the memory of its process grew from")
    ]
    assert len(grown) == bool(cause)
    assert ("what is kept from step to step" in advice_in_words(finding, workers)) == bool(cause)
