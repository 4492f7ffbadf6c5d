"""`dpro doctor`: check whether this machine is ready to record and to explain, and say what to do if not.

Prints one line per check. The decisive one records a real tiny job with the Python interpreter of the user's
jobs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpro.cli.output import console, json_option, print_json, stderr_console

if TYPE_CHECKING:
    from dpro.extensions.doctor.readiness import Check

STEPS = 8
JOB_S = 180
JOB = f"""
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({STEPS}):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
LIMITS = "see docs/recording.md, Limits"
MARKS = {"ready": "ok", "limited": "--", "missing": "!!"}


@click.command()
@click.option(
    "--python",
    default=sys.executable,
    metavar="PYTHON",
    help="Python interpreter of the jobs.  [default: dpro's own]",
)
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path(), metavar="FOLDER",
    help="Folder for runs; jobs on several hosts need a shared folder.  [default: current folder]",
)  # fmt: skip
@json_option
def doctor(python: str, folder: Path, as_json: bool) -> None:
    """Check whether this machine is ready to record.

    \b
    dpro doctor
    dpro doctor --python /envs/train/bin/python --folder /shared/runs

    Checks torch, NCCL, GPUs and their driver, telemetry, network, clocks, the folder for runs, the
    environment and optional packages, and records a tiny job to test the recorder. Run it on the job's
    machine, in the job's environment. It leaves only compiled code in dpro's cache, which speeds up the first
    use of other commands.

    \b
    ok  ready
    --  works with limitations
    !!  a requirement of dpro is missing; the exit code is 1
    """
    with stderr_console().status("Checking this machine …"):
        checks = list(examine(python, folder))
    if as_json:
        from dpro.extensions.doctor.readiness import ReadinessDocument

        ready = all(check.state != "missing" for check in checks)
        print_json(ReadinessDocument(ready=ready, checks=checks))
    else:
        out = console()
        for check in checks:
            out.print(f"{MARKS[check.state]}  {check.name:<12} {check.what}")
            if check.advice:
                out.print(f"{'':16} {check.advice}")
    if any(check.state == "missing" for check in checks):
        raise SystemExit(1)


def examine(python: str, folder: Path) -> Iterator[Check]:
    """Yield all checks, the most important first."""
    from dpro.extensions.doctor import readiness

    torch, facts = readiness.torch_of(python)
    yield torch
    if torch.state != readiness.MISSING:
        yield recording(python)
    yield from readiness.environment(os.environ)
    yield from readiness.gpus(facts)
    yield from readiness.attached(facts, os.environ)
    yield readiness.network()
    yield readiness.clock()
    yield readiness.folder(folder)
    yield readiness.stacks()
    yield from loops()
    yield from readiness.extras()


def loops() -> Iterator[Check]:
    """Compile the loops of imports and analyses by explaining a sample run; yield nothing without numba."""
    from dpro.analysis.analysis import Analysis
    from dpro.cli.demo import sample_run
    from dpro.compiled import can_compile
    from dpro.extensions.doctor.readiness import READY, Check
    from dpro.ingest.kineto.columns import Columns, Memory
    from dpro.ingest.kineto.scanner import Scanner
    from dpro.opening import open_path
    from dpro.replay.construction.graph_builder import build_graph
    from dpro.verdict.verdict import explain

    if not can_compile():
        return
    run = open_path(sample_run())
    Scanner(Columns(), Memory())
    build_graph(run)  # in addition, since the analysis may find the graph in the cache
    explain(Analysis(run))
    yield Check("loops", READY, "compiled and cached")


def recording(python: str) -> Check:
    """Check whether a tiny job is recorded, with a deep window."""
    from dpro.errors import DproError
    from dpro.extensions.doctor.readiness import LIMITED, MISSING, READY, Check
    from dpro.opening import ensure_finished
    from dpro.schema import SPANS, STEPS
    from dpro.store import open_run

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        recorder = [sys.executable, "-m", "dpro", "record", "-o", str(run), "--skip", "4"]
        try:
            subprocess.run(
                [*recorder, "--", python, "-c", JOB], capture_output=True, timeout=JOB_S, check=True
            )
            ensure_finished(run)
            opened = open_run(run)
        except subprocess.CalledProcessError as error:
            what = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
            return Check(
                "recording", MISSING, f"a tiny job failed: {' '.join(what)}", "run it without dpro first"
            )
        except subprocess.TimeoutExpired:
            what = f"a tiny job took longer than {JOB_S} s: this machine is busy"
            return Check("recording", LIMITED, what, "try again when it is quiet")
        except (subprocess.SubprocessError, DproError) as error:
            return Check("recording", MISSING, f"a tiny job was not recorded: {error}", LIMITS)
        rows = opened.rows()
        steps, spans = rows[STEPS.name], rows[SPANS.name]
        if steps and spans:
            return Check(
                "recording", READY, f"a tiny job was recorded: {steps} steps, {spans} spans in depth"
            )
        why = "; ".join(opened.manifest.warnings) or f"{steps} steps, {spans} spans"
        return Check("recording", MISSING, f"a tiny job was not recorded: {why}", LIMITS)
