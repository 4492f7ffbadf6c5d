"""What requests would have seen of a changed server."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from benchmarks.serving_checks.steady import first_token_s, prompt_s, token_s
from dpro.errors import Unanswerable, UsageError
from dpro.extensions.plan.model import Model
from dpro.extensions.serving import predict as search
from dpro.extensions.serving.changes import (
    CHANGES,
    FEWER_BYTES_ERROR,
    FEWER_BYTES_SAVE,
    GivenFacts,
    Server,
    changed,
)
from dpro.extensions.serving.engine import Engine, IterationCost, serve
from dpro.extensions.serving.fit import FORM_ERROR, FittedCost, fit_requests
from dpro.extensions.serving.predict import (
    FIGURES,
    Goal,
    ensure_served_as_recorded,
    figures_of,
    most_requests,
    predict,
    served_requests,
)
from dpro.extensions.serving.sized import ServedModel, cost_of, scaled
from dpro.replay.cost.machine import machine_of
from tests.unit.extensions.serving.test_fit import TRUTH, arrivals

S = 1_000_000_000
SECOND = IterationCost(1.0, 0.0, 0.0)
AZURE = pl.DataFrame(
    {
        "arrival_ns": [5 * S, 9 * S, 10 * S],
        "prompt_tokens": [374, 396, 879],
        "output_tokens": [44, 109, 55],
        "cached_tokens": [-1, -1, -1],
    }
)
LLAMA = Model(32, 4096, 32, 8, 128, 14336, 128256, 8192)
GOAL = Goal(500.0, 40.0)
ON_H100 = GivenFacts(ServedModel(LLAMA, "H100"))


def one(prompt: int, output: int) -> Server:
    """A server with one request, whose iterations take a second."""
    requests = pl.DataFrame({"arrival_ns": [0], "prompt_tokens": [prompt], "output_tokens": [output]})
    return Server(requests, Engine(), SECOND)


def known(engine: Engine) -> FittedCost:
    """A fit that left nothing open."""
    center = np.log([1e-3, 1.5e-2, 5e-5, 3e-5, 1e-7, 2e-9, 1.0, 1e-3])
    return FittedCost(engine, TRUTH, 1e-3, center, np.zeros((8, 8)), 0.0, 1)


@pytest.mark.parametrize("name", list(CHANGES))
def test_every_change_is_applied_as_its_example_says(name: str) -> None:
    given = GivenFacts(ServedModel(LLAMA, "H100"), {"AzureLLMInferenceTrace_conv.csv": AZURE})
    cost = replace(TRUTH, weights_s=0.006)
    before = Server(arrivals(10, 5.0), Engine(kv_tokens=90_000), cost, given=given)
    after = changed(before, CHANGES[name].example)
    assert after is not before
    assert served_requests(after, 0.0)["end_ns"].min() > 0


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("max-bach:requests=2", "did you mean"),
        ("max-batch:requests=0", "from 1 to 1,000,000,000, not 0"),
        ("max-batch", "needs requests"),
        ("arrivals:rate=0", "rate must be from 1e-09 to 1,000,000,000, not 0"),
        ("prefix:share=1", "less than 1"),
        ("speculate:tokens=3,acceptance=2", "acceptance must be from 0 to 1, not 2"),
        ("nano-batches:overlap=nan", "overlap must be from 0 to 1, not nan"),
        ("pools:prefill=1,decode=0", "decode"),
        ("device:name=H1000", "did you mean 'H100'"),
        ("requests:file=a,count=x", "count must be a whole number, not 'x'"),
    ],
)
def test_bad_change_is_refused_in_one_line(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as error:
        changed(one(10, 3), text)
    assert "\n" not in str(error.value)


def test_pools_send_keys_and_values_before_decoding() -> None:
    # One iteration for the prompt; 100 tokens of 1e9 bytes over 100 GB/s take a second; then two decodes.
    served = served_requests(changed(one(100, 3), "pools:prefill=1,decode=1,gbps=100,kv=1e9"), 0.0)
    assert served.select(pl.col("first_token_ns", "end_ns") / S).row(0) == (1, 4)


def test_guessed_tokens_multiply_more_and_need_fewer_iterations() -> None:
    after = changed(one(10, 8), "speculate:tokens=3,acceptance=1")
    assert after.cost.per_decode == 4
    assert (
        served_requests(after, 0.0)["end_ns"].item() == 3 * S
    )  # the prompt with one token, then four, then three


def test_any_number_of_tokens_may_be_guessed() -> None:
    after = changed(one(10, 8), "speculate:tokens=1000000000,acceptance=0.75")
    assert after.engine.tokens_per_decode == 4  # 1 / (1 - 0.75)


def test_tree_of_guesses_verifies_all_branches_and_begins_right_more_often() -> None:
    after = changed(one(10, 8), "speculate:tokens=2,acceptance=0.5,branches=3,first=0.8")
    assert after.cost.per_decode == 1 + 3 * 2
    assert after.engine.tokens_per_decode == pytest.approx(1 + 0.8 * (1 + 0.5))
    chain = changed(one(10, 8), "speculate:tokens=2,acceptance=0.5")
    assert chain.engine.tokens_per_decode == pytest.approx(1 + 0.5 + 0.25)
    with pytest.raises(UsageError, match="branches=, also give first="):
        changed(one(10, 8), "speculate:tokens=2,acceptance=0.5,branches=3")


def test_requests_of_one_token_have_no_time_per_token() -> None:
    with pytest.raises(Unanswerable, match="no time per token"):
        figures_of(served_requests(one(10, 1), 0.0))


def test_cached_share_of_a_prompt_is_not_computed() -> None:
    server = replace(one(10, 1), cost=IterationCost(0.0, 0.0, 1.0))  # a second a token
    assert served_requests(server, 0.0)["first_token_ns"].item() == 10 * S
    assert served_requests(changed(server, "prefix:share=0.25"), 0.0)["first_token_ns"].item() == 8 * S


def test_requests_come_closer_together_and_are_longer_by_their_factors() -> None:
    requests = pl.DataFrame(
        {"arrival_ns": [4, 10, 8], "prompt_tokens": [3, 4, 5], "output_tokens": [1, 2, 9]}
    )
    server = Server(requests, Engine(), SECOND)
    assert changed(server, "arrivals:rate=2").requests["arrival_ns"].to_list() == [4, 7, 6]
    assert changed(server, "prompts:length=2").requests["prompt_tokens"].to_list() == [6, 8, 10]
    assert changed(server, "outputs:length=0.5").requests["output_tokens"].to_list() == [1, 1, 4]


def test_more_tokens_than_can_be_replayed_are_refused_but_for_few_times_those_recorded(monkeypatch):
    server = one(10, 2)
    with pytest.raises(Unanswerable, match="20,000,000 tokens are more than are replayed"):
        changed(server, "outputs:length=10000000")
    monkeypatch.setattr("dpro.extensions.serving.changes.MAX_TOKENS", 1)
    assert changed(server, "prompts:length=4").requests["prompt_tokens"].to_list() == [40]
    with pytest.raises(Unanswerable):
        changed(server, "prompts:length=5")


def test_faster_parts_take_less_and_chunks_take_their_turn() -> None:
    cost = IterationCost(1.0, 4.0, 2.0, power=99.0)
    server = replace(one(10, 2), cost=cost)
    # The prompt takes 1 + 20 s, a decode 1 + 4; twice as fast a host, and products, take half of their parts.
    assert served_requests(server, 0.0)["end_ns"].item() / S == pytest.approx(21 + 5)
    faster = changed(server, "faster:compute=2,host=2")
    assert served_requests(faster, 0.0)["end_ns"].item() / S == pytest.approx(10.5 + 4.5)
    # Chunks of 4, 4 and 2 tokens: 1 + 8, 1 + 8, and 1 + 4 s, in which weights and tokens take as long.
    chunks = changed(server, "chunked-prefill:tokens=4")
    assert served_requests(chunks, 0.0)["first_token_ns"].item() / S == pytest.approx(
        9 + 9 + 1 + 4 * 2 ** (1 / 99)
    )


def test_requests_of_another_log_come_at_its_distances_with_its_lengths() -> None:
    server = replace(one(10, 3), requests=one(10, 3).requests + 7, given=GivenFacts(logs={"conv": AZURE}))
    after = changed(server, "requests:file=conv,count=2")
    assert after.requests.select(pl.exclude("cached_tokens")).rows() == [(7, 374, 44), (7 + 4 * S, 396, 109)]
    assert served_requests(after, 0.0)["output_tokens"].to_list() == [44, 109]


def test_log_without_lengths_is_refused() -> None:
    log = AZURE.with_columns(output_tokens=pl.lit(-1))
    with pytest.raises(Unanswerable, match="tokens of prompt and output"):
        changed(replace(one(10, 3), given=GivenFacts(logs={"log": log})), "requests:file=log")


def test_two_gpus_read_half_of_the_weights_each_and_reduce_between_layers() -> None:
    server = replace(one(100, 2), cost=replace(TRUTH, weights_s=0.006), given=ON_H100)
    after = changed(server, "tensor-parallel:degree=2")
    assert after.cost.weights_s == pytest.approx(0.003)
    assert after.cost.context_s == pytest.approx(TRUTH.context_s / 2)
    # 2 ms of an iteration and 50 us of each layer; two reductions of 10 us a layer beside these.
    assert after.cost.host_s == pytest.approx(TRUTH.host_s * (2000 + 32 * 70) / (2000 + 32 * 50))
    assert after.given.served == ServedModel(LLAMA, "H100", tp=2)


def test_parallelism_of_an_engine_that_takes_longer_than_its_gpus_need_is_refused() -> None:
    # The weights of 8 billion parameters are read in 6 ms, layers take 4: 50 of 60 ms are of something else.
    slow = replace(one(100, 2), cost=replace(TRUTH, host_s=0.045), given=ON_H100)
    with pytest.raises(Unanswerable, match=r"60\.0 ms, 6\.4 times what 1 x H100 need"):
        changed(slow, "tensor-parallel:degree=2")


def test_another_device_reads_by_its_bandwidth_and_has_its_memory() -> None:
    server = Server(one(100, 2).requests, Engine(kv_tokens=100_000), TRUTH, given=ON_H100)
    after = changed(server, "device:name=H200")
    assert after.cost.weights_s == pytest.approx(TRUTH.weights_s * 3350 / 4800)
    weights = 2 * LLAMA.parameters()
    left = (0.9 * 141e9 - weights) / (0.9 * 80e9 - weights)
    assert after.engine.kv_tokens == pytest.approx(100_000 * left, rel=1e-5)


def test_fewer_bits_are_less_to_read_and_leave_room_for_more_tokens() -> None:
    server = Server(one(100, 2).requests, Engine(kv_tokens=100_000), TRUTH, given=ON_H100)
    kept = changed(server, "quantize:kv=8")
    assert kept.cost.context_s == pytest.approx(TRUTH.context_s * (1 - FEWER_BYTES_SAVE / 2))
    assert (kept.cost.weights_s, kept.engine.kv_tokens) == (TRUTH.weights_s, 200_000)
    both = changed(server, "quantize:weights=4,kv=8")
    assert both.cost.weights_s == pytest.approx(TRUTH.weights_s * (1 - FEWER_BYTES_SAVE * 0.75))
    weights = 2 * LLAMA.parameters()
    left = (0.9 * 80e9 - weights / 4) / (0.9 * 80e9 - weights)
    assert both.engine.kv_tokens == pytest.approx(200_000 * left, rel=1e-5)
    assert both.doubt == FEWER_BYTES_ERROR
    assert changed(server, "quantize") == server
    with pytest.raises(UsageError, match="weights must be from 1 to 16"):
        changed(server, "quantize:weights=0")


def test_changes_of_devices_keep_other_changes_and_widen_the_interval() -> None:
    server = replace(one(100, 2), cost=TRUTH, given=ON_H100)
    after = changed(changed(server, "nano-batches:overlap=0.5"), "device:name=H200")
    assert after.cost.overlapped == 0.5
    requests = serve(arrivals(40, 1.0), Engine(), TRUTH).requests
    fitted = known(Engine())
    here, there = (
        {each.name: each for each in predict(requests, fitted, [edit], ON_H100)}
        for edit in ("replicas:count=1", "device:name=H200")
    )
    widths = [np.log(each["tpot_p50_ms"].high / each["tpot_p50_ms"].low) for each in (here, there)]
    assert widths[1] > 1.5 * widths[0]


def test_device_without_a_model_is_refused() -> None:
    with pytest.raises(Unanswerable, match="--model"):
        changed(one(10, 3), "device:name=H200")


def test_model_that_does_not_fit_is_refused() -> None:
    large = replace(LLAMA, layers=400)
    server = Server(
        one(9, 2).requests, Engine(kv_tokens=9_000), TRUTH, given=GivenFacts(ServedModel(large, "H200", 2))
    )
    with pytest.raises(Unanswerable, match="does not fit"):
        changed(server, "tensor-parallel:degree=1")


def test_interval_is_wide_where_a_few_percent_fill_the_server() -> None:
    # Nothing is left open but form, and 4% between two runs; the same requests at a fifth of the rate.
    fitted = known(Engine(max_requests=8))

    def width(rate: float) -> float:
        requests = serve(arrivals(100, rate), fitted.engine, TRUTH).requests
        found = {each.name: each for each in predict(requests, fitted, ["arrivals:rate=1.2"])}
        return float(np.log(found["ttft_p50_ms"].high / found["ttft_p50_ms"].low))

    assert width(5.0) > 5 * width(1.0)


def test_search_allows_fewer_requests_the_less_is_known_of_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BUDGETS", ())
    monkeypatch.setattr(search, "BATCHES", (4, 16))
    requests = serve(arrivals(40, 4.0), Engine(max_requests=8), TRUTH).requests
    sure = known(Engine(max_requests=8))
    unsure = replace(sure, covariance=np.diag([0.0, 0.3, 0.3, *[0.0] * 5]) ** 2)
    rates = []
    for fitted in (sure, unsure):
        found = {each.changes: each.requests_per_s for each in most_requests(requests, fitted, GOAL)}
        rates.append(found[()])
        assert all(rate > found[()] for changes, rate in found.items() if changes)
    assert 0 < rates[1] < 0.8 * rates[0]


def test_half_batches_hide_the_shorter_of_products_and_attention() -> None:
    cost = IterationCost(0.0, 2.0, 0.0, context_s=0.01)
    server = replace(one(100, 2), cost=cost)
    whole, halves = (
        served_requests(each, 0.0)["end_ns"].item() / S for each in (server, changed(server, "nano-batches"))
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


def test_search_does_not_look_beyond_recorded_batches_where_attention_is_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "BUDGETS", ())
    monkeypatch.setattr(search, "BATCHES", (2, 16))
    requests = serve(arrivals(40, 4.0), Engine(max_requests=4), TRUTH).requests
    for masked in (False, True):
        fitted = known(Engine(max_requests=4, masked=masked))
        best = most_requests(requests, fitted, GOAL)[0]
        assert any(change.startswith("max-batch") for change in best.changes) == (not masked)


def test_first_token_changes_as_its_prompt_and_the_iterations_that_it_waits_for() -> None:
    # A prompt takes 4 tokens' time as computed, and measured tokens 2 s: 8 of 20 s are the prompt's.
    said = first_token_s((2.0, 20.0), here=(1.0, 4.0), there=(1.5, 2.0))
    assert said == 8 * 0.5 + 12 * 1.5
    assert first_token_s((2.0, 6.0), (1.0, 4.0), (1.5, 2.0)) == 6 * 0.5  # not more than all of it
    assert prompt_s(IterationCost(1.0, 2.0, 0.5, pair_s=0.01, power=99.0), 10) == pytest.approx(1 + 5 + 0.5)


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


def test_a_server_whose_limit_is_not_known_is_refused_and_one_with_its_limit_is_predicted() -> None:
    queued = serve(arrivals(40, 20.0), Engine(kv_tokens=4_000), TRUTH).requests
    with pytest.raises(Unanswerable, match="--kv-tokens"):
        predict(queued, known(Engine()), ["max-batch:requests=64"])
    with pytest.raises(Unanswerable, match="what limits this engine is not known"):
        ensure_served_as_recorded(queued, known(Engine()))
    ensure_served_as_recorded(queued, known(Engine(kv_tokens=4_000)))
    assert predict(queued, known(Engine(kv_tokens=4_000)), ["max-batch:requests=64"])
