"""View of the fabric: the load of each cable, on recorded or other paths, and colliding connections.

Takes a run with a topology; shows its fabric with the load of each cable, and a table of collisions.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import html

from dpro.analysis.cached import cached
from dpro.arrays import Floats, Ints
from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, choices, csv_link, graph, table, view
from dpro.dashboards.theme import colour, styled
from dpro.dashboards.views.heatmap import SCALE, colour_bar
from dpro.extensions.fabric.answer import (
    TrafficDocument,
    distance_from_hosts,
    load_now,
    traffic_document,
    usage_of,
)
from dpro.extensions.fabric.edits import loads_by
from dpro.extensions.fabric.planning import plan_connection_paths
from dpro.replay.cost.fabric.connections import Usage, connections_of, known_paths
from dpro.replay.cost.fabric.flows import crossed
from dpro.replay.cost.fabric.network import NIC, SWITCH, Choice, Fabric, hashed
from dpro.replay.cost.fabric.placement import Placed, placed
from dpro.topology.file import FILE
from dpro.units import format_bytes

NAME = "fabric"
PATHS = {"now": "paths as they are", "plan": "planned", "spray": "packets over all paths"}
METRICS = {"load": "load of a step", "busy": "load while busy"}


@cached
def traffic_of(loaded: Loaded) -> TrafficDocument:
    """Return the traffic of the job on its fabric, and its collisions."""
    return traffic_document(loaded)


def no_fabric(loaded: Loaded, link: Link) -> str:
    """Return the message for a run without a topology or without deep windows; empty otherwise."""
    if (loaded.run.path / FILE).is_file():
        return needs.windows(loaded, link)
    return (
        "The fabric of this job is unknown: `dpro record --topology FILE` stores it, "
        "`dpro topology FILE --attach RUN` adds it later."
    )


def _chosen(link: Link) -> tuple[str, str]:
    then, metric = link.options.get("paths", "now"), link.options.get("metric", "load")
    return then if then in PATHS else "now", metric if metric in METRICS else "load"


def _cables(loaded: Loaded, link: Link) -> pl.DataFrame:
    """Return `cable_info` for the chosen paths; unknown paths are assumed to be spread evenly."""
    graph_, (then, _) = loaded.outline.predictive, _chosen(link)
    placement = placed(graph_)
    paths = known_paths(placement.flows, placement.routes, placement.path_entries)
    by_plan = plan_connection_paths(placement.flows, placement.routes, placement.fabric.gbps)
    if then == "now":
        load = load_now(placement)
        crossing = (
            {} if paths.missing.size else _crossing(placement, paths.choice(hashed(placement.flows.key)))
        )
    else:
        (load,) = loads_by(then, placement.flows, placement.routes)
        crossing = _crossing(placement, by_plan) if then == "plan" else {}
    used = usage_of(graph_, placement, load)
    steps = loaded.baseline.height
    return cable_info(placement.fabric, used, steps * loaded.baseline_ns, steps, crossing)


def _crossing(placement: Placed, choose: Choice) -> dict[int, list[str]]:
    """Map each link to the connections that cross it, in words."""
    connections = connections_of(placement.flows)
    row, links = crossed(placement.flows, placement.routes, choose)
    names, pairs = placement.fabric.names, set(zip(links.tolist(), connections.of[row].tolist()))
    crossing = defaultdict(list)
    for link, connection in sorted(pairs):
        begin, end = (
            names[int(side[connection])] for side in (connections.flows.begin, connections.flows.end)
        )
        crossing[link].append(f"{begin} → {end}")
    return crossing


def _drawn(loaded: Loaded, link: Link) -> Any:
    placement = placed(loaded.outline.predictive)
    (then, metric), cables = _chosen(link), _cables(loaded, link)
    unknown = traffic_of(loaded).unknown
    note = "Shares of a cable's capacity in its fuller direction; bytes are as recorded."
    if then == "now" and unknown:
        note += (
            f" The paths of {unknown} connections are not known: they are drawn as if they used all evenly. "
            "`dpro topology RUN --paths FILE` names them."
        )
    host_of = {gpu: host for host, gpus in enumerate(placement.fabric.gpus) for gpu in gpus}
    ranks_of = defaultdict(list)
    for rank, gpu in enumerate(placement.gpus):
        ranks_of[host_of[gpu]].append(rank)
    return [
        choices(link, "paths", PATHS, "now"),
        choices(link, "metric", METRICS, "load"),
        graph(
            "fabric-figure",
            fabric_figure(node_info(placement.fabric, ranks_of), cables, metric, link.theme),
        ),
        csv_link(NAME, "cables", link),
        html.P(note, className="note"),
    ]


def _collisions(loaded: Loaded, _link: Link) -> Any:
    traffic: TrafficDocument = traffic_of(loaded)
    saved = (
        f"Planned paths would save {traffic.saved_ms:,.2f} ms ({traffic.saved_low_ms:,.2f} to "
        f"{traffic.saved_high_ms:,.2f}) of {traffic.step_ms:,.2f} ms a step: "
        "`dpro topology RUN --plan FILE` writes them."
    )
    if not traffic.collisions:
        why = "An unknown hash decides the paths." if traffic.unknown else "No connections meet."
        return [html.P(why), html.P(saved)]
    rows = [
        (
            collision.link,
            ", ".join(f"{one.source} → {one.target}" for one in collision.connections),
            f"{collision.together_ms:,.2f}",
            f"{collision.cost_ms:,.2f}",
        )
        for collision in traffic.collisions
    ]
    header = ("link", "connections", "together, ms a step", "cost by itself, ms a step")
    return [table(header, rows, numbers_from=2), html.P(saved)]


VIEW = view(
    NAME,
    "Fabric",
    no_fabric,
    Panel("Load of the cables", "fabric-cables", "following flows over the fabric", _drawn, wide=True),
    Panel("Connections that meet", "fabric-collisions", "replaying each collision", _collisions, wide=True),
    tables={"cables": _cables},
)


# A fabric as a figure: hosts at the bottom, switches in tiers above them, cables coloured by their load.

MAX_NAMED = 24  # nodes of a row that have room for their names
MAX_DRAWN = 6000  # cables; if there are more, those with the highest load
SHADES = 8  # of lines; the dot on each has its exact colour
DOT = 0.36  # position on a line, from its lower end: in the middle many lines cross
FEW_ENDS = 6  # connections that are named
_ROW, _AROUND = 150, 110  # pixels
_Parts = dict[int, int]  # by node, the node that it is drawn as


def node_info(fabric: Fabric, ranks: dict[int, list[int]]) -> pl.DataFrame:
    """Return the positions of hosts and switches in the figure.

    Returns:
        `node` (a number, negative for hosts), `name`, `tier` (0 for hosts), `at` (0 to 1), `ranks` (as text).
    """
    far = distance_from_hosts(fabric)
    rows: list[tuple[int, str, int, str]] = [
        (-1 - host, name, 0, ", ".join(map(str, ranks.get(host, []))))
        for host, name in enumerate(fabric.hosts)
    ]
    switches = np.flatnonzero(fabric.kind == SWITCH)
    top = int(far.max(initial=-1)) + 1  # tier below the switches that no host reaches
    rows += [(node, fabric.names[node], int(far[node]) + 1 or top + 1, "") for node in switches.tolist()]
    frame = pl.DataFrame(rows, schema=["node", "name", "tier", "ranks"], orient="row")
    order = pl.int_range(pl.len()).over("tier")
    return frame.with_columns(at=(order + 0.5) / pl.len().over("tier"))


def cable_info(
    fabric: Fabric, used: Usage, lasted: float, steps: int, crossing: dict[int, list[str]]
) -> pl.DataFrame:
    """Return the traffic on the cables between each pair of nodes.

    Args:
        lasted: duration of all steps, ns.
        crossing: connections of each link, in words; a link may be missing.

    Returns:
        `lower`, `upper` (nodes), `name`, `load` (of a step, of the fullest link), `busy` (load while anything
        crosses that link), `bytes` (per step, of all links, both ways), `connections` (as text), sorted by
        ascending load.
    """
    # Ports are drawn as their hosts, switches as themselves; the inside of hosts is not drawn.
    drawn = {int(node): int(node) for node in np.flatnonzero(fabric.kind == SWITCH)}
    host_of = {name: -1 - host for host, name in enumerate(fabric.hosts)}
    for node in np.flatnonzero(fabric.kind == NIC).tolist():
        drawn[node] = host_of[fabric.names[node].rpartition(":")[0]]
    load = used.sent / fabric.gbps / lasted
    busy = used.sent / fabric.gbps / np.maximum(used.busy, 1.0)
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for link, ends in enumerate(zip(fabric.source.tolist(), fabric.target.tolist())):
        if ends[0] in drawn and ends[1] in drawn:
            lower, upper = sorted((drawn[ends[0]], drawn[ends[1]]))
            groups[lower, upper].append(link)
    rows = []
    for (lower, upper), links in groups.items():
        fullest = max(links, key=lambda link: (load[link], -link))
        names = [name for link in links for name in crossing.get(link, [])]
        rows.append(
            (lower, upper, fabric.link_name(fullest), float(load[fullest]), float(busy[fullest]),
             float(used.sent[links].sum()) / steps, _few(list(dict.fromkeys(names))))
        )  # fmt: skip
    columns = ["lower", "upper", "name", "load", "busy", "bytes", "connections"]
    return pl.DataFrame(rows, schema=columns, orient="row").sort("load", "lower", "upper")


def _few(names: list[str]) -> str:
    more = f"<br>and {len(names) - FEW_ENDS} more" if len(names) > FEW_ENDS else ""
    return "<br>".join(names[:FEW_ENDS]) + more


def fabric_figure(nodes: pl.DataFrame, cables: pl.DataFrame, metric: str, theme: str) -> go.Figure:
    """Draw hosts, switches and cables; hovering over the dot of a cable shows its traffic."""
    place = {node: (x, tier) for node, x, tier in nodes.select("node", "at", "tier").iter_rows()}
    shown = cables.sort(metric, "lower", "upper").tail(MAX_DRAWN)
    begin, end = (
        np.array([place[node] for node in shown[side]]).reshape(-1, 2) for side in ("lower", "upper")
    )
    value = shown[metric].to_numpy()
    most = max(float(value.max(initial=0.0)), 1e-9)
    figure = go.Figure()
    _add_lines(figure, begin, end, np.minimum(value / most * SHADES, SHADES - 1).astype(np.int64), theme)
    mark = begin + DOT * (end - begin)
    figure.add_scatter(
        x=mark[:, 0], y=mark[:, 1], mode="markers", showlegend=False,
        marker={"size": 5, "color": 100 * value, "colorscale": SCALE, "cmin": 0, "cmax": 100 * most,
                "colorbar": colour_bar("%", (0.0, 100 * most), theme)},
        customdata=_words(shown), hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    named = nodes.with_columns(
        label=pl.when(pl.len().over("tier") <= MAX_NAMED).then("name").otherwise(pl.lit(""))
    )
    said = nodes.with_columns(
        text=pl.when(pl.col("ranks") != "")
        .then(pl.col("name") + ": ranks " + pl.col("ranks"))
        .otherwise("name")
    )
    figure.add_scatter(
        x=nodes["at"], y=nodes["tier"], mode="markers+text", showlegend=False, text=named["label"],
        textposition="bottom center", customdata=said["text"], hovertemplate="%{customdata}<extra></extra>",
        marker={"size": 11, "symbol": "square", "color": colour("soft", theme)},
    )  # fmt: skip
    height = _ROW * int(nodes["tier"].n_unique()) + _AROUND
    styled(figure, theme, height=height).update_layout(hovermode="closest", margin_t=56)
    bare = {"showgrid": False, "zeroline": False, "showticklabels": False, "ticks": "", "showline": False}
    figure.update_xaxes(**bare, range=[-0.02, 1.02])
    return figure.update_yaxes(**bare, range=[-0.4, float(nodes["tier"].max() or 0) + 0.4])  # type: ignore[arg-type]


def _add_lines(figure: go.Figure, begin: Floats, end: Floats, shade: Ints, theme: str) -> None:
    """Add a trace for each shade, since lines of one trace have one colour."""
    from plotly.colors import sample_colorscale

    for number in np.unique(shade).tolist():
        rows = shade == number
        points = np.full((int(rows.sum()), 3, 2), np.nan)
        points[:, 0], points[:, 1] = begin[rows], end[rows]
        line = sample_colorscale(SCALE, (number + 0.5) / SHADES)[0] if number else colour("line", theme)
        figure.add_scatter(
            x=points[:, :, 0].ravel(), y=points[:, :, 1].ravel(), mode="lines", hoverinfo="skip",
            line={"color": line, "width": 1 + 3 * number / SHADES}, showlegend=False,
        )  # fmt: skip


def _words(cables: pl.DataFrame) -> list[str]:
    return [
        f"{cable['name']}: {cable['load']:.0%} of a step, {cable['busy']:.0%} while busy<br>"
        f"{format_bytes(int(cable['bytes']))} a step, both ways"
        + ("<br>" + cable["connections"] if cable["connections"] else "")
        for cable in cables.iter_rows(named=True)
    ]
