"""What GPUs send each other: collectives of tensor, context, expert and data parallelism, and messages.

In: a model, layouts, a machine. Out: microseconds per layer and micro-batch, per message, and per step. A
ring over a group (Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005) moves (n-1)/n of its bytes per GPU; across
hosts all rings of a host share its ports, and each step waits for the slowest link.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.replay.layouts.layer import SIZE
from dpro.replay.layouts.layout import column
from dpro.replay.layouts.machine import Machine, Software
from dpro.replay.layouts.model import Model


@dataclass(frozen=True)
class Exchanges:
    """[N] microseconds.

    Attributes:
        forward, backward: collectives of one layer and micro-batch.
        expert_forward, expert_backward: the same of a layer with experts.
        head: of the output layer and micro-batch, tensor parallel.
        message: of one message from stage to stage.
        reduction: of all gradients, and of gathering parameters, per step.
        gathered: of gathering parameters for each pass over a layer (ZeRO 3), per step.
    """

    forward: Floats
    backward: Floats
    expert_forward: Floats
    expert_backward: Floats
    head: Floats
    message: Floats
    reduction: Floats
    gathered: Floats


def one_way_us(
    num_bytes: Floats, ranks: Floats, stride: Floats, machine: Machine, rings: Floats | None = None
) -> Floats:
    """[N] microseconds of an all-gather or a reduce-scatter; an all-reduce is one of each.

    Args:
        num_bytes: [N] of the whole buffer.
        ranks: [N] in the group.
        stride: [N] between neighbouring ranks of the group.
        rings: [N] groups whose members share a host's ports; those that there are, without it.
    """
    inside_most = np.clip(machine.per_host // np.maximum(stride, 1), 1, None)
    local = np.minimum(ranks, inside_most)  # members of the group on one host
    hosts = np.ceil(ranks / local)
    share = np.where(ranks > 1, (ranks - 1) / np.maximum(ranks, 1), 0.0)
    inside = share * num_bytes / (machine.inside_gbps * 1e3)
    sharing = machine.per_host / local if rings is None else rings
    through = num_bytes * (hosts - 1) / np.maximum(hosts, 1) * sharing
    outside = np.where(hosts > 1, through / (machine.outside_gbps * 1e3), 0.0)
    latency = machine.inside_us * np.log2(np.maximum(local, 1)) + np.where(
        hosts > 1, machine.outside_us * (ranks - 1), 0.0
    )
    total: Floats = np.where(ranks > 1, np.maximum(inside, outside) + latency, 0.0)
    return total


def traffic(model: Model, rows: pl.DataFrame, machine: Machine, software: Software) -> Exchanges:
    """What each layout sends."""
    micro_batch, tp, cp, ep = (column(rows, name) for name in ("micro_batch", "tp", "cp", "ep"))
    tokens = micro_batch * model.sequence / cp
    one = np.ones_like(tp)
    vectors = SIZE * tokens * model.hidden
    exposed = 1 - software.tensor_overlap
    # Two all-reduces forward and two backward, or as many pairs of all-gather and reduce-scatter.
    tensor = 4 * one_way_us(vectors, tp, one, machine) * exposed
    # What was cut is gathered once more for the gradients of weights.
    backward = tensor * (1.25 if software.sequence_parallel else 1.0)
    passed = _context_us(model, tokens, tp, cp, machine, software)
    experts = _expert_us(model, tokens, tp, cp, ep, machine)
    head = 2 * one_way_us(vectors, tp, one, machine)
    return Exchanges(
        tensor + passed,
        backward + 2 * passed,
        tensor + passed + experts,
        backward + 2 * passed + experts,
        head,
        _message_us(model, rows, machine, software),
        *_data_us(model, rows, machine, software),
    )


def _context_us(
    model: Model, tokens: Floats, tp: Floats, cp: Floats, machine: Machine, software: Software
) -> Floats:
    """Keys and values pass around the ring of context parallelism, mostly while others are attended to."""
    keys = 2 * model.kv_heads * model.head_size if not model.kv_rank else model.heads * model.widths[0] * 2
    whole = SIZE * tokens * cp * keys / tp
    us: Floats = one_way_us(whole, cp, tp, machine) * (1 - software.context_overlap)
    return us


def _expert_us(model: Model, tokens: Floats, tp: Floats, cp: Floats, ep: Floats, machine: Machine) -> Floats:
    """Two all-to-alls: tokens to their experts, and back; each GPU sends a share of all that it has."""
    if not model.experts:
        return np.zeros_like(tokens)
    sent = SIZE * tokens * model.experts_per_token * model.hidden / tp
    inside = np.minimum(ep, np.clip(machine.per_host // tp, 1, None))
    out_of_host = np.where(ep > inside, (ep - inside) / np.maximum(ep, 1), 0.0)
    within = sent * (inside - 1) / np.maximum(ep, 1) / (machine.inside_gbps * 1e3)
    across = sent * out_of_host / (machine.outside_gbps / machine.per_host * 1e3)
    latency = np.where(ep > 1, machine.inside_us * np.log2(np.maximum(ep, 1)), 0.0)
    us: Floats = 2 * (within + across + latency)
    return us


def _message_us(model: Model, rows: pl.DataFrame, machine: Machine, software: Software) -> Floats:
    """From stage to stage: across hosts unless all stages are within one; all GPUs of a host send at once."""
    micro_batch, tp, cp, dp, pp = (column(rows, name) for name in ("micro_batch", "tp", "cp", "dp", "pp"))
    cut = 1.0 if software.whole_messages else tp
    num_bytes = SIZE * micro_batch * model.sequence / cp * model.hidden / cut
    stage = tp * cp * dp
    within = stage * pp <= machine.per_host
    outside = num_bytes * machine.per_host / (machine.outside_gbps * 1e3)
    inside = num_bytes / (machine.inside_gbps * 0.5e3)
    moved = np.where(within, inside, outside)
    us: Floats = np.where(pp > 1, machine.message_us + moved, 0.0)
    return us


def parameters_of(model: Model, rows: pl.DataFrame) -> tuple[Floats, Floats]:
    """[N] parameters of the fullest GPU: those that data parallelism replicates, and those of its experts."""
    tp, pp, ep = (column(rows, name) for name in ("tp", "pp", "ep"))
    layers = np.ceil(model.layers / pp)
    mixed = layers * model.expert_layers / model.layers
    dense = (layers - mixed) * model.dense_ffn_parameters / tp
    shared = mixed * (model.shared_experts * model.expert_parameters / tp + model.hidden * model.experts)
    tables = np.where(pp > 1, 1.0, 1.0 if model.tied else 2.0) * model.vocabulary * model.hidden / tp
    own = layers * model.attention_parameters / tp + dense + shared + tables
    experts = mixed * model.experts * model.expert_parameters / (ep * tp)
    return own, experts


def _data_us(model: Model, rows: pl.DataFrame, machine: Machine, software: Software) -> tuple[Floats, Floats]:
    """Reduction of gradients and gathering of parameters once per step; gathering for each pass (ZeRO 3)."""
    tp, cp, ep, dp = (column(rows, name) for name in ("tp", "cp", "ep", "dp"))
    zero, micro_batches = column(rows, "zero"), column(rows, "micro_batches")
    own, experts = parameters_of(model, rows)
    ranks, stride = dp * cp, tp
    reduced = one_way_us(own * software.gradient_bytes, ranks, stride, machine)
    gathered = one_way_us(own * SIZE, ranks, stride, machine)
    others = np.maximum(ranks / ep, 1)
    reduced_experts = one_way_us(experts * software.gradient_bytes, others, stride * ep, machine)
    gathered_experts = one_way_us(experts * SIZE, others, stride * ep, machine)
    gather = gathered + gathered_experts
    reduction = reduced + reduced_experts + np.where(zero > 0, gather, reduced + reduced_experts)
    per_pass = np.where(zero > 2, gather * 2 * micro_batches, 0.0)
    exposed = 1 - software.overlap
    return np.where(zero > 2, reduced + reduced_experts, reduction) * exposed, per_pass * (1 - 0.7)
