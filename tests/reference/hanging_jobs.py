"""A small model of training jobs that hang.

Ranks run programs: their hosts enqueue work and go on until they have to look at a result; their devices run
what is enqueued when what it depends on is done and all partners are there. Nothing here knows how hangs are
found: the fault is put into the program or the device, and the rest follows.

hanging_model     groups, calls, faults, ranks
hanging_programs  what ranks do, by layout of the job, and faults in it
hanging_dumps     dumps of the flight recorder: what was visible at some moment, rank by rank
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.reference.hanging_model import NEVER, Fault, Group, Job, Rank, Running, Work
from tests.reference.hanging_programs import (
    Instruction,
    choose_fault,
    dry_run,
    make_mesh,
    program_of,
    with_fault,
)


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
    running = Running(rng, layout, num_ranks, gloo, steps)
    mesh = make_mesh(running)
    calls = dry_run(running, mesh)
    if kind:
        running.fault = choose_fault(rng, kind, calls, running)
    programs = {}
    ranks = [Rank(number, running) for number in range(num_ranks)]
    for rank in ranks:
        programs[rank.number] = with_fault(program_of(rank, mesh), rank, running.fault)
    _run(ranks, programs, running)
    times = [t for works in running.works.values() for w in works for t in (w.enqueued, w.completed)]
    last = max((time for time in times if time < NEVER), default=0.0)
    works = running.works
    return Job(
        layout, num_ranks, running.groups, works, running.fault, gloo, all(r.ended for r in ranks), last
    )


def _run(ranks: list[Rank], programs: dict[int, Iterator[Instruction]], job: Running) -> None:
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


def _finish(parts: list[Work], job: Running) -> bool:
    """Finish the parts that can finish; return whether there were any."""
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


def _is_hit(work: Work, fault: Fault, job: Running) -> bool:
    """Whether it is the very call that the fault of a device or of the network strikes."""
    if fault.kind not in ("device", "comm") or work.rank != fault.ranks[0]:
        return False
    calls = job.works[work.rank]
    return fault.at < len(calls) and calls[fault.at] is work


def _advance(rank: Rank, program: Iterator[Instruction], job: Running) -> None:
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


def _message(rank: Rank, job: Running, group: Group, op: str, peer: int, numel: int) -> None:
    batch = job.rng.randrange(1 << 40) if job.batched and numel != 777 else -1
    work = rank.enqueue(group, op, (numel, numel), "BFloat16", peer=peer, batch=batch)
    if op == "recv":
        rank.frontier.append(work)
        if job.gloo:
            rank.blocked = [work]
