"""Pools of processes: what their workers load, and what becomes of the work when one is killed."""

from __future__ import annotations

import json
import operator
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import active_children
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpro import processes
from dpro.analysis import graphs
from dpro.cli import cli
from dpro.processes import process_pool
from tests.builders import cpu_job

SCRIPT = """
import sys
import dpro
from dpro.analysis import graphs
print("here", flush=True)
graphs.MIN_LARGE_SPANS = 1
run = dpro.open(sys.argv[1])
print(run._analysis.condensed is not None, run.trust.answerable)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_builds_a_large_run_and_runs_once(tmp_path):
    run, script = cpu_job().write(tmp_path / "run"), tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.stdout.splitlines(), done.returncode) == (["here", "True True"], 0), done.stderr


PARENT = """
import os, time
from dpro.processes import process_pool
with process_pool(2) as pool:
    print(*{pool.submit(os.getpid).result() for _ in range(2)}, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_a_command_that_is_killed(number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    parent.send_signal(number)
    rest, _ = parent.communicate(timeout=60)  # its workers have its stdout, too
    assert (rest, parent.returncode) == ("", -number)
    assert workers
    for pid in workers:
        with suppress(FileNotFoundError):
            assert Path(f"/proc/{pid}/stat").read_text().split()[2] in "ZX"


def test_a_pool_leaves_the_program_that_uses_it_in_place():
    program = sys.modules["__main__"]
    with process_pool(1) as pool:
        assert pool.submit(operator.neg, 1).result() == -1
        assert sys.modules["__main__"] is program


def test_threads_that_start_processes_at_once_leave_the_program_in_place(monkeypatch):
    both, one_is_done, last = threading.Barrier(2), threading.Event(), []

    def start(_: object) -> None:  # the one that comes second ends second
        last.append(threading.current_thread())
        with suppress(threading.BrokenBarrierError):  # the other one waits for this to end
            both.wait(0.2)
        if last[-1] is threading.current_thread():
            one_is_done.wait(0.2)

    def work() -> None:
        processes._Worker().start()
        one_is_done.set()

    monkeypatch.setattr(SpawnProcess, "start", start)
    program = sys.modules["__main__"]
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now, sys.modules["__main__"] = sys.modules["__main__"], program
    assert now is program


def _kill_the_first(killed: list[int]) -> None:
    while not killed:
        for child in active_children():
            if child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
                killed.append(child.pid)
                return


@pytest.mark.slow
def test_a_worker_that_is_killed_while_ranks_are_built_is_one_line_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("DPRO_CACHE", str(tmp_path / "cache"))
    run = cpu_job().write(tmp_path / "run")

    def answer():
        return CliRunner().invoke(cli, ["replay", str(run.path), "--json"])

    whole = answer()
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 1)
    killed: list[int] = []
    killer = threading.Thread(target=_kill_the_first, args=(killed,), daemon=True)
    killer.start()
    broken = answer()
    killer.join()
    assert killed
    assert broken.exit_code != 0
    said = "a process that built ranks was killed, perhaps because memory ran out"
    assert str(broken.exception or broken.output).endswith(said)
    assert not [*(tmp_path / "cache").rglob("shares-*")]
    assert json.loads(answer().stdout) == json.loads(whole.stdout)
