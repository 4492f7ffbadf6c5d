"""Gradient buckets: how data-parallel modules group their parameters for communication.

Reads modules as DDP wraps them, torch's or Megatron-core's, the modules that FSDP2 has sharded, and the
reductions of DeepSpeed. Writes `buckets.json`, one object per wrapped module: `source`, and `buckets`, each
with its `bytes`, and the indices (`parameters`), `names`, sizes (`parameter_bytes`) and `shapes` of its
parameters, and its communication `hook`, where they are known.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..patching import patch
from ..recorder import ENOUGH, Recorder
from ..torch_internals import (
    assign_buckets,
    ddp_facts,
    first_bucket_bytes,
    fsdp_groups,
    fsdp_parameter,
    fsdp_states,
    is_fsdp_root,
    planned_buckets,
)
from ..unseen import (
    attributes,
    bytes_of,
    children_of,
    elements_of,
    modules_of,
    parameters_of,
    shape_of,
    wants_gradient,
)

KNOWN_AT_STEP = 3  # DDP rebuilds its buckets after the first backward


class Buckets:
    """The wrapped modules of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._modules: list[weakref.ref[Any]] = []
        self._of_megatron: list[weakref.ref[Any]] = []
        self._patched: set[Any] = set()
        self.of_deepspeed = DeepSpeedBuckets(recorder)

    def on_module(self, module: Any) -> None:
        """Remember a module that was wrapped for data parallelism."""
        self._modules.append(weakref.ref(module))

    def on_group(self) -> None:
        """Watch Megatron-core's wrapper: its process groups are made before it wraps a module."""
        wrapper = ddp_class()
        if wrapper is not None and wrapper not in self._patched:
            self._patched.add(wrapper)
            patch(wrapper, "__init__", after=lambda module: self._recorder.call(self.on_megatron, module))

    def on_megatron(self, module: Any) -> None:
        """Remember a module that Megatron-core wrapped."""
        self._of_megatron.append(weakref.ref(module))

    def on_step(self, step: int) -> object:
        """Save the buckets once they are final, after a few steps."""
        if step == KNOWN_AT_STEP - 1:
            self.of_deepspeed.forget()
        if step == KNOWN_AT_STEP:
            self.of_deepspeed.finish()
            self.save()
        return ENOUGH if step >= KNOWN_AT_STEP else None

    def save(self) -> None:
        """Save the buckets of DDP, FSDP2, Megatron-core and DeepSpeed."""
        described = [of_ddp(module) for module in _alive(self._modules)] + _of_fsdp()
        for module in _alive(self._of_megatron):
            with suppress(Exception):  # an unknown version must not cost torch's buckets
                described += of_megatron(module)
        described += self.of_deepspeed.described()
        if described:
            self._recorder.write_file("buckets.json", json.dumps(described).encode())


def install(recorder: Recorder) -> None:
    """Record gradient buckets."""
    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d
    from torch.nn.parallel import DistributedDataParallel

    buckets = Buckets(recorder)
    patch(DistributedDataParallel, "__init__", after=lambda module: recorder.call(buckets.on_module, module))
    on_group = buckets.on_group
    patch(distributed_c10d, "new_group", before=lambda *_: recorder.call(on_group), also=(dist,))
    for name in {module for module, *_ in HOOKS}:
        recorder.on_import(name, buckets.of_deepspeed.look)
    recorder.listen("step", buckets.on_step)
    recorder.listen("end", buckets.save)


def _alive(references: list[weakref.ref[Any]]) -> list[Any]:
    return [module for reference in references if (module := reference()) is not None]


