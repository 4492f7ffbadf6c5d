"""What codecs lose of the job's own gradients, bucket by bucket, and how long they take.

In: nothing. Out: rows of the table `codecs`, from three early steps. Gradients are copied when backward has
made them, before DDP reduces them, and put together when their bucket is full, as DDP does: so a codec sees
what it would compress. What is reduced stays as it is; a step that is looked at takes longer.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...calls.buckets import of_ddp
from ...patching import patch
from ...recorder import Recorder
from ..report import ChangeReport
from .measuring import BEGINS_AT_STEP, STEPS, save, timed

MIN_COMPRESSION_RATE = 2  # as of PyTorch's PowerSGDState
POWERSGD_RANKS, SHARES = (1, 4), (0.01, 0.1)


class _Coding(NamedTuple):
    """How gradients of one bucket become fewer bytes, and gradients again."""

    encode: Callable[[_Bucket, torch.Tensor], Any]
    decode: Callable[[Any, torch.Tensor], torch.Tensor]


class _Bucket:
    """One bucket of a module."""

    def __init__(self, module: int, bucket: int, parameters: list[torch.Tensor], names: list[str]) -> None:
        self.facts = {"module": module, "bucket": bucket, "names": names}
        self.parameters = parameters
        self.copies: dict[int, torch.Tensor] = {}
        self.kept: dict[Any, torch.Tensor] = {}  # of codecs, from step to step


class _Probe:
    """Gradients of all DDP modules of this process."""

    def __init__(self, report: ChangeReport, recorder: Recorder) -> None:
        self.report, self._recorder = report, recorder
        self.modules: list[weakref.ref[Any]] = []
        self._hooks: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        self._step = 0

    def on_step(self, step: int) -> None:
        self._step = step + 1  # that which begins
        if step == BEGINS_AT_STEP:
            self.report.attempt(self._begin)
        elif step == BEGINS_AT_STEP + STEPS:
            self.end()

    def _begin(self) -> None:
        modules = [module for module in (reference() for reference in self.modules) if module is not None]
        for number, module in enumerate(modules):
            buckets = of_ddp(module)["buckets"]
            named = dict(module.module.named_parameters())
            for index, facts in enumerate(buckets):
                if not facts["names"]:
                    self.report.refuse("DDP does not say which parameters are in which bucket")
                    return
                parameters = [named[name] for name in facts["names"]]
                if any(parameter.dtype != torch.float32 for parameter in parameters):
                    self.report.refuse(f"gradients are {parameters[0].dtype} already")
                    return
                self._watch(module, _Bucket(number, index, parameters, facts["names"]))
            self.report.applied(f"{len(buckets)} buckets of {type(module.module).__name__}")

    def _watch(self, module: Any, bucket: _Bucket) -> None:
        for place, parameter in enumerate(bucket.parameters):
            ready = functools.partial(self._ready, module, bucket, place)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))

    def _ready(self, module: Any, bucket: _Bucket, place: int, parameter: torch.Tensor) -> None:
        if self._hooks and module.require_backward_grad_sync and parameter.grad is not None:
            self.report.attempt(self._copy, bucket, place, parameter.grad)

    def _copy(self, bucket: _Bucket, place: int, gradient: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                bucket.copies[place] = gradient.detach().clone()
                if len(bucket.copies) == len(bucket.parameters):
                    self._rows += self._measured(bucket)
                    bucket.copies = {}
        except Exception:
            bucket.copies = {}
            self.end()  # once is enough
            raise

    def _measured(self, bucket: _Bucket) -> list[dict[str, Any]]:
        flat = torch.cat([bucket.copies[place].reshape(-1) for place in range(len(bucket.parameters))])
        norm = _square(flat)
        rows = []
        for name, (encode, decode) in CODECS.items():
            encoded, encode_ns = timed(flat.device, encode, bucket, flat)
            decoded, decode_ns = timed(flat.device, decode, encoded, flat)
            error = _square(decoded - flat)
            if math.isfinite(norm + error):  # a loss scale may have been too large
                facts = {"codec": name, "step": self._step, "elements": flat.numel(), **bucket.facts}
                facts |= {"square_norm": norm, "square_error": error}
                rows.append({**facts, "encode_ns": encode_ns, "decode_ns": decode_ns})
        return rows

    def end(self) -> None:
        """Look at gradients no more."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        if hooks:
            save(self._recorder, "codecs", self._rows)


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Measure codecs on gradients."""
    from torch.nn.parallel import DistributedDataParallel

    report.missing = "the job wrapped no module with DistributedDataParallel"
    probe = _Probe(report, recorder)
    patch(DistributedDataParallel, "__init__", after=lambda module: probe.modules.append(weakref.ref(module)))
    recorder.listen("step", probe.on_step)
    recorder.listen("end", probe.end)


def _square(values: torch.Tensor) -> float:
    return float(values.double().square().sum())


def _half(dtype: torch.dtype) -> _Coding:
    return _Coding(
        lambda _, flat: flat.to(dtype), lambda encoded, flat: torch.empty_like(flat).copy_(encoded)
    )


def _low_rank(rank: int) -> _Coding:
    """PowerSGD (Vogels et al., 2019): one of its iterations at each call, from where the last one ended."""

    def encode(bucket: _Bucket, _flat: torch.Tensor) -> list[Any]:
        made: list[Any] = []
        for place in range(len(bucket.parameters)):
            part = bucket.copies[place]
            if not _is_worth(part, rank):
                made.append(part)
                continue
            matrix = part.reshape(part.shape[0], -1)
            q = bucket.kept.get((rank, place))
            q = _start(matrix, rank) if q is None else q
            p = torch.linalg.qr(matrix @ q)[0]
            bucket.kept[rank, place] = matrix.T @ p
            made.append((p, bucket.kept[rank, place]))
        return made

    def decode(encoded: list[Any], _flat: torch.Tensor) -> torch.Tensor:
        made = [part if isinstance(part, torch.Tensor) else part[0] @ part[1].T for part in encoded]
        return torch.cat([matrix.reshape(-1) for matrix in made])

    return _Coding(encode, decode)


def _start(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    # The job's random numbers stay its own.
    generator = torch.Generator(device=matrix.device).manual_seed(rank)
    return torch.randn(matrix.shape[1], min(*matrix.shape, rank), device=matrix.device, generator=generator)


def _is_worth(part: torch.Tensor, rank: int) -> bool:
    if part.dim() < 2:
        return False
    rows = int(part.shape[0])
    columns = int(part.numel()) // max(rows, 1)
    return (rows + columns) * min(rows, columns, rank) * MIN_COMPRESSION_RATE < rows * columns


def _largest(share: float) -> _Coding:
    """The largest gradients of a bucket, as `reduction.top_k` sends them."""

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
