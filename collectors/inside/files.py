"""What the job and observers outside it share: files, there whole or not at all, whose they are, and names.

Runs inside the job, where only the standard library may be assumed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, takewhile
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
    refuse_beyond_limit(len(content))
    with written_whole(path) as temporary:
        _write_all(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, content)


LARGEST = 1 << 30  # bytes: no file of ours has more


def refuse_beyond_limit(size: int = LARGEST) -> None:
    """Refuse to write a file that is larger than this process may write: the kernel would send it SIGXFSZ.

    Raises:
        OSError: it is.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= most < size:  # -1 for no limit
        raise OSError(errno.EFBIG, f"files of this process may have {most} bytes at most")


def append_lines(path: Path, *lines: str) -> None:
    """Add lines to the end of a file, which is made where it is missing.

    Raises:
        OSError: it cannot be written.
    """
    content = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
    _write_all(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, content)


def _write_all(path: Path, flags: int, content: bytes) -> None:
    file = OwnDescriptor(path, flags, 0o666)
    try:
        at = os.fstat(file.number).st_size
        while content:
            written = file.write(content, at)
            content, at = content[written:], at + written
    finally:
        file.close()


_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of Linux


class OwnDescriptor:
    """A file that we opened, by its number, of which no more is assumed than the kernel says at each use.

    A job may close all descriptors, as daemons do, and open a file of its own that gets the number of ours.
    So this has no finaliser, which would close whatever is there by then.
    """

    def __init__(self, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> None:
        """Open a file.

        Raises:
            OSError: it cannot be opened.
        """
        self.number = out_of_the_way(os.open(path, flags | os.O_CLOEXEC, mode))
        self._identity = identity_of(self.number)

    def is_ours(self) -> bool:
        """Whether the number is still that of our file."""
        with suppress(OSError):
            return identity_of(self.number) == self._identity
        return False

    def write(self, content: bytes | bytearray, at: int) -> int:
        """Write what fits; returns how many bytes did.

        Args:
            at: the offset; of a file opened to append, its end.

        Raises:
            OSError: it is not ours any more; or it cannot be written, or not grow so far: where a job limits
                the size of its files, the kernel would send it a signal.
        """
        if not self.is_ours():
            raise OSError(errno.EBADF, "the job closed a file descriptor of the recorder")
        refuse_beyond_limit(at + len(content))
        return os.pwrite(self.number, content, at)

    def reserve(self, at: int, length: int) -> None:
        """Have blocks taken for bytes that follow, where the file system can; the file gets no longer.

        Raises:
            OSError: the disk is full.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        offsets = ctypes.c_int64(at), ctypes.c_int64(length)
        if self.is_ours() and libc.fallocate64(self.number, _KEEP_SIZE, *offsets) != 0:
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(number, os.strerror(number))

    def read(self, longest: int) -> bytes:
        """The first bytes of the file.

        Raises:
            OSError: it is not ours any more, or cannot be read.
        """
        if not self.is_ours():
            raise OSError(errno.EBADF, "the job closed a file descriptor of the recorder")
        return os.pread(self.number, longest, 0)

    def reopened(self, path: Path) -> OwnDescriptor:
        """Open the file anew, where the job has closed all descriptors.

        Raises:
            OSError: it is no longer there, or another one.
        """
        file = OwnDescriptor(path, os.O_RDWR)
        if file._identity != self._identity:
            file.close()
            raise OSError(errno.ESTALE, f"{path} is another file now")
        return file

    def close(self) -> None:
        """Close it, if it is ours."""
        if self.is_ours():
            os.close(self.number)


HIGH = 512  # descriptors from here on: a job that opens files gets the numbers that it would without us


def out_of_the_way(descriptor: int) -> int:
    """Give a descriptor a high number, where the process may have it; returns its number now."""
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH)
    except OSError:  # its limit is lower, or none is left
        return descriptor
    os.close(descriptor)
    return high


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


# Names that both the job and observers outside it use: of files, of mesh axes, of pipelines' operations.

WANTED = "wanted.json"  # beside the folders of the launches: changes when an observer wants the latest calls
REQUESTED = "control.json"  # beside them, too: the latest requests, oldest first
IMPORTED = "imported"  # in the folder of a launch: some process of the job has imported torch
SHOWN = "calls-"  # what names of dumps for them begin with
LACKS = "lacks.txt"  # what the PyTorch of a process does not record, a sentence a line
STACKS = "stacks.txt"  # what a handler in C writes where a process cannot answer
STACKS_BY = "stacks.json"  # by which signal to which thread, and under which number the file is open there
LAST = "last"  # there once the interpreter goes and all calls are saved: none came later
STALL = "stall"  # what dumps of calls are called that were made while no step ended
CHECKPOINTS = "checkpoints.jsonl"  # saves and loads of a process, a line each
REQUESTS = "requests.jsonl"  # requests that a process served, a line each when scheduled and when ended
ACTOR = "actor-"  # how names begin, in the folder of the launch, of what says when an actor ran which method
BUSY = ".busy"  # how the name ends of the file with a byte that says whether the actor is in a call
ENGINE = "engine.json"  # which engine of a server a process drives
ENGINES = "engine-"  # how names of folders begin, in that of the launch, of engines in a process without rank
PIPELINE = "pipeline.json"  # which part of the model a process of a pipeline has
STARTED = "started.json"  # when a process had got how far on its way to the first step
PARTS = "start_parts.jsonl"  # imports and process groups of a process on that way, a line each
EXIT = "exit"  # renamed, when a process exits, to this, a hyphen, and the exit code as a byte, none for 0
RAISED = "raised.json"  # the exception that ended a process
MEMORY = "memory.jsonl"  # allocations that were refused to a process, a line each
FAILED = (
    "raised-"  # how names begin of the same, in the folder of the launch, of a process that had not trained
)
TENSOR_AXES = ("tp", "tensor", "tensor_parallel", "model", "model_parallel", "mp")  # of meshes of devices

# Operations of pipelines, as records number them. The loss of a micro-batch belongs to its forward.
FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
LOSS = "loss"
OPERATIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, LOSS)
PRETENDED = "pretended"  # what files of a pretended rank's calls are called
MAIL = "mail"  # in the folder of a launch: what pretended ranks leave for each other
WAITS = "waits-"  # how names begin there of ranks that wait for another's mail
REPLACED = "replaced.json"  # the program that a process replaced itself by (`exec`), and when


def image_folder(launch: Path, host: str, pid: int, image: int) -> Path:
    """The folder of one of the programs that a process has been (`exec`) and that recorded.

    Args:
        image: the program's number, from 0.
    """
    return launch / f"{host}-{pid}{f'_{image}' * (image > 0)}"


def next_image(launch: Path, host: str, pid: int) -> int:
    """Return how many programs a process has been that recorded."""
    return sum(
        1 for _ in takewhile(lambda image: os.path.isdir(image_folder(launch, host, pid, image)), count())
    )


def pid_and_image(folder: str) -> tuple[int, int]:
    """The two of an `image_folder` by its name.

    Raises:
        ValueError: it is the name of another folder.
    """
    pid, _, image = folder.rpartition("-")[2].partition("_")
    return int(pid), int(image or 0)
