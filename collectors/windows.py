"""One deep window: every operator, kernel and launch between two moments, as Kineto sees them.

In: nothing. Out: a Kineto JSON file. Uses the profiler's lower half: the public one imports the compiler
at its first start, a second of stall, and turns events into Python objects that nobody asked for.

Runs inside the job, where only the standard library and torch may be assumed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import _ExperimentalConfig, profile


def busy() -> bool:
    """Whether a profiler runs already: a second one would silently empty the first."""
    kind = torch._C._autograd._profiler_type()
    return bool(kind != torch._C._profiler.ActiveProfilerType.NONE)


def start(shapes: bool) -> Any:
    """Start recording; on a GPU its work and synchronisation too.

    Args:
        shapes: whether operators record the shapes of their inputs.
    """
    gpu = torch.cuda.is_initialized()
    window = profile(
        use_kineto=True,
        use_device="cuda" if gpu else None,
        record_shapes=shapes,
        experimental_config=_ExperimentalConfig(enable_cuda_sync_events=gpu, trace_only=True),
    )
    window._prepare_trace()
    window._start_trace()
    return window


def stop(window: Any, path: Path | None) -> None:
    """Stop recording and save what was seen under a name that only a whole file gets.

    Args:
        window: what `start` returned.
        path: the file to write; None throws the window away.
    """
    window.__exit__(None, None, None)
    if path is not None:
        temporary = path.with_suffix(".tmp")
        window.kineto_results.save(str(temporary))
        os.replace(temporary, path)


def let_child_exit() -> None:
    """Let a forked child of a process that has used Kineto exit: it leaves out the destructors of C++.

    That of Kineto waits for a thread which the child does not have, for ever (ConfigLoader in libkineto).
    """
    libc = ctypes.CDLL(None)
    atexit.register(libc.fflush, None)
    libc.on_exit(libc._exit, None)  # called first, and with the exit code
