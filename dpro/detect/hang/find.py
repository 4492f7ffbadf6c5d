"""Findings of what hangs in a run; none where nothing does.

Takes `Records`, and the findings log of the run; returns `Finding`s with their evidence. A rank is named as
the cause by its own calls and those of its peers; ranks that wait for it are listed as blocked. Where a
missing dump leaves a question open, the finding names the dump that would answer it.

The records of a job that was ended may have lost what it waited for, since a call that fails counts as
finished. So a hang in the log that lasted until the job ended takes precedence, unless the records are surer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from dpro.detect.findings import Finding, ranks_of
from dpro.detect.findings_log import (
    FOLDER,
    JOB_ENDED,
    LoggedFinding,
    finding_of,
    logged_findings,
    time_of_day,
)
from dpro.detect.hang import waits as graph
from dpro.detect.hang.case import (
    Case,
    Death,
    deaths_of,
    examine,
    has_left,
    is_frozen,
    split_frozen,
    without_dump,
)
from dpro.detect.hang.evidence import (
    BEHIND,
    DEADLOCK,
    GROUPS,
    LEFT,
    MAX_SIDES,
    RAISED,
    SHORT,
    SKIPPED,
    observe_attendance,
    observe_chain,
    observe_death,
    observe_doubts,
    observe_fewer_steps,
    observe_heartbeat,
    observe_last_state,
    observe_lost_peers,
    observe_missing_dump,
    observe_wait_before_death,
    place_of,
    stacks,
    with_last_call,
)
from dpro.detect.hang.mismatches import (
    Mismatch,
    describe,
    find_mismatches,
    message_mismatches,
    odd_calls,
    unlike_before,
    unlike_earlier,
)
from dpro.detect.hang.records import Records
from dpro.detect.hang.stacks import GROUP, MAIN_THREAD, WITH_PEERS, doing_of, main_threads, stand_of
from dpro.detect.hang.waits import Root
from dpro.detect.observations import Observation, Value, observe
from dpro.units import NS_PER_S
from dpro.words import numbers_in_words

MAX_OPERATIONS = 2  # listed per finding: ranks may wait for one rank in many operations
MIN_STANDING_NS = 10 * NS_PER_S  # without any step or call, before stacks count as evidence
MAX_OF_DEADLOCK = 6  # operations listed where ranks wait for each other

_MISSED = re.compile(r"Ranks? (\d+(?:, ?\d+)*) failed to pass monitoredBarrier")  # of gloo

# Confidences: all dumps show it; some are missing; NCCL's RAS reports it where dumps do not; one of two.
_SURE, _LIKELY, _REPORTED, _OPEN = 0.98, 0.9, 0.75, 0.5

_STARTS_UNKNOWN = observe(
    "starts-unknown",
    "not known: whether the GPU of one of them never reached it (an earlier kernel does not end), or the "
    "network or the group is at fault; --nccl-timing records that",
)
_FIRST_TO_END = observe("first-to-end", "no other rank ended before it")
_END_UNKNOWN = observe(
    "failed-end-unknown",
    "no rank was seen to end by itself: which end of the connection failed is not known",
)


def find_hangs(records: Records) -> list[Finding]:
    """Find the causes of a hang, and ranks that are gone.

    Returns:
        One finding for each first cause, surest first; empty if no call has been unfinished for long.
    """
    return find_causes(examine(records))


def find_causes(case: Case) -> list[Finding]:
    """Find the causes of a hang in the facts of a job; returns what `find_hangs` does."""
    waits, deaths = case.waits, case.deaths
    roots = [root for root in case.roots if not _lost_peers(root, case)]
    differences = [*find_mismatches(case.records), *message_mismatches(waits.operations)]
    differences = differences or unlike_before(case.records)
    findings = []
    if differences and (roots or deaths):
        touched = {rank for mismatch in differences for rank in mismatch.calls}
        findings = [_mismatch_finding(mismatch, case) for mismatch in differences]
        roots = [root for root in roots if not touched & {*root.ranks, *graph.victims_of(root, waits)}]
    findings += _merge_group_makers([_root_finding(root, case) for root in roots], roots, case)
    findings = [_with_doubt(finding, findings) for finding in findings]
    findings += _further_suspects(roots, findings, case)
    if not findings:
        findings = (
            _left_findings(case)
            or _missed_findings(case)
            or _standing_findings(case)
            or [_death_finding(death, case) for death in deaths.values() if death.first]
        )
    return sorted(findings, key=lambda finding: (-finding.confidence, finding.ranks))


def _lost_peers(root: Root, case: Case) -> bool:
    """Return whether the ranks that others wait for are gone because they lost a peer."""
    deaths = [case.deaths.get(rank) for rank in root.ranks]
    return root.kind in (graph.HOST, graph.UNKNOWN) and all(death and death.lost_peer for death in deaths)


def _with_doubt(finding: Finding, findings: Sequence[Finding]) -> Finding:
    """Lower the confidence of a stuck device where there is another cause: its dump may be too old."""
    if finding.class_ != "hang.device" or all(other.class_ == finding.class_ for other in findings):
        return finding
    sentence = "or the dump of {ranks} is a little older than the others: a dump taken now would decide"
    doubt = observe("older-dump", sentence, ranks=list(finding.ranks))
    return replace(finding.observing(doubt), confidence=min(finding.confidence, _OPEN))


def _further_suspects(roots: Sequence[Root], findings: Sequence[Finding], case: Case) -> list[Finding]:
    """Return findings of ranks without a dump that others also wait for, besides ranks already named."""
    if all(root.kind != graph.HOST for root in roots):
        return []
    named = ranks_of(findings)
    places = tuple(place for place in case.waits.operations if place.unknown - named)
    ranks = sorted(frozenset().union(*(place.unknown for place in places)) - named)
    if not ranks:
        return []
    alone = [place for place in places if not place.absent]  # no other rank is missing there
    root = Root(graph.UNKNOWN, tuple(ranks), tuple(alone) or places)
    frozen = [
        frozen_root for frozen_root in split_frozen(root, case) if is_frozen(frozen_root.ranks[0], case)
    ]
    if frozen:
        return [_unknown_finding(frozen_root, case) for frozen_root in frozen]
    fact = observe_missing_dump(root.ranks, case).then(
        f", and others wait for {_one_of(root.ranks)}, too: it may be stuck as well, or wait for the rank "
        "that is; a dump of {ranks} would show which",
        ranks=ranks,
    )
    return [_finding("hang.rank", "rank", root, case, _OPEN / 2 / len(ranks), [fact])]


def _root_finding(root: Root, case: Case) -> Finding:
    if has_left(root, case):
        return _left_finding(root, case)
    deaths = deaths_of(root, case) if root.kind in (graph.HOST, graph.UNKNOWN) else []
    if deaths:
        return _dead_finding(deaths, root, case, 0.99, observe_wait_before_death(deaths, root, case))
    if root.kind == graph.HOST:
        return _host_finding(root, case)
    if root.kind == graph.DEVICE:
        return _device_finding(root, case)
    if root.kind == graph.COMM:
        return _comm_finding(root, case)
    if root.kind == graph.CYCLE:
        return _cycle_finding(root, case)
    return _unknown_finding(root, case)


def _merge_group_makers(findings: Sequence[Finding], roots: Sequence[Root], case: Case) -> list[Finding]:
    """Merge the findings of ranks that wait for other ranks while they make a process group.

    Where others wait for another rank, these may wait for it, too; else their peers do not make these groups.
    """
    making = [finding for finding in findings if finding.class_ == "hang.host" and doing_of(finding) == GROUP]
    others = [finding for finding in findings if finding not in making]
    if any(finding.class_ in ("hang.host", "hang.rank", "dead.rank") for finding in others):
        return [*others, *(replace(finding, confidence=_OPEN) for finding in making)]
    if not making:
        return list(findings)
    ranks = sorted(ranks_of(making))
    operations = {id(one): one for root in roots if {*root.ranks} <= {*ranks} for one in root.operations}
    merged = Root(graph.CYCLE, tuple(ranks), tuple(operations.values()))
    sentence = "{ranks} make a process group, while others wait in a collective that all ranks have to call"
    fact = observe("makes-group", sentence, ranks=ranks)
    grouped = _finding("hang.mismatch", "rank", merged, case, _LIKELY, [fact])
    return [*others, replace(grouped, cause=GROUPS)]


def _host_finding(root: Root, case: Case) -> Finding:
    rank = root.ranks[0]
    idle = observe("nothing-unfinished", "rank {rank} has nothing unfinished of its own", rank=rank)
    facts = [with_last_call(idle, rank, root, case), *observe_heartbeat(rank, case), *stacks([rank], case)]
    facts += case.records.ras.observations(rank)
    confidence = _LIKELY if without_dump(case) else _SURE
    return _finding("hang.host", "rank", root, case, confidence, facts)


def _device_finding(root: Root, case: Case) -> Finding:
    operation = root.operations[0]
    ranks = list(root.ranks)
    if operation.finished:
        sentence = "{ranks} launched the call below, but never finished it, while peers did"
        facts = [observe("finished-by-peers", sentence, ranks=ranks)]
    else:
        sentence = "{ranks} launched the call below, but its kernel never started"
        peers = sorted(rank for rank in operation.unfinished if rank not in root.ranks)
        facts = [
            observe("never-started", sentence, ranks=ranks),
            observe("runs-on-peers", "its kernel is running on {peer_ranks}", peer_ranks=peers),
        ]
    finding = _finding("hang.device", "rank", root, case, _LIKELY / len(root.ranks), facts)
    return finding if operation.finished else replace(finding, cause=BEHIND)


def _comm_finding(root: Root, case: Case) -> Finding:
    operation = root.operations[0]
    fact = observe("all-came", "all its ranks entered and none finished")
    if operation.finished:
        sentence = "all its ranks entered, and only {finished_ranks} finished"
        fact = observe("all-came", sentence, finished_ranks=sorted(operation.finished))
    kind = "pair" if operation.pair else "group"
    if case.records.starts_unknown and not operation.finished:
        return _finding("hang.comm", kind, root, case, _OPEN, [fact, _STARTS_UNKNOWN])
    fact = fact.then("; no earlier work of theirs is unfinished: the network or the group itself is at fault")
    return _finding("hang.comm", kind, root, case, _LIKELY, [fact])


def _cycle_finding(root: Root, case: Case) -> Finding:
    minority = _out_of_order(root) or odd_calls(root.operations, case.records)
    facts = [
        observe(
            "deadlock",
            "{ranks} wait for each other, which is a deadlock: they call in different orders, which "
            "is a bug in the program, not a hardware fault",
            ranks=list(root.ranks),
        )
    ]
    if minority:
        calls = {rank: call for rank in minority if (call := _odd_call(rank, root))}
        called = "; ".join(
            f": rank {rank} waits in {{call_of_{rank}}}" if rank in calls else "" for rank in minority
        )
        facts.append(
            observe(
                "another-order", f"{{ranks}} called in another order than most{called}",
                ranks=list(minority), **{f"call_of_{rank}": call for rank, call in calls.items()},
            )
        )  # fmt: skip
    finding = _finding(
        "hang.mismatch", "rank", replace(root, ranks=minority or root.ranks), case, _LIKELY, facts
    )
    return finding if minority else replace(finding, cause=DEADLOCK)


def _odd_call(rank: int, root: Root) -> str:
    """Return the collective that a rank of a deadlock waits in, in words; empty for none."""
    for operation in root.operations:
        call = operation.unfinished.get(rank)
        if call and not operation.pair:
            return describe(call.op, call.bytes, call.bytes, call.dtype)
    return ""


def _out_of_order(root: Root) -> tuple[int, ...]:
    """Return the ranks of a deadlock that lack the call in which more than half of its group waits.

    Majority rule: without such a call, no rank is out of order.
    """
    most = max(root.operations, key=lambda operation: len(operation.unfinished))
    if most.pair or 2 * len(most.unfinished) <= len(most.members):
        return ()
    return tuple(sorted(set(root.ranks) & most.absent))


def _unknown_finding(root: Root, case: Case) -> Finding:
    ras = case.records.ras
    if suspects := ras.suspects(root.ranks):
        root = replace(root, ranks=tuple(suspects))
    if len(root.ranks) == 1 and root.ranks[0] in ras.dead:
        return _finding("dead.rank", "rank", root, case, _LIKELY, ras.observations(root.ranks[0]))
    confidence = _OPEN / len(root.ranks)
    frozen = [observation for rank in root.ranks for observation in observe_heartbeat(rank, case)]
    unknown = observe(
        "unknown-whether-stuck",
        f"not known: whether the host code of {_one_of(root.ranks)} is stuck, its GPU does not answer, its "
        "process is gone, or it waits for something itself; a dump of {ranks}, taken now, would show it",
        ranks=list(root.ranks),
    )
    facts = [observe_missing_dump(root.ranks, case), *observe_last_state(root.ranks, case), unknown]
    if len(root.ranks) == 1 and frozen and is_frozen(root.ranks[0], case):
        confidence = _LIKELY
    elif len(root.ranks) == 1 and suspects:
        confidence = _REPORTED
    reported = [observation for rank in root.ranks for observation in ras.observations(rank)]
    host = len(root.ranks) == 1 and (reported or (frozen and is_frozen(root.ranks[0], case)))
    class_ = "hang.host" if host else "hang.rank"
    return _finding(class_, "rank", root, case, confidence, [*facts, *frozen, *reported])


def _one_of(ranks: Sequence[int]) -> str:
    """Return a fragment of a sentence: `{ranks}`, or `one of {ranks}` where there are several."""
    return "{ranks}" if len(ranks) == 1 else "one of {ranks}"


def _death_finding(death: Death, case: Case) -> Finding:
    root = Root(graph.HOST, (death.rank,), ())
    facts = [_FIRST_TO_END] if case.records.world_size > 1 else []
    facts += [_END_UNKNOWN] if death.lost_peer else []
    return _dead_finding([death], root, case, _OPEN if death.lost_peer else _LIKELY, facts)


def _dead_finding(
    deaths: Sequence[Death], root: Root, case: Case, confidence: float, facts: Sequence[Observation]
) -> Finding:
    finding = _finding("dead.rank", "rank", root, case, confidence, [*map(observe_death, deaths), *facts])
    finding = finding.observing(*observe_lost_peers(deaths, case))
    return replace(finding, cause=RAISED if all(death.raised for death in deaths) else "")


def _left_finding(root: Root, case: Case) -> Finding:
    """Return the finding of a rank that ended well while its peers went on."""
    rank = root.ranks[0]
    sentence = "the script of rank {rank} exited without an error at {left_at_ns} while its peers went on"
    left = observe("left-early", sentence, rank=rank, left_at_ns=case.left[rank])
    facts = [with_last_call(left, rank, root, case), *observe_fewer_steps(rank, case)]
    failed = sorted(other for other, death in case.deaths.items() if death.lost_peer)
    if failed:
        sentence = "{failed_ranks} failed only because it was gone"
        facts.append(observe("failed-without-it", sentence, failed_ranks=failed))
    finding = _finding("hang.mismatch", "rank", root, case, _LIKELY if root.operations else _REPORTED, facts)
    steps = dict(case.records.ranks.select("rank", pl.col("last_step").fill_null(-1)).iter_rows())
    fewest = min((step for other, step in steps.items() if other != rank), default=-1)
    return replace(finding, cause=SKIPPED if steps.get(rank, -1) > fewest >= 0 else LEFT)


def _left_findings(case: Case) -> list[Finding]:
    """Return findings of ranks that had left when others lost a peer, where no call shows a missing rank."""
    lost = [death.ended_ns for death in case.deaths.values() if death.lost_peer]
    if not lost or len(lost) < len(case.deaths):
        return []
    left = [rank for rank, last_ns in sorted(case.left.items()) if last_ns <= min(lost) + 2 * NS_PER_S]
    few = 2 * len(left) <= case.records.world_size
    return [_left_finding(Root(graph.HOST, (rank,), ()), case) for rank in left] if few else []


def _missed_findings(case: Case) -> list[Finding]:
    """Return findings of ranks that, by the exception of a peer, did not reach a barrier."""
    findings = []
    for death in case.deaths.values():
        named = _MISSED.search(death.how) if death.lost_peer else None
        for rank in {int(number) for number in named[1].split(",")} - case.deaths.keys() if named else ():
            root = Root(graph.HOST, (rank,), ())
            facts = [*stacks([rank], case), observe_death(death)]
            findings.append(_finding("hang.host", "rank", root, case, _LIKELY, facts))
    return findings


def _standing_findings(case: Case) -> list[Finding]:
    """Return findings of ranks whose peers wait in unrecorded calls, as the stacks of all ranks show.

    Such calls are `monitored_barrier`, and `new_group`, which waits in the job's store.
    """
    ranks = case.records.ranks
    ended = pl.max_horizontal(pl.col("exit_code") + 1, "failed_ns", "left_ns") > 0
    moved_ns = ranks.select(pl.max_horizontal(pl.col("last_step_ns", "last_call_ns").max())).item() or -1
    stood = ranks.filter(~ended & (pl.col("stack") != "") & (pl.col("ended_ns") > moved_ns + MIN_STANDING_NS))
    if moved_ns < 0 or stood.height < case.records.world_size:
        return []
    stands = {rank: stand_of(stack.splitlines()) for rank, stack in stood.select("rank", "stack").iter_rows()}
    waiting = [rank for rank, stand in stands.items() if stand["doing"] in WITH_PEERS]
    missing = [Root(graph.HOST, (rank,), ()) for rank in sorted(stands.keys() - {*waiting}) if waiting]
    return [
        _finding("hang.host", "rank", root, case, _REPORTED, stacks(root.ranks, case), waiting)
        for root in missing
    ]


def _mismatch_finding(mismatch: Mismatch, case: Case) -> Finding:
    root = Root(graph.CYCLE, mismatch.minority, ())
    number = " #{sequence}" if mismatch.sequence >= 0 else ""
    values: dict[str, Value] = {"sequence": mismatch.sequence, "group": mismatch.group}
    said = []
    for place, call in enumerate(dict.fromkeys(call for _, call in sorted(mismatch.calls.items())), 1):
        ranks = sorted(rank for rank, of_rank in mismatch.calls.items() if of_rank == call)
        values |= {f"call_{place}": call, f"call_{place}_ranks": ranks}
        said.append(f"{{call_{place}_ranks}} called {{call_{place}}}")
    facts = [observe("calls-differ", f'call{number} of group "{{group}}": {"; ".join(said)}', **values)]
    sure = len(mismatch.minority) < len(mismatch.calls)
    if mismatch.skipped > 0 and sure:
        facts.append(_observe_skipped_calls(mismatch).then(" there, which explains all later differences"))
    if mismatch.usual:
        return _finding(
            "hang.mismatch", "rank", root, case, *_judge_by_rounds(mismatch, case, facts), mismatch.calls
        )
    departing, seen = unlike_earlier(mismatch, case.records)
    seen += _observe_fewer_updates(mismatch, case)
    facts += seen
    if not sure and departing:
        root, sure, confidence = replace(root, ranks=departing), True, _REPORTED
    else:
        confidence = _SURE if sure else _OPEN
    if not sure:
        sentence = f"no call has a majority: {_one_of(mismatch.minority)} is wrong"
        facts.append(observe("no-majority", sentence, ranks=list(mismatch.minority)))
    finding = _finding("hang.mismatch", "rank", root, case, confidence, facts, mismatch.calls)
    short = [one for one in seen if one.values.get("ranks") == list(root.ranks) and "short" in one.values]
    return replace(finding, cause=SHORT) if short else finding


def _observe_fewer_updates(mismatch: Mismatch, case: Case) -> list[Observation]:
    """Return by how many updates the minority is behind its peers, if by two or more."""
    steps = dict(case.records.ranks.select("rank", "last_step").iter_rows())
    ours = {steps.get(rank, -1) for rank in mismatch.minority}
    theirs = {steps.get(rank, -1) for rank in mismatch.calls if rank not in mismatch.minority}
    if min(ours, default=-1) < 0 or not theirs or max(ours) + 1 >= min(theirs):
        return []
    sentence = "{ranks} had made {updates} updates, the others {peer_updates}: the loop ended {short} short"
    made, others = max(ours) + 1, min(theirs) + 1
    values = {"updates": made, "peer_updates": others, "short": others - made}
    return [observe("fewer-updates", sentence, ranks=list(mismatch.minority), **values)]


def _observe_skipped_calls(mismatch: Mismatch) -> Observation:
    noun = "call" if mismatch.skipped == 1 else "calls"
    sentence = f"{{ranks}} skipped {{skipped}} {noun}"
    return observe("left-calls-out", sentence, ranks=list(mismatch.minority), skipped=mismatch.skipped)


def _judge_by_rounds(
    mismatch: Mismatch, case: Case, facts: Sequence[Observation]
) -> tuple[float, list[Observation]]:
    """Return the confidence in which rank departed from the calls of earlier rounds, and the evidence."""
    lost = list(mismatch.lost)
    ended = [observe_death(case.deaths[rank]) for rank in lost if rank in case.deaths]
    if mismatch.minority == mismatch.lost:
        as_before = observe(
            "called-as-before",
            "they called the same in earlier rounds; a library ended {ranks} within its call: it called "
            "something else, which takes less than they sent",
            ranks=lost,
        )
        sentence = "not known: what {ranks} called there; it ended before that was recorded"
        unknown = observe("last-call-unknown", sentence, ranks=lost)
        return _REPORTED, [*facts, as_before, *ended, *stacks(lost, case), unknown]
    sentence = "in earlier rounds all ranks called {call} there"
    usual = [observe("rounds-before", sentence, call=mismatch.usual)]
    if mismatch.skipped > 0:
        usual.append(_observe_skipped_calls(mismatch).then(": what it called comes next in a round"))
    sentence = "{ranks} received more than it expected, and is not at fault"
    return _LIKELY, [*facts, *usual, observe("got-more", sentence, ranks=lost), *ended]


def _finding(
    class_: str,
    kind: str,
    root: Root,
    case: Case,
    confidence: float,
    facts: Sequence[Observation],
    peers: Iterable[int] = (),
) -> Finding:
    """Return a finding with the common evidence: operations, the chain, the stacks of both sides, and doubts.

    Args:
        peers: ranks of the other side, where the root has no operation.
    """
    kinds = {(tuple(o.unfinished), o.absent, o.unknown, o.key): o for o in reversed(root.operations)}
    most = MAX_OF_DEADLOCK if root.kind == graph.CYCLE else MAX_OPERATIONS
    calls = [observe_attendance(operation) for operation in [*kinds.values()][: -most - 1 : -1]]
    more = len(root.operations) - len(calls)
    if more > 0:
        calls[-1] = calls[-1].then("; and {more} more like this", more=more)
    victims = graph.victims_of(root, case.waits) if root.operations else []
    waiting = {rank for operation in root.operations for rank in operation.unfinished}
    if class_.startswith("hang."):
        at_fault = [] if any(one.kind == MAIN_THREAD for one in facts) else stacks(root.ranks, case)
        of_peers = stacks(sorted({*(waiting or peers)} - {*root.ranks}), case)
        facts = [*facts, *at_fault[:MAX_SIDES], *of_peers[:MAX_SIDES]]
    blocked = observe("blocked", "blocked by this: {blocked_ranks}", blocked_ranks=victims)
    observations = (
        *facts[:1],
        *calls,
        *facts[1:],
        *observe_chain(root, victims, case),
        *([blocked] if victims else []),
        *observe_doubts(root, case),
    )
    return Finding(
        class_,
        kind if len(root.ranks) == 1 or kind != "rank" else "ranks",
        _component(root, kind),
        root.ranks,
        1.0,
        round(confidence, 3),
        0.0,
        observations,
        place=place_of(root.ranks, observations),
        waited_ns=max(case.waited_ns(root), 0),
    )


def _component(root: Root, kind: str) -> str:
    if kind == "rank":
        return numbers_in_words(root.ranks)
    operation = root.operations[0]
    if operation.pair:
        return f"{operation.pair[0]}->{operation.pair[1]}"
    return f"{operation.group} ({numbers_in_words(operation.members)})"


# Merging hangs that a watcher saw with those that the records show.


def merge_watched(hangs: Sequence[Finding], run: Path, steps: pl.DataFrame) -> list[Finding]:
    """Merge the hangs of a run's findings log with those that its records show.

    Returns:
        The hangs of the log, or `hangs` where their first is a hang of higher confidence; each hang in the
        log gains when it was seen, and where the threads of its ranks were.
    """
    last_ns = (steps["start_ns"] + steps["duration_ns"]).max() if steps.height else -1
    watched = []  # hangs and deaths that were not over before the job was
    for notice in logged_findings(run):
        over = notice.over_ns > 0 and notice.why != JOB_ENDED
        moved = isinstance(last_ns, int) and last_ns > notice.time_ns + NS_PER_S
        if notice.class_.startswith(("hang.", "dead.")) and not over and not moved:
            watched.append((notice, finding_of(notice)))
    if not watched:
        return list(hangs)
    surest = max(finding.confidence for _, finding in watched)
    if hangs and hangs[0].confidence > surest and hangs[0].class_.startswith("hang."):
        seen = {finding.ranks: notice for notice, finding in watched}
        return [_confirmed(hang, seen[hang.ranks], run) if hang.ranks in seen else hang for hang in hangs]
    return [_confirmed(finding, notice, run) for notice, finding in watched]


def _confirmed(finding: Finding, notice: LoggedFinding, run: Path) -> Finding:
    """Add to a finding when it was seen, and where the threads of its ranks were then."""
    kept = run / FOLDER / f"hang-{notice.number}"
    seen = observe(
        "seen-by-watch", "`dpro watch` saw it at {time}, while the job hung",
        time=time_of_day(notice.time_ns), seen_at_ns=notice.time_ns,
    )  # fmt: skip
    if kept.is_dir():
        seen = seen.then("; dumps and stacks from then are in {folder}", folder=f"{FOLDER}/{kept.name}")
    shown = [(one.kind, one.values) for one in finding.observations]
    threads = [
        one
        for one in _read_threads(kept / "stacks.json", finding.ranks)
        if (one.kind, one.values) not in shown
    ]
    place = finding.place or place_of(finding.ranks, threads)
    return replace(finding.observing(seen, *threads), place=place)


def _read_threads(path: Path, ranks: Sequence[int]) -> Iterator[Observation]:
    """Yield where the main threads of some ranks were, and which of these ranks did not answer."""
    try:
        answers = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for answer in answers.get("ranks", ()):
        frames: list[dict[str, Any]] = next((thread["frames"] for thread in answer.get("threads", ())), [])
        if answer.get("rank") in ranks and frames:
            calls = [f"{frame['file']}:{frame['line']} {frame['function']}" for frame in frames]
            yield main_threads([answer["rank"]], calls, "was")
    for rank, why in answers.get("why_silent", {}).items():
        if int(rank) in ranks:
            sentence = "rank {rank} did not report where its threads were: {why}"
            yield observe("silent-threads", sentence, rank=int(rank), why=why)
