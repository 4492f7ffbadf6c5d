"""Files that say something of a job: read whole, and what has no end or no beginning is not waited for."""

from __future__ import annotations

import os
import resource
import socket
import tracemalloc
from threading import Thread

import pytest

from dpro.errors import InputError
from dpro.limits import MAX_FACTS_BYTES, MAX_WHOLE_BYTES, memory_left, read_small


def test_a_pipe_that_no_process_writes_to_is_empty(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert read_small(tmp_path / "pipe") == b""


def test_a_pipe_is_read_to_its_end(tmp_path):
    reading, writing = os.pipe()
    content = b"x" * (1 << 20)  # more than a pipe holds
    writer = Thread(target=lambda: os.fdopen(writing, "wb").write(content))
    writer.start()
    try:
        assert read_small(tmp_path / f"/proc/self/fd/{reading}") == content
    finally:
        os.close(reading)
        writer.join()


def test_a_device_is_refused(tmp_path):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"config\.json: is a device"):
        read_small(tmp_path / "config.json")


def test_a_socket_is_refused(tmp_path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    with pytest.raises(InputError, match="cannot be read"):
        read_small(tmp_path / "socket")


def test_what_is_too_large_is_not_read(tmp_path):
    for most_bytes in (MAX_FACTS_BYTES, MAX_WHOLE_BYTES):
        with (tmp_path / "hole").open("wb") as file:
            file.truncate(most_bytes + 1)
        with pytest.raises(InputError, match="is larger than"):
            read_small(tmp_path / "hole", most_bytes)


def test_a_small_file_takes_no_room_for_a_large_one(tmp_path):
    (tmp_path / "log").write_bytes(b"x")
    tracemalloc.start()
    try:
        assert read_small(tmp_path / "log", MAX_WHOLE_BYTES) == b"x"
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_FACTS_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("limited", [resource.RLIMIT_DATA, resource.RLIMIT_AS])
def test_a_limit_of_the_process_counts_less_what_it_has_taken(monkeypatch, limited):
    def limit(of):
        return (8 << 30, 8 << 30) if of == limited else (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    whole = memory_left()
    monkeypatch.setattr(resource, "getrlimit", limit)
    assert memory_left() < min(whole, 8 << 30)
    monkeypatch.setattr(resource, "getrlimit", lambda of: (1 << 20, 1 << 20))
    assert memory_left() == 0
