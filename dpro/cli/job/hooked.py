"""Options of `dpro watch` about the command that is run for findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dpro.errors import UsageError
from dpro.words import one_line

if TYPE_CHECKING:
    from dpro.watch.hook import HookRules

_OPTIONS = (
    click.option(
        "--on-finding", "command", metavar="CMD", default="",
        help="Run this when a finding names one host; never where it may be another.",
    ),
    click.option("--dry-run", is_flag=True, help="Only say when CMD would be run."),
    click.option(
        "--classes", metavar="LIST", default="slow.compute,slow.nic,slow.link,hang.device,dead.rank",
        show_default=True, help="Of findings for which CMD is run.",
    ),
    click.option(
        "--min-confidence", type=click.FloatRange(0, 1), default=0.8, show_default=True,
        help="Of a finding for which CMD is run.",
    ),
    click.option(
        "--at-most", metavar="N/TIME", default="1/1h", show_default=True,
        help="How often CMD is run, over all runs: 2/1h, 1/30m, 3/d.",
    ),
)  # fmt: skip


def on_finding_options(command: Any) -> Any:
    """Add `--on-finding` and what goes with it."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def hook_rules(
    command: str, dry_run: bool, classes: str, min_confidence: float, at_most: str
) -> HookRules | None:
    """When the command is run; None where none is given.

    Args:
        command: for the shell, or empty.
        dry_run: whether it is only said that it would be run.
        classes: of findings.
        min_confidence: of a finding.
        at_most: how often.

    Raises:
        UsageError: the limit is none, or there is no command to try.
    """
    from dpro.watch.hook import HookRules, parse_limit

    limit = parse_limit(at_most)
    if not command and dry_run:
        raise UsageError("--dry-run: name a command with --on-finding")
    chosen = tuple(word.strip() for word in classes.split(","))
    return HookRules(command, chosen, min_confidence, limit, dry_run) if command else None


def warn_of_hook(what: str) -> None:
    """Say on stderr what was done about a finding."""
    click.echo(f"dpro: {one_line(what)}", err=True)
