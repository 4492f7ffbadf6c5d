"""Jobs whose fault is known: the one table of `benchmarks/diagnosis/jobs.py` and `tests/faults`.

Each row is a real job of `train.py` here, or of `benchmarks/recording/pipeline_job.py` where it has stages,
and what is true of it: the ranks at fault, the classes that name it, what it costs, and what is at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

TRAIN, PIPELINE = "tests/faults/train.py", "benchmarks/recording/pipeline_job.py"
HANGS = ("hang.host", "hang.rank")
LATE = ("slow.host",)
COMPUTES = ("slow.compute",)


@dataclass(frozen=True)
class FaultJob:
    """One job, and the truth about it.

    Attributes:
        name: by which it is chosen.
        fault: what goes wrong, as the script calls it.
        options: of the script.
        num_ranks: of the job.
        ranks: at fault; none where that is the job as a whole, or nothing is.
        classes: of findings, each of which names the fault; none of a healthy job.
        cost_ms: per step, on average over those that show it; None where it is not known or no step does.
        place: expression that matches what is at fault in a line of the finding; empty where none has to.
        row: of the list of faults that this was begun with; 0 for others.
        script: the program.
        record: options of `dpro record`.
        measured: whether what the script took for it is what it costs.
        root: whether it needs to be run by root, as on a control group of its own.
    """

    name: str
    fault: str
    options: str = ""
    num_ranks: int = 2
    ranks: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    cost_ms: float | None = None
    place: str = ""
    row: int = 0
    script: str = TRAIN
    record: tuple[str, ...] = field(default=())
    measured: bool = True
    root: bool = False

    @property
    def healthy(self) -> bool:
        """Whether nothing is to be said of it."""
        return not self.classes

    @property
    def ms(self) -> float:
        """How long the fault should take each time."""
        words = self.options.split()
        return float(words[words.index("--ms") + 1])

    @property
    def arguments(self) -> list[str]:
        """Of the script."""
        if self.script == PIPELINE:
            return self.options.split()
        ranks = ["--rank", *map(str, self.ranks)] if self.ranks else []
        return [self.fault, *ranks, *self.options.split()]


def _late() -> Iterator[FaultJob]:
    """One rank is late in each step, or two are."""
    for name, num_ranks, rank, ms, options in (
        ("two ranks", 2, 1, 30, ""),
        ("first of two", 2, 0, 60, ""),
        ("four ranks", 4, 2, 40, ""),
        ("since step 30", 4, 0, 30, "--since 30 --steps 70"),
        ("after the last call", 2, 1, 40, "--place reduced"),
        ("after the update", 4, 3, 40, "--place updated"),
        ("ten times as long", 2, 1, 300, "--steps 30"),
        ("a third", 4, 1, 12, "--steps 80"),
    ):
        yield FaultJob(
            f"sleep, {name}", "sleep", f"--ms {ms} {options}", num_ranks, (rank,), LATE, ms, "waits|sleeps"
        )
    for name, num_ranks, rank, ms, options in (
        ("two ranks", 2, 1, 40, ""),
        ("four ranks", 4, 2, 30, "--step-ms 60"),
        ("since step 30", 2, 0, 40, "--since 30 --steps 70"),
    ):
        yield FaultJob(
            f"compute, {name}", "compute", f"--ms {ms} {options}", num_ranks, (rank,), COMPUTES, ms,
            "computes .* longer|in operators", 11,
        )  # fmt: skip
    for name, ranks, ms, options in (
        ("first and last", (0, 3), 160, "--steps 40"),
        ("neighbours", (1, 2), 60, ""),
        ("since step 30", (0, 1), 50, "--since 30 --steps 80"),
    ):
        yield FaultJob(f"two late, {name}", "sleep", f"--ms {ms} {options}", 4, ranks, LATE, ms, "", 7)
    yield FaultJob("grows on one rank", "grow", "--ms 60 --since 10", 2, (1,), LATE, None, "")


def _of_hosts() -> Iterator[FaultJob]:
    """Something of the host of one rank holds it up, or of all."""
    both = (*LATE, *COMPUTES)
    work = "--work-ms 10 --step-ms 20"
    for name, fault, num_ranks, rank, options, classes, place, row in (
        ("quota", "quota", 2, 1, f"{work} --share 0.15", LATE, "cgroup|limit of CPU", 2),
        ("quota of four", "quota", 4, 2, f"{work} --share 0.15 --step-ms 80", LATE, "cgroup|limit of CPU", 2),
        ("shared core", "shared-core", 2, 1, f"{work} --share 3", LATE, "core", 2),
        ("child process", "child-process", 2, 0, "--ms 100", both, "processes that it starts", 4),
        (
            "child process of four",
            "child-process",
            4,
            0,
            "--ms 100 --since 20",
            both,
            "processes that it starts",
            4,
        ),
        ("interpreter", "interpreter", 2, 1, work, both, "thread|interpreter", 11),
        ("interpreter of four", "interpreter", 4, 2, f"{work} --step-ms 80", both, "thread|interpreter", 11),
        ("write through", "write-through", 2, 1, "--ms 60", both, "disk", 11),
        ("write through, four", "write-through", 4, 3, "--ms 60", both, "disk", 11),
        ("write lines", "write-lines", 2, 0, "--ms 40", both, "", 11),
        ("collects", "collect", 2, 1, "--objects 1000000", LATE, "garbage", 11),
    ):
        yield FaultJob(
            name, fault, options, num_ranks, (rank,), classes, None, place, row, root=fault == "quota"
        )
    yield FaultJob("starved", "shared-core", f"{work} --share 9", 1, (), LATE, None, "core", 2)
    for num_ranks, ms in ((2, 130), (4, 40)):
        yield FaultJob(
            f"serialised, {num_ranks} ranks", "serialised", f"--ms {ms} --steps 40", num_ranks, (),
            LATE, (num_ranks - 1) * ms, "take turns", 6, measured=False,
        )  # fmt: skip


def _ends() -> Iterator[FaultJob]:
    """Ranks that die, leave or stand still."""
    dead = ("dead.rank",)
    own = "train\\.py:\\d+ "
    sample = "ValueError: sample.*" + own + "decode"
    for name, fault, num_ranks, ranks, options, classes, place, row in (
        ("killed", "killed", 2, (1,), "--ms 0", dead, "SIGKILL", 9),
        ("killed, four", "killed", 4, (2,), "--ms 0", dead, "SIGKILL", 9),
        ("killed after a stall", "killed", 2, (1,), "--ms 8000", dead, "SIGKILL", 9),
        ("two killed after a stall", "killed", 4, (0, 3), "--ms 8000", dead, "SIGKILL", 9),
        ("two raise", "raises", 4, (1, 2), "", dead, own, 9),
        ("crash", "crash", 2, (1,), "", dead, "SIGSEGV", 9),
        ("raises", "raises", 2, (0,), "", dead, own + "raises", 10),
        ("raises, four", "raises", 4, (3,), "", dead, own + "raises", 10),
        ("memory", "memory", 2, (1,), "", dead, "MemoryError", 10),
        ("exits", "exits", 2, (1,), "", dead, "exit code 3", 10),
        ("hook fails", "hook-fails", 2, (1,), "", dead, "ValueError: loss.*" + own + "hook_fails", 10),
        ("hook replaced", "hook-replaced", 2, (1,), "", dead, "ValueError: loss.*" + own + "hook_rep", 10),
        ("bad sample", "bad-sample", 2, (1,), "--workers 1", dead, sample, 10),
        ("bad sample, four", "bad-sample", 4, (0,), "--workers 2", dead, sample, 10),
        ("leaves", "leave", 2, (1,), "", ("hang.mismatch",), "left early|exited", 0),
        ("stuck", "stuck", 2, (1,), "", HANGS, own + "stuck", 0),
        ("stuck, four", "stuck", 4, (2,), "", HANGS, own + "stuck", 0),
        ("stopped", "stop", 4, (1,), "", HANGS, "stopped", 0),
        ("interpreter's lock", "lock-held", 4, (0,), "", HANGS, "GIL", 0),
    ):  # fmt: skip
        yield FaultJob(name, fault, f"--since 15 {options}", num_ranks, ranks, classes, None, place, row)
    for fault, num_ranks, rank, call in (
        ("skip", 2, 1, 1), ("skip", 4, 2, 0), ("skip", 4, 0, 5), ("skip", 2, 0, 3), ("size", 2, 1, 0),
        ("size", 4, 1, 2), ("dtype", 4, 3, 0), ("other-call", 4, 2, 1), ("order", 4, 1, 0),
    ):  # fmt: skip
        yield FaultJob(
            f"{fault}, {num_ranks} ranks, call {call}", fault, f"--since 15 --call {call}", num_ranks,
            (rank,), ("hang.mismatch",), None, "called", 1,
        )  # fmt: skip


def _in_some_steps() -> Iterator[FaultJob]:
    """Time that is lost in some steps only."""
    pauses = ("pauses",)
    for name, fault, num_ranks, ranks, options, every, ms, place in (
        ("pause", "sleep", 2, (1,), "--place begin", 10, 300, ""),
        ("pause after the last call", "sleep", 2, (1,), "--place reduced", 10, 300, ""),
        ("pause after the update", "sleep", 4, (2,), "--place updated", 10, 300, ""),
        ("save", "save", 2, (0,), "--place updated", 20, 1000, "checkpoint"),
        ("save after the last call", "save", 4, (0,), "--place reduced", 15, 600, "checkpoint"),
        ("long save", "save", 2, (0,), "--place updated", 40, 5000, "checkpoint"),
        ("validation of one", "validate", 2, (0,), "--place updated", 20, 800, "validat"),
        ("validation of one, four", "validate", 4, (0,), "--place reduced", 20, 800, "validat"),
        ("saved by all", "save", 2, (), "--place updated", 20, 800, "checkpoint"),
    ):
        yield FaultJob(
            name, fault, f"--ms {ms} --every {every} --since 9 --steps 100 {options}", num_ranks, ranks,
            # What comes after the last step's calls is in no step that is timed.
            pauses, ms * len(range(9, 100 if "begin" in options else 99, every)) / 100, place, 12,
        )  # fmt: skip
    yield FaultJob(
        "all slower", "sleep", "--ms 60 --since 50 --steps 100", 2, (), ("slow.regression",), 60, "", 13
    )
    yield FaultJob(
        "all grow", "grow", "--ms 60 --since 20 --steps 80", 2, (), ("slow.regression",), None, "", 13
    )
    yield FaultJob(
        "input of all",
        "none",
        "--workers 1 --sample-ms 20 --steps 40",
        2,
        (),
        LATE,
        None,
        "data|DataLoader",
        0,
    )


def _pipelines() -> Iterator[FaultJob]:
    """A stage of a pipeline is slow."""
    base = "gpipe --forward-ms 2 --inputs-ms 2 --weights-ms 2 --layers {layers} --steps {steps} {options}"
    stage = ("imbalance.stage", "slow.host", "slow.compute")
    for name, layers, rank, options in (
        ("slow stage", "2/6", 1, ""),
        ("slow first stage", "6/2", 0, ""),
    ):
        yield FaultJob(
            name, "stage", base.format(layers=layers, steps=24, options=options), 2, (rank,), stage, None,
            "stage", 5, PIPELINE,
        )  # fmt: skip


def _healthy() -> Iterator[FaultJob]:
    """Nothing is wrong."""
    for name, fault, num_ranks, options in (
        ("plain", "none", 2, ""),
        ("plain, four", "none", 4, ""),
        ("plain, one", "none", 1, ""),
        ("long steps", "none", 2, "--step-ms 150 --steps 40"),
        ("short steps", "none", 2, "--step-ms 5 --steps 200"),
        ("works", "none", 2, "--step-ms 40 --work-ms 10"),
        ("works, four", "none", 4, "--step-ms 100 --work-ms 5"),
        ("few steps", "none", 2, "--steps 12"),
        ("many steps", "none", 2, "--steps 300 --step-ms 10"),
        ("loads", "none", 2, "--workers 1"),
        ("loads, four", "none", 4, "--workers 1"),
        ("sleeps on all", "sleep", 4, "--ms 30"),
        ("validates on all", "validate", 2, "--ms 400 --every 20 --since 19 --place updated --steps 100"),
        (
            "validates on all, four",
            "validate",
            4,
            "--ms 400 --every 20 --since 19 --place updated --steps 80",
        ),
        ("rollouts", "rollout", 2, "--ms 100"),
        ("rollouts, four", "rollout", 4, "--ms 100 --steps 40"),
        ("rollouts at times", "rollout", 2, "--ms 300 --every 8 --since 7 --steps 80"),
        ("short collection", "collect", 2, "--objects 20000 --every 10"),
        ("warms up", "grow", 2, "--ms 0 --step-ms 30"),
        ("saves quickly", "save", 2, "--ms 20 --every 20 --since 19 --steps 100 --place updated"),
    ):
        yield FaultJob(f"healthy, {name}", fault, options, num_ranks)
    yield FaultJob(
        "curriculum", "sleep", "--ms 60 --since 50 --steps 100", 2, (), ("slow.regression",), 60, "", 14
    )


JOBS = {
    job.name: job
    for rows in (_late(), _of_hosts(), _ends(), _in_some_steps(), _pipelines(), _healthy())
    for job in rows
}
