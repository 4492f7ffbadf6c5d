"""The recorder's core: which processes record, what a step is, and the probes that are called for both.

Reads `config.json` in a folder that the launcher made. Writes one folder per training process there, with
`facts.json`, `records.bin` and the files of probes; `log.txt` has a line for each failure.

A *probe* is another module of this package. With `Recorder.listen` it names the occasions of its calls:

    open      the process turns out to train: its folder exists
    work      the training loop asks for a group, a batch or gradients
    sample    a step has ended at which `sampling` has clocks read; before `step`, same argument
    pass      a backward pass begins or has ended in a step whose beginning was read so; argument: when, ns
    step      a step has ended; argument: how many have (0 < n)
    resume    the calls for `step` took long and have returned, and the next step begins; same argument
    group     another process group exists, or one again
    window    a deep window was saved; argument: its name
    second    about once a second, from a thread of ours
    raise     an uncaught exception is about to end the interpreter; arguments: the exception, its traceback
    request   a request came from outside the job; argument: the request
    end       the process group, the interpreter or the process is about to end
    exit      the interpreter is about to exit, `end` is done
    fork      this is a forked child: whatever is open belongs to the parent

An action that returns `ENOUGH` is not called again on that occasion, until the process forks: a probe that
has learned what it needs costs later steps nothing.

Nothing here may change the job: the core is entered through `Recorder.guarded`, a probe through
`Recorder.call`; both turn an exception into one line in the log. A failure in a probe silences that probe,
one in the core ends the recording. Processes that do not train write nothing: output opens when a process
group exists or an optimizer updates. The folder of a rank that never gets its process group shows who it is
and how far it came.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import environment, records, stepping
from .files import OwnDescriptor, image_folder, is_own, next_image, refuse_beyond_limit, write_whole
from .kernel import process_identity
from .main_thread import is_from_signal_handler
from .sampling import Sampling
from .threads import Bell, Thread, allocate_lock, get_ident
from .torch_internals import NO_TASK, default_store, node_counter, task_reader
from .unseen import class_name, device_of, elements_of, message_of, parameters_updated

SECOND_S = 1.0
THREAD_JOIN_S = 5.0
GPU_KNOWN_AT_STEP = 3  # the facts are written again then, with the GPU
LONG_NS = 1_000_000  # work of ours between two steps that would show in their times
HOSTS = ("cpu", "meta")  # types of device that no work is enqueued on
OCCASIONS = ("open", "work", "sample", "pass", "step", "resume", "group", "window", "second", "raise",
             "request", "end", "exit", "fork")  # fmt: skip
ENOUGH = object()  # returned by an action that needs no more calls

# Where launchers give a process its rank and the number of ranks, for jobs without torch.distributed.
RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # the latter is set for tasks of srun, not for batch scripts
)
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


class Recorder:
    """The recorder of one process of the job.

    Attributes:
        launch: the folder that the launcher made for its processes.
        config: what the launcher was asked to record, by option.
        folder: where this process writes; None until it turns out to train.
        joining: the same folder, once a rank asks for its process group; None for others.
        records: its records; None until it turns out to train.
        enabled: whether it records; False after a failure in the core.
        has_exited: whether our exit handler has run: nothing of ours is called or opened any more, whatever
            the job does in handlers after it.
        ending: what is ending the process: `exception` for an uncaught one; empty for nothing.
        num_updates: optimizers' updates so far, and other signs that a step may have ended.
        num_backward: backward calls so far.
        postponed: optimizers that have updated within the present backward.
        pass_begun_ns: when the present backward pass began, where it is timed; 0 for none.
        last_step_s: when a step last ended, on the monotonic clock.
        own_ns: the recorder's time at the end of the latest step, and at passes in it.
        store: the job's own store, for questions of probes.
        data_wait_ns: time spent waiting for a DataLoader so far; -1 where there was none.
        input_elements: elements of the batches from it so far; -1 where none could be counted.
        training_thread: the thread that asks for gradients, or that updates where none was seen to ask; 0
            before.
        device: the device of the parameters that optimizers update; None while none beside the CPU is known.
        pretending: keeps a pretended rank's answers alive; None for a real rank.
        num_messages: sends and receives requested of GPUs so far, and ends of coalesced ones.
        sampling: decides at which ends of steps clocks are read.
        named: returns more facts about who this process is.
        calls_saved_each_s: longest time between saves of calls, so that a kill loses little.
    """

    def __init__(self, launch: Path) -> None:
        """Read the configuration; nothing is written yet.

        Raises:
            PermissionError: the folder belongs to another user, who must not control this process.
        """
        if not is_own(launch):
            raise PermissionError(f"{launch} does not belong to this user")
        self.config: dict[str, Any] = json.loads((launch / "config.json").read_text())
        self.launch = launch
        self.enabled = True
        self.has_exited = False
        self.pretending: Any = None
        self.named: Callable[[], dict[str, str]] = dict
        self.calls_saved_each_s = 60.0
        self._forked = False
        self._all_listeners: dict[str, list[Callable[..., object]]] = {occasion: [] for occasion in OCCASIONS}
        self._silenced: set[str] = set()
        self._log: OwnDescriptor | None = None
        self._imports = AwaitedModules()
        self._backward_task, self._num_nodes = task_reader(), node_counter()
        self._forget()

    def _forget(self) -> None:
        self._listeners = {occasion: list(every) for occasion, every in self._all_listeners.items()}
        self.sampling = Sampling()
        self.folder: Path | None = None
        self._image = 0  # earlier programs of this process that recorded
        self.joining: Path | None = None
        self.records: records.RecordWriter | None = None
        self.last_step_s = time.monotonic()
        self.store = JobStore()
        self._thread: Thread | None = None
        self._flushed_ns = self.own_ns = 0  # when a step last flushed
        self._exiting = Bell()
        self.training_thread = self.num_messages = 0
        self.device: Any = None
        self.ending = ""
        self.data_wait_ns = self.input_elements = -1
        self.num_updates = self.num_backward = 0
        self.postponed: list[Any] = []
        self.pass_begun_ns = 0
        self._times_passes = False  # in the present step
        self._pass_own_ns = self._own_at_passes_ns = 0  # of one pass, and of those of a step
        self._sources: list[int] = []  # of what ends steps, by its number
        self._counter = stepping.StepCounter(self._weigh, self._on_anchor)

    # Calling our own code from the job's.

    def guarded(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run a part of the core; if it fails, log that and record no more."""
        if self.enabled and not self.has_exited:
            self.run(action, *arguments)

    def run(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run a part of the core as `guarded` does, even if recording has ended."""
        try:
            action(*arguments)
        except Exception as error:
            self.stop(action, error)

    def stop(self, action: Callable[..., None], error: Exception) -> None:
        """Record no more, since a part of the core has raised; called where that is handled.

        Raises:
            Exception: `error` itself, where a signal handler of the job's raised it.
        """
        if is_from_signal_handler(error):
            raise error
        self.enabled = False
        self.complain(f"stopped recording in {action.__name__}", error)
        if self.folder is not None:
            self._end()  # Kineto left running would crash the process at its exit

    def complain(self, what: str, error: Exception) -> None:
        """Write one line to the log.

        Args:
            what: what this process does about the error, to follow "process 123".
        """
        with suppress(Exception):
            trouble = f"{class_name(type(error))}: {message_of(error)}"
            line = f"process {os.getpid()} {what}: {trouble}".replace("\n", " ")
            content = f"{line}\n".encode(errors="backslashreplace")
            log = self._opened_log()
            log.write(content, os.fstat(log.number).st_size)

    def _opened_log(self) -> OwnDescriptor:
        """Return the log, kept open since the process may give up the right to open it."""
        if self._log is None or not self._log.is_ours():
            self._log = OwnDescriptor(self.launch / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        return self._log

    def listen(self, occasion: str, action: Callable[..., object]) -> None:
        """Have an action of a probe called on an occasion, as by `call`, even after it returned `ENOUGH`."""
        for listeners in (self._all_listeners[occasion], self._listeners[occasion]):
            if action not in listeners:
                listeners.append(action)

    def on_import(self, module: str, action: Callable[[Any], object]) -> None:
        """Have an action of a probe called, as by `call`, with a module once it is imported, now if it is."""
        self._imports.add(module, partial(self.call, action))

    def call(self, action: Callable[..., object], *arguments: Any) -> None:
        """Run an action of a probe; after one action has raised, none of that probe's runs again."""
        if self.has_exited or action.__module__ in self._silenced:
            return
        try:
            action(*arguments)
        except Exception as error:
            self._silence(action, error)

    def _silence(self, action: Callable[..., object], error: Exception) -> None:
        if is_from_signal_handler(error):
            raise error
        self._silenced.add(action.__module__)
        self.complain(f"continues without {action.__module__.rpartition('.')[2]}", error)

    def works(self, probe: str) -> bool:
        """Return whether a probe, named by its module, has not failed."""
        return probe not in self._silenced

    def _notify(self, occasion: str, *arguments: Any) -> None:
        """Call the listeners of an occasion as `call` does, inlined: every step comes here."""
        silenced = self._silenced
        for action in self._listeners[occasion]:
            if self.has_exited or (silenced and action.__module__ in silenced):
                continue
            try:
                if action(*arguments) is ENOUGH:
                    self._listeners[occasion] = [a for a in self._listeners[occasion] if a != action]
            except Exception as error:
                self._silence(action, error)

    # What the hooks call.

    def on_joining(self) -> None:
        """Make the folder of a rank that asks for its process group, and may end before it has it."""
        has_rank = any(rank in os.environ and size in os.environ for rank, size in RANK_VARIABLES)
        if has_rank and not self.is_helper and self.folder is None and self.joining is None:
            self.joining = self._make_folder()

    def on_process_group(self) -> None:
        """Open the output, or report one more process group: this process has a rank."""
        if self.folder is None:
            self._open()
        else:
            self._write_facts(self.folder)
            self._notify("group")
        self.on_work()

    def on_work(self) -> None:
        """Report that the training loop asks for something."""
        if self._listeners["work"]:
            self._notify("work")

    def on_backward(self) -> None:
        """Count a request for gradients, unless within another backward (reentrant checkpointing)."""
        if self._backward_task() == NO_TASK:
            self.num_backward += 1
            self.training_thread = get_ident()
            if self._listeners["work"]:
                self._notify("work")
            if self._times_passes:
                self._pass_own_ns = 0
                self.pass_begun_ns = self._mark_pass()

    def after_backward(self) -> None:
        """Record the end of a backward pass, and count the updates postponed within it."""
        if self._backward_task() == NO_TASK:
            begun_ns, self.pass_begun_ns = self.pass_begun_ns, 0
            if begun_ns and self.records is not None:
                ended_ns = self._mark_pass()
                self.records.write(records.PASS, begun_ns, ended_ns, self._pass_own_ns)
                self._own_at_passes_ns += self._pass_own_ns
            postponed, self.postponed = self.postponed, []
            for optimizer in postponed:
                self.on_update(optimizer)

    @property
    def is_helper(self) -> bool:
        """Whether another process of the job made this one, which has not shown a rank."""
        return self.folder is None and (self._forked or multiprocessing.parent_process() is not None)

    def on_update(self, optimizer: Any) -> None:
        """Count an update, also one that the loss scaler skipped, or a signal that ends a step."""
        now = time.time_ns()
        self.num_updates += 1
        if self._backward_task() != NO_TASK:
            # A profiler that is started within a backward is lost when that ends.
            self.postponed.append(optimizer)
            return
        if self.records is None:
            if self.is_helper:
                return  # a helper that optimises something
            self._open()
        assert self.records is not None
        gradients: tuple[int, int] | None = None
        if not isinstance(optimizer, stepping.StepSignal):
            if not self.training_thread:
                self.training_thread = get_ident()  # as in Megatron, which asks the engine for gradients
            # These differ once there are new gradients: the graph has grown, whatever computes them.
            seen = self.num_backward, self._num_nodes()
            gradients = seen if any(seen) else None
        before = self._counter.step
        counted = self._counter.update(optimizer, gradients)
        if counted is None:
            return
        step, sampling = self._counter.step, self.sampling
        if step != before:
            last_step_s, self.last_step_s = self.last_step_s, time.monotonic()
            step_ns = 1e9 * (self.last_step_s - last_step_s)
            sampling.left -= 1
            if step_ns >= sampling.paying_ns or sampling.left <= 1 or sampling.ahead:
                self._sample(step, now, step_ns)
            else:
                self._times_passes = False
                self._notify("step", step)
            if time.time_ns() - now > LONG_NS:
                self._notify("resume", step)
                sampling.left = min(sampling.left, 1)  # the next end is read, too
        resumed = time.time_ns()
        if step != before:
            self.own_ns, self._own_at_passes_ns = resumed - now + self._own_at_passes_ns, 0
        self.records.add(records.pack(*counted, now, resumed, records.UPDATE))
        if now - self._flushed_ns >= records.FLUSH_NS or now < self._flushed_ns:
            self._flushed_ns = now
            self.records.flush()

    def on_window(self, name: str) -> None:
        """Report a deep window that was saved under a name."""
        self._notify("window", name)

    def on_raise(self, error: BaseException, place: TracebackType | None) -> None:
        """Report an uncaught exception that is about to end the interpreter."""
        self._notify("raise", error, place)

    def on_request(self, request: dict[str, Any]) -> None:
        """Report a request from outside the job."""
        self._notify("request", request)

    def answer(self, request: str, facts: dict[str, Any]) -> None:
        """Answer a request with its outcome in this process.

        Raises:
            OSError: the answer cannot be written.
        """
        rank, _ = identity()
        self.write_file(f"reply-{request}.json", json.dumps({"rank": rank, **facts}).encode())

    def on_end(self) -> None:
        """End the recording before the process group is destroyed or the interpreter exits."""
        if self.folder is not None:
            self._end()

    def _end(self) -> None:
        self.call(self.store.leave)
        self._notify("end")
        if self.records is not None:
            self.call(self.records.flush)

    def on_exit(self) -> None:
        """End the recording and our thread before the interpreter exits: a thread in C would crash it."""
        self.on_end()
        self._notify("exit")
        self._exiting.ring()
        if self._thread is not None:
            self._thread.join(THREAD_JOIN_S)

    def on_fork(self) -> None:
        """Start empty in a forked child, with all probes: whatever is open belongs to the parent."""
        self._forked = True
        self._silenced.clear()
        self._forget()
        self._notify("fork")

    def _weigh(self, optimizer: Any) -> float:
        """Return the number of elements that an optimizer updates, or the weight of a signal."""
        if isinstance(optimizer, stepping.StepSignal):
            self._sources.append(optimizer.source)
            return optimizer.weight
        self._sources.append(0)
        parameters = parameters_updated(optimizer)
        if self.device is None:
            devices = map(device_of, parameters)
            self.device = next((d for d in devices if d is not None and d.type not in HOSTS), None)
        return float(sum(map(elements_of, parameters)))

    def _on_anchor(self, optimizer: int, base: int, first: int) -> None:
        assert self.records is not None
        self.records.write(records.ANCHOR, optimizer, base, first, self._sources[optimizer])

    def _sample(self, step: int, ended_ns: int, step_ns: float) -> None:
        """Report a step at whose end clocks are read."""
        if step == GPU_KNOWN_AT_STEP and self.folder is not None:
            self._write_facts(self.folder)
        self._notify("sample", step)
        self._notify("step", step)
        self._times_passes = True
        self.sampling.took(time.time_ns() - ended_ns + self._own_at_passes_ns, step_ns)

    def _mark_pass(self) -> int:
        """Report the start or end of a backward pass; return when that was, in ns."""
        now = time.time_ns()
        self._notify("pass", now)
        self._pass_own_ns += time.time_ns() - now
        return now

    # Files.

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file of this process under a name that only a whole file gets.

        Raises:
            OSError: it cannot be written.
        """
        assert self.folder is not None
        write_whole(self.folder / name, content)

    def _make_folder(self) -> Path:
        """Make a folder for this process, with its facts."""
        host, pid = socket.gethostname(), os.getpid()
        self._image = next_image(self.launch, host, pid)
        folder = image_folder(self.launch, host, pid, self._image)
        os.mkdir(folder)  # of our copy of `os`: the job may have replaced its own
        self._opened_log()
        self._started_ns = time.time_ns()
        self._write_facts(folder)
        return folder

    def _open(self) -> None:
        refuse_beyond_limit()
        if self.joining is None:
            folder = self._make_folder()
        else:
            folder = self.joining
            self._started_ns = time.time_ns()
            self._write_facts(folder)
        self.records = records.RecordWriter(folder / "records.bin")
        self.folder = folder
        self._notify("open")
        self._thread = Thread(self.call, self._every_second, self.records)

    def _write_facts(self, folder: Path) -> None:
        rank, world_size = identity()
        local_rank = next((os.environ[name] for name in LOCAL_RANK_VARIABLES if name in os.environ), "-1")
        facts = {
            "rank": rank,
            "world_size": world_size,
            "local_rank": int(local_rank),
            "host": socket.gethostname(),
            "image": self._image,
            **process_identity(os.getpid()),
            "started_ns": self._started_ns,
            "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
            "launcher": os.environ.get("GROUP_RANK", ""),  # torchrun's number among those of other hosts
            "environment": environment.kept(os.environ),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            **gpu_facts(),
            **self.named(),
        }
        write_whole(folder / "facts.json", json.dumps(facts).encode())

    def _every_second(self, writer: records.RecordWriter) -> None:
        exiting = self._exiting
        while self.enabled and self.records is writer:
            self._notify("second")
            writer.flush()
            if exiting.wait(SECOND_S):
                return


def identity() -> tuple[int, int]:
    """Return rank and number of ranks, from torch.distributed or the launcher; 0 and 1 without either."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for rank, size in RANK_VARIABLES:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


# Which GPU this process computes on, so that samples of GPUs can be joined to it. Nothing is asked before the
# job itself has started CUDA: asking would claim a GPU for this process.

_UUID_CHARACTERS = 36
_INSTANCE = "MIG-"


def gpu_facts() -> dict[str, str]:
    """Return name, uuid and PCI address (`0000:c1:00.0`) of the current GPU; empty where not known."""
    if not torch.cuda.is_initialized():
        return {"gpu_name": "", "gpu_uuid": "", "gpu_pci": ""}
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    uuid = _instance(index) or str(getattr(properties, "uuid", ""))
    return {"gpu_name": properties.name, "gpu_uuid": uuid, "gpu_pci": _address(properties)}


def _instance(index: int) -> str:
    """Return the instance of a partitioned GPU that the environment names; CUDA may name the whole GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    return name if name.startswith(_INSTANCE) and len(name) == len(_INSTANCE) + _UUID_CHARACTERS else ""


def _address(properties: Any) -> str:
    """Return the PCI address of a GPU; empty before PyTorch 2.8."""
    try:
        domain, bus, device = (
            int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device")
        )
    except (AttributeError, TypeError, ValueError):
        return ""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


EXIT_S = 0.2  # how long the end of the job waits for a question, at most
Answer = TypeVar("Answer")


class JobStore:
    """The store that the job's processes met in, for questions from threads of ours.

    It answers at once, or with None where there is no store, or it is gone: torch complains on stderr when a
    store that is gone is asked, so that happens once at most.
    """

    def __init__(self) -> None:
        self.gone = False
        self._asking = allocate_lock()

    def ask(self, question: Callable[[Any], Answer]) -> Answer | None:
        """Ask the store a question that it answers without waiting; None where there is no store."""
        with self._asking:
            if self.gone or not dist.is_available() or not dist.is_initialized():
                return None
            try:
                store = default_store()
                return question(store) if store is not None else None
            except (RuntimeError, ValueError):
                self.gone = True
                return None

    def leave(self) -> None:
        """Ask no more: an answer that came while the interpreter ends would abort the process."""
        self.gone = True
        if self._asking.acquire(timeout=EXIT_S):
            self._asking.release()


class AwaitedModules:
    """A finder that asks the other finders, and learns when a module is loaded; it imports nothing by itself.

    An action is called with the module, in the thread that has imported it, when its code has run. A module
    that no job imports costs nothing but a look at a table in each import.
    """

    def __init__(self) -> None:
        self._actions: dict[str, list[Callable[[Any], None]]] = {}
        self._asking: set[str] = set()

    def add(self, name: str, action: Callable[[Any], None]) -> None:
        """Call an action when a module has been imported, at once if it is already.

        Args:
            action: gets the module; must not raise.
        """
        if name in sys.modules:
            action(sys.modules[name])
            return
        self._actions.setdefault(name, []).append(action)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find for an awaited module; None for any other."""
        if name not in self._actions or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(name)
        execute = getattr(getattr(spec, "loader", None), "exec_module", None)
        if spec is None or execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:  # else another module with the same loader
                for action in self._actions.pop(name, ()):
                    action(module)

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec
