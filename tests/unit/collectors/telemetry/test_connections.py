"""TCP connections as the kernel counts them: real ones of this process, and made-up ones."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from dpro.collectors.telemetry import node
from dpro.collectors.telemetry.node import MAX_PEERS, TcpCounts, by_peer, established, inodes_of


def one(inode: int, remote: str = "10.0.0.2", sent_bytes: int = 1 << 20) -> TcpCounts:
    return TcpCounts(inode, "10.0.0.1", remote, sent_bytes, 700, 7, 30 + inode, 10**9 * inode)


def test_connections_to_one_peer_are_summed() -> None:
    found = by_peer([one(1), one(2), one(3)], {1, 2})
    assert found == {
        "10.0.0.1>10.0.0.2": {
            "tcp_sent_bytes": 2 << 20,
            "tcp_sent_segments": 1400,
            "tcp_retransmitted_segments": 14,
            "tcp_rtt_us": 32,
            "tcp_delivered_gbps": 2.0,
        }
    }


def test_peers_that_were_sent_little_and_the_least_of_many_are_left_out() -> None:
    many = [one(at, f"10.0.{at}.2", 1 << 20 | at) for at in range(MAX_PEERS + 3)]
    found = by_peer([*many, one(999, "10.9.9.9", 100)], {*range(2000)})
    assert len(found) == MAX_PEERS
    assert "10.0.0.1>10.0.2.2" not in found
    assert "10.0.0.1>10.9.9.9" not in found


def test_the_kernel_counts_what_a_connection_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    sends = socket.create_connection(listener.getsockname())
    receives, _ = listener.accept()
    sends.sendall(bytes(50_000))
    left = 50_000
    while left:
        left -= len(receives.recv(left))
    assert not [each for each in established() if each.inode == os.fstat(sends.fileno()).st_ino]
    # Connections within a host are left out: let this one look like another.
    monkeypatch.setattr(node, "leaves_host", lambda _: True)
    (found,) = [each for each in established() if each.inode == os.fstat(sends.fileno()).st_ino]
    assert (found.local, found.remote) == ("127.0.0.1", "127.0.0.1")
    assert found.segments >= 1
    assert 0 < found.sent_bytes <= 50_001
    assert found.again == 0
    for each in (listener, sends, receives):
        each.close()


def test_sockets_of_a_process_are_known_by_its_descriptors() -> None:
    with socket.socket() as own:
        assert os.fstat(own.fileno()).st_ino in inodes_of(os.getpid())
    assert inodes_of(2**22 + 1) == set()


def test_a_process_that_may_not_be_read_has_none(tmp_path: Path) -> None:
    assert inodes_of(1, tmp_path) == set()
