"""Extrapolation to missing ranks: which recorded ranks represent them, and what stays unknown.

Takes a built graph and its missing ranks; returns sentences, and a bound on the unknown part. Ranks of one
pipeline stage do the same work and call the same collectives, so in a replay the missing ones arrive at a
collective together with the recorded ones of their stage, whatever an edit changes. The time that recorded
ranks waited for missing ones is part of the apparent communication; the same communication at its fastest
bounds it. The effect of an edit on this waiting is between two extremes: it vanishes, or the missing ranks
arrive when they did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.members import members_of
from dpro.replay.alignment.match import POINT_TO_POINT
from dpro.replay.alignment.transfers import may_meet
from dpro.replay.construction.graph_builder import Built
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import Timeline, replay, share_saved
from dpro.store import Manifest
from dpro.words import first_few, share_missing

# Communication that exceeds its fastest by no more than this contains no waiting.
WAITED_NS = 10_000


@dataclass(frozen=True)
class PartialCollectives:
    """Collectives with missing members.

    Attributes:
        rank, collective: [T] rank and collective of each transfer.
        fastest: [T] ns, the shortest transfer of that operation, group and size.
    """

    rank: Ints
    collective: Ints
    fastest: Ints

    def transfers_in(self, graph: Graph) -> Ints:
        """Return [T] their nodes in the graph of the recorded ranks, whole or condensed."""
        nodes = graph.nodes
        transfers = np.flatnonzero(nodes.kind == NodeKind.TRANSFER)
        size = max(int(nodes.rank.max(initial=0)), int(self.rank.max(initial=0))) + 1
        member = nodes.collective[transfers] * size + nodes.rank[transfers]
        order = np.argsort(member, kind="stable")
        wanted: Ints = transfers[order[np.searchsorted(member[order], self.collective * size + self.rank)]]
        return wanted


@dataclass(frozen=True)
class Extrapolation:
    """The assumptions about missing ranks.

    Attributes:
        assumed: which recorded ranks represent which missing ones, one line each.
        unknown: what no recorded rank represents, one line each.
        rendezvous: their collectives; None where no rank is missing, or none takes part in any.
    """

    assumed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    rendezvous: PartialCollectives | None = None


def extrapolate_missing_ranks(built: Built, manifest: Manifest) -> Extrapolation:
    """Return the assumptions about the missing ranks of a run."""
    missing = manifest.missing_ranks
    if not missing or built.of_operations:  # others at their mesh position represent operations
        return Extrapolation()
    if manifest.is_pretended:  # without waits, and with other sources of communication times
        represented, unknown = _represented(built, sorted(set(manifest.ranks)))
        return Extrapolation((_assumption_in_words(represented, manifest),), tuple(unknown))
    rendezvous = rendezvous_with(built, missing)
    waiting = share_of_waiting(built.graph, rendezvous)
    bound = f", which may be up to {waiting:.0%} of a step" if waiting >= 0.01 else ""
    late = (
        f"{share_missing(len(missing), manifest.world_size)}: waits for them cannot be "
        f"distinguished from slow communication{bound}; record all ranks"
    )
    represented, unknown = _represented(built, sorted(set(manifest.ranks)))
    assumed = _assumption_in_words(represented, manifest)
    return Extrapolation((assumed,), (late, *unknown), rendezvous)


def _assumption_in_words(represented: str, manifest: Manifest) -> str:
    """Word the assumption about missing ranks that recorded ones represent."""
    several, recorded = len(manifest.ranks) > 1, first_few(manifest.ranks, 8)
    changed, all_of = f"rank {recorded}", f"all {manifest.world_size} ranks"
    if several:
        changed, all_of = "one of these", "all ranks that it represents"
    return (
        f"{represented} are assumed to do what {'ranks' if several else 'rank'} {recorded} "
        f"{'do' if several else 'does'}, and a change to {changed} is applied to {all_of}"
    )


def _represented(built: Built, given: list[int]) -> tuple[str, list[str]]:
    """Return which missing ranks are represented by recorded ones, and what is not."""
    rows = built.matching.rows
    if not rows["op"].is_in(POINT_TO_POINT).any():
        return "the missing ranks", []
    num_stages, stage_of = pipeline_stages(rows)
    absent = sorted(set(range(num_stages)) - {stage_of[rank] for rank in given if rank in stage_of})
    if absent:
        listed = ", ".join(map(str, absent))
        return "missing ranks of the same pipeline stage", [
            f"no rank of pipeline stage {listed} of {num_stages} was recorded: its work is unknown"
        ]
    unknown = [] if num_stages else ["the other pipeline stages and their work are unknown"]
    return "missing ranks of the same pipeline stage", unknown


def pipeline_stages(rows: pl.DataFrame) -> tuple[int, dict[int, int]]:
    """Return the number of pipeline stages, and the stage of each rank; 0 where the trace does not say.

    A group in which ranks send to each other has one rank of each stage, in the order of the stages.
    """
    messages = rows.filter(pl.col("op").is_in(POINT_TO_POINT))
    listed = [ranks for text in messages["group_ranks"].unique() if len(ranks := members_of(text)) > 1]
    size = max(map(len, listed), default=0)
    stages = {
        rank: stage for ranks in listed for stage, rank in enumerate(sorted(ranks)) if len(ranks) == size
    }
    return size, stages


def rendezvous_with(built: Built, missing: Collection[int]) -> PartialCollectives | None:
    """Return the transfers of collectives in which missing ranks take part, or may; None without any."""
    nodes, met = built.graph.nodes, built.matching.rows.filter(may_meet(missing))["instance"].to_numpy()
    transfers = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & np.isin(nodes.collective, met))
    if transfers.size == 0:
        return None
    kind = np.stack([nodes.message[transfers], nodes.bytes[transfers]])
    which = np.unique(kind, axis=1, return_inverse=True)[1].reshape(-1)
    shortest = np.full(int(which.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(shortest, which, nodes.duration[transfers])
    return PartialCollectives(nodes.rank[transfers], nodes.collective[transfers], shortest[which])


def share_of_waiting(graph: Graph, rendezvous: PartialCollectives | None) -> float:
    """Return the largest share of the steps that may be waiting for missing ranks.

    Args:
        rendezvous: from `rendezvous_with`.
    """
    if rendezvous is None:
        return 0.0
    return max(share_saved(graph, _without_waiting(graph, rendezvous)), 0.0)


def _without_waiting(graph: Graph, rendezvous: PartialCollectives) -> Graph:
    duration = graph.nodes.duration.copy()
    np.minimum.at(duration, rendezvous.transfers_in(graph), rendezvous.fastest)
    return graph.with_durations(duration)


def as_missing_ranks_may_come(graph: Graph, rendezvous: PartialCollectives) -> list[Timeline]:
    """Replay both extremes of the waiting for missing ranks under an edit.

    Returns:
        The replay without any waiting for them, and the one in which they arrive as late as they did,
        wherever they may have been waited for.
    """
    prompt, transfers = _without_waiting(graph, rendezvous), rendezvous.transfers_in(graph)
    came = graph.nodes.measured_end[transfers] - rendezvous.fastest
    begun = graph.nodes.measured_end[transfers] - graph.nodes.measured_start[transfers]
    waited = begun - rendezvous.fastest > WAITED_NS
    earliest = graph.nodes.earliest.copy()
    np.maximum.at(earliest, transfers[waited], came[waited])
    nodes = dataclasses.replace(prompt.nodes, earliest=earliest)
    return [replay(prompt), replay(dataclasses.replace(prompt, nodes=nodes))]
