"""Where training steps begin and end in a trace.

In: spans of one rank. Out: rows of `steps`: from the profiler's own marks, else from the ends of optimizer
steps, else guessed from what repeats. A step is a stretch of CPU time; its GPU work may run later.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

_COLUMNS = ("step", "start_ns", "duration_ns", "source")
_OPTIMIZER = r"^Optimizer\.step#(.+)\.step$"


def find_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Steps by `ProfilerStep#N`, else by optimizer annotations, else none.

    Args:
        spans: with `kind`, `name`, `start_ns`, `duration_ns`, `sequence_number`, `forward_thread`.
    """
    marked = _marked_steps(spans)
    return marked if marked.height else _optimizer_steps(spans)


def guess_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Steps as above, else by the repetition of the main thread's work where that is clear.

    Args:
        spans: as above, and `pid`, `tid`, `stream`.
    """
    found = find_steps(spans)
    if found.height:
        return found
    bounds = repetitions(spans)
    return pl.DataFrame(
        {
            "step": range(len(bounds)),
            "start_ns": [start for start, _ in bounds],
            "duration_ns": [end - start for start, end in bounds],
            "source": [REPETITION] * len(bounds),
        },
        schema=found.schema,
    )


def _marked_steps(spans: pl.DataFrame) -> pl.DataFrame:
    # The 2020 profiler has no annotations: there the mark is an operator.
    marked = pl.col("kind").is_in(["annotation", "cpu_op"]) & pl.col("name").str.starts_with("ProfilerStep#")
    marks = (
        spans.select("kind", "name", "start_ns", "duration_ns")
        .filter(marked)
        .with_columns(
            step=pl.col("name").str.extract(r"^ProfilerStep#(\d+)$").cast(pl.Int64, strict=False),
            source=pl.lit("ProfilerStep"),
        )
    )
    first = marks.drop_nulls("step").unique("step", keep="first", maintain_order=True)
    return first.select(_COLUMNS).sort("step")


def _optimizer_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Each step ends with its last optimizer.

    Optimizers with no forward work between them belong to one step. Where one optimizer is in every such
    group, a group is a step (others may step less often); where none is (two networks trained in turn),
    the rarest optimizer ends the step. The time before the first end is part of the first step; what
    follows the last end is part of a step that the window cuts, and is left out.
    """
    groups = _optimizer_groups(spans)
    counts = groups.explode("optimizers").group_by("optimizers").len().sort("len", "optimizers")
    if counts.is_empty():
        return pl.DataFrame(
            schema={"step": pl.Int64, "start_ns": pl.Int64, "duration_ns": pl.Int64, "source": pl.String}
        )
    if counts["len"].max() != groups.height:
        groups = groups.filter(pl.col("optimizers").list.contains(counts["optimizers"][0]))
    ends = groups["end_ns"].sort()
    starts = pl.concat([spans["start_ns"].sort().head(1), ends.head(ends.len() - 1)])
    return pl.DataFrame({"start_ns": starts, "duration_ns": ends - starts}).select(
        step=pl.int_range(pl.len()),
        start_ns="start_ns",
        duration_ns="duration_ns",
        source=pl.lit("optimizer annotation"),
    )


def _optimizer_groups(spans: pl.DataFrame) -> pl.DataFrame:
    """Optimizer annotations with no forward work between them: their optimizers and the last end."""
    annotations = spans.filter(pl.col("kind") == "annotation").select(
        "start_ns",
        optimizer=pl.col("name").str.extract(_OPTIMIZER),
        end_ns=pl.col("start_ns") + pl.col("duration_ns"),
    )
    optimizers = annotations.drop_nulls("optimizer").sort("start_ns", maintain_order=True)
    forward = spans.filter((pl.col("sequence_number") >= 0) & (pl.col("forward_thread") <= 0))[
        "start_ns"
    ].sort()
    # Without autograd's numbers forward work cannot be seen: then every annotation stands alone.
    alone = pl.int_range(pl.len())
    work_before = pl.Series(forward.search_sorted(optimizers["start_ns"])) if forward.len() else alone
    return (
        optimizers.with_columns(group=work_before)
        .group_by("group", maintain_order=True)
        .agg(pl.col("optimizer").unique().sort().alias("optimizers"), pl.col("end_ns").max())
    )


# Steps of a trace that marks none, inferred from the repetition of the main thread's work.

REPETITION = "repetition"

_MIN_REPETITIONS = 3
_MIN_SPANS = 5  # in one of them
_MIN_AGREEING = 0.95  # share of spans with the name of the one a period later
_MAX_OF_TYPICAL = 2.0  # duration of one repetition against the median
_MAX_NAMES = 64

Array = npt.NDArray[Any]


