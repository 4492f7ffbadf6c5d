"""Clocks: the wall clock, which all times are on, against one that is never set, and those of other hosts.

Uses a call a second, and the job's own store, through which the hosts find each other. Records each second
both clocks of a host at the same moment, and comparisons with other hosts, made by one process per host: when
the first step has ended, soon after, and then once a minute.

The first process of each host represents it. Hosts are numbered as they come, and each compares itself with
one of lower number: a tree, so that no host answers more than `FAN_OUT` others however many there are. All is
done by a thread that sleeps; the store is only asked what it answers at once, never waited for. The store is
left alone at first: torch complains on stderr when it is gone, as in a short job it may be.
"""

from __future__ import annotations

import _socket as socket  # that of C, which gevent and eventlet leave as it is
import ctypes
import errno
import json
import os
import secrets
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from . import records
from .files import identity_of, move_to_high
from .kernel import host_clock
from .recorder import ENOUGH, SECOND_S, Recorder, identity
from .threads import Thread

FAN_OUT = 8
FIRST_PERIOD_S, LONGEST_PERIOD_S = 1.0, 60.0
NO_STEP_S = 5.0  # begin after this long where no step ends
LOOK_S = 0.5  # between two looks for the other host
KEYS = "dpro/clocks"


class Peers:
    """The clock comparisons of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """Start without a process group in a forked child."""
        self._begun = self._stepped = False
        self._seconds = 0.0

    def on_step(self, _step: int) -> object:
        """Record that the job is under way."""
        self._stepped = True
        return ENOUGH

    def on_second(self) -> None:
        """Begin to compare clocks once there is a process group and the job is under way."""
        if self._begun or not dist.is_available() or not dist.is_initialized():
            return
        self._seconds += SECOND_S
        if not self._stepped and self._seconds <= NO_STEP_S:
            return
        self._begun = True
        size = dist.get_world_size()
        if size > 1 and os.environ.get("LOCAL_WORLD_SIZE") != str(size):  # else all ranks have one clock
            Thread(self._recorder.call, self._run, self._recorder.records)

    def _run(self, writer: records.RecordWriter) -> None:
        store = self._recorder.store
        number, host = store.ask(_host_number), store.ask(_store_host)
        if number is None or host is None:
            return
        pingpong = PingPong(host)
        left = json.dumps([identity()[0], *pingpong.address])
        store.ask(lambda job: job.set(f"{KEYS}/{number}", left))
        peer = self._peer(number, pingpong)
        if store.gone:
            return
        period_s = FIRST_PERIOD_S if peer else LONGEST_PERIOD_S
        while self._recorder.records is writer:
            if peer:
                rank, address = peer
                for time_ns, offset_ns, round_trip_ns in pingpong.compare(address):
                    writer.write(records.PEER, time_ns, rank, offset_ns, round_trip_ns)
            pingpong.answer(period_s)
            period_s = min(2 * period_s, LONGEST_PERIOD_S)

    def _peer(self, number: int, pingpong: PingPong) -> tuple[int, Address] | None:
        """Return rank and address of the process to compare with; None for the first host."""
        key = f"{KEYS}/{(number - 1) // FAN_OUT}"
        store = self._recorder.store
        while number and not store.gone:
            content = store.ask(lambda job: job.get(key) if job.check([key]) else None)
            if content is not None:
                rank, token, port, hosts = json.loads(content)
                return rank, Address(token, port, tuple(hosts))
            pingpong.answer(LOOK_S)
        return None


def install(recorder: Recorder) -> None:
    """Record the clocks once a second, and compare those of the job's hosts."""
    recorder.listen("second", lambda: sample(recorder))
    peers = Peers(recorder)
    recorder.listen("step", peers.on_step)
    recorder.listen("second", peers.on_second)
    recorder.listen("fork", peers.on_fork)


