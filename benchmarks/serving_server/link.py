"""Messages between the processes of two pools: a few facts, and bytes of keys and values.

In: a socket. Out: each message as it was written. Reading raises if the other process is gone.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

HEADER = struct.Struct("<QQ")  # bytes of the facts, and of keys and values


def write(link: socket.socket, head: dict[str, Any], payload: Any) -> None:
    """Send a message."""
    said, kept = json.dumps(head).encode(), memoryview(payload).cast("B")
    link.sendall(HEADER.pack(len(said), len(kept)) + said)
    link.sendall(kept)


def read(link: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """Receive a message."""
    said, kept = HEADER.unpack(receive(link, HEADER.size))
    return json.loads(receive(link, said)), receive(link, kept)


def receive(link: socket.socket, count: int) -> bytearray:
    """Receive this many bytes.

    Raises:
        ConnectionError: the other process is gone.
    """
    found = bytearray(count)
    rest = memoryview(found)
    while rest:
        got = link.recv_into(rest)
        if not got:
            raise ConnectionError("the other process is gone")
        rest = rest[got:]
    return found
