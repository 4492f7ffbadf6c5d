"""Repeats in sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpro.extensions.plan.stack import find_pattern, occurrences


def pattern_of(tokens: list[int], weight: list[float] | None = None) -> list[int]:
    found = find_pattern(np.array(tokens), np.array(weight or [1.0] * len(tokens)))
    return found.tolist()


def test_the_shortest_pattern_that_holds_most_is_found() -> None:
    layer = [1, 1, 1, 2, 3, 4, 5]
    assert pattern_of([9, *layer * 4, 8]) == layer


def test_layers_are_found_within_micro_batches() -> None:
    layer = [1, 2, 3, 4]
    assert pattern_of([*layer * 3, 9] * 5) == layer


def test_what_repeats_within_a_layer_is_no_layer() -> None:
    layer = [1, 1, 2, 3, 4, 5]
    assert pattern_of(layer * 2) == layer


def test_what_weighs_more_counts() -> None:
    assert pattern_of([1, 2, 1, 2, 1, 2, 3, 4, 3, 4], [0.1] * 6 + [5.0] * 4) == [3, 4]


def test_two_equal_matrices_that_weigh_most_are_no_layers_beside_attention() -> None:
    query, key, attention, out, wide, down = range(6)
    layer = np.array([query, key, key, attention, out, wide, wide, down])  # gated: two wide matrices
    weight = np.array([1.0, 0.2, 0.2, 0.5, 1.0, 3.5, 3.5, 1.5])
    tokens, weights = np.tile(layer, 5), np.tile(weight, 5)
    assert find_pattern(tokens, weights, [attention]).tolist() == layer.tolist()
    in_micro_batches = np.tile(np.append(np.tile(layer, 3), 9), 4)
    weights = np.tile(np.append(np.tile(weight, 3), 2.0), 4)
    assert find_pattern(in_micro_batches, weights, [attention]).tolist() == layer.tolist()


def test_nothing_repeats_in_a_sequence_without_repeats() -> None:
    assert pattern_of([1, 2, 3, 4, 5]) == []
    assert pattern_of([]) == []


def test_occurrences_do_not_overlap() -> None:
    assert occurrences(np.array([1, 1, 1, 1, 1]), np.array([1, 1])).tolist() == [0, 2]
    assert occurrences(np.array([1]), np.array([1, 1])).size == 0


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True),
    st.integers(2, 6),
    st.integers(1, 4),
)
def test_a_stack_is_found_whatever_its_depth_and_its_micro_batches(
    layer: list[int], depth: int, micro_batches: int
) -> None:
    tokens = [*layer * depth, 9] * micro_batches
    found = pattern_of(tokens)
    assert found == layer
    assert occurrences(np.array(tokens), np.array(found)).size == depth * micro_batches
