"""Text on the colours of the palette can be read."""

from __future__ import annotations

import pytest

from dpro.analysis.mean_step import PARTS
from dpro.dashboards.theme import THEMES, colour, ink_on


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
