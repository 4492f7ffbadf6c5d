"""Real jobs that are not recorded: what their output alone shows of how they ended."""

import json
import subprocess

import pytest

from tests.commands import dpro
from tests.jobs import PATIENCE_S, TORCHRUN, environment, imports, script

pytest.importorskip("torch")

RAISES = """
import torch.distributed as dist
dist.init_process_group("gloo")

def load(batch):
    if dist.get_rank() == 2 and batch == 3:
        raise KeyError("labels")

for batch in range(6):
    load(batch)
    dist.all_reduce(torch.ones(4))
"""
RAISES_RECORDED = """
import time
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

def load(batch):
    if dist.get_rank() == 2 and batch == 3:
        raise KeyError("labels")

@record
def main():
    dist.init_process_group("gloo")
    for batch in range(6):
        load(batch)
        dist.all_reduce(torch.ones(4))

try:
    main()
except RuntimeError:  # of a rank that lost another: by then that has written its file
    time.sleep(30)
"""
KILLED = """
import os, signal
import torch.distributed as dist
dist.init_process_group("gloo")
for batch in range(6):
    if dist.get_rank() == 1 and batch == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))
"""
WELL = """
import traceback
import torch.distributed as dist
dist.init_process_group("gloo")
try:
    raise ConnectionError("the metrics server is away")
except ConnectionError:
    traceback.print_exc()
dist.all_reduce(torch.ones(4))
"""


def diagnosed(folder, code, *options):
    """Run a job of three ranks without dpro, and diagnose what it wrote."""
    _, path = script(folder, imports() + code)
    command = [*TORCHRUN[:-1], "3", *options, str(path)]
    with (folder / "job.log").open("wb") as log:
        subprocess.run(
            command, cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
    logs = [folder / "job.log", *([folder / "logs"] if "--log-dir" in options else [])]
    done = dpro("diagnose", *logs, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--log-dir", "logs", "--redirects", "3"), ("--tee", "3")])
def test_the_rank_that_raised_is_named_with_its_place_in_the_code(tmp_path, options):
    document = diagnosed(tmp_path, RAISES, *options)
    assert [(one["class"], one["ranks"]) for one in document["findings"]] == [("dead.rank", [2])]
    assert "KeyError: 'labels'" in document["end"]["sentence"]
    assert "job.py" in document["end"]["sentence"]
    assert " load)" in document["end"]["sentence"]
    assert any(note.startswith("start it again? do not") for note in document["notes"])


@pytest.mark.slow
def test_the_rank_that_raised_is_named_by_the_error_files_alone(tmp_path):
    diagnosed(tmp_path, RAISES_RECORDED, "--log-dir", "logs")
    assert [*(tmp_path / "logs").rglob("error.json")]
    done = dpro("diagnose", tmp_path / "logs", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(one["class"], one["ranks"]) for one in document["findings"]] == [("dead.rank", [2])]
    assert "KeyError: 'labels'" in document["end"]["sentence"]
    assert " load)" in document["end"]["sentence"]


@pytest.mark.slow
def test_a_rank_that_was_killed_is_first_and_why_is_not_guessed(tmp_path):
    document = diagnosed(tmp_path, KILLED)
    assert [(one["class"], one["ranks"]) for one in document["findings"]] == [("dead.rank", [1])]
    assert "SIGKILL" in document["end"]["sentence"]
    assert "start it again? it is unknown whether it would end like this again" in document["notes"]


@pytest.mark.slow
def test_of_a_job_that_ended_well_nothing_is_found_whatever_it_wrote(tmp_path):
    document = diagnosed(tmp_path, WELL)
    assert "ConnectionError" in (tmp_path / "job.log").read_text()
    assert (document["findings"], document["end"]["how"]) == ([], "unknown")
    assert document["reasons"]
    assert not document["healthy"]
