"""Every private attribute of PyTorch that the recorder uses, and the fallback where one is missing.

Uses PyTorch as the job has it, 2.6 or newer. Its functions answer in every version; where an attribute is
missing they give up a part of what is recorded, never the job. `INTERNALS` lists the attributes, what is lost
without each, and the versions that have them; no other module of this package names one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple

import torch

DEFAULT_FIRST_BUCKET_BYTES = 1 << 20  # of DDP, as documented
PROFILE = "torch.autograd.profiler.profile"
SCHEDULE = "torch.distributed.pipelining.schedules._PipelineSchedule"
LOSS_OF_SCHEDULE = "_maybe_compute_loss"


class Internal(NamedTuple):
    """A private attribute.

    Attributes:
        without: what is recorded differently, or not at all, where it is missing.
        since: the first version that has it; empty for all supported ones.
        until: the first version that lacks it again; empty for none so far.
        build: which builds have it; empty for all.
    """

    path: str
    without: str
    since: str = ""
    until: str = ""
    build: str = ""


INTERNALS = (
    Internal("torch.autograd._get_sequence_nr", "new gradients are known by backward calls alone"),
    Internal("torch._C._current_graph_task_id", "updates within a backward end steps at once"),
    Internal("torch.distributed.distributed_c10d._get_default_store", "no clocks of hosts are compared"),
    Internal("torch.distributed.distributed_c10d._world", "groups have no ranks, calls are dumped by time"),
    Internal("torch._C._distributed_c10d._dump_fr_trace", "calls of gloo are not recorded", since="2.8"),
    Internal("torch._C._distributed_c10d._dump_nccl_trace", "calls of NCCL are not recorded", build="cuda"),
    Internal("torch._C._distributed_c10d._get_handler_names", "dumps are pickles"),
    Internal("torch._C._distributed_c10d._get_handler", "dumps are pickles"),
    Internal("torch._C._distributed_c10d._Request", "dumps are pickles"),
    Internal("torch._C._distributed_c10d._Response", "dumps are pickles"),
    Internal("torch.testing._internal.distributed.fake_pg", "no rank is pretended"),
    Internal("torch.distributed.ProcessGroup._end_coalescing", "fewer calls are counted between two dumps"),
    Internal("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES", "the documented size is used"),
    Internal("torch.distributed._compute_bucket_assignment_by_size", "some buckets have no parameters"),
    Internal("torch.nn.parallel.DistributedDataParallel._ddp_init_helper", "no tensor plan is applied"),
    Internal("torch.distributed.Reducer._rebuild_buckets", "no tensor plan is applied"),
    Internal("torch.distributed.Reducer._check_reducer_finalized", "no tensor plan is applied"),
    Internal("torch._C._cuda_hasPrimaryContext", "only the current GPU is asked", build="cuda"),
    Internal("torch._C._cuda_attach_out_of_memory_observer", "only where it ends the job", build="cuda"),
    Internal("torch.cuda._lazy_call", "as `_cuda_attach_out_of_memory_observer`"),
    Internal("torch._C._profiler._add_execution_trace_observer", "no execution traces"),
    Internal("torch._C._profiler._enable_execution_trace_observer", "no execution traces"),
    Internal("torch._C._profiler._disable_execution_trace_observer", "no execution traces"),
    Internal("torch._C._profiler._remove_execution_trace_observer", "no execution traces"),
    Internal("torch._C._autograd._profiler_type", "profilers in C++ are not seen"),
    Internal("torch._C._profiler.ActiveProfilerType", "profilers in C++ are not seen"),
    Internal("torch.autograd._disable_profiler", "frameworks that end any profiler end a window"),
    Internal("torch.autograd.profiler._is_profiler_enabled", "ranges that outlive a window end in the next"),
    Internal("torch.autograd.profiler._ExperimentalConfig", "windows lack synchronisation of CUDA"),
    Internal(f"{PROFILE}._prepare_trace", "windows begin and end by the profiler's own `with`"),
    Internal(f"{PROFILE}._start_trace", "windows begin and end by the profiler's own `with`"),
    Internal("torch.ops.profiler._record_function_exit._RecordFunction", "as `_is_profiler_enabled`"),
    Internal("torch.ops.profiler._record_function_exit._RecordFunction._op", "modes see ranges of ours"),
    Internal("torch.ops.profiler._record_function_enter_new._op", "modes see ranges of ours"),
    Internal("torch._C.DisableTorchFunction", "modes of the job see when its tensors are looked at"),
    Internal("torch._C._DisableTorchDispatch", "modes of the job see ranges of ours"),
    Internal("torch.nn.Module._wrapped_call_impl", "fewer model calls are found"),
    Internal("torch.nn.Module._call_impl", "model calls are not recorded"),
    Internal("torch.nn.Module._compiled_call_impl", "model calls are not recorded"),
    Internal("torch.utils.data.dataloader._BaseDataLoaderIter", "waits for data are not recorded"),
    Internal("torch.distributed.pipelining.stage._PipelineStageBase", "pipelines have no operations"),
    Internal("torch.distributed.pipelining.schedules._PipelineSchedule", "as `_maybe_compute_loss`"),
    Internal(f"{SCHEDULE}._maybe_compute_loss", "the loss is not part of a forward"),
    Internal("torch._C._dynamo.eval_frame.set_eval_frame", "the compiler may compile code of ours"),
    Internal("torch._C._dynamo.eval_frame._FrameExecStrategy", "as `skip_code`", since="2.7"),
    Internal("torch._C._dynamo.eval_frame._FrameAction", "as `skip_code`", since="2.7"),
    Internal("torch._C._dynamo.eval_frame.set_code_exec_strategy", "as `skip_code`", since="2.7"),
    Internal("torch._C._dynamo.eval_frame.skip_code", "the compiler may say more on stderr", until="2.7"),
)  # fmt: skip


def internal(path: str) -> Any:
    """Return an attribute of `INTERNALS`; None where this PyTorch lacks it."""
    value: Any = torch
    for name in path.split(".")[1:]:
        value = getattr(value, name, None)
        if value is None:
            return None
    return value


# The engine of autograd.


NO_TASK = -1  # of autograd's engine


def node_counter() -> Callable[[], int]:
    """Return a function that counts the graph nodes this thread has made; it returns 0 if not known."""
    counter: Callable[[], int] | None = internal("torch.autograd._get_sequence_nr")
    return counter or int


def task_reader() -> Callable[[], int]:
    """Return a function that returns which backward this thread runs; `NO_TASK` for none or not known."""
    reader: Callable[[], int] | None = internal("torch._C._current_graph_task_id")
    return reader or (lambda: NO_TASK)


def sequence_number() -> int:
    """Return how many graph nodes this thread has made; 0 where that is not known."""
    return node_counter()()


def is_within_backward() -> bool:
    """Return whether this thread runs a backward; False where that is not known."""
    return task_reader()() != NO_TASK


# Process groups.


def default_store() -> Any:
    """Return the store that the job's processes met in; None where it is not known."""
    store = internal("torch.distributed.distributed_c10d._get_default_store")
    return store() if store is not None else None


