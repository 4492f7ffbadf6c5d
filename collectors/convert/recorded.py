"""The processes that a launch recorded.

In: the folder that a launch wrote to. Out: one `RecordedProcess` per folder in it whose facts can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpro.collectors.launch.recording import Launch
from dpro.words import from_json

_KINDS: dict[str, type] = dict.fromkeys(("rank", "started_ns", "world_size", "local_rank", "pid"), int)
_KINDS |= {"start_ticks": int, "image": int}
_TEXTS = ("host", "clock", "pid_namespace", "gpu_uuid", "gpu_name", "gpu_pci")
_KINDS |= dict.fromkeys(_TEXTS, str) | {"versions": dict, "environment": dict}
# What older recorders left out.
_FACTS: dict[str, Any] = {"world_size": 0, "local_rank": -1, "pid": -1, "start_ticks": -1, "image": 0}
_FACTS |= {"versions": {}, "environment": {}}
_FACTS |= dict.fromkeys(_TEXTS, "")


@dataclass(frozen=True)
class RecordedProcess:
    """One recorded process of the job: its folder and what it said about itself."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def rank(self) -> int:
        """Global rank."""
        return int(self.facts["rank"])

    @property
    def part(self) -> str:
        """Beginning of the names of its parts; pid and image distinguish attempts of a restarted rank."""
        image = self.facts.get("image", 0)
        return f"rank{self.rank:05d}-{self.facts['pid']}{f'_{image}' * (image > 0)}"


def processes(launch: Launch) -> list[RecordedProcess]:
    """The processes that recorded, by rank and then by start."""
    found = []
    for path in launch.raw.glob("*/facts.json"):
        with suppress(ValueError):
            found.append(RecordedProcess(path.parent, process_facts(path.parent)))
    return sorted(found, key=lambda process: (process.rank, process.facts["started_ns"]))


def unreadable(launch: Launch) -> list[str]:
    """The folders of processes whose facts are damaged, as after a power failure."""
    known = {process.folder for process in processes(launch)}
    return sorted(path.parent.name for path in launch.raw.glob("*/facts.json") if path.parent not in known)


def process_facts(folder: Path) -> dict[str, Any]:
    """What a process of the job said about itself.

    Raises:
        ValueError: the file is damaged, or no process wrote it: names of files are made of what it says.
    """
    path = folder / "facts.json"
    try:
        facts: dict[str, Any] = {**_FACTS, **from_json(path.read_text(encoding="utf-8"))}
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{path}: is not what a process writes") from error
    if any(type(facts.get(name)) is not kind for name, kind in _KINDS.items()):
        raise ValueError(f"{path}: is not what a process writes")
    return facts
