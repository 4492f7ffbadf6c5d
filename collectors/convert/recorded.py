"""The processes that a launch recorded, and which of them trained together.

Reads the folder that a launch wrote to; returns one `RecordedProcess` per folder in it whose facts can be
read, and groups them by attempt of the job and by worker group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpro.collectors.launch.recording import Launch
from dpro.words import from_json

_KINDS: dict[str, type] = dict.fromkeys(("rank", "started_ns", "world_size", "local_rank", "pid"), int)
_KINDS |= {"start_ticks": int, "image": int}
_TEXTS = (
    *("host", "clock", "pid_namespace", "gpu_uuid", "gpu_name", "gpu_pci"),
    *("actor", "actor_name", "actor_class", "role"),
)
_KINDS |= dict.fromkeys(_TEXTS, str) | {"versions": dict, "environment": dict}
# Defaults of facts that older recorders left out.
_FACTS: dict[str, Any] = {"world_size": 0, "local_rank": -1, "pid": -1, "start_ticks": -1, "image": 0}
_FACTS |= {"versions": {}, "environment": {}}
_FACTS |= dict.fromkeys(_TEXTS, "")


@dataclass(frozen=True)
class RecordedProcess:
    """A recorded process of the job: its folder, and the facts that it wrote about itself."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def rank(self) -> int:
        """Global rank."""
        return int(self.facts["rank"])

    @property
    def part(self) -> str:
        """Prefix of its part names; pid and image distinguish attempts of a restarted rank."""
        image = self.facts.get("image", 0)
        return f"rank{self.rank:05d}-{self.facts['pid']}{f'_{image}' * (image > 0)}"


def processes(launch: Launch) -> list[RecordedProcess]:
    """Return the processes that recorded, ordered by rank, then start."""
    recorded = []
    for path in launch.raw.glob("*/facts.json"):
        with suppress(ValueError):
            recorded.append(RecordedProcess(path.parent, process_facts(path.parent)))
    return sorted(recorded, key=lambda process: (process.rank, process.facts["started_ns"]))


def unreadable(launch: Launch) -> list[str]:
    """Return the folders of processes whose facts are damaged, as after a power failure."""
    readable = {process.folder for process in processes(launch)}
    return sorted(path.parent.name for path in launch.raw.glob("*/facts.json") if path.parent not in readable)


def process_facts(folder: Path) -> dict[str, Any]:
    """Read the facts that a process of the job wrote about itself.

    Raises:
        ValueError: the file is damaged, or was not written by a recorder. File names are built from its
            values.
    """
    path = folder / "facts.json"
    try:
        facts: dict[str, Any] = {**_FACTS, **from_json(path.read_text(encoding="utf-8"))}
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{path}: was not written by the recorder") from error
    if any(type(facts.get(name)) is not kind for name, kind in _KINDS.items()):
        raise ValueError(f"{path}: was not written by the recorder")
    return facts


# A restarted job is several trainings, one after the other.


def attempts(processes: Sequence[RecordedProcess]) -> list[list[RecordedProcess]]:
    """Group processes by attempt of the job; those of an attempt are ordered by rank.

    A new attempt begins with a process whose rank the attempt already has, whose world size differs, or whose
    torchrun has restarted it since (`--max-restarts`): each host counts its own restarts.
    """
    trainings: list[dict[int, RecordedProcess]] = []
    for process in sorted(processes, key=lambda process: int(process.facts["started_ns"])):
        if not trainings or _begins_again(process, trainings[-1]):
            trainings.append({})
        trainings[-1][process.rank] = process
    return [[attempt[rank] for rank in sorted(attempt)] for attempt in trainings]


def _begins_again(process: RecordedProcess, attempt: Mapping[int, RecordedProcess]) -> bool:
    """Return whether a process cannot have trained together with those of an attempt."""
    if process.rank in attempt:
        return True
    return any(
        member.facts["world_size"] != process.facts["world_size"]
        or (_launcher_fact(member, "launcher") == _launcher_fact(process, "launcher")
            and _launcher_fact(member, "attempt") != _launcher_fact(process, "attempt"))
        for member in attempt.values()
    )  # fmt: skip


def _launcher_fact(process: RecordedProcess, fact: str) -> str:
    """Return a fact of a process about its torchrun; empty where there was none."""
    return str(process.facts.get(fact, ""))


DRIVER = "driver"  # name of the processes that are not actors, where other processes are

# A Ray job may have several worker groups, each with ranks from 0.


def worker_groups(processes: Sequence[RecordedProcess]) -> dict[str, list[RecordedProcess]]:
    """Return the processes of each worker group, by its name, ordered by start of the first process.

    Actors are one group if they have the same class, the same name up to digits, and different ranks; an
    actor that trains alone is a group, also when it is restarted. All other processes are one group with an
    empty name, or `DRIVER` beside other groups.
    """
    members: dict[tuple[str, str, str], list[RecordedProcess]] = {}
    for process in sorted(processes, key=lambda process: int(process.facts["started_ns"])):
        kind, name, actor = (process.facts.get(f"actor{of}", "") for of in ("_class", "_name", ""))
        alone = actor if process.facts["world_size"] <= 1 else ""
        members.setdefault((kind, re.sub(r"[\W_]*\d+", "", name), alone), []).append(process)
    called = [_group_name(kind, name) for kind, name, _ in members]
    called = [role or DRIVER for role in called] if len(called) > 1 else called
    groups = {}
    for place, (role, group) in enumerate(zip(called, members.values(), strict=True)):
        numbered = f"{role}-{called[:place].count(role)}" if called.count(role) > 1 else role
        groups[numbered] = [replace(one, facts={**one.facts, "role": numbered}) for one in group]
    return groups


def of_training(processes: Sequence[RecordedProcess]) -> Sequence[RecordedProcess]:
    """Return the processes of the worker group that seems to train: of several, the one that records most."""

    def size(group: Sequence[RecordedProcess]) -> int:
        paths = [process.folder / "records.bin" for process in group]
        return max(path.stat().st_size if path.is_file() else 0 for path in paths)

    groups = worker_groups(processes)
    return processes if len(groups) <= 1 else max(groups.values(), key=size)


def _group_name(kind: str, name: str) -> str:
    """Name a group of actors; a name derived from the class is replaced by the class."""
    name = kind if not name or name.endswith(kind) else name
    return re.sub(r"^\.|[^\w.-]", "_", name)


# JSON files that processes wrote.


def saved(path: Path, otherwise: Any) -> Any:
    """Return the content of a JSON file, or a default where it is missing.

    Raises:
        ValueError: the file is damaged.
    """
    return from_json(path.read_text()) if path.is_file() else otherwise


def latest_lines(path: Path, key: Callable[[dict[str, Any]], tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Read the objects of a file with one per line; of lines with equal keys, the last.

    Args:
        key: a line for which it raises ValueError, LookupError or TypeError is skipped as damaged.
    """
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        with suppress(ValueError, LookupError, TypeError):
            row = from_json(line)
            rows[key(row)] = row
    return list(rows.values())


# Readers of PyTorch's files, passed in because collectors do not import `ingest`.


@dataclass(frozen=True)
class Readers:
    """Functions of `dpro.ingest` that read one file of one rank.

    Attributes:
        trace: `kineto.read_trace`, for a window.
        dump: `flight_recorder.read_dump`.
    """

    trace: Callable[..., Any]
    dump: Callable[..., Any]
