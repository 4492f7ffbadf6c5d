"""Classification of kernels by name: a versioned table of patterns, in which the first match wins.

Takes names of kernels or communication operators; returns `KernelClass(kind, op)`. Only the name counts: how
and where a kernel was launched is the importers' business. Users add patterns that are tried before this
table, in a TOML file (`$DPRO_CLASSES`, else `~/.config/dpro/classes.toml`)

    [[class]]
    pattern = "my_ring_exchange"   # a regular expression, searched anywhere in the name, ignoring case
    kind = "communication"
    op = "send_recv"               # only where kind is communication

or as a list of such entries that an extension brings.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dpro.errors import InputError
from dpro.plugins import load, places

VERSION = 5  # raise when a name changes class: stored shares by class must not be mixed across versions

COMMUNICATION = "communication"
OTHER = "other"
REDUCTIONS = ("all_reduce", "reduce_scatter")  # operations that add up gradients


@dataclass(frozen=True)
class KernelClass:
    """Class of a kernel: `kind` is one of the classes below, `op` the collective it is part of, if any."""

    kind: str
    op: str = ""


# Operators by the letters of their names: "_allgather_base_", "all_gather_into_tensor" and "AllGather" are
# equal. The first prefix that matches wins, so longer ones come before their own prefixes.
_OPERATIONS = (
    ("allreducebarrier", "barrier"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("bcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("monitoredbarrier", "barrier"),
    ("barrier", "barrier"),
    ("sendrecv", "send_recv"),
    ("send", "send"),
    ("recv", "recv"),
)

_EXPERT_PARALLEL = r"(deep_ep|hybrid_ep|uccl|mori|\bep::|\b(inter|intra)node(_ll)?::)"

# Communication kernels: a lower-case substring that a name must contain before the pattern is tried (names
# are long, patterns slow, and most kernels compute); the pattern; the operation, where the pattern has no
# group `op` that captures it.
_COMMUNICATION = (
    # NCCL and RCCL, old and new names: ncclKernel_*, ncclDevKernel_*, ncclDevKernelDebug_*, and
    # ncclSymkDevKernel_* on symmetric memory. RCCL's Generic kernels do not say what they do.
    ("nccl", r"nccl(Symk?)?(Dev)?Kernel(Debug)?_?(?P<op>\w+)", ""),
    ("nccl", r"nccl\w*?(?P<op>AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv)", ""),
    ("rccl", r"rccl\w*Kernel", ""),
    ("msccl", r"msccl(pp)?(::|_)?\S*?(?P<op>all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)", ""),
    ("msccl", r"msccl\w*Kernel", ""),
    # Expert parallelism: DeepEP, in any namespace, and libraries built like it. Kernels that prepare an
    # exchange on one device (its layout) do not communicate.
    ("dispatch", rf"{_EXPERT_PARALLEL}\S*?(?<!get_)dispatch(?!_layout)|EpDispatch\w*Kernel", "dispatch"),
    ("combine", rf"{_EXPERT_PARALLEL}\S*?combine|EpCombine\w*Kernel", "combine"),
    ("ep::", r"\bep::\S*\b(cached_notify|barrier)\b", "barrier"),
    ("deep_ep", r"deep_ep::\S*\b(cached_notify|barrier)\b", "barrier"),
    ("moe", r"moe_?a2a_?dispatch", "dispatch"),
    ("moe", r"moe_?a2a_?combine", "combine"),
    ("moe", r"moe_?all_?to_?all", "all_to_all"),
    # All-reduces of serving engines: vLLM, SGLang, TensorRT-LLM, FlashInfer, aiter.
    (
        "reduce",
        r"cross_device_reduce|custom_?all_?reduce|(one|two)_?shot_?all_?reduce|all_?reduce_fusion|quickreduce::"
        r"|allreduce_prototype|lamport\w*all_?reduce|lamport_style\w*all_?reduce|trtllm_\w*all_?reduce",
        "all_reduce",
    ),
    ("gather", r"custom_?all_?gather|cross_device_all_?gather", "all_gather"),
    ("custom", r"custom_?reduce_?scatter", "reduce_scatter"),
    # PyTorch on symmetric memory, and Transformer Engine's user buffers.
    ("multimem", r"multimem_\w*?(?P<op>all_?reduce|all_?gather|reduce_?scatter)", ""),
    ("symmetric_memory", r"symmetric_memory::\S*barrier", "barrier"),
    ("signal_kernel", r"\b(put|wait)_signal_kernel", "send_recv"),
    ("userbuffers", r"userbuffers_\w*push_?send|userbuffers_\w*push_?recv", "send_recv"),
    ("userbuffers", r"userbuffers_\w*sum", "reduce_scatter"),
    # NVSHMEM and rocSHMEM.
    ("barrier", r"\b(nv|roc)shmem\w*barrier", "barrier"),
    ("on_stream_kernel", r"\b(barrier|sync)(_all)?_on_stream_kernel", "barrier"),
    ("on_stream_kernel", r"(?P<op>broadcast|alltoall|reduce_?scatter)\w*_on_stream_kernel", ""),
    ("on_stream_kernel", r"fcollect\w*_on_stream_kernel", "all_gather"),
    ("on_stream_kernel", r"(rdxn|reduce)\w*_on_stream_kernel", "all_reduce"),
    ("on_stream_kernel", r"(signal|wait_until|put|get|quiet)\w*_on_stream_kernel", "send_recv"),
    ("shmem", r"\b(nv|roc)shmem\w*(put|get|signal|alltoall|broadcast|reduce)", "all_to_all"),
    ("all", r"\ball_?to_?all_?v?(_2d|Push|_?Kernel)?\b", "all_to_all"),
    ("exchange", r"exchangeSplitAndOffset", "all_to_all"),
    # XLA's instructions, synchronous or as the two ends of an asynchronous one.
    ("al", r"^(ragged-)?(?P<op>all-(reduce|gather|to-all))(-start|-done)?(\.\d+)*$", ""),
    ("reduce-scatter", r"^(?P<op>reduce-scatter)(-start|-done)?(\.\d+)*$", ""),
    ("collective-", r"^collective-permute(-start|-done)?(\.\d+)*$", "send_recv"),
    ("collective-", r"^collective-(?P<op>broadcast)(-start|-done)?(\.\d+)*$", ""),
    # Copy engines: peers' memory is written by copies, not by kernels.
    ("memcpy", r"^Memcpy (PtoP|P2P)", "send_recv"),
    # On the CPU: gloo, MPI and others, by the names of their annotations.
    (":", r"^(gloo|mpi|ucc|nccl|rccl|xccl|hccl):(?P<op>\w+)", ""),
    (
        "mpi_",
        r"^P?MPI_I?(?P<op>all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|reduce|bcast|gather|scatter)",
        "",
    ),
    ("mpi_", r"^P?MPI_(I|R|S|B)?(?P<op>sendrecv|send|recv|barrier)", ""),
)

# Compute kernels. The order decides for names that match several: attention built on cutlass is attention.
_COMPUTE = (
    ("fused", r"^triton_(poi|red|per|for|_|tem(?!\w*(attention|mm|convolution)))"),
    ("optimizer", r"multi_tensor_apply|foreach|fused_?(adam|sgd|lamb|adagrad)|adam_?w?_(kernel|cuda)"),
    (
        "attention",
        r"flash|fmha|attention|attn|\bmla\b|paged_kv|kv_index|sdpa|merge_state|rotary|(?<![a-z])rope"
        r"|compute_dot_do_o|convert_dq_to|(?<![a-z])(mha|gqa|mqa)(?![a-z])|kv_?cache|reshape_and_cache"
        # Replacements of attention: state-space models, and linear attention.
        r"|selective_(scan|state)|chunk_(scan|state|cumsum|gla|fwd|bwd|scaled_dot)|delta_(rule|net)|ssm_scan"
        r"|(?<![a-z])wkv",
    ),
    (
        "embedding",
        r"embedding|embs?_|indexing_backward|index_?(select|add|put|copy|fill)"
        r"|permute_(\dD|indices|pooled|embedding)|bounds_check_indices|linearize_index|offsets_range|lookup"
        r"|sum_and_scatter|partial_segments"
        r"|jagged|recat|(get|set)_rows|gather_kernel|scatter_gather|index_elementwise|_scatter_|krn_partial"
        r"|compute_grad_weight",
    ),
    (
        "convolution",
        r"conv(?!ert)|dgrad|wgrad|fprop|winograd|scudnn|cask_cudnn|Im2Col|col2im|igemm|miopenSp3Asm"
        r"|ImplicitGemm|kern_precompute_indices|cudnn::computeOffsets",
    ),
    (
        "normalisation",
        r"(batch|layer|rms|group|l2)_?norm|\bbn_|norm_fwd|norm_bwd|RowwiseMoments"
        r"|GammaBeta|ComputeInternalGradients|ComputeFusedParams|ComputeBackwardFused|bn_fw|bn_bw"
        r"|cuComputeGradInput",
    ),
    (
        "gemm",
        r"(?<!fb)gemm|gemv|mul_mat|nvjet|cutlass|cublas|Cijk_|splitKreduce|split_?k_?reduce|wgmma|matmul"
        r"|_mm_kernel|bmm|epilogue::impl|dot_kernel|reduce_1Block_kernel|XXT_kernel|ba_plus_cAA"
        r"|fused_moe_kernel|^Custom_Cijk|^triton_tem\w*mm|wvSplitK|marlin|machete|gptq|awq|exllama"
        r"|^dot(\.\d+)*$",
    ),
    (
        "sort",
        r"sort|topk|top_k|scan|cumsum|unique|RadixSort|DeviceSelect|Onesweep|histogram|bincount"
        r"|nonzero",
    ),
    (
        "reduction",
        r"softmax|log_softmax|nll_?loss|(?<![a-z])loss|NLLCriterion|cross_entropy|NormTwoOps|reduce_kernel"
        r"|DeviceReduce|Reduce|pool|mean|arg(max|min)",
    ),
    (
        "memory",
        r"CatArray|concat|copy|(?<![a-z])cpy_|memcpy|memset|transpose|nchwToNhwc|nhwcToNchw|FillFunctor|fill|pad"
        r"|roll_cuda|flip|tensorTransform|convertTensor|batched_transpose|amd_rocclr",
    ),
    (
        "elementwise",
        r"elementwise|unary|bin_bcast|scale_f(16|32)|EigenMetaKernel|vectorized|unrolled|pointwise"
        r"|distribution|dropout|CUDAFunctor|Functor"
        r"|activation|quant|FP8|cast|scalePackedTensor|op_tensor|OpTensor|act_and_mul|silu|gelu|swiglu"
        r"|geglu|upsample|SubTensorOp|triu|tril|^loop_(\w+_)?fusion(_\d+)*$",
    ),
)

KINDS = (COMMUNICATION, *(kind for kind, _ in _COMPUTE), OTHER)

COMMUNICATION_PATTERNS = tuple(
    (needed, re.compile(pattern, re.IGNORECASE), op) for needed, pattern, op in _COMMUNICATION
)
_COMPUTE_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _COMPUTE)


@cache
def operation(name: str) -> str:
    """Return the collective that an operator's name denotes, as spelled in `collectives.op`.

    Args:
        name: such as `nccl:_all_gather_base`, `c10d::allreduce_`, `gloo:send 0->1`, `AllReduce_Sum_f32`.

    Returns:
        The operation; empty where the name denotes none (`wait`, `coalesced`).
    """
    letters = re.sub(r"[^a-z]", "", name.lower().rsplit(":", 1)[-1])
    return next((op for start, op in _OPERATIONS if letters.startswith(start)), "")


@cache
def classify(name: str) -> KernelClass:
    """Return the class of a kernel, by its name.

    Raises:
        InputError: an entry of the user's own table is invalid.
    """
    first = _own_or_communication(name)
    if first:
        return first
    for kind, compute in _COMPUTE_PATTERNS:
        if compute.search(name):
            return KernelClass(kind)
    return KernelClass(OTHER)


def _own_or_communication(name: str) -> KernelClass | None:
    """Return the class by the user's own table or as communication, both tried first; None if none fits."""
    for pattern, class_ in own_classes():
        if pattern.search(name):
            return class_
    letters = name.lower()
    for needed, pattern, op in COMMUNICATION_PATTERNS:
        if needed in letters and (match := pattern.search(name)):
            return KernelClass(COMMUNICATION, op or operation(match.groupdict().get("op", "")))
    return None


