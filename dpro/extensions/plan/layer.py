"""Computation and communication of one micro-batch on one GPU, sized for each layout, and their times.

Takes a model, layouts and a machine; returns microseconds of matmuls, attention and memory-bound work,
forward and backward, of a dense layer, a layer with experts, and the logits and loss of the last stage; and
of the collectives of tensor, context, expert and data parallelism, and of messages.
`dpro.replay.cost.kernels` estimates work, each kind in one call for all layouts; `dpro.replay.cost.machine`
estimates transfers. Does not depend on schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.extensions.plan.layout import column
from dpro.extensions.plan.model import Model, Software
from dpro.replay.cost.kernels.estimate import estimate
from dpro.replay.cost.kernels.operations import attention, matmuls, moves
from dpro.replay.cost.machine import Machine, all_to_all_us, message_us, one_way_us

SIZE = 2  # bytes of an activation
FLASH_BACKWARD = 2.5  # five products where forward has two (Dao et al., arXiv 2205.14135)
KEYS = ["micro_batch", "tp", "cp", "ep"]  # columns that determine the work of a layer
COLLECTIVES = 4  # tensor-parallel, per pass over a layer: two all-gathers and two reduce-scatters
# Products whose rows are not a multiple of 16 bytes miss most of the tensor cores' rate (NVIDIA, Matrix
# Multiplication Background User's Guide, section 3).
ALIGNED, UNALIGNED = 8, 8.0
ROUTING_KERNELS = 40.0  # in addition to a dense layer's: router, permutation, and back


@dataclass(frozen=True)
class LayerTimes:
    """[N] microseconds of one pass over one layer, by what bounds them, and kernels that the host launches.

    `ranks` is the total number of ranks in its tensor-parallel collectives.
    """

    compute: Floats
    memory: Floats
    kernels: Floats
    ranks: Floats

    def __add__(self, other: LayerTimes) -> LayerTimes:
        """Add the times of two passes, one after the other."""
        return LayerTimes(*(us + other_us for us, other_us in zip(self.parts(), other.parts())))

    def __getitem__(self, rows: Ints) -> LayerTimes:
        """Select some rows."""
        return LayerTimes(*(part[rows] for part in self.parts()))

    def parts(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return all fields in order."""
        return self.compute, self.memory, self.kernels, self.ranks


@dataclass(frozen=True)
class LayerWork:
    """Computation of one micro-batch on a GPU, each [N].

    Attributes:
        forward, backward: of a layer.
        expert_forward, expert_backward: of a layer with experts.
        scores: products of queries, keys and values, forward, which selective recomputation repeats.
        head_forward, head_backward: of the output layer and its loss.
    """

    forward: LayerTimes
    backward: LayerTimes
    expert_forward: LayerTimes
    expert_backward: LayerTimes
    scores: LayerTimes
    head_forward: LayerTimes
    head_backward: LayerTimes

    def __getitem__(self, rows: Ints) -> LayerWork:
        """Select some rows."""
        return LayerWork(*(getattr(self, name)[rows] for name in LayerWork.__dataclass_fields__))


def layer_work(model: Model, rows: pl.DataFrame, machine: Machine, software: Software) -> LayerWork:
    """Return the computation of one micro-batch on a GPU in each layout."""
    unique = rows.select(KEYS).unique(maintain_order=True).with_row_index("at")
    kind = rows.select(KEYS).join(unique, on=KEYS, how="left", maintain_order="left")["at"].to_numpy()
    work = _unique_work(model, unique, machine, software)
    return work[kind]


