"""Source files: plain, compressed, or inside an archive; their content as a stream.

In: a path. Out: `Source`s, each of which opens as a stream of decompressed bytes; or one line that says what
is wrong with the file. What the bytes mean is not its business.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, cast

from dpro.errors import InputError
from dpro.ingest.streams import decompressed

HEAD_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 19  # what fits a processor's cache together with what is made of it
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


def expand(path: Path) -> list[Source]:
    """The files that a path stands for: the members of a `.zip`, `.tar` or compressed `.tar`, else itself.

    Raises:
        InputError: the file cannot be opened, or is an archive without a readable list of members.
        MissingExtra: it needs a library that is not installed.
    """
    whole = Source(str(path), path)
    head = whole.head()
    try:
        if head.startswith(_ZIP):
            with zipfile.ZipFile(path) as archive:
                members = [info.filename for info in archive.infolist() if not info.is_dir()]
        elif head[_TAR_MAGIC] == b"ustar":
            members = _tar_members(whole)
        else:
            return [whole]
    except (OSError, *_DAMAGE) as error:
        raise InputError(f"{path}: damaged archive ({error}); copy the file again") from error
    return [Source(f"{path}!{member}", path, member) for member in sorted(set(members))]


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


def _tar_members(archive: Source) -> list[str]:
    """Names of the files in a tar; those of a truncated one as far as they can be read."""
    members: list[str] = []
    with archive.open() as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        try:
            members.extend(info.name for info in tar if info.isfile())
        except (EOFError, tarfile.TarError):
            if not members:
                raise
    return members


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
    with (
        decompressed(cast(BinaryIO, io.FileIO(path))) as stream,
        tarfile.open(fileobj=stream, mode="r|") as tar,
    ):
        content = next((tar.extractfile(info) for info in tar if info.name == member), None)
        if content is None:
            raise KeyError(member)
        with contextlib.suppress(EOFError, tarfile.TarError):  # a truncated archive: what there is of it
            shutil.copyfileobj(content, spool, tarfile.RECORDSIZE)  # small: the one that fails is lost
    spool.seek(0)
    return spool
