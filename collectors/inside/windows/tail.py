"""The GPU's work on the steps that a host has ended: how far it has got.

In: the moment at which the last of them ends. Out: whether the GPU has passed it, by an event that is asked,
never waited for. A synchronisation would stall a job whose host runs ahead of its GPU, for as long as the GPU
is behind, and would break a capture.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from .. import captures
from ..torch_internals import has_context, internal

LOOK_S = 0.005


class PendingGpuWork:
    """What the GPU still has to do; its other streams are taken to join the current one by the step's end."""

    def __init__(self) -> None:
        """The last step ends now."""
        self._events: list[Any] | None = None
        self.has_passed()

    def has_passed(self) -> bool:
        """Whether the GPU has got there, as far as it may be asked now; True also where it has failed."""
        with captures.guard() as free:
            if not free or captures.is_capturing_here():
                return False
            try:
                if self._events is None:
                    self._events = [_recorded(device) for device in devices()]
                return all(event.query() for event in self._events)
            except RuntimeError:  # an earlier error of the GPU, which the job is about to see itself
                self._events = []
                return True

    def wait(self, longest_s: float) -> bool:
        """The same, asked again for this long."""
        deadline = time.monotonic() + longest_s
        while not self.has_passed():
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_S)
        return True


def _recorded(device: int | None) -> Any:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def devices() -> list[int | None]:
    """The devices that this process uses: on another one an event would claim memory for a context."""
    if internal("torch._C._cuda_hasPrimaryContext") is None:
        return [None]  # the current one
    return [device for device in range(torch.cuda.device_count()) if has_context(device)]
