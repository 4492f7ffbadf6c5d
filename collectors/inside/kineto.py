"""One recording of Kineto: every operator, kernel and launch between its start and its stop.

Takes what to record; writes files in Kineto's format. Uses the profiler's lower half: the public one imports
the compiler at its first start, a second of stall, and turns events into Python objects that are not used
here.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from . import detaching
from .files import written_whole
from .main_thread import is_from_signal_handler
from .threads import Local, SignalsBlocked, get_ident, sleep
from .torch_internals import (
    experimental_config,
    is_profiling,
    observe_execution,
    range_calls,
    start_profiler,
)
from .unseen import modules_of, unseen

TEARDOWN_CALLS, TEARDOWN_S = 20, 0.005  # calls of CUDA at the exit, and the time between two

LEVEL, SILENT = "KINETO_LOG_LEVEL", "99"
PROCESS = "/proc/self/comm"  # Kineto reads the name of the process here, and complains if it cannot

_running: list[Recording] = []


def silence() -> None:
    """Keep Kineto from writing to the job's stderr, also where a launcher has dropped that variable."""
    os.environ.setdefault(LEVEL, SILENT)


def ensure_silent() -> None:
    """Raise if Kineto would write to the job's stderr when it starts.

    Raises:
        OSError: the job has emptied its environment, or has no `/proc`.
    """
    if LEVEL not in os.environ:  # Kineto reads it when it first starts
        raise OSError(f"the job has removed {LEVEL} from its environment: Kineto would write to its stderr")
    os.stat(PROCESS)


class OwnProfile(profile):
    """A profiler of ours, distinguished from the user's by its type."""


class Mark(record_function):
    """A range of ours: modes of the job do not see its begin and end."""

    def begin(self) -> bool:
        """Begin the range; return whether that could be hidden."""
        calls = range_calls()
        if calls is not None:
            self.record = unseen(calls[0], self.name, self.args)
        return calls is not None

    def end(self) -> bool:
        """End the range; return whether that could be hidden."""
        calls = range_calls()
        if calls is not None and self.run_callbacks_on_exit:
            unseen(calls[1], self.record)
        return calls is not None


class Recording:
    """Kineto at work, and what else is recorded beside it.

    Attributes:
        thread: the thread that records: no other can stop it.
    """

    def __init__(self, options: Mapping[str, Any], execution_trace: Path | None) -> None:
        """Start recording; on a GPU its work and synchronisation too.

        Args:
            options: `shapes`, `stacks`, `modules`, `memory`, `execution_trace`: whether to record them.
        """
        self.thread = get_ident()
        gpu = self.gpu = torch.cuda.is_initialized()
        self.profiler = OwnProfile(
            use_kineto=True,
            use_device="cuda" if gpu else None,
            record_shapes=bool(options.get("shapes")),
            profile_memory=bool(options.get("memory")),
            with_stack=bool(options.get("stacks")),
            # Stacks need events as objects, made in C++, which `trace_only` leaves out.
            experimental_config=experimental_config(
                enable_cuda_sync_events=gpu, trace_only=not options.get("stacks")
            ),
        )
        self._undo: list[Callable[[], None]] = []
        self._trace: Path | None = None
        if options.get("modules"):
            self._undo.append(name_modules())
        if options.get("execution_trace") and execution_trace is not None:
            end = observe_execution(str(execution_trace.with_suffix(".tmp.json")))
            if end is not None:
                self._trace = execution_trace
                self._undo.append(end)
        _running.append(self)  # before it runs: a handler of the job's may raise once it does
        try:
            with SignalsBlocked():  # threads that Kineto starts inherit this
                start_profiler(self.profiler)
        except BaseException as error:
            has_failed = isinstance(error, Exception) and not is_from_signal_handler(error)
            if has_failed or not is_profiling():  # stopping before the start could stop another's
                _running.remove(self)
                self._restore()
            else:
                self.stop(None)
            raise

    def stop(self, path: Path | None, around: AbstractContextManager[object] | None = None) -> None:
        """Stop, and save what was recorded under names that only whole files get.

        Args:
            path: of the Kineto file; None to keep nothing.
            around: what Kineto ends its session in.
        """
        # Else its exit would synchronise the device: without bound, and impossible while a graph is captured.
        self.profiler.use_device = None
        try:
            with around or nullcontext(), SignalsBlocked():
                try:
                    self.profiler.__exit__(None, None, None)
                finally:
                    _running.remove(self)
        finally:
            self._restore()
        if self._trace is not None:
            unnamed = self._trace.with_suffix(".tmp.json")
            if path is None:
                unnamed.unlink(missing_ok=True)
            else:
                unnamed.replace(self._trace)
        if path is not None:
            with written_whole(path) as temporary, plain_path(temporary) as plain:
                self.profiler.kineto_results.save(plain)

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()


@contextmanager
def plain_path(path: Path) -> Iterator[str]:
    """Yield a path that Kineto can write to: it drops unprintable characters, such as the end of a line."""
    if str(path).isprintable():
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def stop_left() -> None:
    """Stop before the interpreter exits what still runs after any failure: it would crash the exit."""
    for recording in tuple(_running):
        if recording.thread == get_ident():
            with suppress(Exception):
                recording.stop(None)
    if _running:  # in another thread, which alone could stop it
        leave_out_destructors()


def finish_teardown() -> None:
    """Let Kineto tear CUPTI down before the interpreter exits, where the environment has it do so.

    Kineto does that within the next call of CUDA, whichever profiler has stopped. If none came, a C++
    destructor would wait for it forever.
    """
    if detaching.value() != detaching.TORN_DOWN or not torch.cuda.is_initialized():
        return
    with suppress(RuntimeError):  # the GPU has failed, which the job has seen
        for _ in range(TEARDOWN_CALLS):
            torch.cuda.current_stream().query()
            sleep(TEARDOWN_S)


def start_in_main_thread() -> None:
    """Start and stop an empty Kineto once: its first start in another thread prints a line on stderr."""
    Recording({}, None).stop(None)


def leave_out_destructors() -> None:
    """Make this process exit without C++ destructors.

    That of a running Kineto crashes. In a forked child of a process that has used Kineto it waits forever for
    a thread that the child does not have (ConfigLoader in libkineto).
    """
    libc = ctypes.CDLL(None)
    atexit.register(libc.fflush, None)
    libc.on_exit(libc._exit, None)  # called first, and with the exit code


# The names of modules as ranges of Kineto: which layer an operator belongs to.

PREFIX = "nn.Module: "


class _Calls(Local):
    """The open calls of a thread, outermost first, and the names of modules within the outermost."""

    def __init__(self) -> None:
        self.open: list[tuple[Any, record_function]] = []
        self.names: dict[int, str] = {}


def name_modules() -> Callable[[], None]:
    """Begin to name the modules; return how to stop."""
    calls = _Calls()

    def before(module: Any, _arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not calls.open:
            calls.names = {id(part): name for name, part in modules_of(module)}
        name = calls.names.get(id(module)) or type(module).__name__
        mark = Mark(PREFIX + name)
        mark.__enter__()
        calls.open.append((module, mark))

    def after(module: Any, _arguments: Any, _result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        while calls.open:  # those that an exception left open end here, too
            opened, mark = calls.open.pop()
            mark.__exit__(None, None, None)
            if opened is module:
                return

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]

    def stop() -> None:
        for hook in hooks:
            hook.remove()

    return stop
