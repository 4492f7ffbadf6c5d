"""Clocks of other hosts: one process per host compares its host's clock with that of another host.

In: the job's own store, through which the hosts find each other. Out: records of the comparisons: when the
first step has ended, soon after, and then once a minute.

The first process of each host to come speaks for it. Hosts are numbered as they come, and each compares
itself with one of lower number: a tree, so that no host answers more than `FAN_OUT` others however many there
are. All is done by a thread that sleeps; the store is only asked what it answers at once, never waited for.
The store is left alone at first: torch says on stderr when it is gone, as in a short job it may be.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import torch.distributed as dist

from .. import records
from ..process.kernel import host_clock
from ..recorder import SECOND_S, Recorder, identity
from .pingpong import Address, PingPong

FAN_OUT = 8
FIRST_PERIOD_S, LONGEST_PERIOD_S = 1.0, 60.0
NO_STEP_S = 5.0  # begin after this long where no step ends
LOOK_S = 0.5  # how often to look whether the other host is there
KEYS = "dpro/clocks"


class Peers:
    """The comparisons of one process."""

    def __init__(self, recorder: Recorder) -> None:
        """Nothing is compared yet."""
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """This is a forked child: it has no process group yet."""
        self._begun = self._stepped = False
        self._seconds = 0.0

    def on_step(self, _step: int) -> None:
        """Note that the job is under way."""
        self._stepped = True

    def on_second(self) -> None:
        """Begin once there is a process group and the job is under way."""
        if self._begun or not dist.is_available() or not dist.is_initialized():
            return
        self._seconds += SECOND_S
        if not self._stepped and self._seconds <= NO_STEP_S:
            return
        self._begun = True
        if dist.get_world_size() > 1:
            arguments = (self._run, self._recorder.records)
            threading.Thread(
                target=self._recorder.call, args=arguments, name="dpro-peers", daemon=True
            ).start()

    def _run(self, own: records.RecordWriter) -> None:
        store = self._recorder.store
        number, host = store.ask(_number), store.ask(_store_host)
        if number is None or host is None:
            return
        pingpong = PingPong(host)
        left = json.dumps([identity()[0], *pingpong.address])
        store.ask(lambda job: job.set(f"{KEYS}/{number}", left))
        peer = self._peer(number, pingpong)
        if store.gone:
            return
        period_s = FIRST_PERIOD_S if peer else LONGEST_PERIOD_S
        while self._recorder.records is own:
            if peer:
                rank, address = peer
                for time_ns, offset_ns, round_trip_ns in pingpong.compare(address):
                    own.write(records.PEER, time_ns, rank, offset_ns, round_trip_ns)
            pingpong.answer(period_s)
            period_s = min(2 * period_s, LONGEST_PERIOD_S)

    def _peer(self, number: int, pingpong: PingPong) -> tuple[int, Address] | None:
        """The rank and address of the process to compare with; None for the first host."""
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
    """Compare the clocks of the job's hosts."""
    peers = Peers(recorder)
    recorder.listen("step", peers.on_step)
    recorder.listen("second", peers.on_second)
    recorder.listen("fork", peers.on_fork)


def _number(store: Any) -> int | None:
    """Which host this is, if this process speaks for it."""
    if store.add(f"{KEYS}/{host_clock()}", 1) > 1:
        return None
    return int(store.add(f"{KEYS}/hosts", 1)) - 1


def _store_host(store: Any) -> str:
    """The host that all of the job found: where its store is."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "")) or os.environ.get("MASTER_ADDR", "localhost")
