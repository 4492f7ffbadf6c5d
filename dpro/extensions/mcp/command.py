"""`dpro mcp`: serve answers about runs to AI agents."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dpro.cli.options import DAY_S, NumberRange
from dpro.cli.output import protocol_on_stdout
from dpro.errors import needs_extra


@click.command()
@click.argument("folders", nargs=-1, metavar="[FOLDER...]", type=click.Path(path_type=Path))
@click.option(
    "--timeout",
    "timeout_s",
    type=NumberRange(1.0, DAY_S),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Timeout of a tool call.",
)
def mcp(folders: tuple[Path, ...], timeout_s: float) -> None:
    """Serve answers about runs to AI agents, as tools of the Model Context Protocol.

    \b
    dpro mcp /shared/runs
    dpro mcp                                   runs in the current folder

    An MCP client starts this command and talks to it on standard input and output. Its tools are `runs`,
    `info`, `explain`, `diagnose`, `report`, `replay`, `whatif`, `edits`, `sensitivity`, `pareto` and `diff`;
    they return the `--json` output. The tools are read-only and limited to the given folders: paths and links
    to other places are refused. Traces of other tools are imported into the user's cache. dpro exits with its
    client.
    """
    from dpro.extensions.mcp.tools import named_folders

    served = named_folders(folders)
    if sys.stdin.isatty():
        click.echo("waiting for an MCP client on standard input; Ctrl-C ends it", err=True)
    with needs_extra("mcp"):
        from dpro.extensions.mcp.server import serve
    with protocol_on_stdout():
        serve(served, timeout_s)
