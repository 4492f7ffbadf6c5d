"""A small model of training jobs that hang, and of the dumps that PyTorch would leave behind.

Ranks run programs: their hosts enqueue work and go on until they have to look at a result; their devices run
what is enqueued when what it depends on is done and all partners are there. Nothing here knows how hangs are
found: the fault is put into the program or the device, the rest follows, and dumps show what was visible at
some moment, rank by rank.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEVER = math.inf
FAULTS = ("host", "device", "comm", "size", "dtype", "op", "skip", "order", "deadlock")
TWO_HOSTS = "hosts"  # a fault that is not drawn among the others: two ranks stop
CLASSES = {
    "host": "hang.host",
    TWO_HOSTS: "hang.host",
    "device": "hang.device",
    "comm": "hang.comm",
    **dict.fromkeys(("size", "dtype", "op", "skip", "order", "deadlock"), "hang.mismatch"),
}
LAYOUTS = ("dp", "fsdp", "tp_pp", "moe")
_BYTES = {"Float": 4, "BFloat16": 2, "Long": 8, "Double": 8}
_START_NS = 1_758_581_000_000_000_000
_STUCK_NS = 200_000_000_000  # how long after the last progress dumps are taken


@dataclass(frozen=True)
class Group:
    """A process group."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(eq=False)
class Work:
    """One rank's part in one collective or message."""

    rank: int
    group: Group
    op: str
    numel: tuple[int, int]
    dtype: str
    sequence: int
    p2p: bool
    enqueued: float
    peer: int = -1
    after: list[Work] = field(default_factory=list)
    batch: int = -1
    collectives: int = 0
    started: float = NEVER
    completed: float = NEVER

    @property
    def signature(self) -> tuple[Any, ...]:
        """What all parts of a collective must agree on."""
        return (self.op, self.dtype) if self.op == "all_to_all" else (self.op, self.dtype, self.numel)


@dataclass(frozen=True)
class Fault:
    """What goes wrong: which kind, on which ranks, at which of the rank's calls."""

    kind: str
    ranks: tuple[int, ...]
    at: int
    group: Group | None = None


@dataclass
class Job:
    """A job that has been run until nothing moves any more."""

    layout: str
    num_ranks: int
    groups: list[Group]
    works: dict[int, list[Work]]
    fault: Fault | None
    gloo: bool
    finished: bool
    last: float


class _Rank:
    """A rank while it runs: how far its host is, what its compute stream has to wait for."""

    def __init__(self, number: int, job: _Running) -> None:
        self.number, self.job = number, job
        self.time = job.rng.uniform(0, 2e6)
        self.frontier: list[Work] = []
        self.streams: dict[str, Work] = {}
        self.counts: dict[tuple[str, bool], int] = defaultdict(int)
        self.calls = 0
        self.blocked: list[Work] = []
        self.stuck = False
        self.ended = False

    def compute(self, ns: float) -> None:
        self.time += ns * self.job.rng.lognormvariate(0, 0.2)

    def enqueue(
        self, group: Group, op: str, numel: tuple[int, int], dtype: str, *, peer: int = -1, batch: int = -1
    ) -> Work:
        self.compute(20_000)
        p2p = peer >= 0
        key = (group.name, p2p)
        if batch < 0 or self.counts[key] == 0 or batch != self.job.last_batch.get((self.number, group.name)):
            self.counts[key] += 1
            self.job.last_batch[self.number, group.name] = batch
        stream = f"{group.name} {op} {peer}" if p2p else group.name
        before = [self.streams[stream]] if stream in self.streams else []
        work = Work(
            self.number, group, op, numel, dtype, self.counts[key], p2p, self.time, peer,
            [*self.frontier[-3:], *before], batch, self.counts[group.name, False],
        )  # fmt: skip
        self.streams[stream] = work
        self.job.works[self.number].append(work)
        return work


