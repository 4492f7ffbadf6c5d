"""Reader of snapshots of PyTorch's allocator: allocations on each GPU, and their origins in the code.

Takes a pickle of `torch.cuda.memory._dump_snapshot()` or of `torch.cuda.memory_snapshot()`, plain or gzipped;
returns for each GPU the allocations in its history, and those live at the end. Since a pickle can run any
code, only dictionaries, lists, strings and numbers are built from it.

The history is a ring buffer: of earlier allocations, only those freed in the history or live at the end are
known. Sizes are those requested for tensors; the allocator rounds them up.
"""

from __future__ import annotations

import gzip
import io
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpro.detect.findings import CodeLocation
from dpro.detect.hang.stacks import own_call
from dpro.documents import DocumentPart
from dpro.errors import InputError
from dpro.ingest.formats import PassedOver

MAX_BYTES = 4 << 30  # of a file, unpacked
ALLOCATED = "active_allocated"  # state of a block in use by a tensor
MODEL, FORWARD, BACKWARD, OPTIMIZER, ELSEWHERE = "model", "forward", "backward", "optimizer", "elsewhere"
BEFORE = "before"  # allocated before the history began
_OPERATOR = re.compile(r"^at::_ops::(?!empty|new_empty|resize)(\w+?)(?:_[A-Z]\w*)?::")
_OF_BACKWARD = re.compile(r"^torch::autograd::(?:generated::(\w+)::apply|(AccumulateGrad)::)")
_MOVES = re.compile(r"torch/nn/modules/module\.py:\d+ (_apply|convert|to)$")


def name_snapshot(_path: Path, head: bytes) -> PassedOver | None:
    """Name a snapshot among files to import; None for other files."""
    if head[:1] != b"\x80" or b"total_size" not in head[:400] or b"device" not in head[:400]:
        return None
    advice = "`dpro memory FILE` shows what used the memory in one"
    return PassedOver("snapshots of PyTorch's allocator", advice)


class Origin(DocumentPart, frozen=True):
    """The code that allocated memory.

    Attributes:
        phase: `model` while it was moved to the GPU, `forward`, `backward`, `optimizer`, `elsewhere`, or
            `before` if the history does not show it.
        place: innermost call in the job's own code; null where unknown.
        operator: operator of PyTorch, or node of the backward graph; empty where unknown.
    """

    phase: str
    place: CodeLocation | None = None
    operator: str = ""


UNKNOWN = Origin(BEFORE)


class Refused(DocumentPart, frozen=True):
    """A refused allocation.

    Attributes:
        requested_bytes: requested bytes.
        allocated_bytes: bytes in use at that time.
        free_bytes: free bytes of the GPU; null where unknown.
    """

    requested_bytes: int
    allocated_bytes: int
    free_bytes: int | None


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one GPU in a snapshot.

    Attributes:
        device: number of the GPU.
        allocations: `bytes`; `origin`, an index of `origins`; `first` and `until`, the events of allocation
            and free: -1 before the history, `num_events` after it.
        origins: origins of allocations.
        num_events: number of allocations and frees in the history.
        updates: last event of each optimizer update that is followed by a forward pass.
        reserved_bytes: bytes of the GPU that the allocator had reserved at the end.
        refused: the last refused allocation; None if the history has none.
    """

    device: int
    allocations: pl.DataFrame
    origins: Sequence[Origin]
    num_events: int
    updates: Sequence[int]
    reserved_bytes: int
    refused: Refused | None

    def allocated_after(self, event: int) -> pl.DataFrame:
        """Return the allocations live right after an event; for -1, before the first."""
        return self.allocations.filter((pl.col("first") <= event) & (pl.col("until") > event))


class _DataUnpickler(pickle.Unpickler):
    """Unpickler that refuses objects of any class."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds an object of {module}.{name}")


def read_snapshot(file: Path) -> list[DeviceMemory]:
    """Return the memory of each GPU that a snapshot has segments or events of.

    Raises:
        InputError: the file cannot be read, or is not a snapshot.
    """
    if file.is_dir():
        raise InputError(f"{file}: a folder; `dpro memory --help` says how a job writes a snapshot")
    try:
        content = _DataUnpickler(io.BytesIO(_unpacked(file))).load()
        segments, traces = _parts(content)
        return list(_devices(segments, traces))
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from error
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{file}: not a snapshot of PyTorch's allocator, as `torch.cuda.memory._dump_snapshot()` writes "
            f"it ({str(error) or type(error).__name__})"
        ) from error


def _unpacked(file: Path) -> bytes:
    with file.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
        content = (gzip.GzipFile(fileobj=stream) if packed else stream).read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES >> 30} GiB")
    return content


