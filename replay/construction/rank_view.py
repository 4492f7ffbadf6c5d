"""One rank in one window as arrays, from which its part of the graph is built.

Takes rows of the tables for one rank and window, on the aligned clock; returns a `RankView`, whose indices
all other modules of the construction share. Other ranks are not considered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.replay.engine import distinct
from dpro.replay.steps import OF_WINDOW, begins_of_work, without_last_wait
from dpro.schema import GPU_WORK_KINDS, SPAN_KINDS

KIND = {kind: code for code, kind in enumerate(SPAN_KINDS)}
# Masks by kind of span.
IS_ON_CPU = np.isin(SPAN_KINDS, ("cpu_op", "runtime", "annotation", "python"))
IS_ON_GPU = np.isin(SPAN_KINDS, GPU_WORK_KINDS)


class Names:
    """The graph's names by code, with the results of pattern matches cached for all ranks."""

    def __init__(self, names: pl.Series) -> None:
        """Start without cached matches."""
        self._names = names
        self._found: dict[str, Bools] = {}

    def match(self, pattern: str, codes: Ints) -> Bools:
        """Return [K] whether the name of each code matches.

        Args:
            pattern: a regular expression.
            codes: [K].
        """
        if pattern not in self._found:
            self._found[pattern] = self._names.str.contains(pattern).to_numpy()
        return self._found[pattern][codes]


@dataclass(frozen=True)
class RankView:
    """Spans and collectives of one rank in one window.

    Attributes:
        span_id, kind, name, start, end, tid, stream: [S] columns of its spans, sorted by start, outer before
            inner; `name` is a code into the graph's names, `stream` numbers (device, stream).
        launch: [S] for GPU work, the index of the runtime span that launched it; for the span that ran a
            CPU collective, the index of the call; -1 where unknown.
        instance: [S] for a span that ran a collective its instance, else -1; the last of several messages.
        memberships: [2, K] spans that ran collectives, and the instance of each.
        transfer: [S] for a span that ran a collective, ns for which it moved data, else -1.
        is_message: [S] whether it is a send or receive of CPU tensors: its range begins with the call, on the
            calling thread, and lasts until that thread asks whether it is over.
        is_asked: [S] whether the time at which its caller asked for its result is known: for messages, and
            for pretended collectives, which were over when they began.
        asked: [S] that time, in ns; for other spans their end. For messages, `end` is when they were over.
        payload, message: [S] for a span that ran a collective its bytes (-1 where unknown) and index into
            `Graph.messages`, else -1.
        rendezvous: [S] ns on the aligned clock when the last member was ready, else -1.
        main_tid: the thread that drives the training loop.
        step_start, step_number: [T] steps of the rank in this window.
        steps_end: ns, end of the last step; without any, the beginning of the window's one step, or -1 if the
            run has steps and the window none.
        begin, finish: ns, the window's extent on this rank.
    """

    rank: int
    window: int
    span_id: Ints
    kind: Ints
    name: Ints
    start: Ints
    end: Ints
    tid: Ints
    stream: Ints
    launch: Ints
    instance: Ints
    memberships: Ints
    transfer: Ints
    is_message: Bools
    is_asked: Bools
    asked: Ints
    payload: Ints
    message: Ints
    rendezvous: Ints
    main_tid: int
    step_start: Ints
    step_number: Ints
    steps_end: int
    begin: int
    finish: int

    @cached_property
    def on_cpu(self) -> Bools:
        """[S] mask of spans on CPU threads, except those that ran a collective on a worker."""
        return IS_ON_CPU[self.kind] & (self.instance < 0)

    @cached_property
    def on_gpu(self) -> Bools:
        """[S] mask of work on GPU streams."""
        return IS_ON_GPU[self.kind]

    @cached_property
    def calls(self) -> Ints:
        """Indices of the spans that launched something, ascending."""
        launches = np.zeros(self.launch.size, np.bool_)
        launches[self.launch[self.launch >= 0]] = True
        return np.flatnonzero(launches)

    def step_of(self, time: Ints) -> Ints:
        """Return the step that contains each time: -1 before the first, -2 after the last."""
        if self.step_start.size == 0:
            return np.full(time.size, -2) if self.steps_end < 0 else np.where(time < self.steps_end, -1, 0)
        place = np.searchsorted(self.step_start, time, side="right") - 1
        step = np.where(place >= 0, self.step_number[np.maximum(place, 0)], -1)
        return np.where(time >= self.steps_end, -2, step)


