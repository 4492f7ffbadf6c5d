"""Calls of a few ranks, written by hand, as the search for hangs gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.hang.case import Case, examine
from dpro.detect.hang.find import find_causes
from dpro.detect.hang.records import make_records
from dpro.members import members_text
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, PROCESS_GROUPS, STEPS, WORKERS, conform
from dpro.table import Table
from dpro.units import NS_PER_S

DONE, OPEN, RUNNING = "completed", "scheduled", "started"
START_NS = 1_000 * NS_PER_S


class Job:
    """What the ranks of a job called; every call comes a millisecond after the one before."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.rows: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.workers: dict[int, dict[str, Any]] = {}
        self.clock: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self._sequences: dict[tuple[int, str], int] = {}
        for rank in range(num_ranks):
            self.dump(rank)

    def dump(self, rank: int, saved_s: float = -1, **facts: Any) -> None:
        """The rank's dump exists, and says of some group what is given."""
        saved_ns = round(START_NS + saved_s * NS_PER_S) if saved_s >= 0 else -1
        self.groups.append({"rank": rank, "saved_ns": saved_ns, **facts})

    def lose(self, *ranks: int) -> None:
        """Nothing of these ranks was saved."""
        for rows in (self.rows, self.groups):
            rows[:] = [row for row in rows if row["rank"] not in ranks]

    def call(
        self,
        ranks: Sequence[int],
        group: Sequence[int],
        state: str = DONE,
        op: str = "all_reduce",
        **more: Any,
    ) -> None:
        """Some ranks call the next operation of a group."""
        for rank in ranks:
            key = (rank, str(group))
            number = self._sequences[key] = self._sequences.get(key, 0) + 1
            self._add(rank, group, op, state, sequence=number, **more)

    def send(self, rank: int, peer: int, state: str = OPEN, **more: Any) -> None:
        self._add(rank, sorted((rank, peer)), "send", state, peer=peer, **more)

    def recv(self, rank: int, peer: int, state: str = OPEN, **more: Any) -> None:
        self._add(rank, sorted((rank, peer)), "recv", state, peer=peer, **more)

    def _add(self, rank: int, group: Sequence[int], op: str, state: str, **more: Any) -> None:
        row = {
            "collective_id": sum(row["rank"] == rank for row in self.rows),
            "rank": rank,
            "window": -1,
            "op": op,
            "group": "-".join(map(str, group)),
            "group_ranks": members_text(group),
            "bytes_in": 400,
            "bytes_out": 400,
            "dtype": "float32",
            "enqueued_ns": START_NS + 1_000_000 * len(self.rows),
            "state": state,
        }
        self.rows.append(row | more)

    def ended(
        self,
        rank: int,
        at_s: float,
        *,
        code: int = -1,
        number: int = -1,
        error: str = "",
        final: bool = False,
    ) -> None:
        """How and when the process of a rank ended; `final`: its interpreter went, all calls saved."""
        ended_ns = round(START_NS + at_s * NS_PER_S)
        self.workers[rank] = {
            "rank": rank,
            "exit_code": code,
            "exit_signal": number,
            "ended_ns": ended_ns,
            "error": error,
            "failed_ns": ended_ns if error else -1,
            "left_ns": ended_ns if final else -1,
        }

    def beat(self, rank: int, at_s: float) -> None:
        """The recorder's thread last ran then."""
        self.clock.append({"rank": rank, "time_ns": round(START_NS + at_s * NS_PER_S)})

    def stepped(self, rank: int, at_s: float) -> None:
        """A step ended then."""
        end_ns = round(START_NS + at_s * NS_PER_S)
        self.steps.append({"rank": rank, "step": 1, "start_ns": end_ns - 10, "duration_ns": 10})

    def findings(self) -> list[Finding]:
        """What hangs."""
        return find_causes(self.case())

    def case(self) -> Case:
        """What is known before a cause is named."""
        tables = (
            _frame(COLLECTIVES, self.rows),
            _frame(PROCESS_GROUPS, self.groups),
            _frame(WORKERS, list(self.workers.values())),
            _frame(STEPS, self.steps),
            _frame(CLOCK_SAMPLES, self.clock),
        )
        return examine(make_records(*tables, self.num_ranks))


def _frame(table: Table, rows: list[dict[str, Any]]) -> pl.DataFrame:
    frames = [pl.DataFrame([row], schema={name: table.dtypes[name] for name in row}) for row in rows]
    return pl.concat([table.empty(), *(conform(table, frame) for frame in frames)])
