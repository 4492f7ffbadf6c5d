"""Observations of detectors: figures, and one sentence made of them.

Takes a kind, a sentence with the names of its figures, and the figures; returns an `Observation`. Programs
read `values`, only people read the sentence. The last part of a value's name is its unit, which determines
how the sentence shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from dpro.documents import DocumentPart
from dpro.units import format_bytes, format_duration, time_in_words
from dpro.words import ranks_in_words

Value = float | int | str | Sequence[int]


@dataclass(frozen=True)
class Observation:
    """Something that was observed.

    Attributes:
        kind: kind of observation, for programs; several detectors may share it, with their own sentences.
        text: the sentence.
        values: the figures and names in it. Units are in the names: `..._ns`, `..._bytes`, `..._share`;
            `..._at_ns` is a time, and `ranks` and `..._ranks` are lists of ranks.
    """

    kind: str
    text: str
    values: Mapping[str, Value] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Hash kind and text: `values` cannot be hashed."""
        return hash((self.kind, self.text))

    def then(self, sentence: str, **values: Value) -> Observation:
        """Return the observation with more text in its sentence, and the values of that text."""
        return Observation(self.kind, self.text + in_words(sentence, values), {**self.values, **values})


def observe(kind: str, sentence: str, /, **values: Value) -> Observation:
    """Make an observation.

    Args:
        sentence: with the names of values in braces: `rank {rank} waits {waited_ns}`; `{ratio:.2f}` where the
            name of a value has no unit.

    Raises:
        KeyError: a value of the sentence is missing.
    """
    return Observation(kind, in_words(sentence, values), values)


def observe_replay(
    changed: str, changed_ns: float, step_ns: float, takes: str = "the step takes"
) -> Observation:
    """Make the observation of a replay: the step under a change, and without it.

    Args:
        changed: the change, in words: `rank 1 as fast as its peers`.
        takes: the steps in question, with their verb.
    """
    sentence = f"replayed with {{changed}}, {takes} {{changed_ns}} instead of {{step_ns}}"
    return observe("step-without-it", sentence, changed=changed, changed_ns=changed_ns, step_ns=step_ns)


def name_range(least_ns: float, most_ns: float) -> str:
    """Return a fragment of a sentence: `{least_ns} to {most_ns}`, or one of them if both read the same."""
    is_one = format_duration(least_ns) == format_duration(most_ns)
    return "{least_ns}" if is_one else "{least_ns} to {most_ns}"


def in_words(sentence: str, values: Mapping[str, Value]) -> str:
    """Return a sentence with its values, each formatted by its unit."""
    return _FORMATTER.vformat(sentence, (), values)


class _ByUnit(Formatter):
    """Formatter of values by the unit at the end of their names, unless the sentence has a format."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return (field_name, kwargs[field_name]), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        name, shown = value
        if format_spec:
            return format(shown, format_spec)
        return next((show(shown) for end, show in _SHOWN_AS if name.endswith(end)), str(shown))


_SHOWN_AS = (
    ("at_ns", time_in_words),
    ("_ns", format_duration),
    ("_bytes", format_bytes),
    ("share", "{:.0%}".format),
    ("ranks", ranks_in_words),
)
_FORMATTER = _ByUnit()


class ObservationDocument(DocumentPart, frozen=True):
    """The figures behind one line of evidence.

    Attributes:
        kind: what was observed; several detectors may share it, with their own lines.
        values: the figures and names in the line, with units in their names: `longer_ns`, `written_bytes`,
            `busy_share`; null where a figure is not finite.
    """

    kind: str
    values: dict[str, float | int | str | list[int] | None]


def observation_documents(observations: Iterable[Observation]) -> list[ObservationDocument]:
    """Return the documents of observations."""
    return [
        ObservationDocument(one.kind, {name: _plain(value) for name, value in one.values.items()})
        for one in observations
    ]


def observations_of(
    sentences: Sequence[str], documents: Sequence[ObservationDocument]
) -> tuple[Observation, ...]:
    """Return observations from sentences and documents; without figures in older logs."""
    if len(documents) != len(sentences):
        return tuple(Observation("", text) for text in sentences)
    return tuple(
        Observation(
            one.kind,
            text,
            {name: math.nan if value is None else value for name, value in one.values.items()},
        )
        for text, one in zip(sentences, documents, strict=True)
    )


def _plain(value: Value) -> float | int | str | list[int] | None:
    if isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [int(one) for one in value]
