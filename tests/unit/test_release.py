"""What a release is checked for."""

from __future__ import annotations

import re

import pytest

from tests.release import COMMANDS, EXTRAS, NAMED, TRACE, Tried, _zstd, faults


def test_a_command_works_or_names_an_extra_that_is_not_there():
    assert faults([Tried("", "report", "replay"), Tried("replay", "report", "works")]) == []
    assert faults([Tried("watch", "report", "replay"), Tried("all", "report", "works")]) == []


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (Tried("", "info", "exit code 1: boom"), "info, with no extra: exit code 1: boom"),
        (Tried("replay", "report", "replay"), "report, with replay: names replay, which is there"),
        (Tried("all", "report", "replay"), "report, with all: names replay, which is there"),
    ],
)
def test_what_a_user_cannot_mend_is_a_fault(row, says):
    assert faults([row]) == [says]


def test_the_frame_that_is_imported_is_one_that_zstd_reads():
    zstandard = pytest.importorskip("zstandard")
    content = str(TRACE).encode()
    assert zstandard.ZstdDecompressor().decompress(_zstd(content)) == content


def test_every_extra_for_users_is_tried_and_every_command_of_the_program():
    import tomllib

    from dpro.cli import cli
    from tests.jobs import ROOT

    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    of_machines = {"gpu", "amd", "devices"}  # whose libraries need a device, or gigabytes
    assert declared - {"docs", "dev", "mutation", *of_machines} == set(EXTRAS)
    tried = {command.split()[0] for command in COMMANDS.values()}
    jobs = {"attach", "doctor", "demo"}  # which need PyTorch or a running job
    assert set(cli.commands) - jobs <= tried
    assert re.search(NAMED, 'run `pip install "dpro-toolkit[replay]"`')[1] == "replay"
