"""What operations compute and move, counted by hand."""

import numpy as np
import pytest

from dpro.errors import UsageError
from dpro.replay.cost.kernels.learned import features
from dpro.replay.cost.kernels.operations import attention, matmuls, moves
from dpro.replay.cost.kernels.roofline import GPUS


def test_a_product_reads_both_operands_and_writes_its_result():
    (row,) = matmuls("bf16", 2, 3, 5, batch=7).to_dicts()
    assert row["operations"] == 2 * 7 * 2 * 3 * 5
    assert (row["read_bytes"], row["written_bytes"]) == (2 * 7 * (2 * 5 + 5 * 3), 2 * 7 * 2 * 3)


def test_a_product_in_fp8_writes_sixteen_bits():
    (row,) = matmuls("fp8", 2, 3, 5).to_dicts()
    assert (row["read_bytes"], row["written_bytes"]) == (2 * 5 + 5 * 3, 2 * 2 * 3)


@pytest.mark.parametrize(
    ("queries", "past", "window", "seen"),
    [
        (4, 0, 0, (1 + 2 + 3 + 4) / 4),
        (4, 10, 0, (11 + 12 + 13 + 14) / 4),
        (4, 0, 2, (1 + 2 + 2 + 2) / 4),
        (1, 99, 0, 100),
        (1, 99, 16, 16),
    ],
)
def test_a_query_sees_all_tokens_up_to_its_own_or_those_of_its_window(queries, past, window, seen):
    (row,) = attention("bf16", 2, queries, past, 8, 2, 64, window).to_dicts()
    assert row["k"] == pytest.approx(seen)
    assert row["operations"] == pytest.approx(4 * 2 * queries * 8 * 64 * seen)
    assert row["kind"] == ("prefill" if queries > 1 else "decode")


def test_decoding_reads_the_keys_and_values_of_all_that_was_said_before():
    (row,) = attention("bf16", 3, 1, 99, 8, 2, 64, kv_bytes=1).to_dicts()
    assert row["read_bytes"] == 2 * 3 * 100 * 2 * 64 * 1 + 3 * 8 * 64 * 2


@pytest.mark.parametrize("size", [-1.0, np.nan, np.inf])
def test_sizes_that_are_none_are_refused(size):
    with pytest.raises(UsageError, match="size"):
        moves("bf16", size, 1)


def test_an_unknown_element_type_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="fp8"):
        matmuls("fp7", 1, 1, 1)


def test_trees_see_the_blocks_of_heads_that_a_device_sees():
    """Twice the sequences of half the heads are as many blocks, in as full a last wave."""
    gpu = GPUS["H100"]
    two = attention("bf16", [4, 8], 1, 1023, [32, 16], [8, 4], 128)
    columns = features(two, gpu, np.ones(2))
    assert gpu.sms == 132
    group, shared, blocks, fill_shared, fill_blocks, _ = columns[:, -6:].T
    assert group.tolist() == [2, 2]
    assert (shared.tolist(), blocks.tolist()) == ([5, 5], [7, 7])
    assert fill_shared.tolist() == pytest.approx([132 / 32] * 2)
    assert fill_blocks.tolist() == pytest.approx([132 / 128] * 2)
