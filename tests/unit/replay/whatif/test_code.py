"""Changes as lines of code: each changed script is run, and does what its edit says."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpro.replay.whatif.code import LOGGED_EVERY, SCRIPT, changed_script, code_difference
from dpro.replay.whatif.registry import parse_edit

NUM_BATCHES, BATCH = 6, 2


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A process group of one, what the scripts compile, and how they load."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(options) or model)
    yield compiled
    torch.distributed.destroy_process_group()
    gc.enable()


def run(*edits: str) -> dict[str, Any]:
    logged: list[float] = []
    names: dict[str, Any] = {
        "Model": lambda: nn.Linear(3, 2),
        "device": torch.device("cpu"),
        "dataset": [(torch.ones(3), torch.zeros(2))] * NUM_BATCHES * BATCH,
        "batch": BATCH,
        "loss_of": nn.functional.mse_loss,
        "log": logged.append,
    }
    exec(changed_script([parse_edit(edit) for edit in edits]), names)
    return names | {"logged": logged}


def test_the_script_as_it_is_runs(alone):
    assert len(run()["logged"]) == NUM_BATCHES
    assert changed_script([]) == SCRIPT
    assert code_difference([]) == []


def test_each_change_of_code_does_what_its_edit_says(alone):
    assert run("optimizer:impl=fused")["optimizer"].defaults["fused"]
    run("compile", "cuda-graph")
    assert alone == [{}, {"mode": "reduce-overhead"}]
    loader = run("workers:count=1", "batch:factor=1.5")["loader"]
    assert (loader.num_workers, loader.persistent_workers, loader.batch_size) == (1, True, 3)
    assert run("bucket:mb=1")["model"].bucket_bytes_cap == 1 << 20
    assert len(run("no-sync:within=aten::item")["logged"]) == 1 + (NUM_BATCHES - 1) // LOGGED_EVERY
    assert isinstance(run("compress:to=fp16")["model"], DistributedDataParallel)
    assert run("precision:dtype=bf16")["loss"].dtype == torch.float32
    run("gc:every=2")
    assert not gc.isenabled()


def test_gradients_of_several_passes_are_reduced_and_applied_once(alone, monkeypatch):
    updates, reduces = [], []
    step, backward = torch.optim.AdamW.step, torch.Tensor.backward
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: updates.append(step(self)))

    def noted(loss: torch.Tensor) -> None:
        reduces.append(torch.is_grad_enabled())
        backward(loss)

    monkeypatch.setattr(torch.Tensor, "backward", noted)
    run("accumulate:steps=2")
    assert (len(updates), len(reduces)) == (NUM_BATCHES // 2, NUM_BATCHES)


def test_several_changes_go_together_and_each_is_a_line():
    together = code_difference(
        [parse_edit(text) for text in ("compile", "bucket:mb=4", "optimizer:impl=fused")]
    )
    assert [line for line in together if line.startswith("+")] == [
        "+model = DistributedDataParallel(model, bucket_cap_mb=4)",
        "+model = torch.compile(model)",
        "+optimizer = torch.optim.AdamW(model.parameters(), fused=True)",
    ]


@pytest.mark.parametrize(
    "edit",
    ["heal:rank=1", "network:bandwidth=2", "precision:dtype=fp8", "compress:topk=0.01", "workers:count=0",
     "no-sync:within=cudaStreamSynchronize", "bucket:mb=1,first_mb=2"],
)  # fmt: skip
def test_what_is_no_code_of_a_script_like_this_has_none(edit):
    assert code_difference([parse_edit(edit)]) == []
