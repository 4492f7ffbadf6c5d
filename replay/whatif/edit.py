"""What every edit is, and how it declares itself: its keys, and all that help and documentation say of it.

In: classes of edits, and text. Out: the keys they take, instances made from text, text made from instances.
Which edits there are is listed in `dpro.replay.whatif.registry`.

A new edit is a frozen dataclass that derives from `Edit`: class attributes say what it is, fields made with
`key` are what a user may give, and `apply` makes the changed graph. A field that is itself a dataclass of
keys, such as a `NodeSelection`, adds its keys.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import polars as pl

from dpro.errors import UsageError
from dpro.replay.graph import Graph
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import nearest
from dpro.words import shortened

# What it takes to make a change, the least first, and what each is called.
EFFORTS = {
    "flag": "a setting",
    "line": "a line of code",
    "code": "new code",
    "money": "other hardware",
    "none": "cannot be done",
}
MAX_NUMBER = (1 << 62) - 1  # of what is counted or numbered: columns have 64 bits
SHOWN = 60  # characters of a value that is none
MAX_TIMES = 1e6  # beyond that times leave the range of int64 nanoseconds


class RankChange(Protocol):
    """What changes a graph, of all ranks or of one."""

    def apply(self, graph: Graph, /) -> Graph:
        """The changed graph."""


class Edit(ABC):
    """One change to a job.

    `str(edit)` is what `--edit` accepts to make it again.

    Attributes:
        name: what `--edit` calls it.
        summary: what it does, a few words without a full stop.
        example: as `--edit` accepts it, all keys in the order of their declaration.
        needs: what a run must hold to answer it.
        assumes: what its prediction takes for granted; goes on from "assumes that".
        source: where its formula is from.
        doubt: share of the predicted gain that rests on what the edit assumes; widens the interval.
        is_advice: whether it can be done to a job as it is; if not, it says what a part of the job or of the
            machine is worth, or how much there is to gain at most.
        proof: which jobs were really changed so, and recorded before and after (docs/accuracy.md); empty
            where there are none: the edit is unproven.
        effort: what it takes to make the change, one of `EFFORTS`.
        training: what it changes in the training itself, so that a sample may teach more or less: that is
            not predicted. Empty where nothing changes.
        memory: whether it takes or frees memory of a step, so that one is tried with the other.
        of_operations: whether all it changes are whole operations, forward and backward of micro-batches.
        acts_on: what it looks at and changes: only transfers, each rank by itself, some ranks beside their
            peers, or the whole job; all but the last can be had of condensed ranks.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    example: ClassVar[str]
    needs: ClassVar[str]
    assumes: ClassVar[str]
    source: ClassVar[str]
    doubt: float
    is_advice: ClassVar[bool] = True
    proof: ClassVar[str] = ""
    effort: ClassVar[str]
    training: ClassVar[str] = ""
    memory: ClassVar[Literal["", "takes", "frees"]] = ""
    of_operations: ClassVar[bool] = False
    acts_on: ClassVar[Literal["transfers", "ranks", "peers", "job"]] = "job"

    def __post_init__(self) -> None:
        """Refuse values outside what the keys allow."""
        check(self, self.name)

    def __str__(self) -> str:
        """As `--edit` accepts it."""
        given = text_of(self)
        return f"{self.name}:{given}" if given else self.name

    @abstractmethod
    def apply(self, graph: Graph) -> Graph:
        """The graph of the changed job.

        Raises:
            Unanswerable: the run lacks what the edit needs; the message says what.
        """

    @classmethod
    @abstractmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Those worth trying on a run, which its own ranks, modules, sizes and operations decide.

        Raises:
            Unanswerable: the run lacks what the edit needs; the message says what.
        """

    @abstractmethod
    def bound(self, facts: RunFacts) -> float:
        """The most that it can gain by a replay, ns of the mean step for a batch of the recorded size."""

    def bound_with(self, other: Edit, facts: RunFacts) -> float:
        """The most that it gains together with another edit, where one thing bounds both; else infinite."""
        return math.inf

    def bound_on_top(self, before: RunFacts, after: RunFacts) -> float:
        """As `bound`, on top of another edit, by less work where there is a way."""
        return self.bound(after)

    def samples(self, graph: Graph) -> float:
        """How many times as many samples a step of the changed job works on."""
        return 1.0

    def scope(self) -> str:
        """What it looks at and changes, as `acts_on`."""
        return self.acts_on

    def beside_peers(self, graph: Graph, work: pl.DataFrame) -> RankChange:
        """What it changes, once it is known how long all ranks work; of edits that compare ranks.

        Args:
            work: as `dpro.replay.peers.phase_work` returns it.
        """
        return self

    def ranks_changed(self, graph: Graph) -> list[int]:
        """The ranks in which it may change something, where it changes each by itself."""
        return graph.ranks

    def on_operations(self) -> bool:
        """Whether it is for the whole operations of a job that has both them and what they consist of."""
        return self.of_operations

    def is_proven(self, graph: Graph) -> bool:
        """Whether a pair of recordings of jobs like that of the graph has shown what such a change does."""
        return bool(self.proof)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What the edit found in the graph that it is applied to, a line each."""
        return ()

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Other graphs that the changed job may be, at both ends of what the edit leaves open."""
        return ()

    def limit(self, graph: Graph) -> Graph | None:
        """A graph that the changed job cannot be faster than; None where none is known."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """What is changed, in a few words."""

    @abstractmethod
    def how(self) -> str:
        """How to do it for real in PyTorch."""


@dataclass(frozen=True)
class Key:
    """One thing that a user may give: `name=value`.

    Attributes:
        name: of the key.
        type: int, float, str, or Path of a file or folder that is read.
        help: one line.
        default: what it is without; `MISSING` where it must be given, None or "" where it means nothing.
        least, most: the range of a number, ends included.
        choices: what a word may be; any where empty.
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
        """The value of a text.

        Raises:
            UsageError: it is no such value.
        """
        try:
            return self.type(text)
        except ValueError as error:
            what = "a whole number" if self.type is int else "a number"
            shown = shortened(repr(text), SHOWN)
            raise UsageError(f"{label}: {self.name} must be {what}, not {shown}") from error

    def check(self, value: Any, label: str) -> None:
        """Refuse a value out of range (NaN is), or a word that is not among the choices.

        Args:
            value: as `read` returns it.
        """
        if value is None or value == "":
            return
        if self.choices and value not in self.choices:
            near, known = nearest(value, self.choices), ", ".join(self.choices)
            raise UsageError(f"{label}: no {self.name} {value!r}{near}; there are {known}")
        if self.type not in (int, float):
            return
        widest = MAX_NUMBER if self.type is int else MAX_TIMES
        least = -widest if self.least is None else self.least
        most = widest if self.most is None else self.most
        if not least <= value <= most:
            shown = shortened(f"{value:,}" if self.type is int else f"{value:g}", SHOWN)
            is_count = self.type is int and self.most is None and value < least
            bounds = f"{least:,g} or more" if is_count else f"from {least:,g} to {most:,g}"
            raise UsageError(f"{label}: {self.name} must be {bounds}, not {shown}")


