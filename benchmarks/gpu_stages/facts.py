"""Facts of profiling a GPU: what recording rests on, and how it affects a job that goes on training.

Each check is a process: a profiler that was started once changes the process for good, and a check that hangs
or dies in the driver must not take others with it.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import inspect
import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_stages.check import ROOT, Bench, Check
from gpu_stages.cupti import CUDA_EVENT, Cupti

if TYPE_CHECKING:
    from gpu_stages.device import FirstGpu, Rehearsal


def versions(bench: Bench) -> None:
    """Report the installed versions, and the abilities of this PyTorch."""
    import torch
    from torch.autograd.profiler import _ExperimentalConfig

    c10d = torch._C._distributed_c10d
    options = (_ExperimentalConfig.__init__.__doc__ or "").replace(":", " ").replace(",", " ").split()
    bench.say(
        "versions",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=_nccl_version(),
        activities=sorted(str(each) for each in torch.profiler.supported_activities()),
        trace_only="trace_only" in options,
        handlers=sorted(getattr(c10d, "_get_handler_names", list)()),
        dumps=sorted(name for name in dir(c10d) if name.startswith("_dump_")),
    )
    if not bench.dry:
        properties = torch.cuda.get_device_properties(0)
        bench.say(
            "gpu",
            model=properties.name,
            uuid=str(getattr(properties, "uuid", "")),
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            multiprocessors=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
        )


def _nccl_version() -> str:
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # a build without NCCL
        return f"none: {error}"


def analysis(bench: Bench) -> None:
    """Check that dpro itself works here, where its dependencies may have other versions."""
    run = ROOT / "sample_traces" / "slow_rank"
    said = bench.ask("replay", run, limit_s=100)
    found = bench.ask("diagnose", run, limit_s=60)["findings"]
    names = [f"{each['class']} of {each['ranks']}" for each in found]
    bench.say(
        "sample run", replay_error_pct=said["error_pct"], findings=names,
        bar="slow.host of rank 1, as anywhere", holds=names[:1] == ["slow.host of [1]"],
    )  # fmt: skip


def nvml(bench: Bench) -> None:
    """Report what the sampler reads of a busy GPU, at its usual period and at twenty times that."""
    from gpu_stages.device import device_of

    from dpro.collectors.telemetry.nvml import NvidiaGpus

    complaints: list[str] = []
    try:
        gpus = NvidiaGpus(complaints.append)
    except Exception as error:
        bench.say("nvml", bar="GPUs are sampled", holds=False, why=f"{type(error).__name__}: {error}")
        return
    device = device_of(bench.dry)
    for hz in (1, 20):
        costs, counters = [], collections.Counter()
        for number in range(bench.few(4 * hz if hz == 1 else 60, 2)):
            device.spin(900 / hz)
            for sample in gpus.read(number == 0):
                costs.append(sample.values.get("sampling_us", 0.0))
                counters.update(sample.values.keys())
            time.sleep(bench.few(1, 0) / hz)
        device.sync()
        cost_us = statistics.median(costs) if costs else 0.0
        bench.say(
            f"nvml at {hz} Hz", n=len(costs), sampling_us=cost_us, worst_us=max(costs, default=0.0),
            share_of_a_core_pct=cost_us * hz / 1e4, counters=sorted(counters),
        )  # fmt: skip
    bench.say("refused", complaints=complaints)
    bench.attempt("refused fields", lambda: bench.say("refused fields", fields=_refused_fields()))
    query = "uuid,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu,mig.mode.current"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
    )
    bench.say("nvidia-smi", asked=query, said=done.stdout.strip() or done.stderr.strip())


def _refused_fields() -> list[str]:
    """Return the field values that this driver refuses, with its errors."""
    import pynvml

    from dpro.collectors.telemetry import nvml as reader

    fields = [*reader._FIELDS, reader._LINK_COUNT, *reader._LINK_FIELDS]
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    values = pynvml.nvmlDeviceGetFieldValues(handle, [(each.identifier, each.scope) for each in fields])
    return [
        f"{field.counter} ({field.identifier}): {pynvml.NVMLError(value.nvmlReturn)}"
        for field, value in zip(fields, values)
        if value.nvmlReturn
    ]


# Costs of a window, and of steps after it.


def a_step(device: FirstGpu | Rehearsal, bound: str, dry: bool) -> Callable[[], None]:
    """Make a step that launches many kernels and computes little (`launch`), or the opposite."""
    import torch

    if bound == "launch":
        small = torch.ones(256, device=device.name)

        def launches() -> None:
            for _ in range(4 if dry else 100):
                small.mul_(1.0001).add_(0.1)

        return launches
    size = 64 if dry else 8192
    left = torch.randn(size, size, device=device.name, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device.name, dtype=torch.bfloat16)
    out = torch.empty_like(left)

    def computes() -> None:
        for _ in range(4):
            torch.mm(left, right, out=out)

    return computes


def window_costs(bench: Bench, bound: str, graph: bool, sync_events: bool) -> None:
    """Start and stop Kineto three times, with training steps before, between and after."""
    os.environ["TEARDOWN_CUPTI"] = "0"
    from gpu_stages.device import device_of, timed

    device = device_of(bench.dry)
    step = a_step(device, bound, bench.dry)
    if graph:
        step = device.captured(step)
    steps = bench.few(1000 if bound == "launch" else 250, 3)
    timed(device, step, steps)
    before, again = timed(device, step, steps), timed(device, step, steps)
    noise = max(abs(one / other - 1) for one, other in zip(before, again))
    for number in range(3):
        costs = measure_window(bench.folder / "window.json", device, step, sync_events)
        after = timed(device, step, steps)
        ratios = [new / ((one + other) / 2) for new, one, other in zip(after, before, again)]
        bar = 1.01 + noise
        bench.say(
            f"window {number + 1}", n=steps, **costs, before_ms=before[0], after_ms=after[0],
            after_to_before_event=ratios[0], after_to_before_wall=ratios[1], noise=noise,
            bar=f"steps after a window ≤ {bar:.3f} of those before", holds=max(ratios) <= bar,
        )  # fmt: skip
    costs = measure_window(bench.folder / "window.json", device, step, sync_events, busy=True)
    bench.say(
        "stopped while the GPU is busy", **costs, bar="the stop waits for no work of 500 ms",
        holds=costs["stop_ms"] < 250,
    )  # fmt: skip


def detaching_often(bench: Bench) -> None:
    """Tear CUPTI down after many windows, ever closer together, while two other threads use the GPU."""
    import torch
    from gpu_stages.device import device_of

    os.environ["TEARDOWN_CUPTI"] = "1"
    device, path, ended = device_of(bench.dry), bench.folder / "window.json", threading.Event()
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20))).to(device.name)
    batch = torch.ones(8, 64, device=device.name)

    def train_step() -> None:
        model(batch).sum().backward()  # in a thread of autograd

    def copy() -> None:
        stream = device.stream()
        while not ended.is_set():
            with device.on(stream):
                torch.ones(1000).to(device.name, non_blocking=True)
            stream.synchronize()

    copying = threading.Thread(target=copy)
    copying.start()
    try:
        for steps_between in (20, 5, 2, 1, 0):
            begun, windows = time.perf_counter(), bench.few(40, 2)
            kernels = []
            for _ in range(windows):
                kernels.append(measure_window(path, device, train_step, sync=True)["kernels"])
                for _step in range(steps_between):
                    train_step()
            took_ms = 1e3 * (time.perf_counter() - begun) / windows
            bench.say(
                f"{steps_between} steps between two windows", n=windows, fewest=min(kernels),
                kernels=statistics.median(kernels), most=max(kernels), window_and_steps_ms=took_ms,
                bar="each window has nine tenths of the usual kernels",
                holds=min(kernels) >= 0.9 * statistics.median(kernels) > 0,
            )  # fmt: skip
    finally:
        ended.set()
        copying.join()


def measure_window(
    path: Path,
    device: FirstGpu | Rehearsal,
    step: Callable[[], None],
    sync: bool,
    busy: bool = False,
    at_exit: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, float]:
    """Measure the parts of a window of two steps, in ms, and count its events.

    Args:
        path: of its file.
        device: that steps run on.
        step: one of them.
        sync: whether synchronisation is recorded.
        busy: whether it is stopped while the device has work for half a second.
        at_exit: makes the context in which it is stopped.
    """
    from gpu_stages.device import stopwatch

    profiler = kineto(device, sync)
    with stopwatch() as prepare:
        profiler._prepare_trace()
    with stopwatch() as start:
        profiler._start_trace()
    with stopwatch() as steps:
        step()
        step()
    with stopwatch() as synchronise:
        device.sync()
    if busy:
        device.spin(500)
    with stopwatch() as stop:
        profiler.use_device = None  # as windows do: its exit would synchronise
        with at_exit():
            profiler.__exit__(None, None, None)
    with stopwatch() as save:
        profiler.kineto_results.save(str(path))
    device.sync()
    kinds = collections.Counter(event.get("cat", "") for event in events_of(path))
    return {
        "prepare_ms": prepare[0], "start_ms": start[0], "steps_ms": steps[0], "sync_ms": synchronise[0],
        "stop_ms": stop[0], "save_ms": save[0], "kernels": kinds["kernel"],
        "runtime_calls": kinds["cuda_runtime"] + kinds["cuda_driver"], "sync_events": kinds["cuda_sync"],
    }  # fmt: skip


def kineto(device: FirstGpu | Rehearsal, sync_events: bool) -> Any:
    """Make the profiler below torch.profiler, as windows use it."""
    from torch.autograd.profiler import _ExperimentalConfig, profile

    on_gpu = device.name == "cuda"
    extra: dict[str, bool] = {"enable_cuda_sync_events": sync_events and on_gpu}
    if "trace_only" in (_ExperimentalConfig.__init__.__doc__ or ""):
        extra["trace_only"] = True
    config = _ExperimentalConfig(**extra)
    names = inspect.signature(profile.__init__).parameters
    device_word = {"use_device": "cuda" if on_gpu else None} if "use_device" in names else {}
    return profile(use_kineto=True, experimental_config=config, **device_word)


def events_of(path: Path) -> list[dict[str, Any]]:
    """Read the events of a Kineto file."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8", errors="replace"))[
        "traceEvents"
    ]
    return found


