"""Cables, ports and switches that slow groups of ranks have in common, if the run has a topology.

Takes groups of ranks, which of them are slow, and the fabric of their ranks. Returns the parts of the fabric
at fault, by the votes of groups over the paths of their flows (network tomography, `at_fault`), with the
groups that each explains. The path of a flow is known if there is only one, or if the run keeps paths; else
all are equally likely. Does not measure anything.
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
from dpro.detect.observations import Observation, observe
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
MAX_PAIRWISE = 32  # ranks: a larger all-to-all crosses nearly everything, so it distinguishes nothing


_NOT_DISTINGUISHED = observe(
    "not-distinguished", "they cannot be distinguished: the same flows cross them, or paths are not known"
)


class FabricPart(NamedTuple):
    """A part of a fabric that may be at fault.

    Attributes:
        kind: a cable (both ways), a link (one way of it), a port of a host (with its cable), or a switch.
        links: its links; a path through the part takes exactly one of them.
    """

    kind: str
    name: str
    links: tuple[int, ...]

    @property
    def words(self) -> str:
        """Name of the part in a sentence."""
        return f"{self.kind} {self.name}"


class Blamed(NamedTuple):
    """Parts at fault, and the evidence.

    Attributes:
        suspects: parts that fit equally well.
        runner_up: the part that fits next best; None without one.
        crossing, slow: number of groups that are likely to cross the suspects, and how many of them are slow.
        others: number of slow groups that are not.
    """

    verdict: FaultVerdict
    suspects: tuple[FabricPart, ...]
    runner_up: FabricPart | None
    crossing: int
    slow: int
    others: int

    def observations(self, what: str, show: str) -> list[Observation]:
        """Return the evidence.

        Args:
            what: what the groups consist of, such as `pairs of hosts`.
            show: what the slow ones do, such as `became slower`.
        """
        observed = [
            observe(
                "slow-on-paths",
                f"{{slow}} of {{crossing}} {what} whose paths cross {{suspects}} {show}, {{others}} others",
                slow=self.slow, crossing=self.crossing, others=self.others,
                suspects=" or ".join(part.words for part in self.suspects),
            )
        ]  # fmt: skip
        if self.runner_up is not None:
            times = float(np.exp(min(self.verdict.behind, np.log(1e9))))
            sentence = "runner-up: {component}, {times:,.0f} times less likely"
            observed.append(observe("runner-up", sentence, component=self.runner_up.words, times=times))
        return [*observed, _NOT_DISTINGUISHED] if len(self.suspects) > 1 else observed


@dataclass(frozen=True)
class Wires:
    """The fabric of a run, and the GPUs of its ranks.

    Attributes:
        gpus: GPUs of ranks that can send to other hosts.
        paths: paths that the run keeps.
        channels: channels of groups of ranks, where recorded.
    """

    routes: Routes
    gpus: dict[int, int]
    paths: tuple[PathEntry, ...] = ()
    channels: Mapping[Ranks, Channels] = field(default_factory=dict)

    @property
    def fabric(self) -> Fabric:
        """The fabric."""
        return self.routes.network

    @cached_property
    def components(self) -> list[FabricPart]:
        """All parts that may be at fault."""
        return components_of(self.fabric)


def wires_of(run: Run | None) -> Wires | None:
    """Return the fabric of a run; None where it has none, or its ranks are not in it.

    Raises:
        InputError: the run's topology is invalid.
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
    """Return the parts that may be at fault: ports, cables between switches, ways of both, and switches."""
    components = []
    half = fabric.source.size // 2  # offset of a cable's other way
    for link in range(half):
        ends = int(fabric.source[link]), int(fabric.target[link])
        kinds = {int(fabric.kind[end]) for end in ends}
        if HUB in kinds:
            continue
        port = next((end for end in ends if fabric.kind[end] == NIC), None)
        if port is None or kinds == {NIC}:
            name = fabric.link_name(link).replace(" > ", " - ")
            components.append(FabricPart(CABLE, name, (link, link + half)))
        else:
            components.append(FabricPart(PORT, fabric.names[port], (link, link + half)))
        components += [FabricPart(DIRECTION, fabric.link_name(way), (way,)) for way in (link, link + half)]
    for switch in np.flatnonzero(fabric.kind == SWITCH).tolist():
        into = tuple(np.flatnonzero(fabric.target == switch).tolist())
        if into:
            components.append(FabricPart(SWITCHES, fabric.names[switch], into))
    return components


