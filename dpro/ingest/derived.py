"""Training steps and server iterations inferred from spans, for several formats.

Reads the spans of one rank; returns rows of `steps`, from the profiler's own marks, else from the ends of
optimizer steps, else guessed from repeating work. A step is an interval of CPU time; its GPU work may run
later. Also returns rows of `iterations`: the batches of an engine, with the sizes that the trace records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from dpro.schema import GPU_WORK_KINDS, ITERATIONS, kind_of_batch

_OPTIMIZER = r"^Optimizer\.step#(.+)\.step$"


def find_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Return steps by `ProfilerStep#N`, else by optimizer annotations; empty without either.

    Args:
        spans: with `kind`, `name`, `start_ns`, `duration_ns`, `sequence_number`, `forward_thread`.
    """
    # The 2020 profiler has no annotations; its mark is an operator.
    is_mark = pl.col("kind").is_in(["annotation", "cpu_op"]) & pl.col("name").str.starts_with("ProfilerStep#")
    marks = (
        spans.select("kind", "name", "start_ns", "duration_ns")
        .filter(is_mark)
        .with_columns(
            step=pl.col("name").str.extract(r"^ProfilerStep#(\d+)$").cast(pl.Int64, strict=False),
            source=pl.lit("ProfilerStep"),
        )
    )
    firsts = marks.drop_nulls("step").unique("step", keep="first", maintain_order=True)
    marked = firsts.select("step", "start_ns", "duration_ns", "source").sort("step")
    return marked if marked.height and _hold_work(marked, spans) else _optimizer_steps(spans)


def _hold_work(marks: pl.DataFrame, spans: pl.DataFrame) -> bool:
    """Return whether the host works in marked steps, or else most of the device's work runs in them.

    A profiler that begins when all has been launched records a mark that no work belongs to.
    """
    bounds = marks.select("start_ns", until_ns=pl.col("start_ns") + pl.col("duration_ns")).sort("start_ns")
    work = spans.select("kind", "duration_ns", at_ns="start_ns").sort("at_ns")
    within = work.join_asof(bounds, left_on="at_ns", right_on="start_ns").with_columns(
        is_within=(pl.col("at_ns") < pl.col("until_ns")).fill_null(False)
    )
    if within.select((pl.col("is_within") & pl.col("kind").is_in(["cpu_op", "runtime"])).any()).item():
        return True
    on_device = within.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
    inside_ns = on_device.filter("is_within")["duration_ns"].sum()
    return bool(2 * inside_ns >= on_device["duration_ns"].sum())


def guess_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Return steps by `find_steps`, else by the repetition of the main thread's work where that is clear.

    Args:
        spans: with the columns that `find_steps` and `repetitions` need.
    """
    steps = find_steps(spans)
    if steps.height:
        return steps
    bounds = repetitions(spans)
    return pl.DataFrame(
        {
            "step": range(len(bounds)),
            "start_ns": [start for start, _ in bounds],
            "duration_ns": [end - start for start, end in bounds],
            "source": [REPETITION] * len(bounds),
        },
        schema=steps.schema,
    )


def _optimizer_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Return steps that each end with their last optimizer.

    Optimizers without forward work between them belong to one step. Where one optimizer is in every such
    group, a group is a step (others may step less often); where none is (two networks trained in turn), the
    rarest optimizer ends the step. The time before the first end is part of the first step; work after the
    last end belongs to a truncated step, and is left out.
    """
    annotations = spans.filter(pl.col("kind") == "annotation").select(
        "start_ns",
        optimizer=pl.col("name").str.extract(_OPTIMIZER),
        end_ns=pl.col("start_ns") + pl.col("duration_ns"),
    )
    optimizers = annotations.drop_nulls("optimizer").sort("start_ns", maintain_order=True)
    forward = spans.filter((pl.col("sequence_number") >= 0) & (pl.col("forward_thread") <= 0))[
        "start_ns"
    ].sort()
    # Forward work is recognised by autograd's numbers; without any, every annotation is a group.
    alone = pl.int_range(pl.len())
    work_before = pl.Series(forward.search_sorted(optimizers["start_ns"])) if forward.len() else alone
    groups = (
        optimizers.with_columns(group=work_before)
        .group_by("group", maintain_order=True)
        .agg(pl.col("optimizer").unique().sort().alias("optimizers"), pl.col("end_ns").max())
    )
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


