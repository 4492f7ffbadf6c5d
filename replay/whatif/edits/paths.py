"""Other paths over the fabric, and other cables: hashes, planned paths, spraying, failures, oversubscription.

All need the topology of the run. How its routers hash is not known, so what depends on hashes is predicted
over many seeds: the step is that of the median one, its interval reaches from the best to the worst but for
one in twenty. A change for the better starts from hashed paths, one for the worse from paths that meet
nowhere.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from dpro.arrays import Ints
from dpro.errors import InputError, Unanswerable, UsageError
from dpro.replay.cost.fabric.connections import hashed_loads, quantile
from dpro.replay.cost.fabric.flows import Flows, Load, loaded, sprayed
from dpro.replay.cost.fabric.network import GPU, HUB, NIC, Fabric, Routes, between_switches, routes_of
from dpro.replay.cost.fabric.placement import Placed, placed
from dpro.replay.cost.fabric.planning import evenly_split, planned_connections
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.edit import Edit, Reach
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import MAX_TIMES, key
from dpro.replay.whatif.graph_ops.shared_fabric import Cables, with_fabric
from dpro.topology.kept import PathEntry, read_paths

TAIL = 0.05  # of seeds, on either side of the interval
NAMED = 3  # links with the most flows
THEN = ("hash", "plan", "spray")
EVENLY = ", and what shares a cable shares it evenly"  # fair queues, or pacing that is as good


class FabricEdit(Edit):
    """Other paths or other cables."""

    needs: ClassVar[str] = "a topology (`dpro topology FILE --attach RUN`), and ranks on several hosts of it"
    source: ClassVar[str] = "max-min fair rates, Bertsekas and Gallager, section 6.5.2"
    is_better: ClassVar[bool] = True
    acts_on: ClassVar[Reach] = "transfers"

    @abstractmethod
    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        """What is loaded after the change, by the share of seeds that do better; as they are in `placement`.

        Raises:
            Unanswerable: the fabric lacks what the edit names, or no path is left.
        """

    def apply(self, graph: Graph) -> Graph:
        return self._changed(graph, (0.5, 0.5))[0]

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        if self.is_better:  # from the hash that was luckiest, and from the one that was not
            return self._changed(graph, (TAIL, 0.5), (1 - TAIL, 0.5))
        return self._changed(graph, (0.5, TAIL), (0.5, 1 - TAIL))

    def _changed(self, graph: Graph, *shares: tuple[float, float]) -> tuple[Graph, ...]:
        """The changed job, for shares of the seeds that do better, before and after the change."""
        placement = placed(graph)
        cables, gbps = self.cables(placement), placement.fabric.gbps
        best = Cables(sprayed(placement.flows, placement.routes), gbps)

        def begin(share: float) -> Cables:
            by_hash = self.is_better or placement.path_entries
            return Cables(quantile(placement.now, share), gbps) if by_hash else best

        return tuple(
            with_fabric(graph, placement.communications, best, begin(before), cables(after))
            for before, after in shares
        )

    def bound(self, facts: RunFacts) -> float:
        if not self.is_better:
            return 0.0
        return facts.idle(facts.graph.nodes.kind == NodeKind.TRANSFER)


@dataclass(frozen=True)
class HashedPaths(FabricEdit):
    """Each flow takes the path that a hash of its ports and addresses gives it."""

    name = "ecmp"
    summary = "paths by hash: how much collisions cost"
    example = "ecmp"
    assumes = "no flows collided when the run was recorded" + EVENLY
    is_advice = False
    is_better = False
    effort = "none"
    proof = "rings from planned to collided paths of a leaf-spine fabric of namespaces, gloo"
    doubt: float = 0.05

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        placed(facts.graph)
        return [cls()]

    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        return lambda share: Cables(quantile(placement.hashed, share), placement.fabric.gbps)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        placement = placed(graph)
        return fullest(placement, quantile(placement.hashed, 0.5))

    def describe(self) -> str:
        return "paths by hash, where flows may collide"

    def how(self) -> str:
        return "what routers do unless paths are planned; edit `paths` says what that would gain"


@dataclass(frozen=True)
class PlannedPaths(FabricEdit):
    """Each flow on one path, chosen such that flows meet least: C4P's idea (arXiv 2406.04594)."""

    name = "paths"
    summary = "paths that are planned, so that flows meet least"
    example = "paths:file=plan.json,split=no"
    assumes = "paths are by hash now, and flows that meet at all may meet at any time" + EVENLY
    proof = "rings over collided and planned paths of a leaf-spine fabric of namespaces, gloo"
    effort = "code"
    file: Path | None = key("a file of paths instead, as `dpro topology RUN --plan` writes one", None)
    split: str = key(
        "whether some flows are split, so that cables carry the same", "no", choices=("no", "yes")
    )
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        placed(facts.graph)
        return [cls()]

    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        gbps = placement.fabric.gbps
        if self.split == "yes":
            flows, choose = evenly_split(placement.flows, placement.routes)
            in_parts = loaded(flows, placement.routes, choose)
            return lambda share: Cables(in_parts, gbps)
        if self.file:
            loads = hashed_loads(placement.flows, placement.routes, _read(self.file))
            return lambda share: Cables(quantile(loads, share), gbps)
        (load,) = loads_by("plan", placement.flows, placement.routes)
        return lambda share: Cables(load, gbps)

    def is_proven(self, graph: Graph) -> bool:
        return not placed(graph).known_missing and self.split == "no"

    def notes(self, graph: Graph) -> tuple[str, ...]:
        placement = placed(graph)
        return fullest(placement, self.cables(placement)(0.5).load)

    def describe(self) -> str:
        return f"paths as in {self.file}" if self.file else "paths planned for the job's flows"

    def how(self) -> str:
        return (
            "`dpro topology RUN --plan plan.json` writes the path of each connection: give each a source "
            "port whose hash takes it (UDP source ports of RoCE), or routes by source in the leaves"
        )


