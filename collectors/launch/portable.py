"""A copy of what runs inside the job, in the launcher's own folder: for containers that dpro is not in.

In: the folder of a launch. Out: `recorder/` in it, to be put on the job's `PYTHONPATH` behind the folder of
dpro's installation, which comes first wherever it exists. What lies on `PYTHONPATH` is run before any code of
ours can look whose it is. So there is a copy only where no other user can put something in its place: every
folder above it belongs to this user or to root, and lets no other user rename what it holds.
"""

from __future__ import annotations

import os
import shutil
import stat
import zipfile
from contextlib import suppress
from pathlib import Path

from dpro.collectors.inside.own import OTHERS_WRITE
from dpro.folders import made_whole

_COLLECTORS = Path(__file__).resolve().parents[1]
INJECT = _COLLECTORS / "inject"
COPY = "recorder"  # in the folder of a launch
ALIAS, ARCHIVE = "_dpro_inside_the_job", "inside.zip"  # as in `inject/_dpro_autoload.py`
_INSIDE = _COLLECTORS / "inside"


def write_copy(raw: Path) -> None:
    """Copy what runs inside the job, where that is safe; a job without containers does not need it."""
    if not is_out_of_reach(raw) or os.pathsep in str(raw):
        return
    with suppress(OSError), made_whole(raw / COPY, mode=0o700) as copy:
        _fill(copy)


def _fill(copy: Path) -> None:
    for path in sorted(INJECT.rglob("*")):
        if path.suffix in (".py", ".txt") or path.name == "METADATA":
            to = copy / path.relative_to(INJECT)
            to.parent.mkdir(0o700, exist_ok=True)
            shutil.copyfile(path, to)
    with zipfile.ZipFile(copy / ARCHIVE, "w") as archive:  # one file: there may be a launcher per rank
        for path in sorted(_INSIDE.rglob("*.py")):
            archive.write(path, Path(ALIAS, path.relative_to(_INSIDE)))


def is_out_of_reach(folder: Path) -> bool:
    """Whether no other user can put something in the place of a folder, of this user and closed to others."""
    with suppress(OSError):
        for above in folder.resolve(strict=True).parents:
            status = above.lstat()
            theirs = status.st_uid not in (0, os.geteuid())
            if theirs or (status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX):
                return False
        return True
    return False
