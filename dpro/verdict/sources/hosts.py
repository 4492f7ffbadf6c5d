"""Advice on what hosts do: launches, input, waits, allocations, copies, and work that no update needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import polars as pl
from msgspec.structs import replace

from dpro.arrays import Bools
from dpro.detect import pauses
from dpro.detect.findings import CodeLocation
from dpro.detect.machine.oversubscribed import CAUSE as CROWDED
from dpro.recorders import RECORDER_FRAMES
from dpro.replay.attribution import innermost
from dpro.replay.graph import NO_SPAN, Graph
from dpro.replay.steps import host_facts, step_series
from dpro.replay.whatif.edit import kind_of_job
from dpro.replay.whatif.edits.host import gpu_waits
from dpro.replay.whatif.edits.training_loop import busy_share
from dpro.replay.whatif.graph_ops.aside import COMPILER
from dpro.schema import GPU_WORK_KINDS
from dpro.units import format_bytes, format_duration
from dpro.verdict.advice import (
    MAX_GAIN,
    OFTEN,
    WORTH,
    Advice,
    best_of,
    by_edit,
    interval_of,
    partly,
    with_stacks,
)
from dpro.verdict.facts import JobFacts, place_of
from dpro.verdict.limits import (
    ALLOCATING,
    ALLOCATOR,
    CHECKPOINT,
    COLLECTION,
    COMPILATION,
    COPIES,
    HOST,
    INPUT,
    INTO_DEVICE,
    SYNCHRONISATION,
    PromptLaunches,
    before_input,
    host_work_before_slow_launch,
    outside_operators,
)
from dpro.words import counted

NEARLY_ALL = 0.9  # share of the time of calls that the named ones take
SHOWN = 0.1  # least time of a part that is named, as a share of the longest part's
LARGE_COPY = 1 << 18  # bytes above which a copy takes its time for the bytes rather than for the call
LARGER = ("batch:factor=2", "batch:factor=4")
MOSTLY_IDLE = 0.3  # computing share of the step below which a larger batch costs little
ALL_BUSY = 0.9  # share of a step in which a host's cores work: more work finds no core
RUNTIME_CALL = r"(cuda|hip|cu)[A-Z]"


def shorten_host_work(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Give hosts their cores, or shorten what they do for long before one launch."""
    if limit != HOST:  # else a free host only bounds the gain of something else
        return
    host = facts.gains_by_limit().get(HOST, 1.0)
    if facts.still is not None:
        gain = facts.typical_gain_of(facts.job.with_change(facts.still.ended))
        yield Advice(
            "cores",
            "give each rank CPU cores of its own (more cores, fewer threads, pinned)",
            partly(gain, 0.75),
            max(gain, host),
            "a setting",
            "calls then take as long as they usually do",
        )
    launches, slow = facts.launches, facts.slow_launches
    if slow is None:
        return
    before = _work_by_name(facts, partial(host_work_before_slow_launch, slow.kernel))
    most = min(1 / (1 - min(slow.per_step * slow.took_ns / facts.step_ns, 0.95)), host)
    copies_input = re.search(INTO_DEVICE, slow.kernel)
    way = "prepare the input beside the step: " if copies_input else "shorten "
    yield Advice(
        "input" if copies_input else "launch-one",
        f"{way}what the host does for {format_duration(slow.took_ns)} before {slow.in_words}"
        f"{place_of(launches.filter(pl.col('launched') == slow.kernel), facts.spans)}"
        f"{_longest_names(before, facts.rank_steps)}",
        partly(most, 0.5),
        most,
        "new code",
        "launching it can cost what other launches cost",
        with_stacks(facts),
    )


