"""The order of ranks in views: by their numbers, or grouped by where they stand along an axis of parallelism.

In: the layout of a run, and the parameter `order` of a link. Out: a choice for the page, an order of ranks,
and in a figure a line between groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import plotly.graph_objects as go
from dash.development.base_component import Component

from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import choices
from dpro.dashboards.theme import colour
from dpro.replay.mesh import Mesh, named_axes, places_along

KEY, BY_NUMBER = "order", "rank"
_UNKNOWN = -1  # the place of a rank whose place is unknown: first


class RankOrder(NamedTuple):
    """An order of ranks.

    Attributes:
        axis: by which they are grouped; empty for none.
        places: of ranks along it.
    """

    axis: str = ""
    places: Mapping[int, int] = {}

    def place(self, rank: int) -> int:
        """Where a rank is along the axis; the same for all where there is none."""
        return self.places.get(rank, _UNKNOWN)

    def ordered(self, ranks: Iterable[int]) -> list[int]:
        """Ranks, group by group."""
        return sorted(ranks, key=lambda rank: (self.place(rank), rank))

    def label(self, rank: int) -> str:
        """A rank on an axis of a figure: `tp 1: 3`, or its number alone."""
        place = self.place(rank)
        return f"{self.axis} {place if place >= 0 else '?'}: {rank}" if self.axis else str(rank)


NUMBERED = RankOrder()


def orders_of(mesh: Mesh) -> dict[str, str]:
    """The axes by which ranks can be grouped, with what a page calls that."""
    return {axis: f"grouped by {axis}" for axis in named_axes(mesh)}


def order_choice(loaded: Loaded, link: Link) -> list[Component]:
    """The choice of an order, where the run has axes."""
    axes = orders_of(loaded.mesh)
    return [choices(link, KEY, {BY_NUMBER: "by rank", **axes}, BY_NUMBER)] if axes else []


def order_of(loaded: Loaded, link: Link) -> RankOrder:
    """The order that a link says; by number where it says none that the run has."""
    axis = link.options.get(KEY, BY_NUMBER)
    if axis == BY_NUMBER or axis not in named_axes(loaded.mesh):
        return NUMBERED
    return RankOrder(axis, places_along(loaded.mesh, axis))


def draw_groups(figure: go.Figure, ranks: list[int], order: RankOrder, theme: str, across: str = "y") -> None:
    """Draw a line between groups of ranks.

    Args:
        figure: a heatmap that has a row, a column, or both, for each rank.
        across: the axes of the figure that ranks are on: `x`, `y` or `xy`.
    """
    places = [order.place(rank) for rank in ranks]
    line: dict[str, Any] = {"color": colour("ink", theme), "width": 1}
    for number in range(1, len(ranks)):
        if places[number] != places[number - 1]:
            border = number - 0.5
            if "y" in across:
                figure.add_shape(type="line", xref="paper", x0=0, x1=1, y0=border, y1=border, line=line)
            if "x" in across:
                figure.add_shape(type="line", yref="paper", y0=0, y1=1, x0=border, x1=border, line=line)
