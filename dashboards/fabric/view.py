"""What the cables of the fabric carry, as recorded or by other paths, and which connections meet.

In: a run that keeps a topology. Out: its fabric with the load of each cable, and a table of collisions.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import polars as pl
from dash import html
from dash.development.base_component import Component

from dpro.analysis.answers.fabric.traffic import TrafficDocument, load_now, usage_of
from dpro.dashboards import needs
from dpro.dashboards.fabric.figure import cable_info, fabric_figure, node_info
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import View, choices, csv_link, graph, grid, panel, section, table
from dpro.replay.fabric.connections import connections_of, known_paths
from dpro.replay.fabric.flows import crossed
from dpro.replay.fabric.placement import Placed, placed
from dpro.replay.fabric.planning import planned_connections
from dpro.replay.fabric.routes import Choice, hashed
from dpro.replay.whatif.edits.fabric.paths import loads_by

NAME = "fabric"
PATHS = {"now": "paths as they are", "plan": "planned", "spray": "packets over all paths"}
METRICS = {"load": "load of a step", "busy": "load while busy"}


def _chosen(link: Link) -> tuple[str, str]:
    then, metric = link.own.get("paths", "now"), link.own.get("metric", "load")
    return then if then in PATHS else "now", metric if metric in METRICS else "load"


def _cables(loaded: Loaded, link: Link) -> pl.DataFrame:
    """As of `cable_info`, of the paths that the link chooses; unknown ones are taken as spread evenly."""
    graph_, (then, _) = loaded.outline.graph, _chosen(link)
    at = placed(graph_)
    known = known_paths(at.flows, at.routes, at.known)
    by_plan = planned_connections(at.flows, at.routes, at.fabric.gbps)
    if then == "now":
        load = load_now(at)
        crossing = {} if known.missing.size else _crossing(at, known.choice(hashed(at.flows.key)))
    else:
        (load,) = loads_by(then, at.flows, at.routes)
        crossing = _crossing(at, by_plan) if then == "plan" else {}
    used = usage_of(graph_, at, load)
    steps = loaded.baseline.height
    return cable_info(at.fabric, used, steps * loaded.baseline_ns, steps, crossing)


def _crossing(at: Placed, choose: Choice) -> dict[int, list[str]]:
    """By link, the connections that cross it, in words."""
    found = connections_of(at.flows)
    row, links = crossed(at.flows, at.routes, choose)
    names, pairs = at.fabric.names, set(zip(links.tolist(), found.of[row].tolist()))
    crossing = defaultdict(list)
    for link, each in sorted(pairs):
        begin, end = (names[int(side[each])] for side in (found.flows.begin, found.flows.end))
        crossing[link].append(f"{begin} → {end}")
    return crossing


def _ranks(at: Placed) -> dict[int, list[int]]:
    """By host, its ranks."""
    host_of = {gpu: host for host, own in enumerate(at.fabric.gpus) for gpu in own}
    found = defaultdict(list)
    for rank, gpu in enumerate(at.gpus):
        found[host_of[gpu]].append(rank)
    return found


def _drawn(loaded: Loaded, link: Link) -> Any:
    at = placed(loaded.outline.graph)
    (then, metric), cables = _chosen(link), _cables(loaded, link)
    unknown = loaded.traffic.unknown
    note = "Shares of what a cable carries each way, of the fuller way; bytes are those that were recorded."
    if then == "now" and unknown:
        note += (
            f" The paths of {unknown} connections are not known: they are drawn as if they used all evenly. "
            "`dpro topology RUN --paths FILE` names them."
        )
    return [
        choices(link, "paths", PATHS, "now"),
        choices(link, "metric", METRICS, "load"),
        graph("fabric-figure", fabric_figure(node_info(at.fabric, _ranks(at)), cables, metric, link.theme)),
        csv_link(NAME, "cables", link),
        html.P(note, className="note"),
    ]


def _collisions(loaded: Loaded, _link: Link) -> Any:
    traffic: TrafficDocument = loaded.traffic
    saved = (
        f"Planned paths would save {traffic.saved_ms:,.2f} ms ({traffic.saved_low_ms:,.2f} to "
        f"{traffic.saved_high_ms:,.2f}) of {traffic.step_ms:,.2f} ms a step: "
        "`dpro topology RUN --plan FILE` writes them."
    )
    if not traffic.collisions:
        why = "A hash that is not known decides the paths." if traffic.unknown else "No connections meet."
        return [html.P(why), html.P(saved)]
    rows = [
        (
            each.link,
            ", ".join(f"{one.source} → {one.target}" for one in each.connections),
            f"{each.together_ms:,.2f}",
            f"{each.cost_ms:,.2f}",
        )
        for each in traffic.collisions
    ]
    header = ("link", "connections", "together, ms a step", "cost by itself, ms a step")
    return [table(header, rows, numbers_from=2), html.P(saved)]


def _layout() -> Component:
    return grid(
        panel("Load of the cables", section("fabric-cables", "following flows over the fabric"), wide=True),
        panel("Connections that meet", section("fabric-collisions", "replaying each collision"), wide=True),
    )


VIEW = View(
    NAME,
    "Fabric",
    needs.fabric,
    _layout,
    {"fabric-cables": _drawn, "fabric-collisions": _collisions},
    {"cables": _cables},
)
