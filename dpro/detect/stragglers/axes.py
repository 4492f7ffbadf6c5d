"""Where in the layout a late rank stands, and the ranks of which of its groups wait for it.

In: a graph whose run says how its ranks are laid out. Out: an axis of parallelism, and a line of evidence.
That a rank is late is decided before: this says along which axis the others feel it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from dpro.detect.baseline import waits
from dpro.replay.graph import Graph
from dpro.replay.mesh import Mesh, named_axes, places_along
from dpro.replay.run_mesh import axes_of_messages, mesh_of_run
from dpro.units import format_duration

MIN_WAIT = 0.1  # of the longest wait: less is not worth a word


def felt_along(graph: Graph, ranks: Sequence[int]) -> tuple[str, tuple[str, ...]]:
    """The axis along which others wait most for late ranks, and that in words; none if there is one axis."""
    if graph.run is None:
        return "", ()
    mesh = mesh_of_run(graph.run)
    if len(named_axes(mesh)) < 2:
        return "", ()
    each = _waits_by_axis(graph, ranks)
    if not each:
        return "", ()
    worst = max(each, key=lambda axis: each[axis])
    words = [
        f"along {axis} {format_duration(ns)}"
        for axis, ns in sorted(each.items(), key=lambda item: -item[1])
        if ns >= MIN_WAIT * each[worst]
    ]
    who = f"rank {ranks[0]} ({place_of(mesh, ranks[0])})" if len(ranks) == 1 else "these ranks"
    return worst, (f"ranks that share a group with {who} wait for it per step: {', '.join(words)}",)


def place_of(mesh: Mesh, rank: int) -> str:
    """Where a rank stands, such as `dp 1, tp 0`; empty where that is not known."""
    places = ((name, places_along(mesh, name).get(rank)) for name in named_axes(mesh))
    return ", ".join(f"{name} {at}" for name, at in places if at is not None)


def _waits_by_axis(graph: Graph, ranks: Sequence[int]) -> dict[str, float]:
    """By axis, ns per step that each rank of their groups waits where one of these comes last."""
    nodes = graph.nodes
    axes = (*axes_of_messages(graph), "")
    known = np.flatnonzero((nodes.collective >= 0) & (nodes.message >= 0))
    named = pl.DataFrame(
        {"instance": nodes.collective[known], "axis": [axes[at] for at in nodes.message[known].tolist()]},
        {"instance": pl.Int64, "axis": pl.String},
    ).unique("instance", keep="first", maintain_order=True)
    late = pl.col("last").is_in(list(ranks)) & ~pl.col("rank").is_in(list(ranks))
    frame = waits(graph, graph.nodes.measured_start)
    steps = max(frame["step"].n_unique(), 1)
    waited = frame.filter(late & (pl.col("wait_ns") > 0)).join(
        named.filter(pl.col("axis") != ""), on="instance"
    )
    each = waited.group_by("axis").agg(pl.col("wait_ns").sum() / (steps * pl.col("rank").n_unique()))
    return {axis: float(ns) for axis, ns in each.sort("axis").iter_rows()}