# Contents of a window.


def queued_kernels(bench: Bench) -> None:
    """Start a window while kernels wait in the queue, and report which of them are in the trace."""
    import torch
    from gpu_stages.device import device_of

    device, path = device_of(bench.dry), bench.folder / "queued.json"
    early, late = torch.ones(1000, device=device.name), torch.ones(1000, device=device.name)
    torch.neg(early, out=early)  # loads the kernels now, since a kernel's first launch may wait for the queue
    torch.exp(late, out=late)
    for number in range(2):  # the second window starts with CUPTI attached
        device.sync()
        device.spin(200)
        for _ in range(50):
            torch.neg(early, out=early)
        profiler = kineto(device, True)
        profiler._prepare_trace()
        profiler._start_trace()
        for _ in range(50):
            torch.exp(late, out=late)
        device.sync()
        profiler.__exit__(None, None, None)
        profiler.kineto_results.save(str(path))
        events = events_of(path)
        kernels = [event for event in events if event.get("cat") == "kernel"]
        calls = {
            event["args"].get("correlation")
            for event in events
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and "args" in event
        }
        seen = [event for event in kernels if "neg" in event["name"]]
        bench.say(
            f"queue at the start of window {number + 1}", n=50,
            queued_before_and_recorded=len(seen),
            of_those_with_a_launch=sum(event["args"].get("correlation") in calls for event in seen),
            launched_within_and_recorded=sum("exp" in event["name"] for event in kernels),
        )  # fmt: skip


