"""`torch.compile` for the model.

In: the compiler's `mode`. Out: the modules that the training loop calls, compiled in place. Compilation
happens in the step after; where nothing was compiled, the change is refused.
"""

from __future__ import annotations

from typing import Any

from ..recorder import Recorder
from ..torch_internals import compile_call, has_compiled
from .outermost import KNOWN_AT_STEP, change_outermost
from .report import Report


def install(report: Report, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Compile what the training loop calls."""
    from torch.nn.parallel import DistributedDataParallel

    def compile_it(module: Any) -> None:
        # Within DDP's own forward pass, which the compiler does not understand: it knows there, too, that
        # gradients are to be reduced as they come.
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        compile_call(inner, arguments["mode"])
        report.applied(type(inner).__name__)

    checked = [False]

    def on_step(step: int) -> None:
        if step >= KNOWN_AT_STEP + 2 and not checked[0]:
            checked[0] = True
            if not has_compiled():
                report.refuse("torch.compile was asked and has compiled nothing")

    change_outermost(report, recorder, compile_it)
    recorder.listen("step", on_step)
