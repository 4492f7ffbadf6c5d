"""The cache of what dpro can make again: imports, graphs, compiled loops, copies of remote files.

Takes the name of what is kept; returns a folder that only this user can read and write. Symbolic links and
folders of other users are refused, since their content cannot be trusted.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dpro.errors import DproError

_PRIVATE = 0o700
_UNUSED_S = 90 * 86_400
_IN_USE = ".in-use"


def cache_folder(kept: str) -> Path:
    """Return a folder of the user's cache (`$DPRO_CACHE`, else `~/.cache/dpro`), creating it if missing.

    Args:
        kept: name of the folder, after its content: `graphs`.

    Raises:
        DproError: the folder cannot be created, is a link, or belongs to another user.
    """
    chosen = os.environ.get("DPRO_CACHE")
    try:
        root = Path(chosen) if chosen else Path.home() / ".cache" / "dpro"
    except RuntimeError as error:
        raise DproError("there is no home folder for the cache: set DPRO_CACHE to a folder") from error
    folder = root / kept
    try:
        _ensure_own_folder(root)
        if _ensure_own_folder(folder) != _PRIVATE:  # an earlier version made it
            folder.chmod(_PRIVATE)
    except OSError as error:
        raise _refusal(folder, f"cannot be made ({error.strerror or error})") from error
    return folder


@functools.cache
def trusted_folder(kept: str) -> Path:
    """Return a cache folder that may contain code; delete any file in it that other users could have written.

    Returns:
        A path through an open descriptor: it refers to this folder until the process ends, even if the
        folder is replaced.

    Raises:
        DproError: `cache_folder` refuses the folder, or other users may write to it.
        OSError: the folder cannot be opened.
    """
    folder = cache_folder(kept)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not _is_mine_alone(os.fstat(descriptor), stat.S_IFDIR):
        os.close(descriptor)
        raise _refusal(folder, "can be written to by others")
    for name in os.listdir(descriptor):
        with suppress(OSError):  # a folder, or gone
            if not _is_mine_alone(os.lstat(name, dir_fd=descriptor), stat.S_IFREG):
                os.unlink(name, dir_fd=descriptor)
    return Path(f"/proc/self/fd/{descriptor}")


def _is_mine_alone(status: os.stat_result, kind: int) -> bool:
    """Return whether a file is of this kind, belongs to this user, and is not writable by others."""
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.geteuid() and not others_write


def keep_latest(folder: Path, pattern: str, count: int) -> None:
    """Remove all but the `count` last-used files that match `pattern`; safe against concurrent removal."""
    used: list[tuple[int, Path]] = []
    for file in folder.glob(pattern):
        with suppress(FileNotFoundError):
            used.append((file.stat().st_mtime_ns, file))
    for _, file in sorted(used, reverse=True)[count:]:
        file.unlink(missing_ok=True)


def remove_unused(folder: Path) -> None:
    """Remove the subfolders that were last marked by `mark_used` more than three months ago."""
    for kept in folder.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - kept.lstat().st_mtime > _UNUSED_S:
                shutil.rmtree(kept, ignore_errors=True)


@contextmanager
def folder_in_use(parent: Path, prefix: str, suffix: str = "") -> Iterator[Path]:
    """Yield a temporary folder, removed on exit; also remove those that killed processes left behind.

    A file in the folder is locked while it is in use. The system releases the lock however the process ends.

    Raises:
        OSError: the folder cannot be created.
    """
    _remove_abandoned(parent, prefix, suffix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        lock = os.open(folder / _IN_USE, os.O_CREAT | os.O_RDWR, 0o600)
        with suppress(OSError):  # a file system without locks, where no folder counts as abandoned
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _IN_USE).exists():
            break
        os.close(lock)  # another command took the new folder for abandoned and removed it
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(parent: Path, prefix: str, suffix: str) -> None:
    for folder in list(parent.iterdir()):
        if not (folder.name.startswith(prefix) and folder.name.endswith(suffix)):
            continue
        with suppress(OSError):  # locked, or gone
            try:
                lock = os.open(folder / _IN_USE, os.O_RDWR | os.O_NOFOLLOW)
            except FileNotFoundError:  # a folder just created, or one of an earlier version
                if time.time() - folder.lstat().st_mtime > _UNUSED_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def mark_used(kept: Path) -> None:
    """Set the modification time of a cached file or folder to now."""
    with suppress(OSError):  # gone, or on a read-only disk
        os.utime(kept)


def _ensure_own_folder(folder: Path) -> int:
    """Create a folder if missing and return its mode; refuse a link, a file, or another user's folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(_PRIVATE)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise _refusal(folder, "is a link" if stat.S_ISLNK(status.st_mode) else "is not a folder")
    if status.st_uid != os.geteuid():
        raise _refusal(folder, "belongs to another user")
    return stat.S_IMODE(status.st_mode)


def _refusal(folder: Path, why: str) -> DproError:
    return DproError(f"{folder}: {why}, so it is not used as a cache: set DPRO_CACHE to a folder of yours")
