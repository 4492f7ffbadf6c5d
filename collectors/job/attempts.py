"""Which processes of a job trained together: a restarted job is several trainings, one after the other.

In: what the processes said about themselves. Out: groups of them, one per attempt, in order of time.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpro.collectors.convert.recorded import RecordedProcess


def attempts(processes: Sequence[RecordedProcess]) -> list[list[RecordedProcess]]:
    """The processes of each attempt, by rank.

    A new attempt begins with a process whose rank the attempt has already, or that knows of another number
    of ranks or of restarts (`torchrun --max-restarts`).
    """
    found: list[dict[int, RecordedProcess]] = []
    kind = None
    for process in sorted(processes, key=lambda each: int(each.facts["started_ns"])):
        its_kind = (process.facts["world_size"], process.facts.get("attempt", ""))
        if not found or its_kind != kind or process.rank in found[-1]:
            found.append({})
            kind = its_kind
        found[-1][process.rank] = process
    return [[attempt[rank] for rank in sorted(attempt)] for attempt in found]
