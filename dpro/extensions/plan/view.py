"""View of the layouts of a recorded job: throughput against memory, or step against GPUs, with the best ones.

Takes a job whose layers were found, and numbers of ranks; returns a row per layout, and a figure. A layout is
best if no other has more throughput without more memory. The ranking is that of `dpro plan RUN`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from dpro.analysis.cached import cached
from dpro.arrays import Bools, Floats
from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, choices, csv_link, graph, message, view
from dpro.dashboards.theme import colour, plain, series, styled
from dpro.errors import DproError, Unanswerable, UsageError
from dpro.extensions.plan.recorded_job import (
    RecordedJob,
    is_own,
    own_degrees,
    ranked,
    recorded_job,
    usual_batch,
)
from dpro.recorders import SHAPES, how_to_record
from dpro.replay.cost.kernels.roofline import MATMULS
from dpro.schema import SPANS
from dpro.words import capitalised

NAME = "plan"
TIMES = (1, 2, 4, 8)  # of the run's ranks
MAX_POINTS = 2000
FITS = {"yes": "fits", "tight": "may not fit", "no": "does not fit"}
AXES = {"memory": "throughput against memory", "gpus": "step against GPUs"}
FIGURES = ("tokens_per_s_per_gpu", "step_ms", "low_ms", "high_ms", "bubble", "exposed", "memory_gb")
SCHEMA = {
    "layout": pl.String(),
    "gpus": pl.Int64(),
    **dict.fromkeys(FIGURES, pl.Float64()),
    "fits": pl.String(),
    "why": pl.String(),
    "own": pl.Boolean(),
    "best": pl.Boolean(),
}


_NO_PRODUCTS = (
    "Layouts need the shapes of the model's matrix products, forward and backward, and none were recorded. "
    "Record with {}."
)


@cached
def job_of(loaded: Loaded) -> RecordedJob:
    """Return the recorded job, from whose layers other layouts are predicted."""
    return recorded_job(loaded.built.predictive)


@cached
def has_products(loaded: Loaded) -> bool:
    """Return whether products with shapes were recorded, forward and backward, so layers can be found."""
    multiplies = pl.col("name").is_in(list(MATMULS)) & (pl.col("shapes") != "")
    backward = pl.col("forward_thread") > 0
    parts = loaded.run.part_by_part(SPANS, ["name", "forward_thread", "shapes"])
    rows = [part.select(multiplies.any(), backward=backward.any()).row(0) for part in parts]
    return any(one for one, _ in rows) and any(other for _, other in rows)


def nothing_to_plan(loaded: Loaded, link: Link) -> str:
    """Return the message for a run without products in deep windows, or of unknown layout; else empty."""
    if why := needs.windows(loaded, link):
        return why
    if not has_products(loaded):
        return _NO_PRODUCTS.format(how_to_record(SHAPES, loaded.run))
    try:
        own_degrees(loaded.mesh, loaded.run.manifest.world_size)
    except Unanswerable as error:
        return f"{capitalised(str(error))}."
    return ""


def layouts_info(job: RecordedJob, times: tuple[int, ...]) -> pl.DataFrame:
    """Rank the layouts of a job on multiples of its ranks.

    Returns:
        The columns of `SCHEMA`, fastest first: `own` is the run's own layout, `best` is best in throughput
        against memory.

    Raises:
        UsageError: no layout divides model and batch.
    """
    parts: list[pl.DataFrame] = []
    for factor in times:
        gpus = factor * job.ranks
        try:
            rows = ranked(job, gpus, usual_batch(job, gpus))
        except UsageError:
            if factor == times[-1] and not parts:
                raise
            continue  # no layout of this many ranks
        parts.append(rows.with_columns(gpus=pl.lit(gpus, pl.Int64), own=is_own(job)))
    layouts = pl.concat(parts)
    best = _best(layouts["memory_gb"].to_numpy(), layouts["tokens_per_s_per_gpu"].to_numpy())
    best &= (layouts["fits"] != "no").to_numpy()
    shown = layouts.with_columns(best=pl.Series(best)).sort("tokens_per_s_per_gpu", descending=True)
    return shown.select(list(SCHEMA))


def _best(cost: Floats, gain: Floats) -> Bools:
    """Return [N] whether no other layout gains more at no higher cost, or gains as much at lower cost."""
    order = np.lexsort([-gain, cost])
    before = np.concatenate([[-np.inf], np.maximum.accumulate(gain[order])[:-1]])
    best = np.zeros(gain.size, np.bool_)
    best[order] = gain[order] > before
    return best


def layouts_figure(rows: pl.DataFrame, against: str, theme: str) -> go.Figure:
    """Draw a point per layout, a line through the best, and a star for the run's own.

    Args:
        against: a key of `AXES`.
    """
    x, y = ("memory_gb", "tokens_per_s_per_gpu") if against == "memory" else ("gpus", "step_ms")
    figure = go.Figure()
    kept = pl.concat([rows.head(MAX_POINTS), rows.filter("own")]).unique(maintain_order=True)
    for number, (word, title) in enumerate(FITS.items()):
        others = kept.filter(pl.col("fits") == word, ~pl.col("own"))
        if not others.is_empty():
            _points(
                figure, others, (x, y), title, {"color": series(number, theme), "size": 6, "opacity": 0.6}
            )
    own_layout = kept.filter("own")
    if not own_layout.is_empty():
        star = {"color": colour("ink", theme), "size": 13, "symbol": "star"}
        _points(figure, own_layout, (x, y), "the run's own", star)
    if against == "memory":
        front = rows.filter("best").sort("memory_gb")
        figure.add_scatter(
            x=front[x], y=front[y], mode="lines", name="best", hoverinfo="skip",
            line={"shape": "hv", "width": 1.2, "color": colour("ink", theme)},
        )  # fmt: skip
        figure.update_xaxes(title_text="memory of the fullest GPU, GB", rangemode="tozero")
        figure.update_yaxes(title_text="tokens/s of a GPU", rangemode="tozero")
    else:
        figure.update_xaxes(title_text="GPUs", tickvals=rows["gpus"].unique().sort().to_list())
        figure.update_yaxes(title_text="step, ms", rangemode="tozero")
    return styled(figure, theme, height=460)


def _points(
    figure: go.Figure, rows: pl.DataFrame, axes: tuple[str, str], name: str, marker: dict[str, Any]
) -> None:
    hover = [
        f"{plain(row['layout'])}, {row['gpus']} GPUs<br>step {row['step_ms']:.4g} ms "
        f"({row['low_ms']:.4g} to {row['high_ms']:.4g}), bubble {row['bubble']:.1%}, "
        f"communication {row['exposed']:.1%}{'<br>' * bool(row['why'])}{plain(row['why'])}"
        for row in rows.iter_rows(named=True)
    ]
    figure.add_scatter(
        x=rows[axes[0]], y=rows[axes[1]], mode="markers", name=name, marker=marker, customdata=hover,
        hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip


def _against(link: Link) -> str:
    chosen = link.options.get("against", "")
    return chosen if chosen in AXES else next(iter(AXES))


def _times(link: Link) -> int:
    chosen = link.options.get("times", "")
    return int(chosen) if chosen in map(str, TIMES) else 1


def _rows(loaded: Loaded, link: Link) -> pl.DataFrame:
    if nothing_to_plan(loaded, link):
        return pl.DataFrame(schema=SCHEMA)
    times = (_times(link),) if _against(link) == "memory" else TIMES
    return layouts_info(job_of(loaded), times)


def _shown(loaded: Loaded, link: Link) -> Any:
    why = nothing_to_plan(loaded, link)
    if why:
        return message(why)
    against = _against(link)
    try:
        job = job_of(loaded)
        ways = {str(factor): f"{factor * job.ranks} GPUs" for factor in TIMES}
        number = [choices(link, "times", ways, "1")] if against == "memory" else []
        rows = _rows(loaded, link)
    except DproError as error:
        return message(capitalised(str(error)))
    said = [f"{job.explained:.0%} of the measured step is explained by what was found: {job.said[0]}."]
    if not job.machine.memory_gb:
        said.append("The GPUs' memory is unknown: give it as `dpro plan RUN --memory` to see what fits.")
    return [
        choices(link, "against", AXES, "memory"),
        *number,
        graph("plan-figure", layouts_figure(rows, against, link.theme)),
        csv_link(NAME, "layouts", link),
        *(message(line) for line in said),
    ]


VIEW = view(
    NAME,
    "Plan",
    nothing_to_plan,
    Panel("Layouts of the job", "plan-ranked", "ranking layouts", _shown),
    tables={"layouts": _rows},
)
