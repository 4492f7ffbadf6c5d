"""The late watch: finds the ranks of a running job that the others wait for.

Takes the latest calls, steps and counters of its processes; returns findings, once per look. Processes are
asked for their latest calls and given time to answer; the state is a record, and `next_state` alone decides
what comes next. Own times of steps are computed once and kept. Only calls of the latest steps are looked at
again, and fewer of them in large jobs, where many ranks show what a call waits for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from dpro.classify import operation
from dpro.collectors.convert.calls import BACKENDS, with_group_ranks
from dpro.collectors.inside.files import SHOWN
from dpro.detect.findings import Finding
from dpro.detect.findings_log import identity_of
from dpro.detect.run import LatestSteps, came_with_larger_slowdown, diagnose_calls
from dpro.detect.significance import LATEST_STEPS
from dpro.detect.stragglers.causes import WAITING_CODE
from dpro.detect.stragglers.excess import Team, median_of_peers
from dpro.detect.stragglers.from_calls import HISTORY, teams_of
from dpro.detect.stragglers.own_time import MESSAGES, AlwaysOn, calls_of, on_one_clock, own_time
from dpro.errors import InputError
from dpro.extensions.watch.job import Job, ProcessTail, amounts_of, clock_samples_of, steps_of
from dpro.ingest.flight_recorder import label, read_dump
from dpro.members import count_of, members_text
from dpro.replay.steps import job_steps
from dpro.schema import COLLECTIVES, COUNTERS, conform
from dpro.schema.members import with_texts
from dpro.words import from_json

# Steps whose calls are looked at again: what a call waits for is inferred from several steps.
MIN_AGAIN, MAX_AGAIN = 5, 40
MAX_ROWS = 100_000  # calls that are looked at again, unless they are of fewer than MIN_AGAIN steps
MAX_PEERS = 32  # ranks whose counters are compared with those of a late rank
ASK_S = 2.0  # between two requests for the latest calls: a dump costs the job some 20 ms of CPU
ANSWER_S = 1.2  # until all have answered: each process looks for requests once a second
STILL = 0.25  # share of a late rank's cost that its excess must show for its finding to hold
SHARE = 0.1  # share of the time that looks may take


class LateWatchPhase(Enum):
    """Phases of the late watch."""

    RESTING = "the last look was not long ago, or no step has ended since"
    ASKED = "processes were asked for their calls"
    LOOKING = "the calls are looked at"


@dataclass(frozen=True)
class LateState:
    """State of the late watch; times on this host's monotonic clock.

    Attributes:
        due_s: earliest time of the next request to processes.
        asked_s: time of the latest request.
        asked_at: ends of steps before it, over all ranks.
    """

    phase: LateWatchPhase = LateWatchPhase.RESTING
    due_s: float = 0.0
    asked_s: float = 0.0
    asked_at: int = 0


def next_state(state: LateState, now_s: float, updates: int) -> LateState:
    """Return the state at a look of the watcher."""
    if state.phase is LateWatchPhase.RESTING and now_s >= state.due_s and updates > state.asked_at:
        return replace(state, phase=LateWatchPhase.ASKED, asked_s=now_s, asked_at=updates)
    if state.phase is LateWatchPhase.ASKED and now_s >= state.asked_s + ANSWER_S:
        return replace(state, phase=LateWatchPhase.LOOKING)
    return state


def looked(state: LateState, now_s: float, took_s: float) -> LateState:
    """Return the state after a look."""
    due_s = max(state.asked_s + ASK_S, now_s - ANSWER_S + took_s / SHARE)
    return replace(state, phase=LateWatchPhase.RESTING, due_s=due_s)


@dataclass(frozen=True)
class LatestRecords:
    """What is known of a job now, times on each host's own clock.

    Attributes:
        calls: as `CallTable` keeps them.
        steps, workers, clock_samples: rows of these tables.
        amounts: rows of `counters` with the amount of work of steps.
        messages: whether ranks also wait for messages, which calls do not show.
        tables: returns `ProcessTail.frames` of given ranks; only few ranks need it.
    """

    calls: pl.DataFrame
    steps: pl.DataFrame
    workers: pl.DataFrame
    clock_samples: pl.DataFrame
    amounts: pl.DataFrame
    messages: bool
    tables: Callable[[Sequence[int]], Mapping[str, pl.DataFrame]]


class LateWatch:
    """Looks for ranks that the others wait for."""

    def __init__(self) -> None:
        self.state = LateState()
        self._calls, self._own_times = CallTable(), OwnTimes()

    @property
    def unclear(self) -> list[Finding]:
        """`OwnTimes.unclear` of the last look."""
        return self._own_times.unclear

    def look(self, job: Job, held: Sequence[Finding] = ()) -> list[Finding] | None:
        """Return the findings of a look; None if none was due, or no call was new.

        Args:
            held: findings of earlier looks, which are returned again while their ranks are late.
        """
        now_s, before = time.monotonic(), self.state
        self.state = next_state(before, now_s, job.progress.updates)
        if self.state.phase is LateWatchPhase.ASKED and before.phase is not LateWatchPhase.ASKED:
            job.ask_for_calls()
        if self.state.phase is not LateWatchPhase.LOOKING:
            return None
        begun_s, tails = time.thread_time(), list(job.tails.values())
        try:
            return self._own_times.look(self._latest(job, tails), held) if self._calls.read(tails) else None
        finally:
            self.state = looked(self.state, now_s, time.thread_time() - begun_s)

    def _latest(self, job: Job, tails: Sequence[ProcessTail]) -> LatestRecords:
        """Return what is known of the job; forget calls of steps that are not looked at again."""
        steps = steps_of(tails)
        self._calls.forget_before(look_since(steps, self._calls.frame))
        by_rank = {tail.process.rank: tail for tail in tails}

        def tables(ranks: Sequence[int]) -> dict[str, pl.DataFrame]:
            frames = [by_rank[rank].frames() for rank in ranks]
            return {name: pl.concat([of_rank[name] for of_rank in frames]) for name in frames[0]}

        samples, amounts = clock_samples_of(tails), amounts_of(tails)
        calls = self._calls
        return LatestRecords(calls.frame, steps, job.workers, samples, amounts, calls.messages, tables)


class OwnTimes:
    """Own times of a job's steps so far.

    Attributes:
        unclear: ranks that are late since the whole job became slower by far more: no findings, but reasons
            for a deep window.
    """

    def __init__(self) -> None:
        self._own: pl.DataFrame | None = None
        self.unclear: list[Finding] = []

    def look(self, now: LatestRecords, held: Sequence[Finding] = ()) -> list[Finding]:
        """Return findings of the ranks that are late now, after adding the own times of the latest steps.

        Args:
            held: findings of earlier looks. Noise may hide that a rank is late without ending it, so these
                are returned again until their ranks hardly are.
        """
        before, self.unclear = {one.ranks for one in self.unclear}, []
        if now.steps.is_empty() or now.calls.is_empty():
            return [*held]
        steps = now.steps.filter(pl.col("step") > pl.col("step").max() - MAX_AGAIN)
        rows = AlwaysOn(now.calls, steps, COUNTERS.empty(), now.workers, now.clock_samples)
        aligned, _ = on_one_clock(rows)
        calls = aligned.collectives.rename({"enqueued_ns": "time_ns"})
        if calls.is_empty():
            return [*held]
        # Steps and counters of a rank are joined by their start on the rank's own clock.
        new = own_time(calls, aligned.steps).drop("start_ns").join(
            steps.select("rank", "step", "start_ns"), on=["rank", "step"], maintain_order="left"
        )  # fmt: skip
        own_times = self._own = new if self._own is None else _merge_own_times(self._own, new)
        ranks = own_times["rank"].unique().sort().to_list()
        findings = diagnose_calls(
            LatestSteps(
                own_times, calls, now.calls, steps, now.workers, now.amounts,
                tables=lambda late: now.tables(_with_peers(late, ranks)), messages_unseen=now.messages,
            )
        )  # fmt: skip
        for one in findings:
            # Once unclear, it stays so while it lasts: the steps before it are forgotten.
            was_unclear = one.cause == WAITING_CODE and one.ranks in before
            if was_unclear or came_with_larger_slowdown(one, lambda: (own_times, job_steps(now.steps))):
                self.unclear.append(one)
        late = [one for one in findings if one not in self.unclear]
        named = {identity_of(one) for one in late}
        missing = [one for one in held if identity_of(one) not in named]
        teams = teams_of(own_times, calls, now.workers) if missing else []
        return [*late, *(one for one in missing if any(is_still_late(one, team) for team in teams))]


def is_still_late(finding: Finding, team: Team) -> bool:
    """Return whether a late rank still exceeds the own time of its team by a good part of what it cost.

    Args:
        team: own times of steps outside deep windows.
    """
    if len(finding.ranks) != 1 or finding.ranks[0] not in team.ranks or len(team.ranks) < 2:
        return False
    latest = team.own_ns[-min(LATEST_STEPS) :]
    excess_ns = (latest - median_of_peers(latest))[:, team.ranks.index(finding.ranks[0])]
    return bool(excess_ns.size and np.median(excess_ns) >= STILL * finding.cost_ns)


def look_since(steps: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the time from which calls are looked at again.

    Returns:
        `rank` and `since_ns`, on the rank's own clock.
    """
    last = steps["step"].max()
    if not isinstance(last, int):
        return pl.DataFrame(schema={"rank": pl.Int32, "since_ns": pl.Int64})
    latest = steps.filter(pl.col("step") > last - num_steps_again(steps, calls))
    return latest.group_by("rank").agg(since_ns=pl.col("start_ns").min())


