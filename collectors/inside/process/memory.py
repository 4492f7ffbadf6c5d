"""What filled a GPU's memory when an allocation was refused: `memory.jsonl`, a line for each of the first.

Observes PyTorch's caching allocator (CUDA or HIP) before it raises `OutOfMemoryError`, so that errors that
the job catches are seen, too; where the allocator takes no observer, only the error that ends the
interpreter. Writes the requested size and the module, the state of the memory, and the bytes that tensors
hold: parameters, buffers, gradients and optimizer state by module (numbers of layers as `*`), other tensors
by shape; where the job has PyTorch record its memory's history, the rest by the line that allocated it.

Nothing is allocated on a device, and no element of a tensor is read. Memory that no Python object holds, such
as what a kernel saved for the backward, is known to the allocator alone: only its sum is recorded.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from .. import environment
from ..files import MEMORY, append_lines
from ..patching import run_uncompiled
from ..recorder import Recorder
from ..threads import is_main_thread
from ..torch_internals import is_within_backward, on_refused_allocation
from ..tracebacks import OURS
from ..unseen import (
    attributes,
    children_of,
    class_name,
    device_of,
    dtype_of,
    gradient_of,
    is_a,
    is_answered_in_c,
    message_of,
    modules_of,
    parts_of,
    shape_of,
    unseen,
    wants_gradient,
)
from .exits import DEEPEST

MAX_LINES = 16
UNSHARED = 3  # references to the result of `f_locals`: the frame's, ours, and that of the counting call
MAX_ROWS = 48  # rows of one line
MAX_BLOCKS = 200_000  # blocks of the allocator, each an object on the host; more are not read
PARAMETERS, BUFFERS, GRADIENTS, STATE = "parameters", "buffers", "gradients", "optimizer state"
ACTIVATIONS, OTHERS, UNHELD = "activations", "other tensors", "held by no Python object"
_WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_SIZES = {
    "requested_bytes": r"Tried to allocate ([\d.]+) ([KMGT]i)?B",
    "total_bytes": r"total capacity of ([\d.]+) ([KMGT]i)?B",
    "free_bytes": r"of which ([\d.]+) ([KMGT]i)?B is free",
    "allocated_bytes": r"memory ([\d.]+) ([KMGT]i)?B is allocated by PyTorch",
    "unused_bytes": r"and ([\d.]+) ([KMGT]i)?B is reserved by PyTorch",
}
Held = Counter[tuple[str, str]]  # bytes by kind and name


class RefusedAllocations:
    """The refused allocations of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """Start without refusals in a forked child."""
        self._lines = 0

    def on_refused(self, device: int, requested: int, total: int, free: int) -> None:
        """Record a refusal before the allocator raises, in the thread that asked."""
        sizes = {"requested_bytes": requested, "total_bytes": total, "free_bytes": free}
        self._write(device, sizes, [frame for frame, _ in walk_stack(sys._getframe())])

    def on_raise(self, error: BaseException, place: TracebackType | None) -> None:
        """Record an exception that ends the interpreter, if no observer recorded it."""
        if is_a(error, torch.OutOfMemoryError) and not self._lines:
            frames = [frame for frame, _ in walk_tb(place)]
            self._write(-1, sizes_in(message_of(error)), frames[::-1])

    def _write(self, device: int, sizes: dict[str, int], frames: list[FrameType]) -> None:
        if self._lines >= MAX_LINES or self._recorder.is_helper:
            return
        self._lines += 1
        if self._recorder.folder is None:  # refused before the process could show that it trains
            self._recorder.on_process_group()
        frames = [frame for frame in frames if not frame.f_code.co_filename.startswith(OURS)]
        phase, module = place_of(frames)
        calls = [f"{f.f_code.co_filename}:{f.f_lineno} {f.f_code.co_name}" for f in frames[:DEEPEST]]
        line = {"time_ns": time.time_ns(), "device": device, "phase": phase, "module": module}
        line |= sizes | {"calls": "\n".join(calls), "kinds": [], "names": [], "bytes": []}
        with suppress(Exception):  # of a module, a tensor or an optimizer of the job's own class
            line |= describe_memory(device)
        folder = self._recorder.folder
        if folder is not None:
            append_lines(folder / MEMORY, json.dumps(line))


