"""Ranges around what TRL measures of itself: a module that looks like TRL's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
from torch.profiler import profile

from dpro.collectors.inside.steps import phases


class Context:
    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> bool:
        return False


class Trainer:
    def training_step(self, fails: bool) -> int:
        with Context("Trainer.compute_loss"):
            if fails:
                raise KeyError
        return 7


def test_contexts_and_training_steps_of_trl_become_ranges_also_where_they_raise():
    def call(action: Any, *arguments: Any) -> None:
        action(*arguments)

    looks: list[Any] = []
    phases.install(SimpleNamespace(on_import=lambda module, look: looks.append(look), call=call))  # type: ignore[arg-type]
    looks[0](SimpleNamespace())  # another TRL, without them
    looks[0](SimpleNamespace(ProfilingContext=Context, Trainer=Trainer))
    with profile() as seen:
        assert Trainer().training_step(False) == 7
        with pytest.raises(KeyError):
            Trainer().training_step(True)
    names = [event.name for event in seen.events()]
    assert names.count("Trainer.training_step") == names.count("Trainer.compute_loss") == 2
