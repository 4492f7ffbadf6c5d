"""A hanging job: what hangs, which rank waits for which, how far each rank got, and its stacks.

Takes the wait-for graph of `dpro diagnose`, and recorded stacks; returns frames and figures. Calls alone
suffice, such as dumps of a flight recorder.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import html
from dash.development.base_component import Component

from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, csv_link, graph, message, table, view
from dpro.dashboards.theme import colour, plain, styled
from dpro.detect.findings import Finding, ranks_of
from dpro.detect.hang.case import Case
from dpro.detect.hang.evidence import name_of, observe_attendance
from dpro.detect.hang.operations import Operation
from dpro.detect.hang.stack_tree import StackedThread, lines_of, merge_stacks
from dpro.detect.hang.story import last_calls, story_info
from dpro.detect.hang.waits import CYCLE, OPERATION, Node, lead_to, victims_of
from dpro.detect.words import FindingInWords, describe_all
from dpro.members import members_of
from dpro.units import format_duration, time_in_words
from dpro.words import capitalised, counted, numbers_in_words, ranks_in_words, shortened

NAME = "hang"
_DOING = "following which rank waits for which"
MAX_GROUPS = 60  # rows of the figure
MAX_RANKS = 300  # rows of the table
LABEL = 24  # characters per line of a label
FEW = 40  # cells in a row with room for a number
WHOLE = 8  # cells in a row with room for the last call, too
_ROW, _LINE = 19, 13  # pixels of a row, and of each further line of its label
_CELL = 16  # pixels: least width of a cell, for its rank below
FAULT, WAITS, GOES_ON, UNKNOWN = "at fault", "waits", "not waiting", "unknown"


def standing_info(case: Case) -> pl.DataFrame:
    """Return how far each rank got in each of its groups.

    Returns:
        `group`, `ranks` (of the group), `rank`, `issued` and `finished` (numbers of its last calls, -1 for
        none, null where unknown), `behind` (calls fewer than the group's rank that issued most), `waits_in`
        (its unfinished operation), `absent` (others wait for it there). Groups with waiting ranks come first.
    """
    rows = case.records.members.with_columns(pl.col("key").cast(pl.String)).with_columns(
        group=pl.col("key").str.split("|").list.first(), ranks=pl.col("key").str.split("|").list.last()
    )
    progress = [
        pl.DataFrame(
            {
                "rank": [rank for rank, _ in numbers],
                "key": [key for _, key in numbers],
                name: list(numbers.values()),
            },
            schema=[("rank", rows.schema["rank"]), ("key", pl.String), (name, pl.Int64)],
        )
        for name, numbers in (("issued", case.progress.issued), ("finished", case.progress.done))
    ]
    for frame in progress:
        rows = rows.join(frame, on=["rank", "key"], how="left", maintain_order="left")
    current = pl.col("rank").is_in(list(case.progress.current))
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
    """Return `rank`, `key`, `waits_in`, `absent` of all members of unfinished operations."""
    rows: list[tuple[int, str, str, bool]] = []
    for operation in case.waits.operations:
        rows += [(rank, operation.key, name_of(operation), False) for rank in operation.unfinished]
        rows += [(rank, operation.key, "", True) for rank in operation.absent]
    schema = {"rank": rank, "key": pl.String(), "waits_in": pl.String(), "absent": pl.Boolean()}
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    waits_in = pl.col("waits_in").filter(pl.col("waits_in") != "").first()
    return frame.group_by("rank", "key", maintain_order=True).agg(waits_in, pl.col("absent").any())


def standing_figure(standing: pl.DataFrame, theme: str, first: Collection[int] = ()) -> go.Figure:
    """Draw groups × ranks: which ranks are behind, which wait, and which did not arrive.

    Args:
        first: ranks to draw before the others, such as those at fault.
    """
    names = {ranks: numbers_in_words(members_of(ranks)) for ranks in standing["ranks"].unique() if ranks}
    members = pl.format(" ({})", pl.col("ranks").replace(names))  # a group's members may not be recorded
    suffix = pl.when(pl.col("ranks") == "").then(pl.lit("")).otherwise(members)
    called = pl.when(pl.col("group") == "").then(pl.lit("no name")).otherwise("group")
    named = standing.with_columns(row=called + suffix)
    rows = named["row"].unique(maintain_order=True).to_list()[:MAX_GROUPS]
    named = named.filter(pl.col("row").is_in(rows))
    ranks = sorted(named["rank"].unique(), key=lambda rank: (rank not in first, rank))
    column_of = {rank: place for place, rank in enumerate(ranks)}
    behind = np.full((len(rows), len(ranks)), np.nan)
    facts, texts = np.full(behind.shape, "", object), np.full(behind.shape, "", object)
    place = {row: number for number, row in enumerate(rows)}
    for entry in named.iter_rows(named=True):
        cell = place[entry["row"]], column_of[entry["rank"]]
        behind[cell] = np.nan if entry["behind"] is None else entry["behind"]
        facts[cell] = _cell_in_words(entry)
        texts[cell] = _last_call(entry, whole=len(ranks) <= WHOLE)
    figure = go.Figure()
    calm, worse = colour("cpu", theme), colour("bad", theme)
    figure.add_heatmap(
        x=np.arange(len(ranks)), y=np.arange(len(rows)), z=np.minimum(behind, 1), zmin=0, zmax=1,
        showscale=False, colorscale=[[0, f"{calm}55"], [1, f"{worse}aa"]], xgap=1, ygap=1, customdata=facts,
        text=texts, texttemplate="%{text}" if len(ranks) <= FEW else "",
        textfont={"color": colour("ink", theme)},
        hovertemplate="%{customdata}<extra></extra>", hoverongaps=False,
    )  # fmt: skip
    marks = (
        ("waits_in", "waits in this group", "circle", "ink"),
        ("absent", "others wait for it in this group", "x", "bad"),
    )
    for column, title, symbol, ink in marks:
        marked = named.filter(pl.col(column) != "") if column == "waits_in" else named.filter(column)
        figure.add_scatter(
            x=[column_of[rank] + (0.28 if len(ranks) <= FEW else 0) for rank in marked["rank"]],
            y=[place[row] for row in marked["row"]], mode="markers", name=title, hoverinfo="skip",
            marker={"symbol": symbol, "size": 6, "color": colour(ink, theme)},
        )  # fmt: skip
    labels = [wrapped_label(row, LABEL) for row in rows]
    lines = max((label.count("<br>") + 1 for label in labels), default=1)
    styled(figure, theme, height=100 + (_ROW + _LINE * (lines - 1)) * max(len(rows), 3))
    every = 1 + len(ranks) // FEW
    longest = max((len(line) for label in labels for line in label.split("<br>")), default=0)
    least = round(_CHARACTER * longest) + _SIDES + _CELL * min(len(ranks), FEW)
    figure.update_xaxes(
        title_text="rank", tickvals=list(range(len(ranks)))[::every], ticktext=ranks[::every], showgrid=False,
        range=[-0.5, len(ranks) - 0.5], zeroline=False,
    )  # fmt: skip
    figure.update_yaxes(
        tickvals=list(range(len(rows))), ticktext=labels,
        showgrid=False, range=[len(rows) - 0.5, -0.5], zeroline=False,
    )  # fmt: skip
    return figure.update_layout(hovermode="closest", showlegend=True, meta={"least_width": least})


def _last_call(row: Mapping[str, Any], whole: bool) -> str:
    """Word a rank's last call and how far it is behind; unless `whole`, only the latter, if it is."""
    behind, issued = row["behind"] or 0, row["issued"]
    if not whole:
        return str(behind) if behind else ""
    number = "?" if issued is None else f"#{issued}" if issued >= 0 else "none"
    return f"{number}, {behind} behind" if behind else number


def _cell_in_words(row: Mapping[str, Any]) -> str:
    said = [f"rank {row['rank']} in group {row['group']}"]
    if row["issued"] is None:
        return plain(f"{said[0]}: unknown")
    last = (("last call", row["issued"]), ("last finished", row["finished"]))
    said += [f"{what} #{number}" if number >= 0 else f"no {what}" for what, number in last]
    said += [f"{row['behind']} behind the furthest"] if row["behind"] else []
    said += [f"waits in {row['waits_in']}"] if row["waits_in"] else []
    said += ["others wait for it to arrive"] if row["absent"] else []
    return "<br>".join(map(plain, said))


def rank_info(case: Case, findings: Sequence[Finding], workers: pl.DataFrame) -> pl.DataFrame:
    """Return the state of each rank of the job.

    Returns:
        `rank`, `host`, `pid`, `state` (at fault, waits, not waiting, unknown), `waits_in` (its oldest
        unfinished call), `since`, `last_call` (finished or not); ranks at fault come first.
    """
    last = {rank: call for rank, _, call in last_calls(case).iter_rows()}
    blamed = {rank for finding in findings for rank in finding.ranks}
    waiting = {rank for root in case.roots for rank in victims_of(root, case.waits)}
    oldest: dict[int, tuple[int, str, int]] = {}
    for operation in case.waits.operations:
        for rank, call in operation.unfinished.items():
            waiting_call = (call.order, name_of(operation), call.enqueued_ns)
            oldest[rank] = min(oldest.get(rank, waiting_call), waiting_call)
    where = {rank: (host, pid) for rank, host, pid in workers.select("rank", "host", "pid").iter_rows()}
    states = (FAULT, WAITS, GOES_ON, UNKNOWN)
    rows = []
    for rank in range(case.records.world_size):
        is_current = rank in case.progress.current
        state = FAULT if rank in blamed else WAITS if rank in waiting else GOES_ON if is_current else UNKNOWN
        _, name, since_ns = oldest.get(rank, (0, "", -1))
        host, pid = where.get(rank, ("", -1))
        since = time_in_words(since_ns) if since_ns >= 0 else ""
        rows.append((rank, host, pid, state, name, since, last.get(rank, ""), states.index(state)))
    schema = {
        "rank": pl.Int64, "host": pl.String, "pid": pl.Int64, "state": pl.String, "waits_in": pl.String,
        "since": pl.String, "last_call": pl.String, "order": pl.Int64,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row").sort("order", "rank").drop("order")


def stack_info(workers: pl.DataFrame, folder: Path) -> pl.DataFrame:
    """Return the distinct stacks of threads.

    Returns:
        `thread`, `ranks`, `stack` (innermost call first, one per line); main threads first, and of these the
        rarest stack, since a rank whose stack differs from all others deserves the first look.
    """
    stacks = [(one.name, one.rank, "\n".join(one.calls)) for one in _threads(workers, folder)]
    schema = {"thread": pl.String, "rank": pl.Int64, "stack": pl.String}
    frame = pl.DataFrame(stacks, schema=schema, orient="row").unique()
    distinct = frame.group_by("thread", "stack").agg(ranks=pl.col("rank").sort())
    order = [pl.col("thread").str.starts_with("main").not_(), pl.col("ranks").list.len(), "thread", "stack"]
    return distinct.sort(order).select("thread", "ranks", "stack")


def _read_threads(path: Path) -> Iterable[StackedThread]:
    """Yield the threads in a file of stacks from `dpro watch`, up to the first damaged entry."""
    try:
        answers = json.loads(path.read_text(encoding="utf-8"))["ranks"]
        for answer in answers:
            for thread in answer["threads"]:
                frames = [
                    f"{frame['file']}:{frame['line']} {frame['function']}" for frame in thread["frames"]
                ]
                yield StackedThread(int(answer["rank"]), thread["name"], frames)
    except (OSError, ValueError, KeyError, TypeError):
        return


def _threads(workers: pl.DataFrame, folder: Path, *, latest: bool = False) -> list[StackedThread]:
    """Return the stacks of main threads at the end, and of all threads that `dpro watch` recorded.

    Args:
        latest: whether to return only the latest hang, and leave out its number.
    """
    ended = workers.filter(pl.col("stack") != "").select("rank", "stack")
    paths = sorted(folder.glob("findings/hang-*/stacks.json"), key=lambda path: (len(path.parent.name), path))
    kept = [
        thread if latest else thread._replace(name=f"{thread.name}, {path.parent.name}")
        for path in paths[-1 if latest else 0 :]
        for thread in _read_threads(path)
    ]
    return [
        StackedThread(rank, "main thread, at the end", stack.splitlines())
        for rank, stack in ended.iter_rows()
    ] + kept


def _hangs(loaded: Loaded) -> list[Finding]:
    return [finding for finding in loaded.verdict[0] if finding.of_hang]


def _verdict(loaded: Loaded, _link: Link) -> Any:
    if loaded.waiting.records.calls.is_empty():
        return message(needs.NO_CALL_STATES)
    described = describe_all(_hangs(loaded), loaded.workers)
    if not described:
        return html.P(needs.NO_HANG, className="health good")
    first, *others = described
    more = counted(len(others), "more finding")
    shown: list[Component] = [html.P(loaded.end.sentence)] if loaded.end.sentence else []
    shown += _finding(first)
    if others:
        listed = [part for described in others for part in _finding(described)]
        shown.append(html.Details([html.Summary(f"{more}, less sure or later"), *listed]))
    return shown


def _finding(described: FindingInWords) -> list[Component]:
    what, _, doing = described.headline.partition("; ")
    return [
        html.P(f"{what}.", className="health bad"),
        html.P(f"Do: {described.do}", className="do"),
        *([html.P(f"{capitalised(doing)}.")] if doing else []),
        html.Details(
            [html.Summary("what shows it"), html.Ul([html.Li(line) for line in described.evidence])]
        ),
    ]


def _story(loaded: Loaded, link: Link) -> Any:
    story = _story_table(loaded, link)
    if story.is_empty():
        return message("No time of any call is recorded.")
    onset_ns = loaded.end.time_ns or int(story["time_ns"].max() or 0)  # type: ignore[arg-type]
    rows = [
        [
            time_in_words(time_ns) if time_ns >= 0 else "",
            _since_onset(time_ns - onset_ns) if time_ns >= 0 else "",
            ranks_in_words(ranks),
            what,
        ]
        for time_ns, ranks, what in story.iter_rows()
    ]
    return [
        table(["time", "since it hung", "ranks", "what happened"], rows, 4),
        csv_link(NAME, "story", link),
    ]


def _since_onset(passed_ns: int) -> str:
    """Word a time relative to the onset of a hang: `+ 3.2 s`, or before it `- 20 ms`."""
    return "0" if not passed_ns else f"{'+' if passed_ns > 0 else '-'} {format_duration(abs(passed_ns))}"


def _story_table(loaded: Loaded, link: Link) -> pl.DataFrame:
    story, chosen = story_info(loaded.waiting), link.ranks
    return (
        story.filter(pl.col("ranks").list.eval(pl.element().is_in(list(chosen))).list.any())
        if chosen
        else story
    )


def chains_of(loaded: Loaded) -> Chains:
    """Return which ranks wait for which, marking those at fault; none in a hang of communication."""
    blamed = ranks_of(finding for finding in _hangs(loaded) if finding.class_ != "hang.comm")
    return chain_info(loaded.waiting, sorted(blamed))


def _chains(loaded: Loaded, link: Link) -> Any:
    chains = chains_of(loaded)
    if not chains.boxes:
        return message("No rank has waited for long.")
    more = f" {chains.left_out} more, further away, are not shown." if chains.left_out else ""
    note = (
        f"Each waits for what its arrow points to; those that wait for the same thing are drawn as one.{more}"
    )
    return [graph("chain-figure", chain_figure(chains, link.theme)), html.P(note, className="note")]


def _standing(loaded: Loaded, link: Link) -> Any:
    standing = link.chosen(standing_info(loaded.waiting))
    if standing.is_empty():
        return message("No call of this selection was recorded.")
    apart = (pl.col("waits_in") != "") | pl.col("absent") | (pl.col("behind") > 0)
    shown = standing.filter(apart.any().over("group", "ranks"))
    shown = standing if shown.is_empty() else shown
    groups, drawn = (frame.select("group", "ranks").n_unique() for frame in (standing, shown))
    left_out = groups - min(drawn, MAX_GROUPS)
    more = f" The CSV has {counted(left_out, 'more group')}." if left_out else ""
    behind = "how many calls a rank is behind the leading rank of the group"
    whole = shown["rank"].n_unique() <= WHOLE
    note = f"Numbers: {f'a rank’s last call, and {behind}' if whole else behind}.{more}"
    figure = graph("standing-figure", standing_figure(shown, link.theme, ranks_of(_hangs(loaded))))
    return [figure, html.P(note, className="note"), csv_link(NAME, "standing", link)]


def _ranks(loaded: Loaded, link: Link) -> Any:
    ranks = link.chosen(_rank_table(loaded))
    if ranks.is_empty():
        return message("It is not known what the selected ranks did.")
    shown = ranks.head(MAX_RANKS)
    columns: dict[str, Iterable[Any]] = {
        "rank": shown["rank"].cast(pl.String),
        "host": shown["host"],
        "pid": [str(pid) if pid > 0 else "" for pid in shown["pid"]],
        "state": [html.Strong(state) if state == FAULT else state for state in shown["state"]],
        "waits in": shown["waits_in"],
        "since": shown["since"],
        "last call": shown["last_call"],
    }
    header = [name for name, cells in columns.items() if any(cell != "" for cell in cells)]
    rows = list(zip(*(columns[name] for name in header), strict=True))
    return [table(header, rows, len(header)), csv_link(NAME, "ranks", link)]


def _rank_table(loaded: Loaded) -> pl.DataFrame:
    return rank_info(loaded.waiting, _hangs(loaded), loaded.workers)


def _stacks(loaded: Loaded, link: Link) -> Any:
    """Return the stacks as one tree for each kind of thread."""
    threads = _threads(link.chosen(loaded.workers), loaded.run.path, latest=True)
    if not threads:
        return message(
            "No stack was recorded: `dpro record` records those of stalled ranks; dumps have none."
        )
    trees = merge_stacks(threads)
    drawn = [
        html.Details([html.Summary(kind), html.Pre("\n".join(lines_of(kind, tree)[1:]))], open=place == 0)
        for place, (kind, tree) in enumerate(trees.items())
    ]
    return [*drawn, csv_link(NAME, "stacks", link)]


def _stack_table(loaded: Loaded, link: Link) -> pl.DataFrame:
    return stack_info(link.chosen(loaded.workers), loaded.run.path)


VIEW = view(
    NAME,
    "Hang",
    needs.call_states,
    Panel("What hangs", "hang-verdict", _DOING, _verdict, wide=True),
    Panel("What happened", "hang-story", _DOING, _story, wide=True),
    Panel("Which ranks wait for which", "hang-chains", _DOING, _chains, wide=True),
    Panel("How far each rank got in each group", "hang-standing", _DOING, _standing, wide=True),
    Panel("Ranks", "hang-ranks", _DOING, _ranks, wide=True),
    Panel("Where they stood", "hang-stacks", "reading stacks", _stacks, wide=True),
    tables={
        "standing": lambda loaded, link: link.chosen(standing_info(loaded.waiting)),
        "ranks": lambda loaded, link: link.chosen(_rank_table(loaded)),
        "stacks": _stack_table,
        "story": _story_table,
    },
)


# A diagram of which ranks wait for which, from the waiting ranks to the cause. Ranks that wait for the same
# operation share a box, and so do operations, so that a job of a thousand ranks has few boxes. Arrows are the
# shortest paths to the cause.

MAX_BOXES = 60
_LISTED = 3  # operations of a box listed singly
_LABEL, _FACT = 24, 300  # characters of ranks in a label, and in facts
_COLUMN_CHARACTERS = 150  # of labels, over all columns
_LONGEST_LINE = 36  # characters per line of a label
_CHARACTER, _BETWEEN, _SIDES = 7.4, 14, 72  # pixels: width of a capital, gap between columns, both margins
_LONGEST_LABEL = 400  # characters: a group of a thousand ranks may be named after all of them
_BOX, _BOX_LINE = 62, 14  # pixels of a box, and of each further line of its label


class _Wrapper(TextWrapper):
    """Breaks lines after underscores, too, since names of process groups have no blanks."""

    wordsep_simple_re = re.compile(r"(\s+)|(?<=_)")


@dataclass(frozen=True)
class Box:
    """Ranks, or operations, that wait for the same operations or ranks.

    Attributes:
        kind: `rank` or `operation`.
        members: ranks, or indices into the list of operations.
        x: column: 0 for ends of chains, -1 for what waits for them, and so on to the left.
        y: position in its column, 0 in the middle.
    """

    kind: str
    members: tuple[int, ...]
    at_fault: bool
    x: int
    y: float
    label: str
    facts: tuple[str, ...]


@dataclass(frozen=True)
class Chains:
    """The diagram.

    Attributes:
        boxes: the boxes nearest to the cause.
        arrows: pairs of boxes: the first waits for the second.
        left_out: number of boxes not shown.
    """

    boxes: tuple[Box, ...]
    arrows: tuple[tuple[int, int], ...]
    left_out: int


def chain_info(case: Case, at_fault: Sequence[int]) -> Chains:
    """Lay out which ranks wait for which, up to `MAX_BOXES` boxes."""
    roots = case.roots
    away = lead_to(case.waits, roots)
    cyclic = {id(operation) for root in roots if root.kind == CYCLE for operation in root.operations}
    groups, ends = _grouped(case, away, at_fault)
    shown = groups[:MAX_BOXES]
    columns = [
        -away[nodes[0]] + (nodes[0][0] == OPERATION and id(case.waits.operations[nodes[0][1]]) in cyclic)
        for nodes in shown
    ]
    for box, nodes in enumerate(shown):
        # The others wait for a rank that arrived but does not finish, and so does its own call.
        if columns[box] == -1 and nodes[0][0] != OPERATION and nodes[0][1] in at_fault and ends[box]:
            (end, *_) = ends[box]
            columns[box], ends[box] = columns[end] + 1, set()
            ends[end] = ends[end] | {box}
    heights = _heights(columns, ends)
    boxes = tuple(
        _box(case, nodes, at_fault, x, y) for nodes, x, y in zip(shown, columns, heights, strict=True)
    )
    arrows = [(box, end) for box in range(len(boxes)) for end in sorted(ends[box]) if end < len(boxes)]
    return Chains(boxes, tuple(arrows), len(groups) - len(shown))


def _grouped(
    case: Case, away: Mapping[Node, int], at_fault: Sequence[int]
) -> tuple[list[list[Node]], list[set[int]]]:
    """Group nodes that wait for the same groups, those nearest to the ends of chains first.

    Returns:
        The groups, and for each the groups that it waits for. Each node at the end of a chain is its own
        group.
    """
    numbers: dict[Hashable, int] = {}
    groups: list[list[Node]] = []
    ends: list[set[int]] = []
    group_of: dict[Node, int] = {}
    for node, distance in away.items():
        near = {group_of[end] for end in case.waits.successors(node) if away.get(end, distance) < distance}
        blamed = node[0] != OPERATION and node[1] in at_fault
        key = (node[0], distance, blamed, frozenset(near)) if distance else node
        group = group_of[node] = numbers.setdefault(key, len(numbers))
        if group == len(groups):
            groups.append([])
            ends.append(near)
        groups[group].append(node)
    for node in (node for node, distance in away.items() if not distance):  # nodes of a cyclic wait
        ends[group_of[node]] |= {group_of[end] for end in case.waits.successors(node) if away.get(end) == 0}
    return groups, ends


def _heights(columns: Sequence[int], ends: Sequence[set[int]]) -> list[float]:
    """Return heights of boxes in their columns, as near as possible to the boxes that they wait for."""
    members: dict[int, list[int]] = defaultdict(list)
    for box, column in enumerate(columns):
        members[column].append(box)
    heights = [0.0] * len(columns)
    for column in sorted(members, reverse=True):
        beside = {
            box: float(np.mean([heights[end] for end in ends[box] if end < len(heights)] or [0.0]))
            for box in members[column]
        }
        for place, box in enumerate(sorted(members[column], key=lambda box: (-beside[box], box))):
            heights[box] = (len(members[column]) - 1) / 2 - place
    return heights


def _box(case: Case, nodes: Sequence[Node], at_fault: Sequence[int], x: int, y: float) -> Box:
    kind, numbers = nodes[0][0], tuple(sorted(number for _, number in nodes))
    if kind == OPERATION:
        operations = [case.waits.operations[number] for number in numbers]
        facts = [observe_attendance(operation).text for operation in operations[:_LISTED]]
        more = len(operations) - len(facts)
        label = _name_operations(operations)
        return Box(kind, numbers, False, x, y, label, (*facts, *([f"and {more} more"] if more > 0 else [])))
    blamed = numbers[0] in at_fault
    gone = [rank for rank in numbers if rank in case.deaths]
    said = ["at fault" if blamed else "waiting, not at fault"]
    said += [f"{ranks_in_words(gone)}: the process is gone"] if gone else []
    named = ranks_in_words(numbers)
    label = named if len(named) <= _LABEL else f"{len(numbers)} ranks"
    listed = shortened(named, _FACT)
    return Box(kind, numbers, blamed, x, y, label, (listed, *said))


def _name_operations(operations: Sequence[Operation]) -> str:
    """Name operations: one by its name, a sequence as `all_reduce #126–128, group`, others by the first."""
    first, numbers = operations[0], sorted(operation.sequence for operation in operations)
    if first.pair:
        name = f"message {first.pair[0]} → {first.pair[1]}"
    else:
        in_a_row = len({(operation.op, operation.key) for operation in operations}) == 1
        if in_a_row and numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) > 1:
            return f"{first.op} #{numbers[0]}–{numbers[-1]}, {first.group}"
        name = f"{first.op} #{first.sequence}, {first.group}"
    return name + (f" and {len(operations) - 1} more" if len(operations) > 1 else "")


def chain_figure(chains: Chains, theme: str) -> go.Figure:
    """Draw circles for ranks and squares for operations, with arrows to what each waits for."""
    figure = go.Figure()
    columns = {box.x for box in chains.boxes}
    room = min(max(_COLUMN_CHARACTERS // max(len(columns), 1), 12), _LONGEST_LINE)
    labels = {box: wrapped_label(box.label, room) for box in chains.boxes}
    lines = max((label.count("<br>") + 1 for label in labels.values()), default=1)
    looks = (  # kind, at fault, legend, symbol, colour
        ("rank", True, "at fault", "circle", "bad"),
        ("rank", False, "ranks that wait", "circle", "compute"),
        ("operation", False, "what they wait in", "square", "idle"),
    )
    for kind, blamed, title, symbol, ink in looks:
        of_kind = [box for box in chains.boxes if (box.kind, box.at_fault) == (kind, blamed)]
        if of_kind:
            figure.add_scatter(
                x=[box.x for box in of_kind], y=[box.y for box in of_kind], mode="markers", name=title,
                marker={"symbol": symbol, "size": 15, "color": colour(ink, theme)},
                text=[labels[box] for box in of_kind], cliponaxis=False,
                hovertext=["<br>".join(map(_wrapped, box.facts)) for box in of_kind],
                hovertemplate="%{hovertext}<extra></extra>",
            )  # fmt: skip
    for source, target in chains.arrows:
        begin, end = chains.boxes[source], chains.boxes[target]
        figure.add_annotation(
            ax=begin.x, ay=begin.y, axref="x", ayref="y", x=end.x, y=end.y, text="", showarrow=True,
            arrowhead=2, arrowwidth=1, arrowcolor=colour("soft", theme), standoff=10, startstandoff=10,
        )  # fmt: skip
    for box, label in labels.items():  # on top of the arrows
        figure.add_annotation(
            x=box.x, y=box.y, yshift=-9, yanchor="top", text=label, showarrow=False, borderpad=0,
            font={"size": 11}, bgcolor=colour("panel", theme), opacity=0.85,
        )  # fmt: skip
    tallest = max((sum(box.x == column for box in chains.boxes) for column in columns), default=1)
    styled(figure, theme, height=90 + (_BOX + _BOX_LINE * (lines - 1)) * max(tallest, 2))
    sides = (min(columns, default=0) - 0.6, max(columns, default=0) + 0.6)
    figure.update_xaxes(visible=False, range=list(sides)[::-1])  # the cause first
    figure.update_yaxes(visible=False, range=[-tallest / 2 - 0.3, tallest / 2 + 0.3])
    longest = max((len(line) for label in labels.values() for line in label.split("<br>")), default=0)
    least = round((sides[1] - sides[0]) * (_CHARACTER * longest + _BETWEEN)) + _SIDES
    return figure.update_layout(hovermode="closest", meta={"least_width": least})


def wrapped_label(text: str, width: int) -> str:
    """Break a label into lines of `width`, at blanks and underscores; a very long one loses its middle."""
    lines = _Wrapper(width, break_on_hyphens=False).wrap(shortened(text, _LONGEST_LABEL))
    return "<br>".join(map(plain, lines)) or " "


def _wrapped(text: str, width: int = 90) -> str:
    """Break text into lines of a tooltip."""
    return "<br>".join(plain(text[start : start + width]) for start in range(0, len(text), width))
