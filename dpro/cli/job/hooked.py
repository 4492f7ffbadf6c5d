"""Options of `dpro watch` about the command that is run for findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dpro.cli.ranges import NumberRange
from dpro.errors import UsageError
from dpro.words import one_line

if TYPE_CHECKING:
    from dpro.watch.hook import HookRules

_OPTIONS = (
    click.option(
        "--on-finding", "on_finding", metavar="CMD", default="",
        help="Run this when a finding names one host; never where it may be another.",
    ),
    click.option("--dry-run", is_flag=True, help="Only say when CMD would be run."),
    click.option(
        "--classes", metavar="LIST", default="slow.compute,slow.nic,slow.link,hang.device,dead.rank",
        show_default=True, help="Of findings for which CMD is run.",
    ),
    click.option(
        "--min-confidence", type=NumberRange(0, 1), default=0.8, show_default=True,
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
    on_finding: str, dry_run: bool, classes: str, min_confidence: float, at_most: str
) -> HookRules | None:
    """When the command is run; None where none is given.

    Args:
        on_finding: for the shell, or empty.
        dry_run: whether it is only said that it would be run.

    Raises:
        UsageError: the limit is none, a class is not known, or there is no command to try.
    """
    from dpro.watch.hook import HookRules, parse_classes, parse_limit

    limit, chosen = parse_limit(at_most), parse_classes(classes)
    if not on_finding and dry_run:
        raise UsageError("--dry-run: name a command with --on-finding")
    return HookRules(on_finding, chosen, min_confidence, limit, dry_run) if on_finding else None


def as_arguments(rules: HookRules) -> list[str]:
    """The same as arguments of `dpro watch`."""
    return [
        "--on-finding", rules.command,
        "--classes", ",".join(rules.classes),
        "--min-confidence", str(rules.min_confidence),
        "--at-most", f"{rules.limit.most}/{rules.limit.window_s}s",
        *(["--dry-run"] if rules.dry_run else []),
    ]  # fmt: skip


def warn_of_hook(what: str) -> None:
    """Say on stderr what was done about a finding."""
    click.echo(f"dpro: {one_line(what)}", err=True)
