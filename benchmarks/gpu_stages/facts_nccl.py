"""Facts of PyTorch's flight recorder on NCCL: how a dump affects a process that uses its GPU.

One rank is enough: its collectives have entries, states and events like any others. The dumps are made as the
recorder makes them, on a thread that has never used CUDA, and by the plain binding for comparison.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpu_stages.check import Bench, Check

if TYPE_CHECKING:
    from gpu_stages.device import FirstGpu, Rehearsal

RING = 2000


@contextmanager
def one_rank(bench: Bench, timing: bool = False) -> Iterator[FirstGpu | Rehearsal]:
    """Run the block in a process group of one rank, with the flight recorder on."""
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(RING))
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RING))
    if timing:
        os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"
    import torch.distributed as dist
    from gpu_stages.device import device_of

    device = device_of(bench.dry)
    dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        device.sync()
        dist.destroy_process_group()


def plain_dump(device: FirstGpu | Rehearsal) -> Callable[[], bytes]:
    """Return the binding that pickles the ring while it has Python's lock."""
    import torch

    c10d = torch._C._distributed_c10d
    name = "_dump_nccl_trace" if device.name == "cuda" else "_dump_fr_trace"
    dump = getattr(c10d, name, None) or getattr(c10d, "_dump_fr_trace_json", lambda **_: pickle.dumps({}))
    return lambda: dump(includeStackTraces=False)


def ways_to_dump(device: FirstGpu | Rehearsal) -> dict[str, Callable[[], bytes | None]]:
    """Return the plain binding, and the recorder's way, which avoids captures and sets its GPU."""
    ways: dict[str, Callable[[], bytes | None]] = {"binding": plain_dump(device)}
    try:
        ways["recorder"] = _recorders_way(device)
    except Exception as error:  # an incompatible recorder: the binding is measured all the same
        print(f"the recorder's own way is not there: {type(error).__name__}: {error}", flush=True)
    return ways


def _recorders_way(device: FirstGpu | Rehearsal) -> Callable[[], bytes | None]:
    """Set up the recorder's dumping without the rest of it; a dump that is put off returns None."""
    import torch

    from dpro.collectors.inside import captures
    from dpro.collectors.inside.calls import flight

    alone: Any = SimpleNamespace(
        training_thread=threading.main_thread().ident,
        device=torch.device("cuda", 0) if device.name == "cuda" else None,
        call=lambda action, *arguments: action(*arguments),
        listen=lambda *_: None,
    )
    captures.install(alone)
    dumps = flight.RingDumper(alone)
    [ring] = [ring for ring in flight.rings() if (ring.name == flight.NCCL) == (device.name == "cuda")]
    return lambda: dumps.dump(ring)


def entries_of(dump: bytes) -> list[dict[str, Any]]:
    """Return the entries of a pickled dump, which this process has made."""
    found: list[dict[str, Any]] = pickle.loads(dump).get("entries", [])
    return found


def ring(bench: Bench) -> None:
    """Report entries before, during and after their kernels."""
    import torch
    import torch.distributed as dist

    with one_rank(bench) as device:
        value, dump = torch.ones(1000, device=device.name), plain_dump(device)
        device.spin(300)
        for _ in range(5):
            dist.all_reduce(value)
        during = collections.Counter(entry.get("state") for entry in entries_of(dump()))
        device.sync()
        time.sleep(0.3)
        entries = entries_of(dump())
        bench.say(
            "entries", n=len(entries), states_while_it_spins=dict(during),
            states_when_done=dict(collections.Counter(entry.get("state") for entry in entries)),
            retired=sum(bool(entry.get("retired")) for entry in entries),
            with_a_duration=sum("duration_ms" in entry for entry in entries),
            fields=sorted({name for entry in entries for name in entry}),
        )  # fmt: skip


def timing(bench: Bench) -> None:
    """Report entries with start events: TORCH_NCCL_ENABLE_TIMING=1."""
    import torch
    import torch.distributed as dist

    with one_rank(bench, timing=True) as device:
        value, dump = torch.ones(1_000_000, device=device.name), plain_dump(device)
        for _ in range(5):
            dist.all_reduce(value)
        device.sync()
        time.sleep(0.3)
        entries = entries_of(dump())
        durations = [entry["duration_ms"] for entry in entries if entry.get("duration_ms") is not None]
        bench.say(
            "timed entries", n=len(entries), with_a_duration=len(durations), durations_ms=durations,
            started=sum(entry.get("time_discovered_started_ns") is not None for entry in entries),
            bar="each entry has a duration", holds=bench.dry or len(durations) == len(entries),
        )  # fmt: skip


class _Gaps(threading.Thread):
    """Measures the longest time for which another Python thread got no turn."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s, self.go_on = 0.0, True

    def run(self) -> None:
        last = time.perf_counter()
        while self.go_on:
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last)
            last = now


def _on_a_thread(work: Callable[[], object], limit_s: float) -> tuple[float, str]:
    """Run work on a new thread; return its ms, and its error, which may be that it exceeded the limit."""
    said: list[str] = []

    def guarded() -> None:
        try:
            work()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=guarded, daemon=True)
    begun = time.perf_counter()
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        said.append(f"not done after {limit_s:g} s")
    return 1e3 * (time.perf_counter() - begun), "; ".join(said)


def dump_costs(bench: Bench) -> None:
    """Measure dumps of a full ring, with and without unfinished work: time, Python's lock, GPU memory."""
    import torch
    import torch.distributed as dist

    with one_rank(bench) as device:
        value = torch.ones(1000, device=device.name)
        ways = ways_to_dump(device) | _json_dump(device)
        for unfinished, (name, dump) in itertools.product((0, 200), ways.items()):
            for _ in range(bench.few(RING - unfinished, 20)):
                dist.all_reduce(value)
            device.sync()
            time.sleep(bench.few(2, 0))  # the watchdog retires finished entries
            device.spin(1500 if unfinished else 0.1)
            for _ in range(unfinished):  # few enough for the queue of a stream
                dist.all_reduce(value)
            used = device.used_bytes()
            alone_ms, said = _on_a_thread(dump, 20)
            with _gaps() as gaps:
                _on_a_thread(dump, 20)
            bench.say(
                f"dump by the {name}, {unfinished} unfinished", n=bench.few(RING, 20 + unfinished),
                took_ms=alone_ms, lock_kept_ms=1e3 * gaps.longest_s,
                gpu_memory_added_bytes=device.used_bytes() - used, raised=said,
            )  # fmt: skip
            device.sync()


