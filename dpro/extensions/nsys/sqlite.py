"""SQLite files of profilers, whose tables and columns differ by version.

Takes a file, gzipped or not; gives its tables as frames, with nulls for columns that it lacks and no rows for
tables that it lacks. Damage is one line.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from dpro.errors import InputError
from dpro.ingest.reading.files import Source, blocks

MAGIC = b"SQLite format 3\0"
_GZIP = b"\x1f\x8b"
_DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)  # the latter for bytes quoted in SQLite's message

MIN_ROW_BYTES = 4  # a row's offset in its page, its length and its number

Columns = Mapping[str, type[pl.DataType]]


@dataclass(frozen=True)
class Export:
    """An opened export.

    Attributes:
        present: columns by name of table or view.
        max_rows: maximum rows of a table; one with damaged pages may seem to have any number.
    """

    path: Path
    connection: sqlite3.Connection
    present: Mapping[str, frozenset[str]]
    max_rows: int

    def rows(self, table: str, columns: Columns) -> pl.DataFrame:
        """Return a table's rows with the requested columns, null where it lacks one; none without the table.

        Args:
            columns: types by name.

        Raises:
            InputError: the database is damaged.
        """
        have = self.present.get(table, frozenset())
        if not have:
            return pl.DataFrame(schema=columns)
        # SQLite cells may have any type: values of another type than the column's become null.
        stored = {name: "text" if dtype == pl.String else "integer" for name, dtype in columns.items()}
        selected = ", ".join(
            f"""CASE typeof("{name}") WHEN '{stored[name]}' THEN "{name}" END""" if name in have else "NULL"
            for name in columns
        )
        rows = self._all(f'SELECT {selected} FROM "{table}"')
        return pl.DataFrame(rows, schema=columns, orient="row", strict=False)

    def count(self, table: str) -> int:
        """Return the number of rows of a table; 0 where there is none."""
        if table not in self.present:
            return 0
        return int(self._all(f'SELECT count(*) FROM "{table}"')[0][0])

    def _all(self, query: str) -> list[tuple[Any, ...]]:
        try:
            rows = self.connection.execute(query).fetchmany(self.max_rows + 1)
        except _DAMAGE as error:
            raise _damaged(self.path, error) from error
        if len(rows) > self.max_rows:
            raise _damaged(self.path, ValueError("more rows than its pages can hold"))
        return rows

    @cached_property
    def texts(self) -> pl.DataFrame:
        """`StringIds`, with columns `id` and `value`."""
        return self.rows("StringIds", {"id": pl.Int64, "value": pl.String})

    def named(self, frame: pl.DataFrame, **ids: str) -> pl.DataFrame:
        """Add texts that are looked up in `StringIds`.

        Args:
            frame: with columns of ids.
            ids: name of the text column -> the column with its id.
        """
        for text, identifier in ids.items():
            texts = self.texts.rename({"id": identifier, "value": text})
            frame = frame.join(texts, on=identifier, how="left", maintain_order="left")
        return frame


@contextmanager
def open_export(
    path: Path,
    tables: Sequence[str] = ("StringIds",),
    kind: str = "an export of Nsight Systems",
    give: str = "what `nsys export --type sqlite` writes",
) -> Iterator[Export]:
    """Open an export; a gzipped one is unpacked to a temporary file while it is open.

    Args:
        tables: tables or views, of which every file of the kind has one.
        kind: name of the kind of file, for errors.
        give: advice on which file to give, for errors.

    Raises:
        InputError: the file cannot be read, is truncated, or is not of the kind.
    """
    with tempfile.TemporaryDirectory(prefix="dpro-nsys-") as folder:
        database = _unpacked(path, Path(folder))
        _refuse_cut_short(database, path, give)
        address = f"file:{quote(os.fsencode(database.resolve()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", errors="replace")
            max_rows = database.stat().st_size // MIN_ROW_BYTES
            present = _present(connection, path)
            if not present.keys() & set(tables):
                raise InputError(f"{path}: not {kind} (no table {' or '.join(tables)}); give {give}")
            yield Export(path, connection, present, max_rows)


def _unpacked(path: Path, folder: Path) -> Path:
    try:
        with path.open("rb") as file:
            if file.read(len(_GZIP)) != _GZIP:
                return path
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    database, damage = folder / "export.sqlite", list[str]()
    with database.open("wb") as plain:
        plain.writelines(blocks(Source(str(path), path), damage))
    if damage:
        raise InputError(f"{path}: truncated or damaged gzip ({damage[0]}); copy the file again")
    return database


def _refuse_cut_short(database: Path, path: Path, give: str) -> None:
    """Raise if a file is truncated, which SQLite notices only when it happens to read the missing part."""
    with database.open("rb") as file:
        header = file.read(100)
    if not header.startswith(MAGIC) or len(header) < 100:
        raise InputError(f"{path}: not a SQLite database; give {give}")
    page_bytes, num_pages = int.from_bytes(header[16:18]), int.from_bytes(header[28:32])
    page_bytes = 1 << 16 if page_bytes == 1 else page_bytes
    if database.stat().st_size < page_bytes * num_pages:
        raise InputError(f"{path}: SQLite database cut short; copy or export it again")


def _present(connection: sqlite3.Connection, path: Path) -> dict[str, frozenset[str]]:
    try:
        tables, views = (
            connection.execute("SELECT name FROM sqlite_master WHERE type = ?", [kind]).fetchall()
            for kind in ("table", "view")
        )
        columns = {name: _columns_of(connection, name) for (name,) in tables}
        for (name,) in views:
            with suppress(sqlite3.OperationalError):  # a view of tables that are missing
                columns[name] = _columns_of(connection, name)
    except _DAMAGE as error:
        raise _damaged(path, error) from error
    return columns


def _columns_of(connection: sqlite3.Connection, table: str) -> frozenset[str]:
    return frozenset(row[1] for row in connection.execute(f'PRAGMA table_info("{table}")'))


def _damaged(path: Path, error: Exception) -> InputError:
    what = str(error)[:200].encode("unicode_escape").decode()  # SQLite quotes the damage itself
    return InputError(f"{path}: damaged SQLite database ({what}); copy or export it again")
