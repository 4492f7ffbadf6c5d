"""Models and their calls as they are met on the stack of the thread that trains."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from dpro.collectors.inside.steps import model_calls  # noqa: E402
from dpro.collectors.inside.steps.model_calls import TrainedModels, describe, outermost_call  # noqa: E402
from dpro.collectors.inside.torch_internals import module_calls  # noqa: E402
from tests.jobs import wait_until  # noqa: E402


class Recorder:
    """What looking for models needs of one."""

    num_backward = 0
    training_thread = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: list[dict[str, Any]] = []

    def call(self, action: Callable[..., None], *arguments: Any) -> None:
        action(*arguments)

    def write_file(self, name: str, content: bytes) -> None:
        assert name == "model.json"
        self.written.append(json.loads(content))


class Inner(nn.Module):
    """A module in whose call something is done."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.during: Callable[[], None] = lambda: None

    def forward(self, tokens: Any, mask: Any = None) -> Any:
        self.during()
        return self.weight.sum() * tokens.sum()


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Rows(nn.Module):
    """Weights of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)  # 40, none of which is multiplied
        self.frozen = nn.Linear(4, 4)  # 16 + 4
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(4)  # 8
        self.attention = nn.MultiheadAttention(4, 1)  # 48 + 12 and 16 + 4
        self.stem = nn.Conv2d(3, 4, 2, bias=False)  # 48
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight  # tied: multiplied here


def met(recorder: Recorder, inner: Inner, call: Callable[[], Any]) -> TrainedModels:
    """What is met while a call is made, which is looked at once."""
    models = TrainedModels(recorder)  # type: ignore[arg-type]

    def look() -> None:
        found = outermost_call(sys._getframe(), module_calls())
        if found is not None:
            models._meet(found.f_locals)

    inner.during = look
    call()
    return models


def test_the_outermost_module_and_its_tensors_are_met(tmp_path):
    recorder, inner = Recorder(tmp_path), Inner()
    tokens, mask = torch.ones(4, 6, dtype=torch.int64), torch.ones(6, dtype=torch.bool)
    models = met(recorder, inner, lambda: Outer(inner)({"ids": tokens, "name": "x"}["ids"], mask=mask))
    models.save()  # the model is no more, and its call says nothing
    [saved] = recorder.written
    assert saved["models"] == [None]
    assert [(call["shapes"], call["dtypes"]) for call in saved["calls"]] == [
        ([[4, 6], [6]], ["int64", "bool"])
    ]


def test_each_backward_has_one_call_and_evaluation_none(tmp_path):
    recorder, inner = Recorder(tmp_path), Inner()
    outer = Outer(inner)

    def job() -> None:
        for _ in range(2):  # of one loss, or met twice in one call
            outer(torch.ones(2))
        recorder.num_backward += 1
        outer(torch.ones(3))
        outer.eval()
        recorder.num_backward += 1
        outer(torch.ones(4))

    models = met(recorder, inner, job)
    models.save()
    models.save()
    [saved] = recorder.written
    assert [call["shapes"] for call in saved["calls"]] == [[[2]], [[3]]]
    assert saved["models"][0]["name"] == "Outer"


def test_activations_that_a_backward_computes_again_are_no_calls(tmp_path):
    from torch.utils.checkpoint import checkpoint

    recorder, inner = Recorder(tmp_path), Inner()
    calls = 0

    def job() -> None:
        nonlocal calls
        loss = checkpoint(inner, torch.ones(2), use_reentrant=False)
        recorder.num_backward += 1
        loss.backward()

    models = met(recorder, inner, job)
    assert list(models._calls) == [(0, 0)]


def test_main_thread_looks_where_it_is_until_its_model_was_met(tmp_path, monkeypatch):
    monkeypatch.setattr(model_calls, "LOOK_S", 0.001)
    monkeypatch.setattr(model_calls, "MAX_CALLS", 1)
    recorder, inner = Recorder(tmp_path), Inner()
    recorder.training_thread = threading.get_ident()
    models = TrainedModels(recorder)  # type: ignore[arg-type]
    outer, looked = Outer(inner), threading.Event()
    monkeypatch.setattr(recorder, "write_file", lambda name, content: looked.set())
    inner.during = lambda: wait_until(looked.is_set, "never looked at", 60)  # a long forward
    models.on_step(model_calls.KNOWN_AT_STEP - 1)
    assert not models._thread.is_started
    models.on_step(model_calls.KNOWN_AT_STEP)
    outer(torch.ones(5, 7))
    models.on_end()
    assert looked.is_set()
    assert [call["shapes"] for call in models._calls.values()] == [[[5, 7]]]


def test_thread_that_trains_beside_the_main_thread_is_not_looked_at(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.training_thread = threading.get_ident() + 1
    models = TrainedModels(recorder)  # type: ignore[arg-type]
    models.on_step(model_calls.KNOWN_AT_STEP)
    assert not models._thread.is_started


def test_elements_of_weights_are_counted_by_what_is_done_with_them():
    assert describe(nn.DataParallel(Rows())) == {
        "name": "Rows",
        "parameters": 40 + 20 + 8 + 60 + 20 + 48,
        "matrices": 16 + 48 + 16 + 40,
        "trained_matrices": 48 + 16 + 40,
        "tensors": 48,
        "experts": False,
    }


def test_modules_called_experts_are_seen():
    assert describe(nn.ModuleDict({"experts": nn.Linear(2, 2)}))["experts"]


class Mesh:
    mesh_dim_names: tuple[str, ...] | None = ("dp", "tp")
    ndim = 2

    def size(self, axis: int) -> int:
        return (4, 2)[axis]


class Placement:
    def is_shard(self) -> bool:
        return True


def test_a_rank_of_tensor_parallelism_computes_with_its_part_and_one_of_fsdp_with_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=nn.Parameter))
    model = nn.Linear(8, 6, bias=False)
    spec = model.weight._spec = SimpleNamespace(mesh=Mesh(), placements=(Placement(), Placement()))
    assert describe(model)["matrices"] == 24
    unnamed = Mesh()
    unnamed.mesh_dim_names, unnamed.ndim = None, 2
    spec.mesh = unnamed
    assert describe(model)["matrices"] == 6
