"""Evidence of hangs: ranks, operations, chains of waiting, and facts about ranks at fault.

Takes a `Case` and ranks. Returns observations, none where nothing is known, each naming the calls, dumps,
threads or exits that it is derived from; and in words, what a finding means and what to do about it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import polars as pl

from dpro.detect.findings import CodeLocation, Finding
from dpro.detect.hang import waits as graph
from dpro.detect.hang.case import MIN_WAIT_NS, OF_ITS_OWN, Case, Death, is_frozen
from dpro.detect.hang.memory import CAUSE, GREW, OF_HOST, advice_on, filled_by
from dpro.detect.hang.mismatches import describe
from dpro.detect.hang.operations import Operation
from dpro.detect.hang.records import UNFINISHED
from dpro.detect.hang.stacks import (
    BUFFERS,
    GROUP,
    MAIN_THREAD,
    doing_of,
    doings_of,
    main_threads,
    own_call,
    remedy_of,
    sides_in_words,
    sides_of,
    source_line,
    stand_of,
)
from dpro.detect.hang.waits import Root
from dpro.detect.observations import Observation, Value, in_words, observe
from dpro.schema import RECORDER
from dpro.units import DATED_NS
from dpro.words import counted, one_of_ranks

_VERDICTS = {
    "hang.host": "{who}: {its} host code has not reached the call that {its} peers wait in",
    "hang.device": "{who}: {its} GPU never completed {call}",
    "hang.rank": "{who}: it stopped taking part; the records do not show whether its host or its GPU hangs",
    "hang.comm": "{who}: all ranks entered and none finishes; the network or the group itself is at fault",
    "hang.mismatch": "{who}: {its} calls differ from those of the others: a bug in the program, not a "
    "hardware fault",
    "dead.rank": "{who}: the process is gone",
}
_ADVICE = {
    "hang.host": "see what {who} {does}{in_place}{look}{where}",
    "hang.device": "check the GPU of {who} for errors (`dmesg | grep -i xid`, `nvidia-smi -q`) before "
    "reusing it{where}",
    "hang.rank": "check its GPU for errors (`dmesg | grep -i xid`, `nvidia-smi -q`), and see what its "
    "process does{look}; a dump taken at the same moment as its peers' would show which it is{where}",
    "hang.comm": "check the links between these ranks (NCCL_DEBUG=INFO, error counters of the network cards) "
    "and try nccl-tests on their hosts",
    "hang.mismatch": "{compare}",
    "dead.rank": "read the end of its log{signalled}{where}",
}
_COMPARE = (
    "compare the code that {who} ran with that of its peers; TORCH_DISTRIBUTED_DEBUG=DETAIL names the call "
    "that differs"
)
_COMPARE_PLACES = (
    "make these calls on all ranks, in the same order: see why {who} takes another path (a branch on the "
    "rank or its own data, another number of batches, which DDP's `join()` allows, or one that it skipped "
    "after an exception)"
)
_ALIVE = ": `{dump}` for stacks, `ps -o stat,wchan -p {pid}` (T: stopped, D: waiting for a disk or a driver)"
_GONE = "; its process is gone: `dpro record --watch` keeps the stacks of a job that hangs"
_KILLED = "; `dmesg` shows what the kernel killed for lack of memory"
_FAULTED = (
    ": the library that gave up says why (gloo, if its peers' calls differ: `Received data size doesn't "
    "match`); PYTHONFAULTHANDLER=1 shows where"
)
MIN_SURE = 0.6  # below this confidence, the dumps allow several verdicts
FROZEN = "no-thread-runs"  # kind of observation: a process is stopped
MAX_SIDES = 2  # code locations shown of each side: the ranks at fault, and their peers
LEFT, SKIPPED, RAISED, DEADLOCK = "left early", "left calls out", "an exception", "deadlock"  # causes
ATTENDANCE = "operation-attendance"  # kind of observation: which ranks called an operation
GROUPS = "process groups"  # the cause of a mismatch
SHORT = "a loop that ended early"  # the cause of a mismatch
BEHIND = "earlier GPU work"  # the cause of a collective that a device never starts
_MEMORY_MEANS = "{who}: its GPU's memory ran out; what filled it most: {most}"
_RAISED_MEANS = "{who}: its script raised an exception"
_RAISED_ADVICE = "fix the cause of the exception; the log of {who} ends with the whole traceback{where}"
_DEADLOCK_MEANS = (
    "{who}: a deadlock, each waits for the next: they call in different orders; a bug in the program, "
    "not a hardware fault"
)
_DEADLOCK_ADVICE = (
    "call the collectives of these groups in the same order on all ranks, and send before receiving"
)
_LEFT_MEANS = (
    "{who}: it exited early without an error while its peers went on: a bug in the program, not a hardware "
    "fault; its loop had fewer steps, as with uneven inputs"
)
_LEFT_ADVICE = (
    "give all ranks the same number of batches (`DistributedSampler(drop_last=True)`, a step count agreed on "
    "by all), or wrap the loop in `torch.distributed.algorithms.join.Join`"
)
_SKIPPED_MEANS = (
    "{who}: it exited without an error after as many steps as its peers, but with fewer calls: it skipped "
    "calls in a step; a bug in the program, not a hardware fault"
)
_SKIPPED_ADVICE = (
    "look for what makes a rank skip collectives in a step: `no_sync`, a `continue`, a branch on its own "
    "data; from then on its reductions mixed different steps{where}"
)
_SHORT_MEANS = "{who}: its loop ended {short} short: a bug in the program, not a hardware fault"
_MEANS = {LEFT: _LEFT_MEANS, SKIPPED: _SKIPPED_MEANS, RAISED: _RAISED_MEANS, DEADLOCK: _DEADLOCK_MEANS}
_MEANS[SHORT] = _SHORT_MEANS
_MEANS[GROUPS] = (
    "{who}: made a process group that not all ranks made, or in another order: a bug in the program, not a "
    "hardware fault"
)
_ADVICE |= {
    LEFT: f"{_LEFT_ADVICE}; read the end of its log{{where}}",
    SKIPPED: _SKIPPED_ADVICE,
    RAISED: _RAISED_ADVICE,
    DEADLOCK: _DEADLOCK_ADVICE,
}
_ADVICE[SHORT] = _LEFT_ADVICE
_MEANS[BEHIND] = "{who}: a kernel on {its} GPU, launched before {call}, never ends"
_ADVICE[BEHIND] = (
    "{again}see what the GPU of {who} still runs (`cuda-gdb -p {pid}`: `info cuda kernels`), and its errors "
    "(`dmesg | grep -i xid`){where}"
)
_MEANS[GREW] = "{who}: the process was killed after its memory had grown without end"
_ADVICE[GREW] = f"{OF_HOST}{{signalled}}"
_ADVICE[GROUPS] = remedy_of(GROUP)


def name_of(operation: Operation) -> str:
    """Return `all_reduce #12 of group "5 tp" (ranks 0-3)`, or `message #4 from rank 0 to rank 8 in …`."""
    return in_words(*_named(operation))


def _named(operation: Operation) -> tuple[str, dict[str, Value]]:
    """Return the name of an operation as a template, and the values of its fields."""
    number = " #{sequence}" if operation.sequence >= 0 else ""
    ranks = list(operation.members)
    values: dict[str, Value] = {"operation": operation.op, "group": operation.group, "ranks": ranks}
    values["sequence"] = operation.sequence
    if operation.pair:
        values["source"], values["target"] = operation.pair
        return f'message{number} from rank {{source}} to rank {{target}} in group "{{group}}"', values
    return f'{{operation}}{number} of group "{{group}}" ({{ranks}})', values


def observe_attendance(operation: Operation) -> Observation:
    """Return which ranks called an operation, which finished it, and which never called."""
    name, values = _named(operation)
    ranks = {
        "waiting_ranks": sorted(operation.unfinished),
        "finished_ranks": sorted(operation.finished),
        "came_ranks": sorted(operation.came),
        "absent_ranks": sorted(operation.absent),
        "unknown_ranks": sorted(operation.unknown),
    }
    are = "are" if len(operation.unfinished) > 1 else "is"
    parts = (
        f"{{waiting_ranks}} entered and {are} stuck",
        "{finished_ranks} finished it",
        "{came_ranks} entered",
        "{absent_ranks} never entered",
        "unknown: {unknown_ranks}",
    )
    said = "; ".join(part for part, of_part in zip(parts, ranks.values(), strict=True) if of_part)
    sentence = f"{name}: {said}; waiting since {{since_at_ns}}"
    return observe(ATTENDANCE, sentence, **values, **ranks, since_at_ns=operation.since_ns)


def verdict_in_words(finding: Finding) -> str:
    """Return what a finding of a hang means, with what each side does, and where."""
    return verdicts_in_words([finding])


def verdicts_in_words(findings: Sequence[Finding]) -> str:
    """Return what the findings of one hang mean together, naming what their peers do once."""
    sides = [sides_in_words(finding) for finding in findings]
    meanings = [_meaning(finding, clauses) for finding, (clauses, _) in zip(findings, sides, strict=True)]
    return "; ".join(dict.fromkeys([*meanings, *(other for _, others in sides for other in others)]))


def _meaning(finding: Finding, clauses: Sequence[str]) -> str:
    """Return what a finding means, with what the ranks at fault do.

    Args:
        clauses: what these ranks do, in words.
    """
    who, sure = finding.component, finding.confidence >= MIN_SURE
    its, call = "their" if len(finding.ranks) > 1 else "its", _awaited(finding)
    if finding.cause in _MEANS:
        said = _MEANS[finding.cause].format(who=who, its=its, call=call, short=_short(finding))
    elif finding.cause == CAUSE:
        said = _MEMORY_MEANS.format(who=who, most=filled_by(finding))
    elif finding.class_ == "hang.rank":
        said = _VERDICTS[finding.class_].format(who=one_of_ranks(finding.ranks))
    elif finding.class_ == "hang.host" and doing_of(finding):
        return "; ".join(clauses)
    elif finding.class_ == "hang.host" and any(one.kind == FROZEN for one in finding.observations):
        said = f"{who}: its host code is stuck: none of its threads runs"
    elif sure:
        said = _VERDICTS[finding.class_].format(who=who, its=its, call=call)
    elif finding.class_ == "hang.mismatch":
        said = f"{who}: their calls differ; which of them is wrong is not known"
    elif finding.class_ == "hang.comm":
        said = f"{who}: all ranks entered and none finishes; the network, or one of their GPUs, is at fault"
    else:
        said = f"{who}: the others wait for it, and its dump would show why"
    return "; ".join([said, *clauses])


def _awaited(finding: Finding) -> str:
    """Return the call that the peers wait in: `all_reduce #12`."""
    for values in (one.values for one in finding.observations if one.kind == ATTENDANCE):
        sequence = values.get("sequence", -1)
        number = f" #{sequence}" if isinstance(sequence, int) and sequence >= 0 else ""
        return f"{values.get('operation', 'a collective')}{number}"
    return "a collective that its peers completed"


def _short(finding: Finding) -> str:
    """Return by how much a loop ended early: `2 updates`, or `2 rounds` of calls; empty if unknown."""
    for one in finding.observations:
        if "short" in one.values:
            return counted(int(one.values["short"]), "round" if "rounds" in one.values else "update")  # type: ignore[arg-type]
    return ""


def advice_in_words(finding: Finding, workers: pl.DataFrame) -> str:
    """Return what to do about a hang, with the process of its ranks while that may live.

    A job on several hosts also needs the host, and a source file of the job that is here shows its line.
    """
    rows = workers.filter(pl.col("rank").is_in(list(finding.ranks)))
    over = pl.max_horizontal(pl.col("exit_code") + 1, "exit_signal", "failed_ns", "left_ns") > 0
    alive = rows.filter(~over)
    is_gone, rows = alive.is_empty() and not rows.is_empty(), alive if alive.height else rows
    processes = rows.filter(pl.col("pid") > 0).select("rank", "pid", "host").rows()
    pid = processes[0][1] if processes and not is_gone else "PID"
    dump = f"dpro attach --pid {pid} --stacks" if _is_recorded(rows) else f"py-spy dump --pid {pid}"
    look = _ALIVE.format(dump=dump, pid=pid)
    one_host = workers["host"].n_unique() == 1
    named = [
        (rank, "" if is_gone else f"pid {pid}", "" if one_host or not host else f"on {host}")
        for rank, pid, host in processes
    ]
    places = "; ".join(f"rank {rank}: {' '.join(filter(None, at))}" for rank, *at in named if any(at))
    of_cause = advice_on(finding) if finding.cause == CAUSE else _ADVICE.get(finding.cause)
    return (of_cause or _on_sides(finding) or _ADVICE[finding.class_]).format(
        who=finding.component,
        its="their" if len(finding.ranks) > 1 else "its",
        does="do" if len(finding.ranks) > 1 else "does",
        where=f" ({places})" if places else "",
        in_place=f" in {_place_in_words(finding.place, rows)}" if finding.place else "",
        again="if it hangs again, before it is ended: " if is_gone else "",
        pid=pid,
        look=look if not is_gone else "" if finding.place else _GONE,
        compare=(_COMPARE_PLACES if any(sides_of(finding)) else _COMPARE).format(who=finding.component),
        signalled=_on_signal(finding),
    )


def _is_recorded(workers: pl.DataFrame) -> bool:
    """Return whether dpro records processes, so that it can take their stacks."""
    return not workers.is_empty() and set(workers["source"]) == {RECORDER}


def _place_in_words(place: CodeLocation, workers: pl.DataFrame) -> str:
    """Return a place in the code, with its line of source if the file is here as it was when a rank began."""
    line = source_line(place, workers["started_ns"].min() or -1)  # type: ignore[arg-type]
    return f"{place.in_words} (`{line}`)" if line else place.in_words


def _on_sides(finding: Finding) -> str:
    """Return the remedy for what the ranks at fault do; empty where that decides nothing."""
    if finding.class_ == "hang.host":
        return remedy_of(doing_of(finding))
    return remedy_of(BUFFERS) if finding.class_ == "hang.mismatch" and BUFFERS in doings_of(finding) else ""


def _on_signal(finding: Finding) -> str:
    """Return where else to look for ranks that a signal ended; for unknown ends, the kernel's log."""
    signals = [one.values["exit_signal"] for one in finding.observations if "exit_signal" in one.values]
    if any(number in OF_ITS_OWN for number in signals):
        return _FAULTED
    return _KILLED if not signals or signal.SIGKILL in signals else ""


def with_last_call(observation: Observation, rank: int, root: Root, case: Case) -> Observation:
    """Add the last call of a rank in the group in which its peers wait for it, if that is known."""
    operation = root.operations[0] if root.operations else None
    number = -1 if operation is None else case.progress.issued.get((rank, operation.key), -1)
    if operation is None or operation.pair or number < 0:
        return observation
    return observation.then(
        ": its last call in that group is #{last_sequence}, which finished", last_sequence=number
    )


def observe_missing_dump(ranks: Sequence[int], case: Case) -> Observation:
    """Return the observation of why the last calls of some ranks are not known."""
    old = [rank for rank in ranks if rank in case.progress.outdated or rank in case.progress.current]
    none = [rank for rank in ranks if rank not in old]
    said = ["the dump of {missing_ranks} is missing"] if none else []
    said += ["the dump of {outdated_ranks} is older than what its peers wait for"] if old else []
    return observe("no-dump", "; ".join(said), missing_ranks=none, outdated_ranks=old)


def observe_last_state(ranks: Sequence[int], case: Case) -> list[Observation]:
    """Return the state of ranks at the time of their dump, if that is older than those of their peers.

    Args:
        ranks: ranks to describe; those with a recent dump, or none, are left out.
    """
    observed = []
    calls = case.records.calls
    for rank in ranks:
        if rank not in case.progress.outdated:
            continue
        unfinished = calls.filter((pl.col("rank") == rank) & pl.col("state").is_in(UNFINISHED))
        done = case.records.ranks.filter((pl.col("rank") == rank) & pl.col("idle")).height
        if unfinished.height:
            last = unfinished.sort("order").row(-1, named=True)
            observed.append(
                observe(
                    "unfinished-in-dump",
                    "when its dump was saved, rank {rank} had {unfinished} unfinished, the last "
                    '{operation} #{sequence} of group "{group}"',
                    rank=rank, unfinished=unfinished.height, operation=last["op"],
                    sequence=last["sequence"], group=last["group"],
                )
            )  # fmt: skip
        elif done:
            sentence = "when its dump was saved, rank {rank} had finished everything it had begun"
            observed.append(observe("finished-in-dump", sentence, rank=rank))
    return observed


