"""View of the life of a job: what its ranks did over time, the time of each class, and its attempts.

Takes the life of the run's job; returns a figure of it, bars of the classes, and a table of attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from dpro.analysis.analysis import Analysis
from dpro.analysis.cached import cached
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, choices, csv_link, graph, message, table, view
from dpro.dashboards.theme import colour, styled, time_unit
from dpro.errors import Unanswerable
from dpro.extensions.goodput.account import HANG, totals
from dpro.extensions.goodput.attempts import DOWN, HUNG, ensure_one_job
from dpro.extensions.goodput.document import IN_WORDS, goodput_document, in_words
from dpro.extensions.goodput.life import JobLife, life_of
from dpro.schema import STARTS
from dpro.store import Run, open_run
from dpro.units import NS_PER_H, NS_PER_MS, format_duration

# The figure of a job's life: its progress in steps, and what each rank did, over time.

OF, RUN, JOB = "of", "run", "job"  # parameter of the link: the life of the run, or of all runs of the job
MAX_RANKS = 64  # strips
MAX_POINTS = 3000  # of all lines of steps
MAX_LABELS = 12  # attempts up to which their ends are labelled; labels of more show on hover only
MAX_LINES = 60  # attempts whose beginnings are marked
MIN_SHARE = 0.005  # smaller shares are written as < 1%
SEEN = 1 / 1500  # of the whole time: shorter pieces are narrower than a pixel
ROOM = 0.15  # above and below the steps, for labels
STEPS_HEIGHT, ROW, MIN_STRIPS, AROUND = 200, 26, 70, 150  # pixels
SHADES = {  # name of a class in the legend -> colour of the palette, pattern
    "training": ("compute", ""),
    "evaluation": ("cpu", ""),
    "waiting for stragglers": ("wait", ""),
    "saving checkpoints": ("host_bound", ""),
    "steps done again": ("exposed_comm", "/"),
    "hanging": ("ink", ""),
    "ending after a failure": ("ink", "/"),
    "starting": ("runtime", ""),
    "finishing": ("overlapped_comm", ""),
    "recording": ("soft", ""),
    "no process": ("idle", "."),
}
_COLUMNS = ("rank", "attempt", "class", "first_step", "last_step", "begin_ms", "lasts_ms")


def nothing_started(loaded: Loaded, _link: Link) -> str:
    """Return the message for a run without the start times of its processes; empty otherwise."""
    if loaded.num_rows[STARTS.name]:
        return ""
    why = "`dpro record` records it, imported traces have none"
    return f"How the job started and restarted was not recorded: {why}."


@cached
def own_life(loaded: Loaded) -> JobLife:
    """Return the life of the run's job, over its own attempts."""
    return life_of([loaded.run], [loaded])


def goodput_of(analysis: Analysis) -> float | None:
    """Return the share of a run's time in which steps were done for the first time; None where unknown."""
    if not analysis.run.num_rows(STARTS):
        return None
    return goodput_document(life_of([analysis.run], [analysis]), [analysis.run.label]).goodput


@cached
def with_job_of(loaded: Loaded) -> list[Run]:
    """Return the other complete runs on offer that were made by the same command."""
    command, path = loaded.run.manifest.command, loaded.run.path.resolve()
    whole = [open_run(offer.path) for offer in loaded.offers() if offer.is_whole]
    of_command = [other for other in whole if other.manifest.command == command]
    return [other for other in of_command if other.path.resolve() != path] if command else []


@cached
def life_with_others(loaded: Loaded) -> JobLife:
    """Return the life of a job whose attempts are all runs of the same command.

    Raises:
        InputError: two of them ran at the same time.
    """
    runs = [loaded.run, *with_job_of(loaded)]
    life = life_of(runs, [loaded])
    ensure_one_job(life.attempts, runs)
    return life


def chosen_life(loaded: Loaded, link: Link) -> JobLife:
    """Return the life of the run's job: of its own attempts, or with the other runs of the same command.

    Args:
        link: chooses which (`of=job`).

    Raises:
        InputError: two of these ran at the same time.
    """
    return life_with_others(loaded) if link.options.get(OF) == JOB else own_life(loaded)


