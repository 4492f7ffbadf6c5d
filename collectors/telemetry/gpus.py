"""GPUs of a node as the sampler sees them, independent of the vendor: what the vendors' libraries share.

In: a maker's library. Out: samples, one per GPU, whose device is the id that PyTorch knows the GPU by. What a
GPU does not support is asked once; a GPU that is lost is asked no more, and that it was lost is an event.
Calls may block for as long as a driver likes: each library is asked in a thread of its own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from dpro.collectors.telemetry.samples import TelemetrySample

PAUSE_S = 0.1  # between two questions for events, where a library answers at once

Complain = Callable[[str], None]
Values = dict[str, float]
Call = Callable[[Any, Any], Values]  # of the library and a handle


class Unavailable(Exception):
    """No GPU can be sampled; the message says why if that is worth knowing, and is empty otherwise."""


class Fate(Enum):
    """What an error of a library means for what was asked."""

    LOST = auto()  # the GPU is gone
    REFUSED = auto()  # it will never be answered
    FORBIDDEN = auto()  # the same, for want of permission
    LATER = auto()  # it may be answered another time


@dataclass
class SampledGpu:
    """A GPU, or one instance of a GPU that is partitioned (MIG), and what may be asked of it."""

    handle: Any
    device: str
    calls: list[Call]
    rare_calls: list[Call]
    fields: list[Any] = field(default_factory=list)  # what is asked for in one batch, where there is such


class SampledGpus(ABC):
    """The GPUs of this node that one library knows.

    Attributes:
        most_silent: readings in a row without any answer until a GPU counts as lost; 0 for never.
    """

    most_silent = 0

    def __init__(self, complain: Complain, library: Any, errors: tuple[type[Exception], ...]) -> None:
        """No GPU is known yet.

        Args:
            complain: called with one line each, of what is worth knowing about GPUs that are sampled in part.
        """
        self._library, self._complain, self._errors = library, complain, errors
        self._gpus: list[SampledGpu] = []
        self._silent: dict[str, int] = {}
        self._forbidden: set[str] = set()
        self._lost: list[TelemetrySample] = []

    def read(self, everything: bool) -> list[TelemetrySample]:
        """One sample per GPU."""
        samples = [sample for gpu in list(self._gpus) if (sample := self._read(gpu, everything))]
        if self._forbidden:
            self._complain(f"GPUs: no permission to read {', '.join(sorted(self._forbidden))}")
        lost, self._lost, self._forbidden = self._lost, [], set()
        return samples + lost

    def wait(self, timeout_s: float) -> list[TelemetrySample]:
        """Wait for what GPUs report of their own, for as long as that takes or the time is over.

        Args:
            timeout_s: how long to wait at most; without GPUs that report anything just the time passes.

        Returns:
            An event for each error.
        """
        deadline = time.monotonic() + timeout_s
        samples: list[TelemetrySample] = []
        while (left := deadline - time.monotonic()) > 0:
            events = self._events_within(left)
            if events is None:
                time.sleep(left)
                break
            samples += [
                TelemetrySample(time.time_ns(), -1, device, values, is_event=True)
                for device, values in events
            ]
            if not events:
                time.sleep(min(PAUSE_S, left))  # some drivers return at once
        return samples

    @abstractmethod
    def _fate(self, error: Any) -> Fate:
        """What an error means."""

    @abstractmethod
    def _events_within(self, timeout_s: float) -> list[tuple[str, Values]] | None:
        """Devices and what they report, at most within a time; none if nothing came, None if nothing can."""

    def _batch(self, gpu: SampledGpu, everything: bool) -> Values:
        """What is asked for in one batch, where the library has such."""
        return {}

    def _read(self, gpu: SampledGpu, everything: bool) -> TelemetrySample | None:
        now, begun = time.time_ns(), time.perf_counter_ns()
        values: Values = {}
        try:
            for calls in (gpu.calls, gpu.rare_calls) if everything else (gpu.calls,):
                self._call_all(gpu, calls, values)
            values |= self._batch(gpu, everything)
        except self._errors as error:
            if self._fate(error) is Fate.LOST:
                self._lose(gpu, str(error))
            return None
        self._silent[gpu.device] = 0 if values else self._silent.get(gpu.device, 0) + 1
        if 0 < self.most_silent <= self._silent[gpu.device]:
            self._lose(gpu, "its driver no longer answers")
        values["sampling_us"] = (time.perf_counter_ns() - begun) // 1000
        return TelemetrySample(now, -1, gpu.device, values)

    def _call_all(self, gpu: SampledGpu, calls: list[Call], values: Values) -> None:
        """Add what calls return to the values; strike those that are refused off the list.

        Raises:
            Exception: of the library: the GPU is lost.
        """
        for call in list(calls):
            try:
                values |= call(self._library, gpu.handle)
            except self._errors as error:
                fate = self._fate(error)
                if fate is Fate.LOST:
                    raise
                self._note(call.__name__.strip("_").replace("_", " "), fate)
                if fate is not Fate.LATER:
                    calls.remove(call)

    def _note(self, what: str, fate: Fate) -> None:
        if fate is Fate.FORBIDDEN:
            self._forbidden.add(what)

    def _lose(self, gpu: SampledGpu, reason: str) -> None:
        self._complain(f"GPU {gpu.device} was lost: {reason}")
        self._lost.append(TelemetrySample(time.time_ns(), -1, gpu.device, {"lost": 1}, is_event=True))
        self._gpus.remove(gpu)


def libraries() -> Iterator[Callable[[Complain], SampledGpus]]:
    """What opens each maker's library; both may be there on one node."""
    from dpro.collectors.telemetry import amd, nvml

    yield nvml.NvidiaGpus
    yield amd.AmdGpus
