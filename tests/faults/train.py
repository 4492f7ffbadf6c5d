"""A real data-parallel job on gloo with one fault by name, in the ranks and steps that its options say.

Steps sleep, and faults sleep or use a stated CPU time, so that what else runs on the machine hardly changes
what they cost. Run by a launcher that sets RANK and WORLD_SIZE.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc

gc.disable()  # what torch makes need not be looked at: the job starts and ends a second sooner

import argparse
import contextlib
import ctypes
import fcntl
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

gc.freeze()
gc.enable()

WIDTH, BATCH = 16, 4
Options = argparse.Namespace
Fault = Callable[[Options, int], None]
EACH: dict[str, Fault] = {}  # faults that come in each step in which the rank is at fault
ONCE: dict[str, Fault] = {}  # faults that come once, in the first such step
PLACES = (
    "begin",
    "reduced",
    "updated",
)  # of a step: before its forward, after its last call, after its update
CHILD = "import time, sys; t = time.process_time\nwhile t() < float(sys.argv[1]): pass"
HELD: list[Any] = []  # what a fault holds on to
TOOK_MS: list[float] = []  # by the fault, each time: a busy machine adds to what it should take


def use_cpu(ms: float) -> None:
    """Use so much CPU time in matrix products."""
    until = time.thread_time() + ms / 1e3
    matrix = torch.ones(64, 64)
    while time.thread_time() < until:
        torch.mm(matrix, matrix)


def each(function: Fault) -> Fault:
    EACH[function.__name__.replace("_", "-")] = function
    return function


def once(function: Fault) -> Fault:
    ONCE[function.__name__.replace("_", "-")] = function
    return function


@each
def sleep(options: Options, step: int) -> None:
    time.sleep(options.ms / 1e3)


@each
def compute(options: Options, step: int) -> None:
    use_cpu(options.ms)


@each
def grow(options: Options, step: int) -> None:
    """Sleep longer from step to step, up to `ms` in the last one."""
    time.sleep(options.ms / 1e3 * (step - options.since + 1) / (options.steps - options.since))


@each
def write_through(options: Options, step: int) -> None:
    """Write a file to the disk again and again for so long."""
    until = time.monotonic() + options.ms / 1e3
    with open(options.folder / f"log{dist.get_rank()}", "wb", buffering=0) as log:
        while time.monotonic() < until:
            log.write(bytes(1 << 16))
            os.fsync(log.fileno())


@each
def write_lines(options: Options, step: int) -> None:
    """Print for so much CPU time."""
    until = time.thread_time() + options.ms / 1e3
    while time.thread_time() < until:
        print(f"step {step}: loss {torch.ones(()).item():.4f}", flush=True)


@each
def child_process(options: Options, step: int) -> None:
    """Wait for another program that uses so much CPU time, as an evaluation does that is started apart."""
    subprocess.run([sys.executable, "-S", "-c", CHILD, str(options.ms / 1e3)], check=True)


@each
def serialised(options: Options, step: int) -> None:
    """Hold a lock that all ranks take in turn."""
    with open(options.folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(options.ms / 1e3)


@each
def collect(options: Options, step: int) -> None:
    HELD or HELD.extend([] for _ in range(options.objects))
    gc.collect()


@each
def validate(options: Options, step: int) -> None:
    """Call the model without gradients, in four parts."""
    model = HELD[0] if HELD else torch.nn.Linear(WIDTH, WIDTH)
    HELD[:] = [model]
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            time.sleep(options.ms / 4e3)
            model(torch.ones(BATCH, WIDTH))
    model.train()


class Slow(io.BytesIO):
    """A file on a slow disk."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def write(self, content: Any) -> int:
        time.sleep(self.seconds)
        self.seconds = 0
        return super().write(content)


@each
def save(options: Options, step: int) -> None:
    torch.save({"weight": torch.ones(WIDTH, WIDTH)}, Slow(options.ms / 1e3))


@each
def rollout(options: Options, step: int) -> None:
    """Sample from the model without gradients, for a time that differs from step to step, as in RL."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for part in range(4):
            time.sleep(options.ms / 4e3 * (0.7 + 0.6 * ((step * 7 + part) % 5) / 4))
            model(torch.ones(BATCH, WIDTH))


@once
def interpreter(options: Options, step: int) -> None:
    """A thread of the process computes in Python for good."""

    def spin() -> None:
        number = 0
        while True:
            number += 1

    threading.Thread(target=spin, daemon=True).start()


@once
def quota(options: Options, step: int) -> None:
    """Limit the process to `share` of a core by a control group of its own."""
    folder = Path(f"/sys/fs/cgroup/cpu/dpro-faults-{os.getpid()}")
    unified = not folder.parent.is_dir()
    folder = Path("/sys/fs/cgroup") / folder.name if unified else folder
    folder.mkdir()
    period = 100_000
    if unified:
        (folder / "cpu.max").write_text(f"{int(options.share * period)} {period}")
    else:
        (folder / "cpu.cfs_quota_us").write_text(str(int(options.share * period)))
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    HELD.append(folder)


@once
def shared_core(options: Options, step: int) -> None:
    """Share one core with programs that compute, `share` of them."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    for _ in range(int(options.share)):
        child = subprocess.Popen([sys.executable, "-S", "-c", CHILD, "1000"])
        os.sched_setaffinity(child.pid, {core})
        HELD.append(child)


@once
def stuck(options: Options, step: int) -> None:
    time.sleep(1000)