def crossing_of(components: Sequence[FabricPart], links: csr_matrix) -> Floats:
    """Return [F, C] probabilities that a flow crosses a component.

    Args:
        links: [F, L] probability that it crosses a link.
    """
    row = np.concatenate([np.array(part.links, np.int64) for part in components])
    column = np.repeat(np.arange(len(components)), [len(part.links) for part in components])
    shape = (links.shape[1], len(components))
    belongs = csr_matrix((np.ones(row.size), (row, column)), shape=shape)
    crossing: Floats = np.clip((links @ belongs).toarray(), 0.0, 1.0)
    return crossing


def blame_parts(
    components: Sequence[FabricPart], links: csr_matrix, of: Ints, evidence: Floats
) -> list[Blamed]:
    """Return the parts at fault, by the evidence of groups of flows.

    Args:
        links: [F, L] probability that a flow crosses a link.
        of: [F] group of each flow; each group has some.
        evidence: [G] log-likelihood ratio of each group, above 0 where it shows a fault.
    """
    shown = np.asarray(links[evidence[of] > 0].sum(axis=0)).ravel() > 0
    candidates = [part for part in components if shown[list(part.links)].any()]
    if not candidates:
        return []
    each_flow = crossing_of(candidates, links)
    missed = np.zeros((evidence.size, len(candidates)))
    np.add.at(missed, of, np.log1p(-np.minimum(each_flow, 1 - 1e-12)))
    return blame_shown(candidates, 1 - np.exp(missed), evidence)


def blame_shown(components: Sequence[FabricPart], crossing: Floats, evidence: Floats) -> list[Blamed]:
    """Return the parts at fault, given the probabilities that each group would show a fault of each.

    Args:
        crossing: [G, C] these probabilities.
        evidence: [G] as for `blame_parts`.
    """
    # Ways that flows cross as likely as the whole cable or port are left out.
    cables = [(column, part) for column, part in enumerate(components) if part.kind in (CABLE, PORT)]
    of_link = {link: column for column, part in cables for link in part.links}
    kept = [
        column
        for column, part in enumerate(components)
        if part.kind != DIRECTION
        or not np.allclose(crossing[:, column], crossing[:, of_link[part.links[0]]], atol=1e-9)
    ]
    kept = kept
    candidates, crossing = [components[column] for column in kept], crossing[:, kept]
    blamed = []
    for verdict in at_fault(crossing, evidence):
        likely = crossing[:, verdict.suspects[0]] > 0.5 * crossing[:, verdict.suspects[0]].max()
        shows = evidence > 0
        # One way of a cable is not a suspect if the whole cable is.
        parts = [candidates[column] for column in verdict.suspects]
        links = {link for part in parts if part.kind in (CABLE, PORT) for link in part.links}
        suspects = tuple(part for part in parts if part.kind != DIRECTION or part.links[0] not in links)
        runner_up = candidates[verdict.runner_up] if verdict.runner_up >= 0 else None
        counts = (int(flows.sum()) for flows in (likely, likely & shows, ~likely & shows))
        blamed.append(Blamed(verdict, suspects, runner_up, *counts))
    return blamed


def with_hops(transfers: pl.DataFrame, wires: Wires) -> pl.DataFrame:
    """Add `hops`, the most links that a flow of the transfer crosses; drop transfers with unknown paths.

    Args:
        transfers: as from `dpro.detect.network.traffic.transfers_of`.
    """
    placed = _known_groups(transfers, wires)
    flows, links = _flows(placed, wires)
    hops = np.zeros(placed.height, np.int64)
    np.maximum.at(hops, flows.of, hops_of(links))
    return transfers.join(placed.with_columns(hops=hops), on=["members", "op"])


