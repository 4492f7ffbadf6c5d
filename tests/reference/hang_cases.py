"""Simulated hangs through dumps on disk to findings, and whether these are right.

A case draws everything from its seed: layout, fault, clocks, how dumps are taken, which is lost. `decided`
says whether the dumps hold what it takes to be right: the dump of the rank at fault and, where ranks are
compared, of enough others.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.hang.find import find_hangs
from dpro.detect.hang.records import Records, make_records
from dpro.errors import DproError
from dpro.ingest.flight_recorder import read_dump
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, PROCESS_GROUPS, STEPS, TABLES, WORKERS, conform
from tests.reference.hanging_dumps import Dumping, choose_dumping, write_dumps
from tests.reference.hanging_jobs import run_job
from tests.reference.hanging_model import CLASSES, Fault, Job

OPEN = 0.5  # up to this confidence a finding says that it may be something else
COMPARED = ("size", "dtype", "op", "skip", "order")


@dataclass(frozen=True)
class Case:
    """A job with its dumps."""

    job: Job
    dumping: Dumping
    missing: tuple[int, ...]

    @property
    def fault(self) -> Fault | None:
        """What went wrong, None for a healthy job or one that came to no harm."""
        return None if self.job.finished else self.job.fault

    @property
    def decided(self) -> bool:
        """Whether the dumps show what happened."""
        fault, lost = self.fault, {*self.missing, *self.dumping.early}
        if fault is None or fault.group is None:
            return True
        seen = set(fault.group.ranks) - lost
        if fault.kind == "comm":
            return not lost & set(fault.group.ranks)
        return not lost & set(fault.ranks) and len(seen) >= {"host": 1}.get(
            fault.kind, 3 if fault.kind in COMPARED else 2
        )


def make_case(
    seed: int, layout: str, num_ranks: int, kind: str | None, folder: Path, *, gloo: bool, lose: bool
) -> Case:
    """Run a job and leave its dumps in a folder."""
    rng = random.Random(seed)
    job = run_job(rng, layout, num_ranks, kind, gloo=gloo)
    dumping = choose_dumping(rng, job)
    missing = (rng.randrange(num_ranks),) if lose else ()
    moment = None
    if kind is None and rng.random() < 0.5:  # the job was fine, and still ran
        moment = rng.uniform(0.2, 1) * job.last
        facts = dumping.version, dumping.as_json, dumping.active_only, dumping.ring, dumping.timing
        dumping = Dumping(*facts, early={}, stamped=True)
    write_dumps(rng, job, dumping, folder, missing=missing, moment=moment)
    return Case(job, dumping, missing)


def records_of(folder: Path, num_ranks: int) -> tuple[Records, list[str]]:
    """The dumps of a folder, as a run would hold them, and why others were left out."""
    frames: Mapping[str, list[pl.DataFrame]] = defaultdict(list)
    left_out = []
    for path in sorted(folder.iterdir()):
        try:
            trace = read_dump(path)
        except DproError as error:
            left_out.append(str(error))
            continue
        for name, frame in trace.frames.items():
            frames[name].append(conform(TABLES[name], frame))
    tables = [pl.concat([t.empty(), *frames[t.name]]) for t in (COLLECTIVES, PROCESS_GROUPS, WORKERS)]
    return make_records(*tables, STEPS.empty(), CLOCK_SAMPLES.empty(), num_ranks), left_out


def diagnose(folder: Path, num_ranks: int) -> list[Finding]:
    """What hangs by the dumps of a folder."""
    return find_hangs(records_of(folder, num_ranks)[0])


def verdict(case: Case, findings: list[Finding]) -> str:
    """`right`; `open` where a finding says that it may be something else; `silent`, or `wrong`."""
    fault = case.fault
    if fault is None:
        return "wrong" if findings else "right"
    if not findings:
        return "silent"
    first, *others = findings
    ranks, got = set(fault.ranks), set(first.ranks)
    if fault.kind == "comm":
        found = got | {*case.missing, *case.dumping.early} >= ranks
    else:
        found = got == ranks and all(each.confidence <= OPEN for each in others)
    if found and first.class_ == CLASSES[fault.kind]:
        return "right"
    return "open" if first.confidence <= OPEN else "wrong"
