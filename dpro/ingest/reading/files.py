"""Source files, plain, compressed, or inside an archive, as streams of their content.

Takes a path; returns `Source`s, each of which opens as a stream of decompressed bytes, or raises one line
that states what is wrong with the file. Does not interpret the bytes.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import re
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, cast

from isal import igzip_lib

from dpro.errors import InputError, MissingExtra, first_line
from dpro.ingest.reading.values import int32
from dpro.limits import (
    BYTES_PER_VALUE,
    MAX_BLANK_BYTES,
    MAX_DECODED_EXPANSION,
    MAX_HEADER_BYTES,
    MAX_MEMBERS,
    MAX_WHOLE_BYTES,
    MIN_DECODED_BYTES,
    refuse_bomb,
)
from dpro.units import format_bytes
from dpro.words import counted

HEAD_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 19  # fits into a processor's cache together with its decoded content
_STORED_HEAD_BYTES = 1 << 18  # decompresses to at least HEAD_BYTES
_MAX_NAME = 120  # characters
_ZIP = b"PK\x03\x04"
_TAR_MAGIC = slice(257, 262)
# Errors of the standard library on a damaged archive; ValueError on invalid names and numbers.
_ARCHIVE_ERRORS = (
    *(zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, struct.error),
    *(NotImplementedError, RuntimeError, KeyError, ValueError, OverflowError),
)
_DAMAGE = (EOFError, zlib.error, *_ARCHIVE_ERRORS)


@dataclass(frozen=True, order=True)
class Source:
    """A file to import: a separate file, or a member of an archive.

    Attributes:
        label: its name in messages.
        path: the file, or the archive.
        member: name within the archive; empty for a separate file.
    """

    label: str
    path: Path
    member: str = ""

    @property
    def name(self) -> str:
        """The file's name without folders; for a member of an archive, one that is valid as a file name."""
        if not self.member:
            return self.path.name
        # Of a name that is too long, keep the end, which usually has the rank.
        name = PurePath(self.member.replace("\0", "")).name[-_MAX_NAME:]
        return "member" if name in ("", "..") else name

    def open(self) -> BinaryIO:
        """Open the decompressed content.

        Reading raises `EOFError` where the file is damaged, after all readable content.

        Raises:
            InputError: the file cannot be opened.
            MissingExtra: it needs a library that is not installed.
        """
        try:
            if self.member:
                stored, stored_bytes = _open_member(self.path, self.member)
                return decompressed(stored, self.label, stored_bytes)
            return decompressed(cast(BinaryIO, io.FileIO(self.path)), self.label, self.path.stat().st_size)
        except OSError as error:
            raise InputError(f"{self.label}: cannot be read ({error.strerror or error})") from error
        except _DAMAGE as error:
            raise InputError(
                f"{self.label}: damaged archive ({first_line(error)}); copy the file again"
            ) from error

    def head(self) -> bytes:
        """Return the first bytes, decompressed, up to where they can be read.

        Raises:
            InputError: the file cannot be opened.
            MissingExtra: it needs a library that is not installed.
        """
        head = bytearray()
        for block in blocks(self, []):
            head += block
            if len(head) >= HEAD_BYTES:
                break
        return bytes(head[:HEAD_BYTES])


def heads(path: Path) -> Iterator[tuple[Source, bytes]]:
    """Yield the files at a path, each with its first bytes.

    Those are the members of a `.zip`, `.tar` or compressed `.tar`, which is read once, else the file.

    Raises:
        InputError: the file cannot be opened, or is a damaged archive; raised after its readable members.
        MissingExtra: it needs a library that is not installed.
    """
    whole = Source(str(path), path)
    head = whole.head()
    if not _is_archive(head):
        yield whole, head
        return
    seen = set()
    try:
        for member, content in _members(whole):
            if member not in seen:
                seen.add(member)
                source = Source(f"{path}!{member}", path, member)
                yield source, _head_of_stored(content, source.label)
    except (OSError, MemoryError, *_DAMAGE) as error:
        after = f" after {counted(len(seen), 'file')}" if seen else ""
        raise InputError(
            f"{path}: damaged archive ({first_line(error)}){after}; copy the file again"
        ) from error


def goes_forward_only(path: Path) -> bool:
    """Return whether a file is a compressed tar, which must be read from its beginning for each member."""
    with path.open("rb") as file:
        start = file.read(_TAR_MAGIC.stop)
    return not _is_archive(start) and _is_archive(read_head(path))


