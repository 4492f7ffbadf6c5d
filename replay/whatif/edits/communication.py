"""Edits of the network, or of the algorithm of collectives: ring, tree, halving, or hosts first.

Each transfer is scaled by the ratio of its costs under the other and the present algorithm, from
`dpro.replay.cost.transfers`, in a graph whose transfers show the costs of messages and bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable, UsageError
from dpro.replay.cost.curves import LinkCost
from dpro.replay.cost.transfers import (
    FLAT,
    HALVING,
    RING,
    CollectiveKind,
    LinkModel,
    cost,
    fit_costs,
    link_of,
    messages_by_kind,
    ratio_by_table,
    time_ns,
    two_level_ns,
    unknown_latencies,
    why_no_cost,
)
from dpro.replay.graph import EdgeKind, Graph, Message, NodeKind
from dpro.replay.mesh import AXES
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import MAX_TIMES, key
from dpro.replay.whatif.graph_ops.selected import hosts_of, messages_along, messages_fitting, recorded_word
from dpro.replay.whatif.rankwise import RankwiseEdit, TransferEdit
from dpro.units import NS_PER_US, format_duration


def require_communication(graph: Graph) -> None:
    """Raise for a run without communication."""
    if not (graph.nodes.kind == NodeKind.TRANSFER).any():
        raise Unanswerable("the run has no communication")


def transfers_along(graph: Graph, axis: str) -> Bools:
    """Return [N] a mask of transfers along an axis of parallelism; of all where it is empty.

    Raises:
        Unanswerable: no group is known to be along it.
    """
    transfers: Bools = graph.nodes.kind == NodeKind.TRANSFER
    if axis:
        transfers &= np.append(messages_along(graph, axis), False)[graph.nodes.message]
    return transfers


@dataclass(frozen=True)
class NoCommunication(RankwiseEdit):
    """Collectives take no time and no rank waits in them: the bound for all communication work."""

    name = "no-comm"
    summary = "remove all communication, or along one axis: an upper bound"
    example = "no-comm"
    needs = "collectives; for axis=, a known layout"
    assumes = "nothing else changes; collective calls on the host take no time, either"
    source = "the graph without rendezvous; no formula"
    proof = "unreduced DDP gradients, gloo"
    is_advice = False
    effort = "none"
    axis: str = key("only along this parallelism axis; default: all", "", choices=AXES)
    doubt: float = 0.0

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        return [cls()]

    def bound(self, facts: RunFacts) -> float:
        return facts.idle(facts.communication | self._calls(facts.graph))

    def apply(self, graph: Graph) -> Graph:
        """Make transfers and calls free and remove the rendezvous, so that each rank runs by itself."""
        require_communication(graph)
        nodes, edges = graph.nodes, graph.edges
        met = edges.kind == EdgeKind.RENDEZVOUS
        if self.axis:
            met &= np.isin(nodes.collective[edges.source], self._collectives(graph))
        free = transfers_along(graph, self.axis) | self._calls(graph)
        return graph.with_durations(np.where(free, 0, nodes.duration)).without_edges(met)

    def _collectives(self, graph: Graph) -> Ints:
        """Return the removed collectives."""
        return np.unique(graph.nodes.collective[transfers_along(graph, self.axis)])

    def _calls(self, graph: Graph) -> Bools:
        """Return [N] host work that calls removed collectives; without an axis, whole such operators."""
        nodes, edges = graph.nodes, graph.edges
        arrivals = (nodes.kind == NodeKind.ARRIVE) & np.isin(nodes.collective, self._collectives(graph))
        calls = np.zeros(graph.num_nodes, np.bool_)
        calls[edges.source[(edges.kind == EdgeKind.LAUNCH) & arrivals[edges.target]]] = True
        if self.axis:
            return calls
        operators = nodes.kind == NodeKind.CPU
        pieces: Bools = operators & np.isin(nodes.name, nodes.name[calls & operators])
        return calls | pieces

    def describe(self) -> str:
        return f"no communication along {self.axis}" if self.axis else "no communication at all"

    def how(self) -> str:
        return "not possible: bounds the gain of any change to communication"


@dataclass(frozen=True)
class Network(TransferEdit):
    """The network has another bandwidth or latency; which rank waits for which stays the same."""

    name = "network"
    summary = "change network bandwidth and latency"
    example = "network:bandwidth=2,latency=1"
    needs = (
        "collectives; to separate latency from bandwidth, sizes that vary by a factor of two or more; "
        "for axis=, a known layout"
    )
    assumes = "all groups share one network; if sizes do not vary, transfer time depends on bandwidth only"
    source = (
        "Hockney 1994: time = latency + bytes / bandwidth, fitted to the run's own transfers, which are "
        "separated from waiting as in Lin et al., OSDI 2025, section 3.2"
    )
    proof = "links of 200, 500 and 1000 Mbit/s, gloo"
    is_advice = False
    effort = "money"
    bandwidth: float = key("multiple of the bandwidth", 2.0, least=1 / MAX_TIMES)
    latency: float = key("multiple of the latency", 1.0, least=0.0)
    axis: str = key("only along this parallelism axis; default: all", "", choices=AXES)
    doubt: float = 0.15

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        return [cls()]

    def bound(self, facts: RunFacts) -> float:
        if self.latency > 1:
            return facts.idle_without_communication  # overlap may increase
        kept = 1 / self.bandwidth if self.latency == 1 else 0.0
        return facts.on_path(facts.graph.nodes.kind == NodeKind.TRANSFER) * max(1 - kept, 0.0)

    def apply(self, graph: Graph) -> Graph:
        """Scale latency and moving time of each transfer, and the overlap of transfers on one link."""
        require_communication(graph)
        nodes, transfer = graph.nodes, transfers_along(graph, self.axis)
        fixed = np.minimum(latencies(graph), nodes.duration)[transfer]
        duration = nodes.duration.copy()
        moving = (duration[transfer] - fixed) / self.bandwidth
        duration[transfer] = np.rint(self.latency * fixed + moving).astype(np.int64)
        changed = graph.with_durations(duration)
        if self.latency == 1:
            return changed
        overlap = _side_by_side(graph, transfer)
        lag = np.where(overlap, np.rint(graph.edges.lag * self.latency), graph.edges.lag)
        return changed.with_lags(lag.astype(np.int64))

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report operations and groups whose latency the run does not show."""
        return unknown_latencies(graph)

    def describe(self) -> str:
        words = f"a network {self.bandwidth:g} times as fast" + (f" along {self.axis}" if self.axis else "")
        return words if self.latency == 1 else f"{words}, with {self.latency:g} times the latency"

    def how(self) -> str:
        if self.bandwidth < 1 or self.latency > 1:
            return "not a remedy: shows the cost of a slower network"
        return "faster links, or fewer bytes (gradient compression, bf16 reduction)"


