"""Machine code of loops that is kept: it does what numba's does, and nothing is loaded that is not whole."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro import compiled as module
from dpro.compiled import BY_NUMBA, CompiledLoop, InlinedLoop, compiled

SHIFT = 3


@compiled
def _more(value: Any) -> int:
    return int(value + SHIFT)


@compiled
def _mixed(columns: Any, factor: int, share: float, into: Any) -> int:
    # A table of two dimensions, numbers, a tuple of arrays, and another compiled loop.
    counts, marks = into
    total = 0
    for row in range(columns.shape[0]):
        for column in range(columns.shape[1]):
            counts[row] += factor * _more(columns[row, column])
            marks[row] = marks[row] or columns[row, column] * share > 1.5
        total += counts[row]
    return total


def _copy(loop: Any, **other: Any) -> CompiledLoop:
    """The same loop as another process would find it, with other values of what it names."""
    function = loop.py_func
    return CompiledLoop(FunctionType(function.__code__, function.__globals__ | other, function.__name__))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_folders", lambda: iter([tmp_path / "first", tmp_path / "second"]))
    return tmp_path / "first"


@pytest.fixture
def without_numba(monkeypatch):
    """Whoever asks numba to compile fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("numba was asked to compile")

    return lambda: monkeypatch.setattr("numba.njit", refuse)


def _arguments() -> tuple[Any, ...]:
    return np.arange(6).reshape(2, 3), 2, 0.5, (np.zeros(2, np.int64), np.zeros(2, np.bool_))


tables = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(-100, 100))


@given(tables, st.integers(-(2**40), 2**40), st.floats(-2, 2), st.sampled_from(["C", "every other"]))
@settings(max_examples=30)
def test_kept_code_does_what_the_loop_does_in_python(shape, factor, share, layout):
    rows, columns, first = shape
    table = np.arange(first, first + rows * columns).reshape(rows, columns)
    if layout == "every other":
        table = np.repeat(table, 2, axis=1)[:, ::2]
    found, expected = ((np.ones(rows, np.int64), np.zeros(rows, np.bool_)) for _ in range(2))
    loop: Any = _mixed
    assert loop(table, factor, share, found) == loop.py_func(table, factor, share, expected)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def test_another_process_loads_what_the_first_one_kept(folder, without_numba):
    assert _copy(_mixed)(*_arguments()) == 66
    assert len(list(folder.iterdir())) == 1
    without_numba()
    assert _copy(_mixed)(*_arguments()) == 66


def test_a_loop_with_another_constant_or_callee_is_another_loop(folder):
    assert _copy(_more)(4) == 7
    assert _copy(_more, SHIFT=10)(4) == 14
    assert _copy(_mixed)(*_arguments()) == 66
    assert _copy(_mixed, _more=_copy(_more, SHIFT=0))(*_arguments()) == 30
    assert len(list(folder.iterdir())) == 4


def test_code_that_was_written_long_ago_makes_room_for_new_code(folder, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    for shift in range(20, 24):
        assert _copy(_more, SHIFT=shift)(4) == 4 + shift
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda code: code[:-1], lambda code: code[:-1] + b"!", lambda code: b""])
def test_a_file_that_is_not_whole_is_made_again(folder, damage):
    _copy(_more)(4)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert _copy(_more)(4) == 7
    assert file.read_bytes() == whole


def test_a_file_with_the_code_of_another_loop_is_made_again(folder):
    _copy(_more)(4)
    (file,) = folder.iterdir()
    _copy(_more, SHIFT=10)(4)
    (other,) = set(folder.iterdir()) - {file}
    whole = other.read_bytes()
    other.write_bytes(file.read_bytes())
    assert _copy(_more, SHIFT=10)(4) == 14
    assert other.read_bytes() == whole


def test_where_the_first_folder_takes_no_files_the_second_one_does(folder, without_numba):
    folder.write_bytes(b"no folder")
    assert _copy(_more)(4) == 7
    assert len(list((folder.parent / "second").iterdir())) == 1
    without_numba()
    assert _copy(_more)(4) == 7