def life_info(loaded: Loaded, link: Link) -> pl.DataFrame:
    """Return what the selected ranks did, in pieces that are wide enough to be seen.

    Returns:
        `rank`, `attempt`, `class`, `first_step`, `last_step` (-1 outside steps), `begin_ms` since the job
        began, `lasts_ms`.
    """
    life = chosen_life(loaded, link)
    pieces = life.pieces
    if link.ranks:
        pieces = pieces.filter(pl.col("rank").is_in(link.ranks))
    if pieces.is_empty():
        return pl.DataFrame(schema=dict.fromkeys(_COLUMNS, pl.Int64))
    whole_ns = pieces.group_by("rank").agg(pl.col("duration_ns").sum())["duration_ns"].max()
    assert isinstance(whole_ns, int)
    is_seen = (pl.col("duration_ns") >= SEEN * whole_ns) | (pl.int_range(pl.len()).over("rank") == 0)
    seen = pieces.with_columns(pl.when(is_seen).then("class").forward_fill().over("rank"))
    run = pl.struct("rank", "attempt", "class").rle_id()
    step = pl.col("step").filter(pl.col("step") >= 0)
    merged = seen.with_columns(run=run).group_by("run", maintain_order=True).agg(
        pl.col("rank", "attempt", "class", "start_ns").first(), pl.col("duration_ns").sum(),
        first_step=step.min(), last_step=step.max(),
    )  # fmt: skip
    return merged.select(
        "rank", "attempt", "class", pl.col("first_step", "last_step").fill_null(-1),
        begin_ms=_since_begin(life, pl.col("start_ns")), lasts_ms=pl.col("duration_ns") / NS_PER_MS,
    )  # fmt: skip


def attempt_info(loaded: Loaded, link: Link) -> pl.DataFrame:
    """Return the attempts of the job.

    Returns:
        `attempt`, `begin_ms` and `end_ms` since the job began, `stopped_ms` (when it hung, else `end_ms`),
        `first_step`, `steps`, `repeated`, `lost`, and the `label` and `words` of its end.
    """
    life = chosen_life(loaded, link)
    document = goodput_document(life, [loaded.run.label])
    moved = pl.col("start_ns") + pl.col("duration_ns")
    up = (
        life.pieces.filter(pl.col("class") != DOWN)
        .group_by("attempt", "rank")
        .agg(
            begin=pl.col("start_ns").min(), end=moved.max(), moved=moved.filter(pl.col("class") != HANG).max()
        )
    )
    # The rank that fails ends before those that wait for it, so the first end counts.
    times = up.group_by("attempt").agg(
        begin_ms=_since_begin(life, pl.col("begin").min()),
        end_ms=_since_begin(life, pl.col("end").min()),
        moved_ms=_since_begin(life, pl.col("moved").max()),
    )
    rows = [
        (number, attempt.first_step, attempt.steps, attempt.repeated, attempt.lost, end.label, end.words)
        for number, (attempt, end) in enumerate(zip(document.attempts, life.ends, strict=True))
    ]
    names = ["attempt", "first_step", "steps", "repeated", "lost", "label", "words"]
    said = pl.DataFrame(rows, schema=names, orient="row").with_columns(pl.col("attempt").cast(pl.Int32))
    stopped = pl.when(pl.col("label") == HUNG).then("moved_ms").otherwise("end_ms")
    attempts = said.join(times, on="attempt").with_columns(stopped_ms=stopped)
    return attempts.drop("moved_ms").sort("attempt")


