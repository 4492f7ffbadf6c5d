"""The end of a process that cannot be pretended: one line that names the call and its place in the script.

In: a call and why it has no answer. Out: the line on stderr and in the log of the launch; the process ends.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from contextlib import suppress
from typing import Any

import torch

from ..recorder import Recorder

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_PYTHON = sysconfig.get_paths()["stdlib"]
CODE = 3  # exit code of a process that was refused


class NotPretended(SystemExit):
    """Ends the process. It is none of the exceptions that scripts catch."""


def is_of_script(frame: Any) -> bool:
    """Whether a frame runs code of the job: neither torch's, nor Python's, nor ours."""
    return not frame.f_code.co_filename.startswith((_OURS, _TORCH, _PYTHON, "<"))


def place() -> str:
    """Where in the script the present call was made: `train.py:12`; the innermost where all is torch's."""
    frame, innermost = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, "<")):
            here = f"{os.path.basename(name)}:{frame.f_lineno}"
            if is_of_script(frame):
                return here
            innermost = innermost or here
        frame = frame.f_back  # type: ignore[assignment]
    return innermost


class PretendedRefusal:
    """How this process refuses."""

    def __init__(self, recorder: Recorder, rank: int, world: int) -> None:
        self._recorder = recorder
        self._who = f"rank {rank} of {world} cannot be pretended"

    def refuse(self, call: str, why: str) -> None:
        """End the process.

        Raises:
            NotPretended: always.
        """
        line = f"{self._who}: {call} at {place()}: {why}"
        with suppress(OSError), (self._recorder.launch / "log.txt").open("a") as log:
            log.write(f"{line}\n")
        with suppress(OSError, ValueError):
            print(f"dpro: {line}", file=sys.stderr, flush=True)
        raise NotPretended(CODE)