def make_rank_view(
    rank: int, window: int, spans: pl.DataFrame, matched: pl.DataFrame, steps: pl.DataFrame, stepped: bool
) -> RankView:
    """Make the arrays of one rank in one window.

    Args:
        spans: its spans, with `code` for the name, and whether spans of that name mark steps (`marks`) or
            load input (`loads`).
        matched: its matched collectives, with `rendezvous_ns`, `transfer_ns`, `is_message`, `asked_after_ns`,
            `payload` and `message`.
        steps: its steps in the window.
        stepped: whether the run has steps, so that time outside them belongs to no step.
    """
    if not stepped:
        spans = without_last_wait(spans)
    spans = spans.with_columns(end=pl.col("start_ns") + pl.col("duration_ns"))
    if not _is_sorted(*(spans[name].to_numpy() for name in ("start_ns", "end", "span_id"))):
        spans = spans.sort(["start_ns", "end", "span_id"], descending=[False, True, False])
    start = spans["start_ns"].to_numpy()
    kind = spans["kind"].to_physical().cast(pl.Int64).to_numpy()
    on_gpu = IS_ON_GPU[kind]
    place = index_of(spans["span_id"].to_numpy())
    # Keep the collectives whose span is in this window; `executed` is the index of that span.
    executed = place(matched["span_id"].to_numpy())
    matched, executed = matched.filter(pl.Series(executed >= 0)), executed[executed >= 0]
    moved, is_message = _moved(matched, executed, start.size)
    # The span of a message lasts until its caller asks for it, but its data had moved before.
    is_asked, asked, end = _requests_and_ends(start, spans["end"].to_numpy(), is_message, moved)
    # GPU work is launched by the call of its correlation; a CPU collective by its recorded call.
    launch = _launches(spans, kind, on_gpu)
    called = place(matched["launch_span_id"].to_numpy())
    launch[executed] = np.where(launch[executed] >= 0, launch[executed], called)
    on_cpu = IS_ON_CPU[kind] & (moved["instance"] < 0)
    steps = steps.sort("start_ns")
    step_start = steps["start_ns"].to_numpy()
    step_end = step_start + steps["duration_ns"].to_numpy()
    begin, finish = _extent(start, end, on_cpu | on_gpu, step_start)
    return RankView(
        rank=rank,
        window=window,
        span_id=spans["span_id"].to_numpy(),
        kind=kind,
        name=spans["code"].to_numpy(),
        start=start,
        end=end,
        tid=spans["tid"].to_numpy(),
        stream=spans["device"].cast(pl.Int64).to_numpy() * 100_000 + spans["stream"].to_numpy(),
        launch=launch,
        memberships=np.stack([executed, matched["instance"].to_numpy()]),
        is_message=is_message,
        is_asked=is_asked,
        asked=asked,
        main_tid=_main_thread(spans, on_cpu, end - start),
        step_start=step_start,
        step_number=steps["step"].to_numpy(),
        steps_end=_steps_end(step_end, stepped, spans),
        begin=begin,
        finish=finish,
        **{name.removesuffix("_ns"): column for name, column in moved.items()},
    )


def _steps_end(step_end: Ints, stepped: bool, spans: pl.DataFrame) -> int:
    """Return when the last step ends; without steps in the run, when its work begins (0: at once); else -1.

    Args:
        stepped: see `make_rank_view`.
    """
    if step_end.size:
        return int(step_end.max())
    if stepped:
        return -1
    window = spans.group_by(OF_WINDOW).agg(pl.col("start_ns").min())
    begins = begins_of_work(window, spans)["start_ns"]
    return int(begins.filter(begins > window["start_ns"]).sum())  # one window, or none


def _is_sorted(start: Ints, end: Ints, span_id: Ints) -> bool:
    """Return whether spans are sorted by start, outer before inner, as those of a table mostly are."""
    if (start[1:] < start[:-1]).any():
        return False
    same = np.flatnonzero(start[1:] == start[:-1])
    return not (
        (end[same + 1] > end[same]) | ((end[same + 1] == end[same]) & (span_id[same + 1] < span_id[same]))
    ).any()


