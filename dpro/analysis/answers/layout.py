"""Where the ranks of a run stand on the axes of parallelism.

In: a run. Out: `MeshDocument`, which is part of `InfoDocument`.
"""

from __future__ import annotations

import polars as pl

from dpro.classify import REDUCTIONS
from dpro.documents import Part
from dpro.replay.mesh import AXES, GRADIENTS, RankGroup, in_words, mesh_of
from dpro.schema import BUCKETS, COLLECTIVES, PROCESS_GROUPS, WORKERS
from dpro.store import Run


class AxisDocument(Part, frozen=True):
    """An axis of parallelism.

    Attributes:
        name: dp, pp, cp, ep or tp; empty where nothing implies one.
        size: ranks along it.
    """

    name: str
    size: int


class MeshDocument(Part, frozen=True):
    """Where each rank stands.

    Attributes:
        line: the layout in words; empty where it is unknown.
        axes: those that are longer than one.
        coordinates: of each rank, by its number: its place on each axis; -1 where unknown.
        source: mesh, descriptions or algebra; empty where nothing implies it.
        ambiguity: what remains open.
    """

    line: str
    axes: list[AxisDocument]
    coordinates: dict[str, list[int]]
    source: str
    ambiguity: list[str]


def layout_document(run: Run) -> MeshDocument:
    """Where each rank of a run stands."""
    places = run.table(WORKERS).select("rank", *AXES).filter(pl.col("rank") >= 0)
    recorded = {
        row["rank"]: {axis: row[axis] for axis in AXES if row[axis] >= 0} for row in places.to_dicts()
    }
    mesh = mesh_of(groups_of(run), recorded, run.manifest.world_size)
    return MeshDocument(
        in_words(mesh),
        [AxisDocument(*axis) for axis in mesh.axes],
        {str(rank): list(place) for rank, place in sorted(mesh.coordinates.items())},
        mesh.source,
        list(mesh.ambiguity),
    )


def groups_of(run: Run) -> list[RankGroup]:
    """The process groups of a run, in the order in which they were made, as far as their names say."""
    columns = ["group", "group_ranks"]
    said = run.table(PROCESS_GROUPS).select(*columns, op=pl.lit(""))
    calls = run.table(COLLECTIVES)
    used = calls.select(*columns, "op").unique()
    reductions = calls.filter(pl.col("op").is_in(REDUCTIONS)).join(
        run.table(BUCKETS).select("rank", bytes_in="bytes"), on=["rank", "bytes_in"], how="semi"
    )
    gradients = reductions.select(*columns, op=pl.lit(GRADIENTS)).unique()
    rows = pl.concat([said, used, gradients]).filter(pl.col("group_ranks").list.len() > 0)
    known = rows.group_by(*columns).agg(pl.col("op").unique())
    groups = []
    for name, ranks, ops in known.iter_rows():
        number, _, description = name.partition(" ")  # `35 TENSOR_MODEL_PARALLEL_GROUP`
        order = (0, int(number)) if number.isdecimal() else (1, 0)
        groups.append(
            ((*order, name, sorted(ranks)), RankGroup(description, frozenset(ranks), frozenset(ops) - {""}))
        )
    return [group for _, group in sorted(groups, key=lambda each: each[0])]
