"""One palette for light and dark pages, and the names and the look of figures.

The hues are those of Okabe and Ito (Color Universal Design, 2008), which people with colour vision
deficiencies can distinguish; the dark theme uses lighter ones. The style sheet gets them as variables, so
that legends outside figures agree with those inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import plotly.graph_objects as go

from dpro.units import NS_PER_MS, NS_PER_US, duration_unit
from dpro.words import shortened

LIGHT, DARK = "light", "dark"
THEMES = (LIGHT, DARK)
FEW_TICKS = 20
MIN_DIVIDED = 0.7  # decades; from here on at least two of their ticks are visible
MAX_DIVIDED, FEW_POWERS = 1.5, 10  # decades with divisions; most powers of ten along an axis

_PALETTE: Mapping[str, tuple[str, str]] = {  # name -> colour on a light page, on a dark page
    "ink": ("#1c2430", "#dfe5ec"),
    "soft": ("#5b6675", "#a3afbd"),
    "line": ("#dde2e8", "#2c343e"),
    "page": ("#f7f8fa", "#12161b"),
    "panel": ("#ffffff", "#1a2027"),
    "accent": ("#0b62a4", "#6db9ee"),
    "good": ("#00795a", "#35c495"),
    "bad": ("#c04a00", "#f5894a"),
    "compute": ("#0072b2", "#4aa3dc"),
    "exposed_comm": ("#d55e00", "#f07c34"),
    "exposed_transfer": ("#d55e00", "#f07c34"),
    "exposed_wait": ("#e3a3c8", "#a8618c"),
    "unsplit_comm": ("#8c6239", "#b98a5e"),
    "overlapped_comm": ("#009e73", "#2ebd92"),
    "host_bound": ("#e69f00", "#eab23c"),
    "idle": ("#b9c0c9", "#828e9c"),
    "cpu": ("#56b4e9", "#2f7fb3"),
    "runtime": ("#8577b5", "#a99be0"),
    "copy": ("#7f8c00", "#b4c21f"),
    "wait": ("#e3a3c8", "#a8618c"),
}

SPAN_LOOKS: Mapping[str, tuple[str, str]] = {  # kind of a span or node -> name of its colour, its label
    "kernel": ("compute", "kernel"),
    "transfer": ("exposed_comm", "transfer of a collective"),
    "wait": ("wait", "wait in a collective"),
    "copy": ("copy", "copy"),
    "cpu": ("cpu", "operator"),
    "runtime": ("runtime", "GPU runtime call"),
    "host": ("host_bound", "range, Python"),
    "gap": ("idle", "CPU time outside any span"),
    "delay": ("idle", "late launch"),
}


def kind_words(kinds: Iterable[str]) -> list[str]:
    """Return the names of kinds of spans; a kind without an entry keeps its own."""
    return [SPAN_LOOKS.get(kind, ("", kind))[1] for kind in kinds]


_BLACK, _WHITE = "#000000", "#ffffff"
_ON_LIGHT = {  # best ink on a light page and on a dark page -> shade on a light page, one for each pair
    (_BLACK, _BLACK): "#000000",
    (_BLACK, _WHITE): "#000001",
    (_WHITE, _BLACK): "#fffffe",
    (_WHITE, _WHITE): "#fffffd",
}


def colour(what: str, theme: str) -> str:
    """Return a colour of the palette, as a hexadecimal number."""
    return _PALETTE[what][THEMES.index(theme)]


def ink_on(what: str, theme: str) -> str:
    """Return black or white, whichever has more contrast on a colour of the palette.

    Args:
        theme: light or dark; on a light page the result is a shade known to `dark_counterparts`.
    """
    light, dark = (_contrasting(colour(what, page)) for page in THEMES)
    return dark if theme == DARK else _ON_LIGHT[light, dark]


def ink_of(shade: str) -> str:
    """Return black or white for a colour that light and dark pages share.

    Args:
        shade: a hexadecimal number.
    """
    ink = _contrasting(shade)
    return _ON_LIGHT[ink, ink]


def _contrasting(shade: str) -> str:
    """Return black or white, by the contrast of the Web Content Accessibility Guidelines 2.2."""
    shades = [int(shade[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in shades]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    on_white, on_black = 1.05 / (luminance + 0.05), (luminance + 0.05) / 0.05
    return _WHITE if on_white > on_black else _BLACK


def css_name(part: str) -> str:
    """Return the style sheet's variable, without leading dashes, of a part such as `compute_ns`."""
    return part.removesuffix("_ns").replace("_", "-")


