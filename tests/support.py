"""The page of what dpro was tried with, `docs/support.md`: each cell is a number of tests that passed.

python -m tests.support [--only NAME …]      # try the cells, keep the results, write the page
python -m tests.support --write              # only write the page

A cell that needs what this machine lacks is not tried, and says so: its tests are skipped. Pythons other than
this one are looked for in `build/python/VERSION`, versions of PyTorch in `build/torch/VERSION`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "support.json"
PAGE = ROOT / "docs" / "support.md"
PYTHONS = Path(os.environ.get("DPRO_PYTHONS", ROOT / "build" / "python"))
TORCHES = Path(os.environ.get("DPRO_TORCH_ENVIRONMENTS", ROOT / "build" / "torch"))
INTEGRATION = "tests/integration/"
LAUNCHERS = f"{INTEGRATION}test_record_launchers.py"
# What of dpro differs between Pythons: the recorder looks into frames, threads and modules of the job.
OF_PYTHON = ("tests/unit/test_formats.py", "tests/unit/collectors", f"{INTEGRATION}test_record.py")
TORCH = "import torch; print('torch', torch.__version__)"
HEAD = """---
search:
  boost: 0.1
---

# What it works with

Each row is what its tests said when they were last tried, and with what. `make support` tries all that a
machine can, and writes this page. Tests are those of `tests/integration` unless they say otherwise. What
was not tried may work.

