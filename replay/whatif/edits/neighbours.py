"""What runs beside what on a fabric: ranks on other hosts, and other jobs on the same cables.

In: a run with the topology of its fabric. Out: its graph, changed. A rank that moves takes its work with it;
its paths are by hash then. Another job is taken to communicate all the time, or as a recording of it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable, UsageError
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.cost.fabric.connections import quantile
from dpro.replay.cost.fabric.flows import NOT_RECORDED, Flows, Load, flows_of, sprayed
from dpro.replay.cost.fabric.network import (
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
from dpro.replay.graph import Graph, once
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.paths import EVENLY, TAIL, THEN, FabricEdit, loads_by
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.shared_fabric import (
    Background,
    Cables,
    Recorded,
    Sending,
    recorded,
    sending,
    with_fabric,
)
from dpro.store import Run, open_run
from dpro.topology.file import FILE, read
from dpro.topology.hostlist import expand
from dpro.units import format_duration

SHOWN = 8  # hosts that are named
PHASES = 8  # by which steps of another job are taken to be behind those of the run


@dataclass(frozen=True)
class PlacedRanks(FabricEdit):
    """Hosts exchange their ranks, all those of one with all those of another."""

    name = "place"
    summary = "ranks on other hosts, so that neighbours are near each other"
    example = "place:hosts=node1/node0,then=hash"
    assumes = "hosts are equal, and paths are by hash now and then" + EVENLY
    proof = "orders of four hosts over two leaves of a fabric of namespaces, gloo"
    effort = "flag"
    hosts: str = key("that ranks go to, by their first rank: node1/node0; searched where not given", "")
    then: str = key("what paths are chosen by then", "hash", choices=THEN)
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        placement = placed(facts.graph)
        now, then = cls()._hosts(placement)
        return [cls()] if now != then else []

    def _hosts(self, placement: Placed) -> tuple[list[int], list[int]]:
        """The hosts of ranks, by their first rank: as recorded, and then.

        Raises:
            UsageError: other hosts are named, or not all.
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
            raise Unanswerable("hosts with different numbers of GPUs cannot exchange their ranks")
        members, ops, algorithms, channels = placement.communications.kinds
        others = moved(placement.fabric, members, dict(zip(now, then)))
        flows = flows_of(placement.fabric, others, ops, algorithms, channels)
        loads = loads_by(self.then, flows, placement.routes)
        return lambda share: Cables(quantile(loads, share), gbps)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        placement = placed(graph)
        now, then = self._hosts(placement)
        if now == then:
            return ("no other order of hosts was found in which neighbours are nearer",)
        names = [placement.fabric.hosts[host] for host in then]
        more = f" … of {len(names)}" if len(names) > SHOWN else ""
        return (f"hosts by their first rank: {'/'.join(names[:SHOWN])}{more}",)

    def describe(self) -> str:
        return f"ranks on hosts {self.hosts}" if self.hosts else "ranks on hosts near those they send to"

    def how(self) -> str:
        return "the order of hosts in the launcher (Slurm: --distribution=arbitrary with SLURM_HOSTFILE)"