def shorten_code_outside_operators(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Shorten what ranks that compute on their hosts do outside operators."""
    if limit != HOST or not facts.computes_on_hosts:
        return
    gain = facts.gains_by_limit().get(HOST, 1.0)
    outside = _longest_names(_work_by_name(facts, outside_operators), facts.rank_steps)
    do = f"shorten what ranks do outside operators{outside}"
    yield Advice("python", do, partly(gain, 0.5), gain, "new code", check=with_stacks(facts))


def reduce_launches(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Reduce the host's work per launch, or give the GPU more work for each.

    Yields nothing if the host mostly does something else for long, which is then to be shortened, or if
    launches last as long as their kernels, which hides their cost.
    """
    launches = facts.launches
    if facts.launches_block or (facts.slow_launches is not None and facts.still is None):
        return
    by_graph = launches.filter(pl.col("name").str.contains("(?i)graphlaunch"))
    if launches.is_empty() or (by_graph.height and facts.kernels["count"].sum() > 4 * launches.height):
        return
    captured = best_of(facts, ["cuda-graph"])
    surely = captured is not None and (captured.effect == "faster" or limit in (HOST, SYNCHRONISATION))
    # Else, what CUDA graphs may gain is another thing than launching, if free launches gain next to nothing.
    if captured is not None and (surely or best_of(facts, ["no-launch"]) is not None):
        count = launches.height / facts.rank_steps
        fused = " or a fused optimizer" if kind_of_job(facts.job.graph).trains is not False else ""
        yield by_edit(
            "launch",
            f'reduce launch overhead with CUDA graphs (torch.compile(mode="reduce-overhead")){fused}: '
            f"{count:,.0f} launches a step and rank{place_of(launches, facts.spans)}",
            captured,
            "shapes are static, and nothing in the captured part waits for the GPU",
        )
    larger = best_of(facts, LARGER) if limit == HOST and facts.computing < MOSTLY_IDLE else None
    if larger is not None:
        (batch,) = larger.edits
        yield by_edit(
            "batch",
            f"give each step more work ({batch.describe()}): GPUs compute {facts.computing:.0%} of it",
            larger,
        )


def let_launches_return(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Let launches return before their kernels end."""
    if not facts.launches_block:
        return
    gain = facts.typical_gain_of(facts.job.with_change(PromptLaunches()))
    do = "unset CUDA_LAUNCH_BLOCKING, and record again: each launch returns only once its kernel has ended"
    yield Advice("sync", do, partly(gain, 0.5), gain, "a setting", "no code needs launches that block")


def prepare_input_early(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Have the input ready before the step needs it."""
    gain = facts.gains_by_limit().get(INPUT, 1.0)
    if gain < 1.1:
        return
    crowded = any(finding.cause == CROWDED for finding in facts.findings)
    prepared = _work_by_name(facts, before_input)
    longest_name = str(prepared.sort("took_ns")["name"].last() or "")
    if facts.first_call and longest_name == facts.first_call[0]:
        return  # later steps do not repeat a first call
    if re.search(_OF_MODULES, longest_name):
        return  # the model itself works before its first launch
    loading = None if crowded else best_of(facts, facts.candidates("workers"))
    # With these workers, the cores of a host may work all the time before the input is ready in time.
    faster = 1.0 if loading is None else loading.speedup
    is_last_core = busy_share(facts.job.graph) * faster > ALL_BUSY > faster / gain
    if is_last_core and (loading is None or interval_of(loading)[0] < WORTH):
        crowded, loading = True, None
    or_on_gpu = "" if facts.computes_on_hosts else " or on the GPU"
    in_workers = prepared["name"].str.contains("_MultiProcessingDataLoaderIter").any()
    if crowded:
        how = f"prepare less input per sample{or_on_gpu}"
    elif in_workers:
        how = "more DataLoader workers (num_workers), or less work per sample"
    else:
        how = f"prepare the input beside the step{or_on_gpu}"
    longest = _longest_names(prepared.filter(~pl.col("name").str.contains(_OF_MODULES)), facts.rank_steps)
    is_hidden = _hides_input(facts, gain)
    if loading is not None:
        or_prepare = "" if facts.computes_on_hosts else ", or prepare it on the GPU"
        less = "; more find no core: prepare less per sample, too" if is_last_core else ""
        do = f"have {loading.what()} (num_workers) load the input{or_prepare}{less}{longest}"
        advice = by_edit("input", do, loading)
        yield replace(advice, gain_low=1.0) if is_hidden else advice
        return
    yield Advice(
        "input",
        f"{how}{longest}",
        1.0 if is_hidden else partly(gain, 0.5),
        gain,
        "a setting" if in_workers and not crowded else "a line of code",
        "preparing it can be made cheaper"
        if crowded
        else "there are free cores for it, and the source can keep up",
    )


_OF_MODULES = r"\): (_call_impl|_wrapped_call_impl|forward)$|^nn\.Module"  # the model's calls, in stacks


def _hides_input(facts: JobFacts, gain: float) -> bool:
    """Return whether devices may hide the input of a single step: they work longer behind the last launch.

    In the next step they still work off this one while the input is loaded, unless the host waits for them.
    """
    if facts.usual.height > 1 or facts.launches.is_empty():
        return False
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    works = facts.analysis.spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
    lead_ns = works.select(end_ns.max()).item() - facts.launches.select(end_ns.max()).item()
    return bool(lead_ns >= (1 - 1 / gain) * facts.step_ns)


_RANGES = {NO_SPAN: "code outside any recorded range", "dpro::backward": "the backward pass"}  # in words


def _longest_names(work: pl.DataFrame, rank_steps: int) -> str:
    """Return the two names that take longest in some work of the host, per step and rank.

    Args:
        work: `name` and `took_ns`, of all steps and ranks.
    """
    longest = work.filter(pl.col("took_ns") >= SHOWN * pl.col("took_ns").max()).sort(
        "took_ns", descending=True
    )
    shown = ", ".join(
        f"{_RANGES.get(name) or CodeLocation.of(name).in_words} takes {format_duration(took_ns / rank_steps)}"
        for name, took_ns in longest.select("name", "took_ns").head(2).iter_rows()
    )
    return f": {shown}" if shown else ""


def _work_by_name(facts: JobFacts, work_of: Callable[[Graph], Bools]) -> pl.DataFrame:
    """Return some work of hosts in usual steps, without that of the recorder: `name`, `took_ns`.

    Args:
        work_of: returns [N] a mask of a graph's nodes that count; must be picklable by name.
    """
    steps = facts.usual["step"].to_list()
    work = pl.concat(facts.job.map_ranks(partial(_named, work_of, steps)))
    of_job = work.filter(~pl.col("name").str.contains(RECORDER_FRAMES))
    return of_job.group_by("name").agg(pl.col("took_ns").sum())


def _named(work_of: Callable[[Graph], Bools], steps: Sequence[int], graph: Graph) -> pl.DataFrame:
    nodes = graph.nodes
    work = np.flatnonzero(work_of(graph) & (nodes.duration > 0) & np.isin(nodes.step, steps))
    names = pl.Series("name", graph.names, dtype=pl.String).gather(nodes.name[work])
    return pl.DataFrame({"name": names, "took_ns": nodes.duration[work]})


# Work that no update needs: kind, counter of the time that each step of a rank spent on it, remedy.
_BESIDE: Sequence[tuple[str, str, str, str]] = (
    (COMPILATION, "compile_ns", "compile code once, not in steps", pauses.DO[pauses.COMPILATION]),
    (CHECKPOINT, "checkpoint_ns", "do not wait for checkpoints in steps", pauses.DO[pauses.CHECKPOINT]),
    (COLLECTION, "gc_ns", "collect garbage less often", pauses.DO[pauses.COLLECTION]),
)


def end_extra_work(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """End what hosts do in steps besides training, by replay, and by counters of all steps but pauses.

    A host that runs ahead of its GPU may hide it: there, the replay shows its cost, if it knows.
    """
    series = step_series(facts.analysis.steps)
    paused = [] if series is None else series.steps[series.paused].tolist()
    counts = host_facts(facts.analysis.steps, facts.analysis.counters)
    counts = counts.filter(~pl.col("step").is_in(paused))
    replayed = facts.gains_by_limit()
    for kind, column, do, how in _BESIDE:
        spent_ns = pl.col(column).fill_null(0.0)
        share = spent_ns.sum() / pl.col("duration_ns").sum()
        ranks = counts.group_by("rank").agg(share=share, took_ns=spent_ns.mean())
        shares = ranks["share"].to_numpy().clip(0.0, 1 - 1 / MAX_GAIN)
        gains = [replayed[kind]] if kind in replayed else [] if facts.kernels.is_empty() else [1.0]
        if shares.size and (facts.kernels.is_empty() or kind not in replayed):
            gains += [1 / (1 - float(shares.mean())), 1 / (1 - float(shares.max()))]
        if max(gains, default=1.0) < WORTH:
            continue
        took_ns = max([*ranks["took_ns"], 0.0]) or (1 - 1 / gains[0]) * facts.step_ns
        compiling = facts.spans.filter((kind == COMPILATION) & pl.col("name").str.contains(COMPILER))
        yield Advice(
            kind,
            f"{do} ({how}): {format_duration(took_ns)} a step on average{place_of(compiling, facts.spans)}",
            min(gains),
            max(gains),
            "a line of code",
            "ranks that do not do it wait for those that do",
        )


def remove_waits(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Remove calls that wait for the GPU."""
    gain = facts.gains_by_limit().get(SYNCHRONISATION, 1.0)
    if gain < 1.03:
        return
    waits = pl.concat(facts.job.map_ranks(_measured_waits))
    waits = waits.select("rank", "span_id", "waited_ns", call="name")
    usual = facts.spans.join(waits, on=["rank", "span_id"]).sort("waited_ns", "span_id", descending=True)
    before_ns = pl.col("waited_ns").cum_sum() - pl.col("waited_ns")
    longest = usual.filter(before_ns < NEARLY_ALL * pl.col("waited_ns").sum())
    count = longest.height / facts.rank_steps
    if count < OFTEN:
        return
    ended = best_of(facts, ["no-sync"])
    if ended is not None:
        yield by_edit(
            "sync",
            f"remove waits for the GPU ({_waiting_in_words(longest, facts.spans)}), "
            f"{counted(max(round(count), 1), 'call')} a step"
            f"{place_of(longest, facts.spans)}",
            ended,
            "the results can be read later",
        )


def _waiting_in_words(waits: pl.DataFrame, spans: pl.DataFrame) -> str:
    """Return the two calls that wait longest, each with its operator: `cudaMemcpyAsync in aten::copy_`.

    Args:
        waits: some rows of `spans`, with `call`, the name of what waits, and `waited_ns`.
    """
    operators = spans.filter(pl.col("kind") == "cpu_op")
    around = pl.Series(innermost(operators, waits))
    names = operators["name"].gather(around.replace(-1, None))
    operator = pl.when(pl.col("name") != pl.col("call")).then("name").otherwise(names)
    named = waits.group_by("call", operator=operator).agg(pl.col("waited_ns").sum())
    longest = named.sort("waited_ns", "call", "operator", descending=[True, False, False]).head(2)
    pairs = longest.select("call", "operator").iter_rows()
    # Where it is the operator that waits, the other name is that of its call.
    ordered = (
        (other, one) if other and re.match(RUNTIME_CALL, other) else (one, other) for one, other in pairs
    )
    return " and ".join(f"{call} in {operator}" if operator else call for call, operator in ordered)


def _measured_waits(graph: Graph) -> pl.DataFrame:
    return gpu_waits(graph, graph.nodes.measured_end)


def keep_memory(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Keep device memory instead of allocating it again."""
    calls = facts.spans.filter((pl.col("kind") == "runtime") & pl.col("name").str.contains(ALLOCATING))
    share = facts.typical_share(calls)  # typical, as a first step allocates what the others reuse
    if share < 0.03:
        return
    yield Advice(
        "allocator",
        "keep device memory (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, fewer sizes): cudaMalloc "
        f"and cudaFree take {share:.0%} of the step{place_of(calls, facts.spans)}",
        1.0,
        facts.gains_by_limit().get(ALLOCATOR, 1.0),
        "a setting",
    )


def avoid_copies(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Keep on the GPU what is copied repeatedly, or copy it from pinned memory."""
    gain = facts.gains_by_limit().get(COPIES, 1.0)
    if gain < 1.05:
        return
    copies = facts.spans.filter(pl.col("kind") == "memcpy")
    totals = (
        copies.group_by("name")
        .agg(total_ns=pl.col("duration_ns").sum(), moved=pl.col("bytes").clip(lower_bound=0).sum())
        .sort("total_ns", descending=True)
    )
    if totals.is_empty():
        return
    name, total_ns, moved = totals.row(0)
    time = format_duration(total_ns / facts.rank_steps)
    moves = f"moves {format_bytes(moved / facts.rank_steps)} in" if moved else "takes"
    figures = f"{name} {moves} {time} a step and rank"
    of_loader = facts.spans["name"].str.contains("DataLoader").any()
    if "Pageable" in name and (
        of_loader or moved >= LARGE_COPY * copies.filter(pl.col("name") == name).height
    ):
        pin, effort = ("pin_memory=True", "a setting") if of_loader else ("pin_memory()", "a line of code")
        do = f"copy from pinned memory ({pin}, non_blocking=True), beside what is computed: {figures}"
        yield Advice("copies", do, partly(gain, 0.5), gain, effort, "the host has memory to pin")
        return
    yield Advice(
        "copies",
        f"keep on the GPU what is copied: {figures}",
        partly(gain, 0.6),
        gain,
        "new code",
        "memory has room for it",
    )
