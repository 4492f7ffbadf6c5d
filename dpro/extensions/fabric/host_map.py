"""Adds the host of each rank to a run that did not record it, from a CSV file.

Reads a file with the columns `rank`, `host` and, where ranks are not in the order of their GPUs,
`local_rank`; writes the run's table of workers and its manifest as `dpro record` would.
"""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import polars as pl

from dpro.errors import InputError, UsageError, first_line
from dpro.limits import read_small
from dpro.schema import WORKERS
from dpro.store import Run, write_manifest, write_part
from dpro.words import first_few

SOURCE = "host map"  # in the manifest: hosts from such a file may be replaced
_PART = "hosts"  # part of the table with ranks that had no worker


def read_host_map(path: Path) -> pl.DataFrame:
    """Return `rank`, `host` and `local_rank` of each rank; missing local ranks follow the order of ranks.

    Raises:
        InputError: the file cannot be read, lacks a column, or names a rank or a GPU twice.
    """
    try:
        frame = pl.read_csv(BytesIO(read_small(path)), infer_schema=False)
        frame = frame.rename({name: name.strip().lower() for name in frame.columns})
        if missing := sorted({"rank", "host"} - set(frame.columns)):
            raise InputError(f"{path}: no column {missing[0]!r}: it needs rank, host and may have local_rank")
        numbers = [name for name in ("rank", "local_rank") if name in frame.columns]
        frame = frame.select(
            pl.col("host").str.strip_chars(),
            *(pl.col(name).str.strip_chars().cast(pl.Int32) for name in numbers),
        )
    except (pl.exceptions.PolarsError, ValueError) as error:
        raise InputError(f"{path}: {first_line(error)}") from error
    if "local_rank" not in frame.columns:
        frame = frame.with_columns(local_rank=pl.col("rank").rank("ordinal").over("host").cast(pl.Int32) - 1)
    wrong = frame.filter(
        pl.any_horizontal(pl.all().is_null()) | (pl.col("host") == "") | (pl.min_horizontal(numbers) < 0)
    )
    twice = frame.filter(pl.col("rank").is_duplicated() | pl.struct("host", "local_rank").is_duplicated())
    if wrong.height or twice.height or frame.is_empty():
        what = "a line lacks a rank or host" if wrong.height else "a rank or GPU is listed twice"
        raise InputError(f"{path}: {'it names no rank' if frame.is_empty() else what}")
    return frame.select("rank", "host", "local_rank")


def put_hosts(run: Run, hosts: pl.DataFrame) -> Run:
    """Write the hosts of ranks into a run.

    Args:
        hosts: as `read_host_map` returns them; ranks that were not recorded are left out.

    Raises:
        UsageError: the run has recorded hosts, or a recorded rank has no host in the file.
    """
    recorded = run.table(WORKERS)
    says_itself = (recorded["host"] != "").any() or run.manifest.hosts
    if says_itself and run.manifest.sources.get(WORKERS.name) != SOURCE:
        raise UsageError(f"{run.label} already has the hosts of its ranks: --hosts is for runs without them")
    ranks = run.manifest.ranks
    if absent := sorted(set(ranks) - set(hosts["rank"].to_list())):
        raise UsageError(f"--hosts has no host of ranks {first_few(absent, 8)}")
    hosts = hosts.filter(pl.col("rank").is_in(ranks))
    without = hosts.join(recorded, on="rank", how="anti")
    for part in run.parts(WORKERS):
        held = run.read(WORKERS, [part], list(WORKERS.columns)).drop("host", "local_rank")
        write_part(run.path, WORKERS, part.stem, held.join(hosts, on="rank", how="left"))
    write_part(run.path, WORKERS, _PART, without)
    sources = run.manifest.sources | {WORKERS.name: SOURCE}
    names = hosts["host"].unique(maintain_order=True).to_list()
    changed = replace(run.manifest, hosts=names, sources=sources)
    write_manifest(run.path, changed)
    return replace(run, manifest=changed)
