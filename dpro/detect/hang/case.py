"""What is known of a job that may hang before a cause is named: the wait-for graph, and ranks that are gone.

In: `Records`. Out: a `Case`, with the ends of chains of waiting: ranks that the others have waited for longer
than a threshold, or that have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl

from dpro.detect.hang import waits as graph
from dpro.detect.hang.deaths import Death, find_deaths, left_early, lost_peer
from dpro.detect.hang.operations import Knowledge, Operation, know, unfinished_operations
from dpro.detect.hang.records import SYNCHRONISING, UNFINISHED, Records
from dpro.detect.hang.waits import Root, WaitGraph
from dpro.units import NS_PER_S

MIN_WAIT_NS = 4 * NS_PER_S  # a call unfinished for less may be under way; the recorder saves calls after 5 s


@dataclass(frozen=True)
class Case:
    """What the findings of one run are derived from.

    Attributes:
        records: calls, groups and ranks of the run.
        known: how far each rank had come.
        waits: the wait-for graph of ranks and operations.
        deaths: ranks that are gone, by rank.
        left: ranks that ended well while the job did not, and when they last gave a sign.
        now_ns: when the last dump was saved, -1 unknown.
    """

    records: Records
    known: Knowledge
    waits: WaitGraph
    deaths: dict[int, Death]
    left: dict[int, int]
    now_ns: int

    def waited_ns(self, operations: Sequence[Operation]) -> int:
        """Return how long operations had been waited for when the dumps were saved, ns; -1 unknown."""
        since = [operation.since_ns for operation in operations if operation.since_ns >= 0]
        return self.now_ns - min(since) if since and self.now_ns >= 0 else -1

    @property
    def roots(self) -> list[Root]:
        """The ends of chains of waiting that have lasted `MIN_WAIT_NS`, or are at a rank that has left."""
        return [
            each
            for root in graph.find_roots(self.waits)
            if _lasts(root, self) or has_left(root, self)
            for each in each_frozen(root, self)
        ]


def examine(records: Records) -> Case:
    """Derive how far each rank had come, which ranks are gone, and the wait-for graph."""
    records = with_failed(records)
    known = know(records)
    deaths = {death.rank: death for death in find_deaths(records)}
    left = left_early(records)
    saved = records.ranks.filter(pl.col("rank").is_in(list(known.current)))["saved_ns"]
    now_ns = int(saved.max() or -1) if saved.len() else -1  # type: ignore[arg-type]
    gone = {rank for rank, death in deaths.items() if gone_early(death, now_ns)} | left.keys()
    operations = [_without_gone(each, gone) for each in unfinished_operations(records, known)]
    return Case(records, known, graph.build_waits(operations), deaths, left, now_ns)


def _without_gone(operation: Operation, gone: set[int]) -> Operation:
    """Move ranks that are known to be gone from the unknown to the absent ranks of an operation."""
    never = operation.unknown & gone
    return replace(operation, absent=operation.absent | never, unknown=operation.unknown - never)


def gone_early(death: Death, now_ns: int) -> bool:
    """Return whether a rank died while its peers still waited, and not when all were ended.

    Args:
        now_ns: when the last dump was saved, -1 unknown.
    """
    return death.first or 0 <= death.ended_ns < now_ns


def _lasts(root: Root, case: Case) -> bool:
    """Return whether the wait has lasted `MIN_WAIT_NS`, or it is not known when dumps were saved."""
    waited_ns = case.waited_ns(root.operations)
    return waited_ns < 0 or waited_ns >= MIN_WAIT_NS


def has_left(root: Root, case: Case) -> bool:
    """Return whether the rank that all wait for exited with code 0 before they had waited `MIN_WAIT_NS`."""
    if root.kind != graph.HOST or root.ranks[0] not in case.left:
        return False
    since = [operation.since_ns for operation in root.operations if operation.since_ns >= 0]
    return not since or case.left[root.ranks[0]] < min(since) + MIN_WAIT_NS


def each_frozen(root: Root, case: Case) -> list[Root]:
    """Split a root of unknown ranks into one per frozen process: more than one may be at fault."""
    if root.kind != graph.UNKNOWN:
        return [root]
    frozen = [rank for rank in root.ranks if is_frozen(rank, case)]
    return [replace(root, ranks=(rank,)) for rank in frozen] or [root]


def is_frozen(rank: int, case: Case) -> bool:
    """Whether no thread of a process ran for `MIN_WAIT_NS` before its end or its peers' last record."""
    ranks = case.records.ranks
    by_itself = (pl.col("exit_code") >= 0) | (pl.col("failed_ns") > 0) | pl.col("final")
    rows = ranks.filter((pl.col("rank") == rank) & ~by_itself & (pl.col("heartbeat_ns") > 0))
    if rows.is_empty():
        return False
    own, ended_ns = (int(rows[name][0]) for name in ("heartbeat_ns", "ended_ns"))
    last = max(ranks["heartbeat_ns"])
    was_ended = int(rows["exit_signal"][0]) > 0
    return bool(own < (min(last, ended_ns) if was_ended else last) - MIN_WAIT_NS)


def died_at_work(death: Death, root: Root) -> bool:
    """Whether a rank died before its peers had waited `MIN_WAIT_NS` for it: else it was stuck first."""
    since = [operation.since_ns for operation in root.operations if operation.since_ns >= 0]
    return not since or death.ended_ns < min(since) + MIN_WAIT_NS


def without_dump(case: Case) -> list[int]:
    """Return the ranks of the job without a dump that shows what they did last."""
    return [rank for rank in range(case.records.world_size) if rank not in case.known.current]


# Calls that count as completed because they failed, which would hide what a job waited for.

MIN_SILENT_NS = 4 * NS_PER_S  # a rank whose records lack a call for this long did not make it


def with_failed(records: Records) -> Records:
    """Mark calls that were completed by failing as unfinished.

    Returns:
        The records with these calls `scheduled`, and with `status` lowered to the last call that completed.
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
    return replace(records, calls=calls.drop("failed"), status=_held_back(records.status, first))


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
    """Return `rank`, `order` of the last call of each rank that lost a peer, if a gone member lacks it."""
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
    return pl.concat([each.select("rank", "order") for each in (behind, unsent)])


def _issued(records: Records) -> pl.DataFrame:
    """Return `rank`, `key`, `issued`: the last collective that each rank is known to have called."""
    calls = records.calls.filter(~pl.col("p2p")).select("rank", "key", issued="sequence")
    reported = records.status.select("rank", "key", issued="enqueued")
    return pl.concat([calls, reported]).group_by("rank", "key").agg(pl.col("issued").max())


def _held_back(status: pl.DataFrame, unfinished: pl.DataFrame) -> pl.DataFrame:
    """Lower what ranks reported as completed to the call before the first unfinished one.

    Args:
        status: as of `Records`.
        unfinished: `rank`, `key`, `first`: sequence number of that call.
    """
    joined = status.join(unfinished, on=["rank", "key"], how="left", maintain_order="left")
    return joined.with_columns(completed=pl.min_horizontal("completed", pl.col("first") - 1)).drop("first")
