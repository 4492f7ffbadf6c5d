"""GPU memory that ran out: what filled it, and what to do, for ranks that it ended and ranks that went on.

Takes tables `out_of_memory` and `workers`, and findings of ranks that are gone. Returns the findings with
what occupied the memory as evidence, or one finding where all ranks ran out at once; and a line for each rank
that went on. Facts missing from the table are reported as unknown.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.hang.case import MEMORY_ERROR
from dpro.detect.hang.stacks import own_call
from dpro.detect.observations import Observation, Value, observe
from dpro.words import counted, first_few, numbers_in_words

CAUSE = "out of memory"  # the cause of ranks that GPU memory ended
GREW = "memory that grew"  # the cause of ranks that were killed
OF_HOST = (
    "look for what is kept from step to step: losses and outputs in lists (keep `loss.item()`, or "
    "`.detach().cpu()` of few), caches, a Dataset that keeps what it has read"
)
UNHELD, FREE, OUTSIDE, UNKNOWN = "held by no Python object", "unused pieces", "other processes", "not known"
SHOWN = 4  # names listed per kind
NOTABLE = 0.02  # kinds with a smaller share of the allocated memory are not listed
MOST = 0.25  # least share of the memory for which other processes or unused pieces count as what filled it
# In warnings of recordings; older ones say it the other way round.
HOST_KILL = re.compile(r"the kernel killed \d+ process\(es\) for lack|for lack of memory the kernel killed")
_SHARD = "shard the model over the ranks (FSDP, ZeRO, tensor parallelism: `dpro plan` has layouts)"
_LESS = (
    "make the micro-batch smaller and accumulate gradients, or compute activations again in the backward "
    "(`torch.utils.checkpoint`)"
)
ADVICE = {
    "parameters": _SHARD,
    "gradients": f"{_SHARD}, or keep gradients in bf16",
    "optimizer state": f"{_SHARD}, or use an optimizer with smaller state (8 bits, or Adafactor)",
    "buffers": "see which buffers need to be on the GPU",
    "activations": _LESS,
    UNHELD: f"{_LESS}; `torch.cuda.memory._record_memory_history()` in the script lets dpro say which lines",
    "other tensors": "look for tensors that are kept longer than a step: caches, outputs and losses in lists",
    FREE: "set PYTORCH_ALLOC_CONF=expandable_segments:True (before PyTorch 2.9 PYTORCH_CUDA_ALLOC_CONF): "
    "enough was free, but in pieces",
    OUTSIDE: "see with `nvidia-smi` which processes share the GPU",
    UNKNOWN: f"{_LESS}, or shard the model (`dpro plan` has layouts with their memory)",
}
_NOT_RECORDED = observe(
    "memory-not-recorded", "not known: what filled the memory, as nothing recorded it", filled_by=UNKNOWN
)
_NO_HISTORY = observe(
    "no-memory-history", f"not known: which lines allocated what is {UNHELD}; no history was recorded"
)
_OF_REST = ": held by no tensor that Python has, and the allocator's blocks could not be read"


def filled_by(finding: Finding) -> str:
    """Return what occupied most of the memory that the ranks of a finding ran out of."""
    held = (one.values["filled_by"] for one in finding.observations if "filled_by" in one.values)
    return str(next(held, UNKNOWN))


def advice_on(finding: Finding) -> str | None:
    """Return what to do about memory that ran out; None where there is no advice."""
    return ADVICE.get(filled_by(finding))


def with_memory(
    findings: Sequence[Finding], refused: pl.DataFrame, workers: pl.DataFrame, warnings: Iterable[str]
) -> list[Finding]:
    """Add what filled the memory to findings of ranks that ran out of it and are gone.

    Without any finding, ranks that ran out become one: too many ran out at once for a first cause.

    Args:
        refused: table `out_of_memory`.
        warnings: of the recording: what the kernel killed for lack of host memory.
    """
    ran_out = workers.filter(pl.col("error").str.starts_with(MEMORY_ERROR))["rank"].sort().to_list()
    dead = [finding for finding in findings if finding.class_ == "dead.rank"]
    if ran_out and not findings:
        which = "ranks" if len(ran_out) > 1 else "rank", numbers_in_words(ran_out)
        dead = [Finding("dead.rank", *which, tuple(ran_out), 1.0, 0.9, 0.0, ())]
        findings = dead
    last = {row["rank"]: row for row in refused.sort("time_ns").iter_rows(named=True)}
    of_host = [
        observe("killed-for-memory", "{warning}", warning=warning)
        for warning in warnings
        if HOST_KILL.search(warning)
    ]
    explained = []
    for finding in findings:
        if finding in dead and set(finding.ranks) <= {*ran_out}:
            row = next((last[rank] for rank in finding.ranks if rank in last), None)
            finding = replace(
                finding.observing(*(observe_memory(row) if row else [_NOT_RECORDED])), cause=CAUSE
            )
        elif finding in dead and any(
            one.values.get("exit_signal") == signal.SIGKILL for one in finding.observations
        ):
            finding = finding.observing(*of_host)
        explained.append(finding)
    return explained


def describe_survivors(refused: pl.DataFrame, workers: pl.DataFrame) -> list[str]:
    """Return a line for each rank that was refused memory and did not end by it."""
    ended = workers.filter(pl.col("error").str.starts_with(MEMORY_ERROR))["rank"].to_list()
    rows = refused.filter(~pl.col("rank").is_in(ended)).sort("time_ns")
    times = dict(rows.group_by("rank").agg(pl.max_horizontal(pl.len(), pl.col("refused").max())).iter_rows())
    last = {row["rank"]: row for row in rows.iter_rows(named=True)}
    return [
        f"rank {rank} was refused memory {counted(times[rank], 'time')} and continued, which empties the "
        "allocator's cache each time; the last time, "
        + "; ".join(one.text for one in observe_memory(last[rank]))
        for rank in sorted(last)
    ]


def main_use_of(row: Mapping[str, Any]) -> str:
    """Return what filled the memory: unused pieces too small to use, other processes, or the largest kind."""
    unused = row["reserved_bytes"] - row["allocated_bytes"] if row["allocated_bytes"] >= 0 else 0
    total = row["total_bytes"]
    if unused >= row["requested_bytes"] > 0 and unused >= MOST * max(total, row["reserved_bytes"]):
        return FREE
    outside = total - max(row["free_bytes"], 0) - row["reserved_bytes"]
    by_kind = _by_kind(row)
    largest = max(by_kind.values(), default=0)
    if row["reserved_bytes"] >= 0 and outside > max(MOST * total, largest):
        return OUTSIDE
    return by_kind.most_common(1)[0][0] if by_kind else UNKNOWN


def _by_kind(row: Mapping[str, Any]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for kind, size in zip(row["kinds"], row["bytes"], strict=True):
        sums[kind] += size
    if row["allocated_bytes"] > sums.total():
        sums[UNKNOWN] = row["allocated_bytes"] - sums.total()
    return sums


def observe_memory(row: Mapping[str, Any]) -> list[Observation]:
    """Return the observations of how much was requested, how much was there, and what occupied it.

    Args:
        row: of table `out_of_memory`.
    """
    asked = observe(
        "memory-asked-for", "{requested_bytes} were requested", requested_bytes=row["requested_bytes"],
        filled_by=main_use_of(row),
    )  # fmt: skip
    if row["module"]:
        asked = asked.then(" by {module}", module=row["module"])
    if row["phase"]:
        phase = " in the optimizer's update" if row["phase"] == "optimizer" else " in the {phase}"
        asked = asked.then(phase, phase=row["phase"])
    if calls := row["calls"].splitlines():
        asked = asked.then(" ({own_call})", own_call=own_call(calls))
    if row["allocated_bytes"] >= 0:
        of = " of {total_bytes}" if row["total_bytes"] >= 0 else ""
        asked = asked.then(
            f" with {{allocated_bytes}}{of} in use by PyTorch",
            allocated_bytes=row["allocated_bytes"], total_bytes=row["total_bytes"],
        )  # fmt: skip
    observed = [asked]
    by_kind = _by_kind(row)
    for kind, size in by_kind.most_common():
        if size >= NOTABLE * sum(by_kind.values()):
            held = observe("memory-held", "{held_bytes} {held_by}", held_bytes=size, held_by=kind)
            observed.append(held.then(_OF_REST) if kind == UNKNOWN else _with_names(held, row, kind))
    unused = row["reserved_bytes"] - row["allocated_bytes"] if row["allocated_bytes"] >= 0 else 0
    if unused > row["requested_bytes"]:
        sentence = "{unused_bytes} reserved by PyTorch and not in use"
        free = observe("memory-not-in-use", sentence, unused_bytes=unused)
        largest = row["largest_free_bytes"]
        pieces = ", the largest piece {largest_free_bytes}"
        observed.append(free.then(pieces, largest_free_bytes=largest) if largest >= 0 else free)
    outside = row["total_bytes"] - max(row["free_bytes"], 0) - row["reserved_bytes"]
    if row["total_bytes"] >= 0 and row["reserved_bytes"] >= 0 and outside > NOTABLE * row["total_bytes"]:
        sentence = "{outside_bytes} in use by CUDA, its libraries, and other processes"
        observed.append(observe("memory-of-others", sentence, outside_bytes=outside))
    if by_kind[UNHELD] and not row["history"]:
        observed.append(_NO_HISTORY)
    return observed


def _with_names(held: Observation, row: Mapping[str, Any], kind: str) -> Observation:
    rows = zip(row["kinds"], row["names"], row["bytes"], strict=True)
    named = [(name, size) for of_kind, name, size in rows if of_kind == kind and name]
    said = [f"{{name_{place}}} {{name_{place}_bytes}}" for place in range(len(named))]
    values: dict[str, Value] = {}
    for place, (name, size) in enumerate(named[:SHOWN]):
        values |= {f"name_{place}": name, f"name_{place}_bytes": size}
    return held.then(f": {first_few(said, SHOWN)}", **values) if named else held
