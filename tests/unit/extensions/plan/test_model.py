"""Models from configurations: parameters and operations worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpro.errors import InputError, UsageError
from dpro.extensions.plan.model import model_of, read_model

LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "max_position_embeddings": 32,
}


def test_weights_of_a_grouped_query_model_are_those_of_its_matrices() -> None:
    # Queries, keys, values: 8 x (4 + 2 + 2) x 2; output 8 x 8; three of 8 x 16; two tables of 10 x 8.
    assert model_of(LLAMA).parameters() == 2 * (8 * 16 + 64 + 3 * 128) + 2 * 80


def test_a_tied_embedding_counts_once() -> None:
    assert model_of(LLAMA).parameters() - model_of(LLAMA | {"tie_word_embeddings": True}).parameters() == 80


def test_a_token_takes_six_operations_per_weight_and_half_of_the_scores() -> None:
    model = model_of(LLAMA)
    weights = model.parameters() - 80  # looking up the embedding computes nothing
    assert model.operations_per_token() == 6 * weights + 6 * 2 * 8 * 32


@pytest.mark.parametrize(
    ("family", "activation", "matrices"),
    [
        ("llama", "silu", 3),
        ("gemma2", "gelu_pytorch_tanh", 3),
        ("bloom", None, 2),
        ("gpt2", "gelu_new", 2),
        ("phi3", "silu", 3),
        ("", "relu", 2),
    ],
)
def test_feed_forward_layers_have_the_matrices_of_their_family(
    family: str, activation: str | None, matrices: int
) -> None:
    named = {"model_type": family} | ({"hidden_act": activation} if activation else {})
    assert model_of(LLAMA | named).matrices == matrices


def test_experts_count_where_they_are_and_are_met_as_many_as_a_token_has() -> None:
    sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "first_k_dense_replace": 1,
    }
    mixed, dense = model_of(LLAMA | sizes), model_of(LLAMA)
    one = 3 * 8 * 4
    assert mixed.parameters() - dense.parameters() == 4 * one + 8 * 4 - 3 * 128
    assert mixed.operations_per_token() - dense.operations_per_token() == 6 * (2 * one + 8 * 4 - 3 * 128)


def test_latent_attention_has_its_five_matrices() -> None:
    sizes = {
        "q_lora_rank": 6,
        "kv_lora_rank": 4,
        "qk_rope_head_dim": 2,
        "qk_nope_head_dim": 3,
        "v_head_dim": 5,
    }
    model = model_of(LLAMA | sizes)
    assert model.attention_parameters == 8 * 6 + 6 * 4 * 5 + 8 * 6 + 4 * 4 * 8 + 4 * 5 * 8


@pytest.mark.parametrize("missing", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_configuration_that_lacks_a_size_is_refused_by_its_name(missing: str) -> None:
    with pytest.raises(UsageError, match=missing):
        model_of({key: value for key, value in LLAMA.items() if key != missing})


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(InputError, match="is not a configuration"):
        read_model(path)
    path.write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        read_model(path)
    path.write_text(json.dumps(LLAMA))
    assert read_model(path, sequence=64).sequence == 64
