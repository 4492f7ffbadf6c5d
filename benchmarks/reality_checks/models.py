"""Models that published tables name, by their public configurations; clusters, by their known properties."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from dpro.extensions.plan.model import Model
from dpro.replay.cost.kernels.roofline import model_named
from dpro.replay.cost.machine import Machine, machine_of

VOCABULARY_OF_MEGATRON = 51200  # GPT-2's, padded
# Layers, hidden, heads, kv heads, ffn, vocabulary.
DENSE: Mapping[str, tuple[int, int, int, int, int, int]] = {
    "llama27b": (32, 4096, 32, 32, 11008, 32000),
    "llama213b": (40, 5120, 40, 40, 13824, 32000),
    "llama270b": (80, 8192, 64, 8, 28672, 32000),
    "llama38b": (32, 4096, 32, 8, 14336, 128256),
    "llama370b": (80, 8192, 64, 8, 28672, 128256),
    "llama3405b": (126, 16384, 128, 8, 53248, 128256),
    "qwen38b": (36, 4096, 32, 8, 12288, 151936),
    "qwen332b": (64, 5120, 64, 8, 25600, 151936),
    "gpt3175b": (96, 12288, 96, 96, 49152, 51200),
}
# The columns of DENSE, then experts, experts per token, width of an expert, shared experts, dense layers.
MIXED: Mapping[str, tuple[int, ...]] = {
    "mixtral8x7b": (32, 4096, 32, 8, 14336, 32000, 8, 2, 14336, 0, 0),
    "mixtral8x22b": (56, 6144, 48, 8, 16384, 32768, 8, 2, 16384, 0, 0),
    "qwen330ba3b": (48, 2048, 32, 4, 6144, 151936, 128, 8, 768, 0, 0),
    "qwen3235ba22b": (94, 4096, 64, 4, 12288, 151936, 128, 8, 1536, 0, 0),
}
# Latent attention: layers, hidden, heads, ffn, vocabulary, experts, per token, width, shared, dense, rank of
# queries.
LATENT: Mapping[str, tuple[int, ...]] = {
    "deepseekv2": (60, 5120, 128, 12288, 102400, 160, 6, 1536, 2, 1, 1536),
    "deepseekv2lite": (27, 2048, 16, 10944, 102400, 64, 6, 1408, 2, 1, 0),
    "deepseekv3": (61, 7168, 128, 18432, 129280, 256, 8, 2048, 1, 3, 1536),
}
# nanotron's models of the ultrascale page: layers, hidden, heads, ffn. Its printed utilisation implies as
# many heads for keys and values as for queries, and 131,072 words.
ULTRASCALE: Mapping[str, tuple[int, int, int, int]] = {
    "1B": (16, 2048, 32, 8192),
    "3B": (28, 3072, 24, 8192),
    "8B": (32, 4096, 32, 14336),
    "70B": (80, 8192, 64, 28672),
    "80B": (80, 8192, 64, 28672),
}


def named(name: str, layers: int | None, sequence: int) -> Model | None:
    """Return a model by its name, with this many layers if given; None where it is not known."""
    key = re.sub(r"[^a-z0-9]", "", name.lower().replace("3.1", "3").replace("instruct", ""))
    if key in DENSE:
        whole, hidden, heads, kv_heads, ffn, words = DENSE[key]
        size = 128 if "qwen3" in key else hidden // heads
        return Model(layers or whole, hidden, heads, kv_heads, size, ffn, words, sequence)
    if key in MIXED:
        whole, hidden, heads, kv_heads, ffn, words, *mixed = MIXED[key]
        model = Model(layers or whole, hidden, heads, kv_heads, 128, ffn, words, sequence)
        names = ("experts", "experts_per_token", "expert_ffn", "shared_experts", "dense_layers")
        return replace(model, **dict(zip(names, mixed)))
    if key in LATENT:
        whole, hidden, heads, ffn, words, experts, per_token, width, shared, dense, rank = LATENT[key]
        model = Model(layers or whole, hidden, heads, heads, 128, ffn, words, sequence)
        return replace(
            model,
            experts=experts,
            experts_per_token=per_token,
            expert_ffn=width,
            shared_experts=shared,
            dense_layers=dense,
            q_rank=rank,
            kv_rank=512,
            rope_size=64,
            value_size=128,
        )
    return None


def of_megatron(hidden: int, layers: int, heads: int, sequence: int, vocabulary: int) -> Model:
    """Return a GPT of Megatron's: a feed-forward width of four times the hidden size, tied embeddings."""
    return Model(
        layers,
        hidden,
        heads,
        heads,
        hidden // heads,
        4 * hidden,
        vocabulary,
        sequence,
        gated=False,
        tied=True,
    )


def of_ultrascale(name: str, sequence: int) -> Model | None:
    """Return a model of the ultrascale page; None where it is not known."""
    if name not in ULTRASCALE:
        return None
    layers, hidden, heads, ffn = ULTRASCALE[name]
    return Model(layers, hidden, heads, heads, hidden // heads, ffn, 131072, sequence)


def a100() -> Machine:
    """Return DGX-like hosts of A100."""
    return machine_of("A100-SXM4-80GB")


def bloom() -> Machine:
    """Return BLOOM's hosts: links between their A100 carry less than those of a DGX, and matmuls take longer.

    Both were set with its rows in sight.
    """
    return replace(a100(), inside_gbps=130.0, compute=1.15)


def ultrascale() -> Machine:
    """Return the H100 cluster of the ultrascale page.

    Set with its rows in sight: a step of a ring across hosts takes 45 us, and while messages of a pipeline
    cross hosts, the host waits 280 us per rank for any tensor-parallel collective, so that layers take this
    long whatever the micro-batch. The cause is not known.
    """
    return replace(machine_of("H100"), outside_us=45.0, crossed_us=280.0)


def of_accelerator(name: str) -> Machine | None:
    """Return a machine by an accelerator's name in MLPerf's logs; None where it has no data sheet."""
    gpu = next((key for key in ("GB200", "GB300") if key in name), "") or model_named(name)
    if not gpu:
        found = re.search(r"\b(B200|B300|H100|H200|MI3\d\dX|A100)\b", name)
        gpu = found.group(1) if found else ""
    if not gpu:
        return None
    return machine_of(gpu, per_host=72 if gpu.startswith("GB") else 8)
