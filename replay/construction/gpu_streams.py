"""GPU streams of one rank: their order, dependencies between them, and CPU calls that wait for them.

Takes a `RankView`; returns pairs of span indices, and waits of CPU threads. Where the trace records events
(`cuda_sync`), dependencies come from them. Elsewhere they are inferred and marked so: a collective waits for
the last work its thread launched; a consumer waits for the collective its thread waited on; and a kernel that
starts later than its launch and its stream explain waits for work elsewhere that ended at that moment. The
choice is made per pair of streams, since newer drivers lose the record of some waits and keep others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.replay.construction.cpu_threads import ThreadSegments
from dpro.replay.construction.dependencies import WORK, Dependencies, links
from dpro.replay.construction.rank_view import KIND, Names, RankView, index_of
from dpro.replay.graph import EdgeKind

Pairs = list[tuple[int, int]]

# Measured on V100 and H100 traces: a stream continues within about this time of the event it waited for.
COINCIDENCE_NS = 15_000
# Work that waits for room on the device starts at most this long before the end of the work that fills it, or
# in this last part of a kernel: its blocks run in waves, and the last of two or more leaves room.
DRAINING_NS = 450_000
LAST_WAVE = 0.5
# A CPU thread continues within this time of the GPU work it was blocked on.
WAKE_UP_NS = 200_000
ROUNDING_NS = 2_000
# Possible lead of a device's clock over the host's: work then ends after the call that waited for it.
CLOCK_AHEAD_NS = 50_000
# A launch may block, longer than any call lasts, with this many outstanding; CUDA's queue holds 1,020.
OUTSTANDING = 128
BLOCKED_NS = 100_000
# A thread that was silent for less than this before it read the time of events need not have waited.
SILENCE_NS = 500_000
# A piece of an operator or call was blocked if it lasts this multiple of the usual call of its name (the
# median of at least this many), and this share of the step, and ends with a transfer: within these times
# before and after its end, unless such a match is likelier by chance than this.
TIMES_USUAL = 5
ENOUGH_CALLS = 5
SHARE_OF_STEP = 0.05
BEFORE_WORK_NS, AFTER_WORK_NS = 20_000, 100_000
BY_CHANCE = 0.05
# CPU time of a launching call, for traces without a call to measure it.
CALL_NS = 5_000
LONG_AGO = np.iinfo(np.int64).min // 2

# Asynchronous copies may block, as those from pageable memory do; asynchronous fills never do.
COPIES = r"^(cuda|hip)Mem(cpy|set(2D|3D|D\d+)?($|_))"
ONE_STREAM = r"^(cuda|hip)(Stream|Event)Synchronize"
# These calls return only when the device has drained; of the allocating ones only some do.
# `cudaThreadSynchronize` is the older name of `cudaDeviceSynchronize`.
WHOLE_DEVICE = r"^(cuda|hip)((Device|Thread)Synchronize|Free$|FreeHost)|^cuCtxSynchronize"
ALLOCATING = r"^(cuda|hip)(Malloc|HostAlloc|HostMalloc|MemGetInfo)"
STREAM_WAIT = r"^(cuda|hip)StreamWaitEvent"
READS_EVENTS = r"^(cuda|hip)EventElapsedTime"
# Kineto writes -1 for an unknown record of an event, as a signed or unsigned 32-bit number.
IS_RECORDED = pl.col("record_correlation").is_between(0, (1 << 32) - 2)


@dataclass(frozen=True)
class Streams:
    """The GPU work of a rank in stream order.

    Attributes:
        work: [G] span indices, by stream, then start.
        before: [G] span index of the previous work on the same stream, -1 for the first.
        launched: [S] ns at which each span's launch was called; `LONG_AGO` where launched before the window.
        by_stream: for each stream, its span indices in order.
        called: for each stream, the latest launch call of its work up to each of these.
    """

    work: Ints
    before: Ints
    launched: Ints
    by_stream: dict[int, Ints]
    called: dict[int, Ints]


@dataclass(frozen=True)
class BlockedCall:
    """A call or operator blocked on GPU work.

    Attributes:
        call: its span.
        start, end: extent of the wait, in ns.
        awaited: spans of the work.
        recorded: whether the trace records the wait.
        releases: ns at which it releases the work it launches.
    """

    call: int
    start: int
    end: int
    awaited: list[int]
    recorded: bool
    releases: int


def streams_of(view: RankView) -> Streams:
    """Order a rank's GPU work by stream."""
    gpu = np.flatnonzero(view.on_gpu)
    work = gpu[np.lexsort((view.end[gpu], view.start[gpu], view.stream[gpu]))]
    same = np.append(False, view.stream[work][1:] == view.stream[work][:-1])[: work.size]
    before = np.where(same, np.roll(work, 1), -1)
    launched = np.where(view.launch >= 0, view.start[np.maximum(view.launch, 0)], LONG_AGO)
    by_stream = {int(s): work[view.stream[work] == s] for s in np.unique(view.stream[work])}
    called = {stream: np.maximum.accumulate(launched[order]) for stream, order in by_stream.items()}
    return Streams(work, before, launched, by_stream, called)


