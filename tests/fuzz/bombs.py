"""Small files that would take all memory, or for ever, if no limit refused them.

In: a random generator. Out: functions that write a file. Nothing is damaged by chance: each file is hostile.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.fuzz.seeds import flight_pickle, kineto

SWOLLEN = 1 << 30
_PIECE = 1 << 24

HEADS = (
    b'{"schemaVersion": 1, "traceEvents": [',
    b'{"schemaVersion": 1, "x": "',
    b'{"traceEvents": [{"ph": "X", "name": "',
    b'{"pg_config": {}, "entries": [',
    b'{"coll_perf": {"coll": "',
    b'{"coll_perf": {}}\n',
    b'{"communicators_count": 1, "communicators": [',
    b'{"rf_id": 1, "nodes": [',
    b'[{"microbatch": 1},',
    b'{"0": {"fwd_start": [], "fwd_end": [], "bwd_start": [',
    b"SQLite format 3\0 StringIds",
    b"\x80\x02}q\x00X\x07\x00\x00\x00entries]q\x01(",
)
FILLERS = (
    b"\0",
    b" ",
    b"[1],",
    b"[],",
    b"{},",
    b"[",
    b"1",
    b'"',
    b"1,",
    b"x",
    b'{"ph":"X"},',
    b"\n",
    b"N",
    b"]",
)


def swollen(random: Random) -> Callable[[Path], None]:
    """A gigabyte of the same, behind what a format begins with, compressed in one of many ways."""
    head, filler = random.choice(HEADS), random.choice(FILLERS)
    piece = filler * (_PIECE // len(filler))
    packer = random.choice((_gzip, _zstd, _zip, _gzip_in_zip, _tar_gz, _gzip_twice))
    return lambda path: packer(path, head, piece, SWOLLEN // len(piece))


def _gzip(path: Path, head: bytes, piece: bytes, times: int) -> None:
    path.write_bytes(_gzipped(head, piece, times))


def _gzipped(head: bytes, piece: bytes, times: int) -> bytes:
    return gzip.compress(head) + gzip.compress(piece, 6) * times


def _zstd(path: Path, head: bytes, piece: bytes, times: int) -> None:
    path.write_bytes(zstandard.compress(head) + zstandard.compress(piece) * times)


def _gzip_twice(path: Path, head: bytes, piece: bytes, times: int) -> None:
    path.write_bytes(gzip.compress(_gzipped(head, piece, times)))


def _zip(path: Path, head: bytes, piece: bytes, times: int) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("rank0", "w") as member:
        member.write(head)
        for _ in range(times // 4):
            member.write(piece)


def _gzip_in_zip(path: Path, head: bytes, piece: bytes, times: int) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank0", _gzipped(head, piece, times))


def _tar_gz(path: Path, head: bytes, piece: bytes, times: int) -> None:
    info = tarfile.TarInfo("rank0")
    info.size = len(head) + times * len(piece)
    start = info.tobuf() + head
    path.write_bytes(_gzipped(start, piece, times) + gzip.compress(b"\0" * (2048 - info.size % 512)))


def sparse(random: Random) -> Callable[[Path], None]:
    """Gigabytes that take no room on the disk."""
    head = random.choice(HEADS)

    def write(path: Path) -> None:
        path.write_bytes(head)
        with path.open("r+b") as file:
            file.truncate(8 << 30)

    return write


def sparse_tar(random: Random) -> Callable[[Path], None]:
    """An archive of which a member is all hole."""
    info = tarfile.TarInfo("rank0")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:398], header[398:410] = b"00000000000\0", b"00000000000\0"
    header[483:495] = f"{8 << 30:011o}\0".encode()[:12]
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    content = bytes(header) + b"\0" * 1024
    return lambda path: _write(path, random.choice((bytes, gzip.compress))(content))


def laughing(random: Random) -> Callable[[Path], None]:
    """A dump in which a value holds itself over and over."""
    dump: Any = pickle.loads(flight_pickle(0, 3))
    laughs: Any = random.choice(([], (), {}, "x" * 1000, 7, [2] * 60))
    for _ in range(random.choice((12, 20, 100))):
        laughs = random.choice(([laughs] * 2, (laughs, laughs), {"a": laughs, "b": laughs}, [laughs] * 10))
    entry, where = dump["entries"][0], random.randrange(4)
    if where == 0:
        entry[random.choice(list(entry))] = laughs
    elif where == 1:
        dump["pg_status"] = {"0": laughs, "1": {"last_enqueued_collective": laughs}}
    elif where == 2:
        dump["pg_config"]["0"]["ranks"] = laughs
    else:
        dump["entries"] = [entry | {"input_sizes": laughs} for _ in range(1000)]
    return lambda path: _write(path, pickle.dumps(dump, random.choice((2, 4))))


def key(random: Random) -> Callable[[Path], None]:
    """A pickle with a key that takes for ever to look up."""
    step = random.choice(
        (b"q\x00h\x00\x86", b"N\x86", b"2\x86", b"\x85", b"q\x00h\x00h\x00\x87", b"q\x00h\x00\x86\x91")
    )
    looked_up = b"N" + step * random.choice((100, 100_000))
    if random.random() < 0.3:
        looked_up = b"(" + b"N" * 100_000 + b"tq\x00" + b"Nsh\x00" * 50_000
    if random.random() < 0.2:
        looked_up = (
            b"\x8b" + struct.pack("<i", 1 << 20) + b"\x01" * (1 << 20) + b"q\x00" + b"Nsh\x00" * 50_000
        )
    return lambda path: _write(path, b"\x80\x02}X\x07\x00\x00\x00entries]s" + looked_up + b"Ns.")


def dimensions(random: Random) -> Callable[[Path], None]:
    """A dump whose tensors have more dimensions, elements or ranks than any."""
    dump: Any = pickle.loads(flight_pickle(0, 3))
    odd = random.choice(
        (
            [[2] * 1_000_000],
            [[1 << 62] * 1000] * 1000,
            [[10**300] * 1000],
            [[]] * 1_000_000,
            [list(range(100))] * 10_000,
        )
    )
    way = random.randrange(4)
    if way < 2:
        for name in ("input_sizes", "output_sizes"):
            dump["entries"][0][name] = odd
        dump["entries"][0]["input_dtypes"] = ["Float"] * len(odd)
    elif way == 2:
        dump["pg_config"]["0"]["ranks"] = str(list(range(1_000_000)))
        dump["entries"] = [dump["entries"][1] | {"record_id": number} for number in range(2000)]
    else:
        dump["pg_config"] = {str(group): {"desc": "", "ranks": list(range(20_000))} for group in range(30)}
        dump["entries"] = [
            dump["entries"][1] | {"record_id": n, "process_group": [str(n % 30), ""]} for n in range(10_000)
        ]
    as_json = random.random() < 0.5
    return lambda path: _write(path, json.dumps(dump).encode() if as_json else pickle.dumps(dump, 2))


def groups(random: Random) -> Callable[[Path], None]:
    """A trace whose groups are of a million ranks, or listed in every call."""
    document = json.loads(kineto(0, 2000))
    if random.random() < 0.5:
        document["distributedInfo"]["pg_config"] = [{"pg_name": "0", "ranks": list(range(1_000_000))}]
        ranks = "[0, 1, ..., 999999]"
    else:
        ranks = str(list(range(5_000)))
    for event in document["traceEvents"]:
        if "Process Group Ranks" in event["args"]:
            event["args"]["Process Group Ranks"] = ranks
    return lambda path: _write(path, gzip.compress(json.dumps(document).encode()))


def nested(random: Random) -> Callable[[Path], None]:
    """JSON that lies deep in itself, or a number of megabytes."""
    head = random.choice(HEADS[:10])
    middle = random.choice(
        (b"[" * 1_000_000, b'{"a":' * 1_000_000, b"9" * 10_000_000, b"1e" + b"9" * 1_000_000)
    )
    return lambda path: _write(path, head + middle + random.choice((b"", b"]}", b"]" * 1_000_000)))


def rows(random: Random) -> Callable[[Path], None]:
    """A Parquet file of a hundred million rows that are all the same."""
    names = ("rank", "step", "start_ts", "duration")
    columns = {name: np.zeros(1 << 22, dtype=np.int8) for name in names}
    table = pa.table({**columns, "optype": pa.array(["gc"] * (1 << 22)).dictionary_encode()})

    def write(path: Path) -> None:
        with pq.ParquetWriter(path, table.schema, compression="zstd") as file:
            for _ in range(24):
                file.write_table(table)

    return write


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def members(random: Random) -> Callable[[Path], None]:
    """An archive of hundreds of thousands of files, or all of them the same piece of it."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("rank0"))
    header = file.getvalue()[:512]
    return lambda path: _write(path, gzip.compress(header * 300_000, 1))


BOMBS = (
    *(swollen, swollen, swollen, sparse, sparse_tar, laughing, laughing),
    *(key, key, dimensions, groups, nested, rows, members),
)
