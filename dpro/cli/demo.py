"""`dpro demo`: record a small real job, explain it, and check the explanation against the job itself.

Without torch, explains a sample run that ships with dpro. Every number comes from the functions of the
commands that are listed at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpro.cli.analysis import analyse, open_or_import
from dpro.cli.diagnose import print_diagnosis
from dpro.cli.output import console, json_option, print_json, stderr_console
from dpro.errors import DproError
from dpro.units import ms

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.store import Run

STEPS = 60
SLOW_RANK, SLOW_MS_PER_SAMPLE = 1, 6
WINDOWS = ("--every", "20", "--window-steps", "4")
SAMPLE = "slow_rank"
FURTHER = {
    "report": "where the time of each step went",
    "replay": "how well the replay fits, and the critical path",
    "whatif": "all predictions",
    "diagnose": "the findings again",
}


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the recorded runs.  [default: dpro-demo-YYYYmmdd-HHMMSS]",
)
@json_option
def demo(output: Path | None, as_json: bool) -> None:
    """Try dpro in a minute, on the CPU.

    Records a real two-rank DDP training job whose second rank reads its data from a slow disk, says which
    rank is at fault and what that costs, then records the job without the fault to check the answer.
    Where PyTorch is not installed, a run that ships with dpro is explained instead.
    """
    from dpro.analysis.answers.diagnosis import diagnose_replay
    from dpro.verdict.verdict import explain
    from dpro.verdict.words import lines_of

    if find_spec("torch") is None:
        click.echo("PyTorch is not installed: explaining a run that ships with dpro instead.\n", err=as_json)
        faulty, healthy = sample_run(), None
    else:
        folder = output or Path(time.strftime("dpro-demo-%Y%m%d-%H%M%S"))
        faulty = _record(
            folder / "slow_rank", "--slow-rank", str(SLOW_RANK), "--slow-ms", str(SLOW_MS_PER_SAMPLE)
        )
        healthy = _record(folder / "healthy")
    analysis = analyse(str(faulty))
    diagnosis = diagnose_replay(analysis)
    saved = ms(typical_step_ns(analysis.run) - typical_step_ns(open_or_import(healthy))) if healthy else None
    if as_json:
        from dpro.analysis.answers.diagnosis import diagnosis_document
        from dpro.analysis.answers.replay import replay_document
        from dpro.verdict.report import DemoDocument

        document = DemoDocument(
            run=analysis.run.label,
            replay=replay_document(analysis),
            diagnose=diagnosis_document(diagnosis),
            explain=explain(analysis),
            really_saved_ms=saved,
        )
        print_json(document)
        return
    _section("What was recorded")
    _print_recorded(analysis)
    _section("How well the replay matches the measurements")
    trust = analysis.trust
    matched = trust.coverage.collectives_matched
    click.echo(f"  step time within {trust.error_pct:.2f}% on average")
    click.echo(f"  collectives found on all ranks: {1.0 if matched is None else matched:.0%}")
    click.echo(f"  unexplained time: {trust.coverage.time_unexplained:.1%}")
    _section("In short")
    for line in lines_of(explain(analysis)):
        click.echo(line)
    _section("What is wrong, and the evidence")
    print_diagnosis(diagnosis)
    if saved is not None and diagnosis.findings:
        by = f"{saved:.1f} ms less" if saved > 0 else f"{-saved:.1f} ms more"
        why = "" if saved > 0 else ": other work took the cores"
        really = f"recorded without the fault, the same job really takes {by} per step{why}"
        console().print(f"  Checked: {really}.")
    _section("Look further")
    for command, what in FURTHER.items():
        click.echo(f"  {_dpro()} {command} {faulty}  # {what}")


def sample_run() -> Path:
    """Return the folder of the sample run with a slow rank, which ships with dpro.

    Raises:
        DproError: this installation lacks the sample run.
    """
    from importlib.resources import files

    folder = Path(str(files("dpro.sample_traces"))) / SAMPLE
    if not folder.is_dir():
        raise DproError(f"{folder}: this installation lacks the sample runs; install dpro-toolkit again")
    return folder


def _record(run: Path, *arguments: str) -> Path:
    """Record the example job in a separate process, as a user would; return its run directory.

    Raises:
        DproError: the job failed.
    """
    from importlib.resources import files

    script = str(files("dpro.sample_traces") / "train.py")
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", script, "--steps", str(STEPS), *arguments]
    click.echo(f"$ {_dpro()} record -o {run} {' '.join(WINDOWS)} -- {' '.join(command)}", err=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    status = stderr_console()
    with status.status("recording, about 15 s …"):
        done = subprocess.run(
            [sys.executable, "-m", "dpro", "record", "--quiet", "-o", str(run), *WINDOWS, "--", *launcher],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["(it printed nothing)"]
        raise DproError(f"the example job ended with exit code {done.returncode}: {lines[-1]}")
    return run


def typical_step_ns(run: Run) -> float:
    """Return the typical step of a run, in ns; 0 without steps."""
    from dpro.replay.steps import step_series, steps_of

    series = step_series(steps_of(run))
    return 0.0 if series is None else series.typical_ns


def _print_recorded(analysis: Analysis) -> None:
    rows, manifest = analysis.run.rows(), analysis.run.manifest
    per_rank = rows["steps"] // max(len(manifest.ranks), 1)
    click.echo(f"  {len(manifest.ranks)} of {manifest.world_size} ranks of a real DDP job on gloo")
    click.echo(f"  {per_rank} steps on each, and {rows['collectives']} collective calls")
    click.echo(f"  {rows['spans']:,} spans in {analysis.trust.steps.height} steps recorded in depth")


def _section(title: str) -> None:
    console().print(f"\n{title}", style="bold")


def _dpro() -> str:
    """Return how to call dpro: by its name if the shell finds it, else by its path beside this Python."""
    from shutil import which

    beside = Path(sys.executable).parent / "dpro"
    if which("dpro") or not beside.exists():
        return "dpro"
    return os.path.relpath(beside)
