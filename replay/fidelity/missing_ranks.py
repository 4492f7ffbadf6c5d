"""Few ranks given of many: which of the missing ones a given rank stands for, and what stays unknown.

In: a built graph of which ranks are missing. Out: sentences, and a bound on what cannot be told. Ranks of one
pipeline stage do the same work and call the same collectives, so in a replay the missing ones come to a
collective together with the given ones of their stage, whatever an edit changes. How long these waited for
them is part of what looks like communication: the same communication at its fastest bounds it. What an edit
does to that waiting is between two ends: it goes away, or the missing ranks come when they came.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.alignment.match import POINT_TO_POINT
from dpro.replay.construction.graph_builder import Built
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import Timeline, measured_step_times, replay, step_times
from dpro.store import Manifest
from dpro.words import few

# Of communication that lasts longer than its fastest by no more than this, nobody was waited for.
WAITED_NS = 10_000


@dataclass(frozen=True)
class RendezvousRegistry:
    """Collectives with ranks that are missing.

    Attributes:
        transfers: [T] their nodes.
        fastest: [T] ns, the shortest that the same operation of the same group and size lasted.
    """

    transfers: Ints
    fastest: Ints


@dataclass(frozen=True)
class Folding:
    """What is taken for granted of missing ranks.

    Attributes:
        assumed: which given ranks stand for which missing ones, one line each.
        unknown: what nobody stands for, one line each.
        meetings: where they are met; None where no rank is missing, or none is met.
    """

    assumed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    meetings: RendezvousRegistry | None = None


def fold(built: Built, manifest: Manifest) -> Folding:
    """Say what the missing ranks of a run are taken to do.

    Args:
        built: the graph of the given ones.
        manifest: the run's.
    """
    missing = manifest.missing_ranks
    if not missing or built.of_operations:  # operations have places, and others of a place stand for them
        return Folding()
    meetings = meetings_with(built, missing)
    waiting = share_of_waiting(built.graph, meetings)
    bound = f", which may be up to {waiting:.0%} of a step" if waiting >= 0.01 else ""
    late = (
        f"{len(missing)} of {manifest.world_size} ranks are missing: what made the others wait for them "
        f"cannot be told from slow communication{bound}; record all ranks"
    )
    of_whom, nobody = _stood_for(built, sorted(set(manifest.ranks)))
    given = few(manifest.ranks, 8)
    assumed = (
        f"{of_whom} are taken to do what {'ranks' if len(manifest.ranks) > 1 else 'rank'} {given} "
        f"{'do' if len(manifest.ranks) > 1 else 'does'}, and an edit of a rank to be one of all it stands for"
    )
    return Folding((assumed,), (late, *nobody), meetings)


def _stood_for(built: Built, given: list[int]) -> tuple[str, list[str]]:
    """Which of the missing ranks have one that stands for them, and what nobody stands for."""
    rows = built.matching.rows
    if not rows["op"].is_in(POINT_TO_POINT).any():
        return "the missing ranks", []
    num_stages, stage_of = pipeline_stages(rows)
    absent = sorted(set(range(num_stages)) - {stage_of[rank] for rank in given if rank in stage_of})
    if absent:
        listed = ", ".join(map(str, absent))
        return "missing ranks of the same pipeline stage", [
            f"nobody is given of pipeline stage {listed} of {num_stages}: what is done there is unknown"
        ]
    told = [] if num_stages else ["what ranks of other pipeline stages do is unknown, and which those are"]
    return "missing ranks of the same pipeline stage", told


def pipeline_stages(rows: pl.DataFrame) -> tuple[int, dict[int, int]]:
    """How many stages the pipeline has, and which each rank is on; 0 where the trace does not tell.

    A group in which ranks send to each other holds one rank of each stage, in the order of the stages.

    Args:
        rows: matched collectives.
    """
    messages = rows.filter(pl.col("op").is_in(POINT_TO_POINT) & (pl.col("group_ranks").list.len() > 1))
    listed = messages["group_ranks"].unique().to_list()
    size = max(map(len, listed), default=0)
    stages = {
        rank: stage for ranks in listed for stage, rank in enumerate(sorted(ranks)) if len(ranks) == size
    }
    return size, stages


def meetings_with(built: Built, missing: Iterable[int]) -> RendezvousRegistry | None:
    """Where missing ranks are met, or may be."""
    nodes, absent = built.graph.nodes, set(missing)
    rows = built.matching.rows.select("instance", "group_ranks", "peer")
    met = [
        instance
        for instance, ranks, peer in rows.iter_rows()
        if (peer in absent if peer >= 0 else not ranks or not absent.isdisjoint(ranks))
    ]
    transfers = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & np.isin(nodes.collective, met))
    if transfers.size == 0:
        return None
    sort = np.stack([nodes.message[transfers], nodes.bytes[transfers]])
    which = np.unique(sort, axis=1, return_inverse=True)[1].reshape(-1)
    shortest = np.full(int(which.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(shortest, which, nodes.duration[transfers])
    return RendezvousRegistry(transfers, shortest[which])


def share_of_waiting(graph: Graph, meetings: RendezvousRegistry | None) -> float:
    """Share of the steps that is waiting for missing ranks, if all that may be waiting is."""
    measured = float(measured_step_times(graph)["duration_ns"].sum())
    if meetings is None or measured == 0:
        return 0.0
    prompt = replay(_without_waiting(graph, meetings))
    left = float(step_times(graph, prompt.start, prompt.end)["duration_ns"].sum())
    return max(1 - left / measured, 0.0)


def _without_waiting(graph: Graph, meetings: RendezvousRegistry) -> Graph:
    duration = graph.nodes.duration.copy()
    np.minimum.at(duration, meetings.transfers, meetings.fastest)
    return graph.with_durations(duration)


def as_missing_ranks_may_come(graph: Graph, meetings: RendezvousRegistry) -> list[Timeline]:
    """Both ends of what can become of the waiting for missing ranks under an edit.

    Args:
        graph: a changed graph with the nodes of the unchanged one.
        meetings: of the unchanged graph.

    Returns:
        Its replay when nobody waits for them any more, and when they come as late as they did, wherever they
        can have been waited for.
    """
    prompt = _without_waiting(graph, meetings)
    came = graph.nodes.measured_end[meetings.transfers] - meetings.fastest
    begun = graph.nodes.measured_end[meetings.transfers] - graph.nodes.measured_start[meetings.transfers]
    waited = begun - meetings.fastest > WAITED_NS
    earliest = graph.nodes.earliest.copy()
    np.maximum.at(earliest, meetings.transfers[waited], came[waited])
    nodes = dataclasses.replace(prompt.nodes, earliest=earliest)
    return [replay(prompt), replay(dataclasses.replace(prompt, nodes=nodes))]