def _parts(content: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the segments, and the events by device; PyTorch before 2.0 has only segments."""
    segments, traces = (
        (content["segments"], content.get("device_traces", ()))
        if isinstance(content, dict)
        else (content, ())
    )
    if not all(isinstance(segment, dict) and "blocks" in segment for segment in segments):
        raise ValueError("no segments with blocks")
    return segments, traces


def _devices(segments: Sequence[Any], traces: Sequence[Any]) -> Iterator[DeviceMemory]:
    numbers = {segment["device"] for segment in segments}
    numbers |= {number for number, events in enumerate(traces) if events}
    origins = _Origins()
    for device in sorted(numbers):
        events = traces[device] if device < len(traces) else ()
        yield _memory_of(device, [one for one in segments if one["device"] == device], events, origins)


class _Origins:
    """Index of origins, with each stack examined once."""

    def __init__(self) -> None:
        self.listed: list[Origin] = [UNKNOWN]
        self._by_origin = {UNKNOWN: 0}
        self._by_stack: dict[tuple[int, ...], int] = {}
        self._updates: set[tuple[int, ...]] = set()

    def number(self, frames: Sequence[Any]) -> int:
        """Return the index of a stack's origin in `listed`; 0 for an empty stack."""
        key = tuple(map(id, frames))
        if key not in self._by_stack:
            calls = [
                (str(call["filename"]).replace("\\", "/"), call["line"], call["name"]) for call in frames
            ]
            origin = origin_of(calls) if calls else UNKNOWN
            self._by_stack[key] = self._by_origin.setdefault(origin, len(self.listed))
            if len(self._by_origin) > len(self.listed):
                self.listed.append(origin)
        return self._by_stack[key]


def origin_of(calls: Sequence[tuple[str, int, str]]) -> Origin:
    """Return the origin of an allocation, by its stack.

    Args:
        calls: file, line and function of each call, innermost first; C++ calls are optional.
    """
    python = [f"{file}:{line} {name}" for file, line, name in calls if ".py" in file or file.startswith("<")]
    native = [name for file, _, name in calls if ".py" not in file]
    backward = next((match for match in map(_OF_BACKWARD.match, native) if match), None)
    if any("/torch/optim/" in call for call in python):
        phase = OPTIMIZER
    elif backward or any("autograd::Engine" in name for name in native) or _calls_backward(python):
        phase = BACKWARD
    elif any(map(_MOVES.search, python)):
        phase = MODEL
    elif any(call.endswith((" _call_impl", " forward")) for call in python):
        phase = FORWARD
    else:
        phase = ELSEWHERE
    operator = next((match[1] for match in map(_OPERATOR.match, native) if match), "")
    if backward:
        operator = backward[1] or backward[2]
    return Origin(phase, CodeLocation.of(own_call(python)) if python else None, operator)


def _calls_backward(python: Iterable[str]) -> bool:
    return any("/torch/autograd/" in call and call.endswith(("backward", "grad")) for call in python)


def _memory_of(
    device: int, segments: Sequence[Any], events: Sequence[Any], origins: _Origins
) -> DeviceMemory:
    """Return the memory of one GPU, joining each allocation with the event that freed it."""
    first: list[int] = []
    until: list[int] = []
    sizes: list[int] = []
    made_by: list[int] = []
    live: dict[int, int] = {}  # address -> row
    updates: list[int] = []
    refused: tuple[Any, int] | None = None
    num_events, update = 0, -1

    def add(size: int, origin: int, begins: int) -> int:
        first.append(begins)
        until.append(-1)
        sizes.append(size)
        made_by.append(origin)
        return len(sizes) - 1

    for event in events:
        action = event["action"]
        if action == "oom":
            refused = event, num_events - 1
        if action not in ("alloc", "free_requested"):
            continue
        number = origins.number(event.get("frames") or ())
        row = live.pop(event["addr"], None)
        if action == "alloc":
            if row is not None:  # the history lacks the free of the previous block at this address
                until[row] = num_events
            live[event["addr"]] = add(event["size"], number, num_events)
        else:
            row = add(event["size"], 0, -1) if row is None else row
            until[row] = num_events
        phase = origins.listed[number].phase
        if phase == OPTIMIZER:
            update = num_events
        elif phase == FORWARD and action == "alloc" and update >= 0:
            updates.append(update)
            update = -1
        num_events += 1
    for block in _allocated(segments):
        if block.get("address", -1) not in live:
            add(block.get("requested_size", block["size"]), origins.number(_frames_of(block)), -1)
    ends = np.array(until, np.int64)
    table = {"bytes": sizes, "origin": made_by, "first": first, "until": np.where(ends < 0, num_events, ends)}
    memory = DeviceMemory(
        device, pl.DataFrame(table, schema=dict.fromkeys(table, pl.Int64)), origins.listed, num_events,
        updates, sum(segment["total_size"] for segment in segments), None,
    )  # fmt: skip
    if refused is None:
        return memory
    event, after = refused
    in_use = int(memory.allocated_after(after)["bytes"].sum())
    return replace(memory, refused=Refused(event["size"], in_use, event.get("device_free")))


def _allocated(segments: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the blocks in use by tensors, adding the addresses that older versions leave out."""
    for segment in segments:
        address = segment.get("address", -1)
        for block in segment["blocks"]:
            if block["state"] == ALLOCATED:
                yield {"address": address, **block}
            address += block["size"] if address >= 0 else 0


def _frames_of(block: Mapping[str, Any]) -> Sequence[Any]:
    """Return the stack of a block; PyTorch before 2.1 has it in the block's history of uses."""
    history = block.get("history") or [{}]
    return block.get("frames") or history[0].get("frames") or ()