def unpack(archive: Path, places: Mapping[str, Path]) -> None:
    """Write some members of an archive to files, as stored, in one pass; damaged ones in part.

    Args:
        places: target file by name of member.

    Raises:
        OSError: a file cannot be written.
    """
    left = dict(places)
    with contextlib.suppress(InputError, *_DAMAGE):
        for member, content in _members(Source(str(archive), archive)):
            if (place := left.pop(member, None)) is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with place.open("wb") as file:
                        _copy(content, cast(BinaryIO, file))
                except InputError:  # reading the member later reports it again
                    place.unlink()
                    return
            if not left:
                return


def blocks(source: Source, damage: list[str]) -> Iterator[bytes]:
    """Yield the content block by block, up to where it can be read.

    Args:
        damage: a reason is appended where the content ends early.

    Raises:
        InputError: the file cannot be opened, or the disk fails.
    """
    with source.open() as stream:
        raw = cast(io.BufferedReader, stream).raw  # unbuffered, since blocks are larger than the buffer
        try:
            while block := raw.read(_BLOCK_BYTES):
                yield block
        except _DAMAGE as error:
            damage.append(first_line(error))
        except OSError as error:
            raise InputError(f"{source.label}: cannot be read ({error.strerror or error})") from error


def read_bytes(path: Path) -> bytes:
    """Return the whole content of a file, decompressed.

    Raises:
        InputError: it cannot be read, is empty, is damaged, or takes too much memory for its size.
    """
    damage: list[str] = []
    pieces, read = [], 0
    for block in blocks(Source(str(path), path), damage):
        pieces.append(block)
        read += len(block)
        if read > MAX_WHOLE_BYTES:
            raise InputError(
                f"{path}: more than {format_bytes(MAX_WHOLE_BYTES)}, too large to read as a whole; split it"
            )
    content = b"".join(pieces)
    if damage:
        raise InputError(f"{path}: truncated or damaged ({damage[0]}); copy the file again")
    if not content:
        raise InputError(f"{path}: empty file; record it again")
    _refuse_many_values(content, path)
    return content


def _refuse_many_values(content: bytes, path: Path) -> None:
    """Raise if JSON would take too much memory when decoded; many small lists can be a bomb."""
    if len(content) * BYTES_PER_VALUE < MIN_DECODED_BYTES:
        return
    decoded_bytes = BYTES_PER_VALUE * sum(map(content.count, (b",", b"[", b"{")))
    stored_bytes = path.stat().st_size
    if decoded_bytes > max(MIN_DECODED_BYTES, MAX_DECODED_EXPANSION * stored_bytes):
        raise InputError(
            f"{path}: {format_bytes(stored_bytes)} would take some {format_bytes(decoded_bytes)} of memory, "
            "as no trace does; leave it out"
        )


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed, up to where they can be read.

    Raises:
        InputError: the file cannot be opened.
    """
    return Source(str(path), path).head()


def rank_of_name(name: str) -> int:
    """Return the rank in a file's name (`rank3`, `rank-3`, `worker3`); -1 where there is none."""
    match = re.search(r"(?:rank|worker)[-_ ]?(\d+)", name, re.IGNORECASE)
    return int32(match[1]) if match else -1


def _is_archive(head: bytes) -> bool:
    return head.startswith(_ZIP) or head[_TAR_MAGIC] == b"ustar"


class _Header(tarfile.TarInfo):
    """Header of a tar member; raises on one so long that it can only be a bomb."""

    _OF_THE_NEXT_MEMBER = (
        *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
        *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    )

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in self._OF_THE_NEXT_MEMBER and self.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return cast(tarfile.TarInfo, super()._proc_member(archive))  # type: ignore[misc]


def _members(archive: Source) -> Iterator[tuple[str, BinaryIO]]:
    """Yield each file in an archive and its stored bytes, which must be read before the next is requested."""
    with archive.open() as stream:
        if archive.head().startswith(_ZIP):
            with zipfile.ZipFile(archive.path) as opened:
                for number, entry in enumerate(opened.infolist()):
                    _refuse_many(number)
                    if not entry.is_dir():
                        yield entry.filename, cast(BinaryIO, opened.open(entry))
            return
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as tar:
            for number, info in enumerate(tar):
                _refuse_many(number)
                tar.members.clear()  # type: ignore[attr-defined]  # else they are all kept
                if info.isfile():
                    yield info.name, cast(BinaryIO, tar.extractfile(info))


def _refuse_many(number: int) -> None:
    if number >= MAX_MEMBERS:
        raise tarfile.ReadError(f"more than {MAX_MEMBERS} members")