def event_links(
    view: RankView, streams: Streams, syncs: pl.DataFrame, needs: Pairs, names: Names
) -> Dependencies:
    """Return the dependencies between streams, and waits for room on the device.

    Args:
        streams: its GPU work in order.
        syncs: its rows of the `syncs` table.
        needs: its data dependencies between streams.
    """
    recorded = _recorded_events(view, streams, syncs)
    pairs = [(source, target, False) for source, target in (*recorded, *needs)]
    lost = syncs.filter((pl.col("kind") == "stream_wait_event") & (pl.col("stream") >= 0) & ~IS_RECORDED)
    waiting = {max(device, 0) * 100_000 + stream for device, stream in lost["device", "stream"].iter_rows()}
    if not recorded or waiting:
        guessed = _inputs_of_collectives(view, streams) + _users_of_collectives(view, streams, names)
        # Those to streams whose waits the trace has lost are kept where nothing is recorded between the two.
        # Without any recorded dependency all are: a wait may be known by its call alone, without a stream.
        between = {(view.stream[s], view.stream[t]) for s, t in recorded}
        pairs += [
            (s, t, True)
            for s, t in guessed
            if not recorded or (view.stream[t] in waiting and (view.stream[s], view.stream[t]) not in between)
        ]
    coincident, draining = _unexplained_starts(view, streams, [(s, t) for s, t, _ in pairs])
    pairs += [(s, t, True) for s, t in coincident]
    unique = {(s, t): inferred for s, t, inferred in reversed(pairs)}
    source, target = np.array([*unique, *draining], np.int64).reshape(-1, 2).T
    kind = np.repeat([EdgeKind.EVENT, EdgeKind.CONTENTION], [len(unique), len(draining)])
    inferred = np.array([*unique.values(), *[True] * len(draining)], np.bool_)
    return links(kind, (WORK, source), (WORK, target), inferred)


def _recorded_events(view: RankView, streams: Streams, syncs: pl.DataFrame) -> Pairs:
    """Return pairs for recorded events: the last work before the record, and the next work after the wait."""
    if syncs.is_empty():
        return []
    waits = syncs.filter((pl.col("kind") == "stream_wait_event") & IS_RECORDED)
    calls = syncs.filter(pl.col("kind") == "event_record").select("correlation", called="start_ns")
    rows = waits.join(calls, left_on="record_correlation", right_on="correlation", how="inner")
    pairs = []
    for row in rows.iter_rows(named=True):
        device = max(row["device"], 0) * 100_000
        recorded, waiting = device + row["record_stream"], device + row["stream"]
        if recorded not in streams.by_stream or waiting not in streams.by_stream:
            continue
        source = _last_launched(streams, recorded, row["called"])
        place = int(np.searchsorted(streams.called[waiting], row["start_ns"], side="left"))
        target = int(streams.by_stream[waiting][place]) if place < streams.called[waiting].size else -1
        if source >= 0 and target >= 0 and view.end[source] <= view.start[target] + ROUNDING_NS:
            pairs.append((source, target))
    return pairs


def _last_launched(streams: Streams, stream: int, time: int) -> int:
    """Return the last work of one stream that was launched before a time; -1 for none."""
    place = int(np.searchsorted(streams.called[stream], time, side="left")) - 1
    return int(streams.by_stream[stream][place]) if place >= 0 else -1


def _inputs_of_collectives(view: RankView, streams: Streams) -> Pairs:
    """Pair each collective with the last work of its thread on another stream, if that ended in time."""
    pairs: Pairs = []
    for _, work in _launches_by_thread(view, streams):
        collective = view.instance[work] >= 0
        previous = np.maximum.accumulate(np.where(collective, -1, np.arange(work.size)))
        preceded = np.flatnonzero(collective & (previous >= 0))
        before, after = work[previous[preceded]], work[preceded]
        fits = view.stream[before] != view.stream[after]
        fits &= view.end[before] <= view.start[after] + ROUNDING_NS
        pairs += zip(before[fits].tolist(), after[fits].tolist())
    return pairs


