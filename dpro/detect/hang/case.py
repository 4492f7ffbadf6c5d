"""Facts about a job that may hang: the wait-for graph, and ranks that are gone.

Takes `Records`. Returns a `Case`: the ends of chains of waiting, which are ranks that others have waited for
longer than a threshold or that have left; and `Death`s, from the reports of the kernel, the launcher or
Python on how ranks ended. Does not name causes. A missing dump does not prove a death, nor does the end of a
rank that was ended together with all others. A rank that failed because it lost a peer is dead, but not a
first cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from dpro.detect.hang import waits as graph
from dpro.detect.hang.operations import Knowledge, Operation, derive_knowledge, unfinished_operations
from dpro.detect.hang.records import SYNCHRONISING, UNFINISHED, Records
from dpro.detect.hang.stacks import own_call
from dpro.detect.hang.waits import Root, WaitGraph
from dpro.units import NS_PER_S

MIN_WAIT_NS = 4 * NS_PER_S  # a younger call may still be under way; the recorder saves calls after 5 s


@dataclass(frozen=True)
class Case:
    """Facts that the findings of one run are derived from.

    Attributes:
        progress: last known call of each rank.
        left: ranks that ended well although the job did not, and their last sign of life, in ns.
        now_ns: when the last dump was saved; -1 unknown.
    """

    records: Records
    progress: Knowledge
    waits: WaitGraph
    deaths: dict[int, Death]
    left: dict[int, int]
    now_ns: int

    def waited_ns(self, root: Root) -> int:
        """Return how long ranks had waited for a root when the dumps were saved, in ns; -1 unknown."""
        return self.now_ns - root.since_ns if min(self.now_ns, root.since_ns) >= 0 else -1

    @property
    def roots(self) -> list[Root]:
        """Ends of chains of waiting that have lasted `MIN_WAIT_NS`, or that lead to a rank that has left."""
        return [
            end
            for root in graph.find_roots(self.waits)
            # Waits of unknown length count, too: it may not be known when dumps were saved.
            if not 0 <= self.waited_ns(root) < MIN_WAIT_NS or has_left(root, self)
            for end in split_frozen(root, self)
        ]


def examine(records: Records) -> Case:
    """Derive the progress of each rank, the ranks that are gone, and the wait-for graph."""
    records = with_failed(records)
    knowledge = derive_knowledge(records)
    deaths = {death.rank: death for death in find_deaths(records)}
    left = left_early(records)
    saved = records.ranks.filter(pl.col("rank").is_in(list(knowledge.current)))["saved_ns"]
    now_ns = int(saved.max() or -1) if saved.len() else -1  # type: ignore[arg-type]
    gone = {rank for rank, death in deaths.items() if gone_early(death, now_ns)} | left.keys()
    operations = [_without_gone(operation, gone) for operation in unfinished_operations(records, knowledge)]
    return Case(records, knowledge, graph.build_waits(operations), deaths, left, now_ns)


def _without_gone(operation: Operation, gone: set[int]) -> Operation:
    """Move ranks that are gone from the unknown to the absent ranks of an operation."""
    never = operation.unknown & gone
    return replace(operation, absent=operation.absent | never, unknown=operation.unknown - never)


def gone_early(death: Death, now_ns: int) -> bool:
    """Return whether a rank died while its peers still waited, rather than when all were ended.

    Args:
        now_ns: when the last dump was saved; -1 unknown.
    """
    return death.first or 0 <= death.ended_ns < now_ns


def has_left(root: Root, case: Case) -> bool:
    """Return whether the rank that others wait for exited with code 0 before a wait of `MIN_WAIT_NS`."""
    if root.kind != graph.HOST or root.ranks[0] not in case.left:
        return False
    return root.since_ns < 0 or case.left[root.ranks[0]] < root.since_ns + MIN_WAIT_NS


def split_frozen(root: Root, case: Case) -> list[Root]:
    """Split a root of unknown ranks into one per frozen process, as each of them may be at fault."""
    if root.kind != graph.UNKNOWN:
        return [root]
    frozen = [rank for rank in root.ranks if is_frozen(rank, case)]
    return [replace(root, ranks=(rank,)) for rank in frozen] or [root]


def is_frozen(rank: int, case: Case) -> bool:
    """Return whether no thread of a rank ran for `MIN_WAIT_NS` before its end or the last heartbeat."""
    ranks = case.records.ranks
    by_itself = (pl.col("exit_code") >= 0) | (pl.col("failed_ns") > 0) | pl.col("final")
    rows = ranks.filter((pl.col("rank") == rank) & ~by_itself & (pl.col("heartbeat_ns") > 0))
    if rows.is_empty():
        return False
    beat_ns, ended_ns = (int(rows[name][0]) for name in ("heartbeat_ns", "ended_ns"))
    last = max(ranks["heartbeat_ns"])
    was_ended = int(rows["exit_signal"][0]) > 0
    return bool(beat_ns < (min(last, ended_ns) if was_ended else last) - MIN_WAIT_NS)


def deaths_of(root: Root, case: Case) -> list[Death]:
    """Return the deaths of the ranks that others wait for, if each of them died by itself; else none.

    A rank whose peers had waited for `MIN_WAIT_NS` was stuck first. A first cause of death counts even so,
    unless its peers had failed before: a launcher kills processes that do not exit when requested.
    """
    deaths = [case.deaths[rank] for rank in root.ranks if rank in case.deaths]
    by_reason = [rank for rank, death in case.deaths.items() if not death.lost_peer]
    others = case.records.ranks.filter(~pl.col("rank").is_in(by_reason) & (pl.col("ended_ns") > 0))
    failed_ns = min(map(_died_ns, others.iter_rows(named=True)), default=0)
    by_itself = all(
        gone_early(death, case.now_ns)
        and (died_at_work(death, root) or _is_first_to_fail(death, failed_ns, case))
        for death in deaths
    )
    return deaths if by_itself and len(deaths) == len(root.ranks) else []


def _is_first_to_fail(death: Death, failed_ns: int, case: Case) -> bool:
    """Return whether a rank died by itself before its peers did, rather than together with all."""
    apart_ns = failed_ns + 4 * TOGETHER_NS - death.ended_ns > 0
    return apart_ns and not death.lost_peer and any(other.first for other in case.deaths.values())


def died_at_work(death: Death, root: Root) -> bool:
    """Return whether a rank died before its peers waited `MIN_WAIT_NS`; otherwise it was stuck first."""
    return root.since_ns < 0 or death.ended_ns < root.since_ns + MIN_WAIT_NS


def without_dump(case: Case) -> list[int]:
    """Return the ranks of the job without a dump that shows their last calls."""
    return [rank for rank in range(case.records.world_size) if rank not in case.progress.current]


# Calls that are recorded as completed because they failed, which would hide what a job waited for.

MIN_SILENT_NS = 4 * NS_PER_S  # a call still missing from a dump this long after a peer's was not made


def with_failed(records: Records) -> Records:
    """Mark calls that completed by failing as unfinished.

    Returns:
        The records with these calls `scheduled`, and with `status` lowered to the last call that succeeded.
    """
    ranks = records.ranks
    bad = ranks.filter((pl.col("exit_code") > 0) | (pl.col("exit_signal") > 0) | (pl.col("failed_ns") > 0))
    if bad.is_empty():
        return records
    ended = records.calls.join(bad.select("rank"), on="rank", how="semi", maintain_order="left")
    failed = pl.concat([_never_made_by_all(ended, records), _last_before_loss(ended, records)]).unique()
    calls = records.calls.join(
        failed.with_columns(failed=True), on=["rank", "order"], how="left", maintain_order="left"
    ).with_columns(state=pl.when("failed").then(pl.lit("scheduled")).otherwise("state"))
    open_ = calls.filter(pl.col("state").is_in(UNFINISHED) & ~pl.col("p2p")).join(bad, on="rank", how="semi")
    first = open_.group_by("rank", "key").agg(first=pl.col("sequence").min())
    # The last completed call that ranks reported is lowered to the one before the first unfinished call.
    joined = records.status.join(first, on=["rank", "key"], how="left", maintain_order="left")
    before = pl.when(pl.col("first") > 1).then(pl.col("first") - 1).otherwise(-1)  # PyTorch counts from 1
    held_back = (
        pl.when(pl.col("first").is_null()).then("completed").otherwise(pl.min_horizontal("completed", before))
    )
    return replace(
        records, calls=calls.drop("failed"), status=joined.with_columns(completed=held_back).drop("first")
    )


def _never_made_by_all(ended: pl.DataFrame, records: Records) -> pl.DataFrame:
    """Return `rank`, `order` of completed collectives of ended ranks that another member did not call."""
    issued = _issued(records)
    last = records.members.join(
        records.ranks.filter("dumped").select("rank", "saved_ns", "final"), on="rank"
    ).join(issued, on=["rank", "key"], how="left")
    last = last.select("key", "saved_ns", "final", reached=pl.col("issued").fill_null(-1), member="rank")
    done = ended.filter((pl.col("state") == "completed") & pl.col("op").is_in(SYNCHRONISING) & ~pl.col("p2p"))
    furthest = last.group_by("key").agg(least=pl.col("reached").min())
    done = done.join(furthest, on="key").filter(pl.col("sequence") > pl.col("least"))
    latest = pl.col("enqueued_ns").max().over("rank", "key")
    pairs = (
        done.with_columns(latest=latest).join(last, on="key").filter(pl.col("reached") < pl.col("sequence"))
    )
    silent = (pl.col("saved_ns") >= pl.col("enqueued_ns") + MIN_SILENT_NS) & (
        pl.col("latest") <= pl.col("saved_ns")
    )
    return pairs.filter(pl.col("final") | silent).select("rank", "order")


def _last_before_loss(calls: pl.DataFrame, records: Records) -> pl.DataFrame:
    """Return `rank`, `order` of the last call of ranks that lost a peer, if a gone member lacks it."""
    lost = [rank for rank, error in records.ranks.select("rank", "error").iter_rows() if lost_peer(error)]
    ended = pl.col("exit_code").ge(0) | pl.col("exit_signal").gt(0)
    gone = records.ranks.filter(ended & ~pl.col("rank").is_in(lost)).select("rank")
    last = calls.filter(pl.col("rank").is_in(lost)).sort("rank", "order").unique("rank", keep="last")
    last = last.filter(pl.col("state") == "completed")
    reached = records.members.join(gone, on="rank").join(_issued(records), on=["rank", "key"], how="left")
    least = reached.group_by("key").agg(least=pl.col("issued").fill_null(-1).min())
    behind = last.filter(~pl.col("p2p")).join(least, on="key").filter(pl.col("least") < pl.col("sequence"))
    sends = records.calls.filter(pl.col("op") == "send")
    sent = sends.group_by("key", peer="rank", rank="peer").agg(sent=pl.col("sequence").max())
    messages = last.filter(pl.col("p2p") & (pl.col("op") == "recv"))
    messages = messages.join(gone.rename({"rank": "peer"}), on="peer")
    messages = messages.join(sent, on=["key", "peer", "rank"], how="left")
    unsent = messages.filter(pl.col("sent").fill_null(-1) < pl.col("sequence"))
    return pl.concat([calls_of_kind.select("rank", "order") for calls_of_kind in (behind, unsent)])


def _issued(records: Records) -> pl.DataFrame:
    """Return `rank`, `key`, `issued`: the last collective that each rank is known to have called."""
    calls = records.calls.filter(~pl.col("p2p")).select("rank", "key", issued="sequence")
    reported = records.status.select("rank", "key", issued="enqueued")
    return pl.concat([calls, reported]).group_by("rank", "key").agg(pl.col("issued").max())


# Ranks that ended before the job did.

TOGETHER_NS = NS_PER_S // 2  # ranks that end within this time of each other may have been ended together
KILLED_TOGETHER_NS = 5 * NS_PER_S  # the limit where all were killed: launchers kill ranks one by one
AT_ONCE_NS = NS_PER_S // 4  # if all were killed within this, the cause is outside of them
# Signals by which launchers, schedulers and users end a job.
ENDED_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Signals that a process causes itself: its stack shows where.
OF_ITS_OWN = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
INTERRUPTED = "KeyboardInterrupt"
MEMORY_ERROR = "OutOfMemoryError"  # PyTorch's, for GPU memory
# Errors of gloo, NCCL and the job's store when the process at the other end is gone.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote (process|worker|peer)"
    r"|ncclRemoteError|failed to recv|(socket|wait) time(d )?-?out|timed out (after|waiting)"
    r"|DistNetworkError|failed to pass monitoredBarrier|errors while waiting for send/recv",
    re.IGNORECASE,
)
_MEANS = {
    signal.SIGABRT: "a library or the program itself gave up, as gloo does where a peer sends more than is "
    "expected: what the rank wrote last says why",
    signal.SIGKILL: "killed from outside: by the kernel where memory ran out, by a scheduler, or by a user",
    signal.SIGSEGV: "native code touched memory that is not its own",
    signal.SIGBUS: "mapped memory or shared memory (/dev/shm) ran out, or a mapped file became shorter",
}
_FULL = re.compile(r"inline_container.* unexpected pos|PytorchStreamWriter failed writing")  # of torch.save
_LOADER, _PROCESSES = "/torch/utils/data/dataloader.py", "/multiprocessing/"  # in calls
_LOADER_MEANS = "a worker process of its DataLoader is gone: killed, as where memory or /dev/shm runs out"


@dataclass(frozen=True)
class Death:
    """The end of a rank that failed by itself.

    Attributes:
        ended_ns: when it failed, or was seen to be gone.
        how: what ended it, in words.
        means: the usual reason for such an end; empty where none is known.
        first: whether it is a first cause: it ended clearly before every other rank that did not end well,
            or together with others, each for its own reason.
        lost_peer: whether it failed because another process was gone.
        raised: whether an exception ended its script.
        exit_signal: the signal that ended it; -1 if an exception or its exit code did.
    """

    rank: int
    ended_ns: int
    how: str
    means: str
    first: bool
    lost_peer: bool = False
    raised: bool = False
    exit_signal: int = -1


def find_deaths(records: Records) -> list[Death]:
    """Return the deaths of ranks, earliest first."""
    signalled = pl.col("exit_signal").is_in([int(number) for number in ENDED_FROM_OUTSIDE])
    interrupted = pl.col("error").str.starts_with(INTERRUPTED)
    asked = records.ranks.filter(interrupted | (signalled & (pl.col("error") == "")))
    when = pl.when(interrupted).then("failed_ns").otherwise("ended_ns")
    first_asked = asked.select(when.min()).item()
    asked_ns = first_asked if isinstance(first_asked, int) else 0
    rows = [row for row in records.ranks.iter_rows(named=True) if _died(row, asked_ns)]
    rows.sort(key=lambda row: (_died_ns(row), row["rank"]))
    first = _first_causes(rows, records.world_size, asked_ns)
    return [
        Death(
            row["rank"],
            _died_ns(row),
            _end_in_words(row),
            _usual_reason(row),
            row["rank"] in first,
            lost_peer(row["error"]),
            _failed(row),
            -1 if _failed(row) else row["exit_signal"],
        )
        for row in rows
    ]


def left_early(records: Records) -> dict[int, int]:
    """Return the ranks whose script ended well although the job did not, and when, in ns.

    Includes processes that a launcher sent SIGTERM after their script had ended, as they were slow to exit.
    """
    signalled = pl.col("final") & pl.col("exit_signal").is_in([int(number) for number in ENDED_FROM_OUTSIDE])
    ranks = records.ranks.filter(((pl.col("exit_code") == 0) | signalled) & (pl.col("error") == ""))
    when = pl.when(pl.col("left_ns") > 0).then("left_ns").otherwise("ended_ns")
    return {} if ranks.height == records.ranks.height else dict(ranks.select("rank", when).iter_rows())


def lost_peer(error: str) -> bool:
    """Return whether an exception says that the rank at the other end of a connection is gone."""
    return bool(_LOST_PEER.search(error.partition("\n")[0])) and not _lost_worker(error)


def _lost_worker(error: str) -> bool:
    """Return whether the other end of the connection was a worker process of a DataLoader."""
    said, _, calls = error.partition("\n")
    return bool(_LOST_PEER.search(said)) and _LOADER in calls and _PROCESSES in calls


def _died(row: Mapping[str, Any], asked_ns: int) -> bool:
    """Return whether a rank ended badly, rather than by a signal from outside or a SIGKILL following one.

    Args:
        row: of the rank, in `Records.ranks`.
        asked_ns: when the first rank was ended from outside; 0 for never.
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

    Ranks that lost a peer do not count, unless all did and none was ended from outside before: then the first
    does. Returns none if more than half of the job died together, as the cause is then outside of the ranks.
    """
    ended_ns = [row["ended_ns"] for row in rows if row["exit_signal"] == signal.SIGKILL]
    if len(ended_ns) == num_ranks > 1 and max(ended_ns) - min(ended_ns) <= AT_ONCE_NS:
        return set()
    unprompted = [row for row in rows if not lost_peer(row["error"])]
    if not unprompted:
        return {row["rank"] for row in rows[:1] if not 0 < asked_ns < _died_ns(row) + TOGETHER_NS}
    killed = {row["exit_signal"] for row in rows} == {signal.SIGKILL} and len(rows) == num_ranks
    apart_ns = KILLED_TOGETHER_NS if killed else TOGETHER_NS
    together = [row for row in unprompted if _died_ns(row) <= _died_ns(unprompted[0]) + apart_ns]
    # A killed rank makes its peers fail: an exit code alone, at about that time, is not a cause.
    own_reason = [row for row in together if row["exit_signal"] > 0 or _failed(row)]
    first = {row["rank"] for row in own_reason or together}
    return first if len(first) == 1 or 2 * len(first) <= num_ranks else set()


def _end_in_words(row: Mapping[str, Any]) -> str:
    if _failed(row):
        said, *calls = row["error"].splitlines()
        if said.startswith(MEMORY_ERROR):  # the sizes behind it are in table `out_of_memory`
            said = ". ".join(said.split(". ")[:2])
        return f"{said} ({own_call(calls)})" if calls else said
    number, calls = row["exit_signal"], row["stack"].splitlines()
    if number <= 0:
        return f"exit code {row['exit_code']}"
    where = f" in {own_call(calls)}" if calls and number in OF_ITS_OWN else ""
    return f"signal {number} ({signal_name(number)}){where}"


def _usual_reason(row: Mapping[str, Any]) -> str:
    if not _failed(row):
        return _MEANS.get(row["exit_signal"], "")
    if _lost_worker(row["error"]):
        return _LOADER_MEANS
    return "its disk is full, or the quota there is used up" if _FULL.search(row["error"]) else ""


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
