"""Output for which there is no room is one line, and nothing but a file is replaced by a file."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.commands import dpro
from tests.jobs import ROOT


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["--version", "info RUN", "info RUN --json", "topology --fat-tree 4"])
def test_a_disk_without_room_for_the_output_is_one_line(command):
    words = command.replace("RUN", str(ROOT / "sample_traces" / "healthy")).split()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dpro", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "dpro: the output: cannot be written (No space left on device)\n"


def test_a_reader_that_has_seen_enough_hears_nothing(tmp_path):
    command = f"{sys.executable} -m dpro --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_topology_is_written_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "topology.toml")
    assert dpro("topology", "--fat-tree", "4", "-o", tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "topology.toml").is_file()