def key(
    help: str,
    default: Any = MISSING,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field of an edit that a user may give, as `Key` has it; its type is the field's.

    Args:
        default: what it is without; must be given where there is none.
        choices: what a word may be; any where empty.
    """
    declared = {"help": help, "least": least, "most": most, "choices": choices}
    return dataclasses.field(default=default, metadata={"key": declared})


@cache
def _declared(cls: type) -> tuple[tuple[str, Any], ...]:
    """Of a dataclass, each field that is a key with its `Key`, each that holds keys with its class."""
    hints = typing.get_type_hints(cls)
    found: list[tuple[str, Any]] = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found.append((field.name, hint))
        elif "key" in field.metadata:
            optional = isinstance(hint, types.UnionType)
            plain = next(t for t in typing.get_args(hint) if t is not type(None)) if optional else hint
            found.append((field.name, Key(field.name, plain, default=field.default, **field.metadata["key"])))
    return tuple(found)


@cache
def keys_of(cls: type) -> dict[str, Key]:
    """The keys that a class takes, by name, in the order of their declaration."""
    keys: dict[str, Key] = {}
    for name, declared in _declared(cls):
        keys |= {name: declared} if isinstance(declared, Key) else keys_of(declared)
    return keys


def make(cls: type, values: dict[str, str], label: str) -> Any:
    """An instance of a class with keys from the text of their values.

    Args:
        values: texts by key.

    Raises:
        UsageError: a key that must be given is not, or a value is not what it should be.
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
    """Refuse values of a thing's own keys that they do not allow."""
    for name, declared in _declared(thing.__class__):
        if isinstance(declared, Key):
            declared.check(getattr(thing, name), label)


def with_paths(thing: Any, place: Callable[[Path], Path]) -> Any:
    """The same with other files and folders.

    Args:
        place: from each path that its keys name to the one that is read instead; may refuse.
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
    """What was given of its keys as `key=value`, comma-separated."""
    parts = []
    for name, declared in _declared(thing.__class__):
        value = getattr(thing, name)
        if not isinstance(declared, Key):
            parts.append(text_of(value))
        elif value is not None and value != "":
            parts.append(f"{name}={_quoted(number(value) if declared.type is float else value)}")
    return ",".join(filter(None, parts))


def number(value: float) -> str:
    """A number as `--edit` accepts it, with all its digits and no more."""
    return repr(float(value)).removesuffix(".0")


def _quoted(value: str | int | Path) -> str:
    """A value as `--edit` reads it: in quotes where it holds what ends a value."""
    text = str(value).replace('"', "?")
    return f'"{text}"' if any(mark in text for mark in ", =") else text