def observe_heartbeat(rank: int, case: Case) -> list[Observation]:
    """Return whether a process still ran, as shown by the recorder's thread, which writes once a second."""
    row = case.records.ranks.filter((pl.col("rank") == rank) & (pl.col("heartbeat_ns") > 0))
    last = case.records.ranks["heartbeat_ns"].max()
    if row.is_empty() or last is None:
        return []
    beat_ns = int(row["heartbeat_ns"][0])
    if is_frozen(rank, case):
        return [
            observe(
                FROZEN,
                "no thread of rank {rank} has run since {since_at_ns}, {silent_ns} before those of its "
                "peers: its process is stopped, or one thread keeps the interpreter's lock (GIL)",
                rank=rank, since_at_ns=beat_ns, silent_ns=int(last) - beat_ns,  # type: ignore[arg-type]
            )
        ]  # fmt: skip
    sentence = "other threads of rank {rank} went on until {until_at_ns}: its process is not stopped"
    return [observe("other-threads-run", sentence, rank=rank, until_at_ns=beat_ns)]


def stacks(ranks: Sequence[int], case: Case) -> list[Observation]:
    """Return where the main threads of some ranks were last recorded, one observation per place."""
    held: dict[tuple[Value, ...], tuple[list[int], Sequence[str], str]] = {}
    rows = case.records.ranks.filter(pl.col("rank").is_in([*ranks]))
    for row in rows.iter_rows(named=True):
        calls, verb = row["stack"].splitlines(), "is"
        if not calls:  # an exception ended it before a stack was recorded
            calls, verb = row["error"].splitlines()[1:], "was"
        if calls and not is_frozen(row["rank"], case):
            held.setdefault(tuple(stand_of(calls).values()), ([], calls, verb))[0].append(row["rank"])
    most = sorted(held.values(), key=lambda thread: (-len(thread[0]), thread[0]))
    return [main_threads(*thread) for thread in most]