def repetitions(spans: pl.DataFrame) -> list[tuple[int, int]]:
    """Start and end of each whole repetition, ns; empty where the work does not clearly repeat.

    They are counted from the first operator of the window, which is where a loop of steps is usually cut.

    Args:
        spans: with `kind`, `name`, `start_ns`, `duration_ns`, `pid`, `tid`, `stream`, `forward_thread`.
    """
    lane = _outermost(_main_lane(spans))
    names = lane["name"].rank("dense").to_numpy()
    period = _period(names)
    if not period:
        return []
    starts, ends = lane["start_ns"].to_numpy(), lane["end_ns"].to_numpy()
    bounds = np.append(starts, ends[-1:])[: len(starts) + 1 : period].astype(np.int64)
    durations = np.diff(bounds)
    typical = float(np.median(durations))
    if durations.max() > _MAX_OF_TYPICAL * typical or durations.min() * _MAX_OF_TYPICAL < typical:
        return []
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist()))


def _main_lane(spans: pl.DataFrame) -> pl.DataFrame:
    """Operators of the thread that runs most of the forward pass; without operators, the busiest stream."""
    spans = spans.select(
        "kind",
        "name",
        "start_ns",
        "pid",
        "tid",
        "stream",
        "forward_thread",
        end_ns=pl.col("start_ns") + pl.col("duration_ns"),
    )
    operators = spans.filter((pl.col("kind") == "cpu_op") & (pl.col("forward_thread") <= 0))
    lane = ["pid", "tid"] if operators.height else ["stream"]
    work = operators if operators.height else spans.filter(pl.col("kind") == "kernel")
    busiest = work.group_by(lane).len().sort("len", *lane, descending=[True] + [False] * len(lane)).head(1)
    return work.join(busiest.select(lane), on=lane, how="semi").sort(
        "start_ns", "end_ns", descending=[False, True], maintain_order=True
    )


def _outermost(lane: pl.DataFrame) -> pl.DataFrame:
    """The spans of a lane that lie in no other."""
    ends_before = pl.col("end_ns").cum_max().shift(1)
    return lane.filter(ends_before.is_null() | (pl.col("start_ns") >= ends_before))


def _period(names: Array) -> int:
    """The smallest number of spans after which all names repeat, 0 where there is none.

    Args:
        names: `[N]` one number per span, the same for the same name.
    """
    size = len(names)
    for period in _candidates(names):
        if not _MIN_SPANS <= period <= size // _MIN_REPETITIONS:
            continue
        agree = names[:-period] == names[period:]
        # At both ends too: layers repeat in the middle of a step, but not in its head and tail.
        if min(agree.mean(), agree[:period].mean(), agree[-period:].mean()) >= _MIN_AGREEING:
            return period
    return 0


def _candidates(names: Array) -> list[int]:
    """Distances between neighbours of the same, rare name: some operators run once per step."""
    found, counts = np.unique(names, return_counts=True)
    often = np.flatnonzero(counts >= _MIN_REPETITIONS)
    rare = often[np.argsort(counts[often], kind="stable")][:_MAX_NAMES]
    return sorted({int(np.median(np.diff(np.flatnonzero(names == found[which])))) for which in rare})


# Which call launched a kernel, and which range on the calling thread that call lies in.


def launched(kernels: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Each kernel with the runtime call that launched it: `launch_span_id`, `launch_ns`, `launch_end_ns` and
    its `thread`, null where the trace holds no such call.

    Args:
        kernels: spans of kernels, with their `correlation`.
        spans: all spans of the rank, in order of time.
    """
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0)).select(
        "correlation",
        launch_span_id="span_id",
        launch_ns="start_ns",
        launch_end_ns=pl.col("start_ns") + pl.col("duration_ns"),
        thread="tid",
    )
    calls = calls.unique("correlation", keep="first", maintain_order=True)
    return kernels.join(calls, on="correlation", how="left", maintain_order="left")


def enclosed(launches: pl.DataFrame, outer: pl.DataFrame, label: str) -> pl.DataFrame:
    """Find the span on the launching thread that holds each launch.

    Spans of one kind do not nest: the last one begun before the launch is the only candidate.

    Args:
        launches: with `span_id`, `thread`, `launch_ns` and `launch_end_ns`, null where nothing was launched.
        label: `{label}_position` and `{label}_name` are added, null where no span holds the launch.
    """
    spans = outer.select(
        thread="tid",
        outer_ns="start_ns",
        outer_end_ns=pl.col("start_ns") + pl.col("duration_ns"),
        position="position",
        name="name",
    ).sort("outer_ns", maintain_order=True)
    known = launches.drop_nulls("launch_ns").sort("launch_ns", maintain_order=True)
    last = known.select("span_id", "thread", "launch_ns", "launch_end_ns").join_asof(
        spans, left_on="launch_ns", right_on="outer_ns", by="thread", check_sortedness=False
    )
    held = last.filter(pl.col("outer_end_ns") >= pl.col("launch_end_ns")).select(
        "span_id", pl.col("position").alias(f"{label}_position"), pl.col("name").alias(f"{label}_name")
    )
    return launches.join(held, on="span_id", how="left", maintain_order="left")
