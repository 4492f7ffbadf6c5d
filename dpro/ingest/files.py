"""Bytes of a source file, gunzipped where they are gzipped.

In: a path. Out: bytes, or one line that says what is wrong with the file. What the bytes mean is not its
business.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from isal import igzip, isal_zlib

from dpro.errors import InputError

_GZIP = b"\x1f\x8b"
HEAD_BYTES = 1 << 16


def read_bytes(path: Path) -> bytes:
    """The whole file, gunzipped where it is gzipped.

    Raises:
        InputError: it cannot be read, is empty, or its gzip stream is damaged.
    """
    try:
        data = path.read_bytes()
        content: bytes = igzip.decompress(data) if data.startswith(_GZIP) else data
    except (EOFError, zlib.error, igzip.BadGzipFile) as error:
        raise InputError(f"{path}: truncated or damaged gzip ({error}); copy the file again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if not content:
        raise InputError(f"{path}: empty file; record it again")
    return content


def read_head(path: Path) -> bytes:
    """The first bytes of a file, gunzipped, as far as they can be read.

    Raises:
        InputError: the file cannot be opened.
    """
    try:
        with path.open("rb") as file:
            data = file.read(HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if not data.startswith(_GZIP):
        return data
    try:
        head: bytes = isal_zlib.decompressobj(31).decompress(data, HEAD_BYTES)
    except zlib.error:
        return b""
    return head
