"""A run directory on disk: `manifest.json` and one folder of Parquet parts per table.

Takes frames that fit `dpro.schema`; returns a `Run` that reads them back. Every file is written under a
temporary name and renamed when complete, so readers only ever see complete parts, even if the job was killed.
Does not know where frames come from or what they mean.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from dpro._version import __version__
from dpro.documents import DocumentPart, plain
from dpro.errors import InputError, first_line
from dpro.folders import refuse_link, refuse_undecodable, written_whole
from dpro.limits import MAX_RANKS, MAX_ROWS_PER_BYTE, MIN_ROWS, read_small
from dpro.panics import panics_as
from dpro.schema import TABLES, conform
from dpro.table import SchemaError, Table, why_unreadable
from dpro.units import format_bytes
from dpro.words import is_utf8

# A new table or column needs no new version, since readers ignore unknown ones. Raise the version when one is
# removed, or changes its meaning or its values; `python -m tests.formats.keep` keeps a sample of each.
FORMAT_VERSION = 2  # 1, before any release: `group_ranks` are lists
MANIFEST = "manifest.json"
CUT = "truncated tail"  # key of `Manifest.skipped` that counts files, since the missing rows are unknown
IMPOSSIBLE = "spans of impossible times"  # prefix of keys of `Manifest.skipped`


class ChangedPlace(DocumentPart, frozen=True, forbid_unknown_fields=False):
    """One place in a job where a change was applied.

    Attributes:
        where: line of the script, or the object changed.
        instead_of: what the script requested there; empty where it requested nothing.
        times: how often the change was applied there.
    """

    where: str
    instead_of: str
    times: int


class AppliedChange(DocumentPart, frozen=True, forbid_unknown_fields=False):
    """The outcome of one change on one rank.

    Attributes:
        edit: the change, as the user wrote it.
        rank: the rank.
        applied: places where the change was applied.
        refused: reasons why the change was not applied.
    """

    edit: str
    rank: int
    applied: list[ChangedPlace]
    refused: list[str]


@dataclass(frozen=True)
class Manifest:
    """Facts about the run as a whole.

    Attributes:
        represents: ranks of the job that each recorded one was recorded for, itself included: more than 1
            in traces of one rank per tensor-parallel group.
        command: words of the recorded command, with secrets masked.
        environment: environment variables that all ranks shared, from a short list.
        options: options of the recorder.
        exit_status: exit status of the command; minus the signal that killed it, None where unknown.
        error: the first exception that ended a process of the job, in one line; empty where none is known.
        unrecorded: why the run has no steps; empty if it has some.
        applied: outcome of each requested change of the job, on each rank.
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
    error: str = ""
    unrecorded: str = ""
    warnings: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    windows: dict[str, float] = field(default_factory=dict)
    applied: list[AppliedChange] = field(default_factory=list)
    represents: int = 1
    format_version: int = FORMAT_VERSION

    @property
    def is_pretended(self) -> bool:
        """Whether processes of one machine stood in for the ranks, one by one (`--pretend-world`)."""
        return self.options.get("pretend") is not None

    @property
    def num_impossible(self) -> int:
        """Number of spans with impossible times, which were dropped, or moved with their device."""
        return sum(count for reason, count in self.skipped.items() if reason.startswith(IMPOSSIBLE))

    @property
    def num_cut(self) -> int:
        """Number of files that ended early; how many rows they lack is unknown."""
        return self.skipped.get(CUT, 0)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the job that left no record; none where each has a recorded rank that represents it."""
        seen = set(self.ranks)
        if len(seen) * self.represents >= self.world_size:
            return []
        return [rank for rank in range(self.world_size) if rank not in seen]


@dataclass(frozen=True)
class Run:
    """An opened run directory.

    Attributes:
        source: traces or URL that the user named, if they were copied or imported into a cache; else None.
        layout: number of ranks along each axis, as the user states it; empty if not stated.
        damage: one line for each rank or table that is not read, because a file is damaged.
        left_out: files that are not read for this reason.
    """

    path: Path
    manifest: Manifest
    source: Path | str | None = None
    layout: Mapping[str, int] = field(default_factory=dict)
    damage: tuple[str, ...] = ()
    left_out: frozenset[Path] = frozenset()

    @property
    def label(self) -> str:
        """The path or URL by which the user named the run."""
        return str(self.source or self.path)

    def table(self, table: Table, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return all rows of a table, sorted as declared; empty if the run has none.

        Args:
            columns: columns to read, with rows in the order of the parts; None for all columns, sorted.

        Raises:
            InputError: a part cannot be read.
        """
        parts = self.parts(table)
        if not parts:
            return table.empty()
        if columns is not None:
            return _read_columns(table, parts, columns)
        whole = _read_at_once(table, parts)
        if whole is not None:
            return whole
        frames = [_read_part(table, part) for part in parts]
        return pl.concat(frames).sort(table.sort_by, maintain_order=True)

    def parts(self, table: Table) -> list[Path]:
        """Return the files of a table, sorted by name, without damaged ones."""
        return [part for part in part_files(self.path, table) if part not in self.left_out]

    def check(self, table: Table, parts: Sequence[Path], deep: bool) -> None:
        """Raise if any of these parts of a table cannot be read.

        Args:
            deep: read all rows and compare them with the declaration; otherwise read only footers.

        Raises:
            InputError: a part cannot be read.
        """
        if not deep:
            _row_count(list(parts))
        elif _read_at_once(table, list(parts)) is None:  # None also for a part of an older format
            for part in parts:
                _read_part(table, part)

    def part_by_part(self, table: Table, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Yield some columns of a table, one part in memory at a time.

        Raises:
            InputError: a part cannot be read.
        """
        for part in self.parts(table):
            yield _read_columns(table, [part], columns)

    def read(self, table: Table, parts: Sequence[Path], columns: Sequence[str]) -> pl.DataFrame:
        """Return some columns of some parts of a table, in the order of the parts.

        Args:
            parts: files from method `parts`.

        Raises:
            InputError: a part cannot be read.
        """
        return _read_columns(table, list(parts), columns)

    def rows(self) -> dict[str, int]:
        """Return the number of rows of each table, read from the footers of its files."""
        return {name: self.num_rows(table) for name, table in TABLES.items()}

    def num_rows(self, table: Table) -> int:
        """Return the number of rows of one table, read from the footers of its files.

        Raises:
            InputError: a part cannot be read.
        """
        parts = self.parts(table)
        try:
            return _row_count(parts) if parts else 0
        except InputError:  # read the parts one by one, to name the damaged one
            return sum(_row_count([part]) for part in parts)


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run directory.

    Raises:
        InputError: the folder or its manifest does not exist, the manifest is invalid or from a newer dpro,
            or a table's folder is a link.
    """
    folder = Path(path)
    if not folder.exists():
        raise InputError(f"{folder}: no such file or folder")
    refuse_undecodable(folder)
    for name in TABLES:
        refuse_link(folder / name)
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise InputError(f"{folder}: {why_no_run(folder)}")
    return Run(folder, _read_manifest(manifest))


def part_files(run: Path, table: Table, named: str = "") -> list[Path]:
    """Return the files of a table whose names begin with `named`, sorted; skip folders, pipes and devices."""
    paths = sorted((run / table.name).glob(f"{named}*.parquet"))
    return [path for path in paths if path.is_file() and is_utf8(path.name)]


def rank_of(part: Path) -> int | None:
    """Return the rank in a file's name; None if there is none."""
    match = re.match(r"rank(\d{5,})", part.name)
    return int(match[1]) if match else None


def has_tables(folder: Path) -> bool:
    """Return whether a folder contains parts of tables of ranks, with or without a manifest."""
    return any(part_files(folder, table, "rank") for table in TABLES.values())


def why_no_run(folder: Path) -> str:
    """Return why a folder without a manifest is not a run, and what to do."""
    if has_tables(folder):
        return (
            f"has tables but no {MANIFEST}: an unfinished recording, copied without its hidden "
            "folders .recording and .raw; copy it with them, and any command that reads it will finish it"
        )
    return f"not a run directory (no {MANIFEST}); create one with `dpro record` or `dpro import`"


def is_run(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is a folder with a manifest."""
    return (Path(path) / MANIFEST).is_file()


def write_part(run: Path, table: Table, part: str, frame: pl.DataFrame) -> int:
    """Write one part of a table atomically; write nothing for an empty frame.

    Args:
        part: name of the part without suffix, such as `rank00003`.
        frame: rows, which are checked against the table's declaration first.

    Returns:
        The number of rows written.

    Raises:
        SchemaError: the frame does not fit the declaration.
        InputError: the folder of the table is a link.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    conformed = conform(table, frame)
    if conformed.height == 0:
        return 0
    arrow = conformed.to_arrow(compat_level=pl.CompatLevel.oldest())
    # No column has nulls: declaring this in the file saves a marker per value.
    full = pa.schema(field.with_nullable(False) for field in arrow.schema)
    arrow = pa.Table.from_arrays(arrow.columns, schema=full)  # `cast` would load a large module first
    texts = [name for name, dtype in table.dtypes.items() if dtype == pl.String or isinstance(dtype, pl.Enum)]
    with suppress(FileExistsError):
        (run / table.name).mkdir(parents=True)
    with written_whole(run / table.name, f"{part}.parquet") as file:
        pq.write_table(
            arrow,
            file,
            compression="zstd",
            use_dictionary=texts,
            column_encoding=_encodings(table),
            write_statistics=list(table.sort_by),
        )
    return conformed.height


def _encodings(table: Table) -> dict[str, str]:
    """Return the encoding of each integer column: the smallest and fastest for its kind of values."""
    encodings = {}
    for name, dtype in table.dtypes.items():
        if name.endswith("duration_ns"):
            encodings[name] = "BYTE_STREAM_SPLIT"
        elif dtype == pl.Int64 and (name in (*table.sort_by, "sequence") or name.endswith("_ns")):
            encodings[name] = "DELTA_BINARY_PACKED"  # values mostly ascend
        elif dtype in (pl.Int64, pl.Int32):
            encodings[name] = "PLAIN"  # many values are equal, or nearly all are -1
    return encodings


def write_manifest(run: Path, manifest: Manifest) -> None:
    """Write the manifest atomically; write it last, so that a run with a manifest is complete.

    Args:
        run: the run directory, created if missing.
    """
    run.mkdir(parents=True, exist_ok=True)
    document = plain(manifest) | {"missing_ranks": manifest.missing_ranks}
    with written_whole(run.resolve(), MANIFEST) as file:
        file.write((json.dumps(document, indent=1, sort_keys=True) + "\n").encode())


def _read_manifest(path: Path) -> Manifest:
    try:
        document = json.loads(read_small(path))
        version = document["format_version"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise InputError(f"{path.parent}: {_newer_format_message(version, document.get('created_by'))}")
        manifest = msgspec.convert(document, Manifest)
        if not (
            0 <= manifest.world_size <= MAX_RANKS and all(0 <= rank < MAX_RANKS for rank in manifest.ranks)
        ):
            raise ValueError(f"ranks outside 0 … {MAX_RANKS}")
        if manifest.format_version < 1:
            raise ValueError(f"format {manifest.format_version}")
        if manifest.is_pretended and not 0 < int(manifest.options["pretend"]["per_host"]) <= MAX_RANKS:
            raise ValueError(f"pretended ranks of a host outside 1 … {MAX_RANKS}")
        return manifest
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError) as error:
        raise InputError(f"{path}: not a run manifest ({first_line(error)})") from error


def _newer_format_message(version: int, created_by: object) -> str:
    """Return the message for a run of a newer format: it needs the version of dpro that wrote it.

    Args:
        created_by: value of the manifest, which is untrusted.
    """
    writer = re.search(r"\bdpro\b[a-z ]*(\d+(?:\.\d+)+)", str(created_by)[:100])
    needs = f"dpro {writer[1]} or newer" if writer else "a newer dpro"
    this = f"this is dpro {__version__}, which supports formats up to {FORMAT_VERSION}"
    return f"has run format {version}, which needs {needs}; {this}"


def _read_at_once(table: Table, parts: list[Path]) -> pl.DataFrame | None:
    """Read all parts at once, in a fifth of the time of one by one; None if a part is not as declared."""
    with suppress(InputError, SchemaError), _readable(parts[0].parent):
        frame = _collected(pl.scan_parquet(parts, glob=False), parts)
        if frame.schema == table.dtypes:
            return conform(table, frame)
    return None


def _read_part(table: Table, part: Path) -> pl.DataFrame:
    with _readable(part):
        frame = _collected(pl.scan_parquet(part, glob=False), [part])
    declared = [name for name in frame.columns if name in table.columns]
    try:
        return conform(table, frame.select(declared))
    except SchemaError as error:
        raise InputError(f"{part}: damaged, or not written by dpro ({error.args[0]})") from error


def _read_columns(table: Table, parts: list[Path], columns: Sequence[str]) -> pl.DataFrame:
    """Read some columns of all parts at once; columns that a part of an older format lacks get defaults."""
    schema = {name: table.dtypes[name] for name in columns}
    try:
        with _readable(parts[0].parent):
            frame = pl.scan_parquet(
                parts, schema=schema, missing_columns="insert", extra_columns="ignore", glob=False
            )
            read = _collected(frame.select(columns), parts)
    except InputError:  # read the parts one by one, to name the damaged one
        return pl.concat([_read_part(table, part).select(*schema) for part in parts])
    defaults = [
        pl.col(name).fill_null(pl.lit(table.columns[name].default, dtype=dtype))
        for name, dtype in schema.items()
        if table.columns[name].default is not None and read[name].null_count()
    ]
    return read.with_columns(defaults)


@contextmanager
def _readable(part: Path) -> Iterator[None]:
    """Turn Polars errors and panics inside into one line that names the file.

    Raises:
        InputError: the file cannot be read.
    """

    def unreadable(what: str) -> InputError:
        return InputError(f"{part}: not readable as Parquet ({what})")

    try:
        with panics_as(unreadable):
            yield
    except (pl.exceptions.PolarsError, OSError) as error:
        raise unreadable(why_unreadable(error)) from error


def _collected(frame: pl.LazyFrame, parts: list[Path]) -> pl.DataFrame:
    """Return the rows of parts, reading no more than is plausible for the parts' size on disk.

    Raises:
        InputError: the parts have more rows (by `_row_count`).
    """
    most = _most_rows(parts)
    rows = frame.head(most + 1).collect()
    if rows.height > most:
        _row_count(parts)
    return rows


def _most_rows(parts: list[Path]) -> int:
    return max(MIN_ROWS, MAX_ROWS_PER_BYTE * sum(part.stat().st_size for part in parts))


def _row_count(parts: list[Path]) -> int:
    """Return the number of rows of parts, read from their footers.

    Raises:
        InputError: the parts cannot be read, or have more rows than is plausible for their size on disk.
    """
    with _readable(parts[0]):
        count = int(pl.scan_parquet(parts, glob=False).select(pl.len()).collect().item())
    if count > _most_rows(parts):
        stored = format_bytes(sum(part.stat().st_size for part in parts))
        raise InputError(
            f"{parts[0]}: claims {count:,} rows in {stored}, which is implausible; copy the run again"
        )
    return count


def merge_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of several counts by reason, sorted by reason."""
    total: dict[str, int] = {}
    for count in counts:
        for reason, number in count.items():
            total[reason] = total.get(reason, 0) + number
    return dict(sorted(total.items()))
