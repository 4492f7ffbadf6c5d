"""How every command speaks: one JSON object for programs, tables for people, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dpro.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from dpro.detect.findings import Finding

SCHEMA_VERSION = 1

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """Add `--json` to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(
        command
    )


def print_json(document: Mapping[str, Any]) -> None:
    """Print one object on stdout, with `schema_version` first.

    Raises:
        ValueError: a NaN or infinity got into the document, which JSON cannot say.
    """
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **document}, allow_nan=False))


def console() -> Console:
    """A console for text on stdout that keeps names of spans literal."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def stderr_console() -> Console:
    """A console on stderr, for progress and warnings."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while something goes on, on a terminal only; it is told what is done of how much."""
    from rich.progress import Progress

    with Progress(console=stderr_console(), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def warn(message: str) -> None:
    """One line on stderr that does not stop the command."""
    click.echo(f"dpro: warning: {message}", err=True)


def finding_document(finding: Finding, cost_ms: float | None) -> dict[str, Any]:
    """One finding as JSON; without a cost where there are no more steps."""
    return {
        "class": finding.class_,
        "component": {"kind": finding.component_kind, "id": finding.component_id},
        "ranks": list(finding.ranks),
        "severity": finding.severity,
        "confidence": finding.confidence,
        "cost_ms_per_step": cost_ms,
        "evidence": list(finding.evidence),
    }


def share(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    """A share such as `1%` or `0.01` as a number; the callback of an option."""
    if value is None:
        return None
    try:
        number = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise click.BadParameter(f"{value} is no share: give one such as 1% or 0.01")
    return number


def write_text(path: Path, text: str) -> Path:
    """Write a file, and return where.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
    return path
