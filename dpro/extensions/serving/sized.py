"""Estimates the cost of an iteration of a language model on a device, without measurements.

Takes the sizes of a model, a machine, the degree of tensor parallelism and an element type; returns an
`IterationCost`, from the estimates of `replay.cost.kernels` for each product and for attention, and
all-reduces of tensor parallelism. Such estimates are wrong by tens of percent: use ratios of two of them,
with a measurement of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dpro.errors import Unanswerable, UsageError
from dpro.extensions.plan.model import Model
from dpro.extensions.serving.engine import IterationCost
from dpro.replay.cost.kernels.estimate import estimate
from dpro.replay.cost.kernels.operations import matmuls, size_of
from dpro.replay.cost.machine import Machine, machine_of
from dpro.units import NS_PER_S, NS_PER_US

US_PER_S = NS_PER_S / NS_PER_US
MANY = 4096  # tokens at which an iteration is bound by multiplication
REDUCTION_US = 10.0  # of a small all-reduce inside a host, by specialised kernels
LAYER_US = 50.0  # of a layer: a dozen kernels of at least some microseconds each
FIXED_S = 2e-3  # of an iteration: scheduling, sampling
# Shares of the data sheet reached by reading weights, reading keys and values, attention of prompts, and
# products larger than any measured: from loops of one kernel on A100, H100 and H200.
OF_BANDWIDTH, OF_BANDWIDTH_SCATTERED, OF_PEAK, OF_PEAK_MULTIPLIED = 0.78, 0.5, 0.35, 0.6
KV_BYTES = 2
OVERLAPPED = 2.0  # power in `IterationCost` that joins reading weights and multiplying
REDUCTIONS = 2  # per layer
KEPT_FREE = 0.1  # of a GPU's memory: not used for weights, keys and values


@dataclass(frozen=True)
class ServedModel:
    """A model and the GPUs that serve it.

    Attributes:
        model: the model.
        gpu: a key of the data sheets.
        tp: GPUs over which each layer is cut.
        dtype: of the weights.
    """

    model: Model
    gpu: str
    tp: int = 1
    dtype: str = "bf16"


def scaled_to_device(
    fitted: IterationCost, here: ServedModel, there: ServedModel, decodes: int
) -> IterationCost:
    """Scale a cost that was fitted on one device and parallelism to another.

    Raises:
        UsageError: the model cannot be cut this way.
        Unanswerable: a device is unknown.
    """
    computed = [cost_of(one.model, machine_of(one.gpu), one.tp, one.dtype, decodes) for one in (here, there)]
    return scaled(fitted, *computed)


def cached_tokens(served: ServedModel, share: float = 1.0) -> float:
    """Return the memory left beside the weights, in bytes, which is proportional to the tokens that fit.

    Args:
        share: remaining share of the weights' bytes.

    Raises:
        Unanswerable: the weights do not fit.
    """
    memory = machine_of(served.gpu).memory_gb * 1e9 * (1 - KEPT_FREE) * served.tp
    weights = share * served.model.parameters() * size_of(served.dtype)
    if memory <= weights:
        raise Unanswerable(
            f"the model does not fit: {weights / 1e9:.0f} GB of weights, and {served.tp} x {served.gpu} have "
            f"{memory / 1e9:.0f} GB for them"
        )
    return memory - weights


def cost_of(model: Model, machine: Machine, tp: int, dtype: str, decodes: int = 1) -> IterationCost:
    """Estimate the cost of an iteration.

    Args:
        dtype: of weights; keys and values take two bytes.
        decodes: requests that decode in it, which determine the experts that are read.

    Raises:
        UsageError: the model cannot be cut this way.
        Unanswerable: the machine is unknown.
    """
    if tp < 1 or model.heads % tp:
        raise UsageError(f"{model.heads} heads cannot be cut over {tp} GPUs")
    weights = _weights_read(model, decodes) * size_of(dtype) / tp
    bandwidth = machine.sheet.gbps * 1e9
    peak = machine.sheet.tflops["bf16"] * 1e12
    heads, kv_heads = model.heads / tp, max(model.kv_heads / tp, 1.0)
    key, value = model.widths
    kept = 2 * kv_heads * value if not model.kv_rank else model.kv_rank + model.rope_size
    reductions = REDUCTIONS * model.layers if tp > 1 else 0
    return IterationCost(
        host_s=FIXED_S + (model.layers * LAYER_US + reductions * REDUCTION_US) / US_PER_S,
        weights_s=weights / (OF_BANDWIDTH * bandwidth),
        token_s=_token_us(model, machine, tp, dtype) / US_PER_S
        + reductions * 2 * (tp - 1) / tp * KV_BYTES * model.hidden / (machine.inside_gbps * 1e9),
        context_s=model.layers * KV_BYTES * kept / (OF_BANDWIDTH_SCATTERED * bandwidth),
        pair_s=model.layers * 2 * heads * (key + value) / (OF_PEAK * peak),
        power=OVERLAPPED,
    )


def scaled(fitted: IterationCost, here: IterationCost, there: IterationCost) -> IterationCost:
    """Scale a fitted cost by the ratio of two estimates."""
    return replace(
        fitted,
        host_s=fitted.host_s * there.host_s / here.host_s,
        weights_s=fitted.weights_s * there.weights_s / here.weights_s,
        token_s=fitted.token_s * there.token_s / here.token_s,
        context_s=fitted.context_s * there.context_s / here.context_s,
        pair_s=fitted.pair_s * there.pair_s / here.pair_s,
    )


def _token_us(model: Model, machine: Machine, tp: int, dtype: str) -> float:
    """Return the time of all layers' products for a token among many; of experts, those it meets."""
    products = [
        (outputs / (tp if cut == "column" else 1), inputs / (tp if cut == "row" else 1), model.layers)
        for cut, inputs, outputs in model.projections
    ]
    dense = model.layers - model.expert_layers
    wide = 2 if model.gated else 1
    met = model.expert_ffn * (model.shared_experts + model.experts_per_token)
    for width, layers in ((model.ffn, dense), (met, model.expert_layers)):
        products += [(wide * width / tp, model.hidden, layers), (model.hidden, width / tp, layers)]
    n, k, times = (np.array(column, dtype=float) for column in zip(*products, strict=True))
    counted = (n > 0) & (k > 0) & (times > 0)
    operations = matmuls(dtype, np.full(int(counted.sum()), float(MANY)), n[counted], k[counted])
    us = estimate(operations, machine.gpu, machine.sheets)["us"].to_numpy()
    by_sheet = operations["operations"].to_numpy() / (OF_PEAK_MULTIPLIED * machine.sheet.tflops[dtype] * 1e6)
    return float(np.where(np.isnan(us), by_sheet, us) @ times[counted]) / MANY


def _weights_read(model: Model, decodes: int) -> float:
    """Return the weights that an iteration reads; of experts, those expected with random choices."""
    dense = (model.layers - model.expert_layers) * model.dense_ffn_parameters
    tables = model.vocabulary * model.hidden
    met = 0.0
    if model.experts:
        missed = (1 - model.experts_per_token / model.experts) ** decodes
        met = model.experts * (1 - missed) + model.shared_experts
    experts = model.expert_layers * met * model.expert_parameters
    return model.layers * model.attention_parameters + dense + experts + tables
