"""A job in deep windows as it would be with work handed out evenly, and what that would save.

In: a graph. Out: the same graph with work scaled to what it would be if all ranks that do alike work had as
large batches, and findings of `imbalance.data`. Whoever is slower than its peers there is so for another
reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.detect.amounts import amounts_in_windows
from dpro.detect.findings import Finding
from dpro.detect.straggler import FEWEST_STEPS
from dpro.detect.uneven import REST, Uneven, explain, find_uneven_work
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, Graph
from dpro.replay.timeline import steps_before_and_after
from dpro.replay.whatif.heal import ON_CPU, ON_GPU, section_work

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Even:
    """A job with even work.

    Attributes:
        graph: of it.
        findings: what uneven work costs.
        told: whether that is told from single steps. If only from ranks that always have more, it explains
            why they are slow, if they are.
        explained: ns per step that ranks typically work longer because of what they are handed.
    """

    graph: Graph
    findings: list[Finding]
    told: bool
    explained: Mapping[int, float]

    def leaves(self, findings: list[Finding]) -> list[Finding]:
        """Those of the findings about this job that are about more than amounts may be wrong about."""
        return [
            each
            for each in findings
            if each.cost_ns >= REST * max(self.explained.get(rank, 0.0) for rank in each.ranks)
        ]


def hand_out_evenly(graph: Graph) -> Even:
    """The job with even work; as it is where amounts tell nothing."""
    as_it_is = Even(graph, [], True, {})
    if graph.run is None:
        return as_it_is
    work = section_work(graph)
    resource = ON_GPU if (work["resource"] == ON_GPU).any() else ON_CPU
    own = (
        work.filter(pl.col("resource") == resource)
        .group_by("rank", "step")
        .agg(pl.col("work_ns").sum(), pl.col("position").max(), pl.col("calls").first())
        .with_columns(pl.col("position").max().over("rank"))
    )
    amounts = amounts_in_windows(graph.run)
    found = [
        each
        for _, alike in own.sort("position", "calls").group_by("position", "calls", maintain_order=True)
        if (each := _explained(alike, amounts)) is not None
    ]
    if not found:
        return as_it_is
    even = graph.with_durations(_scaled(graph, resource, found))
    before, after = steps_before_and_after(graph, even)
    if before.size < FEWEST_STEPS:
        return as_it_is
    ranks, _, most = max(found, key=lambda each: each[2].relation.clear)
    cost = float((before - after).mean())
    findings = find_uneven_work(most, cost, float(before.mean()), ranks)
    explained = {
        rank: float(value) for ranks, _, uneven in found for rank, value in zip(ranks, uneven.explained)
    }
    return Even(even, findings, most.relation.clear > 0, explained)


def _explained(
    alike: pl.DataFrame, amounts: Mapping[str, pl.DataFrame]
) -> tuple[list[int], Ints, Uneven] | None:
    """Of ranks that do alike work: who, in which steps, and why their times differ.

    Args:
        alike: `rank`, `step` and `work_ns` of their steps.
        amounts: as `amounts_in_windows` gives them; what explains times most clearly counts.
    """
    ranks: list[int] = sorted(alike["rank"].unique().to_list())
    common = alike.filter(pl.len().over("step") == len(ranks)).sort("step", "rank")
    if len(ranks) < 2 or common.is_empty():
        return None
    columns: dict[str, NDArray[Any]] = {
        name: common[name].to_numpy().reshape(-1, len(ranks)) for name in ("step", "work_ns")
    }
    steps, own = columns["step"][:, 0], columns["work_ns"].astype(float)
    told = []
    for what, frame in amounts.items():
        rows = common.join(frame, on=["rank", "step"], how="left", maintain_order="left")
        amount = rows["amount"].fill_null(np.nan).to_numpy().reshape(own.shape)
        told.append(explain(own, amount, steps, what))
    uneven = max(filter(None, told), key=lambda each: each.relation.clear, default=None)
    return None if uneven is None else (ranks, steps, uneven)


def _scaled(graph: Graph, resource: int, found: list[tuple[list[int], Ints, Uneven]]) -> Ints:
    """[N] ns, durations with work scaled to even amounts."""
    nodes = graph.nodes
    duration = nodes.duration.astype(float)
    works = np.isin(nodes.kind, GPU_KINDS if resource == ON_GPU else CPU_KINDS)
    for ranks, steps, uneven in found:
        factor = uneven.equal / uneven.own
        row = np.minimum(np.searchsorted(steps, nodes.step), len(steps) - 1)
        column = np.minimum(np.searchsorted(ranks, nodes.rank), len(ranks) - 1)
        mine = works & (steps[row] == nodes.step) & (np.array(ranks)[column] == nodes.rank)
        duration[mine] *= factor[row[mine], column[mine]]
    scaled: Ints = np.rint(duration).astype(np.int64)
    return scaled