class _OperationTimer:
    """Collects operations with the pass they belong to, and times them in one call."""

    def __init__(self, height: int, machine: Machine, dtype: str) -> None:
        self.height, self.machine, self.dtype = height, machine, dtype
        self.parts: list[pl.DataFrame] = []
        self.labels: list[tuple[str, str, float]] = []

    def add(self, name: str, bound: str, operations: pl.DataFrame, times: float = 1.0) -> None:
        self.parts.append(operations)
        self.labels.append((name, bound, times))

    def product(self, name: str, m: Floats, n: Floats, k: Floats, batch: Floats | float = 1.0) -> None:
        """Add a product forward, and its two products backward, for the gradients of inputs and weights."""
        self.add(f"{name} forward", "compute", matmuls(self.dtype, m, n, k, batch))
        self.add(f"{name} backward", "compute", matmuls(self.dtype, m, k, n, batch))
        self.add(f"{name} backward", "compute", matmuls(self.dtype, k, n, m, batch))

    def moved(self, name: str, num_bytes: Floats, backward: float = 2.0) -> None:
        """Add memory-bound work that reads one half of the bytes and writes the other."""
        for way, times in (("forward", 1.0), ("backward", backward)):
            half = num_bytes * times / 2
            self.add(f"{name} {way}", "memory", moves(self.dtype, half, half))

    def timed(self) -> dict[str, dict[str, Floats]]:
        """Return [N] microseconds by name and bound."""
        whole = pl.concat([part.with_columns(pl.all()) for part in self.parts])
        said = estimate(whole, self.machine.gpu, self.machine.sheets)
        us = said["us"].to_numpy().copy()
        missing = np.isnan(us)
        if missing.any():  # larger than any measured operation: at the rate of the largest, by the data sheet
            us[missing] = _by_sheet(whole.filter(pl.Series(missing)), self.machine)
        by_name: dict[str, dict[str, Floats]] = {}
        for index, (name, bound, times) in enumerate(self.labels):
            us_of_label = us[index * self.height : (index + 1) * self.height] * times
            bounds = by_name.setdefault(
                name, {"compute": np.zeros(self.height), "memory": np.zeros(self.height)}
            )
            bounds[bound] = bounds[bound] + us_of_label
        return by_name


def _by_sheet(operations: pl.DataFrame, machine: Machine) -> Floats:
    sheet = machine.sheet
    dtype = operations["dtype"][0]
    computing = operations["operations"].to_numpy() / (0.8 * sheet.tflops[dtype] * 1e6)
    moved = (operations["read_bytes"] + operations["written_bytes"]).to_numpy() / (0.85 * sheet.gbps * 1e3)
    larger: Floats = np.maximum(computing, moved)
    return larger


def _unique_work(model: Model, rows: pl.DataFrame, machine: Machine, software: Software) -> LayerWork:
    micro_batch, tp, cp, ep = (column(rows, name) for name in KEYS)
    tokens = micro_batch * model.sequence / cp
    clock = _OperationTimer(rows.height, machine, software.dtype)
    _add_attention(clock, model, software, micro_batch, tp, cp)
    # Reads and writes of a token's vector: two norms, two residuals. Backward, norms read twice.
    whole = 10.0 + (1.0 if software.dropout else 0.0)
    shared = tp if software.sequence_parallel else 1.0
    rotated = 4.0 * model.hidden / tp
    clock.moved("pointwise", SIZE * tokens * (whole * model.hidden / shared + rotated), 1.6)
    wide = model.ffn * (2 if model.gated else 1)
    clock.product("dense", tokens, wide / tp, np.full_like(tokens, model.hidden))
    clock.product("dense", tokens, np.full_like(tokens, model.hidden), model.ffn / tp)
    clock.moved("dense", SIZE * tokens * (wide + model.ffn) / tp, 1.5)
    _add_accumulation(clock, model, software, tp, ep)
    if model.experts:
        _add_experts(clock, model, tokens, tp, ep)
    clock.product("head", tokens, np.maximum(model.vocabulary / tp, 1), np.full_like(tokens, model.hidden))
    clock.moved("head", software.loss_bytes / 2 * tokens * model.vocabulary / tp, 1.0)
    times = clock.timed()
    # The host launches collectives, too: two per pass.
    kernels = software.kernels + np.where(tp > 1, 2 * software.collective_kernels, 0.0)
    none = np.zeros(rows.height)

    def work(names: tuple[str, ...], way: str, launched: Floats) -> LayerTimes:
        parts = [times[f"{name} {way}"] for name in names if f"{name} {way}" in times]
        compute, memory = (sum((part[bound] for part in parts), none) for bound in ("compute", "memory"))
        passes = 0 if names in (("head",), ("scores",)) else 1
        return LayerTimes(compute, memory, launched, COLLECTIVES * passes * np.where(tp > 1, tp, 0.0))

    usual, mixed = (
        ("attention", "scores", "pointwise", "dense"),
        ("attention", "scores", "pointwise", "experts"),
    )
    routed = kernels + (ROUTING_KERNELS if model.experts else 0.0)
    return LayerWork(
        forward=work(usual, "forward", kernels),
        backward=work(usual, "backward", 2 * kernels),
        expert_forward=work(mixed, "forward", routed),
        expert_backward=work(mixed, "backward", 2 * routed),
        scores=work(("scores",), "forward", none),
        head_forward=work(("head",), "forward", none + software.head_kernels),
        head_backward=work(("head",), "backward", none + software.head_kernels),
    )


