"""What a shell offers as completions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from dpro.cli import all_commands, cli
from dpro.cli.completion import SHELLS, VARIABLE
from dpro.errors import InputError
from dpro.extensions.trial.changes import CHANGES
from dpro.replay.whatif.registry import EDITS


def after(*words: str) -> list[str]:
    """What may stand in place of the last word."""
    *before, typed = words
    found = ShellComplete(cli, {}, "dpro", VARIABLE).get_completions(before, typed)
    return [item.value for item in found]


def test_commands_and_their_options_complete():
    assert after("") == list(all_commands())
    assert after("di") == ["diagnose", "diff"]
    assert after("report", "--mark") == ["--markdown"]


def test_commands_complete_without_being_loaded():
    code = (
        "import sys; from click.shell_completion import ShellComplete as S; from dpro.cli import cli\n"
        "S(cli, {}, 'dpro', 'X').get_completions([], 'di')\n"
        "assert 'dpro.cli.completion' in sys.modules and 'dpro.cli.diagnose' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["info", "report", "replay", "whatif", "diagnose", "dashboard", "export"])
def test_a_run_completes_as_a_path(command):
    found = ShellComplete(cli, {}, "dpro", VARIABLE).get_completions([command], "sample")
    assert [item.type for item in found] == ["file"]


def test_edits_complete_by_name_by_key_and_by_word():
    assert {name.rstrip(":") for name in after("whatif", "RUN", "--edit", "")} == set(EDITS)
    assert after("whatif", "RUN", "-e", "netw") == ["network:"]
    assert after("whatif", "RUN", "-e", "hide") == ["hide-input"]
    keys = [f"network:{key}=" for key in ("bandwidth", "latency", "axis")]
    assert after("whatif", "RUN", "-e", "network:") == keys
    assert after("whatif", "RUN", "-e", "network:bandwidth=2,axis=tp,") == [
        "network:bandwidth=2,axis=tp,latency="
    ]
    assert after("whatif", "RUN", "-e", "precision:dtype=b") == ["precision:dtype=bf16"]
    assert after("whatif", "RUN", "-e", "nothing:") == []
    assert after("whatif", "RUN", "-e", "network:nothing=") == []


def test_changes_of_a_job_complete_by_example():
    assert set(after("try", "")) == {row.example for row in CHANGES.values()}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script_that_asks_dpro(shell):
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0
    assert f"{VARIABLE}={shell}_complete" in done.output


def test_bash_completes_with_the_script(tmp_path):
    """The function that the script defines is called as bash calls it."""
    script = CliRunner().invoke(cli, ["completion", "bash"]).output
    dpro = tmp_path / "dpro"
    dpro.write_text(f'#!/bin/sh\nexec {sys.executable} -m dpro "$@"\n')
    dpro.chmod(0o755)
    asked = "COMP_WORDS=(dpro rep); COMP_CWORD=1; _dpro_completion dpro; echo ${COMPREPLY[@]}"
    done = subprocess.run(
        ["bash", "-c", f'export PATH="{tmp_path}:$PATH"\n{script}\n{asked}'], capture_output=True, text=True
    )
    assert done.stdout.split() == ["report", "replay"], done.stderr


def test_a_command_that_does_not_exist_is_answered_with_the_nearest():
    done = CliRunner().invoke(cli, ["diagnos", "RUN"])
    assert done.exit_code == 2
    assert "Did you mean 'diagnose'?" in done.output
    said = CliRunner().invoke(cli, ["xyzzy"]).output
    assert "No such command, file or folder: 'xyzzy'.\n" in said


def test_a_program_in_place_of_a_command_is_answered_with_how_to_record_it(tmp_path, monkeypatch):
    (tmp_path / "torchrun").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = CliRunner().invoke(cli, ["torchrun", "my train.py"]).output
    assert "To record it: dpro record -o RUN -- torchrun 'my train.py'" in said


def test_a_run_whose_name_is_mistyped_is_answered_with_the_nearest(tmp_path, monkeypatch):
    (tmp_path / "slow_rank").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "Did you mean 'slow_rank'?" in CliRunner().invoke(cli, ["slow_rnk"]).output


def test_where_the_folder_cannot_be_listed_a_mistyped_word_is_one_line_all_the_same(monkeypatch):
    def refuse(*_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", refuse)
    assert "No such command, file or folder: 'xyzzy'.\n" in CliRunner().invoke(cli, ["xyzzy"]).output


@pytest.mark.parametrize("path", ["/nope", "./nope", "~/nope", "some/nope"])
def test_a_path_that_is_not_there_is_a_missing_file_and_no_missing_command(path):
    error = CliRunner().invoke(cli, [path]).exception
    assert isinstance(error, InputError)
    assert f"{Path(path)}: no such file or folder" in str(error)


@pytest.mark.parametrize("wrong", ["jobs/slow_rnk", "job/slow_rank"])
def test_a_path_with_one_wrong_name_is_answered_with_the_nearest_that_is_there(tmp_path, monkeypatch, wrong):
    (tmp_path / "jobs" / "slow_rank").mkdir(parents=True)
    (tmp_path / "jobbing").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "(did you mean jobs/slow_rank?)" in str(CliRunner().invoke(cli, [wrong]).exception)


def test_two_runs_without_a_command_are_to_be_compared(tmp_path):
    said = CliRunner().invoke(cli, [str(tmp_path), str(tmp_path)]).output
    assert f"two runs: `dpro diff {tmp_path} {tmp_path}` compares them" in " ".join(said.split())
    assert after(str(tmp_path), str(tmp_path), "--js") == ["--json"]  # pressing Tab refuses nothing


def test_help_is_a_command_too():
    assert CliRunner().invoke(cli, ["help"]).output == CliRunner().invoke(cli, ["--help"]).output
    of_command = CliRunner().invoke(cli, ["help", "whatif"]).output
    assert of_command == CliRunner().invoke(cli, ["whatif", "--help"]).output


@pytest.mark.parametrize("command", ["report", "whatif", "export", "diff"])
def test_steps_and_ranks_are_shown_by_example(command):
    assert after(command, "--steps", "") == ["3", "3-8", "3,5,7-9"]
    assert after(command, "--steps", "3-") == ["3-8"]
    of_ranks = [] if command == "whatif" else ["3", "3-8", "3,5,7-9"]  # it refuses them
    assert after(command, "--ranks", "") == of_ranks


def test_the_version_has_the_short_option_that_other_tools_have():
    assert CliRunner().invoke(cli, ["-V"]).output == CliRunner().invoke(cli, ["--version"]).output != ""