# Steps of a trace without marks, inferred from the repetition of the main thread's work.

REPETITION = "repetition"

_MIN_REPETITIONS = 3
_MIN_SPANS = 4  # per repetition: a compiled step has few spans at the top level
_MIN_AGREEING = 0.95  # share of spans with the same name as the span one period later
_MAX_OF_TYPICAL = 2.0  # maximum duration of a repetition, in medians
_MAX_PAUSED = 0.2  # share of a loop's repetitions that may be longer: it pauses now and then
_MIN_AFTER_START_NS = 1_000_000  # faster repetitions after a slow first one may be layers
_MIN_LOOP_SHARE = 0.5  # minimum share of kernel time in repetitions that follow a start-up
_MIN_LAYERS = 0.6  # least share of a step that repeats within it; of layers at most half does
_MAX_DIFFERING_RATIO = 2.0  # maximum share of differing spans, relative to the period with the least
_MAX_NAMES = 64
_NAMES_IN_A_ROW = (
    5  # names in a row: unique at the head of a step, even if each name alone recurs in its layers
)
_FACTOR = 6_364_136_223  # hash multiplier for several names
# Work that is in each iteration of a loop but not in a layer: copies, synchronisation, a backward pass.
_LOOPS = r"(?i)HtoD|DtoH|HostToDevice|DeviceToHost|(Device|Thread|Stream|Event)Synchronize|^autograd::engine"
_WAITS = r"^(cuda|hip)(Device|Thread|Stream|Event)Synchronize|^cuCtxSynchronize"

Array = npt.NDArray[Any]


def repetitions(spans: pl.DataFrame) -> list[tuple[int, int]]:
    """Return start and end of each whole repetition on the host, ns; empty if work does not clearly repeat.

    Repetitions are counted from the first span of the window, where a loop of steps is usually cut, or from
    the end of a start-up, if they have most of the work. The first may take far longer than the others, as it
    warms up; so may a few of a loop, which pauses between epochs or to save.

    Args:
        spans: with `kind`, `name`, `start_ns`, `duration_ns`, `pid`, `tid`, `stream`, `forward_thread`,
            `correlation`, `span_id`, `sequence_number`.
    """
    # Only top-level spans count.
    ends_before = pl.col("end_ns").cum_max().shift(1)
    lane = _main_lane(spans).filter(ends_before.is_null() | (pl.col("start_ns") >= ends_before))
    ran, called = lane.select("start_ns", "end_ns"), lane.select("call_ns", "call_end_ns")
    # The end is taken over all threads, since a backward pass runs on a separate one.
    end_ns = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
    last_ns = int(spans.filter(pl.col("kind") == "cpu_op").select(end_ns).to_numpy().max(initial=0))
    waits = spans.filter(pl.col("name").str.contains(_WAITS)).select("start_ns", end_ns).sort("start_ns")
    names = lane["name"].rank("dense").to_numpy()
    for first, period in _periods(names):
        waited_ns = max(last_ns, _end_of_wait(called, first, period, waits))
        starts, calls = (_bounds(times, first, period, waited_ns) for times in (ran, called))
        durations = np.diff(starts)
        steady = _is_steady(durations) and not first
        has_layers = _has_layers(names[first : first + period])
        if steady or (_is_steady(_without_pauses(durations)) and _is_loop(spans, starts, calls, has_layers)):
            return list(zip(calls[:-1].tolist(), calls[1:].tolist()))
    return []


def _end_of_wait(called: pl.DataFrame, first: int, period: int, waits: pl.DataFrame) -> int:
    """Return when the wait for the device after the last repetition ends; 0 if not all end with such a wait.

    Args:
        called: start and end of each span of the lane on the host.
        waits: `start_ns` and `end_ns` of calls that wait, in order.
    """
    starts, ends = (called.to_series(column).to_numpy() for column in (0, 1))
    if (starts.size - first) % period or waits.is_empty():
        return 0
    begun, over = (waits[column].to_numpy() for column in ("start_ns", "end_ns"))
    next_ns = np.append(starts[first + period :: period], np.iinfo(np.int64).max)
    wait = np.searchsorted(begun, ends[first + period - 1 :: period])
    all_wait = (wait < begun.size).all() and (over[wait] <= next_ns).all()
    return int(over[wait[-1]]) if all_wait else 0