def place_of(ranks: Sequence[int], observations: Sequence[Observation]) -> CodeLocation | None:
    """Return the code location of the ranks' main threads; None if unknown or not a single one."""
    threads = [one.values for one in observations if one.kind == MAIN_THREAD]
    calls = {str(one["own_call"]) for one in threads if set(one.get("ranks", ())) <= {*ranks}}  # type: ignore[arg-type]
    return CodeLocation.of(calls.pop()) if len(calls) == 1 else None


def observe_wait_before_death(deaths: Sequence[Death], root: Root, case: Case) -> list[Observation]:
    """Return how long peers had waited for ranks that died, and where the main threads of these were."""
    observed = []
    for death in deaths:
        waited_ns = death.ended_ns - root.since_ns
        if root.since_ns >= 0 and waited_ns >= MIN_WAIT_NS:
            sentence = "its peers had waited for rank {rank} for {waited_ns} by then"
            observed.append(observe("waited-for", sentence, rank=death.rank, waited_ns=waited_ns))
            observed += stacks([death.rank], case)
    return observed


def observe_death(death: Death) -> Observation:
    """Return the observation of what ended a rank, when, and what that usually means."""
    seen = ", seen at {seen_at_ns}" if death.ended_ns > DATED_NS else ""
    observation = observe(
        "death",
        f"rank {{rank}} was ended by {{how}}{seen}",
        rank=death.rank, how=death.how, exit_signal=death.exit_signal, seen_at_ns=death.ended_ns,
    )  # fmt: skip
    return observation.then(" ({means})", means=death.means) if death.means else observation


