"""Files that others read while the job runs: there whole or not at all.

Runs inside the job, where only the standard library may be assumed.
"""

from __future__ import annotations

import os
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

    Args:
        path: where; a file that is there is replaced.

    Raises:
        OSError: it cannot be written.
    """
    with written_whole(path) as temporary:
        temporary.write_bytes(content)


def is_still(descriptor: int, identity: tuple[int, int]) -> bool:
    """Whether a descriptor is still that of a file: a job may close all, and have its own under that number.

    Args:
        identity: of the file, as from `identity_of`.
    """
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
