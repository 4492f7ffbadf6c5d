"""`dpro import`: other tools' traces into a run directory."""

from __future__ import annotations

from pathlib import Path

import click

from dpro.cli.output import console, json_option, print_json, warn


@click.command("import")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, metavar="RUN", type=click.Path(path_type=Path), help="Run to make."
)
@json_option
def import_(sources: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Turn torch.profiler traces or flight recorder dumps into a run directory.

    SOURCE is a file, or a folder that is searched to the bottom; one file per rank.
    """
    from dpro.cli.info import contents, rows_in_words
    from dpro.cli.runs import progress_bar
    from dpro.ingest.importer import import_sources
    from dpro.store import open_run

    with progress_bar() as progress:
        manifest = import_sources(sources, output, progress=progress)
    for warning in manifest.warnings:
        warn(warning)
    document = contents(open_run(output))
    if as_json:
        print_json(document)
        return
    console().print(
        f"{output}: {len(manifest.ranks)} of {manifest.world_size} ranks, {rows_in_words(document)}"
    )
