"""`dpro dashboard RUN`: the run in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpro.cli.analysis import run_argument
from dpro.cli.output import console, stderr_console, warn
from dpro.errors import UsageError, needs_extra

if TYPE_CHECKING:
    from dpro.dashboards.loaded import Loaded
    from dpro.store import Run


@click.command()
@run_argument
@click.option(
    "--against", type=click.Path(), metavar="OTHER", help="A run to compare it with, as `dpro diff` does."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on; any free one.")
@click.option(
    "--token/--no-token",
    default=True,
    help="Answer only who knows the token in the address that is printed; it is new each time.",
)
@click.option("--browser/--no-browser", default=True, help="Open it in a browser.")
def dashboard(run: str, against: str | None, host: str, port: int, token: bool, browser: bool) -> None:
    """Look at a run in a browser: is it healthy, what is slow, what would help.

    \b
    dpro dashboard RUN
    dpro dashboard AFTER --against BEFORE            and what explains the difference
    dpro dashboard RUN                               while RUN is being recorded: it refreshes itself
    dpro dashboard RUN --no-browser --port 8050      then: ssh -L 8050:localhost:8050 HOST
    dpro dashboard RUN --host 0.0.0.0                for others, who need the address that it prints

    All views show the same selection of steps and ranks, and the address in the browser reproduces what is
    seen. The address that is printed holds a token, without which nothing is answered: other users of the
    machine can reach the port, too. It needs no network. Ctrl-C ends it.
    """
    with needs_extra("dashboard"):
        from dpro.dashboards.server.serve import new_token, serve
    from dpro.cli.run.live import copies, is_live
    from dpro.cli.runs import open_or_import
    from dpro.dashboards.loaded import Passing
    from dpro.dashboards.shown import Shown

    _ensure_free(host, port)
    other = None if against is None else open_or_import(against)
    if is_live(Path(run)):
        states = (load(copy, other, Passing) for copy in copies(Path(run)))
        with stderr_console().status("Waiting for something to be recorded …"):
            shown = Shown(next(states), states)
    else:
        shown = Shown(load(open_or_import(run), other))
    if not token:
        warn(f"--no-token: whoever can reach {host} can look, other users of this machine included")
    serve(shown, host, port, new_token() if token else None, browser=browser, say=_say)


def _ensure_free(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before the run is loaded.

    Raises:
        UsageError: another process listens there, or the host has no such address.
    """
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        why = error.strerror or error
        raise UsageError(
            f"cannot listen on {host} port {port} ({why}): choose others with --host and --port"
        ) from error


def load(run: Run, against: Run | None = None, kind: type[Loaded] | None = None) -> Loaded:
    """The run as the views ask for it.

    Args:
        run: the run.
        against: one to compare it with.
        kind: of what is made.
    """
    from dpro.analysis.analysis import Analysis
    from dpro.dashboards.loaded import Loaded
    from dpro.trial.calibrate import as_tried

    return (kind or Loaded)(run, None if against is None else Analysis(against), as_tried)


def _say(address: str) -> None:
    console().print(f"{address}  (Ctrl-C ends it)")
