"""Safe access to folders of a run, atomic creation of files and folders, and file locks.

Takes a folder of any origin, which other processes may write to at the same time; returns a descriptor, which
refers to that folder even if it is replaced, and files in the folder. Nothing is read, written or removed
through a symbolic link in a run. All files and folders that others may read during writing are made here,
except inside the job, where `collectors/inside/files.py` makes them.
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

MARKERS = ".recording"  # folder that a run has while it is recorded, and until it is finished


def refuse_undecodable(folder: Path) -> None:
    """Raise if a path is not UTF-8, since the Parquet readers accept no other.

    Raises:
        InputError: the path is not UTF-8.
    """
    if not is_utf8(os.path.realpath(folder)):
        raise InputError(f"{folder}: the path of a run must be UTF-8; rename the part that is not")


def refuse_link(folder: Path) -> None:
    """Raise if something other than a real folder is in the place of a folder of a run.

    Raises:
        InputError: the path is a symbolic link, or not a folder.
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
        raise InputError(f"{folder}: must be a folder in a run; remove it")


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Yield a folder as a descriptor, closed on exit.

    Raises:
        InputError: the path is a symbolic link, or not a folder.
        FileNotFoundError: the path does not exist.
    """
    refuse_link(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _temporary_name(name: str) -> str:
    """Return a name for an unfinished file, unique to this thread and host, since hosts may share folders."""
    return f".{name}.{socket.gethostname()}.{threading.get_native_id()}.tmp"


@contextmanager
def written_whole(folder: Path, name: str, *, time_ns: int | None = None) -> Iterator[IO[bytes]]:
    """Yield a file to write, which gets its name when the block succeeds; on an error it is removed.

    Args:
        name: final name; a file or link of that name is replaced, a device or folder never.
        time_ns: timestamp of the file; None for the time of writing.

    Raises:
        InputError: the folder is a symbolic link or not a folder, or the name belongs to something that is
            not a file.
        OSError: the file cannot be written.
    """
    temporary = _temporary_name(name)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened(folder) as where:
        with suppress(FileNotFoundError):
            kind = stat.S_IFMT(os.lstat(name, dir_fd=where).st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFLNK):
                raise InputError(f"{folder / name}: is not a file, and is not replaced by one; name another")
        with suppress(FileNotFoundError):  # left by a killed thread with this id
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
    """Yield a folder to fill, which gets its name when the block succeeds; on an error it is removed.

    Args:
        folder: final path; an empty folder there is replaced.
        within: existing parent of the unfinished folder, on the same file system; None for the final parent.
        mode: permissions of the folder, before the umask.

    Raises:
        OSError: the folder cannot be created, or its path is occupied.
    """
    temporary = (within or folder.parent) / _temporary_name(folder.name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode)
    try:
        yield temporary
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def lock(file: int | IO[Any], *, wait: bool = True) -> bool:
    """Lock an open file or folder until all its descriptors are closed.

    Args:
        wait: whether to wait while another process holds the lock.

    Returns:
        Whether the lock was taken; False only without `wait`, if another process holds it.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def is_locked(file: int | IO[Any]) -> bool:
    """Return whether another process holds the lock of an open file; callers do not block each other.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file or folder inside the block, waiting for it first.

    Args:
        path: a folder, or a file, which is created if missing.

    Raises:
        OSError: the path cannot be opened, or its file system does not support locks.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)
