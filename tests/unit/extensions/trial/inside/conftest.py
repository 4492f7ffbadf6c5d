"""A process in which changes are made, and left as it was: torch's classes are patched as in a job."""

import json
from collections import defaultdict

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from _dpro_inside_the_job.torch_internals import loader_iterator  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import optimizer  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from dpro.extensions.trial.changes import parse_change  # noqa: E402
from dpro.extensions.trial.inside import SETTLED_AT_STEP, install  # noqa: E402


class Job:
    """What changes know of the recorder, and what they said became of them."""

    def __init__(self, folder):
        self.folder = folder
        self.num_backward = 0
        self._listeners = defaultdict(list)

    def change(self, *edits):
        self.config = {"apply": [parse_change(edit).document() for edit in edits]}
        install(self)

    def listen(self, occasion, action):
        self._listeners[occasion].append(action)

    def notify(self, occasion, *arguments):
        for action in self._listeners[occasion]:
            action(*arguments)

    def write_file(self, name, content):
        (self.folder / name).write_bytes(content)

    def backward(self, loss):
        self.num_backward += 1
        self.notify("work")
        loss.backward()

    def steps(self, *numbers):
        for number in numbers:
            self.notify("step", number)

    def said(self):
        self.notify("step", SETTLED_AT_STEP)
        return json.loads((self.folder / "applied.json").read_text())

    def places(self):
        [change] = self.said()
        assert change["refused"] == []
        return change["applied"]

    def refused(self):
        [change] = self.said()
        return "; ".join(change["refused"])


@pytest.fixture
def job(tmp_path, monkeypatch):
    optimizers = [cls for cls in vars(torch.optim).values() if isinstance(cls, type)]
    for cls in (DistributedDataParallel, DataLoader, *optimizers):
        monkeypatch.setattr(cls, "__init__", cls.__init__)
    monkeypatch.setattr(torch.nn.Module, "__call__", torch.nn.Module.__call__)
    monkeypatch.setattr(torch.amp.GradScaler, "step", torch.amp.GradScaler.step)
    for name in ("no_sync", "_ddp_init_helper"):
        monkeypatch.setattr(DistributedDataParallel, name, getattr(DistributedDataParallel, name))
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    for name in ("item", "register_hook", "retain_grad"):
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    monkeypatch.setattr(loader_iterator(), "__next__", loader_iterator().__next__)
    for cls in (torch.nn.Module, torch.optim.Optimizer):
        monkeypatch.setattr(cls, "zero_grad", cls.zero_grad)
    made = torch.optim.Optimizer.profile_hook_step
    monkeypatch.setattr(torch.optim.Optimizer, "profile_hook_step", staticmethod(made))
    for cls in optimizers:  # `step` is made for a class when its first object is
        if "step" in vars(cls):
            monkeypatch.setattr(
                cls, "step", cls.step.__wrapped__ if hasattr(cls.step, "hooked") else cls.step
            )
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)
    hooks = optimizer._global_optimizer_post_hooks
    before = dict(hooks)
    yield Job(tmp_path)
    hooks.clear()
    hooks.update(before)


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