def observe_lost_peers(deaths: Sequence[Death], case: Case) -> list[Observation]:
    """Return which ranks failed since a peer was gone, where in the user's code, and in which call.

    Ranks that a library ended leave no last call: those of their peers show what they were to call.
    """
    gone = {death.rank for death in deaths}
    lost = sorted(rank for rank, death in case.deaths.items() if death.lost_peer and rank not in gone)
    errors = dict(case.records.ranks.select("rank", "error").iter_rows())
    last = case.records.calls.filter(pl.col("rank").is_in(lost)).sort("rank", "order")
    called = {
        row["rank"]: describe(row["op"], row["bytes_in"], row["bytes_out"], row["dtype"])
        for row in last.group_by("rank", maintain_order=True).last().iter_rows(named=True)
    }
    sides: dict[tuple[str, str], list[int]] = {}
    for rank in lost:
        calls = errors[rank].splitlines()[1:]
        sides.setdefault((own_call(calls) if calls else "", called.get(rank, "")), []).append(rank)
    places = sorted((side for side in sides if any(side)), key=lambda side: -len(sides[side]))
    return [
        observe(
            "lost-peer",
            "{ranks} lost a peer" + (" in {own_call}" if call else "")
            + ("; last call: {operation}" if operation else ""),
            ranks=sides[call, operation], own_call=call, operation=operation,
        )
        for call, operation in places[:MAX_SIDES]
    ]  # fmt: skip


