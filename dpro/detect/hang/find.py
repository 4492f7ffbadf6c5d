"""What hangs in a run: findings, none where nothing does.

In: `Records`, and the findings log of the run. Out: `Finding`s with their evidence. A rank is named
as the cause by its own calls and those of its peers; ranks that wait for it are listed as such. What a
missing dump leaves open is reported with the dump that would decide it. The records of a job that was ended
may have lost what it waited for: a call that fails counts as finished. So a hang in the log that was not over
before the job ended decides, unless the records are surer.

Of ranks whose call differs from that of their peers in operation, size or element type, at the same place,
the first such place of each group counts, and the ranks in the minority. What may differ between ranks (the
sizes of an all-to-all, of a gather) is not compared.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
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
    each_frozen,
    examine,
    has_left,
    is_frozen,
    without_dump,
)
from dpro.detect.hang.evidence import (
    DEADLOCK,
    LEFT,
    RAISED,
    SKIPPED,
    attendance,
    chain,
    death_of,
    doubts,
    fewer_steps,
    heartbeat,
    last_state,
    main_thread,
    no_dump,
    place_of,
    stack,
    stood_still,
    with_last_call,
)
from dpro.detect.hang.operations import Operation
from dpro.detect.hang.records import UNFINISHED, Records
from dpro.detect.hang.waits import Root
from dpro.detect.observations import Observation, Value, observe
from dpro.units import NS_PER_S
from dpro.words import numbers_in_words

MAX_OPERATIONS = 2  # that are listed for each finding: ranks may wait for one rank in many operations
MAX_OF_DEADLOCK = 6  # the same of ranks that wait for each other

_MISSED = re.compile(r"Ranks? (\d+(?:, ?\d+)*) failed to pass monitoredBarrier")  # of gloo

# Confidences: all dumps show it; all but some; NCCL's RAS reports it where dumps do not; it is one of two.
_SURE, _LIKELY, _REPORTED, _OPEN = 0.98, 0.9, 0.75, 0.5

_STARTS_UNKNOWN = observe(
    "starts-unknown",
    "not known: whether the GPU of one of them never came to it, as a kernel before it does not end, or the "
    "network or the group is at fault; --nccl-timing records that",
)
_FIRST_TO_END = observe("first-to-end", "no other rank ended before it")
_END_UNKNOWN = observe(
    "failed-end-unknown",
    "no rank is seen to have ended of its own: which end of the connection failed is not known",
)


def find_hangs(records: Records) -> list[Finding]:
    """Find the causes of a hang, and ranks that are gone.

    Returns:
        One finding for each first cause, surest first; none if nothing has been unfinished for long.
    """
    return find_causes(examine(records))


def find_causes(case: Case) -> list[Finding]:
    """Find the causes of a hang in what is known of a job; returns as `find_hangs`."""
    waits, deaths = case.waits, case.deaths
    roots = [root for root in case.roots if not _lost_peers(root, case)]
    differences = [*find_mismatches(case.records), *message_mismatches(waits.operations)]
    differences = differences or unlike_before(case.records)
    findings = []
    if differences and (roots or deaths):
        touched = {rank for mismatch in differences for rank in mismatch.calls}
        findings = [_mismatch_finding(mismatch, case) for mismatch in differences]
        roots = [root for root in roots if not touched & {*root.ranks, *graph.victims_of(root, waits)}]
    findings += [_root_finding(root, case) for root in roots]
    findings = [_with_doubt(finding, findings) for finding in findings]
    findings += _further_suspects(roots, findings, case)
    if not findings:
        findings = (
            _left_findings(case)
            or _missed_findings(case)
            or [_death_finding(death, case) for death in deaths.values() if death.first]
        )
    return sorted(findings, key=lambda finding: (-finding.confidence, finding.ranks))


def _lost_peers(root: Root, case: Case) -> bool:
    """Return whether the ranks that all wait for are gone because they lost a peer."""
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
    """Return findings of ranks without a dump that are waited for, besides a rank that is named."""
    if all(root.kind != graph.HOST for root in roots):
        return []
    named = ranks_of(findings)
    places = tuple(place for place in case.waits.operations if place.unknown - named)
    ranks = sorted(frozenset().union(*(place.unknown for place in places)) - named)
    if not ranks:
        return []
    alone = [place for place in places if not place.absent]  # no other rank is missing there
    root = Root(graph.UNKNOWN, tuple(ranks), tuple(alone) or places)
    frozen = [frozen_root for frozen_root in each_frozen(root, case) if is_frozen(frozen_root.ranks[0], case)]
    return [_unknown_finding(frozen_root, case) for frozen_root in frozen] or [_suspect_finding(root, case)]


def _root_finding(root: Root, case: Case) -> Finding:
    if has_left(root, case):
        return _left_finding(root, case)
    deaths = deaths_of(root, case) if root.kind in (graph.HOST, graph.UNKNOWN) else []
    if deaths:
        return _dead_finding(deaths, root, case, 0.99, stood_still(deaths, root, case))
    if root.kind == graph.HOST:
        return _host_finding(root, case)
    if root.kind == graph.DEVICE:
        return _device_finding(root, case)
    if root.kind == graph.COMM:
        return _comm_finding(root, case)
    if root.kind == graph.CYCLE:
        return _cycle_finding(root, case)
    return _unknown_finding(root, case)


def _host_finding(root: Root, case: Case) -> Finding:
    rank = root.ranks[0]
    idle = observe("nothing-unfinished", "rank {rank} has nothing unfinished of its own", rank=rank)
    facts = [with_last_call(idle, rank, root, case), *heartbeat(rank, case), *stack(rank, case)]
    facts += case.records.ras.observations(rank)
    confidence = _LIKELY if without_dump(case) else _SURE
    return _finding("hang.host", "rank", root, case, confidence, facts)


def _device_finding(root: Root, case: Case) -> Finding:
    operation = root.operations[0]
    ranks = list(root.ranks)
    if operation.finished:
        sentence = "{ranks} came to it, too, but did not finish what its peers finished"
        facts = [observe("finished-by-peers", sentence, ranks=ranks)]
    else:
        sentence = "{ranks} came to it, too, but its GPU never started what runs on its peers"
        peers = sorted(rank for rank in operation.unfinished if rank not in root.ranks)
        facts = [
            observe("never-started", sentence, ranks=ranks),
            observe("runs-on-peers", "it runs on {peer_ranks}", peer_ranks=peers),
        ]
    return _finding("hang.device", "rank", root, case, _LIKELY / len(root.ranks), facts)


def _comm_finding(root: Root, case: Case) -> Finding:
    operation = root.operations[0]
    fact = observe("all-came", "all its ranks came and none finished")
    if operation.finished:
        sentence = "all its ranks came, and only {finished_ranks} finished"
        fact = observe("all-came", sentence, finished_ranks=sorted(operation.finished))
    kind = "pair" if operation.pair else "group"
    if case.records.starts_unknown and not operation.finished:
        return _finding("hang.comm", kind, root, case, _OPEN, [fact, _STARTS_UNKNOWN])
    fact = fact.then(
        "; nothing that one of them has to finish first is open: the network or the group itself"
    )
    return _finding("hang.comm", kind, root, case, _LIKELY, [fact])


def _cycle_finding(root: Root, case: Case) -> Finding:
    minority = _out_of_order(root) or odd_calls(root.operations, case.records)
    facts = [
        observe(
            "deadlock",
            "{ranks} wait for each other, which is a deadlock: no hardware causes that; the order of the "
            "calls differs between them",
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
    frozen = [observation for rank in root.ranks for observation in heartbeat(rank, case)]
    unknown = observe(
        "unknown-whether-stuck",
        f"not known: whether the host code of {_one_of(root.ranks)} is stuck, its GPU does not answer, its "
        "process is gone, or it waits for something in turn; a dump of {ranks}, taken now, would settle it",
        ranks=list(root.ranks),
    )
    facts = [no_dump(root.ranks, case), *last_state(root.ranks, case), unknown]
    if len(root.ranks) == 1 and frozen and is_frozen(root.ranks[0], case):
        confidence = _LIKELY
    elif len(root.ranks) == 1 and suspects:
        confidence = _REPORTED
    reported = [observation for rank in root.ranks for observation in ras.observations(rank)]
    host = len(root.ranks) == 1 and (reported or (frozen and is_frozen(root.ranks[0], case)))
    class_ = "hang.host" if host else "hang.rank"
    return _finding(class_, "rank", root, case, confidence, [*facts, *frozen, *reported])


def _suspect_finding(root: Root, case: Case) -> Finding:
    """Return a finding of ranks that may be stuck, too, or may wait for a rank that is."""
    fact = no_dump(root.ranks, case).then(
        f", and others wait for {_one_of(root.ranks)}, too: it may be stuck as well, or wait for the rank "
        "that is; a dump of {ranks} would distinguish that",
        ranks=list(root.ranks),
    )
    return _finding("hang.rank", "rank", root, case, _OPEN / 2 / len(root.ranks), [fact])


def _one_of(ranks: Sequence[int]) -> str:
    """A part of a sentence: `ranks`, or one of them where they are several."""
    return "{ranks}" if len(ranks) == 1 else "one of {ranks}"


def _death_finding(death: Death, case: Case) -> Finding:
    root = Root(graph.HOST, (death.rank,), ())
    facts = [_FIRST_TO_END] if case.records.world_size > 1 else []
    facts += [_END_UNKNOWN] if death.lost_peer else []
    return _dead_finding([death], root, case, _OPEN if death.lost_peer else _LIKELY, facts)


def _dead_finding(
    deaths: Sequence[Death], root: Root, case: Case, confidence: float, facts: Sequence[Observation]
) -> Finding:
    finding = _finding("dead.rank", "rank", root, case, confidence, [*map(death_of, deaths), *facts])
    return replace(finding, cause=RAISED if all(death.raised for death in deaths) else "")


def _left_finding(root: Root, case: Case) -> Finding:
    """Return the finding of a rank that ended well while its peers went on."""
    rank = root.ranks[0]
    sentence = "the script of rank {rank} ended well at {left_at_ns} while its peers went on"
    left = observe("left-early", sentence, rank=rank, left_at_ns=case.left[rank])
    facts = [with_last_call(left, rank, root, case), *fewer_steps(rank, case)]
    failed = sorted(other for other, death in case.deaths.items() if death.lost_peer)
    if failed:
        sentence = "{failed_ranks} failed because it was gone, and is not at fault"
        facts.append(observe("failed-without-it", sentence, failed_ranks=failed))
    finding = _finding("hang.mismatch", "rank", root, case, _LIKELY if root.operations else _REPORTED, facts)
    steps = dict(case.records.ranks.select("rank", pl.col("last_step").fill_null(-1)).iter_rows())
    fewest = min((step for other, step in steps.items() if other != rank), default=-1)
    return replace(finding, cause=SKIPPED if steps.get(rank, -1) > fewest >= 0 else LEFT)


def _left_findings(case: Case) -> list[Finding]:
    """Return findings of ranks that had left when others lost a peer; no call shows which was missing."""
    lost = [death.ended_ns for death in case.deaths.values() if death.lost_peer]
    if not lost or len(lost) < len(case.deaths):
        return []
    left = [rank for rank, last_ns in sorted(case.left.items()) if last_ns <= min(lost) + 2 * NS_PER_S]
    few = 2 * len(left) <= case.records.world_size
    return [_left_finding(Root(graph.HOST, (rank,), ()), case) for rank in left] if few else []


def _missed_findings(case: Case) -> list[Finding]:
    """Return findings of ranks that the exception of a peer names as not come to a barrier."""
    findings = []
    for death in case.deaths.values():
        named = _MISSED.search(death.how) if death.lost_peer else None
        for rank in {int(number) for number in named[1].split(",")} - case.deaths.keys() if named else ():
            root = Root(graph.HOST, (rank,), ())
            facts = [*stack(rank, case), death_of(death)]
            findings.append(_finding("hang.host", "rank", root, case, _LIKELY, facts))
    return findings


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
        facts.append(_left_out(mismatch).then(" there: that explains all later ones"))
    if mismatch.usual:
        return _finding("hang.mismatch", "rank", root, case, *_by_rounds(mismatch, case, facts))
    if not sure:
        sentence = f"no call is that of a majority: {_one_of(mismatch.minority)} is wrong"
        facts.append(observe("no-majority", sentence, ranks=list(mismatch.minority)))
    confidence = _SURE if sure else _OPEN
    return _finding("hang.mismatch", "rank", root, case, confidence, facts)


def _left_out(mismatch: Mismatch) -> Observation:
    """Return how many calls the ranks that differ left out."""
    noun = "call" if mismatch.skipped == 1 else "calls"
    sentence = f"{{ranks}} left out {{skipped}} {noun}"
    return observe("left-calls-out", sentence, ranks=list(mismatch.minority), skipped=mismatch.skipped)


def _by_rounds(
    mismatch: Mismatch, case: Case, facts: Sequence[Observation]
) -> tuple[float, list[Observation]]:
    """Return how sure it is which rank departed from the calls of the rounds before, and why."""
    lost = list(mismatch.lost)
    ended = [death_of(case.deaths[rank]) for rank in lost if rank in case.deaths]
    if mismatch.minority == mismatch.lost:
        as_before = observe(
            "called-as-before",
            "that is what they called in the rounds before, too; a library ended {ranks} within its call: it "
            "called something else, with less than they sent",
            ranks=lost,
        )
        sentence = "not known: what {ranks} called there, which was not recorded any more"
        unknown = observe("last-call-unknown", sentence, ranks=lost)
        stacks = [observation for rank in lost for observation in stack(rank, case)]
        return _REPORTED, [*facts, as_before, *ended, *stacks, unknown]
    sentence = "in the rounds before, all ranks called {call} there"
    usual = [observe("rounds-before", sentence, call=mismatch.usual)]
    if mismatch.skipped > 0:
        usual.append(_left_out(mismatch).then(": what it called comes next in a round"))
    sentence = "{ranks} got more than it expected, and is not at fault"
    return _LIKELY, [*facts, *usual, observe("got-more", sentence, ranks=lost), *ended]


def _finding(
    class_: str, kind: str, root: Root, case: Case, confidence: float, facts: Sequence[Observation]
) -> Finding:
    """A finding with the evidence that all have: operations, the chain, the victims, and the doubts."""
    kinds = {(tuple(o.unfinished), o.absent, o.unknown, o.key): o for o in reversed(root.operations)}
    most = MAX_OF_DEADLOCK if root.kind == graph.CYCLE else MAX_OPERATIONS
    calls = [attendance(operation) for operation in [*kinds.values()][: -most - 1 : -1]]
    more = len(root.operations) - len(calls)
    if more > 0:
        calls[-1] = calls[-1].then("; and {more} more like it", more=more)
    victims = graph.victims_of(root, case.waits) if root.operations else []
    blocked = observe("blocked", "blocked by this: {blocked_ranks}", blocked_ranks=victims)
    observations = (
        *facts[:1],
        *calls,
        *facts[1:],
        *chain(root, victims, case),
        *([blocked] if victims else []),
        *doubts(root, case),
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


# Hangs that a watcher saw, merged with those that the records show.


def merge_watched(hangs: Sequence[Finding], run: Path, steps: pl.DataFrame) -> list[Finding]:
    """Merge the hangs of a run's findings log with those that its records show.

    Returns:
        The hangs of the log, or `hangs` where their first is a hang of higher confidence; each that is in the
        log says when it was seen, and where the threads of its ranks were.
    """
    watched = list(_still_hung(run, steps))
    if not watched:
        return list(hangs)
    surest = max(finding.confidence for _, finding in watched)
    if hangs and hangs[0].confidence > surest and hangs[0].class_.startswith("hang."):
        seen = {finding.ranks: notice for notice, finding in watched}
        return [_confirmed(hang, seen[hang.ranks], run) if hang.ranks in seen else hang for hang in hangs]
    return [_confirmed(finding, notice, run) for notice, finding in watched]


def _still_hung(run: Path, steps: pl.DataFrame) -> Iterator[tuple[LoggedFinding, Finding]]:
    """Yield hangs that were seen and were not over before the job was."""
    last_ns = (steps["start_ns"] + steps["duration_ns"]).max() if steps.height else -1
    for notice in logged_findings(run):
        over = notice.over_ns > 0 and notice.why != JOB_ENDED
        moved = isinstance(last_ns, int) and last_ns > notice.time_ns + NS_PER_S
        if notice.class_.startswith(("hang.", "dead.")) and not over and not moved:
            yield notice, finding_of(notice)


def _confirmed(finding: Finding, notice: LoggedFinding, run: Path) -> Finding:
    """Return a finding with when it was seen, and where the threads of its ranks were then."""
    kept = run / FOLDER / f"hang-{notice.number}"
    seen = observe(
        "seen-by-watch", "`dpro watch` saw it at {time}, while the job hung",
        time=time_of_day(notice.time_ns), seen_at_ns=notice.time_ns,
    )  # fmt: skip
    if kept.is_dir():
        seen = seen.then("; dumps and stacks of then are in {folder}", folder=f"{FOLDER}/{kept.name}")
    shown = [(one.kind, one.values) for one in finding.observations]
    threads = [
        one for one in _threads(kept / "stacks.json", finding.ranks) if (one.kind, one.values) not in shown
    ]
    place = finding.place or place_of(finding.ranks, threads)
    return replace(finding.observing(seen, *threads), place=place)


def _threads(path: Path, ranks: Sequence[int]) -> Iterator[Observation]:
    """Yield where the main threads of some ranks were, as far as these answered."""
    try:
        answers = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for answer in answers.get("ranks", ()):
        frames: list[dict[str, Any]] = next((thread["frames"] for thread in answer.get("threads", ())), [])
        if answer.get("rank") in ranks and frames:
            calls = [f"{frame['file']}:{frame['line']} {frame['function']}" for frame in frames]
            yield main_thread(answer["rank"], calls, "was")
    for rank, why in answers.get("why_silent", {}).items():
        if int(rank) in ranks:
            sentence = "rank {rank} did not say where its threads were: {why}"
            yield observe("silent-threads", sentence, rank=int(rank), why=why)


_SAME_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
# Uneven parts are legal here, as long as the operation finishes.
_MAY_BE_UNEVEN = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Mismatch:
    """Calls of one group and number that differ.

    Attributes:
        key: the group's name and ranks.
        sequence: number within the group; of a message among those of the pair, -1 where unknown.
        calls: what each rank called, in words, by rank.
        minority: ranks that differ from more than half of the ranks; all ranks without such a majority.
        skipped: number of calls that the minority left out, if that explains all later differences; -1 if
            it does not, or that is not known.
        usual: what all ranks called at this place of the rounds before, in words, where that decides.
        lost: ranks that a library ended there, and whose last calls are not recorded.
    """

    group: str
    key: str
    sequence: int
    calls: Mapping[int, str]
    minority: tuple[int, ...]
    skipped: int = -1
    usual: str = ""
    lost: tuple[int, ...] = ()


def find_mismatches(records: Records) -> list[Mismatch]:
    """Return the first place at which each group's ranks differ, in order of the groups' names."""
    calls = records.calls.filter(~pl.col("p2p") & (pl.col("sequence") >= 0))
    compared = _first_parts(calls.join(_uneven_places(calls), on=["key", "sequence"]))
    size = pl.when(pl.col("op").is_in(_SAME_SIZE))
    compared = compared.with_columns(
        size_in=size.then("bytes_in").otherwise(-1),
        size_out=size.then("bytes_out").otherwise(-1),
        open=pl.col("state").is_in(UNFINISHED),
    )
    differ = [_differs("op", ""), _differs("dtype", "")]
    uneven = pl.any_horizontal(_differs("size_in", -1), _differs("size_out", -1))
    legal = pl.col("op").first().is_in(_MAY_BE_UNEVEN) & ~pl.col("open").any()
    places = (
        compared.group_by("key", "sequence")
        .agg(bad=pl.any_horizontal(*differ) | (uneven & ~legal))
        .filter("bad")
        .group_by("key")
        .agg(pl.col("sequence").min())
    )
    rows = compared.join(places, on=["key", "sequence"]).sort("key", "rank")
    mismatches = []
    for (key,), part in rows.group_by("key", maintain_order=True):
        whole = list(part.iter_rows(named=True))
        words = {
            row["rank"]: describe(row["op"], row["bytes_in"], row["bytes_out"], row["dtype"]) for row in whole
        }
        minority = _minority({row["rank"]: _signature(row) for row in whole})
        sequence = int(part["sequence"][0])
        skipped = _skipped(_first_parts(calls.filter(pl.col("key") == str(key))), sequence, minority)
        mismatches.append(Mismatch(part["group"][0], str(key), sequence, words, minority, skipped))
    return mismatches


def _first_parts(calls: pl.DataFrame) -> pl.DataFrame:
    """Return one call per rank and number: the first part of a coalesced call."""
    return calls.sort("order").unique(["key", "sequence", "rank"], keep="first", maintain_order=True)


def _uneven_places(calls: pl.DataFrame) -> pl.DataFrame:
    """Return `key` and `sequence` of all places where anything compared differs: few of perhaps millions."""
    size = pl.when(pl.col("op").is_in(_SAME_SIZE))
    compared = calls.select(
        "key",
        "sequence",
        pl.col("op", "dtype").cast(pl.Categorical).to_physical(),
        size_in=size.then("bytes_in").otherwise(-1),
        size_out=size.then("bytes_out").otherwise(-1),
    )
    same = [pl.col(name).min() == pl.col(name).max() for name in ("op", "dtype", "size_in", "size_out")]
    equal = compared.group_by("key", "sequence").agg(equal=pl.all_horizontal(same))
    return equal.filter(~pl.col("equal")).select("key", "sequence")


def _differs(name: str, unknown: str | int) -> pl.Expr:
    values = pl.col(name).filter(pl.col(name) != pl.lit(unknown))
    return values.n_unique() > 1


def _signature(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what must be the same on all ranks."""
    sizes = (row["bytes_in"], row["bytes_out"]) if row["op"] in _SAME_SIZE else ()
    return (row["op"], row["dtype"], *sizes)