def _read(file: Path) -> list[PathEntry]:
    try:
        return read_paths(file)
    except InputError as error:
        raise Unanswerable(str(error)) from error


@dataclass(frozen=True)
class SprayedPaths(FabricEdit):
    """Packets of each flow go over all paths."""

    name = "spray"
    summary = "packets over all paths at once"
    example = "spray:headroom=0.05"
    assumes = "paths are by hash now, and ports put packets in order again" + EVENLY
    effort = "money"
    headroom: float = key("share of a cable that is lost to packets out of order", 0.05, least=0.0, most=0.9)
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        placed(facts.graph)
        return [cls()]

    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        load = sprayed(placement.flows, placement.routes)
        fabric = placement.fabric
        gbps = np.where(between_switches(fabric), fabric.gbps * (1 - self.headroom), fabric.gbps)
        return lambda share: Cables(load, gbps)

    def describe(self) -> str:
        return "packets sprayed over all paths"

    def how(self) -> str:
        return (
            "switches and ports that spray packets and put them in order (adaptive routing, UEC, EFA's SRD)"
        )


@dataclass(frozen=True)
class FailedCable(FabricEdit):
    """A cable between two switches fails, or a port; flows take other paths."""

    name = "fail"
    summary = "a cable of the fabric fails"
    example = "fail:link=leaf0/spine0,then=hash,left=0"
    assumes = "no flows collided before" + EVENLY
    proof = "a cable down and one at half rate, leaf-spine fabric of namespaces, gloo"
    is_advice = False
    is_better = False
    effort = "none"
    link: str = key("the ends of the cable, as leaf0/spine0; one of several side by side")
    then: str = key("what paths are chosen by then", "hash", choices=THEN)
    left: float = key("share of its capacity that is left: paths stay", 0.0, least=0.0, most=1.0)
    doubt: float = 0.05

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        placement = placed(facts.graph)
        fabric, begin = placement.fabric, placement.flows.begin
        used = placement.routes.out[begin[fabric.kind[begin] == NIC]]
        leaves = set(fabric.target[used].tolist())
        up = np.flatnonzero(between_switches(fabric) & np.isin(fabric.source, list(leaves)))[:1]
        ends = zip(fabric.source[up].tolist(), fabric.target[up].tolist())
        return [cls("/".join(fabric.names[end] for end in pair)) for pair in ends]

    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        cable, gbps = _cable(placement.fabric, self.link), placement.fabric.gbps
        if self.left:
            slower = gbps.copy()
            slower[cable] *= self.left
            return lambda share: Cables(quantile(placement.now, share), slower)
        routes = routes_of(placement.fabric, cable)
        loads = loads_by(self.then, placement.flows, routes)
        return lambda share: Cables(quantile(loads, share), gbps)

    def describe(self) -> str:
        if self.left:
            return f"a cable {self.link} with {self.left:.3g} of its capacity"
        return f"a failed cable {self.link}, paths then by {self.then}"

    def how(self) -> str:
        return "cannot be wished for: it says what a failure would cost, and what planning then saves"


