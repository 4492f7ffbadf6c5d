"""Every nanosecond of the usual step has one cause, and what limits a job follows from what each takes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.verdict.ledger import (
    LARGE,
    NO_CORE,
    ORDER,
    RANK,
    UNEXPLAINED,
    LedgerRow,
    entries_of,
    limit_of_entries,
    shares_of_limits,
)
from dpro.verdict.limits import BUBBLE, COMMUNICATION, COMPUTE, HOST, IMBALANCE, INPUT
from dpro.verdict.verdict import limit_of
from tests.builders import TinyRun, cpu_job
from tests.unit.verdict.test_verdict import facts_of


def entries(**ns: float) -> list[LedgerRow]:
    return [LedgerRow(cause.replace("_", "-"), (), value, "") for cause, value in ns.items()]


def two_parts() -> TinyRun:
    """Steps of 100 us in which a GPU works for 30: the host takes 20 before the launch, and 50 behind it."""
    run = TinyRun()
    for step in range(4):
        at = step * 100
        run.op("aten::load", at, at + 20)
        run.call(at + 20, at + 21, step)
        run.kernel("k", at + 22, at + 52, step)
        run.op("aten::rest", at + 21, at + 99)
        run.step(step, at, at + 100)
    return run


@pytest.mark.parametrize("run", [cpu_job(), two_parts()], ids=["cpu", "gpu"])
def test_entries_add_up_to_the_step_and_none_is_negative(run, tmp_path):
    facts = facts_of(run, tmp_path)
    taken_apart = entries_of(facts)
    assert sum(entry.ns for entry in taken_apart) == pytest.approx(facts.step_ns, rel=1e-9)
    assert all(entry.ns >= 0 for entry in taken_apart)
    assert [ORDER.index(entry.cause) for entry in taken_apart] == sorted(
        ORDER.index(entry.cause) for entry in taken_apart
    )


def test_a_step_is_taken_apart_into_what_was_put_into_it(tmp_path):
    shares = shares_of_limits(entries_of(facts_of(two_parts(), tmp_path)))
    assert shares[INPUT] == pytest.approx(0.2, abs=0.03)
    assert shares[HOST] == pytest.approx(0.5, abs=0.06)
    assert shares[COMPUTE] == pytest.approx(0.3, abs=0.03)
    assert limit_of_entries(entries_of(facts_of(two_parts(), tmp_path / "again")), False) == HOST


def side_by_side(gpu_us: int) -> TinyRun:
    """A host that launches a kernel each 10 us and waits for none, and a GPU that works on each."""
    run, free = TinyRun(), 0
    for number in range(40):
        at = 10 * number
        run.op("aten::op", at, at + 9)
        run.call(at + 6, at + 9, number)
        free = max(free, at + 10) + gpu_us
        run.kernel("k", free - gpu_us, free, number)
    for step in range(4):
        run.step(step, 100 * step, 100 * (step + 1))
    return run


def test_host_is_the_limit_where_free_devices_save_nothing_though_they_work_most_of_the_step(tmp_path):
    facts = facts_of(side_by_side(gpu_us=6), tmp_path / "host")
    assert facts.gain_of_devices < 1.02
    shares = shares_of_limits(entries_of(facts))
    assert shares[HOST] < LARGE < shares[COMPUTE]
    assert limit_of(facts).kind == HOST
    assert limit_of(facts_of(side_by_side(gpu_us=11), tmp_path / "devices")).kind == COMPUTE


def test_compute_that_gains_nothing_when_free_is_no_limit_beside_something_that_does():
    parts = entries(host=0.1, input=0.1, compute=0.8)
    assert limit_of_entries(parts, False, lambda limit: limit != COMPUTE) == HOST
    assert limit_of_entries(parts, False, lambda _: True) == COMPUTE
    # Devices that work nearly all the time leave no room for another limit.
    nearly_all = entries(host=0.1, input=0.05, compute=0.85)
    assert limit_of_entries(nearly_all, False, lambda limit: limit != COMPUTE) == COMPUTE


def what_hosts_do() -> TinyRun:
    """Steps of 100 ms: launching takes 0.02, the kernel 30, allocating 20, a collection 15, compiling 10."""
    run = TinyRun()
    for step in range(4):
        at = step * 100_000
        run.call(at, at + 10, 10 * step)
        run.kernel("k", at + 20, at + 30_000, 10 * step)
        run.call(at + 40_000, at + 60_000, 10 * step + 1, name="cudaMalloc")
        run.op("_compile.compile_inner (dynamo_timed)", at + 60_000, at + 70_000)
        run.op("build_guards (dynamo_timed)", at + 62_000, at + 65_000)  # a part of it
        run.op("aten::make", at + 70_000, at + 99_000)
        run.counter("gc_pause_ns", at + 75_000, 15e6)
        run.step(step, at, at + 100_000)
    return run


def test_what_no_step_needs_has_entries_of_its_own_beside_the_host(tmp_path):
    taken_apart = entries_of(facts_of(what_hosts_do(), tmp_path))
    parts = {entry.cause: entry.ns / 1e6 for entry in taken_apart}
    assert parts["allocator"] == pytest.approx(20, abs=1)
    assert parts["compilation"] == pytest.approx(10, abs=1)
    assert parts["collection"] == pytest.approx(15, abs=1)
    assert shares_of_limits(taken_apart)[HOST] == pytest.approx(0.45, abs=0.02)
    assert sum(parts.values()) == pytest.approx(100, rel=5e-3)


def saving(steps: int, saves: int) -> TinyRun:
    """Steps of 1 ms, of which saving takes 400 us in the first ones, on rank 0."""
    run = TinyRun()
    for step, rank in product(range(steps), (0, 1)):
        at = step * 1000
        run.op("aten::mm", at, at + 500, rank)
        call = at + 500 if rank else at + 900
        run.gloo((call, call + 10), (call + 10, at + 990), rank, group="dp", group_ranks="0,1", sequence=step)
        run.step(step, at, at + 1000, rank)
        if rank == 0 and step < saves:
            facts = {"kind": "save", "start_ns": (at + 500) * 1000, "duration_ns": 400_000}
            run.rows["checkpoints"].append({"rank": 0, "stall_ns": 400_000} | facts)
    return run


def test_saving_in_most_steps_is_an_entry_of_them(tmp_path):
    parts = {entry.cause: entry.ns for entry in entries_of(facts_of(saving(4, 4), tmp_path))}
    assert parts["checkpoint"] == pytest.approx(400_000, rel=0.02)


def test_saving_now_and_then_is_none(tmp_path):
    assert "checkpoint" not in {entry.cause for entry in entries_of(facts_of(saving(4, 2), tmp_path))}


def test_what_gains_nothing_is_no_limit():
    parts = entries(host=0.4, input=0.3, compute=0.3)
    assert limit_of_entries(parts, False) == HOST
    assert limit_of_entries(parts, False, lambda limit: limit != HOST) == INPUT
    assert limit_of_entries(parts, False, lambda limit: False) == COMPUTE


def test_a_rank_that_a_finding_names_comes_before_the_rest_of_uneven_work(tmp_path):
    taken_apart = entries_of(facts_of(cpu_job(num_steps=12, extra=4_000), tmp_path))
    assert [entry.ranks for entry in taken_apart if entry.cause == RANK] == [(1,)]


def test_the_largest_part_but_compute_is_the_limit_where_it_is_large():
    assert limit_of_entries(entries(input=LARGE, host=0.1, compute=0.7), False) == INPUT
    assert limit_of_entries(entries(input=LARGE - 0.01, host=0.1, compute=0.71), False) == COMPUTE


def test_parts_of_one_limit_count_together():
    assert limit_of_entries(entries(rank=0.12, imbalance=0.1, host=0.18, compute=0.6), False) == IMBALANCE
    assert (
        limit_of_entries([LedgerRow(NO_CORE, (), 0.15, ""), *entries(host=0.1, compute=0.75)], False) == HOST
    )


def test_stages_of_a_pipeline_are_never_limited_by_compute():
    assert limit_of_entries(entries(pipeline_bubble=0.05, compute=0.95), True) == BUBBLE


def test_no_limit_is_named_where_most_is_unexplained():
    assert limit_of_entries(entries(host=0.3, compute=0.1, unexplained=0.6), False) == ""
    assert limit_of_entries([], False) == ""


def test_what_kernels_without_launches_take_is_compute_and_the_gaps_are_unexplained(tmp_path):
    run = TinyRun()
    for number in range(40):
        run.kernel("k", 10 * number, 10 * number + 7)
    for step in range(4):
        run.step(step, 100 * step, 100 * (step + 1))
    taken_apart = entries_of(facts_of(run, tmp_path))
    shares = shares_of_limits(taken_apart)
    assert shares[COMPUTE] == pytest.approx(0.7, abs=0.02)
    assert shares[UNEXPLAINED] == pytest.approx(0.3, abs=0.02)
    assert limit_of_entries(taken_apart, False) == COMPUTE


CAUSES = st.sampled_from([cause for cause in ORDER if cause not in (COMPUTE, UNEXPLAINED)])


@given(st.lists(st.tuples(CAUSES, st.floats(0, 1)), max_size=8), st.floats(0.01, 1))
def test_the_limit_is_compute_or_takes_a_fifth_of_the_step(parts, compute):
    listed = [*(LedgerRow(cause, (), ns, "") for cause, ns in parts), LedgerRow(COMPUTE, (), compute, "")]
    limit = limit_of_entries(listed, False)
    shares = shares_of_limits(listed)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert limit == COMPUTE or shares[limit] >= LARGE
    assert limit != COMMUNICATION or shares[limit] == max(
        share for name, share in shares.items() if name != COMPUTE
    )


def transfers_beside_hosts() -> TinyRun:
    """Steps of 1 ms of two ranks: a transfer of 0.98 ms, beside it hosts work for 0.6 and 0.2 ms."""
    run = TinyRun()
    for step, (rank, work) in product(range(4), enumerate((600, 200))):
        at = step * 1000
        run.call(at, at + 5, step, rank)
        run.nccl(at + 10, at + 990, step, rank, group="dp", group_ranks="0,1", sequence=step)
        run.op("aten::mm", at + 10, at + 10 + work, rank)
        run.call(at + 10 + work, at + 995, 1000 + step, rank, name="cudaDeviceSynchronize")
        run.step(step, at, at + 1000, rank)
    return run


def test_an_entry_is_what_its_removal_saves_and_what_it_hides_comes_after_it(tmp_path):
    facts = facts_of(transfers_beside_hosts(), tmp_path)
    parts = {entry.cause: entry.ns / 1e3 for entry in entries_of(facts)}
    saved_us = facts.step_ns * (1 - 1 / facts.gains_by_limit()[COMMUNICATION]) / 1e3
    assert parts[COMMUNICATION] == pytest.approx(saved_us, abs=20)
    assert parts[IMBALANCE] == pytest.approx(400, abs=20)