def sample(recorder: Recorder) -> None:
    """Record the wall clock, and the one that is never stepped or slewed."""
    if recorder.records is None:
        return
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    now = time.time_ns()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    recorder.records.write(records.CLOCK, now, (before + after) // 2)


def _host_number(store: Any) -> int | None:
    """Return this host's number, from 0, if this process represents it; else None."""
    if store.add(f"{KEYS}/{host_clock()}", 1) > 1:
        return None
    return int(store.add(f"{KEYS}/hosts", 1)) - 1


def _store_host(store: Any) -> str:
    """Return the host of the store, which every process of the job has reached."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "")) or os.environ.get("MASTER_ADDR", "localhost")


# The offset of this host's clock from another's, by timed messages between two processes.

ROUNDS = 64  # exchanges in a comparison
BEST = 8  # of them are kept: those with the shortest round trip
PATIENCE_S = 0.2
LOSSES = 3  # messages lost in a comparison before it is given up

# Token of the process asked, 1 for an answer, and ns on the clock of each: asked, came, answered.
_MESSAGE = struct.Struct("!QQqqq")
_SO_TIMESTAMPNS = 35  # <asm-generic/socket.h>; the socket module does not name it
_TIMESPEC = struct.Struct("@qq")
# No packet is sent to these addresses: a packet's source would be the host's own address.
_ANYWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}


class ClockSample(NamedTuple):
    """A comparison of two clocks.

    Attributes:
        time_ns: time of the comparison, on this host's clock.
        offset_ns: this host's clock minus the other's.
        round_trip_ns: time the messages were under way; the offset is wrong by half of it at most.
    """

    time_ns: int
    offset_ns: int
    round_trip_ns: int


class Address(NamedTuple):
    """Where a process can be asked for its time.

    Attributes:
        token: must be in a question for it to be answered.
        hosts: names of its host, best first.
    """

    token: int
    port: int
    hosts: tuple[str, ...]


class PingPong:
    """A socket that answers questions for the time, and asks them."""

    def __init__(self, toward: str, shown: Callable[[int], int] = lambda ns: ns) -> None:
        """Open the socket.

        Args:
            shown: returns what this host's clock shows at a CLOCK_REALTIME in ns; the same, save in tests.

        Raises:
            OSError: there is no network.
        """
        self._family = _family(toward)
        opened = socket.socket(self._family, socket.SOCK_DGRAM)
        number = move_to_high(opened.detach())
        self._socket = socket.socket(self._family, socket.SOCK_DGRAM, fileno=number)
        # Never finalised: that would close the file of the job that has its number then.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._socket))
        self._identity = identity_of(self._socket.fileno())
        self._socket.bind(("", 0))
        with suppress(OSError):  # without it arrivals are stamped when they are read
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._shown = shown
        hosts = [_source_address(self._family, host) for host in (toward, _ANYWHERE[self._family])]
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
            The samples with the shortest round trips, in order of time; none where the peer does not answer.
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
                hosts.pop(0)  # it may be known under its other names
        return sorted(sorted(samples, key=lambda sample: sample.round_trip_ns)[:BEST])

    def _ask(self, peer: Address, host: str) -> ClockSample | None:
        asked = self._shown(time.time_ns())
        try:
            self._ensure_ours()
            self._socket.sendto(_MESSAGE.pack(peer.token, 0, asked, 0, 0), (host, peer.port))
        except OSError:  # no route to it
            return None
        return self._answer_to(peer.token, asked, time.monotonic() + PATIENCE_S)

    def _answer_to(self, token: int, asked: int, until_s: float) -> ClockSample | None:
        """Return the answer to our question, None if it does not come in time; answer others' questions."""
        while (left_s := until_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            self._ensure_ours()
            try:
                self._socket.recvmsg(1, 0, socket.MSG_PEEK)  # waits, and takes nothing
            except TimeoutError:
                return None
            self._ensure_ours()
            content, ancillary, _, sender = self._socket.recvmsg(_MESSAGE.size, 64)
            came = self._shown(_arrival_ns(ancillary))
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

    def _ensure_ours(self) -> None:
        """Raise unless the socket is the one that was opened.

        Raises:
            OSError: the job has closed it, and may have opened another under its number.
        """
        if identity_of(self._socket.fileno()) != self._identity:
            raise OSError(errno.EBADF, "the job closed a socket of the recorder")


def _arrival_ns(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Return CLOCK_REALTIME when a message came, in ns; now where the kernel did not stamp it."""
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(content) == _TIMESPEC.size:
            seconds, ns = _TIMESPEC.unpack(content)
            return int(seconds * 1_000_000_000 + ns)
    return time.time_ns()


def _family(host: str) -> int:
    """Return IPv4 where a host has it, else IPv6."""
    families = {family for family, *_ in socket.getaddrinfo(host, None, 0, socket.SOCK_DGRAM)}
    return socket.AF_INET if socket.AF_INET in families or not families else socket.AF_INET6


def _source_address(family: int, host: str) -> str:
    """Return the address that packets to a host would leave from; empty where it cannot be reached."""
    with suppress(OSError):
        probe = socket.socket(family, socket.SOCK_DGRAM)
        try:
            probe.connect((host, 9))  # with a datagram socket this sends nothing
            return str(probe.getsockname()[0])
        finally:
            probe.close()
    return ""
