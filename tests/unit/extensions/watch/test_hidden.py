"""A webhook's URL is in no command line that others can see, and in no message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from dpro.errors import UsageError
from dpro.extensions.watch.command import OPTIONS_OF_RECORD, WEBHOOK, check_outlets, start_watcher

URL = "https://hooks.example/T0/secret"
SHOW = r"""
import os, pathlib, sys
from dpro.extensions.watch.command import hide
hidden = hide(sys.argv[1])
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
print(hidden, sys.argv[1], pathlib.Path("/proc/self/cmdline").read_text().split("\0")[3:])
"""


def test_a_word_is_overwritten_wherever_it_is_and_in_processes_forked_later():
    command = [sys.executable, "-c", SHOW, URL, "--other", f"--url={URL}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    masked = "*" * len(URL)
    assert done.stdout.strip() == f"True {URL} {[masked, '--other', f'--url={masked}', '']}"


def test_the_watcher_gets_it_by_its_environment_alone(monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: started.append((command, how["env"])))
    start_watcher(URL, "9464", None, True, SimpleNamespace(run=Path("run")))
    start_watcher("", "", None, False, SimpleNamespace(run=Path("run")))
    (command, environment), (bare, plain) = started
    assert command[-3:] == ["--alone", "--metrics", "9464"]
    assert "secret" not in " ".join(command)
    assert environment[WEBHOOK] == URL
    assert bare[-2:] == ["--alone", "--no-ask"]
    assert WEBHOOK not in plain


def test_the_environment_is_the_same_as_the_option_and_is_not_handed_on(monkeypatch):
    got = []

    @click.command(params=[*OPTIONS_OF_RECORD])
    def command(webhook: str, **_: object) -> None:
        got.append((webhook, os.environ.get(WEBHOOK)))

    for arguments, environment in ([], URL), (["--webhook", URL], None), ([], None):
        if environment:
            monkeypatch.setenv(WEBHOOK, environment)
        assert CliRunner().invoke(command, arguments).exit_code == 0
    assert got == [(URL, None), (URL, None), ("", None)]


def test_one_that_cannot_be_is_refused_without_being_said():
    with pytest.raises(UsageError) as error:
        check_outlets("hooks.example/secret", "")
    assert "secret" not in str(error.value)
