"""Where the ranks of a run stand, and along which axis each of its process groups is.

In: a run's process groups, calls, buckets and workers. Out: `Mesh`, and an axis for each kind of
communication of a graph. How coordinates follow from groups is in `mesh.py`.
"""

from __future__ import annotations

import polars as pl

from dpro.classify import REDUCTIONS
from dpro.members import members_of
from dpro.replay.alignment.match import group_label
from dpro.replay.graph import Graph
from dpro.replay.kept import kept
from dpro.replay.mesh import AXES, GRADIENTS, Mesh, RankGroup, axis_of_group, mesh_of
from dpro.schema import BUCKETS, COLLECTIVES, PROCESS_GROUPS, WORKERS
from dpro.store import Run
from dpro.words import whole_number


def mesh_of_run(run: Run) -> Mesh:
    """Where each rank of a run stands."""
    places = run.table(WORKERS).filter(pl.col("rank") >= 0)
    recorded = {
        row["rank"]: {axis: row[axis] for axis in AXES if row[axis] >= 0} for row in places.to_dicts()
    }
    sizes = {axis: max(places[f"{axis}_size"].to_list(), default=-1) for axis in AXES}
    return mesh_of(groups_of(run), recorded, run.manifest.world_size, sizes)


def axes_of_messages(graph: Graph) -> tuple[str, ...]:
    """The axis along which each kind of communication is, in the order of the graph's messages.

    Messages between two ranks are along the axis in which these two differ, whatever group they are sent in.

    Returns:
        As of `axis_of_group`; all empty where the graph has no run.
    """
    return kept(graph, "axes-of-messages", (graph.messages, graph.run), lambda: _axes_of_messages(graph))


def _axes_of_messages(graph: Graph) -> tuple[str, ...]:
    if graph.run is None:
        return ("",) * len(graph.messages)
    mesh = mesh_of_run(graph.run)
    columns = ["rank", "peer", "op", "group", "group_ranks"]
    calls = graph.run.table(COLLECTIVES, columns).with_columns(label=group_label())
    alone = calls.filter(pl.col("peer") < 0).select("op", "label", "group", ranks="group_ranks")
    pairs = calls.filter(pl.col("peer") >= 0).select(
        "op", "label", "group", ranks=pl.format("{},{}", "rank", "peer")
    )
    axes_of: dict[tuple[str, str], set[str]] = {}
    for op, label, group, ranks in pl.concat([alone, pairs]).unique().iter_rows():
        axis = axis_of_group(mesh, members_of(ranks), description_of(group))
        axes_of.setdefault((op, label), set()).add(axis)
    axes = {message: each.pop() for message, each in axes_of.items() if len(each) == 1}
    return tuple(axes.get((message.op, message.group), "") for message in graph.messages)


def description_of(group: str) -> str:
    """What the job says of a group, which is in its name in a run (`35 TENSOR_MODEL_PARALLEL_GROUP`)."""
    return group.partition(" ")[2]


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
    rows = pl.concat([said, used, gradients]).filter(pl.col("group_ranks") != "")
    used_for = rows.group_by(*columns).agg(pl.col("op").unique())
    groups = []
    for name, text, ops in used_for.iter_rows():
        ranks = members_of(text)
        number = whole_number(name.partition(" ")[0])
        order = (0, number) if number >= 0 else (1, 0)
        described = RankGroup(description_of(name), frozenset(ranks), frozenset(ops) - {""})
        groups.append(((*order, name, sorted(ranks)), described))
    return [group for _, group in sorted(groups, key=lambda each: each[0])]
