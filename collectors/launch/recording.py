"""The recordings of a run that are not over: what a launcher leaves in it while its job runs.

In: a run directory. Out: its launches, and whether their sidecars live. While a run is recorded it holds, for
each launcher (one per node, or one per rank under `srun`):

    .recording/LAUNCH.json   the marker: locked by the sidecar for as long as it lives
    .raw/LAUNCH/             what the recorder writes; only the user who records may enter it

Both go when the tables are whole. A marker that no process locks is of a sidecar that was killed (a container
that ended with the job, say): its recording can be finished by a command that reads the run.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import stat
import zipfile
from collections.abc import Iterable, Iterator
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
MARKERS = ".recording"
RAW = ".raw"
_NAME = re.compile(r"\w[\w.-]*")  # of a launch
_SHARED = re.compile(r"\.?(control|wanted|windows-\w*)\.[\w.-]*")  # what the processes of all launches share
_LAUNCH = f"{INJECT}/launch="  # see `inject/_dpro_autoload.py`, as for the next two
ALIAS, ARCHIVE = "_dpro_inside_the_job", "inside.zip"
COPY = "recorder"  # in the folder of a launch


@dataclass(frozen=True)
class Launch:
    """One launcher's part of a recording.

    Attributes:
        name: unique among the launchers of the run.
    """

    run: Path
    name: str

    @property
    def raw(self) -> Path:
        """The folder the recorder writes to."""
        return self.run / RAW / self.name

    @property
    def marker(self) -> Path:
        """The file whose lock says that the sidecar lives."""
        return self.run / MARKERS / f"{self.name}.json"

    @property
    def inject(self) -> str:
        """The name on `PYTHONPATH` by which the recorder in the job finds this launch."""
        return _LAUNCH + quote(os.fsencode(self.raw), safe="")

    def facts(self) -> dict[str, Any]:
        """What the launcher knew: host, pid and start of the job, and its command.

        Raises:
            FileNotFoundError: the recording is over.
            InputError: the marker is no launcher's.
        """
        with _opened_marker(self.marker) as marker:
            try:
                facts: dict[str, Any] = from_json(marker.read())
                if _is_a_launchers(facts):
                    return facts
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                pass
        raise InputError(
            f"{self.marker}: is not what a launcher writes; remove it, and read the run as it is"
        )

    def log(self, line: str) -> None:
        """Write a line that becomes a warning of the run, if there is room and the run is still there."""
        with suppress(OSError), (self.raw / "log.txt").open("a", errors="backslashreplace") as log:
            log.write(line.replace("\n", " ") + "\n")

    def remove_raw(self) -> None:
        """Delete what the recorder wrote: its tables are whole.

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
        """Say that the recording is over.

        Raises:
            InputError: `.recording` is a link.
        """
        with suppress(FileNotFoundError), opened(self.marker.parent) as markers:
            with suppress(FileNotFoundError):
                os.unlink(self.marker.name, dir_fd=markers)
            with suppress(OSError):
                self.marker.parent.rmdir()


def _is_a_launchers(facts: dict[str, Any]) -> bool:
    """Whether the facts of a marker are of the types that a launcher writes.

    Raises:
        LookupError, TypeError, AttributeError: they are not.
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
    """The launch that a process is recorded by, from its `PYTHONPATH`; None for none."""
    for entry in python_path.split(os.pathsep):
        if entry.startswith(_LAUNCH):
            raw = Path(os.fsdecode(unquote_to_bytes(entry.removeprefix(_LAUNCH))))
            return Launch(raw.parents[1], raw.name)
    return None


def launches(run: Path) -> list[Launch]:
    """The recordings of a run that are not over.

    Raises:
        InputError: its folders of them are links, or a marker has a name that no launch has.
    """
    refuse_link(run / MARKERS)
    refuse_link(run / RAW)
    try:
        names = sorted(os.listdir(run / MARKERS))
    except (FileNotFoundError, NotADirectoryError):  # over, perhaps only just now
        return []
    launched = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    for name in launched:
        if not _NAME.fullmatch(name):
            raise InputError(
                f"{run / MARKERS}: {f'{name}.json'!a} is no name that a recording has; remove it"
            )
    return [Launch(run, name) for name in launched]


@contextmanager
def _opened_marker(path: Path) -> Iterator[IO[bytes]]:
    """A marker to read; neither a link nor a pipe is waited for or followed."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as marker:
        yield marker


def is_locked(recording: Launch) -> bool:
    """Whether the sidecar of a recording lives."""
    try:
        with _opened_marker(recording.marker) as marker:
            return folders.is_locked(marker)
    except OSError:
        return False


@contextmanager
def to_be_finished(recording: Launch) -> Iterator[bool]:
    """Hold the lock of a recording whose sidecar is gone, as it would: other commands wait meanwhile.

    Yields:
        Whether it is this process's to finish; not where another one does so, or just has.
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
    except OSError:  # its file system cannot lock, so there is no process to wait for
        return True


# A copy of what runs inside the job, for containers that dpro is not in: `recorder/` in the launcher's
# folder, to be put on the job's `PYTHONPATH` behind the folder of dpro's installation, which comes first
# wherever it exists. What lies on `PYTHONPATH` is run before any code of ours can look whose it is. So there
# is a copy only where no other user can put something in its place: every folder above it belongs to this
# user or to root, and lets no other user rename what it holds.


def write_copy(raw: Path) -> None:
    """Copy what runs inside the job, where that is safe; a job without containers does not need it."""
    if not is_out_of_reach(raw) or os.pathsep in str(raw):
        return
    with suppress(OSError), made_whole(raw / COPY, mode=0o700) as copy:
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


# What of a run directory may be changed: only this user's own folders, and nothing that a link leads to. A
# run may have come from anywhere: what its names and links say is never followed out of it.

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
            f"{run}: its file system does not support permissions, so other users could change files that "
            "the job loads; choose another folder with -o"
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
                        f"{entry.path}: is a link or special file, which a recording never has; remove it"
                    )
                if entry.stat(follow_symlinks=False).st_uid != owner:
                    raise InputError(_foreign(Path(entry.path), entry.stat(follow_symlinks=False).st_uid))
                if entry.is_dir(follow_symlinks=False):
                    _ensure_plain(Path(entry.path))


def _foreign(path: Path, owner: int) -> str:
    return (
        f"{path}: belongs to {_name(owner)}, not to {_name(os.geteuid())}: only its owner can record there "
        "or finish a recording; run dpro as that user, or use your own copy"
    )


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
