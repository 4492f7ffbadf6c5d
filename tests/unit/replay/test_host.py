import polars as pl

from dpro.replay.host import host_facts, per_rank
from dpro.schema import COUNTERS, STEPS, conform


def steps(*rows):
    frame = pl.DataFrame(rows, schema=["rank", "step", "start_ns", "duration_ns"], orient="row")
    return conform(STEPS, frame)


def counters(*rows):
    return conform(COUNTERS, pl.DataFrame(rows, schema=["rank", "counter", "time_ns", "value"], orient="row"))


TWO_RANKS = steps((0, 1, 100, 50), (0, 2, 150, 70), (1, 1, 105, 60))


def test_facts_belong_to_the_step_that_starts_at_their_time():
    known = counters((0, "step_gc_ns", 150, 7.0), (1, "step_gc_ns", 105, 9.0), (0, "data_wait_ns", 150, 3.0))
    facts = host_facts(TWO_RANKS, known)
    assert facts.select("rank", "step", "gc_ns").rows() == [(0, 1, None), (0, 2, 7.0), (1, 1, 9.0)]
    assert facts["data_wait_ns"].to_list() == [None] * 3  # a single wait is no step's total


def test_mean_of_a_rank_is_over_the_steps_that_were_measured():
    known = counters((0, "step_gc_ns", 100, 4.0), (0, "step_gc_ns", 150, 8.0), (1, "step_cpu_ns", 105, 9.0))
    means = per_rank(host_facts(TWO_RANKS, known))
    assert means.select("rank", "steps", "duration_ns", "gc_ns", "cpu_ns").rows() == [
        (0, 2, 60.0, 6.0, None),
        (1, 1, 60.0, None, 9.0),
    ]


def test_run_of_which_nothing_is_known_has_no_rows():
    assert host_facts(TWO_RANKS, counters((0, "gpu_power_w", 100, 300.0))).is_empty()
    assert per_rank(host_facts(TWO_RANKS, COUNTERS.empty())).is_empty()
