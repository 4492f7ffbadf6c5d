"""A waterfall figure: contributions that add up to a difference."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import polars as pl

from dpro.dashboards.names import plain
from dpro.dashboards.theme import colour, styled, time_unit
from dpro.words import shortened

_LONGEST = 44  # characters beside a bar
_ROW = 24  # pixels
_ROOM = 0.3  # of the width of the bars: beside them, for their values


def waterfall_figure(parts: pl.DataFrame, title: str, theme: str) -> go.Figure:
    """Draw parts from top to bottom, then their sum; increases have the bad colour, decreases the good one.

    Args:
        parts: `name`, `kind` and `delta_ms`.
        title: of the axis, with `{}` for the unit.
    """
    names = [f"{kind} {name}".strip() for name, kind in parts.select("name", "kind").iter_rows()]
    labels = [plain(shortened(name, _LONGEST)) for name in names]
    rows = list(range(len(labels) + 1))
    deltas = parts["delta_ms"].to_numpy()
    scale, unit = time_unit(float(np.abs(deltas).max(initial=0.0)))
    deltas = deltas / scale
    reached = np.append(np.cumsum(deltas), 0.0)
    room = _ROOM * float(np.ptp(reached))
    low, high = (float(reached.min()) - room * bool((deltas < 0).any()), float(reached.max()) + room)
    figure = go.Figure()
    figure.add_waterfall(
        orientation="h",
        y=rows,
        x=[*deltas, deltas.sum()],
        measure=["relative"] * len(labels) + ["total"],
        increasing={"marker": {"color": colour("bad", theme)}},
        decreasing={"marker": {"color": colour("good", theme)}},
        totals={"marker": {"color": colour("idle", theme)}},
        connector={"line": {"color": colour("soft", theme), "width": 1, "dash": "dot"}},
        texttemplate="%{delta:+.3~f}",
        textposition="outside",
        textfont={"size": 11},
        cliponaxis=False,
        customdata=[*map(plain, names), "in all"],
        hovertemplate=f"%{{customdata}}: %{{delta:+.4~g}} {unit} per step<extra></extra>",
    )
    styled(figure, theme, height=90 + _ROW * len(rows))
    figure.update_xaxes(title_text=title.format(unit), zeroline=True, nticks=6)
    figure.update_xaxes(range=[low, high] if room else None)
    figure.update_yaxes(tickvals=rows, ticktext=[*labels, "in all"], autorange="reversed")
    figure.update_yaxes(showgrid=False, zeroline=False)
    return figure.update_layout(showlegend=False, margin_r=70)
