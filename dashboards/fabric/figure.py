"""A fabric as a figure: hosts at the bottom, switches in tiers above them, cables coloured by their load.

In: a fabric, and what its links carry. Out: frames of nodes and cables, and a figure of both. Cables side by
side, and all ports of a host on one switch, are one line: its colour is that of the fullest link.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import plotly.graph_objects as go
import polars as pl

from dpro.analysis.answers.fabric.topology import distance_from_hosts
from dpro.arrays import Floats, Ints
from dpro.dashboards.theme import colour, styled
from dpro.dashboards.views.heatmap import SCALE, colour_bar
from dpro.replay.fabric.network import NIC, SWITCH, Fabric
from dpro.replay.fabric.usage import Usage
from dpro.units import format_bytes

MAX_NAMED = 24  # nodes of a row that have room for their names
MAX_DRAWN = 6000  # cables; of more those with the most load
SHADES = 8  # of lines; the dot on each has its exact colour
DOT = 0.36  # of the way up a line: in the middle many lines cross
FEW_ENDS = 6  # connections that are named
_ROW, _AROUND = 150, 110  # pixels
_Parts = dict[int, int]  # by node, the node that it is drawn as


def node_info(fabric: Fabric, ranks: dict[int, list[int]]) -> pl.DataFrame:
    """Where hosts and switches are drawn.

    Returns:
        `node` (a number, hosts below 0), `name`, `tier` (0 of hosts), `at` (from 0 to 1), `ranks` (as text).
    """
    far = distance_from_hosts(fabric)
    rows: list[tuple[int, str, int, str]] = [
        (-1 - host, name, 0, ", ".join(map(str, ranks.get(host, []))))
        for host, name in enumerate(fabric.hosts)
    ]
    switches = np.flatnonzero(fabric.kind == SWITCH)
    top = int(far.max(initial=-1)) + 1  # of switches that no host is below
    rows += [(node, fabric.names[node], int(far[node]) + 1 or top + 1, "") for node in switches.tolist()]
    frame = pl.DataFrame(rows, schema=["node", "name", "tier", "ranks"], orient="row")
    order = pl.int_range(pl.len()).over("tier")
    return frame.with_columns(at=(order + 0.5) / pl.len().over("tier"))


def cable_info(
    fabric: Fabric, used: Usage, lasted: float, steps: int, crossing: dict[int, list[str]]
) -> pl.DataFrame:
    """What the cables between two nodes carry.

    Args:
        lasted: of all steps, ns.
        crossing: by link, its connections in words; a link may be missing.

    Returns:
        `lower`, `upper` (nodes), `name`, `load` (of a step, of the fullest link), `busy` (of the time in
        which anything crosses that), `bytes` (of a step, of all links, both ways), `connections` (as text),
        the most load last.
    """
    drawn = _drawn_as(fabric)
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


def _drawn_as(fabric: Fabric) -> _Parts:
    """Ports are drawn as their hosts, switches as themselves; what is inside of hosts is not drawn."""
    found = {int(node): int(node) for node in np.flatnonzero(fabric.kind == SWITCH)}
    host_of = {name: -1 - host for host, name in enumerate(fabric.hosts)}
    for node in np.flatnonzero(fabric.kind == NIC).tolist():
        found[node] = host_of[fabric.names[node].rpartition(":")[0]]
    return found


def _few(names: list[str]) -> str:
    more = f"<br>and {len(names) - FEW_ENDS} more" if len(names) > FEW_ENDS else ""
    return "<br>".join(names[:FEW_ENDS]) + more


def fabric_figure(nodes: pl.DataFrame, cables: pl.DataFrame, metric: str, theme: str) -> go.Figure:
    """Draw hosts, switches and cables; what crosses a cable is said where the pointer is on its dot.

    Args:
        nodes: as from `node_info`.
        cables: as from `cable_info`.
    """
    place = {node: (at, tier) for node, at, tier in nodes.select("node", "at", "tier").iter_rows()}
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
                "colorbar": colour_bar("%", theme)},
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
    """A trace for each shade: lines of one trace have one colour."""
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
        f"{each['name']}: {each['load']:.0%} of a step, {each['busy']:.0%} while busy<br>"
        f"{format_bytes(int(each['bytes']))} a step, both ways"
        + ("<br>" + each["connections"] if each["connections"] else "")
        for each in cables.iter_rows(named=True)
    ]
