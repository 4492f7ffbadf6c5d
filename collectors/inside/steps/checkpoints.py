"""Saves and loads of checkpoints: when, how long they held up training, how long they took, and their size.

Watches calls of `torch.save`, `torch.load`, `torch.distributed.checkpoint` and safetensors. Writes
`checkpoints.jsonl`, a line for each as it ends, and another where it went on in the background; and counts
how long saving has held up the thread that trains. A save or load within another is part of that. A file is
identified by its path, its inode and its time of change, since many jobs rename what they have saved.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from .. import records
from ..files import CHECKPOINTS, append_lines
from ..recorder import Recorder, identity
from ..threads import Local, get_ident, is_main_thread
from ..unseen import attributes, is_a, path_of

LONG_NS = 1_000_000  # a shorter call without a path is not a checkpoint
MAX_LINES = 10_000  # lines of a process
MAX_FILES = 10_000  # files of a folder whose sizes are added
SAVE, LOAD = "save", "load"
# Functions by module; looked for once the job has imported it.
LATE: dict[str, dict[str, tuple[str, ...]]] = {
    "torch.distributed.checkpoint": {SAVE: ("save", "async_save"), LOAD: ("load",)},
    "torch.distributed.checkpoint.state_dict_saver": {SAVE: ("save", "async_save", "_save_state_dict")},
    "torch.distributed.checkpoint.state_dict_loader": {LOAD: ("load",)},
    "safetensors.torch": {SAVE: ("save_file", "save_model"), LOAD: ("load_file", "load_model")},
}
# Arguments that name the file: their keywords, and their positions by function.
KEYWORDS = ("checkpoint_id", "f", "filename")
PLACES = {"save": 1, "load": 0, "save_file": 1, "save_model": 1, "load_file": 0, "load_model": 1}


class Checkpoints:
    """The saves and loads of one process.

    Attributes:
        held_up: how long saving has held up the thread that trains.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._patched: set[str] = set()
        # Replacements by function; a function of several modules has the same one in all.
        self._watching: dict[Any, Any] = {}
        self.on_fork()

    def on_fork(self) -> None:
        """Start at zero in a forked child: what its parent was doing does not count."""
        self.held_up = Stopwatch()
        self._inside = Local()
        self._in_background: set[str] = set()
        self._lines = 0

    def look(self, *_: Any) -> None:
        """Patch the functions of those modules that the job has imported."""
        for name, kinds in LATE.items():
            if name not in self._patched and name in sys.modules:
                watched = [self.watch(sys.modules[name], function, kind)
                         for kind, functions in kinds.items() for function in functions]  # fmt: skip
                if any(watched):  # else it is still being imported
                    self._patched.add(name)

    def watch(self, module: Any, name: str, kind: str) -> bool:
        """Record the calls of a function.

        Args:
            kind: `save` or `load`.

        Returns:
            Whether the module has such a function.
        """
        original = getattr(module, name, None)
        if not callable(original):
            return False
        if original not in self._watching.values():  # else it was taken from a module that is patched
            watched = self._watching.get(original) or self._wrap(original, name, kind)
            self._watching[original] = watched
            setattr(module, name, watched)
        return True

    def _wrap(self, original: Any, name: str, kind: str) -> Any:
        source = f"{getattr(original, '__module__', '')}.{name}"

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "depth", 0):
                return original(*args, **kwargs)
            self._inside.depth = 1
            ours = self._recorder.training_thread == get_ident()
            start_ns, path = time.time_ns(), _path(name, args, kwargs)
            if ours and kind == SAVE:
                self.held_up.start()
            try:
                result = original(*args, **kwargs)
            except BaseException:
                self._inside.depth = 0
                self._recorder.call(self._on_end, kind, path, start_ns, ours)
                raise
            self._inside.depth = 0
            self._recorder.call(self._on_done, kind, source, path, start_ns, ours, result)
            return result

        return watched

    def _on_end(self, kind: str, path: str, start_ns: int, ours: bool) -> dict[str, int]:
        """Record the end of a call, successful or not; return what is known of the file."""
        took_ns = self.held_up.stop() if ours and kind == SAVE else -1
        facts = _file_facts(path)
        if took_ns >= LONG_NS and self._recorder.records is not None:
            self._recorder.records.write(records.SAVED, start_ns, took_ns, facts.get("bytes", -1))
        return facts

    def _on_done(self, kind: str, source: str, path: str, start_ns: int, ours: bool, result: Any) -> None:
        """Record a call that returned; its save may go on in the background."""
        now_ns = time.time_ns()
        stood = ours or is_main_thread()
        facts = self._on_end(kind, path, start_ns, ours)
        of_background = path in self._in_background and not stood
        if of_background or (not path and now_ns - start_ns < LONG_NS):
            return
        line = {
            "kind": kind,
            "source": source,
            "path": path,
            "start_ns": start_ns,
            "stall_ns": now_ns - start_ns if stood else 0,
        }
        upload = _upload(result)
        if upload is None:
            self._write(line | {"duration_ns": now_ns - start_ns} | facts)
            return
        self._in_background.add(path)
        self._write(line | {"duration_ns": -1})
        upload.add_done_callback(lambda _: self._recorder.call(self._on_uploaded, line))

    def _on_uploaded(self, line: dict[str, Any]) -> None:
        """Record that a save in the background is written."""
        self._in_background.discard(line["path"])
        self._write(line | {"duration_ns": time.time_ns() - line["start_ns"]} | _file_facts(line["path"]))

    def _write(self, line: dict[str, Any]) -> None:
        folder = self._recorder.folder
        if folder is None or self._lines >= MAX_LINES:
            return
        self._lines += 1
        append_lines(folder / CHECKPOINTS, json.dumps(line))


