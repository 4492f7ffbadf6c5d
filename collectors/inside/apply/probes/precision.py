"""What the model's weights lose with fewer bits, and how much the loss minds.

In: nothing. Out: rows of the table `sensitivities`. For each weight of two or more dimensions: how far
rounding moves it, and the trace of the loss's Hessian over it, by Hutchinson's estimator (products of the
Hessian with random signs; HAWQ-V2, Dong et al., NeurIPS 2020) on the batches of three early steps. Gradients
are derived a second time beside the loop's own backward, which is left as it is. Where that would call code
of the script again, or PyTorch cannot do it, the trace is that of Fisher's matrix: squares of gradients,
times the samples of a batch.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...patching import patch
from ...recorder import Recorder
from ...torch_internals import fsdp_states, is_within_backward
from ..modules.outermost import change_outermost
from ..report import ChangeReport
from .measuring import BEGINS_AT_STEP, STEPS, save

SAMPLES = 4  # random signs per batch
WRAPPER = "module."  # by which DDP names the module inside
LARGEST_FP8 = 448.0
CODE = "with torch.autocast(…): around the layers that can do with fewer bits"
Weights = dict[str, torch.Tensor]


class _Sensitivity:
    """Traces of the weights of this process."""

    def __init__(self, report: ChangeReport, recorder: Recorder) -> None:
        self.report, self._recorder = report, recorder
        self.models: list[Any] = []
        self.watched = ""  # why gradients are not derived a second time
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
            self._hooks.append(model.register_forward_pre_hook(self._called, with_kwargs=True))
        for name, weight in self._weights.items():
            noting = functools.partial(self._note_gradient, name)
            self._hooks.append(weight.register_post_accumulate_grad_hook(noting))
        if self._weights:
            self._begun = True
            self.report.applied(f"{len(self._weights)} weights")

    def _called(self, _model: Any, args: Any, kwargs: Any) -> None:
        sizes = [argument.shape[0] for argument in tree_leaves((args, kwargs)) if _is_batch(argument)]
        self._samples = sizes[0] if sizes else 1

    def _note_gradient(self, name: str, weight: torch.Tensor) -> None:
        if self._begun and weight.grad is not None:
            self.report.attempt(self._square, name, weight.grad)

    def _square(self, name: str, gradient: torch.Tensor) -> None:
        square = float(gradient.detach().double().square().sum())
        self._fisher.setdefault(name, []).append(self._samples * square)

    def before_backward(self, loss: Any, gradients: Any) -> None:
        """The loop asks for gradients of a number."""
        is_number = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad
        if not (self._begun and is_number) or gradients is not None or is_within_backward():
            return
        self._losses.append(float(loss.detach()))
        reason = self.watched or _foreign(loss)
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
        """Look at the job no more, and save what was found."""
        begun, self._begun = self._begun, False
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        if begun and self._losses:
            rows = [row for name, weight in self._weights.items() for row in self._rows(name, weight)]
            save(self._recorder, "sensitivities", rows)
        self._weights = {}

    def _rows(self, name: str, weight: torch.Tensor) -> list[dict[str, Any]]:
        # Of a second derivative that failed once, what came before is kept: it is of other batches only.
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
                "square_error": _sum_of_squares(rounded(weight, precision) - weight),
            }
            for precision in PRECISIONS
        ]


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Measure sensitivities of weights."""
    probe = _Sensitivity(report, recorder)
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            report.attempt(probe.before_backward, tensors, grad_tensors)
        return original(tensors, grad_tensors, *args, **kwargs)

    def watched(_tensor: Any) -> None:
        probe.watched = probe.watched or "the script looks at gradients by hooks of tensors"

    def refuse_scaler(scaler: Any) -> None:
        if scaler.is_enabled():
            report.refuse(f"a GradScaler scales the loss of a job that has few bits already: {CODE}")

    torch.autograd.backward = backward
    patch(torch.Tensor, "register_hook", before=watched)
    patch(torch.Tensor, "retain_grad", before=watched)
    patch(torch.amp.GradScaler, "step", before=refuse_scaler)
    change_outermost(report, recorder, probe.models.append)
    recorder.listen("step", probe.on_step)
    recorder.listen("end", lambda: report.attempt(probe.end))


def weights_of(model: Any) -> Weights:
    """Weights of two or more dimensions that products use, by their module as `--modules` names it."""
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
    """Estimates of the trace of a loss's Hessian over each weight, one per random vector of signs.

    Args:
        loss: one number; its graph is left for the loop's own backward.
        seed: of the signs; the job's own random numbers stay its own.
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


def _foreign(loss: torch.Tensor) -> str:
    """Why deriving gradients a second time would call code that is not PyTorch's own; empty where not."""
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


def _sum_of_squares(values: torch.Tensor) -> float:
    return float(values.detach().double().square().sum())


def rounded(weight: torch.Tensor, precision: str) -> torch.Tensor:
    """A weight as it is with fewer bits: fp8 (E4M3) with one scale, int8 with one for each output."""
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
