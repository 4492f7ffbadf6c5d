"""Edits as lines of code: their changes in a short training script.

Takes edits; returns the changed script, or its difference from `SCRIPT`, whose names stand in for those of
the job. Edits that do not change code (a healed rank, another network) change no line, nor do those whose
code depends on the model; `Edit.how` describes these in words.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpro.replay.whatif.edit import Edit

SCRIPT = """\
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

model = Model().to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(dataset, batch_size=batch)
for step, (inputs, targets) in enumerate(loader):
    inputs, targets = inputs.to(device), targets.to(device)
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log(loss.item())
"""
_IMPORTED = "import torch\n"
_WRAPPED = "model = DistributedDataParallel(model"
_LOOP = "for step, (inputs, targets)"
_FORWARD = "    loss = loss_of(model(inputs), targets)\n"
_BACKWARD = "    loss.backward()\n"
_UPDATE = "    optimizer.step()\n    optimizer.zero_grad()\n"
_LOG = "    log(loss.item())\n"
LOGGED_EVERY = 100  # steps

Replacements = Mapping[str, str]  # text of the script -> its replacement


def _compile(_edit: Any) -> Replacements:
    return {"optimizer = torch": "model = torch.compile(model)\noptimizer = torch"}


def _capture(edit: Any) -> Replacements:
    if str(edit) != edit.name:  # of some operators only
        return {}
    captured = 'model = torch.compile(model, mode="reduce-overhead")'
    return {"optimizer = torch": f"{captured}\noptimizer = torch"}


def _optimizer(edit: Any) -> Replacements:
    return {"AdamW(model.parameters()": f"AdamW(model.parameters(), {edit.impl}=True"}


def _precision(edit: Any) -> Replacements:
    if str(edit) != f"{edit.name}:dtype=bf16":
        return {}
    cast = "    with torch.autocast(device.type, dtype=torch.bfloat16):\n"
    return {_FORWARD: f"{cast}    {_FORWARD}"}


def _workers(edit: Any) -> Replacements:
    beside = f", num_workers={edit.count}, persistent_workers=True"
    return {"batch_size=batch": f"batch_size=batch{beside}"} if edit.count else {}


def _batch(edit: Any) -> Replacements:
    whole = float(edit.factor).is_integer()
    size = f"{edit.factor:g} * batch" if whole else f"round({edit.factor:g} * batch)"
    return {"batch_size=batch": f"batch_size={size}"}


def _bucket(edit: Any) -> Replacements:
    return {} if edit.first_mb is not None else {_WRAPPED: f"{_WRAPPED}, bucket_cap_mb={edit.mb:g}"}


def _compress(edit: Any) -> Replacements:
    if not edit.to:
        return {}
    hooks = "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
    hook = f"model.register_comm_hook(None, default_hooks.{edit.to}_compress_hook)"
    return {_IMPORTED: _IMPORTED + hooks, "optimizer = torch": f"{hook}\noptimizer = torch"}


def _collect(edit: Any) -> Replacements:
    collected = f"    if step % {edit.every} == 0:\n        gc.collect()\n" if edit.every else ""
    return {
        _IMPORTED: f"import gc\n\n{_IMPORTED}",
        _LOOP: f"gc.disable()\n{_LOOP}",
        _LOG: collected + _LOG,
    }


def _read_later(edit: Any) -> Replacements:
    if "item" not in (edit.within or "item"):
        return {}
    return {_LOG: f"    if step % {LOGGED_EVERY} == 0:\n    {_LOG}"}


def _accumulate(edit: Any) -> Replacements:
    last = f"(step + 1) % {edit.steps} == 0"
    context = f"    with nullcontext() if {last} else model.no_sync():\n"
    update = "".join(f"    {line}\n" for line in _UPDATE.splitlines())
    return {
        _IMPORTED: f"from contextlib import nullcontext\n\n{_IMPORTED}",
        _FORWARD: f"{context}    {_FORWARD}",
        _BACKWARD: f"        (loss / {edit.steps}).backward()\n",
        _UPDATE: f"    if {last}:\n{update}",
    }


_REPLACEMENTS: Mapping[str, Callable[[Any], Replacements]] = {
    "accumulate": _accumulate,
    "batch": _batch,
    "bucket": _bucket,
    "compile": _compile,
    "compress": _compress,
    "cuda-graph": _capture,
    "gc": _collect,
    "no-sync": _read_later,
    "optimizer": _optimizer,
    "precision": _precision,
    "workers": _workers,
}


def changed_script(edits: Sequence[Edit]) -> str:
    """Return `SCRIPT` with the edits applied; those without code leave it unchanged."""
    script = SCRIPT
    for edit in edits:
        replacements = _REPLACEMENTS.get(edit.name, lambda _: {})(edit)
        if all(text in script for text in replacements):  # otherwise another edit has changed these lines
            for text, instead in replacements.items():
                script = script.replace(text, instead, 1)
    return script


def code_difference(edits: Sequence[Edit]) -> list[str]:
    """Return lines that begin with `+`, `-` or a blank, as in a unified diff; none where no code changes."""
    lines = difflib.unified_diff(SCRIPT.splitlines(), changed_script(edits).splitlines(), n=1, lineterm="")
    return ["…" if line.startswith("@@") else line for line in list(lines)[2:]][1:]
