"""`torch.compile` for the model.

In: the compiler's `mode`, or a `backend` other than the usual one: `cudagraphs`, which captures what the
model launches and fuses nothing. Out: the modules that the training loop calls, compiled in place.
Compilation happens in the step after; where nothing was compiled, the change is refused.
"""

from __future__ import annotations

from typing import Any

from ...recorder import Recorder
from ...torch_internals import compile_call, has_compiled
from ..report import ChangeReport
from .outermost import KNOWN_AT_STEP, change_outermost

CUDA_GRAPHS = "cudagraphs"
CODE = f'model = torch.compile(model, backend="{CUDA_GRAPHS}")'


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Compile what the training loop calls."""
    from torch.nn.parallel import DistributedDataParallel

    def compile_it(module: Any) -> None:
        # Within DDP's own forward pass, which the compiler does not understand: it knows there, too, that
        # gradients are to be reduced as they come.
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        device = next(inner.parameters()).device.type
        if arguments.get("backend") == CUDA_GRAPHS and device != "cuda":
            report.refuse(f"CUDA graphs need a GPU, the model is on the {device}: there, {CODE}")
            return
        compile_call(inner, **arguments)
        report.applied(type(inner).__name__)

    checked = [False]

    def on_step(step: int) -> None:
        if step >= KNOWN_AT_STEP + 2 and not checked[0]:
            checked[0] = True
            if not has_compiled():
                report.refuse("torch.compile was asked and has compiled nothing")

    change_outermost(report, recorder, compile_it)
    recorder.listen("step", on_step)
