"""The answers of `dpro memory`: documents for programs, lines for people.

Takes the results of `snapshot` and `peak` on each GPU; returns one document on a snapshot, or on two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from dpro.detect.hang.memory import ADVICE, FREE
from dpro.documents import Document, DocumentPart
from dpro.errors import UsageError
from dpro.extensions.memory.peak import GrowingOrigin, Held, Peak, find_growth, find_peak
from dpro.extensions.memory.snapshot import (
    BACKWARD,
    BEFORE,
    ELSEWHERE,
    FORWARD,
    MODEL,
    OPTIMIZER,
    DeviceMemory,
    Origin,
    Refused,
    read_snapshot,
)
from dpro.units import format_bytes
from dpro.words import counted

_WORDS = {
    MODEL: "model.to(device)",
    FORWARD: "forward",
    BACKWARD: "backward",
    OPTIMIZER: "optimizer",
    ELSEWHERE: "other code",
    BEFORE: "allocated before recording started",
}
_ADVICE_ON = {FORWARD: "activations", OPTIMIZER: "optimizer state", MODEL: "parameters"}
_KEPT = ADVICE["other tensors"]
_NO_HISTORY = (
    "no stack is known: call torch.cuda.memory._record_memory_history() at the start of the script, before "
    "torch.cuda.memory._dump_snapshot(FILE)"
)


class DeviceMemoryDocument(DocumentPart, frozen=True, kw_only=True):
    """The memory of one GPU.

    Attributes:
        device: number of the GPU in the process.
        peak_bytes: peak allocated bytes in the history.
        end_bytes: bytes allocated at the end.
        reserved_bytes: bytes of the GPU that the allocator had reserved at the end, in use or not.
        num_events: number of allocations and frees in the history; 0 without a history.
        peak_event: event after which the peak was reached; -1 if it was before the history.
        refused: the last refused allocation; null if there is none.
        held: memory at the peak by origin, the largest first.
        growing: origins that grew with each step, the fastest first.
        remedy: how to reduce the largest part; empty where unknown.
    """

    device: int
    peak_bytes: int
    end_bytes: int
    reserved_bytes: int
    num_events: int
    peak_event: int
    refused: Refused | None
    held: list[Held]
    growing: list[GrowingOrigin]
    remedy: str


class MemoryDocument(Document, frozen=True, kw_only=True):
    """Memory of GPUs by origin, from a snapshot.

    Attributes:
        devices: GPUs on which memory was allocated.
    """

    devices: list[DeviceMemoryDocument]


class ChangeDocument(DocumentPart, frozen=True):
    """Memory of one origin at the peaks of two snapshots.

    Attributes:
        origin: the origin.
        before_bytes: bytes in the first snapshot.
        after_bytes: bytes in the second snapshot.
    """

    origin: Origin
    before_bytes: int
    after_bytes: int


class DeviceChangeDocument(DocumentPart, frozen=True, kw_only=True):
    """The memory of one GPU in two snapshots.

    Attributes:
        device: number of the GPU in the process of the second snapshot.
        before_bytes: peak of the first snapshot.
        after_bytes: peak of the second snapshot.
        changed: origins whose memory changed, the largest change first.
    """

    device: int
    before_bytes: int
    after_bytes: int
    changed: list[ChangeDocument]


class MemoryChangeDocument(Document, frozen=True, kw_only=True):
    """Changes of memory by origin between the peaks of two snapshots.

    Attributes:
        devices: GPUs in both snapshots, matched by number; or the only GPU of each.
    """

    devices: list[DeviceChangeDocument]


def memory_document(file: Path) -> MemoryDocument:
    """Return the memory in a snapshot by origin.

    Raises:
        InputError: the file is not a snapshot.
    """
    return MemoryDocument(devices=[_device_document(memory) for memory in read_snapshot(file)])


def _device_document(memory: DeviceMemory) -> DeviceMemoryDocument:
    peak = find_peak(memory)
    return DeviceMemoryDocument(
        device=memory.device, peak_bytes=peak.bytes, end_bytes=peak.end_bytes,
        reserved_bytes=memory.reserved_bytes, num_events=memory.num_events, peak_event=peak.event,
        refused=memory.refused, held=list(peak.held), growing=find_growth(memory),
        remedy=_remedy(memory, peak),
    )  # fmt: skip


def _remedy(memory: DeviceMemory, peak: Peak) -> str:
    """Return advice against fragmentation if that explains a refusal, else on the phase with most memory."""
    if memory.refused is not None:
        in_use, wanted = memory.refused.allocated_bytes, memory.refused.requested_bytes
        if memory.reserved_bytes - in_use >= wanted:  # snapshots only have the reserved bytes at the end
            return ADVICE[FREE]
    by_phase: Counter[str] = Counter()
    for one in peak.held:
        by_phase[one.origin.phase] += one.bytes
    largest = max(by_phase, key=by_phase.__getitem__, default="")
    return ADVICE[_ADVICE_ON[largest]] if largest in _ADVICE_ON else ""


def memory_change_document(before: Path, after: Path) -> MemoryChangeDocument:
    """Return the changes of memory by origin from one snapshot to another.

    Raises:
        InputError: a file is not a snapshot.
        UsageError: no GPU is in both snapshots.
    """
    old, new = read_snapshot(before), read_snapshot(after)
    if len(old) == len(new) == 1:
        pairs = [(old[0], new[0])]
    else:
        by_number = {memory.device: memory for memory in old}
        pairs = [(by_number[memory.device], memory) for memory in new if memory.device in by_number]
    if not pairs:
        raise UsageError(f"{before} and {after}: no GPU is in both")
    return MemoryChangeDocument(devices=[_change_document(*pair) for pair in pairs])


def _change_document(old: DeviceMemory, new: DeviceMemory) -> DeviceChangeDocument:
    before, after = find_peak(old), find_peak(new)
    then, now = ({one.origin: one.bytes for one in peak.held} for peak in (before, after))
    changed = [ChangeDocument(one, then.get(one, 0), now.get(one, 0)) for one in then | now]
    changed = [one for one in changed if one.before_bytes != one.after_bytes]
    changed.sort(key=lambda one: -abs(one.after_bytes - one.before_bytes))
    return DeviceChangeDocument(
        device=new.device, before_bytes=before.bytes, after_bytes=after.bytes, changed=changed
    )


def lines_of_memory(document: MemoryDocument, most: int) -> Iterator[str]:
    """Yield the lines on a snapshot, first those of GPUs with a refused allocation.

    Args:
        most: largest number of rows per GPU.
    """
    for one in sorted(document.devices, key=lambda one: one.refused is None):
        yield from _head_of(one)
        rows = [
            (format_bytes(held.bytes), f"{held.bytes / max(one.peak_bytes, 1):.0%}", f"{held.blocks:,}",
             origin_in_words(held.origin))
            for held in one.held
        ]  # fmt: skip
        yield from _aligned(("at the peak", "share", "blocks", "allocated in"), rows, most)
        for growing in one.growing[:most]:
            size = format_bytes(growing.bytes_per_step)
            yield (
                f"GROWS  {size} more after each of {growing.steps} steps: {origin_in_words(growing.origin)}"
            )
        if one.growing:
            yield f"       {_KEPT}"
        if not any(held.origin.phase != BEFORE for held in one.held):
            yield f"note   {_NO_HISTORY}"
        elif one.remedy:
            yield f"TRY    {one.remedy}"
        yield ""


def _head_of(one: DeviceMemoryDocument) -> Iterator[str]:
    when = f"after event {one.peak_event + 1:,} of {one.num_events:,}"
    where = "at the end, no history" if not one.num_events else when if one.peak_event >= 0 else "at first"
    yield (
        f"GPU {one.device}  peak {format_bytes(one.peak_bytes)} ({where}), at the end "
        f"{format_bytes(one.end_bytes)} in use of {format_bytes(one.reserved_bytes)} reserved"
    )
    if one.refused is not None:
        free = one.refused.free_bytes
        left = "" if free is None else f" and {format_bytes(free)} free on the GPU"
        yield (
            f"out of memory: an allocation of {format_bytes(one.refused.requested_bytes)} failed with "
            f"{format_bytes(one.refused.allocated_bytes)} in use{left}"
        )


def origin_in_words(origin: Origin) -> str:
    """Return an origin in words: `forward: attend (model.py:12), softmax`."""
    place = origin.place.in_words if origin.place else ""
    return ": ".join(filter(None, [_WORDS[origin.phase], ", ".join(filter(None, [place, origin.operator]))]))


def _aligned(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], most: int) -> Iterator[str]:
    """Yield rows with all columns but the last right-aligned, then the number of rows left out."""
    shown = [head, *rows[:most]] if rows else []
    widths = [max(map(len, column)) for column in zip(*shown)]
    for row in shown:
        numbers = "  ".join(text.rjust(width) for text, width in zip(row[:-1], widths))
        yield f"{numbers}  {row[-1]}"
    if len(rows) > most:
        yield f"and {counted(len(rows) - most, 'smaller one')}: -n {len(rows)} shows all"


def lines_of_change(document: MemoryChangeDocument, most: int) -> Iterator[str]:
    """Yield the lines on the changes between two snapshots.

    Args:
        most: largest number of rows per GPU.
    """
    for one in document.devices:
        sizes = f"{format_bytes(one.before_bytes)} before, {format_bytes(one.after_bytes)} after"
        yield f"GPU {one.device}  peak {sizes} ({_signed(one.after_bytes - one.before_bytes)})"
        rows = [
            (_signed(changed.after_bytes - changed.before_bytes), format_bytes(changed.before_bytes),
             format_bytes(changed.after_bytes), origin_in_words(changed.origin))
            for changed in one.changed
        ]  # fmt: skip
        yield from _aligned(("change", "before", "after", "allocated in"), rows, most)
        yield ""


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"
