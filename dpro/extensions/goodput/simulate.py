"""Simulates what a job gets done in some time, if its hosts fail and it recovers in a given way.

Takes a `Recovery`, the stages of a job and how it saves and recovers; times of failures; and a duration.
Returns what each of many simulated jobs did in that time. Between two failures a job is a sequence of known
length: it starts, and alternates between steps and checkpoints. So the simulation goes from failure to
failure, of all jobs at once.

Failures may come while the job starts or trains, and lose what was done since the last complete checkpoint. A
failed host goes to repair. A spare replaces it; without one the job waits, or continues with fewer replicas
until a host is back, and then restarts from its last checkpoint, as under torchrun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Floats

MIN_STEP = 0.1  # of the mean of steps and stages: bounds their random variation from below
MAX_CYCLES = 1_000_000  # starts of a job in the simulated time
CLASSES = ("productive", "smaller", "checkpoint", "repeated", "hang", "start", "down", "waiting")


@dataclass(frozen=True)
class Recovery:
    """The stages of a job, and how it saves and recovers.

    Attributes:
        step_s: a step at full size.
        every: steps from one checkpoint to the next; 0 for none.
        stall_s: how long a checkpoint stalls training.
        background_s: time after that until the checkpoint is complete.
        start_s: from the start of processes until the first step, including a load.
        down_s: from the end of processes until the next ones start.
        detect_s: from a failure that hangs until the processes are ended.
        crash_s: from any other failure, which ends a process, until the processes are ended.
        hangs: share of failures that hang.
        kept_steps: steps that a failure costs where neighbours have the state, whatever was saved; -1 where
            they do not.
        hosts: number of hosts of the job at full size.
        spares: number of spare hosts; -1 for always enough.
        repair_s: until a failed host is back.
        replicas: data-parallel replicas at full size; 0 for a job that cannot continue with fewer.
        slower: factor by which a step is longer while a host is missing.
        unsure: standard deviation of `slower`.
        keeps_batch: whether such a step has as many samples as before; otherwise fewer, as replicas are
            missing.
        kept_share: share of a replica's samples that it still computes without a GPU; 0 where it stops.
        launch_s: until the launcher of a host that is back has joined the job.
        wait_s: how long the others wait for more hosts before they continue without one.
        warm_s: part of `start_s` by which the first steps are longer than typical ones.
        writers: ranks that write a checkpoint.
        ranks: ranks of the job at full size; 0 where unknown.
        step_noise: variation of steps, as where the machine or the network is shared: the mean of n steps has
            this relative standard deviation over the root of n.
        stage_noise: relative standard deviation of each start, with the cost of the failure before it.
        stage_doubt: relative standard deviation of the mean of all these stages, and of checkpoint stalls.
    """

    step_s: float
    every: int
    stall_s: float
    background_s: float
    start_s: float
    down_s: float
    detect_s: float
    crash_s: float = 0.0
    hangs: float = 1.0
    kept_steps: int = -1
    hosts: int = 1
    spares: int = -1
    repair_s: float = 0.0
    replicas: int = 0
    slower: float = 1.0
    unsure: float = 0.0
    keeps_batch: bool = False
    kept_share: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    warm_s: float = 0.0
    writers: int = 1
    ranks: int = 0
    step_noise: float = 0.0
    stage_noise: float = 0.0
    stage_doubt: float = 0.0


@dataclass(frozen=True)
class Failures:
    """When failures come.

    Attributes:
        after: maps the present time [S], s, and number of hosts [S] of jobs to the time of their next
            failure.
        of_hosts: maps the number of hosts [S] of jobs to the share of failures that take a host.
        hanging: maps times of failures [S], s, to whether each hangs; None to draw that at random.
    """

    after: Callable[[Floats, NDArray[np.int64]], Floats]
    of_hosts: Callable[[NDArray[np.int64]], Floats]
    hanging: Callable[[Floats], Bools] | None = None


@dataclass(frozen=True)
class SimulatedTime:
    """How simulated jobs spent their time.

    Attributes:
        seconds: [S, classes] time by job and class of `CLASSES`; a row adds up to the simulated time.
        steps: [S] steps at full size that were done for good.
        failures: [S] number of failures.
    """

    seconds: Floats
    steps: Floats
    failures: NDArray[np.int64]

    @property
    def goodput(self) -> Floats:
        """[S] share of the time in which steps were done for good."""
        return np.asarray(self.seconds[:, 0] / self.seconds.sum(axis=1))


def simulate(
    recovery: Recovery, failures: Failures, horizon_s: float, rng: np.random.Generator, jobs: int
) -> SimulatedTime:
    """Simulate jobs that run, fail and recover for `horizon_s`.

    Raises:
        ValueError: more than `MAX_CYCLES` starts would be simulated.
    """
    state = _State(recovery, jobs, rng)
    for _ in range(MAX_CYCLES):
        running = state.now_s < horizon_s
        if not running.any():
            return SimulatedTime(state.seconds, state.steps, state.failures)
        _cycle(state, failures, horizon_s, rng, running)
    raise ValueError(f"more than {MAX_CYCLES:,} starts in {horizon_s:,.0f} s: failures come too often")


class _State:
    """The present time `now_s` [S] of simulated jobs, and what they have done.

    Attributes:
        stages: [S] factor on the measured time of stages other than steps, by job.
    """

    def __init__(self, recovery: Recovery, jobs: int, rng: np.random.Generator) -> None:
        self.recovery = recovery
        # Separate streams, so that all designs have the same failures.
        slower_rng, mean_rng, self._stage_rng = rng.spawn(3)
        doubt = recovery.unsure * slower_rng.standard_normal(jobs)
        self.slower = np.maximum(recovery.slower + doubt, MIN_STEP)
        of_mean = recovery.stage_doubt * mean_rng.standard_normal(jobs)
        self.stages = np.maximum(1.0 + of_mean, MIN_STEP)
        self.now_s = np.zeros(jobs)
        self.seconds = np.zeros((jobs, len(CLASSES)))
        self.steps = np.zeros(jobs)
        self.failures = np.zeros(jobs, np.int64)
        self.back_s: Floats = np.zeros((jobs, 0))  # [S, in repair] when each host is back

    def stage_factors(self) -> Floats:
        """Return [S] factors on the mean time of the stages of this cycle, drawn from their uncertainty."""
        noise = self.recovery.stage_noise * self._stage_rng.standard_normal(len(self.now_s))
        return np.asarray(np.maximum(self.stages + noise, MIN_STEP))

    def spend(self, name: str, seconds: Floats) -> None:
        self.seconds[:, CLASSES.index(name)] += seconds
        self.now_s += seconds

    def hosts(self) -> NDArray[np.int64]:
        """Return [S] available hosts of each job, at most as many as it needs."""
        recovery = self.recovery
        if recovery.spares < 0:
            return np.full(len(self.now_s), recovery.hosts)
        away = (self.back_s > self.now_s[:, None]).sum(axis=1)
        return np.asarray(np.minimum(recovery.hosts + recovery.spares - away, recovery.hosts), np.int64)

    def next_back_s(self) -> Floats:
        """Return [S] when the next host is back; infinity where none is away."""
        if not self.back_s.shape[1]:
            return np.full(len(self.now_s), np.inf)
        return np.asarray(np.where(self.back_s > self.now_s[:, None], self.back_s, np.inf).min(axis=1))

    def send_to_repair(self, which: Bools) -> None:
        """Send a host of each selected job to repair."""
        away_s = self.recovery.repair_s + self.recovery.launch_s
        back = np.where(which, self.now_s + away_s, -np.inf)
        kept = self.back_s[:, (self.back_s > self.now_s[:, None]).any(axis=0)]
        self.back_s = np.column_stack([kept, back])


def _cycle(
    state: _State, failures: Failures, horizon_s: float, rng: np.random.Generator, running: Bools
) -> None:
    """Simulate from one start of processes to the next, for the jobs that are not over."""
    recovery = state.recovery
    hosts, size = _wait_for_hosts(state, horizon_s, running)
    begun_s = state.now_s.copy()
    failure_s = failures.after(begun_s, hosts)
    grown_s = np.where(size < 1, state.next_back_s(), np.inf)
    until_s = np.minimum(np.minimum(failure_s, grown_s), horizon_s)
    fails = running & (failure_s <= until_s)
    grows = running & ~fails & (grown_s <= until_s)
    stage_factors = state.stage_factors()
    state.spend(
        "start", np.where(running, np.minimum(until_s - begun_s, stage_factors * recovery.start_s), 0.0)
    )
    run_s = np.where(running, until_s - state.now_s, 0.0)
    noise = recovery.step_noise / np.sqrt(np.maximum(run_s / recovery.step_s, 1.0))
    usual_s = recovery.step_s * np.maximum(1.0 + noise * rng.standard_normal(len(size)), MIN_STEP)
    _train(state, run_s, size, usual_s, fails | grows)
    state.now_s = np.where(running, until_s, state.now_s)  # else a failure may come again, by rounding
    state.failures += fails
    by_chance, of_host = rng.random(len(size)), rng.random(len(size)) < failures.of_hosts(hosts)
    hang = failures.hanging(until_s) if failures.hanging else by_chance < recovery.hangs
    seen_s = np.where(hang, recovery.detect_s, stage_factors * recovery.crash_s)
    state.spend("hang", np.where(fails, np.minimum(seen_s, horizon_s - state.now_s), 0.0))
    state.send_to_repair(fails & of_host)
    state.spend(
        "down", np.where(running, np.minimum(stage_factors * recovery.down_s, horizon_s - state.now_s), 0.0)
    )
    if recovery.replicas and recovery.wait_s:
        waits_s = np.where(fails & (state.hosts() < recovery.hosts), recovery.wait_s, 0.0)
        state.spend("down", np.minimum(waits_s, np.maximum(horizon_s - state.now_s, 0.0)))


def _wait_for_hosts(state: _State, horizon_s: float, running: Bools) -> tuple[NDArray[np.int64], Floats]:
    """Wait until each job has enough hosts; return [S] its hosts at the start, and its relative size."""
    recovery = state.recovery
    while True:
        hosts = state.hosts()
        replicas = hosts * recovery.replicas // recovery.hosts
        whole = hosts >= recovery.hosts
        size = replicas + recovery.kept_share * (recovery.replicas - replicas)
        waits = running & ~whole & (size <= 0) & (state.now_s < horizon_s)
        if not waits.any():
            return hosts, np.where(whole, 1.0, size / max(recovery.replicas, 1))
        until_s = np.minimum(state.next_back_s(), horizon_s)
        state.spend("waiting", np.where(waits, until_s - state.now_s, 0.0))


def _train(state: _State, run_s: Floats, size: Floats, usual_s: Floats, stops: Bools) -> None:
    """Simulate steps and checkpoints for `run_s`; jobs in `stops` lose steps without a checkpoint."""
    recovery = state.recovery
    step_s = usual_s * np.where(size < 1, state.slower, 1.0)
    counts = np.ones_like(size) if recovery.keeps_batch else size
    work_s = recovery.every * step_s if recovery.every else np.full_like(step_s, np.inf)
    stall_s = recovery.stall_s * state.stages
    cycle_s = work_s + stall_s
    whole = np.floor(run_s / cycle_s)
    rest_s = run_s - (whole * cycle_s if recovery.every else 0.0)
    per_checkpoint = float(recovery.every)
    stalls_s = whole * stall_s + np.maximum(rest_s - work_s, 0.0)
    trained = np.floor(np.minimum(rest_s, work_s) / step_s + 1e-9)
    done = whole * per_checkpoint + trained
    written = np.clip(np.floor((run_s - recovery.background_s) / cycle_s), 0.0, whole) * per_checkpoint
    if recovery.kept_steps >= 0:
        written = np.maximum(written, done - recovery.kept_steps)
    kept = np.where(stops, np.minimum(written, done), done)
    state.steps += kept * counts
    state.spend("checkpoint", stalls_s)
    productive_s = np.where(stops, kept * step_s, run_s - stalls_s)
    full_s = productive_s * counts * usual_s / step_s  # time that the same progress takes at full size
    state.spend("productive", full_s)
    state.spend("smaller", productive_s - full_s)
    state.spend("repeated", run_s - stalls_s - productive_s)


def exponential(job_rate: float | Floats, host_rate: float | Floats, rng: np.random.Generator) -> Failures:
    """Return memoryless failures, of the job as a whole and of each of its hosts.

    Args:
        job_rate: failures of the job per s at any size, from software and storage; [S] where the jobs differ.
        host_rate: failures per s and host; [S] where the jobs differ.
    """

    def after(now_s: Floats, hosts: NDArray[np.int64]) -> Floats:
        with np.errstate(divide="ignore"):
            mean_s = 1.0 / (job_rate + host_rate * hosts)
        return np.asarray(now_s + rng.exponential(1.0, len(now_s)) * mean_s)

    def of_hosts(hosts: NDArray[np.int64]) -> Floats:
        return np.asarray(host_rate * hosts / np.maximum(job_rate + host_rate * hosts, 1e-300))

    return Failures(after, of_hosts)
