"""Samples and tokens of a step, from shapes."""

from __future__ import annotations

import json

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.mean_step import facts_of, mean_step_document, mean_step_of
from dpro.errors import Unanswerable
from dpro.opening import open_path
from dpro.replay.cost.work import find_inputs, inputs_of_calls
from dpro.schema import COUNTERS, MODEL_CALLS, conform
from dpro.store import open_run

STRETCHES = pl.DataFrame(
    {"rank": [0, 0], "window": [0, 0], "step": [3, 4], "start_ns": [100, 200], "end_ns": [200, 300]}
)


def _spans(*calls: tuple[str, object, int]) -> pl.DataFrame:
    rows = [
        (0, 0, "cpu_op", name, "" if shapes is None else json.dumps(shapes), at) for name, shapes, at in calls
    ]
    names = ["rank", "window", "kind", "name", "shapes", "start_ns"]
    return pl.DataFrame(rows, schema=names, orient="row")


TEXT = ("aten::embedding", [[50304, 768], [4, 1024], [], [], []])
POSITION = ("aten::embedding", [[1024, 768], [1, 1024], [], [], []])


def test_indices_of_the_largest_embedding_are_tokens_whatever_the_number_of_micro_batches():
    spans = _spans(*((*each, at) for at in (110, 150, 210, 250) for each in (TEXT, POSITION)))
    assert find_inputs(spans, STRETCHES).rows() == [(0, 8.0, 8192.0)]


def test_what_begins_outside_of_steps_does_not_count():
    assert find_inputs(_spans((*TEXT, 50), (*TEXT, 110), (*TEXT, 210)), STRETCHES).rows() == [
        (0, 4.0, 4096.0)
    ]


def test_images_are_samples_and_no_tokens():
    stem = ("aten::convolution", [[32, 3, 224, 224], [64, 3, 7, 7], [], [], []])
    later = ("aten::convolution", [[32, 64, 56, 56], [64, 64, 3, 3], [], [], []])
    spans = _spans((*stem, 110), (*later, 120), (*stem, 210), (*later, 220))
    assert find_inputs(spans, STRETCHES).rows() == [(0, 32.0, 0.0)]


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([("aten::mm", None, 110)], "without their shapes"),
        ([("aten::mm", [[8, 8], [8, 8]], 110)], "neither an embedding"),
        ([("aten::embedding", [[50304, 768], [16384], []], 110)], "neither an embedding"),  # flattened
        ([("aten::embedding", "torn", 110)], "neither an embedding"),
        (
            [
                ("aten::convolution", [[8, 3, 9, 9], [4, 3, 3, 3]], 110),
                ("aten::convolution", [[8, 3, 9, 9], [4, 3, 5, 5]], 110),
            ],
            "several convolutions",
        ),
    ],
)
def test_what_shapes_do_not_say_is_refused(calls, why):
    with pytest.raises(Unanswerable, match=why):
        find_inputs(_spans(*calls), STRETCHES)


def test_the_sample_without_shapes_has_elements_of_batches_and_says_why_no_more(repository):
    mean = mean_step_of(Analysis(open_run(repository / "sample_traces" / "slow_rank")))
    assert mean.samples_per_s is None
    assert (
        "samples and tokens are not known: operators were recorded without their shapes"
        in dict(facts_of(mean))["input"]
    )


def test_a_real_model_of_language_has_tokens_per_second(traces):
    document = mean_step_document(Analysis(open_path(traces / "single" / "h100_bert_pystack.json.gz")))
    assert document.rate_unknown == ""
    assert document.tokens_per_s == pytest.approx(141 * document.samples_per_s)  # sequences of 141


# By calls of the model.


def _called(shapes: object, dtypes: object, **row: object) -> dict:
    return {"rank": 0, "model": 0, "parameters": 10, "shapes": shapes, "dtypes": dtypes} | row


def _of(*calls: dict, backward: float = 1.0) -> pl.DataFrame:
    counters = pl.DataFrame({"rank": [0], "counter": ["step_backward_calls"], "value": [backward]})
    return inputs_of_calls(
        conform(MODEL_CALLS, pl.DataFrame(list(calls), schema_overrides=MODEL_CALLS.dtypes)),
        conform(COUNTERS, counters),
    )


@pytest.mark.parametrize(
    ("shapes", "dtypes", "samples", "tokens"),
    [
        ([[4, 128]], ["int64"], 4, 512),
        ([[4, 128], [4, 1, 128, 128]], ["int32", "bool"], 4, 512),  # a mask
        ([[32, 3, 224, 224], [32]], ["float32", "int64"], 32, 0),
        ([[16, 20]], ["bfloat16"], 16, 0),
    ],
)
def test_what_a_model_is_given_says_samples_and_tokens(shapes, dtypes, samples, tokens):
    assert _of(_called(shapes, dtypes)).rows() == [(0, samples, tokens)]


def test_each_backward_call_has_the_mean_of_the_calls_that_were_met():
    calls = (_called([[4, length]], ["int64"]) for length in (100, 200))
    assert _of(*calls, backward=3.0).rows() == [(0, 12.0, 1800.0)]


def test_a_loss_is_no_model():
    loss = _called([[4, 10], [4]], ["float32", "int64"], model=1, parameters=0)
    assert _of(_called([[4, 128]], ["int64"]), loss).rows() == [(0, 4.0, 512.0)]


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([_called([[4, 8]], ["int64"], parameters=0)], "no call"),
        ([_called([[4, 8]], ["int64"]), _called([[4, 8]], ["int64"], model=1)], "several models"),
        ([_called([[4, 8], [4, 9]], ["int64", "int64"])], "neither one"),  # encoder and decoder
        ([_called([[4, 8], [4, 3, 9, 9]], ["int64", "float32"])], "neither one"),  # text with images
        ([_called([[4, 8, 9]], ["float32"])], r"float32 \[4, 8, 9\]"),
        ([_called([], [])], "none"),
        ([_called([[4, 8]], ["int64"], rank=1)], "how often"),
    ],
)
def test_what_does_not_say_it_is_refused(calls, why):
    with pytest.raises(Unanswerable, match=why):
        _of(*calls)
