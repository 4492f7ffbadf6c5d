"""Files that are nearly right: bytes, texts and values changed at random.

In: a random generator and a file's content. Out: another content. The same generator gives the same content.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

import polars as pl
import zstandard

Mutation = Callable[[Random, bytes], bytes]

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63) - 1, 2**100, 1 << 20),
    *(1e308, 0.5, -0.0, float("nan"), float("inf"), -float("inf")),
    *(
        "",
        "0",
        "-1",
        "1e999",
        "nan",
        "[0, 1, ..., 7]",
        "[" + "0, " * 500 + "0]",
        "[-1, 99999999999]",
        "rank 7",
    ),
    *("\ud800", "\0", "\u202e", "a\nb", "x" * 5000, "2" * 5000),
    *([], {}, [[]], [None], [[2**40] * 80], {"a": {"b": []}}, [0] * 3000, [[[[[[]]]]]]),
)
ODD_TEXTS = (
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"\\",
    b"\n",
    b"NaN",
    b"-",
    b"1e999",
    b"\xed\xa0\x80",
)

ODD_NUMBERS = (
    *(b"0", b"1", b"2", b"3", b"64", b"100000", b"1000000000", b"%d" % (2**62 - 1), b"%d" % 2**63),
    *(b"0.001", b"1e6", b"1e308", b"1e999", b"1e-320", b"-1", b"-0", b"nan", b"inf", b"-inf", b""),
    *(b"9" * 400, b"9" * 5000, b"0x10", b"1_0", b"+5", b"007", "\u0663\u00b2\u00bd".encode()),
)
ODD_WORDS = (
    *(b"", b"x" * 70_000, b"a." * 300 + b"a", b"[" * 9500, b"[1-99999999]", b"[1-3][1-999]", b"[3-1]"),
    *("\u00e9\u202e\u2028\U0001f600".encode(), b"\xff", b"\xed\xa0\x80", b"\x1b[2J", b"\r\n", b"\n", b" "),
    *(b"*", b"?", b"[", b"]", b"{", b'"', b"'", b"\\", b"=", b",", b":", b"/", b"..", b"#", b"%s", b"yes"),
)
_PARTS = re.compile(rb"[0-9]+(?:\.[0-9]+)?|[A-Za-z_]+|\s+|.", re.DOTALL)


def of_text(random: Random, content: bytes) -> bytes:
    """Text some of whose numbers, words and marks are others, left out, repeated or swapped."""
    parts = _PARTS.findall(content)
    for _ in range(random.choice((1, 1, 2, 5))):
        if not parts:
            return random.choice(ODD_WORDS)
        at, other = random.randrange(len(parts)), random.randrange(len(parts))
        way = random.randrange(6)
        if way < 3:
            parts[at] = random.choice(ODD_NUMBERS if parts[at][:1].isdigit() else ODD_WORDS)
        elif way == 3:
            del parts[at]
        elif way == 4:
            parts[at] = (parts[at] * random.choice((2, 300, 20_000)))[:100_000]
        else:
            parts[at], parts[other] = parts[other], parts[at]
    return b"".join(parts)


def of_bytes(random: Random, content: bytes) -> bytes:
    """Some bytes flipped, set, cut out, doubled, or put in."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        at = random.randrange(len(data) + 1)
        length = random.choice((1, 1, 2, 4, 8, 64, 1024))
        way = random.randrange(6)
        if way == 0 and at < len(data):
            data[at] ^= 1 << random.randrange(8)
        elif way == 1 and at < len(data):
            data[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        elif way == 2:
            del data[at : at + length]
        elif way == 3:
            data[at:at] = data[at : at + length] * random.choice((1, 1, 2, 50))
        elif way == 4:
            data[at:at] = random.choice(ODD_TEXTS) * random.choice((1, 1, 3, 1000))
        else:
            data[at : at + 8] = random.choice((0, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)).to_bytes(
                8, "little"
            )
    return bytes(data)


def cut(random: Random, content: bytes) -> bytes:
    """The beginning, or the end."""
    at = random.randrange(len(content) + 1)
    return content[:at] if random.random() < 0.8 else content[at:]


def of_values(random: Random, value: Any) -> Any:
    """A value of JSON or a pickle with some of its parts changed, left out, doubled or swapped."""
    for _ in range(random.choice((1, 1, 2, 5))):
        holders = [holder for holder in _containers(value) if holder]
        if not holders:
            return random.choice(ODD_VALUES)
        holder = random.choice(holders)
        key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        way = random.randrange(6)
        if way < 3:
            holder[key] = random.choice(ODD_VALUES)
        elif way == 3:
            del holder[key]
        elif way == 4:
            other = random.choice(holders)
            holder[key] = random.choice(list(other.values()) if isinstance(other, dict) else other)
        elif isinstance(holder, list):
            holder[key:key] = [holder[key]] * random.choice((1, 2, 300))
        else:
            holder[random.choice(("", "0", "rank", "\ud800", "x" * 300))] = holder.pop(key)
    return value


def _containers(value: Any) -> list[Any]:
    found, waiting = [], [value]
    while waiting and len(found) < 5000:
        each = waiting.pop()
        if isinstance(each, dict | list):
            found.append(each)
            waiting += each.values() if isinstance(each, dict) else each
    return found


def of_json(random: Random, content: bytes) -> bytes:
    """JSON with other values; lines of JSON one by one."""
    try:
        return _dumped(of_values(random, json.loads(content)))
    except (ValueError, RecursionError):
        pass
    lines = content.splitlines()
    at = random.randrange(len(lines)) if lines else 0
    try:
        lines[at] = _dumped(of_values(random, json.loads(lines[at])))
    except (ValueError, IndexError, RecursionError):
        return of_bytes(random, content)
    return b"\n".join(lines)


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def of_pickle(random: Random, content: bytes) -> bytes:
    """A pickle with other values, of any protocol."""
    try:
        value = of_values(random, pickle.loads(content))
        if random.random() < 0.1:
            value = _shared(random, value)
        return pickle.dumps(value, random.choice((2, 2, 3, 4, 5)))
    # `load` of damaged content raises whatever its opcodes meet, such as the end of it.
    except (ValueError, LookupError, RecursionError, EOFError, AttributeError, pickle.PickleError):
        return of_bytes(random, content)


def _shared(random: Random, value: Any) -> Any:
    """The value with one in it that holds itself over and over."""
    laughs: Any = []
    for _ in range(random.choice((5, 30, 100))):
        laughs = [laughs] * 2 if random.random() < 0.9 else (laughs, laughs)
    holder = random.choice([each for each in _containers(value) if each] or [[0]])
    holder[next(iter(holder)) if isinstance(holder, dict) else 0] = laughs
    return value


def of_sqlite(random: Random, content: bytes) -> bytes:
    """A database with other values, or other columns."""
    with sqlite3.connect(":memory:") as connection:
        connection.deserialize(content)
        tables = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        for _ in range(random.choice((1, 2, 5))):
            table = random.choice(tables)
            columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
            if not columns:
                continue
            column = random.choice(columns)
            odd = random.choice(
                (None, -1, 2**31, 2**62, -(2**63), 0.5, "", "x" * 300, b"\xff\0", "\udcff", 1e308)
            )
            odd = odd.encode("utf-8", "surrogateescape").decode("latin1") if isinstance(odd, str) else odd
            way = random.randrange(4)
            if way < 2:
                connection.execute(
                    f'UPDATE "{table}" SET "{column}" = ? WHERE rowid % ? = 0', (odd, random.choice((1, 2)))
                )
            elif way == 2:
                connection.execute(
                    f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "x{random.randrange(99)}"'
                )
            else:
                connection.execute(f'DELETE FROM "{table}" WHERE rowid % 2 = 0')
        connection.commit()
        return connection.serialize()


ODD_TYPES = (
    pl.String,
    pl.Float64,
    pl.Int8,
    pl.Int128,
    pl.Boolean,
    pl.Binary,
    pl.Decimal(38, 2),
    pl.UInt64,
    pl.Date,
)


def of_parquet(random: Random, content: bytes) -> bytes:
    """A table with a column of another type, of nulls, of lists or structures, or without it."""
    frame = pl.read_parquet(io.BytesIO(content))
    name = random.choice(frame.columns)
    way = random.randrange(7)
    if way == 0:
        frame = frame.with_columns(pl.col(name).cast(random.choice(ODD_TYPES), strict=False))
    elif way == 1:
        frame = frame.with_columns(pl.struct(name, pl.lit(1).alias("b")).alias(name))
    elif way == 2:
        frame = frame.with_columns(pl.concat_list(name).alias(name))
    elif way == 3:
        frame = frame.drop(name)
    elif way == 4:
        frame = frame.with_columns(pl.when(pl.int_range(pl.len()) % 2 == 0).then(name).alias(name))
    elif way == 5:
        frame = frame.with_columns(pl.lit(random.choice((-1, 2**62, 1e300, "x", None))).alias(name))
    else:
        frame = (
            frame.rename({name: random.choice(("x", "rank", name.upper()))})
            if len(frame.columns) > 1
            else frame
        )
    file = io.BytesIO()
    frame.write_parquet(file)
    return file.getvalue()


def _failsafe(mutation: Mutation) -> Mutation:
    """What cannot be changed by its meaning is changed by its bytes."""

    def mutated(random: Random, content: bytes) -> bytes:
        try:
            return mutation(random, content)
        except Exception:
            return of_bytes(random, content)

    return mutated


def by_content(content: bytes) -> Mutation:
    """How to change a file by its meaning."""
    if content.startswith(b"SQLite"):
        return _failsafe(of_sqlite)
    if content.startswith(b"PAR1"):
        return _failsafe(of_parquet)
    return of_pickle if content.startswith(b"\x80") else of_json


def mutated(random: Random, content: bytes) -> bytes:
    """The content, changed in one of all ways."""
    ways = (by_content(content), by_content(content), of_bytes, cut)
    for _ in range(random.choice((1, 1, 1, 2))):
        content = random.choice(ways)(random, content)
    return content


def packed(random: Random, content: bytes, name: str) -> tuple[bytes, str]:
    """The content compressed or in an archive, or not, and a name for it; then bytes may change, too."""
    way = random.randrange(10)
    if way < 4:
        return content, name
    if way < 6:
        content, name = gzip.compress(content), name + ".gz"
    elif way == 6:
        content, name = zstandard.compress(content), name + ".zst"
    elif way == 7:
        content, name = _zip(random, content, name), name + ".zip"
    else:
        content, name = _tar(random, content, name), name + ".tar"
        content, name = (gzip.compress(content), name + ".gz") if way == 9 else (content, name)
    return (random.choice((of_bytes, cut))(random, content) if random.random() < 0.4 else content), name


def _called(random: Random, name: str) -> str:
    return random.choice(
        (name, name, f"job/{name}", "..", f"../{name}", f"a\n{name}", "é" * 130, f"{name}\udcff")
    )


def _zip(random: Random, content: bytes, name: str) -> bytes:
    file = io.BytesIO()
    method = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr(_called(random, name).encode("utf-8", "replace").decode(), content)
        archive.writestr("readme", b"nothing")
    return file.getvalue()


def _tar(random: Random, content: bytes, name: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(
        fileobj=file, mode="w", format=random.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
    ) as archive:
        info = tarfile.TarInfo(_called(random, name))
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = (
            random.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)),
            info.name,
        )
        archive.addfile(link)
    return file.getvalue()
