"""Time that kernels spend on attention scores, by the shapes of the operators that launch them."""

from __future__ import annotations

import json

import pytest

from dpro.schema import SPANS, STEPS
from dpro.verdict.scores import parts_on_scores
from tests.builders import TinyRun

QUERIES, KEYS, SCORES = [8, 256, 32], [8, 32, 256], [8, 256, 256]
SPLIT = [2, 4, 256, 256]  # the scores, by batch and head
HIDDEN = [2, 256, 128]


def parts(tmp_path, works):
    """The shares of works: operator, shapes, kernel, us."""
    run, at = TinyRun(), 0.0
    for number, (operator, shapes, kernel, lasts) in enumerate(works):
        run.op(operator, at, at + 10, shapes=json.dumps(shapes))
        run.call(at + 4, at + 6, number)
        run.kernel(kernel, 10_000 + at, 10_000 + at + lasts, number)
        at += 1000
    written = run.write(tmp_path / "run")
    return parts_on_scores(written.table(SPANS), written.table(STEPS))


def test_all_that_is_done_to_scores_counts_however_the_softmax_is_written(tmp_path):
    found = parts(
        tmp_path,
        [
            ("aten::bmm", [QUERIES, KEYS], "gemm_a", 100),
            ("aten::mul", [SPLIT, []], "mul", 300),
            ("aten::exp", [SCORES], "exp", 200),
            ("aten::mul", [HIDDEN, HIDDEN], "mul", 100),
            ("aten::bmm", [SCORES, QUERIES], "gemm_b", 50),
            ("aten::mm", [[512, 128], [128, 128]], "gemm_c", 80),
        ],
    )
    # The product with the values takes them, and makes nothing of their size: what it takes counts.
    assert found == {"mul": pytest.approx(0.75), "exp": 1.0, "gemm_a": 1.0, "gemm_b": 1.0}


@pytest.mark.parametrize(
    "works",
    [
        # A product that makes more than it takes, and nothing takes that: no attention.
        [("aten::bmm", [QUERIES, KEYS], "gemm", 100), ("aten::exp", [SCORES], "exp", 200)],
        # Experts: batched products, each smaller than what it is made of.
        [("aten::bmm", [[8, 64, 512], [8, 512, 64]], "gemm", 100), ("aten::mul", [[8, 64, 64]], "mul", 10)],
        [("aten::mm", [[512, 128], [128, 128]], "gemm", 100)],
        [],
    ],
)
def test_other_products_make_no_attention(tmp_path, works):
    assert parts(tmp_path, works) == {}


def test_lists_of_tensors_and_unknown_shapes_are_no_scores(tmp_path):
    found = parts(
        tmp_path,
        [
            ("aten::bmm", [QUERIES, KEYS], "gemm", 100),
            ("aten::cat", [[SCORES, SCORES], []], "cat", 30),
            ("aten::exp", [SCORES], "exp", 200),
            ("aten::bmm", [SCORES, QUERIES], "gemm", 50),
        ],
    )
    assert found == {"exp": 1.0, "gemm": 1.0}
