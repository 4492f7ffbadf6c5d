"""Device meshes: which axes of parallelism the job has, and this rank's coordinates on them.

Reads meshes as they are made, and the groups of Megatron-core and DeepSpeed, which make none. Writes
`mesh.json`, a list of the axes' names, sizes and this rank's coordinates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ..patching import patch
from ..recorder import ENOUGH, Recorder


class Meshes:
    """The named meshes of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """Start without meshes in a forked child."""
        self._known: list[dict[str, Any]] = []

    def on_mesh(self, mesh: Any) -> None:
        """Add a new mesh, if its axes have names and it contains this rank."""
        names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
        if not names or coordinate is None:
            return
        self._add({"names": list(names), "sizes": list(mesh.mesh.shape), "coordinate": list(coordinate)})

    def on_step(self, _step: int) -> object:
        """Add the axes of frameworks, which are set up by the end of a step."""
        for fact in of_frameworks():
            self._add(fact)
        return ENOUGH

    def _add(self, fact: dict[str, Any]) -> None:
        if fact not in self._known:
            self._known.append(fact)
            self.save()

    def save(self) -> None:
        """Save the meshes, once the process has a folder."""
        if self._known and self._recorder.folder is not None:
            self._recorder.write_file("mesh.json", json.dumps(self._known).encode())


def install(recorder: Recorder) -> None:
    """Record device meshes."""
    if not dist.is_available():
        return
    from torch.distributed.device_mesh import DeviceMesh

    meshes = Meshes(recorder)
    patch(DeviceMesh, "__init__", after=lambda mesh: recorder.call(meshes.on_mesh, mesh))
    recorder.listen("open", meshes.save)
    recorder.listen("step", meshes.on_step)
    recorder.listen("fork", meshes.on_fork)


# This rank's coordinates on the axes of Megatron-core and DeepSpeed, which make no device meshes.

MEGATRON = "megatron.core.parallel_state"
DEEPSPEED = "deepspeed.utils.groups"
# By axis, its names in Megatron-core and in objects like it (DeepSpeed's `mpu`): the first that exists.
AXES: Sequence[tuple[str, Sequence[str]]] = (
    ("pp", ("pipeline_model_parallel", "pipe_parallel")),
    ("dp", ("data_parallel",)),
    ("cp", ("context_parallel", "sequence_parallel")),
    ("tp", ("tensor_model_parallel", "slice_parallel", "model_parallel")),
)
EXPERTS = "expert_model_parallel"


def of_frameworks() -> list[dict[str, Any]]:
    """Return the axes of frameworks that are set up, as `names`, `sizes` and `coordinate`."""
    facts = []
    for state in _states():
        with suppress(Exception):  # an unknown version
            facts += [
                fact for fact in (_of_axes(state, AXES), _of_axes(state, (("ep", (EXPERTS,)),))) if fact
            ]
    with suppress(Exception):
        facts += _of_deepspeed(sys.modules.get(DEEPSPEED))
    return facts


def _states() -> Iterator[Any]:
    """Yield what has ranks and sizes: Megatron-core, once it is set up, and DeepSpeed's `mpu`."""
    megatron = sys.modules.get(MEGATRON)
    if megatron is not None and getattr(megatron, "is_initialized", lambda: False)():
        yield megatron
    state = getattr(sys.modules.get(DEEPSPEED), "mpu", None)
    if state is not None and state is not megatron:
        yield state


def _of_axes(state: Any, axes: Sequence[tuple[str, Sequence[str]]]) -> dict[str, Any]:
    """Return the axes with a rank and a size in `state`; empty where it has none."""
    places: list[tuple[str, int, int]] = []
    for axis, spellings in axes:
        name = next((spelling for spelling in spellings if hasattr(state, f"get_{spelling}_world_size")), "")
        if not name:
            continue
        size = getattr(state, f"get_{name}_world_size")()
        rank = getattr(state, f"get_{name}_rank")() if size else None
        if size and rank is not None and 0 <= rank < size:
            places.append((axis, int(size), int(rank)))
    if not places:
        return {}
    names, sizes, coordinate = map(list, zip(*places))
    return {"names": names, "sizes": sizes, "coordinate": coordinate}


def _of_deepspeed(groups: Any) -> Iterator[dict[str, Any]]:
    """Yield data parallelism where DeepSpeed has no other axis, and its experts."""
    if groups is None:
        return
    alone = groups.mpu is None and getattr(groups, "mesh_device", None) is None
    world = getattr(groups, "_WORLD_GROUP", None)
    if alone and world is not None:
        yield {"names": ["dp"], "sizes": [dist.get_world_size()], "coordinate": [dist.get_rank()]}
    experts = [(dist.get_world_size(group), group) for group in groups._EXPERT_PARALLEL_GROUP.values()]
    if experts:
        size, group = max(experts, key=lambda expert: expert[0])
        yield {"names": ["ep"], "sizes": [size], "coordinate": [dist.get_rank(group)]}
