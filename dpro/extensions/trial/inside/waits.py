"""Changes that keep the training loop from waiting: for values of the GPU, or for its input."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from _dpro_inside_the_job.recorder import Recorder
from _dpro_inside_the_job.torch_internals import loader_iterator
from torch.utils._pytree import tree_leaves

from . import ChangeReport

LATE_FROM_STEP = 2
LATE_CODE = "keep losses on the GPU and read them every N steps"
Call = tuple[Any, int, int]  # code and line of a call, and how often the step made it before
Read = Callable[[], Any]


class _Values:
    """The values that calls of `item` return one step late."""

    def __init__(self, report: ChangeReport) -> None:
        self.begun = False
        self._report = report
        self._calls: Counter[tuple[Any, int]] = Counter()
        self._reads: dict[Call, Read] = {}
        self._applied = False

    def on_step(self, step: int) -> None:
        self.begun = self.begun or step >= LATE_FROM_STEP
        self._calls.clear()

    def late(self, tensor: Any, frame: FrameType) -> Read | None:
        """Return how to read the value of this call in the previous step; None where it is not known."""
        place = frame.f_code, frame.f_lineno
        call = (*place, self._calls[place])
        self._calls[place] += 1
        before = self._reads.pop(call, None)
        self._reads[call] = start_copy(tensor)
        if before is not None and not self._applied:
            self._applied = True
            self._report.applied(f"item() in {frame.f_code.co_name}")
        return before


def return_values_late(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Make `tensor.item()` in the script's own code return the value of the same call in the previous step.

    Values are copied from the third step on, while the job continues. PyTorch's own calls, and tensors on the
    CPU, stay as they are. A script that decides something by such a value decides a step late.
    """
    report.missing = f"the script reads nothing from a GPU with item() in each step: in general, {LATE_CODE}"
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
        except Exception as error:  # such as a call while a CUDA graph is captured
            values.begun = False
            report.refuse(f"{type(error).__name__}: {error}".replace("\n", " "))
            return original(tensor)

    torch.Tensor.item = item
    recorder.listen("step", values.on_step)


def is_elsewhere(tensor: Any) -> bool:
    """Return whether reading a tensor waits for a device."""
    return bool(tensor.is_cuda)


def start_copy(tensor: Any) -> Read:
    """Start copying a value to the host; return a function that waits for the copy and reads it."""
    value = torch.empty((), dtype=tensor.dtype, pin_memory=True)
    value.copy_(tensor.detach().reshape(()), non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def read() -> Any:
        done.synchronize()
        return value.tolist()

    return read


AGAIN_FROM_STEP = 3
AGAIN_CODE = "DataLoader(num_workers=N, prefetch_factor=…) with enough workers"


class _Batches:
    """The last batch loaded for training, and the number of batches that each iterator returned."""

    def __init__(self, report: ChangeReport) -> None:
        self.begun = False
        self._report = report
        self._applied = False
        self._last: dict[int, tuple[Any, list[int]]] = {}
        self._count: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def again(self, iterator: Any) -> tuple[bool, Any]:
        """Return whether to repeat the last batch, and that batch.

        Raises:
            StopIteration: the loader has no more batches.
        """
        key = id(iterator._dataset)
        if not (self.begun and torch.is_grad_enabled() and key in self._last):
            return False, None
        length = _length(iterator)
        if length is None:
            self._report.refuse(
                f"the DataLoader does not know how many batches it has: in the script, {AGAIN_CODE}"
            )
            return False, None
        if self._count.get(iterator, 0) >= length:
            raise StopIteration
        batch, versions = self._last[key]
        if _versions(batch) != versions:
            self._report.refuse(f"the script changes its batches in place: in the script, {AGAIN_CODE}")
            return False, None
        if not self._applied:
            self._applied = True
            self._report.applied("DataLoader")
        return True, batch

    def returned(self, iterator: Any, batch: Any) -> None:
        self._count[iterator] = self._count.get(iterator, 0) + 1
        if not self.begun and torch.is_grad_enabled():
            self._last = {id(iterator._dataset): (batch, _versions(batch))}


def return_batches_again(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Make a DataLoader return the last batch that it loaded, as many times as it has batches.

    It does so for batches to train on, once three steps have ended. This measures the gain of an input that
    is always ready; the job does not learn what it should.
    """
    report.missing = f"the job made no DataLoader: prepare its input ahead, such as with {AGAIN_CODE}"
    batches = _Batches(report)

    def on_step(step: int) -> None:
        batches.begun = batches.begun or step >= AGAIN_FROM_STEP

    iterators = loader_iterator()
    if iterators is None:
        report.refuse("this PyTorch has no iterator of a DataLoader")
        return
    original = iterators.__next__

    @functools.wraps(original)
    def patched(iterator: Any) -> Any:
        is_there, batch = False, None
        try:
            is_there, batch = batches.again(iterator)
        except StopIteration:
            raise
        except Exception as error:  # the job loads its own batches
            report.refuse(f"{type(error).__name__}: {error}")
        if not is_there:
            batch = original(iterator)
        report.attempt(batches.returned, iterator, batch)
        return batch

    iterators.__next__ = patched
    recorder.listen("step", on_step)


def _length(iterator: Any) -> int | None:
    try:
        return len(iterator)
    except TypeError:
        return None


def _versions(batch: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
