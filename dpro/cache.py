"""Where dpro keeps what it can make again: imports, graphs, copies of what lies elsewhere.

In: what is to be kept. Out: a folder that only this user can read and write. What others could have put there
is not used: a folder of another user, or a link.
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
    """A folder of the user's cache, which is `$DPRO_CACHE` or else `~/.cache/dpro`; it is made if need be.

    Args:
        kept: what is kept in it, such as `graphs`; the folder's name.

    Raises:
        DproError: it cannot be made, is a link, or belongs to another user.
    """
    chosen = os.environ.get("DPRO_CACHE")
    try:
        root = Path(chosen) if chosen else Path.home() / ".cache" / "dpro"
    except RuntimeError as error:
        raise DproError("there is no home folder to keep things in: name a folder with DPRO_CACHE") from error
    folder = root / kept
    try:
        _own(root)
        if _own(folder) != _PRIVATE:  # an earlier version made it
            folder.chmod(_PRIVATE)
    except OSError as error:
        raise _not_used(folder, f"cannot be made ({error.strerror or error})") from error
    return folder


@functools.cache
def trusted_folder(kept: str) -> Path:
    """As `cache_folder`, of what may hold code: what others can have put there is removed.

    Returns:
        A path that stays this folder whatever is put in its place, for as long as the process runs.

    Raises:
        DproError: as `cache_folder`, or others may write to it.
        OSError: it cannot be opened.
    """
    folder = cache_folder(kept)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not _is_mine_alone(os.fstat(descriptor), stat.S_IFDIR):
        os.close(descriptor)
        raise _not_used(folder, "can be written to by others")
    for name in os.listdir(descriptor):
        with suppress(OSError):  # a folder, or gone
            if not _is_mine_alone(os.lstat(name, dir_fd=descriptor), stat.S_IFREG):
                os.unlink(name, dir_fd=descriptor)
    return Path(f"/proc/self/fd/{descriptor}")


def _is_mine_alone(status: os.stat_result, kind: int) -> bool:
    """Whether a file or folder is of this kind and this user, and no one else may write to it."""
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.geteuid() and not others_write


def keep_latest(folder: Path, pattern: str, count: int) -> None:
    """Remove all but the files that were used last; others may do the same meanwhile."""
    used: list[tuple[int, Path]] = []
    for file in folder.glob(pattern):
        with suppress(FileNotFoundError):
            used.append((file.stat().st_mtime_ns, file))
    for _, file in sorted(used, reverse=True)[count:]:
        file.unlink(missing_ok=True)


def remove_unused(folder: Path) -> None:
    """Remove the folders in a folder that `mark_used` has not seen for three months."""
    for kept in folder.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - kept.lstat().st_mtime > _UNUSED_S:
                shutil.rmtree(kept, ignore_errors=True)


@contextmanager
def folder_in_use(parent: Path, prefix: str, suffix: str = "") -> Iterator[Path]:
    """A folder for as long as it is used; such folders of processes that were killed are removed.

    A file in it is locked meanwhile: however its process ends, the system unlocks it.

    Raises:
        OSError: it cannot be made.
    """
    _remove_abandoned(parent, prefix, suffix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        lock = os.open(folder / _IN_USE, os.O_CREAT | os.O_RDWR, 0o600)
        with suppress(OSError):  # a file system without locks, on which nothing is taken for abandoned
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _IN_USE).exists():
            break
        os.close(lock)  # another command locked it first, and removed it
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
            except FileNotFoundError:  # just made, or by an earlier version
                if time.time() - folder.lstat().st_mtime > _UNUSED_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def mark_used(kept: Path) -> None:
    """Note that something kept is used now."""
    with suppress(OSError):  # gone, or a disk that cannot be written to
        os.utime(kept)


def _own(folder: Path) -> int:
    """Make a folder if need be, and return its mode; one that is not this user's is refused."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(_PRIVATE)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise _not_used(folder, "is a link" if stat.S_ISLNK(status.st_mode) else "is no folder")
    if status.st_uid != os.geteuid():
        raise _not_used(folder, "belongs to another user")
    return stat.S_IMODE(status.st_mode)


def _not_used(folder: Path, why: str) -> DproError:
    return DproError(f"{folder}: {why}, so nothing is kept there: name a folder of yours with DPRO_CACHE")