def group_names() -> dict[Any, str]:
    """Return the name of each process group."""
    world = internal("torch.distributed.distributed_c10d._world")
    return dict(getattr(world, "pg_names", {}))


def group_ranks(group: Any) -> Mapping[int, int]:
    """Return the place of each global rank in a process group; empty where they are not known."""
    world = internal("torch.distributed.distributed_c10d._world")
    return dict(getattr(world, "pg_group_ranks", {}).get(group, {}))


def backend_configs() -> list[str]:
    """Return the backends of each process group, as `cpu:gloo,cuda:nccl`."""
    world = internal("torch.distributed.distributed_c10d._world")
    return [str(config) for config in getattr(world, "pg_backend_config", {}).values()]


def group_backends(group: Any) -> str:
    """Return the backends of a process group, as `gloo, nccl`; empty where they are not known."""
    world = internal("torch.distributed.distributed_c10d._world")
    configs = str(getattr(world, "pg_backend_config", {}).get(group, ""))
    return ", ".join(sorted({config.rpartition(":")[2] for config in configs.split(",")}))


def backends_of(group: Any) -> list[Any]:
    """Return the backends of a process group that can be asked."""
    backends = []
    for device in getattr(group, "_device_types", ()):
        with suppress(Exception):
            backends.append(group._get_backend(device))
    return backends


