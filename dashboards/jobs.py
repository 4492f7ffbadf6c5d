"""Names of jobs by what differs between their commands, for legends and tables.

In: commands and numbers of ranks. Out: a short name for each. What starts a script (`torchrun`, its options)
is left out unless nothing else differs.
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
    """A command: what starts the script, its name, and its arguments, an option with its value as one."""

    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]


def job_names(jobs: Iterable[Job]) -> dict[Job, str]:
    """Name each job: its script, those arguments that others of the same script lack, its ranks."""
    distinct = list(dict.fromkeys(jobs))
    parts = {command: _parts(command) for command, _ in distinct}
    names = {job: _name(parts[job[0]], list(parts.values()), job[1]) for job in distinct}
    for job, name in names.items():
        same = [parts[other[0]] for other, called in names.items() if called == name and other[1] == job[1]]
        if len(same) > 1:
            present = _apart(parts[job[0]].launcher, [command_parts.launcher for command_parts in same])
            names[job] = ", ".join(filter(None, [shortened(present, LONGEST), name]))
    return names


def difference_in_words(here: Job, there: Job) -> str:
    """What two jobs differ by; empty where they are the same."""
    said = [] if here[1] == there[1] else [f"{counted(here[1], 'rank')} against {there[1]}"]
    if here[0] != there[0] and here[0] and there[0]:
        one, other = _parts(here[0]), _parts(there[0])
        pairs = ((_all_of(one), _all_of(other)), (_all_of(other), _all_of(one)))
        if one.script == other.script:
            pairs = ((one.arguments, other.arguments), (other.arguments, one.arguments))
        present, absent = (_apart(units, [units, others]) for units, others in pairs)
        present, absent = (text and f"`{shortened(text, LONGEST)}`" for text in (present, absent))
        if present and absent:
            said.append(f"{present} against {absent}")
        elif present or absent:
            said.append(f"with {present}" if present else f"without {absent}")
    return "; ".join(said)


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
    """Those units that not all have."""
    return " ".join(unit for unit in units if not all(unit in others for others in of_all))