def of_ddp(module: Any) -> dict[str, Any]:
    """Return a DDP module's buckets in order of communication, rebuilt if they were."""
    said = ddp_facts(module)
    sizes = [int(size) for size in _split(said.get("rebuilt_bucket_sizes") or said.get("bucket_sizes"))]
    ignored = attributes(module).get("parameters_to_ignore", ())
    named = parameters_of(dict(children_of(module)).get("module"))
    reduced = [
        (name, parameter) for name, parameter in named if wants_gradient(parameter) and name not in ignored
    ]
    rebuilt = _split(said.get("rebuilt_per_bucket_param_indices"))
    members = [[int(index) for index in indices.split()] for indices in rebuilt]
    members = (
        members
        or planned_buckets(module)
        or _assign_again(module, [parameter for _, parameter in reduced], sizes)
        or [[] for _ in sizes]
    )
    hook = str(said.get("comm_hook") or "")
    buckets = []
    for size, parameters in zip(sizes, members):
        within = [reduced[index] for index in parameters]
        buckets.append({"bytes": size, "parameters": parameters, "hook": hook, **_describe(within)})
    return {"source": "DDP logging data", "buckets": buckets}


def _assign_again(module: Any, parameters: list[Any], sizes: list[int]) -> list[list[int]]:
    """Return the parameters of buckets that are never rebuilt (`find_unused_parameters`), unlogged by DDP.

    DDP's own function assigns them again; empty if that does not give buckets of the same sizes.
    """
    cap, first = attributes(module)["bucket_bytes_cap"], first_bucket_bytes()
    for limits in ([first, cap], [cap], [sys.maxsize]):  # by version, and by the arguments of DDP
        indices = assign_buckets(parameters, limits)[::-1]  # the last layers communicate first
        if [sum(bytes_of(parameters[index]) for index in bucket) for bucket in indices] == sizes:
            return indices
    return []


def _describe(named: list[tuple[str, Any]]) -> dict[str, Any]:
    return {
        "names": [name for name, _ in named],
        "parameter_bytes": [bytes_of(parameter) for _, parameter in named],
        "shapes": [shape_of(parameter) for _, parameter in named],
    }


def _split(listing: object) -> list[str]:
    return [part.strip() for part in str(listing or "").split(",") if part.strip()]


def _of_fsdp() -> list[dict[str, Any]]:
    """Return what each outermost sharded module gathers at once, in the order of the model."""
    states = fsdp_states()
    described = []
    for root, state in states.items():
        if is_fsdp_root(state):
            indices = {name: index for index, (name, _) in enumerate(parameters_of(root))}
            inner = [states[module] for _, module in modules_of(root) if module in states]
            buckets = [_of_group(group, indices) for sharded in inner for group in fsdp_groups(sharded) or ()]
            described.append({"source": "FSDP2 parameter groups", "buckets": buckets})
    return described


def _of_group(group: Any, indices: dict[str, int]) -> dict[str, Any]:
    named = [fsdp_parameter(parameter) for parameter in group.fsdp_params]
    gathered = [
        math.prod(shape) * (parameter.param_dtype or parameter.orig_dtype).itemsize
        for parameter, (_, shape) in zip(group.fsdp_params, named)
    ]
    return {
        "bytes": sum(gathered),
        "parameters": [indices.get(name, -1) for name, _ in named],
        "hook": "",
        "names": [name for name, _ in named],
        "parameter_bytes": gathered,
        "shapes": [shape for _, shape in named],
    }


# Gradient buckets of Megatron-core's DistributedDataParallel, which is not torch's DDP.

DDP_OF_MEGATRON = "megatron.core.distributed.distributed_data_parallel"
# By Megatron-core's attribute: experts have separate groups of ranks, and so separate buckets.
SOURCES = {
    "bucket_groups": "Megatron-core buckets",
    "expert_parallel_bucket_groups": "Megatron-core buckets of experts",
}


def ddp_class() -> Any:
    """Return Megatron-core's class that wraps a module; None where the job has not imported it."""
    return getattr(sys.modules.get(DDP_OF_MEGATRON), "DistributedDataParallel", None)


