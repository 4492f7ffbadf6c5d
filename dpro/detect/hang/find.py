"""From a run to what hangs in it: findings, none where nothing does.

In: `Records`. Out: `Finding`s with their evidence in words. A rank is named for what its own calls and those
of its peers show; ranks that wait for it are named as such. What a missing dump leaves open is said with the
dump that would settle it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.hang import waits as graph
from dpro.detect.hang.deaths import Death, find_deaths
from dpro.detect.hang.mismatch import Mismatch, describe, find_mismatches, message_mismatches, odd_calls
from dpro.detect.hang.operations import Knowledge, Operation, know, unfinished_operations
from dpro.detect.hang.records import Records
from dpro.detect.hang.waits import Root, Waits
from dpro.detect.hang.words import (
    attendance,
    chain_in_words,
    name_of,
    numbers_in_words,
    one_of,
    ranks_in_words,
    time_in_words,
)
from dpro.units import NS_PER_S, format_duration

SHORTEST_NS = 4 * NS_PER_S  # what is unfinished for less may be under way; the recorder saves calls after 5 s
LONGEST_LIST = 2  # operations told of each finding: what waits for one rank waits in many places

_SURE, _LIKELY, _TOLD, _OPEN = 0.98, 0.9, 0.75, 0.5  # told: by NCCL's RAS, where dumps leave it open


@dataclass(frozen=True)
class Case:
    """All that the findings of one run are made of.

    Attributes:
        records: what the run tells.
        known: how far each rank had come.
        waits: who waits for whom.
        deaths: ranks that are gone, by rank.
        now_ns: when the last dump was saved, -1 unknown.
    """

    records: Records
    known: Knowledge
    waits: Waits
    deaths: dict[int, Death]
    now_ns: int

    def waited_ns(self, operations: Sequence[Operation]) -> int:
        """How long the operations have been waited for when the dumps were saved, -1 unknown."""
        since = [operation.since_ns for operation in operations if operation.since_ns >= 0]
        return self.now_ns - min(since) if since and self.now_ns >= 0 else -1

    @property
    def roots(self) -> list[Root]:
        """Where chains of waiting end that have lasted for long."""
        return [root for root in graph.find_roots(self.waits) if _lasts(root, self)]


def find_hangs(records: Records) -> list[Finding]:
    """What the ranks of a run wait for, and ranks that are gone.

    Args:
        records: what the run tells of calls and ranks.

    Returns:
        One finding for each first cause, surest first; none if nothing has been unfinished for long.
    """
    return judge(examine(records))


def examine(records: Records) -> Case:
    """Find out who had come how far, who is gone, and who waits for whom."""
    known = know(records)
    deaths = {death.rank: death for death in find_deaths(records)}
    saved = records.ranks.filter(pl.col("rank").is_in(list(known.current)))["saved_ns"]
    now_ns = int(saved.max() or -1) if saved.len() else -1  # type: ignore[arg-type]
    operations = [_without_dead(each, deaths, now_ns) for each in unfinished_operations(records, known)]
    return Case(records, known, graph.build_waits(operations), deaths, now_ns)


def judge(case: Case) -> list[Finding]:
    """The findings of a case, as from `find_hangs`."""
    roots, waits, deaths = case.roots, case.waits, case.deaths
    differences = [*find_mismatches(case.records), *message_mismatches(waits.operations)]
    findings = []
    if differences and (roots or deaths):
        touched = {rank for each in differences for rank in each.calls}
        findings = [_mismatch_finding(each, case) for each in differences]
        roots = [root for root in roots if not touched & {*root.ranks, *graph.victims_of(root, waits)}]
    findings += [_root_finding(root, case) for root in roots]
    findings = [_doubted(finding, findings) for finding in findings]
    if not findings:
        findings = [_death_finding(death, case) for death in deaths.values() if death.first]
    return sorted(findings, key=lambda finding: (-finding.confidence, finding.ranks))


def _doubted(finding: Finding, findings: Sequence[Finding]) -> Finding:
    """A device that seems stuck beside another cause may be a dump that was saved a moment too early."""
    if finding.class_ != "hang.device" or all(each.class_ == finding.class_ for each in findings):
        return finding
    named = ranks_in_words(finding.ranks)
    doubt = f"or the dump of {named} is a little older than the others: one taken now would tell"
    return replace(finding, confidence=min(finding.confidence, _OPEN), evidence=(*finding.evidence, doubt))


def _without_dead(operation: Operation, deaths: dict[int, Death], now_ns: int) -> Operation:
    """The operation with ranks that are known to be gone counted among those that will not come."""
    gone = {rank for rank in operation.unknown if rank in deaths and _gone_early(deaths[rank], now_ns)}
    return replace(operation, absent=operation.absent | gone, unknown=operation.unknown - gone)


def _gone_early(death: Death, now_ns: int) -> bool:
    """Whether a rank died while its peers still waited, and not when all were ended."""
    return death.first or 0 <= death.ended_ns < now_ns


def _lasts(root: Root, case: Case) -> bool:
    """Whether something has been waited for long enough, as far as anything tells when dumps were saved."""
    waited_ns = case.waited_ns(root.operations)
    return waited_ns < 0 or waited_ns >= SHORTEST_NS


def _root_finding(root: Root, case: Case) -> Finding:
    death = case.deaths.get(root.ranks[0]) if root.kind in (graph.HOST, graph.UNKNOWN) else None
    if death and len(root.ranks) == 1 and _gone_early(death, case.now_ns) and _died_at_work(death, root):
        return _finding("dead.rank", "rank", root, case, 0.99, [_death_in_words(death)])
    if root.kind == graph.HOST:
        return _host_finding(root, case)
    if root.kind == graph.DEVICE:
        return _device_finding(root, case)
    if root.kind == graph.COMM:
        return _comm_finding(root, case)
    if root.kind == graph.CYCLE:
        return _cycle_finding(root, case)
    return _unknown_finding(root, case)


def _died_at_work(death: Death, root: Root) -> bool:
    """Whether a rank died before its peers had waited for it for long: else it was stuck first."""
    since = [operation.since_ns for operation in root.operations if operation.since_ns >= 0]
    return not since or death.ended_ns < min(since) + SHORTEST_NS


def _host_finding(root: Root, case: Case) -> Finding:
    rank = root.ranks[0]
    facts = [f"rank {rank} has nothing unfinished of its own{_last_call(rank, root, case)}"]
    facts += [*_heartbeat(rank, case), *_stack(rank, case), *case.records.ras.in_words(rank)]
    confidence = _LIKELY if _missing(case) else _SURE
    return _finding("hang.host", "rank", root, case, confidence, facts)


def _last_call(rank: int, root: Root, case: Case) -> str:
    """What the rank did last in the group where its peers wait for it."""
    operation = root.operations[0]
    number = case.known.issued.get((rank, operation.key), -1)
    if operation.pair or number < 0:
        return ""
    return f": its last call in that group is #{number}, and finished"


def _device_finding(root: Root, case: Case) -> Finding:
    operation = root.operations[0]
    calls = [call for rank, call in operation.unfinished.items() if rank not in root.ranks]
    if operation.finished:
        fact = f"{ranks_in_words(root.ranks)} came to it, too, but did not finish what its peers finished"
    else:
        fact = (
            f"{ranks_in_words(root.ranks)} came to it, too, but its GPU never started what runs on its peers"
        )
    peers = [] if operation.finished else [f"it runs on {ranks_in_words(call.rank for call in calls)}"]
    confidence = _LIKELY / len(root.ranks)
    return _finding("hang.device", "rank", root, case, confidence, [fact, *peers])


def _comm_finding(root: Root, case: Case) -> Finding:
    operation = root.operations[0]
    fact = "all its ranks came and none finished"
    if operation.finished:
        fact = f"all its ranks came, and only {ranks_in_words(operation.finished)} finished"
    fact += "; nothing that one of them has to finish first is open: the network or the group itself"
    kind = "pair" if operation.pair else "group"
    return _finding("hang.comm", kind, root, case, _LIKELY, [fact])


def _cycle_finding(root: Root, case: Case) -> Finding:
    minority = _out_of_order(root) or odd_calls(root.operations, case.records)
    facts = [
        f"{ranks_in_words(root.ranks)} wait for each other in a circle: no hardware does that; "
        "the order of the calls differs between them"
    ]
    if minority:
        called = "; ".join(_odd_call(rank, root) for rank in minority)
        facts.append(f"{ranks_in_words(minority)} called in another order than most{called}")
    return _finding(
        "hang.mismatch", "rank", replace(root, ranks=minority or root.ranks), case, _LIKELY, facts
    )


def _odd_call(rank: int, root: Root) -> str:
    """The collective that a rank of a circle waits in."""
    for operation in root.operations:
        call = operation.unfinished.get(rank)
        if call and not operation.pair:
            return f": rank {rank} waits in {describe(call.op, call.bytes, call.bytes, call.dtype)}"
    return ""


def _out_of_order(root: Root) -> tuple[int, ...]:
    """Ranks of a circle that are not where most of it is; none where there is no most."""
    most = max(root.operations, key=lambda operation: len(operation.unfinished))
    if most.pair or 2 * len(most.unfinished) <= len(most.members):
        return ()
    return tuple(sorted(set(root.ranks) & most.absent))


def _unknown_finding(root: Root, case: Case) -> Finding:
    ras = case.records.ras
    if suspects := ras.suspects(root.ranks):
        root = replace(root, ranks=tuple(suspects))
    if len(root.ranks) == 1 and root.ranks[0] in ras.dead:
        return _finding("dead.rank", "rank", root, case, _LIKELY, ras.in_words(root.ranks[0]))
    named = one_of(root.ranks)
    facts, confidence = [], _OPEN / len(root.ranks)
    frozen = [line for rank in root.ranks for line in _heartbeat(rank, case)]
    old = [rank for rank in root.ranks if rank in case.known.outdated or _has_dump(rank, case)]
    none = [rank for rank in root.ranks if rank not in old]
    if none:
        facts.append(f"the dump of {ranks_in_words(none)} is missing")
    if old:
        facts.append(f"the dump of {ranks_in_words(old)} is older than what its peers wait for")
    facts.append(
        f"not known: whether the host code of {named} is stuck, its process is gone, or it waits for "
        f"something in turn; a dump of {ranks_in_words(root.ranks)}, taken now, would settle it"
    )
    if len(root.ranks) == 1 and frozen and _is_frozen(root.ranks[0], case):
        confidence = _LIKELY
    elif len(root.ranks) == 1 and suspects:
        confidence = _TOLD
    told = [line for rank in root.ranks for line in ras.in_words(rank)]
    return _finding("hang.host", "rank", root, case, confidence, [*facts, *frozen, *told])


def _has_dump(rank: int, case: Case) -> bool:
    return rank in case.known.current


def _heartbeat(rank: int, case: Case) -> list[str]:
    """Whether the process still ran, by the recorder's thread in it, which writes once a second."""
    row = case.records.ranks.filter((pl.col("rank") == rank) & (pl.col("heartbeat_ns") > 0))
    last = case.records.ranks["heartbeat_ns"].max()
    if row.is_empty() or last is None:
        return []
    own = int(row["heartbeat_ns"][0])
    if _is_frozen(rank, case):
        silent = format_duration(float(int(last) - own))  # type: ignore[arg-type]
        return [
            f"no thread of rank {rank} has run since {time_in_words(own)}, {silent} before those of its "
            "peers: its process is stopped, or one thread keeps the interpreter's lock (GIL)"
        ]
    return [f"other threads of rank {rank} went on until {time_in_words(own)}: only its main thread is stuck"]


