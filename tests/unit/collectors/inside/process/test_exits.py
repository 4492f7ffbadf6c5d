"""What is kept of the exception that ends a process."""

from __future__ import annotations

import json
import os
import signal
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside import records
from dpro.collectors.inside.files import EXIT, LAST, RAISED
from dpro.collectors.inside.process.exits import Exits, describe_exception
from dpro.collectors.inside.tracebacks import OURS
from dpro.collectors.launch.endings import UNKNOWN, ending, exception, left_ns


def caught(error: BaseException) -> dict[str, object]:
    try:
        raise error
    except BaseException:
        return describe_exception(*sys.exc_info())  # type: ignore[arg-type]


def test_an_exception_is_its_type_the_first_line_of_its_message_and_the_calls_it_came_through():
    raised = caught(ValueError("x is negative\nand more"))
    assert (raised["type"], raised["message"]) == ("ValueError", "x is negative")
    assert [call.rpartition(" ")[2] for call in raised["calls"]] == ["caught"]  # type: ignore[attr-defined]


def test_a_message_that_is_too_long_ends_with_a_sentence():
    said = "Expected to have finished. This says that parameters were not used. "
    assert caught(RuntimeError(said + "x" * 400))["message"] == said.strip()
    assert caught(RuntimeError("x" * 400))["message"] == "x" * 300


def test_an_exception_that_quotes_another_process_is_what_that_one_raised():
    quoted = "\n\n-- Process 1 failed:\nTraceback (most recent call last):\n  File x\nOSError: disk full\n"
    assert caught(RuntimeError(quoted))["message"] == "OSError: disk full"


def test_an_exception_of_a_worker_is_what_its_own_code_raised_and_calls_of_ours_are_left_out():
    quoted = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/venv/torch/worker.py", line 9, in _worker_loop\n    data = fetcher.fetch(index)\n'
        '  File "/job/data.py", line 12, in decode\n    raise ValueError(index)\nValueError: sample 7 is cut'
    )
    raised = caught(ValueError(quoted))
    assert raised["message"] == "sample 7 is cut"
    assert raised["calls"][:2] == [
        "/job/data.py:12 decode",
        "/venv/torch/worker.py:9 _worker_loop",
    ]  # type: ignore[index]

    def patched() -> None:
        raise ValueError

    patched.__code__ = patched.__code__.replace(co_filename=f"{OURS}inside/steps/data.py")
    try:
        patched()
    except ValueError as error:
        calls = exception_calls(error)
    assert [call.rpartition(" ")[2] for call in calls] == [
        "test_an_exception_of_a_worker_is_what_its_own_code_raised_and_calls_of_ours_are_left_out"
    ]


def exception_calls(error: BaseException) -> list[str]:
    return list(describe_exception(type(error), error, error.__traceback__)["calls"])


def test_an_exception_that_a_hook_of_the_jobs_own_got_is_kept_at_the_end(monkeypatch):
    kept: list[BaseException] = []
    exits = Exits(SimpleNamespace(ending=""))  # type: ignore[arg-type]
    monkeypatch.setattr(exits, "on_raise", lambda kind, error, place: kept.append(error))
    exits.on_end()
    monkeypatch.setattr(sys, "last_value", ValueError("bad"), raising=False)
    exits.on_end()
    assert [str(error) for error in kept] == ["bad"]


def test_secrets_of_a_message_are_masked_and_a_message_that_fails_is_none():
    assert "hunter2" not in str(caught(RuntimeError("no access: password=hunter2"))["message"])

    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError

    assert caught(Broken())["message"] == ""


def test_the_exception_becomes_columns_of_workers(tmp_path):
    assert exception(tmp_path, []) == {"error": "", "failed_ns": -1}
    stopped = [records.Record(5, 0, signal.SIGINT, 0, records.ENDING)]
    assert exception(tmp_path, stopped) == {"error": "KeyboardInterrupt", "failed_ns": 5}
    raised = {
        "time_ns": 7,
        "type": "ValueError",
        "message": "bad",
        "calls": ["a.py:1 f", "b.py:2 g"],
    }
    (tmp_path / RAISED).write_text(json.dumps(raised))
    assert exception(tmp_path, []) == {"error": "ValueError: bad\na.py:1 f\nb.py:2 g", "failed_ns": 7}


def test_a_process_that_exited_before_sigterm_ended_by_its_exit_code(tmp_path):
    assert ending(tmp_path, [], 15).signal == 15
    (tmp_path / EXIT).touch()
    assert ending(tmp_path, [], None) == UNKNOWN
    (tmp_path / EXIT).rename(tmp_path / f"{EXIT}-")
    assert ending(tmp_path, [], 15) == (0, -1)
    assert ending(tmp_path, [], 11).signal == 11  # it crashed on its way out
    assert ending(tmp_path / "none", [], None) == UNKNOWN
    (tmp_path / f"{EXIT}-").rename(os.fsdecode(os.fsencode(tmp_path / f"{EXIT}-") + b"\xff"))
    assert ending(tmp_path, [], None) == (255, -1)


def test_when_an_interpreter_went_is_known_only_where_all_its_calls_were_saved(tmp_path):
    assert left_ns(tmp_path) == -1
    (tmp_path / LAST).write_bytes(b"")
    assert left_ns(tmp_path) == (tmp_path / LAST).stat().st_mtime_ns
