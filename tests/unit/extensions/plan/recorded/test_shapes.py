"""Models by the shapes of their products."""

from __future__ import annotations

import pytest

from dpro.errors import Unanswerable
from dpro.extensions.plan.recorded_job import embedding_of, shapes_of

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu[[2,{h},16,8],[2,{h},16,8],[2,{h},16,8]]"


def linear(inputs: int, outputs: int) -> str:
    return f"aten::addmm[[{outputs}],[32,{inputs}],[{inputs},{outputs}],[],[]]"


def layer(tp: int = 1, gated: bool = False) -> list[str]:
    first = [linear(32, 64 // tp), linear(32, 64 // tp)] if gated else [linear(32, 64 // tp)]
    return [
        *[linear(32, 32 // tp)] * 3,
        ATTENTION.format(h=4 // tp),
        linear(32 // tp, 32),
        *first,
        linear(64 // tp, 32),
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_a_model_is_the_same_however_it_is_cut(tp: int, gated: bool) -> None:
    found = shapes_of(layer(tp, gated), ["aten::mm[[32,32],[32,100]]"], (100, 32), 6, tp, 1)
    model = found.model
    assert (model.layers, model.hidden, model.heads, model.kv_heads, model.head_size) == (6, 32, 4, 4, 8)
    assert (model.ffn, model.gated, model.vocabulary, model.sequence) == (64, gated, 100, 16)
    assert (found.micro_batch, found.cut_head) == (2, False)


def test_an_output_layer_narrower_than_the_embedding_is_cut() -> None:
    found = shapes_of(layer(2), ["aten::mm[[32,32],[32,50]]"], (100, 32), 2, 2, 1)
    assert (found.model.vocabulary, found.cut_head) == (100, True)


def test_grouped_queries_are_known_by_the_width_of_keys() -> None:
    products = layer()
    products[1] = products[2] = linear(32, 16)
    assert shapes_of(products, ["aten::mm[[32,32],[32,100]]"], (), 2, 1, 1).model.kv_heads == 2


@pytest.mark.parametrize(
    ("products", "word"),
    [
        (["nvjet_tst_128x128"], "--shapes"),
        ([linear(32, 32)] * 4, "attention"),
        (layer()[1:4], "not known"),
        ([*layer()[:-1], linear(64, 48)], "back to it"),
        ([*layer()[:-1], linear(40, 32)], "feed-forward"),
    ],
)
def test_what_is_no_known_layer_is_refused(products: list[str], word: str) -> None:
    with pytest.raises(Unanswerable, match=word):
        shapes_of(products, [], (100, 32), 2, 1, 1)


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(Unanswerable, match="embedding"):
        shapes_of(layer(), [], (), 2, 1, 1)


def test_the_largest_embedding_counts() -> None:
    assert embedding_of(["[[16,8],[2,4],[],[],[]]", "[[100,8],[2,4],[],[],[]]", ""]) == (100, 8)
