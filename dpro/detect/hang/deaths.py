"""Ranks that ended before the job did, by what the kernel, the launcher or Python said of their ends.

In: `Records`. Out: `Death`s, first one first, and ranks that left early. A dump that is missing proves no
death; nor does the end of a rank that was ended together with all others. Who failed for want of a peer is
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

TOGETHER_NS = NS_PER_S // 2  # ranks that end within this time of each other may have been ended by one hand
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
    signal.SIGKILL: "killed from outside: by the kernel where memory ran out, by a scheduler, or by somebody",
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
    """Ranks that died, in the order in which they did."""
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
    """When the first rank ended because it was told to; 0 for none."""
    told_to = pl.col("exit_signal").is_in([int(number) for number in ENDED_FROM_OUTSIDE])
    interrupted = pl.col("error").str.starts_with(INTERRUPTED)
    asked = records.ranks.filter(interrupted | (told_to & (pl.col("error") == "")))
    when = pl.when(interrupted).then("failed_ns").otherwise("ended_ns")
    first = asked.select(when.min()).item()
    return first if isinstance(first, int) else 0


def left_early(records: Records) -> dict[int, int]:
    """Ranks whose script ended well though the job did not, and when.

    A launcher may tell a process to end that has left already, and is only slow to go.
    """
    told_to = pl.col("final") & pl.col("exit_signal").is_in([int(each) for each in ENDED_FROM_OUTSIDE])
    ranks = records.ranks.filter(((pl.col("exit_code") == 0) | told_to) & (pl.col("error") == ""))
    when = pl.when(pl.col("left_ns") > 0).then("left_ns").otherwise("ended_ns")
    return {} if ranks.height == records.ranks.height else dict(ranks.select("rank", when).iter_rows())


def lost_peer(error: str) -> bool:
    """Whether an exception says that the process at the other end of a connection is gone."""
    return bool(_LOST_PEER.search(error.partition("\n")[0]))


def _died(row: Mapping[str, Any], asked_ns: int) -> bool:
    """Whether a rank ended badly, and not because it was told to: by a signal, or killed when it did not go.

    Args:
        row: a rank.
        asked_ns: when the first rank had ended because it was told to; 0 for none.
    """
    if _failed(row):
        return True
    if row["exit_signal"] == signal.SIGKILL and 0 < asked_ns < row["ended_ns"] - TOGETHER_NS:
        return False
    told_to = row["exit_signal"] in ENDED_FROM_OUTSIDE or row["error"].startswith(INTERRUPTED)
    return (row["exit_signal"] > 0 or row["exit_code"] > 0) and not told_to


def _failed(row: Mapping[str, Any]) -> bool:
    return row["failed_ns"] > 0 and not row["error"].startswith(INTERRUPTED)


def _died_ns(row: Mapping[str, Any]) -> int:
    return int(row["failed_ns"] if _failed(row) else row["ended_ns"])


def _first_causes(rows: Sequence[Mapping[str, Any]], num_ranks: int, asked_ns: int) -> set[int]:
    """Ranks that died first, without those that died of it, or of others that were told to end.

    Several that died at once are causes unless they are most of the job: that has a cause outside of them.
    """
    own = [row for row in rows if not lost_peer(row["error"])]
    if not own:
        return {row["rank"] for row in rows[:1] if not 0 < asked_ns < _died_ns(row) + TOGETHER_NS}
    killed = {row["exit_signal"] for row in rows} == {signal.SIGKILL} and len(rows) == num_ranks
    apart_ns = KILLED_TOGETHER_NS if killed else TOGETHER_NS
    together = [row for row in own if _died_ns(row) <= _died_ns(own[0]) + apart_ns]
    # Who is killed takes its peers with it; of what they fail, where nothing tells, is that.
    told = [row for row in together if row["exit_signal"] > 0 or _failed(row)]
    first = {row["rank"] for row in told or together}
    return first if len(first) == 1 or 2 * len(first) <= num_ranks else set()


def _how(row: Mapping[str, Any]) -> str:
    if _failed(row):
        said, *calls = row["error"].splitlines()
        return f"{said} ({own_call(calls)})" if calls else said
    number = row["exit_signal"]
    return f"signal {number} ({signal_name(number)})" if number > 0 else f"exit code {row['exit_code']}"


def own_call(calls: Sequence[str]) -> str:
    """The innermost call that is the user's own and no library's, as `file:line function`."""
    return next((call for call in calls if "-packages/" not in call and "/lib/python" not in call), calls[0])


def signal_name(number: int) -> str:
    """`SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
