"""Other arguments for objects that the script makes: DDP modules, DataLoaders, optimizers.

Takes a class and the arguments that it shall get. The class then makes its objects with them, also for
derived classes and for libraries that use it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from _dpro_inside_the_job.recorder import Recorder
from torch.utils.data import DataLoader, IterableDataset

from . import ChangeReport, place

Bound = inspect.BoundArguments
Settings = dict[str, Any]


def set_arguments(
    report: ChangeReport,
    classes: list[Any],
    settings: Settings,
    also: Callable[[Bound], Settings] = lambda _: {},
) -> None:
    """Make classes construct their objects with `settings`.

    Args:
        report: receives where that happened, and what the script had asked for.
        classes: their `__init__` is replaced; one may call that of another.
        settings: arguments by name; where empty, `also` returns all arguments that change.
        also: returns the arguments that must change with the settings, from the script's arguments; raises
            `ValueError` where the settings do not fit.
    """
    making: set[int] = set()
    for cls in classes:
        _patch(report, cls, settings, also, making)


def _patch(
    report: ChangeReport, cls: Any, settings: Settings, also: Callable[[Bound], Settings], making: set[int]
) -> None:
    original: Callable[..., None] = cls.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        if id(self) in making:
            return original(self, *args, **kwargs)
        making.add(id(self))
        try:
            bound = _bound(signature, self, args, kwargs)
            before = _merge_settings(report, bound, settings, also) if bound is not None else None
            if bound is None or before is None:
                return original(self, *args, **kwargs)
            original(*bound.args, **bound.kwargs)
            report.applied(f"{type(self).__name__} at {place()}", before)
        finally:
            making.discard(id(self))

    cls.__init__ = patched


def _bound(signature: inspect.Signature, self: Any, args: Any, kwargs: Any) -> Bound | None:
    try:
        return signature.bind(self, *args, **kwargs)
    except TypeError:
        return None  # the original raises the error


def _merge_settings(
    report: ChangeReport, bound: Bound, settings: Settings, also: Callable[[Bound], Settings]
) -> str | None:
    """Put settings among the arguments of a call.

    Returns:
        The replaced arguments of the script, such as `bucket_cap_mb=1`, empty for none; None where nothing
        was changed.
    """
    try:
        wanted = settings | also(bound)
    except ValueError as error:
        report.refuse(f"{place()}: {error}")
        return None
    given = {name: bound.arguments[name] for name in wanted if name in bound.arguments}
    if settings and all(name in given and given[name] == value for name, value in settings.items()):
        report.missing = f"the script sets {_format_settings(given)} itself ({place()}): nothing to change"
        return None
    after = {**bound.arguments, **wanted}
    order = [*bound.signature.parameters]  # of the signature
    bound.arguments = {name: after[name] for name in sorted(after, key=order.index)}
    return _format_settings({name: value for name, value in given.items() if value != wanted[name]})


def _format_settings(given: Settings) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def change_ddp(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Construct DistributedDataParallel with other arguments.

    An explicit bucket cap also applies to the first bucket, as in PyTorch.
    """
    from torch.nn.parallel import DistributedDataParallel

    report.missing = "the job wraps no module in DistributedDataParallel"

    def also(bound: Bound) -> dict[str, Any]:
        listed = "bucket_cap_mb" in arguments and bound.arguments.get("bucket_cap_mb_list") is not None
        return {"bucket_cap_mb_list": None} if listed else {}

    set_arguments(report, [DistributedDataParallel], arguments, also)


OF_WORKERS = ("prefetch_factor", "persistent_workers")


def change_loaders(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Make DataLoaders load differently, or make batches `factor` times as large.

    Samples and their order stay the same; each worker seeds its own random numbers, as in PyTorch.
    """
    report.missing = "the job created no DataLoader"
    if "factor" in arguments:
        _enlarge_batches(report, **arguments)
    else:
        _change_loading(report, arguments)


def _enlarge_batches(report: ChangeReport, factor: float) -> None:
    report.missing = "the job created no DataLoader: increase its batch size in the script"

    def also(bound: Bound) -> dict[str, Any]:
        before = bound.arguments.get("batch_size", 1)
        if bound.arguments.get("batch_sampler") is not None:
            raise ValueError("a batch_sampler creates the batches: increase its batch_size in the script")
        if before is None:
            raise ValueError("the dataset creates the batches (batch_size=None): increase their size there")
        size = before * factor
        if size != int(size):
            raise ValueError(f"{factor:g} times a batch of {before} is not a whole number of samples")
        return {"batch_size": int(size)}

    set_arguments(report, [DataLoader], {}, also)


def _change_loading(report: ChangeReport, arguments: dict[str, Any]) -> None:
    def also(bound: Bound) -> dict[str, Any]:
        given = bound.arguments
        before = given.get("num_workers", 0)
        workers = arguments.get("num_workers", before)
        if not workers and any(name in arguments for name in OF_WORKERS):
            raise ValueError("the DataLoader has no workers: also set their number")
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


SETTINGS = {"fused": ("fused", True), "foreach": ("foreach", True), "loop": ("foreach", False)}
EXCLUDED = {"fused": "foreach", "foreach": "fused"}


def change_optimizers(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Make optimizers with another `impl`: fused, foreach, or loop.

    PyTorch's optimizers without such a version, and those of other libraries, stay unchanged; where the job
    has no other optimizers, the change is refused.
    """
    name, value = SETTINGS[arguments["impl"]]
    report.missing = "the job created no optimizer"

    def also(bound: Bound) -> dict[str, Any]:
        other = EXCLUDED[name]
        return {other: False} if bound.arguments.get(other) else {}

    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and _takes(cls, name)]
    _name_unchangeable(report, name)
    set_arguments(report, classes, {name: value}, also)


def _takes(cls: type, name: str) -> bool:
    return name in inspect.signature(cls.__init__).parameters  # type: ignore[misc] # of the class itself


def _name_unchangeable(report: ChangeReport, name: str) -> None:
    """Name an optimizer that cannot be changed in `report.missing`."""
    original = torch.optim.Optimizer.__init__

    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        if not any(_takes(cls, name) for cls in type(self).__mro__ if cls.__module__.startswith("torch.")):
            report.missing = f"{type(self).__name__} has no {name} version"
        original(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = patched
