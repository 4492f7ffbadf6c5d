import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.collectors.convert.tables import host_counters
from dpro.collectors.inside import records
from dpro.collectors.inside.records import Record
from dpro.collectors.inside.stepping import Boundary

# Steps end at 100, 200 and 300; after each the recorder itself takes 10.
ENDS = {0: Boundary(100, 110), 1: Boundary(200, 210), 2: Boundary(300, 310)}


def values(recorded, counter, ends=ENDS):
    rows = host_counters(recorded, ends).filter(pl.col("counter") == counter)
    return dict(rows.select("time_ns", "value").iter_rows())


def work(time, backward, collected=0, waited=-1):
    return Record(time, backward, collected, waited, records.WORK)


def test_value_of_a_step_is_what_was_added_between_its_ends():
    recorded = [work(101, 4), work(203, 8, 50), work(301, 13, 50)]
    assert values(recorded, "step_backward_calls") == {110: 4, 210: 5}
    assert values(recorded, "step_gc_ns") == {110: 50, 210: 0}


def test_long_work_of_the_recorder_counts_for_neither_step():
    recorded = [work(101, 4), work(203, 8, 50), work(209, 8, 90), work(301, 13, 95)]
    assert values(recorded, "step_gc_ns") == {110: 50, 210: 5}


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_step_that_was_not_measured_at_both_ends_is_unknown(missing):
    recorded = [work(101, 4), work(203, 8), work(301, 13)]
    del recorded[missing]
    assert list(values(recorded, "step_backward_calls")) == {0: [210], 1: [], 2: [110]}[missing]


def test_samples_between_steps_are_nobodys():
    recorded = [work(101, 4), work(150, 6), work(203, 8)]
    assert values(recorded, "step_backward_calls") == {110: 4}


def test_step_after_a_gap_in_the_numbers_is_unknown():
    recorded = [work(101, 4), work(203, 8), work(301, 13)]
    gap = {0: ENDS[0], 2: ENDS[1], 3: ENDS[2]}
    assert values(recorded, "step_backward_calls", gap) == {210: 5}


def cpu(time, process, thread=0, queued=0):
    return Record(time, process, thread, queued, records.CPU)


def test_steps_between_two_samples_have_their_shares_of_the_time_between_them():
    ends = {0: Boundary(100, 110), 1: Boundary(140, 150), 2: Boundary(240, 250), 3: Boundary(300, 310)}
    recorded = [cpu(101, 1000), cpu(241, 1024), cpu(301, 1028)]
    assert values(recorded, "step_cpu_ns", ends) == {110: 6, 150: 18, 250: 4}


def test_work_of_the_recorder_between_two_samples_is_in_no_step():
    before = [cpu(101, 4), cpu(205, -1, -1, -1), cpu(205, 5000), cpu(301, 5007)]
    assert values(before, "step_cpu_ns") == {210: 7}


def test_what_is_counted_in_each_step_is_not_spread():
    assert values([work(101, 4), work(301, 13)], "step_backward_calls") == {}


@given(st.data())
def test_clocks_that_are_read_at_some_ends_of_steps_give_the_same_totals(data):
    took = data.draw(st.lists(st.integers(0, 10**8), min_size=2, max_size=60))
    used = [data.draw(st.integers(0, each)) for each in took]
    now, total, ends, recorded = 1000, 500, {0: Boundary(1000, 1001)}, [cpu(1000, 500)]
    for step, (duration, own) in enumerate(zip(took, used, strict=True), start=1):
        now, total = now + 1 + duration, total + own
        ends[step] = Boundary(now, now + 1)
        recorded.append(cpu(now, total))
    some = [recorded[0], *(each for each in recorded[1:-1] if data.draw(st.booleans())), recorded[-1]]
    all_read, some_read = values(recorded, "step_cpu_ns", ends), values(some, "step_cpu_ns", ends)
    assert list(all_read.values()) == used
    assert some_read.keys() == all_read.keys()
    assert sum(some_read.values()) == pytest.approx(sum(used))


def test_what_the_kernel_does_not_report_has_no_row():
    recorded = [Record(101, 5, 3, -1, records.CPU), Record(203, 9, 6, -1, records.CPU)]
    assert values(recorded, "step_cpu_ns") == {110: 4}
    assert values(recorded, "step_training_thread_cpu_ns") == {110: 3}
    assert values(recorded, "step_run_queue_ns") == {}


def test_cpu_time_of_children_and_what_is_written_are_of_the_step():
    recorded = [Record(101, 7, 512, 0, records.CHILDREN), Record(203, 9, 1536, 0, records.CHILDREN)]
    assert values(recorded, "step_children_cpu_ns") == {110: 2}
    assert values(recorded, "step_written_bytes") == {110: 1024}


def test_waiting_for_data_is_unknown_before_there_was_a_loader():
    recorded = [work(101, 4), work(203, 8, waited=30), work(301, 13, waited=37)]
    assert values(recorded, "step_data_wait_ns") == {210: 7}


def test_long_intervals_are_rows_of_their_own():
    recorded = [
        Record(120, 60, 3, 0, records.LOADED),
        Record(220, 40, -1, 0, records.LOADED),
        Record(500, 7, 0, 0, records.COLLECTED),
    ]
    rows = host_counters(recorded, {}).sort("time_ns")
    assert rows.rows() == [
        ("DataLoader worker 3", "data_wait_ns", 120, 60.0),
        ("", "data_wait_ns", 220, 40.0),
        ("", "gc_pause_ns", 500, 7.0),
    ]


def test_elements_of_batches_are_counted_per_step_from_the_first_that_a_loader_hands_over():
    handed = [Record(101, 64, 0, 0, records.INPUT), Record(203, 160, 0, 0, records.INPUT)]
    recorded = [work(101, 4), handed[0], work(203, 8), handed[1], work(301, 13)]
    assert values(recorded, "step_input_elements") == {110: 96}
    assert values([work(101, 4), work(203, 8)], "step_input_elements") == {}


def test_what_is_done_beside_training_is_counted_per_step():
    recorded = [Record(101, 5, 7, 0, records.ASIDE), Record(203, 5, 40, 9, records.ASIDE)]
    assert values(recorded, "step_checkpoint_ns") == {110: 0}
    assert values(recorded, "step_no_grad_ns") == {110: 33}
    assert values(recorded, "step_compile_ns") == {110: 9}


def test_saves_and_beginnings_of_loaders_are_intervals():
    recorded = [
        Record(120, 30, 4096, 0, records.SAVED),
        Record(150, 20, -1, 0, records.SAVED),  # into something that is no file
        Record(180, 5, 4, 0, records.BEGUN),
        Record(190, 6, 2, 1, records.BEGUN),
    ]
    rows = host_counters(recorded, ENDS)
    assert rows.rows() == [
        ("", "checkpoint_save_ns", 120, 30.0),
        ("", "checkpoint_save_bytes", 120, 4096.0),
        ("", "checkpoint_save_ns", 150, 20.0),
        ("4 workers", "loader_start_ns", 180, 5.0),
        ("2 persistent workers", "loader_start_ns", 190, 6.0),
    ]
