"""Edits as text: `heal:rank=1`, `network:bandwidth=2`, `scale:name=aten::mm,factor=0.5`.

In: what the user typed. Out: an edit, or one line that names the nearest thing that exists.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from shlex import shlex

from dpro.errors import UsageError
from dpro.replay.whatif.comm import Network, NoCommunication
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.heal import Heal
from dpro.replay.whatif.host import NoLaunch
from dpro.replay.whatif.scale import HideInput, Scale
from dpro.replay.whatif.select import Selection

Values = dict[str, str]
SELECTION_KEYS = ("name", "within", "kind", "rank", "step", "stage", "dp")


def _selection(values: Values) -> Selection:
    text = {key: values.get(key, "") for key in ("name", "within", "kind")}
    rank, step, stage, dp = (_integer(values, key) for key in ("rank", "step", "stage", "dp"))
    return Selection(**text, rank=rank, step=step, stage=stage, dp=dp)


def _integer(values: Values, key: str) -> int | None:
    if key not in values:
        return None
    try:
        return int(values[key])
    except ValueError as error:
        raise UsageError(f"{key} must be a whole number, not {values[key]!r}") from error


def _number(values: Values, key: str, default: float) -> float:
    try:
        return float(values.get(key, default))
    except ValueError as error:
        raise UsageError(f"{key} must be a number, not {values[key]!r}") from error


def _heal(values: Values) -> Edit:
    rank = _integer(values, "rank")
    if rank is None:
        raise UsageError("heal needs a rank: heal:rank=1")
    return Heal(rank)


# name -> (keys it takes, how to make it, example)
EDITS: dict[str, tuple[tuple[str, ...], Callable[[Values], Edit], str]] = {
    "scale": (
        (*SELECTION_KEYS, "factor"),
        lambda values: Scale(_selection(values), _number(values, "factor", 0.5)),
        "scale:name=aten::mm,factor=0.5",
    ),
    "heal": (("rank",), _heal, "heal:rank=1"),
    "no-comm": ((), lambda values: NoCommunication(), "no-comm"),
    "network": (
        ("bandwidth",),
        lambda values: Network(_number(values, "bandwidth", 2.0)),
        "network:bandwidth=2",
    ),
    "no-launch": ((), lambda values: NoLaunch(), "no-launch"),
    "hide-input": ((), lambda values: HideInput(), "hide-input"),
}


def parse_edit(text: str) -> Edit:
    """Make an edit from its text.

    Raises:
        UsageError: no such edit or key (with the nearest one), or a value that is not what it should be.
    """
    name, _, rest = text.strip().partition(":")
    if name not in EDITS:
        raise UsageError(f"no edit {name!r}{_nearest(name, list(EDITS))}; there are {', '.join(EDITS)}")
    keys, make, example = EDITS[name]
    values: Values = {}
    for item in _items(rest, name):
        key, equals, value = item.partition("=")
        if key not in keys:
            takes = f"it takes {', '.join(keys)}, as in {example}" if keys else "it takes none"
            raise UsageError(f"{name}: no key {key!r}{_nearest(key, list(keys))}; {takes}")
        if key in values:
            raise UsageError(f"{name}: {key} is given twice")
        if not equals or not value:
            raise UsageError(f"{name}: {key} needs a value, as in {example}")
        values[key] = value
    return make(values)


def _items(text: str, name: str) -> list[str]:
    """`a=1,b="x, y"` at its commas; those in quotes do not count."""
    lexer = shlex(text, posix=True)
    lexer.whitespace, lexer.quotes, lexer.escape, lexer.commenters = ",", '"', "", ""
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError as error:
        raise UsageError(f"{name}: a quote is not closed in {text!r}") from error


def _nearest(word: str, known: list[str]) -> str:
    close = get_close_matches(word, known, n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else ""
