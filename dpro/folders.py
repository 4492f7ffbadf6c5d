"""Folders of a run, files and folders that are there whole or not at all, and locks on them.

In: a folder that may have come from anywhere, and that others may write to meanwhile. Out: a descriptor, that
stays that folder whatever is put in its place, and files in it. Nothing is read, written or removed through a
link that lies in a run. Every file and folder of dpro that others may read while it is written is made here;
what runs inside the job has `collectors/inside/files.py`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dpro.errors import InputError
from dpro.words import is_utf8


def refuse_undecodable(folder: Path) -> None:
    """Refuse a path that is not UTF-8, which no reader of tables takes.

    Raises:
        InputError: it is not.
    """
    if not is_utf8(os.path.realpath(folder)):
        raise InputError(f"{folder}: the path is not UTF-8, as that of a run has to be; rename what is not")


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
    """Open a folder as a descriptor.

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


def _temporary(name: str) -> str:
    """Return the name of a file of this thread that is not whole yet; other hosts may share its folder."""
    return f".{name}.{socket.gethostname()}.{threading.get_native_id()}.tmp"


@contextmanager
def written_whole(folder: Path, name: str, *, time_ns: int | None = None) -> Iterator[IO[bytes]]:
    """Open a file to write, which gets its name when the block ends well; otherwise nothing is left of it.

    Args:
        name: its name, which a file or a link may have: it is replaced. A device never is.
        time_ns: its time stamp; None for the time at which it is written.

    Raises:
        InputError: the folder is a symbolic link, or none; or what has the name is no file.
        OSError: the file cannot be written.
    """
    temporary = _temporary(name)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened(folder) as where:
        with suppress(FileNotFoundError):
            kind = stat.S_IFMT(os.lstat(name, dir_fd=where).st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFLNK):
                raise InputError(f"{folder / name}: is no file, and is not replaced by one; name another")
        with suppress(FileNotFoundError):  # of a killed thread that had this id
            os.unlink(temporary, dir_fd=where)
        try:
            with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=where), "wb") as file:
                yield file
                file.flush()
                if time_ns is not None:
                    os.utime(file.fileno(), ns=(time_ns, time_ns))
            os.replace(temporary, name, src_dir_fd=where, dst_dir_fd=where)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=where)
            raise


@contextmanager
def made_whole(folder: Path, *, within: Path | None = None, mode: int = 0o777) -> Iterator[Path]:
    """Make a folder to fill, which gets its name when the block ends well; otherwise nothing is left of it.

    Args:
        folder: where it is to be; there may be an empty folder.
        within: where it is until then, on the same file system; beside its place if None. It must exist.

    Raises:
        OSError: it cannot be made, or something else is in its place.
    """
    temporary = (within or folder.parent) / _temporary(folder.name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode)
    try:
        yield temporary
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def lock(file: int | IO[Any], *, wait: bool = True) -> bool:
    """Lock an open file or folder until all its descriptors are closed.

    Returns:
        Whether it is locked now: False where another process holds it.

    Raises:
        OSError: its file system cannot lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def is_locked(file: int | IO[Any]) -> bool:
    """Return whether another process holds the lock of an open file; others may ask at the same time.

    Raises:
        OSError: its file system cannot lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file or folder: one process after the other.

    Args:
        path: a folder, or a file, which is made if need be.

    Raises:
        OSError: it cannot be opened, or its file system cannot lock.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)
