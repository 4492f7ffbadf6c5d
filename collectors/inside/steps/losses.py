"""Losses: the numbers whose gradients the training loop asks for.

In: calls of `backward` on one number. Out: a record for each, with how many came before it. On the CPU the
number is read at once; on a device it is copied there into a table, which is read when the job ends, so that
nothing waits for it. Of a loss that a GradScaler has scaled the number before that counts. Only the first
ones are kept, and nothing is recorded unless it was asked for: `dpro try` compares what a changed job learns.
"""

from __future__ import annotations

import functools
import struct
import time
import weakref
from typing import Any

import torch

from .. import records
from ..recorder import Recorder
from ..torch_internals import is_within_backward

MAX_LOSSES = 4096
FLOAT, INTEGER = struct.Struct("<d"), struct.Struct("<q")


class Losses:
    """The losses of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """This is a forked child: its losses are its own."""
        self._early: list[tuple[int, float]] = []  # before there was a file
        self._times: list[int] = []
        self._table: Any = None
        self._scaled: tuple[weakref.ref[Any], Any] | None = None
        self._count = 0

    def on_scaled(self, before: Any, after: Any) -> None:
        """A GradScaler has scaled a loss."""
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            self._scaled = weakref.ref(after), before.detach()

    def on_backward(self, tensors: Any, gradients: Any) -> None:
        """Gradients are asked for.

        Args:
            gradients: of those, where the caller gives them: then it is no loss.
        """
        if isinstance(tensors, (tuple, list)) and len(tensors) == 1:
            (tensors,) = tensors
        is_number = isinstance(tensors, torch.Tensor) and tensors.numel() == 1
        if gradients is not None or not is_number or is_within_backward() or self._count >= MAX_LOSSES:
            return
        scaled, self._scaled = self._scaled, None
        loss = scaled[1] if scaled is not None and scaled[0]() is tensors else tensors.detach()
        if loss.device.type == "cpu":
            self._note(time.time_ns(), float(loss))
        else:
            self._copy(loss)
        self._count += 1

    def _note(self, time_ns: int, loss: float) -> None:
        writer = self._recorder.records
        if writer is None:
            self._early.append((time_ns, loss))
            return
        early, self._early = self._early, []
        for noted_ns, number in (*early, (time_ns, loss)):
            writer.write(records.LOSS, noted_ns, INTEGER.unpack(FLOAT.pack(number))[0])

    def _copy(self, loss: Any) -> None:
        """Copy a number on its device, in the order of its stream."""
        if loss.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if self._table is None:
            self._table = torch.empty(MAX_LOSSES, device=loss.device, dtype=torch.float32)
        self._table[len(self._times)].copy_(loss.reshape(()))
        self._times.append(time.time_ns())

    def on_end(self) -> None:
        """Read the table; the job computes no more."""
        times, self._times = self._times, []
        if times:
            for time_ns, loss in zip(times, self._table[: len(times)].tolist(), strict=True):
                self._note(time_ns, loss)


def install(recorder: Recorder) -> None:
    """Record losses, where that was asked for."""
    if not recorder.config.get("losses"):
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
    recorder.listen("end", losses.on_end)
    recorder.listen("fork", losses.on_fork)
