"""Cases of the matrix: class of fault x layout x ranks x severity x noise x missing telemetry x clocks.

In: a seed and a fault. Out: a job of `tests/reference/training_jobs.py`, how it is recorded, and whether that
recording shows the fault. Everything else that is drawn is equal for all faults of a seed.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from tests.reference.training_jobs import (
    BATCHES,
    HOST_FAULTS,
    IMBALANCES,
    LAYOUTS,
    NOISES,
    Job,
    hosts_apart,
    mesh_of,
)
from tests.reference.training_records import SKEWS, Recording

SEVERITIES = (1.05, 1.1, 1.2, 1.5, 2.0, 5.0)
RANKS = {"windows": ((4, 16, 64), (48, 48, 4)), "calls": ((4, 16, 64, 512), (38, 38, 20, 4))}
MISSING = (0.0, 0.1, 0.3)
STEPS = 80
WINDOW_EVERY, WINDOW_STEPS, FIRST_WINDOW = 12, 2, 5  # two steps in a window is the default of `record`


@dataclasses.dataclass(frozen=True)
class Case:
    """A job, how it is recorded, and whether the recording shows its fault.

    Attributes:
        seen: `windows`, or `calls` alone.
        shows: whether the recording has evidence of the fault.
    """

    job: Job
    recording: Recording
    seen: str
    shows: bool


def draw(seed: int, fault: str) -> Case:
    """Draw one case; everything but the fault is equal for all faults of a seed."""
    rng = random.Random(f"slow {seed}")
    seen = rng.choice(("windows", "calls"))
    size = rng.choices(*RANKS[seen])[0]
    layout, gpu = LAYOUTS[seed % len(LAYOUTS)], rng.random() < (0.6 if seen == "windows" else 0.25)
    steps = STEPS if size <= 64 else 50
    windows = tuple((first, WINDOW_STEPS) for first in range(FIRST_WINDOW, steps, WINDOW_EVERY))
    since = rng.choice((0, 0, steps // 3, steps // 2))
    apart = random.Random(f"batches {seed}")
    batches, uneven = apart.choice(("sized", *BATCHES)), apart.choice(IMBALANCES)
    job = Job(
        layout, size, steps, gpu, rng.choice(NOISES), seed, windows=windows if seen == "windows" else (),
        batches=batches,
    )  # fmt: skip
    missing, skew, victim = rng.choice(MISSING), rng.choice(SKEWS), rng.randrange(size)
    hows = {"host": rng.choice(HOST_FAULTS), "network": rng.choice(("nic", "rank")), "imbalance": uneven}
    how = hows.get(fault, "")
    severity = rng.choice(SEVERITIES)
    lost = tuple(rank for rank in range(size) if rng.random() < missing and rank != victim)[: size - 2]
    if fault:
        since = steps // 2 if fault == "regression" else since
        job = dataclasses.replace(
            job, fault=fault, severity=severity, victim=victim, since=since, how=how
        )  # fmt: skip
    timed = seen == "calls" and gpu and rng.random() < 0.5
    recording = Recording(skew, lost if missing else (), missing, seed, timed)
    return Case(job, recording, seen, shows(job, recording, seen))


def shows(job: Job, recording: Recording, seen: str) -> bool:
    """Return whether the recording has evidence of the fault at all."""
    if job.fault in ("regression", ""):
        return True
    if job.fault == "imbalance":
        return _shows_imbalance(job, recording, seen)
    if job.fault == "network":
        return _shows_network(job, recording, seen)
    if job.fault == "input":
        return True
    peers = _peers(job, recording)
    if seen == "windows":
        return bool(peers)
    if recording.skew == "unknown" or (job.gpu and job.fault == "compute"):
        return False  # no common clock; or only the device is late
    return _comparable(job, recording, job.victim) and any(
        _comparable(job, recording, peer) for peer in peers
    )


def _shows_imbalance(job: Job, recording: Recording, seen: str) -> bool:
    """Return whether uneven work is visible: by its recorded amount, or as stages that take longer."""
    here = [rank for rank in range(job.num_ranks) if rank not in recording.lost]
    if job.layout == "tp_pp":
        return seen == "windows" and np.unique(mesh_of(job.layout, job.num_ranks).pp[here]).size > 1
    if job.batches != "sized":
        return False
    if seen == "windows":
        return len(here) > 1
    clocks = recording.skew != "unknown" and not job.gpu
    return clocks and sum(_comparable(job, recording, rank) for rank in here) > 1


def _shows_network(job: Job, recording: Recording, seen: str) -> bool:
    """Return whether equal groups or earlier steps allow a comparison, by times or by waiting hosts."""
    if seen == "windows" or recording.timed:
        return job.since > 0 or _like_groups(job, recording) >= 2
    hosts_show_it = not job.gpu and job.layout != "tp_pp" and recording.skew != "unknown"
    return job.since > 0 and hosts_show_it


def _peers(job: Job, recording: Recording) -> list[int]:
    """Return recorded ranks of the victim's stage."""
    mesh = mesh_of(job.layout, job.num_ranks)
    same_stage = np.flatnonzero(mesh.pp == mesh.pp[job.victim])
    return [int(rank) for rank in same_stage if rank != job.victim and rank not in recording.lost]


def _comparable(job: Job, recording: Recording, rank: int) -> bool:
    """Return whether a rank's clock and all ranks of its groups, except those of all ranks, are recorded."""
    leader = rank // hosts_apart(job.num_ranks) * hosts_apart(job.num_ranks)
    if recording.skew == "compared" and leader and {0, leader} & {*recording.lost}:
        return False  # its host's clock was compared with the first rank's by the leader
    groups = mesh_of(job.layout, job.num_ranks).groups.values()
    mine = [row for kind in groups for row in kind if rank in row and row.size < job.num_ranks]
    return not any(np.isin(row, recording.lost).any() for row in mine)


def _like_groups(job: Job, recording: Recording) -> int:
    """Count equal groups that are completely recorded, the victim in one; the largest number of any kind."""
    mesh, largest = mesh_of(job.layout, job.num_ranks), 0
    for kind, groups in mesh.groups.items():
        hosts = groups // hosts_apart(job.num_ranks)
        spans = np.array([len(set(row)) for row in hosts])
        whole = ~np.isin(groups, recording.lost).any(axis=1) & (groups.shape[1] > 1)
        mine = (groups == job.victim).any(axis=1) & whole
        if not mine.any() or (job.how == "nic" and spans[mine][0] == 1) or kind == "world":
            continue
        largest = max(largest, int((whole & (spans == spans[mine][0])).sum()))
    return largest
