"""How early FSDP2 gathers parameters.

In: `ahead`, by how many modules earlier than FSDP2 does it, and `only`, forward or backward. Out: each module
that FSDP2 has sharded names those whose parameters it gathers, in the order in which they ran in the first
step of which the end was seen. On the CPU a gather waits for its result unless FSDP2 is asked otherwise,
which it is.
"""

from __future__ import annotations

from typing import Any

from ...recorder import Recorder
from ...torch_internals import fsdp_prefetches, fsdp_states, gather_asynchronously, is_fsdp_root
from ..report import ChangeReport

CODE = "fully_shard(layer), then layer.set_modules_to_forward_prefetch([next, …])"


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Prefetch once the order of modules is known."""
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
            report.refuse(f"the job has no two modules that FSDP2 shards: in the script, {CODE}")
        elif any(fsdp_prefetches(states[module]) for module in inner):
            report.refuse("the script sets what FSDP2 prefetches itself")
        else:
            _prefetch(inner, states, **arguments)
            report.applied(f"{len(inner)} modules of {type(inner[0]).__name__}")

    remaining = [watch, change]  # at the ends of the first two steps that are counted

    def on_step(step: int) -> None:
        if remaining:
            report.attempt(remaining.pop(0))

    recorder.listen("step", on_step)


def _prefetch(modules: list[Any], states: dict[Any, Any], ahead: int, only: str = "") -> None:
    """Forward nothing is gathered early by default, backward one module is."""
    for module, state in states.items():
        if is_fsdp_root(state) and next(module.parameters()).device.type == "cpu":
            gather_asynchronously(module)
    for place, module in enumerate(modules):
        if only != "backward":
            module.set_modules_to_forward_prefetch(modules[place + 1 : place + 1 + ahead])
        if only != "forward":
            module.set_modules_to_backward_prefetch(modules[max(place - 1 - ahead, 0) : place][::-1])
