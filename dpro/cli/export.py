"""`dpro export`: the run's timelines in a file that other viewers open."""

from __future__ import annotations

from pathlib import Path

import click

from dpro.cli.analysis import analyse, run_argument
from dpro.cli.output import console, json_option, print_json
from dpro.errors import UsageError

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
    taken apart into waiting and moving. The critical path is a group of its own.

    \b
    dpro export RUN --perfetto run.pftrace      open it in https://ui.perfetto.dev
    dpro export RUN --chrome run.json.gz        also for chrome://tracing
    """
    files = {"chrome": chrome, "perfetto": perfetto}
    wanted = {form: path for form, path in files.items() if path is not None}
    if not wanted:
        raise UsageError("name a file to write with --perfetto FILE or --chrome FILE")
    from dpro.export.chrome import write_chrome
    from dpro.export.perfetto import write_perfetto
    from dpro.export.slices import slices

    writers = {"chrome": write_chrome, "perfetto": write_perfetto}
    rows = slices(analyse(run).timeline)
    for form, path in wanted.items():
        try:
            writers[form](rows, path)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
    if as_json:
        written = [{"format": form, "path": str(path)} for form, path in wanted.items()]
        print_json({"run": run, "slices": rows.height, "files": written})
    else:
        for path in wanted.values():
            console().print(f"{path}: {rows.height:,} slices")
