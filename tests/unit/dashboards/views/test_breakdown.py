"""Figures of the breakdown."""

from __future__ import annotations

import polars as pl
import pytest

from dpro.dashboards.theme import THEMES, ink_on, least_width
from dpro.dashboards.views.breakdown import PARTS, part_figure, with_legend


@pytest.mark.parametrize("theme", THEMES)
def test_values_inside_bars_have_the_ink_with_most_contrast(theme):
    parts = pl.DataFrame({"rank": [0], "duration_ms": [float(len(PARTS))]} | {name: [1.0] for name in PARTS})
    figure = part_figure(parts, "rank", theme)
    inks = [ink_on(name.removesuffix("_ms"), theme) for name in PARTS]
    assert [bar.insidetextfont.color for bar in figure.data] == inks
    assert not least_width(figure)  # it shrinks with the page, which has the legend beside it
    assert least_width(with_legend(figure)) > 500  # inside, the legend leaves room for the bars
