"""TCP connections of the job as the kernel counts them: what was sent, what again, round trip and rate.

In: processes. Out: values per pair of addresses, summed over the connections of a process between them. They
are asked of the kernel in one dump (sock_diag(7), `struct tcp_info`), whatever their number; which are a
process's own is known by its descriptors. Connections within the host are left out, and peers to which little
was sent.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MAX_PEERS = 64  # of a process: those to which it sent most
MIN_BYTES = 1 << 16  # sent to a peer: less is not what a step waits for
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _DUMP = 4, 20, 0x301  # request, root, match
_DONE, _ERROR = 3, 2  # types of netlink messages
_INFO = 2  # INET_DIAG_INFO
_ESTABLISHED = 1
_ANSWER_BYTES, _READ_BYTES = 72, 1 << 17
_MESSAGE = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_SOCKET = struct.Struct("!HH16s16s")  # ports and addresses
# Of `struct tcp_info`: offset and format of what is read.
_RTT, _AGAIN, _ACKNOWLEDGED, _SEGMENTS, _RATE = (68, "I"), (100, "I"), (120, "Q"), (156, "I"), (160, "Q")


class TcpCounts(NamedTuple):
    """A connection, as the kernel counts it.

    Attributes:
        sent_bytes: that the peer acknowledged.
        segments: with data, that were sent, with those sent again.
        again: that were sent again.
        rtt_us: round trip.
        rate: bytes per second, as lately delivered.
    """

    inode: int
    local: str
    remote: str
    sent_bytes: int
    segments: int
    again: int
    rtt_us: int
    rate: int


def established() -> list[TcpCounts]:
    """The TCP connections of this network namespace.

    Raises:
        OSError: the kernel does not answer.
    """
    connections = []
    for family in (socket.AF_INET, socket.AF_INET6):
        connections += [counted for answer in _dump(family) if (counted := _counted(family, answer))]
    return [connection for connection in connections if leaves_host(connection)]


def leaves_host(connection: TcpCounts) -> bool:
    """Whether a connection leads to another host."""
    return connection.local != connection.remote and not connection.remote.startswith(("127.", "::1"))


def _dump(family: int) -> Iterator[bytes]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 1 << _ESTABLISHED)
    header = _MESSAGE.pack(_MESSAGE.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1)
        kernel.sendto(header + request, (0, 0))
        while True:
            data = kernel.recv(_READ_BYTES)
            offset = 0
            while offset + _MESSAGE.size <= len(data):
                size, kind, *_ = _MESSAGE.unpack_from(data, offset)
                if kind in (_DONE, _ERROR) or size < _MESSAGE.size:
                    return
                yield data[offset + _MESSAGE.size : offset + size]
                offset += (size + 3) & ~3


def _counted(family: int, answer: bytes) -> TcpCounts | None:
    """A connection of an answer; None where an old kernel says too little."""
    _, _, source, target = _SOCKET.unpack_from(answer, 4)
    size = 4 if family == socket.AF_INET else 16
    local, remote = (_address(family, packed[:size]) for packed in (source, target))
    inode = struct.unpack_from("=I", answer, _ANSWER_BYTES - 4)[0]
    info = _attribute(answer, _INFO)
    if len(info) < _RATE[0] + 8:
        return None
    rtt, again, sent, segments, rate = (
        struct.unpack_from(f"={form}", info, offset)[0]
        for offset, form in (_RTT, _AGAIN, _ACKNOWLEDGED, _SEGMENTS, _RATE)
    )
    return TcpCounts(inode, local, remote, sent, segments, again, rtt, rate)


def _address(family: int, packed: bytes) -> str:
    """An address in words; that of an IPv4 peer of an IPv6 socket as of IPv4."""
    return socket.inet_ntop(family, packed).removeprefix("::ffff:")


def _attribute(answer: bytes, wanted: int) -> bytes:
    offset = _ANSWER_BYTES
    while offset + 4 <= len(answer):
        size, kind = struct.unpack_from("=HH", answer, offset)
        if size < 4:
            break
        if kind == wanted:
            return answer[offset + 4 : offset + size]
        offset += (size + 3) & ~3
    return b""


def inodes_of(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """Inodes of the sockets that a process has open; none if it is gone or another user's."""
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(proc / str(pid) / "fd"):
            with suppress(OSError):
                name = os.readlink(entry.path)
                if name.startswith("socket:["):
                    inodes.add(int(name[8:-1]))
    return inodes


def by_peer(connections: Iterable[TcpCounts], inodes: set[int]) -> dict[str, dict[str, float]]:
    """Values by pair of addresses, `10.0.0.1>10.0.0.2`, of the connections of a process."""
    by_pair: dict[str, list[TcpCounts]] = {}
    for connection in connections:
        if connection.inode in inodes:
            by_pair.setdefault(f"{connection.local}>{connection.remote}", []).append(connection)
    values = {
        pair: {
            "tcp_sent_bytes": float(sum(connection.sent_bytes for connection in several)),
            "tcp_sent_segments": float(sum(connection.segments for connection in several)),
            "tcp_retransmitted_segments": float(sum(connection.again for connection in several)),
            "tcp_rtt_us": float(max(connection.rtt_us for connection in several)),
            "tcp_delivered_gbps": max(connection.rate for connection in several) / 1e9,
        }
        for pair, several in by_pair.items()
    }
    kept = sorted(values, key=lambda pair: -values[pair]["tcp_sent_bytes"])[:MAX_PEERS]
    return {pair: values[pair] for pair in kept if values[pair]["tcp_sent_bytes"] >= MIN_BYTES}
