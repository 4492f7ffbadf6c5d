"""Commands as a shell runs them, in this process: importing dpro again takes longer than most of them do."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
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


def on_terminal(
    *arguments: str | Path,
    rows: int = 24,
    cwd: Path | None = None,
    keys: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> bytes:
    """What a command that succeeds shows on a terminal of 80 columns.

    Args:
        arguments: what follows `dpro`.
        cwd: where it starts, if not here.
        keys: that are typed ahead.
        environment: variables beside those of this process.
    """
    child, end = pty.fork()
    if child == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))
        os.chdir(cwd or os.curdir)
        command = [sys.executable, "-m", "dpro", *map(str, arguments)]
        os.execve(sys.executable, command, {**os.environ, "TERM": "xterm", **(environment or {})})
    os.write(end, keys)
    text = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(end, 1 << 16):
            text += part
    assert os.waitpid(child, 0)[1] == 0
    os.close(end)
    return text
