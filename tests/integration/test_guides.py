"""Every command of the guides is run, and its output is compared with the guide's.

In a guide, `<!-- RUN is slow_rank -->` says what a name stands for: a run that ships, or something made
here. A line of a `console` block that begins with `$` is a command; those below it are lines of what it
says, in which numbers and blanks may be others and which may be cut short.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from dpro.cli import cli
from dpro.errors import DproError
from dpro.replay.whatif.registry import EDITS
from tests.jobs import ROOT, TINY, TORCHRUN, complete, environment, start
from tests.reference.hanging_dumps import dumps_of_a_stuck_host

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
WITH_A_JOB = ("record", "attach", "try")  # commands that run one, or look into one that runs
ENDS_WITH_1 = "--fail-on"  # that is what it is for
LINE = r"(?m)^\$ (.*)$"

TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (batch,) in DataLoader(TensorDataset(torch.ones(240, 64)), batch_size=4):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
"""
HANGS = """
import time, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000):
    train_step()
    dist.all_reduce(torch.ones(4))
    if step == 20 and dist.get_rank() == 1:
        time.sleep(600)
"""


class Command(NamedTuple):
    """One command of a guide, and lines of its output."""

    guide: Path
    text: str
    said: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Without `dpro`."""
        dpro, *words = shlex.split(self.text)
        assert dpro == "dpro"
        return words


def _commands() -> Iterator[Command]:
    for guide in GUIDES:
        for block in re.findall(r"(?ms)^```console\n(.*?)^```$", guide.read_text()):
            first, *rest = re.split(LINE, block)
            assert not first.strip(), f"{guide.name}: a console block begins with a command"
            for text, said in zip(rest[::2], rest[1::2]):
                yield Command(guide, text, tuple(filter(None, map(str.strip, said.splitlines()))))


COMMANDS = list(_commands())
SLOW = [each for each in COMMANDS if each.words[0] in WITH_A_JOB]
FAST = [each for each in COMMANDS if each not in SLOW and "NOW" not in each.words]


def _name(command: Command) -> str:
    return f"{command.guide.stem}: {command.text}"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[Path, Path]:
    """For each guide a folder that has the files and runs it names."""
    made = {}
    for guide in GUIDES:
        folder = made[guide] = tmp_path_factory.mktemp(guide.stem)
        for comment in re.findall(r"<!-- (.*?) -->", guide.read_text()):
            for name, what in re.findall(r"(\w+) is (\w+)", comment):
                if what == "dumps":
                    dumps_of_a_stuck_host(folder / name)
                elif what != "hanging":
                    (folder / name).symlink_to(ROOT / "sample_traces" / what)
    return made


def _pattern(line: str) -> str:
    """Return a pattern for a line of output that allows other numbers, units of time and blanks."""
    number = re.compile(r"(\\-|\\\+)?\d+(\\?[.,]\d+)*")
    unit = re.compile(r"^[num]?s\b")
    words = (number.sub(r"[-+]?[\\d.,]+", re.escape(word)) for word in line.split())
    return r"\s+".join(unit.sub("[num]?s", word) for word in words)


def _check(command: Command, output: str) -> None:
    for line in command.said:
        assert re.search(_pattern(line), output), f"{line!r} is not said:\n{output}"


def test_guides_are_about_commands():
    assert {each.guide for each in COMMANDS} == set(GUIDES)
    assert len(FAST) >= 20


@pytest.mark.parametrize("command", FAST, ids=_name)
def test_a_command_of_a_guide_says_what_the_guide_shows(command, places, monkeypatch):
    monkeypatch.chdir(places[command.guide])
    if command.words[0] == "dashboard":
        _check(command, _first_line(command.words))
        return
    done = CliRunner().invoke(cli, command.words)
    assert not isinstance(done.exception, DproError), done.exception
    assert done.exit_code == (1 if ENDS_WITH_1 in command.words else 0), done.output
    _check(command, done.output)


def _edits_in_passing() -> Iterator[tuple[Path, str]]:
    """Edits that a guide names in its prose, outside its commands."""
    for guide in GUIDES:
        prose = re.sub(r"(?ms)^```.*?^```$", "", guide.read_text())
        for edit in dict.fromkeys(re.findall(r"`([^`\n]+)`", prose)):
            if edit.split(":")[0] in EDITS:
                yield guide, edit


@pytest.mark.parametrize(("guide", "edit"), list(_edits_in_passing()), ids=str)
def test_an_edit_that_a_guide_names_is_answered_by_its_run(guide, edit, places):
    done = CliRunner().invoke(cli, ["whatif", str(places[guide] / "RUN"), "--edit", edit, "--json"])
    assert not isinstance(done.exception, DproError), done.exception
    refused = json.loads(done.stdout)["refused"]
    assert all("GPU" in each["reason"] for each in refused), refused  # the runs that ship are of CPUs


def _first_line(words: list[str]) -> str:
    """What a command that serves pages says before it is interrupted."""
    command = [sys.executable, "-m", "dpro", *words, "--no-browser"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        keeping = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with keeping.open(line.split()[0]) as answer:  # it listens, and takes the token for a cookie
            assert "token" not in answer.url
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    return line


@pytest.mark.slow
@pytest.mark.parametrize("text", sorted({each.text for each in SLOW if each.words[0] != "attach"}))
def test_a_command_that_runs_a_job_does_so(text, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    (command, *_) = [each for each in SLOW if each.text == text]
    words = command.words
    at = words.index("torchrun")
    launched = [*words[:at], sys.executable, "-m", "torch.distributed.run", *words[at + 1 :]]
    done = complete([sys.executable, "-m", "dpro", *launched], tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    _check(command, (done.stdout + done.stderr).decode())


@pytest.mark.slow
def test_commands_about_a_job_that_hangs_are_run_on_one(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(TINY + HANGS)
    job = start([sys.executable, "-m", "dpro", "record", "-o", "RUN", "--", *TORCHRUN, "job.py"], tmp_path)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("RUN/.raw/*/*/stall.json"))) < 1 and time.monotonic() < deadline:
            time.sleep(0.2)
        asked = [each for each in COMMANDS if each.words[0] == "attach" or "NOW" in each.words]
        assert len(asked) >= 3
        for command in asked:
            done = complete([sys.executable, "-m", "dpro", *command.words], tmp_path)
            assert done.returncode == 0, done.stderr.decode()
            _check(command, done.stdout.decode())
    finally:
        for facts in tmp_path.glob("RUN/.raw/*/*/facts.json"):
            os.kill(json.loads(facts.read_text())["pid"], signal.SIGKILL)
        job.wait(60)


@pytest.mark.slow
def test_the_site_has_no_link_that_leads_nowhere(tmp_path):
    pytest.importorskip("material", reason="no mkdocs-material: pip install 'dpro-toolkit[docs]'")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(
        build, cwd=ROOT, capture_output=True, text=True, env=environment(NO_MKDOCS_2_WARNING=1)
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "guides" / "it-hangs" / "index.html").is_file()
