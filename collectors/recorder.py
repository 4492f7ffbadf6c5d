"""The recorder: what runs inside the job, in every process that trains.

In: a folder that the launcher made, with `config.json`. Out: one folder per training process in it, with
`facts.json`, `records.bin` (steps and clocks), `window*.json` (Kineto), `flight-*.pickle` (PyTorch's
flight recorder) and `buckets.json`; `log.txt` has a line for every process that stopped recording.

Nothing here may change the job: every entry goes through `Recorder.guarded`, which turns trouble into
one line in the log and silence afterwards. Only the standard library and torch are used, and nothing is
written by processes that do not train: output opens when a process group is there or an optimizer updates.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import multiprocessing
import os
import platform
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.optim.optimizer import register_optimizer_step_post_hook


def _load(name: str) -> Any:
    """A sibling of this file under a private name: `dpro` need not be importable inside the job."""
    spec = importlib.util.spec_from_file_location(f"_dpro_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from dpro.collectors import records, stepping, windows
else:
    records, stepping, windows = _load("records"), _load("stepping"), _load("windows")

BACKWARD = "dpro::backward"  # the range around each backward call within a window
CLOCK_PERIOD_S = 1.0
STALL_S = 5.0  # after this long without a step the flight recorder is saved: the job may hang
BUCKETS_KNOWN_AT_STEP = 3  # DDP rebuilds its buckets after the first backward

# Where launchers tell a process its rank and the number of ranks, for jobs without torch.distributed.
RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # the latter is set for tasks of srun, not for batch scripts
)
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


class Recorder:
    """What one process of the job records; methods may raise, and are called through `guarded`."""

    def __init__(self, launch: Path) -> None:
        """Read the configuration; nothing is written yet.

        Args:
            launch: the folder that the launcher made for its processes.
        """
        config = json.loads((launch / "config.json").read_text())
        self._every: int = config["every"]
        self._window_steps: int = config["window_steps"]
        self._skip: int = config["skip"]
        self._shapes: bool = config["shapes"]
        self._launch = launch
        self._log = launch / "log.txt"
        self._enabled = True
        self._forked = False
        self._modules: list[weakref.ref[Any]] = []
        self._forget()

    def _forget(self) -> None:
        self._folder: Path | None = None
        self._records: records.RecordWriter | None = None
        self._window: Any = None
        self._window_start = (0, 0)  # step, ns
        self._window_thread = 0
        self._windows = 0
        self._groups: dict[str, list[int]] = {}
        self._last_step_s = time.monotonic()
        self._counter = stepping.StepCounter(self._on_anchor)

    def guarded(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run one of the methods below; if it fails, say so in the log and record no more."""
        if not self._enabled:
            return
        try:
            action(*arguments)
        except Exception as error:
            self._disable(action, error)

    def _disable(self, action: Callable[..., None], error: Exception) -> None:
        self._enabled = False
        with suppress(Exception):
            what = f"{type(error).__name__}: {error}".replace("\n", " ")
            with self._log.open("a") as log:
                log.write(f"process {os.getpid()} stopped recording in {action.__name__}: {what}\n")
        window, self._window = self._window, None
        with suppress(Exception):
            if window is not None:  # Kineto left running would crash the process at its exit
                windows.stop(window, None)

    # What the hooks call.

    def on_process_group(self) -> None:
        """A process group is there: this process has a rank."""
        if self._folder is None:
            self._open()
        else:
            self._write_facts()

    def on_update(self, optimizer: Any) -> None:
        """An optimizer, or the loss scaler which may skip it, has updated."""
        now = time.time_ns()
        if self._records is None:
            if self._forked or multiprocessing.parent_process() is not None:
                return  # a helper process that happens to optimise something
            self._open()
        assert self._records is not None
        before = self._counter.step
        counted = self._counter.update(id(optimizer))
        if counted is None:
            return
        if self._counter.step != before:
            self._on_step(self._counter.step)
        self._records.write(records.UPDATE, *counted, now, time.time_ns())

    def on_module(self, module: Any) -> None:
        """A module was wrapped for data parallelism."""
        self._modules.append(weakref.ref(module))

    def on_end(self) -> None:
        """The process group or the interpreter is about to go."""
        if self._folder is not None:
            self.close_window(save=True)
            self._save_flight("end")
            self._save_buckets()

    def on_raise(self) -> None:
        """An exception that nobody caught is about to end the interpreter."""
        if self._records is not None:
            self._records.write(records.RAISED, time.time_ns())

    def on_fork(self) -> None:
        """This is a forked child: whatever is open belongs to the parent."""
        if self._windows:
            windows.let_child_exit()
        self._forked = True
        self._forget()

    @property
    def in_window(self) -> bool:
        """Whether a deep window is being recorded."""
        return self._window is not None

    def is_ours(self, window: Any) -> bool:
        """Whether a profiler is the one this recorder started."""
        return window is self._window

    # Steps and windows.

    def _on_anchor(self, optimizer: int, base: int) -> None:
        assert self._records is not None
        self._records.write(records.ANCHOR, optimizer, base)

    def _on_step(self, step: int) -> None:
        self._last_step_s = time.monotonic()
        if self._window is not None and step >= self._window_start[0] + self._window_steps:
            self.close_window(save=True)
        if step == BUCKETS_KNOWN_AT_STEP:
            self._write_facts()  # by now the GPU has been chosen
            self._save_buckets()
        if step >= self._skip and (step - self._skip) % self._every == 0:
            self._open_window(step)

    def _open_window(self, step: int) -> None:
        self._windows += 1  # also where it cannot be recorded, so that all ranks count alike
        if self._window is None and not windows.busy():
            self._window = windows.start(self._shapes)
            self._window_start = (step, time.time_ns())
            self._window_thread = threading.get_ident()

    def close_window(self, save: bool) -> None:
        """End the window, if one is being recorded.

        Args:
            save: whether to keep it.
        """
        if self._window is None or self._folder is None or self._records is None:
            return
        if threading.get_ident() != self._window_thread:
            return  # only the thread that started Kineto can stop it
        window, self._window = self._window, None
        index, end_ns = self._windows - 1, time.time_ns()
        windows.stop(window, self._folder / f"window{index:04d}.json" if save else None)
        if save:
            self._records.write(records.WINDOW, index, self._window_start[1], end_ns)
            self._save_flight(f"window{index:04d}")

    # Files.

    def _open(self) -> None:
        folder = self._launch / f"{socket.gethostname()}-{os.getpid()}"
        folder.mkdir()
        self._records = records.RecordWriter(folder / "records.bin")
        self._started_ns = time.time_ns()
        self._folder = folder
        self._write_facts()
        threading.Thread(target=self._tick, args=(self._records,), name="dpro-clock", daemon=True).start()

    def _write_facts(self) -> None:
        rank, world_size = _identity()
        local_rank = next((os.environ[name] for name in LOCAL_RANK_VARIABLES if name in os.environ), "-1")
        facts = {
            "rank": rank,
            "world_size": world_size,
            "local_rank": int(local_rank),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_ns": self._started_ns,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            **_gpu(),
        }
        self._write("facts.json", json.dumps(facts).encode())

    def _save_buckets(self) -> None:
        modules = [module for reference in self._modules if (module := reference()) is not None]
        buckets = [_buckets(module._get_ddp_logging_data()) for module in modules]
        if buckets:
            self._write("buckets.json", json.dumps(buckets).encode())

    def _save_flight(self, occasion: str) -> None:
        """Save the flight recorders: gloo and the like share one, NCCL has its own."""
        if not dist.is_available():
            return
        self._groups |= _groups()  # destroyed groups stay known
        self._write("groups.json", json.dumps(self._groups).encode())
        c10d = torch._C._distributed_c10d
        for backend in ("fr", "nccl"):
            dump = getattr(c10d, f"_dump_{backend}_trace", None)
            if dump is not None:
                self._write(f"flight-{backend}-{occasion}.pickle", dump(includeStackTraces=False))

    def _write(self, name: str, content: bytes) -> None:
        assert self._folder is not None
        temporary = self._folder / f"{name}.tmp"
        temporary.write_bytes(content)
        os.replace(temporary, self._folder / name)

    # The thread beside the job: two clocks a second, and the flight recorder while nothing moves.

    def _tick(self, own: records.RecordWriter) -> None:
        saved_s = 0.0
        while self._enabled and self._records is own:
            self.guarded(self._sample_clock)
            now_s = time.monotonic()
            if min(now_s - self._last_step_s, now_s - saved_s) > STALL_S:
                self.guarded(self._save_flight, "stall")
                saved_s = now_s
            time.sleep(CLOCK_PERIOD_S)

    def _sample_clock(self) -> None:
        assert self._records is not None
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        now = time.time_ns()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        self._records.write(records.CLOCK, now, (before + after) // 2)


def _identity() -> tuple[int, int]:
    """Rank and number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for rank, size in RANK_VARIABLES:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def _gpu() -> dict[str, str]:
    if not torch.cuda.is_initialized():  # asking further would claim a GPU for this process
        return {"gpu_name": "", "gpu_uuid": ""}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"gpu_name": properties.name, "gpu_uuid": str(getattr(properties, "uuid", ""))}


def _groups() -> dict[str, list[int]]:
    """Global ranks of each process group by name; gloo's flight recorder does not tell them."""
    world = dist.distributed_c10d._world
    return {name: sorted(world.pg_group_ranks.get(group, ())) for group, name in world.pg_names.items()}


def _buckets(logging_data: dict[str, Any]) -> list[int]:
    """Bytes per bucket in order of communication: as rebuilt after the first backward, if it was."""
    sizes = logging_data.get("rebuilt_bucket_sizes") or logging_data.get("bucket_sizes") or ""
    return [int(size) for size in str(sizes).split(",") if size.strip()]


# Getting in: each patch calls the original with the same arguments and lets its exceptions pass.


def install(launch: str) -> None:
    """Set the hooks; called at the end of `import torch`. Raises nothing the caller need know of."""
    recorder = Recorder(Path(launch))
    register_optimizer_step_post_hook(
        lambda optimizer, _args, _kwargs: recorder.guarded(recorder.on_update, optimizer)
    )
    _patch(torch.amp.GradScaler, "update", after=lambda scaler: recorder.guarded(recorder.on_update, scaler))
    if dist.is_available():
        _install_distributed(recorder)
    _install_backward(recorder)
    _install_profiler(recorder)
    _install_excepthook(recorder)
    # A child that inherits a running Kineto would keep gathering events that nobody collects.
    os.register_at_fork(
        before=lambda: recorder.guarded(recorder.close_window, False),
        after_in_child=lambda: recorder.guarded(recorder.on_fork),
    )
    atexit.register(recorder.guarded, recorder.on_end)


def _patch(
    owner: Any,
    name: str,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
) -> None:
    """Have `before` and `after` called around a function; they get its first argument, if there is one."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        before(*args[:1])
        result = original(*args, **kwargs)
        after(*args[:1])
        return result

    setattr(owner, name, patched)


def _install_distributed(recorder: Recorder) -> None:
    from torch.distributed import device_mesh, distributed_c10d
    from torch.nn.parallel import DistributedDataParallel

    for module in (distributed_c10d, dist, device_mesh):
        if hasattr(module, "init_process_group"):
            _patch(module, "init_process_group", after=lambda *_: recorder.guarded(recorder.on_process_group))
        if hasattr(module, "destroy_process_group"):
            _patch(module, "destroy_process_group", before=lambda *_: recorder.guarded(recorder.on_end))
    _patch(
        DistributedDataParallel, "__init__", after=lambda module: recorder.guarded(recorder.on_module, module)
    )


def _install_backward(recorder: Recorder) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not recorder.in_window:
            return original(*args, **kwargs)
        with record_function(BACKWARD):
            return original(*args, **kwargs)

    torch.autograd.backward = backward


def _install_profiler(recorder: Recorder) -> None:
    """Give way when the user's own profiler starts."""

    def give_way(profiler: Any) -> None:
        if recorder.in_window and not recorder.is_ours(profiler):
            recorder.guarded(recorder.close_window, False)

    _patch(torch.autograd.profiler.profile, "_prepare_trace", before=give_way)


def _install_excepthook(recorder: Recorder) -> None:
    original = sys.excepthook

    def excepthook(*details: Any) -> None:
        recorder.guarded(recorder.on_raise)
        original(*details)

    sys.excepthook = excepthook