def _add_attention(
    clock: _OperationTimer, model: Model, software: Software, micro_batch: Floats, tp: Floats, cp: Floats
) -> None:
    """Add projections, and the products of queries, keys and values."""
    tokens = micro_batch * model.sequence / cp
    for cut, inputs, outputs in model.projections:
        n = outputs / (tp if cut == "column" else 1)
        k = inputs / (tp if cut == "row" else 1)
        clock.product("attention", tokens, n + 0 * tokens, k + 0 * tokens)
    heads, queries = model.heads / tp, model.sequence / cp
    width = np.full_like(tokens, model.widths[1])
    if software.flash:
        kv_heads = np.maximum(model.kv_heads / tp, 1)
        past = (model.sequence - queries) / 2  # context parallelism balances the causal work of its ranks
        fused = attention(
            software.dtype, micro_batch, queries, past, heads, np.minimum(kv_heads, heads), width
        )
        clock.add("scores forward", "compute", fused)
        clock.add("scores backward", "compute", fused, FLASH_BACKWARD)
        return
    batch = micro_batch * heads * (UNALIGNED if model.widths[1] % ALIGNED else 1)
    clock.product("scores", queries, np.full_like(tokens, model.sequence), width, batch)
    clock.product("scores", queries, width, np.full_like(tokens, model.sequence), batch)
    batch = micro_batch * heads
    # Softmax reads and writes the scores; dropout again, with a mask of a byte. Backward reads one more.
    passes = 2 + (2.5 if software.dropout else 0)
    clock.moved("scores", SIZE * passes * batch * queries * model.sequence, 1 + 1 / passes)


def _add_accumulation(
    clock: _OperationTimer, model: Model, software: Software, tp: Floats, ep: Floats
) -> None:
    experts = model.experts / ep + model.shared_experts * np.ones_like(ep)
    for name, weights in (
        ("attention", model.attention_parameters / tp),
        ("dense", model.dense_ffn_parameters / tp),
        ("experts", experts * model.expert_parameters / tp),
        ("head", model.vocabulary * model.hidden / tp),
    ):
        half = software.accumulation_bytes / 2 * weights
        clock.add(f"{name} backward", "memory", moves(clock.dtype, half, half))


def _add_experts(clock: _OperationTimer, model: Model, tokens: Floats, tp: Floats, ep: Floats) -> None:
    """Add one GPU's experts with an even share of the tokens, shared experts, router, and permutations."""
    local = model.experts / ep
    tokens_each = np.maximum(tokens * model.experts_per_token / local, 1)
    wide = model.expert_ffn * (2 if model.gated else 1)
    hidden = np.full_like(tokens, model.hidden)
    clock.product("experts", tokens_each, wide / tp, hidden, local)
    clock.product("experts", tokens_each, hidden, model.expert_ffn / tp, local)
    clock.product("experts", tokens, np.full_like(tokens, model.experts), hidden)
    clock.moved("experts", SIZE * tokens * model.experts_per_token * (wide + model.expert_ffn) / tp, 1.5)
    clock.moved("experts", SIZE * tokens * model.experts_per_token * 6.0 * model.hidden, 1.0)
    if model.shared_experts:
        shared = model.shared_experts
        clock.product("experts", tokens, shared * wide / tp, hidden)
        clock.product("experts", tokens, hidden, shared * model.expert_ffn / tp)


# Communication between GPUs.