def _json_dump(device: FirstGpu | Rehearsal) -> dict[str, Callable[[], bytes | None]]:
    """Return the binding that writes JSON, where this PyTorch has it; else nothing."""
    import torch

    name = "_dump_nccl_trace_json" if device.name == "cuda" else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, name, None)
    return {"binding as JSON": dump} if dump is not None else {}


@contextmanager
def _gaps() -> Iterator[_Gaps]:
    """Watch another thread's turns while the block runs."""
    gaps = _Gaps()
    gaps.start()
    time.sleep(0.05)
    gaps.longest_s = 0.0
    try:
        yield gaps
    finally:
        gaps.go_on = False
        gaps.join()


def dump_during_sync(bench: Bench) -> None:
    """Dump while the training thread is in cudaDeviceSynchronize."""
    import torch
    import torch.distributed as dist

    with one_rank(bench) as device:
        value = torch.ones(1000, device=device.name)
        for name, dump in ways_to_dump(device).items():
            device.sync()
            device.spin(2000)
            for _ in range(50):
                dist.all_reduce(value)
            took: list[tuple[float, str]] = []
            late = threading.Timer(0.2, lambda dump=dump, took=took: took.append(_on_a_thread(dump, 10)))
            late.start()
            begun = time.perf_counter()
            device.sync()
            waited_ms = 1e3 * (time.perf_counter() - begun)
            late.join(15)
            bench.say(
                f"dump by the {name}", took_ms=took[0][0] if took else None, sync_ms=waited_ms,
                raised=took[0][1] if took else "never came back",
            )  # fmt: skip


def dump_during_capture(bench: Bench, mode: str, way: str) -> None:
    """Dump without pause while a graph is captured, and check that the capture succeeds."""
    import torch
    import torch.distributed as dist

    with one_rank(bench) as device:
        value = torch.ones(1000, device=device.name)
        dump = ways_to_dump(device).get(way)
        if dump is None:
            bench.say(f"capture, {mode}", skipped=f"no dump by the {way} here")
            return
        made, left, over, raised = 0, 0, threading.Event(), ""

        def repeat() -> None:
            nonlocal made, left
            while not over.is_set():
                done = dump() is not None
                made, left = made + done, left + (not done)

        def work() -> None:
            for _ in range(bench.few(3000, 10)):
                value.add_(1)

        dist.all_reduce(value)  # both kernels are loaded now, not within the capture
        value.add_(1)
        device.sync()
        with device.on(device.stream()):
            device.spin(4000)  # so that the entries below stay unfinished, and their events are queried
            for _ in range(20):
                dist.all_reduce(value)
        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        time.sleep(0.05)
        try:
            replay = device.captured_amid(work, mode)
            replay()
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        over.set()
        thread.join(10)
        bench.say(
            f"capture, {mode}, dumps by the {way}", n=made, left_for_later=left, raised=raised,
            bar="the capture is not disturbed", holds=not raised,
        )  # fmt: skip


def captured_collective(bench: Bench) -> None:
    """Report whether a collective within a graph is in the ring, once or with each replay."""
    import torch
    import torch.distributed as dist

    with one_rank(bench) as device:
        value, dump = torch.ones(1000, device=device.name), plain_dump(device)
        dist.all_reduce(value)
        device.sync()
        replay = device.captured(lambda: dist.all_reduce(value))
        captured = len(entries_of(dump()))
        for _ in range(10):
            replay()
        device.sync()
        time.sleep(0.3)
        entries = entries_of(dump())
        status = pickle.loads(dump()).get("pg_status", {})
        bench.say(
            "captured collective", n=10, entries_when_captured=captured, entries_after_replays=len(entries),
            states=dict(collections.Counter(entry.get("state") for entry in entries)),
            counters={str(key): dict(each) for key, each in status.items()},
        )  # fmt: skip


def _captures() -> list[Check]:
    checks = []
    for way in ("recorder", "binding"):
        for mode in ("global", "thread_local", "relaxed"):
            run = functools.partial(dump_during_capture, mode=mode, way=way)
            asks = f"does a capture in mode {mode} live through dumps?"
            checks.append(Check("facts", f"nccl-capture-{mode}-{way}", asks, run, 45))
    return checks


CHECKS = (
    Check("facts", "nccl-ring", "what do entries of NCCL look like?", ring, 60),
    Check("facts", "nccl-dump", "what does a dump cost the process?", dump_costs, 60),
    *_captures(),
    Check("facts", "nccl-dump-sync", "is a dump possible while the GPU is waited for?", dump_during_sync, 45),
    Check("facts", "nccl-captured-collective", "are captured collectives in the ring?",
          captured_collective, 45),
    Check("facts", "nccl-timing", "do entries have durations with NCCL's timing on?", timing, 45),
)  # fmt: skip
