"""From the names of a device mesh's axes to a rank's coordinates in the run.

In: what the recorder saw of the meshes that a process made. Out: `dp`, `tp`, `pp`, `cp`, `ep` of `workers`,
and `dp_size`, … A mesh has any names and any number of axes; names that are usual in PyTorch's own examples,
Megatron, DeepSpeed and TorchTitan are known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpro.collectors.inside.names import TENSOR_AXES
from dpro.words import from_json

AXES: Mapping[str, Sequence[str]] = {
    "dp": ("dp", "ddp", "fsdp", "data", "data_parallel", "dp_replicate", "dp_shard", "replicate", "shard"),
    "tp": TENSOR_AXES,
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel", "stage"),
    "cp": ("cp", "context", "context_parallel", "sp", "seq", "sequence", "sequence_parallel", "ulysses"),
    "ep": ("ep", "expert", "expert_parallel"),
}  # fmt: skip


def mesh_coordinates(path: Path) -> dict[str, int]:
    """Return where a process is on the axes whose name implies a kind of parallelism, and how long they are.

    Several axes of one kind in one mesh (replicate and shard, of hybrid sharding) are one axis, the first
    name the slowest. Of several meshes, the one with the most axes takes precedence.

    Args:
        path: `mesh.json` as the recorder left it; may be missing.

    Returns:
        By axis its coordinate, and by `dp_size`, … the axis's size.
    """
    meshes: list[dict[str, Any]] = from_json(path.read_text()) if path.is_file() else []
    known: dict[str, int] = {}
    for mesh in sorted(meshes, key=lambda mesh: -len(mesh["names"])):
        known = _coordinates(mesh) | known
    return known


def _coordinates(mesh: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size, coordinate in zip(mesh["names"], mesh["sizes"], mesh["coordinate"]):
        axis = next((axis for axis, names in AXES.items() if name.lower() in names), None)
        if axis is not None:
            found[axis] = found.get(axis, 0) * size + coordinate
            found[f"{axis}_size"] = found.get(f"{axis}_size", 1) * size
    return found
