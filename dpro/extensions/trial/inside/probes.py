"""Measurements that leave the job unchanged: what gradients lose by codecs, and weights by low precision.

Runs functions on copies of tensors in a few early steps that are not measured otherwise, and writes a file
with rows of the probe's table. A failure goes to the report, and the job continues.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _dpro_inside_the_job.calls.buckets import of_ddp
from _dpro_inside_the_job.patching import patch
from _dpro_inside_the_job.recorder import Recorder
from _dpro_inside_the_job.torch_internals import fsdp_states, is_within_backward
from torch.utils._pytree import tree_leaves

from . import ChangeReport
from .modules import WRAPPER, change_outermost

BEGINS_AT_STEP, STEPS = 4, 3  # DDP's buckets are final by then; before the first deep window of `dpro try`
REPEATS = 2


def timed(device: Any, action: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Return the result of an action and its shorter time of two, in ns: the first may have to warm up.

    Args:
        action: may be called several times.
    """
    times = []
    for _ in range(REPEATS):
        _wait(device)
        begun_ns = time.perf_counter_ns()
        result = action(*arguments)
        _wait(device)
        times.append(time.perf_counter_ns() - begun_ns)
    return result, min(times)


def _wait(device: Any) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def save(recorder: Recorder, table: str, rows: list[dict[str, Any]]) -> None:
    """Write rows of a table.

    Args:
        rows: all of this process; where empty, nothing is written.
    """
    if rows and recorder.folder is not None:
        recorder.write_file(f"{table}.json", json.dumps(rows).encode())


MIN_COMPRESSION_RATE = 2  # as in PyTorch's PowerSGDState
POWERSGD_RANKS, SHARES = (1, 4), (0.01, 0.1)


class _Coding(NamedTuple):
    """Encoder and decoder that compress the gradients of one bucket."""

    encode: Callable[[_Bucket, torch.Tensor], Any]
    decode: Callable[[Any, torch.Tensor], torch.Tensor]


class _Bucket:
    def __init__(self, module: int, bucket: int, parameters: list[torch.Tensor], names: list[str]) -> None:
        self.facts = {"module": module, "bucket": bucket, "names": names}
        self.parameters = parameters
        self.copies: dict[int, torch.Tensor] = {}
        self.kept: dict[Any, torch.Tensor] = {}  # state of codecs, from step to step


