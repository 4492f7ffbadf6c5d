import polars as pl

from dpro.replay.steps import host_facts, per_rank
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


def test_what_is_measured_in_long_steps_only_is_no_more_than_a_step():
    # Waits for a core are read every 5 ms: of nine steps of 3 ms and one of 30 the long one, for half.
    lengths = [3] * 9 + [30]
    starts = [sum(lengths[:at]) for at in range(10)]
    rows = [(0, at, start, length) for at, (start, length) in enumerate(zip(starts, lengths, strict=True))]
    known = counters((0, "step_run_queue_ns", starts[-1], 15.0))
    means = per_rank(host_facts(steps(*rows), known))
    assert means.select("duration_ns", "run_queue_ns").rows() == [(5.7, 2.85)]


def test_run_of_which_nothing_is_known_has_no_rows():
    assert host_facts(TWO_RANKS, counters((0, "gpu_power_w", 100, 300.0))).is_empty()
    assert per_rank(host_facts(TWO_RANKS, COUNTERS.empty())).is_empty()


def test_a_step_of_no_length_says_nothing_of_its_rank():
    none = steps((0, 1, 100, 0), (0, 2, 150, 70), (1, 1, 105, 0))
    known = counters((0, "step_gc_ns", 100, 4.0), (0, "step_gc_ns", 150, 8.0), (1, "step_gc_ns", 105, 9.0))
    assert per_rank(host_facts(none, known)).select("rank", "duration_ns", "gc_ns").rows() == [(0, 70, 8.0)]
