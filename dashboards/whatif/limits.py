"""How the step time depends on the speed of each part of the machine, and where it stops improving.

In: curves, as `dpro whatif --sensitivity` prints them. Out: a table and a figure of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import polars as pl

from dpro.dashboards.theme import series, styled, time_unit
from dpro.replay.whatif.sensitivity import PART_WORDS, Curve
from dpro.units import NS_PER_MS

FASTEST = 30.0  # the largest factor in the figure: curves are flat beyond it


def curve_info(curves: Sequence[Curve]) -> pl.DataFrame:
    """List the points of all curves: `part`, `factor` (times as fast), `step_ms`, `break_even` (or null)."""
    rows = [
        (curve.part, factor, step / NS_PER_MS, curve.break_even)
        for curve in curves
        for factor, step in zip((1.0, *curve.factors), (curve.base_ns, *curve.step_ns))
    ]
    schema = {"part": pl.String, "factor": pl.Float64, "step_ms": pl.Float64, "break_even": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def curve_figure(points: pl.DataFrame, theme: str) -> go.Figure:
    """Draw a line for each part, with its break-even marked.

    Args:
        points: as from `curve_info`.
    """
    figure = go.Figure()
    shown = points.filter(pl.col("factor") <= FASTEST)
    scale, unit = time_unit(float(shown["step_ms"].to_numpy().max(initial=0.0)))
    shown = shown.with_columns(pl.col("step_ms") / scale)
    for number, ((part,), own) in enumerate(shown.group_by("part", maintain_order=True)):
        ink = series(number, theme)
        figure.add_scatter(
            x=own["factor"], y=own["step_ms"], mode="lines", line={"color": ink, "width": 2},
            name=PART_WORDS[str(part)], hovertemplate=f"x%{{x:g}}: %{{y:.4g}} {unit}",
        )  # fmt: skip
        even = own["break_even"][0]
        if even is not None and even <= FASTEST:
            figure.add_scatter(
                x=[even], y=[_between(own, even)], mode="markers", showlegend=False,
                name=PART_WORDS[str(part)], marker={"size": 9, "color": ink, "symbol": "diamond"},
                hovertemplate="from x%{x:.1f} on hardly anything more is gained",
            )  # fmt: skip
    ticks = [1, 1.5, 2, 3, 4, 6, 10, 30]
    figure.update_xaxes(
        title_text="times as fast", type="log", tickvals=ticks, ticktext=[f"x{each:g}" for each in ticks]
    )
    figure.update_yaxes(title_text=f"mean step in deep windows, {unit}", rangemode="tozero")
    return styled(figure, theme, height=300)


def _between(points: pl.DataFrame, factor: float) -> float:
    """Interpolate the step at a factor, linearly in 1 / factor, as a step behaves that the part limits."""
    ordered = points.sort("factor", descending=True)
    speed = 1 / ordered["factor"].to_numpy()
    return float(np.interp(1 / factor, speed, ordered["step_ms"].to_numpy()))