def _users_of_collectives(view: RankView, streams: Streams, names: Names) -> Pairs:
    """Pair a pending collective with the next work of a thread that makes a stream wait.

    Of the pending collectives that had ended by then, it is the one whose end coincides with the work's
    start, else the oldest.
    """
    waits = np.flatnonzero(names.match(STREAM_WAIT, view.name) & (view.kind == KIND["runtime"]))
    waits = waits[np.argsort(view.start[waits], kind="stable")]
    user = np.full(waits.size, -1, np.int64)
    for tid, work in _launches_by_thread(view, streams):
        of_thread = np.flatnonzero(view.tid[waits] == tid)
        place = np.searchsorted(streams.launched[work], view.start[waits[of_thread]])
        user[of_thread] = np.append(work, -1)[place]
    used = (user >= 0) & (view.instance[user] < 0)
    waits, user = waits[used], user[used]
    pending = _Pending(view, streams)
    waiting = zip(view.start[waits].tolist(), view.start[user].tolist(), view.stream[user].tolist())
    taken = [pending.take(*wait) for wait in waiting]
    return [(collective, span) for collective, span in zip(taken, user.tolist()) if collective >= 0]


class _Pending:
    """A rank's collectives that no stream has waited for yet."""

    def __init__(self, view: RankView, streams: Streams) -> None:
        spans = streams.work[(view.instance[streams.work] >= 0) & (view.launch[streams.work] >= 0)]
        spans = spans[np.argsort(streams.launched[spans], kind="stable")]
        columns = (streams.launched[spans], view.end[spans], view.stream[spans])
        self._facts = dict(zip(spans.tolist(), zip(*(column.tolist() for column in columns))))
        self._rank = {span: number for number, span in enumerate(self._facts)}  # by launch
        by_end = spans[np.argsort(view.end[spans], kind="stable")]
        self._by_end, self._ends = by_end.tolist(), view.end[by_end].tolist()

    def take(self, called: int, begun: int, stream: int) -> int:
        """Remove and return the pending collective that work on a stream had to wait for; -1 for none.

        Args:
            called: ns at which the stream was made to wait; the collective was launched before.
            begun: ns at which the work began.
            stream: stream of the work.
        """
        latest = begun + ROUNDING_NS

        def ready(span: int) -> bool:
            launched, end, where = self._facts[span]
            return bool(launched < called and end <= latest and where != stream)

        low = bisect_left(self._ends, begun - COINCIDENCE_NS)
        high = bisect_left(self._ends, latest + 1)
        close = [span for span in self._by_end[low:high] if span in self._facts and ready(span)]
        asked_for = takewhile(lambda span: self._facts[span][0] < called, self._facts)
        chosen = max(close, key=self._rank.__getitem__) if close else next(filter(ready, asked_for), -1)
        self._facts.pop(chosen, None)
        return chosen


def _launches_by_thread(view: RankView, streams: Streams) -> list[tuple[int, Ints]]:
    """Return for each thread the GPU work it launched, in order of launch."""
    work = streams.work[view.launch[streams.work] >= 0]
    tid = view.tid[view.launch[work]]
    return [
        (int(t), work[tid == t][np.argsort(streams.launched[work[tid == t]], kind="stable")])
        for t in np.unique(tid)
    ]