class _Running:
    """A job while it runs."""

    def __init__(self, rng: random.Random, layout: str, num_ranks: int, gloo: bool, steps: int) -> None:
        self.rng, self.layout, self.num_ranks, self.gloo, self.steps = rng, layout, num_ranks, gloo, steps
        self.works: dict[int, list[Work]] = {rank: [] for rank in range(num_ranks)}
        self.last_batch: dict[tuple[int, str], int] = {}
        self.fault: Fault | None = None
        self.groups: list[Group] = []
        self.eager = gloo or rng.random() < 0.2
        self.batched = not gloo and rng.random() < 0.5
        self.world = self._group(range(num_ranks), "default_pg")
        self.layers = rng.randint(2, 3)
        self.looks = rng.choice([0.3, 0.7, 1.0])  # how often a host looks at results

    def _group(self, ranks: Any, description: str) -> Group:
        group = Group(str(len(self.groups)), description, tuple(ranks))
        self.groups.append(group)
        return group


def run_job(
    rng: random.Random, layout: str, num_ranks: int, kind: str | None, *, gloo: bool = False, steps: int = 3
) -> Job:
    """Run a job of a layout, with a fault or without, until it ends or nothing moves.

    Args:
        rng: all chance there is.
        layout: one of `LAYOUTS`.
        num_ranks: number of ranks.
        kind: one of `FAULTS`, None for a healthy job.
        gloo: hosts wait for every collective, and messages leave no trace.
        steps: number of steps.
    """
    running = _Running(rng, layout, num_ranks, gloo, steps)
    mesh = _mesh(running)
    calls = _dry_run(running, mesh)
    if kind:
        running.fault = _choose_fault(rng, kind, calls, running)
    programs = {}
    ranks = [_Rank(number, running) for number in range(num_ranks)]
    for rank in ranks:
        programs[rank.number] = _with_fault(_program(rank, mesh), rank, running.fault)
    _run(ranks, programs, running)
    times = [t for works in running.works.values() for w in works for t in (w.enqueued, w.completed)]
    last = max((time for time in times if time < NEVER), default=0.0)
    works = running.works
    return Job(
        layout, num_ranks, running.groups, works, running.fault, gloo, all(r.ended for r in ranks), last
    )


# Programs: each instruction is (what, arguments); the interpreter below does them.

Instruction = tuple[Any, ...]


