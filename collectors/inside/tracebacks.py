"""Stacks of threads, as `faulthandler` writes them.

`faulthandler` walks the frames in C, while it holds the interpreter's lock, and makes no objects. Python that
walks the frames of another thread makes frame objects; that may start a garbage collection, which may let
the other thread run on, and then the frame that is being walked is gone: Python 3.11 crashes there.
"""

from __future__ import annotations

import faulthandler
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

OURS = str(Path(__file__).parents[1]) + os.sep  # the folder of our files, which are not the user's code
_dump = faulthandler.dump_traceback
_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class ThreadTraceback(NamedTuple):
    """The calls of one thread that have not returned.

    Attributes:
        ident: of the thread, as `threading.get_ident`.
        is_current: whether it asked for the stacks, or handled the signal that did.
        frames: `file`, `line` and `function`, innermost first; the innermost 100 at most.
    """

    ident: int
    is_current: bool
    frames: list[dict[str, Any]]


def stacks() -> list[ThreadTraceback]:
    """Return the stacks of all threads of this process.

    Raises:
        OSError: there is no memory for them.
    """
    descriptor = os.memfd_create("dpro-stacks")
    with open(descriptor, "r+", errors="replace") as text:
        _dump(descriptor, all_threads=True)
        text.seek(0)
        return parse(text.read())


def parse(text: str) -> list[ThreadTraceback]:
    """Return the stacks in the output of `faulthandler`."""
    threads: list[ThreadTraceback] = []
    for line in text.splitlines():
        head, frame = _THREAD.match(line), _FRAME.match(line)
        if head:
            threads.append(ThreadTraceback(int(head[2], 16), head[1] != "Thread", []))
        elif frame and threads:
            threads[-1].frames.append({"file": frame[1], "line": int(frame[2]), "function": frame[3]})
    return threads
