"""`dpro dashboard RUN…`: view runs in a browser."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.output import console, stderr_console, warn
from dpro.cli.runs import is_live, is_run_folder, latest_in, runs_in, why_not
from dpro.errors import DproError, UsageError, needs_extra
from dpro.opening import open_path
from dpro.remote import is_url

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.cli.report import ReportPage
    from dpro.dashboards.figures import Figures
    from dpro.dashboards.loaded import Loaded
    from dpro.dashboards.runs import Runs, ShownRun
    from dpro.store import Run


@click.command()
@click.argument("runs", type=click.Path(), nargs=-1, required=True, metavar="RUN…")
@click.option(
    "--against", type=click.Path(), metavar="OTHER", help="Run to compare with, as `dpro diff` does."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on; by default any free port."
)
@click.option(
    "--token/--no-token",
    default=True,
    help="Require the token in the printed address; each start makes a new token.",
)
@click.option("--browser/--no-browser", default=True, help="Open the page in a browser.")
def dashboard(
    runs: tuple[str, ...], against: str | None, host: str, port: int, token: bool, browser: bool
) -> None:
    """View a run in a browser: its health, what is slow, and what would help.

    \b
    dpro dashboard RUN                           refreshes while the job runs
    dpro dashboard RUN OTHER …                   choose a run, or compare two
    dpro dashboard FOLDER                        a folder of runs, latest first
    dpro dashboard AFTER --against BEFORE        what explains the difference
    dpro dashboard RUN --no-browser --port 8050  ssh -L 8050:localhost:8050 HOST
    dpro dashboard RUN --host 0.0.0.0            for all who have the address

    The page lists the given runs and the other runs in the folder of the first. All views share one selection
    of steps and ranks, and the browser's address reproduces the current view. The printed address contains a
    token, without which the server answers no request, because other users of the machine can reach the port
    too. While a job runs that records deep windows, a button asks for one (not with --no-token). The page
    needs no network. Press Ctrl-C to stop.
    """
    with needs_extra("dashboard"):
        from dpro.dashboards.server import new_token, serve

    _ensure_free(host, port)
    offered = offered_runs(runs, against)
    if not token:
        warn(f"--no-token: anyone who can reach {host} can view the runs, including users of this machine")
    serve(offered, host, port, new_token() if token else None, browser=browser, say=_say)


def offered_runs(given: Sequence[str], against: str | None = None) -> Runs:
    """Return the runs that the page offers, with the first one open.

    Raises:
        InputError: one of them cannot be opened.
        UsageError: one was given twice.
    """
    from dpro.cli.analysis import open_or_import
    from dpro.dashboards.runs import Runs

    latest = latest_in(Path(given[0])) if len(given) == 1 else None
    paths = [str(latest) if latest else given[0], *given[1:]]
    paths += [against] if against is not None and against not in paths else []
    names = names_of(paths)
    with stderr_console().status("Waiting for something to be recorded …"):
        opened = _shown_run(paths[0], open_or_import)
    for path in paths[1:]:
        if not _lives(path):
            open_or_import(path)  # reports its errors before the page opens
    recorded = opened.lives or opened.loaded.run.source is None  # not imported
    beside = Path(paths[0]).resolve().parent if recorded else None
    return Runs(
        opened,
        names[paths[0]],
        offers_of(paths, beside),
        lambda offered: _shown_run(offered.path, open_path),
        "" if against is None else names[against],
    )


def _lives(path: str) -> bool:
    return not is_url(path) and is_live(Path(path))


def _shown_run(path: str, open_it: Callable[[str], Run]) -> ShownRun:
    """Return a run as the page shows it: while it is being recorded, one copy after another.

    Args:
        open_it: opens a run that is not being recorded.
    """
    from dpro.dashboards.loaded import RecordingCopy
    from dpro.dashboards.requested import RequestedWindow
    from dpro.dashboards.runs import ShownRun

    if not _lives(path):
        return ShownRun(load(open_it(path)))
    states = (load(copy, RecordingCopy) for copy in copies(Path(path)))
    first = next(states)
    takes_windows = first.run.manifest.options.get("windows", True)
    return ShownRun(first, states, RequestedWindow(Path(path).resolve()) if takes_windows else None)


def _ensure_free(host: str, port: int) -> None:
    """Check that an address can be listened on, before the run is loaded.

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
    """Return the run with the results that views need."""
    from dpro.dashboards.loaded import Loaded

    return (kind or Loaded)(run)


def _say(address: str) -> None:
    console().print(f"{address}  (Ctrl-C ends it)")


# Offered runs: the given ones, and those in the folder of the first. Listing writes nothing and leaves out
# links, so that all offered runs are in folders that the user named. A run that is being recorded is shown as
# a copy, renewed now and then, and as the run itself after the job has ended; the job does not notice.

