"""What a start consists of until the first step has ended: each import, and each process group.

Watches imports of the main thread, and calls that make process groups. Writes `start_parts.jsonl`, a line for
each as it ends. Loads of checkpoints are in `checkpoints.jsonl`. An import within another is part of that;
one that began before torch was imported counts from then on. The communicator of a group is not seen here:
NCCL makes it in the group's first collective, unless the job gave a device to its process group.

Nothing of ours runs below an import: its tracebacks are the job's own. A finder right before Python's own one
asks that one, and gives the spec that it found a class that reports when importlib says that the module has
been executed (`_initializing`); then the class is as before. The finder goes when the first step has ended. A
module that another probe awaits (`AwaitedModules`) is not seen itself, but its imports are.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ..files import PARTS, append_lines
from ..main_thread import is_from_signal_handler
from ..patching import wrap
from ..recorder import ENOUGH, Recorder
from ..threads import is_main_thread
from ..torch_internals import group_backends, group_names, group_ranks
from ..unseen import attributes

LONG_NS = 1_000_000  # shorter imports are left out
MAX_LINES = 5_000
IMPORT, GROUP = "import", "process_group"
_IMPORTS = "_find_and_load_unlocked"  # importlib's function that is asked for a module


class StartParts:
    """The parts of the start of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: list[str] = []  # lines that wait for a folder
        self._lines = 0
        self.is_over = False

    def add(self, kind: str, name: str, start_ns: int, **facts: Any) -> None:
        """Record a part that ends now."""
        if not self.is_over and self._lines < MAX_LINES:
            self._lines += 1
            part = {"kind": kind, "name": name, "start_ns": start_ns}
            self._waiting.append(json.dumps({**part, "duration_ns": time.time_ns() - start_ns, **facts}))
            self.save()

    def on_group(self, group: Any, start_ns: int) -> None:
        """Record a process group that was made, if this rank is a member."""
        name = group_names().get(group, "")
        if name:
            ranks, purpose = list(group_ranks(group)), str(getattr(group, "group_desc", ""))
            self.add(GROUP, name, start_ns, ranks=ranks, backend=group_backends(group), purpose=purpose)

    def save(self) -> None:
        """Write the lines that wait, where the process records or may be about to."""
        folder = self._recorder.folder or self._recorder.joining
        if folder is not None and self._waiting:
            lines, self._waiting = self._waiting, []
            append_lines(folder / PARTS, *lines)

    def watch(self, original: Any) -> Any:
        """Return an `around` for `wrap` that records the process groups that a function makes."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            start_ns = time.time_ns()
            group = original(*args, **kwargs)
            self._recorder.call(self.on_group, group, start_ns)
            return group

        return watched


class ImportWatch:
    """A finder that asks Python's own one, and measures imports."""

    def __init__(self, recorder: Recorder, parts: StartParts) -> None:
        self._parts = parts
        self._timed = _timed(lambda spec: recorder.call(self.on_initializing, spec))
        self._spec: ModuleSpec | None = None  # found last
        self._found_ns = 0
        self._running: ModuleSpec | None = None  # the outermost import that runs

    def install(self) -> None:
        """Begin, also with the outermost import that runs now, which includes torch's."""
        place = next((n for n, finder in enumerate(sys.meta_path) if finder is PathFinder), -1)
        if place < 0 or not is_main_thread():
            return
        sys.meta_path.insert(place, self)
        specs = (attributes(module).get("__spec__") for module in list(sys.modules.values()))
        outermost = next((spec for spec in specs if attributes(spec).get("_initializing")), None)
        if type(outermost) is ModuleSpec and outermost.name != "torch":
            outermost.__class__ = self._timed
            self._running, self._found_ns = outermost, time.time_ns()

    def remove(self) -> object:
        """Stop watching imports."""
        self._parts.is_over, self._running = True, None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        return ENOUGH

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of Python's own finder for a main thread's outermost import; None for others."""
        asks = sys._getframe().f_back  # importlib's function that asks each finder
        asks = asks and asks.f_back
        is_imported = asks is not None and asks.f_code.co_name == _IMPORTS
        if self._running is not None or not is_imported or not is_main_thread():
            return None
        start_ns = time.time_ns()
        try:
            spec = PathFinder.find_spec(name, path, target)
        except Exception as error:  # importlib asks again, and the job sees what that raises
            if is_from_signal_handler(error):
                raise
            return None
        if type(spec) is ModuleSpec:
            spec.__class__ = self._timed
            self._spec, self._found_ns = spec, start_ns
        return spec

    def on_initializing(self, spec: ModuleSpec) -> None:
        """Begin or end the measurement as importlib begins or ends executing a module."""
        if type(spec) is self._timed:
            self._running = self._running or (spec if spec is self._spec else None)
        elif spec is self._running:
            self._running = self._spec = None
            if time.time_ns() - self._found_ns >= LONG_NS:
                self._parts.add(IMPORT, spec.name, self._found_ns)


def _timed(notify: Callable[[ModuleSpec], None]) -> type[ModuleSpec]:
    """Return a class for specs of modules that are being imported; afterwards a spec is a plain one again."""

    class _Timed(ModuleSpec):
        def __setattr__(self, name: str, value: object) -> None:
            object.__setattr__(self, name, value)
            if name == "_initializing":
                if not value:
                    object.__setattr__(self, "__class__", ModuleSpec)
                notify(self)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(_Timed, name, getattr(ModuleSpec, name))
    return _Timed


def install(recorder: Recorder) -> StartParts:
    """Record the parts of a start."""
    parts = StartParts(recorder)
    imports = ImportWatch(recorder, parts)
    imports.install()
    recorder.listen("open", parts.save)
    recorder.listen("step", lambda _step: imports.remove())
    recorder.listen("fork", imports.remove)
    if dist.is_available():
        from torch.distributed import device_mesh, distributed_c10d

        for name in ("_new_group_with_tag", "split_group"):
            if hasattr(distributed_c10d, name):
                wrap(distributed_c10d, name, parts.watch, also=(dist, device_mesh))
    return parts
