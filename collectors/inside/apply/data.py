"""How DataLoaders load: worker processes, what they prepare in advance, pinned memory, size of batches.

In: `num_workers`, `prefetch_factor`, `pin_memory`, `persistent_workers`, or a `factor` for the batch size.
Out: loaders made with them. Samples and their order stay as they are; what workers draw at random is seeded
by worker, as PyTorch has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..recorder import Recorder
from .arguments import Bound, set_arguments
from .report import ChangeReport

OF_WORKERS = ("prefetch_factor", "persistent_workers")


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Change how loaders are made."""
    report.missing = "the job made no DataLoader"
    if "factor" in arguments:
        _enlarge_batches(report, **arguments)
    else:
        _load_otherwise(report, arguments)


def _enlarge_batches(report: ChangeReport, factor: float) -> None:
    report.missing = "the job made no DataLoader: in the script, make its batches larger"

    def also(bound: Bound) -> dict[str, Any]:
        before = bound.arguments.get("batch_size", 1)
        if bound.arguments.get("batch_sampler") is not None:
            raise ValueError("a batch_sampler makes the batches: give it a larger batch_size in the script")
        if before is None:
            raise ValueError("the data set makes the batches (batch_size=None): make them larger there")
        size = before * factor
        if size != int(size):
            raise ValueError(f"{factor:g} times a batch of {before} is no whole number of samples")
        return {"batch_size": int(size)}

    set_arguments(report, [DataLoader], {}, also)


def _load_otherwise(report: ChangeReport, arguments: dict[str, Any]) -> None:
    def also(bound: Bound) -> dict[str, Any]:
        given = bound.arguments
        before = given.get("num_workers", 0)
        workers = arguments.get("num_workers", before)
        if not workers and any(name in arguments for name in OF_WORKERS):
            raise ValueError("the DataLoader has no workers: give their number, too")
        if workers > 1 and workers > before and isinstance(given["dataset"], IterableDataset) and before < 2:
            raise ValueError(
                "each worker would read all of an IterableDataset that the script reads in one process"
            )
        if arguments.get("pin_memory") and not torch.accelerator.is_available():
            raise ValueError("pinned memory has no effect without an accelerator")
        if workers:
            return {}
        unset: dict[str, Any] = {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
        unset["multiprocessing_context"] = None
        return {name: value for name, value in unset.items() if given.get(name, value) != value}

    set_arguments(report, [DataLoader], arguments, also)
