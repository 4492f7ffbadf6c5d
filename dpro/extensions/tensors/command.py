"""`dpro whatif RUN --plan FILE` predicts a tensor plan; `--make-plan FILE` searches for one and writes it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.errors import UsageError

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
]


def ask_for_plan(analysis: Analysis, given: Mapping[str, Any]) -> Proposal | None:
    """What to predict for a plan; None where none is asked for.

    Raises:
        UsageError: the options do not go together, or there is no such file.
        InputError: the file is no plan.
    """
    plan: Path | None = given["plan"]
    if plan is None:
        return None
    if given["budget"] is not None:
        raise UsageError("--budget limits a search, and --plan makes none: omit one of them")
    return proposal_of(plan)


def proposal_of(path: Path) -> Proposal:
    """The edits of a plan in a file, with the plan itself behind them.

    Raises:
        UsageError, InputError: as of `read_plan`.
    """
    from dpro.cli.whatif import Proposal
    from dpro.extensions.tensors.edits import Tensors
    from dpro.extensions.tensors.plan_file import read_plan

    edits = (*read_plan(path).edits, str(Tensors(path)))
    return Proposal(edits, (), lambda document: document, how_to_try(path))


def how_to_try(path: Path) -> str:
    """The command that makes a plan to the job."""
    return f"dpro try --plan {shlex.quote(str(path))} -- COMMAND"
