from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from dpro.collectors.inside.calls.buckets import of_ddp  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(cap_mb: float, **options: bool) -> DistributedDataParallel:
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 256), nn.Linear(256, 4))
    model[1].bias.requires_grad = False
    module = DistributedDataParallel(model, bucket_cap_mb=cap_mb, **options)
    for _ in range(3):
        module(torch.ones(2, 64)).sum().backward()
    return module


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {}, {"static_graph": True}])
@pytest.mark.parametrize("cap_mb", [25, 0.3, 0.0001])
def test_buckets_have_their_parameters_whether_or_not_ddp_rebuilds_them(options, cap_mb):
    found = of_ddp(wrapped(cap_mb, **options))["buckets"]
    assert sorted(index for bucket in found for index in bucket["parameters"]) == [0, 1, 2, 3, 4]
    assert all(bucket["bytes"] == sum(bucket["parameter_bytes"]) for bucket in found)
    assert {"2.weight", "2.bias"} & {*found[0]["names"]}  # the last layer communicates first


def test_buckets_of_unknown_members_have_sizes_alone(monkeypatch):
    module = wrapped(25, find_unused_parameters=True)
    monkeypatch.setattr(dist, "_compute_bucket_assignment_by_size", lambda *_: ([[0]], []))
    [bucket] = of_ddp(module)["buckets"]
    assert bucket["bytes"] == sum((64 * 512 + 512, 512 * 256, 256 * 4 + 4)) * 4
    assert bucket["parameters"] == bucket["names"] == []
