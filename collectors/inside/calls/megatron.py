"""Gradient buckets of Megatron-core's DistributedDataParallel, which is no module of torch's DDP.

In: its class, once the job itself has imported it, and its modules. Out: their buckets, as in `buckets.json`.
Only attributes are read; one that another version lacks gives up the buckets, not the job.
"""

from __future__ import annotations

import sys
from typing import Any

DDP_OF_MEGATRON = "megatron.core.distributed.distributed_data_parallel"
# By what Megatron-core calls them: experts have groups of ranks, and so buckets, of their own.
SOURCES = {
    "bucket_groups": "Megatron-core buckets",
    "expert_parallel_bucket_groups": "Megatron-core buckets of experts",
}


def ddp_class() -> Any:
    """Return Megatron-core's class that wraps a module; None where the job has not imported it."""
    return getattr(sys.modules.get(DDP_OF_MEGATRON), "DistributedDataParallel", None)


def of_megatron(module: Any) -> list[dict[str, Any]]:
    """Buckets in the order in which the last layers' come first, their parameters likewise.

    That is the order in which Megatron-core expects gradients, not one in which they were seen. `bytes` are
    those of the reduction: with a distributed optimizer, of the padded buffer.
    """
    named = [(name, each) for name, each in module.module.named_parameters() if each.requires_grad]
    known = {id(parameter): (index, name) for index, (name, parameter) in enumerate(named)}
    found = []
    for attribute, source in SOURCES.items():
        groups = getattr(module, attribute, ())
        buckets = [_of_bucket(bucket, known) for group in groups for bucket in group.buckets]
        if buckets:
            found.append({"source": source, "buckets": buckets})
    return found


def _of_bucket(bucket: Any, known: dict[int, tuple[int, str]]) -> dict[str, Any]:
    item = bucket.grad_data.element_size()  # gradients may be reduced in another type than that of weights
    places = [known.get(id(parameter), (-1, "")) for parameter in bucket.params_list]
    return {
        "bytes": int(bucket.grad_data.numel() * item),
        "parameters": [index for index, _ in places],
        "hook": "",
        "names": [name for _, name in places],
        "parameter_bytes": [int(parameter.numel() * item) for parameter in bucket.params_list],
        "shapes": [list(parameter.shape) for parameter in bucket.params_list],
    }
