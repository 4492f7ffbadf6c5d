"""Megatron-core's buckets, of stand-ins with the attributes of 0.16; a slow test runs the real one."""

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from dpro.collectors.inside.calls import buckets as probe  # noqa: E402
from dpro.collectors.inside.calls.buckets import DDP_OF_MEGATRON, ddp_class, of_megatron  # noqa: E402


class Wrapped(nn.Module):
    """What Megatron-core makes of a model: buckets from the last parameter on, padded to 64 gradients."""

    def __init__(self, module: nn.Module, grad_dtype: torch.dtype = torch.float32) -> None:
        """One bucket per layer, the last one of experts; the first parameter does not train."""
        super().__init__()
        self.module = module
        last, *others = [list(reversed(list(layer.parameters()))) for layer in reversed(module)]
        others[-1] = [each for each in others[-1] if each.requires_grad]
        self.bucket_groups = [group(others, grad_dtype)]
        self.expert_parallel_bucket_groups = [group([last], grad_dtype)]


def group(members: list[list[nn.Parameter]], dtype: torch.dtype) -> SimpleNamespace:
    def bucket(parameters: list[nn.Parameter]) -> SimpleNamespace:
        padded = -(-sum(each.numel() for each in parameters) // 64) * 64
        return SimpleNamespace(params_list=parameters, grad_data=torch.zeros(padded, dtype=dtype))

    return SimpleNamespace(buckets=[bucket(each) for each in members])


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    layers[0].weight.requires_grad = False
    return layers


def test_buckets_are_those_that_megatron_made_in_the_type_that_it_reduces():
    dense, experts = of_megatron(Wrapped(model()))
    assert (dense["source"], experts["source"]) == (
        "Megatron-core buckets",
        "Megatron-core buckets of experts",
    )
    second, first = dense["buckets"]
    assert second["names"] == ["1.bias", "1.weight"]
    assert second["parameters"] == [2, 1]  # of those that train
    assert second["shapes"] == [[4], [4, 8]]
    assert second["parameter_bytes"] == [16, 128]  # of bf16 weights, reduced as fp32
    assert second["bytes"] == 256  # padded: 64 gradients
    assert (first["names"], first["parameter_bytes"]) == (["0.bias"], [32])
    assert experts["buckets"][0]["names"] == ["2.bias", "2.weight"]


class Recorder:
    """Keeps what is written, and lets errors pass."""

    def __init__(self) -> None:
        """Nothing is written yet."""
        self.files: dict[str, bytes] = {}

    def call(self, action, *arguments) -> None:
        action(*arguments)

    def write_file(self, name: str, content: bytes) -> None:
        self.files[name] = content


def imported(monkeypatch) -> type[nn.Module]:
    """Have the job import Megatron-core: a class of its own for each test, which patches it."""
    wrapper = type("DistributedDataParallel", (Wrapped,), {})
    monkeypatch.setitem(sys.modules, DDP_OF_MEGATRON, SimpleNamespace(DistributedDataParallel=wrapper))
    return wrapper


def test_a_class_is_met_once_the_job_has_imported_it(monkeypatch):
    recorder = Recorder()
    found = probe.Buckets(recorder)
    found.on_group()
    assert ddp_class() is None
    assert DDP_OF_MEGATRON not in sys.modules
    wrapper = imported(monkeypatch)
    found.on_group()
    patched = wrapper.__init__
    found.on_group()
    assert wrapper.__init__ is patched
    wrapped = wrapper(model())
    found.save()
    assert recorder.files["buckets.json"].count(b'"Megatron-core buckets') == 2
    del wrapped
    recorder.files.clear()
    found.save()
    assert recorder.files == {}  # the job let it go


def test_another_version_that_lacks_an_attribute_costs_its_buckets_alone(monkeypatch):
    recorder = Recorder()
    found = probe.Buckets(recorder)
    wrapper = imported(monkeypatch)
    found.on_group()
    lacking = wrapper(model())
    del lacking.bucket_groups[0].buckets[0].params_list
    whole = wrapper(model())
    found.save()
    assert recorder.files["buckets.json"].count(b'"source"') == 2
    assert whole is not None


def test_a_new_group_has_the_probe_look_for_the_class(monkeypatch):
    from torch.distributed import distributed_c10d

    def new_group(*_):
        return "group"

    for module in (dist, distributed_c10d):  # to be restored
        monkeypatch.setattr(module, "new_group", new_group)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "__init__", lambda *_: None)
    recorder = Recorder()
    recorder.listen = recorder.on_import = lambda *_: None
    probe.install(recorder)
    wrapper = imported(monkeypatch)
    before = wrapper.__init__
    assert dist.new_group([0]) == "group"
    assert wrapper.__init__ is not before
