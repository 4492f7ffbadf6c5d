"""Gradient buckets of DeepSpeed: what is in each reduction, seen when it begins.

In: DeepSpeed's optimizers (ZeRO 1, 2, 3) and its engine (no ZeRO), once the job itself has imported them.
Out: their buckets, as in `buckets.json`. DeepSpeed fills one buffer with gradients and keeps no list of what
was in it: the list is read when the buffer is about to be reduced, in a few early steps. What another version
lacks gives up the buckets, not the job.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..recorder import Recorder

ZERO_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
ZERO_3 = "deepspeed.runtime.zero.stage3"
ENGINE = "deepspeed.runtime.engine"
AFTER_BACKWARD = ", after backward"
OF_EXPERTS = " of experts"


class Flush(NamedTuple):
    """One buffer that is about to be reduced.

    Attributes:
        source: what says so.
        item: bytes of an element in the reduction.
        parameters: whose gradients are in it, in order.
        names: of all parameters of the model, by parameter.
    """

    source: str
    item: int
    parameters: list[Any]
    names: dict[Any, str]


class DeepSpeedBuckets:
    """What DeepSpeed reduces together in one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._hooked: set[str] = set()
        self._is_final = False
        self._met: dict[tuple[int, ...], dict[str, Any]] = {}

    def look(self, *_: Any) -> None:
        """Hook what the job has imported by now."""
        for module, owner, method, flushes in HOOKS:
            target = getattr(sys.modules.get(module), owner, None)
            if target is not None and module not in self._hooked:
                self._hooked.add(module)
                self._hook(target, method, flushes)

    def _hook(self, owner: Any, name: str, flushes: Callable[..., Iterator[Flush]]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not self._is_final and not torch.compiler.is_compiling():
                self._recorder.call(self._on_flush, flushes, args, kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, hooked)

    def _on_flush(self, flushes: Callable[..., Iterator[Flush]], args: Any, kwargs: Any) -> None:
        for flush in flushes(*args, **kwargs):
            key = (id(args[0]), *(id(parameter) for parameter in flush.parameters))
            if key not in self._met:  # else another micro-batch of the step
                self._met[key] = {"owner": id(args[0]), "source": flush.source, "bucket": _facts(flush)}

    def forget(self) -> None:
        """Buckets may still change: only those that come now count."""
        self._met.clear()

    def finish(self) -> None:
        """No more are needed."""
        self._is_final = True

    def described(self) -> list[dict[str, Any]]:
        """One object per optimizer and source, its buckets in the order of their reductions."""
        modules: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for flushed in self._met.values():
            modules.setdefault((flushed["owner"], flushed["source"]), []).append(flushed["bucket"])
        return [{"source": source, "buckets": buckets} for (_, source), buckets in modules.items()]


def of_zero(optimizer: Any, comm_dtype: Any = None, *_: Any) -> Iterator[Flush]:
    """What an optimizer of ZeRO reduces when it empties its buffers.

    Args:
        optimizer: of stage 1, 2 or 3.
        comm_dtype: the type of the buffer that is emptied; all where it is None.
    """
    stage = 3 if hasattr(optimizer, "fp16_groups") else 2 if optimizer.partition_gradients else 1
    in_backward = stage > 1 or getattr(optimizer, "overlap_comm", False)
    source = f"DeepSpeed ZeRO-{stage} buckets"
    for dtype, bucket in list(optimizer.ipg_buckets.items()):
        parameters = [_parameter(optimizer, entry) for entry in bucket.params]
        if parameters and comm_dtype in (None, dtype):
            reduced = any(getattr(parameter, "allreduce", True) for parameter in parameters)
            experts = "" if reduced else OF_EXPERTS
            behind = "" if in_backward else AFTER_BACKWARD
            yield Flush(f"{source}{experts}{behind}", dtype.itemsize, parameters, optimizer.param_names)


def _parameter(optimizer: Any, entry: Any) -> Any:
    """A parameter in a buffer: stage 3 holds it, others its group and its place there."""
    if not isinstance(entry, tuple):
        return entry
    return entry[1] if isinstance(entry[1], torch.Tensor) else optimizer.bit16_groups[entry[0]][entry[1]]


def of_engine(engine: Any, small_bucket: list[Any], *_: Any, **__: Any) -> Iterator[Flush]:
    """What an engine without ZeRO reduces at once, after backward."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    reduced = [parameter for parameter in names if parameter.grad is not None and parameter.numel()]
    owners = {parameter.grad.data_ptr(): parameter for parameter in reduced}
    parameters = [owners.get(gradient.data_ptr()) for gradient in small_bucket]
    if parameters and None not in parameters:
        item = getattr(engine.communication_data_type, "itemsize", small_bucket[0].element_size())
        yield Flush(f"DeepSpeed buckets{AFTER_BACKWARD}", item, parameters, names)


HOOKS: tuple[tuple[str, str, str, Callable[..., Iterator[Flush]]], ...] = (
    (ZERO_1_2, "DeepSpeedZeroOptimizer", "reduce_ipg_grads", of_zero),
    (
        ZERO_3,
        "DeepSpeedZeroOptimizer_Stage3",
        "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
        of_zero,
    ),
    (ENGINE, "DeepSpeedEngine", "allreduce_and_copy", of_engine),
)


def _facts(flush: Flush) -> dict[str, Any]:
    trained = [parameter for parameter in flush.names if parameter.requires_grad]
    by_id = {id(parameter): (index, flush.names[parameter]) for index, parameter in enumerate(trained)}
    places = [by_id.get(id(parameter), (-1, "")) for parameter in flush.parameters]
    # Of stage 3, a parameter's own shape is that of nothing: it is shared out.
    shapes = [
        [int(size) for size in getattr(parameter, "ds_shape", parameter.shape)]
        for parameter in flush.parameters
    ]
    sizes = [math.prod(shape) * flush.item for shape in shapes]
    return {
        "bytes": sum(sizes),
        "parameters": [index for index, _ in places],
        "hook": "",
        "names": [name for _, name in places],
        "parameter_bytes": sizes,
        "shapes": shapes,
    }
