"""Whether a folder is this user's own: nothing is read from, or written to, one of another user.

Runs inside the job, where only the standard library may be assumed.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress

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
