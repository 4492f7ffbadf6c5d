"""Declaration and text of changes: `heal:rank=1`, `network:bandwidth=2`, `scale:name="a, b",factor=0.5`.

Takes classes of changes and what the user typed; returns their keys, instances made from text, and text made
from instances, or raises one line that names the nearest existing key.

A change to a graph, a server or the recovery of a job is a frozen dataclass whose fields made with `key` are
what a user may give. A field that is itself a dataclass of keys, such as a `NodeSelection`, adds its keys.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path
from shlex import shlex
from typing import Any, Generic, TypeVar

from dpro.errors import UsageError
from dpro.words import shortened, suggest

MAX_NUMBER = (1 << 62) - 1  # of counts and numbers: columns have 64 bits
SHOWN = 60  # characters of an invalid value in an error
MAX_VALUE = 10**9  # of a key of a `KnownChange`
MAX_TIMES = 1e6  # larger factors take times out of the range of int64 nanoseconds

Changed = TypeVar("Changed")
Values = Mapping[str, Any]  # by key


@dataclass(frozen=True)
class Key:
    """One value that a user may give: `name=value`.

    Attributes:
        type: int, float, bool, str, or Path of a file or folder that is read.
        help: one line.
        default: value where not given; `MISSING` where it must be given, None or "" where it means nothing.
        least, most: the range of a number, ends included.
        choices: allowed words; any where empty.
    """

    name: str
    type: type
    help: str
    default: Any
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is MISSING

    def read(self, text: str, label: str) -> Any:
        """Convert a text to a value.

        Raises:
            UsageError: the text is not such a value.
        """
        if self.type is bool and text not in ("true", "false"):
            raise UsageError(
                f"{label}: {self.name} must be true or false, not {shortened(repr(text), SHOWN)}"
            )
        try:
            return text == "true" if self.type is bool else self.type(text)
        except ValueError as error:
            what = "a whole number" if self.type is int else "a number"
            shown = shortened(repr(text), SHOWN)
            raise UsageError(f"{label}: {self.name} must be {what}, not {shown}") from error

    def check(self, value: Any, label: str) -> None:
        """Raise if a value is out of range (NaN is), or a word is not among the choices.

        Args:
            value: as `read` returns it.
        """
        if value is None or value == "":
            return
        if self.choices and value not in self.choices:
            near, allowed = suggest(value, self.choices), ", ".join(self.choices)
            raise UsageError(f"{label}: no {self.name} {value!r}{near}; there are {allowed}")
        if self.type not in (int, float):
            return
        widest = MAX_NUMBER if self.type is int else MAX_TIMES
        least = -widest if self.least is None else self.least
        most = widest if self.most is None else self.most
        if not least <= value <= most:
            shown = shortened(f"{value:,}" if self.type is int else f"{value:g}", SHOWN)
            is_count = self.type is int and self.most is None and value < least
            bounds = f"{_plain(least)} or more" if is_count else f"from {_plain(least)} to {_plain(most)}"
            raise UsageError(f"{label}: {self.name} must be {bounds}, not {shown}")


def key(
    help: str,
    default: Any = MISSING,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a field of an edit that a user may give, as a `Key` of the field's type.

    Args:
        default: value where not given; the key is required without one.
        choices: allowed words; any where empty.
    """
    declared = {"help": help, "least": least, "most": most, "choices": choices}
    return dataclasses.field(default=default, metadata={"key": declared})


@cache
def _declared(cls: type) -> tuple[tuple[str, Any], ...]:
    """Return each field of a dataclass that is a key, with its `Key`, or has keys, with its class."""
    hints = typing.get_type_hints(cls)
    declared: list[tuple[str, Any]] = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            declared.append((field.name, hint))
        elif "key" in field.metadata:
            optional = isinstance(hint, types.UnionType)
            plain = next(t for t in typing.get_args(hint) if t is not type(None)) if optional else hint
            declared.append(
                (field.name, Key(field.name, plain, default=field.default, **field.metadata["key"]))
            )
    return tuple(declared)


@cache
def keys_of(cls: type) -> dict[str, Key]:
    """Return the keys of a class by name, in the order of their declaration."""
    keys: dict[str, Key] = {}
    for name, declared in _declared(cls):
        keys |= {name: declared} if isinstance(declared, Key) else keys_of(declared)
    return keys


def make(cls: type, values: dict[str, str], label: str) -> Any:
    """Make an instance of a class from the texts of its keys.

    Args:
        values: texts by key.

    Raises:
        UsageError: a required key is missing, or a value is invalid.
    """
    given: dict[str, Any] = {}
    for name, declared in _declared(cls):
        if not isinstance(declared, Key):
            given[name] = make(declared, values, label)
        elif name in values:
            given[name] = declared.read(values[name], label)
        elif declared.required:
            raise UsageError(f"{label} needs {name}=, {declared.help}")
    return cls(**given)


