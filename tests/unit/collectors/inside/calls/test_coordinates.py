"""Coordinates by Megatron-core's and DeepSpeed's own groups, of stand-ins; a slow test asks the real ones."""

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from dpro.collectors.inside.calls.mesh import DEEPSPEED, MEGATRON, of_frameworks  # noqa: E402


def state(**places):
    """An object with a rank and a size for each name."""
    made = SimpleNamespace(is_initialized=lambda: True)
    for name, (rank, size) in places.items():
        setattr(made, f"get_{name}_rank", lambda rank=rank: rank)
        setattr(made, f"get_{name}_world_size", lambda size=size: size)
    return made


@pytest.fixture
def job(monkeypatch):
    """Sets what the job has imported."""

    def imported(megatron=None, **groups):
        monkeypatch.setitem(sys.modules, MEGATRON, megatron)
        said = {"mpu": None, "mesh_device": None, "_WORLD_GROUP": None, "_EXPERT_PARALLEL_GROUP": {}} | groups
        monkeypatch.setitem(sys.modules, DEEPSPEED, SimpleNamespace(**said))

    return imported


def test_megatron_says_the_rank_on_each_axis_and_among_experts(job):
    axes = {"pipeline_model_parallel": (1, 2), "data_parallel": (0, 4), "tensor_model_parallel": (3, 8)}
    job(state(**axes, context_parallel=(0, 1), expert_model_parallel=(1, 2)))
    assert of_frameworks() == [
        {"names": ["pp", "dp", "cp", "tp"], "sizes": [2, 4, 1, 8], "coordinate": [1, 0, 0, 3]},
        {"names": ["ep"], "sizes": [2], "coordinate": [1]},
    ]


def test_megatron_that_is_not_set_up_says_nothing(job):
    job(SimpleNamespace(is_initialized=lambda: False))
    assert of_frameworks() == []
    job(SimpleNamespace(is_initialized=lambda: True, get_data_parallel_world_size=lambda: 1 / 0))
    assert of_frameworks() == []


def test_a_grid_of_deepspeed_says_its_stages_and_slices(job):
    axes = {
        "pipe_parallel": (1, 2),
        "data_parallel": (0, 2),
        "slice_parallel": (0, 1),
        "model_parallel": (1, 2),
    }
    job(mpu=state(**axes), _WORLD_GROUP="its own")
    assert of_frameworks() == [
        {"names": ["pp", "dp", "tp"], "sizes": [2, 2, 1], "coordinate": [1, 0, 0]},
    ]


def test_without_any_of_these_deepspeed_is_data_parallel_and_has_its_experts(job, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: {None: 8, "two": 2, "four": 4}[group])
    monkeypatch.setattr(dist, "get_rank", lambda group=None: {None: 5, "four": 1}[group])
    job(_WORLD_GROUP="all", _EXPERT_PARALLEL_GROUP={"ep_size_2": "two", "ep_size_4": "four"})
    assert of_frameworks() == [
        {"names": ["dp"], "sizes": [8], "coordinate": [5]},
        {"names": ["ep"], "sizes": [4], "coordinate": [1]},
    ]
    job()
    assert of_frameworks() == []  # DeepSpeed has been imported, and nothing made of it
