"""Evidence of hangs in words: ranks, operations, chains of waiting, and what is known of ranks at fault.

In: a `Case`, and ranks. Out: lines of evidence, none where nothing is known; each names the calls, dumps,
threads or exits that it is derived from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.hang import waits as graph
from dpro.detect.hang.case import MIN_WAIT_NS, Case, Death, is_frozen, own_call
from dpro.detect.hang.memory import CAUSE, advice_on
from dpro.detect.hang.operations import Operation
from dpro.detect.hang.records import UNFINISHED
from dpro.detect.hang.waits import Root
from dpro.units import format_duration, time_in_words
from dpro.words import one_of, ranks_in_words

_VERDICTS = {
    "hang.host": "{who}: its host code is stuck",
    "hang.device": "{who}: its GPU does not finish what its peers finished",
    "hang.rank": "{who}: it stopped taking part; the records do not distinguish its host from its device",
    "hang.comm": "{who}: all ranks called and none finishes; the network or the group itself is at fault",
    "hang.mismatch": "{who}: its calls differ from those of the others; the program is wrong, no hardware",
    "dead.rank": "{who}: the process is gone",
}
_ADVICE = {
    "hang.host": "see what {who} does: `py-spy dump --pid PID` for its stacks, `ps -o stat,wchan -p PID` "
    "(T is stopped, D waits for a disk or a driver){where}",
    "hang.device": "look for errors of its GPU (`dmesg | grep -i xid`, `nvidia-smi -q`) before it is used "
    "again{where}",
    "hang.rank": "look at both: what its process does (`py-spy dump --pid PID`, `ps -o stat,wchan -p PID`), "
    "and errors of its GPU (`dmesg | grep -i xid`, `nvidia-smi -q`); a dump of its calls of the same moment "
    "as its peers' would distinguish them{where}",
    "hang.comm": "check the links between these ranks (NCCL_DEBUG=INFO, error counters of the network cards) "
    "and try nccl-tests on their hosts",
    "hang.mismatch": "compare the code that {who} ran with that of its peers; TORCH_DISTRIBUTED_DEBUG=DETAIL "
    "names the call that differs",
    "dead.rank": "read the end of its log; `dmesg` shows what the kernel killed for lack of memory{where}",
}
MIN_SURE = 0.6  # confidence, below which the verdict is one of several that the dumps allow
MAX_CALLS = 3  # of a stack that are quoted
LEFT, SKIPPED, RAISED, DEADLOCK = "left early", "left calls out", "an exception", "deadlock"  # causes
_MEMORY_MEANS = "{who}: its GPU's memory ran out; what filled it most: {most}"
_RAISED_MEANS = "{who}: its script failed by an exception"
_RAISED_ADVICE = "mend what raises it; the end of the log of {who} has the whole traceback{where}"
_DEADLOCK_MEANS = (
    "{who}: a deadlock, each waits for the next: they call in different orders; the program is wrong, "
    "no hardware"
)
_DEADLOCK_ADVICE = (
    "let all ranks call the collectives of these groups in one order, and send before they receive"
)
_LEFT_MEANS = (
    "{who}: it left early, its script ended well while its peers went on; the program is wrong, no hardware: "
    "its loop had fewer steps, as with uneven inputs"
)
_LEFT_ADVICE = (
    "give all ranks the same number of batches (`DistributedSampler(drop_last=True)`, a step count agreed on "
    "by all), or wrap the loop in `torch.distributed.algorithms.join.Join`; read the end of its log{where}"
)
_SKIPPED_MEANS = (
    "{who}: its script ended well after as many steps as its peers made, but with fewer calls: it left calls "
    "out in a step; the program is wrong, no hardware"
)
_SKIPPED_ADVICE = (
    "look for what lets a rank leave collectives out of a step: `no_sync`, a `continue`, a branch on its own "
    "data; from then on it reduced what belongs to another step{where}"
)
_MEANS = {LEFT: _LEFT_MEANS, SKIPPED: _SKIPPED_MEANS, RAISED: _RAISED_MEANS, DEADLOCK: _DEADLOCK_MEANS}
_ADVICE |= {LEFT: _LEFT_ADVICE, SKIPPED: _SKIPPED_ADVICE, RAISED: _RAISED_ADVICE, DEADLOCK: _DEADLOCK_ADVICE}


def name_of(operation: Operation) -> str:
    """Return `all_reduce #12 of group "5 tp" (ranks 0-3)`, or `message #4 from rank 0 to rank 8 in …`."""
    number = f" #{operation.sequence}" if operation.sequence >= 0 else ""
    if operation.pair:
        source, target = operation.pair
        return f'message{number} from rank {source} to rank {target} in group "{operation.group}"'
    return f'{operation.op}{number} of group "{operation.group}" ({ranks_in_words(operation.members)})'


def attendance(operation: Operation) -> str:
    """Return which ranks called an operation, which finished it, and which never called."""
    parts = []
    if operation.unfinished:
        came = f"{ranks_in_words(operation.unfinished)} came and wait"
        parts.append(came if len(operation.unfinished) > 1 else f"{came}s")
    if operation.finished:
        parts.append(f"{ranks_in_words(operation.finished)} finished it")
    if operation.came:
        parts.append(f"{ranks_in_words(operation.came)} came")
    if operation.absent:
        parts.append(f"{ranks_in_words(operation.absent)} never came")
    if operation.unknown:
        parts.append(f"unknown: {ranks_in_words(operation.unknown)}")
    return f"{name_of(operation)}: {'; '.join(parts)}; waited for since {time_in_words(operation.since_ns)}"


def chain_in_words(chain: Sequence[tuple[int, Operation]], ends: Collection[int]) -> str:
    """Return a chain of waiting, link by link.

    Args:
        chain: pairs of a rank and the operation it waits in, as of `chain_from`.
        ends: ranks that the last link waits for; none where its operation itself is at fault.
    """
    links = []
    for (rank, operation), following in zip(chain, [*chain[1:], None], strict=True):
        waited = f"rank {following[0]}" if following else ranks_in_words(ends) if ends else "no rank"
        if following and following[0] == rank:
            waited = "what it has to finish first"
        links.append(f"rank {rank} waits in {name_of(operation)} for {waited}")
    return "; ".join(links)


def verdict_in_words(finding: Finding) -> str:
    """Return what a finding of a hang means."""
    who = finding.component
    if finding.cause in _MEANS:
        return _MEANS[finding.cause].format(who=who)
    if finding.cause.startswith(CAUSE):
        return _MEMORY_MEANS.format(who=who, most=finding.cause.removeprefix(CAUSE))
    if finding.class_ == "hang.rank":
        return _VERDICTS[finding.class_].format(who=one_of(finding.ranks))
    if finding.confidence >= MIN_SURE:
        return _VERDICTS[finding.class_].format(who=who)
    if finding.class_ == "hang.mismatch":
        return f"{who}: their calls differ, and which of them is wrong is not known"
    if finding.class_ == "hang.comm":
        return f"{who}: all ranks called and none finishes; the network, or the GPU of one of them"
    return f"{who}: the others wait for it, and its dump would show why"


def advice_in_words(finding: Finding, workers: pl.DataFrame) -> str:
    """Return what to do about a hang, with host and process of its ranks where they are known."""
    processes = workers.filter(pl.col("rank").is_in(list(finding.ranks)) & (pl.col("pid") > 0))
    places = [
        f"rank {rank}: pid {pid} on {host}"
        for rank, pid, host in processes.select("rank", "pid", "host").iter_rows()
    ]
    where = f" ({'; '.join(places)})" if places else ""
    advice = _ADVICE.get(finding.cause) or advice_on(finding.cause) or _ADVICE[finding.class_]
    return advice.format(who=finding.component, where=where)


def last_call(rank: int, root: Root, case: Case) -> str:
    """Return what a rank called last in the group in which its peers wait for it."""
    operation = root.operations[0] if root.operations else None
    number = -1 if operation is None else case.progress.issued.get((rank, operation.key), -1)
    if operation is None or operation.pair or number < 0:
        return ""
    return f": its last call in that group is #{number}, and finished"


def no_dump(ranks: Sequence[int], case: Case) -> str:
    """Return why the last calls of some ranks are not known."""
    old = [rank for rank in ranks if rank in case.progress.outdated or rank in case.progress.current]
    none = [rank for rank in ranks if rank not in old]
    said = [f"the dump of {ranks_in_words(none)} is missing"] if none else []
    said += [f"the dump of {ranks_in_words(old)} is older than what its peers wait for"] if old else []
    return "; ".join(said)


def last_state(ranks: Sequence[int], case: Case) -> list[str]:
    """Return what dumps that are older than those of their peers say of the time when they were saved.

    Args:
        ranks: of which only those with such a dump are described.
    """
    lines = []
    calls = case.records.calls
    for rank in ranks:
        if rank not in case.progress.outdated:
            continue
        unfinished = calls.filter((pl.col("rank") == rank) & pl.col("state").is_in(UNFINISHED))
        done = case.records.ranks.filter((pl.col("rank") == rank) & pl.col("idle")).height
        if unfinished.height:
            last = unfinished.sort("order").row(-1, named=True)
            lines.append(
                f"when its dump was saved, rank {rank} had {unfinished.height} unfinished, the last "
                f'{last["op"]} #{last["sequence"]} of group "{last["group"]}"'
            )
        elif done:
            lines.append(f"when its dump was saved, rank {rank} had finished all it had begun")
    return lines


def heartbeat(rank: int, case: Case) -> list[str]:
    """Return whether a process still ran, by the recorder's thread in it, which writes once a second."""
    row = case.records.ranks.filter((pl.col("rank") == rank) & (pl.col("heartbeat_ns") > 0))
    last = case.records.ranks["heartbeat_ns"].max()
    if row.is_empty() or last is None:
        return []
    beat_ns = int(row["heartbeat_ns"][0])
    if is_frozen(rank, case):
        silent = format_duration(float(int(last) - beat_ns))  # type: ignore[arg-type]
        return [
            f"no thread of rank {rank} has run since {time_in_words(beat_ns)}, {silent} before those of its "
            "peers: its process is stopped, or one thread keeps the interpreter's lock (GIL)"
        ]
    went_on = f"other threads of rank {rank} went on until {time_in_words(beat_ns)}"
    return [f"{went_on}: only its main thread is stuck"]