def _unexplained_starts(view: RankView, streams: Streams, explained: Pairs) -> tuple[Pairs, Pairs]:
    """Find causes of work that starts later than its launch, its stream and known events explain.

    Returns:
        Pairs in which other work ends just when it starts: an unrecorded dependency. And pairs in which work
        elsewhere is about to end: the device was full, and has room as it drains.
    """
    work = streams.work
    ready = np.full(view.start.size, LONG_AGO)
    launch = view.launch[work]
    called = np.where(launch >= 0, view.end[np.maximum(launch, 0)], LONG_AGO)
    before = np.where(streams.before >= 0, view.end[np.maximum(streams.before, 0)], LONG_AGO)
    ready[work] = np.maximum(called, before)
    for source, target in explained:
        ready[target] = max(ready[target], view.end[source])
    late = work[view.start[work] - ready[work] > COINCIDENCE_NS]
    by_end = work[np.argsort(view.end[work], kind="stable")]
    ends = view.end[by_end]
    # Communication leaves room on the device for more of it, and spurious waits for it may form cycles.
    computes = view.instance < 0
    coincident, draining = [], []
    waves = (view.kind[by_end] == KIND["kernel"]) & (view.instance[by_end] < 0)
    lasts = ends - view.start[by_end]
    tail = np.maximum(DRAINING_NS, np.where(waves, LAST_WAVE * lasts, 0)).astype(np.int64)
    longest = int(tail.max(initial=DRAINING_NS))
    around = view.start[late][:, None] + np.array([-COINCIDENCE_NS, ROUNDING_NS // 2, longest])
    for span, (low, now, high) in zip(late.tolist(), np.searchsorted(ends, around, side="right").tolist()):
        elsewhere = view.stream[by_end[low:high]] != view.stream[span]
        earlier = view.start[by_end[low:high]] < view.start[span]
        leaving = ends[low:high] - tail[low:high] <= view.start[span]
        others = low + np.flatnonzero(elsewhere & earlier & leaving)
        if (ended := others[others < now]).size:
            coincident.append((int(by_end[ended[-1]]), span))
        elif others.size and (filling := others[(view.instance[by_end[others]] < 0) | computes[span]]).size:
            draining.append((int(by_end[filling[0]]), span))
    return coincident, draining


def blocked_calls(
    view: RankView,
    streams: Streams,
    segments: Mapping[int, ThreadSegments],
    syncs: pl.DataFrame,
    names: Names,
) -> list[BlockedCall]:
    """Return the CPU calls that were blocked on GPU work: those that end with work they can wait for.

    A call is judged by when it returns, not by its duration: long calls that wait for nothing are common.
    Operators, and calls that are not known to wait, are judged by both.

    Args:
        streams: its GPU work in order.
        segments: innermost spans of its threads.
    """
    awaited = _awaited_by_calls(view, streams, syncs)
    runtime = view.kind == KIND["runtime"]
    is_copy, is_one, is_all, is_allocating = (
        np.flatnonzero(runtime & names.match(pattern, view.name))
        for pattern in (COPIES, ONE_STREAM, WHOLE_DEVICE, ALLOCATING)
    )
    blocked = []
    others = np.setdiff1d(view.calls, is_copy, assume_unique=True)  # copies may block
    cost = int(np.median(view.end[others] - view.start[others])) if others.size else CALL_NS
    copies = np.full(view.start.size, -1, np.int64)  # the work that each call launched
    launched = streams.work[view.launch[streams.work] >= 0]
    copies[view.launch[launched]] = launched
    is_copy = is_copy[copies[is_copy] >= 0]
    is_copy = is_copy[_ends_with(view, is_copy, view.end[copies[is_copy]])]
    for call, copy in zip(is_copy.tolist(), copies[is_copy].tolist()):
        handed_in = min(view.start[call] + cost, max(view.start[call], view.start[copy]))
        blocked.append(_blocked(view, call, int(handed_in), [copy]))
    for call in is_one.tolist():
        recorded = call in awaited
        last = [awaited[call]] if recorded else _last_everywhere(view, streams, call)
        ahead = CLOCK_AHEAD_NS if recorded else ROUNDING_NS
        fitting = [span for span in last if _ends_with(view, call, view.end[span], ahead)]
        if fitting:
            closest = max(fitting, key=lambda span: view.end[span])
            blocked.append(_blocked(view, call, int(view.start[call]), [closest], recorded))
    for call in is_all.tolist():
        last = _last_everywhere(view, streams, call)
        if last and max(view.end[span] for span in last) > view.start[call]:
            blocked.append(_blocked(view, call, int(view.start[call]), last, recorded=True))
    for call in is_allocating.tolist():
        last = _last_everywhere(view, streams, call)
        if last and _ends_with(view, call, max(view.end[span] for span in last)):
            blocked.append(_blocked(view, call, int(view.start[call]), last))
    reading = runtime & names.match(READS_EVENTS, view.name)
    blocked += _full_queue(view, streams, {call.call for call in blocked})
    blocked += _silent_waits(view, streams, np.flatnonzero(reading))
    return blocked + _unusually_long(view, streams, segments, names, blocked)


def _full_queue(view: RankView, streams: Streams, explained: Collection[int]) -> list[BlockedCall]:
    """Return launches that waited for room in the device's queue, inferred as they return when work ends.

    Args:
        explained: calls known to have waited for something else.
    """
    calls = np.unique(view.calls)
    calls = calls[view.end[calls] - view.start[calls] >= BLOCKED_NS]
    if not calls.size or not streams.work.size:
        return []
    by_end = streams.work[np.argsort(view.end[streams.work], kind="stable")]
    ends, launched = view.end[by_end], np.sort(streams.launched[by_end])
    outstanding = np.searchsorted(launched, view.start[calls]) - np.searchsorted(ends, view.end[calls])
    last = np.searchsorted(ends, view.end[calls], side="right") - 1
    late = view.end[calls] - ends[last]
    waited = (
        (last >= 0)
        & (late <= COINCIDENCE_NS)
        & (ends[last] > view.start[calls])
        & (outstanding >= OUTSTANDING)
    )
    return [
        _blocked(view, int(call), int(view.start[call]), [int(by_end[number])])
        for call, number in zip(calls[waited], last[waited])
        if int(call) not in explained
    ]


def _silent_waits(view: RankView, streams: Streams, readers: Ints) -> list[BlockedCall]:
    """Return waits for unrecorded events, inferred from calls that read when events happened.

    A time can be read only after its event, and profilers that leave out `cudaEventSynchronize` still record
    the reading (DDP does both before a forward pass). The sign of the wait is a thread that does nothing
    until work on the GPU has just ended.

    Args:
        readers: the calls that read.
    """
    work = streams.work[np.argsort(view.end[streams.work], kind="stable")]
    ends, launched = view.end[work], streams.launched[work]
    marks = {}
    for tid in np.unique(view.tid[readers]).tolist():
        on_thread = view.on_cpu & (view.tid == tid)
        marks[tid] = np.sort(np.concatenate([[view.begin], view.start[on_thread], view.end[on_thread]]))
    blocked = []
    for call in readers.tolist():
        of_thread, called = marks[int(view.tid[call])], int(view.start[call])
        silent_from = max(int(of_thread[max(int(np.searchsorted(of_thread, called)) - 1, 0)]), view.begin)
        low, high = np.searchsorted(ends, (called - WAKE_UP_NS, called + ROUNDING_NS))
        asked_for = low + np.flatnonzero(launched[low:high] < silent_from)
        if asked_for.size and called - silent_from >= SILENCE_NS:
            awaited = int(work[asked_for[-1]])
            end = min(called, int(view.end[awaited]))
            blocked.append(BlockedCall(call, silent_from, end, [awaited], False, releases=silent_from))
    return blocked


def _unusually_long(
    view: RankView,
    streams: Streams,
    segments: Mapping[int, ThreadSegments],
    names: Names,
    explained: Collection[BlockedCall],
) -> list[BlockedCall]:
    """Return pieces of operators and calls that last too long and end with a transfer: inferred waits.

    An allocator that runs out of memory waits for events inside the operator that requested some, and
    profilers do not record that. The piece keeps the usual time of its call, and waits for the rest. Long
    operators often end by chance with a copy or kernel that they did not wait for: these count for
    synchronising calls only, which must have waited for something.

    Args:
        explained: calls known to have been blocked otherwise.
    """
    work = streams.work[np.argsort(view.end[streams.work], kind="stable")]
    transfers = work[view.instance[work] >= 0]
    synchronises = (view.kind == KIND["runtime"]) & names.match(ONE_STREAM, view.name)
    blocked = []
    for tid, start, end, span, usual in _unusual_pieces(view, segments).tolist():
        can_be, by_chance = (work, np.inf) if synchronises[span] else (transfers, BY_CHANCE)
        awaited = _ended_with(view, streams, can_be, tid, start, end, by_chance)
        since = start + usual
        otherwise = any(view.tid[b.call] == tid and b.start < end and b.end > start for b in explained)
        if awaited < 0 or view.end[awaited] <= since or otherwise:
            continue
        # Leave some of the piece after the wait, for the work it launches to follow.
        until = min(end - 1, int(view.end[awaited]))
        blocked.append(BlockedCall(span, since, until, [awaited], False, releases=int(view.end[span])))
    return blocked


def _unusual_pieces(view: RankView, segments: Mapping[int, ThreadSegments]) -> Ints:
    """Return pieces of operators and calls that last much longer than usual.

    Returns:
        [P, 5] thread, start, end, span, and the usual time of a call of that name, ns.
    """
    size = np.array([of_thread.span.size for of_thread in segments.values()], np.int64)
    tid = np.repeat(np.array([*segments], np.int64), size)
    start, end, span = (
        np.concatenate([tid[:0], *(getattr(of_thread, name) for of_thread in segments.values())])
        for name in ("start", "end", "span")
    )
    works = (span >= 0) & np.isin(view.kind[span], (KIND["cpu_op"], KIND["runtime"]))
    lasts = end - start
    steps_ns = np.diff(view.step_start, append=view.steps_end)
    usual_ns = float(np.median(steps_ns)) if view.step_start.size else float(view.finish - view.begin)
    long = np.flatnonzero(works & (lasts >= SHARE_OF_STEP * usual_ns))
    usual = np.full(view.start.size, np.iinfo(np.int64).max // TIMES_USUAL)
    if long.size:
        spent = np.bincount(span[works], weights=lasts[works], minlength=view.start.size)
        for name in np.unique(view.name[span[long]]).tolist():
            calls = np.flatnonzero((view.name == name) & (spent > 0))
            if calls.size >= ENOUGH_CALLS:
                usual[calls] = np.median(spent[calls])
    long = long[lasts[long] >= TIMES_USUAL * usual[span[long]]]
    return np.stack([tid[long], start[long], end[long], span[long], usual[span[long]]], axis=1)


def _ended_with(
    view: RankView, streams: Streams, work: Ints, tid: int, start: int, end: int, by_chance: float
) -> int:
    """Return the work with which a piece of a thread ends, launched before it on the thread's device; or -1.

    Args:
        work: candidate spans, in order of their ends.
        tid: the thread.
        start, end: extent of the piece, in ns.
        by_chance: largest share of the piece that may be near the end of such work.
    """
    ends = view.end[work]
    low, high = np.searchsorted(ends, (start, end + BEFORE_WORK_NS), side="right")
    if low == high or ends[high - 1] < end - AFTER_WORK_NS:
        return -1
    launched = streams.work[view.launch[streams.work] >= 0]
    devices = view.stream[launched[view.tid[view.launch[launched]] == tid]] // 100_000
    ended = work[low:high]
    ended = ended[(streams.launched[ended] < start) & np.isin(view.stream[ended] // 100_000, devices)]
    near_any = ended.size * (BEFORE_WORK_NS + AFTER_WORK_NS) / (end - start)
    if not ended.size or view.end[ended[-1]] < end - AFTER_WORK_NS or near_any > by_chance:
        return -1
    return int(ended[-1])


def _awaited_by_calls(view: RankView, streams: Streams, syncs: pl.DataFrame) -> dict[int, int]:
    """Return the last work that each call waits for, by index of the call, where the trace records it."""
    if syncs.is_empty():
        return {}
    waits = syncs.filter(
        ((pl.col("kind") == "stream_sync") & (pl.col("stream") >= 0))
        | ((pl.col("kind") == "event_sync") & IS_RECORDED)
    )
    if waits.height == 0:
        return {}
    records = syncs.filter(pl.col("kind") == "event_record").select("correlation", recorded="start_ns")
    waits = waits.join(records, left_on="record_correlation", right_on="correlation", how="left")
    calls = index_of(view.span_id)(waits["span_id"].to_numpy())
    awaited: dict[int, int] = {}
    for call, row in zip(calls.tolist(), waits.iter_rows(named=True)):
        of_stream = row["kind"] == "stream_sync"
        stream = max(row["device"], 0) * 100_000 + (row["stream"] if of_stream else row["record_stream"])
        until = row["start_ns"] if of_stream else row["recorded"]
        if call >= 0 and until is not None and stream in streams.by_stream:
            last = _last_launched(streams, stream, until)
            awaited |= {call: last} if last >= 0 else {}
    return awaited


def _last_everywhere(view: RankView, streams: Streams, call: int) -> list[int]:
    """Return the last work on each stream that was launched before a call and ended before it returned."""
    last = [_last_launched(streams, stream, view.start[call]) for stream in streams.by_stream]
    return [span for span in last if span >= 0 and view.end[span] <= view.end[call] + ROUNDING_NS]


def _ends_with(view: RankView, call: int | Ints, work_end: int | Ints, ahead_ns: int = ROUNDING_NS) -> Bools:
    """Return whether a call was still running when the work ended and returned soon after.

    Args:
        ahead_ns: bound on the lead of the device's clock over the host's.
    """
    late = view.end[call] - work_end
    return (view.start[call] < work_end) & (late >= -ahead_ns) & (late <= WAKE_UP_NS)


def _blocked(
    view: RankView, call: int, start: int, awaited: list[int], recorded: bool = False
) -> BlockedCall:
    end = min(int(view.end[call]), max(int(view.end[span]) for span in awaited))
    return BlockedCall(call, min(start, end), end, awaited, recorded, releases=min(start, end))