def sync_correlation(bench: Bench, own_activity: bool) -> None:
    """Let streams wait for events, and report whether the trace says which record each wait was for."""
    import torch
    from gpu_stages.device import device_of, stopwatch

    device, path = device_of(bench.dry), bench.folder / "sync.json"
    stream, value = device.stream(), torch.ones(1000, device=device.name)
    profiler = kineto(device, True)
    profiler._prepare_trace()
    profiler._start_trace()
    with stopwatch() as enabling:
        end_events = _record_events() if own_activity and not bench.dry else lambda: None
    for _ in range(10):
        value.add_(1)
        ready = device.event()
        ready.record()
        stream.wait_event(ready)
        with device.on(stream):
            value.add_(1)
            done = device.event()
            done.record(stream)
        done.synchronize()
    stream.synchronize()
    device.sync()
    profiler.__exit__(None, None, None)
    with stopwatch() as disabling:
        end_events()
    profiler.kineto_results.save(str(path))
    syncs = [event for event in events_of(path) if event.get("cat") == "cuda_sync"]
    kinds = collections.Counter(event["name"] for event in syncs)
    records = [event["args"].get("wait_on_cuda_event_record_corr_id", -1) for event in syncs]
    streams = [event["args"].get("wait_on_stream", -1) for event in syncs]
    bench.say(
        "sync events", n=len(syncs), kinds=dict(kinds), enable_ms=enabling[0], disable_ms=disabling[0],
        with_a_record=sum(int(each) >= 0 for each in records),
        with_a_stream=sum(int(each) >= 0 for each in streams),
        fields=sorted({name for event in syncs for name in event["args"]}),
    )  # fmt: skip


