"""What model a run trains, from the shapes of the products of one of its layers.

In: a layer's products as `stack` has them, the embedding's shape, and how many ranks share a layer. Out: a
`Model`. Known are dense transformers: projections of queries, keys and values, attention, its output, and a
feed-forward network of two or three matrices; everything else is refused. Tensor parallelism is taken to cut
outputs of the first matrices, and inputs of those that lead back (Shoeybi et al., arXiv 1909.08053).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from dpro.errors import Unanswerable
from dpro.replay.layouts.inputs.model import Model
from dpro.replay.layouts.recorded.sequence import ATTENTION
from dpro.replay.models.roofline import product_of

GIVE = "give --model config.json"
MIN_HEADS, MAX_HEAD = 1, 512


class Shapes(NamedTuple):
    """What the shapes say.

    Attributes:
        model: the model.
        micro_batch: sequences that a rank has at once.
        cut_head: whether the output layer is cut over the ranks of a layer.
    """

    model: Model
    micro_batch: int
    cut_head: bool


class _Attended(NamedTuple):
    """Of the attention of a rank: sequences, tokens of each, heads, those of keys, size of a head."""

    batch: int
    sequence: int
    heads: int
    kv_heads: int
    size: int


def shapes_of(
    products: Sequence[str], outside: Sequence[str], embedding: tuple[int, ...], layers: int, tp: int, cp: int
) -> Shapes:
    """The model of a run.

    Args:
        products: of one layer, forward, in order: an operator's name and its shapes.
        embedding: [rows, width] of the largest embedding, empty where none was recorded.
        tp, cp: ranks that share a layer, and a sequence.

    Raises:
        Unanswerable: there are no shapes, or they are not those of a dense transformer.
    """
    if not any("[" in each for each in products):
        raise Unanswerable(f"the run has no shapes of operators: record with `--shapes`, or {GIVE}")
    attended = _attention(products)
    at = next(i for i, each in enumerate(products) if re.search(ATTENTION, each))
    before, after = _weights(products[:at]), _weights(products[at + 1 :])
    if not before or len(after) < 3:
        raise Unanswerable(
            f"{len(before)} matrices before attention and {len(after)} after it are not known: {GIVE}"
        )
    hidden = before[0][0]
    output, *wide, down = after
    if output[1] != hidden or down[1] != hidden or any(inputs != hidden for inputs, _ in (*before, *wide)):
        raise Unanswerable(f"a layer's matrices do not lead from {hidden} back to it: {GIVE}")
    ffn = down[0]
    widths = sum(outputs for _, outputs in wide)
    if widths not in (ffn, 2 * ffn):
        raise Unanswerable(
            f"a feed-forward network of {widths} outputs and {ffn} inputs is not known: {GIVE}"
        )
    heads = attended.heads
    if output[0] != heads * attended.size:
        raise Unanswerable(f"{heads} heads of {attended.size} do not make {output[0]} inputs: {GIVE}")
    kv_heads = (sum(outputs for _, outputs in before) // attended.size - heads) // 2
    if kv_heads < 1 or heads % kv_heads:
        raise Unanswerable(f"{heads} heads of queries do not share {kv_heads} of keys: {GIVE}")
    rows, cut_head = _vocabulary(outside, embedding, hidden, tp)
    model = Model(
        layers=layers,
        hidden=hidden,
        heads=heads * tp,
        kv_heads=kv_heads * tp,
        head_size=attended.size,
        ffn=ffn * tp,
        vocabulary=rows,
        sequence=attended.sequence * cp,
        gated=widths == 2 * ffn,
    )
    return Shapes(model, attended.batch, cut_head)


def _weights(products: Sequence[str]) -> list[tuple[int, int]]:
    """Inputs and outputs of the matrices that are multiplied with tokens."""
    found = []
    for each in products:
        sizes = product_of(*_split(each))
        if sizes is not None and sizes[0] == 1:
            found.append((int(sizes[3]), int(sizes[2])))
    return found


def _split(text: str) -> tuple[str, str]:
    name, bracket, shapes = text.partition("[")
    return name, bracket + shapes


def _lists(text: str) -> list[list[int]]:
    try:
        read = json.loads(_split(text)[1])
    except ValueError:
        return []
    return [each for each in read if isinstance(each, list) and all(isinstance(n, int) for n in each)]


def _attention(products: Sequence[str]) -> _Attended:
    """Sizes of attention: [batch, heads, sequence, size] in PyTorch, else [batch, sequence, heads, size].

    Raises:
        Unanswerable: no operator of attention has such shapes.
    """
    for each in products:
        if not re.search(ATTENTION, each):
            continue
        inputs = [shape for shape in _lists(each) if len(shape) == 4]
        if len(inputs) < 2:
            continue
        batch, one, other, size = inputs[0]
        first = "scaled_dot_product" in each  # PyTorch's own function: heads come first
        heads, sequence = (one, other) if first else (other, one)
        kv_heads = inputs[1][1 if first else 2]
        if heads >= MIN_HEADS and size <= MAX_HEAD:
            return _Attended(batch, sequence, heads, kv_heads, size)
    raise Unanswerable(f"no operator of attention in a layer has shapes of four dimensions: {GIVE}")


def _vocabulary(outside: Sequence[str], embedding: tuple[int, ...], hidden: int, tp: int) -> tuple[int, bool]:
    """Rows of the embedding of all ranks, and whether the output layer is cut."""
    heads = [outputs for inputs, outputs in _weights(outside) if inputs == hidden]
    rows = embedding[0] if len(embedding) == 2 and embedding[1] == hidden else 0
    local = max(heads, default=0)
    if not rows and not local:
        raise Unanswerable(f"neither the embedding nor the output layer is recorded: {GIVE}")
    if tp > 1 and local and rows and local < rows:
        return rows, True
    if tp > 1 and local and local == rows and prod((local, tp)) >= 16384:
        return rows * tp, True  # both are cut: a vocabulary of thousands of rows
    return max(rows, local), False


def embedding_of(shapes: Sequence[str]) -> tuple[int, ...]:
    """[rows, width] of the largest embedding among those with shapes like the operator's."""
    tables = [tuple(_lists(each)[0]) for each in shapes if _lists(each)]
    return max((table for table in tables if len(table) == 2), key=prod, default=())
