"""The last line of an answer: commands that answer what it leaves open."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dpro.errors import DproError

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis


def print_following(run: str, analysis: Analysis, names: Iterable[str]) -> None:
    """Print the commands that can answer about a run, in a line, or a line for each; nothing if none can.

    Args:
        run: as the user gave it.
        names: of commands, in order: `explain`, `report`, `diagnose` or `whatif`.
    """
    from dpro.verdict.words import MARGIN, WIDTH

    commands = [f"dpro {name} {shlex.quote(run)}" for name in names if _answers(name, analysis)]
    line = f"{'MORE':{MARGIN}}{' | '.join(commands)}"
    if commands:
        click.echo(line if len(line) <= WIDTH else line.replace(" | ", "\n" + " " * MARGIN))


def _answers(name: str, analysis: Analysis) -> bool:
    """Return whether a command has an answer about a run."""
    from dpro.schema import SPANS

    with suppress(DproError):
        if name == "report":
            return bool(analysis.run.num_rows(SPANS))
        if name in ("diagnose", "whatif") and analysis.run.manifest.num_cut:
            return False  # both would say again that traces are cut short
        if name == "diagnose":
            return bool(analysis.verdict)
        return name == "explain" or bool(not analysis.end.hung and analysis.trust)
    return False