def stack(rank: int, case: Case) -> list[str]:
    """Return where a rank's main thread was when its stack was last recorded."""
    rows = case.records.ranks.filter((pl.col("rank") == rank) & (pl.col("stack") != ""))
    if rows.is_empty() or is_frozen(rank, case):
        return []
    return [f"the main thread of rank {rank} is in {calls_in_words(rows['stack'][0].splitlines())}"]


def calls_in_words(calls: Sequence[str]) -> str:
    """The innermost calls of a stack, and that of the user's own code where it is further out."""
    quoted, called = [*calls[:MAX_CALLS]], own_call(calls)
    if called not in quoted:
        quoted += ["…", called] if calls.index(called) > MAX_CALLS else [called]
    return " < ".join(quoted)


def stood_still(deaths: Sequence[Death], root: Root, case: Case) -> list[str]:
    """Return for how long ranks that died had kept their peers waiting, and where their main threads were."""
    lines = []
    for death in deaths:
        waited_ns = death.ended_ns - root.since_ns
        if root.since_ns >= 0 and waited_ns >= MIN_WAIT_NS:
            waited = format_duration(float(waited_ns))
            lines.append(f"its peers had waited for rank {death.rank} for {waited} by then")
            lines += stack(death.rank, case)
    return lines


def death_in_words(death: Death) -> str:
    """Return what ended a rank, when, and what that usually means."""
    means = f" ({death.means})" if death.means else ""
    return f"rank {death.rank} was ended by {death.how}, seen at {time_in_words(death.ended_ns)}{means}"


