"""Changes to the modules that the training loop calls: compiled, under autocast, recomputed, prefetched.

Watches the calls of modules during the first steps, except calls within other modules. Changes each such
module once, after those steps. Then `torch.nn.Module` is as before, also for modules that are compiled later.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from _dpro_inside_the_job.recorder import Recorder
from _dpro_inside_the_job.torch_internals import (
    COMPILED_CALL,
    compile_call,
    fsdp_prefetches,
    fsdp_states,
    gather_asynchronously,
    has_compiled,
    is_fsdp_root,
)
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from . import ChangeReport

KNOWN_AT_STEP = 2


class _Calls:
    """The modules that the training loop itself calls during the first steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._found: list[tuple[Any, bool]] = []
        self._waiting: list[tuple[ChangeReport, Callable[[Any], None]]] = []
        self._within = threading.local()
        self._original = torch.nn.Module.__call__
        torch.nn.Module.__call__ = self._patched = self._watch_calls(self._original)
        recorder.listen("step", self._on_step)

    def change_when_found(self, report: ChangeReport, change: Callable[[Any], None]) -> None:
        self._waiting.append((report, change))

    def _watch_calls(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._within, "a_call", False) or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            self._within.a_call = True
            try:
                if not any(module is other for other, _ in self._found) and _is_trained(module):
                    self._found.append((module, _is_compiled(module)))
                return original(module, *args, **kwargs)
            finally:
                self._within.a_call = False

        return called

    def _on_step(self, step: int) -> None:
        if step < KNOWN_AT_STEP or not self._waiting:
            return
        if torch.nn.Module.__call__ is self._patched:
            torch.nn.Module.__call__ = self._original
        waiting, self._waiting = self._waiting, []
        for report, change in waiting:
            for module, is_compiled in self._found:
                if is_compiled:
                    report.refuse("the script compiles its model itself: apply this change there")
                else:
                    report.attempt(change, module)


_calls = functools.cache(_Calls)  # one search serves all changes


def change_outermost(report: ChangeReport, recorder: Recorder, change: Callable[[Any], None]) -> None:
    """Call an action with each module that the loop itself calls for training.

    Args:
        report: refuses where the script compiles a module: a change around it would also alter what was
            compiled.
        change: the action; it may raise.
    """
    report.missing = "no step of the job called a trainable module"
    _calls(recorder).change_when_found(report, change)


def _is_trained(module: Any) -> bool:
    wanted = torch.is_grad_enabled() and module.training
    return wanted and any(parameter.requires_grad for parameter in module.parameters())