@once
def stop(options: Options, step: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@once
def lock_held(options: Options, step: int) -> None:
    ctypes.PyDLL(None).sleep(1000)  # unlike CDLL, PyDLL keeps the interpreter's lock


@once
def killed(options: Options, step: int) -> None:
    """Be killed, as the kernel does where memory has run out, after standing still for `ms`."""
    time.sleep(options.ms / 1e3)
    os.kill(os.getpid(), signal.SIGKILL)


@once
def crash(options: Options, step: int) -> None:
    ctypes.string_at(0)


@once
def raises(options: Options, step: int) -> None:
    raise ValueError(f"loss is not finite at step {step}")


@once
def exits(options: Options, step: int) -> None:
    os._exit(3)


@once
def hook_fails(options: Options, step: int) -> None:
    """Raise where the program's own hook for exceptions is broken."""

    def broken(*_: object) -> None:
        raise RuntimeError("the hook itself")

    sys.excepthook = broken
    raise ValueError(f"loss is not finite at step {step}")


@once
def hook_replaced(options: Options, step: int) -> None:
    """Raise where the program has a hook of its own for exceptions, which writes a line."""
    sys.excepthook = lambda kind, error, place: print(kind, error, file=sys.stderr)
    raise ValueError(f"loss is not finite at step {step}")


@once
def leave(options: Options, step: int) -> None:
    sys.exit(0)


@once
def memory(options: Options, step: int) -> None:
    raise MemoryError(f"unable to allocate {step} GiB")


CALLS = ("skip", "size", "dtype", "other-call", "order")
WRONG = [*CALLS, "bad-sample"]


class Samples(Dataset[Tensor]):
    """Samples of ones, of which one cannot be decoded."""

    def __init__(self, options: Options, bad: int) -> None:
        self.options, self.bad = options, bad

    def __len__(self) -> int:
        return BATCH * self.options.steps

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.options.sample_ms / 1e3)
        if index == self.bad:
            decode(index)
        return torch.ones(WIDTH)


def decode(index: int) -> None:
    raise ValueError(f"sample {index} is truncated")


def batches(options: Options, rank: int) -> Iterator[Tensor]:
    """The batches of all steps."""
    if not options.workers:
        for _ in range(options.steps):
            yield torch.ones(BATCH, WIDTH)
        return
    bad = options.since * BATCH if options.fault == "bad-sample" and rank in options.rank else -1
    yield from DataLoader(Samples(options, bad), batch_size=BATCH, num_workers=options.workers)


class Descent(torch.optim.Optimizer):
    """The optimizers of torch import the compiler, which takes longer than all the rest."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def add_param_group(self, group: Any) -> None:
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.01 * parameter.grad
            parameter.grad = None


def reduce_gradients(options: Options, model: torch.nn.Module, wrong: bool) -> None:
    """One all-reduce per parameter, one of them another where the rank calls wrongly."""
    gradients = [parameter.grad for parameter in model.parameters()]
    if wrong and options.fault == "order":
        gradients.reverse()
    for place, gradient in enumerate(gradients):
        if wrong and place == options.call and options.fault != "order":
            if options.fault == "skip":
                continue
            if options.fault == "size":
                gradient = torch.ones(gradient.numel() // 2)
            elif options.fault == "dtype":
                gradient = torch.ones(gradient.shape, dtype=torch.float64)
            else:
                dist.broadcast(gradient, 0)
                continue
        dist.all_reduce(gradient)


def at_fault(options: Options, rank: int, step: int) -> bool:
    """Whether a rank is at fault in a step."""
    due = step >= options.since and (step - options.since) % options.every == 0
    return due and (rank in options.rank or not options.rank)


def train(options: Options) -> None:
    rank = dist.get_rank()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    optimizer = Descent(model.parameters())
    for step, batch in enumerate(batches(options, rank)):
        wrong = at_fault(options, rank, step)
        act(options, step, wrong, "begin")
        time.sleep(options.step_ms / 1e3)
        if options.work_ms:
            use_cpu(options.work_ms)
        model(batch).sum().backward()
        reduce_gradients(options, model, wrong and options.fault in CALLS and step == options.since)
        act(options, step, wrong, "reduced")
        optimizer.step()
        act(options, step, wrong, "updated")


def act(options: Options, step: int, wrong: bool, place: str) -> None:
    """Do what the fault is, where it is due."""
    if not wrong or place != options.place:
        return
    if step == options.since:
        (options.folder / "went-wrong").touch()
    if options.fault in EACH:
        begun = time.monotonic()
        EACH[options.fault](options, step)
        TOOK_MS.append(1e3 * (time.monotonic() - begun))
    elif options.fault in ONCE and step == options.since:
        ONCE[options.fault](options, step)


def parsed() -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=["none", *EACH, *ONCE, *WRONG])
    parser.add_argument("--rank", type=int, nargs="*", default=[], help="at fault; all where none is given")
    parser.add_argument("--ms", type=float, default=30.0, help="of the fault, each time")
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--since", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--place", choices=PLACES, default="begin")
    parser.add_argument("--call", type=int, default=1, help="which of a step's calls is wrong")
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--work-ms", type=float, default=0.0, help="of CPU time, in each step of each rank")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--sample-ms", type=float, default=0.0)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path())
    return parser.parse_args()


def release() -> None:
    """End what a fault has started."""
    for held in HELD:
        if isinstance(held, subprocess.Popen):
            held.kill()
            held.wait()
        elif isinstance(held, Path):
            (held.parent / "cgroup.procs").write_text(str(os.getpid()))
            with contextlib.suppress(OSError):
                held.rmdir()


def main() -> None:
    options = parsed()
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        release()
    if TOOK_MS:
        (options.folder / f"took-{dist.get_rank()}").write_text(str(sum(TOOK_MS) / len(TOOK_MS)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
