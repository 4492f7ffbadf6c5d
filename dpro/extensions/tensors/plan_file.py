"""The file of a tensor plan: which gradients a DDP job reduces together, in which order, and how.

Reads a JSON file as a `TensorPlan`, and writes it. Does not check whether a run has these gradients.

    {
      "tensor_plan": 1,
      "made_from": "runs/gpt, 2 ranks, 4 gradients",
      "reductions": [
        {"gradients": ["head.weight", "head.bias"], "pieces": 1, "reduce_in": ""},
        {"gradients": ["layers.0.weight", "layers.0.bias"], "pieces": 2, "reduce_in": "bf16"}
      ],
      "edits": ["optimizer:impl=fused"]
    }

Unnamed gradients are `#0`, `#1` and so on, in the order in which they become ready.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpro.errors import InputError, UsageError
from dpro.folders import written_whole

VERSION = 1
REDUCE_IN = ("", "bf16", "fp16")  # "" is the type of the gradients themselves
MAX_PIECES = 10_000
UNNAMED = "#"  # before the position of a gradient without a name


@dataclass(frozen=True)
class PlannedReduction:
    """One bucket of gradients.

    Attributes:
        gradients: names of its parameters, without DDP's prefix `module.`.
        pieces: number of equal parts it is reduced in.
        reduce_in: type during the reduction, one of `REDUCE_IN`.
    """

    gradients: tuple[str, ...]
    pieces: int = 1
    reduce_in: str = ""


@dataclass(frozen=True)
class TensorPlan:
    """How a job should reduce its gradients.

    Attributes:
        reductions: in the order in which they are called.
        edits: edits of the plan, as `--edit` accepts them; they apply before it.
        made_from: the run that it was made from, in words.
    """

    reductions: tuple[PlannedReduction, ...]
    edits: tuple[str, ...] = ()
    made_from: str = ""

    @property
    def gradients(self) -> tuple[str, ...]:
        """All gradients, in the order in which they are reduced."""
        return tuple(name for reduction in self.reductions for name in reduction.gradients)

    @property
    def has_names(self) -> bool:
        """Whether its gradients have names, without which it cannot change a job."""
        return not any(name.startswith(UNNAMED) for name in self.gradients)


def read_plan(path: Path) -> TensorPlan:
    """Read a plan from a file.

    Raises:
        UsageError: there is no such file.
        InputError: it cannot be read, or is not a tensor plan of this version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UsageError(f"{path}: no such file; `dpro whatif RUN --make-plan {path}` writes one") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    try:
        return _plan_of(json.loads(text))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def write_plan(plan: TensorPlan, path: Path) -> None:
    """Write a plan, one reduction per line.

    Raises:
        InputError: it cannot be written there.
    """
    reductions = ",\n".join(f"    {json.dumps(asdict(reduction))}" for reduction in plan.reductions)
    text = (
        f'{{\n  "tensor_plan": {VERSION},\n  "made_from": {json.dumps(plan.made_from)},\n'
        f'  "reductions": [\n{reductions}\n  ],\n  "edits": {json.dumps(list(plan.edits))}\n}}\n'
    )
    try:
        with written_whole(path.parent, path.name) as file:
            file.write(text.encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _plan_of(document: Any) -> TensorPlan:
    """Return the plan in a JSON document.

    Raises:
        InputError: it is not a plan; the message says what is wrong.
    """
    if not isinstance(document, dict) or "tensor_plan" not in document:
        raise InputError("not a tensor plan: it has no key `tensor_plan`")
    if document["tensor_plan"] != VERSION:
        version = json.dumps(document["tensor_plan"])
        raise InputError(f"a tensor plan of version {version}, and this dpro reads version {VERSION}")
    rows = document.get("reductions")
    if not isinstance(rows, list) or not rows:
        raise InputError("the plan has no reductions: `reductions` must be a list of at least one")
    reductions = tuple(_reduction_of(row, number) for number, row in enumerate(rows))
    seen: set[str] = set()
    for name in (name for reduction in reductions for name in reduction.gradients):
        if name in seen:
            raise InputError(f"gradient {name} is reduced twice: name each gradient once")
        seen.add(name)
    edits = document.get("edits", [])
    if not isinstance(edits, list) or not all(isinstance(edit, str) and edit for edit in edits):
        raise InputError("`edits` must be a list of edits as --edit accepts them")
    return TensorPlan(reductions, tuple(edits), str(document.get("made_from", "")))


def _reduction_of(row: Any, number: int) -> PlannedReduction:
    """Return one entry of `reductions`.

    Raises:
        InputError: it is not a reduction.
    """
    label = f"reduction {number}"
    if not isinstance(row, dict):
        raise InputError(f"{label}: must be an object with `gradients`")
    if unknown := sorted(set(row) - {"gradients", "pieces", "reduce_in"}):
        raise InputError(f"{label}: no key {unknown[0]!r}; there are gradients, pieces, reduce_in")
    names, pieces, reduce_in = row.get("gradients"), row.get("pieces", 1), row.get("reduce_in", "")
    if not isinstance(names, list) or not names:
        raise InputError(f"{label}: it has no gradients: `gradients` must be a list of at least one name")
    if not all(isinstance(name, str) and name for name in names):
        raise InputError(f"{label}: gradients are names of parameters, in quotes")
    if type(pieces) is not int or not 1 <= pieces <= MAX_PIECES:
        raise InputError(f"{label}: pieces must be a whole number from 1 to {MAX_PIECES:,}")
    if reduce_in not in REDUCE_IN:
        raise InputError(f'{label}: reduce_in must be "", "bf16" or "fp16", not {json.dumps(reduce_in)}')
    return PlannedReduction(tuple(names), pieces, reduce_in)
