"""Where the ranks of a run stand: what its tables say to `mesh.mesh_of`.

In: a run. Out: its `Mesh`.
"""

from __future__ import annotations

import polars as pl

from dpro.classify import REDUCTIONS
from dpro.replay.mesh import AXES, GRADIENTS, Mesh, RankGroup, mesh_of
from dpro.schema import BUCKETS, COLLECTIVES, PROCESS_GROUPS, WORKERS
from dpro.store import Run


def mesh_of_run(run: Run) -> Mesh:
    """Where each rank of a run stands."""
    places = run.table(WORKERS).select("rank", *AXES).filter(pl.col("rank") >= 0)
    recorded = {
        row["rank"]: {axis: row[axis] for axis in AXES if row[axis] >= 0} for row in places.to_dicts()
    }
    return mesh_of(groups_of(run), recorded, run.manifest.world_size)


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
