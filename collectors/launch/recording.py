"""Recordings in progress: the files that a launcher keeps in a run while its job runs.

Reads a run directory; returns its launches, and whether their sidecars live. While a run is recorded, it has
for each launcher (one per node, or one per rank under `srun`):

    .recording/LAUNCH.json   the marker: locked by the sidecar for as long as it lives
    .raw/LAUNCH/             files of the recorder; only the user who records may enter

Both are removed once the tables are complete. A marker that no process locks belongs to a sidecar that was
killed (for example by a container that ended with the job): a command that reads the run can finish the
recording.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote_to_bytes

from dpro import folders
from dpro.collectors.inside.files import OTHERS_WRITE, owns
from dpro.errors import InputError, UsageError
from dpro.folders import made_whole, opened, refuse_link
from dpro.words import from_json

INJECT, _INSIDE = (Path(__file__).resolve().parents[1] / name for name in ("inject", "inside"))
MARKERS = folders.MARKERS
RAW = ".raw"
_NAME = re.compile(r"\w[\w.-]*")  # name of a launch
_SHARED = re.compile(r"\.?(control|wanted|windows-\w*)\.[\w.-]*")  # files shared by all launches
_LAUNCH = f"{INJECT}/launch="  # this and the next two are also in `inject/_dpro_autoload.py`
ALIAS, ARCHIVE = "_dpro_inside_the_job", "inside.zip"
COPY = "recorder"  # folder in that of a launch


@dataclass(frozen=True)
class Launch:
    """A launcher's part of a recording.

    Attributes:
        name: unique among the launchers of the run.
    """

    run: Path
    name: str

    @property
    def raw(self) -> Path:
        """Folder that the recorder writes to."""
        return self.run / RAW / self.name

    @property
    def marker(self) -> Path:
        """File whose lock shows that the sidecar lives."""
        return self.run / MARKERS / f"{self.name}.json"

    @property
    def inject(self) -> str:
        """Name on `PYTHONPATH` by which the recorder in the job finds this launch."""
        return _LAUNCH + quote(os.fsencode(self.raw), safe="")

    def facts(self) -> dict[str, Any]:
        """Read the launcher's facts: host, pid and start of the job, and its command.

        Raises:
            FileNotFoundError: the recording is over.
            InputError: the marker was not written by a launcher.
        """
        with _opened_marker(self.marker) as marker:
            try:
                facts: dict[str, Any] = from_json(marker.read())
                if _are_launcher_facts(facts):
                    return facts
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                pass
        raise InputError(f"{self.marker}: was not written by a launcher; remove it to read the run as it is")

    def log(self, line: str) -> None:
        """Append a line that becomes a warning of the run; ignored on a full disk, or if the run is gone."""
        with suppress(OSError), (self.raw / "log.txt").open("a", errors="backslashreplace") as log:
            log.write(line.replace("\n", " ") + "\n")

    def remove_raw(self) -> None:
        """Delete the files of the recorder; the tables must be complete.

        Raises:
            InputError: `.raw` is a link.
        """
        with suppress(FileNotFoundError), opened(self.raw.parent) as raw:
            shutil.rmtree(self.name, ignore_errors=True, dir_fd=raw)
            with suppress(OSError):
                left = os.listdir(raw)
                if all(map(_SHARED.fullmatch, left)):  # this was the last launcher's
                    for name in left:
                        os.unlink(name, dir_fd=raw)
                self.raw.parent.rmdir()

    def remove_marker(self) -> None:
        """Remove the marker, which ends the recording.

        Raises:
            InputError: `.recording` is a link.
        """
        with suppress(FileNotFoundError), opened(self.marker.parent) as markers:
            with suppress(FileNotFoundError):
                os.unlink(self.marker.name, dir_fd=markers)
            with suppress(OSError):
                self.marker.parent.rmdir()


def _are_launcher_facts(facts: dict[str, Any]) -> bool:
    """Return whether the facts of a marker have the types that a launcher writes.

    Raises:
        LookupError, TypeError, AttributeError: they do not.
    """
    host, pid, ticks = facts["host"], facts["pid"], facts["start_ticks"]
    place = [facts.get("clock", ""), facts.get("pid_namespace", "")]
    changes = facts.get("options", {}).get("apply", [])
    return (
        all(isinstance(text, str) for text in (host, *place))
        and "/" not in host
        and type(pid) is type(ticks) is int
        and isinstance(facts.get("command", []), list)
        and all(isinstance(change["edit"], str) for change in changes)
    )


def launch_on(python_path: str) -> Launch | None:
    """Return the launch named on a process's `PYTHONPATH`; None for none."""
    for entry in python_path.split(os.pathsep):
        if entry.startswith(_LAUNCH):
            raw = Path(os.fsdecode(unquote_to_bytes(entry.removeprefix(_LAUNCH))))
            return Launch(raw.parents[1], raw.name)
    return None


def launches(run: Path) -> list[Launch]:
    """Return the recordings of a run that are in progress.

    Raises:
        InputError: `.recording` or `.raw` is a link, or the name of a marker is not valid.
    """
    refuse_link(run / MARKERS)
    refuse_link(run / RAW)
    try:
        names = sorted(os.listdir(run / MARKERS))
    except (FileNotFoundError, NotADirectoryError):  # the recording is over, perhaps only just now
        return []
    launched = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    for name in launched:
        if not _NAME.fullmatch(name):
            raise InputError(f"{run / MARKERS}: {f'{name}.json'!a} is not the name of a recording; remove it")
    return [Launch(run, name) for name in launched]


