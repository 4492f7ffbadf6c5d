"""Every command of the guides is run, and what it prints is compared with the guide, whole and in order.

Of commands that run a job, or look into one, a guide shows some lines: the others depend on the machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpro.cli import cli
from dpro.errors import DproError
from dpro.replay.whatif.registry import EDITS
from tests.guides import GUIDES, WITH_A_JOB, Command, commands, make_places, printed
from tests.jobs import ROOT, TINY, TORCHRUN, complete, environment, start, wait_until

pytestmark = pytest.mark.usefixtures("searched_once")

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


COMMANDS = list(commands())
SLOW = [each for each in COMMANDS if each.words[0] in WITH_A_JOB]
FAST = [each for each in COMMANDS if not each.runs_a_job]


def _name(command: Command) -> str:
    return f"{command.guide.stem}: {command.text}"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[Path, Path]:
    """For each guide a folder that has the files and runs it names."""
    made = {}
    for guide in GUIDES:
        made[guide] = tmp_path_factory.mktemp(guide.stem)
        make_places(guide, made[guide])
    return made


def _pattern(line: str) -> str:
    """Return a pattern for a line of output that allows other numbers, units, bars, tokens and blanks."""
    number = re.compile(r"(\\-|\\\+)?\d+(\\?[.,:]\d+)*")
    bar, unit = re.compile("[█▓▒▚░·]{3,}"), re.compile(r"^[num]?s\b")
    said = re.sub(r"token=\S+", "token=…", line).split()
    words = (unit.sub("[num]?s", number.sub(r"[-+]?[\\d.,:]+", re.escape(word))) for word in said)
    return r"\s+".join(bar.sub("[█▓▒▚░·]+", word).replace("…", r"\S+") for word in words)


def _check(command: Command, output: str) -> None:
    """Hold each line that is shown of a job to be among what it says: the others depend on the machine."""
    for line in filter(None, map(str.strip, command.said)):
        assert re.search(_pattern(line), output), f"{line!r} is not said:\n{output}"


def _check_whole(command: Command, lines: tuple[str, ...]) -> None:
    """Hold the guide to show all lines that are printed, in order; numbers may be others."""
    renew = "`python -m tests.guides` writes it again"
    assert len(command.said) == len(lines), f"{command.text}: {renew}:\n" + "\n".join(lines)
    for shown, said in zip(command.said, lines):
        assert re.fullmatch(_pattern(shown), said.strip()), f"{shown!r} is now {said!r}: {renew}"


def test_guides_are_about_commands():
    assert {each.guide for each in COMMANDS} == set(GUIDES)
    assert len(FAST) >= 20


@pytest.mark.few(6)
@pytest.mark.parametrize("command", FAST, ids=_name)
def test_a_command_of_a_guide_prints_what_the_guide_shows_and_no_more(command, places, monkeypatch):
    monkeypatch.chdir(places[command.guide])
    monkeypatch.delenv("COLUMNS", raising=False)
    _check_whole(command, printed(command))


def _edits_in_passing() -> Iterator[tuple[Path, str]]:
    """Edits that a guide names in its prose, outside its commands."""
    for guide in GUIDES:
        prose = re.sub(r"(?ms)^```.*?^```$", "", guide.read_text())
        for edit in dict.fromkeys(re.findall(r"`([^`\n]+)`", prose)):
            if edit.split(":")[0] in EDITS:
                yield guide, edit


@pytest.mark.few(2)
@pytest.mark.parametrize(("guide", "edit"), list(_edits_in_passing()), ids=str)
def test_an_edit_that_a_guide_names_is_answered_by_its_run(guide, edit, places):
    done = CliRunner().invoke(cli, ["whatif", str(places[guide] / "RUN"), "--edit", edit, "--json"])
    assert not isinstance(done.exception, DproError), done.exception
    refused = json.loads(done.stdout)["refused"]
    assert all("GPU" in each["reason"] for each in refused), refused  # the runs that ship are of CPUs


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
        wait_until(lambda: list(tmp_path.glob("RUN/.raw/*/*/stall.json")), "no rank saw the hang")
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
