"""What main threads do while a job hangs, and where in the user's code.

Takes stacks, as calls `file:line function`, innermost first, and the CPU time of threads. Returns the call of
the user's own code, and what the library that it called is known to do there, both in words. A thread counts
as stuck only if it took no CPU time and no library is known to wait there.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from dpro.detect.findings import CodeLocation, Finding
from dpro.detect.observations import Observation, Value, observe
from dpro.units import NS_PER_S
from dpro.words import ranks_in_words, shortened

MAIN_THREAD = "main-thread"  # kind of observation: where a main thread is
MIN_COMPUTING = 0.25  # of the time: a waiting thread takes none, except while its process ends unrecorded
MIN_SAMPLED_NS = 4 * NS_PER_S  # a shorter time says little about what a thread does
MAX_SOURCE_BYTES = 10_000_000  # a larger file is hardly written by hand
MAX_LINE = 60  # characters of a line of source that are shown
MAX_CALLS = 3  # innermost calls of a stack that are quoted
# Counters of a process (its main thread ran, or was ready to), and one of its host, written at each sample.
_CPU_TIME, _SAMPLED = ("main_thread_cpu_s", "main_thread_runqueue_s"), "telemetry_cpu_s"

_INSTALLED = re.compile(r"-packages/|/lib/python")
_OF_TORCH = re.compile(r"-packages/(torch|triton)/|/lib/python[\d.]+/(?!\w+-packages/)")  # or of Python
_GENERATED = re.compile(r"<(frozen|eval_with_key|string)\b|/torchinductor_")  # generated code
_INNER = re.compile(r" <(genexpr|\w+comp)>$")  # part of the function around it


@dataclass(frozen=True)
class Doing:
    """A kind of work or wait of a thread.

    Attributes:
        calls: pattern of `file function` of the library calls that do this.
        verb: in the plural: `compile`; empty where it is not known.
        what: the words after the verb, with `{call}` for the function of the library that was called.
        remedy: what to do where other ranks wait for it, in any step, with the fields of
            `evidence.py:advice_in_words`; empty where the calls of all ranks decide that.
        works: whether it goes on by itself, so that the others wait only as long as it takes.
    """

    calls: str
    verb: str = ""
    what: str = ""
    remedy: str = ""
    works: bool = False


COMPILE, GROUP, BUFFERS, COMPUTE, STUCK, UNKNOWN = "compile", "group", "buffers", "compute", "stuck", ""
WITH_PEERS = (GROUP, BUFFERS, "collective", "fsdp")  # in these a thread waits for other ranks
_LONGER = "or give `init_process_group` a longer `timeout`"
_SHORTEN = (
    f"if it needs that long, do it once and keep its result on disk, share it among all ranks, {_LONGER}"
)
_FILES = r"(torch/serialization\.py|torch/distributed/checkpoint/\S*|/safetensors/\S*) \w*"
_IN_LIBRARIES = {  # the first match counts
    COMPILE: Doing(
        r"torch/_dynamo/(convert_frame|output_graph)\.py|torch/_inductor/(codegen/|(graph|scheduler)\.py)"
        r"|torch/_inductor/async_compile\.py|/compile_fx\.py \w*compile|/triton/compiler/", "compile", "",
        "let all ranks compile at the same time, keep the compiler's cache between jobs "
        f"(TORCHINDUCTOR_CACHE_DIR), {_LONGER}", works=True),
    GROUP: Doing(
        r"torch/distributed/(distributed_c10d|device_mesh)\.py ((new|split)_\w*group\w*|init_\w+)$", "wait",
        "in {call} for other ranks",
        "call `new_group` on all ranks and in one order, also on those that are not in the group"),
    "loader": Doing(
        r"torch/utils/data/dataloader\.py (_try_get_data|_get_data)$", "wait", "for DataLoader workers",
        "see what the Dataset waits for in a worker (a file, a lock, the network); with "
        "`DataLoader(timeout=60)` it raises instead"),
    "load": Doing(
        _FILES + "load", "load", "a checkpoint",
        f"see whether its file system is slow or does not answer; {_SHORTEN}", works=True),
    "save": Doing(
        _FILES + "save", "save", "a checkpoint",
        "see whether its file system is slow or full; save in the background "
        f"(`torch.distributed.checkpoint.async_save`), {_LONGER}", works=True),
    "process": Doing(
        r"/(subprocess|multiprocessing/\w+|concurrent/futures/process)\.py ", "wait",
        "for a process that it started", f"see what that process waits for; {_SHORTEN}"),
    "thread": Doing(r"/(threading|queue|concurrent/futures/\w+)\.py ", "wait", "for another thread"),
    "network": Doing(
        r"/(socket|ssl|http/client)\.py ", "wait", "for data from the network",
        f"see whether the server that it reads from answers; {_SHORTEN}"),
    BUFFERS: Doing(
        r"torch/nn/parallel/distributed\.py _sync_\w*buffers$", "wait", "in DDP's broadcast of buffers",
        "use `model.module` where not all ranks evaluate, or evaluate on all ranks"),
    "collective": Doing(
        r"torch/distributed/(distributed_c10d|_functional_collectives|nn/functional)\.py [a-z]\w+$", "wait",
        "in {call}"),
    "fsdp": Doing(r"torch/distributed/(fsdp|_composable)/", "wait", "in FSDP"),
    "backward": Doing(r"torch/autograd/\w+\.py (backward|grad)$", "wait", "in backward"),
}  # fmt: skip
_DOINGS = _IN_LIBRARIES | {
    COMPUTE: Doing("", "compute", "", f"see what {{who}} {{does}}{{in_place}}; {_SHORTEN}", works=True),
    STUCK: Doing("", "be", "stuck"),
    UNKNOWN: Doing(""),
}


def stand_of(calls: Sequence[str]) -> dict[str, Value]:
    """Return what a thread does: `doing`, a key of `_DOINGS`; `call`, of the library; and `own_call`.

    Library calls count if the user's code made them last; calls of a compiler, which may call that code,
    always.

    Args:
        calls: of its stack, innermost first, at least one.
    """
    of_user = own_call(calls)
    plain = [re.sub(r":\d+ ", " ", call) for call in calls]
    for name, doing in _IN_LIBRARIES.items():
        within = plain if name == COMPILE else plain[: calls.index(of_user)]
        places = [place for place, call in enumerate(within) if re.search(doing.calls, call)]
        if places:
            called = plain[places[-1]].rpartition(" ")[2]
            return {"doing": name, "call": called, "own_call": own_call(calls[places[-1] :])}
    return {"doing": UNKNOWN, "call": "", "own_call": of_user}


def own_call(calls: Sequence[str]) -> str:
    """Return the innermost call of the user's code, as `file:line function`.

    Where all code is installed, it is the innermost call outside of torch and Python.
    """
    written = [call for call in calls if not _GENERATED.search(call)] or list(calls)
    of_user = [call for call in written if not _INSTALLED.search(call)]
    among = of_user or [call for call in written if not _OF_TORCH.search(call)] or written
    return next((call for call in among if not _INNER.search(call)), among[0])


def source_line(place: CodeLocation, before_ns: int) -> str:
    """Return the line of source at a place; empty where its file is not here, or was changed since a time.

    Args:
        before_ns: when the job began: a file that was changed later may have another line there.
    """
    path = Path(place.file)
    try:
        status = path.stat()
        if not path.is_absolute() or path.suffix != ".py" or not stat.S_ISREG(status.st_mode):
            return ""
        if status.st_mtime_ns > before_ns or status.st_size > MAX_SOURCE_BYTES:
            return ""
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return ""
    return shortened(lines[place.line - 1].strip(), MAX_LINE) if 0 < place.line <= len(lines) else ""


def calls_in_words(calls: Sequence[str]) -> str:
    """Return the innermost calls of a stack, and the user's own call where it is further out."""
    quoted, called = [*calls[:MAX_CALLS]], own_call(calls)
    if called not in quoted:
        quoted += ["…", called] if calls.index(called) > MAX_CALLS else [called]
    return " < ".join(quoted)


