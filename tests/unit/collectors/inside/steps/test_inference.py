from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from dpro.collectors.inside.stepping import MODEL_CALL  # noqa: E402
from dpro.collectors.inside.steps import inference  # noqa: E402


class Recorder:
    """What looking for a model needs of one."""

    training_thread = num_updates = 0
    is_helper = False

    def __init__(self) -> None:
        self.steps: list[object] = []

    def call(self, action: Callable[..., None], *arguments: Any) -> None:
        action(*arguments)

    guarded = call

    def on_update(self, source: object) -> None:
        self.steps.append(source)


@pytest.fixture
def looks(monkeypatch):
    """Look as often as there is something to be found, and find just that."""

    def run(modules: list[Any], evaluated: Any = None) -> tuple[Recorder, int]:
        recorder, left = Recorder(), list(modules)

        class Call:
            """Looks at once, in this thread."""

            def __init__(self, action: Callable[[], None]) -> None:
                self.ask = action

        def look() -> Any:
            if len(left) == 1:
                calls._thread.end()
            return left.pop(0)

        monkeypatch.setattr(inference, "PATIENCE_S", 0.0)
        monkeypatch.setattr(inference, "LOOK_S", 0.0)
        monkeypatch.setattr(inference, "MainThreadCall", Call)
        monkeypatch.setattr(inference, "outermost_module", look)
        calls = inference.ModelCalls(recorder)  # type: ignore[arg-type]
        if evaluated is not None:
            calls._evaluated = weakref.ref(evaluated)
        calls._search_until_found()
        return recorder, len(modules) - len(left)

    return run


def test_model_that_is_called_now_and_then_is_found_at_the_second_call_that_is_met(looks):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    idle = [None] * 100
    recorder, num_looks = looks([*idle, model, *idle, other, *idle, model, *idle])
    assert num_looks == 303
    with torch.no_grad():
        model(torch.ones(2))
        other(torch.ones(2))
        model(torch.ones(2))
    assert recorder.steps == [MODEL_CALL, MODEL_CALL]


def test_calls_that_build_a_graph_are_no_steps_until_no_training_can_be_meant(looks, monkeypatch):
    model = torch.nn.Linear(2, 2)
    recorder, _ = looks([model, model, None])
    model(torch.ones(2))
    assert recorder.steps == []
    monkeypatch.setattr(inference, "GRAPHS_S", 0.0)
    model(torch.ones(2))
    assert recorder.steps == [MODEL_CALL]


def test_model_is_let_go_once_the_process_trains(looks):
    model = torch.nn.Linear(2, 2)
    recorder, _ = looks([model, model, None])
    assert model._compiled_call_impl is not None
    recorder.training_thread = 1
    model(torch.ones(2))
    assert model._compiled_call_impl is None
    assert recorder.steps == []


def test_models_that_are_met_once_are_not_watched(looks):
    models = [torch.nn.Linear(2, 2) for _ in range(3)]
    recorder, _ = looks([None, *models, None])
    for model in models:
        model(torch.ones(2))
    assert recorder.steps == []


def test_model_that_was_met_does_not_live_for_that(looks):
    recorder, _ = looks(
        [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), None]
    )  # perhaps with one and the same id
    assert recorder.steps == []


def test_model_that_other_threads_call_is_the_one_that_is_evaluated(looks):
    model = torch.nn.Linear(2, 2)
    recorder, num_looks = looks([None] * 1000, evaluated=model)
    assert num_looks == inference.ELSEWHERE_LOOKS
    with torch.no_grad():
        model(torch.ones(2))
    assert recorder.steps == [MODEL_CALL]


def test_evaluated_model_is_not_watched_where_the_main_thread_calls_one(looks):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    recorder, _ = looks([other, *[None] * 1000], evaluated=model)
    model(torch.ones(2))
    assert recorder.steps == []
