"""Folders of a run: nothing is read, written or removed through a link that lies in one.

In: a folder that may have come from anywhere, and that others may write to meanwhile. Out: a descriptor, that
stays that folder whatever is put in its place, or a file in it that is there whole or not at all.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dpro.errors import InputError


def refuse_link(folder: Path) -> None:
    """Hold a folder of a run to be one, if it exists.

    Raises:
        InputError: it is a symbolic link, or no folder.
    """
    try:
        mode = os.lstat(folder).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(mode):
        raise InputError(
            f"{folder}: is a symbolic link, and nothing is read, written or removed through links of a run; "
            "put what it names in its place, or remove it"
        )
    if not stat.S_ISDIR(mode):
        raise InputError(f"{folder}: is no folder, as it is in a run; remove it")


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A folder as a descriptor.

    Raises:
        InputError: it is a symbolic link, or no folder.
        FileNotFoundError: there is none.
    """
    refuse_link(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def written_whole(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """A file to write, which gets its name when the block ends well.

    Args:
        folder: where it is to be.
        name: its name, which may be taken: it is replaced.

    Raises:
        InputError: the folder is a symbolic link, or none.
        OSError: the file cannot be written.
    """
    temporary = f".{name}.{os.getpid()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened(folder) as where:
        with suppress(FileNotFoundError):  # of a killed process that had this pid
            os.unlink(temporary, dir_fd=where)
        with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=where), "wb") as file:
            yield file
        os.replace(temporary, name, src_dir_fd=where, dst_dir_fd=where)
