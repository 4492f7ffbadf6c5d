"""Files and folders that are there whole or not at all, and their locks."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from dpro.errors import InputError
from dpro.folders import is_locked, lock, locked, made_whole, refuse_undecodable, written_whole


def test_file_gets_its_name_when_it_is_whole(tmp_path):
    (tmp_path / "name").write_text("before")
    with written_whole(tmp_path, "name", time_ns=5_000_000_000) as file:
        file.write(b"after")
        assert (tmp_path / "name").read_text() == "before"
    assert (tmp_path / "name").read_text() == "after"
    assert (tmp_path / "name").stat().st_mtime_ns == 5_000_000_000
    assert os.listdir(tmp_path) == ["name"]


def test_threads_that_write_the_same_file_do_not_take_what_another_has_not_finished(tmp_path):
    def write_in_a_thread():
        with written_whole(tmp_path, "name") as file:
            file.write(b"of the thread")

    with ThreadPoolExecutor(1) as executor, written_whole(tmp_path, "name") as file:
        file.write(b"half")
        file.flush()
        executor.submit(write_in_a_thread).result()
        assert (tmp_path / "name").read_text() == "of the thread"
        file.write(b" and half")
    assert (tmp_path / "name").read_text() == "half and half"
    assert os.listdir(tmp_path) == ["name"]


def fail_half_way(writing):
    with writing:
        raise ZeroDivisionError


def test_nothing_is_left_of_a_file_or_folder_that_fails(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fail_half_way(written_whole(tmp_path, "name"))
    with pytest.raises(ZeroDivisionError):
        fail_half_way(made_whole(tmp_path / "folder"))
    assert os.listdir(tmp_path) == []


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(InputError, match="symbolic link"), written_whole(tmp_path / "link", "name"):
        pass
    assert os.listdir(tmp_path / "real") == []


def test_folder_gets_its_name_when_it_is_whole(tmp_path):
    with made_whole(tmp_path / "folder", mode=0o700) as folder:
        (folder / "file").touch()
        assert not (tmp_path / "folder").exists()
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == ["file"]
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


def test_folder_takes_no_place_of_one_that_holds_something(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    with pytest.raises(OSError, match="not empty"), made_whole(tmp_path / "folder"):
        pass
    assert os.listdir(tmp_path) == ["folder"]


def test_one_process_at_a_time_holds_a_lock(tmp_path):
    path = tmp_path / "lock"
    asked = "from dpro.folders import lock; print(lock(open(__import__('sys').argv[1]), wait=False))"

    def got_elsewhere() -> str:
        command = [sys.executable, "-c", asked, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with locked(path):
        assert got_elsewhere() == "False"
        with path.open() as other:
            assert is_locked(other)
            assert not lock(other, wait=False)
    assert got_elsewhere() == "True"
    with path.open() as other:
        assert not is_locked(other)


def test_folder_is_locked_as_a_file_is(tmp_path):
    with locked(tmp_path):
        descriptor = os.open(tmp_path, os.O_RDONLY)
        assert is_locked(descriptor)
        os.close(descriptor)
    assert os.listdir(tmp_path) == []


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    """A device that root names as an output would be lost."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(InputError, match="is not a file"), written_whole(tmp_path, name):
            pass
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_a_loop_of_links_is_a_path_like_another(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    refuse_undecodable(tmp_path / "loop" / "run")
    with pytest.raises(InputError, match="must be UTF-8"):
        refuse_undecodable(tmp_path / "loop" / "run\udcff")
