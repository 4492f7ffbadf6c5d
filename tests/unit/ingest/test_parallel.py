"""Tasks over processes and executors."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dpro.ingest.importer import DIED, run_tasks


def _double(task: int) -> int:
    return task * 2


def _die_of_three(task: int) -> int:
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return task * 2


def _die_once(task: tuple[int, Path]) -> int:
    number, mark = task
    if number == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * 2


def _fail_of_three(task: int) -> int:
    if task == 3:
        raise ValueError("three\nis too many")
    return task * 2


def _write(task: Path) -> str:
    return str(task.write_text("x"))


def _lost(task: object, why: str) -> str:
    return f"{task} {why}"


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_task_is_done_once(jobs):
    assert sorted(run_tasks(_double, range(4), _lost, jobs=jobs)) == [0, 2, 4, 6]


def test_no_tasks_are_no_results():
    assert list(run_tasks(_double, [], _lost, jobs=3)) == []


@pytest.mark.slow
def test_a_process_that_dies_takes_only_its_own_task_with_it():
    results = list(run_tasks(_die_of_three, range(8), _lost, jobs=3))
    assert sorted(map(str, results)) == sorted(["0", "2", "4", "8", "10", "12", "14", f"3 {DIED}"])


def test_a_task_whose_process_died_is_tried_again(tmp_path):
    tasks = [(number, tmp_path / "died") for number in range(6)]
    assert sorted(run_tasks(_die_once, tasks, _lost, jobs=2)) == [0, 2, 4, 6, 8, 10]
    assert (tmp_path / "died").exists()


def test_a_task_that_an_executor_loses_is_reported_in_one_line():
    with ThreadPoolExecutor(2) as executor:
        results = list(run_tasks(_fail_of_three, range(5), _lost, executor=executor))
    assert sorted(map(str, results)) == ["0", "2", "3 ValueError: three", "4", "8"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_disk_that_fails_ends_it(jobs, tmp_path):
    tasks = [tmp_path / "a", tmp_path / "nowhere" / "b", tmp_path / "c"]
    with pytest.raises(FileNotFoundError):
        list(run_tasks(_write, tasks, _lost, jobs=jobs))


def test_an_executor_is_left_running():
    with ThreadPoolExecutor(1) as executor:
        list(run_tasks(_double, range(3), _lost, executor=executor))
        assert executor.submit(_double, 4).result() == 8
