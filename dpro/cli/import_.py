"""`dpro import`: import traces of other tools into a run directory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import click

from dpro.cli.output import console, json_option, print_json, progress, warn
from dpro.errors import DproError, UsageError
from dpro.plugins import hooks_of, options_of
from dpro.words import first_few

if TYPE_CHECKING:
    from dpro.ingest.shards import Shard, WaitingImport
    from dpro.store import Run


@click.command("import")
@click.argument("sources", nargs=-1, metavar="SOURCE...")
@click.option(
    "-o", "--output", required=True, metavar="RUN", help="Run to create; can be a URL (s3://bucket/run)."
)
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Number of files to read in parallel, one process each.  [default: number of cores]",
)
@click.option(
    "--shard",
    metavar="I/N",
    help="Import shard I of N of the files; the last shard to finish creates the run.",
)
@json_option
def import_(
    sources: tuple[str, ...],
    output: str,
    jobs: int | None,
    shard: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Import traces and dumps of other tools as a run directory.

    SOURCE is a file, an archive, or a folder, which is searched recursively; or a URL of one.

    \b
    dpro import traces/ -o RUN
    dpro import rank0.json.gz dumps.zip -o RUN --jobs 4
    dpro import /data/traces -o /data/RUN --shard $SLURM_ARRAY_TASK_ID/16
    dpro import s3://bucket/traces -o s3://bucket/RUN
    """
    from dpro.ingest.shards import WaitingImport, parse_shard
    from dpro.remote import is_url, local_copy

    share = parse_shard(shard) if shard is not None else None
    additions = [add for ask in hooks_of("import") if (add := ask(output, given)) is not None]
    if not sources and (not additions or share is not None):
        others = [] if share else [option.opts[0] for option in options_of("import") if option.expose_value]
        raise UsageError(", or only ".join(["name the traces to import", *others]))
    traces = [local_copy(source) if is_url(source) else Path(source) for source in sources]
    with TemporaryDirectory(prefix="dpro-import-") as here:
        outcome = _import(traces, output, share, jobs, Path(here)) if traces else _make_empty(Path(output))
        if isinstance(outcome, WaitingImport):
            _say_what_is_missing(output, outcome, as_json)
            return
        if share is not None and not is_url(output):
            _condense(outcome)
        for add in additions:
            outcome = replace(outcome, manifest=add(outcome.path))
        for warning in outcome.manifest.warnings:
            warn(warning)
        _say_what_was_imported(outcome, as_json)


def _import(
    traces: list[Path],
    output: str,
    share: Shard | None,
    jobs: int | None,
    here: Path,
) -> Run | WaitingImport:
    """Import into a local folder, or into a remote store by way of the temporary folder `here`."""
    from dpro.cli.analysis import progress_bar
    from dpro.ingest.importer import Reading, import_sources
    from dpro.ingest.shards import WaitingImport, import_shard
    from dpro.remote import NEEDED, is_url
    from dpro.store import open_run

    with progress_bar() as report:
        reading = Reading(jobs, progress=report)
        if is_url(output):
            for import_to_store in hooks_of("stored"):
                return cast("Run | WaitingImport", import_to_store(traces, output, share, here, reading))
            raise UsageError(f"{output}: {NEEDED}")
        run = Path(output)
        if share is None:
            import_sources(traces, run, **vars(reading))
            return open_run(run)
        outcome = import_shard(traces, run, share, reading)
        return outcome if isinstance(outcome, WaitingImport) else open_run(run)


def _condense(run: Run) -> None:
    """Condense the ranks of a large run right after the import, so that the first answer finds them."""
    from dpro.analysis.graphs import condensed_of, is_large

    if is_large(run):
        # An error is dropped here: the command that needs the ranks will raise it again.
        with suppress(DproError), progress("Building the ranks") as report:
            condensed_of(run, report)


def _make_empty(run: Path) -> Run:
    from dpro._version import __version__
    from dpro.ingest.importer import refuse_existing
    from dpro.store import Manifest, open_run, write_manifest

    refuse_existing(run)
    write_manifest(run, Manifest(world_size=0, ranks=[], created_by=f"dpro {__version__}"))
    return open_run(run)


def _say_what_was_imported(run: Run, as_json: bool) -> None:
    from dpro.analysis.answers.info import contents_document
    from dpro.cli.info import rows_in_words, unclassified_in_words

    document = contents_document(run)
    if as_json:
        print_json(document)
        return
    ranks = f"{len(document.ranks)} of {document.world_size} ranks"
    console().print(f"{run.label}: {ranks}, {rows_in_words(document)}")
    console().print(f"kernels: {unclassified_in_words(document.coverage.unclassified)}")


def _say_what_is_missing(run: str, waiting: WaitingImport, as_json: bool) -> None:
    from dpro.ingest.shards import ShardDocument

    if as_json:
        print_json(ShardDocument(run=run, complete=False, missing_shards=waiting.missing))
        return
    count, out = len(waiting.missing), first_few(waiting.missing, 8)
    are = "shard is" if count == 1 else "shards are"
    console().print(f"{run}: incomplete; {count} {are} missing: {out}")
