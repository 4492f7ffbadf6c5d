"""`dpro info`: what a run holds and what it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.output import console, json_option, print_json

if TYPE_CHECKING:
    import polars as pl

    from dpro.store import Run


@click.command()
@click.argument("run", metavar="RUN", type=click.Path())
@json_option
def info(run: str, as_json: bool) -> None:
    """What a run holds and what it lacks."""
    from dpro.cli.runs import open_or_import

    opened = open_or_import(run)
    document = describe(opened)
    if as_json:
        print_json(document)
    else:
        console().print("\n".join(in_words(document)))


def contents(run: Run) -> dict[str, Any]:
    """What a run holds, in the keys that `import` and `info` share."""
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


def describe(run: Run) -> dict[str, Any]:
    """What `info --json` prints."""
    from dpro.schema import STEPS

    steps = run.table(STEPS)
    return contents(run) | {
        "steps": steps["step"].n_unique(),
        "hosts": run.manifest.hosts,
        "gpus": run.manifest.gpus,
        "coverage": _coverage(run, steps),
    }


def _coverage(run: Run, steps: pl.DataFrame) -> dict[str, Any]:
    """Shares between 0 and 1, None where there is nothing to take a share of."""
    import polars as pl

    from dpro.schema import COLLECTIVES, SPANS

    collectives = run.table(COLLECTIVES)
    spans = run.table(SPANS)
    return {
        "collective_bytes_known": collectives.select((pl.col("bytes_in") >= 0).mean()).item(),
        "collective_group_known": collectives.select((pl.col("group") != "").mean()).item(),
        "kernel_time_classified": _classified_share(spans),
        "windows": spans["window"].n_unique(),
        "steps_in_windows": steps.filter(pl.col("window") >= 0)["step"].n_unique(),
    }


def _classified_share(spans: pl.DataFrame) -> float | None:
    import polars as pl

    from dpro.classify import OTHER, classify

    times = spans.filter(pl.col("kind") == "kernel").group_by("name").agg(pl.col("duration_ns").sum())
    total = times["duration_ns"].sum()
    known = sum(time for name, time in times.iter_rows() if classify(name).kind != OTHER)
    return known / total if total else None


def in_words(document: Mapping[str, Any]) -> list[str]:
    """The same for people, one fact a line; what is missing comes last."""
    coverage = document["coverage"]
    lines = [
        f"run        {document['run']}",
        f"ranks      {len(document['ranks'])} of {document['world_size']}",
        f"hosts      {', '.join(document['hosts']) or 'not recorded'}",
        f"GPUs       {', '.join(document['gpus']) or 'none'}",
        f"steps      {document['steps']}, of which {coverage['steps_in_windows']} lie in deep windows",
        f"rows       {rows_in_words(document)}",
    ]
    shares = {
        "collectives with bytes known": coverage["collective_bytes_known"],
        "collectives with group known": coverage["collective_group_known"],
        "kernel time classified": coverage["kernel_time_classified"],
    }
    lines += [f"coverage   {share:.1%} {what}" for what, share in shares.items() if share is not None]
    lines += [f"skipped    {count} {reason}" for reason, count in document["skipped"].items()]
    return lines + [f"warning    {warning}" for warning in document["warnings"]]


def rows_in_words(document: Mapping[str, Any]) -> str:
    """Row counts of the tables that have any: `6800 spans, 32 collectives`."""
    return ", ".join(f"{count} {name}" for name, count in document["rows"].items() if count) or "none"
