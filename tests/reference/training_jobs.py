"""A model of training jobs that are slow: hosts, devices and networks, and what makes them slow.

A step is a list of instructions, each for some ranks at once, in an order in which they can be carried out.
Every rank has a host, a device with a stream for work and one for each of its groups, and sends of its own.
Hosts of jobs on the CPU work themselves. Nothing here knows how slow parts are found: a fault changes how
long work or transfers take, all else follows. Times are ms of a clock that all share; what a recorder sees of
it is written by `training_records.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LAYOUTS = ("dp", "fsdp", "tp_pp", "moe")
NOISES = ("1%", "5%", "10%", "heavy", "periodic")
FAULTS = ("compute", "host", "imbalance", "network", "regression", "input")
HOST_FAULTS = ("data", "gc", "contention", "sleep")
IMBALANCES = ("varying", "persistent")
BATCHES = ("sized", "idle", "none")
LAUNCH_MS = 0.08  # a kernel, its operator around it
LAG_MS = 0.006  # from a launch to its kernel
CALL_MS = 0.05  # to hand over a collective
WAKE_UP_MS = 0.02
RANKS_PER_HOST = 8
PROFILED = 1.04  # times what hosts need in a deep window
MICRO_BATCHES = 4
LAYERS = 4


@dataclass(frozen=True)
class Job:
    """What is run.

    Attributes:
        layout: how the model is spread over the ranks.
        num_ranks: of the job.
        num_steps: of the job.
        gpu: whether devices work, or the hosts.
        noise: which.
        seed: of everything that is drawn.
        fault: one of `FAULTS`; empty for a healthy job.
        severity: how many times as long the faulty part takes; of host faults and input the step.
        victim: the rank, or the first of a pair.
        since: the first step with the fault.
        how: which host fault; of uneven work, whether the victim's data-parallel rank always has more.
        windows: steps that are recorded in depth: first and number of each.
        step_noise: whether whole steps of a rank vary, beside each piece of its work.
        batches: what loaders hand over: batches whose size shows how much work they are, some that vary in
            what costs nothing, or nothing that has a size.
    """

    layout: str
    num_ranks: int
    num_steps: int
    gpu: bool = False
    noise: str = "5%"
    seed: int = 0
    fault: str = ""
    severity: float = 1.0
    victim: int = -1
    since: int = 0
    how: str = ""
    windows: tuple[tuple[int, int], ...] = ()
    step_noise: bool = True
    batches: str = "none"


@dataclass(frozen=True)
class Mesh:
    """Where the ranks are: [R] coordinates, and groups of each kind as arrays [G, M] of ranks."""

    tp: Ints
    pp: Ints
    dp: Ints
    num_stages: int
    groups: dict[str, Ints]


@dataclass
class Log:
    """What happened: batches of rows, each an array per column, equally long within a batch.

    Attributes:
        calls: `op`, `group` (kind), `number` (of the call within its kind of group), `rank`, `group_index`,
            `called`, `begin`, `end`, `bytes`, `peer`, `deep` and, of deep ones, `correlation`.
        spans: `kind`, `name`, `lane`, `rank`, `begin`, `end`, `correlation`.
        steps: `step`, `rank`, `begin`, `end`, `window`.
        counters: by name [T, R] ms.
        elements: [T, R] of the batches that were loaded; empty where they have no size.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, list[Floats]] = field(default_factory=dict)
    elements: list[Floats] = field(default_factory=list)


def mesh_of(layout: str, num_ranks: int) -> Mesh:
    """The usual mesh of a layout: tensor-parallel ranks next to each other, then data, then stages."""
    tp_size, num_stages = 1, 1
    if layout == "tp_pp":
        tp_size, num_stages = {4: (2, 2), 16: (2, 2), 64: (4, 4)}.get(num_ranks, (8, 4))
    rank = np.arange(num_ranks)
    dp_size = num_ranks // (tp_size * num_stages)
    tp, dp, pp = rank % tp_size, rank // tp_size % dp_size, rank // (tp_size * dp_size)
    groups = {"world": rank[None, :]}
    grid = rank.reshape(num_stages, dp_size, tp_size)
    if layout == "tp_pp":
        groups["tp"] = grid.reshape(-1, tp_size)
        groups["dp"] = grid.transpose(0, 2, 1).reshape(-1, dp_size)
    else:
        groups["dp"] = groups["world"]
    if layout == "moe":
        ep_size = {4: 2, 16: 4}.get(num_ranks, 8)
        groups["ep"] = rank.reshape(-1, ep_size)
    return Mesh(tp, pp, dp, num_stages, groups)


