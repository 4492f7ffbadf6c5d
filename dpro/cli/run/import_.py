"""`dpro import`: other tools' traces into a run directory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpro.cli.output import console, json_option, print_json, warn
from dpro.errors import UsageError
from dpro.words import few

if TYPE_CHECKING:
    from dpro.ingest.shards import WaitingImport


@click.command("import")
@click.argument("sources", nargs=-1, metavar="SOURCE...", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, metavar="RUN", type=click.Path(path_type=Path), help="Run to make."
)
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Files read at a time, each in a process of its own; default: one per core.",
)
@click.option(
    "--executor",
    type=click.Choice(["processes", "ray"]),
    default="processes",
    show_default=True,
    help="Where files are read: on this machine, or on the Ray cluster that RAY_ADDRESS names.",
)
@click.option(
    "--shard",
    metavar="I/N",
    help="Import the I-th of N shares of the files; the last share to be in makes the run.",
)
@click.option(
    "--requests",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Log of a server's requests, JSON lines or CSV, beside its traces or alone; may be repeated.",
)
@json_option
def import_(
    sources: tuple[Path, ...],
    output: Path,
    jobs: int | None,
    executor: str,
    shard: str | None,
    requests: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Turn other tools' traces and dumps into a run directory.

    SOURCE is a file, an archive, or a folder that is searched to the bottom.

    \b
    dpro import traces/ -o RUN
    dpro import profile/ --requests requests.jsonl -o RUN
    dpro import rank0.json.gz dumps.zip -o RUN --jobs 4
    dpro import /data/traces -o /data/RUN --shard $SLURM_ARRAY_TASK_ID/16
    """
    from dpro._version import __version__
    from dpro.cli.runs import progress_bar
    from dpro.ingest.importer import import_sources, refuse_existing
    from dpro.ingest.requests.log import add_requests, read_requests
    from dpro.ingest.shards import WaitingImport, import_shard, parse_shard
    from dpro.store import Manifest, write_manifest

    share = parse_shard(shard) if shard is not None else None
    if not sources and (not requests or share is not None):
        raise UsageError("name the traces to import" + (", or a log of requests alone" if not share else ""))
    log = read_requests(requests) if requests else None
    if log is not None and not sources:
        refuse_existing(output)
        write_manifest(output, Manifest(world_size=0, ranks=[], created_by=f"dpro {__version__}"))
        add_requests(output, log)
        _say_what_was_imported(output, as_json)
        return
    with _executor(executor) as pool, progress_bar() as progress:
        if share is None:
            manifest = import_sources(sources, output, jobs=jobs, executor=pool, progress=progress)
        else:
            outcome = import_shard(sources, output, share, jobs=jobs, executor=pool, progress=progress)
            if isinstance(outcome, WaitingImport):
                _say_what_is_missing(output, outcome, as_json)
                return
            manifest = outcome
    if log is not None:
        manifest = add_requests(output, log)
    for warning in manifest.warnings:
        warn(warning)
    _say_what_was_imported(output, as_json)


@contextmanager
def _executor(name: str) -> Iterator[Executor | None]:
    """The executor of a name; None for processes of this machine."""
    if name == "processes":
        yield None
        return
    from dpro.ingest.ray_executor import ray_executor

    with ray_executor() as executor:
        yield executor


def _say_what_was_imported(run: Path, as_json: bool) -> None:
    from dpro.analysis.answers.info import contents_document
    from dpro.cli.run.info import rows_in_words, unclassified_in_words
    from dpro.store import open_run

    document = contents_document(open_run(run))
    if as_json:
        print_json(document)
        return
    ranks = f"{len(document.ranks)} of {document.world_size} ranks"
    console().print(f"{run}: {ranks}, {rows_in_words(document)}")
    console().print(unclassified_in_words(document.coverage.unclassified))


def _say_what_is_missing(run: Path, waiting: WaitingImport, as_json: bool) -> None:
    from dpro.ingest.shards import ShardDocument

    if as_json:
        print_json(ShardDocument(run=str(run), complete=False, missing_shards=waiting.missing))
        return
    out = few(waiting.missing, 8)
    console().print(f"{run}: not whole yet; {len(waiting.missing)} shards are still out: {out}")
