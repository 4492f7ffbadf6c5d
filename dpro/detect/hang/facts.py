"""What is known of ranks that a finding is about, in words: their calls, dumps, threads, ends.

In: a `Case`, and ranks. Out: lines of evidence, none where nothing is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from dpro.detect.hang import waits as graph
from dpro.detect.hang.case import MIN_WAIT_NS, Case, is_frozen
from dpro.detect.hang.deaths import Death
from dpro.detect.hang.records import UNFINISHED
from dpro.detect.hang.waits import Root
from dpro.detect.hang.words import chain_in_words, name_of, ranks_in_words, time_in_words
from dpro.units import format_duration


def last_call(rank: int, root: Root, case: Case) -> str:
    """What the rank did last in the group where its peers wait for it."""
    operation = root.operations[0] if root.operations else None
    number = -1 if operation is None else case.known.issued.get((rank, operation.key), -1)
    if operation is None or operation.pair or number < 0:
        return ""
    return f": its last call in that group is #{number}, and finished"


def no_dump(ranks: Sequence[int], case: Case) -> str:
    """Why nothing is known of some ranks."""
    old = [rank for rank in ranks if rank in case.known.outdated or _has_dump(rank, case)]
    none = [rank for rank in ranks if rank not in old]
    said = [f"the dump of {ranks_in_words(none)} is missing"] if none else []
    said += [f"the dump of {ranks_in_words(old)} is older than what its peers wait for"] if old else []
    return "; ".join(said)


def _has_dump(rank: int, case: Case) -> bool:
    return rank in case.known.current


def last_state(ranks: Sequence[int], case: Case) -> list[str]:
    """What dumps that are older than those of their peers say of their moment."""
    lines = []
    calls = case.records.calls
    for rank in ranks:
        if rank not in case.known.outdated:
            continue
        own = calls.filter((pl.col("rank") == rank) & pl.col("state").is_in(UNFINISHED))
        done = case.records.ranks.filter((pl.col("rank") == rank) & pl.col("idle")).height
        if own.height:
            last = own.sort("order").row(-1, named=True)
            lines.append(
                f"when its dump was saved, rank {rank} had {own.height} unfinished, the last "
                f'{last["op"]} #{last["sequence"]} of group "{last["group"]}"'
            )
        elif done:
            lines.append(f"when its dump was saved, rank {rank} had finished all it had begun")
    return lines


def heartbeat(rank: int, case: Case) -> list[str]:
    """Whether the process still ran, by the recorder's thread in it, which writes once a second."""
    row = case.records.ranks.filter((pl.col("rank") == rank) & (pl.col("heartbeat_ns") > 0))
    last = case.records.ranks["heartbeat_ns"].max()
    if row.is_empty() or last is None:
        return []
    own = int(row["heartbeat_ns"][0])
    if is_frozen(rank, case):
        silent = format_duration(float(int(last) - own))  # type: ignore[arg-type]
        return [
            f"no thread of rank {rank} has run since {time_in_words(own)}, {silent} before those of its "
            "peers: its process is stopped, or one thread keeps the interpreter's lock (GIL)"
        ]
    return [f"other threads of rank {rank} went on until {time_in_words(own)}: only its main thread is stuck"]


def stack(rank: int, case: Case) -> list[str]:
    """Where the rank's main thread stood when it was last seen."""
    rows = case.records.ranks.filter((pl.col("rank") == rank) & (pl.col("stack") != ""))
    if rows.is_empty() or is_frozen(rank, case):
        return []
    return [f"the main thread of rank {rank} is in {' < '.join(rows['stack'][0].splitlines()[:3])}"]


def death_in_words(death: Death) -> str:
    """What ended a rank, when, and what that usually means."""
    means = f" ({death.means})" if death.means else ""
    return f"rank {death.rank} was ended by {death.how}, seen at {time_in_words(death.ended_ns)}{means}"


def fewer_steps(rank: int, case: Case) -> list[str]:
    """By how much a rank's last step ended before those of its peers."""
    ends: dict[int, int] = dict(case.records.ranks.select("rank", "last_step_ns").iter_rows())
    own, last = ends.get(rank, -1), max(ends.values(), default=-1)
    if own < 0 or last - own < MIN_WAIT_NS:
        return []
    return [f"its last step ended {format_duration(float(last - own))} before that of its peers"]


def chain(root: Root, victims: Sequence[int], case: Case) -> list[str]:
    """The longest of the shortest ways to the root: it tells most of how the job came to stand."""
    chains = [graph.chain_from(rank, root, case.waits) for rank in victims]
    longest = max(chains, key=len, default=[])
    if len(longest) < 2:
        return []
    ends = root.ranks if root.kind in (graph.HOST, graph.DEVICE, graph.UNKNOWN) else ()
    return [f"the chain: {chain_in_words(longest, ends)}"]


def doubts(root: Root, case: Case) -> list[str]:
    """Ranks of which nothing tells whether they came, where that leaves something open."""
    if root.kind == graph.UNKNOWN:
        return []
    open_ = sorted({rank for operation in root.operations for rank in operation.unknown} - set(root.ranks))
    if not open_:
        return []
    names = ", ".join(name_of(each) for each in root.operations[:1] if each.unknown) or "these operations"
    return [
        f"not known: whether {ranks_in_words(open_)} came to {names}; a dump of {ranks_in_words(open_)} "
        f"would tell whether more than {ranks_in_words(root.ranks)} is stuck"
    ]