def calls_of(backend: Any) -> int | None:
    """Return how many collectives a backend has been called for; None where it does not count."""
    with suppress(Exception):
        return int(backend._get_sequence_number_for_group())
    return None


def dump_of(ring: str) -> Callable[..., bytes] | None:
    """Return the function that dumps a ring of calls, `fr` or `nccl`, as a pickle; None without it."""
    dump: Callable[..., bytes] | None = internal(f"torch._C._distributed_c10d._dump_{ring}_trace")
    return dump


def handler_of(name: str) -> Callable[[], bytes] | None:
    """Return a handler of PyTorch's own monitoring; None where none has that name."""
    names = internal("torch._C._distributed_c10d._get_handler_names")
    get = internal("torch._C._distributed_c10d._get_handler")
    request = internal("torch._C._distributed_c10d._Request")
    response = internal("torch._C._distributed_c10d._Response")
    if None in (names, get, request, response) or name not in names():
        return None

    class Answer(response):  # type: ignore[misc, valid-type]
        def set_content(self, content: str, _type: str) -> None:
            self.content = content

        def set_status(self, _status: int) -> None:
            pass

    def ask() -> bytes:
        answer = Answer()
        get(name)(request(), answer)
        return bytes(answer.content.encode())

    return ask


# Process groups without other members.

FAKE = "fake"  # the backend that makes them
CHECKPOINT = "torch.distributed.checkpoint.state_dict_saver._save_state_dict"  # writes every sharded model


def has_fake_backend() -> bool:
    """Make groups available whose other members need not exist; return whether this PyTorch has them."""
    with suppress(ImportError):
        from torch.testing._internal.distributed import fake_pg

        return fake_pg is not None
    return False


# Gradient buckets.


def ddp_facts(module: Any) -> Mapping[str, Any]:
    """Return what a DDP module logs about itself; empty where it does not."""
    said = getattr(module, "_get_ddp_logging_data", dict)
    return dict(said())


def first_bucket_bytes() -> int:
    """Return the size of DDP's first bucket."""
    size = internal("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES")
    return int(size) if size is not None else DEFAULT_FIRST_BUCKET_BYTES


def assign_buckets(parameters: list[Any], limits: list[int]) -> list[list[int]]:
    """Return the parameters of each bucket, by DDP's own function; empty where this PyTorch lacks it.

    Args:
        limits: bytes of the first buckets; the last applies to all others.
    """
    assign = internal("torch.distributed._compute_bucket_assignment_by_size")
    return [list(members) for members in assign(parameters, limits)[0]] if assign is not None else []


Buckets = list[list[int]]
Choice = Callable[[Any, list[Any], list[bool]], Buckets]