@dataclass(frozen=True)
class Delay(TransferEdit):
    """Collectives and messages take longer, whatever their size: added network latency."""

    name = "delay"
    summary = "add network latency to each transfer, whatever its size"
    example = "delay:us=500"
    needs = "collectives"
    assumes = (
        "large and small transfers are delayed equally, although an algorithm that sends chunks may "
        "hide part of the latency"
    )
    source = "Hockney 1994: time = latency + bytes / bandwidth, with added latency"
    proof = "1 ms each way, gloo"
    is_advice = False
    effort = "none"
    us: float = key("added latency per transfer, in microseconds", least=0.0)
    axis: str = key("only along this parallelism axis; default: all", "", choices=AXES)
    doubt: float = 0.5

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return the edit that adds the latency to hosts in another building."""
        return [cls(100.0)]

    def bound(self, facts: RunFacts) -> float:
        return 0.0

    def apply(self, graph: Graph) -> Graph:
        """Lengthen each transfer; transfers of one link overlap during the added latency."""
        require_communication(graph)
        added, transfer = round(NS_PER_US * self.us), transfers_along(graph, self.axis)
        duration = np.where(transfer, added, 0) + graph.nodes.duration
        lag = np.where(_side_by_side(graph, transfer), graph.edges.lag - added, graph.edges.lag)
        return graph.with_durations(duration).with_lags(lag)

    def describe(self) -> str:
        which = f"each transfer along {self.axis}" if self.axis else "each transfer"
        return f"{which} takes {format_duration(self.us * NS_PER_US)} longer"

    def how(self) -> str:
        return "not a remedy: shows the cost of hosts that are further apart"


def _side_by_side(graph: Graph, transfer: Bools) -> NDArray[np.bool_]:
    """Return [E] a mask of edges by which a transfer begins before the one ahead of it on its link ends.

    Args:
        transfer: [N] mask of the transfers to consider.
    """
    edges = graph.edges
    between = transfer[edges.source] & transfer[edges.target] & (edges.kind == EdgeKind.STREAM)
    return np.asarray(between & (edges.lag < 0))


def latencies(graph: Graph) -> NDArray[np.int64]:
    """Return [N] ns of each transfer that do not depend on its bytes, where the run shows them; else 0."""
    fixed = np.zeros(graph.num_nodes, np.int64)
    lines = fit_costs(graph)
    for kind, messages in messages_by_kind(graph).items():
        if kind in lines:
            fixed[np.isin(graph.nodes.message, messages)] = round(lines[kind].latency_ns)
    return fixed


HIERARCHICAL = "hierarchical"
PROTOCOLS = ("ll", "ll128", "simple")


@dataclass(frozen=True)
class Algorithm(TransferEdit):
    """Collectives of known cost run another algorithm."""

    name = "algorithm"
    summary = "change the algorithm of collectives (ring, tree, halving, hierarchical) or NCCL's protocol"
    example = "algorithm:to=tree"
    needs = (
        "all-reduces, all-gathers or reduce-scatters with sizes that vary by a factor of two or more; "
        "for hierarchical, the hosts of ranks, and a group within one host or inside_gbps=; for proto=, "
        "a network table with both protocols"
    )
    assumes = (
        "messages and bytes cost the same in each algorithm, a host has one port to the others, and the "
        "library's protocol and channels stay unchanged; protocols differ as in the network table"
    )
    source = (
        "ring and halving: Thakur et al., IJHPCA 2005; tree, of all-reduces: Sanders et al., Parallel "
        "Computing 2009; hierarchical: Cho et al., BlueConnect, MLSys 2019; with the run's own latency and "
        "bandwidth"
    )
    effort = "flag"
    to: str = key("which", "", choices=(*FLAT, HIERARCHICAL))
    proto: str = key("NCCL protocol instead of an algorithm; needs a network table", "", choices=PROTOCOLS)
    now: str = key("current algorithm, if not recorded; default: ring", "", choices=FLAT)
    group: str = key("pattern for the process group; default: all", "")
    axis: str = key("only along this parallelism axis; default: all", "", choices=AXES)
    inside_gbps: float | None = key("bandwidth within a host, in 1e9 bytes per second", None, least=1e-6)
    inside_us: float | None = key("latency of a message within a host, in microseconds", None, least=0.0)
    doubt: float = 0.3

    def __post_init__(self) -> None:
        """Raise unless exactly one of algorithm and protocol is given."""
        super().__post_init__()
        if bool(self.to) == bool(self.proto):
            raise UsageError("algorithm needs to=tree (or another algorithm), or proto=ll128, not both")

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return all algorithms but the present one, and the protocols of the network table."""
        ran = {recorded_algorithm(facts.graph, message.op) or RING for message in facts.graph.messages}
        table = facts.graph.network
        measured = set() if table is None or "protocol" not in table.columns else set(table["protocol"])
        protocols = [cls(proto=proto) for proto in PROTOCOLS if proto in measured]
        return [*(cls(to) for to in (*FLAT, HIERARCHICAL) if {to} != ran), *protocols]

    def bound(self, facts: RunFacts) -> float:
        return facts.on_path(facts.graph.nodes.kind == NodeKind.TRANSFER)

    def apply(self, graph: Graph) -> Graph:
        """Scale the transfers of each operation and group with a formula."""
        duration = graph.nodes.duration.copy()
        answered, refused = self._ratios(graph)
        if not answered:
            raise Unanswerable(refused[0] if refused else f"no group in the run fits {self.group!r}")
        for transfers, ratio in answered:
            duration[transfers] = np.rint(duration[transfers] * ratio).astype(np.int64)
        return graph.with_durations(duration)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report the unchanged collectives, with reasons."""
        return tuple(f"unchanged: {reason}" for reason in self._ratios(graph)[1])

    def _ratios(self, graph: Graph) -> tuple[list[tuple[NDArray[np.int64], Floats]], list[str]]:
        """Return transfers with the ratio of their times, and the reasons why others have none."""
        require_communication(graph)
        nodes, lines = graph.nodes, fit_costs(graph)
        fits = messages_fitting(graph, group=self.group, axis=self.axis)
        answered, refused = [], []
        for kind, messages in messages_by_kind(graph).items():
            if not fits[messages[0]]:
                continue
            transfers = np.flatnonzero(np.isin(nodes.message, messages) & (nodes.bytes > 0))
            message, num_bytes = graph.messages[messages[0]], nodes.bytes[transfers].astype(np.float64)
            try:
                by_table = self._by_protocol(graph, message, transfers) if self.proto else None
                ratio = self._ratio(graph, lines, kind, message, num_bytes) if by_table is None else by_table
                answered.append((transfers, ratio))
            except Unanswerable as error:
                refused.append(f"{kind[0]} in {kind[1] or 'a group without a name'}: {error}")
        return answered, refused

    def _ratio(
        self,
        graph: Graph,
        lines: dict[CollectiveKind, LinkCost],
        kind: CollectiveKind,
        message: Message,
        num_bytes: Floats,
    ) -> Floats:
        """Return [T] time by the other algorithm over time by the present one."""
        now = self._ran(graph, message.op)
        if kind not in lines:
            raise Unanswerable(why_no_cost(graph, kind))
        if message.num_ranks < 2:
            raise Unanswerable("the number of ranks in the group is unknown")
        if lines[kind].bandwidth_only:
            raise Unanswerable(
                "sizes are too similar to separate the cost per message from the cost per byte"
            )
        if now == self.to:
            return np.ones(num_bytes.size)
        spent = cost(message.op, now, message.num_ranks)
        link = link_of(lines[kind], spent, num_bytes)
        before = time_ns(spent, link, num_bytes)
        if self.to != HIERARCHICAL:
            return time_ns(cost(message.op, self.to, message.num_ranks), link, num_bytes) / before
        ranks = _hosts_in(graph, message)
        if len(ranks) < 2:
            raise Unanswerable("its ranks are all on one host")
        if len(set(ranks.values())) > 1:
            raise Unanswerable("its hosts have different numbers of ranks")
        hosts, per_host = len(ranks), next(iter(ranks.values()))
        inside = self._inside(graph, lines, num_bytes)
        return two_level_ns(message.op, hosts, per_host, link, inside, num_bytes) / before

    def _by_protocol(self, graph: Graph, message: Message, transfers: NDArray[np.int64]) -> Floats:
        """Return [T] time by the other protocol over time by the present one, from the network table.

        Raises:
            Unanswerable: the table lacks one of both.
        """
        now, ranks = recorded_word(graph, message.op, "protocol", PROTOCOLS), message.num_ranks
        if now == self.proto:
            return np.ones(transfers.size)
        num_bytes, took = (
            column[transfers].astype(np.float64) for column in (graph.nodes.bytes, graph.nodes.duration)
        )
        protocols = (now, self.proto)
        ratio = ratio_by_table(graph, message, ranks, num_bytes, took, protocols) if transfers.size else None
        if ratio is None:
            raise Unanswerable(
                f"what {now or 'the protocol that NCCL chose'} and {self.proto} take among {ranks} ranks is "
                "in no network table: give one with a column protocol"
            )
        return ratio

    def _ran(self, graph: Graph, op: str) -> str:
        return recorded_algorithm(graph, op) or self.now or RING

    def _inside(self, graph: Graph, lines: dict[CollectiveKind, LinkCost], num_bytes: Floats) -> LinkModel:
        """Return the cost of communication within a host, as given, or as fitted to a group within one host.

        Args:
            num_bytes: [T] payloads.

        Raises:
            Unanswerable: there is neither.
        """
        if self.inside_gbps is not None:
            return LinkModel((self.inside_us or 0.0) * NS_PER_US, 1 / self.inside_gbps)
        for kind, messages in messages_by_kind(graph).items():
            message = graph.messages[messages[0]]
            if kind in lines and len(_hosts_in(graph, message)) == 1:
                spent = cost(message.op, self._ran(graph, message.op), message.num_ranks)
                return link_of(lines[kind], spent, num_bytes)
        raise Unanswerable(
            "no group within one host shows the cost of communication there: give inside_gbps="
        )

    def describe(self) -> str:
        if self.proto:
            return f"collectives run by protocol {self.proto.upper()}"
        return (
            f"collectives run by {self.to}"
            if self.to in FLAT
            else "collectives run hierarchically, within hosts first"
        )

    def how(self) -> str:
        if self.proto:
            return f"NCCL_PROTO={self.proto.upper() if self.proto != 'simple' else 'Simple'}"
        if self.to == HALVING:
            return "use a library that implements it, such as MPI or gloo"
        if self.to in FLAT:
            return f"NCCL_ALGO={self.to.capitalize()}"
        return "reduce-scatter, all-reduce and all-gather over a two-dimensional init_device_mesh"


def recorded_algorithm(graph: Graph, op: str) -> str:
    """Return the algorithm of all collectives of an operation; empty where not recorded."""
    return recorded_word(graph, op, "algorithm", FLAT)


def _hosts_in(graph: Graph, message: Message) -> Counter[str]:
    """Return the number of ranks of a group on each host.

    Raises:
        Unanswerable: the run does not record the hosts of all.
    """
    hosts, nodes = hosts_of(graph), graph.nodes
    same = [number for number, other in enumerate(graph.messages) if other.group == message.group]
    ranks = np.unique(nodes.rank[np.isin(nodes.message, same)]).tolist()
    if len(ranks) < message.num_ranks or not set(ranks) <= hosts.keys():
        raise Unanswerable("the run does not name the hosts of all ranks of the group")
    return Counter(hosts[rank] for rank in ranks)
