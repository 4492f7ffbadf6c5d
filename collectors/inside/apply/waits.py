"""A training loop that reads values from the GPU a step later, instead of waiting for them.

In: nothing. Out: `tensor.item()` in the script's own code returns, from the third step on, what the same
call returned in the step before; the value of this step is copied meanwhile. PyTorch's own calls, and
tensors on the CPU, stay as they are. A script that decides something by such a value decides a step late.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ..recorder import Recorder
from .report import ChangeReport

BEGINS_AT_STEP = 2
CODE = "keep losses on the GPU and read them every N steps"
Call = tuple[Any, int, int]  # the code and the line of a call, and how many of them the step had before
Read = Callable[[], Any]


class _Values:
    """What each call of a step will return in the next."""

    def __init__(self, report: ChangeReport) -> None:
        self.begun = False
        self._report = report
        self._calls: Counter[tuple[Any, int]] = Counter()
        self._reads: dict[Call, Read] = {}
        self._applied = False

    def on_step(self, step: int) -> None:
        self.begun = self.begun or step >= BEGINS_AT_STEP
        self._calls.clear()

    def late(self, tensor: Any, frame: FrameType) -> Read | None:
        """How to read what the same call was about in the step before; None where that is not known."""
        place = frame.f_code, frame.f_lineno
        call = (*place, self._calls[place])
        self._calls[place] += 1
        before = self._reads.pop(call, None)
        self._reads[call] = start_copy(tensor)
        if before is not None and not self._applied:
            self._applied = True
            self._report.applied(f"item() in {frame.f_code.co_name}")
        return before


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Have `item()` return what was computed a step before."""
    report.missing = f"the script reads nothing from a GPU with item() in each step: in general, {CODE}"
    values = _Values(report)
    original = torch.Tensor.item

    @functools.wraps(original)
    def item(tensor: Any) -> Any:
        if not values.begun or not is_elsewhere(tensor) or torch.compiler.is_compiling():
            return original(tensor)
        frame = sys._getframe(1)
        if f"{frame.f_globals.get('__name__', '')}.".startswith("torch."):
            return original(tensor)
        try:
            read = values.late(tensor, frame)
            return original(tensor) if read is None else read()
        except Exception as error:  # as a call in a capture of CUDA graphs
            values.begun = False
            report.refuse(f"{type(error).__name__}: {error}".replace("\n", " "))
            return original(tensor)

    torch.Tensor.item = item
    recorder.listen("step", values.on_step)


def is_elsewhere(tensor: Any) -> bool:
    """Whether reading a tensor waits for a device."""
    return bool(tensor.is_cuda)


def start_copy(tensor: Any) -> Read:
    """Copy a value to the host without waiting for it. Returns how to read it once it is there."""
    value = torch.empty((), dtype=tensor.dtype, pin_memory=True)
    value.copy_(tensor.detach().reshape(()), non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def read() -> Any:
        done.synchronize()
        return value.tolist()

    return read