def _is_compiled(module: Any) -> bool:
    return any(
        type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


WRAPPER = "module."  # DDP's prefix for names within its module
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def lower_precision(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Run the modules that the loop calls, or the `layers` within them, under autocast to a `dtype`.

    Outputs in that precision are converted to float32, since the script uses them, mostly for a loss, outside
    autocast. Gradients of fp16 are not scaled: a step takes as long as with a GradScaler, but small gradients
    are lost.
    """
    dtype = DTYPES[arguments["dtype"]]

    def change(model: Any) -> None:
        layers = frozenset(arguments.get("layers", ()))
        parts = [part for name, part in model.named_modules() if name.removeprefix(WRAPPER) in layers]
        for module in parts if layers else [model]:
            lower(module)

    def lower(module: Any) -> None:
        around = _Autocast(report, next(module.parameters()).device.type, dtype)
        compiled = getattr(module, COMPILED_CALL, None)
        if compiled is not None:
            setattr(module, COMPILED_CALL, around.calling(compiled))
        else:
            module.register_forward_pre_hook(around.enter, prepend=True)
            module.register_forward_hook(around.leave, always_call=True)
        report.applied(type(module).__name__)

    change_outermost(report, recorder, change)


class _Autocast:
    """Autocast that module hooks enter and leave; unlike a replaced `forward`, they also work in copies."""

    def __init__(self, report: ChangeReport, device: str, dtype: torch.dtype) -> None:
        self._report = report
        self._device, self._dtype = device, dtype
        self._entered: list[Any] = []

    def __deepcopy__(self, _memo: Any) -> _Autocast:
        return _Autocast(self._report, self._device, self._dtype)

    def enter(self, _module: Any = None, _inputs: Any = None) -> None:
        is_there = torch.is_autocast_enabled(self._device)
        if is_there:
            self._report.refuse("the script runs its model under autocast itself")
        context = nullcontext() if is_there else torch.autocast(self._device, self._dtype)
        context.__enter__()
        self._entered.append(context)

    def leave(self, _module: Any, _inputs: Any, output: Any) -> Any:
        self._entered.pop().__exit__(None, None, None)
        return tree_map(self._as_float32, output)

    def _as_float32(self, value: Any) -> Any:
        is_low = isinstance(value, torch.Tensor) and value.dtype == self._dtype
        return value.float() if is_low else value

    def calling(self, function: Any) -> Any:
        """Wrap a function in this autocast."""

        def called(*args: Any, **kwargs: Any) -> Any:
            output = None
            self.enter()
            try:
                output = function(*args, **kwargs)
            finally:
                output = self.leave(None, None, output)
            return output

        return called


CUDA_GRAPHS = "cudagraphs"
GRAPHS_CODE = f'model = torch.compile(model, backend="{CUDA_GRAPHS}")'


def compile_model(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Compile modules in place, with a `mode`, or a `backend` other than the default.

    `cudagraphs` captures the launches of the model and fuses nothing. Compilation happens in the following
    step; where nothing was compiled, the change is refused.
    """
    from torch.nn.parallel import DistributedDataParallel

    def compile_it(module: Any) -> None:
        # The compiler does not support DDP's own forward pass, so compile the module within. There, too, it
        # knows that gradients are reduced as they become ready.
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        device = next(inner.parameters()).device.type
        if arguments.get("backend") == CUDA_GRAPHS and device != "cuda":
            report.refuse(
                f"CUDA graphs need a GPU, but the model is on the {device}: on a GPU, {GRAPHS_CODE}"
            )
            return
        compile_call(inner, **arguments)
        report.applied(type(inner).__name__)

    checked = [False]

    def on_step(step: int) -> None:
        if step >= KNOWN_AT_STEP + 2 and not checked[0]:
            checked[0] = True
            if not has_compiled():
                report.refuse("torch.compile was requested but compiled nothing")

    change_outermost(report, recorder, compile_it)
    recorder.listen("step", on_step)


def recompute(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Checkpoint the outermost modules whose names match a pattern: backward recomputes their activations.

    Names, parameters and hooks of modules stay as they are.
    """
    pattern = arguments["module"]

    def change(model: Any) -> None:
        for name, module in list(_matching_modules(model, pattern)):
            if getattr(module.forward, "__wrapped__", None) is checkpoint:
                continue
            wrappers = ("CheckpointWrapper", "OffloadWrapper")
            if any(type(part).__name__ in wrappers for part in module.modules()):
                report.refuse(f"the script checkpoints {name} itself")
                continue
            module.forward = _with_checkpoint(module.forward)
            report.applied(f"{name} ({type(module).__name__})")

    change_outermost(report, recorder, change)
    report.missing = (
        f"no trainable module is called {pattern}: in the script, "
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
    )


def _with_checkpoint(forward: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    functools.update_wrapper(called, forward)
    called.__wrapped__ = checkpoint  # type: ignore[attr-defined] # marks it for `recompute`
    return called


def _matching_modules(model: Any, pattern: str) -> Iterator[tuple[str, Any]]:
    """Yield the outermost modules within a model whose names match, as `dpro record --modules` names them."""
    taken: list[str] = []
    for name, module in model.named_modules():
        if not name or any(name.startswith(f"{outer}.") for outer in taken):
            continue
        if any(fnmatchcase(spelling, pattern) for spelling in (name, name.removeprefix(WRAPPER))):
            taken.append(name)
            yield name, module


PREFETCH_CODE = "fully_shard(layer), then layer.set_modules_to_forward_prefetch([next, …])"


def prefetch(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Make FSDP2 gather parameters `ahead` by this many modules, in `only` forward or backward.

    Each sharded module names the modules whose parameters it gathers early, in the order in which they ran
    between the first two recorded ends of steps. On the CPU FSDP2 waits for each gather by default; here it
    does not.
    """
    report.missing = "the job has no steps"
    order: list[Any] = []
    hooks: list[Any] = []

    def ran(module: Any, _arguments: Any) -> None:
        if not any(module is other for other in order):
            order.append(module)

    def watch() -> None:
        hooks.extend(module.register_forward_pre_hook(ran, prepend=True) for module in fsdp_states())

    def change() -> None:
        for hook in hooks:
            hook.remove()
        states = fsdp_states()
        inner = [module for module in order if not is_fsdp_root(states[module])]
        if len(inner) < 2:
            report.refuse(f"FSDP2 shards fewer than two modules of the job: in the script, {PREFETCH_CODE}")
        elif any(fsdp_prefetches(states[module]) for module in inner):
            report.refuse("the script configures FSDP2 prefetching itself")
        else:
            _prefetch(inner, states, **arguments)
            report.applied(f"{len(inner)} modules of {type(inner[0]).__name__}")

    remaining = [watch, change]  # run at the ends of the first two counted steps

    def on_step(step: int) -> None:
        if remaining:
            report.attempt(remaining.pop(0))

    recorder.listen("step", on_step)


def _prefetch(modules: list[Any], states: dict[Any, Any], ahead: int, only: str = "") -> None:
    """Set the prefetches; by default nothing is gathered early in forward, one module in backward."""
    for module, state in states.items():
        if is_fsdp_root(state) and next(module.parameters()).device.type == "cpu":
            gather_asynchronously(module)
    for place, module in enumerate(modules):
        if only != "backward":
            module.set_modules_to_forward_prefetch(modules[place + 1 : place + 1 + ahead])
        if only != "forward":
            module.set_modules_to_backward_prefetch(modules[max(place - 1 - ahead, 0) : place][::-1])