def blame_wires(groups: pl.DataFrame, wires: Wires) -> list[tuple[Blamed, set[str]]]:
    """Return the parts at fault, each with the groups (`members`) that it explains.

    Args:
        groups: `op`, `members`, `slow`.
    """
    placed = _known_groups(groups, wires)
    slow = groups.group_by("members", "op").agg(pl.col("slow").any())
    shows = placed.join(slow, on=["members", "op"], how="left", maintain_order="left")["slow"].to_numpy()
    if not shows.any():
        return []
    flows, links = _flows(placed, wires)
    blamed = blame_parts(wires.components, links, flows.of, votes(shows.astype(np.bool_)))
    return [(part, set(placed["members"].filter(pl.Series(part.verdict.explained)))) for part in blamed]


def _known_groups(groups: pl.DataFrame, wires: Wires) -> pl.DataFrame:
    """Return `members`, `op` of groups on several hosts whose ranks are all in the fabric."""
    kinds = groups.filter(pl.col("num_hosts") > 1).select("members", "op", "num_ranks").unique()
    placed = [
        {int(rank) for rank in members.split(",")} <= wires.gpus.keys()
        and not (op in PAIRWISE and size > MAX_PAIRWISE)
        for members, op, size in kinds.iter_rows()
    ]
    return kinds.filter(pl.Series(placed, dtype=pl.Boolean)).drop("num_ranks").sort("members", "op")


def _flows(groups: pl.DataFrame, wires: Wires) -> tuple[Flows, csr_matrix]:
    """Return flows of groups, and the probabilities of the links that each may cross."""
    ranks = [tuple(map(int, group.split(","))) for group in groups["members"]]
    members = [[wires.gpus[rank] for rank in group] for group in ranks]
    ops = ["send" if op == "message" else op for op in groups["op"]]
    channels = [wires.channels.get(group, NOT_RECORDED) for group in ranks]
    flows = flows_of(wires.fabric, members, ops, channels=channels)
    return flows, crossings(flows, wires.routes, wires.paths)


# Network tomography: components at fault, from what flows show end to end.
#
# The model is that of Flock (Harsh, Meng, Agrawal and Godfrey, CoNEXT 2023, arXiv 2305.03348): a flow whose
# path is known in part crosses a faulty component with probability q, so a faulty component changes the
# likelihood of flow f by 1 + q (exp(evidence) - 1). The set of components of highest likelihood is searched
# greedily: each further one must explain what the earlier ones do not. With known paths and one vote per
# flow, this is the vote of 007 (Arzani et al., NSDI 2018), except that healthy flows vote against, too. No
# method distinguishes components that the same flows cross; these are named together.

SHOWS = 0.9  # share of flows across a faulty component that show it
FALSE = 0.02  # share of the others that seem to show a fault
MIN_LOG_RATIO = np.log(1000.0)  # least likelihood ratio to chance, per component that could be named
ODDS = np.log(20.0)  # components are distinguished if one is at least this many times as likely
MAX_CONFIDENCE = 0.99  # the model itself may be wrong
MAX_FAULTS = 8
CONGESTION = 0.002  # share of segments that a flow sends again on full links, none broken
BURST = 4.0  # segments that are lost, or assumed to be, at a time
HARMFUL = 0.01  # share of segments that a broken link loses


class FaultVerdict(NamedTuple):
    """A component at fault.

    Attributes:
        suspects: components that fit (nearly) as well, the best first; one if the flows distinguish it.
        runner_up: the next best component; -1 if no other fits at all.
        behind: logarithm of how many times less likely the runner-up is.
        confidence: 0 to 1, that the component is among the suspects.
        explained: [F] mask of flows that show a fault and are likely to cross the component.
    """

    suspects: tuple[int, ...]
    runner_up: int
    behind: float
    confidence: float
    explained: Bools


