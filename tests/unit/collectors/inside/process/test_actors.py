"""What an actor of Ray notes of itself: a module that looks like Ray's."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside.process import actors

Info = namedtuple("Info", ["function", "function_name"])


class Rollout:
    def generate(self, count: int) -> int:
        if count < 0:
            raise ValueError("no such count")
        return count

    async def answer(self) -> None: ...

    def stream(self) -> Any:
        yield 1


class Number:
    def is_nil(self) -> bool:
        return False

    def hex(self) -> str:
        return "a1"


def executor(name: str, method: Any) -> Any:
    def run(actor: Any, *arguments: Any) -> Any:
        return method(actor, *arguments)

    run.name, run.method = name, method  # type: ignore[attr-defined]
    return run


class Manager:
    def __init__(self) -> None:
        self._function_execution_info = {
            "1": Info(executor("generate", Rollout.generate), "generate"),
            "2": Info(lambda: 7, "task"),
        }

    def _make_actor_method_executor(self, name: str, method: Any) -> Any:
        return executor(name, method)


class Worker:
    def __init__(self, mode: int) -> None:
        self.mode, self.actor_id, self.actor_name = mode, Number(), "rollout-1"
        self.actors, self.function_actor_manager = {"a1": Rollout()}, Manager()


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.setattr(actors, "SHORTEST_NS", 0)
    looks: list[Any] = []
    made = SimpleNamespace(launch=tmp_path, named=dict, calls_saved_each_s=60.0, looks=looks)
    made.on_import = lambda module, look: looks.append(look)
    made.call = lambda action, *arguments: action(*arguments)
    actors.install(made)  # type: ignore[arg-type]
    return made


def names_noted(folder: Path) -> list[str]:
    path = folder / f"actor-{socket.gethostname()}-{os.getpid()}.jsonl"
    return [json.loads(line)["name"] for line in path.read_text().splitlines()] if path.exists() else []


def test_actor_says_who_it_is_and_notes_its_calls_whenever_its_class_was_loaded(recorder, tmp_path):
    worker = Worker(mode=1)
    recorder.looks[0](SimpleNamespace(global_worker=worker))
    assert recorder.named() == {"actor": "a1", "actor_name": "rollout-1", "actor_class": "Rollout"}
    assert recorder.calls_saved_each_s < 60
    methods = worker.function_actor_manager._function_execution_info
    later = worker.function_actor_manager._make_actor_method_executor("generate", Rollout.generate)
    assert methods["2"].function() == 7
    for method in (methods["1"].function, later):
        assert method(Rollout(), 3) == 3
        assert (method.name, method.method) == ("generate", Rollout.generate)
    assert names_noted(tmp_path) == ["Rollout.generate"] * 2
    assert next(tmp_path.glob("*.busy")).read_text() == "0"
    make = worker.function_actor_manager._make_actor_method_executor
    for name in ("answer", "stream"):  # what they return has only begun
        assert make(name, getattr(Rollout, name)).__name__ == "run"


def test_exception_passes_as_without_the_recorder_and_is_kept(recorder, tmp_path):
    worker = Worker(mode=1)
    plain = worker.function_actor_manager._make_actor_method_executor("generate", Rollout.generate)
    recorder.looks[0](SimpleNamespace(global_worker=worker))
    noting = worker.function_actor_manager._make_actor_method_executor("generate", Rollout.generate)
    texts = []
    for method in (plain, noting):
        with pytest.raises(ValueError, match="no such count") as caught:
            method(Rollout(), -1)
        texts.append(traceback.format_tb(caught.value.__traceback__)[1:])
    assert texts[0] == texts[1]
    raised = json.loads(next(tmp_path.glob("raised-*.json")).read_text())
    assert (raised["type"], raised["message"]) == ("ValueError", "no such count")


@pytest.mark.parametrize("worker", [None, Worker(mode=0)])
def test_drivers_are_no_actors(recorder, tmp_path, worker):
    recorder.looks[0](SimpleNamespace(global_worker=worker))
    assert recorder.named() == {}
    assert list(tmp_path.iterdir()) == []