def is_communication(name: str) -> bool:
    """Return whether a kernel communicates; called for every name, so it skips the compute patterns."""
    class_ = _own_or_communication(name)
    return class_ is not None and class_.kind == COMMUNICATION


def table_version() -> str:
    """Return the version of dpro's table, followed by `+` and a digest of the user's own entries, if any.

    Raises:
        InputError: an entry of the user's own table is invalid.
    """
    user_classes = [(pattern.pattern, class_.kind, class_.op) for pattern, class_ in own_classes()]
    digest = hashlib.sha256(repr(user_classes).encode()).hexdigest()[:8]
    return f"{VERSION}+{digest}" if user_classes else str(VERSION)


@cache
def own_classes() -> tuple[tuple[re.Pattern[str], KernelClass], ...]:
    """Return the user's patterns and their classes: of the TOML file, then of extensions, by name.

    Raises:
        InputError: an entry is invalid, or a source cannot be read.
    """
    return tuple(
        _checked(entry, f"{where}: class {number}")
        for where, entries in _own_tables()
        for number, entry in enumerate(entries, start=1)
    )


def _own_tables() -> Iterator[tuple[str, Sequence[Any]]]:
    chosen = os.environ.get("DPRO_CLASSES")
    path = Path(chosen) if chosen else Path.home() / ".config" / "dpro" / "classes.toml"
    if chosen or path.is_file():
        yield str(path), _read_toml(path)
    for name, place in places("classes").items():
        where = f"classes {name} ({place})"
        try:
            entries = list(load(place))
        except Exception as error:  # the user's code may raise anything
            raise InputError(f"{where}: cannot be loaded ({type(error).__name__}: {error})") from error
        yield where, entries


