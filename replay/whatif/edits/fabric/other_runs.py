"""What another run sends on the fabric of a run: the communications of a typical step, step after step.

In: the folder of the other run, and the fabric. Out: `OtherRun`, and its communications beside those of the
run, whose steps begin at any time in those of the other. The other job keeps its own pace: what meets on a
cable shares it, but nothing that the other job does begins later for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fabric.flows import Flows, flows_of, sprayed
from dpro.replay.fabric.network import Fabric, fabric_of
from dpro.replay.fabric.placement import Communications, Placed, communications, gpus_of_ranks
from dpro.replay.fabric.routes import Routes, routes_of
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.graph_ops.shared_fabric import Background, Cables, Recorded, Sending, sending
from dpro.store import Run, open_run
from dpro.topology.file import FILE, read

STRETCHED = 3.0  # times the time that communications of the run take, for which the other job is there, too


@dataclass(frozen=True)
class OtherRun:
    """What another run sends in a typical step.

    Attributes:
        found: all of its communications.
        step: [O] which of them are of that step.
        sending: [O] what these send; they begin after the first of them.
        period_ns: how long the step takes.
        gpus: that its ranks compute on.
    """

    found: Communications
    step: Ints
    sending: Sending
    period_ns: float
    gpus: frozenset[int]


def other_run(path: Path, at: Placed) -> OtherRun:
    """What another run sends on the fabric of a run.

    Raises:
        InputError: there is no run.
        Unanswerable: it has no steps, its hosts are not in the fabric, or no cable is on a path of both.
    """
    run = open_run(path)
    try:
        gpus = gpus_of_ranks(run, at.fabric)
        _check_cables(run, at.fabric)
        graph = build_graph(run).graph
    except Unanswerable as error:
        raise Unanswerable(f"{path}: {error}") from error
    found = communications(graph, gpus)
    flows = flows_of(at.fabric, *found.kinds)
    load = sprayed(flows, at.routes)
    common = set(load.links.tolist()) & set(sprayed(at.flows, at.routes).links.tolist())
    if not common:
        raise Unanswerable(f"{path}: no cable is on a path of both runs: they cannot meet")
    timeline = replay(graph)
    times = step_times(graph, timeline.start, timeline.end).sort("duration_ns", "step")
    own = graph.nodes.step[found.transfers]
    times = times.filter(times["step"].is_in(np.unique(own).tolist()))
    if not times.height:
        raise Unanswerable(f"{path}: no step of it is known in which ranks exchange something")
    step, period = times.select("step", "duration_ns").row((times.height - 1) // 2)
    members = np.unique(found.of[own == step])
    each = Sending(*(column[members] for column in sending(graph, found, Cables(load, at.fabric.gbps))))
    each = each._replace(begin=each.begin - each.begin.min())
    return OtherRun(found, members, each, float(period), frozenset(gpus.values()))


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


def flows_of_both(at: Placed, other: OtherRun) -> Flows:
    """The flows of each kind of communication of a run, and behind them those of the other."""
    members, ops, algorithms, channels = at.found.kinds
    more = other.found.kinds
    return flows_of(
        at.fabric,
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
    for each in np.unique(window):
        since, until = moved.begin[window == each].min(), moved.end[window == each].max()
        count = int(np.ceil(STRETCHED * (until - since) / other.period_ns)) + 2
        firsts.append(since + other.period_ns * (phase + np.arange(-1, count)))
    at = np.concatenate(firsts)
    kind = np.tile(other.found.kind[other.step], at.size)
    step = other.sending
    starts = (at[:, None] + step.begin[None, :]).ravel()
    return Background(kind, Sending(starts, np.tile(step.work, at.size), np.tile(step.ceiling, at.size)))
