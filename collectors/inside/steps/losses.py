"""Losses and norms of gradients: the numbers that show whether the training goes well.

Watches calls of `backward` on one number, and the results of torch's functions that clip gradients. Writes a
record for each, of any step, where that was asked for. Nothing is computed for it, and nothing waits for a
device: there a number is copied into pinned memory, in the order of its stream, and read once it has come.
Its arrival shows in the memory itself, which had the bits of no number before; no event is queried. Where a
GradScaler has scaled a loss, the number before that counts.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import time
import weakref
from collections import deque
from types import MemberDescriptorType
from typing import Any, NamedTuple

import torch

from .. import captures, records
from ..recorder import Recorder
from ..torch_internals import NO_TASK, task_reader
from ..unseen import find_in_class, unseen

SLOTS = 1024  # numbers that a device has yet to deliver; beyond these, others are left out
NONE_YET = 0x7FA5A5A5  # the bits of a NaN that no computation makes
MAX_EARLY = 1024  # numbers before there was a file
FLOAT, INTEGER, FLOAT32 = struct.Struct("<d"), struct.Struct("<q"), struct.Struct("<f")
LOSS, GRAD_NORM = range(len(records.LOSS_KINDS))
FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_is_cpu = torch.Tensor.is_cpu.__get__


class Noted(NamedTuple):
    """A number without its value: when it was there, its kind, and whether a GradScaler was used."""

    time_ns: int
    kind: int
    is_scaled: bool


class Delivered:
    """Memory that devices copy numbers into, and that is read without a call of torch or of a device."""

    def __init__(self) -> None:
        self._bits = self._pinned_memory()
        self._numbers = self._bits.view(torch.float32)
        self._seen = (ctypes.c_uint32 * SLOTS).from_address(self._bits.data_ptr())
        self._waiting: deque[tuple[int, Noted]] = deque()
        self._next = itertools.count()

    @staticmethod
    def _pinned_memory() -> Any:
        """Return pinned memory: a copy into any other waits."""
        return torch.full((SLOTS,), NONE_YET, dtype=torch.int32, device="cpu", pin_memory=True)

    def copy(self, number: Any, noted: Noted) -> None:
        """Have a number copied here, behind the work of its stream."""
        if len(self._waiting) < SLOTS:
            slot = next(self._next) % SLOTS
            number = unseen(torch.Tensor.reshape, unseen(torch.Tensor.to, number, torch.float32), ())
            unseen(torch.Tensor.copy_, unseen(torch.Tensor.select, self._numbers, 0, slot), number, True)
            self._waiting.append((slot, noted))

    def take(self) -> list[tuple[Noted, float]]:
        """Remove and return the oldest numbers that have come."""
        taken = []
        while self._waiting and (bits := self._seen[self._waiting[0][0]]) != NONE_YET:
            slot, noted = self._waiting.popleft()
            self._seen[slot] = NONE_YET
            taken.append((noted, FLOAT32.unpack(bits.to_bytes(4, "little"))[0]))
        return taken


class Losses:
    """The losses and norms of gradients of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._backward_task = recorder, task_reader()
        self._left: list[Delivered | None] = []  # of the parent of a fork: freeing it would call the device
        self._delivered: Delivered | None = None
        self.on_fork()

    def on_fork(self) -> None:
        """Start without numbers in a forked child."""
        self._left.append(self._delivered)
        self._early: deque[tuple[Noted, float]] = deque(maxlen=MAX_EARLY)
        self._delivered = None
        self._scaled: tuple[weakref.ref[Any], Any] | None = None
        self._is_scaled = False

    def on_scaled(self, before: Any, after: Any) -> None:
        """Remember a loss that a GradScaler has scaled; one that is switched off returns it as it is."""
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and after is not before:
            self._scaled, self._is_scaled = (weakref.ref(after), unseen(torch.Tensor.detach, before)), True

    def on_backward(self, tensors: Any, gradients: Any) -> None:
        """Record a loss as gradients are asked for.

        Args:
            gradients: those of `tensors`, where the caller gives them: then it is not a loss.
        """
        if isinstance(tensors, (tuple, list)) and len(tensors) == 1:
            (tensors,) = tensors
        if gradients is None and isinstance(tensors, torch.Tensor) and self._backward_task() == NO_TASK:
            scaled, self._scaled = self._scaled, None
            is_of_scaled = scaled is not None and scaled[0]() is tensors
            self._note(LOSS, scaled[1] if scaled is not None and is_of_scaled else tensors)

    def on_norm(self, norm: Any) -> None:
        """Record the norm of gradients that a function has returned."""
        if isinstance(norm, torch.Tensor):
            self._note(GRAD_NORM, norm)

    def _note(self, kind: int, number: Any) -> None:
        if type(number) is not torch.Tensor:
            # Of a tensor sharded over ranks, this rank's part: the whole would take communication.
            part, _ = find_in_class(type(number), "_local_tensor")
            number = part.__get__(number) if type(part) is MemberDescriptorType else number
            if find_in_class(type(number), "__torch_dispatch__")[1] is not torch.Tensor:
                return
        if unseen(torch.Tensor.numel, number) != 1:
            return
        noted = Noted(time.time_ns(), kind, self._is_scaled)
        if unseen(_is_cpu, number):
            self._write(noted, float(unseen(torch.Tensor.item, number)))
        elif not captures.is_capturing_here():
            if self._delivered is None:
                self._delivered = Delivered()
            self._delivered.copy(unseen(torch.Tensor.detach, number), noted)
            self.on_end()

    def _write(self, noted: Noted, value: float) -> None:
        writer = self._recorder.records
        if writer is None:
            self._early.append((noted, value))
            return
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        for (time_ns, kind, is_scaled), number in (*early, (noted, value)):
            bits = INTEGER.unpack(FLOAT.pack(number))[0]
            writer.write(records.LOSS, time_ns, bits, kind, int(is_scaled))

    def on_end(self) -> None:
        """Record the numbers that devices have delivered, without waiting for others."""
        for noted, value in self._delivered.take() if self._delivered is not None else ():
            self._write(noted, value)


def install(recorder: Recorder) -> None:
    """Record losses and norms of gradients, where that was asked for."""
    if not recorder.config.get("watch_loss"):
        return
    losses = Losses(recorder)
    backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale

    @functools.wraps(backward)
    def with_losses(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            recorder.call(losses.on_backward, tensors, grad_tensors)
        return backward(tensors, grad_tensors, *args, **kwargs)

    @functools.wraps(scale)
    def with_scale(scaler: Any, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        recorder.call(losses.on_scaled, outputs, scaled)
        return scaled

    torch.autograd.backward = with_losses
    torch.amp.GradScaler.scale = with_scale
    utils = torch.nn.utils
    _watch_norm(recorder, losses, "clip_grad_norm_", utils.clip_grad, utils)
    _watch_norm(recorder, losses, "get_total_norm", utils)
    recorder.on_import(
        FSDP,
        lambda fsdp: _watch_norm(
            recorder, losses, "clip_grad_norm_", getattr(fsdp, "FullyShardedDataParallel", None)
        ),
    )
    recorder.listen("end", losses.on_end)
    recorder.listen("fork", losses.on_fork)


def _watch_norm(recorder: Recorder, losses: Losses, name: str, *owners: Any) -> None:
    """Record what a function returns, wherever it is under its name."""
    original = getattr(owners[0], name, None)
    if original is None:
        return

    @functools.wraps(original)
    def with_norm(*args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            recorder.call(losses.on_norm, norm)
        return norm

    for owner in owners:
        setattr(owner, name, with_norm)