def _read_toml(path: Path) -> Sequence[Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); DPRO_CLASSES names it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML ({error})") from error
    entries = document.get("class", [])
    unknown = sorted(document.keys() - {"class"})
    if unknown or not isinstance(entries, list):
        raise InputError(f"{path}: {', '.join(unknown) or 'class'}: only [[class]] tables are allowed")
    return entries


def _checked(entry: Any, where: str) -> tuple[re.Pattern[str], KernelClass]:
    """Return one entry as a pattern and its class; raise an `InputError` that names an invalid entry."""
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: not a table with pattern, kind and op")
    texts = {name: entry.get(name, "") for name in ("pattern", "kind", "op")}
    where += f" ({texts['pattern']!r})"
    unknown = sorted(map(str, entry.keys() - texts.keys()))
    if unknown:
        raise InputError(f"{where}: unknown key {', '.join(unknown)}; there are pattern, kind and op")
    if not all(isinstance(text, str) for text in texts.values()) or not texts["pattern"]:
        raise InputError(f"{where}: pattern, kind and op must be strings, and pattern must not be empty")
    if texts["kind"] not in KINDS:
        raise InputError(f"{where}: kind {texts['kind']!r} is none of {', '.join(KINDS)}")
    if texts["op"] and texts["kind"] != COMMUNICATION:
        raise InputError(f"{where}: op goes with kind {COMMUNICATION!r} only")
    try:
        return re.compile(texts["pattern"], re.IGNORECASE), KernelClass(texts["kind"], texts["op"])
    except re.error as error:
        raise InputError(f"{where}: not a regular expression ({error})") from error
