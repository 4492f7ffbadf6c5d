"""Panics of polars."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from dpro.errors import InputError
from dpro.panics import is_panic, panics_as


class PanicException(BaseException):  # as polars' own, which cannot be made in Python
    pass


def fail(error: BaseException) -> None:
    os.write(2, b"it failed\n")
    raise error


def test_a_panic_becomes_an_error_of_one_line(capfd):
    with pytest.raises(InputError, match=r"^gone$"), panics_as(InputError):
        fail(PanicException("gone\nand more"))
    assert capfd.readouterr().err == ""


def test_what_is_said_where_nothing_panics_is_said(capfd):
    with panics_as(InputError):
        print("a word", file=sys.stderr)
        with panics_as(InputError):
            os.write(2, b"and another\n")
    assert capfd.readouterr().err == "a word\nand another\n"
    with pytest.raises(KeyError), panics_as(InputError):
        fail(KeyError())
    assert capfd.readouterr().err == "it failed\n"


def test_threads_may_hold_back_at_once(capfd):
    inside, over = threading.Barrier(2), threading.Barrier(2)

    def hold() -> None:
        with panics_as(InputError):
            inside.wait()
            os.write(2, b"word\n")
        over.wait()

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capfd.readouterr().err == "word\nword\n"


def test_a_process_without_a_standard_error_can_read():
    script = "import os, dpro.panics\nos.close(2)\nwith dpro.panics.panics_as(Exception): print('read')"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "read\n"


def test_a_process_that_can_open_no_more_files_reads_without_holding_back(monkeypatch, capfd):
    def full(_name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    with panics_as(InputError):
        os.write(2, b"word\n")
    assert capfd.readouterr().err == "word\n"


def test_only_panics_are_panics():
    assert is_panic(PanicException())
    assert not any(map(is_panic, (KeyboardInterrupt(), ValueError(), SystemExit())))


def test_the_first_array_of_polars_runs_no_python_in_rust_where_ctrl_c_is_a_panic():
    script = """
import dpro.table
import numpy.lib
import polars

def interrupt(*_):
    raise KeyboardInterrupt

numpy.lib.NumpyVersion.__init__ = interrupt
print(polars.Series(["word"]).to_numpy())
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "['word']\n"