@contextmanager
def _opened_marker(path: Path) -> Iterator[IO[bytes]]:
    """Open a marker to read, without following a link or blocking on a pipe."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as marker:
        yield marker


def is_locked(recording: Launch) -> bool:
    """Return whether the sidecar of a recording lives."""
    try:
        with _opened_marker(recording.marker) as marker:
            return folders.is_locked(marker)
    except OSError:
        return False


@contextmanager
def to_be_finished(recording: Launch) -> Iterator[bool]:
    """Take the lock of a recording whose sidecar is gone, so that other commands wait meanwhile.

    Yields:
        Whether this process is to finish it; false where another one is doing so, or just has.
    """
    with ExitStack() as stack:
        try:
            marker = stack.enter_context(_opened_marker(recording.marker))
            is_mine = _is_lockable(marker) and recording.marker.exists()
        except FileNotFoundError:
            is_mine = False
        yield is_mine


def _is_lockable(marker: IO[bytes]) -> bool:
    try:
        return folders.lock(marker, wait=False)
    except OSError:  # the file system does not support locks, so no process can hold one
        return True


# A copy of the code that runs inside the job, for containers without dpro: `recorder/` in the launcher's
# folder, placed on the job's `PYTHONPATH` behind dpro's installation, which wins where it exists. Python runs
# code on `PYTHONPATH` before the recorder can check its owner. So a copy is made only where no other user can
# replace it: every folder above belongs to this user or root, and no other user may rename its entries.


def write_copy(raw: Path, probes: Mapping[str, str]) -> None:
    """Copy the code that runs inside the job, if that is safe; only jobs in containers need the copy.

    Args:
        probes: files of extensions' probes, by the name under which the recorder loads them.
    """
    if not is_out_of_reach(raw) or os.pathsep in str(raw):
        return
    with suppress(OSError), made_whole(raw / COPY, mode=0o700) as copy:
        for path in sorted(INJECT.rglob("*")):
            if path.suffix in (".py", ".txt") or path.name == "METADATA":
                to = copy / path.relative_to(INJECT)
                to.parent.mkdir(0o700, exist_ok=True)
                shutil.copyfile(path, to)
        with zipfile.ZipFile(copy / ARCHIVE, "w") as archive:  # one file: a job may have a launcher per rank
            for name, file in {"": str(_INSIDE / "__init__.py"), **probes}.items():
                for path, to in _modules_of(Path(file), Path(ALIAS, name)):
                    archive.write(path, to)


def _modules_of(file: Path, name: Path) -> list[tuple[Path, Path]]:
    """Return the files of a module or package, each with its path in an archive where it has another name."""
    if file.name != "__init__.py":
        return [(file, name.with_suffix(".py"))]
    return [(path, name / path.relative_to(file.parent)) for path in sorted(file.parent.rglob("*.py"))]


def is_out_of_reach(folder: Path) -> bool:
    """Return whether no other user can replace a folder that belongs to this user and is closed to others."""
    with suppress(OSError):
        for above in folder.resolve(strict=True).parents:
            status = above.lstat()
            theirs = status.st_uid not in (0, os.geteuid())
            if theirs or (status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX):
                return False
        return True
    return False


# Only this user's own folders of a run directory may be changed, and nothing behind a link. A run may come
# from anywhere, so its names and links are never followed out of it.

PRIVATE = 0o700


def ensure_mine(folders: Iterable[Path], *, within: bool = True) -> None:
    """Raise unless folders of a run, where they exist, belong to this user.

    Args:
        within: whether everything below them must belong to this user, too.

    Raises:
        InputError: a folder belongs to another user, is a link, or contains a link or special file.
    """
    for folder in folders:
        with suppress(FileNotFoundError):
            _ensure_mine(folder)
            if within:
                _ensure_plain(folder)


def keep_others_out(run: Path, private: Path) -> None:
    """Ensure that no other user can replace a folder of a run or its content.

    A run that others may write to gets the sticky bit: they can add to it, but not rename or delete.

    Args:
        private: a folder in the run; made if needed.

    Raises:
        UsageError: one of them belongs to another user, is a link, or is on a file system without
            permissions.
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
            f"{run}: its file system does not support permissions, so other users could change files that "
            "the job loads; choose another folder with -o"
        )


def _ensure_mine(folder: Path) -> None:
    refuse_link(folder)
    owner = os.lstat(folder).st_uid
    if not owns(folder, owner):
        raise InputError(_foreign(folder, owner))


def _ensure_plain(folder: Path) -> None:
    """Raise unless a folder has only files and folders of its owner, at any depth."""
    owner = os.lstat(folder).st_uid
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # removed by a process that is just ending
                if not (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)):
                    raise InputError(
                        f"{entry.path}: is a link or special file, which a recording never has; remove it"
                    )
                if entry.stat(follow_symlinks=False).st_uid != owner:
                    raise InputError(_foreign(Path(entry.path), entry.stat(follow_symlinks=False).st_uid))
                if entry.is_dir(follow_symlinks=False):
                    _ensure_plain(Path(entry.path))


def _foreign(path: Path, owner: int) -> str:
    return (
        f"{path}: belongs to {_user_name(owner)}, not to {_user_name(os.geteuid())}: only its owner can "
        "record there "
        "or finish a recording; run dpro as that user, or use your own copy"
    )


def _user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
