"""Ranks that ended before the job did, by what the kernel or the launcher said of their ends.

In: `Records`. Out: `Death`s, first one first. A dump that is missing proves no death; nor does the end of a
rank that was ended together with all others.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

import polars as pl

from dpro.detect.hang.records import Records
from dpro.units import NS_PER_S

TOGETHER_NS = NS_PER_S // 2  # ranks that end within this time of each other may have been ended by one hand
# What launchers, schedulers and users send to a job that is to end.
_ENDED_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MEANS = {
    signal.SIGABRT: "a library gave up, as gloo does where a peer sends more than is expected: "
    "what the rank wrote last says why",
    signal.SIGKILL: "killed from outside: by the kernel where memory ran out, by a scheduler, or by somebody",
    signal.SIGSEGV: "native code touched memory that is not its own",
    signal.SIGBUS: "mapped memory or shared memory (/dev/shm) ran out, or a mapped file became shorter",
}


@dataclass(frozen=True)
class Death:
    """A rank that ended otherwise than well, of its own.

    Attributes:
        rank: the rank.
        ended_ns: when it was seen to be gone.
        how: what ended it, in words.
        means: what usually ends processes so; empty where nothing can be said.
        first: whether it ended clearly before every other rank that did not end well.
    """

    rank: int
    ended_ns: int
    how: str
    means: str
    first: bool


def find_deaths(records: Records) -> list[Death]:
    """Ranks that died, in the order in which they did."""
    ranks = records.ranks.sort("ended_ns", "rank")
    outside = pl.col("exit_signal").is_in([int(number) for number in _ENDED_FROM_OUTSIDE])
    bad = ranks.filter((pl.col("exit_signal") > 0) | (pl.col("exit_code") > 0))
    died = bad.filter(~outside)
    deaths = []
    for rank, ended_ns, code, number in died.select(
        "rank", "ended_ns", "exit_code", "exit_signal"
    ).iter_rows():
        others = bad.filter(pl.col("rank") != rank)
        alike = others.filter(~outside)["ended_ns"]
        first = all(int(other) > ended_ns + TOGETHER_NS for other in alike)
        how = f"signal {number} ({_signal_name(number)})" if number > 0 else f"exit code {code}"
        deaths.append(Death(rank, ended_ns, how, _MEANS.get(number, ""), first))
    return deaths


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
