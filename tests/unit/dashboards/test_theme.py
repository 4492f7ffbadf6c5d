"""Text on the colours of the palette can be read."""

from __future__ import annotations

import pytest

from dpro.analysis.mean_step import PARTS
from dpro.dashboards.theme import DARK, LIGHT, THEMES, colour, dark_counterparts, ink_on, log_ticks


def _luminance(hexadecimal: str) -> float:
    shades = [int(hexadecimal[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in shades]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("part", PARTS)
def test_a_name_inside_the_bar_of_the_mean_step_has_contrast(part, theme):
    name = part.removesuffix("_ns")
    low, high = sorted(map(_luminance, (colour(name, theme), ink_on(name, theme))))
    assert (high + 0.05) / (low + 0.05) >= 4.5


@pytest.mark.parametrize(("name", "theme"), [("soft", LIGHT), ("soft", DARK), ("idle", DARK)])
@pytest.mark.parametrize("behind", ["panel", "page"])
def test_small_text_and_what_is_not_explained_stand_out_from_the_page(name, theme, behind):
    low, high = sorted(map(_luminance, (colour(name, theme), colour(behind, theme))))
    assert (high + 0.05) / (low + 0.05) >= 4.5


@pytest.mark.parametrize("part", PARTS)
def test_a_report_that_turns_dark_has_the_ink_of_the_dark_page(part):
    name = part.removesuffix("_ns")
    assert dark_counterparts()[ink_on(name, LIGHT)] == ink_on(name, DARK)


@pytest.mark.parametrize(
    ("values", "dtick"),
    [
        ([20, 90], None),
        ([], None),
        ([0, 50], None),
        ([20, 400], "D2"),
        ([20, 900], 1),
        ([1, 1e6], 1),
        ([1, 1e25], 3),
    ],
)
def test_an_axis_of_many_powers_of_ten_is_not_crowded(values, dtick):
    assert log_ticks(values).get("dtick") == dtick