class _CodecProbe:
    """The measurement of codecs on all DDP modules of this process."""

    def __init__(self, report: ChangeReport, recorder: Recorder) -> None:
        self.report, self._recorder = report, recorder
        self.modules: list[weakref.ref[Any]] = []
        self._hooks: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        self._step = 0

    def on_step(self, step: int) -> None:
        self._step = step + 1  # the step that begins
        if step == BEGINS_AT_STEP:
            self.report.attempt(self._begin)
        elif step == BEGINS_AT_STEP + STEPS:
            self.report.attempt(self.end)

    def _begin(self) -> None:
        modules = [module for module in (reference() for reference in self.modules) if module is not None]
        for number, module in enumerate(modules):
            buckets = of_ddp(module)["buckets"]
            named = dict(module.module.named_parameters())
            for index, facts in enumerate(buckets):
                if not facts["names"]:
                    self.report.refuse("DDP does not report the parameters of its buckets")
                    return
                parameters = [named[name] for name in facts["names"]]
                if any(parameter.dtype != torch.float32 for parameter in parameters):
                    self.report.refuse(f"gradients are {parameters[0].dtype} already")
                    return
                bucket = _Bucket(number, index, parameters, facts["names"])
                for place, parameter in enumerate(bucket.parameters):
                    ready = functools.partial(self._on_gradient, module, bucket, place)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))
            self.report.applied(f"{len(buckets)} buckets of {type(module.module).__name__}")

    def _on_gradient(self, module: Any, bucket: _Bucket, place: int, parameter: torch.Tensor) -> None:
        if self._hooks and module.require_backward_grad_sync and parameter.grad is not None:
            self.report.attempt(self._copy, bucket, place, parameter.grad)

    def _copy(self, bucket: _Bucket, place: int, gradient: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                bucket.copies[place] = gradient.detach().clone()
                if len(bucket.copies) == len(bucket.parameters):
                    self._rows += self._measure(bucket)
                    bucket.copies = {}
        except Exception:
            bucket.copies = {}
            self.end()  # one failure is enough
            raise

    def _measure(self, bucket: _Bucket) -> list[dict[str, Any]]:
        flat = torch.cat([bucket.copies[place].reshape(-1) for place in range(len(bucket.parameters))])
        norm = _sum_of_squares(flat)
        rows = []
        for name, (encode, decode) in CODECS.items():
            encoded, encode_ns = timed(flat.device, encode, bucket, flat)
            decoded, decode_ns = timed(flat.device, decode, encoded, flat)
            error = _sum_of_squares(decoded - flat)
            if math.isfinite(norm + error):  # a loss scale may have been too large
                facts = {"codec": name, "step": self._step, "elements": flat.numel(), **bucket.facts}
                facts |= {"square_norm": norm, "square_error": error}
                rows.append({**facts, "encode_ns": encode_ns, "decode_ns": decode_ns})
        return rows

    def end(self) -> None:
        """Stop observing gradients, and save the rows."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        if hooks:
            save(self._recorder, "codecs", self._rows)


def measure_codecs(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Measure what codecs lose of the job's own gradients, and how long they take: table `codecs`.

    Gradients are copied when backward has computed them, before DDP reduces them, and joined when their
    bucket is full, as in DDP: so a codec sees what it would compress. The reduced gradients stay unchanged; a
    measured step takes longer.
    """
    from torch.nn.parallel import DistributedDataParallel

    report.missing = "the job wraps no module in DistributedDataParallel"
    probe = _CodecProbe(report, recorder)
    patch(DistributedDataParallel, "__init__", after=lambda module: probe.modules.append(weakref.ref(module)))
    recorder.listen("step", probe.on_step)
    recorder.listen("end", lambda: report.attempt(probe.end))


def _sum_of_squares(values: torch.Tensor) -> float:
    return float(values.detach().double().square().sum())


def _half(dtype: torch.dtype) -> _Coding:
    return _Coding(
        lambda _, flat: flat.to(dtype), lambda encoded, flat: torch.empty_like(flat).copy_(encoded)
    )


def _low_rank(rank: int) -> _Coding:
    """Return PowerSGD (Vogels et al., 2019): each call is one iteration, which continues the previous one."""

    def encode(bucket: _Bucket, _flat: torch.Tensor) -> list[Any]:
        made: list[Any] = []
        for place in range(len(bucket.parameters)):
            part = bucket.copies[place]
            if not _is_worth(part, rank):
                made.append(part)
                continue
            matrix = part.reshape(part.shape[0], -1)
            q = bucket.kept.get((rank, place))
            q = _random_start(matrix, rank) if q is None else q
            p = torch.linalg.qr(matrix @ q)[0]
            bucket.kept[rank, place] = matrix.T @ p
            made.append((p, bucket.kept[rank, place]))
        return made

    def decode(encoded: list[Any], _flat: torch.Tensor) -> torch.Tensor:
        made = [part if isinstance(part, torch.Tensor) else part[0] @ part[1].T for part in encoded]
        return torch.cat([matrix.reshape(-1) for matrix in made])

    return _Coding(encode, decode)


def _random_start(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    # A separate generator leaves the job's random numbers unchanged.
    generator = torch.Generator(device=matrix.device).manual_seed(rank)
    return torch.randn(matrix.shape[1], min(*matrix.shape, rank), device=matrix.device, generator=generator)


def _is_worth(part: torch.Tensor, rank: int) -> bool:
    if part.dim() < 2:
        return False
    rows = int(part.shape[0])
    columns = int(part.numel()) // max(rows, 1)
    return (rows + columns) * min(rows, columns, rank) * MIN_COMPRESSION_RATE < rows * columns


def _largest(share: float) -> _Coding:
    """Return a codec that sends the largest gradients of a bucket, as `reduction.top_k` does."""

    def encode(_bucket: _Bucket, flat: torch.Tensor) -> Any:
        indices = flat.abs().topk(max(round(share * flat.numel()), 1), sorted=False).indices
        waiting = flat.index_fill(0, indices, 0.0)  # for the next step
        return indices.to(torch.int32), flat[indices], waiting

    def decode(encoded: Any, flat: torch.Tensor) -> torch.Tensor:
        indices, values, _ = encoded
        return torch.zeros_like(flat).index_add_(0, indices, values)

    return _Coding(encode, decode)


CODECS = {
    "to=fp16": _half(torch.float16),
    "to=bf16": _half(torch.bfloat16),
    **{f"powersgd_rank={rank}": _low_rank(rank) for rank in POWERSGD_RANKS},
    **{f"topk={share:g}": _largest(share) for share in SHARES},
}


SAMPLES = 4  # vectors of random signs per batch
LARGEST_FP8 = 448.0  # of E4M3
CODE = "with torch.autocast(…): around the layers that tolerate fewer bits"
Weights = dict[str, torch.Tensor]


class _Sensitivity:
    """The measurement of Hessian traces over the weights of this process."""

    def __init__(self, report: ChangeReport, recorder: Recorder) -> None:
        self.report, self._recorder = report, recorder
        self.models: list[Any] = []
        self.watched = ""  # why second derivatives were given up; empty before
        self._begun = False
        self._weights: Weights = {}
        self._hooks: list[Any] = []
        self._samples = 1
        self._losses: list[float] = []
        self._hutchinson: dict[str, list[float]] = {}
        self._fisher: dict[str, list[float]] = {}

    def on_step(self, step: int) -> None:
        if step == BEGINS_AT_STEP:
            self.report.attempt(self._begin)
        elif step == BEGINS_AT_STEP + STEPS:
            self.report.attempt(self.end)

    def _begin(self) -> None:
        if fsdp_states():
            self.report.refuse(f"FSDP shards the weights: in the script, {CODE}")
            return
        for model in self.models:
            self._weights |= weights_of(model)
            self._hooks.append(model.register_forward_pre_hook(self._on_call, with_kwargs=True))
        for name, weight in self._weights.items():
            noting = functools.partial(self._note_gradient, name)
            self._hooks.append(weight.register_post_accumulate_grad_hook(noting))
        if self._weights:
            self._begun = True
            self.report.applied(f"{len(self._weights)} weights")

    def _on_call(self, _model: Any, args: Any, kwargs: Any) -> None:
        sizes = [argument.shape[0] for argument in tree_leaves((args, kwargs)) if _is_batch(argument)]
        self._samples = sizes[0] if sizes else 1

    def _note_gradient(self, name: str, weight: torch.Tensor) -> None:
        if self._begun and weight.grad is not None:
            self.report.attempt(self._add_square, name, weight.grad)

    def _add_square(self, name: str, gradient: torch.Tensor) -> None:
        self._fisher.setdefault(name, []).append(self._samples * _sum_of_squares(gradient))

    def before_backward(self, loss: Any, gradients: Any) -> None:
        """Estimate the traces when the loop asks for gradients of a number."""
        is_number = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad
        if not (self._begun and is_number) or gradients is not None or is_within_backward():
            return
        self._losses.append(float(loss.detach()))
        reason = self.watched or _foreign_operator(loss)
        if reason:
            self.watched = reason
            return
        try:
            estimates = traces(loss, self._weights, seed=len(self._losses))
        except Exception as error:  # such as operators without a second derivative, or too little memory
            self.watched = f"{type(error).__name__}: {error}".partition("\n")[0]
            return
        for name, values in estimates.items():
            self._hutchinson.setdefault(name, []).extend(values)

    def end(self) -> None:
        """Stop observing the job, and save the rows."""
        begun, self._begun = self._begun, False
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        if begun and self._losses:
            rows = [row for name, weight in self._weights.items() for row in self._rows(name, weight)]
            save(self._recorder, "sensitivities", rows)
        self._weights = {}

    def _rows(self, name: str, weight: torch.Tensor) -> list[dict[str, Any]]:
        # Estimates from before a failure of second derivatives are kept: they only come from other batches.
        method = "hutchinson" if name in self._hutchinson else "fisher"
        values = (self._hutchinson if name in self._hutchinson else self._fisher).get(name, [])
        if not values:
            return []
        spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else -1.0
        facts = {
            "module": name, "elements": weight.numel(), "square_norm": _sum_of_squares(weight),
            "trace": statistics.fmean(values), "trace_error": spread, "method": method,
            "batches": len(self._losses), "loss": statistics.fmean(self._losses),
        }  # fmt: skip
        return [
            {
                **facts,
                "precision": precision,
                "square_error": _sum_of_squares(round_to(weight, precision) - weight),
            }
            for precision in PRECISIONS
        ]


def measure_sensitivities(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Measure what weights lose in low precision, and how that affects the loss: table `sensitivities`.

    For each weight of two or more dimensions: its rounding error, and the trace of the loss's Hessian over
    it, by Hutchinson's estimator (products of the Hessian with random signs; HAWQ-V2, Dong et al., NeurIPS
    2020) on the batches of three early steps. Second derivatives are computed before the loop's own backward,
    which stays unchanged. Where that would call code of the script again, or PyTorch cannot do it, the trace
    is that of the Fisher matrix: squares of gradients, times the samples of a batch.
    """
    probe = _Sensitivity(report, recorder)
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            report.attempt(probe.before_backward, tensors, grad_tensors)
        return original(tensors, grad_tensors, *args, **kwargs)

    def watched(_tensor: Any) -> None:
        probe.watched = probe.watched or "the script reads gradients in tensor hooks"

    def refuse_scaler(scaler: Any) -> None:
        if scaler.is_enabled():
            report.refuse(f"a GradScaler scales the loss, so the job uses few bits already: {CODE}")

    torch.autograd.backward = backward
    patch(torch.Tensor, "register_hook", before=watched)
    patch(torch.Tensor, "retain_grad", before=watched)
    patch(torch.amp.GradScaler, "step", before=refuse_scaler)
    change_outermost(report, recorder, probe.models.append)
    recorder.listen("step", probe.on_step)
    recorder.listen("end", lambda: report.attempt(probe.end))


def weights_of(model: Any) -> Weights:
    """Return trainable float32 weights of two or more dimensions, by module as `--modules` names it."""
    weights: Weights = {}
    for name, module in model.named_modules():
        weight: Any = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            continue
        plain = weight.dim() > 1 and weight.dtype == torch.float32 and not hasattr(weight, "to_local")
        if plain and weight.requires_grad:
            weights[name.removeprefix(WRAPPER)] = weight
    return weights


def traces(loss: torch.Tensor, weights: Weights, seed: int) -> dict[str, list[float]]:
    """Return estimates of the trace of a loss's Hessian over each weight, one per vector of random signs.

    Args:
        loss: one number; its graph is kept for the loop's own backward.
        seed: of the signs; the job's own random numbers stay unchanged.
    """
    given = list(weights.values())
    first = torch.autograd.grad(loss, given, create_graph=True, allow_unused=True)
    slopes: list[Any] = list(first)  # None where the loss does not depend on a weight
    curved = [index for index, slope in enumerate(slopes) if getattr(slope, "requires_grad", False)]
    estimates: dict[str, list[float]] = {name: [] for name in weights}
    for sample in range(SAMPLES):
        signs = [_signs(weight, seed * SAMPLES + sample, index) for index, weight in enumerate(given)]
        products: dict[int, Any] = {}
        if curved:
            made = torch.autograd.grad(
                [slopes[index] for index in curved], given, [signs[index] for index in curved],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
            products = {index: product for index, product in enumerate(made) if product is not None}
        for index, name in enumerate(weights):
            product = products.get(index)
            estimates[name].append(
                float((product * signs[index]).double().sum()) if product is not None else 0.0
            )
    return estimates


def _signs(like: torch.Tensor, seed: int, number: int) -> torch.Tensor:
    generator = torch.Generator(device=like.device).manual_seed(seed * 100_003 + number)
    return torch.randint(0, 2, like.shape, device=like.device, generator=generator).to(like.dtype) * 2 - 1


def _foreign_operator(loss: torch.Tensor) -> str:
    """Return why second derivatives would call code that is not PyTorch's; empty where they would not."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return f"{node.name()} is not an operator of PyTorch: its backward would run again"
        waiting += [following for following, _ in node.next_functions]
    return ""


def _is_batch(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def round_to(weight: torch.Tensor, precision: str) -> torch.Tensor:
    """Return a weight rounded to a precision: fp8 (E4M3) with one scale, int8 with one for each output."""
    weight = weight.detach()
    if precision in HALVES:
        return weight.to(HALVES[precision]).to(weight.dtype)
    if precision == "fp8":
        scale = weight.abs().max().clamp(min=1e-30) / LARGEST_FP8
        return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
    rows = weight.reshape(weight.shape[0], -1)
    scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return ((rows / scales).round().clamp(-127, 127) * scales).reshape(weight.shape)


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("bf16", "fp16", "fp8", "int8")
