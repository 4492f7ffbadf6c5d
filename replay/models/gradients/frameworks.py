"""Which framework reduces the gradients of a run, and what to write in it for a change of its reductions.

In: a run's gradient buckets, whose source its recorder named. Out: the name of the framework, and its own
settings. DDP's are what edits say by themselves.
"""

from __future__ import annotations

from dpro.schema import BUCKETS
from dpro.store import Run

MEGATRON, DEEPSPEED, FSDP2 = "Megatron-core", "DeepSpeed", "FSDP2"
FRAMEWORKS = (MEGATRON, DEEPSPEED, FSDP2)
NOT_THERE = "it has no such setting"


def framework_of(run: Run | None) -> str:
    """One of `FRAMEWORKS`; empty for DDP, for several of them, and where the run does not say."""
    sources = set() if run is None else set(run.table(BUCKETS, ["source"])["source"].unique())
    found = {name for name in FRAMEWORKS for source in sources if source.startswith(name)}
    return found.pop() if len(found) == 1 else ""


def of_bucket_size(framework: str, elements: int) -> str:
    """The setting for buckets of a size.

    Args:
        framework: one of `FRAMEWORKS`.
    """
    return {
        MEGATRON: (
            f"DistributedDataParallelConfig(bucket_size={elements}, overlap_grad_reduce=True), which counts "
            "parameters; without overlap_grad_reduce there is one bucket"
        ),
        DEEPSPEED: f'"zero_optimization": {{"reduce_bucket_size": {elements}}}, which counts elements',
        FSDP2: f"fully_shard around groups of layers of about {elements} parameters: each is one reduction",
    }[framework]


def of_half_precision(framework: str, dtype: str) -> str:
    """The setting for reductions in half precision.

    Args:
        framework: one of `FRAMEWORKS`.
        dtype: fp16 or bf16.
    """
    torch_dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[dtype]
    return {
        MEGATRON: "DistributedDataParallelConfig(grad_reduce_in_fp32=False), with parameters in that type",
        DEEPSPEED: f'"communication_data_type": "{dtype}"',
        FSDP2: f"fully_shard(…, mp_policy=MixedPrecisionPolicy(reduce_dtype={torch_dtype}))",
    }[framework]


def of_no_overlap(framework: str) -> str:
    """The setting for reductions after backward.

    Args:
        framework: one of `FRAMEWORKS`.
    """
    return {
        MEGATRON: "DistributedDataParallelConfig(overlap_grad_reduce=False)",
        DEEPSPEED: '"zero_optimization": {"overlap_comm": false}',
        FSDP2: NOT_THERE,
    }[framework]
