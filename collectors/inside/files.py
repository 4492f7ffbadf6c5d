"""Files that others read while the job runs, there whole or not at all, and whose the folders are.

Runs inside the job, where only the standard library may be assumed.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a name to write a file under; the file gets its own name when the block ends well.

    Its time stamp is by this host's clock, as all else that is recorded: a file server's may differ.

    Args:
        path: its own name, which may be taken: it is replaced.

    Raises:
        OSError: the file cannot be renamed.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    yield temporary
    now_ns = time.time_ns()
    with suppress(OSError):
        os.utime(temporary, ns=(now_ns, now_ns))
    os.replace(temporary, path)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    with written_whole(path) as temporary:
        temporary.write_bytes(content)


def is_still(descriptor: int, identity: tuple[int, int]) -> bool:
    """Whether a descriptor is still that of a file: a job may close all, and reuse its number."""
    with suppress(OSError):
        return identity_of(descriptor) == identity
    return False


def identity_of(descriptor: int) -> tuple[int, int]:
    """Device and inode of an open file."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def stamp_of(path: Path) -> tuple[int, int]:
    """Return what changes when a file is made or replaced."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino


# Whether a folder is this user's own: nothing is read from, or written to, one of another user.

SQUASHED_ROOT = 65534  # the user that a file server may map root to (`root_squash`)
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_own(folder: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder, no link to one, that this user owns and no other may write to."""
    with suppress(OSError):
        status = os.lstat(folder)
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & OTHERS_WRITE
        return private and owns(folder, status.st_uid)
    return False


def owns(folder: str | os.PathLike[str], owner: int) -> bool:
    """Whether the owner of a folder is this user, or the user that its file server maps this user to.

    Root is a user like any other: the owner of a folder can direct what root does in it.
    """
    return owner == os.geteuid() or (owner == SQUASHED_ROOT and _known_as(folder) == owner)


def _known_as(folder: str | os.PathLike[str]) -> int:
    """The owner of what this user makes there; -1 where they cannot."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
    return -1
