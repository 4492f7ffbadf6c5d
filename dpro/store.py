"""A run directory on disk: `manifest.json` and one folder of Parquet parts per table.

In: frames that fit `dpro.schema`. Out: a `Run` that reads them back. Every file is written under a
temporary name and renamed when whole, so a reader, and a run whose job was killed, only ever see whole
parts. It does not know where frames come from or what they mean.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from dpro.errors import InputError
from dpro.folders import refuse_link, written_whole
from dpro.schema import TABLES, Table, conform

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What is true of the run as a whole.

    Attributes:
        command: the words of the command that was recorded, secrets masked.
        environment: the settings of the job, from a short list of variables, as all its ranks had them.
        options: what the recorder was asked for.
        exit_status: of the command; minus the signal that killed it, None where unknown.
        applied: what became of each change that was to be made to the job, on each rank: `edit`, `rank`,
            `applied` (places: `where`, `instead_of`, `times`) and `refused` (reasons).
    """

    world_size: int
    ranks: list[int]
    created_by: str = ""
    command: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    exit_status: int | None = None
    warnings: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    windows: dict[str, float] = field(default_factory=dict)
    applied: list[dict[str, Any]] = field(default_factory=list)
    format_version: int = FORMAT_VERSION

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the job that left no record."""
        seen = set(self.ranks)
        return [rank for rank in range(self.world_size) if rank not in seen]


@dataclass(frozen=True)
class Run:
    """An opened run directory.

    Attributes:
        path: the directory.
        manifest: what is true of the run as a whole.
        source: the traces or the URL that the user named, where they were brought into a cache; else None.
    """

    path: Path
    manifest: Manifest
    source: Path | str | None = None

    @property
    def label(self) -> str:
        """What the user calls it."""
        return str(self.source or self.path)

    def table(self, table: Table, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """All rows of a table, sorted as declared; empty where the run has none.

        Args:
            table: which table.
            columns: those to read, where not all are needed; rows then come in the order of the parts.

        Raises:
            InputError: a part cannot be read.
        """
        parts = sorted((self.path / table.name).glob("*.parquet"))
        if not parts:
            return table.empty()
        if columns is not None:
            return _read_columns(table, parts, columns)
        frames = [_read_part(table, part) for part in parts]
        return pl.concat(frames).sort(table.sort_by, maintain_order=True)

    def rows(self) -> dict[str, int]:
        """Number of rows of each table, read from the files' footers."""
        counts = {}
        for name in TABLES:
            parts = (self.path / name).glob("*.parquet")
            counts[name] = sum(_row_count(part) for part in parts)
        return counts


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run directory.

    Raises:
        InputError: no such folder, no manifest, a manifest that is not one, or one from a newer dpro; or a
            table's folder is a link.
    """
    folder = Path(path)
    if not folder.exists():
        raise InputError(f"{folder}: no such file or folder")
    for name in TABLES:
        refuse_link(folder / name)
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise InputError(f"{folder}: {why_no_run(folder)}")
    return Run(folder, _read_manifest(manifest))


def holds_tables(folder: Path) -> bool:
    """Whether a folder has parts of tables, be it a run or not."""
    return any(next((folder / name).glob("rank*.parquet"), None) for name in TABLES)


def why_no_run(folder: Path) -> str:
    """What a folder without a manifest is, and what to do."""
    if holds_tables(folder):
        return (
            f"holds tables but no {MANIFEST}: a recording that was not finished, copied without its hidden "
            "folders .recording and .raw; copy it with them, and any command that reads it finishes it"
        )
    return f"not a run directory (no {MANIFEST}); `dpro record` or `dpro import` makes one"


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a folder that holds a manifest."""
    return (Path(path) / MANIFEST).is_file()


def write_part(run: Path, table: Table, part: str, frame: pl.DataFrame) -> int:
    """Write one part of a table, whole or not at all; an empty frame writes nothing.

    Args:
        run: the run directory.
        table: which table.
        part: name of the part without suffix, such as `rank00003`.
        frame: rows; they are held to the table's declaration first.

    Returns:
        The number of rows written.

    Raises:
        SchemaError: the frame does not fit the declaration.
        InputError: the folder of the table is a link.
    """
    import pyarrow.parquet as pq

    conformed = conform(table, frame)
    if conformed.height == 0:
        return 0
    arrow = conformed.to_arrow(compat_level=pl.CompatLevel.oldest())
    integers = [name for name, dtype in table.dtypes.items() if dtype in (pl.Int64, pl.Int32)]
    texts = [name for name, dtype in table.dtypes.items() if dtype == pl.String or isinstance(dtype, pl.Enum)]
    with suppress(FileExistsError):
        (run / table.name).mkdir(parents=True)
    with written_whole(run / table.name, f"{part}.parquet") as file:
        pq.write_table(
            arrow,
            file,
            compression="zstd",
            use_dictionary=texts,
            column_encoding=dict.fromkeys(integers, "DELTA_BINARY_PACKED"),
        )
    return conformed.height


def write_manifest(run: Path, manifest: Manifest) -> None:
    """Write the manifest, whole or not at all: it is written last, so a run that has one is complete."""
    run.mkdir(parents=True, exist_ok=True)
    document = dataclasses.asdict(manifest) | {"missing_ranks": manifest.missing_ranks}
    with written_whole(run.resolve(), MANIFEST) as file:
        file.write((json.dumps(document, indent=1, sort_keys=True) + "\n").encode())


def _read_manifest(path: Path) -> Manifest:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document["format_version"]
        known = {f.name for f in dataclasses.fields(Manifest)}
        manifest = Manifest(**{key: value for key, value in document.items() if key in known})
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a run manifest ({error})") from error
    if version > FORMAT_VERSION:
        raise InputError(
            f"{path}: written by a newer dpro (format {version}, this one reads {FORMAT_VERSION})"
        )
    return manifest


def _read_part(table: Table, part: Path) -> pl.DataFrame:
    try:
        frame = pl.read_parquet(part, glob=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{part}: not readable as Parquet ({str(error).splitlines()[0]})") from error
    known = [name for name in frame.columns if name in table.columns]
    return conform(table, frame.select(known))


def _read_columns(table: Table, parts: list[Path], columns: Sequence[str]) -> pl.DataFrame:
    """Some columns of all parts at once; parts of older formats may lack some, which get their default."""
    schema = {name: table.dtypes[name] for name in columns}
    try:
        frame = pl.scan_parquet(parts, schema=table.dtypes, missing_columns="insert", glob=False)
        read = frame.select(columns).collect()
    except (pl.exceptions.PolarsError, OSError):
        return pl.concat([_read_part(table, part).select(schema) for part in parts])
    defaults = [
        pl.col(name).fill_null(pl.lit(table.columns[name].default, dtype=dtype))
        for name, dtype in schema.items()
        if table.columns[name].default is not None and read[name].null_count()
    ]
    return read.with_columns(defaults)


def _row_count(part: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(part).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{part}: not readable as Parquet ({str(error).splitlines()[0]})") from error


def merge_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum of several `{reason: n}`, in order of the reasons."""
    total: dict[str, int] = {}
    for count in counts:
        for reason, number in count.items():
            total[reason] = total.get(reason, 0) + number
    return dict(sorted(total.items()))
