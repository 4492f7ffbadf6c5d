"""Requests of Kineto to its daemon, as bytes."""

import socket
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import InputError
from dpro.extensions.dynolog import daemon
from dpro.extensions.dynolog.daemon import HEAD, parse_request


def request(pids, kind=b"req"):
    payload = struct.pack(f"<iiq{len(pids)}i", 3, len(pids), 0, *pids)
    return HEAD.pack(len(payload), kind) + payload


def test_request_names_the_process_and_those_that_started_it():
    assert parse_request(request([5665, 5663, 1])) == [5665, 5663, 1]


def test_other_datagrams_name_no_process():
    assert parse_request(request([1], kind=b"ctxt")) == []
    assert parse_request(b"") == []
    assert parse_request(request([1, 2, 3])[:-1]) == []


@given(st.binary(max_size=200))
def test_no_datagram_is_trouble(datagram):
    parse_request(datagram)
    parse_request(HEAD.pack(0, b"req") + datagram)


def test_second_daemon_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(daemon, "environment_of", lambda _: {"KINETO_IPC_SOCKET_DIR": str(tmp_path)})
    (tmp_path / "dynolog").touch()
    with pytest.raises(InputError, match="another daemon"):
        daemon.profile(1, 3, tmp_path, 1.0)


def test_a_job_that_names_no_folder_asks_at_an_address_that_ends_as_a_text_in_c_does(tmp_path, monkeypatch):
    monkeypatch.setattr(daemon, "environment_of", lambda _: {})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        with suppress(OSError):  # where a daemon of this machine has it
            other.bind("\0dynolog\0")
        with pytest.raises(InputError, match=r"^dynolog: another daemon already listens"):
            daemon.profile(1, 3, tmp_path, 1.0)
