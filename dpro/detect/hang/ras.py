"""What NCCL's RAS reports of ranks: which do not answer, are considered dead, or have made fewer calls.

In: the rows of `counters` that a RAS report leaves. Out: `Ras`, which decides what dumps leave open. It names
no rank by itself: a rank that waits for others has made fewer calls than some, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import polars as pl

SILENT, DEAD = "ras_unresponsive", "ras_considered_dead"
CALLS = "ras_calls "  # and the operation
SOURCE = "NCCL RAS"


@dataclass(frozen=True)
class Ras:
    """What a report says.

    Attributes:
        dead: ranks that NCCL considers dead.
        silent: ranks that do not answer.
        answering: ranks that answered.
        behind: by rank, one line for each communicator and operation that it called less often than others.
    """

    dead: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    answering: frozenset[int] = frozenset()
    behind: Mapping[int, list[str]] = field(default_factory=dict)

    def suspects(self, ranks: Iterable[int]) -> list[int]:
        """Return which of some ranks the report implicates: the dead, else the silent, else those behind."""
        named = list(ranks)
        for group in (self.dead, self.silent, self.behind):
            if found := [rank for rank in named if rank in group]:
                return found
        return []

    def in_words(self, rank: int) -> list[str]:
        """Return what the report says of a rank, one line each."""
        lines = []
        if rank in self.dead:
            lines.append(f"NCCL's RAS considers rank {rank} dead")
        elif rank in self.silent:
            lines.append(f"rank {rank} does not answer NCCL's RAS: its process is stopped, gone or cut off")
        elif rank in self.answering:
            lines.append(f"rank {rank} answers NCCL's RAS: its process is alive")
        return lines + list(self.behind.get(rank, ()))


def read_ras(counters: pl.DataFrame) -> Ras:
    """Read the report from table `counters`; empty for a run without one."""
    flagged = {
        name: frozenset(counters.filter(pl.col("counter") == name)["rank"].to_list())
        for name in (SILENT, DEAD)
    }
    calls = counters.filter(pl.col("counter").str.starts_with(CALLS))
    behind: dict[int, list[str]] = {}
    most = pl.col("value").max().over("device", "counter")
    late = calls.with_columns(most=most).filter(pl.col("value") < pl.col("most"))
    late = late.sort("rank", "device", "counter")
    for rank, communicator, counter, value, top in late.select(
        "rank", "device", "counter", "value", "most"
    ).iter_rows():
        behind.setdefault(rank, []).append(
            f"by NCCL's RAS it has called {counter.removeprefix(CALLS)} {value:.0f} times in communicator "
            f"{communicator}, others {top:.0f} times"
        )
    return Ras(flagged[DEAD], flagged[SILENT], frozenset(calls["rank"].to_list()), behind)