def _moved(matched: pl.DataFrame, executed: Ints, num_spans: int) -> tuple[dict[str, Ints], Bools]:
    """Return what each span moved in a collective, -1 for others; and [S] whether it is a CPU message.

    Args:
        executed: [K] index of the span that ran each collective.
    """
    names = ("instance", "transfer_ns", "rendezvous_ns", "payload", "message", "asked_after_ns")
    of_span = {name: np.full(num_spans, -1, np.int64) for name in names}
    for name, column in of_span.items():
        column[executed] = matched[name].to_numpy()
    # Of several messages in one kernel, the last one to meet its other end counts.
    np.maximum.at(of_span["rendezvous_ns"], executed, matched["rendezvous_ns"].to_numpy())
    np.minimum.at(of_span["transfer_ns"], executed, matched["transfer_ns"].to_numpy())
    is_message = np.zeros(num_spans, np.bool_)
    is_message[executed] = matched["is_message"].to_numpy()
    return of_span, is_message


def _requests_and_ends(
    start: Ints, closed: Ints, is_message: Bools, moved: dict[str, Ints]
) -> tuple[Bools, Ints, Ints]:
    """Return [S] whether and when each result was requested, and when it was over; pop from `moved`."""
    after = moved.pop("asked_after_ns")
    is_asked = is_message | (after >= 0)
    over = np.maximum(moved["rendezvous_ns"], start) + moved["transfer_ns"]
    end = np.where(is_asked, np.minimum(closed, over), closed)
    return is_asked, np.where(after >= 0, start + after, closed), end


def _extent(start: Ints, end: Ints, used: Bools, step_start: Ints) -> tuple[int, int]:
    """Return the extent of a window on its rank, in ns; (0, 0) without any work.

    It may open before the first span of its first step: that time belongs to the step.
    """
    begin = int(start[used].min()) if used.any() else 0
    finish = int(end[used].max()) if used.any() else 0
    return (min(begin, int(step_start[0])) if step_start.size else begin), finish


def index_of(ids: Ints) -> Callable[[Ints], Ints]:
    """Return a function from span ids to positions, -1 for unknown ids."""
    # Binary search in the sorted ids; an unknown id finds a neighbour, which differs.
    order = np.argsort(ids, kind="stable")
    sorted_ids = ids[order]

    def place(wanted: Ints) -> Ints:
        likely = np.minimum(np.searchsorted(sorted_ids, wanted), max(ids.size - 1, 0))
        return np.where(sorted_ids[likely] == wanted, order[likely], -1)

    return place


def _launches(spans: pl.DataFrame, kind: Ints, gpu: Bools) -> Ints:
    """Return [S] the index of the runtime span with the correlation of each GPU span, -1 for none."""
    correlation = spans["correlation"].to_numpy()
    launch = np.full(kind.size, -1, np.int64)
    calls = np.flatnonzero((kind == KIND["runtime"]) & (correlation >= 0))
    if calls.size == 0:
        return launch
    order = calls[np.argsort(correlation[calls], kind="stable")]
    work = np.flatnonzero(gpu & (correlation >= 0))
    likely = np.minimum(np.searchsorted(correlation[order], correlation[work]), order.size - 1)
    launch[work] = np.where(correlation[order[likely]] == correlation[work], order[likely], -1)
    return launch


def _main_thread(spans: pl.DataFrame, cpu: Bools, duration: Ints) -> int:
    """Return the thread that drives the training loop; -1 without CPU spans.

    It is the one that marks steps, else the process's first thread, else the one with most time in spans.
    """
    on_cpu = np.flatnonzero(cpu)
    if on_cpu.size == 0:
        return -1
    tid, pid, marks = (spans[name].to_numpy()[on_cpu] for name in ("tid", "pid", "marks"))
    threads, thread = distinct(tid)
    marked, busy = np.bincount(thread[marks], minlength=threads.size), np.zeros(threads.size, np.int64)
    np.add.at(busy, thread, duration[on_cpu])
    first = np.zeros(threads.size, np.bool_)
    first[thread[tid == pid]] = True
    return int(threads[np.lexsort((-threads, busy, first, marked))[-1]])
