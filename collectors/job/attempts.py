"""Which processes of a job trained together: a restarted job is several trainings, one after the other.

In: what the processes said about themselves. Out: groups of them, one per attempt, in order of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpro.collectors.convert.recorded import RecordedProcess


def attempts(processes: Sequence[RecordedProcess]) -> list[list[RecordedProcess]]:
    """The processes of each attempt, by rank.

    A new attempt begins with a process whose rank the attempt has already, that knows of another number of
    ranks, or that its torchrun has started again since (`--max-restarts`): each host's counts for itself.
    """
    found: list[dict[int, RecordedProcess]] = []
    for process in sorted(processes, key=lambda each: int(each.facts["started_ns"])):
        if not found or _begins_anew(process, found[-1]):
            found.append({})
        found[-1][process.rank] = process
    return [[attempt[rank] for rank in sorted(attempt)] for attempt in found]


def _begins_anew(process: RecordedProcess, attempt: Mapping[int, RecordedProcess]) -> bool:
    """Whether a process cannot have trained together with those of an attempt."""
    if process.rank in attempt:
        return True
    return any(
        each.facts["world_size"] != process.facts["world_size"]
        or (_known(each, "launcher") == _known(process, "launcher")
            and _known(each, "attempt") != _known(process, "attempt"))
        for each in attempt.values()
    )  # fmt: skip


def _known(process: RecordedProcess, fact: str) -> str:
    """What a process said of its torchrun; empty where there was none."""
    return str(process.facts.get(fact, ""))
