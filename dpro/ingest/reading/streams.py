"""Compressed files as streams of their content, damaged ones as far as they can be read.

In: a binary file. Out: a stream of what it holds, decompressed as its first bytes demand, and no more of it
than `limits` allow. A stream whose source is damaged delivers all that can be read first and then raises
`EOFError` with what is wrong.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from isal import igzip_lib

from dpro.errors import MissingExtra
from dpro.limits import MAX_BLANK_BYTES, refuse_bomb
from dpro.units import format_bytes

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BLANKS = b"\0 \t\r\n"
_INPUT_BYTES = 1 << 17
_CAREFUL_BYTES = 64  # of compressed input at a time, to lose little before the damage


def decompressed(file: BinaryIO, label: str, stored_bytes: int) -> BinaryIO:
    """The content of a file that may be compressed (gzip, zstandard), as a stream that keeps to `limits`.

    Raises:
        MissingExtra: it needs a library that is not installed.
    """
    start = file.read(len(_ZSTD))
    file.seek(0)
    content = _Gunzip(file) if start.startswith(_GZIP) else _Unzstd(file) if start == _ZSTD else file
    return io.BufferedReader(_Bounded(content, label, stored_bytes))


class _Stream(io.RawIOBase):
    """Content that is made from a file; `read` makes it."""

    _file: BinaryIO | io.RawIOBase

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, target: memoryview, /) -> int:  # type: ignore[override]
        content = self.read(len(target))
        target[: len(content)] = content
        return len(content)


class _Bounded(_Stream):
    """Content of a file, up to a long stretch of nothing but blanks, which is damage.

    Reading raises `InputError` where the content is more than such a file can hold.
    """

    def __init__(self, file: BinaryIO | io.RawIOBase, label: str, stored_bytes: int) -> None:
        self._file = file
        self._label = label
        self._stored_bytes = stored_bytes
        self._read_bytes = 0
        self._blank_bytes = 0  # in a row, up to here

    def read(self, size: int = -1, /) -> bytes:
        """Read at most `size` bytes, without the copy that `readinto` makes."""
        if size < 0:
            return self.readall()
        content = self._file.read(size) or b""
        self._read_bytes += len(content)
        refuse_bomb(self._label, self._read_bytes, self._stored_bytes)
        # The beginning first: it shows of nearly all content that it is not blank.
        blank = not content[:64].strip(_BLANKS) and not content.strip(_BLANKS)
        self._blank_bytes = self._blank_bytes + len(content) if blank else 0
        if self._blank_bytes > MAX_BLANK_BYTES:
            raise EOFError(f"nothing but blanks or zeros for {format_bytes(MAX_BLANK_BYTES)}")
        return content


class _Gunzip(_Stream):
    """Content of all members of a gzip file; zeros and foreign bytes after the last are passed over."""

    _file: BinaryIO

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._engine = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        self._delivered = 0
        self._salvage: Iterator[bytes] | None = None
        self._kept = b""  # salvaged and not yet delivered

    def read(self, size: int = -1, /) -> bytes:
        """Read at most `size` bytes, without the copy that `readinto` makes."""
        if size < 0:
            return self.readall()
        content = self._salvaged(size) if self._salvage else self._decompressed(size)
        self._delivered += len(content)
        return content

    def _decompressed(self, size: int) -> bytes:
        try:
            while not self._engine.eof or self._next_member():
                data = self._file.read(_INPUT_BYTES) if self._engine.needs_input else b""
                if self._engine.needs_input and not data:
                    raise EOFError("gzip stream cut short")
                content: bytes = self._engine.decompress(data, size)
                if content:
                    return content
            return b""
        except igzip_lib.IsalError as error:  # type: ignore[misc]  # its stub declares an instance
            self._salvage = _carefully(self._file, self._delivered, str(error))
            return self._salvaged(size)

    def _next_member(self) -> bool:
        """Continue with the member that follows, if one does."""
        left = self._engine.unused_data.lstrip(b"\0")
        left = left if len(left) > 1 else left + self._file.read(_INPUT_BYTES)
        if not left.startswith(_GZIP):
            return False
        self._file.seek(self._file.tell() - len(left))
        self._engine = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        return True

    def _salvaged(self, size: int) -> bytes:
        while not self._kept and self._salvage:
            self._kept = next(self._salvage)
        content, self._kept = self._kept[:size], self._kept[size:]
        return content


def _carefully(file: BinaryIO, delivered: int, what: str) -> Iterator[bytes]:
    """What a damaged gzip file holds after the bytes that were delivered already.

    The fast decoder loses a whole block of output where it meets damage: this one reads again in small steps.

    Raises:
        EOFError: at the damage.
    """
    file.seek(0)
    engine = zlib.decompressobj(31)
    while data := file.read(_CAREFUL_BYTES):
        while data:
            try:
                content = engine.decompress(data)
            except zlib.error as error:
                raise EOFError(f"damaged gzip stream: {what}") from error
            if len(content) > delivered:
                yield content[delivered:]
            delivered = max(0, delivered - len(content))
            data = engine.unused_data
            if engine.eof:
                engine = zlib.decompressobj(31)
    raise EOFError(f"damaged gzip stream: {what}")


class _Unzstd(_Stream):
    """Content of a zstandard file, frame after frame."""

    def __init__(self, file: BinaryIO) -> None:
        try:
            import zstandard
        except ModuleNotFoundError as error:
            raise MissingExtra("zstandard", "zstd") from error
        self._file = file
        self._error: type[Exception] = zstandard.ZstdError
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        self._reader = cast(BinaryIO, reader)

    def read(self, size: int = -1, /) -> bytes:
        """Read at most `size` bytes."""
        if size < 0:
            return self.readall()
        try:
            return self._reader.read(size)
        except self._error as error:
            raise EOFError(f"damaged zstandard stream: {error}") from error
