"""Which collective calls PyTorch itself remembers: its flight recorder, turned on where it is off.

Reads the job's environment and process groups. Sets the size of the flight recorder's ring in the
environment, unless the user did, and writes `lacks.txt`, one sentence for each thing that this PyTorch does
not record. Before 2.11 the ring has no entries unless a variable gives it some; before 2.8 it covers NCCL
alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from ..files import LACKS
from ..recorder import Recorder
from ..torch_internals import backend_configs, dump_of

DEFAULT = 2000  # entries, as in PyTorch 2.11 and later
_NEW, _OLD = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
_FOR_TESTS = ("fake", "threaded", "undefined")  # backends that call nothing


def knows_all() -> bool:
    """Return whether the flight recorder covers all backends, which came with a new name of its variable."""
    return dump_of("fr") is not None


def names() -> tuple[str, ...]:
    """Return the variables that this PyTorch takes the size from; the first one that is set counts.

    PyTorch warns of the second on stderr: a job that did not set it must not get it.
    """
    return (_NEW, _OLD) if knows_all() else (_OLD,)


def turn_on() -> None:
    """Give the ring entries, unless the user has set their number; PyTorch reads it at the first group."""
    if not any(name in os.environ for name in names()):
        os.environ[names()[0]] = str(DEFAULT)


def entries() -> int:
    """Return how many calls the ring keeps; 0 where it is turned off."""
    texts = [os.environ[name] for name in names() if name in os.environ]
    try:
        return max(int(texts[0]), 0) if texts else DEFAULT
    except ValueError:  # PyTorch raises its own error
        return DEFAULT


def lacks(backends: Iterable[str], size: int) -> list[str]:
    """Return one sentence for each gap in the record of collective calls."""
    if size == 0:
        name = next((name for name in names() if name in os.environ), names()[0])
        return [f"{name}={os.environ.get(name, 0)} turns PyTorch's flight recorder off: {_UNSEEN}"]
    remembered = {"nccl", "gloo", "xccl", *_FOR_TESTS} if knows_all() else {"nccl", *_FOR_TESTS}
    version = torch.__version__.partition("+")[0]
    return [
        f"the flight recorder of PyTorch {version} does not record the calls of {backend}: {_UNSEEN}"
        for backend in sorted(set(backends) - remembered)
    ]


_UNSEEN = "they are recorded only in deep windows, without bytes and groups"


class UnrecordedCalls:
    """The gaps in what this process's PyTorch records."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """Start with nothing written in a forked child."""
        self._said: list[str] = []

    def say(self) -> None:
        """Write the gaps, if they differ from those written before."""
        if self._recorder.folder is None or not dist.is_initialized():
            return
        configs = backend_configs()
        now = lacks(
            {part.rpartition(":")[2] for config in configs for part in config.split(",") if part}, entries()
        )
        if now != self._said:
            self._said = now
            self._recorder.write_file(LACKS, "".join(f"{line}\n" for line in now).encode())


def install(recorder: Recorder) -> None:
    """Turn the flight recorder on, and write what it cannot record."""
    if not dist.is_available():
        return
    turn_on()
    coverage = UnrecordedCalls(recorder)
    recorder.listen("open", coverage.say)
    recorder.listen("end", coverage.say)  # groups may have been made since
    recorder.listen("fork", coverage.on_fork)