def _path(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the file or folder that a call saves to or loads from; empty where it has no path."""
    place = PLACES.get(name, len(args))
    given = next((kwargs[keyword] for keyword in KEYWORDS if kwargs.get(keyword) is not None), None)
    given = args[place] if given is None and place < len(args) else given
    path = path_of(given)
    with suppress(OSError):  # the folder that it is relative to is gone
        return os.path.abspath(path) if path else ""
    return path


def _upload(result: Any) -> Future[Any] | None:
    """Return the future of a save in the background; None where all is written."""
    upload = attributes(result).get("upload_completion", result)
    return upload if is_a(upload, Future) else None


def _file_facts(path: str) -> dict[str, int]:
    """Return size, inode and time of change of a path; empty where nothing is there."""
    with suppress(OSError):
        status = os.stat(path)
        size = status.st_size if not os.path.isdir(path) else _size_of_own(path)
        return {"bytes": size, "inode": status.st_ino, "modified_ns": status.st_mtime_ns}
    return {}


def _size_of_own(folder: str) -> int:
    """Return the bytes of this rank's files of torch.distributed.checkpoint in a folder; -1 unknown."""
    prefix, size = f"__{identity()[0]}_", 0
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_FILES:
                return -1
            size += entry.stat().st_size if entry.name.startswith(prefix) else 0
    return size


def install(recorder: Recorder) -> Checkpoints:
    """Record saves and loads.

    Returns:
        The object that knows how long saving has held up training.
    """
    checkpoints = Checkpoints(recorder)
    for module in (torch, torch.serialization):
        checkpoints.watch(module, "save", SAVE)
        checkpoints.watch(module, "load", LOAD)
    for name in LATE:
        recorder.on_import(name, checkpoints.look)
    recorder.listen("fork", checkpoints.on_fork)
    return checkpoints


class Stopwatch:
    """The time that an activity took so far; nested calls are counted once.

    Attributes:
        depth: calls within each other that have begun.
        begun_ns: when the outermost began.
        ended_ns: time of activities that have ended: the total while none runs.
    """

    def __init__(self) -> None:
        self.depth = self.ended_ns = self.begun_ns = 0

    def start(self) -> None:
        """Begin the activity."""
        self.depth += 1
        if self.depth == 1:
            self.begun_ns = time.time_ns()

    def stop(self) -> int:
        """End the activity; one that began before the stopwatch existed is ignored.

        Returns:
            How long it took, in ns, if that was the outermost; else -1.
        """
        if self.depth != 1:
            self.depth = max(self.depth - 1, 0)
            return -1
        self.depth = 0
        took_ns = time.time_ns() - self.begun_ns
        self.ended_ns += took_ns
        return took_ns

    def total_ns(self, now_ns: int) -> int:
        """Return the total time so far, in ns, including an activity that still runs."""
        return self.ended_ns + (now_ns - self.begun_ns if self.depth else 0)
