"""What windows leave behind, and whether detaching CUPTI after them takes it away: what decides the defaults.

The checks stand in the order of their value, and all of them fit into one call of the benchmark.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_stages.check import Bench, Check, EndedProcess
from gpu_stages.cupti import CUDA_EVENT, KINDS, Cupti
from gpu_stages.facts import a_step, kineto, measure_window
from gpu_stages.overhead import BARS, KEYS, arguments_of, interval, switched
from gpu_stages.ranks import backend_of, two_ranks

if TYPE_CHECKING:
    from gpu_stages.device import FirstGpu, Rehearsal

    Device = FirstGpu | Rehearsal

MAX_RATIO = 1.01  # of steps after a window to those before
MIN_KERNELS = 0.99  # of those of the other windows
STATE_S = 15.0  # for one state of the process
LONGEST_S = 90.0  # for a job and the turns before it


# G1: the cost of a launch, in each state in which a profiler may leave a process.


def _profile(device: Device, sync_events: bool) -> None:
    """Run and discard a session of Kineto, as windows do."""
    profiler = kineto(device, sync_events)
    profiler._prepare_trace()
    profiler._start_trace()
    device.sync()
    profiler.use_device = None  # else its exit would synchronise
    profiler.__exit__(None, None, None)


def _enter(name: str, device: Device, step: Callable[[], None]) -> None:
    """Bring this process into a state.

    Raises:
        RuntimeError: CUPTI is not there, lacks a function or refuses.
    """
    from gpu_stages.device import Rehearsal

    what, _, kind = name.partition(": ")
    if what == "CPU-only profile":
        _profile(Rehearsal(), sync_events=False)
    elif what.startswith("Kineto"):
        _profile(device, sync_events="without sync events" not in what)
        if what == "Kineto, then event timestamps off":
            Cupti().set_event_timestamps(False)
        elif what == "Kineto, then cuptiFinalize":
            Cupti().finalize()
    elif what.startswith("subscribed"):
        cupti = Cupti()
        cupti.subscribe()
        if what == "subscribed and unsubscribed":
            cupti.unsubscribe()
    elif what.startswith("event timestamps"):
        cupti = Cupti()
        cupti.set_event_timestamps(True)
        if what == "event timestamps on and off":
            cupti.set_event_timestamps(False)
    elif what == "activity on and off":
        cupti = Cupti()
        cupti.enable(KINDS.get(kind, CUDA_EVENT))
        step()
        device.sync()
        cupti.disable(KINDS.get(kind, CUDA_EVENT))


STATES = (
    "nothing",
    "Kineto",
    "Kineto, then event timestamps off",
    "Kineto, then cuptiFinalize",
    "Kineto without sync events",
    "subscribed",
    "CPU-only profile",
    *(f"activity on and off: {kind}" for kind in (*KINDS, "event")),
    "event timestamps on",
    "event timestamps on and off",
    "subscribed and unsubscribed",
)


def _in_state(dry: bool, name: str, answer: Any) -> None:
    """Time launches before and after this process enters a state; runs in a process of its own."""
    from gpu_stages.device import device_of, timed

    os.environ["TEARDOWN_CUPTI"] = "0"
    try:
        device = device_of(dry)
        step = a_step(device, "launch", dry)
        steps = 3 if dry else 250
        timed(device, step, steps)
        before = [timed(device, step, steps)[1] for _ in range(3)]
        _enter(name, device, step)
        timed(device, step, max(steps // 10, 1))
        after = [timed(device, step, steps)[1] for _ in range(3)]
        answer.send({"before": before, "after": after})
    except Exception as error:
        answer.send({"error": f"{type(error).__name__}: {error}"})
    answer.close()
    os._exit(0)  # no destructor of a library that was detached below Kineto


def launch_cost(bench: Bench) -> None:
    """Report the cost of a launch after each state, each in a process that is forked before CUDA is used."""
    import torch  # noqa: F401  # once for all of them

    forked = multiprocessing.get_context("fork")
    launches = 2 * bench.few(100, 4)
    for name in STATES:
        mine, theirs = forked.Pipe(duplex=False)
        process = forked.Process(target=_in_state, args=(bench.dry, name, theirs))
        process.start()
        theirs.close()
        try:
            found = mine.recv() if mine.poll(STATE_S) else {"error": "it did not end"}
        except EOFError:
            process.join(STATE_S)
            found = {"error": f"it ended with {process.exitcode}"}
        process.kill()
        process.join()
        if "error" in found:
            figures = {"refused" if bench.dry else "error": found["error"]}
            bench.say(name, n=0, bar="the state can be entered", holds=False, **figures)
            continue
        before, after = (statistics.median(found[side]) for side in ("before", "after"))
        noise = max(found["before"]) / min(found["before"]) - 1
        bench.say(
            name, n=len(found["after"]), launch_us=1e3 * before / launches,
            added_us=1e3 * (after - before) / launches, to_before=after / before, noise=noise,
            bar=f"≤ {MAX_RATIO + noise:.3f} of before", holds=after / before <= MAX_RATIO + noise,
        )  # fmt: skip


# G2 and G3: steps after windows that are torn down, all or every other one.


def detaching(bench: Bench, bound: str, graph: bool) -> None:
    """Compare steps after windows that tear CUPTI down with those before the first one."""
    os.environ["TEARDOWN_CUPTI"] = "1"
    _windows(bench, bound, graph, [nullcontext] * bench.few(12, 2))


def alternating(bench: Bench) -> None:
    """Detach after every other window under replays of a graph, as `dpro record --detach` does it."""
    from dpro.collectors.inside.detaching import Detaching

    os.environ["TEARDOWN_CUPTI"] = "0"
    detaches = Detaching()
    _windows(bench, "launch", True, [nullcontext, detaches.at_exit] * bench.few(6, 1))
    bench.say(
        "teardowns", stuck=detaches.is_stuck, bar="each ends within 100 ms", holds=not detaches.is_stuck
    )


def _windows(bench: Bench, bound: str, graph: bool, ends: list[Callable[[], Any]]) -> None:
    """Take windows with training steps before, between and after them.

    Args:
        ends: for each window, the context in which its session ends.
    """
    from gpu_stages.device import device_of, timed

    device = device_of(bench.dry)
    step = a_step(device, bound, bench.dry)
    if graph:
        step = device.captured(step)
    steps = bench.few(60 if bound == "gpu" else 2000 if graph else 400, 3)
    timed(device, step, steps)
    before = [timed(device, step, steps)[0] for _ in ends]
    usual_ms, costs, after = statistics.median(before), [], []
    for at_exit in ends:
        costs.append(measure_window(bench.folder / "window.json", device, step, sync=True, at_exit=at_exit))
        timed(device, step, max(steps // 10, 1))  # CUPTI is torn down within a later call
        after.append(timed(device, step, steps)[0] / usual_ms)
    noise = max(abs(each / usual_ms - 1) for each in before)
    kept = [ratio for ratio, end in zip(after, ends) if end is nullcontext]
    torn = after if len(kept) == len(ends) else [x for x, end in zip(after, ends) if end is not nullcontext]
    parts = {part: statistics.median(cost[part] for cost in costs) for part in costs[0]}
    if len(torn) < len(ends):
        bench.say("steps after a kept window", n=len(kept), to_before=statistics.median(kept), most=max(kept))
    bench.say(
        "steps after a window", n=len(torn), before_ms=usual_ms, to_before=statistics.median(torn),
        least=min(torn), most=max(torn), noise=noise, **parts,
        bar=f"≤ {MAX_RATIO:g} of those before", holds=statistics.median(torn) <= MAX_RATIO,
    )  # fmt: skip
    kernels = [cost["kernels"] for cost in costs]
    bench.say(
        "kernels of a window", n=len(kernels), fewest=min(kernels), most=max(kernels),
        bar="≥ 99% of those of the others", holds=min(kernels) >= MIN_KERNELS * max(kernels) > 0,
    )  # fmt: skip


# G4: two ranks with collectives in flight.


def in_flight(bench: Bench) -> None:
    """Detach after each window of two ranks, and compare the kernels of their windows."""
    import polars as pl

    from dpro.schema import SPANS, STEPS
    from dpro.store import open_run

    backend = backend_of(bench)
    command = two_ranks(bench, backend, "--steps", bench.few(120, 30), "--item-every", 1)
    options = ["--skip", 6, "--every", 10, "--window-steps", 2, "--detach"]
    run, done = bench.record("run", command, options, 50)
    bench.say(
        "job", exit_code=done.code, wall_s=done.wall_s, backend=backend, stderr=done.stderr[-400:],
        bar="both ranks end with 0", holds=done.code == 0,
    )  # fmt: skip
    info = bench.ask("info", run)
    said = [line for line in info["warnings"] if "CUPTI was detached" in line]
    bench.say(
        "detached", n=len(said), said=said, skipped=info.get("skipped"),
        bar="CUPTI is detached, in time", holds=bool(said) and "not in time" not in " ".join(said),
    )  # fmt: skip
    opened = open_run(run)
    steps = opened.table(STEPS).filter(pl.col("window") >= 0).select("rank", "start_ns", "window")
    spans = opened.table(SPANS).filter(pl.col("kind") == ("cpu_op" if bench.dry else "kernel"))
    placed = spans.sort("start_ns").join_asof(steps.sort("start_ns"), on="start_ns", by="rank")
    whole = steps.group_by("rank", "window").len().filter(pl.col("len") == 2)
    counts = placed.join(whole, on=["rank", "window"], how="semi").group_by("rank", "window").len()
    for rank in range(2):
        kernels = counts.filter(pl.col("rank") == rank).sort("window")["len"].to_list()
        bench.say(
            f"kernels of rank {rank}'s windows", n=len(kernels), fewest=min(kernels, default=0),
            most=max(kernels, default=0), bar="none is lost",
            holds=len(kernels) > 1 and min(kernels) == max(kernels),
        )  # fmt: skip


# G5: whole jobs, in turns.


def default_windows(bench: Bench, job: str, steps: int, rounds: int) -> None:
    """Compare jobs with default windows with plain ones; all start at once, and train one after the other.

    A job needs longer to start than to train, and starts do not disturb one that trains on another core.
    """
    ways = ("plain", "default windows")
    arguments = arguments_of(bench, job, bench.few(steps, 12))
    order = [way for number in range(bench.few(rounds, 2)) for way in ways[:: 1 - 2 * (number % 2)]]
    turns = [bench.folder / f"turn-{number}" for number in range(len(order) + 1)]

    def train(number: int) -> tuple[EndedProcess, Path | None]:
        folder, run = bench.folder / f"job-{number}", None
        folder.mkdir()
        own = dataclasses.replace(bench, folder=folder)
        command = bench.job("train.py", *arguments, "--turn", turns[number])
        try:
            if order[number] == "plain":
                done = own.run(command, LONGEST_S)
            else:
                run, done = own.record("run", command, limit_s=LONGEST_S)
        finally:
            turns[number + 1].touch()  # also where it has failed
        return done, run

    turns[0].touch()
    with ThreadPoolExecutor(len(order)) as pool:
        ended = list(pool.map(train, range(len(order))))
    measured = []
    for done, run in ended:
        measured.append(done.ensure().last_json())
        if run is not None:
            measured[-1]["windows"] = (bench.ask("info", run).get("windows") or {}).get("count", 0)
    for clock, key in KEYS.items():
        plain, mine = ([each[key] for each, way in zip(measured, order) if way == name] for name in ways)
        ratios = [own / other for own, other in zip(mine, plain)]
        low, high = interval(ratios)
        bar, ratio = BARS["default windows"], statistics.median(ratios)
        bench.say(
            f"{clock}: default windows", n=len(ratios), ratio=ratio, low=low, high=high,
            noise=max(plain) / min(plain) - 1, plain_ms=statistics.median(plain),
            windows=[int(each["windows"]) for each in measured if "windows" in each],
            settled=high <= bar or low > bar, bar=f"≤ {bar:g} of plain", holds=ratio <= bar,
        )  # fmt: skip


# G6: the parts of a step's timing event.


def step_events(bench: Bench) -> None:
    """Measure the host's cost of each call for an event at a step's end, and whether it is ready later."""
    import collections
    import time

    from gpu_stages.device import device_of

    device = device_of(bench.dry)

    @contextmanager
    def timing(part: str) -> Iterator[None]:
        begun = time.perf_counter_ns()
        yield
        took_ns[part].append(time.perf_counter_ns() - begun)

    for bound in ("launch", "gpu"):
        step = a_step(device, bound, bench.dry)
        steps, pending, late, before = bench.few(200, 5), collections.deque(), 0, None
        took_ns: dict[str, list[int]] = {"nothing": [], "record": [], "query": [], "elapsed": []}
        device.sync()
        for _ in range(steps):
            step()
            event = device.event()
            with timing("nothing"):
                pass
            with timing("record"):
                event.record()
            pending.append(event)
            if len(pending) > 2:
                oldest = pending.popleft()
                with timing("query"):
                    is_ready = oldest.query()
                late += not is_ready
                if before is not None and is_ready:
                    with timing("elapsed"):
                        before.elapsed_time(oldest)
                before = oldest if is_ready else None
        device.sync()
        nothing_ns = statistics.median(took_ns["nothing"])
        bench.say(
            f"events, {bound}-bound", n=steps, not_ready_two_steps_later=late,
            **{f"{part}_us": (statistics.median(each) - nothing_ns) / 1e3
               for part, each in took_ns.items() if each and part != "nothing"},
        )  # fmt: skip


def _check(name: str, asks: str, run: Callable[..., None], limit_s: float, **sizes: object) -> Check:
    return Check("windows", name, asks, functools.partial(run, **sizes), limit_s)


_DETACHED = "are steps after a window as those before where CUPTI is torn down, and are all kernels there?"

CHECKS = (
    _check("launch-cost", "what does a launch cost after each thing that a profiler does?", launch_cost, 100),
    _check("detach-launch-eager", _DETACHED, detaching, 45, bound="launch", graph=False),
    _check("detach-launch-graph", _DETACHED, detaching, 45, bound="launch", graph=True),
    _check("detach-alternating", "and where every other window detaches, under replays of a graph?",
           alternating, 45),
    _check("detach-ranks", "do windows that detach amid collectives lose kernels, and do both ranks end?",
           in_flight, 90),
    _check("small-switched", "what does the recorder add to a step of one process?",
           switched, 50, job="small", steps=2000, turn=10),
    _check("small-windows", "what do default windows cost a job of small launches?",
           default_windows, 95, job="small", steps=500, rounds=6),
    _check("step-events", "what do recording, querying and reading a timing event take?", step_events, 20),
    _check("detach-gpu-eager", _DETACHED, detaching, 40, bound="gpu", graph=False),
)  # fmt: skip
