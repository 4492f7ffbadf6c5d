"""Edits of the fabric: other paths, cables or hosts, and other jobs beside this one.

Takes a run with the topology of its fabric; returns its changed graph. The hashes of its routers are unknown,
so predictions that depend on them use many seeds: the step is that of the median seed, and its interval
leaves out one seed in twenty at either end. An improvement starts from hashed paths, a deterioration from
paths that meet nowhere. A rank that moves takes its work with it, and its new paths are by hash. Another job
is assumed to communicate all the time, or as in a recording of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.errors import InputError, Unanswerable, UsageError
from dpro.extensions.fabric.planning import evenly_split, plan_connection_paths
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.cost.fabric.connections import hashed_loads, quantile
from dpro.replay.cost.fabric.flows import NOT_RECORDED, Flows, Load, flows_of, loaded, sprayed
from dpro.replay.cost.fabric.network import (
    GPU,
    HUB,
    NIC,
    NO_LINK,
    Fabric,
    Routes,
    between_switches,
    fabric_of,
    paths,
    routes_of,
)
from dpro.replay.cost.fabric.placement import (
    Communications,
    Placed,
    communications,
    gpus_of_ranks,
    host_named,
    placed,
)
from dpro.replay.graph import Graph, NodeKind, once
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import MAX_TIMES, key
from dpro.replay.whatif.graph_ops.shared_fabric import (
    Background,
    Cables,
    Recorded,
    Sending,
    recorded,
    sending,
    with_fabric,
)
from dpro.replay.whatif.rankwise import TransferEdit
from dpro.store import Run, open_run
from dpro.topology.file import FILE, read
from dpro.topology.hostlist import expand
from dpro.topology.kept import PathEntry, read_paths
from dpro.units import format_duration

TAIL = 0.05  # of seeds, on either side of the interval
NAMED = 3  # links with the most flows
PATH_CHOICES = ("hash", "plan", "spray")
EVENLY = ", and flows share a cable evenly"  # fair queues, or pacing that is as good


class FabricEdit(TransferEdit):
    """An edit that changes paths or cables."""

    needs: ClassVar[str] = "a topology (`dpro topology FILE --attach RUN`), and ranks on several of its hosts"
    source: ClassVar[str] = "max-min fair rates, Bertsekas and Gallager, section 6.5.2"
    is_better: ClassVar[bool] = True

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        placed(facts.graph)
        return [cls()]

    @abstractmethod
    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        """Return a function from the share of seeds that do better to the load after the change.

        Raises:
            Unanswerable: the fabric lacks what the edit names, or no path is left.
        """

    def apply(self, graph: Graph) -> Graph:
        return self._changed(graph, (0.5, 0.5))[0]

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        if self.is_better:  # the gain is smallest from the luckiest hash, and largest from the unluckiest
            return self._changed(graph, (TAIL, 0.5), (1 - TAIL, 0.5))
        return self._changed(graph, (0.5, TAIL), (0.5, 1 - TAIL))

    def _changed(self, graph: Graph, *shares: tuple[float, float]) -> tuple[Graph, ...]:
        """Return the changed job for each pair of shares of better seeds, before and after the change."""
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
    summary = "choose paths by hash (ECMP): shows the cost of collisions"
    example = "ecmp"
    assumes = "no flows collided when the run was recorded" + EVENLY
    is_advice = False
    is_better = False
    effort = "none"
    proof = "rings from planned to collided paths of a leaf-spine fabric of namespaces, gloo"
    doubt: float = 0.05

    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        return lambda share: Cables(quantile(placement.hashed, share), placement.fabric.gbps)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        placement = placed(graph)
        return fullest_links(placement, quantile(placement.hashed, 0.5))

    def describe(self) -> str:
        return "paths by hash, where flows may collide"

    def how(self) -> str:
        return "the default of routers without planned paths; edit `paths` shows the gain of planning"


@dataclass(frozen=True)
class PlannedPaths(FabricEdit):
    """Each flow on one path, chosen such that flows meet least: C4P's idea (arXiv 2406.04594)."""

    name = "paths"
    summary = "plan paths so that flows collide as little as possible"
    example = "paths:file=plan.json,split=no"
    assumes = (
        "paths are currently chosen by hash, and flows that can collide may collide at any time" + EVENLY
    )
    proof = "rings over collided and planned paths of a leaf-spine fabric of namespaces, gloo"
    effort = "code"
    file: Path | None = key("file with paths instead, in the format of `dpro topology RUN --plan`", None)
    split: str = key(
        "whether to split some flows, to balance the load of cables", "no", choices=("no", "yes")
    )
    doubt: float = 0.1

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
        return fullest_links(placement, self.cables(placement)(0.5).load)

    def describe(self) -> str:
        return f"paths as in {self.file}" if self.file else "paths planned for the job's flows"

    def how(self) -> str:
        return (
            "`dpro recipe nccl` writes settings of NCCL and rules of switches; where source ports can be "
            "chosen, `dpro topology RUN --plan plan.json` writes the path of each connection"
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
    summary = "spray packets over all paths"
    example = "spray:headroom=0.05"
    assumes = "paths are currently chosen by hash, and ports reorder packets" + EVENLY
    effort = "money"
    headroom: float = key(
        "share of a cable's bandwidth lost to out-of-order packets", 0.05, least=0.0, most=0.9
    )
    doubt: float = 0.1

    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        load = sprayed(placement.flows, placement.routes)
        fabric = placement.fabric
        gbps = np.where(between_switches(fabric), fabric.gbps * (1 - self.headroom), fabric.gbps)
        return lambda share: Cables(load, gbps)

    def describe(self) -> str:
        return "packets sprayed over all paths"

    def how(self) -> str:
        return "use switches and ports with packet spraying and reordering (adaptive routing, UEC, EFA's SRD)"


@dataclass(frozen=True)
class FailedCable(FabricEdit):
    """A cable between two switches fails, or a port; flows take other paths."""

    name = "fail"
    summary = "fail a cable of the fabric"
    example = "fail:link=leaf0/spine0,then=hash,left=0"
    assumes = "flows did not collide before" + EVENLY
    proof = "a cable down and one at half rate, leaf-spine fabric of namespaces, gloo"
    is_advice = False
    is_better = False
    effort = "none"
    link: str = key("both ends of the cable, such as leaf0/spine0; one of several parallel cables")
    then: str = key("how paths are chosen afterwards", "hash", choices=PATH_CHOICES)
    left: float = key("remaining share of its capacity; paths stay unchanged", 0.0, least=0.0, most=1.0)
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
            return f"cable {self.link} at {self.left:.3g} of its capacity"
        return f"failed cable {self.link}, with paths by {self.then}"

    def how(self) -> str:
        return "not a remedy: shows the cost of a failure, and the savings by planning"


@dataclass(frozen=True)
class Oversubscription(FabricEdit):
    """Switches pass on less than they take: cables between switches are fewer, or slower."""

    name = "oversubscription"
    summary = "reduce the number of cables between switches"
    example = "oversubscription:ratio=2"
    assumes = "packets are spread evenly, so that collisions cost nothing in addition" + EVENLY
    proof = "all cables between switches at half rate, leaf-spine fabric of namespaces, gloo"
    is_advice = False
    is_better = False
    effort = "money"
    ratio: float = key("factor by which the bandwidth between switches shrinks", 2.0, least=1 / MAX_TIMES)
    doubt: float = 0.05

    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        fabric = placement.fabric
        gbps = np.where(between_switches(fabric), fabric.gbps / self.ratio, fabric.gbps)
        load = sprayed(placement.flows, placement.routes)
        return lambda share: Cables(load, gbps)

    def describe(self) -> str:
        return f"cables between switches at {1 / self.ratio:.3g} of their capacity"

    def how(self) -> str:
        return "fewer or slower cables from leaves to spines: shows their cost"


def loads_by(
    then: str, flows: Flows, routes: Routes, path_entries: Sequence[PathEntry] = ()
) -> Sequence[Load]:
    """Return the load of flows: one, or one per seed of a hash.

    Args:
        then: how paths are chosen: hash, plan or spray.
        path_entries: known paths, which no hash decides.
    """
    if then == "spray":
        return [sprayed(flows, routes)]
    if then == "plan":
        return [loaded(flows, routes, plan_connection_paths(flows, routes, routes.network.gbps))]
    return hashed_loads(flows, routes, path_entries)


def _cable(fabric: Fabric, text: str) -> Ints:
    """Return both links of one cable.

    Raises:
        UsageError: the text does not name two ends.
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


def fullest_links(placement: Placed, load: Load) -> tuple[str, ...]:
    """Return one line for each of the links between switches that most groups of ranks cross."""
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


SHOWN = 8  # hosts that are named
PHASES = 8  # offsets tried between the steps of another job and those of the run


@dataclass(frozen=True)
class PlacedRanks(FabricEdit):
    """Hosts exchange their ranks, all those of one with all those of another."""

    name = "place"
    summary = "move ranks to other hosts, so that communicating ranks are close"
    example = "place:hosts=node1/node0,then=hash"
    assumes = "hosts are equal, and paths are chosen by hash before and after" + EVENLY
    proof = "orders of four hosts over two leaves of a fabric of namespaces, gloo"
    effort = "flag"
    hosts: str = key("new order of hosts, by first rank: node1/node0; default: search for the best", "")
    then: str = key("how paths are chosen afterwards", "hash", choices=PATH_CHOICES)
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        placement = placed(facts.graph)
        now, then = cls()._hosts(placement)
        return [cls()] if now != then else []

    def _hosts(self, placement: Placed) -> tuple[list[int], list[int]]:
        """Return the hosts of ranks, by first rank, as recorded and after the move.

        Raises:
            UsageError: the edit does not name each host of the ranks once.
            Unanswerable: the topology lacks a named host.
        """
        now = hosts_of(placement.fabric, placement.gpus)
        if not self.hosts:
            calls = placement.communications
            sent = np.bincount(calls.kind, calls.sent, calls.first.size).astype(float)
            traffic = exchanged(placement.fabric, placement.flows, sent, now)
            order = best_order(traffic, distances(placement.routes, now))
            return now, [now[place] for place in order.tolist()]
        named = [name.strip() for name in self.hosts.split("/")]
        then = [host_named(placement.fabric, name) for name in named]
        if None in then:
            raise Unanswerable(f"the topology has no host {named[then.index(None)]!r}")
        if len(then) != len(now) or len(set(then)) != len(then):
            raise UsageError(f"place: hosts={self.hosts!r}: name {len(now)} hosts, each once")
        return now, [host for host in then if host is not None]

    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        now, then = self._hosts(placement)
        gbps = placement.fabric.gbps
        if now == then:
            return lambda share: Cables(quantile(placement.now, share), gbps)
        gpus = placement.fabric.gpus
        if any(len(gpus[one]) != len(gpus[other]) for one, other in zip(now, then)):
            raise Unanswerable("hosts with different numbers of GPUs cannot swap ranks")
        members, ops, algorithms, channels = placement.communications.kinds
        others = moved(placement.fabric, members, dict(zip(now, then)))
        flows = flows_of(placement.fabric, others, ops, algorithms, channels)
        loads = loads_by(self.then, flows, placement.routes)
        return lambda share: Cables(quantile(loads, share), gbps)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        placement = placed(graph)
        now, then = self._hosts(placement)
        if now == then:
            return ("no order of hosts was found that brings neighbours closer",)
        names = [placement.fabric.hosts[host] for host in then]
        more = f" … of {len(names)}" if len(names) > SHOWN else ""
        return (f"hosts by their first rank: {'/'.join(names[:SHOWN])}{more}",)

    def describe(self) -> str:
        return f"ranks on hosts {self.hosts}" if self.hosts else "ranks placed close to their peers"

    def how(self) -> str:
        return (
            "change the order of hosts in the launcher (Slurm: --distribution=arbitrary with SLURM_HOSTFILE)"
        )


@dataclass(frozen=True)
class OtherJobs(FabricEdit):
    """Other jobs send along rings over their hosts all the time, or as a recorded one did."""

    name = "beside"
    summary = "run other jobs on the same fabric"
    example = "beside:hosts=node[2-3]/node[4-7],then=hash"
    assumes = (
        "no other job ran during the recording; a job given by hosts= communicates all the time, a "
        "recorded job keeps its own pace, and its steps begin at any time within the run's steps" + EVENLY
    )
    is_advice = False
    is_better = False
    effort = "none"
    hosts: str = key("hosts of another job, in the order of its ring; separate several jobs by /", "")
    run: Path | None = key("folder of a run of another job on the same fabric, instead of hosts", None)
    then: str = key("how the paths of all jobs are chosen", "hash", choices=PATH_CHOICES)
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        placed(facts.graph)
        return []  # the run does not name other jobs

    def apply(self, graph: Graph) -> Graph:
        if not self.run:
            return super().apply(graph)
        return self._beside_run(graph, self._phases(graph)[PHASES // 2], 0.5)

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        if not self.run:
            return super().bounds(graph)
        phases = self._phases(graph)
        ends = ((phases[0], TAIL), (phases[-1], 1 - TAIL))
        return tuple(self._beside_run(graph, phase, share) for phase, share in ends)

    def _phases(self, graph: Graph) -> tuple[float, ...]:
        """Return offsets of the other run, as parts of its step, sorted by how much they slow this one."""

        def compute(graph: Graph) -> tuple[float, ...]:
            def slowness(phase: float) -> int:
                changed = self._beside_run(graph, phase, 0.5)
                timeline = replay(changed)
                return int(step_times(changed, timeline.start, timeline.end)["duration_ns"].sum())

            return tuple(sorted((number / PHASES for number in range(PHASES)), key=slowness))

        return once(graph, ("phases", self), compute)

    def _beside_run(self, graph: Graph, phase: float, share: float) -> Graph:
        """Return the graph of the job while the recorded other one runs, too.

        Args:
            phase: how much later than this job's first communication the other's is, as a part of its step.
            share: share of the seeds that do better, for the paths of both jobs.
        """
        placement, gbps = placed(graph), placed(graph).fabric.gbps
        other, loads = self._other(graph)
        best = Cables(sprayed(placement.flows, placement.routes), gbps)
        first = np.unique(placement.communications.of, return_index=True)[1]
        window = graph.nodes.window[placement.communications.transfers[first]].astype(np.int64)
        return with_fabric(
            graph,
            placement.communications,
            best,
            Cables(quantile(placement.now, 0.5), gbps) if placement.path_entries else best,
            Cables(quantile(loads, share), gbps),
            background(other, window, recorded(graph, placement.communications), phase),
        )

    def _other(self, graph: Graph) -> tuple[OtherRun, Sequence[Load]]:
        """Return the traffic of the recorded job, and the load of both jobs for each seed.

        Raises:
            UsageError: hosts are named as well.
        """
        path = self.run
        if self.hosts or path is None:
            raise UsageError("beside: give hosts=, or run= with the folder of a run, not both")

        def compute(graph: Graph) -> tuple[OtherRun, Sequence[Load]]:
            placement = placed(graph)
            other = other_run(path, placement)
            return other, loads_by(
                self.then, flows_of_both(placement, other), placement.routes, placement.path_entries
            )

        return once(graph, ("other run", path, self), compute)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        if not self.run:
            return ()
        placement = placed(graph)
        other, _ = self._other(graph)
        takes = f"its typical step takes {format_duration(other.period_ns)}, and it keeps that pace"
        common = sorted(placement.fabric.names[gpu] for gpu in other.gpus & {*placement.gpus})
        if not common:
            return (takes,)
        gpus = ", ".join(common[:SHOWN])
        return (takes, f"both compute on {gpus}: their interference there is not predicted")

    def cables(self, placement: Placed) -> Callable[[float], Cables]:
        if not self.hosts:
            raise UsageError("beside: give hosts= of other jobs, or run= with the folder of a run")
        fabric = placement.fabric
        jobs = [list(self._gpus(placement, text)) for text in self.hosts.split("/")]
        members, ops, algorithms, channels = placement.communications.kinds
        more, rings, unknown = ["all_reduce"] * len(jobs), [""] * len(jobs), [NOT_RECORDED] * len(jobs)
        flows = flows_of(
            fabric,
            [*map(list, members), *jobs],
            [*ops, *more],
            [*algorithms, *rings],
            [*channels, *unknown],
        )
        loads = loads_by(self.then, flows, placement.routes, placement.path_entries)
        return lambda share: Cables(quantile(loads, share), fabric.gbps)

    @staticmethod
    def _gpus(placement: Placed, text: str) -> Iterator[int]:
        names = expand(text)
        for name in names:
            host = host_named(placement.fabric, name)
            if host is None:
                raise Unanswerable(f"the topology has no host {name!r}")
            yield from placement.fabric.gpus[host]
        if len(names) < 2:
            raise UsageError(f"beside: hosts={text!r}: a job on one host sends nothing over the fabric")

    def describe(self) -> str:
        if self.run:
            return f"beside the job of {self.run}, paths by {self.then}"
        return f"other jobs on {self.hosts}, paths by {self.then}"

    def how(self) -> str:
        return "not a remedy: shows the cost of neighbouring jobs, and the savings by planning"


# The order of hosts that moves the fewest bytes over the fewest and fastest cables.

MAX_EXCHANGED = 200  # hosts up to which exchanges of all pairs are tried
_Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def exchanged(fabric: Fabric, flows: Flows, sent: Floats, hosts: Sequence[int]) -> _Matrix:
    """Return [H, H] bytes that each host sends to each other one.

    Args:
        sent: [C] bytes that the busiest rank of each communication sends.
        hosts: hosts of the run, by their number in the fabric.
    """
    place = np.full(fabric.num_nodes, -1)
    for number, host in enumerate(hosts):
        for gpu in fabric.gpus[host]:
            place[gpu] = number
            if gpu in fabric.port:
                place[fabric.port[gpu]] = number
    begin, end = place[flows.begin], place[flows.end]
    sent_bytes = np.zeros((len(hosts), len(hosts)))
    np.add.at(sent_bytes, (begin, end), np.where(begin != end, flows.share * sent[flows.of], 0.0))
    return sent_bytes


def distances(routes: Routes, hosts: Sequence[int]) -> _Matrix:
    """Return [H, H] time of a byte on links between switches, on a shortest path between hosts, in ns."""
    fabric = routes.network
    ports = np.array([_ports(fabric, host)[0] for host in hosts])
    one, other = (grid.ravel() for grid in np.meshgrid(ports, ports, indexing="ij"))
    different = np.flatnonzero(one != other)
    first = paths(routes, one[different], other[different], lambda flows, *_: np.zeros(flows.size, np.int64))
    takes = np.where(between_switches(fabric), 1 / fabric.gbps, 0.0)
    ns = np.zeros(one.size)
    ns[different] = np.where(first == NO_LINK, 0.0, takes[first]).sum(axis=1)
    return ns.reshape(ports.size, ports.size)


def _ports(fabric: Fabric, host: int) -> list[int]:
    return [fabric.port[gpu] for gpu in fabric.gpus[host] if gpu in fabric.port]


def best_order(traffic: _Matrix, far: _Matrix) -> Ints:
    """Return [H] the place of each host's work; the order stays as it is unless another one is better.

    Args:
        traffic: [H, H] bytes from host to host.
        far: [H, H] distances of places.
    """
    from scipy.optimize import quadratic_assignment  # imported late: as slow to load as everything else

    as_placed = np.arange(len(traffic))
    if len(traffic) < 2:
        return as_placed
    draws = {"rng": np.random.default_rng(0)}
    permutation = quadratic_assignment(traffic, far, method="faq", options=draws).col_ind
    if len(traffic) <= MAX_EXCHANGED:
        guess = np.stack([as_placed, permutation], axis=1)
        begin = draws | {"partial_guess": guess}
        permutation = quadratic_assignment(traffic, far, method="2opt", options=begin).col_ind
    before, after = ((traffic * far[np.ix_(order, order)]).sum() for order in (as_placed, permutation))
    order: Ints = permutation.astype(np.int64) if after < before * (1 - 1e-9) else as_placed
    return order


def hosts_of(fabric: Fabric, gpus: Sequence[int]) -> list[int]:
    """Return the hosts of GPUs, each once, in the order of the GPUs."""
    host_of = {gpu: host for host, host_gpus in enumerate(fabric.gpus) for gpu in host_gpus}
    return list(dict.fromkeys(host_of[gpu] for gpu in gpus))


def moved(fabric: Fabric, members: Sequence[Sequence[int]], to: dict[int, int]) -> list[list[int]]:
    """Return the GPUs of communications after hosts have swapped; GPUs keep their number in the host."""
    place = {
        gpu: fabric.gpus[to[host]][number]
        for host, host_gpus in enumerate(fabric.gpus)
        if host in to
        for number, gpu in enumerate(host_gpus)
        if number < len(fabric.gpus[to[host]])
    }
    return [[place[gpu] for gpu in gpus] for gpus in members]


# The traffic of another run on the fabric of a run: its typical step, repeated.

STRETCHED = 3.0  # factor on the time the run communicates in: the other job sends for so long


@dataclass(frozen=True)
class OtherRun:
    """The traffic of another run in a typical step.

    Attributes:
        step: [O] communications of that step.
        sending: [O] what these send; they begin at or after 0, the time of the first.
        period_ns: duration of the step.
        gpus: GPUs that its ranks compute on.
    """

    communications: Communications
    step: Ints
    sending: Sending
    period_ns: float
    gpus: frozenset[int]


def other_run(path: Path, placement: Placed) -> OtherRun:
    """Return the traffic of another run on the fabric of a run.

    Raises:
        InputError: there is no such run.
        Unanswerable: it has no steps, its hosts are not in the fabric, or no cable is on a path of both.
    """
    run = open_run(path)
    try:
        gpus = gpus_of_ranks(run, placement.fabric)
        _check_cables(run, placement.fabric)
        graph = build_graph(run).graph
    except Unanswerable as error:
        raise Unanswerable(f"{path}: {error}") from error
    calls = communications(graph, gpus)
    flows = flows_of(placement.fabric, *calls.kinds)
    load = sprayed(flows, placement.routes)
    common = set(load.links.tolist()) & set(sprayed(placement.flows, placement.routes).links.tolist())
    if not common:
        raise Unanswerable(f"{path}: no cable is on a path of both runs: they cannot meet")
    timeline = replay(graph)
    times = step_times(graph, timeline.start, timeline.end).sort("duration_ns", "step")
    step_of = graph.nodes.step[calls.transfers]
    times = times.filter(times["step"].is_in(np.unique(step_of).tolist()))
    if not times.height:
        raise Unanswerable(f"{path}: it has no known step in which ranks communicate")
    step, period = times.select("step", "duration_ns").row((times.height - 1) // 2)
    members = np.unique(calls.of[step_of == step])
    sent = Sending(
        *(column[members] for column in sending(graph, calls, Cables(load, placement.fabric.gbps)))
    )
    sent = sent._replace(begin=sent.begin - sent.begin.min())
    return OtherRun(calls, members, sent, float(period), frozenset(gpus.values()))


def _check_cables(run: Run, fabric: Fabric) -> None:
    """Raise if the other run's own topology has its ports on other switches.

    Raises:
        Unanswerable: it does.
    """
    if not (run.path / FILE).is_file():
        return
    ours, its = _switches(routes_of(fabric)), _switches(routes_of(fabric_of(read(run.path / FILE))))
    for port, switch in its.items():
        if ours.get(port, switch) != switch:
            raise Unanswerable(
                f"its topology is another one: {port} is cabled to {switch} there, and to {ours[port]} here"
            )


def _switches(routes: Routes) -> dict[str, str]:
    """Map the name of each port to that of the switch it is cabled to."""
    network = routes.network
    out = {port: int(routes.out[port]) for port in set(network.port.values())}
    return {
        network.names[port]: network.names[network.target[link]] for port, link in out.items() if link >= 0
    }


def flows_of_both(placement: Placed, other: OtherRun) -> Flows:
    """Return the flows of each kind of communication of a run, followed by those of the other."""
    members, ops, algorithms, channels = placement.communications.kinds
    more = other.communications.kinds
    return flows_of(
        placement.fabric,
        [*members, *more[0]],
        [*ops, *more[1]],
        [*algorithms, *more[2]],
        [*channels, *more[3]],
    )


def background(other: OtherRun, window: Ints, moved: Recorded, phase: float) -> Background:
    """Return the traffic of the other run's steps while a run communicates.

    Args:
        window: [C] window of each communication of the run; between windows nothing is slowed down.
    """
    firsts: list[Floats] = []
    for number in np.unique(window):
        since, until = moved.begin[window == number].min(), moved.end[window == number].max()
        count = int(np.ceil(STRETCHED * (until - since) / other.period_ns)) + 2
        firsts.append(since + other.period_ns * (phase + np.arange(-1, count)))
    step_starts = np.concatenate(firsts)
    kind = np.tile(other.communications.kind[other.step], step_starts.size)
    step = other.sending
    starts = (step_starts[:, None] + step.begin[None, :]).ravel()
    return Background(
        kind, Sending(starts, np.tile(step.work, step_starts.size), np.tile(step.ceiling, step_starts.size))
    )