def series(number: int, theme: str) -> str:
    """Return the colour of the n-th series of a figure; colours repeat."""
    hues = ("compute", "exposed_comm", "overlapped_comm", "host_bound", "wait", "cpu", "runtime")
    return colour(hues[number % len(hues)], theme)


def css_variables() -> str:
    """Return the palette as a style sheet: `--compute`, `--ink`, … for each theme."""
    rules = []
    for theme in THEMES:
        values = "".join(f"--{name.replace('_', '-')}:{colour(name, theme)};" for name in _PALETTE)
        rules.append(f':root[data-theme="{theme}"]{{color-scheme:{theme};{values}}}')
    return ":root{--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}" + "".join(rules)


def time_unit(largest_ms: float) -> tuple[float, str]:
    """Choose the unit of an axis of times.

    Returns:
        The unit in ms and its name, us to h: the unit in which the largest value is written.
    """
    name, ns = duration_unit(max(largest_ms * NS_PER_MS, NS_PER_US))
    return ns / NS_PER_MS, name


def least_width(figure: go.Figure) -> int:
    """Return the width in pixels below which a figure scrolls instead of shrinking; 0 if it has none."""
    return int((figure.layout.meta or {}).get("least_width", 0))


def dark_counterparts() -> dict[str, str]:
    """Return the colour of a dark page for each colour of a light one."""
    return dict(_PALETTE.values()) | {shade: dark for (_, dark), shade in _ON_LIGHT.items()}


def whole_ticks(count: int) -> dict[str, Any]:
    """Return tick settings for an axis of whole numbers (ranks, steps): one per number if few."""
    return {"dtick": 1} if count <= FEW_TICKS else {}


def log_ticks(values: Iterable[float]) -> dict[str, Any]:
    """Return tick settings for a logarithmic axis: powers of ten; 2 and 5 if there is hardly one."""
    positive = [value for value in values if value > 0]
    decades = math.log10(max(positive) / min(positive)) if positive else 0.0
    if decades < MIN_DIVIDED:
        return {}
    if decades <= MAX_DIVIDED:
        return {"dtick": "D2"}
    return {"dtick": math.ceil(decades / FEW_POWERS), "minor": {"dtick": "D1", "ticks": "inside"}}


@lru_cache
def _look(theme: str) -> go.layout.Template:
    """Return the page's look of figures: transparent background, thin grid, system font."""
    ink, soft, line = (colour(what, theme) for what in ("ink", "soft", "line"))
    axis: dict[str, Any] = dict.fromkeys(("gridcolor", "linecolor", "zerolinecolor", "tickcolor"), line)
    axis |= {"automargin": True, "tickfont": {"color": soft, "size": 11}}
    axis["title"] = {"font": {"color": soft, "size": 12}}
    beside = axis | {"title": axis["title"] | {"standoff": 8}}  # keeps a title off the tick labels
    layout: dict[str, Any] = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": ink},
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"color": soft}},
        "hoverlabel": {"bgcolor": colour("panel", theme), "bordercolor": line, "font": {"color": ink}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": soft, "activecolor": colour("accent", theme)},
        "xaxis": beside,
        "yaxis": axis,
    }
    return go.layout.Template(layout=layout)


def styled(figure: go.Figure, theme: str, *, height: int) -> go.Figure:
    """Apply the page's look to a figure."""
    margin = {"l": 56, "r": 16, "t": 28, "b": 44}
    return figure.update_layout(template=_look(theme), height=height, margin=margin, uirevision="kept")


# Names from traces must be escaped. Plotly interprets a subset of HTML in its texts: a kernel called `<b>`
# would turn text bold, and a name could contain a link. Text of the page itself is never parsed as HTML.

LONGEST_NAME = 90  # characters of a name in a figure
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # first characters of a formula in spreadsheets
_SPACE = ("\t", "\r", "\n")  # leading blanks, which spreadsheets ignore


def plain(name: object) -> str:
    """Escape a name so that a figure shows it literally."""
    return escaped(shortened(str(name), LONGEST_NAME))


def escaped(text: str) -> str:
    """Escape a text of any length so that a figure shows it literally."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def in_cell(text: str) -> str:
    """Escape a name in a CSV file so that no spreadsheet evaluates it as a formula."""
    return f"'{text}" if text.lstrip().startswith(_FORMULA) or text.startswith(_SPACE) else text