def of_megatron(module: Any) -> list[dict[str, Any]]:
    """Return buckets with the last layers first, and their parameters in the same order.

    This is the order in which Megatron-core expects gradients, not an observed one. `bytes` are those of the
    reduction: with a distributed optimizer, of the padded buffer.
    """
    named = [
        (name, parameter) for name, parameter in parameters_of(module.module) if wants_gradient(parameter)
    ]
    by_id = {id(parameter): (index, name) for index, (name, parameter) in enumerate(named)}
    described = []
    for attribute, source in SOURCES.items():
        groups = getattr(module, attribute, ())
        buckets = [_of_bucket(bucket, by_id) for group in groups for bucket in group.buckets]
        if buckets:
            described.append({"source": source, "buckets": buckets})
    return described


def _of_bucket(bucket: Any, by_id: dict[int, tuple[int, str]]) -> dict[str, Any]:
    item = bucket.grad_data.element_size()  # gradients may be reduced in another type than that of weights
    places = [by_id.get(id(parameter), (-1, "")) for parameter in bucket.params_list]
    return {
        "bytes": int(bucket.grad_data.numel() * item),
        "parameters": [index for index, _ in places],
        "hook": "",
        "names": [name for _, name in places],
        "parameter_bytes": [elements_of(parameter) * item for parameter in bucket.params_list],
        "shapes": [list(parameter.shape) for parameter in bucket.params_list],
    }


# Gradient buckets of DeepSpeed's optimizers (ZeRO 1, 2, 3) and engine (no ZeRO), once the job itself has
# imported them. DeepSpeed fills one buffer with gradients and keeps no list of past contents: the list is
# read when the buffer is about to be reduced, in a few early steps. An attribute missing in another version
# costs the buckets, not the job.

ZERO_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
ZERO_3 = "deepspeed.runtime.zero.stage3"
ENGINE = "deepspeed.runtime.engine"
AFTER_BACKWARD = ", after backward"
OF_EXPERTS = " of experts"


class Flush(NamedTuple):
    """One buffer that is about to be reduced.

    Attributes:
        source: the `source` in `buckets.json`.
        item: bytes of an element in the reduction.
        parameters: whose gradients are in it, in order.
        names: of all parameters of the model, by parameter.
    """

    source: str
    item: int
    parameters: list[Any]
    names: dict[Any, str]


class DeepSpeedBuckets:
    """The buffers that DeepSpeed reduces in one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._hooked: set[str] = set()
        self._is_final = False
        self._met: dict[tuple[int, ...], dict[str, Any]] = {}

    def look(self, *_: Any) -> None:
        """Install hooks in the modules of DeepSpeed that the job has imported."""
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
        """Discard the buckets seen so far, since buckets may still change."""
        self._met.clear()

    def finish(self) -> None:
        """Record no more buckets."""
        self._is_final = True

    def described(self) -> list[dict[str, Any]]:
        """Return one object per optimizer and source, with buckets in the order of their reductions."""
        modules: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for flushed in self._met.values():
            modules.setdefault((flushed["owner"], flushed["source"]), []).append(flushed["bucket"])
        return [{"source": source, "buckets": buckets} for (_, source), buckets in modules.items()]


def of_zero(optimizer: Any, comm_dtype: Any = None, *_: Any) -> Iterator[Flush]:
    """Yield the buffers that an optimizer of ZeRO is about to reduce.

    Args:
        optimizer: of stage 1, 2 or 3.
        comm_dtype: the type of the buffer that is emptied; None for all.
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
    """Return the parameter of an entry in a buffer: stage 3 stores it, others its group and index."""
    if not isinstance(entry, tuple):
        return entry
    return entry[1] if isinstance(entry[1], torch.Tensor) else optimizer.bit16_groups[entry[0]][entry[1]]


def of_engine(engine: Any, small_bucket: list[Any], *_: Any, **__: Any) -> Iterator[Flush]:
    """Yield the buffer that an engine without ZeRO reduces at once, after backward."""
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
    # In stage 3 a parameter's own shape is empty.
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
