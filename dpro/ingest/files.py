"""Source files: plain, compressed, or inside an archive; their content as a stream.

In: a path. Out: `Source`s, each of which opens as a stream of decompressed bytes; or one line that says what
is wrong with the file. What the bytes mean is not its business.
"""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, cast

from dpro.errors import InputError
from dpro.ingest.streams import decompressed

HEAD_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 19  # what fits a processor's cache together with what is made of it
_STORED_HEAD_BYTES = 1 << 18  # decompresses to as much as a head at least
_ZIP = b"PK\x03\x04"
_TAR_MAGIC = slice(257, 262)
_ARCHIVE_ERRORS = (zipfile.BadZipFile, tarfile.TarError, NotImplementedError, RuntimeError, KeyError)
_DAMAGE = (EOFError, zlib.error, *_ARCHIVE_ERRORS)


@dataclass(frozen=True, order=True)
class Source:
    """One file to import: a path of its own, or a member of an archive.

    Attributes:
        label: what to call it in messages.
        path: the file, or the archive.
        member: name within the archive, empty where there is none.
    """

    label: str
    path: Path
    member: str = ""

    @property
    def name(self) -> str:
        """The file's name without folders."""
        return PurePath(self.member).name if self.member else self.path.name

    def open(self) -> BinaryIO:
        """The content, decompressed.

        Reading raises `EOFError` where the file is damaged, after all that could be read.

        Raises:
            InputError: the file cannot be opened.
            MissingExtra: it needs a library that is not installed.
        """
        try:
            if self.member:
                return decompressed(_open_member(self.path, self.member))
            return decompressed(cast(BinaryIO, io.FileIO(self.path)))
        except OSError as error:
            raise InputError(f"{self.label}: cannot be read ({error.strerror or error})") from error
        except _DAMAGE as error:
            raise InputError(f"{self.label}: damaged archive ({error}); copy the file again") from error

    def head(self) -> bytes:
        """The first bytes, decompressed, as far as they can be read.

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
    """The files that a path stands for, each with its first bytes.

    Those are the members of a `.zip`, `.tar` or compressed `.tar`, which is gone through once, else the file.

    Raises:
        InputError: the file cannot be opened, or is a damaged archive: after what can be read of it.
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
                yield Source(f"{path}!{member}", path, member), _head_of_stored(content)
    except (OSError, *_DAMAGE) as error:
        after = f" after {len(seen)} files" if seen else ""
        raise InputError(f"{path}: damaged archive ({error}){after}; copy the file again") from error


def goes_forward_only(path: Path) -> bool:
    """Whether a file is an archive that must be read from its beginning for each member: a compressed tar."""
    with path.open("rb") as file:
        start = file.read(_TAR_MAGIC.stop)
    return not _is_archive(start) and _is_archive(read_head(path))


def unpack(archive: Path, places: Mapping[str, Path]) -> None:
    """Write some members of an archive to files, as they are stored, in one pass; damaged ones in part.

    Args:
        archive: the archive.
        places: where to write each, by the member's name.

    Raises:
        OSError: a file cannot be written.
    """
    left = dict(places)
    with contextlib.suppress(*_DAMAGE):
        for member, content in _members(Source(str(archive), archive)):
            if (place := left.pop(member, None)) is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as file:
                    _copy(content, cast(BinaryIO, file))
            if not left:
                return


def blocks(source: Source, damage: list[str]) -> Iterator[bytes]:
    """The content piece by piece, as far as it can be read.

    Args:
        source: the file.
        damage: what is wrong is appended where the content ends early.

    Raises:
        InputError: the file cannot be opened, or the disk fails.
    """
    with source.open() as stream:
        # Below the buffer, since blocks are larger than that; files in archives have read from theirs before.
        raw = stream.raw if type(stream) is io.BufferedReader else stream
        try:
            while block := raw.read(_BLOCK_BYTES):
                yield block
        except _DAMAGE as error:
            damage.append(str(error))
        except OSError as error:
            raise InputError(f"{source.label}: cannot be read ({error.strerror or error})") from error


def read_bytes(path: Path) -> bytes:
    """The whole content of a file, decompressed.

    Raises:
        InputError: it cannot be read, is empty, or is damaged.
    """
    damage: list[str] = []
    content = b"".join(blocks(Source(str(path), path), damage))
    if damage:
        raise InputError(f"{path}: truncated or damaged ({damage[0]}); copy the file again")
    if not content:
        raise InputError(f"{path}: empty file; record it again")
    return content


def read_head(path: Path) -> bytes:
    """The first bytes of a file, decompressed, as far as they can be read.

    Raises:
        InputError: the file cannot be opened.
    """
    return Source(str(path), path).head()


def rank_of_name(name: str) -> int:
    """The rank that a file's name tells (`rank3`, `rank-3`, `worker3`), -1 where it does not."""
    found = re.search(r"(?:rank|worker)[-_ ]?(\d+)", name, re.IGNORECASE)
    return int(found[1]) if found else -1


def _is_archive(head: bytes) -> bool:
    return head.startswith(_ZIP) or head[_TAR_MAGIC] == b"ustar"


def _members(archive: Source) -> Iterator[tuple[str, BinaryIO]]:
    """Each file in an archive and its bytes as stored, which are to be read before the next is asked for."""
    with archive.open() as stream:
        if archive.head().startswith(_ZIP):
            with zipfile.ZipFile(archive.path) as opened:
                for entry in opened.infolist():
                    if not entry.is_dir():
                        yield entry.filename, cast(BinaryIO, opened.open(entry))
            return
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for info in tar:
                if info.isfile():
                    yield info.name, cast(BinaryIO, tar.extractfile(info))


def _head_of_stored(content: BinaryIO) -> bytes:
    """The first bytes of a member, decompressed."""
    stored = io.BytesIO()
    _copy(content, stored, _STORED_HEAD_BYTES)
    stored.seek(0)
    head = bytearray()
    with contextlib.suppress(*_DAMAGE), decompressed(stored) as stream:  # it is cut, if long
        while len(head) < HEAD_BYTES and (block := stream.read(HEAD_BYTES)):
            head += block
    return bytes(head[:HEAD_BYTES])


def _copy(content: BinaryIO, target: BinaryIO, most: int | None = None) -> None:
    """Copy what can be read, in small steps: the one that meets damage is lost."""
    with contextlib.suppress(*_DAMAGE):
        while (most is None or target.tell() < most) and (piece := content.read(tarfile.RECORDSIZE)):
            target.write(piece)


def _open_member(path: Path, member: str) -> BinaryIO:
    """A member of an archive as a seekable stream of its bytes as stored."""
    with path.open("rb") as file:
        start = file.read(_TAR_MAGIC.stop)
    if start.startswith(_ZIP):
        return cast(BinaryIO, zipfile.ZipFile(path).open(member))
    if start[_TAR_MAGIC] == b"ustar":
        return cast(BinaryIO, tarfile.open(path, "r:").extractfile(member))
    return _spooled(path, member)


def _spooled(path: Path, member: str) -> BinaryIO:
    """A member of a compressed tar, in a temporary file: within the archive one can only go forward."""
    spool = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (closed with the stream)
    for name, content in _members(Source(str(path), path)):
        if name == member:
            _copy(content, spool)
            spool.seek(0)
            return spool
    raise KeyError(member)
