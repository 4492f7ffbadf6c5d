"""How to record a detail that a run lacks, in the words of the tool that made the run.

In: a run, and the detail. Out: a phrase that follows "record with".
"""

from __future__ import annotations

from typing import Final

from dpro.store import Run

MEMORY: Final = "--memory"
MODULES: Final = "--modules"
SHAPES: Final = "--shapes"
STACKS: Final = "--stacks"
OF_RECORDER = r"^(dpro/)?collectors/inside/"  # how names of our own functions begin in the stacks of a job

_OF_TORCH = {  # option of `dpro record` -> argument of torch.profiler.profile
    MEMORY: "profile_memory=True",
    MODULES: "with_stack=True",
    SHAPES: "record_shapes=True",
    STACKS: "with_stack=True",
}
_TORCH = "kineto"
XLA = "xla"  # among the versions of a run: XLA compiled the program, and its importer says so


def tools_of(run: Run) -> list[str]:
    """The formats of the traces that a run was imported from; none of one that dpro recorded."""
    manifest = run.manifest
    if manifest.created_by.startswith("dpro record"):
        return []
    return sorted({tool for tools in manifest.sources.values() for tool in tools.split(", ")})


def is_of_xla(run: Run) -> bool:
    """Whether XLA compiled the program, so that nothing which changes programs of PyTorch changes it."""
    return XLA in run.manifest.versions


def how_to_record(detail: str, run: Run | None) -> str:
    """How to record a detail that a run lacks: `record_shapes=True of torch.profiler`.

    Args:
        detail: as the option of `dpro record` is called.
        run: None where the tool is not known.
    """
    dpro, torch = f"`dpro record {detail}`", f"{_OF_TORCH[detail]} of torch.profiler"
    tools = [] if run is None else tools_of(run)
    if run is not None and is_of_xla(run):
        return f"a tool that has it, since {' and '.join(tools)} traces lack it"
    if _TORCH in tools:
        return torch
    return f"{torch} or {dpro}, since {' and '.join(tools)} traces lack it" if tools else dpro
