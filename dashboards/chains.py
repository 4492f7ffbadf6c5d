"""A diagram of which ranks wait for which: ranks and operations, from those that wait to the cause.

In: the graph of waiting. Out: boxes and arrows, and a figure of them. Ranks that wait for the same operation
share a box, and so do operations, so that a job of a thousand ranks has few boxes. Arrows are the shortest
paths to the cause.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import TextWrapper

import numpy as np
import plotly.graph_objects as go

from dpro.dashboards.names import plain
from dpro.dashboards.theme import colour, styled
from dpro.detect.hang.case import Case
from dpro.detect.hang.evidence import attendance
from dpro.detect.hang.operations import Operation
from dpro.detect.hang.waits import CYCLE, OPERATION, Node, lead_to
from dpro.words import ranks_in_words, shortened

MAX_BOXES = 60
_LISTED = 3  # operations of a box that are listed one by one
_LABEL, _FACT = 24, 300  # characters of ranks in a label, and in facts
_COLUMN_CHARACTERS = 150  # of a label, in all columns together
_LONGEST_LINE = 32  # characters of a label
_CHARACTER, _BETWEEN, _SIDES = 7.4, 14, 72  # pixels: of a capital, between columns, of both margins
_LONGEST_LABEL = 400  # characters: a group of a thousand ranks may be named by all of them
_ROW, _LINE = 62, 14  # pixels of a box, of each further line of its label


class _Wrapper(TextWrapper):
    """Breaks lines after underscores, too: names of process groups have no blanks."""

    wordsep_simple_re = re.compile(r"(\s+)|(?<=_)")


@dataclass(frozen=True)
class Box:
    """Ranks, or operations, that wait for the same operations or ranks.

    Attributes:
        kind: `rank` or `operation`.
        members: ranks, or indices into the list of operations.
        at_fault: whether a finding names these ranks.
        x: column, 0 for the ends of chains, -1 for what waits for those, and so on to the left.
        y: position in its column, 0 in the middle.
        label: short text.
        facts: lines of the tooltip.
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
        boxes: those nearest to the cause.
        arrows: pairs of boxes: the first waits for the second.
        left_out: how many boxes there is no room for.
    """

    boxes: tuple[Box, ...]
    arrows: tuple[tuple[int, int], ...]
    left_out: int


def chain_info(case: Case, at_fault: Sequence[int]) -> Chains:
    """Lay out which ranks wait for which.

    Args:
        case: the run's unfinished calls and their graph of waiting.
    """
    roots = case.roots
    away = lead_to(case.waits, roots)
    cyclic = {id(operation) for root in roots if root.kind == CYCLE for operation in root.operations}
    groups, ends = _grouped(case, away, at_fault)
    shown = groups[:MAX_BOXES]
    columns = [
        -away[nodes[0]] + (nodes[0][0] == OPERATION and _operation(case, nodes[0]) in cyclic)
        for nodes in shown
    ]
    heights = _heights(columns, ends)
    boxes = tuple(
        _box(case, nodes, at_fault, x, y) for nodes, x, y in zip(shown, columns, heights, strict=True)
    )
    arrows = [(box, end) for box in range(len(boxes)) for end in sorted(ends[box]) if end < len(boxes)]
    return Chains(boxes, tuple(arrows), len(groups) - len(shown))


def _grouped(
    case: Case, away: Mapping[Node, int], at_fault: Sequence[int]
) -> tuple[list[list[Node]], list[set[int]]]:
    """Group nodes that wait for the same groups, nearest to the ends of chains first.

    Returns:
        The groups, and for each the groups that it waits for. Nodes at ends of chains are groups of one.
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
    for node in (node for node, distance in away.items() if not distance):  # the nodes of a cyclic wait
        ends[group_of[node]] |= {group_of[end] for end in case.waits.successors(node) if away.get(end) == 0}
    return groups, ends


def _operation(case: Case, node: Node) -> int:
    return id(case.waits.operations[node[1]])


