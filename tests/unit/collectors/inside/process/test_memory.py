"""What is kept of an allocation that was refused: small models on the CPU, and snapshots written by hand."""

from __future__ import annotations

import json
import sys
import weakref
from collections import Counter
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.convert.tables import out_of_memory
from dpro.collectors.inside import torch_internals
from dpro.collectors.inside.files import MEMORY
from dpro.collectors.inside.process import memory
from dpro.schema import OUT_OF_MEMORY, conform

SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.00 GiB of which "
    "1.50 GiB is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved "
    "by PyTorch"
)


class Process:
    """What a probe needs of the recorder."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder
        self.is_helper = False
        self.actions: dict[str, Any] = {}

    def listen(self, occasion: str, action: Any) -> None:
        self.actions[occasion] = action

    def call(self, action: Any, *arguments: Any) -> None:
        action(*arguments)


class Refusing(torch.nn.Module):
    def forward(self, given: Any) -> Any:
        raise torch.OutOfMemoryError(SAID)


def refused_in(module: Any, process: Process) -> list[dict[str, Any]]:
    """Rows that a process leaves in which a module ran out of memory."""
    memory.install(process)  # type: ignore[arg-type]
    try:
        module(torch.ones(1, 4))
    except torch.OutOfMemoryError as error:
        process.actions["raise"](error, error.__traceback__)
    rows = out_of_memory(RecordedProcess(process.folder, {"rank": 3}))
    return conform(OUT_OF_MEMORY, rows).to_dicts()


def test_what_tensors_hold_is_counted_once_by_kind_and_by_module():
    model = torch.nn.Sequential()
    model.add_module(
        "of_this_test", torch.nn.ModuleList(torch.nn.Linear(7, 11, bias=False) for _ in range(2))
    )
    model.register_buffer("mask", torch.zeros(3, dtype=torch.uint8))
    optimizer = torch.optim.Adam(model.of_this_test.parameters(), foreach=False)
    for layer in model.of_this_test:
        layer.weight.grad = torch.ones(11, 7)
    optimizer.step()
    kept = torch.empty(5, 13)
    held, known = memory.held_by_python(-1)
    size = 2 * 7 * 11 * 4
    of_layers = {kind: held[kind, "of_this_test.*"] for kind in (memory.PARAMETERS, memory.GRADIENTS)}
    assert of_layers == {memory.PARAMETERS: size, memory.GRADIENTS: size}
    assert held[memory.STATE, "of_this_test.*"] == 2 * size + 2 * 4  # two moments, and the step of each
    assert held[memory.BUFFERS, "Sequential"] == 3
    assert held[memory.OTHERS, "[5, 13] float32"] == kept.nbytes
    assert kept.data_ptr() in known
    assert memory.held_by_python(0)[0] == {}  # none of it is on a GPU


def test_blocks_that_no_tensor_of_python_holds_are_counted_by_the_line_that_allocated_them():
    library = {
        "filename": "/venv/lib/python3.11/site-packages/torch/nn/functional.py",
        "line": 9,
        "name": "f",
    }
    own = {"filename": "/job/train.py", "line": 31, "name": "step"}

    def block(state: str, size: int, address: int, **more: Any) -> dict[str, Any]:
        return {"state": state, "size": size, "requested_size": size - 1, "address": address, **more}

    segments = [
        {
            "device": 0,
            "blocks": [
                block("active_allocated", 512, 1 << 20, frames=[library, own]),
                block("active_allocated", 1024, 2 << 20, frames=[library, own]),
                block("inactive", 4096, 3 << 20),
                block("active_awaiting_free", 256, 4 << 20, frames=[]),
                block("inactive", 2048, 5 << 20),
            ],
        }
    ]
    held: Counter[tuple[str, str]] = Counter()
    assert memory.reduced(segments, held, {2 << 20}) == {"largest_free_bytes": 4096, "history": True}
    assert held == {(memory.UNHELD, "/job/train.py:31 step"): 511, (memory.UNHELD, ""): 255}
    for each in segments[0]["blocks"]:
        each.pop("frames", None)
    assert memory.reduced(segments, Counter(), set())["history"] is False


def test_an_error_that_ends_the_script_names_the_module_and_what_its_message_says(tmp_path):
    model = torch.nn.ModuleDict({"inner": torch.nn.Sequential(torch.nn.Identity(), Refusing())})
    model.forward = lambda given: model["inner"](given)
    (row,) = refused_in(torch.nn.parallel.DataParallel(model, device_ids=None), Process(tmp_path))
    assert (row["rank"], row["phase"], row["module"]) == (3, "forward", "inner.1 Refusing")
    gib = 1 << 30
    assert (row["requested_bytes"], row["total_bytes"], row["free_bytes"]) == (
        2 * gib,
        79 * gib,
        gib * 3 // 2,
    )
    assert (row["allocated_bytes"], row["reserved_bytes"]) == (60 * gib, 60 * gib + gib // 2)
    assert row["calls"].splitlines()[0].endswith("forward")


def test_an_error_that_is_caught_is_seen_by_the_allocators_observer_and_written_once(tmp_path, monkeypatch):
    started: list[Any] = []
    observers: list[Any] = []
    internals = {
        "torch._C._cuda_attach_out_of_memory_observer": observers.append,
        "torch.cuda._lazy_call": started.append,
    }
    monkeypatch.setattr(torch_internals, "internal", internals.get)
    current = {"allocated_bytes": 900, "reserved_bytes": 1000, "active": 1, "inactive_split": 1}
    stats = {f"{name}.all.current": value for name, value in current.items()} | {"num_ooms": 5}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    block = {"state": "active_allocated", "size": 900, "address": 1}
    segments = [{"device": 0, "blocks": [block]}, {"device": 1, "blocks": [block]}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)  # an older one, without arguments
    process = Process(tmp_path)
    monkeypatch.setattr(Refusing, "forward", lambda self, given: observers[0](0, 512, 2000, 30))
    memory.install(process)  # type: ignore[arg-type]
    assert not observers  # CUDA is not there yet
    started[0]()
    Refusing()(1)
    process.actions["raise"](torch.OutOfMemoryError(SAID), None)  # which the observer has seen
    (row,) = out_of_memory(RecordedProcess(tmp_path, {"rank": 0})).to_dicts()
    assert (row["device"], row["requested_bytes"], row["total_bytes"], row["free_bytes"]) == (
        0,
        512,
        2000,
        30,
    )
    assert (row["allocated_bytes"], row["reserved_bytes"], row["refused"]) == (900, 1000, 5)
    assert (row["kinds"], row["bytes"]) == ([memory.UNHELD], [900])
    assert row["module"] == "Refusing"


@pytest.mark.slow
def test_lines_and_blocks_are_bounded_and_an_allocator_without_observers_is_no_error(tmp_path, monkeypatch):
    refused = memory.RefusedAllocations(Process(tmp_path))  # type: ignore[arg-type]
    many = {f"{name}.all.current": memory.MAX_BLOCKS for name in ("active", "inactive_split")}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: many)
    for _ in range(memory.MAX_LINES + 3):
        refused.on_refused(0, 1, 2, 3)  # `memory_snapshot` would fail here: this PyTorch has no CUDA
    lines = [json.loads(line) for line in (tmp_path / MEMORY).read_text().splitlines()]
    assert len(lines) == memory.MAX_LINES
    assert "history" not in lines[0]

    def attach(_: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver")

    monkeypatch.setattr(
        torch_internals, "internal", lambda path: attach if "attach" in path else SimpleNamespace
    )
    monkeypatch.setattr(
        torch_internals, "internal", lambda path: attach if "attach" in path else (lambda start: start())
    )
    torch_internals.on_refused_allocation(print, Process(tmp_path).call)


def test_an_update_and_a_backward_are_no_forward():
    def frame(filename: str, owner: Any = None) -> Any:
        code = SimpleNamespace(co_filename=filename, co_varnames=("self",))
        return SimpleNamespace(f_code=code, f_locals={"self": owner})

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    engine = frame(torch.autograd.__file__)
    assert memory.place_of([frame("optim.py", optimizer), engine]) == ("optimizer", "")
    assert memory.place_of([frame("job.py"), engine]) == ("backward", "")
    again = [frame("linear.py", torch.nn.Linear(1, 1)), engine]  # computed again in the backward
    assert memory.place_of(again) == ("forward", "Linear")


class Freeing(torch.nn.Module):
    def forward(self, keeps: bool) -> tuple[Any, ...]:
        large = torch.ones(9)
        seen, place = weakref.ref(large), memory.place_of(frame for frame, _ in walk_stack(sys._getframe()))
        own = locals() if keeps else {}
        memory.place_of([sys._getframe()])
        del large
        return place, seen() is None, len(own)


def test_what_a_method_frees_once_it_has_caught_the_error_is_freed_and_its_own_locals_stay():
    place, is_freed, _ = Freeing()(False)
    assert place == ("forward", "Freeing")
    assert is_freed
    assert Freeing()(True)[2] > 0


def test_a_module_whose_parameters_raise_costs_what_holds_the_memory_and_not_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "describe_memory", lambda device: {}[device])
    (row,) = refused_in(Refusing(), Process(tmp_path))
    assert (row["module"], row["kinds"], row["allocated_bytes"]) == ("Refusing", [], 60 << 30)