def _record_events() -> Callable[[], object]:
    """Turn on CUPTI's activity for events, which Kineto leaves off; return the function that turns it off.

    Windows leave it off: PyTorch's Kineto reader does not know these activities, and writes a line for each.
    """
    cupti, kind = Cupti(), ctypes.c_int(CUDA_EVENT)
    cupti.call("cuptiActivityEnable", kind)
    return lambda: cupti.call("cuptiActivityDisable", kind)


def _window_checks() -> list[Check]:
    variants = [
        # First the settings that jobs get today, then ones that could be changed.
        ("launch", False, True), ("gpu", False, True), ("launch", True, True), ("launch", False, False),
        ("gpu", True, True),
    ]  # fmt: skip
    checks = []
    for bound, graph, sync in variants:
        words = [bound, "graph" if graph else "eager", *([] if sync else ["no-sync-events"])]
        asks = "what do the parts of a window cost, and are steps slower after it?"
        run = functools.partial(window_costs, bound=bound, graph=graph, sync_events=sync)
        checks.append(Check("facts", "-".join(["window", *words]), asks, run, 45))
    asks = "does a process live through many teardowns of CUPTI beside threads that use the GPU?"
    return [*checks, Check("facts", "detach-often", asks, detaching_often, 60)]


CHECKS = (
    Check("facts", "versions", "what is installed, and what can it do?", versions, 60),
    Check("facts", "analysis", "does dpro itself work here?", analysis, 120),
    Check("facts", "queued-kernels", "are kernels that were queued before the start recorded?",
          queued_kernels, 45),
    Check("facts", "sync-correlation", "do sync events say what was waited for?",
          functools.partial(sync_correlation, own_activity=False), 45),
    *_window_checks(),
    Check("facts", "sync-correlation-own", "do they with CUPTI's activity for events on?",
          functools.partial(sync_correlation, own_activity=True), 45),
    Check("facts", "nvml", "what does the driver refuse, and what does asking cost?", nvml, 45),
)  # fmt: skip