def describe(op: str, bytes_in: int, bytes_out: int, dtype: str) -> str:
    """Return a call in words: `all_gather of 40 to 160 bytes of float32`.

    Args:
        bytes_in, bytes_out: sizes, -1 unknown.
        dtype: type of the elements, empty if unknown.
    """
    sizes = [f"{size:,}" for size in dict.fromkeys((bytes_in, bytes_out)) if size >= 0]
    size = f" of {' to '.join(sizes)} bytes" if sizes else ""
    return op + size + (f" of {dtype}" if dtype else "")


def _minority(signatures: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks whose call is not that of more than half; all ranks where no call has that majority."""
    (most, count), *_ = Counter(signatures.values()).most_common()
    if 2 * count <= len(signatures):
        return tuple(sorted(signatures))
    return tuple(sorted(rank for rank, what in signatures.items() if what != most))


def _skipped(calls: pl.DataFrame, sequence: int, minority: Sequence[int]) -> int:
    """Return how many calls, up to 3, the minority left out, if that explains its later calls; else -1."""
    others = calls.filter(~pl.col("rank").is_in(list(minority)) & (pl.col("sequence") >= sequence))
    calls_of_minority = calls.filter(pl.col("rank").is_in(list(minority)) & (pl.col("sequence") >= sequence))
    if others.is_empty() or calls_of_minority.is_empty():
        return -1
    by_number = [
        {row[0]: row[1:] for row in part.select("sequence", "op", "bytes_in", "dtype").iter_rows()}
        for part in (others, calls_of_minority)
    ]
    theirs, ours = by_number
    for count in range(1, 4):
        compared = [(ours[n], theirs[n + count]) for n in ours if n + count in theirs]
        if compared and all(call == other for call, other in compared):
            return count
    return -1


def odd_calls(operations: Sequence[Operation], records: Records) -> tuple[int, ...]:
    """Return the ranks whose unfinished collective is of a kind that their group has never completed.

    Returns:
        Those ranks if others wait in collectives that their group has called before; none otherwise.
    """
    odd: set[int] = set()
    usual: set[int] = set()
    for operation in operations:
        if operation.pair:
            continue
        earlier = records.calls.filter((pl.col("key") == operation.key) & (pl.col("state") == "completed"))
        kinds = set(earlier.select("op", "dtype", "bytes_in").iter_rows())
        for rank, call in operation.unfinished.items():
            new = call.op in _SAME_SIZE and kinds and (call.op, call.dtype, call.bytes) not in kinds
            (odd if new else usual).add(rank)
    return tuple(sorted(odd)) if usual - odd else ()


# Calls that are unlike those of the rounds before. Where a member gets more than it expects, gloo ends its
# process at once, and what it called last is not recorded. A training loop repeats its calls: the rank that
# departs from them is at fault; where none of those whose calls are known does, it is one that was ended.

ROUNDS = 3  # that have to be equal before a call that differs counts
MAX_PERIOD = 2000  # calls of a round
IN_A_CALL = "torch/distributed/"  # part of the paths of a stack that is within a call
Call = tuple[Any, ...]


def unlike_before(records: Records) -> list[Mismatch]:
    """Return calls of groups of which a library ended a member, where a rank departs from the rounds before.

    Nothing is returned of a group whose calls never repeated, or all of whose known ranks depart equally.
    """
    aborted = records.ranks.filter(pl.col("exit_signal") == int(signal.SIGABRT))
    calls = records.calls.filter(~pl.col("p2p") & (pl.col("sequence") >= 0))
    groups = records.members.join(aborted.select("rank"), on="rank", how="semi")["key"].unique().sort()
    mismatches = (
        _departing(key, _first_parts(calls.filter(pl.col("key") == key)), aborted, records) for key in groups
    )
    return list(filter(None, mismatches))


def _departing(key: str, calls: pl.DataFrame, aborted: pl.DataFrame, records: Records) -> Mismatch | None:
    members = set(records.members.filter(pl.col("key") == key)["rank"].to_list())
    gone = members & set(aborted["rank"].to_list())
    others = members - gone
    rows = {rank: list(calls.filter(pl.col("rank") == rank).iter_rows(named=True)) for rank in others}
    rounds = {rank: _round_of(rows[rank]) for rank in others}
    if not others or not all(rounds.values()):
        return None
    departures = {rank: place for rank, (place, _) in rounds.items() if place >= 0}  # type: ignore[misc]
    last = {rank: rows[rank][departures.get(rank, -1)] for rank in others}
    group = calls["group"][0]
    if not departures:
        return _ended_in_a_call(key, group, gone, last, records)
    if len({_signature(last[rank]) for rank in departures}) == 1 and len(departures) == len(others) > 1:
        return None  # all called something else, as at the end of an epoch
    first = min(departures, key=lambda rank: last[rank]["sequence"])
    place, period = rounds[first]  # type: ignore[misc]
    usual = rows[first][place - period]
    left_out = [
        count
        for count in range(1, min(4, period))
        if _signature(rows[first][place - period + count]) == _signature(last[first])
    ]
    words = {first: _in_words(last[first])}
    minority = tuple(sorted(departures))
    return Mismatch(
        group, key, last[first]["sequence"], words, minority, next(iter(left_out), -1), _in_words(usual),
        tuple(sorted(gone)),
    )  # fmt: skip


def _ended_in_a_call(
    key: str, group: str, gone: set[int], last: Mapping[int, Mapping[str, Any]], records: Records
) -> Mismatch | None:
    """The mismatch of ranks that were ended within a call while all others called as in the rounds before."""
    stacks = dict(
        records.ranks.filter(pl.col("rank").is_in(sorted(gone))).select("rank", "stack").iter_rows()
    )
    within = tuple(
        rank for rank in sorted(gone) if IN_A_CALL in "".join(stacks.get(rank, "").splitlines()[:4])
    )
    if len(within) != 1:
        return None
    latest = max(last.values(), key=lambda row: row["sequence"])
    words = {rank: _in_words(row) for rank, row in sorted(last.items())}
    return Mismatch(group, key, latest["sequence"], words, within, -1, _in_words(latest), within)


def _in_words(row: Mapping[str, Any]) -> str:
    return describe(row["op"], row["bytes_in"], row["bytes_out"], row["dtype"])


def _round_of(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Where a rank's calls depart from their rounds, and how many calls a round has; None without rounds.

    Args:
        rows: calls of a rank in one group, by number; only those since the last gap count, and of these
            half at most come before the rounds: a job begins with other calls.

    Returns:
        The place of the first call that differs, -1 where none does; it is in the last round.
    """
    numbers = [row["sequence"] for row in rows]
    gaps = [place for place in range(1, len(rows)) if numbers[place] != numbers[place - 1] + 1]
    begin = gaps[-1] if gaps else 0
    names: dict[Call, int] = {}
    calls = np.array([names.setdefault(_signature(row), len(names)) for row in rows[begin:]], np.int64)
    departs = None
    for period in range(1, min(len(calls) // ROUNDS, MAX_PERIOD) + 1):
        differs = np.flatnonzero(calls[period:] != calls[:-period]) + period
        early, late = np.split(differs, [np.searchsorted(differs, len(calls) - period)])
        regular = int(early[-1]) + 1 - period if early.size else 0
        end = int(late[0]) if late.size else len(calls)
        if 2 * regular > len(calls) or end - regular < ROUNDS * period:
            continue
        if not late.size:
            return -1, period
        departs = departs or (begin + end, period)
    return departs


def message_mismatches(operations: Sequence[Operation]) -> list[Mismatch]:
    """Return the messages that both ranks of a pair wait in, where sizes or element types differ."""
    mismatches = []
    for operation in operations:
        if operation.pair is None or len(operation.unfinished) < 2:
            continue
        words = {
            rank: describe(c.op, c.bytes, c.bytes, c.dtype)
            for rank, c in sorted(operation.unfinished.items())
        }
        calls = list(operation.unfinished.values())
        sizes = {call.bytes for call in calls if call.bytes >= 0}
        dtypes = {call.dtype for call in calls if call.dtype}
        if len(sizes) > 1 or len(dtypes) > 1:
            ranks = tuple(sorted(words))
            mismatches.append(Mismatch(operation.group, operation.key, operation.sequence, words, ranks))
    return mismatches
