"""Commands as a shell runs them, in this process: importing dpro anew takes longer than most of them do."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from dpro.cli import main


def dpro(*arguments: str | Path, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that does not become another process, as `dpro record` does.

    Args:
        arguments: what follows `dpro`.
        cache: the folder of the user's cache, if not the usual one.
    """
    command = ["dpro", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", command)
        patch.delenv("COLUMNS", raising=False)
        if cache:
            patch.setenv("DPRO_CACHE", str(cache))
        with pytest.raises(SystemExit) as ended:
            main()
    return subprocess.CompletedProcess(command, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def in_own_process(*arguments: str | Path, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own, for what a process reads once."""
    command = [sys.executable, "-m", "dpro", *map(str, arguments)]
    env = os.environ | ({"DPRO_CACHE": str(cache)} if cache else {})
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def refused(done: subprocess.CompletedProcess[str], exit_code: int) -> str:
    """The one line on stderr of a command that could not do what was asked."""
    assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("dpro: ")
    return line
