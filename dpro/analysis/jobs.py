"""Short names of jobs by the differences between their commands, for legends and tables.

Takes commands and numbers of ranks; returns a short name for each job. The launcher (`torchrun` and its
options) is left out unless nothing else differs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import NamedTuple

from dpro.words import counted, shortened

LONGEST = 60  # characters of a command
Job = tuple[str, int]  # command, number of ranks


class _Parts(NamedTuple):
    """A command: launcher, name of the script, and arguments, an option with its value as one argument."""

    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]


def job_names(jobs: Iterable[Job]) -> dict[Job, str]:
    """Name each job by its script, the arguments that other jobs of that script lack, and its ranks."""
    distinct = list(dict.fromkeys(jobs))
    parts = {command: _parts(command) for command, _ in distinct}
    names = {job: _name(parts[job[0]], list(parts.values()), job[1]) for job in distinct}
    for job, name in names.items():
        same = [parts[other[0]] for other, called in names.items() if called == name and other[1] == job[1]]
        if len(same) > 1:
            present = _apart(parts[job[0]].launcher, [command_parts.launcher for command_parts in same])
            names[job] = ", ".join(filter(None, [shortened(present, LONGEST), name]))
    return names


def difference_in_words(a: str, b: str) -> str:
    """Describe how the commands of jobs A and B differ; empty if they do not, or if one is unknown."""
    if not a or not b or a == b:
        return ""
    of_a, of_b = _parts(a), _parts(b)
    units = [(_all_of(parts) if of_a.script != of_b.script else parts.arguments) for parts in (of_a, of_b)]
    only_a, only_b = (_apart(of_one, units) for of_one in units)
    only_a, only_b = (text and f"`{shortened(text, LONGEST)}`" for text in (only_a, only_b))
    if only_a and only_b:
        return f"A has {only_a}, B has {only_b}"
    return f"A also has {only_a}" if only_a else f"B also has {only_b}" if only_b else ""


def _all_of(parts: _Parts) -> tuple[str, ...]:
    return (parts.script, *parts.arguments)


def _parts(command: str) -> _Parts:
    try:
        words = shlex.split(command)
    except ValueError:  # an unclosed quotation mark
        words = command.split()
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), 0)
    units: list[str] = []
    for word in words[script + 1 :]:
        is_value = units and units[-1].startswith("-") and " " not in units[-1] and not word.startswith("-")
        units = [*units[:-1], f"{units[-1]} {word}"] if is_value else [*units, word]
    name = PurePath(words[script]).name if words else ""
    return _Parts(tuple(words[:script]), name, tuple(units))


def _name(present: _Parts, all_parts: Sequence[_Parts], ranks: int) -> str:
    of_script = [others.arguments for others in all_parts if others.script == present.script]
    arguments = _apart(present.arguments, of_script) if len(of_script) > 1 else " ".join(present.arguments)
    command = shortened(f"{present.script} {arguments}".strip(), LONGEST) or "traces"
    return f"{command}, {counted(ranks, 'rank')}"


def _apart(units: Sequence[str], of_all: Sequence[Sequence[str]]) -> str:
    """Join the units that are missing from at least one of the sequences."""
    return " ".join(unit for unit in units if not all(unit in others for others in of_all))
