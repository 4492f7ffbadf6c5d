"""Common part of GPU sampling, independent of the vendor.

Reads a vendor's library; returns samples, one per GPU, whose device is the id under which PyTorch knows the
GPU. A call that a GPU does not support is made once; a lost GPU is not read any more, and its loss is an
event. Calls may block as long as the driver likes, so each library runs in its own thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from dpro.collectors.telemetry.samples import TelemetrySample
from dpro.plugins import load, places

PAUSE_S = 0.1  # between polls for events, where a library returns at once

Complain = Callable[[str], None]
Values = dict[str, float]
Call = Callable[[Any, Any], Values]  # takes the library and a handle


class Unavailable(Exception):
    """No GPU can be sampled; the message says why, and is empty where that needs no report."""


class Fate(Enum):
    """Consequence of a library error for the failed call."""

    LOST = auto()  # the GPU is gone
    REFUSED = auto()  # the call will never succeed
    FORBIDDEN = auto()  # the call will never succeed, for lack of permission
    LATER = auto()  # the call may succeed another time


@dataclass
class SampledGpu:
    """A GPU, or an instance of a partitioned GPU (MIG), and the calls that it supports."""

    handle: Any
    device: str
    calls: list[Call]
    rare_calls: list[Call]
    fields: list[Any] = field(default_factory=list)  # read in one batch, where the library supports it


class SampledGpus(ABC):
    """GPUs of this node that one library knows.

    Attributes:
        most_silent: readings in a row without any value after which a GPU counts as lost; 0 for never.
    """

    most_silent = 0

    def __init__(self, complain: Complain, library: Any, errors: tuple[type[Exception], ...]) -> None:
        """Begin without GPUs; subclasses add those they find.

        Args:
            complain: called with one line for each GPU or value that cannot be sampled.
        """
        self._library, self._complain, self._errors = library, complain, errors
        self._gpus: list[SampledGpu] = []
        self._silent: dict[str, int] = {}
        self._forbidden: set[str] = set()
        self._lost: list[TelemetrySample] = []

    def read(self, everything: bool) -> list[TelemetrySample]:
        """Return one sample per GPU, and an event for each that was lost.

        Args:
            everything: include the values that are read rarely.
        """
        samples = [sample for gpu in list(self._gpus) if (sample := self._read(gpu, everything))]
        if self._forbidden:
            self._complain(f"GPUs: no permission to read {', '.join(sorted(self._forbidden))}")
        lost, self._lost, self._forbidden = self._lost, [], set()
        return samples + lost

    def wait(self, timeout_s: float) -> list[TelemetrySample]:
        """Wait for events that GPUs report, until the timeout.

        Args:
            timeout_s: how long to wait; GPUs that report no events only let the time pass.

        Returns:
            One sample per event.
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
        """Return the consequence of an error."""

    @abstractmethod
    def _events_within(self, timeout_s: float) -> list[tuple[str, Values]] | None:
        """Return devices and their events within a timeout; empty if none came, None if none can come."""

    def _batch(self, gpu: SampledGpu, everything: bool) -> Values:
        """Return the values that the library reads in one batch; none by default."""
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
        """Add the results of calls to the values; remove refused calls from the list.

        Raises:
            Exception: an error of the library: the GPU is lost.
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


class GpuLibrary(NamedTuple):
    """A vendor's library: its name, what exists where the driver is loaded, and how its GPUs are opened."""

    name: str
    driver: Path
    open: Callable[[Complain], SampledGpus]


def libraries() -> Iterator[GpuLibrary]:
    """Yield the library of NVIDIA, and those of extensions; a node may have several."""
    from dpro.collectors.telemetry import nvml

    yield nvml.NVML
    yield from map(load, places("telemetry").values())
