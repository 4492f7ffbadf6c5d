"""What of a run directory may be changed: only this user's own folders, and nothing that a link leads to.

In: folders of a run directory, made by any user. Out: nothing, or an error that says what is wrong with them.
A run may have come from anywhere: what its names and links say is never followed out of it.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dpro.collectors.inside.files import OTHERS_WRITE, owns
from dpro.errors import InputError, UsageError
from dpro.folders import refuse_link

PRIVATE = 0o700


def ensure_mine(folders: Iterable[Path], *, within: bool = True) -> None:
    """Hold folders of a run to be this user's, where they exist.

    Args:
        within: whether what is in them has to be, too.

    Raises:
        InputError: one is another user's, a link, or holds a link or something else than files and folders.
    """
    for folder in folders:
        with suppress(FileNotFoundError):
            _ensure_mine(folder)
            if within:
                _ensure_plain(folder)


def keep_others_out(run: Path, private: Path) -> None:
    """Ensure that no other user can replace a folder of a run, or what it holds.

    Where others may write to the run, it gets the sticky bit: they can add to it, and no more.

    Args:
        private: a folder in it; it is made if need be.

    Raises:
        UsageError: one of them is another user's, a link, or on a file system that keeps no permissions.
        OSError: it cannot be made.
    """
    try:
        _ensure_mine(run)
        if run.stat().st_mode & OTHERS_WRITE:
            run.chmod(stat.S_IMODE(run.stat().st_mode) | stat.S_ISVTX)
        with suppress(FileExistsError):
            private.mkdir(PRIVATE)
        _ensure_mine(private)
    except InputError as error:
        raise UsageError(str(error)) from error
    if stat.S_IMODE(private.stat().st_mode) != PRIVATE:
        private.chmod(PRIVATE)
    mode = run.stat().st_mode
    if private.stat().st_mode & OTHERS_WRITE or (mode & OTHERS_WRITE and not mode & stat.S_ISVTX):
        raise UsageError(
            f"{run}: its file system keeps no permissions, so that others could change what the job reads "
            "there; name a folder elsewhere with -o"
        )


def _ensure_mine(folder: Path) -> None:
    refuse_link(folder)
    owner = os.lstat(folder).st_uid
    if not owns(folder, owner):
        raise InputError(_foreign(folder, owner))


def _ensure_plain(folder: Path) -> None:
    """Hold all that a folder holds to be files and folders of its owner."""
    owner = os.lstat(folder).st_uid
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # of a process that still ends
                if not (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)):
                    raise InputError(
                        f"{entry.path}: is a link or no plain file, which no recording has; remove it"
                    )
                if entry.stat(follow_symlinks=False).st_uid != owner:
                    raise InputError(_foreign(Path(entry.path), entry.stat(follow_symlinks=False).st_uid))
                if entry.is_dir(follow_symlinks=False):
                    _ensure_plain(Path(entry.path))


def _foreign(path: Path, owner: int) -> str:
    return (
        f"{path}: belongs to {_name(owner)}, and this is {_name(os.geteuid())}: only its owner records there "
        "or finishes a recording; work as that user, or on a copy of your own"
    )


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