def run_job(job: Job) -> Log:
    """Run all steps."""
    machine = Machine(job)
    for step in range(job.num_steps):
        machine.step(step)
    return machine.log


class Machine:
    """The hosts, devices and networks of a job, as they go through its steps."""

    def __init__(self, job: Job) -> None:
        """All ranks are about to begin."""
        self.job = job
        self.mesh = mesh_of(job.layout, job.num_ranks)
        self.log = Log()
        self.random = np.random.default_rng([job.seed, LAYOUTS.index(job.layout), job.num_ranks])
        draw, size = self.random, job.num_ranks
        self.scale = float(draw.uniform(4, 30))  # ms of a layer
        self.own_speed = draw.lognormal(0, 0.01, size)  # no two devices are quite the same
        self.host = draw.uniform(0, 5, size)
        self.device = self.host.copy()
        self.comm = {kind: self.host.copy() for kind in self.mesh.groups}  # each group has a queue of its own
        self.sends = self.host.copy()
        self.sent: dict[tuple[int, int], list[tuple[Floats, Floats, int]]] = {}  # and not yet received
        self.all = np.arange(size)
        self.lengths = np.random.default_rng([job.seed, 7])  # apart, so that all else is drawn the same
        self.quadratic = float(self.lengths.uniform(0, 0.5))  # of the work: attention
        self.pause_every = draw.integers(17, 32, size)
        self.pause_phase = draw.integers(0, 32, size)
        self.numbers: dict[str, int] = {}
        self.correlation = 0
        self.deep = False
        self.spent: dict[str, Floats] = {}
        self.layer = 2 if job.layout == "tp_pp" else LAYERS
        self.program = list(getattr(self, f"_{job.layout}")())

    # --- one step

    def step(self, number: int) -> None:
        """Carry out one step, and write it down."""
        job, size = self.job, self.job.num_ranks
        self.number = number
        self.window = next((w for w, (f, n) in enumerate(self.job.windows) if f <= number < f + n), -1)
        self.deep = self.window >= 0
        self.faulty = bool(self.job.fault) and number >= self.job.since
        self.spent = {name: np.zeros(size) for name in ("data", "gc", "queue", "cpu")}
        self.of_step = self._noise(size) if self.job.step_noise else np.ones(size)
        uneven = self._uneven(size)
        self.of_step = self.of_step * uneven
        if job.batches != "none":
            self.log.elements.append(self._elements(uneven))
        began = self.host.copy()
        self._load()
        self._stall()
        for name, arguments in self.program:
            getattr(self, name)(*arguments)
        self._finish()
        row = {"step": number, "rank": self.all, "begin": began, "end": self.host.copy()}
        self.log.steps.append(row | {"window": self.window})
        for name, spent in self.spent.items():
            self.log.counters.setdefault(name, []).append(spent)

    def _noise(self, size: int) -> Floats:
        """[size] factors."""
        noise = self.job.noise
        if noise == "heavy":
            return np.exp(0.05 * self.random.standard_t(2.5, size).clip(-8, 60)).clip(0.3, 30)
        sigma = 0.03 if noise == "periodic" else float(noise.rstrip("%")) / 100
        return self.random.lognormal(0, sigma, size)

    def _uneven(self, size: int) -> Floats:
        """[size] factors of work of the step: sequences that are longer for some ranks, others each time."""
        if self.faulty and self.job.fault == "imbalance" and self.job.layout != "tp_pp":
            spread = np.log(self.job.severity)
            if self.job.how == "persistent":
                return np.where(self.mesh.dp == self.mesh.dp[self.job.victim], self.job.severity, 1.0)
            per_copy = np.exp(self.random.uniform(0, spread, self.mesh.dp.max() + 1))
            return per_copy[self.mesh.dp]
        return np.ones(size)

    def _elements(self, work: Floats) -> Floats:
        """[size] elements of padded batches that take so much work, a part of which grows quadratically."""
        if self.job.batches == "idle":
            work = np.exp(self.lengths.normal(0, 0.2, work.size))
        q = self.quadratic
        length = (np.sqrt((1 - q) ** 2 + 4 * q * work) - (1 - q)) / (2 * q)
        return 2 * 8 * np.rint(512 * length)

    @property
    def step_ms(self) -> float:
        """About what a rank works in a step."""
        return 3 * self.layer * self.scale

    def _load(self) -> None:
        """The next batch; mostly it is there already."""
        wait = 0.4 * self._noise(self.job.num_ranks)
        extra = (self.job.severity - 1) * self.step_ms
        if self.faulty and self.job.fault == "input":
            wait += extra * self._noise(self.job.num_ranks)
        if self.faulty and self.job.fault == "host" and self.job.how == "data":
            wait[self.job.victim] += extra * self._noise(1)[0]
        self.spent["data"] += wait
        self._on_host(
            "annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", self.all, wait
        )

    def _stall(self) -> None:
        """What the host does besides: Python, garbage, checkpoints, and faults."""
        size, job = self.job.num_ranks, self.job
        self.host += 0.3 * self._noise(size)
        garbage = np.zeros(size)
        if job.noise == "periodic":
            due = (self.number + self.pause_phase) % self.pause_every == 0
            garbage[due] = 0.5 * self.step_ms
            if self.number % 40 == 39:
                self.host[0] += 3 * self.step_ms
        extra = (job.severity - 1) * self.step_ms * self._noise(1)[0]
        if self.faulty and job.fault == "host":
            if job.how == "gc":
                garbage[job.victim] += extra
            elif job.how == "sleep":
                self.host[job.victim] += extra
            elif job.how == "contention" and job.gpu:
                self.host[job.victim] += extra
                self.spent["queue"][job.victim] += extra
        self.host += garbage
        self.spent["gc"] += garbage

    def _finish(self) -> None:
        """The optimizer, and a look at the loss."""
        self.wait()
        self.work("optimizer", self.all, 0.3 * self.scale)
        if self.job.gpu:
            done = np.max([self.host, self.device, *self.comm.values()], axis=0) + LAG_MS
            self._on_host("runtime", "cudaDeviceSynchronize", self.all, done - self.host)
        self._on_host("cpu_op", "aten::item", self.all, np.full(self.job.num_ranks, 0.05))

    # --- instructions

    def work(self, name: str, ranks: Ints, ms: float) -> None:
        """Some ranks compute."""
        job = self.job
        time = ms * self.own_speed[ranks] * self._noise(ranks.size) * self.of_step[ranks]
        if self.faulty:
            time = time * self._fault_of_work(ranks)
        if not job.gpu:
            if self.faulty and (job.fault, job.how) == ("host", "contention"):
                mine = ranks == job.victim
                queued = np.where(mine, time * (1 - 1 / job.severity), 0)
                self.spent["queue"][ranks] += queued
                self.spent["cpu"][ranks] -= queued
            self.spent["cpu"][ranks] += time
            self._on_host("cpu_op", f"aten::{name}", ranks, time)
            return
        launch = LAUNCH_MS * self._noise(ranks.size) * (PROFILED if self.deep else 1)
        begin = self.host[ranks] + launch / 2
        self.correlation += 1
        self._span("cpu_op", f"aten::{name}", ranks, self.host[ranks], self.host[ranks] + launch)
        self._span("runtime", "cudaLaunchKernel", ranks, begin, begin + launch / 4, link=True)
        self.host[ranks] += launch
        self.spent["cpu"][ranks] += launch
        start = np.maximum(self.device[ranks], begin + launch / 4 + LAG_MS)
        self.device[ranks] = start + time
        self._span("kernel", f"{name}_kernel", ranks, start, start + time, lane="compute", link=True)

    def _fault_of_work(self, ranks: Ints) -> Floats | float:
        job = self.job
        if job.fault == "regression":
            return job.severity
        slow = job.fault == "compute" or (job.fault, job.how, job.gpu) == ("host", "contention", False)
        if slow:
            return np.where(ranks == job.victim, job.severity, 1.0)
        if job.fault == "imbalance" and job.layout == "tp_pp":
            return np.where(self.mesh.pp[ranks] == self.mesh.num_stages - 1, job.severity, 1.0)
        return 1.0

    def collective(self, op: str, kind: str, ms: float, blocks: bool, stage: int = -1) -> None:
        """All groups of a kind (of one stage only) call an operation.

        Args:
            op: which.
            kind: of groups.
            ms: to move the data.
            blocks: whether the work that follows waits for it; else it is waited for at `wait`.
            stage: whose groups call; -1 for all.
        """
        groups = self.mesh.groups[kind]
        if stage >= 0:
            groups = groups[self.mesh.pp[groups[:, 0]] == stage]
        if groups.shape[1] < 2:
            return
        ranks = groups.ravel()
        called = self.host[ranks].copy()
        self.correlation += 1
        self._span("cpu_op", f"c10d::{op}", ranks, called, called + CALL_MS, issues=True)
        self._span("runtime", "cudaLaunchKernelExC", ranks, called + 0.01, called + 0.03, link=True, gpu=True)
        self.host[ranks] += CALL_MS
        ready = self.device[ranks] + LAG_MS if self.job.gpu else called
        begin = np.maximum(np.maximum(self.comm[kind][ranks], called + 0.03 + LAG_MS), ready)
        moving = ms * self._noise(len(groups)) * self._fault_of_transfer(groups)
        end = np.repeat(begin.reshape(groups.shape).max(axis=1) + moving, groups.shape[1])
        self.comm[kind][ranks] = end
        self._called(op, kind, ranks, np.repeat(_indices(groups, self.mesh.groups[kind]), groups.shape[1]),
                     called, begin, end, ms, -1)  # fmt: skip
        if blocks:
            self._hold(ranks, end)

    def _hold(self, ranks: Ints, end: Floats) -> None:
        """What follows on these ranks waits until then."""
        if self.job.gpu:
            self._span("runtime", "cudaStreamWaitEvent", ranks, self.host[ranks], self.host[ranks] + 0.002)
            self.host[ranks] += 0.003
            self.device[ranks] = np.maximum(self.device[ranks], end)
        else:
            self.host[ranks] = np.maximum(self.host[ranks], end + WAKE_UP_MS)

    def wait(self) -> None:
        """What follows waits for all collectives."""
        self._hold(self.all, np.max([*self.comm.values()], axis=0))

    def send(self, stage: int, to: int) -> None:
        """Each rank of a stage begins to send to the same rank of another, and goes on."""
        sender = self.all[self.mesh.pp == stage]
        ready = np.maximum(self.device[sender] + LAG_MS if self.job.gpu else 0.0, self.host[sender])
        called = self._issue("send", sender)
        self.sent.setdefault((stage, to), []).append((called, ready + CALL_MS, self.correlation))

    def receive(self, stage: int, to: int, ms: float) -> None:
        """Each rank of a stage receives what was sent to it first, and the work that follows waits for it."""
        sender, receiver = (self.all[self.mesh.pp == each] for each in (stage, to))
        sent, ready, correlation = self.sent[stage, to].pop(0)
        queued = self.sends[sender] if self.job.gpu else 0.0  # sends of gloo do not wait for each other
        begin_send = np.maximum(ready, queued)
        begin = np.maximum(
            self.host[receiver] + CALL_MS, self.device[receiver] + LAG_MS if self.job.gpu else 0.0
        )
        called = self._issue("recv", receiver)
        pairs = np.stack([sender, receiver], axis=1)
        moving = ms * self._noise(sender.size) * self._fault_of_transfer(pairs)
        end = np.maximum(begin_send, begin) + moving
        self.sends[sender] = end
        for op, ranks, peers, at, since, number in (
            ("send", sender, receiver, sent, begin_send, correlation),
            ("recv", receiver, sender, called, begin, self.correlation),
        ):
            self._called(op, f"p2p {stage} {to}", ranks, self.mesh.dp[ranks] * 64 + self.mesh.tp[ranks],
                         at, since, end, ms, peers, number)  # fmt: skip
        self._hold(receiver, end)

    def _issue(self, op: str, ranks: Ints) -> Floats:
        """Some ranks call for a message; when."""
        called = self.host[ranks].copy()
        self.host[ranks] += CALL_MS
        self.correlation += 1
        self._span("cpu_op", f"c10d::{op}", ranks, called, called + CALL_MS, issues=True)
        self._span("runtime", "cudaLaunchKernelExC", ranks, called + 0.01, called + 0.03, link=True, gpu=True)
        return called

    def _fault_of_transfer(self, groups: Ints) -> Floats | float:
        """[G] factors: the slow way out of a host of one rank."""
        job = self.job
        if not self.faulty or job.fault != "network":
            return 1.0
        hosts = groups // hosts_apart(job.num_ranks)
        leaves = (hosts != hosts[:, :1]).any(axis=1) if job.how == "nic" else True
        return np.where((groups == job.victim).any(axis=1) & leaves, job.severity, 1.0)

    # --- what is written down

    def _on_host(self, kind: str, name: str, ranks: Ints, ms: Floats) -> None:
        time = ms * (PROFILED if self.deep and kind == "cpu_op" else 1)
        self._span(kind, name, ranks, self.host[ranks], self.host[ranks] + time)
        self.host[ranks] += time

    def _span(
        self, kind: str, name: str, ranks: Ints, begin: Floats, end: Floats, *, lane: str = "main",
        link: bool = False, gpu: bool = False, issues: bool = False,
    ) -> None:  # fmt: skip
        if not self.deep or (gpu and not self.job.gpu):
            return
        row = {"kind": kind, "name": name, "lane": lane, "rank": ranks, "begin": begin, "end": end}
        row |= {"correlation": self.correlation if link else -1, "window": self.window}
        self.log.spans.append(row | ({"span_id": 10**8 + self.correlation} if issues else {}))

    def _called(
        self, op: str, kind: str, ranks: Ints, group: Ints, called: Floats, begin: Floats, end: Floats,
        ms: float, peer: Ints | int, correlation: int = -1,
    ) -> None:  # fmt: skip
        name = f"{kind} {op}" if op in ("send", "recv") else kind
        stages = "".join(map(str, np.unique(self.mesh.pp[ranks]))) if kind in ("tp", "dp") else ""
        number = self.numbers[name + stages] = self.numbers.get(name + stages, -1) + 1
        row = {
            "op": op,
            "group": kind,
            "number": number,
            "rank": ranks,
            "group_index": group,
            "called": called,
        }
        row |= {"begin": begin, "end": end, "bytes": int(ms * 1e6), "peer": peer, "window": self.window}
        known = correlation if correlation >= 0 else self.correlation
        self.log.calls.append(row | {"correlation": known, "step": self.number})

    # --- programs: what a step is, by layout

    def _forward_and_backward(self) -> Iterator[tuple[str, int]]:
        yield from (("forward", layer) for layer in range(self.layer))
        yield from (("backward", layer) for layer in reversed(range(self.layer)))

    def _dp(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for way, layer in self._forward_and_backward():
            ms = self.scale * (2 if way == "backward" else 1)
            yield "work", (f"{way}_{layer}", self.all, ms)
            if way == "backward":
                yield "collective", ("all_reduce", "world", 0.6 * self.scale, False)

    def _fsdp(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for way, layer in self._forward_and_backward():
            yield "collective", ("all_gather", "world", 0.2 * self.scale, True)
            yield "work", (f"{way}_{layer}", self.all, self.scale * (2 if way == "backward" else 1))
            if way == "backward":
                yield "collective", ("reduce_scatter", "world", 0.2 * self.scale, False)

    def _moe(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for way, layer in self._forward_and_backward():
            ms = self.scale * (2 if way == "backward" else 1)
            yield "work", (f"{way}_attention_{layer}", self.all, 0.5 * ms)
            yield "collective", ("all_to_all", "ep", 0.15 * self.scale, True)
            yield "work", (f"{way}_expert_{layer}", self.all, 0.5 * ms)
            yield "collective", ("all_to_all", "ep", 0.15 * self.scale, True)
            if way == "backward":
                yield "collective", ("all_reduce", "world", 0.3 * self.scale, False)

    def _tp_pp(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        last = self.mesh.num_stages - 1
        stages = [self.all[self.mesh.pp == stage] for stage in range(last + 1)]
        for way, stage in schedule(last + 1, MICRO_BATCHES):
            back = way == "backward"
            ms = self.scale / MICRO_BATCHES * (2 if back else 1)
            before, after = (stage + 1, stage - 1) if back else (stage - 1, stage + 1)
            if 0 <= before <= last:
                yield "receive", (before, stage, 0.05 * ms)
            for layer in range(self.layer):
                yield "work", (f"{way}_{layer}", stages[stage], ms)
                yield "collective", ("all_reduce", "tp", 0.1 * ms, True, stage)
            if 0 <= after <= last:
                yield "send", (stage, after)
        for stage in range(last + 1):
            yield "collective", ("all_reduce", "dp", 0.4 * self.scale, False, stage)


def hosts_apart(num_ranks: int) -> int:
    """How many ranks share a host: of small jobs, half of them."""
    return min(RANKS_PER_HOST, num_ranks // 2)


def _indices(groups: Ints, among: Ints) -> Ints:
    """[G] which of a kind's groups these are, by their first ranks."""
    order = np.argsort(among[:, 0])
    return order[np.searchsorted(among[:, 0], groups[:, 0], sorter=order)]


def schedule(num_stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """One forward and one backward in turn (1F1B), in an order in which all can be carried out."""
    queues = []
    for stage in range(num_stages):
        warm = min(num_stages - 1 - stage, micro_batches)
        rest = micro_batches - warm
        queues.append(["forward"] * warm + ["forward", "backward"] * rest + ["backward"] * warm)
    done = {(way, stage): 0 for way in ("forward", "backward") for stage in range(num_stages)}
    order = []
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                way = queue[0]
                before = stage - 1 if way == "forward" else stage + 1
                needed = done[way, stage] + 1
                if 0 <= before < num_stages and done[way, before] < needed:
                    break
                done[way, stage] += 1
                order.append((queue.pop(0), stage))
    return order