def _bounds(times: pl.DataFrame, first: int, period: int, last_ns: int) -> Array:
    """Return the starts of all repetitions, then the end of the last whole one, ns.

    Args:
        times: start and end of each span of the lane.
        last_ns: end of the last operator on any thread, and of the wait behind it; 0 without any.
    """
    starts, ends = (times.to_series(column).to_numpy() for column in (0, 1))
    bounds: Array = np.append(starts, np.maximum(ends[-1:], last_ns))[
        first : len(starts) + 1 : period
    ].astype(np.int64)
    return bounds


def _is_steady(durations: Array) -> bool:
    """Return whether repetitions have about equal durations, except for the first."""
    typical = float(np.median(durations))
    others = durations[1:] if typical >= _MIN_AFTER_START_NS and durations[0] > typical else durations
    return bool(others.max() <= _MAX_OF_TYPICAL * typical and typical <= _MAX_OF_TYPICAL * others.min())


def _without_pauses(durations: Array) -> Array:
    """Return the durations without those that are far longer than the typical one, if these are few."""
    paused = durations > _MAX_OF_TYPICAL * np.median(durations)
    paused[0] = False  # the first may warm up
    return durations[~paused] if paused.sum() <= _MAX_PAUSED * paused.size else durations


def _has_layers(names: Array) -> bool:
    """Return whether most of a repetition repeats within it, and some of it does not.

    Args:
        names: [P] number of each span's name.
    """
    agreeing = [(names[:-lag] == names[lag:]).mean() for lag in range(1, names.size // _MIN_REPETITIONS + 1)]
    return _MIN_LAYERS <= max(agreeing, default=0.0) < 1


def _is_loop(spans: pl.DataFrame, starts: Array, calls: Array, has_layers: bool) -> bool:
    """Return whether repetitions after a start-up are most of the work, and are a loop rather than layers."""
    kernels = spans.filter(pl.col("kind") == "kernel")
    busy, began = (kernels[name].to_numpy() for name in ("duration_ns", "start_ns"))
    if busy[began >= starts[0]].sum() < _MIN_LOOP_SHARE * busy.sum():
        return False
    if has_layers:
        return True
    loops = spans.filter(pl.col("name").str.contains(_LOOPS)).select("kind", "start_ns")
    kinds = (("memcpy", starts), ("runtime", calls), ("cpu_op", calls))
    marks = ((loops.filter(pl.col("kind") == kind)["start_ns"].to_numpy(), bounds) for kind, bounds in kinds)
    return any(np.histogram(moments, bounds)[0].all() for moments, bounds in marks)


def _main_lane(spans: pl.DataFrame) -> pl.DataFrame:
    """Return operators of the thread with most of the forward pass; without operators, the busiest stream.

    Returns:
        `name`; `start_ns` and `end_ns` of execution; `call_ns` and `call_end_ns` on the host, which for
        kernels is the launching call where recorded. Ordered by time.
    """
    work, lane = (pl.col("kind") == "cpu_op") & (pl.col("forward_thread") <= 0), ["pid", "tid"]
    is_on_cpu = bool(spans.select(work.any()).item())
    if not is_on_cpu:
        work, lane = pl.col("kind") == "kernel", ["stream"]
    rows = spans.lazy().filter(work)  # lazy, so that columns that are not used are not copied
    # A compiled backward pass may have most operators, so those that autograd numbers in a forward pass
    # decide.
    of_forward = (pl.col("sequence_number") >= 0).sum() if is_on_cpu else pl.lit(0)
    counts = rows.group_by(lane).agg(of_forward.alias("forward"), pl.len())
    order = ["forward", "len", *lane]
    busiest = counts.sort(order, descending=[True, True] + [False] * len(lane)).head(1)
    chosen = rows.join(busiest, on=lane, how="semi", maintain_order="left").collect()
    chosen = chosen.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    call = (pl.col("start_ns"), pl.col("end_ns"))
    if not is_on_cpu:
        chosen = with_launch(chosen, spans)
        call = (pl.coalesce("launch_ns", call[0]), pl.coalesce("launch_end_ns", call[1]))
    return chosen.select("name", "start_ns", "end_ns", call_ns=call[0], call_end_ns=call[1]).sort(
        "start_ns", "end_ns", descending=[False, True], maintain_order=True
    )


def _periods(names: Array) -> Iterator[tuple[int, int]]:
    """Yield first span and length of each period with which names repeat; short ones first, start-ups last.

    Args:
        names: [N] number of each span's name.
    """
    whole, late = [], []
    for period in _candidates(names):
        agree = names[:-period] == names[period:]
        # Both ends must agree, too: layers repeat in the middle of a step, but not in its head and tail.
        if agree[-period:].mean() < _MIN_AGREEING:
            continue
        if min(agree.mean(), agree[:period].mean()) >= _MIN_AGREEING:
            whole.append((1 - float(agree.mean()), period))
            continue
        counts = np.append(0, np.cumsum(agree))
        differing = np.flatnonzero(counts[period:] - counts[:-period] < _MIN_AGREEING * period)
        after = int(differing[-1]) + 1 if differing.size else 0
        first = after + int(np.flatnonzero(np.append(True, ~agree[after : after + period]))[-1])
        if names.size - first >= _MIN_REPETITIONS * period:
            late.append((first, period))
    # Layers repeat well if a step has a short head and tail, but steps repeat better.
    least = min(whole, default=(0.0, 0))[0]
    yield from (
        (0, period) for differing_share, period in whole if differing_share <= _MAX_DIFFERING_RATIO * least
    )
    yield from late


def _candidates(names: Array) -> list[int]:
    """Return distances between occurrences of the same rare work, some of which runs once per step."""
    size = names.size
    distances: set[int] = set()
    for length in (1, _NAMES_IN_A_ROW):
        if size < length * _MIN_REPETITIONS:
            break
        # A collision of two codes only adds a candidate, which is then checked.
        rows = np.lib.stride_tricks.sliding_window_view(names.astype(np.int64), length)
        _, codes, counts = np.unique(
            rows @ (_FACTOR ** np.arange(length)), return_inverse=True, return_counts=True
        )
        often = np.flatnonzero(counts >= _MIN_REPETITIONS)
        rare = often[np.argsort(counts[often], kind="stable")][:_MAX_NAMES]
        distances |= {int(np.median(np.diff(np.flatnonzero(codes == which)))) for which in rare}
    return [period for period in sorted(distances) if _MIN_SPANS <= period <= size // _MIN_REPETITIONS]


# Calls that synchronise, the call that launched a kernel, and the range around a call.

# Runtime and driver calls, CUDA and HIP, with and without suffixes such as `_v2`, `WithFlags`, `_ptsz`.
_SYNC_CALLS = (
    (r"^(cuda|hip|cu)EventRecord", "event_record"),
    (r"^(cuda|hip|cu)StreamWaitEvent", "stream_wait_event"),
    (r"^(cuda|hip|cu)EventSynchronize", "event_sync"),
    (r"^(cuda|hip|cu)StreamSynchronize", "stream_sync"),
    (r"^((cuda|hip)(Device|Thread)Synchronize|cuCtxSynchronize)", "device_sync"),
)


def sync_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the runtime calls that wait or record an event, with their `kind` in table `syncs`."""
    kinds = (
        pl.when(pl.col("name").str.contains(pattern)).then(pl.lit(kind)) for pattern, kind in _SYNC_CALLS
    )
    named = calls.select(pl.col("name").unique()).with_columns(kind=pl.coalesce(*kinds)).drop_nulls()
    return calls.join(named, on="name", maintain_order="left")


def with_launch(kernels: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Add the runtime call that launched each kernel; null where the trace has no such call.

    The columns are `launch_span_id`, `launch_ns`, `launch_end_ns` and `thread`.

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


def with_enclosing_span(launches: pl.DataFrame, outer: pl.DataFrame, label: str) -> pl.DataFrame:
    """Find the span on the launching thread that encloses each launch.

    Spans of one kind do not nest: the last one begun before the launch is the only candidate.

    Args:
        launches: with `span_id`, `thread`, `launch_ns` and `launch_end_ns`, null where nothing was launched.
        outer: candidates, with `position`.
        label: prefix of the added columns `{label}_position` and `{label}_name`, null where no span encloses
            the launch.
    """
    spans = outer.select(
        thread="tid",
        outer_ns="start_ns",
        outer_end_ns=pl.col("start_ns") + pl.col("duration_ns"),
        position="position",
        name="name",
    ).sort("outer_ns", maintain_order=True)
    launched_kernels = launches.drop_nulls("launch_ns").sort("launch_ns", maintain_order=True)
    last = launched_kernels.select("span_id", "thread", "launch_ns", "launch_end_ns").join_asof(
        spans, left_on="launch_ns", right_on="outer_ns", by="thread", check_sortedness=False
    )
    held = last.filter(pl.col("outer_end_ns") >= pl.col("launch_end_ns")).select(
        "span_id", pl.col("position").alias(f"{label}_position"), pl.col("name").alias(f"{label}_name")
    )
    return launches.join(held, on="span_id", how="left", maintain_order="left")


# Iterations of a server's engine, from the first of these that exists: ranges that engines set around an
# iteration (vLLM), the range `dpro::iteration`, Python calls of SGLang's model runner, CUDA graphs with a
# whole model, and calls of embedding with their shapes. A trace of training has none. Tokens are -1 where
# unknown.

ANNOTATION, SHAPES, GRAPHS, CALLS = "annotation", "shapes", "CUDA graph", "Python calls"
RANGE = "dpro::iteration"
_COUNTS = ("prefill_tokens", "decode_tokens", "num_requests", "context_tokens", "waiting")

# vLLM: requests and tokens of both kinds; newer versions append further counts to the tokens.
_TOKENS = r"^execute_context_(\d+)\((\d+)[^)]*\)_generation_(\d+)\((\d+)[^)]*\)"
_REQUESTS = r"^execute_new_(\d+)_cached_(\d+)"  # older vLLM: requests only
_RUNNER = r"model_runner\.py\(\d+\): forward_(extend|decode|split_prefill)$"
_REPLAY = r"cuda_graph_runner\.py\(\d+\): replay$"
_MODEL_CALL = re.compile(f"{_RUNNER}|{_REPLAY}")
_ATTENTION = r"(?i)attention|attn|fmha|flash_fwd|\bmla\b|mla::|mqa|gqa"


def find_iterations(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the iterations of one rank, in order; none where the trace shows none.

    Args:
        spans: with `kind`, `name`, `start_ns`, `duration_ns`, `correlation`, `forward_thread`, `shapes`.
    """
    # Without named ranges on CPU threads, the corresponding ranges on GPU streams count.
    ranges = spans.select("kind", "name", "start_ns", "duration_ns")
    on_cpu = ranges.filter(pl.col("kind") == "annotation")
    ranges = on_cpu if on_cpu.height else ranges.filter(pl.col("kind") == "gpu_annotation")
    for find, rows in (
        (_token_ranges, ranges),
        (_request_ranges, ranges),
        (_own_ranges, ranges),
        (_model_calls, spans),
    ):
        iterations = find(rows)
        if iterations.height:
            return _numbered(_until_gpu_ends(iterations, spans))
    if _is_training(spans):
        return ITERATIONS.empty()
    graphs = _whole_graphs(spans)
    if graphs.is_empty():
        return _numbered(_until_gpu_ends(_embeddings(spans), spans))
    around = _engine_ranges(ranges, graphs)
    return _numbered(_until_gpu_ends(around, spans) if around.height else graphs)


def model_calls(names: Iterable[str]) -> list[str]:
    """Return the names of Python calls that `find_iterations` uses; spans may lack all others."""
    return [name for name in names if _MODEL_CALL.search(name)]


def _numbered(iterations: pl.DataFrame) -> pl.DataFrame:
    """Order and number the rows, and shift starts so that none is before the end of its predecessor."""
    if iterations.is_empty():
        return ITERATIONS.empty()
    ordered = iterations.sort("start_ns").with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    before = pl.col("end_ns").cum_max().shift(1).fill_null(pl.col("start_ns").min())
    return (
        ordered.with_columns(start_ns=pl.max_horizontal("start_ns", before))
        .with_columns(duration_ns=pl.max_horizontal(pl.col("end_ns") - pl.col("start_ns"), 0))
        .with_columns(iteration=pl.int_range(pl.len(), dtype=pl.Int64))
        .drop("end_ns")
    )


def _extracted(ranges: pl.DataFrame, pattern: str, names: list[str]) -> pl.DataFrame:
    """Return the ranges whose name matches a pattern, with the numbers in it."""
    groups = [
        pl.col("name").str.extract(pattern, place + 1).cast(pl.Int64).alias(n)
        for place, n in enumerate(names)
    ]
    fits = ranges.filter(pl.col("name").str.contains(pattern))
    return fits.select("start_ns", "duration_ns", *groups)


def _token_ranges(ranges: pl.DataFrame) -> pl.DataFrame:
    numbers = _extracted(ranges, _TOKENS, ["contexts", "prefill_tokens", "generations", "decode_tokens"])
    return numbers.select(
        "start_ns",
        "duration_ns",
        "prefill_tokens",
        "decode_tokens",
        num_requests=pl.col("contexts") + pl.col("generations"),
        kind=kind_of_batch(),
        source=pl.lit(ANNOTATION),
    )


def _request_ranges(ranges: pl.DataFrame) -> pl.DataFrame:
    """Return ranges with counts of requests.

    New requests begin with their prompt; for the others, the name does not show whether a prompt continues.
    """
    new, old = pl.col("new"), pl.col("old")
    kind = pl.when(new == 0).then(pl.lit("decode")).when(old == 0).then(pl.lit("prefill"))
    return _extracted(ranges, _REQUESTS, ["new", "old"]).select(
        "start_ns",
        "duration_ns",
        num_requests=new + old,
        kind=kind.otherwise(pl.lit("mixed")),
        source=pl.lit(ANNOTATION),
    )


def _own_ranges(ranges: pl.DataFrame) -> pl.DataFrame:
    """Return ranges like `dpro::iteration prefill=128 decode=3 requests=4 context=900 waiting=0`."""
    said = {name: name.removesuffix("_tokens").removeprefix("num_") for name in _COUNTS}
    values = [
        pl.col("name").str.extract(rf"\b{word}=(\d+)").cast(pl.Int64).fill_null(-1).alias(name)
        for name, word in said.items()
    ]
    fits = ranges.filter(pl.col("name").str.starts_with(RANGE))
    return fits.select("start_ns", "duration_ns", *values, source=pl.lit(ANNOTATION)).with_columns(
        kind=kind_of_batch()
    )


def _model_calls(spans: pl.DataFrame) -> pl.DataFrame:
    """Return Python calls of SGLang's model runner, which replays CUDA graphs only to decode."""
    columns = spans.select("kind", "name", "start_ns", "duration_ns").filter(pl.col("kind") == "python")
    calls = columns.filter(pl.col("name").str.contains(_RUNNER) | pl.col("name").str.contains(_REPLAY))
    decodes = pl.col("name").str.contains(_REPLAY) | pl.col("name").str.ends_with("decode")
    return calls.select(
        "start_ns",
        "duration_ns",
        kind=pl.when(decodes).then(pl.lit("decode")).otherwise(pl.lit("prefill")),
        source=pl.lit(CALLS),
    )


def _is_training(spans: pl.DataFrame) -> bool:
    if spans.select((pl.col("forward_thread") > 0).any()).item():
        return True
    names = spans.filter(pl.col("kind") == "annotation")["name"]
    return bool(names.str.starts_with("Optimizer.step").any())


def _launched(spans: pl.DataFrame, which: pl.Expr) -> pl.DataFrame:
    """Return launch time, kernel name and end of the GPU work launched by the matching runtime calls."""
    columns = spans.select("kind", "name", "correlation", "start_ns", "duration_ns")  # to filter faster
    columns = columns.filter(pl.col("correlation") > 0)
    calls = columns.filter(pl.col("kind") == "runtime").filter(which)
    work = columns.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
    return work.select("correlation", kernel="name", end_ns=pl.col("start_ns") + pl.col("duration_ns")).join(
        calls.select("correlation", launched_ns="start_ns").unique("correlation", keep="first"),
        on="correlation",
    )


def _until_gpu_ends(iterations: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Extend the ranges to the end of the GPU work that they launched."""
    if iterations.is_empty():
        return iterations
    ranges = iterations.sort("start_ns").with_row_index("at")
    bounds = ranges.select("at", range_ns="start_ns", until_ns=pl.col("start_ns") + pl.col("duration_ns"))
    work = _launched(spans, pl.lit(True)).select("launched_ns", "end_ns").sort("launched_ns")
    within = work.join_asof(bounds, left_on="launched_ns", right_on="range_ns").filter(
        pl.col("launched_ns") < pl.col("until_ns")
    )
    ends = within.group_by("at").agg(pl.col("end_ns").max())
    until = pl.max_horizontal(pl.col("start_ns") + pl.col("duration_ns"), "end_ns")
    return (
        ranges.join(ends, on="at", how="left", maintain_order="left")
        .with_columns(duration_ns=until - pl.col("start_ns"))
        .drop("at", "end_ns")
    )


def _whole_graphs(spans: pl.DataFrame) -> pl.DataFrame:
    """Return launches of CUDA graphs with a whole model; engines capture only batches that decode.

    A graph with at most half as many attention kernels as the largest one is a piece of a model.
    """
    work = _launched(spans, pl.col("name").str.contains("^(cuda|hip)GraphLaunch"))
    graphs = (
        work.group_by("correlation")
        .agg(
            attentions=pl.col("kernel").str.contains(_ATTENTION).sum(),
            start_ns=pl.col("launched_ns").min(),
            end_ns=pl.col("end_ns").max(),
        )
        .filter((pl.col("attentions") > 1) & (2 * pl.col("attentions") > pl.col("attentions").max()))
    )
    return graphs.select(
        "start_ns",
        duration_ns=pl.col("end_ns") - pl.col("start_ns"),
        kind=pl.lit("decode"),
        source=pl.lit(GRAPHS),
    )


def _engine_ranges(ranges: pl.DataFrame, graphs: pl.DataFrame) -> pl.DataFrame:
    """Return ranges of batches, if each graph is in a separate one; batches without a graph prefill."""
    batches = ranges.filter(pl.col("name") == "execute_model").sort("start_ns")
    placed = graphs.sort("start_ns").join_asof(
        batches.select("start_ns", begin_ns="start_ns", range_ns="duration_ns"), on="start_ns"
    )
    held = placed.filter(pl.col("start_ns") < pl.col("begin_ns") + pl.col("range_ns"))["begin_ns"]
    decodes = pl.col("start_ns").is_in(held.implode())
    return batches.filter(held.n_unique() == graphs.height).select(
        "start_ns",
        "duration_ns",
        kind=pl.when(decodes).then(pl.lit("decode")).otherwise(pl.lit("prefill")),
        source=pl.lit(ANNOTATION),
    )


def _embeddings(spans: pl.DataFrame) -> pl.DataFrame:
    """Return intervals between calls of the largest embedding, with counts from the shape of its indices.

    Indices in two dimensions are requests times tokens of each; one token means that the batch decodes.
    Packed batches have one dimension: the number of tokens is known, but not their kind. A model without any
    batch that may decode generates nothing, and has no iterations.
    """
    is_operator = pl.col("kind") == "cpu_op"
    calls = spans.select("kind", "name", "start_ns", "shapes").filter(
        is_operator & (pl.col("name") == "aten::embedding")
    )
    shape = r"^\[\s*\[(\d+),\s*(\d+)\],\s*\[(\d+)(?:,\s*(\d+))?\]"
    sized = calls.with_columns(
        rows=pl.col("shapes").str.extract(shape, 1).cast(pl.Int64),
        batch=pl.col("shapes").str.extract(shape, 3).cast(pl.Int64),
        length=pl.col("shapes").str.extract(shape, 4).cast(pl.Int64),
    ).drop_nulls("batch")
    first = sized.filter(pl.col("rows") == pl.col("rows").max()).sort("start_ns")
    may_decode = pl.col("length").is_null() | (pl.col("length") == 1)
    if sized.height < 2 or not first.select(may_decode.any()).item():  # a single call shows nothing
        return pl.DataFrame(schema={"start_ns": pl.Int64})
    last_ns = spans.select((pl.col("start_ns") + pl.col("duration_ns")).filter(is_operator).max()).item()
    until = pl.col("start_ns").shift(-1).fill_null(last_ns)
    tokens, decodes = pl.col("batch") * pl.col("length"), pl.col("length") == 1
    return first.select(
        "start_ns",
        duration_ns=until - pl.col("start_ns"),
        prefill_tokens=pl.when(decodes).then(0).otherwise(tokens).fill_null(-1),
        decode_tokens=pl.when(decodes).then(tokens).otherwise(0 * tokens).fill_null(-1),
        num_requests=pl.when(pl.col("length").is_not_null()).then("batch").otherwise(-1),
        source=pl.lit(SHAPES),
    ).with_columns(kind=kind_of_batch())