def test_where_no_folder_takes_files_loops_run_all_the_same(folder):
    folder.write_bytes(b"no folder")
    (folder.parent / "second").write_bytes(b"no folder")
    assert _copy(_more)(4) == 7


def _divides(values: Any, by: int) -> int:
    return int(values[0] // by)


def _also_divides(values: Any, by: int) -> int:
    return int(values[0] // by)


def _allocates(values: Any, by: int) -> int:
    made = np.empty(by, np.int64)
    for at in range(by):
        made[at] = values[at % 2]
    return int(made[by - 1])


def _returns_an_array(values: Any, _by: int) -> Any:
    return values


def _calls_the_mathematics_library(values: Any, by: int) -> int:
    return int(values[0] ** (by / 3))


@pytest.mark.parametrize(
    "function", [_divides, _allocates, _returns_an_array, _calls_the_mathematics_library]
)
def test_what_cannot_run_by_itself_is_left_to_numba(folder, function):
    loop = compiled(function)
    assert np.all(loop(np.array([8, 9]), 3) == function(np.array([8, 9]), 3))
    (file,) = folder.iterdir()
    assert file.read_bytes()[module.DIGEST_BYTES :] == BY_NUMBA


def test_what_raises_raises(folder):
    with pytest.raises(ZeroDivisionError):
        compiled(_divides)(np.ones(1, np.int64), 0)


def test_a_loop_with_other_settings_is_another_loop(folder):
    assert InlinedLoop(_also_divides)(np.ones(1, np.int64), 2) == 0  # not held to raise where `by` is 0
    with pytest.raises(ZeroDivisionError):
        CompiledLoop(_divides)(np.ones(1, np.int64), 0)


def test_threads_that_call_a_loop_first_load_it_once(folder, monkeypatch):
    loads, linked, together = [], module._linked, threading.Barrier(4)

    def slowly(*given):
        loads.append(given)
        time.sleep(0.1)
        return linked(*given)

    def call(loop):
        together.wait()
        return loop(4)

    monkeypatch.setattr(module, "_linked", slowly)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, [_copy(_more)] * 4)) == [7] * 4
    assert len(loads) == 1


@pytest.mark.parametrize("odd", [True, 2**63, np.int32(4), 4j])
def test_arguments_that_machine_code_does_not_take_are_left_to_numba(folder, odd):
    assert compiled(_same)(odd) == odd
    assert not folder.exists()


def _same(value: Any) -> Any:
    return value


def test_settings_of_numba_hold(folder, monkeypatch):
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    _copy(_more)(4)
    assert not folder.exists()


def test_other_processors_are_left_to_numba(folder, monkeypatch):
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    assert _copy(_more)(4) == 7
    assert not folder.exists()


def test_numba_still_passes_arrays_as_is_expected_here(folder, monkeypatch):
    monkeypatch.setattr(module, "ARRAY", ("data", "shape"))
    assert _copy(_mixed)(*_arguments()) == 66
    (file,) = folder.iterdir()
    assert file.read_bytes()[module.DIGEST_BYTES :] == BY_NUMBA


def test_all_arguments_are_passed_in_the_types_of_the_machine_code(folder, monkeypatch):
    monkeypatch.setattr(module, "_flat", lambda kind: iter(["i64"]))
    assert _copy(_mixed)(*_arguments()) == 66
    (file,) = folder.iterdir()
    assert file.read_bytes()[module.DIGEST_BYTES :] == BY_NUMBA


def test_a_replay_does_not_load_numba_once_its_loops_are_kept():
    program = """
import sys
import numpy as np
from dpro.replay.engine import longest_path
one = np.ones(1, np.int64)
assert longest_path(one, one, np.zeros(2, np.int64), one[:0], one[:0])[0].tolist() == [1]
print("numba" in sys.modules, "scipy" in sys.modules)
"""
    said = [subprocess.check_output([sys.executable, "-c", program], text=True).split() for _ in range(2)]
    assert said[1] == ["False", "False"]


def test_loops_are_compiled_where_numba_can_keep_nothing(folder, monkeypatch):
    def njit(*, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda loop: lambda *arguments: ("compiled", loop(*arguments))

    monkeypatch.setattr("numba.njit", njit)
    assert compiled(_same)(True) == ("compiled", True)
