"""`dpro record`: run an unmodified job and record it.

Takes a command; passes on its output and exit code, and writes a run directory, which is complete moments
after the command has ended.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dpro.cli.options import DAY_S, MAX_STEPS, MAX_WINDOW_STEPS, NumberRange
from dpro.cli.output import parse_share
from dpro.errors import UsageError
from dpro.plugins import hooks_of

if TYPE_CHECKING:
    from dpro.collectors.launch.notices import LastWord
    from dpro.collectors.launch.processes import LaunchedProcess
    from dpro.collectors.launch.recording import Launch

_ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"  # if 1, events queue behind kernels launched before them
_OF_OWN_WINDOWS = frozenset({"every", "skip"})
_OF_WINDOWS = _OF_OWN_WINDOWS | frozenset(
    {
        "on_request",
        "window_steps",
        "budget",
        "shapes",
        "stacks",
        "modules",
        "memory",
        "execution_trace",
        "detach",
        "keep_windows",
        "keep",
    }
)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-o",
    "--output",
    "run",
    type=click.Path(path_type=Path, file_okay=False),
    help="Run directory to create.  [default: dpro-run-YYYYmmdd-HHMMSS]",
)
@click.option(
    "--no-windows", "windows", flag_value=False, default=True,
    help="Record no deep windows, which can cost more than the budget: only steps, calls and telemetry, "
    "without a replay.",
)  # fmt: skip
@click.option(
    "--on-request", is_flag=True,
    help="Record deep windows only when asked: by `dpro attach RUN --steps K`, a button of "
    "`dpro dashboard RUN`, or `dpro watch`.",
)  # fmt: skip
@click.option(
    "--window-steps", type=click.IntRange(1, MAX_WINDOW_STEPS), default=2, show_default=True, metavar="K",
    help="Steps per deep window, which records every operator and kernel.",
)  # fmt: skip
@click.option(
    "--budget", callback=parse_share, default="1%", show_default=True, metavar="SHARE",
    help="Share of the job's time that recording may cost; it sets the spacing of deep windows. The first "
    "window is always recorded, and slows a launch-bound GPU job for the rest of its run: see --no-windows.",
)  # fmt: skip
@click.option(
    "--every", type=click.IntRange(1, MAX_STEPS), metavar="N",
    help="Start a deep window every N steps, whatever it costs.",
)  # fmt: skip
@click.option(
    "--skip", type=click.IntRange(2, MAX_STEPS), default=5, show_default=True, metavar="S",
    help="Steps before the first deep window; dpro needs two to find the step boundaries.",
)  # fmt: skip
@click.option(
    "--shapes/--no-shapes", default=False, show_default=True, help="Record input shapes of operators."
)
@click.option("--stacks/--no-stacks", default=False, show_default=True, help="Record Python calls.")
@click.option(
    "--modules/--no-modules",
    default=False,
    show_default=True,
    help="Record the module of each operator.",
)
@click.option(
    "--memory/--no-memory",
    default=False,
    show_default=True,
    help="Record every allocation: memory in use and its peak.",
)
@click.option(
    "--keep-windows", type=click.IntRange(1, MAX_STEPS), metavar="N",
    help="Deep windows to keep in RUN after the job, the same ones on all ranks.  [default: all]",
)  # fmt: skip
@click.option(
    "--keep", type=click.Choice(["latest", "slow"]), default="latest", show_default=True,
    help="Which deep windows to keep: the latest, or the ones with the slowest steps.",
)  # fmt: skip
@click.option(
    "--mask-command",
    is_flag=True,
    help="Record only the first word of the command. Secrets are always masked.",
)
@click.option(
    "--step", default="", metavar="MODULE:FUNCTION",
    help="End a step when this function of the job returns (train:train_step, mine.loop:Trainer.step), "
    "instead of at the optimizer update.",
)  # fmt: skip
@click.option(
    "--telemetry-period", "telemetry_period_s", type=NumberRange(0, DAY_S), default=1, show_default=True,
    metavar="SECONDS", help="Sampling period of the node's GPUs, network and CPUs; 0 turns sampling off.",
)  # fmt: skip
@click.option(
    "--nccl-timing", is_flag=True,
    help="Have PyTorch time every NCCL collective (TORCH_NCCL_ENABLE_TIMING=1), so that a slow GPU "
    "shows without deep windows. With CUDA_DEVICE_MAX_CONNECTIONS=1, this prevents communication from "
    "overlapping compute.",
)  # fmt: skip
@click.option(
    "--detach", is_flag=True, hidden=True,
    help="Detach CUPTI from a launch-bound GPU job after deep windows, so that later steps are as fast as "
    "before. Untried on most GPUs.",
)  # fmt: skip
@click.option(
    "--ray", is_flag=True,
    help="Record the actors and Ray Train workers of a driver that calls ray.init, on all nodes: RUN has "
    "to be in a folder that they share.",
)  # fmt: skip
@click.option(
    "--watch-loss", is_flag=True,
    help="Record the loss and the gradient norm of every step, so that `dpro diagnose` and `dpro watch` name "
    "the first rank and step where one is not finite or jumps.",
)  # fmt: skip
@click.option(
    "-q", "--quiet", is_flag=True, help="Say nothing about the recording on stderr, which the job shares."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def record(
    context: click.Context,
    /,
    run: Path | None,
    command: tuple[str, ...],
    quiet: bool,
    **given: Any,
) -> None:
    """Record an unmodified job under any launcher.

    \b
    dpro record -o RUN -- python train.py
    dpro record -o RUN -- torchrun --nproc-per-node 8 train.py
    srun dpro record -o RUN -- python train.py          (one shared RUN)
    mpirun -np 16 dpro record -o RUN -- python train.py
    dpro record --ray -o RUN -- python driver.py

    dpro always records every step, and every collective call outside of CUDA graphs. From time to time it
    records K steps in depth (a deep window), for replay and what-if. Their measured cost decides how often;
    `--every N` fixes the interval, for example in a job with few steps; with `--on-request` there is none
    until you ask.

    A step ends at the update of the job's optimizers. To end it elsewhere, use --step, or put a range
    around each step, without importing dpro: with torch.profiler.record_function("dpro::step"): ...

    If Slurm requeues the job, its restarts are recorded into RUN-restart1 and so on, next to RUN.

    The job keeps its output, signals and exit code; dpro adds a line to stderr, which says where RUN is, and
    one at the end on a terminal, or if nothing was recorded. RUN is ready moments after the job ends, even
    after a crash; commands that read RUN wait until it is.
    """
    from dpro.collectors.launch.start import TEARDOWN, RecordOptions, Request, launch

    names = {option.name for option in fields(RecordOptions)} & given.keys()
    chosen = RecordOptions(**{name: given.pop(name) for name in names})
    if not chosen.windows:
        _refuse(context, _OF_WINDOWS, "deep windows, which --no-windows turns off")
    if chosen.on_request:
        _refuse(context, _OF_OWN_WINDOWS, "automatic deep windows, which --on-request turns off")
    if chosen.every is not None and chosen.window_steps > chosen.every:
        raise UsageError(f"--window-steps {chosen.window_steps} does not fit into --every {chosen.every}")
    if chosen.keep_windows is None and chosen.keep != "latest":
        raise UsageError(f"--keep {chosen.keep}: add --keep-windows N to say how many")
    module, colon, function = chosen.step.partition(":")
    if chosen.step and not (colon and all(map(str.isidentifier, f"{module}.{function}".split(".")))):
        raise UsageError(f"--step {chosen.step}: give a function as MODULE:FUNCTION, for instance train:step")
    if chosen.nccl_timing and os.environ.get(_ONE_QUEUE) == "1":
        click.echo(
            f"dpro: --nccl-timing with {_ONE_QUEUE}=1: communication will not overlap compute", err=True
        )
    if chosen.detach and TEARDOWN in os.environ:
        raise UsageError(f"--detach changes {TEARDOWN} while the job runs, but it is set: unset it")
    request = Request(command, chosen, quiet=quiet)
    for ask in hooks_of("record"):
        ask(request, given)
    launch(run or Path(time.strftime("dpro-run-%Y%m%d-%H%M%S")), request, _sidecar)


def _refuse(context: click.Context, names: frozenset[str], what_for: str) -> None:
    """Raise if the user gave an option that another option makes meaningless.

    Args:
        names: names of the parameters of these options.
        what_for: what the options set, and which option turns it off.

    Raises:
        UsageError: one of these options was given.
    """
    given = context.get_parameter_source
    for parameter in context.command.params:
        if parameter.name in names and given(parameter.name) is not ParameterSource.DEFAULT:
            raise UsageError(f"{parameter.opts[0]} applies to {what_for}")


def _sidecar(recording: Launch, job: LaunchedProcess, last_word: LastWord) -> None:
    """Run the sidecar, the process beside the job; it imports Polars only after the job has ended."""
    from dpro.collectors.sidecar import attend
    from dpro.opening import readers

    def convert(recording: Launch) -> None:
        from dpro.collectors.finish import convert_waiting

        convert_waiting(recording, readers())

    def finish(recording: Launch, status: int | None, statuses: dict[int, int]) -> None:
        from dpro.collectors.finish import finish

        finish(recording, readers(), status, statuses)

    attend(recording, job, convert, finish, last_word)
    _say_what_was_recorded(recording.run, last_word)


def _say_what_was_recorded(run: Path, last_word: LastWord) -> None:
    with suppress(OSError, ValueError, LookupError):
        if why := json.loads((run / "manifest.json").read_bytes())["unrecorded"]:
            last_word.say(why)
        else:
            last_word.say_recorded()