if TYPE_CHECKING:
    from dpro.dashboards.runs import OfferedRun
    from dpro.store import Run


FRESH_S = 5.0  # age up to which a list is used: the page needs it for every link


def offers_of(given: Sequence[str], folder: Path | None = None) -> Callable[[], list[OfferedRun]]:
    """Return a function that lists the given runs, and those of a folder.

    Args:
        given: paths as typed, the first run first; traces are allowed.
    """
    listed: list[tuple[float, list[OfferedRun]]] = []

    def offers() -> list[OfferedRun]:
        if not listed or time.monotonic() - listed[0][0] > FRESH_S:
            listed[:] = [(time.monotonic(), list(_offers(given, folder)))]
        return listed[0][1]

    return offers


def _offers(given: Sequence[str], folder: Path | None) -> Iterator[OfferedRun]:
    from dpro.dashboards.runs import OfferedRun

    names = names_of(given)
    given_folders = {Path(path).resolve() for path in given if not is_url(path)}
    for path, name in names.items():
        local = not is_url(path) and is_run_folder(Path(path))
        lives = local and is_live(Path(path))
        yield OfferedRun(name, path, why_not(Path(path)) if local and not lives else "", lives)
    for run in runs_in(folder) if folder is not None else []:
        if run.resolve() not in given_folders:
            lives = is_live(run)
            name = run.name if run.name not in names.values() else f"{folder}/{run.name}"
            yield OfferedRun(name, str(run), "" if lives else why_not(run), lives)


def names_of(given: Sequence[str]) -> dict[str, str]:
    """Name each path by its last part, or by the whole path where two paths have the same last part.

    Raises:
        UsageError: a path was given twice.
    """
    if len(set(given)) < len(given):
        raise UsageError("a run was given twice: each is offered once")
    last = [Path(path).name or path for path in given]
    return {path: name if last.count(name) == 1 else path for path, name in zip(given, last, strict=True)}


# A run that is still being recorded.


MIN_S = 2.0  # least time between two copies
SHARE = 0.1  # share of the time that copying may take
KEPT = 2  # copies kept: a view may still read the previous one


def copies(run: Path, least_s: float = MIN_S) -> Iterator[Run]:
    """Yield copies of a recording, and at last the run itself.

    Args:
        least_s: least time between two copies.

    Raises:
        InputError: the run cannot be opened when its job is over.
    """
    import polars as pl

    from dpro.opening import open_path

    with TemporaryDirectory(prefix="dpro-live-", ignore_cleanup_errors=True) as folder:
        for number in count():
            if not is_live(run):
                break
            began = time.monotonic()
            shutil.rmtree(Path(folder) / str(number - KEPT), ignore_errors=True)
            with suppress(DproError, OSError, ValueError, pl.exceptions.PolarsError):  # it changes meanwhile
                yield replace(_copied(run.resolve(), Path(folder) / str(number)), source=run)
            took = time.monotonic() - began
            time.sleep(max(least_s, took / SHARE))
        yield open_path(run)


def _copied(run: Path, to: Path) -> Run:
    """Copy what has been recorded so far, with the findings made while the job runs."""
    from dpro.collectors.attach import copy_run
    from dpro.collectors.finish import finish
    from dpro.detect.findings_log import FOLDER
    from dpro.opening import readers
    from dpro.store import open_run

    copy_run(run, to, lambda launch: finish(launch, readers(), None, {}))
    if (run / FOLDER).is_dir():
        shutil.copytree(run / FOLDER, to / FOLDER)
    return open_run(to)


# What `dpro report` and notebooks use.

OPTIONS_OF_REPORT = (
    click.Option(
        ["--html"],
        type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
        metavar="FILE",
        help="Write a self-contained HTML report with figures.",
    ),
)


def page_of_report(given: Mapping[str, Any]) -> ReportPage | None:
    """Return the page that `dpro report --html` writes; None if it was not requested.

    Raises:
        MissingExtra: plotly is not installed.
    """
    from dpro.cli.report import ReportPage

    if given.get("html") is None:
        return None
    with needs_extra("dashboard"):
        from dpro.dashboards.loaded import Loaded
        from dpro.dashboards.report import html_of
    return ReportPage(given["html"], Loaded, html_of)


def open_for_figures(run: Run) -> tuple[Analysis, Figures] | None:
    """Return an analysis, and figures that share its results; None if plotly is not installed."""
    try:
        from dpro.dashboards.figures import Figures
        from dpro.dashboards.loaded import Loaded
    except ImportError:
        return None
    loaded = Loaded(run)
    return loaded, Figures(loaded)