def sizes_in(message: str) -> dict[str, int]:
    """Return the sizes in the message of an `OutOfMemoryError`, in bytes; those it lacks are left out."""
    matches = {name: re.search(pattern, message) for name, pattern in _SIZES.items()}
    sizes = {
        name: int(float(match[1]) * 1024 ** " KMGT".index((match[2] or " ")[0]))
        for name, match in matches.items()
        if match
    }
    unused = sizes.pop("unused_bytes", 0)
    return sizes | (
        {"reserved_bytes": sizes["allocated_bytes"] + unused} if "allocated_bytes" in sizes else {}
    )


def place_of(frames: Iterable[FrameType]) -> tuple[str, str]:
    """Return where memory was refused: forward, backward or optimizer, and the name of the innermost module.

    Args:
        frames: innermost first.
    """
    phase, inner, outer = "", None, None
    for frame in frames:
        owner = _self_of(frame) if frame.f_code.co_varnames[:1] == ("self",) else None
        if is_a(owner, Module):
            inner, outer = (owner if inner is None else inner), owner
        here = "forward" if inner is not None else "optimizer" if is_a(owner, Optimizer) else ""
        phase = phase or here or ("backward" if frame.f_code.co_filename == torch.autograd.__file__ else "")
    if not phase and (is_within_backward() or not is_main_thread()):
        phase = "backward"
    if inner is None or outer is None:
        return phase, ""
    path = next((name for name, module in modules_of(outer) if module is inner), "")
    return phase, f"{_WRAPPERS.sub('', path)} {type(inner).__name__}".strip()


def _self_of(frame: FrameType) -> Any:
    """Return the first argument of a method, and release the locals that Python before 3.13 then keeps."""
    values = frame.f_locals
    owner = values.get("self")
    if type(values) is dict and sys.getrefcount(values) <= UNSHARED:  # else the job holds them, by `locals()`
        values.clear()
    return owner


def describe_memory(device: int) -> dict[str, Any]:
    """Return what holds the memory of a device, as columns of `out_of_memory`.

    Args:
        device: its number; -1 where it is not known, and the tensors of all devices are counted.
    """
    held, addresses = held_by_python(device)
    facts: dict[str, Any] = {}
    if device >= 0:
        stats = torch.cuda.memory_stats(device)
        current = {name: int(stats.get(f"{name}.all.current", -1))
                   for name in ("allocated_bytes", "reserved_bytes", "active", "inactive_split")}  # fmt: skip
        facts = {name: current[name] for name in ("allocated_bytes", "reserved_bytes")}
        facts["refused"] = int(stats.get("num_ooms", -1))
        if current["active"] + current["inactive_split"] <= MAX_BLOCKS:
            facts |= reduced(_segments(device), held, addresses)
    rows = held.most_common()
    beyond = Counter[str]()
    for (kind, _), size in rows[MAX_ROWS:]:
        beyond[kind] += size
    rows = [*rows[:MAX_ROWS], *(((kind, ""), size) for kind, size in beyond.most_common())]
    return facts | {
        "kinds": [kind for (kind, _), _ in rows],
        "names": [name for (_, name), _ in rows],
        "bytes": [size for _, size in rows],
    }


def _segments(device: int) -> list[dict[str, Any]]:
    try:
        segments = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # before PyTorch 2.10 or so
        segments = torch.cuda.memory_snapshot()
    return [segment for segment in segments if segment["device"] == device]


