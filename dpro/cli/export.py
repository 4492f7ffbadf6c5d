"""`dpro export`: the run's timelines in a file that other viewers open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpro.cli.analysis import analyse, run_argument
from dpro.cli.output import console, json_option, print_json
from dpro.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from dpro.analysis.analysis import Analysis

_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@run_argument
@click.option("--chrome", type=_FILE, metavar="FILE", help="Chrome's trace JSON; compressed for FILE.gz.")
@click.option("--perfetto", type=_FILE, metavar="FILE", help="Perfetto's protobuf, with exact times.")
@json_option
def export(run: str, chrome: Path | None, perfetto: Path | None, as_json: bool) -> None:
    """Write all ranks' timelines into one file, on one aligned clock.

    \b
    Measured and replayed timelines are separate groups, one track per thread and stream; a collective is
    taken apart into waiting and moving. The critical path is a group of its own; what `dpro
    diagnose` finds is another, step by step.

    \b
    dpro export RUN --perfetto run.pftrace      open it in https://ui.perfetto.dev
    dpro export RUN --chrome run.json.gz        also for chrome://tracing
    """
    files = {"chrome": chrome, "perfetto": perfetto}
    wanted = {form: path for form, path in files.items() if path is not None}
    if not wanted:
        raise UsageError("name a file to write with --perfetto FILE or --chrome FILE")
    analysis = analyse(run)
    rows = drawn(analysis)
    for form, path in wanted.items():
        _write(rows, form, path)
    if as_json:
        written = [{"format": form, "path": str(path)} for form, path in wanted.items()]
        print_json({"run": run, "slices": rows.height, "files": written})
    else:
        for path in wanted.values():
            console().print(f"{path}: {rows.height:,} slices")


def drawn(analysis: Analysis) -> pl.DataFrame:
    """What viewers are shown of a run."""
    from dpro.export.slices import slices

    return slices(analysis.timeline, analysis.verdict[0])


def write_timelines(analysis: Analysis, path: Path) -> None:
    """Write the timelines in the format that the file's name asks for.

    Raises:
        UsageError: the file cannot be written.
    """
    _write(drawn(analysis), "chrome" if path.name.endswith((".json", ".json.gz")) else "perfetto", path)


def _write(rows: pl.DataFrame, form: str, path: Path) -> None:
    from dpro.export.chrome import write_chrome
    from dpro.export.perfetto import write_perfetto

    try:
        {"chrome": write_chrome, "perfetto": write_perfetto}[form](rows, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
