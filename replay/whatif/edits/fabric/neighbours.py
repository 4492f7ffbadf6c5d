"""What runs beside what on a fabric: ranks on other hosts, and other jobs on the same cables.

In: a run with the topology of its fabric. Out: its graph, changed. A rank that moves takes its work with it;
its paths are by hash then. Another job is taken to communicate all the time, or as a recording of it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpro.errors import Unanswerable, UsageError
from dpro.replay.fabric.flows import NOT_RECORDED, Load, flows_of, sprayed
from dpro.replay.fabric.placement import Placed, host_named, placed
from dpro.replay.fabric.seeds import quantile
from dpro.replay.graph import Graph, once
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.edits.fabric.assignment import best_order, distances, exchanged, hosts_of, moved
from dpro.replay.whatif.edits.fabric.other_runs import OtherRun, background, flows_of_both, other_run
from dpro.replay.whatif.edits.fabric.paths import EVENLY, TAIL, THEN, FabricEdit, loads_by
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.graph_ops.shared_fabric import Cables, recorded, with_fabric
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
        at = placed(facts.graph)
        now, then = cls()._hosts(at)
        return [cls()] if now != then else []

    def _hosts(self, at: Placed) -> tuple[list[int], list[int]]:
        """The hosts of ranks, by their first rank: as recorded, and then.

        Raises:
            UsageError: other hosts are named, or not all.
        """
        now = hosts_of(at.fabric, at.gpus)
        if not self.hosts:
            sent = np.bincount(at.found.kind, at.found.sent, at.found.first.size).astype(float)
            traffic = exchanged(at.fabric, at.flows, sent, now)
            order = best_order(traffic, distances(at.routes, now))
            return now, [now[place] for place in order.tolist()]
        named = [name.strip() for name in self.hosts.split("/")]
        then = [host_named(at.fabric, name) for name in named]
        if None in then:
            raise Unanswerable(f"the topology has no host {named[then.index(None)]!r}")
        if len(then) != len(now) or len(set(then)) != len(then):
            raise UsageError(f"place: hosts={self.hosts!r}: name {len(now)} hosts, each once")
        return now, [host for host in then if host is not None]

    def cables(self, at: Placed) -> Callable[[float], Cables]:
        now, then = self._hosts(at)
        gbps = at.fabric.gbps
        if now == then:
            return lambda share: Cables(quantile(at.now, share), gbps)
        if any(len(at.fabric.gpus[one]) != len(at.fabric.gpus[other]) for one, other in zip(now, then)):
            raise Unanswerable("hosts with different numbers of GPUs cannot exchange their ranks")
        members, ops, algorithms, channels = at.found.kinds
        others = moved(at.fabric, members, dict(zip(now, then)))
        flows = flows_of(at.fabric, others, ops, algorithms, channels)
        loads = loads_by(self.then, flows, at.routes)
        return lambda share: Cables(quantile(loads, share), gbps)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        at = placed(graph)
        now, then = self._hosts(at)
        if now == then:
            return ("no other order of hosts was found in which neighbours are nearer",)
        names = [at.fabric.hosts[host] for host in then]
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
            return tuple(sorted((each / PHASES for each in range(PHASES)), key=slowness))

        return once(graph, ("phases", self.run, self.then), _columns(graph), compute)

    def _beside_run(self, graph: Graph, phase: float, before: float, after: float) -> Graph:
        """The job beside the recorded one.

        Args:
            phase: how much later than this job's first communication the other one's is, of its step.
        """
        at, gbps = placed(graph), placed(graph).fabric.gbps
        other, loads = self._other(graph)
        best = Cables(sprayed(at.flows, at.routes), gbps)
        first = np.unique(at.found.of, return_index=True)[1]
        window = graph.nodes.window[at.found.transfers[first]].astype(np.int64)
        return with_fabric(
            graph,
            at.found,
            best,
            Cables(quantile(at.now, before), gbps) if at.known else best,
            Cables(quantile(loads, after), gbps),
            background(other, window, recorded(graph, at.found), phase),
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
            at = placed(graph)
            other = other_run(path, at)
            return other, loads_by(self.then, flows_of_both(at, other), at.routes, at.known)

        return once(graph, ("other run", self.run, self.then), _columns(graph), compute)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        if not self.run:
            return ()
        at = placed(graph)
        other, _ = self._other(graph)
        takes = f"its typical step takes {format_duration(other.period_ns)}, and it keeps that pace"
        both = sorted(at.fabric.names[gpu] for gpu in other.gpus & {*at.gpus})
        if not both:
            return (takes,)
        shared = (
            f"both compute on {', '.join(both[:SHOWN])}: what they take of each other there is not predicted"
        )
        return (takes, shared)

    def cables(self, at: Placed) -> Callable[[float], Cables]:
        if not self.hosts:
            raise UsageError("beside: give hosts= of other jobs, or run= with the folder of a run")
        fabric = at.fabric
        jobs = [list(self._gpus(at, text)) for text in self.hosts.split("/")]
        members, ops, algorithms, channels = at.found.kinds
        more, rings, unknown = ["all_reduce"] * len(jobs), [""] * len(jobs), [NOT_RECORDED] * len(jobs)
        flows = flows_of(
            fabric,
            [*map(list, members), *jobs],
            [*ops, *more],
            [*algorithms, *rings],
            [*channels, *unknown],
        )
        loads = loads_by(self.then, flows, at.routes, at.known)
        return lambda share: Cables(quantile(loads, share), fabric.gbps)

    @staticmethod
    def _gpus(at: Placed, text: str) -> Iterator[int]:
        """The GPUs of a job's hosts."""
        names = expand(text)
        for name in names:
            host = host_named(at.fabric, name)
            if host is None:
                raise Unanswerable(f"the topology has no host {name!r}")
            yield from at.fabric.gpus[host]
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