def check(thing: Any, label: str) -> None:
    """Raise if a value of an instance's own keys is not allowed."""
    for name, declared in _declared(thing.__class__):
        if isinstance(declared, Key):
            declared.check(getattr(thing, name), label)


def with_paths(thing: Any, place: Callable[[Path], Path]) -> Any:
    """Return a copy with other files and folders.

    Args:
        place: maps each path among its keys to the one that is read instead; may raise.
    """
    changed: dict[str, Any] = {}
    for name, declared in _declared(thing.__class__):
        value = getattr(thing, name)
        if not isinstance(declared, Key):
            changed[name] = with_paths(value, place)
        elif isinstance(value, Path):
            changed[name] = place(value)
    return dataclasses.replace(thing, **changed)


def text_of(thing: Any) -> str:
    """Return the given keys as `key=value`, comma-separated."""
    parts = []
    for name, declared in _declared(thing.__class__):
        value = getattr(thing, name)
        if not isinstance(declared, Key):
            parts.append(text_of(value))
        elif value is not None and value != "":
            parts.append(f"{name}={quoted(number(value) if declared.type is float else value)}")
    return ",".join(filter(None, parts))


def number(value: float) -> str:
    """Write a number as `--edit` accepts it, with exactly the digits that it needs."""
    return repr(float(value)).removesuffix(".0")


def _plain(bound: float) -> str:
    """Write a bound for people to read."""
    return f"{bound:,.0f}" if bound == round(bound) and abs(bound) < 1e16 else f"{bound:,g}"


def quoted(value: str | int | Path) -> str:
    """Return a value as `--edit` reads it: in quotes where it contains a separator."""
    text = str(value).replace('"', "?")
    return f'"{text}"' if any(mark in text for mark in ", =") else text


def count_key(name: str, help: str = "", least: int = 1, default: Any = MISSING) -> Key:
    """Return a key of a count."""
    return Key(name, int, help, default, least, MAX_VALUE)


def amount_key(name: str, help: str, default: Any = MISSING, most: float = MAX_VALUE) -> Key:
    """Return a key of a number that is not negative."""
    return Key(name, float, help, default, 0, most)


@dataclass(frozen=True)
class KnownChange(Generic[Changed]):
    """A kind of change to something other than a graph: a server, or the recovery of a job.

    Attributes:
        apply: makes the change.
        keys: of its values.
        example: in text.
        doc: description and assumptions.
        source: of the idea; empty without one.
    """

    apply: Callable[[Changed, Values], Changed]
    keys: Sequence[Key]
    example: str
    doc: str
    source: str = ""


def read_values(name: str, rest: str, keys: Sequence[Key], example: str) -> dict[str, Any]:
    """Return the values of all keys, with defaults for those not given.

    Args:
        rest: the text after the name.

    Raises:
        UsageError: a required key is missing, or a value is invalid.
    """
    given = values_of(name, rest, [key.name for key in keys], example)
    values: dict[str, Any] = {}
    for key in keys:
        if key.required and key.name not in given:
            raise UsageError(f"{name} needs {key.name}, as in {example}")
        values[key.name] = key.read(given[key.name], name) if key.name in given else key.default
        key.check(values[key.name], name)
    return values


def split_edit(text: str) -> tuple[str, str]:
    """Split an edit's text into its name and its keys with values."""
    name, _, rest = text.strip().partition(":")
    return name, rest


def values_of(name: str, rest: str, keys: Collection[str], example: str) -> dict[str, str]:
    """Return the values that an edit's text gives to its keys.

    Args:
        rest: the text after the name: `a=1,b="x, y"`; commas in quotes do not count.
        keys: allowed ones.

    Raises:
        UsageError: a key is unknown (with the nearest one), twice or without a value, or a quote is open.
    """
    values: dict[str, str] = {}
    lexer = shlex(rest, posix=True)
    lexer.whitespace, lexer.quotes, lexer.escape, lexer.commenters = ",", '"', "", ""
    lexer.whitespace_split = True
    try:
        items = list(lexer)
    except ValueError as error:
        raise UsageError(f"{name}: a quote is not closed in {rest!r}") from error
    for item in items:
        key, equals, value = item.partition("=")
        if key not in keys and values and (not equals or ":" in key):  # `hide-input` or `heal:rank=1`
            raise UsageError(f"{name}: {item.strip()!r} is no key=value; write another edit separately")
        if key not in keys:
            takes = f"it takes {', '.join(keys)}, as in {example}" if keys else "it takes none"
            raise UsageError(f"{name}: no key {key!r}{suggest(key, keys)}; {takes}")
        if key in values:
            raise UsageError(f"{name}: {key} is given twice")
        if not equals or not value:
            raise UsageError(f"{name}: {key} needs a value, as in {example}")
        values[key] = value
    return values