def choose_buckets(choose: Choice, refuse: Callable[[Exception], None]) -> bool:
    """Make DDP modules reduce in buckets of our choice, which DDP does not rebuild after the first step.

    Args:
        choose: gets the DDP module, its parameters, and which have sparse gradients. It returns the indices
            of the parameters of each bucket, in the order in which buckets are reduced, or raises.
        refuse: gets what was raised; the module then has the buckets of DDP.

    Returns:
        Whether this PyTorch allows it.
    """
    ddp, reducer = "torch.nn.parallel.DistributedDataParallel", "torch.distributed.Reducer"
    make = internal(f"{ddp}._ddp_init_helper")
    needed = [internal(f"{reducer}.{name}") for name in ("_rebuild_buckets", "_check_reducer_finalized")]
    if make is None or None in needed:
        return False

    @functools.wraps(make)
    def made(module: Any, parameters: list[Any], sparse: list[bool], *more: Any, **others: Any) -> None:
        original = torch.distributed.Reducer
        try:
            compiler = sys.modules.get("torch._dynamo.config")
            if getattr(compiler, "optimize_ddp", "") == "python_reducer":
                raise ValueError("compiled autograd reduces gradients itself (python_reducer), without DDP")
            buckets = choose(module, parameters, sparse)
            planned = functools.partial(_reducer, original, parameters, buckets, refuse)
            torch.distributed.Reducer = planned
        except Exception as error:
            refuse(error)
        try:
            make(module, parameters, sparse, *more, **others)
        finally:
            torch.distributed.Reducer = original

    internal(ddp)._ddp_init_helper = made
    return True


def _reducer(
    original: Any, of_module: list[Any], buckets: Buckets, refuse: Callable[[Exception], None],
    parameters: list[Any], usual: Buckets, limits: list[int], *more: Any, **others: Any,
) -> Any:  # fmt: skip
    """Return a reducer of the given buckets, or of the usual ones where it cannot be made."""
    if parameters is not of_module:  # of a module that another thread wraps at the same time
        return original(parameters, usual, limits, *more, **others)

    class Planned(original):  # type: ignore[misc]
        def _rebuild_buckets(self) -> bool:
            # Without a rebuild the reducer goes on recording the order in which gradients are ready: 24 bytes
            # each in every step. Errors that a rebuild would raise first are raised here.
            self._check_reducer_finalized()
            return False

    try:
        reducer = Planned(parameters, buckets, [max(limits)] * len(buckets), *more, **others)
        reducer.planned = buckets
        return reducer
    except Exception as error:
        refuse(error)
        return original(parameters, usual, limits, *more, **others)


def planned_buckets(module: Any) -> Buckets:
    """Return the buckets of a DDP module that `choose_buckets` chose; empty where DDP has its own."""
    return list(getattr(vars(module).get("reducer"), "planned", ()))


def fsdp_states() -> dict[Any, Any]:
    """Return the state of each module that FSDP2 has sharded."""
    composable = sys.modules.get("torch.distributed._composable_state")
    states = {m: ref() for m, ref in getattr(composable, "_module_state_mapping", {}).items()}
    return {module: state for module, state in states.items() if fsdp_groups(state) is not None}


def is_fsdp_root(state: Any) -> bool:
    """Return whether a state is that of an outermost module."""
    return bool(getattr(state, "_is_root", False))


def fsdp_prefetches(state: Any) -> bool:
    """Return whether the script chose what FSDP2 gathers early; False where that is not known."""
    names = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")
    return any(getattr(state, name, None) for name in names)


def gather_asynchronously(module: Any) -> None:
    """Make FSDP2 gather without waiting, where this PyTorch can.

    Args:
        module: an outermost module that FSDP2 has sharded.
    """
    gather = getattr(module, "_set_unshard_async_op", None)
    if gather is not None:
        gather(True)


def fsdp_groups(state: Any) -> list[Any] | None:
    """Return the parameter groups of a state; None where it is not one of FSDP2."""
    groups = getattr(state, "_fsdp_param_groups", None)  # a list since PyTorch 2.12 or so
    if groups is not None:
        return list(groups)
    if not hasattr(state, "_fsdp_param_group"):
        return None
    return [state._fsdp_param_group] * bool(state._fsdp_param_group)


def fsdp_parameter(parameter: Any) -> tuple[str, list[int]]:
    """Return the name and the shape of a parameter before it was sharded; empty where they are not known."""
    return str(getattr(parameter, "_param_fqn", "")), list(getattr(parameter, "_orig_size", ()))


# GPUs.


def has_context(device: int) -> bool | None:
    """Return whether this process uses a GPU; None where that is not known."""
    has = internal("torch._C._cuda_hasPrimaryContext")
    return bool(has(device)) if has is not None else None