def fewer_steps(rank: int, case: Case) -> list[str]:
    """Return by how much a rank's last step ended before that of its peers."""
    ends: dict[int, int] = dict(case.records.ranks.select("rank", "last_step_ns").iter_rows())
    end_ns, last_ns = ends.get(rank, -1), max(ends.values(), default=-1)
    if end_ns < 0 or last_ns - end_ns < MIN_WAIT_NS:
        return []
    return [f"its last step ended {format_duration(float(last_ns - end_ns))} before that of its peers"]


def chain(root: Root, victims: Sequence[int], case: Case) -> list[str]:
    """Return the longest of the shortest chains to the root, which shows most of the waiting."""
    chains = [graph.chain_from(rank, root, case.waits) for rank in victims]
    longest = max(chains, key=len, default=[])
    if len(longest) < 2:
        return []
    ends = root.ranks if root.kind in (graph.HOST, graph.DEVICE, graph.UNKNOWN) else ()
    return [f"the chain: {chain_in_words(longest, ends)}"]


def doubts(root: Root, case: Case) -> list[str]:
    """Return which ranks may be stuck, too, since it is not known whether they called."""
    if root.kind == graph.UNKNOWN:
        return []
    open_ = sorted({rank for operation in root.operations for rank in operation.unknown} - set(root.ranks))
    if not open_:
        return []
    names = (
        ", ".join(name_of(operation) for operation in root.operations[:1] if operation.unknown)
        or "these operations"
    )
    return [
        f"not known: whether {ranks_in_words(open_)} came to {names}; a dump of {ranks_in_words(open_)} "
        f"would show whether more than {ranks_in_words(root.ranks)} is stuck"
    ]
