"""What requests would have seen of a changed server."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dpro.errors import UsageError
from dpro.replay.layouts.inputs.machine import machine_of
from dpro.replay.layouts.inputs.model import Model
from dpro.replay.serving.changes import CHANGES, Server, changed
from dpro.replay.serving.engine import Engine, IterationCost, serve
from dpro.replay.serving.fit import FORM_ERROR, FittedCost, fit_requests
from dpro.replay.serving.predict import FIGURES, answered, figures_of, predict
from dpro.replay.serving.sized import cost_of, scaled
from dpro.replay.serving.steady import token_s
from tests.unit.replay.serving.test_fit import TRUTH, arrivals

S = 1_000_000_000
SECOND = IterationCost(1.0, 0.0, 0.0)
LLAMA = Model(32, 4096, 32, 8, 128, 14336, 128256, 8192)


def one(prompt: int, output: int) -> Server:
    """A server with one request, whose iterations take a second."""
    requests = pl.DataFrame({"arrival_ns": [0], "prompt_tokens": [prompt], "output_tokens": [output]})
    return Server(requests, Engine(), SECOND)


@pytest.mark.parametrize("name", list(CHANGES))
def test_every_change_is_applied_as_its_example_says(name: str) -> None:
    before = Server(arrivals(10, 5.0), Engine(kv_tokens=90_000), TRUTH)
    after = changed(before, CHANGES[name].example)
    assert after is not before
    assert answered(after, 0.0)["end_ns"].min() > 0


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("max-bach:requests=2", "did you mean"),
        ("max-batch:requests=0", "from 1 on"),
        ("max-batch", "needs requests"),
        ("arrivals:rate=0", "more than 0"),
        ("prefix:share=1", "less than 1"),
        ("speculate:tokens=3,acceptance=2", "at most 1"),
        ("nano-batches:overlap=nan", "number from 0"),
        ("pools:prefill=1,decode=0", "decode"),
    ],
)
def test_bad_change_is_refused_in_one_line(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as error:
        changed(one(10, 3), text)
    assert "\n" not in str(error.value)


def test_pools_send_keys_and_values_before_decoding() -> None:
    # One iteration for the prompt; 100 tokens of 1e9 bytes over 100 GB/s take a second; then two decodes.
    served = answered(changed(one(100, 3), "pools:prefill=1,decode=1,gbps=100,kv=1e9"), 0.0)
    assert served.select(pl.col("first_token_ns", "end_ns") / S).row(0) == (1, 4)


def test_guessed_tokens_multiply_more_and_need_fewer_iterations() -> None:
    after = changed(one(10, 8), "speculate:tokens=3,acceptance=1")
    assert after.cost.per_decode == 4
    assert answered(after, 0.0)["end_ns"].item() == 3 * S  # the prompt with one token, then four, then three


def test_half_batches_hide_the_shorter_of_products_and_attention() -> None:
    cost = IterationCost(0.0, 2.0, 0.0, context_s=0.01)
    server = replace(one(100, 2), cost=cost)
    whole, halves = (
        answered(each, 0.0)["end_ns"].item() / S for each in (server, changed(server, "nano-batches"))
    )
    assert (whole, halves) == (5.0, 4.0)


def test_unchanged_server_is_predicted_as_it_was_measured() -> None:
    requests = serve(arrivals(40, 4.0), Engine(max_requests=8), TRUTH).requests
    fitted = fit_requests(requests, Engine(max_requests=8))
    measured = figures_of(requests)
    for figure in predict(requests, fitted, ["replicas:count=1"]):
        assert figure.predicted == pytest.approx(measured[figure.name])
        assert figure.low < figure.predicted < figure.high


def test_prediction_of_a_smaller_batch_holds_what_a_smaller_batch_gives() -> None:
    sent = arrivals(80, 6.0)
    requests = serve(sent, Engine(max_requests=16), TRUTH).requests
    fitted = fit_requests(requests, Engine(max_requests=16))
    truth = figures_of(serve(sent, Engine(max_requests=4), TRUTH).requests)
    said = {each.name: each for each in predict(requests, fitted, ["max-batch:requests=4"])}
    assert set(said) == set(FIGURES)
    for name in ("tpot_p50_ms", "tokens_per_s", "latency_p50_ms"):
        assert said[name].predicted == pytest.approx(truth[name], rel=0.05)


def test_draws_vary_as_much_as_the_fit_leaves_open() -> None:
    center = np.log([1e-3, 1e-2, 1e-5, 1e-5, 1e-8, 1e-9, 1.0, 1e-3])
    fitted = FittedCost(Engine(), TRUTH, 0.0, center, np.diag([0.0, 0.01] + [0.0] * 6), 0.0, 1)
    weights = np.log([cost.weights_s for cost, _ in fitted.draws(400)])
    assert np.std(weights) == pytest.approx(np.hypot(0.1, FORM_ERROR), rel=0.15)


def test_closed_form_equals_the_engine_that_clients_keep_busy() -> None:
    requests = pl.DataFrame(
        {"arrival_ns": [0] * 200, "prompt_tokens": [200] * 200, "output_tokens": [50] * 200}
    ).with_columns(output_tokens=pl.Series(np.random.default_rng(0).integers(40, 61, 200)))
    cost = IterationCost(1e-3, 1e-2, 1e-6, 1e-5, 1e-8, 1e-10, power=4.0)
    served = serve(requests, Engine(token_budget=8192, clients=8), cost).requests[40:160]
    measured = figures_of(served)["tpot_p50_ms"] / 1e3
    assert token_s(cost, 8, 200, 50) == pytest.approx(measured, rel=0.05)


def test_more_gpus_and_faster_memory_make_a_decode_faster() -> None:
    machine = machine_of("H100")
    alone, cut = (cost_of(LLAMA, machine, tp, "bf16") for tp in (1, 4))
    assert cut.weights_s == pytest.approx(alone.weights_s / 4)
    assert cut.host_s > alone.host_s  # all-reduces
    newer = cost_of(LLAMA, machine_of("H200"), 1, "bf16")
    assert newer.weights_s == pytest.approx(alone.weights_s * 3350 / 4800)
    assert scaled(TRUTH, alone, newer).weights_s == pytest.approx(TRUTH.weights_s * 3350 / 4800)


def test_layers_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(UsageError, match="32 heads"):
        cost_of(LLAMA, machine_of("H100"), 5, "bf16")


def test_more_decodes_read_more_experts() -> None:
    experts = replace(LLAMA, experts=64, experts_per_token=4, expert_ffn=1024)
    few, many = (cost_of(experts, machine_of("H100"), 1, "bf16", decodes).weights_s for decodes in (1, 64))
    assert many > 2 * few