def _stack(rank: int, case: Case) -> list[str]:
    """Where the rank's main thread stood when it was last seen."""
    rows = case.records.ranks.filter((pl.col("rank") == rank) & (pl.col("stack") != ""))
    if rows.is_empty() or _is_frozen(rank, case):
        return []
    return [f"the main thread of rank {rank} is in {' < '.join(rows['stack'][0].splitlines()[:3])}"]


def _is_frozen(rank: int, case: Case) -> bool:
    beats: dict[int, int] = dict(case.records.ranks.select("rank", "heartbeat_ns").iter_rows())
    return 0 < beats.get(rank, -1) < max(beats.values()) - SHORTEST_NS


def _death_in_words(death: Death) -> str:
    means = f" ({death.means})" if death.means else ""
    return f"rank {death.rank} was ended by {death.how}, seen at {time_in_words(death.ended_ns)}{means}"


def _death_finding(death: Death, case: Case) -> Finding:
    root = Root(graph.HOST, (death.rank,), ())
    facts = [_death_in_words(death), "no other rank ended before it"]
    return _finding("dead.rank", "rank", root, case, _LIKELY, facts)


def _mismatch_finding(mismatch: Mismatch, case: Case) -> Finding:
    root = Root(graph.CYCLE, mismatch.minority, ())
    number = f" #{mismatch.sequence}" if mismatch.sequence >= 0 else ""
    by_call: dict[str, list[int]] = {}
    for rank, call in sorted(mismatch.calls.items()):
        by_call.setdefault(call, []).append(rank)
    told = "; ".join(f"{ranks_in_words(ranks)} called {call}" for call, ranks in by_call.items())
    facts = [f'call{number} of group "{mismatch.group}": {told}']
    minority = ranks_in_words(mismatch.minority)
    sure = len(mismatch.minority) < len(mismatch.calls)
    if mismatch.skipped > 0 and sure:
        calls = "call" if mismatch.skipped == 1 else "calls"
        facts.append(f"{minority} left out {mismatch.skipped} {calls} there: all later ones fit if it did")
    if not sure:
        facts.append(f"no call is that of most: {one_of(mismatch.minority)} is wrong")
    confidence = _SURE if sure else _OPEN
    return _finding("hang.mismatch", "rank", root, case, confidence, facts)