def _head_of_stored(content: BinaryIO, label: str) -> bytes:
    stored = io.BytesIO()
    _copy(content, stored, _STORED_HEAD_BYTES)
    stored.seek(0)
    head = bytearray()
    with (
        contextlib.suppress(*_DAMAGE),
        decompressed(stored, label, _STORED_HEAD_BYTES) as stream,
    ):  # a long member is truncated here
        while len(head) < HEAD_BYTES and (block := stream.read(HEAD_BYTES)):
            head += block
    return bytes(head[:HEAD_BYTES])


def _copy(content: BinaryIO, target: BinaryIO, limit: int | None = None) -> None:
    """Copy readable content in small steps, since the step that meets damage is lost."""
    with contextlib.suppress(*_DAMAGE):
        while (limit is None or target.tell() < limit) and (piece := content.read(tarfile.RECORDSIZE)):
            target.write(piece)


def _open_member(path: Path, member: str) -> tuple[BinaryIO, int]:
    """Open a member of an archive as a seekable stream of its stored bytes; also return its size on disk."""
    with path.open("rb") as file:
        start = file.read(_TAR_MAGIC.stop)
    if start.startswith(_ZIP):
        archive = zipfile.ZipFile(path)
        return cast(BinaryIO, archive.open(member)), archive.getinfo(member).compress_size
    if start[_TAR_MAGIC] == b"ustar":
        tar = tarfile.open(path, "r:", tarinfo=_Header)  # noqa: SIM115 (closed with the stream)
        content = tar.extractfile(member)
        if content is None:  # a later member of that name is not a file
            raise KeyError(member)
        return cast(BinaryIO, content), path.stat().st_size
    return _spooled(path, member), path.stat().st_size


def _spooled(path: Path, member: str) -> BinaryIO:
    """Copy a member of a compressed tar to a temporary file, since such an archive is not seekable."""
    spool = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (closed with the stream)
    for name, content in _members(Source(str(path), path)):
        if name == member:
            _copy(content, spool)
            spool.seek(0)
            return spool
    raise KeyError(member)


# Streams of the content of compressed files, up to where damaged ones can be read.

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BLANKS = b"\0 \t\r\n"
_INPUT_BYTES = 1 << 17
_CAREFUL_BYTES = 64  # compressed bytes per step, to lose little before the damage


def decompressed(file: BinaryIO, label: str, stored_bytes: int) -> BinaryIO:
    """Return the content of a file that may be compressed (gzip, zstandard), as a stream bounded by `limits`.

    Raises:
        MissingExtra: it needs a library that is not installed.
    """
    start = file.read(len(_ZSTD))
    file.seek(0)
    content = _Gunzip(file) if start.startswith(_GZIP) else _Unzstd(file) if start == _ZSTD else file
    return io.BufferedReader(_Bounded(content, label, stored_bytes))


class _Stream(io.RawIOBase):
    """Content derived from a file; subclasses implement `read`."""

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
    """Content of a file, up to a long run of blanks, which is damage.

    Reading raises `InputError` where the content exceeds what a file of its size can hold.
    """

    def __init__(self, file: BinaryIO | io.RawIOBase, label: str, stored_bytes: int) -> None:
        self._file = file
        self._label = label
        self._stored_bytes = stored_bytes
        self._read_bytes = 0
        self._blank_bytes = 0  # length of the current run of blanks

    def read(self, size: int = -1, /) -> bytes:
        """Read at most `size` bytes, without the copy that `readinto` makes."""
        if size < 0:
            return self.readall()
        content = self._file.read(size) or b""
        self._read_bytes += len(content)
        refuse_bomb(self._label, self._read_bytes, self._stored_bytes)
        # Test the beginning first: it is enough for nearly all content.
        blank = not content[:64].strip(_BLANKS) and not content.strip(_BLANKS)
        self._blank_bytes = self._blank_bytes + len(content) if blank else 0
        if self._blank_bytes > MAX_BLANK_BYTES:
            raise EOFError(f"nothing but blanks or zeros for {format_bytes(MAX_BLANK_BYTES)}")
        return content


class _Gunzip(_Stream):
    """Content of all members of a gzip file; zeros and foreign bytes after the last are ignored."""

    _file: BinaryIO

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._engine = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        self._delivered = 0
        self._salvage: Iterator[bytes] | None = None
        self._kept = b""  # salvaged but not yet delivered

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
        """Continue with the next member; return whether there is one."""
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
    """Yield the content of a damaged gzip file after the bytes that were delivered already.

    The fast decoder loses a whole block of output at damage; this one reads again in small steps.

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
        if size < 0:
            return self.readall()
        try:
            return self._reader.read(size)
        except self._error as error:
            raise EOFError(f"damaged zstandard stream: {error}") from error
