"""Machine code of loops that is kept: another process takes it, and nothing that others may have written."""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from dpro import compiled as module
from dpro.cache import trusted_folder
from dpro.compiled import CompiledLoop, InlinedLoop, compile_beside, compiled, is_kept, run_beside

SHIFT = 3


@compiled
def _more(value: Any) -> int:
    return int(value + SHIFT)


@compiled
def _sum_of_more(values: Any) -> int:
    total = 0
    for value in values:
        total += _more(value)
    return total


def _copy(loop: Any, **other: Any) -> CompiledLoop:
    """The same loop as another process would find it, with other values of what it names."""
    function = loop.py_func
    return CompiledLoop(FunctionType(function.__code__, function.__globals__ | other, function.__name__))


def _compilations(loop: CompiledLoop) -> int:
    return sum(loop._by_numba.stats.cache_misses.values())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of kept code; processes that begin later look into it again."""
    monkeypatch.setenv("DPRO_CACHE", str(tmp_path / "cache"))
    trusted_folder.cache_clear()
    yield tmp_path / "cache" / "loops"
    trusted_folder.cache_clear()


@pytest.fixture
def later(folder):
    return trusted_folder.cache_clear


def test_another_process_loads_what_the_first_one_kept(folder, later):
    assert _copy(_more)(4) == 7
    assert {file.suffix for file in folder.iterdir()} == {".nbi", ".nbc"}
    later()
    loaded = _copy(_more)
    assert loaded(4) == 7
    assert _compilations(loaded) == 0


def test_a_loop_with_another_constant_or_callee_is_another_loop(folder):
    assert _copy(_more)(4) == 7
    assert _copy(_more, SHIFT=10)(4) == 14
    assert _copy(_sum_of_more)(np.arange(3)) == 12
    assert _copy(_sum_of_more, _more=_copy(_more, SHIFT=0))(np.arange(3)) == 3


def test_a_process_beside_keeps_a_loop_for_those_that_come_later(folder, later, monkeypatch):
    monkeypatch.setattr("os.nice", lambda _: 0)
    assert not is_kept(_copy(_more))
    compile_beside(lambda: _copy(_more)(4))
    assert is_kept(_copy(_more))
    assert not is_kept(_copy(_more, SHIFT=10))
    monkeypatch.setattr("importlib.metadata.version", lambda _: "another one")
    module._machine.cache_clear()
    assert not is_kept(_copy(_more))
    module._machine.cache_clear()


def test_only_one_process_compiles_beside(folder, monkeypatch):
    monkeypatch.setattr("os.nice", lambda _: 0)
    other = os.open(trusted_folder("loops"), os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    compile_beside(lambda: pytest.fail("another process does it"))
    os.close(other)


def test_loops_are_compiled_beside_where_files_cannot_be_locked(folder, monkeypatch):
    def without_locks(*_: object) -> None:
        raise OSError(37, "no locks available")

    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setattr("fcntl.flock", without_locks)
    compile_beside(lambda: _copy(_more)(4))
    assert is_kept(_copy(_more))


def test_a_process_beside_runs_nothing_that_lies_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert run_beside("beside").wait() != 0
    assert not (tmp_path / "mark").exists()


def test_commands_go_on_where_no_process_can_be_started_beside(monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr("subprocess.Popen", full)
    assert run_beside("none") is None


def test_parts_of_a_loop_are_kept_with_it(folder):
    names = {"_part": InlinedLoop(_divides)}
    caller = CompiledLoop(FunctionType(_calls_part.__code__, names, "caller"))
    assert caller(np.ones(1, np.int64), 1) == 1
    assert len(list(folder.iterdir())) == 2


def _calls_part(values: Any, by: int) -> Any:
    return _part(values, by)  # noqa: F821


def _divides(values: Any, by: int) -> int:
    return int(values[0] // by)


def test_a_loop_with_other_settings_is_another_loop(folder):
    assert InlinedLoop(_divides)(np.ones(1, np.int64), 0) == 0  # not held to raise where `by` is 0
    with pytest.raises(ZeroDivisionError):
        CompiledLoop(_divides)(np.ones(1, np.int64), 0)


def test_checks_that_numba_is_asked_for_are_compiled_in(folder, monkeypatch):
    assert _copy(CompiledLoop(_divides))(np.ones(1, np.int64)[:0], 1) == 1
    monkeypatch.setattr("numba.config.BOUNDSCHECK", 1)
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    with pytest.raises(IndexError):
        _copy(CompiledLoop(_divides))(np.ones(1, np.int64)[:0], 1)


def test_code_that_was_written_long_ago_makes_room_for_new_code(folder, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    for shift in range(20, 24):
        assert _copy(_more, SHIFT=shift)(4) == 4 + shift
    assert len(list(folder.iterdir())) <= 4


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", [lambda code: code[:-9], lambda _: b"", lambda code: b"\xff" + code])
def test_a_file_that_is_not_whole_is_made_again(folder, later, suffix, damage):
    _copy(_more)(4)
    (file,) = folder.glob(f"*{suffix}")
    file.write_bytes(damage(file.read_bytes()))
    later()
    assert _copy(_more)(4) == 7


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def _is_run(folder: Path, later: Any, changed: Any) -> bool:
    """Whether what stands in all files of kept code is run, once a change has been made to the folder."""
    _copy(_more)(4)
    mark = folder.parent / "mark"
    for file in folder.iterdir():
        file.write_bytes(pickle.dumps(_Bomb(mark)))
    changed()
    later()
    assert _copy(_more)(4) == 7
    return mark.exists()


def test_what_the_user_wrote_is_run(folder, later):
    assert _is_run(folder, later, lambda: None)  # or the tests below would show nothing


def test_a_file_that_others_can_write_to_is_not_run(folder, later):
    assert not _is_run(folder, later, lambda: [file.chmod(0o666) for file in folder.iterdir()])


def test_a_link_is_not_run(folder, later, tmp_path):
    def linked() -> None:
        for file in list(folder.iterdir()):
            file.rename(tmp_path / file.name)
            file.symlink_to(tmp_path / file.name)

    assert not _is_run(folder, later, linked)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_of_another_user_are_not_run(folder, later):
    assert not _is_run(folder, later, lambda: [os.chown(file, 1234, -1) for file in folder.iterdir()])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_user_is_not_looked_into(folder, later):
    assert not _is_run(folder, later, lambda: os.chown(folder, 1234, -1))


def test_a_folder_that_is_put_in_its_place_is_not_looked_into(folder, later):
    def replaced() -> None:
        later()
        trusted_folder("loops")
        folder.rename(folder.with_name("before"))
        folder.mkdir()
        for file in folder.with_name("before").iterdir():
            file.rename(folder / file.name)

    assert not _is_run(folder, lambda: None, replaced)


def test_loops_run_where_nothing_can_be_kept(folder, later):
    folder.parent.write_text("no folder")
    assert _copy(_more)(4) == 7


def test_settings_of_numba_and_its_own_folder_are_left_alone(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "theirs"))
    assert _copy(_more)(4) == 7
    assert not (tmp_path / "theirs").exists()


def test_what_needs_no_loop_does_not_load_numba():
    program = "import sys, dpro.replay.engine; print('numba' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == ["False"]