def observe_fewer_steps(rank: int, case: Case) -> list[Observation]:
    """Return by how much a rank's last step ended before that of its peers."""
    ends: dict[int, int] = dict(case.records.ranks.select("rank", "last_step_ns").iter_rows())
    end_ns, last_ns = ends.get(rank, -1), max(ends.values(), default=-1)
    if end_ns < 0 or last_ns - end_ns < MIN_WAIT_NS:
        return []
    sentence = "its last step ended {earlier_ns} before that of its peers"
    return [observe("fewer-steps", sentence, earlier_ns=last_ns - end_ns)]


def observe_chain(root: Root, victims: Sequence[int], case: Case) -> list[Observation]:
    """Return the longest of the victims' shortest chains to the root, as it shows most of the waiting."""
    chains = [graph.chain_from(rank, root, case.waits) for rank in victims]
    longest = max(chains, key=len, default=[])
    if len(longest) < 2:
        return []
    end_ranks = root.ranks if root.kind in (graph.HOST, graph.DEVICE, graph.UNKNOWN) else ()
    said: list[str] = []
    values: dict[str, Value] = {
        "waiting_ranks": [waiting for waiting, _ in longest],
        "end_ranks": list(end_ranks),
    }
    for place, (waiting, operation) in enumerate(longest, 1):
        following = longest[place][0] if place < len(longest) else None
        waited = f"rank {{rank_{place + 1}}}"
        if following is None:
            waited = "{end_ranks}" if end_ranks else "no rank"
        elif following == waiting:
            waited = "earlier work of its own"
        said.append(f"rank {{rank_{place}}} waits in {{operation_{place}}} for {waited}")
        values |= {f"rank_{place}": waiting, f"operation_{place}": name_of(operation)}
    return [observe("chain-of-waiting", f"the chain: {'; '.join(said)}", **values)]


def observe_doubts(root: Root, case: Case) -> list[Observation]:
    """Return which other ranks may be stuck, since it is not known whether they entered."""
    if root.kind == graph.UNKNOWN:
        return []
    open_ = sorted({rank for operation in root.operations for rank in operation.unknown} - set(root.ranks))
    if not open_:
        return []
    name, values = _named(root.operations[0])
    if not root.operations[0].unknown:
        name, values = "these operations", {}
    return [
        observe(
            "doubtful-attendance",
            f"not known: whether {{unknown_ranks}} entered {name}; a dump of {{unknown_ranks}} would show "
            "whether more than {stuck_ranks} is stuck",
            **values, unknown_ranks=open_, stuck_ranks=list(root.ranks),
        )
    ]  # fmt: skip
