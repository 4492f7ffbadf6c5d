"""Whether a folder is this user's own: nothing is read from, or written to, one that is somebody else's.

Runs inside the job, where only the standard library may be assumed.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress

NOBODY = 65534  # what a file server may take root for (`root_squash`)
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_own(folder: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder, no link to one, that this user owns and no other may write to."""
    with suppress(OSError):
        status = os.lstat(folder)
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & OTHERS_WRITE
        return private and owns(folder, status.st_uid)
    return False


def owns(folder: str | os.PathLike[str], owner: int) -> bool:
    """Whether the owner of a folder is this user, or whom its file server takes this user for.

    Root is a user like any other: what it does in somebody else's folder, that user can direct.
    """
    return owner == os.geteuid() or (owner == NOBODY and _known_as(folder) == owner)


def _known_as(folder: str | os.PathLike[str]) -> int:
    """The owner of what this user makes there; -1 where they cannot."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
    return -1
