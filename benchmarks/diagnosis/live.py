"""Simulated jobs, as the watcher sees them: the latency of alarms, and how many are false.

Each look gets the calls of the latest steps, as many as the watcher keeps; late ranks are found by the code
that the watcher runs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.host_bound import find_input_bound
from dpro.detect.load_model import WORKLOAD
from dpro.detect.regression import find_regression
from dpro.detect.stragglers.from_calls import HISTORY, messages_unseen
from dpro.detect.stragglers.own_time import calls_of
from dpro.extensions.watch.late import MAX_AGAIN, LatestRecords, OwnTimes, look_since
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, PASSES, SPANS, STEPS, WORKERS
from tests.reference.training_jobs import LAYOUTS, NOISES, Job, Log, Machine
from tests.reference.training_records import Recording, frames_of

CHUNK = 20  # steps between looks at long jobs
Frames = dict[str, pl.DataFrame]


@dataclasses.dataclass
class Stream:
    """A job as the watcher sees it: its new records, and the ones that the watcher keeps."""

    machine: Machine
    calls: deque[pl.DataFrame]  # as `dpro.extensions.watch.late` keeps them
    rest: deque[Frames]
    watcher: OwnTimes
    past: list[pl.DataFrame]
    messages: bool = False

    def counters(self) -> pl.DataFrame:
        """Return the counters of the latest steps."""
        return pl.concat([each[COUNTERS.name] for each in self.rest])

    def advance(self, first: int, count: int) -> None:
        """Run some steps of the job."""
        self.machine.log = Log()
        for step in range(first, first + count):
            self.machine.step(step)
        new = frames_of(self.machine.job, self.machine.log, Recording())
        self.calls.append(calls_of(new[COLLECTIVES.name]).rename({"time_ns": "enqueued_ns"}))
        self.messages = self.messages or messages_unseen(new[COLLECTIVES.name], new[WORKERS.name])
        self.rest.append(new)
        self.past.append(new[STEPS.name])

    def look(self) -> list[Finding]:
        """Return the current findings of late ranks."""
        steps = pl.concat([each[STEPS.name] for each in self.rest])
        known = pl.concat(self.calls)
        calls = known.join(look_since(steps, known), on="rank")
        calls = calls.filter(pl.col("enqueued_ns") >= pl.col("since_ns")).drop("since_ns")
        workers, none = self.rest[-1][WORKERS.name], CLOCK_SAMPLES.empty()

        def tables(ranks: Sequence[int]) -> dict[str, pl.DataFrame]:
            counters = self.counters().filter(pl.col("rank").is_in(ranks))
            return {STEPS.name: steps, PASSES.name: PASSES.empty(), COUNTERS.name: counters}

        amounts = self.counters().filter(pl.col("counter") == WORKLOAD)
        return self.watcher.look(LatestRecords(calls, steps, workers, none, amounts, self.messages, tables))


def begin(job: Job, chunk: int) -> Stream:
    """Make a job before its first step; it is looked at every `chunk` steps."""
    kept = deque[pl.DataFrame](maxlen=MAX_AGAIN // chunk + 1)
    return Stream(Machine(job), kept, deque(maxlen=HISTORY // chunk), OwnTimes(), [])


def latency(job: Job, most: int) -> int | None:
    """Count steps from the first slow one to the look that names it; None if none does, -1 if another is.

    Args:
        job: with a fault since a step.
        most: steps to wait for it.
    """
    stream = begin(job, 1)
    for step in range(job.since + most):
        stream.advance(step, 1)
        if step < job.since and step % CHUNK:
            continue
        named = {finding.ranks for finding in stream.look()} if step >= 12 else set()
        if named - {(job.victim,)}:
            return -1
        if named and step >= job.since:
            return step - job.since + 1
    return None


def healthy(seed: int, num_steps: int) -> dict[str, Any]:
    """Run a long healthy job; return alarms of looks at late ranks, and of the whole series at the end."""
    layout, noise = LAYOUTS[seed % len(LAYOUTS)], NOISES[seed % len(NOISES)]
    job = Job(layout, 16 if seed % 2 else 4, num_steps, noise=noise, seed=seed)
    stream, alarms, alarmed = begin(job, CHUNK), [], False
    for first in range(0, num_steps, CHUNK):
        stream.advance(first, CHUNK)
        found = stream.look() if first else []
        if found and not alarmed:
            alarms.append({"step": first + CHUNK, "ranks": found[0].ranks, "evidence": found[0].evidence[0]})
        alarmed = bool(found)
    steps = pl.concat(stream.past)
    counters = stream.counters()
    at_last = find_regression(steps, WORKERS.empty(), lambda: counters, lambda: SPANS.empty())
    at_last += find_input_bound(steps.tail(50_000), counters, on_gpus=False)
    alarms += [{"step": num_steps, "ranks": each.ranks, "evidence": each.evidence[0]} for each in at_last]
    hours = float(steps["duration_ns"].sum()) / 3.6e12
    row = {"layout": layout, "noise": noise, "ranks": job.num_ranks, "steps": num_steps, "hours": hours}
    return row | {"looks": num_steps // CHUNK, "alarms": alarms}


def smallest(seeds: range) -> Iterator[dict[str, Any]]:
    """Yield latencies of small slowdowns within 20 steps, at 5% noise of work, and also of whole steps."""
    for step_noise in (False, True):
        for severity in (1.03, 1.05, 1.07, 1.1, 1.15):
            for layout in ("dp", "fsdp", "moe"):
                for seed in seeds:
                    job = Job(layout, 16 if seed % 2 else 4, 0, seed=seed, fault="compute", severity=severity,
                              victim=1, since=80, step_noise=step_noise)  # fmt: skip
                    found = latency(job, 20)
                    yield {"step_noise": step_noise, "severity": severity, "layout": layout, "latency": found}


def latencies(seeds: range) -> Iterator[dict[str, Any]]:
    """Yield the number of steps until a straggler is named, by how slow it is."""
    for severity in (1.2, 1.5, 2.0, 5.0):
        for seed in seeds:
            job = Job(("dp", "fsdp", "moe")[seed % 3], 16 if seed % 2 else 4, 0, noise=NOISES[seed % 5],
                      seed=seed, fault="compute", severity=severity, victim=2, since=80)  # fmt: skip
            yield {"severity": severity, "noise": job.noise, "latency": latency(job, 60)}


def live_tables(rows: dict[str, list[dict[str, Any]]], wilson: Any, table: Any) -> str:
    """Return the rows of this module as Markdown."""
    parts = []
    if rows.get("healthy"):
        long = rows["healthy"]
        alarms, hours = sum(len(row["alarms"]) for row in long), sum(row["hours"] for row in long)
        steps, looks = sum(row["steps"] for row in long), sum(row["looks"] for row in long)
        parts.append(
            f"Healthy: {len(long)} jobs, {steps} steps, {looks} looks, {hours:.0f} rank-hours: {alarms}"
            f" alarms ({1000 * alarms / hours:.2f} per 1,000 rank-hours)\n"
        )
    if rows.get("smallest"):
        body = []
        for key in dict.fromkeys((row["step_noise"], row["severity"]) for row in rows["smallest"]):
            mine = [row["latency"] for row in rows["smallest"] if (row["step_noise"], row["severity"]) == key]
            named = [each for each in mine if each is not None and each > 0]
            where = "each piece of work, and whole steps" if key[0] else "each piece of work"
            body.append([where, key[1], wilson(len(named), len(mine)), mine.count(-1)])
        parts.append(table(["5% noise of", "slowdown", "named within 20 steps", "another named"], body))
    if rows.get("latency"):
        body = []
        for severity in dict.fromkeys(row["severity"] for row in rows["latency"]):
            mine = [row["latency"] for row in rows["latency"] if row["severity"] == severity]
            named = sorted(each for each in mine if each is not None and each > 0)
            far = named[int(0.9 * (len(named) - 1))] if named else "-"
            middle = statistics.median(named) if named else "-"
            body.append([severity, wilson(len(named), len(mine)), middle, far, mine.count(-1)])
        parts.append(
            table(["slowdown", "named within 60 steps", "median steps", "90%", "another named"], body)
        )
    return "\n".join(parts)
