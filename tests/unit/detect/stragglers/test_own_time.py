"""Ranks that others wait for, found in the times of calls of made-up jobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dpro.detect.findings import Finding
from dpro.detect.significance import MIN_COST
from dpro.detect.stragglers.causes import CPU, NEARLY_AS_LATE, WAITING_CODE
from dpro.detect.stragglers.excess import Excess, Team, late_columns
from dpro.detect.stragglers.from_calls import (
    HOSTS_ONLY,
    cannot_show,
    finding_of,
    slowdown_with,
    team_of,
)
from dpro.detect.stragglers.own_time import (
    AlwaysOn,
    calls_of,
    on_one_clock,
    outside_calls,
    own_time,
    teams_by_calls,
)
from dpro.extensions.watch.late import LatestRecords, OwnTimes
from dpro.schema import CLOCK_SAMPLES, COUNTERS, PASSES, STEPS, WORKERS, conform
from tests.unit.detect.calling import (
    MS,
    Job,
    Section,
    counted,
    data_parallel,
    late_ranks,
    noisy,
    slower,
    tables,
    tensor_and_data_parallel,
)


def named(job: Job) -> list[str]:
    return [finding.component_id for finding in late_ranks(*tables(job))]


def own_ms(job: Job) -> np.ndarray:
    """[T, R] ms of own work per step."""
    collectives, steps, _, _ = tables(job)
    own = own_time(calls_of(collectives), steps)
    return own.sort("step", "rank")["own_ns"].to_numpy().reshape(-1, job.factors.shape[0]) / MS


@pytest.mark.parametrize("blocks", [False, True])
def test_own_time_of_a_step_is_its_work_without_the_wait_for_a_slower_rank(blocks):
    job = slower(noisy(data_parallel(3, 12, blocks=blocks), 1, 0.01), 1, 1.5)
    own = np.median(own_ms(job), axis=0)
    assert own == pytest.approx([41, 61, 41], rel=0.03)


def test_messages_that_go_as_one_are_no_calls_of_their_whole_group():
    collectives, steps, _, _ = tables(noisy(data_parallel(4, 12), 3, 0.01))
    of_pair = collectives.filter(pl.col("rank") < 2)
    sent = of_pair.with_columns(op=pl.lit("nccl:coalesced"), sequence=pl.col("sequence") + pl.col("rank"))
    both = pl.concat([collectives, sent.with_columns(enqueued_ns=pl.col("enqueued_ns") + 2 * MS)])
    assert calls_of(both).sort("rank", "sequence").equals(calls_of(collectives).sort("rank", "sequence"))
    assert own_time(calls_of(both), steps).equals(own_time(calls_of(collectives), steps))


def test_hosts_that_make_their_next_call_before_the_last_has_come_do_not_wait_for_it():
    job = slower(noisy(data_parallel(3, 12, buckets=4), 1, 0.01), 1, 2.0)
    assert np.median(own_ms(job), axis=0) == pytest.approx([41, 81, 41], rel=0.03)


def test_rank_that_works_longer_is_named_with_what_the_others_wait_for_it():
    [finding] = late_ranks(*tables(slower(noisy(data_parallel(4, 12), 3, 0.01), 2, 1.25)))
    assert (finding.component_kind, finding.component_id, finding.ranks) == ("rank", "2", (2,))
    assert finding.cost_ns == pytest.approx(10 * MS, rel=0.15)
    assert finding.confidence > 0.6
    assert "rank 2 takes" in finding.evidence[0]
    values = {one.kind: one.values for one in finding.observations}
    assert values["longer-work"]["longer_ns"] == pytest.approx(10 * MS, rel=0.15)
    assert values["waited-for"]["waited_ns"] == finding.cost_ns
    assert values["waited-for"]["own_wait_ns"] == 0
    assert any(said.endswith("; it waits for none") for said in finding.evidence)


def nearly_as_late() -> Job:
    """Rank 4 takes 12% more than most in each step, and some other rank still more: no rank waits for it."""
    job = slower(data_parallel(6, 24), 4, 1.12)
    for step in range(24):
        job.factors[step % 4, step] *= 1.35
    return job


def test_a_rank_that_costs_nothing_now_is_said_to():
    findings = late_ranks(*tables(nearly_as_late()))
    [finding] = [each for each in findings if each.component_id == "4"]
    assert finding.cost_ns == 0
    assert "none of it for rank 4 alone: it costs nothing now" in finding.evidence[1]
    assert finding.confidence <= 0.5


def watched(job: Job, longer_by: float = 0.0) -> tuple[list[Finding], list[Finding]]:
    """What a watcher finds, and what is unclear to it, of a job on one host whose training threads are idle.

    Args:
        longer_by: share by which all steps are longer from step 20 on.
    """
    collectives, steps, counters, _ = tables(job)
    ranks = steps["rank"].unique().sort()
    workers = conform(WORKERS, pl.DataFrame({"rank": ranks, "host": ["a"] * len(ranks)}))
    calls = calls_of(collectives).rename({"time_ns": "enqueued_ns"})
    idle = steps.select("rank", host=pl.lit("a"), time_ns="start_ns", counter=pl.lit(CPU), value=pl.lit(1e6))
    longer = pl.col("duration_ns") * (1 + longer_by)
    steps = steps.with_columns(duration_ns=pl.when(pl.col("step") < 20).then("duration_ns").otherwise(longer))
    counters = pl.concat([counters, conform(COUNTERS, idle)])
    latest = {STEPS.name: steps, PASSES.name: PASSES.empty(), COUNTERS.name: counters}
    none = CLOCK_SAMPLES.empty()
    times = OwnTimes()
    found = times.look(LatestRecords(calls, steps, workers, none, counters, False, lambda _: latest))
    return found, times.unclear


def test_a_watcher_raises_no_alarm_at_what_costs_nothing():
    assert watched(nearly_as_late()) == ([], [])


@pytest.mark.parametrize(("longer_by", "named"), [(0.0, ["1"]), (0.3, [])])
def test_a_watcher_blames_no_rank_for_a_wait_that_came_when_all_became_slower_by_more(longer_by, named):
    """Rank 1 waits 4 ms more since step 20, in no code that is known; all may take 12 ms more since then."""
    job = noisy(data_parallel(4, 40), 3, 0.01)
    job.factors[1, 20:] *= 1.1
    found, unclear = watched(job, longer_by)
    assert [one.component_id for one in found] == named
    assert [one.component_id for one in unclear] == ([] if named else ["1"])
    assert {one.cause for one in (*found, *unclear)} == {WAITING_CODE}


def test_steps_are_compared_from_where_a_rank_became_late():
    steps = pl.DataFrame({"step": range(20), "duration_ns": [100] * 12 + [160] * 8})
    own = {"step": [*range(20)] * 3, "rank": [0] * 20 + [1] * 20 + [2] * 20}
    since = pl.DataFrame(own | {"own_ns": [50] * 20 + [50] * 12 + [70] * 8 + [50] * 20})
    assert slowdown_with(since, steps, 1) == 60
    always = pl.DataFrame(own | {"own_ns": [50] * 20 + [70] * 20 + [50] * 20})
    assert slowdown_with(always, steps, 1) == 0
    assert slowdown_with(since.filter(pl.col("step") < 14), steps, 1) == 0  # too few since then


def test_how_much_longer_a_rank_takes_is_never_less_than_nothing():
    # Its ratio to its peers is above 1 in the middle, while it takes less in more than half of the steps.
    own = np.full((10, 3), 100.0 * MS)
    own[:6, 1], own[6:, 1] = 99.0 * MS, 130.0 * MS
    team = Team([0, 1, 2], np.arange(10), own, np.zeros_like(own), np.zeros_like(own, dtype=np.int64))
    longer = Excess(1, 10, 0.05, 0.001, 0.9)
    finding = finding_of(team, longer, COUNTERS.empty(), WORKERS.empty())
    assert "takes 4.83 ms (5.1%) more" in finding.evidence[0]
    assert finding.observations[0].values["longer_share"] == pytest.approx(0.0513, rel=0.01)  # e^0.05 - 1


@pytest.mark.parametrize("rank", range(4))
def test_lateness_that_a_rank_inherits_from_another_group_is_not_its_own(rank):
    assert named(slower(noisy(tensor_and_data_parallel(14), 5, 0.01), rank, 1.3)) == [str(rank)]


@pytest.mark.parametrize("hosts", [2, 4])
def test_ranks_whose_hosts_never_wait_are_not_blamed(hosts):
    job = slower(noisy(data_parallel(hosts, 14), 7, 0.01), 1, 1.3)
    assert named(Job(job.sections, job.factors, hosts_wait=False)) == []


def test_that_a_gpu_may_be_slow_unseen_is_said():
    gpus = pl.DataFrame({"rank": [0, 1], "gpu_uuid": ["a", "b"]})
    collectives, *_, workers = tables(data_parallel(2, 3), gpus)
    assert cannot_show(collectives, workers) == [HOSTS_ONLY]
    assert cannot_show(collectives, tables(data_parallel(2, 3))[-1]) == []


def test_uneven_stages_are_no_peers_of_each_other():
    sections = [Section(20.0, [[0, 1], [2, 3]], False)] * 2
    job = slower(slower(noisy(Job(sections, np.ones((4, 14, 2))), 2, 0.01), 2, 1.5), 3, 1.5)
    assert named(job) == []


def test_lateness_is_called_doubtful_where_waits_for_messages_are_not_seen():
    stages = pl.DataFrame({"rank": [0, 1], "pp": [0, 0]})
    [finding] = late_ranks(*tables(slower(noisy(data_parallel(2, 14), 2, 0.01), 1, 1.5), stages))
    assert finding.confidence <= 0.5
    assert "not known: whether it is the first cause" in finding.evidence[-1]


@pytest.mark.parametrize(
    ("counter", "class_", "cause"),
    [
        ("step_data_wait_ns", "slow.host", "the input pipeline"),
        ("step_gc_ns", "slow.host", "garbage collection"),
        ("step_run_queue_ns", "slow.host", "CPU contention"),
        ("step_training_thread_cpu_ns", "slow.compute", ""),
    ],
)
def test_cause_is_what_its_host_counted_more_of(counter, class_, cause):
    job = slower(noisy(data_parallel(2, 14), 2, 0.01), 1, 1.5)
    times = np.full((2, 14), 5.0)
    others = {"step_gc_ns": times, "step_training_thread_cpu_ns": times}
    spent = times.copy()
    spent[1] += 18
    [finding] = late_ranks(*tables(counted(job, **(others | {counter: spent}))))
    assert (finding.class_, finding.cause) == (class_, cause)


@pytest.mark.parametrize(
    ("counters", "class_", "cause"),
    [
        ({"step_run_queue_ns": 10.0, "step_training_thread_cpu_ns": 9.0}, "slow.compute", ""),
        ({"step_run_queue_ns": 16.0, "step_training_thread_cpu_ns": 1.0}, "slow.host", "CPU contention"),
        ({"step_run_queue_ns": 9.0, "step_cpu_ns": 18.0}, "slow.host", "another thread of its process"),
        ({"step_children_cpu_ns": 15.0}, "slow.host", "a process that it started"),
        ({"step_written_bytes": 1.0}, "slow.host", "waiting for a disk"),
        ({}, "slow.host", "host code that waits"),
    ],
)
def test_what_a_rank_does_itself_comes_before_that_it_waits_for_a_core(counters, class_, cause):
    job = slower(noisy(data_parallel(2, 14), 2, 0.01), 1, 1.5)
    times = {name: np.full((2, 14), 5.0) for name in ("step_training_thread_cpu_ns", "step_cpu_ns")}
    for name, more in counters.items():
        times[name] = times.get(name, np.zeros((2, 14))).copy()
        times[name][1] += more
    if "step_training_thread_cpu_ns" in counters:
        times["step_cpu_ns"] = times["step_training_thread_cpu_ns"]
    [finding] = late_ranks(*tables(counted(job, **times)))
    assert (finding.class_, finding.cause) == (class_, cause)


def test_two_ranks_of_four_that_are_late_together_are_named_together_with_what_both_cost():
    job = slower(slower(noisy(data_parallel(4, 24), 2, 0.01), 1, 2.0), 3, 1.98)
    [finding] = late_ranks(*tables(job))
    assert (finding.component_kind, finding.ranks) == ("ranks", (1, 3))
    assert finding.cost_ns == pytest.approx(40 * MS, rel=0.05)
    assert "fixing one of them alone saves" in finding.evidence[2]
    kinds = [one.kind for one in finding.observations]
    assert kinds[:3] == ["longer-work", "longer-work", "waited-for-together"]
    assert not {"waited-for", "nearly-as-late"} & {*kinds}
    assert finding.observations[2].values["waited_ns"] == finding.cost_ns


def test_of_two_late_ranks_one_that_is_far_later_is_named_by_itself():
    job = slower(slower(noisy(data_parallel(4, 24), 2, 0.01), 1, 3.0), 3, 1.2)
    findings = late_ranks(*tables(job))
    assert findings[0].ranks == (1,)
    assert findings[0].cost_ns == pytest.approx(72 * MS, rel=0.05)


@pytest.mark.parametrize(("where", "code"), [(0, True), (slice(None), False)])
def test_what_all_ranks_take_longer_between_steps_is_no_transfer_of_the_calls_within(where, code):
    job = noisy(data_parallel(2, 60, blocks=True), 1, 0.01)
    factors = job.factors.copy()
    factors[:, 30:, where] *= 2.0
    collectives, steps, _, _ = tables(replace(job, factors=factors))
    calls = calls_of(collectives.with_columns(bytes_in=pl.lit(64, pl.Int64)))
    assert outside_calls(calls, steps, [0, 1], 30) is code


def test_rank_that_sleeps_is_late_by_its_host():
    job = slower(noisy(data_parallel(2, 14), 2, 0.01), 1, 1.5)
    [finding] = late_ranks(*tables(counted(job, step_training_thread_cpu_ns=np.full((2, 14), 40.0))))
    assert finding.class_ == "slow.host"
    assert "sleeps or waits" in finding.evidence[2]


def test_steps_of_deep_windows_and_steps_unlike_most_do_not_count():
    collectives, steps, _, _ = tables(data_parallel(2, 12))
    extra = collectives.filter(sequence=16).with_columns(sequence=pl.lit(100, pl.Int64), op=pl.lit("barrier"))
    steps = steps.with_columns(window=pl.when(pl.col("step") == 8).then(0).otherwise("window"))
    own = own_time(calls_of(pl.concat([collectives, extra])), steps)
    assert 5 not in own["step"].to_list()  # has the barrier
    assert not {8, 9} & set(own["step"].to_list())  # was recorded in depth, and follows such a step
    assert {3, 4, 7, 11} <= set(own["step"].to_list())


def test_calls_of_which_a_member_is_missing_show_nothing_of_their_steps():
    collectives, steps, _, _ = tables(data_parallel(3, 12))
    lost = collectives.filter(~((pl.col("rank") == 1) & (pl.col("sequence") == 13)))
    own = own_time(calls_of(lost), steps)
    assert 4 not in own["step"].to_list()
    assert {3, 5} <= set(own["step"].to_list())


NOISES = {
    "1%": {"sigma": 0.01},
    "5%": {"sigma": 0.05},
    "10%": {"sigma": 0.10},
    "heavy tails": {"sigma": 0.05, "tail": 2.5},
}


def alarms(job: Job, size: int = 240, stride: int = 5) -> int:
    """How often a healthy job is called sick when it is looked at again and again while it runs."""
    collectives, steps, _, _ = tables(job)
    calls = calls_of(collectives)
    own = own_time(calls, steps)
    [ranks] = teams_by_calls(calls, own, {})
    whole = team_of(own, ranks)
    return sum(
        bool(late_columns(team_of(own.filter(pl.col("step").is_between(end - size, end)), ranks)))
        for end in whole.steps[10::stride]
    )


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_healthy_job_raises_nothing_however_often_it_is_looked_at(num_ranks, noise):
    assert alarms(noisy(data_parallel(num_ranks, 250, buckets=1), 11, **NOISES[noise])) == 0


def test_periodic_checkpoint_of_one_rank_raises_nothing():
    job = noisy(data_parallel(4, 250, buckets=1), 3, 0.03)
    job.factors[0, ::20] *= 6
    assert alarms(job) == 0


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("num_ranks", [2, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_long_healthy_job_raises_nothing(seed, num_ranks, noise):
    assert alarms(noisy(data_parallel(num_ranks, 1500, buckets=1), seed, **NOISES[noise]), stride=3) == 0


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
@pytest.mark.parametrize("blocks", [False, True])
def test_rank_that_takes_a_fifth_longer_is_named_within_ten_steps_and_no_other(num_ranks, blocks):
    """The first two steps of a recording are no whole ones."""
    for seed in range(3):
        job = slower(noisy(data_parallel(num_ranks, 62, blocks=blocks), seed, 0.02), 1, 1.2, since=52)
        assert named(job) == ["1"]


def test_what_costs_little_is_not_reported():
    assert all(
        finding.severity >= MIN_COST
        for finding in late_ranks(*tables(slower(noisy(data_parallel(2, 40), 1, 0.01), 1, 1.06)))
    )


def test_clocks_that_were_compared_make_hosts_comparable_and_others_are_left_out():
    job = slower(noisy(data_parallel(3, 14), 2, 0.01), 1, 1.5)
    hosts = pl.DataFrame({"rank": [0, 1, 2], "clock": ["a", "b", "c"], "host": ["a", "b", "c"]})
    collectives, steps, counters, workers = tables(job, hosts)
    ahead = 700 * MS
    moved = pl.when(pl.col("rank") == 1).then(ahead).otherwise(0)
    now = int(steps["start_ns"].median()) + ahead  # type: ignore[arg-type]
    compared = {"rank": 1, "time_ns": now, "peer_rank": 0, "offset_ns": ahead, "round_trip_ns": 10_000}
    rows = AlwaysOn(
        collectives.with_columns(pl.col("enqueued_ns") + moved),
        steps.with_columns(pl.col("start_ns") + moved),
        counters, workers, conform(CLOCK_SAMPLES, pl.DataFrame([compared])),
    )  # fmt: skip
    aligned, apart = on_one_clock(rows)
    assert apart == [2]
    alone = aligned.collectives.with_columns(group_ranks=pl.lit("0,1"))
    [finding] = late_ranks(alone, aligned.steps, aligned.counters, aligned.workers)
    assert finding.ranks == (1,)
    assert finding.cost_ns == pytest.approx(20 * MS, rel=0.15)


def test_runs_without_calls_or_steps_show_nothing():
    collectives, steps, counters, workers = tables(data_parallel(2, 12))
    assert late_ranks(collectives.clear(), steps, counters, workers) == []
    assert late_ranks(collectives, steps.clear(), counters, workers) == []


def without(job: Job, rank: int) -> list[str]:
    """Who is named where nothing of a rank was recorded."""
    rows = [table.filter(pl.col("rank") != rank) for table in tables(job)]
    return [finding.component_id for finding in late_ranks(*rows)]


def test_slow_rank_is_named_where_another_was_not_recorded_at_all():
    assert without(slower(noisy(data_parallel(4, 14), 3, 0.01), 2, 1.3), rank=0) == ["2"]


@pytest.mark.parametrize("job", [data_parallel(4, 14), tensor_and_data_parallel(14)])
def test_no_rank_is_blamed_for_a_slow_rank_that_was_not_recorded(job):
    for rank in range(4):
        assert without(slower(noisy(job, 3, 0.01), rank, 1.5), rank) == []


def test_rank_that_is_much_slower_is_named_even_if_others_hide_it():
    job = noisy(data_parallel(5, 40, buckets=1), 1, 0.01)
    for step, busy in enumerate(np.random.default_rng(4).choice([0, 2, 3, 4], 40)):
        job.factors[busy, step] *= 2.5  # in each step another rank has much to do
    (finding,) = late_ranks(*tables(slower(job, 1, 1.8)))
    assert finding.component_id == "1"
    assert finding.severity < MIN_COST
    assert finding.observations[-1] == NEARLY_AS_LATE


def test_one_step_that_takes_far_longer_does_not_count_as_the_cost_of_a_slow_rank():
    job = slower(noisy(data_parallel(4, 40, blocks=True), 1, 0.01), 1, 1.25)
    (usual,) = late_ranks(*tables(job))
    job.factors[1, 33] *= 5  # as in a pause
    (finding,) = late_ranks(*tables(job))
    assert finding.cost_ns == pytest.approx(usual.cost_ns, rel=0.05)


def test_rank_that_became_a_little_slower_is_named_even_if_the_step_hardly_waits_for_it():
    job = noisy(data_parallel(8, 100, buckets=1), 3, 0.03)
    (finding,) = late_ranks(*tables(slower(job, 2, 1.05, since=80)))
    assert finding.component_id == "2"
    assert finding.severity < MIN_COST
    assert "it became slower: before, it took" in finding.evidence[1]
    assert late_ranks(*tables(slower(job, 2, 1.05))) == []  # as slow, but always was


def test_what_costs_little_may_be_a_wait_for_a_message_where_these_are_not_seen():
    job = slower(noisy(data_parallel(8, 100, buckets=1), 3, 0.03), 2, 1.05, since=80)
    assert late_ranks(*tables(job, pl.DataFrame({"rank": range(8), "pp": [0] * 8}))) == []
