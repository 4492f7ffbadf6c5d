"""Numbers of command lines, and of the files that they name, have ends."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import pytest
from click.types import FloatParamType, IntParamType

from dpro.cli import cli
from dpro.cli.options import NumberRange
from tests.commands import dpro, refused


def _numbers() -> Iterator[tuple[str, click.Parameter]]:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        waiting = [cli.get_command(context, name)]
        while waiting:
            command = waiting.pop()
            waiting += getattr(command, "commands", {}).values()
            for parameter in command.params:
                if isinstance(parameter.type, IntParamType | FloatParamType):
                    yield f"{name} {parameter.name}", parameter


def test_every_number_is_between_two_ends_and_is_a_number():
    open_ended = [
        name
        for name, parameter in _numbers()
        if not isinstance(parameter.type, click.IntRange | NumberRange)
        or None in (parameter.type.min, parameter.type.max)
    ]
    assert open_ended == []


@pytest.mark.parametrize("number", ["nan", "1e400", "-1", "9" * 5000])
def test_a_number_that_is_none_or_too_large_is_bad_usage(number):
    line = refused(dpro("check", "--timeout", number, "--hosts", "localhost"), 2)
    assert line.startswith("dpro: Invalid value for '--timeout': ")
    assert line.endswith(" (see `dpro check --help`)")
    assert len(line) < 400


def test_usage_that_click_refuses_is_one_line():
    line = refused(dpro("report", "--nothing"), 2)
    assert line == "dpro: No such option '--nothing' (see `dpro report --help`)"
    assert "Did you mean 'report'?" in refused(dpro("repor"), 2)
    for wrong, meant in (("--edt", "--edit"), ("--sensitvity", "--sensitivity")):
        line = refused(dpro("whatif", "RUN", wrong, "1"), 2)
        assert line.count("--") == 3  # also that of `dpro whatif --help`
        assert meant in line


def test_a_plan_of_a_batch_that_is_a_large_prime_ends(tmp_path):
    config = tmp_path / "config.json"
    sizes = "num_hidden_layers num_attention_heads hidden_size vocab_size intermediate_size"
    config.write_text(json.dumps({"model_type": "llama"} | dict.fromkeys(sizes.split(), 32)))
    done = dpro("plan", "--model", config, "--gpus", "1", "--global-batch", "16777213", "--sequence", "64")
    assert done.returncode == 0, done.stderr
    assert "is not in the range 1<=x<=16777216" in dpro("plan", "--global-batch", "1000000007").stderr


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        (f'{{"num_hidden_layers": {"9" * 5000}}}', 1, "is not JSON"),
        ('{"num_hidden_layers": 1e400}', 2, "a whole number"),
        (f'{{"num_hidden_layers": {"9" * 30}}}', 2, "is from 0 to 16,777,216"),
        ("[" * 100_000, 1, "is not JSON"),
        ('{"a":' * 100_000, 1, "is not JSON"),
        ("\xff", 1, "is not JSON"),
    ],
)
def test_a_configuration_of_no_model_is_one_line(tmp_path, config, code, said):
    path = tmp_path / "config.json"
    path.write_text(config, encoding="latin-1")
    line = refused(dpro("plan", "--model", path, "--gpus", "8"), code)
    assert said in line
    assert len(line) < 400