def main_threads(ranks: Sequence[int], calls: Sequence[str], verb: str) -> Observation:
    """Return the observation of where the main threads of ranks are, or were.

    Args:
        calls: of one of their stacks, innermost first.
        verb: `is` or `was`, for one thread.
    """
    threads, said = ("thread", verb) if len(ranks) == 1 else ("threads", {"is": "are"}.get(verb, "were"))
    sentence = f"the main {threads} of {{ranks}} {said} in {{calls}}"
    return observe(MAIN_THREAD, sentence, ranks=list(ranks), calls=calls_in_words(calls), **stand_of(calls))


def sides_of(finding: Finding) -> Iterator[Mapping[str, Value]]:
    """Yield the values of `main_threads` observations, of ranks at fault and of their peers."""
    for one in finding.observations:
        if one.kind == MAIN_THREAD and "doing" in one.values:
            yield one.values


def doing_of(finding: Finding) -> str:
    """Return what the ranks at fault do; `UNKNOWN` where that is not known or differs between them."""
    doings = doings_of(finding)
    return doings.pop() if len(doings) == 1 else UNKNOWN


def doings_of(finding: Finding) -> set[str]:
    """Return everything that ranks at fault do."""
    return {doing_on(side) for side in sides_of(finding) if _is_own(side, finding)}


def doing_on(side: Mapping[str, Value]) -> str:
    """Return what threads do: what a library does, else whether they ran."""
    if side["doing"] or "ran_share" not in side:
        return str(side["doing"])
    return COMPUTE if float(side["ran_share"]) >= MIN_COMPUTING else STUCK  # type: ignore[arg-type]


