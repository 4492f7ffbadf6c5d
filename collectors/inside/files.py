"""Files that the job shares with observers outside it: atomic writes, owners of folders, and names.

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
    """Yield a temporary path to write; rename it to `path` when the block ends without an exception.

    Its time stamp is by this host's clock, like all recorded times: a file server's may differ.

    Args:
        path: the final name; an existing file is replaced.

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


LARGEST = 1 << 30  # bytes; no file of ours is larger


def refuse_beyond_limit(size: int = LARGEST) -> None:
    """Raise if this process may not write a file of this size: the kernel would send it SIGXFSZ.

    Raises:
        OSError: the process's limit is lower.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= most < size:  # -1 for no limit
        raise OSError(errno.EFBIG, f"files of this process may have at most {most} bytes")


def append_lines(path: Path, *lines: str) -> None:
    """Append lines to a file, which is made where it is missing.

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
    """A file that we opened, known by its descriptor's number and verified at each use.

    A job may close all descriptors, as daemons do, and open another file that gets the number of ours. So
    this has no finaliser, which would close whichever file has the number then.
    """

    def __init__(self, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> None:
        """Open a file.

        Raises:
            OSError: it cannot be opened.
        """
        self.number = move_to_high(os.open(path, flags | os.O_CLOEXEC, mode))
        self._identity = identity_of(self.number)

    def is_ours(self) -> bool:
        """Return whether the number still belongs to our file."""
        with suppress(OSError):
            return identity_of(self.number) == self._identity
        return False

    def write(self, content: bytes | bytearray, at: int) -> int:
        """Write as much as fits; return the number of bytes written.

        Args:
            at: the offset; of a file opened to append, its end.

        Raises:
            OSError: the file is not ours any more, or cannot be written, or must not grow this far: where a
                job limits the size of its files, the kernel would send it a signal.
        """
        if not self.is_ours():
            raise OSError(errno.EBADF, "the job closed a file descriptor of the recorder")
        refuse_beyond_limit(at + len(content))
        return os.pwrite(self.number, content, at)

    def reserve(self, at: int, length: int) -> None:
        """Reserve blocks for bytes that follow, where the file system can; the file gets no longer.

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
        """Return the first bytes of the file.

        Raises:
            OSError: the file is not ours any more, or cannot be read.
        """
        if not self.is_ours():
            raise OSError(errno.EBADF, "the job closed a file descriptor of the recorder")
        return os.pread(self.number, longest, 0)

    def reopened(self, path: Path) -> OwnDescriptor:
        """Open the file again, where the job has closed all descriptors.

        Raises:
            OSError: it is no longer there, or another one.
        """
        file = OwnDescriptor(path, os.O_RDWR)
        if file._identity != self._identity:
            file.close()
            raise OSError(errno.ESTALE, f"{path} is another file now")
        return file

    def close(self) -> None:
        """Close the file, if it is ours."""
        if self.is_ours():
            os.close(self.number)


HIGH = 512  # our lowest descriptor: files of the job get the same numbers as without us


def move_to_high(descriptor: int) -> int:
    """Move a descriptor to a high number, where the process may have one; return its number."""
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH)
    except OSError:  # its limit is lower, or none is left
        return descriptor
    os.close(descriptor)
    return high


def identity_of(descriptor: int) -> tuple[int, int]:
    """Return device and inode of an open file."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def stamp_of(path: Path) -> tuple[int, int]:
    """Return modification time (ns) and inode, which change when a file is made or replaced; 0 for none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino


# Owners of folders: nothing is read from, or written to, a folder of another user.

SQUASHED_ROOT = 65534  # the user that a file server may map root to (`root_squash`)
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_own(folder: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder, no link to one, that this user owns and no other may write to."""
    with suppress(OSError):
        status = os.lstat(folder)
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & OTHERS_WRITE
        return private and owns(folder, status.st_uid)
    return False


def owns(folder: str | os.PathLike[str], owner: int) -> bool:
    """Return whether the owner of a folder is this user, or the user that its file server maps this user to.

    Root is a user like any other: the owner of a folder can direct what root does in it.
    """
    return owner == os.geteuid() or (owner == SQUASHED_ROOT and _known_as(folder) == owner)


def _known_as(folder: str | os.PathLike[str]) -> int:
    """Return the owner of files that this user makes in a folder; -1 where it cannot make any."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
    return -1


# Names that both the job and observers outside it use: of files, of mesh axes, of pipelines' operations.

WANTED = "wanted.json"  # beside the folders of the launches; changes when an observer wants the latest calls
REQUESTED = "control.json"  # beside them, too: the latest requests, oldest first
IMPORTED = "imported"  # in the folder of a launch, once a process of the job has imported torch
SHOWN = "calls-"  # prefix of dumps for observers
LACKS = "lacks.txt"  # what the PyTorch of a process does not record, a sentence a line
STACKS = "stacks.txt"  # written by a handler in C where a process cannot answer
STACKS_BY = "stacks.json"  # the signal for that, the thread that gets it, and the file's descriptor
LAST = "last"  # exists once the interpreter exits and all calls are saved: none came later
STALL = "stall"  # name of dumps of calls made while no step ended
CHECKPOINTS = "checkpoints.jsonl"  # saves and loads of a process, one per line
REQUESTS = "requests.jsonl"  # requests that a process served, a line each when scheduled and when ended
ACTOR = "actor-"  # prefix, in the folder of the launch, of the files of when an actor ran which method
BUSY = ".busy"  # suffix of the file whose byte says whether the actor is in a call
ENGINE = "engine.json"  # which engine of a server a process drives
ENGINES = "engine-"  # prefix of folders, in that of the launch, of engines in processes without a rank
PIPELINE = "pipeline.json"  # which part of the model a process of a pipeline has
STARTED = "started.json"  # when a process reached which point on its way to the first step
PARTS = "start_parts.jsonl"  # imports and process groups of a process on that way, one per line
EXIT = "exit"  # renamed, when a process exits, to this, a hyphen, and the exit code as a byte, none for 0
RAISED = "raised.json"  # the exception that ended a process
MEMORY = "memory.jsonl"  # refused allocations of a process, one per line
FAILED = "raised-"  # prefix of the same file, in the folder of the launch, of processes that had not trained
TENSOR_AXES = ("tp", "tensor", "tensor_parallel", "model", "model_parallel", "mp")  # of device meshes

# Operations of pipelines, as records number them. The loss of a micro-batch belongs to its forward.
FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
LOSS = "loss"
OPERATIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, LOSS)
PRETENDED = "pretended"  # prefix of files of a pretended rank's calls
MAIL = "mail"  # in the folder of a launch: what pretended ranks leave for each other
WAITS = "waits-"  # prefix there of files of ranks that wait for another's mail
REPLACED = "replaced.json"  # the program that a process replaced itself by (`exec`), and when


def image_folder(launch: Path, host: str, pid: int, image: int) -> Path:
    """Return the folder of one of the programs that a process has been (`exec`) and that recorded.

    Args:
        image: the program's number, from 0.
    """
    return launch / f"{host}-{pid}{f'_{image}' * (image > 0)}"


def next_image(launch: Path, host: str, pid: int) -> int:
    """Return how many programs of a process have recorded."""
    return sum(
        1 for _ in takewhile(lambda image: os.path.isdir(image_folder(launch, host, pid, image)), count())
    )


def pid_and_image(folder: str) -> tuple[int, int]:
    """Return pid and image from the name of an `image_folder`.

    Raises:
        ValueError: it is the name of another folder.
    """
    pid, _, image = folder.rpartition("-")[2].partition("_")
    return int(pid), int(image or 0)
