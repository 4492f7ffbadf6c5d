"""Where the ranks of a run stand on the axes of parallelism.

In: a run. Out: `MeshDocument`, which is part of `InfoDocument`.
"""

from __future__ import annotations

from dpro.documents import DocumentPart
from dpro.replay.mesh import in_words
from dpro.replay.run_mesh import mesh_of_run
from dpro.store import Run


class AxisDocument(DocumentPart, frozen=True):
    """An axis of parallelism.

    Attributes:
        name: dp, pp, cp, ep or tp; empty where nothing implies one.
        size: ranks along it.
    """

    name: str
    size: int


class OverlayDocument(DocumentPart, frozen=True):
    """Experts, laid over axes that hold all ranks already.

    Attributes:
        name: ep.
        size: ranks that hold all experts together.
        over: the axes along which those differ.
    """

    name: str
    size: int
    over: list[str]


class MeshDocument(DocumentPart, frozen=True):
    """Where each rank stands.

    Attributes:
        line: the layout in words; empty where it is unknown.
        axes: those that are longer than one.
        coordinates: of each rank, by its number: its place on each axis; -1 where unknown.
        source: mesh, descriptions or algebra; empty where nothing implies it.
        ambiguity: what remains open.
        overlays: experts that are laid over the axes.
    """

    line: str
    axes: list[AxisDocument]
    coordinates: dict[str, list[int]]
    source: str
    ambiguity: list[str]
    overlays: list[OverlayDocument]


def layout_document(run: Run) -> MeshDocument:
    """Where each rank of a run stands."""
    mesh = mesh_of_run(run)
    return MeshDocument(
        in_words(mesh),
        [AxisDocument(*axis) for axis in mesh.axes],
        {str(rank): list(place) for rank, place in sorted(mesh.coordinates.items())},
        mesh.source,
        list(mesh.ambiguity),
        [OverlayDocument(each.name, each.size, list(each.over)) for each in mesh.overlays],
    )
