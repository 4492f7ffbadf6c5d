"""Hosts with more threads than cores: one finding about the host, and no rank is named for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import polars as pl
import pytest

from dpro.detect.findings import Finding
from dpro.detect.machine.oversubscribed import (
    CONTENTION,
    crowds_of,
    find_crowded_hosts,
    shared_hosts,
    with_throttling,
    without_crowded,
)
from dpro.detect.observations import observe
from dpro.detect.stragglers.causes import CPU
from dpro.schema import COUNTERS, STEPS, WORKERS, conform

MS = 1_000_000
STEP = 100 * MS
Tables = tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]
WAITS = observe("test", "it waits")
LATE = Finding("slow.host", "rank", "1", (1,), 0.2, 0.9, 20.0 * MS, (WAITS,), CONTENTION)


def tables(
    waits_ms: Mapping[int, float],
    hosts: Mapping[int, str] | None = None,
    steps: int = 40,
    cpu_ms: Mapping[int, float] | None = None,
    since: int = 0,
    threads_ms: float = 0.0,
    runnable: float = 9.0,
) -> Tables:
    """Steps of 100 ms, in each of which ranks wait for a core and compute for as long as given.

    Args:
        threads_ms: how long other threads of each rank compute.
        runnable: threads that are ready to run on the host.
    """
    rows, counted = [], []
    for step in range(steps):
        for rank, wait in waits_ms.items():
            at = {"rank": rank, "host": "", "time_ns": step * STEP}
            rows.append({"rank": rank, "step": step, "start_ns": step * STEP, "duration_ns": STEP})
            computed = (cpu_ms or {}).get(rank, 30.0)
            values = {
                "step_run_queue_ns": wait * (step >= since),
                CPU: computed,
                "step_cpu_ns": computed + threads_ms,
            }
            counted += [at | {"counter": name, "value": value * MS} for name, value in values.items()]
    workers = [{"rank": rank, "host": (hosts or {}).get(rank, "one")} for rank in waits_ms]
    on_node = {"rank": -1, "host": "one", "time_ns": 0}
    sampled = {"cpus": 2.0, "runnable_threads": runnable, "cgroup_cpu_limit_cores": 1.5}
    counted += [on_node | {"counter": name, "value": value} for name, value in sampled.items()]
    frames = zip((STEPS, COUNTERS, WORKERS), (rows, counted, workers), strict=True)
    found = [conform(table, pl.DataFrame(each)) for table, each in frames]
    return found[0], found[1], found[2]


def test_a_host_all_of_whose_ranks_wait_for_a_core_is_one_finding_about_the_host():
    steps, counters, workers = tables({0: 30.0, 1: 50.0})
    (finding,) = find_crowded_hosts(crowds_of(steps, counters, workers), counters)
    assert (finding.class_, finding.component_kind, finding.component_id) == ("slow.host", "host", "one")
    assert finding.ranks == (0, 1)
    assert finding.cost_ns == pytest.approx(30 * MS)  # what all of them wait
    assert finding.severity == pytest.approx(0.3)
    said = " ".join(finding.evidence)
    assert (
        "wait for a CPU core for 30 ms to 50 ms of a step of 100 ms, in 100% of the latest 40 steps" in said
    )
    assert "2 cores, and typically 9 threads are ready to run" in said
    assert "the ranks' processes compute on 0.6 of 2 cores: other processes use the rest" in said
    assert "cgroup may use 1.5 of them" in said
    values = {one.kind: one.values for one in finding.observations}
    assert (values["no-core"]["least_ns"], values["no-core"]["most_ns"]) == (30 * MS, 50 * MS)
    assert "no-rank-at-fault" in values
    assert "this delays all ranks of the host" in said
    assert finding.remedy == (
        "run fewer processes beside the ranks (DataLoader workers, other jobs), or give the job more cores"
    )


@pytest.mark.parametrize(
    ("cpu_ms", "threads_ms", "first"),
    [
        (30.0, 0.0, "run fewer processes"),
        (30.0, 25.0, "start fewer threads per rank (OMP_NUM_THREADS), run fewer processes"),
        (80.0, 60.0, "start fewer threads per rank (OMP_NUM_THREADS), or give the job more cores"),
        (80.0, 0.0, "start fewer threads per rank (OMP_NUM_THREADS), or give the job more cores"),
    ],
)
def test_the_remedy_follows_who_has_the_cores(cpu_ms, threads_ms, first):
    steps, counters, workers = tables(
        {0: 30.0, 1: 50.0}, cpu_ms={0: cpu_ms, 1: cpu_ms}, threads_ms=threads_ms
    )
    (finding,) = find_crowded_hosts(crowds_of(steps, counters, workers), counters)
    assert finding.remedy.startswith(first)
    values = {one.kind: one.values for one in finding.observations}
    assert ("beside_cores" in values["used-cores"]) == (threads_ms > 0)


@pytest.mark.parametrize(("cpu_ms", "shared"), [(30.0, True), (80.0, False)])
def test_other_processes_have_the_cores_that_the_ranks_do_not_compute_on(cpu_ms, shared):
    steps, counters, workers = tables({0: 30.0, 1: 50.0}, cpu_ms={0: cpu_ms, 1: cpu_ms})
    assert shared_hosts(steps, counters, workers) == ["one"] * shared
    assert shared_hosts(steps, counters.filter(pl.col("counter") != "cpus"), workers) == []
    assert shared_hosts(steps, counters.filter(pl.col("counter") != "step_cpu_ns"), workers) == []


def test_a_host_is_shared_if_its_ranks_wait_for_others_now_and_then():
    now_and_then = tables({0: 80.0, 1: 80.0}, since=34)
    assert crowds_of(*now_and_then) == []
    assert shared_hosts(*now_and_then) == ["one"]
    assert shared_hosts(*tables({0: 5.0, 1: 5.0})) == []  # of 100 ms


@pytest.mark.parametrize(
    "crowd",
    [
        tables({0: 30.0, 1: 5.0}),  # one rank alone waits: that is about the rank
        tables({0: 30.0}, runnable=2.0),  # its host has a core for each thread
        tables({0: 30.0, 1: 50.0}, steps=8),
        tables({0: 30.0, 1: 50.0}, hosts={0: "one", 1: "two"}),
        tables({0: 0.0, 1: 0.0}),
    ],
)
def test_fewer_ranks_or_steps_are_no_crowd(crowd):
    assert crowds_of(*crowd) == []


def test_a_host_that_became_crowded_is_found_in_its_latest_steps():
    (crowd,) = crowds_of(*tables({0: 30.0, 1: 50.0}, since=25))
    assert crowd.steps == 10


def test_a_run_that_does_not_count_waiting_for_a_core_shows_nothing():
    steps, counters, workers = tables({0: 30.0, 1: 50.0})
    assert crowds_of(steps, counters.filter(pl.col("counter") != "step_run_queue_ns"), workers) == []


def left(finding: Finding, cpu_ms: Mapping[int, float] | None = None) -> list[Finding]:
    steps, counters, workers = tables({0: 30.0, 1: 45.0, 2: 30.0}, cpu_ms=cpu_ms)
    return without_crowded([finding], crowds_of(steps, counters, workers), steps, counters)


def test_a_rank_that_waits_longer_for_a_core_is_not_named_beside_its_host():
    assert left(LATE) == []


def test_a_rank_that_waits_far_longer_for_a_core_than_any_other_is_named():
    steps, counters, workers = tables({0: 30.0, 1: 60.0, 2: 12.0})
    assert without_crowded([LATE], crowds_of(steps, counters, workers), steps, counters) == [LATE]


@pytest.mark.parametrize(("wait_ms", "runnable"), [(90.0, 1.0), (30.0, 9.0)])
def test_a_job_of_one_rank_is_crowded_if_it_mostly_waits_or_its_host_has_more_threads_than_cores(
    wait_ms, runnable
):
    steps, counters, workers = tables({0: wait_ms}, runnable=runnable)
    (finding,) = find_crowded_hosts(crowds_of(steps, counters, workers), counters)
    assert finding.ranks == (0,)
    assert finding.evidence[0].startswith("the training thread waits for a CPU core for ")


def test_the_limit_of_a_ranks_own_cgroup_is_its_cause_where_it_held_the_rank_back():
    steps, counters, _ = tables({0: 5.0, 1: 60.0})
    totals = [(second, 0.4 * second) for second in range(4)]  # s; 10 steps a second
    rows = [
        {"rank": 1, "host": "", "time_ns": round(at * 1e9), "counter": name, "value": value}
        for at, total in totals
        for name, value in (("cgroup_throttled_s", total), ("cgroup_cpu_limit_cores", 0.2))
    ]
    held = pl.concat([counters, conform(COUNTERS, pl.DataFrame(rows))])
    (finding,) = with_throttling([LATE], steps, held)
    assert finding.cause == "its limit of CPU time"
    assert "limit of 0.2 cores, and throttled it for 40 ms per step" in finding.evidence[0]
    held_back, waits = finding.observations
    assert held_back.values == {"rank": 1, "limit_cores": 0.2, "held_ns": pytest.approx(40 * MS)}
    assert (waits, finding.remedy) == (WAITS, "raise cpu.max, or the CPU limit of its container")
    assert with_throttling([LATE], steps, counters) == [LATE]
    (alone,) = with_throttling([], steps, held)
    assert (alone.class_, alone.ranks, alone.cause) == ("slow.host", (1,), "its limit of CPU time")
    both = [row | {"rank": 0} for row in rows]  # one cgroup of the whole job
    assert with_throttling([], steps, pl.concat([held, conform(COUNTERS, pl.DataFrame(both))])) == []


def test_a_rank_is_named_if_its_own_cpu_time_shows_that_it_works_longer():
    slow = replace(LATE, class_="slow.compute", cause="")
    assert left(slow) == []
    assert left(slow, cpu_ms={1: 50.0}) == [slow]


def test_what_is_counted_apart_from_computing_is_kept():
    for cause in ("the input pipeline", "garbage collection", "host code that waits"):
        assert left(replace(LATE, cause=cause)) != []
    assert left(replace(LATE, component_kind="job")) != []
    assert left(replace(LATE, ranks=(7,), component_id="7")) != []  # of another host