def num_steps_again(steps: pl.DataFrame, calls: pl.DataFrame) -> int:
    """Return the number of steps whose calls are looked at again."""
    times = calls["enqueued_ns"]
    first, last, step_ns = times.min(), times.max(), steps["duration_ns"].mean()
    if not isinstance(first, int) or not isinstance(last, int) or not isinstance(step_ns, float):
        return MAX_AGAIN
    covered = max((last - first) / max(step_ns, 1.0), 1.0)
    return max(MIN_AGAIN, min(MAX_AGAIN, int(MAX_ROWS * covered / calls.height)))


def _merge_own_times(old: pl.DataFrame, new: pl.DataFrame) -> pl.DataFrame:
    """Return the own times of the latest steps; those in `new` replace those in `old`."""
    before = old.join(new.select("rank", "step"), on=["rank", "step"], how="anti")
    rows = pl.concat([before, new.select(before.columns)])
    return rows.filter(pl.col("step") > pl.col("step").max() - HISTORY).sort("step", "rank")


def _with_peers(late: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the late ranks and about `MAX_PEERS` others, spread over the job."""
    others = [rank for rank in ranks if rank not in late]
    every = max(len(others) // MAX_PEERS, 1)
    return sorted({*late, *others[::every]})


# The latest calls of all processes of a job, in the form from which late ranks are inferred.

MIN_STEPS = 3  # steps whose calls include a whole step of all ranks
SUFFIXES = (".json", ".pickle")
SCHEMA = {
    "rank": pl.Int32,
    "key": pl.String,
    "sequence": pl.Int64,
    "op": pl.String,
    "size": pl.Int64,
    "enqueued_ns": pl.Int64,
}
_NONE = -1  # number of the kind of a call that shows no late ranks


class _Entry(msgspec.Struct):
    record_id: int = -1
    profiling_name: str = ""
    process_group: tuple[str, ...] = ()
    collective_seq_id: int = -1
    is_p2p: bool = False
    time_created_ns: int = 0


class _Config(msgspec.Struct):
    ranks: str = ""


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []
    pg_config: dict[str, _Config] = {}


_decode = msgspec.json.Decoder(_Dump, strict=False).decode


class CallKind(NamedTuple):
    """Kind of a call: the operation, its group (a short name), and the group's size, -1 if unknown."""

    op: str
    key: str
    size: int


class _Progress:
    """How much of a process's calls has been read."""

    def __init__(self) -> None:
        self.stamps: dict[str, tuple[int, int]] = {}
        self.last = dict.fromkeys(BACKENDS, -1)
        self.kinds: dict[tuple[str, tuple[str, ...]], int] = {}
        self.groups: dict[str, str] = {}


class CallTable:
    """The calls of a job.

    Attributes:
        frame: columns of `SCHEMA`, times on each host's own clock.
        messages: whether ranks also send messages, which calls of collectives do not show.
    """

    def __init__(self) -> None:
        self.frame = pl.DataFrame(schema=SCHEMA)
        self.messages = False
        self._progress: dict[Path, _Progress] = {}
        self._kinds: dict[CallKind, int] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._ranks: dict[str, str] = {}

    def read(self, tails: Iterable[ProcessTail]) -> bool:
        """Read new calls; return whether there were any."""
        parts: list[tuple[int, np.ndarray]] = []
        others: list[pl.DataFrame] = []
        for tail in tails:
            progress = self._progress.setdefault(tail.process.folder, _Progress())
            for backend in BACKENDS:
                path = _new_dump(tail, progress, backend)
                for dump in [] if path is None else [*_earlier_dumps(path, backend, tail, progress), path]:
                    try:
                        parts.append((tail.process.rank, self._numbers(dump, backend, tail, progress)))
                    except (OSError, msgspec.DecodeError):
                        others.append(self._read_any(dump, backend, tail, progress))
        new = [calls for calls in (self._as_frame(parts), *others) if calls.height]
        if new:
            self.frame = pl.concat([self.frame, *new])
        return bool(new)

    def forget_before(self, since: pl.DataFrame) -> None:
        """Keep only calls of each rank from a time on.

        Args:
            since: `rank` and `since_ns`, on the rank's own clock; calls of other ranks are forgotten.
        """
        kept = self.frame.join(since, on="rank").filter(pl.col("enqueued_ns") >= pl.col("since_ns"))
        self.frame = kept.drop("since_ns")

    def _numbers(self, path: Path, backend: str, tail: ProcessTail, progress: _Progress) -> np.ndarray:
        """Return [N, 3] int64: kind, sequence and time (ns) of new calls.

        Raises:
            msgspec.DecodeError: it is not JSON, or not of the usual form.
        """
        if path.suffix != ".json":
            raise msgspec.DecodeError("a pickle")
        dump, last = _decode(path.read_bytes()), progress.last[backend]
        rows = []
        for entry in dump.entries:
            if entry.record_id <= last:
                continue
            named = entry.profiling_name, entry.process_group
            kind = progress.kinds.get(named)
            if kind is None:
                kind = progress.kinds[named] = self._kind(named, dump.pg_config, tail, progress)
            if kind != _NONE and not entry.is_p2p and entry.time_created_ns > 0:
                rows.append((kind, entry.collective_seq_id, entry.time_created_ns))
        if dump.entries:
            progress.last[backend] = max(last, dump.entries[-1].record_id)
        return np.array(rows, np.int64).reshape(-1, 3)

    def _kind(
        self,
        named: tuple[str, tuple[str, ...]],
        config: Mapping[str, _Config],
        tail: ProcessTail,
        progress: _Progress,
    ) -> int:
        """Return the number of a kind of call; `_NONE` where it shows no late ranks."""
        name, group = named
        op = operation(name) or name
        if op in MESSAGES:
            self.messages = True
        if op in MESSAGES or not group or not group[0]:
            return _NONE
        ranks = self._ranks_of(group[0], config, tail, progress)
        size = count_of(ranks)
        if size == 1:
            return _NONE
        key = self._key(label(group[0], group[1] if len(group) > 1 else ""), ranks)
        return self._number(CallKind(op, key, size or -1))

    def _ranks_of(
        self, group: str, config: Mapping[str, _Config], tail: ProcessTail, progress: _Progress
    ) -> str:
        """Return the ranks of a group as text, from the dump or the process's file; empty if unknown."""
        listed = config[group].ranks if group in config else ""
        if listed:
            if listed not in self._ranks:
                digits = listed.strip("[]").replace(",", " ").split()
                self._ranks[listed] = members_text(sorted(int(rank) for rank in digits if rank.isdigit()))
            return self._ranks[listed]
        if group not in progress.groups:
            with suppress(OSError, ValueError):
                named = from_json((tail.process.folder / "groups.json").read_bytes())
                progress.groups = {name: members_text(sorted(ranks)) for name, ranks in named.items()}
        return progress.groups.get(group, "")

    def _key(self, group: str, ranks: str) -> str:
        """Return a short name of a group."""
        return self._keys.setdefault((group, ranks), f"{len(self._keys)}")

    def _number(self, kind: CallKind) -> int:
        return self._kinds.setdefault(kind, len(self._kinds))

    def _as_frame(self, parts: list[tuple[int, np.ndarray]]) -> pl.DataFrame:
        """Return the calls of several processes as a table, with a row for all parts of a call."""
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return pl.DataFrame(schema=SCHEMA)
        rows = np.concatenate([part for _, part in parts])
        kinds = pl.DataFrame(list(self._kinds), schema=["op", "key", "size"], orient="row")
        frame = pl.DataFrame(
            {
                "rank": np.repeat([rank for rank, _ in parts], [len(part) for _, part in parts]),
                "sequence": rows[:, 1],
                "enqueued_ns": rows[:, 2],
            }
        ).with_columns(kinds[rows[:, 0]])
        frame = frame.select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())
        return frame.sort("enqueued_ns").unique(["rank", "key", "sequence"], keep="first")

    def _read_any(self, path: Path, backend: str, tail: ProcessTail, progress: _Progress) -> pl.DataFrame:
        """Return the new calls of a dump in any format; empty if it is damaged or gone."""
        place, last = BACKENDS.index(backend), progress.last[backend]
        try:
            if path.suffix == ".parquet":  # it was converted before this look
                frame = with_texts(pl.read_parquet(path)).select(COLLECTIVES.columns)
            else:
                dump = read_dump(path, rank=tail.process.rank, after=last).frames[COLLECTIVES.name]
                frame = conform(COLLECTIVES, dump).with_columns(pl.col("collective_id") * 2 + place)
        except (OSError, InputError, pl.exceptions.PolarsError):
            return pl.DataFrame(schema=SCHEMA)
        new = frame.filter(pl.col("collective_id") // 2 > last)
        if new.is_empty():
            return pl.DataFrame(schema=SCHEMA)
        progress.last[backend] = max(last, _largest(new["collective_id"]) // 2)
        new = with_group_ranks(new, tail.process.folder)
        self.messages = self.messages or bool(new["op"].is_in(MESSAGES).any())
        return self._of_table(new)

    def _of_table(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return rows of `collectives` with the columns of `SCHEMA`."""
        calls = calls_of(rows)
        names = {key: self._key(*key.rsplit("|", 1)) for key in calls["key"].unique()}
        short = pl.col("key").replace_strict(names, return_dtype=pl.String)
        return calls.with_columns(key=short).select(
            pl.col({"enqueued_ns": "time_ns"}.get(name, name)).cast(dtype).alias(name)
            for name, dtype in SCHEMA.items()
        )


def _new_dump(tail: ProcessTail, progress: _Progress, backend: str) -> Path | None:
    """Return the dump that a process made for a watcher, if it is new."""
    folder = str(tail.process.folder)
    for suffix in SUFFIXES:
        name = f"{folder}/{SHOWN}{backend}{suffix}"
        with suppress(OSError):
            status = os.stat(name)
            stamp = status.st_mtime_ns, status.st_ino
            is_new = progress.stamps.get(name) != stamp
            progress.stamps[name] = stamp
            return Path(name) if is_new else None
    return None


def _earlier_dumps(path: Path, backend: str, tail: ProcessTail, progress: _Progress) -> list[Path]:
    """Return dumps for the record that begin before a watcher's dump, oldest first.

    A process whose ring of calls covers less than a whole step saves such dumps again and again. They are
    returned only if needed, and only as many as cover a few steps.
    """
    with suppress(OSError, msgspec.DecodeError, IndexError):
        shown = _decode(path.read_bytes()).entries if path.suffix == ".json" else []
        wanted_ns = MIN_STEPS * int(tail.steps[-1, 2])
        if shown[0].record_id <= progress.last[backend] + 1:
            return []
        if shown[-1].time_created_ns - shown[0].time_created_ns >= wanted_ns:
            return []
        dumps = tail.process.folder.glob(f"flight-{backend}-*.*")
        written_ns = {dump: dump.stat().st_mtime_ns for dump in dumps if ".tmp" not in dump.name}
        since_ns = shown[0].time_created_ns - wanted_ns
        return sorted((dump for dump, ns in written_ns.items() if ns >= since_ns), key=written_ns.__getitem__)
    return []


def _largest(numbers: pl.Series) -> Any:
    return numbers.max()
