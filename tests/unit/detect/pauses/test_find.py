"""Time that is lost in some steps only, found from steps, counters and calls of made-up jobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.detect.pauses import EMPTY_QUEUE, LostTime, Pause, done_in_windows, find_pauses, merged
from dpro.detect.stragglers.from_calls import find_late_ranks
from dpro.detect.stragglers.own_time import calls_of, own_time, own_time_of_all
from dpro.schema import COUNTERS, STEPS, conform
from dpro.verdict.verdict import fault_in_words
from tests.unit.detect.calling import MS, Job, counted, data_parallel, noisy, slower, tables

STEP_MS = 41.1  # of `data_parallel`: work, the last call, the optimizer
PAUSE_MS = 200.0
ALL = slice(None)


def paused(job: Job, ranks, steps, ms: float = PAUSE_MS) -> Job:
    """The same with more work of some ranks at the start of some steps."""
    factors = job.factors.copy()
    factors[np.ix_(np.atleast_1d(ranks), np.atleast_1d(steps), [0])] += ms / job.sections[0].ms
    return replace(job, factors=factors)


def in_steps(job: Job, ranks, steps, ms: float = PAUSE_MS) -> np.ndarray:
    """[R, T] ms of a counter that has a value in some steps of some ranks."""
    values = np.full(job.factors.shape[:2], 0.1)
    values[np.ix_(np.atleast_1d(ranks), np.atleast_1d(steps))] += ms
    return values


def lost(job: Job, more: pl.DataFrame | None = None):
    collectives, steps, counters, _ = tables(job)
    counters = counters if more is None else pl.concat([counters, conform(COUNTERS, more)])
    return find_pauses(steps, counters, lambda: own_time_of_all(calls_of(collectives), steps))


OWN = pl.DataFrame(schema={"rank": pl.Int32, "step": pl.Int64, "own_ns": pl.Int64})
EVERY_TENTH = np.arange(9, 100, 10)
QUIET = noisy(data_parallel(4, 100), 1, 0.01)


@pytest.mark.parametrize(
    ("counter", "cause", "do"),
    [
        ("step_gc_ns", "garbage collection", "gc.freeze()"),
        ("step_checkpoint_ns", "checkpoint", "async_save"),
        ("step_compile_ns", "compilation", "dynamic=True"),
        ("step_no_grad_ns", "validation", "validate on all ranks"),
        ("step_data_wait_ns", "waiting for data", "prefetch_factor"),
    ],
)
def test_what_one_rank_does_in_some_steps_is_named_with_its_period_its_share_and_what_to_do(
    counter, cause, do
):
    job = counted(paused(QUIET, 2, EVERY_TENTH), **{counter: in_steps(QUIET, 2, EVERY_TENTH)})
    (finding,) = lost(job).findings
    assert (finding.class_, finding.component_kind, finding.component_id) == ("pauses", "rank", "2")
    assert (finding.cause, finding.ranks) == (cause, (2,))
    assert "rank 2" in finding.evidence[0]
    assert "in every 10th step, the others wait" in finding.evidence[0]
    assert do in finding.remedy
    pauses, share, *_ = finding.observations
    assert pauses.values["pause_ns"] == pytest.approx(PAUSE_MS * MS, rel=0.03)
    assert (pauses.values["ranks"], pauses.values["period_steps"]) == ((2,), 10)
    assert (share.values["pauses"], share.values["steps"]) == (10, 100)
    assert "steps 9, 19, 29, 39 …: 10 of 100 steps" in finding.evidence[1]
    assert finding.cost_ns == pytest.approx(PAUSE_MS / 10 * MS, rel=0.03)
    assert finding.severity == pytest.approx(20 / (20 + STEP_MS), rel=0.03)
    assert finding.confidence > 0.8


def test_what_all_ranks_do_is_of_the_job():
    job = counted(
        paused(QUIET, range(4), EVERY_TENTH), step_checkpoint_ns=in_steps(QUIET, range(4), EVERY_TENTH)
    )
    (finding,) = lost(job).findings
    assert (finding.component_kind, finding.component_id, finding.ranks) == (
        "job",
        "checkpoint",
        (0, 1, 2, 3),
    )
    assert finding.evidence[0].startswith("all ranks save a checkpoint")
    assert "less often" in finding.remedy


def test_ranks_that_pause_in_turn_are_said_to_not_do_so_together():
    job, values = QUIET, np.full((4, 100), 0.1)
    for rank in range(4):
        mine = np.arange(3 + 2 * rank, 100, 12)
        job, values = paused(job, rank, mine), values + in_steps(QUIET, rank, mine)
    (finding,) = lost(counted(job, step_gc_ns=values)).findings
    assert (finding.component_kind, finding.component_id) == ("job", "garbage collection")
    assert "ranks 0-3, not all in the same steps, collect garbage" in finding.evidence[0]
    assert "same, few steps on all ranks" in finding.remedy


def test_pause_that_no_counter_explains_is_of_the_rank_that_the_others_wait_for():
    cpu = in_steps(QUIET, 1, EVERY_TENTH)
    idle = lost(counted(paused(QUIET, 1, EVERY_TENTH), step_training_thread_cpu_ns=0.0 * cpu)).findings
    busy = lost(counted(paused(QUIET, 1, EVERY_TENTH), step_training_thread_cpu_ns=cpu)).findings
    assert [(each.component_id, each.cause) for each in (*idle, *busy)] == [
        ("1", "unknown wait"),
        ("1", "other work"),
    ]
    assert "computing nothing" in idle[0].evidence[0]


@pytest.mark.parametrize(("ms", "cause"), [(90.0, "unknown wait"), (110.0, "garbage collection")])
def test_what_is_half_of_a_pause_explains_it_and_less_does_not(ms, cause):
    values = in_steps(QUIET, 2, EVERY_TENTH, ms) + in_steps(QUIET, 1, EVERY_TENTH, 90.0)
    (finding,) = lost(counted(paused(QUIET, 2, EVERY_TENTH), step_gc_ns=values)).findings
    assert (finding.component_id, finding.cause, finding.ranks) == ("2", cause, (2,))


@pytest.mark.parametrize(("ms", "cause"), [(90.0, "unknown wait"), (110.0, "other work")])
def test_a_rank_works_in_a_pause_if_it_computes_for_half_of_it(ms, cause):
    cpu = in_steps(QUIET, 1, EVERY_TENTH, ms)
    job = counted(paused(QUIET, 1, EVERY_TENTH), step_training_thread_cpu_ns=cpu)
    assert [(each.ranks, each.cause) for each in lost(job).findings] == [((1,), cause)]


def test_a_rank_whose_own_work_is_less_than_half_of_a_pause_does_not_work_in_it():
    job = paused(paused(QUIET, 1, EVERY_TENTH), 2, EVERY_TENTH, 95.0)
    assert [each.ranks for each in lost(job).findings] == [(1,)]


def test_validation_that_mostly_waits_for_its_own_data_is_a_validation():
    job = counted(
        paused(QUIET, 0, EVERY_TENTH),
        step_no_grad_ns=in_steps(QUIET, 0, EVERY_TENTH, 50.0),
        step_data_wait_ns=in_steps(QUIET, 0, EVERY_TENTH, 90.0),
    )
    assert [finding.cause for finding in lost(job).findings] == ["validation"]


@pytest.mark.parametrize(
    ("workers", "component", "do"),
    [
        ("4 workers", "loader restart", "persistent_workers=True"),
        ("4 persistent workers", "epoch start", "sampler"),
        ("0 workers", "epoch start", "sampler"),
    ],
)
def test_waiting_for_data_where_a_loader_restarts_is_distinguished_from_other_waits(workers, component, do):
    job = paused(QUIET, range(4), EVERY_TENTH)
    job = counted(job, step_data_wait_ns=in_steps(QUIET, range(4), EVERY_TENTH))
    begins = tables(job)[1].filter(pl.col("step").is_in(EVERY_TENTH.tolist()))
    began = begins.select(
        "rank",
        device=pl.lit(workers),
        counter=pl.lit("loader_start_ns"),
        time_ns=pl.col("start_ns") + MS,
        value=pl.lit(1.0 * MS),
    )
    (finding,) = lost(job, began).findings
    assert (finding.component_kind, finding.component_id) == ("job", component)
    assert do in finding.remedy


def test_size_and_speed_of_a_checkpoint_are_reported():
    job = counted(paused(QUIET, 0, EVERY_TENTH), step_checkpoint_ns=in_steps(QUIET, 0, EVERY_TENTH))
    rows = [(0, "checkpoint_save_ns", 7, 2e8), (0, "checkpoint_save_bytes", 7, 2.5e6)]
    saved = pl.DataFrame(rows, schema=["rank", "counter", "time_ns", "value"], orient="row")
    (finding,) = lost(job, saved).findings
    assert "files of 2.5 MB, saved at 12.5 MB/s" in finding.evidence


def test_host_that_ran_ahead_of_its_gpu_loses_what_it_does_not_catch_up():
    steps = [100.0] * 60
    for at in range(8, 60, 10):
        steps[at], steps[at + 1] = 300.0, 50.0  # 200 more, of which the next step catches up 50
    frame = _steps(steps)
    busy = _counter(frame, "step_gc_ns", [200.0 if ms == 300 else 0.0 for ms in steps])
    (finding,) = find_pauses(frame, busy, _no_calls).findings
    assert finding.cost_ns == pytest.approx(6 * 150 / 60 * MS)


def test_pause_of_a_rank_that_the_others_notice_some_steps_later_is_that_ranks():
    pauses = np.arange(10, 100, 15)
    durations = np.full((3, 100), 100.0)
    durations[0, pauses] = 400.0
    durations[1:, pauses + 2] = 400.0  # their hosts ran ahead
    frame = pl.concat([_steps(each.tolist(), rank) for rank, each in enumerate(durations)])
    collected = np.zeros((3, 100))
    collected[0, pauses] = 300.0
    counters = pl.concat(
        [_counter(_steps(durations[rank].tolist(), rank), "step_gc_ns", collected[rank]) for rank in range(3)]
    )
    (finding,) = find_pauses(frame, counters, _no_calls).findings
    assert (finding.component_id, finding.cause) == ("0", "garbage collection")


def test_one_huge_pause_counts_and_two_small_ones_do_not():
    one = counted(paused(QUIET, 0, 50, 1000.0), step_gc_ns=in_steps(QUIET, 0, 50, 1000.0))
    (finding,) = lost(one).findings
    assert "in one step" in finding.evidence[0]
    assert finding.confidence <= 0.5
    two = counted(paused(QUIET, 0, [40, 70]), step_gc_ns=in_steps(QUIET, 0, [40, 70]))
    assert lost(two).findings == []


def test_long_first_steps_are_said_apart_and_are_a_finding_only_if_most_of_the_time_is_lost_there():
    job = counted(paused(QUIET, 1, EVERY_TENTH), step_gc_ns=in_steps(QUIET, 1, EVERY_TENTH))
    (finding,) = lost(paused(job, range(4), [0, 1], 500.0)).findings
    assert finding.cost_ns == pytest.approx(PAUSE_MS / 10 * MS, rel=0.03)
    assert any("warm-up" in line for line in finding.evidence)
    assert lost(paused(QUIET, range(4), [0, 1], 500.0)).findings == []
    (start,) = lost(paused(QUIET, range(4), 0, 5000.0)).findings
    assert (start.class_, start.component_id, start.cause) == ("pauses", "warm-up", "")
    compiled = counted(QUIET, step_compile_ns=in_steps(QUIET, range(4), 0, 5000.0))
    (start,) = lost(paused(compiled, range(4), 0, 5000.0)).findings
    assert start.cause == "compilation"
    assert fault_in_words([start]) == "compilation: the first 3 steps take 5 s more than typical ones."


def test_what_makes_steps_of_windows_longer_than_others_is_said():
    deep = [40, 41]
    job = paused(counted(QUIET, step_compile_ns=in_steps(QUIET, range(4), deep)), range(4), deep)
    _, steps, counters, _ = tables(job)
    window = pl.when(pl.col("step").is_in(deep)).then(0).otherwise(-1).cast(pl.Int32)
    assert done_in_windows(steps.with_columns(window=window), counters) == "compile code"
    others = pl.when(pl.col("step").is_in([60, 61])).then(0).otherwise(-1).cast(pl.Int32)
    assert done_in_windows(steps.with_columns(window=others), counters) == ""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("sigma", "tail"), [(0.01, 0.0), (0.05, 0.0), (0.1, 0.0), (0.05, 2.5)])
def test_noise_is_no_pause(seed, sigma, tail):
    assert lost(noisy(data_parallel(4, 300), seed, sigma, tail)).findings == []


def test_slow_rank_and_a_job_that_became_slower_have_no_pauses():
    assert lost(slower(QUIET, 1, 1.5)).findings == []
    became = QUIET
    for rank in range(4):
        became = slower(became, rank, 2.0, since=60)
    assert lost(became).findings == []
    assert lost(paused(QUIET, 1, np.arange(40, 60))).findings == []  # a slow spell


def test_hiccups_of_a_busy_machine_are_no_pauses():
    rng = np.random.default_rng(3)
    job, queued = QUIET, np.full((4, 100), 0.1)
    for step in rng.choice(np.arange(5, 100), 12, replace=False):
        rank = int(rng.integers(4))
        job = paused(job, rank, step, 100.0)
        queued += in_steps(QUIET, rank, step, 80.0)
    assert lost(counted(job, step_run_queue_ns=queued)).findings == []  # they waited for a core
    assert lost(job).findings == []  # nothing says what they are of; neither regular, nor of one rank


def test_what_follows_deep_windows_and_nothing_explains_is_not_the_jobs():
    job = paused(QUIET, 1, np.arange(9, 100, 10))
    collectives, steps, counters, _ = tables(job)
    inside = pl.col("step").is_between(pl.col("step") // 10 * 10 + 5, pl.col("step") // 10 * 10 + 6)
    windows = steps.with_columns(window=pl.when(inside).then(0).otherwise(-1).cast(pl.Int32))
    assert (
        find_pauses(windows, counters, lambda: own_time_of_all(calls_of(collectives), windows)).findings == []
    )
    (found,) = find_pauses(steps, counters, lambda: own_time_of_all(calls_of(collectives), steps)).findings
    assert found.component_id == "1"


def test_pause_of_a_host_that_runs_ahead_of_its_gpu_costs_what_the_gpu_stands_idle():
    """Every tenth step collects garbage for 200 ms, 120 of which the launch queue covers."""
    everybody = range(4)
    job = counted(paused(QUIET, everybody, EVERY_TENTH), step_gc_ns=in_steps(QUIET, everybody, EVERY_TENTH))
    collectives, steps, counters, _ = tables(job)
    own = own_time_of_all(calls_of(collectives), steps)
    device = pl.when(pl.col("step").is_in(EVERY_TENTH.tolist())).then(180 * MS).otherwise(100 * MS)
    (finding,) = find_pauses(steps.with_columns(gpu_step_ns=device), counters, lambda: own).findings
    assert finding.component_id == "garbage collection"
    assert finding.cost_ns == pytest.approx(8 * MS)
    covered = steps.with_columns(gpu_step_ns=pl.lit(100 * MS))
    assert find_pauses(covered, counters, lambda: own).findings == []


def test_few_steps_show_no_pauses():
    assert lost(paused(data_parallel(2, 8), 0, [4, 6])).findings == []
    assert find_pauses(STEPS.empty(), COUNTERS.empty(), _no_calls).findings == []


def test_steps_that_pauses_explain_name_no_slow_rank():
    late = np.arange(7, 100, 5)
    job = counted(paused(QUIET, 2, late, 100.0), step_gc_ns=in_steps(QUIET, 2, late, 100.0))
    collectives, steps, counters, workers = tables(job)
    calls = calls_of(collectives)
    known = find_pauses(steps, counters, lambda: own_time_of_all(calls, steps))
    assert known.steps == late.tolist()
    rest = own_time(calls, steps).filter(~pl.col("step").is_in(known.steps))
    assert find_late_ranks(rest, calls, counters, workers, doubtful=False) == []


@settings(max_examples=25, deadline=None)
@given(
    period=st.integers(3, 20),
    phase=st.integers(4, 20),
    rank=st.integers(0, 3),
    times=st.floats(1.0, 50.0),
)
def test_cost_is_what_was_added_whatever_period_phase_rank_and_length(period, phase, rank, times):
    at = np.arange(phase, 100, period)
    added = times * 40.0
    job = counted(paused(QUIET, rank, at, added), step_checkpoint_ns=in_steps(QUIET, rank, at, added))
    (finding,) = lost(job).findings
    assert finding.ranks == (rank,)
    assert finding.cost_ns == pytest.approx(added * at.size / 100 * MS, rel=0.06)
    assert 0 < finding.severity < 1
    if at.size >= 3:
        assert f"every {period}" in finding.evidence[0]


def _no_calls() -> pl.DataFrame:
    return pl.DataFrame(schema={"rank": pl.Int32, "step": pl.Int64, "own_ns": pl.Int64})


def _steps(durations_ms: list[float], rank: int = 0) -> pl.DataFrame:
    lasted = np.round(np.array(durations_ms) * MS).astype(np.int64)
    starts = np.concatenate([[0], lasted.cumsum()[:-1]]) + 10**18
    rows = {"step": np.arange(lasted.size), "start_ns": starts, "duration_ns": lasted}
    return conform(STEPS, pl.DataFrame(rows).with_columns(rank=pl.lit(rank), window=pl.lit(-1)))


def _counter(steps: pl.DataFrame, name: str, values_ms) -> pl.DataFrame:
    rows = steps.select("rank", pl.lit(name).alias("counter"), time_ns="start_ns")
    return conform(COUNTERS, rows.with_columns(value=pl.Series(values_ms, dtype=pl.Float64) * MS))


def test_what_a_rank_does_after_its_last_call_is_one_pause_though_two_steps_show_it():
    half = [Pause(9, 150.0, 150.0, "unknown wait", 0.0, ()), Pause(10, 150.0, 150.0, "checkpoint", 1.0, (1,))]
    (whole,) = merged(half)
    assert (whole.step, whole.longer_ns, whole.lost_ns) == (9, 300.0, 300.0)
    assert (whole.kind, whole.ranks) == ("checkpoint", (1,))


def test_pauses_in_a_row_of_other_kinds_or_other_ranks_stay_apart():
    first = Pause(9, 150.0, 150.0, "checkpoint", 1.0, (0,))
    for second in (
        replace(first, step=11),
        replace(first, step=10, kind="validation"),
        replace(first, step=10, ranks=(1,)),
    ):
        assert merged([first, second]) == [first, second]


@pytest.mark.parametrize(("short", "share"), [(60.0, "13%"), (200.0, "33%")])
def test_a_validation_of_all_ranks_is_described_and_no_fault(short, share):
    job = counted(
        paused(QUIET, range(4), EVERY_TENTH, short),
        step_no_grad_ns=in_steps(QUIET, range(4), EVERY_TENTH, short),
    )
    found = lost(job)
    assert found.findings == []
    assert found.described[0].startswith(f"all ranks validate (work without gradients) for {short:.0f}")
    assert found.described[0].endswith(f"in every 10th step: {share} of the wall time")
    assert set(EVERY_TENTH) <= {*found.steps}


def enqueued(host_ms, extra_ms: float, waits: bool = True) -> LostTime:
    """Steps of 72 ms on two GPUs, whose hosts enqueue them in less, and wait for them in every fifth step.

    Args:
        host_ms: of a step, by rank.
        extra_ms: by which the GPUs' step after a wait is longer.
    """
    number = np.arange(100)
    after_wait = (number % 5 == 1) & (number > 1)
    device_ms = np.where(after_wait, 72 + extra_ms, 72.0)
    rows = []
    for rank, enqueues_ms in enumerate(host_ms):
        host = np.where(after_wait, 5 * 72 - 4 * enqueues_ms if waits else enqueues_ms, enqueues_ms)
        begin = np.cumsum(np.append(0, host))[:-1]
        rows += [
            {
                "rank": rank,
                "step": step,
                "start_ns": int(begin[step] * MS),
                "duration_ns": int(host[step] * MS),
                "gpu_step_ns": int(device_ms[step] * MS),
            }
            for step in number
        ]
    steps = conform(STEPS, pl.DataFrame(rows))
    return find_pauses(steps, conform(COUNTERS, pl.DataFrame()), lambda: OWN)


def test_gpus_that_wait_for_new_work_after_their_hosts_have_waited_for_them_are_a_pause_of_its_own():
    (finding,) = (found := enqueued([30, 30], 29)).findings
    assert finding.component_id == EMPTY_QUEUE
    assert "the job keeps GPUs waiting for new work for 29 ms in every 5th step" in finding.evidence[0]
    assert "`.item()`" in finding.remedy
    assert not found.kept_waiting  # no rank more than the other


def test_the_rank_whose_host_takes_longest_to_enqueue_a_step_is_named_with_what_that_costs():
    found = enqueued([3, 24], 22)
    (finding,) = found.findings
    assert (finding.cause, finding.ranks) == (EMPTY_QUEUE, (1,))
    wait_ns, often, cost_ns = found.kept_waiting[1]
    assert wait_ns == pytest.approx(22 * MS, rel=0.1)
    assert often == "in every 5th step"
    assert cost_ns == pytest.approx(22 / 5 * MS, rel=0.1)


@pytest.mark.parametrize(("extra_ms", "waits"), [(60, True), (22, False)])
def test_gpus_that_wait_for_longer_than_a_step_is_enqueued_in_or_without_a_wait_before_are_no_such_pause(
    extra_ms, waits
):
    found = enqueued([3, 24], extra_ms, waits)
    assert all(finding.cause != EMPTY_QUEUE != finding.component_id for finding in found.findings)
    assert not found.kept_waiting
