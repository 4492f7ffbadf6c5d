"""Another algorithm for collectives: ring, tree, halving, or hosts first.

In: a graph whose transfers tell what messages and bytes cost. Each transfer is scaled by what the other
algorithm takes for its bytes over what the one that ran does, as `dpro.replay.algorithms` has it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.algorithms import FLAT, HALVING, RING, Link, cost, link_of, time_ns, two_level_ns
from dpro.replay.costs import Line, Sort, fit_costs, sorts
from dpro.replay.graph import Graph, Message
from dpro.replay.whatif.comm import require_communication
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.select import hosts_of, messages_fitting
from dpro.schema import COLLECTIVES
from dpro.units import NS_PER_US

Floats = NDArray[np.float64]

HIERARCHICAL = "hierarchical"


@dataclass(frozen=True)
class Algorithm(Edit):
    """Collectives of known cost run another algorithm."""

    name = "algorithm"
    summary = "collectives by ring, tree, halving, or first within hosts"
    example = "algorithm:to=tree"
    needs = (
        "all-reduces, all-gathers or reduce-scatters whose sizes vary twofold or more; for hierarchical the "
        "hosts of ranks, and a group within one host or inside_gbps="
    )
    assumes = (
        "a message and a byte cost the same in each algorithm, a host has one port to the others, and the "
        "library's protocol and channels stay"
    )
    source = (
        "ring and halving: Thakur et al., IJHPCA 2005; tree, of all-reduces: Sanders et al., Parallel "
        "Computing 2009; hierarchical: Cho et al., BlueConnect, MLSys 2019; with the run's own latency and "
        "bandwidth"
    )
    to: str = key("which", choices=(*FLAT, HIERARCHICAL))
    now: str = key("which one ran, where the run does not tell; ring without", "", choices=FLAT)
    group: str = key("pattern for the process group; all without", "")
    inside_gbps: float | None = key("bandwidth within a host, 1e9 bytes per second", None, least=1e-6)
    inside_us: float | None = key("latency of a message within a host, microseconds", None, least=0.0)
    doubt: float = 0.3

    def apply(self, graph: Graph) -> Graph:
        """Scale the transfers of each operation and group that there is a formula for."""
        duration = graph.nodes.duration.copy()
        answered, refused = self._ratios(graph)
        if not answered:
            raise Unanswerable(refused[0] if refused else f"no group in the run fits {self.group!r}")
        for mine, ratio in answered:
            duration[mine] = np.rint(duration[mine] * ratio).astype(np.int64)
        return graph.with_durations(duration)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What keeps its time, and why."""
        return tuple(f"unchanged: {reason}" for reason in self._ratios(graph)[1])

    def _ratios(self, graph: Graph) -> tuple[list[tuple[NDArray[np.int64], Floats]], list[str]]:
        """Transfers with the ratio of their times, and why others have none."""
        require_communication(graph)
        nodes, lines = graph.nodes, fit_costs(graph)
        fits = messages_fitting(graph, "", self.group)
        answered, refused = [], []
        for sort, messages in sorts(graph).items():
            if not fits[messages[0]]:
                continue
            mine = np.flatnonzero(np.isin(nodes.message, messages) & (nodes.bytes > 0))
            num_bytes = nodes.bytes[mine].astype(np.float64)
            try:
                answered.append(
                    (mine, self._ratio(graph, lines, sort, graph.messages[messages[0]], num_bytes))
                )
            except Unanswerable as error:
                refused.append(f"{sort[0]} in {sort[1] or 'unnamed group'}: {error}")
        return answered, refused

    def _ratio(
        self, graph: Graph, lines: dict[Sort, Line], sort: Sort, message: Message, num_bytes: Floats
    ) -> Floats:
        """[T] time by the other algorithm over time by the one that ran."""
        now = self._ran(graph, message.op)
        if sort not in lines:
            raise Unanswerable("too few transfers of known size with all their ranks to tell what one costs")
        if message.num_ranks < 2:
            raise Unanswerable("how many ranks are in it is not known")
        if lines[sort].bandwidth_only:
            raise Unanswerable("sizes are too alike to tell what a message costs from what its bytes do")
        if now == self.to:
            return np.ones(num_bytes.size)
        spent = cost(message.op, now, message.num_ranks)
        link = link_of(lines[sort], spent)
        before = time_ns(spent, link, num_bytes)
        if self.to != HIERARCHICAL:
            return time_ns(cost(message.op, self.to, message.num_ranks), link, num_bytes) / before
        hosts, per_host = _layout(graph, message)
        inside = self._inside(graph, lines)
        return two_level_ns(message.op, hosts, per_host, link, inside, num_bytes) / before

    def _ran(self, graph: Graph, op: str) -> str:
        return recorded_algorithm(graph, op) or self.now or RING

    def _inside(self, graph: Graph, lines: dict[Sort, Line]) -> Link:
        """What communication within a host costs, as given, or as a group within one host tells.

        Raises:
            Unanswerable: neither does.
        """
        if self.inside_gbps is not None:
            return Link((self.inside_us or 0.0) * NS_PER_US, 1 / self.inside_gbps)
        for sort, messages in sorts(graph).items():
            message = graph.messages[messages[0]]
            if sort in lines and len(_hosts_in(graph, message)) == 1:
                return link_of(lines[sort], cost(message.op, self._ran(graph, message.op), message.num_ranks))
        raise Unanswerable("no group within one host tells what communication there costs: give inside_gbps=")

    def describe(self) -> str:
        """What is changed."""
        return f"collectives run by {self.to}" if self.to in FLAT else "collectives run within hosts first"

    def how(self) -> str:
        """How to do it."""
        if self.to == HALVING:
            return "a library that has it, as MPI and gloo do"
        if self.to in FLAT:
            return f"NCCL_ALGO={self.to.capitalize()}"
        return "reduce-scatter, all-reduce and all-gather over a two-dimensional init_device_mesh"


def recorded_algorithm(graph: Graph, op: str) -> str:
    """The algorithm that all collectives of an operation ran; empty where the run does not tell."""
    if graph.run is None:
        return ""
    rows = graph.run.table(COLLECTIVES, ["op", "algorithm"]).filter(pl.col("op") == op)
    found = [name.lower() for name in rows["algorithm"].unique().to_list()]
    return found[0] if len(found) == 1 and found[0] in FLAT else ""


def _hosts_in(graph: Graph, message: Message) -> Counter[str]:
    """How many ranks of a group are on each host.

    Raises:
        Unanswerable: the run does not tell of all.
    """
    hosts, nodes = hosts_of(graph), graph.nodes
    same = [number for number, other in enumerate(graph.messages) if other.group == message.group]
    ranks = np.unique(nodes.rank[np.isin(nodes.message, same)]).tolist()
    if len(ranks) < message.num_ranks or not set(ranks) <= hosts.keys():
        raise Unanswerable("the run does not tell the hosts of all ranks of the group")
    return Counter(hosts[rank] for rank in ranks)


def _layout(graph: Graph, message: Message) -> tuple[int, int]:
    """Hosts of a group, and ranks on each.

    Raises:
        Unanswerable: the run does not tell, there is but one, or they hold different numbers of ranks.
    """
    ranks = _hosts_in(graph, message)
    if len(ranks) < 2:
        raise Unanswerable("its ranks are all on one host")
    if len(set(ranks.values())) > 1:
        raise Unanswerable("its hosts have different numbers of ranks")
    return len(ranks), next(iter(ranks.values()))
