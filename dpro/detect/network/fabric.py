"""Groups of hosts between which all is slow: a switch, or what lies between two parts of the network.

In: transfers, and which host each rank is on. Out: blocks: hosts fall into parts, transfers within a part are
fast, and all those between parts are slow. Most pairs of hosts are then slow, so that a comparison with the
usual shows nothing; two levels do, and which hosts are on which. Whether the network is broken there or was
built so, the transfers of one run do not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import polars as pl

LIKE = ["op", "bytes", "num_ranks", "num_hosts"]
MIN_RATIO = 1.5  # of the slow level's time to the fast level's
MAX_SPREAD = 0.5  # of a level's values, of the distance between the levels, in logarithms
MIN_HOSTS = 2  # in each of two parts: one host alone is at fault itself


class FabricBlock(NamedTuple):
    """Parts of the network, and what is slow between them.

    Attributes:
        parts: hosts of each part.
        slow: of the groups between parts `LIKE` columns, `members`, `transfer_ns`, `count`, `typical_ns` (of
            the fast level) and `excess` (logarithm against that).
    """

    parts: tuple[tuple[str, ...], ...]
    slow: pl.DataFrame

    @property
    def name(self) -> str:
        """The parts in words."""
        return " | ".join(", ".join(part) for part in self.parts)


def find_blocks(transfers: pl.DataFrame, hosts: Mapping[int, str]) -> list[FabricBlock]:
    """Parts of the network between which all is slow; none unless that holds for every group there is.

    Args:
        transfers: as `dpro.detect.network.traffic.transfers_of` gives them.
    """
    typical = (
        transfers.filter(pl.col("num_hosts") > 1)
        .group_by(*LIKE, "members")
        .agg(pl.col("transfer_ns").median(), count=pl.len())
        .sort(*LIKE, "members")
    )
    blocks: dict[tuple[tuple[str, ...], ...], list[pl.DataFrame]] = {}
    for _, same_kind in typical.group_by(LIKE, maintain_order=True):
        levels = _two_levels(same_kind)
        parts = _parts(levels, hosts) if levels is not None else None
        if levels is not None and parts:
            blocks.setdefault(parts, []).append(levels.filter("slow").drop("slow"))
    return [FabricBlock(parts, pl.concat(slow)) for parts, slow in blocks.items()]


def _two_levels(same_kind: pl.DataFrame) -> pl.DataFrame | None:
    """Groups, fast and slow ones separated at the widest gap of their times; None if there is none."""
    ordered = same_kind.sort("transfer_ns", "members")
    times = np.log(ordered["transfer_ns"].to_numpy())
    if times.size < 2:
        return None
    cut = int(np.argmax(np.diff(times))) + 1
    fast, slow = times[:cut], times[cut:]
    distance = float(np.median(slow) - np.median(fast))
    widest = max(float(np.ptp(fast)), float(np.ptp(slow)))
    if distance < np.log(MIN_RATIO) or widest > MAX_SPREAD * distance:
        return None
    middle = float(np.median(fast))
    return ordered.with_columns(
        pl.Series("excess", times - middle),
        typical_ns=pl.lit(float(np.exp(middle))),
        slow=pl.int_range(pl.len()) >= cut,
    )


def _parts(levels: pl.DataFrame, hosts: Mapping[int, str]) -> tuple[tuple[str, ...], ...] | None:
    """Parts that fast groups join, if all slow groups are between them and no fast one is; None otherwise."""
    fast, slow = (
        [_hosts_of(members, hosts) for members in levels.filter(which)["members"]]
        for which in (~pl.col("slow"), pl.col("slow"))
    )
    parts = tuple(sorted(_joined(fast, set().union(*fast, *slow))))
    place = {host: number for number, part in enumerate(parts) for host in part}
    between = all(len({place[host] for host in group}) > 1 for group in slow)
    large = sum(len(part) >= MIN_HOSTS for part in parts)
    return parts if between and large >= 2 and large == len(parts) else None


def _hosts_of(members: str, hosts: Mapping[int, str]) -> set[str]:
    return {hosts.get(int(rank), "") for rank in members.split(",")}


def _joined(groups: Iterable[set[str]], every: set[str]) -> Iterator[tuple[str, ...]]:
    """Hosts that groups connect, be it through others."""
    parts: list[set[str]] = [{host} for host in sorted(every)]
    for group in groups:
        touched = [part for part in parts if part & group]
        parts = [part for part in parts if not part & group] + [set().union(*touched)]
    yield from (tuple(sorted(part)) for part in parts)
