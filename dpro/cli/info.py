"""`dpro info`: what a run holds and what it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.output import console, json_option, print_json
from dpro.errors import InputError

if TYPE_CHECKING:
    import polars as pl

    from dpro.store import Run

_UNKNOWN_KERNELS_NAMED = 5


@click.command()
@click.argument("run", metavar="RUN", type=click.Path())
@json_option
def info(run: str, as_json: bool) -> None:
    """What a run holds and what it lacks.

    \b
    dpro info RUN
    dpro info FOLDER_OF_TRACES --json

    Coverage is the share of what is there that dpro understands: collectives whose bytes and group are known,
    steps in deep windows, GPU time of kernels whose class no name tells.
    """
    from dpro.cli.runs import open_quietly

    opened = open_quietly(run)  # the warnings are part of what it prints
    document = describe(opened)
    if as_json:
        print_json(document)
    else:
        console().print("\n".join(in_words(document)))


def contents(run: Run) -> dict[str, Any]:
    """What a run holds, in the keys that `import` and `info` share."""
    manifest = run.manifest
    return {
        "run": run.label,
        "ranks": manifest.ranks,
        "world_size": manifest.world_size,
        "missing_ranks": manifest.missing_ranks,
        "rows": run.rows(),
        "warnings": manifest.warnings,
        "skipped": manifest.skipped,
        "coverage": {"unclassified": unclassified(run)},
    }


def describe(run: Run) -> dict[str, Any]:
    """What `info --json` prints."""
    from dpro.schema import STEPS

    steps = run.table(STEPS)
    held = contents(run)
    return held | {
        "cache": None if run.source is None else str(run.path),
        "steps": steps["step"].n_unique(),
        "hosts": run.manifest.hosts,
        "gpus": run.manifest.gpus,
        "coverage": held["coverage"] | _coverage(run, steps, held["coverage"]["unclassified"]["share"]),
    }


def _coverage(run: Run, steps: pl.DataFrame, unclassified_share: float | None) -> dict[str, Any]:
    """Shares between 0 and 1, None where there is nothing to take a share of."""
    import polars as pl

    from dpro.schema import COLLECTIVES, SPANS

    collectives = run.table(COLLECTIVES)
    windows = {window for part in _parts(run, SPANS.name, "window") for window in part["window"].unique()}
    return {
        "collective_bytes_known": collectives.select((pl.col("bytes_in") >= 0).mean()).item(),
        "collective_group_known": collectives.select((pl.col("group") != "").mean()).item(),
        "kernel_time_classified": None if unclassified_share is None else 1 - unclassified_share,
        "windows": len(windows),
        "steps_in_windows": steps.filter(pl.col("window") >= 0)["step"].n_unique(),
    }


def unclassified(run: Run) -> dict[str, Any]:
    """Kernels that the table of classes does not know: how many, their time, and which take most of it."""
    from dpro.classify import OTHER, classify, table_version

    counts, times = _kernels_by_name(run)
    unknown = [name for name in times if classify(name).kind == OTHER]
    time_ns, total_ns = sum(times[name] for name in unknown), sum(times.values())
    longest = sorted(unknown, key=lambda name: (-times[name], name))[:_UNKNOWN_KERNELS_NAMED]
    return {
        "kernels": sum(counts[name] for name in unknown),
        "time_ms": time_ns / 1e6,
        "share": time_ns / total_ns if total_ns else None,
        "names": longest,
        "classes": table_version(),
    }


def _kernels_by_name(run: Run) -> tuple[Counter[str], Counter[str]]:
    """How often each kernel ran, and for how many ns, with one part in memory at a time."""
    import polars as pl

    counts, times = Counter[str](), Counter[str]()
    for part in _parts(run, "spans", "kind", "name", "duration_ns"):
        kernels = part.filter((pl.col("kind") == "kernel") & (pl.col("duration_ns") >= 0))
        for name, count, time_ns in (
            kernels.group_by("name").agg(pl.len(), pl.col("duration_ns").sum()).iter_rows()
        ):
            counts[name] += count
            times[name] += time_ns
    return counts, times


def _parts(run: Run, table: str, *columns: str) -> Iterator[pl.DataFrame]:
    """Some columns of a table, part by part.

    Raises:
        InputError: a part cannot be read.
    """
    import polars as pl

    for part in sorted((run.path / table).glob("*.parquet")):
        try:
            yield pl.read_parquet(part, columns=list(columns), glob=False)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise InputError(f"{part}: not readable as Parquet ({str(error).splitlines()[0]})") from error


def in_words(document: Mapping[str, Any]) -> list[str]:
    """The same for people, one fact a line; what is missing comes last."""
    coverage = document["coverage"]
    lines = [
        f"run        {document['run']}",
        *([f"cache      {document['cache']}"] if document["cache"] else []),
        f"ranks      {len(document['ranks'])} of {document['world_size']}",
        f"hosts      {', '.join(document['hosts']) or 'not recorded'}",
        f"GPUs       {', '.join(document['gpus']) or 'none recorded'}",
        f"steps      {document['steps']}, of which {coverage['steps_in_windows']} lie in deep windows",
        f"rows       {rows_in_words(document)}",
        f"kernels    {unclassified_in_words(coverage['unclassified'])}",
    ]
    shares = {
        "collectives with bytes known": coverage["collective_bytes_known"],
        "collectives with group known": coverage["collective_group_known"],
    }
    lines += [f"coverage   {share:.1%} {what}" for what, share in shares.items() if share is not None]
    lines += [f"skipped    {count} {reason}" for reason, count in document["skipped"].items()]
    return lines + [f"warning    {warning}" for warning in document["warnings"]]


def rows_in_words(document: Mapping[str, Any]) -> str:
    """Row counts of the tables that have any: `6800 spans, 32 collectives`."""
    return ", ".join(f"{count} {name}" for name, count in document["rows"].items() if count) or "none"


def unclassified_in_words(unknown: Mapping[str, Any]) -> str:
    """How much GPU time no class explains: `12 kernels unclassified, 3.1% of GPU time: my_kernel`."""
    if unknown["share"] is None:
        return "no kernels"
    names = f": {', '.join(name[:60] for name in unknown['names'])}" if unknown["names"] else ""
    return f"{unknown['kernels']} kernels unclassified, {unknown['share']:.1%} of GPU time{names}"
