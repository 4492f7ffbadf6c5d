"""How to record a detail that a run lacks, in the terms of the tool that made the run.

Takes a run and the detail; returns a phrase that follows "record with".
"""

from __future__ import annotations

from typing import Final

from dpro.store import Run

MEMORY: Final = "--memory"
MODULES: Final = "--modules"
SHAPES: Final = "--shapes"
STACKS: Final = "--stacks"
# Files of the recorder's own frames in the stacks of a job.
RECORDER_FRAMES = r"^(dpro/)?(collectors|extensions/\w+)/inside/"
OF_LIBRARIES = (  # names of Python functions, in the spans of traces, that are not the job's own
    RECORDER_FRAMES + r"|(^|/)(torch|torch_xla|threading\.py|contextlib\.py|functools\.py)\b|^<|^nn\.Module"
)

_OF_TORCH = {  # option of `dpro record` -> argument of torch.profiler.profile
    MEMORY: "profile_memory=True",
    MODULES: "with_stack=True",
    SHAPES: "record_shapes=True",
    STACKS: "with_stack=True",
}
_TORCH = "kineto"
XLA = "xla"  # key of `Manifest.versions`, set by the importer of programs that XLA compiled


def tools_of(run: Run) -> list[str]:
    """Return the formats of the traces that a run was imported from; empty for a run that dpro recorded."""
    manifest = run.manifest
    if manifest.created_by.startswith("dpro record"):
        return []
    return sorted({tool for tools in manifest.sources.values() for tool in tools.split(", ")})


def is_of_xla(run: Run) -> bool:
    """Return whether XLA compiled the program, so that changes of PyTorch programs do not apply."""
    return XLA in run.manifest.versions


def how_to_record(detail: str, run: Run | None) -> str:
    """Return how to record a detail that a run lacks: `record_shapes=True of torch.profiler`.

    Args:
        detail: option of `dpro record` that records the detail.
        run: the run; None where the tool is unknown.
    """
    dpro, torch = f"`dpro record {detail}`", f"{_OF_TORCH[detail]} of torch.profiler"
    tools = [] if run is None else tools_of(run)
    if run is not None and is_of_xla(run):
        return f"a tool that has it, since {' and '.join(tools)} traces lack it"
    if _TORCH in tools:
        return torch
    return f"{torch} or {dpro}, since {' and '.join(tools)} traces lack it" if tools else dpro
