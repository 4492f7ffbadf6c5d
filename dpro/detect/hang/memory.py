"""GPU memory that ran out: what filled it, and what to do, of ranks that ended by it or went on.

In: tables `out_of_memory` and `workers`, and findings of ranks that are gone. Out: the same with what held
memory as evidence, or one where all ranks ran out at once; a line for each rank that went on. What the table
does not hold is said to be unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.hang.case import MEMORY_ERROR, own_call
from dpro.units import format_bytes
from dpro.words import counted, few, numbers_in_words

CAUSE = "out of memory: "  # how causes begin of ranks that ended by it; then what held most
UNHELD, FREE, OUTSIDE, UNKNOWN = "held by no Python object", "unused pieces", "other processes", "not known"
SHOWN = 4  # names that are listed of a kind
NOTABLE = 0.02  # of what is allocated: kinds that hold less are not listed
MOST = 0.25  # of the memory: what others or unused pieces must take at least to be named as what filled it
HOST_KILL = "for lack of memory the kernel killed"  # in warnings of recordings
_SHARD = "shard the model over the ranks (FSDP, ZeRO, tensor parallelism: `dpro plan` has layouts)"
_LESS = (
    "make the micro-batch smaller and accumulate gradients, or compute activations again in the backward "
    "(`torch.utils.checkpoint`)"
)
_ADVICE = {
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


def advice_on(cause: str) -> str | None:
    """What to do about a cause of a finding; None where it is another."""
    return _ADVICE.get(cause.removeprefix(CAUSE)) if cause.startswith(CAUSE) else None


def with_memory(
    findings: Sequence[Finding], refused: pl.DataFrame, workers: pl.DataFrame, warnings: Iterable[str]
) -> list[Finding]:
    """Add to findings of ranks that are gone what filled the memory that they ran out of.

    Where more ranks ran out at once than could be a first cause, they are a finding of their own.

    Args:
        refused: table `out_of_memory`.
        warnings: of the recording: what the kernel killed for lack of the host's memory.
    """
    ran_out = workers.filter(pl.col("error").str.starts_with(MEMORY_ERROR))["rank"].sort().to_list()
    dead = [finding for finding in findings if finding.class_ == "dead.rank"]
    if ran_out and not findings:
        which = "ranks" if len(ran_out) > 1 else "rank", numbers_in_words(ran_out)
        dead = [Finding("dead.rank", *which, tuple(ran_out), 1.0, 0.9, 0.0, ())]
        findings = dead
    last = {row["rank"]: row for row in refused.sort("time_ns").iter_rows(named=True)}
    of_host = [warning for warning in warnings if HOST_KILL in warning]
    explained = []
    for finding in findings:
        if finding in dead and set(finding.ranks) <= {*ran_out}:
            row = next((last[rank] for rank in finding.ranks if rank in last), None)
            lines = described(row) if row else ["not known: what filled the memory, as nothing recorded it"]
            cause = CAUSE + (most_of(row) if row else UNKNOWN)
            finding = replace(finding, observations=(*finding.observations, *lines), cause=cause)
        elif finding in dead and of_host and any("SIGKILL" in line for line in finding.evidence):
            finding = replace(finding, observations=(*finding.observations, *of_host))
        explained.append(finding)
    return explained


def went_on(refused: pl.DataFrame, workers: pl.DataFrame) -> list[str]:
    """A line for each rank that was refused memory and did not end by it."""
    ended = workers.filter(pl.col("error").str.starts_with(MEMORY_ERROR))["rank"].to_list()
    rows = refused.filter(~pl.col("rank").is_in(ended)).sort("time_ns")
    times = dict(rows.group_by("rank").agg(pl.max_horizontal(pl.len(), pl.col("refused").max())).iter_rows())
    last = {row["rank"]: row for row in rows.iter_rows(named=True)}
    return [
        f"rank {rank} was refused memory {counted(times[rank], 'time')} and went on, which empties the "
        f"allocator's cache each time; the last time, {'; '.join(described(last[rank]))}"
        for rank in sorted(last)
    ]


def most_of(row: Mapping[str, Any]) -> str:
    """What filled the memory: pieces too small, others on the GPU, or the kind that holds most."""
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


def described(row: Mapping[str, Any]) -> list[str]:
    """What was asked for, what was there, and what held it, one line each.

    Args:
        row: of table `out_of_memory`.
    """
    where = f" by {row['module']}" if row["module"] else ""
    phase = {"optimizer": " in the optimizer's update"}.get(row["phase"], f" in the {row['phase']}")
    asked = f"{format_bytes(row['requested_bytes'])} were asked for{where}{phase * bool(row['phase'])}"
    calls = row["calls"].splitlines()
    lines = [asked + (f" ({own_call(calls)})" if calls else "")]
    if row["allocated_bytes"] >= 0:
        of = f" of {format_bytes(row['total_bytes'])}" if row["total_bytes"] >= 0 else ""
        lines[0] += f" with {format_bytes(row['allocated_bytes'])}{of} in use by PyTorch"
    by_kind = _by_kind(row)
    for kind, size in by_kind.most_common():
        if size >= NOTABLE * sum(by_kind.values()):
            of_rest = ": held by no tensor that Python has, and the allocator's blocks could not be read"
            lines.append(f"{format_bytes(size)} {kind}{of_rest if kind == UNKNOWN else _names_of(row, kind)}")
    unused = row["reserved_bytes"] - row["allocated_bytes"] if row["allocated_bytes"] >= 0 else 0
    if unused > row["requested_bytes"]:
        largest = row["largest_free_bytes"]
        pieces = f", the largest piece {format_bytes(largest)}" if largest >= 0 else ""
        lines.append(f"{format_bytes(unused)} reserved by PyTorch and not in use{pieces}")
    outside = row["total_bytes"] - max(row["free_bytes"], 0) - row["reserved_bytes"]
    if row["total_bytes"] >= 0 and row["reserved_bytes"] >= 0 and outside > NOTABLE * row["total_bytes"]:
        lines.append(f"{format_bytes(outside)} in use by CUDA, its libraries, and other processes")
    if by_kind[UNHELD] and not row["history"]:
        lines.append(f"not known: which lines allocated what is {UNHELD}; no history was recorded")
    return lines


def _names_of(row: Mapping[str, Any], kind: str) -> str:
    """The names that hold most of a kind."""
    rows = zip(row["kinds"], row["names"], row["bytes"], strict=True)
    named = [f"{name} {format_bytes(size)}" for of_kind, name, size in rows if of_kind == kind and name]
    return f": {few(named, SHOWN)}" if named else ""
