"""Every suite and benchmark, whole, one after the other: what the default tests leave out.

python -m tests.nightly [--folder build/nightly] [--only NAME …] [--again] [--list]

Each stage writes its output to FOLDER/NAME.log and its result to FOLDER/NAME.json; FOLDER.md is a page with
all results. A stage that ended at this commit is not run again: a night that was cut short goes on where it
was. A stage that takes longer than its limit is killed and counts as failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, convert, to_builtins

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile")


class Stage(NamedTuple):
    """A command, and the minutes that it may take."""

    name: str
    minutes: float
    command: Sequence[str]


class Result(Struct, frozen=True):
    """How a stage ended.

    Attributes:
        commit: of the checkout.
        begun: date and time, UTC.
        load: average load of the machine's cores in the minute before, and in the last one of the stage.
        seconds: that it took.
        exit_code: None where it was killed at its limit.
        checks: by name, whether each check of a benchmark holds.
        summary: the last line of a suite.
    """

    commit: str
    begun: str
    load: tuple[float, float]
    seconds: float
    exit_code: int | None
    checks: dict[str, bool]
    summary: str


def _benchmark(name: str, minutes: float, *options: str) -> Stage:
    return Stage(name, minutes, (sys.executable, "-m", f"benchmarks.{name}", *options))


STAGES = (
    Stage("tests", 20, (*PYTEST, "-m", "not slow")),
    _benchmark("speed.overhead", 15, "--rounds", "4", "--steps", "1000", "--json"),
    _benchmark("speed.startup", 3, "--json"),
    _benchmark("speed.storage", 8, "--json"),
    _benchmark("speed.answer", 6, "--json"),
    _benchmark("speed.engine", 8, "--json"),
    _benchmark("speed.fabric", 3, "--json"),
    _benchmark("speed.ranks", 8, "--ranks", "64", "1024", "--rounds", "1", "--json"),
    _benchmark("condense", 6, "--json"),
    _benchmark("search", 10, "--json"),
    _benchmark("curves", 3, "--json"),
    _benchmark("devices", 6, "--json"),
    _benchmark("reality", 6, "--json"),
    _benchmark("serving", 4, "--json"),
    _benchmark("verdicts", 4, "--json"),
    _benchmark("gpu_pairs", 4, "--json"),
    _benchmark("questions", 4, "--json"),
    _benchmark("advised", 8, "--rounds", "3", "--json"),
    _benchmark("goodput", 10, "--campaigns", "2", "--minutes", "1", "--json"),
    _benchmark("fabric", 8, "--cases", "20", "--json"),
    _benchmark("accuracy.answered", 8, "--json"),
    _benchmark("accuracy.edges", 8, "--json"),
    _benchmark("accuracy.whatif", 18, "--every", "4", "--rounds", "1", "--json"),
    _benchmark("accuracy.schedules", 10, "--json"),
    _benchmark("accuracy.twins", 10, "--rounds", "1", "--json"),
    _benchmark("diagnosis", 18, "matrix", "healthy", "smallest", "--cases", "4"),
    _benchmark("diagnosis.hangs", 4, "--json"),
    _benchmark("diagnosis.jobs", 45, "--json"),
    _benchmark("diagnosis.operations", 5, "--cases", "8", "--json"),
    _benchmark("diagnosis.dumps", 4, "--ranks", "256", "--rounds", "1", "--json"),
    _benchmark("diagnosis.large", 4, "--ranks", "64", "--rounds", "1", "--json"),
    _benchmark("diagnosis.healing", 6, "--ranks", "64", "256", "--json"),
    _benchmark("watch.scale", 6, "--ranks", "64"),
    _benchmark("unchanged", 15, "-o", "build/nightly/answers.json"),
    Stage(
        "gallery",
        12,
        (sys.executable, "-m", "tests.gallery", "build/gallery", "--widths", "390", "1440", "--themes",
         "dark"),
    ),
    Stage("torch versions", 25, ("make", "test-torch")),
    Stage("fuzz", 60, (*PYTEST, "-m", "slow", "tests/fuzz")),
    Stage(
        "slow tests",
        70,
        (*PYTEST, "-m", "slow", "--ignore", "tests/fuzz", "--ignore", "tests/torch_versions",
         "--ignore", "tests/gpu"),
    ),
)  # fmt: skip


def run(stage: Stage, folder: Path, commit: str) -> Result:
    """Run a stage to its end or its limit."""
    begun, load = time.time(), os.getloadavg()[0]
    with (folder / f"{_file(stage)}.log").open("w+") as log:
        process = subprocess.Popen(
            stage.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=60 * stage.minutes)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        output = log.read()
    lines = [line for line in output.splitlines() if line.strip()]
    return Result(
        commit=commit,
        begun=time.strftime("%Y-%m-%d %H:%M", time.gmtime(begun)),
        load=(load, os.getloadavg()[0]),
        seconds=time.time() - begun,
        exit_code=code,
        checks=checks_in(output),
        summary=lines[-1].strip("= ") if lines else "",
    )


def checks_in(output: str) -> dict[str, bool]:
    """Whether each check holds, of the JSON object that ends the output of a benchmark."""
    start = 0 if output.startswith("{") else output.rfind("\n{") + 1
    printed: object = None
    with suppress(ValueError):
        printed = json.loads(output[start:])
    checks = printed if isinstance(printed, dict) else {}
    return {
        name: bool(check["holds"])
        for name, check in checks.items()
        if isinstance(check, dict) and check.get("holds") is not None
    }


def page(results: dict[str, Result]) -> str:
    """The results as Markdown."""
    rows = [
        "# Every suite and benchmark",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.",
        "",
        "| stage | begun (UTC) | load | took | result |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        took = f"{result.seconds / 60:.1f} min"
        load = f"{result.load[0]:.1f} to {result.load[1]:.1f}"
        rows.append(f"| {name} | {result.begun} | {load} | {took} | {said(result)} |")
    minutes = sum(result.seconds for result in results.values()) / 60
    commits = ", ".join(sorted({result.commit[:8] for result in results.values()}))
    return "\n".join([*rows, "", f"{minutes:.0f} minutes in all, at {commits}.", ""])


def said(result: Result) -> str:
    """A result in words."""
    if result.exit_code is None:
        return "**killed at its limit**"
    ended = "" if result.exit_code == 0 else f"**exit code {result.exit_code}** "
    if result.checks:
        missed = [name for name, holds in result.checks.items() if not holds]
        held = f"{len(result.checks) - len(missed)} of {len(result.checks)} checks hold"
        return f"{ended}{held}{': missed ' if missed else ''}{', '.join(missed)}"
    return f"{ended}{result.summary[:100] if 'passed' in result.summary or ended else 'runs'}"


def main() -> None:
    """Run what is left, and write the page after each stage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "nightly")
    parser.add_argument("--only", nargs="+", default=[stage.name for stage in STAGES], metavar="NAME")
    parser.add_argument("--again", action="store_true", help="also stages that have ended at this commit")
    parser.add_argument("--list", action="store_true", help="name the stages and their limits")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{stage.name:24} {stage.minutes:3.0f} min" for stage in STAGES))
        return
    unknown = set(options.only) - {stage.name for stage in STAGES}
    if unknown:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}; --list names them")
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    files = {stage.name: folder / f"{_file(stage)}.json" for stage in STAGES}
    results = {
        name: convert(json.loads(path.read_bytes()), Result) for name, path in files.items() if path.exists()
    }
    for stage in STAGES:
        is_done = stage.name in results and results[stage.name].commit == commit
        if stage.name not in options.only or (is_done and not options.again):
            continue
        print(f"{stage.name} …", file=sys.stderr, flush=True)
        results[stage.name] = run(stage, folder, commit)
        files[stage.name].write_text(json.dumps(to_builtins(results[stage.name]), indent=1))
        folder.with_suffix(".md").write_text(page(results))
        print(f"{stage.name}: {said(results[stage.name])}", file=sys.stderr, flush=True)
    print(page(results))
    failed = [name for name in options.only if results[name].exit_code != 0]
    sys.exit(bool(failed))


def _file(stage: Stage) -> str:
    return stage.name.replace(" ", "-")


if __name__ == "__main__":
    main()
