"""DeepSpeed's buckets, of stand-ins with the attributes of 0.19; a slow test runs the real one."""

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from dpro.collectors.inside.calls import buckets as deepspeed  # noqa: E402
from dpro.collectors.inside.calls.buckets import ENGINE, ZERO_1_2, ZERO_3, DeepSpeedBuckets  # noqa: E402

REDUCE_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"


class Recorder:
    """Lets errors pass."""

    def call(self, action, *arguments):
        action(*arguments)


class ZeroOptimizer:
    """ZeRO 1 and 2: a buffer for each type, which holds groups and places of parameters."""

    def __init__(self, model: nn.Module, stage: int) -> None:
        """All parameters are in one group."""
        self.partition_gradients = stage == 2
        self.overlap_comm = False
        self.bit16_groups = [list(model.parameters())]
        self.param_names = {parameter: name for name, parameter in model.named_parameters()}
        self.ipg_buckets = {torch.bfloat16: SimpleNamespace(params=[])}
        self.reduced: list[int] = []

    def reduce_ipg_grads(self, comm_dtype=None):
        for bucket in self.ipg_buckets.values():
            self.reduced.append(len(bucket.params))
            bucket.params.clear()

    def step(self, *buckets: tuple[int, ...]) -> None:
        for each in buckets:
            self.ipg_buckets[torch.bfloat16].params += [(0, place, -1) for place in each]
            self.reduce_ipg_grads(torch.bfloat16)


class ZeroOptimizer3:
    """ZeRO 3: a buffer holds parameters, each of which is shared out."""

    def __init__(self, model: nn.Module) -> None:
        """Its shapes are those before."""
        self.fp16_groups = [list(model.parameters())]
        self.param_names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.ds_shape = parameter.shape
            parameter.data = torch.empty(0)
        self.ipg_buckets = {
            torch.float32: SimpleNamespace(params=[]),
            torch.float16: SimpleNamespace(params=[]),
        }


setattr(ZeroOptimizer3, REDUCE_3, lambda optimizer, dtype: optimizer.ipg_buckets[dtype].params.clear())


class Engine:
    """Without ZeRO: gradients themselves are in a bucket."""

    communication_data_type = torch.float32

    def __init__(self, module: nn.Module) -> None:
        """What it trains."""
        self.module = module

    def allreduce_and_copy(self, small_bucket, dp_group=None, dp_world_size=None):
        pass


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    layers[0].bias.requires_grad = False
    return layers


@pytest.fixture
def buckets(monkeypatch) -> DeepSpeedBuckets:
    """Hooked on the stand-ins, of which each test has classes of its own."""
    for path, name, standin in (
        (ZERO_1_2, "DeepSpeedZeroOptimizer", ZeroOptimizer),
        (ZERO_3, "DeepSpeedZeroOptimizer_Stage3", ZeroOptimizer3),
        (ENGINE, "DeepSpeedEngine", Engine),
    ):
        own = type(name, (standin,), {})
        monkeypatch.setitem(sys.modules, path, SimpleNamespace(**{name: own}))
    found = DeepSpeedBuckets(Recorder())
    found.look()
    found.look()
    return found


def made(path: str, *arguments):
    [own] = vars(sys.modules[path]).values()
    return own(*arguments)


def test_each_buffer_has_the_gradients_that_were_in_it_when_it_was_reduced(buckets):
    optimizer = made(ZERO_1_2, model(), 2)
    optimizer.step((3, 2), (0,))
    optimizer.step((3, 2), (0,))  # another micro-batch
    assert optimizer.reduced == [2, 1, 2, 1]
    [found] = buckets.described()
    assert found["source"] == "DeepSpeed ZeRO-2 buckets"
    first, second = found["buckets"]
    assert first["names"] == ["1.bias", "1.weight"]
    assert first["parameters"] == [2, 1]  # of those that train
    assert first["shapes"] == [[2], [2, 8]]
    assert first["parameter_bytes"] == [4, 32]  # reduced as bf16, whatever the type of the weights
    assert (first["bytes"], second["bytes"], second["names"]) == (36, 64, ["0.weight"])


def test_zero_1_says_that_it_reduces_after_backward(buckets):
    made(ZERO_1_2, model(), 1).step((0, 2, 3))
    assert buckets.described()[0]["source"] == "DeepSpeed ZeRO-1 buckets, after backward"


def test_what_was_met_before_is_forgotten_and_nothing_is_met_after_the_last_step_of_interest(buckets):
    optimizer = made(ZERO_1_2, model(), 2)
    optimizer.step((3,))
    buckets.forget()
    optimizer.step((3, 2))
    buckets.finish()
    optimizer.step((0,))
    assert [each["names"] for each in buckets.described()[0]["buckets"]] == [["1.bias", "1.weight"]]


def test_zero_3_has_the_shapes_of_parameters_that_are_shared_out_and_only_the_buffer_of_a_type(buckets):
    layers = model()
    weight, _, _, bias = layers.parameters()
    optimizer = made(ZERO_3, layers)
    optimizer.ipg_buckets[torch.float32].params += [bias, weight]
    optimizer.ipg_buckets[torch.float16].params += [bias]
    getattr(optimizer, REDUCE_3)(torch.float32)
    [found] = buckets.described()
    assert found["source"] == "DeepSpeed ZeRO-3 buckets"
    assert [(each["names"], each["parameter_bytes"]) for each in found["buckets"]] == [
        (["1.bias", "0.weight"], [8, 128])
    ]


def test_experts_are_apart(buckets):
    layers = model()
    for parameter in layers[1].parameters():
        parameter.allreduce = False
    made(ZERO_1_2, layers, 2).step((3, 2), (0,))
    assert [each["source"] for each in buckets.described()] == [
        "DeepSpeed ZeRO-2 buckets of experts",
        "DeepSpeed ZeRO-2 buckets",
    ]


def test_without_zero_gradients_are_known_by_where_they_are(buckets):
    layers = model()
    layers(torch.ones(1, 4)).sum().backward()
    engine = made(ENGINE, layers)
    engine.allreduce_and_copy([each.grad.data for each in layers.parameters() if each.grad is not None])
    engine.allreduce_and_copy([torch.ones(3)])  # of something else
    [found] = buckets.described()
    assert [each["names"] for each in found["buckets"]] == [["0.weight", "1.weight", "1.bias"]]
    assert found["source"] == "DeepSpeed buckets, after backward"


def test_a_version_without_the_method_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, ZERO_1_2, SimpleNamespace(DeepSpeedZeroOptimizer=object))
    monkeypatch.setattr(deepspeed, "HOOKS", deepspeed.HOOKS[:1])
    found = DeepSpeedBuckets(Recorder())
    found.look()
    assert found.described() == []
