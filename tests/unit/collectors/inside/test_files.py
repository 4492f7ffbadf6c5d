"""Files that others read while the job runs."""

import os
from pathlib import Path

import pytest

from dpro.collectors.inside.files import stamp_of, write_whole, written_whole


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
