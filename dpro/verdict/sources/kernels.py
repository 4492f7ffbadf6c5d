"""Advice on kernels: fewer bits, tensor cores, fused attention and pointwise work, what dominates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence

import polars as pl

from dpro.replay.cost.kernels.roofline import GPUS, stored_as
from dpro.replay.whatif.edit import kind_of_job
from dpro.replay.whatif.edits.kernels import COMPILED
from dpro.verdict.advice import ROUGH, Advice, best_of, by_edit
from dpro.verdict.facts import JobFacts, short_kernel
from dpro.verdict.limits import (
    COMPUTE,
)
from dpro.verdict.scores import parts_on_scores
from dpro.words import counted

DOMINANT = 0.15  # of compute: least share of a kernel that is worth replacing
NEARLY_ALL = 0.9  # share of a kernel's time within attention from which it counts
SURE_TO_SHOW = 0.08  # least share of computing time for which a family of kernels is worth a line
CASTING = 0.75  # most of their time that other kernels take on half the bytes: others cast in addition
IN_MEMORY = ("elementwise", "memory", "reduction", "normalisation")  # families that take their time for bytes
KEPT_IN_FP32 = (
    r"(?i)softmax|layer_?norm|group_?norm|rms_?norm|loss|nll|\b(exp|log|pow)\w*_kernel"  # by autocast
)
TENSOR_CORES = (2.0, 6.0)  # least and most speed-up of matmuls over FP32 without tensor cores
EIGHT_BITS = (1.2, 2.0)  # the same in 8 bits over 16, on tensor cores
FEW_BITS, FEW_BITS_WITHOUT_FP64 = (1.0, 8.0), (8.0, 64.0)  # least and most speed-up of FP32 over FP64
HAS_FP64 = r"P100|V100|A100|A30\b|A800|H100|H200|H800|H20\b|B200|MI\d{2,3}"  # GPUs with units for it
FUSED_ATTENTION = (0.35, 0.12)  # time of a fused kernel as a share of unfused attention's: most, least
FUSED_WITH = 7  # kernels at most, with the softmax, between the two matmuls of unfused attention
WRITTEN_WITH = 16  # the same, where the softmax is written out
# Time of FlashAttention 2 as a share of version 1's, and of 3 on Hopper of 2's: most, least (their papers).
NEWER_ATTENTION = (0.75, 0.5)
MEASURED = 0.8  # least time of convolutions whose kernels cuDNN chose by measuring, as a share of now
BEFORE_VOLTA = r"(?i)\b(tesla )?([kmp]\d+|p100|gtx (9|10)\d\d|titan xp?|quadro [kmp]\d+)\b"  # GPUs
BEFORE_AMPERE = BEFORE_VOLTA + r"|\b(v100|t4|titan|rtx 20\d\d|quadro)"
MORE_ROWS = (2.0, 8.0)  # times as many rows that products with few take in about the same time: least, most
MAINLY = 0.5  # of computing time: products that take more are what to change
_SOFTMAX = r"(?i)softmax"
_WRITTEN_OUT = (r"(?i)\bexp_kernel", r"(?i)MaxOps|MaxNanFunctor")  # parts of a softmax; with a log, of a loss
_LOG = r"(?i)\blog_kernel"
_FEW_ROWS = r"(?i)gemv|mat_vec|nvjet_\w*?_\d+x8_"  # products of a matrix and one row, or at most 8
_OF_LOSS = r"(?i)nll|loss|log_?softmax|softmax_warp_\w+<.*\d, true"  # `true`: of the logarithm


def use_fewer_bits(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Multiply in FP32 rather than FP64, and on tensor cores rather than in FP32."""
    families = facts.kernels.filter(pl.col("family").is_in(["gemm", "convolution", "attention"]))
    matmuls = families["name"].to_list()
    doubled = [name for name in matmuls if re.search(r"(?i)(?<![a-z])dgemm|d884|_f64|<double|double>", name)]
    if facts.share_of(doubled) >= SURE_TO_SHOW:
        may_have_fp64 = not facts.gpu or re.search(HAS_FP64, facts.gpu)
        factors = FEW_BITS if may_have_fp64 else FEW_BITS_WITHOUT_FP64
        low, high = (facts.gain_of_faster(dict.fromkeys(doubled, 1 / factor)) for factor in factors)
        share = facts.share_of(doubled)
        do = f"matmuls in FP32, not FP64 ({short_kernel(doubled[0])}): {share:.0%} of compute"
        yield Advice("amp", do, low, high, "a line of code", "the job needs no more than 24 bits")
    names = [name for name in matmuls if without_tensor_cores(name)]
    on_tensor_cores = [name for name in matmuls if name not in names and stored_as(name) == "tf32"]
    times = _times_of_tensor_cores(facts.gpu, [*names, *on_tensor_cores])
    if times < TENSOR_CORES[0]:
        return
    computing = facts.computing_kernels.select("name", "family").iter_rows()
    floats = [name for name, family in computing if _is_halved(name, family, of_compiled=bool(names))]
    least, most = (min(factor, part * times) for factor, part in zip(TENSOR_CORES, (0.75, 1.0)))
    autocast = dict.fromkeys([*on_tensor_cores, *floats], 0.5) | dict.fromkeys(names, 1 / most)
    if facts.share_of(names) >= SURE_TO_SHOW:
        gpu = GPUS.get(facts.gpu)
        has_tf32 = gpu is None or gpu.tflops["tf32"] > gpu.tflops["fp32"]
        how = 'torch.set_float32_matmul_precision("high"), or autocast' if has_tf32 else "autocast"
        do = f"matmuls on tensor cores ({how}): {short_kernel(names[0])} and others are FP32, "
        do += f"{facts.share_of(names):.0%} of compute"
        at_least = dict.fromkeys(names, 1 / least)
    elif facts.share_of(on_tensor_cores) >= SURE_TO_SHOW:
        do = f"autocast to 16 bits: {short_kernel(on_tensor_cores[0])} and others are TF32, other kernels "
        do += f"FP32, together {facts.share_of([*on_tensor_cores, *floats]):.0%} of compute"
        at_least = dict.fromkeys(floats, CASTING)
    else:
        return
    low, high = (facts.gain_of_faster(factors) for factors in (at_least, autocast))
    assumes = "the model works as well with fewer bits; at most, other kernels move half the bytes, too"
    yield Advice("amp", do, low, high, "a line of code", assumes)