def on_refused_allocation(observe: Callable[..., None], call: Callable[..., None]) -> None:
    """Have a function called before the allocator of GPUs raises, once CUDA has started, if possible.

    Args:
        observe: gets the device, the requested bytes, all bytes of the device, and its free ones; in the
            thread that asked, which holds no lock of the allocator's. Must not raise.
        call: runs what must not fail, as `Recorder.call`.
    """
    attach = internal("torch._C._cuda_attach_out_of_memory_observer")
    at_start = internal("torch.cuda._lazy_call")
    if attach is not None and at_start is not None:
        at_start(lambda: call(_attached, attach, observe))


def _attached(attach: Callable[..., None], observe: Callable[..., None]) -> None:
    with suppress(RuntimeError):  # an allocator that has no observers, such as `cudaMallocAsync`
        attach(observe)


# Profilers.


def profiler_hooks() -> tuple[str, str]:
    """Return the names of the methods that prepare and that start a profiler."""
    names = ("_prepare_trace", "_start_trace")
    there = all(internal(f"{PROFILE}.{name}") is not None for name in names)
    return names if there else ("__enter__", "__enter__")


def prepare_profiler(profiler: Any) -> None:
    """Prepare a profiler again, where that can be done apart from starting it."""
    name, _ = profiler_hooks()
    if name != "__enter__":
        getattr(profiler, name)()


def start_profiler(profiler: Any) -> None:
    """Prepare and start a profiler, without the other effects of its `with`."""
    for name in dict.fromkeys(profiler_hooks()):
        getattr(profiler, name)()


def experimental_config(**wanted: bool) -> Any:
    """Return a configuration of Kineto; None where there is none.

    Options that this PyTorch does not take are given up, the last first. Older versions have no `trace_only`
    and lose nothing: there, events become objects only for those that ask for them.
    """
    config = internal("torch.autograd.profiler._ExperimentalConfig")
    while config is not None:
        try:
            return config(**wanted)
        except TypeError:
            if not wanted:
                raise
            wanted.popitem()
    return None


def is_profiling() -> bool:
    """Return whether a profiler runs already: a second one would silently empty the first."""
    kind = internal("torch._C._autograd._profiler_type")
    kinds = internal("torch._C._profiler.ActiveProfilerType")
    if kind is None or kinds is None:
        return has_profiler()
    return bool(kind() != kinds.NONE)


PROFILER_RUNS = "_is_profiler_enabled"  # of `torch.autograd.profiler`


def has_profiler() -> bool:
    """Return whether a profiler of Python runs; False where that is not known."""
    return bool(internal(f"torch.autograd.profiler.{PROFILER_RUNS}"))


def has_cuspy() -> bool:
    """Return whether the job has set up Cuspy, which takes CUPTI from Kineto for the process's whole life.

    Its modules are loaded when a profiler with a `CuspyConfig` starts, and cupti-python only by them.
    """
    return "torch.profiler._cuspy" in sys.modules and "cupti.cupti" in sys.modules


def end_range(record: Any) -> bool:
    """End a range of `record_function`; return whether that was possible."""
    leave = internal("torch.ops.profiler._record_function_exit._RecordFunction")
    if leave is None:
        return False
    leave(record)
    return True