def progress_info(loaded: Loaded, link: Link) -> pl.DataFrame:
    """Return the progress of the job in steps over time.

    Returns:
        `attempt`, `time_ms` since the job began, `done`: steps that the last rank had done then.
    """
    life = chosen_life(loaded, link)
    pieces = life.pieces.filter(pl.col("step") >= 0)
    end = (pl.col("start_ns") + pl.col("duration_ns")).max()
    ends = pieces.group_by("attempt", "step").agg(time_ns=end).with_columns(done=pl.col("step") + 1)
    begins = pieces.group_by("attempt").agg(time_ns=pl.col("start_ns").min(), done=pl.col("step").min())
    points = pl.concat([frame.select("attempt", "time_ns", "done") for frame in (begins, ends)])
    number = pl.int_range(pl.len()).over("attempt")
    every = -(-points.height // MAX_POINTS) or 1
    kept = (number % every == 0) | (number == pl.len().over("attempt") - 1)
    drawn = points.sort("attempt", "done").filter(kept)
    return drawn.select("attempt", "done", time_ms=_since_begin(life, pl.col("time_ns")))


def _since_begin(life: JobLife, time_ns: pl.Expr) -> pl.Expr:
    begin_ns = life.pieces["start_ns"].min()
    return (time_ns - (begin_ns if isinstance(begin_ns, int) else 0)) / NS_PER_MS


def life_figure(
    rows: pl.DataFrame, classes: pl.DataFrame, attempts: pl.DataFrame, progress: pl.DataFrame, theme: str
) -> go.Figure:
    """Draw the life of a job.

    Args:
        rows: as `life_info` returns them, not empty.
        classes: as `class_info` returns them: the drawn pieces are too coarse to give shares.
    """
    ranks = rows["rank"].unique().sort().to_list()[:MAX_RANKS]
    shown = rows.filter(pl.col("rank").is_in(ranks))
    scale, unit = time_unit(float((shown["begin_ms"] + shown["lasts_ms"]).to_numpy().max()))
    strips = max(MIN_STRIPS, ROW * len(ranks))
    figure = make_subplots(
        rows=2, shared_xaxes=True, vertical_spacing=0.08, row_heights=[STEPS_HEIGHT, strips]
    )
    _draw_steps(figure, attempts, progress, scale, theme)
    _draw_strips(figure, shown, classes, scale, theme)
    _mark_attempts(figure, attempts, scale, theme)
    styled(figure, theme, height=STEPS_HEIGHT + strips + AROUND)
    figure.update_xaxes(title_text=f"since the job began, {unit}", row=2)
    figure.update_xaxes(showticklabels=False, row=1)
    top = max(1, *progress["done"].to_list()) * (1 + ROOM)
    figure.update_yaxes(title_text="step of the job", range=[-ROOM * top, top], row=1)
    order = [f"rank {rank}" for rank in ranks]
    figure.update_yaxes(categoryorder="array", categoryarray=order[::-1], showgrid=False, row=2)
    return figure.update_layout(barmode="overlay", bargap=0.15, showlegend=True, hovermode="closest")


def _mark_attempts(figure: go.Figure, attempts: pl.DataFrame, scale: float, theme: str) -> None:
    """Draw a line where each attempt began, and its number between the two parts of the figure."""
    soft, between = colour("soft", theme), figure.layout.yaxis2.domain[1]
    for number, begin_ms in attempts.select("attempt", "begin_ms").rows()[:MAX_LINES]:
        if number:
            line = {"color": soft, "width": 1, "dash": "dot"}
            figure.add_vline(x=begin_ms / scale, line=line)
        if attempts.height <= MAX_LABELS:
            figure.add_annotation(
                x=begin_ms / scale, y=between, yref="paper", text=str(number) if number else "attempt 0",
                showarrow=False, xanchor="left", yanchor="bottom", font={"size": 11, "color": soft},
            )  # fmt: skip


def _draw_steps(
    figure: go.Figure, attempts: pl.DataFrame, progress: pl.DataFrame, scale: float, theme: str
) -> None:
    """Draw a line for the steps of each attempt, its end, and how far the next one falls back."""
    ends, falls = [], []
    last: tuple[float, int] | None = None
    for row in attempts.iter_rows(named=True):
        of_attempt = progress.filter(pl.col("attempt") == row["attempt"])
        times_ms, done = of_attempt["time_ms"].to_list(), of_attempt["done"].to_list()
        if done and last is not None:
            falls.append((last, (times_ms[0], done[0])))
        height = done[-1] if done else last[1] if last is not None else 0
        x = [time_ms / scale for time_ms in [*times_ms, max([row["stopped_ms"], *times_ms])]]
        line = {"color": colour("compute", theme), "width": 2.5}
        figure.add_scatter(
            x=x if done else [], y=[*done, height] if done else [], mode="lines", line=line,
            showlegend=False, hovertemplate=f"attempt {row['attempt']}: %{{y:,}} steps done<extra></extra>",
            row=1, col=1,
        )  # fmt: skip
        ends.append((x[-1], height, row))
        last = (x[-1] * scale, height) if done else last
    _draw_falls(figure, falls, scale, theme)
    few = len(ends) <= MAX_LABELS
    bad = [row["label"] not in ("finished", "running") for _, _, row in ends]
    figure.add_scatter(
        x=[x for x, _, _ in ends],
        y=[y for _, y, _ in ends],
        mode="markers+text" if few else "markers",
        marker={"symbol": ["x" if is_bad else "circle" for is_bad in bad], "size": 9,
                "color": [colour("bad" if is_bad else "good", theme) for is_bad in bad]},
        text=[row["label"] for _, _, row in ends],
        textposition="top center",
        textfont={"size": 11, "color": colour("ink", theme)},
        customdata=[[row["attempt"], row["words"], row["lost"]] for _, _, row in ends],
        hovertemplate="attempt %{customdata[0]}: %{customdata[1]}; %{customdata[2]:,} steps lost"
        "<extra></extra>",
        cliponaxis=False,
        name="end of an attempt",
        showlegend=False,
        row=1, col=1,
    )  # fmt: skip


def _draw_falls(figure: go.Figure, falls: list[Any], scale: float, theme: str) -> None:
    """Draw dotted lines from the ends of attempts to the steps that the next ones resumed from."""
    x, y = [], []
    for (from_ms, reached), (to_ms, resumed) in falls:
        x += [from_ms / scale, to_ms / scale, None]
        y += [reached, resumed, None]
    bad = colour("bad", theme)
    figure.add_scatter(
        x=x, y=y, mode="lines", line={"color": bad, "width": 1.5, "dash": "dot"}, showlegend=False,
        hovertemplate="went on from step %{y:,}<extra></extra>", name="falls back to its checkpoint",
        row=1, col=1,
    )  # fmt: skip
    fell = [(to_ms / scale, resumed, reached - resumed) for (_, reached), (to_ms, resumed) in falls]
    written = [fall for fall in fell if fall[2] > 0] if len(falls) < MAX_LABELS else []
    figure.add_scatter(
        x=[x for x, _, _ in written], y=[resumed for _, resumed, _ in written], mode="text",
        text=[f"−{steps:,} step{'s' * (steps != 1)}" for _, _, steps in written],
        textposition="bottom center", textfont={"size": 11, "color": bad}, cliponaxis=False,
        showlegend=False, hoverinfo="skip", name="steps lost", row=1, col=1,
    )  # fmt: skip


def _draw_strips(
    figure: go.Figure, shown: pl.DataFrame, classes: pl.DataFrame, scale: float, theme: str
) -> None:
    """Draw a strip for each rank, the first at the top."""
    what = pl.col("class").replace_strict(IN_WORDS).alias("what")
    named, shares = shown.with_columns(what), classes.group_by(what).agg(pl.col("share").sum())
    share_of = dict(shares.iter_rows())
    for words, (shade, pattern) in SHADES.items():
        of_class = named.filter(pl.col("what") == words)
        if of_class.is_empty():
            continue
        share = share_of[words]
        figure.add_bar(
            x=of_class["lasts_ms"] / scale,
            base=of_class["begin_ms"] / scale,
            y=[f"rank {rank}" for rank in of_class["rank"]],
            orientation="h",
            name=f"{words} {share:.0%}" if share >= MIN_SHARE else f"{words} < 1%",
            marker={"color": colour(shade, theme), "line": {"width": 0}, "pattern": _pattern(pattern, theme)},
            customdata=[
                [row["class"].replace("_", " "), _steps(row), format_duration(row["lasts_ms"] * NS_PER_MS),
                 row["attempt"]]
                for row in of_class.iter_rows(named=True)
            ],
            hovertemplate="%{y}, attempt %{customdata[3]}: %{customdata[0]}%{customdata[1]}, %{customdata[2]}"
            "<extra></extra>",
            row=2, col=1,
        )  # fmt: skip


def _pattern(shape: str, theme: str) -> dict[str, Any]:
    fg = colour("panel", theme)
    return {"shape": shape, "fillmode": "overlay", "fgcolor": fg, "size": 7, "solidity": 0.2}


def _steps(row: dict[str, Any]) -> str:
    first, last = row["first_step"], row["last_step"]
    return "" if first < 0 else f" (step {first:,})" if first == last else f" (steps {first:,} to {last:,})"


def markers_of(names: Sequence[str], theme: str) -> dict[str, Any]:
    """Return the style of bars of classes, as of their pieces in the strips."""
    drawn = [SHADES[IN_WORDS[name]] for name in names]
    pattern = _pattern("", theme) | {"shape": [shape for _, shape in drawn]}
    return {"color": [colour(shade, theme) for shade, _ in drawn], "line": {"width": 0}, "pattern": pattern}


NAME = "goodput"
_ROW, _MIN_HEIGHT = 22, 220  # pixels
_NONE = "No time of these ranks is known."


def class_info(loaded: Loaded, link: Link) -> pl.DataFrame:
    """Return the time of each class on the selected ranks: `class`, `rank_hours`, `hours_each`, `share`."""
    pieces = chosen_life(loaded, link).pieces
    chosen = pieces.filter(pl.col("rank").is_in(link.ranks)) if link.ranks else pieces
    hours = pl.col("duration_ns") / NS_PER_H
    per_rank = hours / max(chosen["rank"].n_unique(), 1)
    classes = totals(chosen).sort("duration_ns", descending=True)
    return classes.select("class", rank_hours=hours, hours_each=per_rank, share="share")


def class_figure(classes: pl.DataFrame, theme: str) -> go.Figure:
    """Draw the share of each class, the largest at the top."""
    share = 100 * classes["share"]
    lasting = [f"{format_duration(hours * NS_PER_H)} a rank" for hours in classes["hours_each"]]
    figure = go.Figure()
    figure.add_bar(
        x=share,
        y=[name.replace("_", " ") for name in classes["class"]],
        orientation="h",
        marker=markers_of(classes["class"].to_list(), theme),
        text=[f"{percent:.2g}%, {lasts}" for percent, lasts in zip(share, lasting, strict=True)],
        textposition="auto",  # beside the longest bar there is no room
        cliponaxis=False,
        customdata=lasting,
        hovertemplate="%{y}: %{x:.2f} %, %{customdata}<extra></extra>",
    )
    figure.update_xaxes(title_text="share of the time of all ranks, %", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return styled(figure, theme, height=max(_MIN_HEIGHT, _ROW * classes.height + 110))


def _life(loaded: Loaded, link: Link) -> Any:
    offered = len(with_job_of(loaded))
    which = {RUN: "this run", JOB: f"all {offered + 1} runs of this command, as one job"}
    chosen = [choices(link, OF, which, RUN)] if offered else []
    rows = life_info(loaded, link)
    if rows.is_empty():
        return [*chosen, message(_NONE)]
    more = rows["rank"].n_unique() - MAX_RANKS
    figure = life_figure(
        rows, class_info(loaded, link), attempt_info(loaded, link), progress_info(loaded, link), link.theme
    )
    return [
        *chosen,
        message(in_words(goodput_document(chosen_life(loaded, link), [loaded.run.label]))),
        *([message(f"{more} more ranks are not drawn: select some.")] if more > 0 else []),
        graph("goodput-life-figure", figure),
        csv_link(NAME, "life", link),
    ]


def _classes(loaded: Loaded, link: Link) -> Any:
    classes = class_info(loaded, link)
    if classes.is_empty():
        return message(_NONE)
    return [
        graph("goodput-classes-figure", class_figure(classes, link.theme)),
        csv_link(NAME, "classes", link),
    ]


def _attempts(loaded: Loaded, link: Link) -> Any:
    document = goodput_document(chosen_life(loaded, link), [loaded.run.label])
    rows = [
        [
            row["attempt"], format_duration(row["begin_ms"] * NS_PER_MS) if row["begin_ms"] else "0",
            format_duration((row["end_ms"] - row["begin_ms"]) * NS_PER_MS),
            f"{row['first_step']:,}" if row["steps"] else "–", f"{row['steps']:,}",
            f"{row['repeated']:,}", f"{row['lost']:,}", row["words"],
        ]
        for row in attempt_info(loaded, link).iter_rows(named=True)
    ]  # fmt: skip
    header = [
        "attempt",
        "began at",
        "lasted",
        "from step",
        "steps",
        "steps done again",
        "steps lost",
        "how it ended",
    ]
    said = f"Goodput {document.goodput:.1%}, effective training time ratio (ETTR) {document.ettr:.1%}."
    return [
        message(said),
        table(header, rows, numbers_to=len(header) - 1),
        csv_link(NAME, "attempts", link),
        *map(message, document.notes),
    ]


VIEW = view(
    NAME,
    "Goodput",
    nothing_started,
    Panel("Life of the job", "goodput-life", "accounting for its time", _life, wide=True),
    Panel("Attempts", "goodput-attempts", "finding what each resumed from", _attempts, wide=True),
    Panel("Where the time went", "goodput-classes", "adding up its time", _classes, wide=True),
    tables={"life": life_info, "classes": class_info, "attempts": attempt_info, "progress": progress_info},
)


# Figures outside the view: `run.plot.life()`, and in a report.


def draw_life(loaded: Loaded, link: Link) -> go.Figure:
    """Draw the life of the job over its attempts: its progress in steps, and what its ranks did.

    Raises:
        Unanswerable: no time of this selection was recorded.
    """
    rows = life_info(loaded, link)
    if rows.is_empty():
        raise Unanswerable("nothing to draw: no moment of this selection was recorded")
    return life_figure(
        rows, class_info(loaded, link), attempt_info(loaded, link), progress_info(loaded, link), link.theme
    )


def figures_of_report(loaded: Loaded, ranks: list[int]) -> Iterator[tuple[str, Callable[[], go.Figure]]]:
    """Yield the title of the figure of a report, and a function that draws it."""
    if loaded.num_rows[STARTS.name]:
        worth = goodput_document(own_life(loaded), []).goodput
        title = f"Life of the job: {worth:.0%} of its time was training that counts"
        yield title, lambda: draw_life(loaded, Link(ranks=tuple(ranks)))
