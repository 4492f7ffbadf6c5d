"""The processes that a launch recorded, and which of them trained together.

In: the folder that a launch wrote to. Out: one `RecordedProcess` per folder in it whose facts can be read,
and groups of them, one per attempt of the job.
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
    recorded = []
    for path in launch.raw.glob("*/facts.json"):
        with suppress(ValueError):
            recorded.append(RecordedProcess(path.parent, process_facts(path.parent)))
    return sorted(recorded, key=lambda process: (process.rank, process.facts["started_ns"]))


def unreadable(launch: Launch) -> list[str]:
    """The folders of processes whose facts are damaged, as after a power failure."""
    readable = {process.folder for process in processes(launch)}
    return sorted(path.parent.name for path in launch.raw.glob("*/facts.json") if path.parent not in readable)


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


# A job that is restarted is several trainings, one after the other.


def attempts(processes: Sequence[RecordedProcess]) -> list[list[RecordedProcess]]:
    """The processes of each attempt, by rank.

    A new attempt begins with a process whose rank the attempt has already, that knows of another number of
    ranks, or that its torchrun has started again since (`--max-restarts`): each host's counts for itself.
    """
    trainings: list[dict[int, RecordedProcess]] = []
    for process in sorted(processes, key=lambda process: int(process.facts["started_ns"])):
        if not trainings or _begins_anew(process, trainings[-1]):
            trainings.append({})
        trainings[-1][process.rank] = process
    return [[attempt[rank] for rank in sorted(attempt)] for attempt in trainings]


def _begins_anew(process: RecordedProcess, attempt: Mapping[int, RecordedProcess]) -> bool:
    """Whether a process cannot have trained together with those of an attempt."""
    if process.rank in attempt:
        return True
    return any(
        member.facts["world_size"] != process.facts["world_size"]
        or (_known(member, "launcher") == _known(process, "launcher")
            and _known(member, "attempt") != _known(process, "attempt"))
        for member in attempt.values()
    )  # fmt: skip


def _known(process: RecordedProcess, fact: str) -> str:
    """What a process said of its torchrun; empty where there was none."""
    return str(process.facts.get(fact, ""))


DRIVER = "driver"  # what processes are called that are no actors, where others are

# A job of Ray may have several worker groups, each with ranks from 0 on.


def worker_groups(processes: Sequence[RecordedProcess]) -> dict[str, list[RecordedProcess]]:
    """The processes of each worker group, by what it is called, the first to start first.

    Actors are of one group if they have the same class, the same name but for digits, and other ranks; one
    that trains alone is a group, also when it is started again. All other processes are one, called nothing.
    """
    members: dict[tuple[str, str, str], list[RecordedProcess]] = {}
    for process in sorted(processes, key=lambda process: int(process.facts["started_ns"])):
        kind, name, actor = (process.facts.get(f"actor{of}", "") for of in ("_class", "_name", ""))
        alone = actor if process.facts["world_size"] <= 1 else ""
        members.setdefault((kind, re.sub(r"[\W_]*\d+", "", name), alone), []).append(process)
    called = [_called(kind, name) for kind, name, _ in members]
    called = [role or DRIVER for role in called] if len(called) > 1 else called
    groups = {}
    for place, (role, group) in enumerate(zip(called, members.values(), strict=True)):
        numbered = f"{role}-{called[:place].count(role)}" if called.count(role) > 1 else role
        groups[numbered] = [replace(one, facts={**one.facts, "role": numbered}) for one in group]
    return groups


def of_training(processes: Sequence[RecordedProcess]) -> Sequence[RecordedProcess]:
    """Of several worker groups of a job that runs the one that seems to train, since it records most."""

    def size(group: Sequence[RecordedProcess]) -> int:
        paths = [process.folder / "records.bin" for process in group]
        return max(path.stat().st_size if path.is_file() else 0 for path in paths)

    groups = worker_groups(processes)
    return processes if len(groups) <= 1 else max(groups.values(), key=size)


def _called(kind: str, name: str) -> str:
    """What actors of a class are called; a name that was made of that of the class is no better."""
    name = kind if not name or name.endswith(kind) else name
    return re.sub(r"^\.|[^\w.-]", "_", name)


# What processes left in files of JSON.


def saved(path: Path, otherwise: Any) -> Any:
    """What a file holds, or something else where it is missing.

    Raises:
        ValueError: it is damaged.
    """
    return from_json(path.read_text()) if path.is_file() else otherwise


def latest_lines(path: Path, key: Callable[[dict[str, Any]], tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The objects of a file that has one a line; of those with one key the last.

    Args:
        key: a line for which it raises an error is left out, as one that is damaged.
    """
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        with suppress(ValueError, LookupError, TypeError):
            row = from_json(line)
            rows[key(row)] = row
    return list(rows.values())


# What reads the files of PyTorch and NCCL for the recorder: handed in, since importers are not its concern.


@dataclass(frozen=True)
class Readers:
    """Functions of `dpro.ingest`; all but those of logs read one file of one rank.

    Attributes:
        trace: `kineto.read_trace`, of a window.
        dump: `flight_recorder.read_dump`.
        log: `nccl.inspector.read_inspector_log`, whose file may be of several processes.
        execution: adds to what `trace` returned what an execution trace of the same steps knows.
        requests: `requests.read_requests`.
    """

    trace: Callable[..., Any]
    dump: Callable[..., Any]
    log: Callable[[Path], Sequence[Any]]
    execution: Callable[..., Any]
    requests: Callable[[Sequence[Path]], Any]
