"""`dpro import`: other tools' traces into a run directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.output import console, json_option, print_json, stderr_console, warn

if TYPE_CHECKING:
    from dpro.ingest.importer import Progress
    from dpro.store import Run


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
    from dpro.ingest.importer import import_sources
    from dpro.store import open_run

    with progress_bar() as progress:
        manifest = import_sources(sources, output, progress=progress)
    for warning in manifest.warnings:
        warn(warning)
    document = contents(open_run(output))
    if as_json:
        print_json(document)
    else:
        console().print(
            f"{output}: {len(manifest.ranks)} of {manifest.world_size} ranks, {rows_in_words(document)}"
        )


def contents(run: Run) -> dict[str, Any]:
    """What a run holds, as `import` and `info` report it."""
    manifest = run.manifest
    return {
        "run": str(run.path),
        "ranks": manifest.ranks,
        "world_size": manifest.world_size,
        "missing_ranks": manifest.missing_ranks,
        "rows": run.rows(),
        "warnings": manifest.warnings,
        "skipped": manifest.skipped,
    }


def rows_in_words(document: dict[str, Any]) -> str:
    """Row counts of the tables that have any: `6800 spans, 32 collectives`."""
    return ", ".join(f"{count} {name}" for name, count in document["rows"].items() if count)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr that counts files; nothing where stderr is no terminal."""
    from rich.progress import Progress as Bar

    console = stderr_console()
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading traces", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
