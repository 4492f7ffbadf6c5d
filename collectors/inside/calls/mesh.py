"""Device meshes: which axes of parallelism the job has, and where on them this rank is.

In: meshes as they are made, and what Megatron-core and DeepSpeed say instead (`coordinates.py`). Out:
`mesh.json`, a list of their axes' names, sizes and this rank's coordinates.
"""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from ..patching import patch
from ..recorder import Recorder
from .coordinates import of_frameworks


class Meshes:
    """The named meshes of one process."""

    def __init__(self, recorder: Recorder) -> None:
        """No mesh is made yet."""
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """This is a forked child."""
        self._known: list[dict[str, Any]] = []
        self._asked = False

    def on_mesh(self, mesh: Any) -> None:
        """A mesh was made."""
        names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
        if not names or coordinate is None:
            return
        self._add({"names": list(names), "sizes": list(mesh.mesh.shape), "coordinate": list(coordinate)})

    def on_step(self, _step: int) -> None:
        """A step has ended: what the job needs for one is set up."""
        if not self._asked:
            self._asked = True
            for fact in of_frameworks():
                self._add(fact)

    def _add(self, fact: dict[str, Any]) -> None:
        if fact not in self._known:
            self._known.append(fact)
            self.save()

    def save(self) -> None:
        """Save the meshes, once there is a place for it."""
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
