"""`dpro record`: run a job, unchanged, and have it recorded.

In: a command. Out: the command's own output and exit code, and a run directory that is whole moments after
the command has ended. This is where the recorder meets the importers that read what PyTorch wrote.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpro.errors import InputError, UsageError

if TYPE_CHECKING:
    from dpro.collectors.convert import Readers
    from dpro.collectors.launch import Launch
    from dpro.collectors.processes import Process


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-o",
    "--output",
    "run",
    type=click.Path(path_type=Path, file_okay=False),
    help="Run directory to make.  [default: dpro-run-YYYYmmdd-HHMMSS]",
)
@click.option(
    "--window-steps", type=click.IntRange(min=1), default=2, show_default=True, metavar="K",
    help="Steps in a deep window, which sees every operator and kernel.",
)  # fmt: skip
@click.option(
    "--every", type=click.IntRange(min=1), default=200, show_default=True, metavar="N",
    help="Steps from one deep window to the next.",
)  # fmt: skip
@click.option(
    "--skip", type=click.IntRange(min=1), default=5, show_default=True, metavar="S",
    help="Steps before the first deep window.",
)  # fmt: skip
@click.option(
    "--shapes/--no-shapes", default=False, show_default=True, help="Input shapes of operators, too."
)
@click.option(
    "--mask-command",
    is_flag=True,
    help="Of the command, record only its first word. Secrets are masked anyway.",
)
@click.option(
    "--step", default="", metavar="MODULE:FUNCTION",
    help="A step ends where this function of the job returns (train:train_step, mine.loop:Trainer.step), "
    "instead of where its optimizers update.",
)  # fmt: skip
@click.option(
    "--telemetry-period", type=click.FloatRange(min=0), default=1, show_default=True, metavar="SECONDS",
    help="Time between samples of GPUs, network and CPUs of the node; 0 for none.",
)  # fmt: skip
@click.option(
    "--nccl-inspector", default="", metavar="PLUGIN",
    help="Have NCCL load its Inspector, and take in what that measures: the path of "
    "libnccl-profiler-inspector.so, or `inspector` if it is on the job's library path.",
)  # fmt: skip
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def record(
    run: Path | None,
    window_steps: int,
    every: int,
    skip: int,
    shapes: bool,
    mask_command: bool,
    step: str,
    telemetry_period: float,
    nccl_inspector: str,
    command: tuple[str, ...],
) -> None:
    """Record a job, unchanged, through any launcher.

    \b
    dpro record -o RUN -- python train.py
    dpro record -o RUN -- torchrun --nproc-per-node 8 train.py
    srun dpro record -o RUN -- python train.py          (one shared RUN)
    mpirun -np 16 dpro record -o RUN -- python train.py

    Every step and every collective call is recorded all the time. K steps in every N are recorded in
    depth: that is what replay and what-if work on. Raise N if the windows cost too much, or lower it for
    a job of few steps.

    A step ends where the job's optimizers update. If that is not what a step is, name it: with --step, or
    with a range around it, which needs no dpro: with torch.profiler.record_function("dpro::step"): ...

    The job's output, signals and exit code are its own. RUN is ready moments after the job has ended,
    also after a crash; commands that read it wait for it.
    """
    from dpro.collectors.inspector import check_plugin
    from dpro.collectors.launch import RecordOptions, launch

    if window_steps > every:
        raise UsageError(f"--window-steps {window_steps} does not fit into --every {every}")
    if step and not all(part.isidentifier() for part in step.replace(":", ".", 1).split(".")):
        raise UsageError(f"--step {step}: give a function as MODULE:FUNCTION, for instance train:train_step")
    options = RecordOptions(
        window_steps=window_steps,
        every=every,
        skip=skip,
        shapes=shapes,
        mask_command=mask_command,
        step=step,
        telemetry_period_s=telemetry_period,
        nccl_inspector=check_plugin(nccl_inspector, os.environ) if nccl_inspector else "",
    )
    launch(run or Path(time.strftime("dpro-run-%Y%m%d-%H%M%S")), command, options, _sidecar)


def ensure_finished(run: str | os.PathLike[str], timeout_s: float = 60.0) -> None:
    """Make sure that a run, if `dpro record` made it, is whole: call it before opening one.

    Waits for a sidecar that still writes; does its work where it was killed together with the job.

    Args:
        run: a run directory, or anything else, which is left alone.
        timeout_s: how long to wait at most.

    Raises:
        InputError: the run is still being recorded, takes longer than the timeout, or cannot be finished.
    """
    from dpro.collectors.launch import wait_until_finished

    abandoned = wait_until_finished(run, timeout_s)
    if abandoned:
        from dpro.collectors.finish import finish

        for recording in abandoned:
            try:
                finish(recording, _readers(), None, {})
            except OSError as error:
                raise InputError(
                    f"{run}: its tables cannot be written ({error.strerror or error})"
                ) from error


def _sidecar(recording: Launch, job: Process) -> None:
    """What the process beside the job does; polars is imported only after the job."""
    from dpro.collectors.sidecar import attend

    def convert(recording: Launch) -> None:
        from dpro.collectors.finish import convert_waiting

        convert_waiting(recording, _readers())

    def finish(recording: Launch, status: int | None, statuses: dict[int, int]) -> None:
        from dpro.collectors.finish import finish

        finish(recording, _readers(), status, statuses)

    attend(recording, job, convert, finish)


def _readers() -> Readers:
    from dpro.collectors.convert import Readers
    from dpro.ingest.flight_recorder import read_dump
    from dpro.ingest.kineto import read_trace
    from dpro.ingest.nccl.inspector import read_inspector_log

    return Readers(trace=read_trace, dump=read_dump, log=read_inspector_log)
