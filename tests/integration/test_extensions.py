"""dpro does without any of its extensions, and takes those of other distributions as its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

from dpro.detect.run import Explained
from dpro.plugins import installed
from tests.jobs import ROOT, TINY, environment

SAMPLE = str(ROOT / "sample_traces" / "slow_rank")
WITHOUT = r"""
import sys
gone = sys.argv[1].split(",")
class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{package}.") for package in packages):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
packages = ["dpro.dashboards" if name == "dashboards" else f"dpro.extensions.{name}" for name in gone]
sys.meta_path.insert(0, Missing())
from dpro import plugins
entries = plugins.entries
plugins.entries = lambda: [entry for entry in entries() if entry.name not in gone]
from dpro.cli import main
for words in sys.argv[2].split(" ; "):
    sys.argv = ["dpro", *words.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (words, ended.code)
    print("=====", flush=True)
"""
TRAIN = TINY + "for _ in range(4): train_step()\n"
EXTENSIONS = sorted(installed().extensions)


def _without(gone: list[str], folder: Path, *asked: str) -> list[str]:
    """What each of some commands prints, in a process in which some extensions cannot be imported."""
    words = [sys.executable, "-c", WITHOUT, ",".join(gone), " ; ".join(asked)]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split("=====\n")[:-1]


def _answers_without(gone: list[str], folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    listed, explained, diagnosed, predicted, reported = _without(
        gone, folder, "--help", f"explain {SAMPLE}", f"diagnose {SAMPLE}",
        f"whatif {SAMPLE} --edit heal:rank=1", f"report {SAMPLE}",
    )  # fmt: skip
    commands = {line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line.split()}
    everything = installed().extensions
    missing = {name for extension in gone for name in everything[extension].commands}
    assert not missing & commands
    assert {"record", "explain", "whatif"} <= commands
    assert "rank 1" in explained
    assert "rank 1" in diagnosed
    assert "heal:rank=1" in predicted
    assert "Where the usual step of each rank goes" in reported


def test_all_that_three_questions_need_works_without_any_extension(tmp_path):
    _answers_without(EXTENSIONS, tmp_path)
    _without(EXTENSIONS, tmp_path, f"record --quiet -o run -- {sys.executable} train.py")
    (shown,) = _without(EXTENSIONS, tmp_path, "info run")
    assert "ranks      1 of 1" in shown


@pytest.mark.slow
@pytest.mark.parametrize("gone", EXTENSIONS)
def test_each_extension_can_be_taken_away(gone, tmp_path):
    needing = [name for name in EXTENSIONS if gone in installed().extensions[name].needs]
    _answers_without([gone, *needing], tmp_path)
    _without([gone, *needing], tmp_path, f"record --quiet -o run -- {sys.executable} train.py")
    (shown,) = _without([gone, *needing], tmp_path, "info run")
    assert "ranks      1 of 1" in shown


# What CONTRIBUTING.md shows, by the name in its first line.
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SHOWN = dict(re.findall(r"```python\n# dpro_sparks/(\w+\.py)\n(.*?)```", CONTRIBUTING, re.DOTALL))
SPARKS = SHOWN | {
    "__init__.py": """
from dpro.plugins import Command, Extension
EXTENSION = Extension(
    commands={"sparks": Command("dpro_sparks.command:sparks", "Count the sparks.", "Sparks")},
    options={"record": "dpro_sparks.command:OPTIONS"},
    edits={"Sparks": {"turbo": "dpro_sparks.edits:Turbo"}},
    detectors={"sparks": "dpro_sparks.detectors:DETECTOR"},
    importers={"sparks": "dpro_sparks.importers:SpansImporter"},
    views={"sparks": "dpro_sparks.view:VIEW"},
    probes={"sparks": "dpro_sparks.probe"},
    hooks={"record": "dpro_sparks.command:note", "printed": "dpro_sparks.command:say"},
)
""",
    "command.py": """
import click
OPTIONS = [click.Option(["--sparks"], default="none")]
@click.command()
def sparks():
    click.echo("no sparks")
def note(request, given):
    request.extra["sparks"] = given["sparks"]
def say(run):
    click.echo(f"sparks of {run.label}: none")
""",
    "view.py": """
from dash import html
from dpro.dashboards.page import Panel, view
VIEW = view(
    "sparks", "Sparks", lambda loaded, link: "",
    Panel("Sparks", "sparks-all", "counting", lambda loaded, link: html.P("none")), tables={},
)
""",
    "probe.py": """
import os
from _dpro_inside_the_job.recorder import Recorder
def install(recorder):
    with open(os.environ["SPARKS"], "w") as file:
        file.write(f"{isinstance(recorder, Recorder)} {recorder.config['sparks']}")
""",
}


def _install(folder: Path, package: str, entry: str, files: dict[str, str]) -> None:
    (folder / package).mkdir()
    for name, text in files.items():
        (folder / package / name).write_text(text)
    info = folder / f"{package}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[dpro.extensions]\n{entry}\n")


def _dpro(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder}:{ROOT}"
    env = environment(PYTHONPATH=path, SPARKS=folder / "sparks.txt", DPRO_CACHE=folder / "cache")
    command = [sys.executable, "-m", "dpro", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_an_extension_of_another_distribution_works_as_dpros_own(tmp_path):
    _install(tmp_path, "dpro_sparks", "sparks = dpro_sparks:EXTENSION", SPARKS)
    (tmp_path / "train.py").write_text(TRAIN)
    assert "Sparks:\n  sparks      Count the sparks." in _dpro(tmp_path, "--help").stdout
    assert _dpro(tmp_path, "sparks").stdout == "no sparks\n"
    faster = _dpro(tmp_path, "whatif", SAMPLE, "--edit", "turbo:rank=1,factor=2").stdout
    assert re.search(r"x1\.[1-9]\d .*: the CPU of rank 1 2 times as fast", faster)
    assert "sparks of " in _dpro(tmp_path, "diagnose", SAMPLE).stdout
    (tmp_path / "spans.csv").write_text("name,start_us,duration_us\naten::mm,5,7\n")
    imported = _dpro(tmp_path, "import", "spans.csv", "-o", "imported").stdout
    assert "1 of 1 ranks, 1 span\n" in imported
    job = (sys.executable, "train.py")
    recorded = _dpro(tmp_path, "record", "--quiet", "--sparks", "two", "-o", "run", "--", *job)
    assert (recorded.returncode, recorded.stderr) == (0, "")
    assert (tmp_path / "sparks.txt").read_text() == "True two"
    code = (
        "from dpro.dashboards.app import VIEWS; from dpro.ingest.formats import registry\n"
        "print(VIEWS[-1].title, registry().find(b'name,start_us,duration_us').name)"
    )
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert shown.stdout == "Sparks spans as CSV\n"


def test_an_extension_that_is_broken_costs_no_command(tmp_path):
    _install(tmp_path, "dpro_broken", "broken = dpro_broken:EXTENSION", {"__init__.py": "1 / 0"})
    done = _dpro(tmp_path, "info", SAMPLE)
    assert done.returncode == 0
    assert done.stdout.startswith("run ")
    why = "extension broken (dpro_broken:EXTENSION) cannot be used: ZeroDivisionError: division by zero"
    assert done.stderr == f"dpro: warning: {why}\n"


def test_the_detector_that_is_shown_finds_the_rank_whose_steps_vary_most():
    shown: dict[str, object] = {}
    exec(SHOWN["detectors.py"], shown)
    times = {0: [100, 110, 100], 1: [100, 110, 100], 2: [50, 160, 100]}
    rows = [(rank, -1, duration) for rank, durations in times.items() for duration in durations]
    steps = pl.DataFrame(rows, schema=["rank", "window", "duration_ns"], orient="row")
    (finding,) = shown["find_unsteady"](SimpleNamespace(steps=steps), Explained())
    assert (finding.title, finding.ranks) == ("jitter: rank 2", (2,))
    assert shown["find_unsteady"](SimpleNamespace(steps=steps.filter(rank=0)), Explained()) == []
