"""A training loop that never waits for its input, since it gets the batch before again.

In: nothing. Out: from the third step on a DataLoader that is asked for a batch to train on returns the
last one that it loaded, as many times as it has batches. What an input that is always ready would gain is
measured so; what the job learns is not what it should.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..recorder import Recorder
from ..torch_internals import loader_iterator
from .report import ChangeReport

BEGINS_AT_STEP = 3
CODE = "DataLoader(num_workers=N, prefetch_factor=…) with enough workers"


class _Batches:
    """The last batch of each data set, and how many of its batches were returned."""

    def __init__(self, report: ChangeReport) -> None:
        self.begun = False
        self._report = report
        self._applied = False
        self._last: dict[int, tuple[Any, list[int]]] = {}
        self._count: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def again(self, iterator: Any) -> tuple[bool, Any]:
        """The last batch, where there is one to return.

        Raises:
            StopIteration: the loader has no more batches.
        """
        key = id(iterator._dataset)
        if not (self.begun and torch.is_grad_enabled() and key in self._last):
            return False, None
        length = _length(iterator)
        if length is None:
            self._report.refuse(
                f"the DataLoader does not know how many batches it has: in the script, {CODE}"
            )
            return False, None
        if self._count.get(iterator, 0) >= length:
            raise StopIteration
        batch, versions = self._last[key]
        if _versions(batch) != versions:
            self._report.refuse(f"the script changes its batches in place: in the script, {CODE}")
            return False, None
        if not self._applied:
            self._applied = True
            self._report.applied("DataLoader")
        return True, batch

    def returned(self, iterator: Any, batch: Any) -> None:
        self._count[iterator] = self._count.get(iterator, 0) + 1
        if not self.begun and torch.is_grad_enabled():
            self._last = {id(iterator._dataset): (batch, _versions(batch))}


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Return batches again."""
    report.missing = f"the job made no DataLoader: its input has to be ready by other means, as {CODE}"
    batches = _Batches(report)

    def on_step(step: int) -> None:
        batches.begun = batches.begun or step >= BEGINS_AT_STEP

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
        except Exception as error:  # the job loads its batches itself
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
