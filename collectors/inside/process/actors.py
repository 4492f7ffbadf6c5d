"""Actors of Ray: which one this process is, and when it ran which method.

Reads Ray's state of a worker, once the job itself has imported Ray. Provides the facts by which readers know
worker groups, and writes to the folder of the launch, also for actors that never train:
`actor-HOST-PID.jsonl`, a line for each call that took long; `.busy`, a byte that says whether the actor is in
a call; and what a call raised. Coroutines and generators are not watched.

Ray ends its workers without their interpreters: nothing can be saved then, so calls are saved more often.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

from ..files import ACTOR, BUSY, FAILED, OwnDescriptor, append_lines, write_whole
from ..recorder import Recorder
from ..threads import get_native_id
from ..unseen import attributes, traceback_of
from .exits import describe_exception

MODULE = "ray._private.worker"
WORKER = 1  # the mode of a process that runs tasks and actors; drivers have others
SHORTEST_NS = 3_000_000  # a shorter call is not a phase of a job; recording one takes 30 us
MAX_CALLS = 200_000  # calls that are recorded
SAVED_EACH_S = 5.0
_module_of = type.__dict__["__module__"].__get__
_name_of = type.__dict__["__name__"].__get__


class Actor:
    """This process as an actor of Ray."""

    def __init__(self, recorder: Recorder, module: Any) -> None:
        self._recorder, self._module = recorder, module
        self._path = recorder.launch / f"{ACTOR}{socket.gethostname()}-{os.getpid()}.jsonl"
        self._busy = OwnDescriptor(self._path.with_suffix(BUSY), os.O_WRONLY | os.O_CREAT)
        self._open = self._noted = 0  # calls

    def facts(self) -> dict[str, str]:
        """Return the actor's id, name and class; empty in a process that is not an actor."""
        with suppress(Exception):  # of another version of Ray
            worker = self._module.global_worker
            if not worker.actor_id.is_nil():
                kinds = [_name_of(type(actor)) for actor in worker.actors.values()]
                number, name = worker.actor_id.hex(), str(worker.actor_name)
                return {"actor": number, "actor_name": name, "actor_class": str(kinds[0]) if kinds else ""}
        return {}

    def ranged(self, method: Any) -> Any:
        """Return a method, called by Ray with the actor as first argument, that records when it ran."""
        called = getattr(method, "method", None)
        if called is None or inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called):
            return method

        @functools.wraps(method)  # Ray asks for its attributes
        def noted(*args: Any, **kwargs: Any) -> Any:
            begun_ns = time.time_ns()
            self._recorder.call(self._count, 1)
            try:
                return method(*args, **kwargs)
            except BaseException as error:
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without our frame
                self._recorder.call(self._failed, error)
                raise
            finally:
                self._recorder.call(self._count, -1)
                if time.time_ns() - begun_ns >= SHORTEST_NS:
                    self._recorder.call(self._note, args[:1], method.name, begun_ns)

        return noted

    def _count(self, change: int) -> None:
        self._open += change
        self._busy.write(b"1" if self._open else b"0", 0)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Exception):  # not where the actor exits
            said = describe_exception(type(error), error, traceback_of(error))
            name = self._path.stem.replace(ACTOR, FAILED, 1)
            write_whole(self._path.with_name(f"{name}.json"), json.dumps(said).encode())

    def _note(self, actor: tuple[object, ...], method: str, begun_ns: int) -> None:
        kind = type(actor[0]) if actor else object
        if self._noted >= MAX_CALLS or str(_module_of(kind)).startswith(
            "ray."
        ):  # Ray's own, such as Ray Train's
            return
        call = {"name": f"{_name_of(kind)}.{method}", "start_ns": begun_ns, "end_ns": time.time_ns()}
        append_lines(self._path, json.dumps(call | {"tid": get_native_id()}))
        self._noted += 1


def install(recorder: Recorder) -> None:
    """Record the calls of this process if it is an actor of Ray."""

    def look(module: Any) -> None:
        worker: Any = getattr(module, "global_worker", None)
        if attributes(worker).get("mode") != WORKER:
            return
        actor = Actor(recorder, module)
        recorder.named = actor.facts
        recorder.calls_saved_each_s = SAVED_EACH_S
        manager = worker.function_actor_manager
        methods = attributes(manager).get("_function_execution_info", {})
        for number, method in list(methods.items()):
            methods[number] = method._replace(function=actor.ranged(method.function))
        make = manager._make_actor_method_executor
        manager._make_actor_method_executor = lambda *of_method: actor.ranged(make(*of_method))

    recorder.on_import(MODULE, look)
