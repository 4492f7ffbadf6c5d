"""Work of ranks in each phase of a step, and which ranks are peers.

Takes a graph; returns work per rank, step and phase, without waits and transfers; teams of ranks that make
the same calls between equally many phases; and the median of a rank's peers. A phase is the work of a rank
between two of its collectives, in which ranks of one role do the same. Excess work is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools, Floats, Ints
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, Graph, NodeKind, computed_once, is_one_of, once
from dpro.replay.kept import kept_as

ON_CPU, ON_GPU = 0, 1  # resources
PHASE = ["position", "resource"]
LABEL = [*PHASE, "name", "around"]


def work_keys(graph: Graph, ranks: Sequence[int] | None = None) -> pl.DataFrame:
    """Return `node`, `rank`, `step` and the keys for comparison of all nodes that are work in a step."""
    if ranks is not None:
        return _work_keys(graph, np.isin(graph.nodes.rank, ranks))
    return once(graph, "work keys", _work_keys)


def _work_keys(graph: Graph, among: Bools | np.bool_ = np.True_) -> pl.DataFrame:
    nodes = graph.nodes
    on_cpu = is_one_of(nodes.kind, (*CPU_KINDS, NodeKind.DELAY))  # late launches count as work of the host
    on_gpu = is_one_of(nodes.kind, GPU_KINDS)
    node = np.flatnonzero((on_cpu | on_gpu) & among & (nodes.phase >= 0) & (nodes.step >= 0))
    same = _name_codes(graph)
    return pl.DataFrame(
        {
            "node": node,
            "rank": nodes.rank[node],
            "step": nodes.step[node],
            "position": nodes.phase[node],
            "resource": np.where(on_gpu[node], ON_GPU, ON_CPU),
            "name": same[nodes.name[node]],
            "around": np.where(nodes.around[node] >= 0, same[nodes.around[node]], -1),
        }
    )


@computed_once
def _name_codes(graph: Graph) -> Ints:
    """Return [len(names)] codes, equal in all graphs; names that differ only in numbers share one."""
    plain = (re.sub(r"\d+", "0", name).encode(errors="surrogatepass") for name in graph.names)
    digests = b"".join(blake2b(name, digest_size=8).digest() for name in plain)
    return np.frombuffer(digests, np.int64)


@kept_as("phase-work")
def phase_work(graph: Graph) -> pl.DataFrame:
    """Return the work of each rank in each phase of each step; waits and transfers do not count.

    Returns:
        `rank`, `step`, `position` (of the phase in its step), `resource` (CPU 0, GPU 1), `name`, `around`
        (codes of names without numbers), `work_ns`, `calls` (a code of the rank's calls in a step).
    """
    return with_calls(work_without_calls(graph), graph)


def work_without_calls(graph: Graph) -> pl.DataFrame:
    """Return `phase_work` without `calls`, which also works on a part of a graph with only some ranks."""
    keys = work_keys(graph)
    return (
        keys.with_columns(work_ns=pl.Series(graph.nodes.duration[keys["node"].to_numpy()]))
        .group_by("rank", "step", *LABEL)
        .agg(pl.col("work_ns").sum())
    )


def with_calls(work: pl.DataFrame, graph: Graph) -> pl.DataFrame:
    """Complete the `phase_work` of all ranks with column `calls`.

    Args:
        work: rows of `work_without_calls` for all ranks.
    """
    # A code of the usual calls of each rank in a step: operations, group sizes and phases. Stages of a
    # pipeline may make equally many calls, and still do other work in between.
    nodes = graph.nodes
    here = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & (nodes.step >= 0) & (nodes.message >= 0))
    messages = pl.DataFrame(
        [(message.op, message.num_ranks) for message in graph.messages],
        schema={"op": pl.String, "size": pl.Int64}, orient="row",
    )  # fmt: skip
    called = pl.DataFrame({"rank": nodes.rank[here], "step": nodes.step[here], "place": nodes.phase[here]})
    called = called.with_columns(messages[nodes.message[here]])
    of_steps = called.group_by("rank", "step").agg(calls=pl.struct("op", "size", "place").hash().sum())
    usual = of_steps.group_by("rank").agg(pl.col("calls").mode().min())
    return (
        work.join(usual, on="rank", how="left")
        .with_columns(pl.col("calls").fill_null(0))
        .sort("rank", "step", *LABEL)
    )


def teams_by_work(work: pl.DataFrame) -> list[list[int]]:
    """Return teams of ranks with equally many phases and the same calls; a lone rank is a team.

    Args:
        work: rows of `phase_work`.

    Returns:
        The ranks of each team, ascending; in the order of their number of phases and calls.
    """
    ranks = work.group_by("rank").agg(pl.col("position").max(), pl.col("calls").first()).sort("rank")
    by_kind = ranks.group_by("position", "calls").agg("rank").sort("position", "calls")
    return [sorted(team) for team in by_kind["rank"].to_list()]


def peers_of(teams: Iterable[Sequence[int]], rank: int) -> list[int]:
    """Return the other ranks of a rank's team; empty for a rank without a team.

    Args:
        teams: teams of `teams_by_work`.
    """
    return [peer for team in teams if rank in team for peer in team if peer != rank]


def ranks_of_teams(teams: Sequence[Sequence[int]], without: Collection[int] = ()) -> pl.DataFrame:
    """Return all `rank`s in order, with `team` (its number), `counts` (as a peer) and `others` that count.

    Args:
        teams: teams of `teams_by_work`.
        without: ranks that do not count as peers.
    """
    numbers = np.repeat(np.arange(len(teams)), [len(team) for team in teams])
    ranks = pl.DataFrame({"rank": list(chain(*teams)), "team": numbers}, {"rank": pl.Int64, "team": pl.Int64})
    counted = ranks.sort("rank").with_columns(counts=~pl.col("rank").is_in(list(without)))
    others = pl.col("counts").cast(pl.Int64).sum().over("team") - pl.col("counts").cast(pl.Int64)
    return counted.with_columns(others=others)


def peer_medians(group: Ints, value: NDArray[Any], counts: Bools, others: Ints) -> Floats:
    """Return [N] the median of the other values in each one's group, computed for all at once.

    Args:
        group: [N] numbers of groups.
        value: [N] values, not negative.
        counts: [N] whether a value counts for the others of its group.
        others: [N] number of values in the median; those missing count as 0.
    """
    order = np.lexsort((-value, ~counts, group))
    opens = np.flatnonzero(np.append(True, np.diff(group[order]) != 0)[: order.size])
    lengths = np.diff(np.append(opens, order.size))
    first = np.repeat(opens, lengths)
    counted = (
        np.repeat(np.add.reduceat(counts[order].astype(np.int64), opens), lengths) if order.size else first
    )
    rank_in_group = np.where(counts[order], np.arange(order.size) - first, order.size)
    falling, number, middles = value[order], others[order], np.zeros(order.size)
    for middle in ((number - 1) // 2, number // 2):
        place = middle + (middle >= rank_in_group)
        is_there = (middle >= 0) & (place < counted)
        middles[is_there] += falling[(first + place)[is_there]]
    median = np.empty(order.size)
    median[order] = middles / 2
    return median


def teams_in_groups(kinds: Mapping[int, Hashable], groups: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return teams of two or more ranks of one kind that wait for each other, directly or through others.

    Args:
        kinds: the work of each rank; ranks of other kinds are not peers.
        groups: ranks that call together; ranks without a kind are ignored.
    """
    linked = {rank: rank for rank in kinds}

    def root(rank: int) -> int:
        while linked[rank] != rank:
            rank = linked[rank]
        return rank

    for members in groups:
        first: dict[Hashable, int] = {}
        for rank in members:
            if rank in kinds:
                linked[root(rank)] = root(first.setdefault(kinds[rank], rank))
    by_root: dict[int, list[int]] = {}
    for rank in sorted(linked):
        by_root.setdefault(root(rank), []).append(rank)
    return [ranks for ranks in by_root.values() if len(ranks) > 1]