def remedy_of(doing: str) -> str:
    """Return what to do where others wait for ranks that do this; empty where more must be known."""
    return _DOINGS[doing].remedy


def works(finding: Finding) -> bool:
    """Return whether the ranks at fault are known to go on with work of their own."""
    return finding.class_ == "hang.host" and _DOINGS[doing_of(finding)].works


def _is_own(side: Mapping[str, Value], finding: Finding) -> bool:
    return set(side["ranks"]) <= {*finding.ranks}  # type: ignore[arg-type]


def sides_in_words(finding: Finding) -> tuple[list[str], list[str]]:
    """Return what the ranks at fault do, and what their peers do, one clause each."""
    if not finding.class_.startswith("hang."):
        return [], []
    clauses: tuple[list[str], list[str]] = [], []
    for side in sides_of(finding):
        is_peer = not _is_own(side, finding)
        # A clause: `rank 0 waits in DDP's broadcast of buffers, in validate (job.py:15)`.
        ranks, doing = side["ranks"], _DOINGS.get(doing_on(side), _DOINGS[UNKNOWN])
        verb = doing.verb or ("wait" if is_peer else "be")
        if len(ranks) == 1:  # type: ignore[arg-type]
            verb = "is" if verb == "be" else f"{verb}s"
        verb = "are" if verb == "be" else verb
        what = doing.what.format(call=side["call"])
        place = CodeLocation.of(str(side["own_call"]))
        where = f"at {place.in_words}" if place.name == "<module>" else f"in {place.in_words}"
        said = " ".join(filter(None, [ranks_in_words(ranks), verb, what]))  # type: ignore[arg-type]
        clauses[is_peer].append(
            f"{said}{',' if what.startswith('in ') or said.endswith(('wait', 'waits')) else ''} {where}"
        )
    return clauses


def needed_for_cpu_time(part: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `counters` that show when main threads ran."""
    return part.filter(pl.col("counter").is_in([*_CPU_TIME, _SAMPLED]))


def with_cpu_time(
    findings: Sequence[Finding], counters: pl.DataFrame, workers: pl.DataFrame, now_ns: int
) -> list[Finding]:
    """Add to findings of hosts the share of their peers' wait in which their main thread ran.

    Args:
        now_ns: when the wait was last observed; -1 unknown.
    """
    hosts, ends = dict(workers.select("rank", "host").iter_rows()), _began_to_end(workers)
    explained = []
    for finding in findings:
        rank, since_ns = finding.ranks[0] if finding.ranks else -1, now_ns - finding.waited_ns
        waits = since_ns, ends.get(rank)
        share = ran_share(counters, rank, hosts.get(rank, ""), *waits) if finding.waited_ns else None
        if finding.class_ == "hang.host" and share is not None:
            said = "; it ran for {ran_share} of the time that its peers waited"
            seen = [
                one.then(said, ran_share=share)
                if one.kind == MAIN_THREAD and one.values.get("ranks") == [rank]
                else one
                for one in finding.observations
            ]
            finding = replace(finding, observations=tuple(seen))
        explained.append(finding)
    return explained


def _began_to_end(workers: pl.DataFrame) -> dict[int, int]:
    """Return when each rank began to end; from then on its main thread saves and closes, which is no work."""
    gone = ((pl.col("exit_code") >= 0) | (pl.col("exit_signal") > 0)) & (pl.col("ended_ns") > 0)
    left = (pl.when(pl.col(name) > 0).then(name) for name in ("failed_ns", "left_ns"))
    began = workers.select("rank", at=pl.min_horizontal(*left, pl.when(gone).then("ended_ns"))).drop_nulls()
    return dict(began.iter_rows())


def ran_share(
    counters: pl.DataFrame, rank: int, host: str, since_ns: int, until_ns: int | None = None
) -> float | None:
    """Return the share of a wait in which a main thread ran or waited for a core; None unknown.

    Only whole intervals between samples within the wait count: others contain work from before or after.

    Args:
        counters: as from `needed_for_cpu_time`; a sample equal to the one before was not written.
        until_ns: when the rank began to end; None if it lives.
    """
    sampled = counters.filter(host=host, counter=_SAMPLED)["time_ns"].sort()
    if until_ns is not None:
        sampled = sampled.filter(sampled <= until_ns)
    within: list[int] = sampled.filter(sampled >= since_ns).to_list()
    rows = counters.filter(pl.col("counter").is_in(_CPU_TIME), rank=rank).sort("time_ns")
    if len(within) < 2 or within[-1] - since_ns < MIN_SAMPLED_NS or rows.is_empty():
        return None
    ran_s = 0.0
    for _, of_counter in rows.group_by("counter"):
        first, last = (of_counter.filter(pl.col("time_ns") <= at)["value"] for at in (within[0], within[-1]))
        if last.len():
            ran_s += float(last[-1]) - (first[-1] if first.len() else of_counter["value"][0])
    return min(ran_s * NS_PER_S / (within[-1] - within[0]), 1.0)
