"""Attention that writes its scores to memory, by the shapes of operators.

Takes kernels with the operators that launched them; returns how much of the time of each kernel goes into
scores. These are the result of a batched product that is larger than what it is made of, and that another
product takes: queries times keys, then times values. Whatever runs on tensors of that size belongs to it,
however the softmax is written; a fused kernel keeps all of it on the chip.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod

import polars as pl

from dpro.replay.attribution import attributed
from dpro.replay.cost.kernels.roofline import product_of

Size = tuple[float, float, float]  # of a batch of matrices: how many, rows, columns


def parts_on_scores(spans: pl.DataFrame, steps: pl.DataFrame) -> dict[str, float]:
    """Return the share of each kernel's time, by name, that is spent on attention scores; empty if none is.

    Args:
        spans: of some steps.
        steps: table `steps`.
    """
    products = spans.filter((pl.col("shapes") != "") & pl.col("name").is_in(["aten::bmm", "aten::baddbmm"]))
    scores = _scores(products.select("name", "shapes").unique().rows())
    if not scores:
        return {}
    kernels = attributed(spans, steps)
    works = kernels.select("operator", "shapes").unique()
    on_scores = [_is_on(scores, *work) for work in works.rows()]
    time_ns, is_on = pl.col("duration_ns"), pl.col("is_on")
    parts = (
        kernels.join(works.with_columns(is_on=pl.Series(on_scores, dtype=pl.Boolean)), on=works.columns)
        .group_by("name")
        .agg(part=time_ns.filter(is_on).sum() / time_ns.sum(), on_ns=time_ns.filter(is_on).sum())
        .filter(pl.col("on_ns") > 0)
        .sort("on_ns", "name", descending=[True, False])
    )
    return dict(parts.select("name", "part").rows())


def _scores(products: Iterable[tuple[str, str]]) -> set[Size]:
    """Return the sizes that one of some products makes of smaller factors, and another takes.

    Args:
        products: names and shapes of operators.
    """
    made, taken = set[Size](), set[Size]()
    for product in products:
        size = product_of(*product)
        if size is None or size[0] <= 1:
            continue
        batch, rows, columns, inner = size
        if min(rows, columns) > inner:
            made.add((batch, rows, columns))
        elif inner > min(rows, columns):
            taken |= {(batch, rows, inner), (batch, inner, rows)}  # as it is, or transposed in a backward
            taken |= {(batch, inner, columns), (batch, columns, inner)}
    return made & taken


def _is_on(scores: set[Size], operator: str, shapes: str) -> bool:
    """Return whether an operator makes scores, or takes a tensor of their size."""
    product = product_of(operator, shapes)
    if product is not None and product[:3] in scores:
        return True
    given = [shape for shape in json.loads(shapes or "[]") if isinstance(shape, list) and len(shape) > 2]
    sizes = {(float(prod(shape[:-2])), float(shape[-2]), float(shape[-1])) for shape in given if _flat(shape)}
    return bool(sizes & scores)


def _flat(shape: list[object]) -> bool:
    """Return whether a shape is that of one tensor, not of a list of tensors."""
    return all(isinstance(length, int) for length in shape)