"""


class Cell(NamedTuple):
    """What dpro may be used with.

    Attributes:
        row: the kind of thing.
        name: the thing.
        tests: what pytest is given.
        version: the command that says which version was tried; of `python` the one that runs the tests.
        note: what else is known, in Markdown.
    """

    row: str
    name: str
    tests: Sequence[str] = ()
    version: Sequence[str] = ()
    note: str = ""


class Result(NamedTuple):
    """How many tests of a cell passed, were skipped and failed, when, and with what."""

    day: str
    tried_with: str
    passed: int
    skipped: int
    failed: int


def _python(version: str) -> Cell:
    return Cell("Python", version, OF_PYTHON)


def _torch(version: str) -> Cell:
    return Cell("PyTorch", version, ("tests/torch_versions",))


CELLS = (
    *map(_python, ("3.11", "3.12", "3.13", "3.14")),
    *map(_torch, ("2.6", "2.8", "2.11", "2.13")),
    Cell("Communication", "gloo", (f"{INTEGRATION}test_record_calls.py",), ("python", "-c", TORCH)),
    Cell(
        "Communication", "NCCL", ("tests/gpu/test_jobs.py",),
        note="one rank on one H200 by `make gpu`; several GPUs [are unmeasured](gpu.md#line-by-line)",
    ),
    Cell("Communication", "MPI, as a backend of PyTorch", note="PyTorch's wheels are built without it"),
    Cell(
        "GPUs", "CUDA", ("tests/gpu/test_jobs.py",),
        note="`make gpu` on one H200, PyTorch 2.11, CUDA 13.0: [GPUs](gpu.md)",
    ),
    Cell(
        "GPUs", "ROCm",
        note="traces of MI300X are [imported](accuracy.md#imported-traces); telemetry was tried against a "
        "made-up library (`tests/unit/collectors/telemetry`)",
    ),
    Cell(
        "Launchers", "torchrun",
        (f"{LAUNCHERS}::test_elastic_rendezvous_is_recorded",
         f"{LAUNCHERS}::test_restart_by_torchrun_keeps_both_attempts"), ("python", "-c", TORCH),
    ),
    Cell(
        "Launchers", "Open MPI",
        (f"{LAUNCHERS}::test_ranks_of_mpirun_are_recorded_with_the_recorder_before_or_behind_it",),
        ("mpirun", "--version"),
    ),
    Cell(
        "Clusters", "Slurm", (f"{INTEGRATION}test_slurm.py",), ("slurmctld", "-V"),
        "nodes that share a machine and have names of their own",
    ),
    Cell(
        "Clusters", "Kubernetes", ("tests/unit/test_cluster.py",),
        note="manifests are held to its schemas; no cluster was tried",
    ),
    Cell("Clusters", "containers", (f"{INTEGRATION}test_record_containers.py",)),
    Cell(
        "Systems", "Prometheus", (f"{INTEGRATION}test_prometheus.py",), ("promtool", "--version"),
        "and the queries of the dashboard for Grafana",
    ),
    Cell(
        "Systems", "OpenTelemetry", ("tests/unit/extensions/export/test_otlp.py",),
        ("python", "-c", "import opentelemetry.sdk.version as v; print('SDK', v.__version__)"),
    ),
    Cell(
        "Systems", "Slack, Teams, PagerDuty", ("tests/unit/extensions/watch/test_outlets.py",),
        ("python", "-c", "import apprise; print('Apprise', apprise.__version__)"),
        "up to the request that leaves",
    ),
    Cell(
        "Beside", "`torch.profiler` of the job",
        (f"{INTEGRATION}test_record_profilers.py", "tests/gpu/test_jobs.py"), ("python", "-c", TORCH),
    ),
    Cell(
        "Beside", "Nsight Systems",
        note="whoever holds CUPTI first keeps it: the windows then lack GPU work, and the run says so "
        "(`ranks.cupti-held` of [GPUs](gpu.md)); `--no-windows` leaves CUPTI alone",
    ),
    Cell("Beside", "DCGM profiling", note="windows trace activities, and take no performance counters"),
)  # fmt: skip


def interpreter_of(cell: Cell) -> Path:
    """The Python that runs the tests of a cell."""
    if cell.row != "Python" or platform.python_version().startswith(f"{cell.name}."):
        return Path(sys.executable)
    return PYTHONS / cell.name / "bin" / "python"


def tried(cell: Cell) -> Result:
    """Run the tests of a cell."""
    python = interpreter_of(cell)
    env = os.environ | {"DPRO_TORCH_ENVIRONMENTS": str(TORCHES)}
    env["DPRO_TORCH_VERSIONS"] = cell.name if cell.row == "PyTorch" else ""
    if (cell.row == "PyTorch" and not (TORCHES / cell.name).exists()) or not python.exists():
        return Result("", "", 0, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--dist",
            "loadfile",
            f"--junit-xml={report}",
            *cell.tests,
        ]
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        print(done.stdout[-2000:], file=sys.stderr)
        counts = {} if not report.exists() else next(iter(xml.parse(report).getroot())).attrib
    number = {key: int(counts.get(key, 0)) for key in ("tests", "skipped", "failures", "errors")}
    failed = number["failures"] + number["errors"] + (not counts)
    passed = number["tests"] - number["skipped"] - failed
    return Result(time.strftime("%Y-%m-%d"), _tried_with(cell, python), passed, number["skipped"], failed)


def _tried_with(cell: Cell, python: Path) -> str:
    """The version that was tried."""
    if cell.row == "PyTorch":
        python = TORCHES / cell.name / "bin" / "python"
    of_row = {"Python": ("python", "--version"), "PyTorch": ("python", "-c", TORCH)}
    command = of_row.get(cell.row, cell.version)
    if not command:
        return ""
    words = [str(python), *command[1:]] if command[0] == "python" else list(command)
    return (
        subprocess.run(words, capture_output=True, text=True)
        .stdout.partition("\n")[0]
        .partition(" (branch")[0]
        .strip()
    )


def page(results: Mapping[str, Result]) -> str:
    """The page, of what was tried by name of the cell."""
    lines = ["| | | tried | by | |", "|---|---|---|---|---|"]
    row = ""
    for cell in CELLS:
        result = results.get(name_of(cell))
        title = "" if cell.row == row else f"**{cell.row}**"
        lines.append(f"| {title} | {cell.name} | {said(result)} | {_tests(cell)} | {cell.note} |")
        row = cell.row
    return HEAD + "\n".join(lines) + "\n"


def said(result: Result | None) -> str:
    """A result in words."""
    if result is None or not result.passed + result.failed:
        return "not tried"
    skipped = f", {result.skipped} skipped" if result.skipped else ""
    failed = f", **{result.failed} failed**" if result.failed else ""
    tried_with = f" with {result.tried_with}" if result.tried_with else ""
    return f"{result.passed} passed{skipped}{failed}{tried_with}, {result.day}"


def _tests(cell: Cell) -> str:
    return ", ".join(f"`{test.removeprefix(INTEGRATION).rpartition('::')[2]}`" for test in cell.tests)


def name_of(cell: Cell) -> str:
    """The name of a cell, as `--only` takes it."""
    return f"{cell.row} {cell.name}"


def kept() -> dict[str, Result]:
    """The results of the last tries."""
    return {name: Result(**result) for name, result in json.loads(RESULTS.read_text()).items()}


def main() -> int:
    """Try, keep, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [name_of(cell) for cell in CELLS if cell.tests]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    results = kept() if RESULTS.exists() else {}
    for cell in CELLS:
        name = name_of(cell)
        if name not in options.only or options.write:
            continue
        result = tried(cell)
        print(f"{name}: {said(result)}", flush=True)
        if result.passed + result.failed:  # what cannot be tried here keeps its last result
            results[name] = result
    ordered = {name: results[name]._asdict() for name in map(name_of, CELLS) if name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page(kept()))
    return int(any(result.failed for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
