"""`dpro whatif RUN --plan FILE` predicts a tensor plan; `--make-plan FILE` searches for one and writes it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.options import NumberRange
from dpro.cli.output import ensure_writable, progress
from dpro.errors import UsageError
from dpro.extensions.tensors.plan_file import REDUCE_IN, TensorPlan, read_plan, write_plan
from dpro.selection import Selection

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.cli.whatif import Proposal

_FILE = click.Path(dir_okay=False, path_type=Path)
OPTIONS = [
    click.Option(
        ["--plan"],
        metavar="FILE",
        type=_FILE,
        help="Predict a tensor plan, with the edits that belong to it.",
    ),
    click.Option(
        ["--make-plan"],
        metavar="FILE",
        type=_FILE,
        help="Search which gradients to reduce together, with operator fusion; write a tensor plan.",
    ),
    click.Option(
        ["--reduce-in"],
        type=click.Choice(REDUCE_IN[1:]),
        help="With --make-plan: let reductions be in half precision where that shortens the step.",
    ),
    click.Option(
        ["--memory-gb"],
        type=NumberRange(0.001, 1e6),
        metavar="N",
        help="With --make-plan: fit the job into N x 1e9 bytes (needs `dpro record --memory`).",
    ),
]


def ask_for_plan(analysis: Analysis, given: Mapping[str, Any]) -> Proposal | None:
    """Return the prediction to make for a plan; with `--make-plan`, search for the plan and write it first.

    Returns:
        None where no plan is requested.

    Raises:
        UsageError: the options contradict each other, or there is no such file.
        InputError: the file is not a plan, or cannot be written.
        Unanswerable: the run lacks what a plan needs.
    """
    plan, made = given["plan"], given["make_plan"]
    if plan is not None and made is not None:
        raise UsageError("--plan predicts a plan, --make-plan writes one: omit one of them")
    for option in ("reduce_in", "memory_gb"):
        if given[option] is not None and made is None:
            raise UsageError(f"--{option.replace('_', '-')} is for a search: give --make-plan FILE, too")
    if plan is not None and given["budget"] is not None:
        raise UsageError("--budget limits a search, and --plan makes none: omit one of them")
    if made is not None and given["edits"]:
        raise UsageError("--make-plan searches from the job as it is: omit --edit")
    if made is not None:
        return _make(analysis, made, given)
    return None if plan is None else _proposal(plan, read_plan(plan))


def _proposal(path: Path, plan: TensorPlan) -> Proposal:
    """Return the edits of a plan in a file, followed by the plan itself."""
    from dpro.cli.whatif import Proposal
    from dpro.extensions.tensors.edits import Tensors

    trial = f"dpro try --plan {shlex.quote(str(path))} -- COMMAND" if plan.has_names else ""
    lines = (
        [] if plan.has_names else ["The gradients of the plan have no names, so no job can be changed by it."]
    )
    return Proposal((*plan.edits, str(Tensors(path))), lines, lambda document: document, trial)


def _make(analysis: Analysis, path: Path, given: Mapping[str, Any]) -> Proposal:
    """Search for a plan and write it.

    Raises:
        InputError, UsageError, Unanswerable: as in `ask_for_plan`.
    """
    from msgspec.structs import asdict

    from dpro.extensions.tensors.answer import MadePlanDocument, lines_of, search_document
    from dpro.extensions.tensors.joint import make_plan

    ensure_writable(path)
    with progress("Searching for a plan") as report:
        plan, search = make_plan(
            analysis,
            given["reduce_in"] or "",
            given["memory_gb"],
            given["budget"],
            Selection(given["steps"]),
            report,
        )
    write_plan(plan, path)
    proposal, made = _proposal(path, plan), search_document(path, plan, search)
    return proposal._replace(
        lines=[*lines_of(made), *proposal.lines],
        document=lambda document: MadePlanDocument(**asdict(document), made_plan=made),
    )
