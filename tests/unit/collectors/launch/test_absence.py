import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpro.collectors.launch import absence
from dpro.collectors.launch.absence import flags_of, in_words, reason_of, reasons, seen_by, why_no_steps
from dpro.collectors.launch.recording import Launch

NAME = Launch(Path("/run"), "host-1").inject


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("python train.py -I", ""),
        ("python -I train.py", "I"),
        ("python -uE -m package -I", "uE"),
        ("python -c -I", ""),
        ("python -Wignore::E train.py", ""),
        ("python -X importtime -I x", ""),
        ("python -bE", "bE"),
        ("python --version", ""),
    ],
)
def test_flags_are_those_of_the_interpreter(command, flags):
    assert flags_of(command.split()) == set(flags)


@pytest.fixture
def process():
    """A process that is given an environment and waits."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*flags: str, **environment: str) -> int:
        command = [sys.executable, *flags, "-c", "print(flush=True); input()"]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe))
        assert started[-1].stdout.readline()
        return started[-1].pid

    yield start
    for each in started:
        each.communicate(b"\n")


def torch_of(folder: Path, version: str) -> Path:
    (folder / "version.py").write_text(f"__all__ = ['git']\n__version__ = '{version}'\n")
    return folder


@pytest.mark.parametrize(
    ("flags", "environment", "version", "reason"),
    [
        ([], {"PYTHONPATH": f"{NAME}:/mine"}, "2.13.0+cpu", None),
        (["-E"], {"PYTHONPATH": NAME}, "2.13.0", "`python -E` ignores PYTHONPATH"),
        ([], {"PYTHONPATH": "/mine"}, "2.13.0", "started with its own PYTHONPATH"),
        ([], {}, "2.13.0", "started with its own PYTHONPATH"),
        ([], {"PYTHONPATH": NAME}, "2.4.1", "its torch is 2.4, and the recorder needs 2.6 or newer"),
        ([], {"PYTHONPATH": NAME, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "2.6.0", "AUTOLOAD=0"),
    ],
)
def test_what_keeps_the_recorder_out_is_seen_from_outside(
    process, tmp_path, flags, environment, version, reason
):
    found = reason_of(process(*flags, **environment), torch_of(tmp_path, version), NAME, tmp_path)
    assert (found is None) if reason is None else (reason in str(found))


def test_process_of_another_user_is_said_to_be_one(process, tmp_path, monkeypatch):
    pid = process(PYTHONPATH=NAME)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    reason = reason_of(pid, torch_of(tmp_path, "2.13.0"), NAME, tmp_path)
    assert reason is not None
    assert "runs as another user than `dpro record`" in reason


def test_processes_without_torch_are_of_no_interest(process):
    assert reasons(process("-I"), NAME, Path("/run")) == {}


def test_descendants_are_looked_at(tmp_path):
    library = tmp_path / "site-packages" / "torch" / "lib" / "libtorch_cpu.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"x" * 4096)
    torch_of(library.parents[1], "2.4.0")
    program = tmp_path / "maps.py"
    program.write_text(
        f"import mmap\nwith open({str(library)!r}, 'r+b') as file: m = mmap.mmap(file.fileno(), 0)\n"
        "print(flush=True)\ninput()"
    )
    shell = subprocess.Popen(
        ["sh", "-c", f'"{sys.executable}" "{program}"; true'],
        env={"PYTHONPATH": NAME},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert shell.stdout is not None
    assert shell.stdout.readline()
    [reason] = in_words(reasons(shell.pid, NAME, tmp_path))
    shell.communicate(b"\n")
    assert "imported torch but was not recorded: its torch is 2.4" in reason


@pytest.mark.parametrize(
    ("updates", "imported", "seen", "failure", "words"),
    [
        ([], False, [], "", "no process of the job was seen to import torch"),
        (
            [],
            False,
            [],
            "exit code 1",
            r"failed \(exit code 1\) before any of its processes was seen to import torch",
        ),
        ([], True, [], "exit code 1: E", r"the job failed \(exit code 1: E\) before its first step ended"),
        ([], True, [], "", "imported torch, but no process created a process group, ran an optimizer step"),
        (
            [],
            True,
            ["process 7 imported torch but"],
            "",
            "nothing was recorded: process 7 imported torch but",
        ),
        ([0, 0], True, [], "", "no step of the job ended: no optimizer ran"),
        ([0, 0], True, [], "SIGKILL", r"the job failed \(SIGKILL\) before its first step ended"),
        (
            [1, 0],
            True,
            [],
            "",
            "the job ran a single step: a step is timed from the end of the previous step",
        ),
        ([1], True, [], "exit code 3", r"failed \(exit code 3\) after its first step: a step is timed"),
    ],
)
def test_why_there_is_no_step_is_one_sentence(updates, imported, seen, failure, words):
    assert re.search(words, why_no_steps(updates, imported, seen, failure))


def test_path_is_followed_as_the_process_sees_it(process, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "relative").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative")
    (tmp_path / "loop").symlink_to("loop")
    pid = process()
    assert seen_by(pid, tmp_path / "absolute" / ".." / "absolute") == Path(f"/proc/{pid}/root{tmp_path}/real")
    seen_by(pid, tmp_path / "loop" / "x")  # comes to an end


@pytest.mark.parametrize(
    ("has_code", "has_run", "copied", "words"),
    [
        (True, True, False, None),
        (False, True, True, None),
        (True, False, True, "without the run folder (RUN): mount that there under the same path"),
        (False, False, True, "without the run folder (RUN): mount that there under the same path"),
        (False, True, False, "without dpro's installation (DPRO): mount that there under the same path, or "),
        (False, False, False, "without dpro's installation (DPRO) and the run folder (RUN): mount that"),
    ],
)
def test_what_a_container_lacks_is_said(process, tmp_path, monkeypatch, has_code, has_run, copied, words):
    launch, inside = Launch(tmp_path / "run", "host-1"), tmp_path / "container"
    (launch.raw / ("recorder" if copied else "x")).mkdir(parents=True)
    code = Path(launch.inject).parent
    for there, path in ((has_code, code), (has_run, launch.raw), (True, tmp_path)):
        if there:
            (inside / path.relative_to("/")).mkdir(parents=True, exist_ok=True)
    torch_of(inside / tmp_path.relative_to("/"), "2.13.0")
    monkeypatch.setattr(absence, "seen_by", lambda _, path: inside / path.relative_to("/"))
    reason = reason_of(process(PYTHONPATH=launch.inject), tmp_path, launch.inject, launch.raw)
    expected = words and words.replace("DPRO", str(code.parent)).replace("RUN", str(launch.run))
    assert reason is None if expected is None else expected in str(reason)
