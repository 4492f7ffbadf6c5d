"""What a kernel does, told by its name: a versioned table of patterns, first match wins.

In: names of kernels or communication operators. Out: `KernelClass(kind, op)`. It knows nothing but the
name: how a kernel was launched, or by whom, is the importers' business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

VERSION = 1  # raise when a name changes class, so that stored shares can be told apart

COMMUNICATION = "communication"
OTHER = "other"


@dataclass(frozen=True)
class KernelClass:
    """Class of a kernel: `kind` is one of the classes below, `op` the collective it is part of, if any."""

    kind: str
    op: str = ""


# Operators by the letters of their name: "_allgather_base_", "all_gather_into_tensor", "AllGather" are one.
# Longer names come before those they begin with.
_OPERATIONS = (
    ("allreducebarrier", "barrier"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("monitoredbarrier", "barrier"),
    ("barrier", "barrier"),
    ("sendrecv", "send_recv"),
    ("send", "send"),
    ("recv", "recv"),
)

# Communication kernels: the group named `op` holds the operation, else the second item names it.
_COMMUNICATION = (
    (r"nccl(Dev)?Kernel_?(?P<op>\w+)", ""),  # NCCL and RCCL, old and new names
    (r"nccl\w*?(?P<op>AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv)", ""),
    (r"deep_ep::\S*\b(notify_dispatch|dispatch)\b", "dispatch"),
    (r"deep_ep::\S*\b(notify_combine|combine)\b", "combine"),
    (
        r"cross_device_reduce|custom_?all_?reduce|(one|two)_?shot_?all_?reduce|allreduce_fusion_kernel",
        "all_reduce",
    ),
    (r"multimem_(one_shot_)?all_reduce|oneShotAllReduce|twoShotAllReduce|lamport\w*allreduce", "all_reduce"),
    (r"multimem_all_gather|custom_?all_?gather|cross_device_all_?gather", "all_gather"),
    (r"custom_?reduce_?scatter|multimem_reduce_?scatter", "reduce_scatter"),
    (r"nvshmem\w*barrier", "barrier"),
    (r"nvshmem\w*(put|get|signal|alltoall|broadcast|reduce)", "all_to_all"),
)

# Everything else. The order settles names that fit several: attention built on cutlass is attention.
_COMPUTE = (
    ("fused", r"^triton_(poi|red|per|tem|for|_)"),
    ("optimizer", r"multi_tensor_apply|foreach|fused_?(adam|sgd|lamb|adagrad)|adam_?w?_(kernel|cuda)"),
    ("attention", r"flash|fmha|attention|attn|\bmla\b|paged_kv|kv_index|sdpa|merge_state|rotary|rope"),
    (
        "embedding",
        r"embedding|embs?_|indexing_backward|index_?(select|add|put|copy|fill)"
        r"|permute_(\dD|indices|pooled|embedding)|bounds_check_indices|linearize_index|lookup"
        r"|jagged|recat|gather_kernel|scatter_gather|index_elementwise|_scatter_|krn_partial"
        r"|compute_grad_weight",
    ),
    (
        "convolution",
        r"conv(?!ert)|dgrad|wgrad|fprop|winograd|scudnn|cask_cudnn|Im2Col|col2im|igemm|miopenSp3Asm"
        r"|ImplicitGemm",
    ),
    (
        "normalisation",
        r"batch_?norm|layer_?norm|rms_?norm|group_?norm|\bbn_|norm_fwd|norm_bwd|RowwiseMoments"
        r"|GammaBeta|ComputeInternalGradients|ComputeFusedParams|ComputeBackwardFused|bn_fw|bn_bw",
    ),
    (
        "gemm",
        r"gemm|gemv|nvjet|cutlass|cublas|Cijk_|splitKreduce|split_?k_?reduce|wgmma|matmul"
        r"|_mm_kernel|bmm|epilogue::impl|dot_kernel|reduce_1Block_kernel|XXT_kernel|ba_plus_cAA"
        r"|fused_moe_kernel|^Custom_Cijk",
    ),
    (
        "sort",
        r"sort|topk|top_k|scan|cumsum|unique|RadixSort|DeviceSelect|Onesweep|histogram|bincount"
        r"|nonzero",
    ),
    (
        "reduction",
        r"softmax|log_softmax|nll_?loss|NLLCriterion|cross_entropy|NormTwoOps|reduce_kernel"
        r"|DeviceReduce|Reduce|pool|mean|arg(max|min)",
    ),
    (
        "memory",
        r"CatArray|copy|memcpy|memset|transpose|nchwToNhwc|nhwcToNchw|FillFunctor|fill|pad"
        r"|roll_cuda|flip|tensorTransform|batched_transpose|amd_rocclr",
    ),
    (
        "elementwise",
        r"elementwise|vectorized|unrolled|pointwise|distribution|dropout|CUDAFunctor|Functor"
        r"|activation|quant|FP8|cast|scalePackedTensor|op_tensor|OpTensor|act_and_mul|silu|gelu"
        r"|SubTensorOp|triu|tril",
    ),
)

_COMMUNICATION_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE), op) for pattern, op in _COMMUNICATION)
_COMPUTE_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _COMPUTE)


@cache
def operation(name: str) -> str:
    """The collective that an operator's name stands for, as `collectives.op` spells it.

    Args:
        name: such as `nccl:_all_gather_base`, `c10d::allreduce_`, `gloo:send 0->1`, `AllReduce_Sum_f32`.

    Returns:
        The operation, or an empty string where the name is of none (`wait`, `coalesced`).
    """
    letters = re.sub(r"[^a-z]", "", name.lower().rsplit(":", 1)[-1])
    return next((op for start, op in _OPERATIONS if letters.startswith(start)), "")


@cache
def classify(name: str) -> KernelClass:
    """Class of a kernel by its name.

    Args:
        name: as the profiler recorded it.
    """
    for pattern, op in _COMMUNICATION_PATTERNS:
        found = pattern.search(name)
        if found:
            return KernelClass(COMMUNICATION, op or operation(found["op"]))
    for kind, compute in _COMPUTE_PATTERNS:
        if compute.search(name):
            return KernelClass(kind)
    return KernelClass(OTHER)


def is_communication(name: str) -> bool:
    """Whether a kernel moves data between ranks."""
    return classify(name).kind == COMMUNICATION