def votes(shows: Bools) -> Floats:
    """Return [F] log-likelihood ratios of flows that either show a fault or do not."""
    for_it, against_it = float(np.log(SHOWS / FALSE)), float(np.log((1 - SHOWS) / (1 - FALSE)))
    return np.where(shows, for_it, against_it)


def votes_of_losses(sent: Ints, again: Ints) -> Floats:
    """Return [F] log-likelihood ratios of flows that count the segments they sent and sent again.

    Each is that of a binomial, with a harmful loss against what congestion causes, divided by the dispersion
    (quasi-likelihood: Wedderburn, Biometrika 61, 1974), since several segments are lost at a time; and capped
    at the values of `votes`.

    Args:
        sent: [F] segments, including those sent again.
        again: [F] segments sent again.
    """
    usual = float(np.median(again[sent > 0] / sent[sent > 0])) if (sent > 0).any() else 0.0
    background = max(CONGESTION, 2 * usual)
    lossy = max(HARMFUL, 4 * background)
    if lossy >= 1:
        return np.zeros(sent.size)
    ratio = again * np.log(lossy / background) + (sent - again) * np.log((1 - lossy) / (1 - background))
    least, most = votes(np.array([False, True]))
    capped: Floats = np.clip(ratio.astype(np.float64) / BURST, least, most)
    return capped


def at_fault(crossing: Floats, evidence: Floats) -> list[FaultVerdict]:
    """Return the components at fault, surest first; none where nothing is beyond chance.

    Args:
        crossing: [F, C] probability that a flow crosses a component, 0 to 1.
        evidence: [F] log-likelihood ratios: above 0 where a flow shows a fault.
    """
    verdicts: list[FaultVerdict] = []
    if not crossing.size:
        return verdicts
    least = MIN_LOG_RATIO + np.log(crossing.shape[1])
    crossed = np.zeros(evidence.size)  # probability that a flow crosses a component known to be at fault
    ratio = np.expm1(np.clip(evidence, -30, 30))
    gain, either = _gains(crossing, ratio, crossed)
    while len(verdicts) < MAX_FAULTS and gain.max() >= least:
        best = int(np.argmax(gain))
        explained = (crossing[:, best] > 0) & (evidence > 0) & (crossed < 0.5)
        crossed = either[:, best]
        left, either = _gains(crossing, ratio, crossed)
        # A component that still explains enough once this one is known is another fault, not an alternative.
        alternative = np.flatnonzero((left < least) & (gain > 0))
        order = alternative[np.argsort(-gain[alternative], kind="stable")]
        suspects = order[gain[order] >= gain[best] - ODDS]
        rest = order[suspects.size :]
        runner_up = int(rest[0]) if rest.size else -1
        behind = float(gain[best] - gain[runner_up]) if rest.size else np.inf
        chance = np.exp(least - MIN_LOG_RATIO - gain[best])
        weights = np.exp(gain[order] - gain[best])
        sure = float(weights[: suspects.size].sum() / (weights.sum() + chance))
        verdicts.append(
            FaultVerdict(
                tuple(suspects.tolist()), runner_up, behind, round(min(sure, MAX_CONFIDENCE), 3), explained
            )
        )
        gain = left
    return verdicts


def _gains(crossing: Floats, ratio: Floats, crossed: Floats) -> tuple[Floats, Floats]:
    """Return [C] log-likelihood gained by each component; [F, C] probabilities to cross it or a known fault.

    Args:
        crossing: [F, C] as for `at_fault`.
        ratio: [F] likelihood ratio of each flow, minus 1.
        crossed: [F] probability that it crosses a component already known to be at fault.
    """
    either = 1 - (1 - crossed[:, None]) * (1 - crossing)
    before = np.log1p(crossed * ratio)[:, None]
    gained: Floats = (np.log1p(either * ratio[:, None]) - before).sum(axis=0)
    return gained, either
