"""Cables, ports and switches that slow groups of ranks have in common, where the run has a topology.

In: groups of ranks, which of them are slow, and the fabric that their ranks are in. Out: what of the fabric
is at fault, by the votes of groups over the paths of their flows (`tomography`), with the groups that it
explains. The path of a flow is known where there is only one, or where the run keeps paths; else each is as
likely. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy.sparse import csr_matrix

from dpro.arrays import Bools, Floats, Ints
from dpro.detect.network.tomography import FaultVerdict, at_fault, votes
from dpro.errors import Unanswerable
from dpro.replay.cost.fabric.connections import crossings, hops_of
from dpro.replay.cost.fabric.flows import NOT_RECORDED, PAIRWISE, Channels, Flows, flows_of
from dpro.replay.cost.fabric.network import HUB, NIC, SWITCH, Fabric, Routes, routes_of
from dpro.replay.cost.fabric.placement import (
    Ranks,
    channels_of_run,
    fabric_of_run,
    gpus_of_ranks,
    paths_of_run,
)
from dpro.store import Run
from dpro.topology.kept import PathEntry

CABLE, DIRECTION, PORT, SWITCHES = "cable", "link", "port", "switch"
CLASSES = {CABLE: "slow.link", DIRECTION: "slow.link", PORT: "slow.nic", SWITCHES: "slow.fabric"}
MAX_PAIRWISE = 32  # ranks: a larger all-to-all crosses nearly everything, and distinguishes nothing


class FabricPart(NamedTuple):
    """A part of a fabric that may be at fault.

    Attributes:
        kind: a cable (both ways), a link (one way of it), a port of a host (with its cable), or a switch.
        name: of it.
        links: a path that crosses the component takes exactly one of these.
    """

    kind: str
    name: str
    links: tuple[int, ...]

    @property
    def words(self) -> str:
        """What it is called in a sentence."""
        return f"{self.kind} {self.name}"


class Blamed(NamedTuple):
    """What is at fault, and what shows it.

    Attributes:
        verdict: with the groups that it explains.
        suspects: components that cannot be distinguished.
        runner_up: what fits next best; None where nothing else does.
        crossing, slow: groups that are likely to cross it, and how many of these are slow.
        others: slow groups that are not.
    """

    verdict: FaultVerdict
    suspects: tuple[FabricPart, ...]
    runner_up: FabricPart | None
    crossing: int
    slow: int
    others: int

    def lines(self, what: str, show: str) -> list[str]:
        """As evidence."""
        names = " or ".join(each.words for each in self.suspects)
        said = [
            f"{self.slow} of {self.crossing} {what} whose paths cross {names} {show}, {self.others} others"
        ]
        if self.runner_up is not None:
            times = float(np.exp(min(self.verdict.behind, np.log(1e9))))
            said.append(f"runner-up: {self.runner_up.words}, {times:,.0f} times less likely")
        if len(self.suspects) > 1:
            said.append("they cannot be distinguished: the same flows cross them, or paths are not known")
        return said


@dataclass(frozen=True)
class Wires:
    """The fabric of a run, and where its ranks are.

    Attributes:
        routes: next hops, and the fabric.
        gpus: of ranks that can send to other hosts.
        known: paths that the run keeps.
        channels: of groups of ranks, as far as they were recorded.
    """

    routes: Routes
    gpus: dict[int, int]
    known: tuple[PathEntry, ...] = ()
    channels: Mapping[Ranks, Channels] = field(default_factory=dict)

    @property
    def fabric(self) -> Fabric:
        """The fabric."""
        return self.routes.network

    @cached_property
    def components(self) -> list[FabricPart]:
        """All that may be at fault."""
        return components_of(self.fabric)


def wires_of(run: Run | None) -> Wires | None:
    """The fabric of a run; None where it has none, or its ranks are not in it.

    Raises:
        InputError: the run's topology is wrong.
    """
    try:
        fabric = fabric_of_run(run)
        assert run is not None
        gpus = gpus_of_ranks(run, fabric)
        with_ports = {rank: gpu for rank, gpu in gpus.items() if gpu in fabric.port}
        return Wires(routes_of(fabric), with_ports, paths_of_run(run), channels_of_run(run).of)
    except Unanswerable:
        return None


def components_of(fabric: Fabric) -> list[FabricPart]:
    """What of a fabric may be at fault: ports, cables between switches and their ways, and switches."""
    found = []
    half = fabric.source.size // 2  # a cable's other way comes that much later
    for link in range(half):
        ends = int(fabric.source[link]), int(fabric.target[link])
        kinds = {int(fabric.kind[end]) for end in ends}
        if HUB in kinds:
            continue
        port = next((end for end in ends if fabric.kind[end] == NIC), None)
        if port is None or kinds == {NIC}:
            name = fabric.link_name(link).replace(" > ", " - ")
            found.append(FabricPart(CABLE, name, (link, link + half)))
        else:
            found.append(FabricPart(PORT, fabric.names[port], (link, link + half)))
        found += [FabricPart(DIRECTION, fabric.link_name(way), (way,)) for way in (link, link + half)]
    for switch in np.flatnonzero(fabric.kind == SWITCH).tolist():
        into = tuple(np.flatnonzero(fabric.target == switch).tolist())
        if into:
            found.append(FabricPart(SWITCHES, fabric.names[switch], into))
    return found


def crossing_of(components: Sequence[FabricPart], links: csr_matrix) -> Floats:
    """[F, C] probability that a flow crosses a component.

    Args:
        links: [F, L] probability that it crosses a link.
    """
    row = np.concatenate([np.array(each.links, np.int64) for each in components])
    column = np.repeat(np.arange(len(components)), [len(each.links) for each in components])
    shape = (links.shape[1], len(components))
    belongs = csr_matrix((np.ones(row.size), (row, column)), shape=shape)
    crossing: Floats = np.clip((links @ belongs).toarray(), 0.0, 1.0)
    return crossing


def blame_parts(
    components: Sequence[FabricPart], links: csr_matrix, of: Ints, evidence: Floats
) -> list[Blamed]:
    """What is at fault, by the evidence of groups of flows.

    Args:
        links: [F, L] probability that a flow crosses a link.
        of: [F] the group that each flow belongs to; each group has some.
        evidence: [G] log-likelihood ratio of each group, above 0 where it shows a fault.
    """
    shown = np.asarray(links[evidence[of] > 0].sum(axis=0)).ravel() > 0
    candidates = [each for each in components if shown[list(each.links)].any()]
    if not candidates:
        return []
    each_flow = crossing_of(candidates, links)
    missed = np.zeros((evidence.size, len(candidates)))
    np.add.at(missed, of, np.log1p(-np.minimum(each_flow, 1 - 1e-12)))
    return blame_shown(candidates, 1 - np.exp(missed), evidence)


def blame_shown(components: Sequence[FabricPart], crossing: Floats, evidence: Floats) -> list[Blamed]:
    """The same where it is known how likely each group shows a fault of each component.

    Args:
        crossing: [G, C] these probabilities.
        evidence: [G] as of `blame_parts`.
    """
    kept = _distinct(components, crossing)
    candidates, crossing = [components[at] for at in kept], crossing[:, kept]
    found = []
    for verdict in at_fault(crossing, evidence):
        likely = crossing[:, verdict.suspects[0]] > 0.5 * crossing[:, verdict.suspects[0]].max()
        shows = evidence > 0
        suspects = _whole([candidates[at] for at in verdict.suspects])
        runner_up = candidates[verdict.runner_up] if verdict.runner_up >= 0 else None
        counts = (int(flows.sum()) for flows in (likely, likely & shows, ~likely & shows))
        found.append(Blamed(verdict, suspects, runner_up, *counts))
    return found


def _distinct(components: Sequence[FabricPart], crossing: Floats) -> list[int]:
    """Components but for the ways of cables and ports that all flows cross in one way only."""
    cables = [(at, each) for at, each in enumerate(components) if each.kind in (CABLE, PORT)]
    of_link = {link: at for at, each in cables for link in each.links}
    return [
        at
        for at, each in enumerate(components)
        if each.kind != DIRECTION
        or not np.allclose(crossing[:, at], crossing[:, of_link[each.links[0]]], atol=1e-9)
    ]


def _whole(suspects: Sequence[FabricPart]) -> tuple[FabricPart, ...]:
    """Suspects without a way of a cable where the cable is one of them, too."""
    whole = {link for each in suspects if each.kind in (CABLE, PORT) for link in each.links}
    return tuple(each for each in suspects if each.kind != DIRECTION or each.links[0] not in whole)


def with_hops(transfers: pl.DataFrame, wires: Wires) -> pl.DataFrame:
    """Transfers with `hops`, the most links that a flow of theirs crosses; without those that show nothing.

    Args:
        transfers: as `dpro.detect.network.traffic.transfers_of` gives them.
    """
    known = _known_groups(transfers, wires)
    flows, links = _flows(known, wires)
    hops = np.zeros(known.height, np.int64)
    np.maximum.at(hops, flows.of, hops_of(links))
    return transfers.join(known.with_columns(hops=hops), on=["members", "op"])


def blame_wires(groups: pl.DataFrame, wires: Wires) -> list[tuple[Blamed, set[str]]]:
    """What is at fault, and which groups (`members`) it explains.

    Args:
        groups: `op`, `members`, `slow`.
    """
    known = _known_groups(groups, wires)
    slow = groups.group_by("members", "op").agg(pl.col("slow").any())
    shows = known.join(slow, on=["members", "op"], how="left", maintain_order="left")["slow"].to_numpy()
    if not shows.any():
        return []
    flows, links = _flows(known, wires)
    found = blame_parts(wires.components, links, flows.of, votes(_as_bools(shows)))
    return [(each, set(known["members"].filter(pl.Series(each.verdict.explained)))) for each in found]


def _as_bools(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Bools:
    return values.astype(np.bool_)


def _known_groups(groups: pl.DataFrame, wires: Wires) -> pl.DataFrame:
    """`members`, `op` of groups whose ranks are all in the fabric, on several hosts of it."""
    kinds = groups.filter(pl.col("num_hosts") > 1).select("members", "op", "num_ranks").unique()
    placed = [
        {int(rank) for rank in members.split(",")} <= wires.gpus.keys()
        and not (op in PAIRWISE and size > MAX_PAIRWISE)
        for members, op, size in kinds.iter_rows()
    ]
    return kinds.filter(pl.Series(placed, dtype=pl.Boolean)).drop("num_ranks").sort("members", "op")


def _flows(known: pl.DataFrame, wires: Wires) -> tuple[Flows, csr_matrix]:
    """Flows of groups, and the links that each may cross."""
    ranks = [tuple(map(int, each.split(","))) for each in known["members"]]
    members = [[wires.gpus[rank] for rank in each] for each in ranks]
    ops = ["send" if op == "message" else op for op in known["op"]]
    channels = [wires.channels.get(each, NOT_RECORDED) for each in ranks]
    flows = flows_of(wires.fabric, members, ops, channels=channels)
    return flows, crossings(flows, wires.routes, wires.known)