@dataclass(frozen=True)
class OtherJobs(FabricEdit):
    """Other jobs send along rings over their hosts all the time, or as a recorded one did."""

    name = "beside"
    summary = "other jobs on the same fabric"
    example = "beside:hosts=node[2-3]/node[4-7],then=hash"
    assumes = (
        "no other job ran when the run was recorded; jobs that are named by hosts communicate all the time, "
        "a recorded one keeps its own pace, and its steps begin at any time in those of the run" + EVENLY
    )
    is_advice = False
    is_better = False
    effort = "none"
    hosts: str = key("of another job, in the order of its ring; a / before the next job", "")
    run: Path | None = key("a recording of another job on the same fabric instead, a folder", None)
    then: str = key("what paths of all are chosen by then", "hash", choices=THEN)
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        placed(facts.graph)
        return []  # which others there are the run does not say

    def apply(self, graph: Graph) -> Graph:
        if not self.run:
            return super().apply(graph)
        return self._beside_run(graph, self._phases(graph)[PHASES // 2], 0.5, 0.5)

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        if not self.run:
            return super().bounds(graph)
        phases = self._phases(graph)
        ends = ((phases[0], TAIL), (phases[-1], 1 - TAIL))
        return tuple(self._beside_run(graph, phase, 0.5, share) for phase, share in ends)

    def _phases(self, graph: Graph) -> tuple[float, ...]:
        """Parts of a step that the other run may be behind, in the order of how slow they make this one."""

        def slowness(phase: float) -> int:
            changed = self._beside_run(graph, phase, 0.5, 0.5)
            timeline = replay(changed)
            return int(step_times(changed, timeline.start, timeline.end)["duration_ns"].sum())

        def compute() -> tuple[float, ...]:
            return tuple(sorted((number / PHASES for number in range(PHASES)), key=slowness))

        return once(graph, ("phases", self.run, self.then), _columns(graph), compute)

    def _beside_run(self, graph: Graph, phase: float, before: float, after: float) -> Graph:
        """The job beside the recorded one.

        Args:
            phase: how much later than this job's first communication the other one's is, of its step.
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
            Cables(quantile(placement.now, before), gbps) if placement.path_entries else best,
            Cables(quantile(loads, after), gbps),
            background(other, window, recorded(graph, placement.communications), phase),
        )

    def _other(self, graph: Graph) -> tuple[OtherRun, Sequence[Load]]:
        """What the recorded job sends, and what both jobs load by each seed.

        Raises:
            UsageError: hosts are named as well.
        """
        path = self.run
        if self.hosts or path is None:
            raise UsageError("beside: give hosts=, or run= with the folder of a run, not both")

        def compute() -> tuple[OtherRun, Sequence[Load]]:
            placement = placed(graph)
            other = other_run(path, placement)
            return other, loads_by(
                self.then, flows_of_both(placement, other), placement.routes, placement.path_entries
            )

        return once(graph, ("other run", self.run, self.then), _columns(graph), compute)

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
        return (takes, f"both compute on {gpus}: what they take of each other there is not predicted")

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
        """The GPUs of a job's hosts."""
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
        return "cannot be wished for: it says what neighbours would cost, and what planning then saves"


def _columns(graph: Graph) -> tuple[object, ...]:
    """What the communications of a graph follow from."""
    nodes, edges = graph.nodes, graph.edges
    return nodes.kind, nodes.message, nodes.rank, nodes.duration, edges.source, edges.kind


# Which host computes the work of which: fewer bytes over fewer and faster cables.

MAX_EXCHANGED = 200  # hosts of which all pairs are tried
_Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def exchanged(fabric: Fabric, flows: Flows, sent: Floats, hosts: Sequence[int]) -> _Matrix:
    """[H, H] bytes that each host sends to each other.

    Args:
        sent: [C] bytes that the busiest rank of each sends.
        hosts: of the run, by their number in the fabric.
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
    """[H, H] what a byte takes on links between switches on a shortest path between hosts, ns."""
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
    """[H] the place of each host's work: the order as it is where no other one is better.

    Args:
        traffic: [H, H] bytes from host to host.
        far: [H, H] distances of places.
    """
    from scipy.optimize import quadratic_assignment  # only here: it takes as long to load as all the rest

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
    """The hosts of GPUs, each once, in the order in which they come."""
    host_of = {gpu: host for host, host_gpus in enumerate(fabric.gpus) for gpu in host_gpus}
    return list(dict.fromkeys(host_of[gpu] for gpu in gpus))


def moved(fabric: Fabric, members: Sequence[Sequence[int]], to: dict[int, int]) -> list[list[int]]:
    """The GPUs of communications once hosts have changed places; a GPU keeps its number in its host."""
    place = {
        gpu: fabric.gpus[to[host]][number]
        for host, host_gpus in enumerate(fabric.gpus)
        if host in to
        for number, gpu in enumerate(host_gpus)
        if number < len(fabric.gpus[to[host]])
    }
    return [[place[gpu] for gpu in gpus] for gpus in members]


# What another run sends on the fabric of a run: the communications of a typical step, step after step.

STRETCHED = 3.0  # times the time that communications of the run take, for which the other job is there, too


@dataclass(frozen=True)
class OtherRun:
    """What another run sends in a typical step.

    Attributes:
        communications: all of its communications.
        step: [O] which of them are of that step.
        sending: [O] what these send; they begin after the first of them.
        period_ns: how long the step takes.
        gpus: that its ranks compute on.
    """

    communications: Communications
    step: Ints
    sending: Sending
    period_ns: float
    gpus: frozenset[int]


def other_run(path: Path, placement: Placed) -> OtherRun:
    """What another run sends on the fabric of a run.

    Raises:
        InputError: there is no run.
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
        raise Unanswerable(f"{path}: no step of it is known in which ranks exchange something")
    step, period = times.select("step", "duration_ns").row((times.height - 1) // 2)
    members = np.unique(calls.of[step_of == step])
    sent = Sending(
        *(column[members] for column in sending(graph, calls, Cables(load, placement.fabric.gbps)))
    )
    sent = sent._replace(begin=sent.begin - sent.begin.min())
    return OtherRun(calls, members, sent, float(period), frozenset(gpus.values()))


def _check_cables(run: Run, fabric: Fabric) -> None:
    """Refuse another run whose own topology has its hosts on other switches.

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
    """By the name of a port, that of the switch it is cabled to."""
    network = routes.network
    out = {port: int(routes.out[port]) for port in set(network.port.values())}
    return {
        network.names[port]: network.names[network.target[link]] for port, link in out.items() if link >= 0
    }


def flows_of_both(placement: Placed, other: OtherRun) -> Flows:
    """The flows of each kind of communication of a run, and behind them those of the other."""
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
    """The other run's steps while a run communicates.

    Args:
        window: [C] of each communication of the run: between windows nothing is slowed down.
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
