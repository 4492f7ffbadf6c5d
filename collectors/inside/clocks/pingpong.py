"""How far this host's clock is from another host's, by timed messages between two processes.

In: the address of another `PingPong`. Out: differences of the clocks, each with a bound of its error. As in
NTP (RFC 5905, section 8), each exchange takes four times: asked, came, answered, came back. Time that the
other takes to answer does not count, and arrivals are stamped by the kernel: a busy interpreter on either
side costs no precision.

No host waits for another: a lost message or a host that is gone costs a sample.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

ROUNDS = 64  # exchanges in a comparison
BEST = 8  # of them are kept: those with the shortest round trip
PATIENCE_S = 0.2
LOSSES = 3  # messages lost in a comparison before it is given up

# Token of the one asked, 1 for an answer, and ns on their own clocks: asked, came, answered.
_MESSAGE = struct.Struct("!QQqqq")
_SO_TIMESTAMPNS = 35  # <asm-generic/socket.h>; the socket module does not name it
_TIMESPEC = struct.Struct("@qq")
# Addresses that no packet is sent to: a host's own one is what it would send from.
_ANYWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}


class ClockSample(NamedTuple):
    """One comparison of two clocks.

    Attributes:
        time_ns: when, on this host's clock.
        offset_ns: this host's clock minus the other's.
        round_trip_ns: time the messages were under way; the offset is wrong by half of it at most.
    """

    time_ns: int
    offset_ns: int
    round_trip_ns: int


class Address(NamedTuple):
    """Where a process can be asked for its time.

    Attributes:
        token: what a question must carry to be answered.
        port: its port.
        hosts: names of its host, best first.
    """

    token: int
    port: int
    hosts: tuple[str, ...]


class PingPong:
    """A socket that answers questions for the time, and asks some."""

    def __init__(self, toward: str, shown: Callable[[int], int] = lambda ns: ns) -> None:
        """Open the socket.

        Args:
            shown: what this host's clock shows at this many ns of CLOCK_REALTIME; the same, save in tests.

        Raises:
            OSError: there is no network.
        """
        self._family = _family(toward)
        self._socket = socket.socket(self._family, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        with suppress(OSError):  # without it arrivals are stamped when they are read
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._shown = shown
        hosts = [_source(self._family, host) for host in (toward, _ANYWHERE[self._family])]
        hosts = [host for host in dict.fromkeys(hosts) if host]
        self.address = Address(secrets.randbits(63), self._socket.getsockname()[1], tuple(hosts))

    def answer(self, for_s: float) -> None:
        """Answer questions for this many seconds."""
        until_s = time.monotonic() + for_s
        while self._answer_to(0, 0, until_s) is not None:
            pass

    def compare(self, peer: Address) -> list[ClockSample]:
        """Ask a peer for its time again and again, and answer others meanwhile.

        Returns:
            The samples with the shortest round trips, in order of time; none where it does not answer.
        """
        samples: list[ClockSample] = []
        lost = 0
        hosts = list(peer.hosts)
        while hosts and len(samples) < ROUNDS and lost < LOSSES:
            sample = self._ask(peer, hosts[0])
            if sample is not None:
                samples.append(sample)
            elif samples:
                lost += 1
            else:
                hosts.pop(0)  # perhaps it is known under its other names
        return sorted(sorted(samples, key=lambda sample: sample.round_trip_ns)[:BEST])

    def _ask(self, peer: Address, host: str) -> ClockSample | None:
        asked = self._shown(time.time_ns())
        try:
            self._socket.sendto(_MESSAGE.pack(peer.token, 0, asked, 0, 0), (host, peer.port))
        except OSError:  # no route to it
            return None
        return self._answer_to(peer.token, asked, time.monotonic() + PATIENCE_S)

    def _answer_to(self, token: int, asked: int, until_s: float) -> ClockSample | None:
        """The answer to a question of ours, None if it does not come in time; others' are answered."""
        while (left_s := until_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                content, ancillary, _, sender = self._socket.recvmsg(_MESSAGE.size, 64)
            except TimeoutError:
                return None
            came = self._shown(_stamp(ancillary))
            if len(content) != _MESSAGE.size:
                continue
            about, answer, sent, theirs_came, theirs_sent = _MESSAGE.unpack(content)
            if not answer and about == self.address.token:
                with suppress(OSError):
                    now = self._shown(time.time_ns())
                    self._socket.sendto(_MESSAGE.pack(about, 1, sent, came, now), sender)
            elif answer and about == token and sent == asked:
                offset = ((sent - theirs_came) + (came - theirs_sent)) // 2
                return ClockSample((sent + came) // 2, offset, (came - sent) - (theirs_sent - theirs_came))
        return None


def _stamp(ancillary: list[tuple[int, int, bytes]]) -> int:
    """CLOCK_REALTIME when a message came, ns."""
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(content) == _TIMESPEC.size:
            seconds, ns = _TIMESPEC.unpack(content)
            return int(seconds * 1_000_000_000 + ns)
    return time.time_ns()


def _family(host: str) -> socket.AddressFamily:
    """IPv4 where a host has it."""
    found = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)}
    return socket.AF_INET if socket.AF_INET in found or not found else socket.AF_INET6


def _source(family: socket.AddressFamily, host: str) -> str:
    """The address that packets to a host would leave from; empty where it cannot be reached."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # of a datagram socket this sends nothing
        return str(probe.getsockname()[0])
    return ""
