"""docs/papers.md: each command in it is one that dpro takes, with changes that exist."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from dpro.cli import cli
from dpro.extensions.goodput.outlook import DESIGNS
from dpro.extensions.serving.changes import CHANGES
from dpro.replay.whatif.grammar import split_edit, values_of
from dpro.replay.whatif.registry import parse_edit

PAGE = (Path(__file__).parents[2] / "docs/papers.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`dpro (\w+)([^`]*)`", PAGE)
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| system")]
SYSTEMS = (
    "dPRO", "C4", "MegaScale", "ByteCheckpoint", "ElasWave", "NTP", "QSync", "OHQ", "LLM-PQ", "EnergonAI",
    "NCPP", "SpecInfer", "BatchLLM", "DiskGNN", "AlgoPerf",
)  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_system_has_a_row_with_a_command_or_what_is_missing(system):
    (row,) = [row for row in ROWS if system in row.split("|")[1]]
    _, _, works, missing, _ = row.split("|")
    assert "`dpro " in works or (works.strip() == "none" and missing.strip())


@pytest.mark.parametrize(("command", "rest"), COMMANDS)
def test_each_command_and_its_options_exist(command, rest):
    declared = cli.get_command(click.Context(cli), command)
    options = {option for parameter in declared.params for option in parameter.opts}
    assert set(re.findall(r"(?<= )--[\w-]+", rest)) <= options


def test_each_change_can_be_made_as_written():
    changes = []
    for row in ROWS:
        command = ""
        for named, edit in re.findall(r"`dpro (\w+)|--edit ([^\s`]+)", row):
            command = named or command
            if edit:
                changes.append((command, edit))
    assert len(changes) >= 12
    for command, edit in changes:
        if command == "whatif":
            parse_edit(edit)
        else:
            name, rest = split_edit(edit)
            change = {"goodput": DESIGNS, "serving": CHANGES}[command][name]
            assert values_of(name, rest, [key.name for key in change.keys], change.example)
