"""Ranks that ended before the job did, by what the kernel, the launcher or Python reported of their ends.

In: `Records`. Out: `Death`s, first one first, and ranks that left early. A missing dump proves no death, nor
does the end of a rank that was ended together with all others. A rank that failed because it lost a peer is
dead, but no first cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from dpro.detect.hang.records import Records
from dpro.units import NS_PER_S

TOGETHER_NS = NS_PER_S // 2  # ranks that end within this time of each other may have been ended together
KILLED_TOGETHER_NS = 5 * NS_PER_S  # the same where all were killed: launchers do that one by one
# What launchers, schedulers and users send to a job that is to end.
ENDED_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
INTERRUPTED = "KeyboardInterrupt"
# What gloo, NCCL and the job's store say where the process at the other end is gone.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote (process|worker|peer)"
    r"|ncclRemoteError|failed to recv|(socket|wait) time(d )?-?out|timed out (after|waiting)"
    r"|DistNetworkError",
    re.IGNORECASE,
)
_MEANS = {
    signal.SIGABRT: "a library gave up, as gloo does where a peer sends more than is expected: "
    "what the rank wrote last says why",
    signal.SIGKILL: "killed from outside: by the kernel where memory ran out, by a scheduler, or by a user",
    signal.SIGSEGV: "native code touched memory that is not its own",
    signal.SIGBUS: "mapped memory or shared memory (/dev/shm) ran out, or a mapped file became shorter",
}


@dataclass(frozen=True)
class Death:
    """A rank that ended otherwise than well, of its own.

    Attributes:
        rank: the rank.
        ended_ns: when it failed, or was seen to be gone.
        how: what ended it, in words.
        means: what usually ends processes so; empty where nothing can be said.
        first: whether it is a first cause: it ended clearly before every other rank that did not end well,
            or together with others, each for a reason of its own.
        lost_peer: whether it failed because another process was gone.
        raised: whether an exception ended its script.
    """

    rank: int
    ended_ns: int
    how: str
    means: str
    first: bool
    lost_peer: bool = False
    raised: bool = False


def find_deaths(records: Records) -> list[Death]:
    """Return the ranks that died, in the order in which they did."""
    asked_ns = _asked_ns(records)
    rows = [row for row in records.ranks.iter_rows(named=True) if _died(row, asked_ns)]
    rows.sort(key=lambda row: (_died_ns(row), row["rank"]))
    first = _first_causes(rows, records.world_size, asked_ns)
    return [
        Death(
            row["rank"],
            _died_ns(row),
            _how(row),
            "" if _failed(row) else _MEANS.get(row["exit_signal"], ""),
            row["rank"] in first,
            lost_peer(row["error"]),
            _failed(row),
        )
        for row in rows
    ]


def _asked_ns(records: Records) -> int:
    """Return when the first rank ended by a signal from outside or Ctrl-C, ns; 0 for none."""
    signalled = pl.col("exit_signal").is_in([int(number) for number in ENDED_FROM_OUTSIDE])
    interrupted = pl.col("error").str.starts_with(INTERRUPTED)
    asked = records.ranks.filter(interrupted | (signalled & (pl.col("error") == "")))
    when = pl.when(interrupted).then("failed_ns").otherwise("ended_ns")
    first = asked.select(when.min()).item()
    return first if isinstance(first, int) else 0


def left_early(records: Records) -> dict[int, int]:
    """Return the ranks whose script ended well though the job did not, and when, ns.

    A launcher may send SIGTERM to a process whose script has ended and which is only slow to exit.
    """
    signalled = pl.col("final") & pl.col("exit_signal").is_in([int(each) for each in ENDED_FROM_OUTSIDE])
    ranks = records.ranks.filter(((pl.col("exit_code") == 0) | signalled) & (pl.col("error") == ""))
    when = pl.when(pl.col("left_ns") > 0).then("left_ns").otherwise("ended_ns")
    return {} if ranks.height == records.ranks.height else dict(ranks.select("rank", when).iter_rows())


def lost_peer(error: str) -> bool:
    """Return whether an exception says that the process at the other end of a connection is gone."""
    return bool(_LOST_PEER.search(error.partition("\n")[0]))


def _died(row: Mapping[str, Any], asked_ns: int) -> bool:
    """Return whether a rank ended badly, and was not ended from outside by a signal or a later SIGKILL.

    Args:
        row: of the rank, in `Records.ranks`.
        asked_ns: as of `_asked_ns`.
    """
    if _failed(row):
        return True
    if row["exit_signal"] == signal.SIGKILL and 0 < asked_ns < row["ended_ns"] - TOGETHER_NS:
        return False
    signalled = row["exit_signal"] in ENDED_FROM_OUTSIDE or row["error"].startswith(INTERRUPTED)
    return (row["exit_signal"] > 0 or row["exit_code"] > 0) and not signalled


def _failed(row: Mapping[str, Any]) -> bool:
    return row["failed_ns"] > 0 and not row["error"].startswith(INTERRUPTED)


def _died_ns(row: Mapping[str, Any]) -> int:
    return int(row["failed_ns"] if _failed(row) else row["ended_ns"])


def _first_causes(rows: Sequence[Mapping[str, Any]], num_ranks: int, asked_ns: int) -> set[int]:
    """Return the ranks whose death is a first cause: the first, and those that died together with it.

    Ranks that lost a peer, or died after others had been ended from outside, are none. Where more than half
    of the job died together, the cause is outside of them, and no rank is returned.

    Args:
        asked_ns: as of `_asked_ns`.
    """
    own = [row for row in rows if not lost_peer(row["error"])]
    if not own:
        return {row["rank"] for row in rows[:1] if not 0 < asked_ns < _died_ns(row) + TOGETHER_NS}
    killed = {row["exit_signal"] for row in rows} == {signal.SIGKILL} and len(rows) == num_ranks
    apart_ns = KILLED_TOGETHER_NS if killed else TOGETHER_NS
    together = [row for row in own if _died_ns(row) <= _died_ns(own[0]) + apart_ns]
    # A rank that is killed makes its peers fail: of those together with it, an exit code alone is no cause.
    own_reason = [row for row in together if row["exit_signal"] > 0 or _failed(row)]
    first = {row["rank"] for row in own_reason or together}
    return first if len(first) == 1 or 2 * len(first) <= num_ranks else set()


def _how(row: Mapping[str, Any]) -> str:
    if _failed(row):
        said, *calls = row["error"].splitlines()
        return f"{said} ({own_call(calls)})" if calls else said
    number = row["exit_signal"]
    return f"signal {number} ({signal_name(number)})" if number > 0 else f"exit code {row['exit_code']}"


def own_call(calls: Sequence[str]) -> str:
    """Return the innermost call that is in the user's code and in no library, as `file:line function`."""
    return next((call for call in calls if "-packages/" not in call and "/lib/python" not in call), calls[0])


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