def _heights(columns: Sequence[int], ends: Sequence[set[int]]) -> list[float]:
    """Compute the height of boxes in their columns: as near as possible to the boxes that they wait for."""
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
        facts = [attendance(operation) for operation in operations[:_LISTED]]
        more = len(operations) - len(facts)
        label = _short_name(operations[0]) + (f" + {len(operations) - 1}" if len(operations) > 1 else "")
        return Box(kind, numbers, False, x, y, label, (*facts, *([f"and {more} more"] if more > 0 else [])))
    blamed = numbers[0] in at_fault
    gone = [rank for rank in numbers if rank in case.deaths]
    said = ["at fault" if blamed else "waiting, at fault in nothing"]
    said += [f"{ranks_in_words(gone)}: the process is gone"] if gone else []
    named = ranks_in_words(numbers)
    label = named if len(named) <= _LABEL else f"{len(numbers)} ranks"
    listed = shortened(named, _FACT)
    return Box(kind, numbers, blamed, x, y, label, (listed, *said))


def _short_name(operation: Operation) -> str:
    if operation.pair:
        return f"message {operation.pair[0]} → {operation.pair[1]}"
    return f"{operation.op} #{operation.sequence}, {operation.group}"


def chain_figure(chains: Chains, theme: str) -> go.Figure:
    """Draw circles for ranks and squares for operations, with arrows to what each waits for.

    Args:
        chains: as from `chain_info`.
    """
    figure = go.Figure()
    columns = {box.x for box in chains.boxes}
    room = min(max(_COLUMN_CHARACTERS // max(len(columns), 1), 12), _LONGEST_LINE)
    labels = {box: wrapped_label(box.label, room) for box in chains.boxes}
    lines = max((label.count("<br>") + 1 for label in labels.values()), default=1)
    looks = (  # kind, at fault, what the legend says, symbol, colour
        ("rank", True, "at fault", "circle", "bad"),
        ("rank", False, "ranks that wait", "circle", "compute"),
        ("operation", False, "what they wait in", "square", "idle"),
    )
    for kind, blamed, title, symbol, ink in looks:
        mine = [box for box in chains.boxes if (box.kind, box.at_fault) == (kind, blamed)]
        if mine:
            figure.add_scatter(
                x=[box.x for box in mine], y=[box.y for box in mine], mode="markers", name=title,
                marker={"symbol": symbol, "size": 15, "color": colour(ink, theme)},
                text=[labels[box] for box in mine], cliponaxis=False,
                hovertext=["<br>".join(map(_wrapped, box.facts)) for box in mine],
                hovertemplate="%{hovertext}<extra></extra>",
            )  # fmt: skip
    for source, target in chains.arrows:
        begin, end = chains.boxes[source], chains.boxes[target]
        figure.add_annotation(
            ax=begin.x, ay=begin.y, axref="x", ayref="y", x=end.x, y=end.y, text="", showarrow=True,
            arrowhead=2, arrowwidth=1, arrowcolor=colour("soft", theme), standoff=10, startstandoff=10,
        )  # fmt: skip
    for box, label in labels.items():  # above the arrows
        figure.add_annotation(
            x=box.x, y=box.y, yshift=-9, yanchor="top", text=label, showarrow=False, borderpad=0,
            font={"size": 11}, bgcolor=colour("panel", theme), opacity=0.85,
        )  # fmt: skip
    tallest = max((sum(box.x == column for box in chains.boxes) for column in columns), default=1)
    styled(figure, theme, height=90 + (_ROW + _LINE * (lines - 1)) * max(tallest, 2))
    sides = (min(columns, default=0) - 0.6, max(columns, default=0) + 0.6)
    figure.update_xaxes(visible=False, range=list(sides))
    figure.update_yaxes(visible=False, range=[-tallest / 2 - 0.3, tallest / 2 + 0.3])
    longest = max((len(line) for label in labels.values() for line in label.split("<br>")), default=0)
    least = round((sides[1] - sides[0]) * (_CHARACTER * longest + _BETWEEN)) + _SIDES
    return figure.update_layout(hovermode="closest", meta={"least_width": least})


def wrapped_label(text: str, width: int) -> str:
    """Break a label into lines that fit, at blanks and underscores; a very long one loses its middle."""
    lines = _Wrapper(width, break_on_hyphens=False).wrap(shortened(text, _LONGEST_LABEL))
    return "<br>".join(map(plain, lines)) or " "


def _wrapped(text: str, width: int = 90) -> str:
    """Wrap long text for a tooltip."""
    return "<br>".join(plain(text[at : at + width]) for at in range(0, len(text), width))