def range_calls() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the functions in C that begin and end a range; None where they are not known."""
    begin = internal("torch.ops.profiler._record_function_enter_new._op")
    end = internal("torch.ops.profiler._record_function_exit._RecordFunction._op")
    return None if begin is None or end is None else (begin, end)


def hiding() -> list[Any]:
    """Return contexts that hide calls from modes of the job and classes of tensors; empty if not known."""
    paths = ("torch._C.DisableTorchFunction", "torch._C._DisableTorchDispatch")
    return [context() for path in paths if (context := internal(path)) is not None]


def observe_execution(path: str) -> Callable[[], None] | None:
    """Make PyTorch write an execution trace; return how to end it, None if impossible or already writing."""
    names = ("add", "enable", "disable", "remove")
    observers = [internal(f"torch._C._profiler._{name}_execution_trace_observer") for name in names]
    if None in observers:
        return None
    add, enable, disable, remove = observers
    if not add(path):
        return None
    enable()

    def end() -> None:
        disable()
        remove()

    return end


# Modules, loaders and the compiler.

COMPILED_CALL = "_compiled_call_impl"  # an attribute that `Module.__call__` honours, and that is never saved


def module_calls() -> tuple[CodeType, ...]:
    """Return the code that every call of a module runs; empty where a call cannot be replaced."""
    if not hasattr(torch.nn.Module, COMPILED_CALL) or internal("torch.nn.Module._call_impl") is None:
        return ()
    functions = [internal(f"torch.nn.Module.{name}") for name in ("_wrapped_call_impl", "_call_impl")]
    return tuple(function.__code__ for function in functions if function is not None)


def call_of(module: Any) -> Callable[..., Any]:
    """Return what a call of a module runs: its compiled form, or its own."""
    call: Callable[..., Any] = getattr(module, COMPILED_CALL, None) or module._call_impl
    return call


def loader_iterator() -> Any:
    """Return the class of a DataLoader's iterators; None where it is not known."""
    return internal("torch.utils.data.dataloader._BaseDataLoaderIter")


def worker_of(held: Mapping[str, Any]) -> int:
    """Return the worker whose batch comes next; -1 where the process loads it itself, or it is not known.

    Args:
        held: attributes of the loader's iterator.
    """
    tasks = held.get("_task_info")
    task = tasks.get(held.get("_rcvd_idx")) if tasks else None
    return int(task[0]) if task else -1


def pipeline_classes() -> tuple[Any, Any]:
    """Return the classes of pipelines' stages and of their schedules; None before the job has loaded them."""
    package = "torch.distributed.pipelining"
    stages, schedules = (sys.modules.get(f"{package}.{name}") for name in ("stage", "schedules"))
    stage = getattr(stages, "_PipelineStageBase", None)
    return stage, getattr(schedules, "_PipelineSchedule", None)


COMPILER_CALLBACKS = "torch._dynamo.callback"


def compiler_callbacks() -> Any:
    """Return the compiler's handler of callbacks; None before the job has loaded it."""
    return getattr(sys.modules.get(COMPILER_CALLBACKS), "callback_handler", None)


def compile_call(module: Any, **how: str) -> None:
    """Compile the calls of a module in place, as `torch.compile` of a module does.

    `Module.compile`, the fallback, passes over modules of `torch.nn`.
    """
    from torch._dynamo import external_utils

    wrap = getattr(external_utils, "wrap_inline", None)
    if wrap is None or not hasattr(module, COMPILED_CALL):
        module.compile(**how)
        return
    setattr(module, COMPILED_CALL, torch.compile(wrap(module._call_impl), **how))


def has_compiled() -> bool:
    """Return whether the compiler has made a graph; True where that is not known."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return counters is None or bool(counters["stats"]["unique_graphs"])


def frame_watch() -> Callable[[Any], Any]:
    """Return a function that sets the interpreter's callback for frames, and returns the former one."""
    watch: Callable[[Any], Any] | None = internal("torch._C._dynamo.eval_frame.set_eval_frame")
    return watch or (lambda _: None)


def code_skipper() -> Callable[[CodeType], Any] | None:
    """Return a function that keeps frames of a code uncompiled, not what they call; None if not known."""
    frames = "torch._C._dynamo.eval_frame"
    strategy, action = internal(f"{frames}._FrameExecStrategy"), internal(f"{frames}._FrameAction")
    set_strategy = internal(f"{frames}.set_code_exec_strategy")
    if None not in (strategy, action, set_strategy):
        leave = strategy(action.SKIP, action.DEFAULT)
        return lambda code: set_strategy(code, leave)
    skip: Callable[[CodeType], Any] | None = internal(f"{frames}.skip_code")
    return skip
