"""Sizes of models and properties of frameworks, which determine computation, communication and memory.

Takes a Hugging Face `config.json` as a dictionary, or the name of a framework; returns a `Model` or a
`Software`. Supports dense and mixture-of-experts transformers with grouped-query or latent attention
(DeepSeek-V2, arXiv 2405.04434). Does not depend on layouts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpro.errors import InputError, UsageError, first_line
from dpro.limits import read_small
from dpro.words import shortened

GATED = ("silu", "swiglu", "swish", "geglu")
MAX_SIZE = 1 << 24  # of any size in a configuration
MAX_PARAMETERS = 10**15
SHOWN = 40  # characters of an invalid size in an error
# Families whose feed-forward layers have two matrices with any activation, and families that have three.
PLAIN_FAMILIES = ("bloom", "falcon", "gpt", "mpt", "opt", "phi-", "phi_", "starcoder2")
GATED_FAMILIES = ("gemma",)
# Names of each size in configurations, which differ between model families.
NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden"),
    "heads": ("num_attention_heads", "n_head", "heads"),
    "vocabulary": ("vocab_size", "vocabulary"),
}
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "kv_heads": ("num_key_value_heads", "n_head_kv", "kv_heads"),
    "head_size": ("head_dim", "head_size"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "ffn"),
    "sequence": ("max_position_embeddings", "n_positions", "seq_length", "sequence"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "top_k"),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn"),
    "shared_experts": ("n_shared_experts", "shared_experts"),
    "dense_layers": ("first_k_dense_replace", "dense_layers"),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_size": ("qk_rope_head_dim",),
    "nope_size": ("qk_nope_head_dim",),
    "value_size": ("v_head_dim",),
}


@dataclass(frozen=True)
class Model:
    """A transformer.

    Attributes:
        layers, hidden, heads, kv_heads, head_size: usual sizes.
        ffn: width of a dense feed-forward layer.
        gated: whether a feed-forward layer has a third matrix (SwiGLU).
        vocabulary: rows of the embedding.
        tied: whether the embedding is also the output layer.
        sequence: tokens per sequence.
        experts, experts_per_token, expert_ffn, shared_experts: of a mixture of experts; 0 experts in a dense
            model.
        dense_layers: number of leading layers without experts.
        q_rank, kv_rank, rope_size, value_size: of latent attention; kv_rank is 0 for any other. `head_size`
            is then the size of queries and keys without the rotary part.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    sequence: int
    gated: bool = True
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_size: int = 0
    value_size: int = 0

    @property
    def projections(self) -> tuple[tuple[str, int, int], ...]:
        """Matrices of attention: how tensor parallelism cuts each, inputs, outputs.

        "column" cuts the outputs, "row" the inputs, "whole" neither.
        """
        if not self.kv_rank:
            out = (self.heads + 2 * self.kv_heads) * self.head_size
            return (("column", self.hidden, out), ("row", self.heads * self.head_size, self.hidden))
        queries = self.heads * (self.head_size + self.rope_size)
        down_q = (("whole", self.hidden, self.q_rank), ("column", self.q_rank, queries))
        return (
            *(down_q if self.q_rank else (("column", self.hidden, queries),)),
            ("whole", self.hidden, self.kv_rank + self.rope_size),
            ("column", self.kv_rank, self.heads * (self.head_size + self.value_size)),
            ("row", self.heads * self.value_size, self.hidden),
        )

    @property
    def widths(self) -> tuple[float, float]:
        """Elements of a head: of queries and keys, and the mean of keys and values."""
        key = self.head_size + self.rope_size
        value = self.value_size or self.head_size
        return float(key), (key + value) / 2

    @property
    def attention_parameters(self) -> int:
        """Weights of the attention of one layer."""
        return sum(inputs * outputs for _, inputs, outputs in self.projections)

    @property
    def head_weight(self) -> float:
        """The weights of the output layer, relative to those of a dense layer."""
        return self.vocabulary * self.hidden / (self.attention_parameters + self.dense_ffn_parameters)

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 3 if self.gated else 2

    @property
    def dense_ffn_parameters(self) -> int:
        """Weights of a dense feed-forward layer."""
        return self.matrices * self.hidden * self.ffn

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert."""
        return self.matrices * self.hidden * self.expert_ffn

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return max(self.layers - self.dense_layers, 0) if self.experts else 0

    def parameters(self) -> int:
        """Return the number of weights, without those of norms and biases."""
        dense = (self.layers - self.expert_layers) * self.dense_ffn_parameters
        routed = self.experts + self.shared_experts
        mixed = self.expert_layers * (routed * self.expert_parameters + self.hidden * self.experts)
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.attention_parameters + dense + mixed + tables

    def operations_per_token(self) -> float:
        """Return the floating-point operations of one token, forward and backward, without recomputation.

        Six per weight that the token meets, and the causal half of attention's two products (as in
        Megatron-LM, Narayanan et al., SC 2021, appendix; PaLM's MFU leaves out recomputation, too).
        """
        dense = (self.layers - self.expert_layers) * self.dense_ffn_parameters
        met = self.experts_per_token + self.shared_experts
        mixed = self.expert_layers * (met * self.expert_parameters + self.hidden * self.experts)
        weights = self.layers * self.attention_parameters + dense + mixed + self.vocabulary * self.hidden
        scores = self.layers * self.heads * self.widths[1] * self.sequence  # 2 products, 2 operations, half
        return 6.0 * weights + 3 * 2 * scores


def model_of(config: Mapping[str, Any], sequence: int | None = None) -> Model:
    """Return the model that a configuration describes.

    Args:
        config: keys of a Hugging Face `config.json`.
        sequence: tokens per sequence, if not the maximum of the model.

    Raises:
        UsageError: a size is missing, not a positive number, or larger than that of any model.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = {**config, **nested}
    sizes = {key: _size(config, key, names, required=True) for key, names in NAMES.items()}
    sizes |= {key: _size(config, key, names, required=False) for key, names in OPTIONAL.items()}
    hidden, heads = sizes["hidden"], sizes["heads"]
    latent = sizes["kv_rank"] > 0
    if latent and not sizes["nope_size"]:
        raise UsageError("the configuration has kv_lora_rank but no qk_nope_head_dim: attention is unknown")
    if not latent and not sizes["head_size"] and hidden % heads:
        raise UsageError(f"hidden size {hidden} does not divide into {heads} heads: give head_dim")
    gated = _gated(config)
    ffn = sizes["ffn"] or 4 * hidden
    experts = sizes["experts"]
    model = Model(
        layers=sizes["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else sizes["kv_heads"] or heads,
        head_size=sizes["nope_size"] if latent else sizes["head_size"] or hidden // heads,
        ffn=ffn,
        vocabulary=sizes["vocabulary"],
        sequence=sequence or sizes["sequence"] or 4096,
        gated=bool(config.get("gated", gated)),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=sizes["experts_per_token"] or (1 if experts else 0),
        expert_ffn=(sizes["expert_ffn"] or ffn) if experts else 0,
        shared_experts=sizes["shared_experts"] if experts else 0,
        dense_layers=min(sizes["dense_layers"], sizes["layers"]),
        q_rank=sizes["q_rank"],
        kv_rank=sizes["kv_rank"],
        rope_size=sizes["rope_size"] if latent else 0,
        value_size=sizes["value_size"] if latent else 0,
    )
    if model.parameters() > MAX_PARAMETERS:
        raise UsageError(f"the configuration is of {model.parameters():.3g} weights: more than any model")
    return model


def _gated(config: Mapping[str, Any]) -> bool:
    """Return whether feed-forward layers have a third matrix, by the family, or else by the activation."""
    family = str(config.get("model_type", "")).lower()
    if family.startswith(GATED_FAMILIES):
        return True
    if family.startswith(PLAIN_FAMILIES):
        return False
    activation = config.get("hidden_act", config.get("activation_function", "silu"))
    return str(activation).lower() in GATED


def read_model(path: Path, sequence: int | None = None) -> Model:
    """Read the model of a `config.json`.

    Args:
        sequence: tokens per sequence, if not the maximum of the model.

    Raises:
        InputError: the file cannot be read, or is not a JSON object.
        UsageError: a size is missing.
    """
    try:
        config = json.loads(read_small(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON ({first_line(error)})") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: is not a configuration: a JSON object is needed")
    return model_of(config, sequence)


def _size(config: Mapping[str, Any], key: str, names: tuple[str, ...], required: bool) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(
                f"{name} of the configuration is {shortened(repr(value), SHOWN)}: a whole number is needed"
            )
        if value > MAX_SIZE:
            raise UsageError(
                f"{name} of the configuration is from 0 to {MAX_SIZE:,}, not {shortened(str(value), SHOWN)}"
            )
        if value > 0 or not required:
            return value
    if required:
        raise UsageError(f"the configuration has no {names[0]}: dpro needs it for the {key}")
    return 0


# Properties in which widely used training frameworks differ.


@dataclass(frozen=True)
class Software:
    """How a framework trains.

    Attributes:
        flash: whether attention is fused (Dao et al., arXiv 2205.14135); otherwise its scores are in memory.
        sequence_parallel: whether tensor parallelism cuts norms, too (Korthikanti et al., 2205.05198).
        gradient_bytes: per element that data parallelism reduces.
        overlap: share of data-parallel communication that computation can hide.
        tensor_overlap: share of tensor-parallel communication that computation can hide.
        context_overlap: share of context-parallel communication that computation can hide.
        accumulation_bytes: read and written per parameter when a micro-batch's gradients are added.
        loss_bytes: read and written per logit by the loss, forward and backward together.
        whole_messages: whether each GPU of a tensor-parallel group sends the complete message to the next
            stage, not only its share (the latter is scatter/gather in Narayanan et al., SC 2021).
        balanced: whether stages are cut by weights, including the output layer, instead of by layers.
        kernels: launches by the host per layer and pass, forward.
        collective_kernels: launches that a tensor-parallel collective costs the host.
        head_kernels: launches for embedding, output layer and loss, per pass and micro-batch.
        dtype: of matmuls.
        optimizer_bytes: moved per parameter by a step of the optimizer.
        logit_bytes: per logit, held at the same time: in 16 bits, in fp32, and its gradient.
        activations: factor on the activations that a layer with fused norms, rotation and activations keeps.
        main_gradient_bytes, state_bytes: kept per parameter, besides two bytes for the parameter itself.
    """

    flash: bool = True
    sequence_parallel: bool = True
    gradient_bytes: int = 4
    overlap: float = 0.0
    tensor_overlap: float = 0.0
    context_overlap: float = 0.8
    accumulation_bytes: float = 8.0
    loss_bytes: float = 40.0
    whole_messages: bool = False
    balanced: bool = False
    kernels: float = 30.0
    collective_kernels: float = 4.0
    head_kernels: float = 60.0
    dtype: str = "bf16"
    dropout: bool = False
    optimizer_bytes: float = 34.0
    main_gradient_bytes: float = 4.0
    activations: float = 1.0
    logit_bytes: float = 10.0
    state_bytes: float = 12.0


FRAMEWORKS: Mapping[str, Software] = {
    # Megatron-core with Transformer Engine: fused attention, norms and losses; reductions overlap backward.
    "megatron": Software(overlap=0.5),
    # Megatron-DeepSpeed as of 2022: scores in memory, dropout, no sequence parallelism, unfused loss.
    "megatron-deepspeed": Software(
        flash=False,
        sequence_parallel=False,
        gradient_bytes=2,
        accumulation_bytes=14.0,
        loss_bytes=90.0,
        kernels=76.0,
        dropout=True,
        logit_bytes=16.0,
    ),
    # nanotron as of 2024: stages balanced with the output layer, few fused kernels.
    "nanotron": Software(
        balanced=True,
        loss_bytes=60.0,
        kernels=140.0,
        activations=1.5,
        logit_bytes=16.0,
    ),
}


def framework_named(name: str) -> Software:
    """Return the properties of a framework.

    Raises:
        UsageError: it is unknown.
    """
    if name not in FRAMEWORKS:
        raise UsageError(f"no framework {name!r}: there are {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]