@dataclass(frozen=True)
class Oversubscription(FabricEdit):
    """Switches pass on less than they take: cables between switches are fewer, or slower."""

    name = "oversubscription"
    summary = "fewer cables between switches"
    example = "oversubscription:ratio=2"
    assumes = "packets are spread evenly, so that nothing is lost to collisions besides" + EVENLY
    proof = "all cables between switches at half rate, leaf-spine fabric of namespaces, gloo"
    is_advice = False
    is_better = False
    effort = "money"
    ratio: float = key("how many times less switches pass on", 2.0, least=1 / MAX_TIMES)
    doubt: float = 0.05

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        placed(facts.graph)
        return [cls()]

    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        fabric = placement.fabric
        gbps = np.where(between_switches(fabric), fabric.gbps / self.ratio, fabric.gbps)
        load = sprayed(placement.flows, placement.routes)
        return lambda share: Cables(load, gbps)

    def describe(self) -> str:
        return f"cables between switches with {1 / self.ratio:.3g} of their capacity"

    def how(self) -> str:
        return "fewer or slower cables from leaves to spines: it says what that would cost"


def loads_by(
    then: str, flows: Flows, routes: Routes, path_entries: Sequence[PathEntry] = ()
) -> Sequence[Load]:
    """What flows load: one load, or one by each seed of a hash.

    Args:
        then: what paths are chosen by: hash, plan or spray.
        path_entries: paths that no hash decides.
    """
    if then == "spray":
        return [sprayed(flows, routes)]
    if then == "plan":
        return [loaded(flows, routes, planned_connections(flows, routes, routes.network.gbps))]
    return hashed_loads(flows, routes, path_entries)


def _cable(fabric: Fabric, text: str) -> Ints:
    """Both links of one cable.

    Raises:
        UsageError: the text names no two ends.
        Unanswerable: no cable has these ends.
    """
    begin, arrow, end = (part.strip() for part in text.partition("/"))
    if not (begin and arrow and end):
        raise UsageError(f"fail: link={text!r}: name both ends of the cable, as leaf0/spine0")
    for name in (begin, end):
        if name not in fabric.node_of or fabric.kind[fabric.node_of[name]] in (GPU, HUB):
            raise Unanswerable(f"the topology has no switch and no port {name!r}")
    ends = (fabric.node_of[begin], fabric.node_of[end])
    each_way = [fabric.links_from.get(pair, []) for pair in (ends, ends[::-1])]
    if not each_way[0]:
        raise Unanswerable(f"no cable of the topology joins {begin} and {end}")
    return np.array([links[0] for links in each_way], np.int64)


def fullest(placement: Placed, load: Load) -> tuple[str, ...]:
    """The links between switches that most connections cross, a line each."""
    between, (members, *_) = between_switches(placement.fabric), placement.communications.kinds
    rows = np.repeat(np.arange(load.indptr.size - 1), np.diff(load.indptr))
    crossing: dict[int, set[tuple[int, ...]]] = {}
    for row, link in zip(rows.tolist(), load.links.tolist()):
        if between[link]:
            crossing.setdefault(link, set()).add(members[row])
    most = sorted(crossing, key=lambda link: (-len(crossing[link]), link))[:NAMED]
    return tuple(
        f"{placement.fabric.link_name(link)} carries {len(crossing[link])} groups of ranks"
        for link in most
        if len(crossing[link]) > 1
    )