def reduced(segments: Iterable[dict[str, Any]], held: Held, addresses: set[int]) -> dict[str, Any]:
    """Count the blocks that no tensor of Python's holds, by the line that allocated them where it is known.

    Args:
        segments: of one device, as `torch.cuda.memory_snapshot` returns them.
        held: gets the bytes of these blocks.
        addresses: of what Python's tensors hold.

    Returns:
        `largest_free_bytes`, and `history`: whether allocations were recorded by the line that made them.
    """
    largest, history = 0, False
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                largest = max(largest, block["size"])
                continue
            calls = block.get("frames") or ()
            history = history or bool(calls)
            if block.get("address", 0) not in addresses:
                held[UNHELD, environment.mask(_line_of(calls))] += block.get("requested_size", block["size"])
    return {"largest_free_bytes": largest, "history": history}


def _line_of(calls: Iterable[dict[str, Any]]) -> str:
    """Return the innermost call of the job's own code, `file:line function`; empty where none is known."""
    python = (call for call in calls if ".py" in call["filename"])
    named = [f"{call['filename']}:{call['line']} {call['name']}" for call in python]
    of_job = (call for call in named if "-packages/" not in call and "/lib/python" not in call)
    return next(of_job, named[0] if named else "")


def held_by_python(device: int) -> tuple[Held, set[int]]:
    """Return the bytes of tensors that Python's objects hold, by kind and name, and the storages' addresses.

    Args:
        device: number of the GPU; -1 for all devices.
    """
    objects = gc.get_objects()
    modules = [value for value in objects if issubclass(type(value), Module)]
    optimizers = [value for value in objects if issubclass(type(value), Optimizer)]
    tensors = [value for value in objects if issubclass(type(value), torch.Tensor)]
    del objects
    held, addresses, names = Held(), set[int](), dict[int, str]()

    def count(kind: str, name: str, tensor: Any) -> None:
        with suppress(Exception):  # a class of the job's, or one without storage
            for part in _parts(tensor):
                storage = unseen(torch.Tensor.untyped_storage, part)
                size, address, place = storage.nbytes(), storage.data_ptr(), device_of(part)
                where = getattr(place, "type", ""), getattr(place, "index", -1)
                is_on_device = device < 0 or where == ("cuda", device)
                if is_on_device and size and address and address not in addresses:
                    addresses.add(address)
                    held[kind, name] += size

    inner = {id(child) for module in modules for _, child in children_of(module)}
    for root in (module for module in modules if id(module) not in inner):
        for name, module in modules_of(root):
            group = _NUMBER.sub("*", f"{_WRAPPERS.sub('', f'{name}.')}").rstrip(".") or type(module).__name__
            for parameter in parts_of(attributes(module).get("_parameters")):
                names[id(parameter)] = group
                count(PARAMETERS, group, parameter)
                count(GRADIENTS, group, gradient_of(parameter))
            for buffer in parts_of(attributes(module).get("_buffers")):
                count(BUFFERS, group, buffer)
    for optimizer in optimizers:
        states: Any = attributes(optimizer).get("state")
        for parameter, state in list(dict.items(states)) if is_a(states, dict) else ():
            name = names.get(id(parameter), class_name(type(optimizer)))
            for value in parts_of(state):
                count(STATE, name, value)
            count(PARAMETERS, name, parameter)
            count(GRADIENTS, name, gradient_of(parameter))
    for tensor in tensors:
        with suppress(Exception):
            kind = ACTIVATIONS if wants_gradient(tensor) else OTHERS
            count(kind, f"{shape_of(tensor)} {dtype_of(tensor)}", tensor)
    return held, addresses


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a tensor: of a DTensor its own shard; none where it is not a tensor."""
    if is_answered_in_c(tensor) and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif is_answered_in_c(tensor):
        yield tensor


def install(recorder: Recorder) -> None:
    """Record refused allocations."""
    refused = RefusedAllocations(recorder)

    def observe(*facts: int) -> None:
        run_uncompiled(recorder.call, refused.on_refused, *facts)

    on_refused_allocation(observe, recorder.call)
    recorder.listen("raise", refused.on_raise)
    recorder.listen("fork", refused.on_fork)
