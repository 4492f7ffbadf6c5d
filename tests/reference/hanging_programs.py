"""Programs of ranks by layout of the job, and faults put into them.

A program yields instructions, (what, arguments), which `hanging_jobs` carries out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.reference.hanging_model import TWO_HOSTS, Fault, Rank, Running

Instruction = tuple[Any, ...]


def make_mesh(job: Running) -> dict[str, Any]:
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
            group = job.add_group(
                ranks, job.rng.choice([axis.upper(), "undefined"]) if axis != "tp" else "TP"
            )
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


def program_of(rank: Rank, mesh: dict[str, Any]) -> Iterator[Instruction]:
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


def _dp(rank: Rank, mesh: dict[str, Any], step: int) -> Iterator[Instruction]:
    world = rank.job.world
    yield "compute", 5e6
    for bucket in range(rank.job.layers + 1):
        yield "compute", 2e6
        yield "collective", world, "all_reduce", (4096 * (bucket + 1),) * 2, "Float", False
    yield ("join",)
    yield "collective", world, "all_reduce", (1, 1), "Float", True


def _fsdp(rank: Rank, mesh: dict[str, Any], step: int) -> Iterator[Instruction]:
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


def _tp_pp(rank: Rank, mesh: dict[str, Any], step: int) -> Iterator[Instruction]:
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


def _forward(me: int, mesh: dict[str, Any], job: Running) -> Iterator[Instruction]:
    place = mesh["pp"][me].ranks.index(me)
    ranks = mesh["pp"][me].ranks
    if place > 0:
        yield "message", mesh["pp"][me], "recv", ranks[place - 1], 2048
    yield from _layers(me, mesh, job.layers)
    if place < len(ranks) - 1:
        yield "message", mesh["pp"][me], "send", ranks[place + 1], 2048


def _backward(me: int, mesh: dict[str, Any], job: Running) -> Iterator[Instruction]:
    place = mesh["pp"][me].ranks.index(me)
    ranks = mesh["pp"][me].ranks
    if place < len(ranks) - 1:
        yield "message", mesh["pp"][me], "recv", ranks[place + 1], 2048
    yield from _layers(me, mesh, job.layers)
    if place > 0:
        yield "message", mesh["pp"][me], "send", ranks[place - 1], 2048


def _moe(rank: Rank, mesh: dict[str, Any], step: int) -> Iterator[Instruction]:
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


def dry_run(job: Running, mesh: dict[str, Any]) -> dict[int, list[Instruction]]:
    """The calls that each rank will make."""
    state = job.rng.getstate()
    calls = {}
    for number in range(job.num_ranks):
        rank = Rank(number, job)
        calls[number] = [each for each in program_of(rank, mesh) if each[0] in ("collective", "message")]
    job.rng.setstate(state)
    return calls


def choose_fault(rng: random.Random, kind: str, calls: dict[int, list[Instruction]], job: Running) -> Fault:
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


def with_fault(program: Iterator[Instruction], rank: Rank, fault: Fault | None) -> Iterator[Instruction]:
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
