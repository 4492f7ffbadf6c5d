"""Attempts of jobs written down moment by moment, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dpro.schema import CHECKPOINTS, COUNTERS, LOSSES, START_PARTS, STARTS, STEPS, WORKERS
from dpro.store import Manifest, Run, open_run, write_manifest, write_part

S = 1_000_000_000


def ns(seconds: float) -> int:
    return round(seconds * S)


class WrittenAttempt:
    """One start of a job: processes start, import for 2 s, join a group for 1 s, set up for 1 s, and step."""

    def __init__(self, begin: float, ranks: int = 2, step: float = 1.0) -> None:
        self.begin, self.num_ranks, self.step = begin, ranks, step
        self.starts: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.workers: list[dict[str, Any]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.counters: list[dict[str, Any]] = []
        self.parts: list[dict[str, Any]] = []
        self.losses: list[dict[str, Any]] = []

    def trained(self, steps: int, longer: dict[int, float] | None = None) -> float:
        """All ranks do `steps` steps; returns when the last ended."""
        first = self.begin + 4 + self.step
        now = first
        for step in range(1, steps):
            took = self.step + (longer or {}).get(step, 0.0)
            for rank in range(self.num_ranks):
                self.steps.append(
                    {"rank": rank, "step": step, "start_ns": ns(now), "duration_ns": ns(took), "source": "x"}
                )
            now += took
        for rank in range(self.num_ranks):
            moments = dict(
                zip(("process", "imported", "group_begin", "group", "work"), (0, 2, 2, 3, 4), strict=True)
            )
            row = {f"{name}_ns": ns(self.begin + at) for name, at in moments.items()}
            row |= {"rank": rank, "launched_ns": 0, "first_update_ns": ns(first) if steps else -1}
            self.starts.append(row)
        return now if steps else self.begin + 4

    def ended(self, time: float, code: int = 0) -> WrittenAttempt:
        """All ranks end."""
        for rank in range(self.num_ranks):
            row = {"rank": rank, "host": "a", "started_ns": ns(self.begin), "ended_ns": ns(time)}
            self.workers.append(row | {"exit_code": code, "exit_signal": -1 if code >= 0 else 9})
        return self

    def killed(self, time: float, rank: int = 0, others: float = 1.0) -> WrittenAttempt:
        """A rank is killed, and the launcher ends the other ranks `others` s later; as dpro records it."""
        for each in range(self.num_ranks):
            ends = time if each == rank else time + others
            row = {"rank": each, "host": "a", "started_ns": ns(self.begin), "ended_ns": ns(ends)}
            row |= {"exit_code": -1, "exit_signal": 9 if each == rank else 15, "source": "dpro recorder"}
            self.workers.append(row)
        return self

    def checkpoint(self, kind: str, start: float, stall: float, path: str, **more: Any) -> None:
        """Rank 0 saves or loads a file."""
        times = {"start_ns": ns(start), "stall_ns": ns(stall), "duration_ns": ns(stall)}
        self.checkpoints.append({"rank": 0, "kind": kind, "path": path} | times | more)

    def loss(self, rank: int, step: int, value: float) -> None:
        """A rank calls `backward` on a loss."""
        self.losses.append({"rank": rank, "step": step, "kind": "loss", "value": value})

    def part(self, kind: str, rank: int, start: float, took: float, name: str, **more: Any) -> None:
        """A rank imports a module or makes a process group."""
        times = {"start_ns": ns(start), "duration_ns": ns(took)}
        self.parts.append({"rank": rank, "kind": kind, "name": name, "group_ranks": ""} | times | more)

    def written(self, folder: Path) -> Run:
        """The attempt as a run."""
        tables = (STARTS, START_PARTS, STEPS, WORKERS, CHECKPOINTS, COUNTERS, LOSSES)
        written = (self.starts, self.parts, self.steps, self.workers, self.checkpoints, self.counters)
        rows = (*written, self.losses)
        for table, of_table in zip(tables, rows, strict=True):
            if of_table:
                names = {name: table.dtypes[name] for name in of_table[0]}
                write_part(folder, table, "rank00000", pl.DataFrame(of_table, schema=names))
        ranks = list(range(self.num_ranks))
        write_manifest(folder, Manifest(world_size=self.num_ranks, ranks=ranks, created_by="a test"))
        return open_run(folder)


def killed_five_times() -> list[WrittenAttempt]:
    """Six attempts that save after every fifth step, each from the last save; five are killed."""
    attempts, begin, done = [], 0.0, 0
    for number, steps in enumerate((12, 9, 0, 14, 6, 8)):
        attempt = WrittenAttempt(begin=begin)
        end = attempt.trained(steps)
        if done:
            attempt.checkpoint("load", begin + 3.5, 0.2, f"/step{done}")
        saved = [step for step in range(done + 1, done + steps) if step % 5 == 0]
        for step in saved:
            attempt.checkpoint("save", begin + 4 + step - done + 0.001, 0.0, f"/step{step}")
        done = saved[-1] if saved else done
        attempts.append(attempt.killed(end + 0.5, number % 2) if number < 5 else attempt.ended(end + 1))
        begin = end + 4
    return attempts


def job(folder: Path, attempts: Sequence[WrittenAttempt]) -> Run:
    """A run with its earlier attempts in it, as `dpro record` leaves them."""
    *earlier, last = attempts
    for number, attempt in enumerate(earlier):
        attempt.written(folder / "attempts" / str(number))
    return last.written(folder)
