"""Flows between hosts of a lab, and the goodput of each.

In: pairs of hosts with ports. Out: bytes per second of each, counted at the receiver, while all run.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from benchmarks.fabric_lab.lab import Lab, inside

SETTLING_S = 1.5  # until congestion control has found the share
BLOCK = 1 << 16


class Flow(NamedTuple):
    """A connection that sends as much as it can.

    Attributes:
        begin, end: hosts.
        port, to_port: source and destination.
    """

    begin: int
    end: int
    port: int
    to_port: int


@contextmanager
def before_other_work() -> Iterator[None]:
    """Run this process and its children before all processes without real-time priority.

    A host that waits for a core leaves its cables idle, which is an effect of the machine and not of the
    fabric. Senders and receivers sleep most of the time. Nice values do not help between sessions (sched(7)).
    """
    own = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *own)


def goodput(made: Lab, flows: Sequence[Flow], seconds: float) -> list[float]:
    """Measure the goodput of each flow, in bytes per second, while all run.

    Args:
        made: the lab.
        flows: the flows.
        seconds: for how long they are measured.
    """
    received = [0] * len(flows)
    over = threading.Event()
    ready = threading.Barrier(2 * len(flows) + 1)
    threads = []
    for number, flow in enumerate(flows):
        listener = _listener(made, flow)
        threads += [
            threading.Thread(target=_receive, args=(listener, received, number, over, ready), daemon=True),
            threading.Thread(target=_send, args=(made, flow, over, ready), daemon=True),
        ]
    for thread in threads:
        thread.start()
    ready.wait(timeout=30)
    time.sleep(SETTLING_S)
    before, since = list(received), time.monotonic()
    time.sleep(seconds)
    after, until = list(received), time.monotonic()
    over.set()
    for thread in threads:
        thread.join(timeout=10)
    return [(last - first) / (until - since) for first, last in zip(before, after)]


def _listener(made: Lab, flow: Flow) -> socket.socket:
    with inside(made.host(flow.end)):
        listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((made.address(flow.end), flow.to_port))
    listener.listen(1)
    return listener


def _receive(
    listener: socket.socket, received: list[int], number: int, over: threading.Event, ready: threading.Barrier
) -> None:
    ready.wait()
    connection, _ = listener.accept()
    connection.settimeout(0.5)
    into = bytearray(BLOCK)
    while not over.is_set():
        try:
            received[number] += connection.recv_into(into)
        except TimeoutError:
            continue
        except OSError:
            break
    connection.close()
    listener.close()


def _send(made: Lab, flow: Flow, over: threading.Event, ready: threading.Barrier) -> None:
    with inside(made.host(flow.begin)):
        connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    connection.bind((made.address(flow.begin), flow.port))
    ready.wait()
    connection.connect((made.address(flow.end), flow.to_port))
    connection.settimeout(0.5)
    block = bytes(BLOCK)
    while not over.is_set():
        try:
            connection.send(block)
        except TimeoutError:
            continue
        except OSError:
            break
    connection.close()