def _mesh(job: _Running) -> dict[str, Any]:
    """Groups of the layout, by axis and rank."""
    n, layout = job.num_ranks, job.layout
    sizes = {"dp": (1, 1), "fsdp": (1, 1), "tp_pp": (2, 2), "moe": (1, 1)}[layout]
    if layout == "tp_pp" and n >= 16:
        sizes = job.rng.choice([(2, 2), (4, 2), (2, 4)])
    tp, pp = sizes
    dp = n // (tp * pp)
    rank_of = {(d, p, t): (p * dp + d) * tp + t for d in range(dp) for p in range(pp) for t in range(tp)}
    where = {rank: place for place, rank in rank_of.items()}
    mesh: dict[str, Any] = {"tp": {}, "pp": {}, "dp": {}, "ep": {}, "where": where, "size": (dp, pp, tp)}

    def make(axis: str, members: list[list[int]]) -> None:
        for ranks in members:
            group = job._group(ranks, job.rng.choice([axis.upper(), "undefined"]) if axis != "tp" else "TP")
            for rank in ranks:
                mesh[axis][rank] = group

    if tp > 1:
        make("tp", [[rank_of[d, p, t] for t in range(tp)] for p in range(pp) for d in range(dp)])
    if pp > 1:
        make("pp", [[rank_of[d, p, t] for p in range(pp)] for d in range(dp) for t in range(tp)])
    if dp > 1 and layout == "tp_pp":
        make("dp", [[rank_of[d, p, t] for d in range(dp)] for p in range(pp) for t in range(tp)])
    if layout == "moe":
        width = max(2, n // job.rng.choice([1, 2])) if n <= 16 else 8
        make("ep", [list(range(first, min(first + width, n))) for first in range(0, n, width)])
    return mesh


def _program(rank: _Rank, mesh: dict[str, Any]) -> Iterator[Instruction]:
    job = rank.job
    yield "collective", job.world, "broadcast", (1000, 1000), "Float", True
    body = {"dp": _dp, "fsdp": _fsdp, "tp_pp": _tp_pp, "moe": _moe}[job.layout]
    looks = random.Random(hash((job.looks, job.num_ranks)))  # the same on all ranks, as programs are
    for step in range(job.steps):
        yield from body(rank, mesh, step)
        if looks.random() < job.looks:
            yield ("look",)
    yield "collective", job.world, "barrier", (1, 1), "Float", True
    yield ("look",)


def _dp(rank: _Rank, mesh: dict[str, Any], step: int) -> Iterator[Instruction]:
    world = rank.job.world
    yield "compute", 5e6
    for bucket in range(rank.job.layers + 1):
        yield "compute", 2e6
        yield "collective", world, "all_reduce", (4096 * (bucket + 1),) * 2, "Float", False
    yield ("join",)
    yield "collective", world, "all_reduce", (1, 1), "Float", True


def _fsdp(rank: _Rank, mesh: dict[str, Any], step: int) -> Iterator[Instruction]:
    world, n = rank.job.world, rank.job.num_ranks
    sizes = [1024 * (layer + 1) for layer in range(rank.job.layers)]
    for size in (*sizes, *reversed(sizes)):
        yield "collective", world, "_all_gather_base", (size, size * n), "BFloat16", True
        yield "compute", 3e6
    for size in reversed(sizes):
        yield "compute", 3e6
        yield "collective", world, "_reduce_scatter_base", (size * n, size), "BFloat16", False
    yield ("join",)
    yield "collective", world, "all_reduce", (1, 1), "Float", True


def _tp_pp(rank: _Rank, mesh: dict[str, Any], step: int) -> Iterator[Instruction]:
    me = rank.number
    _, p, _ = mesh["where"][me]
    dp, stages, _ = mesh["size"]
    micro_batches = stages + 2
    warm_up = min(stages - p - 1, micro_batches)
    for _ in range(warm_up):
        yield from _forward(me, mesh, rank.job)
    for number in range(micro_batches):
        if number + warm_up < micro_batches:
            yield from _forward(me, mesh, rank.job)
        yield from _backward(me, mesh, rank.job)
    yield ("join",)
    if dp > 1:
        yield "collective", mesh["dp"][me], "all_reduce", (8192, 8192), "Float", True
    yield "collective", rank.job.world, "all_reduce", (1, 1), "Float", True


def _layers(me: int, mesh: dict[str, Any], layers: int) -> Iterator[Instruction]:
    for layer in range(layers):
        yield "compute", 1e6
        yield "collective", mesh["tp"][me], "all_reduce", (2048 + 16 * layer,) * 2, "BFloat16", True


def _forward(me: int, mesh: dict[str, Any], job: _Running) -> Iterator[Instruction]:
    place = mesh["pp"][me].ranks.index(me)
    ranks = mesh["pp"][me].ranks
    if place > 0:
        yield "message", mesh["pp"][me], "recv", ranks[place - 1], 2048
    yield from _layers(me, mesh, job.layers)
    if place < len(ranks) - 1:
        yield "message", mesh["pp"][me], "send", ranks[place + 1], 2048


def _backward(me: int, mesh: dict[str, Any], job: _Running) -> Iterator[Instruction]:
    place = mesh["pp"][me].ranks.index(me)
    ranks = mesh["pp"][me].ranks
    if place < len(ranks) - 1:
        yield "message", mesh["pp"][me], "recv", ranks[place + 1], 2048
    yield from _layers(me, mesh, job.layers)
    if place > 0:
        yield "message", mesh["pp"][me], "send", ranks[place - 1], 2048


def _moe(rank: _Rank, mesh: dict[str, Any], step: int) -> Iterator[Instruction]:
    me, rng = rank.number, rank.job.rng
    for layer in range(2 * rank.job.layers):
        yield "compute", 2e6
        yield "collective", mesh["ep"][me], "all_gather", (16, 16 * len(mesh["ep"][me].ranks)), "Long", True
        if layer % 2 == 0:
            yield ("look",)  # how many tokens come has to be known
        yield (
            "collective",
            mesh["ep"][me],
            "all_to_all",
            (4096, 4096 + rng.randint(-50, 50)),
            "BFloat16",
            True,
        )
        yield "compute", 2e6
        yield (
            "collective",
            mesh["ep"][me],
            "all_to_all",
            (4096, 4096 + rng.randint(-50, 50)),
            "BFloat16",
            True,
        )
    yield "collective", rank.job.world, "all_reduce", (65536, 65536), "Float", False
    yield ("join",)
    yield "collective", rank.job.world, "all_reduce", (2, 2), "Float", True


# Faults.


def _dry_run(job: _Running, mesh: dict[str, Any]) -> dict[int, list[Instruction]]:
    """The calls that each rank will make."""
    state = job.rng.getstate()
    calls = {}
    for number in range(job.num_ranks):
        rank = _Rank(number, job)
        calls[number] = [each for each in _program(rank, mesh) if each[0] in ("collective", "message")]
    job.rng.setstate(state)
    return calls


def _choose_fault(rng: random.Random, kind: str, calls: dict[int, list[Instruction]], job: _Running) -> Fault:
    rank = rng.randrange(job.num_ranks)
    first = len(calls[rank]) // 3
    places = list(range(first, len(calls[rank]) - 2))

    def fits(at: int) -> bool:
        what, group, op = calls[rank][at][:3]
        if kind in ("host", TWO_HOSTS):
            return True
        if kind == "device":
            return what == "collective" and op != "broadcast"
        if kind == "deadlock":
            return len(group.ranks) >= 2 and not job.gloo
        if what != "collective" or op in ("broadcast", "barrier") or len(group.ranks) < 2:
            return False
        if kind == "size":
            return op != "all_to_all"
        if kind in ("skip", "order"):
            later = [each for each in calls[rank][at + 1 :] if each[0] == "collective" and each[1] is group]
            return bool(later) and _signature(later[0]) != _signature(calls[rank][at])
        return True

    at = rng.choice([at for at in places if fits(at)])
    group = calls[rank][at][1]
    if kind == TWO_HOSTS:
        others = [other for other in range(job.num_ranks) if other != rank and at < len(calls[other]) - 2]
        return Fault(kind, tuple(sorted((rank, rng.choice(others)))), at, group)
    if kind == "comm":
        return Fault(kind, group.ranks if calls[rank][at][0] == "collective" else (rank,), at, group)
    if kind == "deadlock":
        other = rng.choice([each for each in group.ranks if each != rank])
        return Fault(kind, tuple(sorted((rank, other))), at, group)
    return Fault(kind, (rank,), at, group)


def _signature(call: Instruction) -> tuple[Any, ...]:
    _, _, op, numel, dtype, _ = call
    return (op, dtype) if op == "all_to_all" else (op, dtype, numel)


def _with_fault(program: Iterator[Instruction], rank: _Rank, fault: Fault | None) -> Iterator[Instruction]:
    if fault is None or rank.number not in fault.ranks or fault.kind in ("device", "comm"):
        yield from program
        return
    calls, held = 0, None
    for each in program:
        here = each[0] in ("collective", "message") and calls == fault.at
        calls += each[0] in ("collective", "message")
        if held is not None and each[0] == "collective" and each[1] is held[1]:
            yield each
            yield held
            held = None
            continue
        if not here:
            yield each
        elif fault.kind in ("host", TWO_HOSTS):
            yield ("stop",)
        elif fault.kind == "deadlock":
            other = next(number for number in fault.ranks if number != rank.number)
            yield "message", fault.group, "recv", other, 777
            yield ("look",)
            yield each
        elif fault.kind == "order":
            held = each
        elif fault.kind != "skip":
            yield _altered(each, fault.kind)


def _altered(call: Instruction, kind: str) -> Instruction:
    what, group, op, numel, dtype, waits = call
    if kind == "size":
        numel = (numel[0] + 8, numel[1] + 8)
    elif kind == "dtype":
        dtype = "Double" if dtype != "Double" else "Float"
    else:
        op = "broadcast" if op != "broadcast" else "all_reduce"
    return what, group, op, numel, dtype, waits


# Running.


def _run(ranks: list[_Rank], programs: dict[int, Iterator[Instruction]], job: _Running) -> None:
    meetings: dict[Any, list[Work]] = defaultdict(list)
    pending: list[Work] = []
    pairs: dict[Any, int] = defaultdict(int)
    places: dict[int, int] = defaultdict(int)
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            before = len(job.works[rank.number]), rank.ended, rank.stuck
            _advance(rank, programs[rank.number], job)
            for work in job.works[rank.number][places[rank.number] :]:
                meetings[_meeting(work, pairs)].append(work)
                pending.append(work)
            places[rank.number] = len(job.works[rank.number])
            moved |= before != (len(job.works[rank.number]), rank.ended, rank.stuck)
        progress = True
        while progress:
            progress = False
            for work in pending:
                if work.started == NEVER and all(each.completed < NEVER for each in work.after):
                    work.started = max([work.enqueued, *(each.completed for each in work.after)]) + 1e4
                    progress = True
            for meeting in meetings.values():
                progress |= _finish(meeting, job)
            pending = [work for work in pending if work.completed == NEVER]
            moved |= progress


def _meeting(work: Work, pairs: dict[Any, int]) -> Any:
    """What a part belongs to: the n-th collective of its group, the n-th message of its pair."""
    if not work.p2p:
        return work.group.name, work.sequence
    ends = (work.rank, work.peer) if work.op == "send" else (work.peer, work.rank)
    key = (work.group.name, ends, work.op)
    pairs[key] += 1
    return work.group.name, ends, pairs[key]


def _finish(parts: list[Work], job: _Running) -> bool:
    """Finish what can be; whether anything was."""
    open_ = [work for work in parts if work.completed == NEVER]
    if not open_ or any(work.started == NEVER for work in open_):
        eager = [w for w in open_ if w.op == "send" and job.eager and w.started < NEVER]
        for work in eager:
            work.completed = work.started + 5e4
        return bool(eager)
    first, fault = parts[0], job.fault
    needed = 2 if first.p2p else len(first.group.ranks)
    if len(parts) < needed or len({work.signature for work in parts if not work.p2p}) > 1:
        return False
    hit = [work for work in parts if fault and _is_hit(work, fault, job)]
    if fault and fault.kind == "comm" and hit:
        return False
    end = max(work.started for work in parts) + job.rng.uniform(2e5, 2e6)
    done = False
    for work in open_:
        if work not in hit:
            work.completed = end + job.rng.uniform(0, 2e5)
            done = True
    return done


def _is_hit(work: Work, fault: Fault, job: _Running) -> bool:
    """Whether it is the very call that the fault of a device or of the network strikes."""
    if fault.kind not in ("device", "comm") or work.rank != fault.ranks[0]:
        return False
    calls = job.works[work.rank]
    return fault.at < len(calls) and calls[fault.at] is work


def _advance(rank: _Rank, program: Iterator[Instruction], job: _Running) -> None:
    """Run a host until it has to wait."""
    while not rank.ended and not rank.stuck:
        if rank.blocked:
            if any(work.completed == NEVER for work in rank.blocked):
                return
            rank.time = max([rank.time, *(work.completed for work in rank.blocked)])
            rank.blocked = []
        instruction = next(program, None)
        if instruction is None:
            rank.ended = True
            return
        what, *arguments = instruction
        if what == "compute":
            rank.compute(arguments[0])
        elif what == "collective":
            group, op, numel, dtype, waits = arguments
            work = rank.enqueue(group, op, numel, dtype)
            if waits or job.gloo:
                rank.frontier.append(work)
            if job.gloo and waits:
                rank.blocked = [work]
        elif what == "message":
            _message(rank, job, *arguments)
        elif what == "join":
            rank.frontier.extend(work for work in job.works[rank.number][-40:] if work.completed == NEVER)
        elif what == "look":
            rank.blocked = [w for w in job.works[rank.number] if w.completed == NEVER and w.op != "send"]
        elif what == "stop":
            rank.stuck = True


def _message(rank: _Rank, job: _Running, group: Group, op: str, peer: int, numel: int) -> None:
    batch = job.rng.randrange(1 << 40) if job.batched and numel != 777 else -1
    work = rank.enqueue(group, op, (numel, numel), "BFloat16", peer=peer, batch=batch)
    if op == "recv":
        rank.frontier.append(work)
        if job.gloo:
            rank.blocked = [work]


# Dumps.


@dataclass(frozen=True)
class Dumping:
    """How the dumps of one job are taken.

    Attributes:
        version: of the format.
        as_json: JSON, else a pickle.
        active_only: only what is not finished.
        ring: number of entries that are kept.
        timing: whether starts are noticed.
        early: ranks whose dump was taken too early, with the moment.
        stamped: whether files keep the time they were written at.
    """

    version: str
    as_json: bool
    active_only: bool
    ring: int
    timing: bool
    early: dict[int, float]
    stamped: bool


def choose_dumping(rng: random.Random, job: Job) -> Dumping:
    """Some way to take the dumps of a job."""
    version = rng.choice(["2.4", "2.5", "2.7", "2.9", "2.10"])
    early: dict[int, float] = {}
    if rng.random() < 0.2:
        rank = rng.randrange(job.num_ranks)
        early[rank] = job.last * rng.uniform(0.2, 0.9)
    active = not job.gloo and version >= "2.9" and rng.random() < 0.4
    ring = rng.choice([100, 400, 2000])
    return Dumping(version, rng.random() < 0.3, active, ring, rng.random() < 0.3, early, rng.random() < 0.5)


def write_dumps(
    rng: random.Random,
    job: Job,
    dumping: Dumping,
    folder: Path,
    *,
    missing: tuple[int, ...] = (),
    moment: float | None = None,
) -> None:
    """Write the dump of each rank as PyTorch would.

    Args:
        rng: chance in clocks and delays.
        job: what was run.
        dumping: how dumps are taken.
        folder: where to.
        missing: ranks whose dump is lost.
        moment: when dumps are taken; long after the last progress where not given.
    """
    for rank in range(job.num_ranks):
        delay = rng.uniform(0, 3e8) if moment is None else rng.uniform(0, 2e8)
        taken = dumping.early.get(rank, (job.last + _STUCK_NS if moment is None else moment) + delay)
        skew = rng.gauss(0, 2e6)
        if rank in missing:
            continue
        document = _document(job, rank, dumping, taken, skew)
        path = folder / f"nccl_trace_rank_{rank}"
        text = json.dumps(document, default=str).encode() if dumping.as_json else pickle.dumps(document, 2)
        path.write_bytes(text)
        if dumping.stamped:
            stamp = _START_NS + int(taken)
            os.utime(path, ns=(stamp, stamp))


def _document(job: Job, rank: int, dumping: Dumping, taken: float, skew: float) -> dict[str, Any]:
    seen = [work for work in job.works[rank] if work.enqueued <= taken]
    if job.gloo:
        seen = [work for work in seen if not work.p2p]
    own = [group for group in job.groups if rank in group.ranks]
    ids = {group.name: 2 * number if rank % 2 else number for number, group in enumerate(own)}
    entries = _entries(seen, ids, dumping, taken, skew, job.gloo)
    entries = entries[-dumping.ring :]
    if dumping.active_only:
        entries = [entry for entry in entries if entry["state"] != "completed"]
    status = {}
    for group in own:
        works = [work for work in seen if work.group is group]
        done = [work.sequence for work in works if work.completed <= taken]
        status[str(ids[group.name])] = {
            "last_enqueued_collective": works[-1].sequence if works else -1,
            "last_started_collective": -1,
            "last_completed_collective": done[-1] if done else -1,
        }
    used = [group for group in own if any(work.group is group for work in seen)]
    config = {g.name: {"name": g.name, "desc": g.description, "ranks": str(list(g.ranks))} for g in used}
    if job.gloo:
        config = {"": {"name": "", "desc": "", "ranks": "[]"}}
    document = {"version": dumping.version, "pg_config": config, "entries": entries}
    if dumping.version >= "2.5" or dumping.version == "2.10":
        document["pg_status"] = {
            n: facts for n, facts in status.items() if facts["last_enqueued_collective"] >= 0
        }
    return document


def _entries(
    works: list[Work], ids: dict[str, int], dumping: Dumping, taken: float, skew: float, gloo: bool
) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for work in works:
        single = work.batch < 0
        entries.append(_entry(work, len(entries), ids, dumping, taken, skew, gloo, single))
        if not single:  # each batch of messages here holds one
            end = _entry(work, len(entries), ids, dumping, taken, skew, gloo, True)
            entries.append(end | {"profiling_name": "nccl:coalesced", "input_sizes": [], "output_sizes": []})
    return entries


def _entry(
    work: Work, record: int, ids: dict[str, int], dumping: Dumping, taken: float, skew: float,
    gloo: bool, kept_up: bool,
) -> dict[str, Any]:  # fmt: skip
    ended, began = work.completed <= taken and kept_up, work.started <= taken and dumping.timing and kept_up
    state = "scheduled" if gloo else "completed" if ended else "started" if began else "scheduled"
    none = 0 if dumping.as_json else None
    members = work.group.ranks
    name = work.op
    if work.p2p:
        arrow = "->" if work.op == "send" else "<-"
        name = f"{work.op} {members.index(work.rank)}{arrow}{members.index(work.peer)}"
    group: Any = (work.group.name, work.group.description)
    sizes = (
        [] if work.op == "barrier" else [[work.numel[0]]],
        [] if work.op == "barrier" else [[work.numel[1]]],
    )
    return {
        "record_id": record,
        "pg_id": ids[work.group.name],
        "process_group": list(group) if dumping.as_json else group,
        "collective_seq_id": work.collectives if work.p2p else work.sequence,
        "p2p_seq_id": work.sequence if work.p2p else 0,
        "op_id": work.sequence,
        "profiling_name": f"{'gloo' if gloo else 'nccl'}:{name}",
        "time_created_ns": _START_NS + int(work.enqueued + skew),
        "input_sizes": sizes[0],
        "input_dtypes": [work.dtype] * len(sizes[0]),
        "output_sizes": sizes[1],
        "output_dtypes": [work.dtype] * len(sizes[1]),
        "state": state,
        "time_discovered_started_ns": _START_NS + int(work.started) if began else none,
        "time_discovered_completed_ns": _START_NS + int(work.completed) if ended and not gloo else none,
        "retired": ended,
        "timeout_ms": 180000,
        "is_p2p": work.p2p,
    }


def dumps_of_a_stuck_host(folder: Path) -> Path:
    """What a flight recorder leaves behind of a job of pipelines in which one rank's host gets stuck."""
    folder.mkdir(exist_ok=True)
    chance = random.Random(11)
    dumping = Dumping(
        "2.9", as_json=False, active_only=False, ring=2000, timing=False, early={}, stamped=False
    )
    write_dumps(chance, run_job(chance, "tp_pp", 8, "host"), dumping, folder, missing=())
    return folder