def _finding(
    class_: str, kind: str, root: Root, case: Case, confidence: float, facts: Sequence[str]
) -> Finding:
    """A finding with what all have: who came, the chain, the victims, and the doubts."""
    kinds = {(tuple(o.unfinished), o.absent, o.unknown, o.key): o for o in reversed(root.operations)}
    told = [attendance(operation) for operation in [*kinds.values()][: -LONGEST_LIST - 1 : -1]]
    more = len(root.operations) - len(told)
    if more > 0:
        told[-1] += f"; and {more} more like it"
    victims = graph.victims_of(root, case.waits) if root.operations else []
    waited_ns = case.waited_ns(root.operations)
    evidence = [
        *facts[:1],
        *told,
        *facts[1:],
        *_chain(root, victims, case),
        *([f"waiting because of it, at fault in nothing: {ranks_in_words(victims)}"] if victims else []),
        *_doubts(root, case),
    ]
    return Finding(
        class_,
        kind if len(root.ranks) == 1 or kind != "rank" else "ranks",
        _component(root, kind),
        root.ranks,
        1.0,
        round(confidence, 3),
        float(max(waited_ns, 0)),
        tuple(evidence),
    )


def _component(root: Root, kind: str) -> str:
    if kind == "rank":
        return numbers_in_words(root.ranks)
    operation = root.operations[0]
    if operation.pair:
        return f"{operation.pair[0]}->{operation.pair[1]}"
    return f"{operation.group} ({numbers_in_words(operation.members)})"


def _chain(root: Root, victims: Sequence[int], case: Case) -> list[str]:
    """The longest of the shortest ways to the root: it tells most of how the job came to stand."""
    chains = [graph.chain_from(rank, root, case.waits) for rank in victims]
    longest = max(chains, key=len, default=[])
    if len(longest) < 2:
        return []
    ends = root.ranks if root.kind in (graph.HOST, graph.DEVICE, graph.UNKNOWN) else ()
    return [f"the chain: {chain_in_words(longest, ends)}"]


def _missing(case: Case) -> list[int]:
    """Ranks of the job without a dump that shows what they did last."""
    return [rank for rank in range(case.records.world_size) if rank not in case.known.current]


def _doubts(root: Root, case: Case) -> list[str]:
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
