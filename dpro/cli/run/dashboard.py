"""`dpro dashboard RUN…`: runs in a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpro.cli.output import console, stderr_console, warn
from dpro.errors import UsageError, needs_extra
from dpro.opening import open_path

if TYPE_CHECKING:
    from dpro.dashboards.loaded import Loaded
    from dpro.dashboards.runs import Runs, ShownRun
    from dpro.store import Run


@click.command()
@click.argument("runs", type=click.Path(), nargs=-1, required=True, metavar="RUN…")
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
def dashboard(
    runs: tuple[str, ...], against: str | None, host: str, port: int, token: bool, browser: bool
) -> None:
    """Look at a run in a browser: is it healthy, what is slow, what would help.

    \b
    dpro dashboard RUN
    dpro dashboard RUN OTHER …                       the page offers a choice, and compares two
    dpro dashboard FOLDER                            of runs: the latest first
    dpro dashboard AFTER --against BEFORE            and what explains the difference
    dpro dashboard RUN                               while RUN is being recorded: it refreshes itself
    dpro dashboard RUN --no-browser --port 8050      then: ssh -L 8050:localhost:8050 HOST
    dpro dashboard RUN --host 0.0.0.0                for others, who need the address that it prints

    The page offers the runs that were given and those in the folder of the first. All views show the same
    selection of steps and ranks, and the address in the browser reproduces what is seen. The address that is
    printed holds a token, without which nothing is answered: other users of the machine can reach the port,
    too. It needs no network. Ctrl-C ends it.
    """
    with needs_extra("dashboard"):
        from dpro.dashboards.server import new_token, serve

    _ensure_free(host, port)
    offered = offer(runs, against)
    if not token:
        warn(f"--no-token: whoever can reach {host} can look, other users of this machine included")
    serve(offered, host, port, new_token() if token else None, browser=browser, say=_say)


def offer(given: Sequence[str], against: str | None = None) -> Runs:
    """The runs that the page offers, the first of them opened.

    Raises:
        InputError: one of them cannot be opened.
        UsageError: one was given twice.
    """
    from dpro.cli.analysis import open_or_import
    from dpro.cli.run.offered import latest_in, names_of, offers_of
    from dpro.dashboards.runs import Runs

    latest = latest_in(Path(given[0])) if len(given) == 1 else None
    paths = [str(latest) if latest else given[0], *given[1:]]
    paths += [against] if against is not None and against not in paths else []
    names = names_of(paths)
    with stderr_console().status("Waiting for something to be recorded …"):
        opened = _show(paths[0], open_or_import)
    for path in paths[1:]:
        if not _lives(path):
            open_or_import(path)  # what is wrong with it is said before the page opens
    recorded = opened.lives or opened.loaded.run.source is None  # not imported
    beside = Path(paths[0]).resolve().parent if recorded else None
    return Runs(
        opened,
        names[paths[0]],
        offers_of(paths, beside),
        lambda offered: _show(offered.path, open_path),
        "" if against is None else names[against],
    )


def _lives(path: str) -> bool:
    from dpro.cli.run.offered import is_live
    from dpro.remote import is_url

    return not is_url(path) and is_live(Path(path))


def _show(path: str, open_it: Callable[[str], Run]) -> ShownRun:
    """A run as the page shows it: while it is recorded, copy by copy.

    Args:
        open_it: opens one that is not being recorded.
    """
    from dpro.cli.run.offered import copies
    from dpro.dashboards.loaded import RecordingCopy
    from dpro.dashboards.runs import ShownRun

    if not _lives(path):
        return ShownRun(load(open_it(path)))
    states = (load(copy, RecordingCopy) for copy in copies(Path(path)))
    return ShownRun(next(states), states)


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


def load(run: Run, kind: type[Loaded] | None = None) -> Loaded:
    """The run as the views ask for it."""
    from dpro.dashboards.loaded import Loaded
    from dpro.trial.calibrate import as_tried

    return (kind or Loaded)(run, as_tried)


def _say(address: str) -> None:
    console().print(f"{address}  (Ctrl-C ends it)")
