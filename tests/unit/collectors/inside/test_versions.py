"""What older versions of PyTorch do not have, as they would behave; `make test-torch` runs the real ones."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from dpro.collectors.inside import patching
from dpro.collectors.inside.windows import kineto


def binding(*names: str) -> Any:
    def config(**wanted: bool) -> dict[str, bool]:
        if set(wanted) - set(names):
            raise TypeError("__init__(): incompatible constructor arguments")
        return wanted

    return config


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (("enable_cuda_sync_events", "trace_only"), {"enable_cuda_sync_events": True, "trace_only": True}),
        (("enable_cuda_sync_events",), {"enable_cuda_sync_events": True}),
        ((), {}),
    ],
)
def test_kineto_is_configured_with_what_its_binding_takes(monkeypatch, names, taken):
    monkeypatch.setattr(kineto, "_ExperimentalConfig", binding(*names))
    assert kineto.config_of(enable_cuda_sync_events=True, trace_only=True) == taken


def test_code_that_is_kept_from_the_compiler_is_not_compiled():
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    def ours(value: Any) -> Any:
        return value + 1

    def theirs(value: Any) -> Any:
        return value + 2

    skip = patching.frame_skipper()
    assert skip is not None
    skip(ours.__code__)
    torch.compile(ours, backend=backend)(torch.ones(1))
    assert compiled == []
    torch.compile(theirs, backend=backend)(torch.ones(1))
    assert len(compiled) == 1
