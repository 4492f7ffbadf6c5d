"""Files that others read while the job runs."""

import os
import resource
from pathlib import Path

import pytest

from dpro.collectors.inside.files import (
    append_lines,
    refuse_beyond_limit,
    stamp_of,
    write_whole,
    written_whole,
)


def test_file_gets_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "window0003.json"
    path.write_text("before")
    before = stamp_of(path)
    with written_whole(path) as temporary:
        temporary.write_text("after")
        assert path.read_text() == "before"
        assert temporary.match(f"window0003.json.{os.getpid()}.tmp")  # a kill leaves this: it is reported
    assert path.read_text() == "after"
    assert stamp_of(path) != before
    assert os.listdir(tmp_path) == [path.name]


def test_file_that_cannot_be_written_leaves_the_one_before(tmp_path):
    write_whole(tmp_path / "name", b"before")
    with pytest.raises(TypeError):
        write_whole(tmp_path / "name", 5)
    assert (tmp_path / "name").read_bytes() == b"before"


def test_stamp_of_a_file_that_is_missing_is_known():
    assert stamp_of(Path("/nowhere")) == (0, 0)


def test_no_file_is_written_that_is_larger_than_the_process_may_write(tmp_path, monkeypatch):
    append_lines(tmp_path / "lines", "12")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    write_whole(tmp_path / "whole", b"1234")
    for refused in (
        lambda: write_whole(tmp_path / "whole", b"12345"),
        lambda: append_lines(tmp_path / "lines", "4"),
        refuse_beyond_limit,
    ):
        with pytest.raises(OSError, match="at most"):
            refused()
    assert (tmp_path / "whole").read_bytes() == b"1234"
    assert (tmp_path / "lines").read_bytes() == b"12\n"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    append_lines(tmp_path / "lines", "4")
    refuse_beyond_limit()
