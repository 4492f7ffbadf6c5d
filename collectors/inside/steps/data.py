"""Waiting for data: the time the training loop spends in its DataLoader, and how much data it gets there.

Watches the calls of a loader's `__iter__` and `__next__`. Keeps the totals so far, which `host` samples at
the end of each step, and writes a record for each long wait, with the worker process whose batch it was, and
for each beginning of a loader. Only the sizes of a batch's tensors are read, never their contents.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch.utils.data.dataloader import DataLoader

from .. import records
from ..recorder import Recorder
from ..threads import get_ident
from ..torch_internals import loader_iterator, worker_of
from ..unseen import attributes, elements_of, is_a, parts_of

LONG_NS = 1_000_000


class DataWaits:
    """The waits of one process for data."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """Start without a wait in a forked child: a worker, most likely."""
        self._worker = -1
        self._begun_ns = 0  # 0 outside a wait
        self._waiting: Any = None  # the iterator that is waited for

    def on_beginning(self, loader: Any) -> None:
        """Begin to wait for a loader that begins again, and may have to start its workers."""
        ours = self._recorder.training_thread in (0, get_ident())
        if self._waiting is None and ours:
            self._waiting, self._begun_ns = loader, time.time_ns()

    def on_begun(self, loader: Any) -> None:
        """Record the wait for a loader that has begun."""
        if self._waiting is not loader:
            return
        self._waiting = None
        duration_ns = time.time_ns() - self._begun_ns
        self._recorder.data_wait_ns = max(self._recorder.data_wait_ns, 0) + duration_ns
        if self._recorder.records is not None:
            held = attributes(loader)
            workers, persist = int(held.get("num_workers", 0)), int(bool(held.get("persistent_workers")))
            self._recorder.records.write(records.BEGUN, self._begun_ns, duration_ns, workers, persist)

    def on_wait(self, iterator: Any) -> None:
        """Begin to wait for a batch, unless within another loader, or on a thread that does not train."""
        ours = self._recorder.training_thread in (0, get_ident())
        if self._waiting is None and ours:
            self._recorder.guarded(self._recorder.on_work)
            self._waiting, self._worker = iterator, worker_of(attributes(iterator))
            self._begun_ns = time.time_ns()

    def on_batch(self, iterator: Any, batch: Any) -> None:
        """Record the wait for a batch.

        Args:
            iterator: of the loader; one that is not waited for changes nothing.
            batch: None where there are no more.
        """
        if self._waiting is not iterator:
            return
        self._waiting = None
        duration_ns = time.time_ns() - self._begun_ns
        self._recorder.data_wait_ns = max(self._recorder.data_wait_ns, 0) + duration_ns
        if duration_ns >= LONG_NS and self._recorder.records is not None:
            self._recorder.records.write(records.LOADED, self._begun_ns, duration_ns, self._worker)
        # A batch to evaluate is not work of the training step, nor distributed among ranks like it.
        elements = count_elements(batch) if torch.is_grad_enabled() else 0
        if elements > 0:
            self._recorder.input_elements = max(self._recorder.input_elements, 0) + elements


def install(recorder: Recorder) -> None:
    """Record how long the training loop waits for its data."""
    data = DataWaits(recorder)
    recorder.listen("fork", data.on_fork)
    _patch_beginning(recorder, data)
    iterators = loader_iterator()
    if iterators is None:
        return
    original = iterators.__next__

    @functools.wraps(original)
    def patched(iterator: Any) -> Any:
        recorder.call(data.on_wait, iterator)
        batch = None
        try:
            batch = original(iterator)
            return batch
        finally:
            recorder.call(data.on_batch, iterator, batch)

    iterators.__next__ = patched


def _patch_beginning(recorder: Recorder, data: DataWaits) -> None:
    original = DataLoader.__iter__

    @functools.wraps(original)
    def patched(loader: Any) -> Any:
        recorder.call(data.on_beginning, loader)
        try:
            return original(loader)
        finally:
            recorder.call(data.on_begun, loader)

    DataLoader.__iter__ = patched


# The work in a batch, without reading its tensors: the number of their elements.

MAX_PARTS = 256  # parts of a batch; one with more is not counted: that would take long
_PLAIN = (str, bytes, int, float)


def count_elements(batch: Any) -> int:
    """Return how many elements the tensors of a batch have; 0 where it has none, or too many parts."""
    return sum(map(elements_of, tensors_in(batch)))


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """Return the tensors that a batch consists of, in order; none where it has too many parts to look at.

    Lists, tuples, dicts and the attributes of objects (batches of tokenizers and of graphs) are looked into.
    """
    tensors: list[torch.Tensor] = []
    parts, met = [batch], {id(None)}
    while parts:
        part = parts.pop()
        if is_a(part, torch.Tensor):
            tensors.append(part)
        elif id(part) not in met:
            met.add(id(part))
            held = _held(part)
            if len(met) + len(parts) + len(held) > MAX_PARTS:
                return []
            parts.extend(reversed([*held]))
    return tensors


def _held(part: Any) -> Any:
    if is_a(part, (dict, list, tuple)):
        held = parts_of(part)
        return () if held and not is_a(part, dict) and is_a(held[0], _PLAIN) else held
    return () if is_a(part, (type, *_PLAIN)) else attributes(part).values()