def use_eight_bits(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Multiply in 8 bits rather than 16, where no gradient needs more."""
    if limit != COMPUTE or kind_of_job(facts.job.graph).trains is not False:
        return
    families = facts.kernels.filter(pl.col("family").is_in(["gemm", "convolution"]))
    names = [name for name in families["name"] if stored_as(name) in ("fp16", "bf16")]
    if facts.share_of(names) < MAINLY:
        return
    low, high = (facts.gain_of_faster(dict.fromkeys(names, 1 / factor)) for factor in EIGHT_BITS)
    do = f"weights and activations in 8 bits (INT8, FP8): {short_kernel(names[0])} and others "
    do += f"multiply in 16, {facts.share_of(names):.0%} of compute"
    assumes = "the model, calibrated for that, works as well; the GPU multiplies in 8 bits"
    yield Advice("amp", do, low, high, "new code", assumes)


def _is_halved(kernel: str, family: str, of_compiled: bool) -> bool:
    """Return whether a kernel moves half the bytes in 16 bits, as autocast runs it.

    Args:
        of_compiled: whether kernels made by torch.compile count, whose names do not show their type.
    """
    if kernel.startswith(COMPILED):
        return of_compiled and not re.search(r"16|half", kernel)
    is_moved = family in IN_MEMORY and stored_as(kernel) == "fp32"
    return is_moved and not re.search(KEPT_IN_FP32, kernel)


def without_tensor_cores(kernel: str) -> bool:
    """Return whether the name of a matmul, convolution or attention says that it multiplies in FP32."""
    fp32 = r"(?i)fmha\w*_f32|sgemm|scudnn|_f32f32_f32f32|simt|(engine|convolve\w*|winograd\w*)<float"
    return bool(re.search(fp32, kernel)) and not re.search(
        r"(?i)tensorop|tf32|s1688|s884|s16816|hmma|h884|bf16|half", kernel
    )


def _times_of_tensor_cores(gpu: str, names: Sequence[str]) -> float:
    """Return a GPU's best matmul rate over its FP32 rate; infinite if unknown, 1 without tensor cores."""
    if gpu in GPUS and GPUS[gpu].tflops:
        peaks = GPUS[gpu].tflops
        return max(peaks.values()) / peaks["fp32"] if "fp32" in peaks else math.inf
    has = gpu or any(re.search(r"volta|turing|ampere|sm[789]\d|sm1\d\d", name) for name in names)
    return math.inf if has else 1.0


def fuse_attention(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Fuse attention, or use the version for the GPU at hand."""
    computing = facts.computing_kernels
    by_shapes = parts_on_scores(facts.spans, facts.analysis.steps)
    unfused = by_shapes or dict.fromkeys(_unfused_attention(facts), 1.0)
    share = sum(part * facts.share_of([name]) for name, part in unfused.items())
    if share >= SURE_TO_SHOW:
        low, high = (
            facts.gain_of_faster({name: 1 - part * (1 - factor) for name, part in unfused.items()})
            for factor in FUSED_ATTENTION
        )
        named = f"{short_kernel(next(iter(unfused)))} and {'others on them' if by_shapes else 'its matmuls'}"
        yield Advice(
            "attention",
            f"scaled_dot_product_attention: scores are written to memory ({named}, {share:.0%} of compute)",
            low,
            high,
            "a line of code",
            ROUGH,
        )
    for version, kernels, runs_newer in _VERSIONS:
        older = [name for name in computing["name"] if re.search(kernels, name) and "sm90" not in name]
        if facts.share_of(older) < SURE_TO_SHOW or not runs_newer(facts):
            continue
        low, high = (facts.gain_of_faster(dict.fromkeys(older, factor)) for factor in NEWER_ATTENTION)
        yield Advice(
            "attention",
            f"FlashAttention {version + 1}: {short_kernel(older[0])} is FlashAttention {version}, "
            f"{facts.share_of(older):.0%} of compute",
            low,
            high,
            "a line of code",
            ROUGH,
        )


def _unfused_attention(facts: JobFacts) -> list[str]:
    """Return kernels of unfused attention, a softmax or an exp first; empty without any.

    These are each softmax, and what mostly runs from the product before one to the product after it: both
    products, scaling, masks. A softmax may also be written out, with a maximum, an exp and a sum.
    """
    families = facts.computing_kernels.select("name", "family")
    of_softmax = pl.col("name").str.contains(_SOFTMAX) & ~pl.col("name").str.contains(_OF_LOSS)
    has_log = pl.col("name").str.contains(_LOG).any()
    is_product, lane = pl.col("family") == "gemm", ["rank", "stream"]
    kernels = (
        facts.spans.filter(pl.col("kind") == "kernel")
        .join(families, on="name")
        .sort(*lane, "start_ns")
        .with_columns(stretch=is_product.cum_sum().over(lane))
    )
    written = pl.all_horizontal(pl.col("name").str.contains(part).any() for part in _WRITTEN_OUT) & ~has_log
    between = (~is_product).sum()
    is_last = pl.col("stretch").shift(-1).over(lane).is_null()
    stretches = (
        kernels.group_by(*lane, "stretch")
        .agg(attends=(of_softmax.any() & (between <= FUSED_WITH)) | (written & (between <= WRITTEN_WITH)))
        .sort(*lane, "stretch")
        .with_columns(attends=pl.col("attends") & (pl.col("stretch") > 0) & ~is_last)
        .with_columns(ends=pl.col("attends").shift(1).over(lane).fill_null(False))
    )
    inside = pl.col("attends") | (pl.col("ends") & is_product)
    took_ns = pl.col("duration_ns")
    parts = (
        kernels.join(stretches, on=[*lane, "stretch"])
        .group_by("name")
        .agg(part=took_ns.filter(inside).sum() / took_ns.sum(), is_softmax=of_softmax.any())
    )
    mostly = parts.filter((pl.col("part") >= NEARLY_ALL) | "is_softmax")
    is_exp = pl.col("name").str.contains(_WRITTEN_OUT[0])
    return mostly.sort("is_softmax", is_exp, "name", descending=[True, True, False])["name"].to_list()


def _is_hopper(facts: JobFacts) -> bool:
    if facts.gpu:
        return bool(re.search(r"H100|H200|GH200|H800|H20", facts.gpu))
    return bool(facts.kernels["name"].str.contains(r"sm90|nvjet").any())


def _is_ampere_or_later(facts: JobFacts) -> bool:
    if facts.gpu:
        return not re.search(BEFORE_AMPERE, facts.gpu)
    return bool(facts.kernels["name"].str.contains(r"ampere|sm[89]\d").any())


# FlashAttention's versions before the latest: their kernels, and whether a GPU runs the next one.
_VERSIONS: Sequence[tuple[int, str, Callable[[JobFacts], bool]]] = (
    (1, r"fmha_(fwd|bwd)\w*loop", _is_ampere_or_later),
    (2, r"flash_(fwd|bwd)\w*kernel", _is_hopper),
)


def fuse_pointwise(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Fuse pointwise kernels, on GPUs for which torch.compile makes code."""
    computing = facts.kernels.filter(pl.col("family").is_in(["elementwise", "memory", "normalisation"]))
    names = computing["name"].to_list()
    share = facts.share_of(names)
    count = int(computing["count"].sum()) / facts.rank_steps
    is_old = any(re.search(BEFORE_VOLTA, gpu) for gpu in facts.analysis.run.manifest.gpus)
    if share < SURE_TO_SHOW or count < 10 or is_old:
        return
    fused = best_of(facts, ["compile"])
    if fused is not None:
        yield by_edit(
            "fuse",
            f"torch.compile: {count:,.0f} pointwise and copying kernels a step and rank, {share:.0%} of "
            "compute",
            fused,
        )


# Kernels of libraries, which a job can choose, but not change.
_OF_A_LIBRARY = re.compile(
    r"(?i)\bat::|at_cuda_detail|cutlass|cublas|cudnn|\bcub::|thrust::|nvjet|xmma|gemv(2|N|NSP)|split_?k"
    r"|^(maxwell|pascal|volta|turing|ampere|hopper|sm\d+)_|flash_(fwd|bwd)|\bflash::|fmha|nccl|rccl"
    r"|Cijk_|miopen|convertTensor_kernel|n[ch]?hwTo|magma|fbgemm|transformer_engine|cufft|regular_fft"
)


def replace_dominant_kernel(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Where compute limits, a faster kernel in place of the one that takes most, or for convolutions."""
    if limit != COMPUTE or facts.computing_kernels.is_empty():
        return
    of_short = facts.computing_kernels.with_columns(short=pl.col("name").replace_strict(facts.short_names))
    totals = of_short.group_by("short").agg("name", pl.col("total_ns").sum())
    short, names, _ = totals.sort("total_ns", "short", descending=[True, False]).row(0)
    families = facts.computing_kernels.group_by("family").agg("name", pl.col("total_ns").sum())
    family, of_family, _ = families.sort("total_ns", "family", descending=[True, False]).row(0)
    share, is_chosen = facts.share_of(names), any(map(_OF_A_LIBRARY.search, names))
    if family == "convolution" and (is_chosen or share < DOMINANT):
        many, taken = counted(len(of_family), "kernel"), facts.share_of(of_family)
        do = "let cuDNN measure which kernels are fastest (torch.backends.cudnn.benchmark = True): "
        do += f"convolutions are {taken:.0%} of compute, in {many}"
        high = facts.gain_of_faster(dict.fromkeys(of_family, MEASURED))
        yield Advice("tune-kernel", do, 1.0, high, "a line of code", f"sizes of input are fixed; {ROUGH}")
    elif share >= DOMINANT:
        faster = f"a faster kernel than {short} (shapes, layout, library)" if is_chosen else f"tune {short}"
        high = facts.gain_of_faster(dict.fromkeys(names, 0.5))
        yield Advice("tune-kernel", f"{faster}: {share:.0%} of compute", 1.0, high, "new code", ROUGH)


def multiply_more_rows(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Multiply several rows at a time, where products with few rows read all weights for them.

    Within what a step of products with few rows takes, they multiply more rows. At worst all other kernels
    take as many times as long; at best, none.
    """
    has_few, is_product = pl.col("name").str.contains(_FEW_ROWS), pl.col("family") == "gemm"
    few, products, others = (
        facts.computing_kernels.filter(kind)["name"].to_list()
        for kind in (has_few, has_few | is_product, ~has_few)
    )
    share = facts.share_of(products)
    trains = kind_of_job(facts.job.graph).trains
    if limit != COMPUTE or trains or facts.share_of(few) < SURE_TO_SHOW or share < MAINLY:
        return
    least, most = MORE_ROWS
    low = facts.gain_of_rows(least, others)
    do = f"larger batches: {facts.short_names[few[0]]} reads all weights for few rows; "
    do += f"products are {share:.0%} of compute"
    assumes = "gains are per sample or token, as more rows share what is read"
    yield Advice("batch", do, low, most, "a setting", assumes)
