"""Steps guessed from what repeats."""

from __future__ import annotations

import polars as pl
import pytest

from dpro.ingest.derived import guess_steps, repetitions

STEP = ["zero_grad", "embed", "linear", "relu", "linear", "loss", "adam"]


def _spans(names: list[str], *, kind: str = "cpu_op", every: int = 10, slow: int = -1) -> pl.DataFrame:
    """One span after the other; each has a child of its own name within it."""
    rows, now = [], 0
    for number, name in enumerate(names):
        rows += [(name, now, every - 2), (f"child of {name}", now + 1, 2)]
        now += every * (50 if number == slow else 1)
    frame = pl.DataFrame(
        rows, schema={"name": pl.String, "start_ns": pl.Int64, "duration_ns": pl.Int64}, orient="row"
    )
    same = {"pid": 1, "tid": 2, "stream": 7, "sequence_number": -1, "forward_thread": 0, "correlation": -1}
    columns = {key: pl.lit(value) for key, value in same.items()}
    return frame.with_columns(kind=pl.lit(kind), span_id=pl.int_range(pl.len()), **columns)


@pytest.mark.parametrize("kind", ["cpu_op", "kernel"])
def test_three_equal_rounds_are_three_steps(kind):
    assert repetitions(_spans(STEP * 3, kind=kind)) == [(0, 70), (70, 140), (140, 208)]


def test_a_round_that_the_window_cuts_is_left_out():
    assert repetitions(_spans(STEP * 3 + STEP[:4])) == [(0, 70), (70, 140), (140, 210)]


def test_two_rounds_are_not_enough():
    assert repetitions(_spans(STEP * 2)) == []


def test_equal_layers_within_one_step_are_no_steps():
    layer = ["norm", "linear", "attention", "linear", "relu", "linear"]
    assert repetitions(_spans(["embed", "position", "mask", *layer * 12, "head", "loss", "adam"])) == []


def test_work_that_does_not_repeat_has_no_steps():
    assert repetitions(_spans([f"op {number}" for number in range(40)])) == []
    assert repetitions(_spans([])) == []


def test_layers_with_a_short_head_and_tail_are_no_steps_where_several_steps_repeat():
    layer = [f"op {number}" for number in range(30)]
    assert len(repetitions(_spans(["embed", *layer * 8, "head"] * 3))) == 3


@pytest.mark.parametrize("waits_of", [(0, 1, 2), (0, 2)])
def test_the_last_round_lasts_as_long_as_its_host_waits_for_the_device_if_all_rounds_end_so(waits_of):
    rounds = _spans(STEP * 3).with_columns(
        start_ns=pl.col("start_ns") + 200 * (pl.col("start_ns") // 70)  # 270 each: the last one seems short
    )
    waits = _spans(["cudaDeviceSynchronize"] * 3, kind="runtime").filter(pl.col("name") != "child of")
    waits = waits.filter(pl.col("name") == "cudaDeviceSynchronize").with_columns(
        start_ns=pl.Series([270 * number + 70 for number in range(3)]), duration_ns=pl.lit(195, pl.Int64)
    )[list(waits_of)]
    bounds = repetitions(pl.concat([rounds, waits]))
    assert bounds == ([(0, 270), (270, 540), (540, 805)] if len(waits_of) == 3 else [])


def test_what_precedes_the_rounds_of_a_loop_is_a_start_up():
    start = [f"init {number}" for number in range(9)]
    rounds = [*STEP[:-1], "autograd::engine::evaluate_function: adam"]
    assert repetitions(_spans([*start, *rounds * 3])) == [(90, 160), (160, 230), (230, 298)]


def test_equal_layers_behind_a_start_are_no_steps_since_no_layer_feeds_its_device_or_goes_back():
    assert repetitions(_spans(["embed", "position", "mask", *STEP * 12])) == []


def test_rounds_behind_a_start_that_repeat_layers_are_steps():
    layer = ["norm", "linear", "attention", "linear", "relu", "linear"]
    rounds = ["embed", *layer * 4, "head"] * 3
    start = [f"init {number}" for number in range(30)]
    assert repetitions(_spans([*start, *rounds], kind="kernel")) == [(300, 560), (560, 820), (820, 1078)]
    # What repeats as a whole is a layer, or part of one.
    assert repetitions(_spans([*start, *["norm", "linear", "relu", "add"] * 12], kind="kernel")) == []


def test_rounds_that_are_little_of_the_work_are_no_steps():
    start = _spans(["train"], kind="kernel", every=10_000)
    rounds = _spans([*["init"] * 4, *["read", *STEP] * 3], kind="kernel").with_columns(
        pl.col("start_ns") + 10_000
    )
    reads = rounds.filter(pl.col("name") == "read").with_columns(
        kind=pl.lit("memcpy"), name=pl.lit("Memcpy DtoH (Device -> Pageable)")
    )
    assert repetitions(pl.concat([start, rounds, reads])) == []
    assert len(repetitions(pl.concat([rounds, reads]))) == 3


def test_the_first_round_may_take_far_longer_than_the_others():
    ms = 1_000_000
    bounds = repetitions(_spans(STEP * 4, every=ms, slow=3))
    assert bounds[0] == (0, 56 * ms)
    assert len(bounds) == 4


def test_after_a_long_first_round_very_short_ones_may_be_layers():
    assert repetitions(_spans(STEP * 4, slow=3)) == []


def test_rounds_are_of_the_thread_that_runs_forward_though_another_one_has_more_operators():
    forward = _spans(STEP * 3, every=20).with_columns(sequence_number=pl.lit(1))
    backward = _spans(STEP * 6).with_columns(tid=pl.lit(3), forward_thread=pl.lit(-1))
    assert repetitions(pl.concat([forward, backward])) == [(0, 140), (140, 280), (280, 418)]


def test_steps_of_kernels_alone_begin_when_the_host_launches_their_first():
    kernels = _spans(STEP * 3, kind="kernel").with_columns(
        pl.col("start_ns") + 1_000, correlation=pl.int_range(pl.len())
    )
    calls = _spans(STEP * 3, kind="runtime").with_columns(correlation=pl.int_range(pl.len()))
    assert repetitions(pl.concat([kernels, calls])) == [(0, 70), (70, 140), (140, 208)]


def test_rounds_of_very_different_lengths_are_not_clear():
    assert repetitions(_spans(STEP * 3, slow=9)) == []


LOOP = [*STEP[:-1], "autograd::engine::evaluate_function: adam"]


def test_pauses_in_few_rounds_of_a_loop_do_not_hide_the_others():
    assert len(repetitions(_spans(LOOP * 20, slow=73))) == 20


def test_rounds_of_a_loop_that_often_pause_are_not_clear():
    rounds = [_spans(LOOP * 2, slow=9).with_columns(pl.col("start_ns") + 1_000 * at) for at in range(6)]
    assert repetitions(pl.concat(rounds)) == []


def test_pauses_between_equal_layers_are_no_steps():
    assert repetitions(_spans(STEP * 20, slow=73)) == []


def test_a_guess_says_that_it_is_one_and_marks_come_first():
    spans = _spans(STEP * 3)
    assert guess_steps(spans)["source"].to_list() == ["repetition"] * 3
    mark = spans.head(1).with_columns(kind=pl.lit("annotation"), name=pl.lit("ProfilerStep#5"))
    assert guess_steps(pl.concat([spans, mark]))["source"].to_list() == ["ProfilerStep"]
