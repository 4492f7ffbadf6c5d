"""Gradient buckets: how data-parallel modules group their gradients for communication.

In: modules as they are wrapped. Out: `buckets.json`, a list of bucket sizes in bytes per wrapped module.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

import torch.distributed as dist

from .patching import patch
from .recorder import Recorder

KNOWN_AT_STEP = 3  # DDP rebuilds its buckets after the first backward


class Buckets:
    """The wrapped modules of one process."""

    def __init__(self, recorder: Recorder) -> None:
        """No module is wrapped yet."""
        self._recorder = recorder
        self._modules: list[weakref.ref[Any]] = []

    def on_module(self, module: Any) -> None:
        """A module was wrapped for data parallelism."""
        self._modules.append(weakref.ref(module))

    def on_step(self, step: int) -> None:
        """Buckets are final after a few steps."""
        if step == KNOWN_AT_STEP:
            self.save()

    def save(self) -> None:
        """Save what DDP says of its buckets."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        buckets = [_buckets(module._get_ddp_logging_data()) for module in modules]
        if buckets:
            self._recorder.write_file("buckets.json", json.dumps(buckets).encode())


def install(recorder: Recorder) -> None:
    """Record gradient buckets."""
    if not dist.is_available():
        return
    from torch.nn.parallel import DistributedDataParallel

    buckets = Buckets(recorder)
    patch(DistributedDataParallel, "__init__", after=lambda module: recorder.call(buckets.on_module, module))
    recorder.listen("step", buckets.on_step)
    recorder.listen("end", buckets.save)


def _buckets(logging_data: dict[str, Any]) -> list[int]:
    """Bytes per bucket in order of communication: as rebuilt after the first backward, if it was."""
    sizes = logging_data.get("rebuilt_bucket_sizes") or logging_data.get("bucket_sizes") or ""
    return [int(size) for size in str(sizes).split(",") if size.strip()]
