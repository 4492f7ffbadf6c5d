"""Transfers that became slower than they were: the network against its own history.

In: a graph whose windows reach over many steps. Out: a finding for transfers between hosts, and one for those
within: since when, by how much, and what the groups that became slower have in common. A group is compared
with itself, so what befell all alike is found, too. Waiting is no part of transfers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.detect.changepoints import change_points
from dpro.detect.fabric import LIKE
from dpro.detect.findings import Finding
from dpro.detect.network import Suspect, blame, host_of, replayed_with, transfers_of, words_of
from dpro.replay.graph import Graph
from dpro.units import format_bytes, format_duration

Floats = NDArray[np.float64]

SLOWER = 1.15  # times what it was
LEAST_SHARE = 0.01  # of the step: what costs less is not worth a finding
FEWEST = 3  # transfers of a group on each side of a change, to say whether it changed
LINES = 3  # of evidence
SIDES = {True: "between hosts", False: "within hosts"}


class Change(NamedTuple):
    """What became slower.

    Attributes:
        since: the first step of the slower level.
        times: how many times as long transfers take.
        between: whether transfers between hosts did, or those within.
        groups: `LIKE` columns, `members`, `before_ns`, `after_ns`, and whether each became `slow`.
    """

    since: int
    times: float
    between: bool
    groups: pl.DataFrame


def find_slower_transfers(graph: Graph) -> list[Finding]:
    """Say so if transfers take clearly longer since some step, and the steps wait for it."""
    transfers = transfers_of(graph)
    changes = [change for side in SIDES if (change := change_of(transfers, between=side))]
    found = (_describe(graph, transfers, change, host_of(graph)) for change in changes)
    return [finding for finding in found if finding]


def change_of(transfers: pl.DataFrame, *, between: bool) -> Change | None:
    """The change for the worse that lasts to the end; None where there is none.

    Args:
        transfers: as `transfers_of` gives them.
        between: look at transfers between hosts; else at those within.
    """
    keys = [*LIKE, "members"]
    mine = transfers.filter((pl.col("num_hosts") > 1) == between)
    relative = (pl.col("transfer_ns") / pl.col("transfer_ns").median().over(keys)).alias("relative")
    series = mine.with_columns(relative).group_by("step").agg(pl.col("relative").median()).sort("step")
    times = series["relative"].to_numpy()
    cuts = change_points(times, SLOWER - 1)
    levels = [float(np.median(part)) for part in np.split(times, cuts)] if cuts else []
    if len(levels) < 2 or levels[-1] < SLOWER * min(levels[:-1]):
        return None
    first = len(levels) - 1  # of the levels that are slower to the end
    while first > 0 and levels[first - 1] >= SLOWER * min(levels):
        first -= 1
    if first == 0:
        return None
    since = int(series["step"][cuts[first - 1]])
    groups = _sides(mine, keys, since)
    if not groups["slow"].any():
        return None
    before, after = times[: cuts[first - 1]], times[cuts[first - 1] :]
    return Change(since, float(np.median(after) / np.median(before)), between, groups)


def _sides(transfers: pl.DataFrame, keys: list[str], since: int) -> pl.DataFrame:
    """What each group typically took before a step and takes since, and whether it is slow now."""
    old, new = (
        pl.col("transfer_ns").filter(side) for side in (pl.col("step") < since, pl.col("step") >= since)
    )
    return (
        transfers.group_by(keys)
        .agg(before_ns=old.median(), after_ns=new.median(), seen=pl.min_horizontal(old.len(), new.len()))
        .filter(pl.col("seen") >= FEWEST)
        .with_columns(slow=pl.col("after_ns") >= SLOWER * pl.col("before_ns"))
        .sort(keys)
    )


def _describe(
    graph: Graph, transfers: pl.DataFrame, change: Change, hosts: Mapping[int, str]
) -> Finding | None:
    """The finding, None where the steps since then hardly wait for it."""
    slow = change.groups.filter("slow")
    faster = slow.select(*LIKE, "members", times=pl.col("before_ns") / pl.col("after_ns"))
    since = transfers.filter(pl.col("step") >= change.since)
    saved, base = replayed_with(graph, since.join(faster, on=[*LIKE, "members"]))
    late = [at for at, step in enumerate(sorted(set(_steps(graph)))) if step >= change.since]
    saved, base = saved[late], base[late]
    cost = float(saved.mean())
    if cost < LEAST_SHARE * base.mean():
        return None
    kind, name, class_ = _component(change, hosts)
    ranks = sorted({int(rank) for members in slow["members"] for rank in members.split(",")})
    step = float(base.mean())
    evidence = (
        f"since step {change.since} transfers {SIDES[change.between]} take {change.times:.2f} times as long "
        f"as before, {slow.height} of {change.groups.height} groups that call the same on both sides of it",
        *_slowest(slow),
        _other_side(transfers, change),
        f"replayed with these transfers as fast as before, the steps since then take "
        f"{format_duration(step - cost)} instead of {format_duration(step)}",
    )
    persistent = round(float((saved > 0).mean()), 3)
    return Finding(class_, kind, name, tuple(ranks), round(cost / step, 4), persistent, cost, evidence)


def _steps(graph: Graph) -> list[int]:
    return [int(step) for step in np.unique(graph.nodes.step[graph.nodes.step >= 0])]


def _component(change: Change, hosts: Mapping[int, str]) -> tuple[str, str, str]:
    """What is at fault: what slow groups have in common where others stayed as they were, else all of it."""
    everywhere = ("network", SIDES[change.between], "slow.fabric")
    if change.groups["slow"].all():
        return everywhere
    explained = list(blame(change.groups, hosts))
    if len(explained) != 1:
        return everywhere
    suspects: list[Suspect] = explained[0][0]
    if len(suspects) > 1:
        return "one of", ", ".join(map(words_of, suspects)), suspects[0].class_
    return suspects[0].kind, suspects[0].id, suspects[0].class_


def _slowest(slow: pl.DataFrame) -> list[str]:
    worst = slow.sort(pl.col("after_ns") / pl.col("before_ns"), "members", descending=[True, False])
    return [
        f"{op} of {format_bytes(size)} among ranks {members}: {format_duration(after)}, before "
        f"{format_duration(before)}"
        for op, size, members, before, after in worst.select(
            "op", "bytes", "members", "before_ns", "after_ns"
        )
        .head(LINES)
        .iter_rows()
    ]


def _other_side(transfers: pl.DataFrame, change: Change) -> str:
    """Whether transfers on the other side, within hosts or between them, changed as well."""
    rest = _sides(
        transfers.filter((pl.col("num_hosts") > 1) != change.between), [*LIKE, "members"], change.since
    )
    where = SIDES[not change.between]
    if rest.is_empty():
        return f"nothing is known of transfers {where}"
    ratio = float((rest["after_ns"] / rest["before_ns"]).median())  # type: ignore[arg-type]
    return f"transfers {where} take {ratio:.2f} times as long as before"
