import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.replay.gradient_buckets import Buffers, buffers_of, calls_by_pass, gradient_moments, gradient_passes
from dpro.replay.whatif.graph_ops.reductions import closing
from dpro.schema import BUCKETS
from tests.builders import TinyRun
from tests.ddp import ddp_job

IN_BACKWARD = Buffers([24, 16], [[16, 8], [16]], ((4,), (2,), (4,)), after_backward=False, is_zero=True)
AFTER = Buffers([24, 16], [[16, 8], [16]], ((4,), (2,), (4,)), after_backward=True, is_zero=True)


def calls(*begin_end, since=0, step=0):
    rows = [
        {"step": step, "bytes": num_bytes, "since": since, "span_id": 90 + k, "start_ns": a, "end_ns": b}
        for k, (a, b, num_bytes) in enumerate(begin_end)
    ]
    return pl.DataFrame(rows)


def accumulations(*begin_end):
    rows = [{"span_id": k, "start_ns": a, "end_ns": b} for k, (a, b) in enumerate(begin_end)]
    return pl.DataFrame(rows)


def test_a_buffer_is_reduced_in_the_hook_of_the_gradient_after_its_last():
    ready = accumulations((10, 12), (20, 22), (30, 40))  # the third one's hook reduces the first two
    moments = gradient_moments(calls((31, 38, 24), (50, 60, 16)), ready, IN_BACKWARD)
    assert moments["start_ns"].to_list() == [10, 20, 38]
    assert moments["end_ns"].to_list() == [12, 38, 60]
    assert moments["span_id"].to_list() == [0, 1, 2]


def test_after_backward_gradients_are_ready_when_it_has_ended_and_then_as_buffers_are_filled():
    ready = accumulations((10, 12), (20, 22), (30, 40))
    moments = gradient_moments(calls((50, 55, 24), (60, 66, 16)), ready, AFTER)
    assert moments["start_ns"].to_list() == [40, 50, 60]
    assert moments["end_ns"].to_list() == [40, 55, 66]


def test_gradients_of_the_micro_batch_before_are_not_of_the_pass():
    ready = accumulations((1, 2), (3, 4), (5, 6), (10, 12), (20, 22), (30, 40))
    moments = gradient_moments(calls((31, 38, 24), (50, 60, 16), since=8), ready, IN_BACKWARD)
    assert moments["span_id"].to_list() == [3, 4, 5]


def test_a_pass_with_other_gradients_than_recorded_is_refused():
    with pytest.raises(Unanswerable, match="has 2 gradients, not the 3"):
        gradient_moments(calls((31, 38, 24), (50, 60, 16)), accumulations((10, 12), (20, 22)), IN_BACKWARD)
    ready = accumulations((10, 12), (20, 22), (30, 40))
    with pytest.raises(Unanswerable, match="before all the gradients"):
        gradient_moments(calls((15, 16, 24), (50, 60, 16)), ready, IN_BACKWARD)


def test_passes_are_the_recorded_buffers_one_after_the_other():
    twice = pl.concat([calls((1, 2, 24), (3, 4, 16)), calls((5, 6, 24), (7, 8, 16))])
    assert [turn["start_ns"].to_list() for turn in calls_by_pass(twice, IN_BACKWARD)] == [[1, 3], [5, 7]]
    half = calls((1, 2, 12), (3, 4, 8))  # the same in another type
    assert len(calls_by_pass(half, IN_BACKWARD)) == 1
    for other in (calls((1, 2, 16), (3, 4, 24)), calls((1, 2, 24))):
        with pytest.raises(Unanswerable, match="do not match the recorded buffers"):
            calls_by_pass(other, IN_BACKWARD)


def bucket(number, source, module=0):
    return {
        "rank": 0, "module": module, "bucket": number, "bytes": 24, "parameters": [0, 1], "names": ["a", "b"],
        "parameter_bytes": [16, 8], "shapes": [[4], [2]], "hook": "", "source": source,
    }  # fmt: skip


def test_what_is_reduced_after_backward_and_who_updates_is_in_the_source(tmp_path):
    def read(name, *rows):
        run = TinyRun()
        run.rows[BUCKETS.name] += rows
        return buffers_of(run.write(tmp_path / name))

    found = read("one", bucket(0, "DeepSpeed ZeRO-1 buckets, after backward"))
    assert found == Buffers([24], [[16, 8]], ((4,), (2,)), after_backward=True, is_zero=True)
    plain = read("two", bucket(0, "DeepSpeed buckets, after backward"))
    assert (plain.after_backward, plain.is_zero) == (True, False)
    with pytest.raises(Unanswerable, match="experts"):
        read(
            "three",
            bucket(0, "DeepSpeed ZeRO-2 buckets"),
            bucket(0, "DeepSpeed ZeRO-2 buckets of experts", 1),
        )
    with pytest.raises(Unanswerable, match="does not record which gradients"):
        read("four", bucket(0, "Megatron-core buckets"))


def test_passes_of_a_job_are_those_that_a_ddp_job_of_the_same_buckets_has(tmp_path):
    job = ddp_job(sizes_kb=(512, 2048, 1024, 256), closes=(1, 3))
    plain = gradient_passes(job.build(tmp_path / "ddp").graph)
    for row in job.rows[BUCKETS.name]:
        row["source"] = "DeepSpeed ZeRO-2 buckets"
    found = gradient_passes(job.build(tmp_path / "zero").graph)
    assert len(found) == len(plain) == 6
    for ours, theirs in zip(found, plain):
        assert ours.parameters.num_bytes.tolist() == theirs.parameters.num_bytes.tolist()
        assert ours.closes.tolist() == theirs.closes.tolist()
        assert ours.transfer.tolist() == theirs.transfer.tolist()
        assert ours.parameters.is_update_sharded
        assert not theirs.parameters.is_update_sharded


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(1, 256))
def test_buffers_hold_no_more_than_fits_unless_one_gradient_is_larger(sizes, cap):
    closes = closing(np.array(sizes), cap, cap, closes_before=True)
    assert closes[-1] == len(sizes) - 1
    for first, last in zip([0, *(closes[:-1] + 1)], closes):
        held = sum(sizes[first : last + 1])
        assert held <= cap or first == last
        assert last == len(sizes) - 1 or held >= cap or held + sizes[last + 1] > cap