@dataclass(frozen=True)
class Exchanges:
    """[N] microseconds of communication.

    Attributes:
        forward, backward: collectives of one layer and micro-batch.
        expert_forward, expert_backward: collectives of one layer with experts and micro-batch.
        head: of the output layer and micro-batch, tensor parallel.
        message: of one message from stage to stage.
        reduction: of reducing all gradients and gathering parameters, per step.
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


def traffic(model: Model, rows: pl.DataFrame, machine: Machine, software: Software) -> Exchanges:
    """Return the communication of each layout."""
    micro_batch, tp, cp, ep = (column(rows, name) for name in ("micro_batch", "tp", "cp", "ep"))
    tokens = micro_batch * model.sequence / cp
    one = np.ones_like(tp)
    vectors = SIZE * tokens * model.hidden
    exposed = 1 - software.tensor_overlap
    # Two all-reduces forward and two backward, or as many pairs of all-gather and reduce-scatter.
    tensor = 4 * one_way_us(vectors, tp, one, machine) * exposed
    # With sequence parallelism, cut activations are gathered again for the gradients of weights.
    backward = tensor * (1.25 if software.sequence_parallel else 1.0)
    keys = 2 * model.kv_heads * model.head_size if not model.kv_rank else model.heads * model.widths[0] * 2
    whole = SIZE * tokens * cp * keys / tp
    passed: Floats = one_way_us(whole, cp, tp, machine) * (1 - software.context_overlap)
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


def _expert_us(model: Model, tokens: Floats, tp: Floats, cp: Floats, ep: Floats, machine: Machine) -> Floats:
    """Return the time of two all-to-alls of all tokens, to the experts and back."""
    if not model.experts:
        return np.zeros_like(tokens)
    sent = SIZE * tokens * model.experts_per_token * model.hidden / tp
    return 2 * all_to_all_us(sent, ep, tp, machine)


def _message_us(model: Model, rows: pl.DataFrame, machine: Machine, software: Software) -> Floats:
    """Return the time of a message between stages, across hosts unless one has all; GPUs send at once."""
    micro_batch, tp, cp, dp, pp = (column(rows, name) for name in ("micro_batch", "tp", "cp", "dp", "pp"))
    cut = 1.0 if software.whole_messages else tp
    num_bytes = SIZE * micro_batch * model.sequence / cp * model.hidden / cut
    stage = tp * cp * dp
    within = stage * pp <= machine.per_host
    return np.where(pp > 1, message_us(num_bytes, within, machine), 0.0)


def parameters_of(model: Model, rows: pl.DataFrame) -> tuple[Floats, Floats]:
    """Return [N] parameters of the fullest GPU: replicated by data parallelism, and of its experts."""
    tp, pp, ep = (column(rows, name) for name in ("tp", "pp", "ep"))
    layers = np.ceil(model.layers / pp)
    mixed = layers * model.expert_layers / model.layers
    dense = (layers - mixed) * model.dense_ffn_parameters / tp
    shared = mixed * (model.shared_experts * model.expert_parameters / tp + model.hidden * model.experts)
    tables = np.where(pp > 1, 1.0, 1.0 if model.tied else 2.0) * model.vocabulary * model.hidden / tp
    replicated = layers * model.attention_parameters / tp + dense + shared + tables
    experts = mixed * model.experts * model.expert_parameters / (ep * tp)
    return replicated, experts


def _data_us(model: Model, rows: pl.DataFrame, machine: Machine, software: Software) -> tuple[Floats, Floats]:
    """Return the time of reduction and gathering once per step, and of gathering per pass (ZeRO 3)."""
    tp, cp, ep, dp = (column(rows, name) for name in ("tp", "cp", "ep", "dp"))
    zero, micro_batches = column(rows, "zero"), column(rows, "micro_batches")
    replicated, experts = parameters_of(model, rows)
    ranks, stride = dp * cp, tp
    reduced = one_way_us(replicated * software.gradient_bytes, ranks, stride, machine)
    gathered = one_way_us(replicated * SIZE, ranks, stride, machine)
    others = np.maximum(ranks / ep, 1)
    reduced_experts = one_way_us(experts * software.gradient_bytes, others, stride * ep, machine)
    gathered_experts = one_way_us(experts * SIZE, others, stride * ep, machine)
    gather = gathered + gathered_experts
    reduction = reduced + reduced_experts + np.where(zero > 0, gather, reduced + reduced_experts)
    per_pass = np.where(zero > 2, gather * 2 * micro_batches, 0.0)
    exposed = 1 - software.overlap
    return np.where(zero > 2, reduced + reduced_experts, reduction) * exposed, per_pass * (1 - 0.7)
