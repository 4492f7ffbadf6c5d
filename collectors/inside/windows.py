"""Deep windows: every operator, kernel and launch of some steps, as Kineto sees them.

In: the ends of steps. Out: `windowNNNN.json`, a Kineto file, and a record of when each window was. Uses the
profiler's lower half: the public one imports the compiler at its first start, a second of stall, and turns
events into Python objects that nobody asked for.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import _ExperimentalConfig, profile, record_function

from . import records
from .patching import patch
from .recorder import Recorder

BACKWARD = "dpro::backward"  # the range around each backward call within a window


class Windows:
    """The deep windows of one process: at most one is open."""

    def __init__(self, recorder: Recorder) -> None:
        """No window is open yet."""
        self._recorder = recorder
        self._every: int = recorder.config["every"]
        self._steps: int = recorder.config["window_steps"]
        self._skip: int = recorder.config["skip"]
        self._shapes: bool = recorder.config["shapes"]
        self._forget()

    def _forget(self) -> None:
        self._open: Any = None
        self._started = (0, 0)  # step, ns
        self._thread = 0
        self._count = 0

    @property
    def is_open(self) -> bool:
        """Whether a window is being recorded."""
        return self._open is not None

    def on_step(self, step: int) -> None:
        """A step has ended: a window may, too, and another may begin."""
        if self.is_open and step >= self._started[0] + self._steps:
            self.close(save=True)
        if step >= self._skip and (step - self._skip) % self._every == 0:
            self._start(step)

    def on_end(self) -> None:
        """No step may follow: keep what there is."""
        self.close(save=True)

    def on_profiler(self, profiler: Any) -> None:
        """A profiler is about to start; give way to the user's own."""
        if self.is_open and profiler is not self._open:
            self.close(save=False)

    def before_fork(self) -> None:
        """A child that inherits a running Kineto would keep gathering events that nobody collects."""
        self.close(save=False)

    def on_fork(self) -> None:
        """This is a forked child."""
        if self._count:
            _let_child_exit()
        self._forget()

    def _start(self, step: int) -> None:
        self._count += 1  # also where it cannot be recorded, so that all ranks count alike
        if not self.is_open and not _busy():
            self._open = _start_kineto(self._shapes)
            self._started = (step, time.time_ns())
            self._thread = threading.get_ident()
            if self._recorder.records is not None:
                self._recorder.records.write(records.OPENED, self._count - 1, self._started[1], step)

    def close(self, save: bool) -> None:
        """End the window, if one is being recorded.

        Args:
            save: whether to keep it.
        """
        folder, own_records = self._recorder.folder, self._recorder.records
        if self._open is None or folder is None or own_records is None:
            return
        if threading.get_ident() != self._thread:
            return  # only the thread that started Kineto can stop it
        save = save and folder.is_dir()  # Kineto would say on stderr that the run was deleted
        window, self._open = self._open, None
        index, end_ns = self._count - 1, time.time_ns()
        _stop_kineto(window, folder / f"window{index:04d}.json" if save else None)
        if save:
            own_records.write(records.WINDOW, index, self._started[1], end_ns)
            self._recorder.on_window(f"window{index:04d}")
        else:
            own_records.write(records.DROPPED, index)


def install(recorder: Recorder) -> None:
    """Record deep windows."""
    windows = Windows(recorder)
    recorder.listen("step", windows.on_step)
    recorder.listen("end", windows.on_end)
    recorder.listen("fork", windows.on_fork)
    _install_backward(windows)
    patch(profile, "_prepare_trace", before=lambda profiler: recorder.call(windows.on_profiler, profiler))
    os.register_at_fork(before=lambda: recorder.call(windows.before_fork))


def _install_backward(windows: Windows) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not windows.is_open:
            return original(*args, **kwargs)
        with record_function(BACKWARD):
            return original(*args, **kwargs)

    torch.autograd.backward = backward


def _busy() -> bool:
    """Whether a profiler runs already: a second one would silently empty the first."""
    kind = torch._C._autograd._profiler_type()
    return bool(kind != torch._C._profiler.ActiveProfilerType.NONE)


def _start_kineto(shapes: bool) -> Any:
    """Start recording; on a GPU its work and synchronisation too."""
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


def _stop_kineto(window: Any, path: Path | None) -> None:
    """Stop recording and save what was seen under a name that only a whole file gets."""
    window.__exit__(None, None, None)
    if path is not None:
        temporary = path.with_suffix(".tmp")
        window.kineto_results.save(str(temporary))
        os.replace(temporary, path)


def _let_child_exit() -> None:
    """Let a forked child of a process that has used Kineto exit: it leaves out the destructors of C++.

    That of Kineto waits for a thread which the child does not have, for ever (ConfigLoader in libkineto).
    """
    libc = ctypes.CDLL(None)
    atexit.register(libc.fflush, None)
    libc.on_exit(libc._exit, None)  # called first, and with the exit code
