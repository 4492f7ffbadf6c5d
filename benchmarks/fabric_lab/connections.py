"""Connections that stay open, like those of a job, and what each message takes.

In: a lab, and flows. Out: for each round of messages sent at once, the segments that the sender's kernel
counts and the time that the receiver measures.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from benchmarks.fabric_lab.lab import Lab, inside
from benchmarks.fabric_lab.traffic import Flow

BLOCK = 1 << 16
TIMEOUT_S = 30.0
_TCP_INFO_BYTES, _RETRANSMITTED, _SEGMENTS = 232, 100, 156  # of `struct tcp_info`, include/uapi/linux/tcp.h


class SentMessage(NamedTuple):
    """Time and segments of a sent message.

    Attributes:
        seconds: from the signal to begin to its last byte.
        segments: sent, including those sent again.
        retransmitted: segments sent again.
    """

    seconds: float
    segments: int
    retransmitted: int


class LabConnection(NamedTuple):
    """The two ends of a connection between hosts."""

    sends: socket.socket
    receives: socket.socket


@contextmanager
def connections(made: Lab, flows: Sequence[Flow]) -> Iterator[list[LabConnection]]:
    """Open a connection for each flow; close all at the end.

    Args:
        made: the lab.
        flows: with ports that are all different.
    """
    found: list[LabConnection] = []
    try:
        for flow in flows:
            with inside(made.host(flow.end)):
                listener = socket.socket()
            with inside(made.host(flow.begin)):
                sends = socket.socket()
            for end in (listener, sends):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                end.settimeout(TIMEOUT_S)
            listener.bind((made.address(flow.end), flow.to_port))
            listener.listen(1)
            sends.bind((made.address(flow.begin), flow.port))
            sends.connect((made.address(flow.end), flow.to_port))
            receives, _ = listener.accept()
            receives.settimeout(TIMEOUT_S)
            listener.close()
            found.append(LabConnection(sends, receives))
        yield found
    finally:
        for connection in found:
            connection.sends.close()
            connection.receives.close()


def moved_at_once(used: Sequence[LabConnection], num_bytes: int) -> list[SentMessage]:
    """Send a message over each connection at the same time.

    Args:
        used: the connections.
        num_bytes: of a message.
    """
    began = [0.0]
    ends = [0.0] * len(used)
    ready = threading.Barrier(2 * len(used) + 1)
    before = [_counted(each.sends) for each in used]

    def send(connection: LabConnection) -> None:
        ready.wait()
        connection.sends.sendall(bytes(num_bytes))

    def receive(connection: LabConnection, number: int) -> None:
        into = bytearray(BLOCK)
        ready.wait()
        left = num_bytes
        while left > 0:
            left -= connection.receives.recv_into(into)
        ends[number] = time.monotonic()

    threads = [threading.Thread(target=send, args=(each,), daemon=True) for each in used]
    threads += [
        threading.Thread(target=receive, args=(each, number), daemon=True) for number, each in enumerate(used)
    ]
    for thread in threads:
        thread.start()
    ready.wait(timeout=TIMEOUT_S)
    began[0] = time.monotonic()
    for thread in threads:
        thread.join(timeout=TIMEOUT_S)
    after = [_counted(each.sends) for each in used]
    return [
        SentMessage(end - began[0], new[0] - old[0], new[1] - old[1])
        for end, old, new in zip(ends, before, after)
    ]


def _counted(connection: socket.socket) -> tuple[int, int]:
    """Return the numbers of data segments sent, and of segments sent again."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return struct.unpack_from("I", info, _SEGMENTS)[0], struct.unpack_from("I", info, _RETRANSMITTED)[0]
