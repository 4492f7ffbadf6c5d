"""The command `dpro history` and the hook that adds the history to a diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dpro.cli.output import console, json_option, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpro.analysis.answers.diagnosis import Diagnosis
    from dpro.store import Run

NO_HISTORY = "Neither read nor write the history of findings, as with DPRO_HISTORY=off."
OPTIONS = [click.Option(["--no-history", "history"], flag_value=False, default=True, help=NO_HISTORY)]


def add_history(diagnosis: Diagnosis, run: Run, given: Mapping[str, Any]) -> Diagnosis:
    """Add earlier findings about the same hosts to a diagnosis, and store its findings for later runs."""
    from dataclasses import replace

    from dpro.extensions.history.database import with_history
    from dpro.store import MANIFEST

    if not (given.get("history", True) and diagnosis.findings and run.source is None):
        return diagnosis
    hosts = dict(diagnosis.workers.select("rank", "host").iter_rows())
    ended_ns = (run.path / MANIFEST).stat().st_mtime_ns
    return replace(diagnosis, findings=with_history(diagnosis.findings, hosts, run.path, ended_ns))


@click.command()
@click.option("--host", default="", metavar="NAME", help="Only findings about this host.")
@click.option(
    "--clear", is_flag=True, help="Delete these findings; without --host, also the counts of --at-most."
)
@json_option
def history(host: str, clear: bool, as_json: bool) -> None:
    """List hosts that were found at fault before.

    \b
    dpro history
    dpro history --host node07
    dpro history --host node07 --clear     after a repair

    `dpro watch` and `dpro diagnose` remember findings that name one host of several, and report repeat
    offenders. The history stays on this machine, in $XDG_STATE_HOME/dpro/history.sqlite
    (~/.local/state/dpro/history.sqlite), or at the path in DPRO_HISTORY; DPRO_HISTORY=off turns it off.
    """
    from datetime import datetime

    from msgspec.structs import replace

    from dpro.extensions.history.database import HistoryDocument, forget, history_path, remembered

    path = history_path()
    cleared = forget(host) if clear and path is not None else 0
    rows = [replace(row, run=row.run.rpartition("#")[0] or row.run) for row in remembered(host)]
    if as_json:
        print_json(HistoryDocument(path=str(path) if path else None, findings=rows, cleared=cleared))
        return
    from dpro.detect.findings import class_in_words

    out = console()
    if clear:
        out.print(f"{cleared} findings removed")
    elif path is None:
        out.print("The history is turned off (DPRO_HISTORY).")
    elif not rows:
        out.print("No finding has named a host yet.")
    for row in rows:
        when = datetime.fromtimestamp(row.time_ns / 1e9).strftime("%Y-%m-%d %H:%M")
        out.print(
            f"{when}  {row.host}  {class_in_words(row.class_)}  confidence {row.confidence:.2f}  {row.run}"
        )
