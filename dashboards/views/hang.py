"""A job that stands still: what hangs, which rank waits for which, how far each had come, where it stood.

In: the graph of waiting, as `dpro diagnose` builds it, and stacks that were kept. Out: frames and figures. It
needs calls alone: dumps of a flight recorder are enough.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import html
from dash.development.base_component import Component

from dpro.dashboards import needs
from dpro.dashboards.chains import Chains, chain_figure, chain_info, wrapped_label
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.names import plain, plain_all
from dpro.dashboards.page import View, csv_link, graph, grid, message, panel, section, table
from dpro.dashboards.theme import colour, styled
from dpro.detect.findings import Finding
from dpro.detect.hang.case import Case
from dpro.detect.hang.evidence import advice_in_words, name_of, verdict_in_words
from dpro.detect.hang.waits import victims_of
from dpro.members import members_of
from dpro.units import time_in_words
from dpro.words import numbers_in_words, ranks_in_words

NAME = "hang"
MAX_GROUPS = 60  # rows of the figure
MAX_RANKS = 300  # rows of the table
LABEL = 48  # characters of a line
FEW = 40  # cells across that have room for a number
_ROW, _LINE = 19, 13  # pixels of a row, of each further line of its label
FAULT, WAITS, GOES_ON, UNKNOWN = "at fault", "waits", "not waiting", "unknown"


def standing_info(case: Case) -> pl.DataFrame:
    """How far each rank had come in each of its groups.

    Returns:
        `group`, `ranks` (of the group), `rank`, `issued` and `finished` (numbers of its last calls, -1 none,
        null where that is unknown), `behind` (calls fewer than the rank of the group that issued most),
        `waits_in` (what it has not finished), `absent` (others wait for it there). Groups that are waited in
        come first.
    """
    rows = case.records.members.with_columns(pl.col("key").cast(pl.String)).with_columns(
        group=pl.col("key").str.split("|").list.first(), ranks=pl.col("key").str.split("|").list.last()
    )
    known = [
        pl.DataFrame(
            {
                "rank": [rank for rank, _ in numbers],
                "key": [key for _, key in numbers],
                name: list(numbers.values()),
            },
            schema=[("rank", rows.schema["rank"]), ("key", pl.String), (name, pl.Int64)],
        )
        for name, numbers in (("issued", case.known.issued), ("finished", case.known.done))
    ]
    for each in known:
        rows = rows.join(each, on=["rank", "key"], how="left", maintain_order="left")
    current = pl.col("rank").is_in(list(case.known.current))
    rows = rows.with_columns(
        pl.when(current).then(pl.col("issued", "finished").fill_null(-1)).otherwise(None)
    ).with_columns(behind=pl.col("issued").max().over("key") - pl.col("issued"))
    rows = rows.join(
        _open_calls(case, rows.schema["rank"]), on=["rank", "key"], how="left", maintain_order="left"
    )
    rows = rows.with_columns(pl.col("waits_in").fill_null(""), pl.col("absent").fill_null(False))
    waited = ((pl.col("waits_in") != "") | pl.col("absent")).any().over("key")
    order = [waited, (pl.col("behind").max()).over("key"), "group", "ranks", "rank"]
    descending = [True, True, False, False, False]
    rows = rows.sort(order, descending=descending, nulls_last=True)
    return rows.select("group", "ranks", "rank", "issued", "finished", "behind", "waits_in", "absent")


def _open_calls(case: Case, rank: pl.DataType) -> pl.DataFrame:
    """`rank`, `key`, `waits_in`, `absent` of all that take part in unfinished operations."""
    rows: list[tuple[int, str, str, bool]] = []
    for operation in case.waits.operations:
        rows += [(rank, operation.key, name_of(operation), False) for rank in operation.unfinished]
        rows += [(rank, operation.key, "", True) for rank in operation.absent]
    schema = {"rank": rank, "key": pl.String(), "waits_in": pl.String(), "absent": pl.Boolean()}
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    waits_in = pl.col("waits_in").filter(pl.col("waits_in") != "").first()
    return frame.group_by("rank", "key", maintain_order=True).agg(waits_in, pl.col("absent").any())


def standing_figure(standing: pl.DataFrame, theme: str) -> go.Figure:
    """Groups × ranks: which are behind, which wait, and which did not come.

    Args:
        standing: as from `standing_info`.
    """
    names = {ranks: numbers_in_words(members_of(ranks)) for ranks in standing["ranks"].unique() if ranks}
    members = pl.format(" ({})", pl.col("ranks").replace(names))  # which ranks are in it may not be recorded
    known = pl.when(pl.col("ranks") == "").then(pl.lit("")).otherwise(members)
    named = standing.with_columns(row=pl.col("group") + known)
    rows = named["row"].unique(maintain_order=True).to_list()[:MAX_GROUPS]
    named = named.filter(pl.col("row").is_in(rows))
    ranks = named["rank"].unique().sort().to_list()
    at = {rank: place for place, rank in enumerate(ranks)}
    behind = np.full((len(rows), len(ranks)), np.nan)
    facts = np.full(behind.shape, "", object)
    place = {row: number for number, row in enumerate(rows)}
    for each in named.iter_rows(named=True):
        cell = place[each["row"]], at[each["rank"]]
        behind[cell] = np.nan if each["behind"] is None else each["behind"]
        facts[cell] = _cell_in_words(each)
    figure = go.Figure()
    calm, worse = colour("cpu", theme), colour("bad", theme)
    figure.add_heatmap(
        x=np.arange(len(ranks)), y=np.arange(len(rows)), z=np.minimum(behind, 1), zmin=0, zmax=1,
        showscale=False, colorscale=[[0, f"{calm}55"], [1, f"{worse}aa"]], xgap=1, ygap=1, customdata=facts,
        text=np.where(behind > 0, np.char.mod("%.0f", np.nan_to_num(behind)), ""),
        texttemplate="%{text}" if len(ranks) <= FEW else "", textfont={"color": colour("ink", theme)},
        hovertemplate="%{customdata}<extra></extra>", hoverongaps=False,
    )  # fmt: skip
    marks = (("waits_in", "waits here", "circle", "ink"), ("absent", "others wait for it here", "x", "bad"))
    for column, title, symbol, ink in marks:
        mine = named.filter(pl.col(column) != "") if column == "waits_in" else named.filter(column)
        figure.add_scatter(
            x=[at[rank] + (0.28 if len(ranks) <= FEW else 0) for rank in mine["rank"]],
            y=[place[row] for row in mine["row"]], mode="markers", name=title, hoverinfo="skip",
            marker={"symbol": symbol, "size": 6, "color": colour(ink, theme)},
        )  # fmt: skip
    labels = [wrapped_label(row, LABEL) for row in rows]
    lines = max((label.count("<br>") + 1 for label in labels), default=1)
    styled(figure, theme, height=100 + (_ROW + _LINE * (lines - 1)) * max(len(rows), 3))
    every = 1 + len(ranks) // FEW
    figure.update_xaxes(
        title_text="rank", tickvals=list(range(len(ranks)))[::every], ticktext=ranks[::every], showgrid=False,
        range=[-0.5, len(ranks) - 0.5], zeroline=False,
    )  # fmt: skip
    figure.update_yaxes(
        tickvals=list(range(len(rows))), ticktext=labels,
        showgrid=False, range=[len(rows) - 0.5, -0.5], zeroline=False,
    )  # fmt: skip
    return figure.update_layout(hovermode="closest")


def _cell_in_words(row: Mapping[str, Any]) -> str:
    said = [f"rank {row['rank']} in group {row['group']}"]
    if row["issued"] is None:
        return plain(f"{said[0]}: unknown")
    last = (("last call", row["issued"]), ("last finished", row["finished"]))
    said += [f"{what} #{number}" if number >= 0 else f"no {what}" for what, number in last]
    said += [f"{row['behind']} behind the furthest"] if row["behind"] else []
    said += [f"waits in {row['waits_in']}"] if row["waits_in"] else []
    said += ["others wait for it to come"] if row["absent"] else []
    return "<br>".join(plain_all(said))


def rank_info(case: Case, findings: Sequence[Finding], workers: pl.DataFrame) -> pl.DataFrame:
    """What each rank of the job does.

    Args:
        workers: table `workers`.

    Returns:
        `rank`, `host`, `pid`, `state` (at fault, waits, not waiting, unknown), `waits_in` (its oldest
        unfinished call), `since`; those at fault first.
    """
    blamed = {rank for finding in findings for rank in finding.ranks}
    waiting = {rank for root in case.roots for rank in victims_of(root, case.waits)}
    oldest: dict[int, tuple[int, str, int]] = {}
    for operation in case.waits.operations:
        for rank, call in operation.unfinished.items():
            mine = (call.order, name_of(operation), call.enqueued_ns)
            oldest[rank] = min(oldest.get(rank, mine), mine)
    where = {rank: (host, pid) for rank, host, pid in workers.select("rank", "host", "pid").iter_rows()}
    states = (FAULT, WAITS, GOES_ON, UNKNOWN)
    rows = []
    for rank in range(case.records.world_size):
        known = rank in case.known.current
        state = FAULT if rank in blamed else WAITS if rank in waiting else GOES_ON if known else UNKNOWN
        _, name, since_ns = oldest.get(rank, (0, "", -1))
        host, pid = where.get(rank, ("", -1))
        since = time_in_words(since_ns) if since_ns >= 0 else ""
        rows.append((rank, host, pid, state, name, since, states.index(state)))
    schema = {
        "rank": pl.Int64, "host": pl.String, "pid": pl.Int64, "state": pl.String, "waits_in": pl.String,
        "since": pl.String, "order": pl.Int64,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row").sort("order", "rank").drop("order")


def stack_info(workers: pl.DataFrame, folder: Path) -> pl.DataFrame:
    """Where threads stood: those that stood at the same place as one.

    Args:
        workers: table `workers`.

    Returns:
        `thread`, `ranks`, `stack` (innermost call first, one a line), the rarest first: a rank that
        stands where no other does is looked at first.
    """
    found = [
        ("main thread, at the end", rank, stack)
        for rank, stack in workers.select("rank", "stack").iter_rows()
        if stack
    ]
    for path in sorted(folder.glob("findings/hang-*/stacks.json")):
        found += list(_kept(path))
    schema = {"thread": pl.String, "rank": pl.Int64, "stack": pl.String}
    frame = pl.DataFrame(found, schema=schema, orient="row").unique()
    distinct = frame.group_by("thread", "stack").agg(ranks=pl.col("rank").sort())
    order = [pl.col("thread").str.starts_with("main").not_(), pl.col("ranks").list.len(), "thread", "stack"]
    return distinct.sort(order).select("thread", "ranks", "stack")


def _kept(path: Path) -> Iterable[tuple[str, int, str]]:
    """Threads in a file of stacks that `dpro watch` kept; none where it is damaged."""
    try:
        answers = json.loads(path.read_text(encoding="utf-8"))["ranks"]
        for answer in answers:
            for thread in answer["threads"]:
                frames = [f"{each['file']}:{each['line']} {each['function']}" for each in thread["frames"]]
                yield f"{thread['name']}, {path.parent.name}", int(answer["rank"]), "\n".join(frames)
    except (OSError, ValueError, KeyError, TypeError):
        return


def _hangs(loaded: Loaded) -> list[Finding]:
    return [finding for finding in loaded.verdict[0] if finding.of_hang]


def _verdict(loaded: Loaded, _link: Link) -> Any:
    if loaded.waiting.records.calls.is_empty():
        return message(needs.NO_CALL_STATES)
    findings = _hangs(loaded)
    if not findings:
        return html.P("Nothing hangs that the calls of this run can show.", className="health good")
    return [each for finding in findings for each in _finding(finding, loaded.workers)]


def _finding(finding: Finding, workers: pl.DataFrame) -> list[Component]:
    said = f"{finding.class_}: {verdict_in_words(finding)}"
    return [
        html.P([said, html.Span(f"; confidence {finding.confidence:.2f}")], className="health bad"),
        html.Ul([html.Li(line) for line in finding.evidence]),
        html.P(f"Do: {advice_in_words(finding, workers)}", className="note"),
    ]


def chains_of(loaded: Loaded) -> Chains:
    """Which ranks wait for which in a run, with those at fault."""
    blamed = sorted({rank for finding in _hangs(loaded) for rank in finding.ranks})
    return chain_info(loaded.waiting, blamed)


def _chains(loaded: Loaded, link: Link) -> Any:
    chains = chains_of(loaded)
    if not chains.boxes:
        return message("No rank has waited for long.")
    more = f" {chains.left_out} more, further away, are not shown." if chains.left_out else ""
    note = f"Each waits for what its arrow points to; those that wait for the same are one.{more}"
    return [graph("chain-figure", chain_figure(chains, link.theme)), html.P(note, className="note")]


def _standing(loaded: Loaded, link: Link) -> Any:
    standing = link.chosen(standing_info(loaded.waiting))
    if standing.is_empty():
        return message("No call of this selection was recorded.")
    apart = (pl.col("waits_in") != "") | pl.col("absent") | (pl.col("behind") > 0)
    shown = standing.filter(apart.any().over("group", "ranks"))
    shown = standing if shown.is_empty() else shown
    groups, drawn = (each.select("group", "ranks").n_unique() for each in (standing, shown))
    left_out = groups - min(drawn, MAX_GROUPS)
    more = f" {left_out} more groups are in the CSV." if left_out else ""
    note = f"Numbers are calls fewer than the rank of the group that made most.{more}"
    figure = graph("standing-figure", standing_figure(shown, link.theme))
    return [figure, html.P(note, className="note"), csv_link(NAME, "standing", link)]


def _ranks(loaded: Loaded, link: Link) -> Any:
    ranks = link.chosen(_rank_table(loaded))
    if ranks.is_empty():
        return message("Of no rank of this selection is it known what it did.")
    header = ["rank", "host", "pid", "state", "waits in", "since"]
    rows = [
        [
            str(row["rank"]),
            row["host"],
            str(row["pid"]) if row["pid"] > 0 else "",
            html.Strong(row["state"]) if row["state"] == FAULT else row["state"],
            row["waits_in"],
            row["since"],
        ]
        for row in ranks.head(MAX_RANKS).iter_rows(named=True)
    ]
    return [table(header, rows, len(header)), csv_link(NAME, "ranks", link)]


def _rank_table(loaded: Loaded) -> pl.DataFrame:
    return rank_info(loaded.waiting, _hangs(loaded), loaded.workers)


def _stacks(loaded: Loaded, link: Link) -> Any:
    stacks = _stack_table(loaded, link)
    blamed = [rank for finding in _hangs(loaded) for rank in finding.ranks]
    named = pl.col("ranks").list.eval(pl.element().is_in(blamed)).list.any()
    stacks = stacks.sort(named, descending=True, maintain_order=True)
    if stacks.is_empty():
        return message(
            "No stack was kept: `dpro record` keeps those of ranks that stand still, dumps have none."
        )
    threads = [
        html.Details(
            [html.Summary(f"{ranks_in_words(row['ranks'])}: {row['thread']}"), html.Pre(row["stack"])],
            open=place == 0,
        )
        for place, row in enumerate(stacks.iter_rows(named=True))
    ]
    return [*threads, csv_link(NAME, "stacks", link)]


def _stack_table(loaded: Loaded, link: Link) -> pl.DataFrame:
    return stack_info(link.chosen(loaded.workers), loaded.run.path)


def _layout() -> Component:
    doing = "following which rank waits for which"
    return grid(
        panel("What hangs", section("hang-verdict", doing), wide=True),
        panel("Which ranks wait for which", section("hang-chains", doing), wide=True),
        panel("How far each rank had come in each group", section("hang-standing", doing), wide=True),
        panel("Ranks", section("hang-ranks", doing), wide=True),
        panel("Where they stood", section("hang-stacks", "reading stacks"), wide=True),
    )


VIEW = View(
    NAME,
    "Hang",
    needs.call_states,
    _layout,
    {
        "hang-verdict": _verdict,
        "hang-chains": _chains,
        "hang-standing": _standing,
        "hang-ranks": _ranks,
        "hang-stacks": _stacks,
    },
    {
        "standing": lambda loaded, link: link.chosen(standing_info(loaded.waiting)),
        "ranks": lambda loaded, link: link.chosen(_rank_table(loaded)),
        "stacks": _stack_table,
    },
)
