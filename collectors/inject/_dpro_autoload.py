"""Loads the recorder into processes that import torch: PyTorch calls `load`, the entry point of this folder.

The job's `PYTHONPATH` lists this folder and a path in it that does not exist: `launch=` and the quoted path
of the folder that the launcher made for the job's processes. So the job runs the code of the installed dpro.
Where that installation is missing, as in a container, a copy of this folder in the launcher's folder takes
its place, and is on `PYTHONPATH` only where no other user can replace it. Runs inside the job, with any
Python that PyTorch supports.
"""

import os
import sys

ALIAS = "_dpro_inside_the_job"  # the recorder's package name in the job's processes
LAUNCH = "launch="
ARCHIVE = "inside.zip"  # the recorder; beside this file only in a copy


def load() -> None:
    """Install the recorder once; log any failure instead of raising it into the job."""
    if ALIAS in sys.modules:  # Python 3.9 calls an entry point as often as it finds it
        return
    launch = ""
    try:
        here = os.path.dirname(os.path.abspath(__file__))
        archive = os.path.join(here, ARCHIVE)
        launch = os.path.dirname(here) if os.path.exists(archive) else _launch()
        if launch:
            _install(launch, archive)
    except Exception as error:
        try:
            if os.lstat(launch).st_uid == os.geteuid():
                with open(os.path.join(launch, "log.txt"), "a") as log:
                    log.write(f"the recorder could not be loaded: {error!r}\n")
        except OSError:
            pass


def _launch() -> str:
    """Return the folder that the launcher made; empty where `sys.path` names none."""
    from urllib.parse import unquote_to_bytes

    begins = os.path.join(os.path.dirname(__file__), LAUNCH)
    folders = [entry[len(begins) :] for entry in sys.path if entry.startswith(begins)]
    return os.fsdecode(unquote_to_bytes(folders[0])) if folders else ""


def _install(launch: str, archive: str) -> None:
    import importlib.machinery
    import importlib.util

    if os.path.exists(archive):
        if not (_is_private(launch) and _is_private(os.path.dirname(archive))):
            raise PermissionError(f"{launch} does not belong to this user")
        spec = importlib.machinery.PathFinder.find_spec(ALIAS, [archive])
    else:
        package = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "inside")
        spec = importlib.util.spec_from_file_location(ALIAS, os.path.join(package, "__init__.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[ALIAS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[ALIAS])
    importlib.import_module(f"{ALIAS}.hooks").install(launch)


def _is_private(folder: str) -> bool:
    """Return whether `folder` is a directory, not a link, of this user and closed to all others."""
    import stat

    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
