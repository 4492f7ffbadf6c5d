"""How frameworks that are in wide use train: what each does unlike the others.

Kernels per layer, and what norms and activation functions keep, were chosen with the tables of
docs/reality.md in sight, one number per framework; the rest is how each is written.
"""

from __future__ import annotations

from collections.abc import Mapping

from dpro.errors import UsageError
from dpro.replay.layouts.inputs.machine import Software

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
    """What a framework does.

    Raises:
        UsageError: it is not known.
    """
    if name not in FRAMEWORKS:
        raise UsageError(f"no framework {name!r}: there are {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]
