"""How DDP reduces gradients: compressed, only every few steps, or not at all.

Takes `to` (fp16, bf16, powersgd with its `rank`, topk with a `share`, or nothing), and the `layers` whose
gradients it applies to; or `buckets`, each with its choice, also in `pieces` where a tensor plan chose the
buckets (`planned`); or `every` for local updates. Registers communication hooks on all DDP modules when
gradients are first asked for. A hook of the script is registered by then, and wins: the change is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from _dpro_inside_the_job.patching import patch
from _dpro_inside_the_job.recorder import Recorder
from _dpro_inside_the_job.torch_internals import (
    assign_buckets,
    ddp_facts,
    first_bucket_bytes,
    fsdp_states,
    planned_buckets,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import ChangeReport

# First steps, with plain all-reduce: DDP rebuilds its buckets after the first step, and hooks that keep
# gradients between steps must not see that.
PLAIN_STEPS = 3
NO_HOOK = ("", "None")
Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Register communication hooks when gradients are first asked for."""
    from torch.nn.parallel import DistributedDataParallel

    report.missing = "the job wraps no module in DistributedDataParallel"
    register = _local_updates if "every" in arguments else _compression
    waiting: list[weakref.ref[Any]] = []

    def on_work() -> None:
        if waiting and recorder.num_backward:
            modules, waiting[:] = [reference() for reference in waiting], []
            for module in filter(None, modules):
                report.attempt(_register, report, module, functools.partial(register, **arguments))

    if arguments.get("to") == "nothing":
        refuse_sharded(
            report,
            recorder,
            "FSDP2 cannot run without its collectives, which gather parameters: this edit needs DDP",
        )
    patch(DistributedDataParallel, "__init__", after=lambda module: waiting.append(weakref.ref(module)))
    recorder.listen("work", on_work)


def refuse_sharded(report: ChangeReport, recorder: Recorder, reason: str) -> None:
    """Refuse a change if the job turns out to use FSDP2."""

    def look(step: int) -> None:
        if step == PLAIN_STEPS and fsdp_states():
            report.refuse(reason)

    recorder.listen("step", lambda step: report.attempt(look, step))


def _register(report: ChangeReport, module: Any, register: Callable[[ChangeReport, Any], None]) -> None:
    has_own = str(ddp_facts(module).get("comm_hook", ""))
    if getattr(module, "_comm_hooks", None) or has_own not in NO_HOOK:
        report.refuse(f"the script has registered a communication hook itself: {has_own}")
        return
    register(report, module)
    report.applied(f"DDP of {type(module.module).__name__}")


def _compression(report: ChangeReport, module: Any, to: str = "", **more: Any) -> None:
    pattern = more.pop("layers", "")
    if more.get("planned") and not planned_buckets(module):
        return  # refused for this module
    if "buckets" in more:
        module.register_comm_hook(module.process_group, _hook_by_bucket(report, module, **more))
    elif to == "nothing":
        module.broadcast_buffers = False
        module.register_comm_hook(None, _keep_local)
    elif to == "powersgd":
        _power_sgd(module, **more)
    elif to == "topk":
        module.register_comm_hook(None, top_k(module.process_group, **more))
    elif pattern:
        module.register_comm_hook(
            module.process_group, _hook_of_layers(report, module, _half_hook(to), pattern)
        )
    else:
        module.register_comm_hook(module.process_group, _half_hook(to))


def _hook_by_bucket(
    report: ChangeReport, module: Any, buckets: list[dict[str, Any]], planned: bool = False
) -> Hook:
    """Return a hook that reduces each bucket, known by the names of its parameters, as chosen for it.

    Args:
        planned: whether buckets are final from the first step on.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    names = {id(parameter): name for name, parameter in module.module.named_parameters()}
    group = module.process_group
    hooks: dict[frozenset[str], Hook] = {}
    states: dict[frozenset[str], Any] = {}  # of PowerSGD, by bucket
    for choice in buckets:
        to, key = choice["to"], frozenset(choice["names"])
        if to == "powersgd":
            states[key] = powerSGD_hook.PowerSGDState(group, choice["rank"], start_powerSGD_iter=2)
            hooks[key] = functools.partial(_with_state, powerSGD_hook.powerSGD_hook, states[key])
        elif to == "topk":
            hooks[key] = _largest_hook(group, choice["share"])
        elif "pieces" in choice:
            hooks[key] = in_pieces(group, choice["pieces"], to)
        else:
            hooks[key] = _half_hook(to) if to else default_hooks.allreduce_hook
        report.applied(f"{_in_words(choice)}: gradients of {choice['names'][0]} to {choice['names'][-1]}")

    def chosen(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        key = frozenset(names.get(id(parameter), "") for parameter in bucket.parameters())
        if key not in hooks:
            report.refuse("DDP's buckets differ from the probed ones: probe this job again")
        for other, state in states.items():
            if other != key:
                state.maybe_increase_iter(bucket)  # the state counts steps by the last bucket
        return hooks.get(key, default_hooks.allreduce_hook)(group, bucket)

    chosen.__annotations__ = {}
    return chosen if planned else _after_plain_steps(group, chosen)


def _in_words(choice: dict[str, Any]) -> str:
    pieces = choice.get("pieces", 1)
    return (choice["to"] or "as they are") + (f", in {pieces} pieces" if pieces > 1 else "")


def _with_state(hook: Hook, state: Any, _group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    return hook(state, bucket)


def _after_plain_steps(group: Any, hook: Hook) -> Hook:
    """Return a hook that uses plain all-reduce in the first steps, and `hook` after them."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    num_steps = 0

    def later(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        nonlocal num_steps
        plain = num_steps < PLAIN_STEPS
        num_steps += bucket.is_last()
        return default_hooks.allreduce_hook(group, bucket) if plain else hook(state, bucket)

    later.__annotations__ = {}  # DDP accepts missing annotations, but not text ones
    return later


def _half_hook(to: str) -> Hook:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks: dict[str, Hook] = {"fp16": default_hooks.fp16_compress_hook, "bf16": _bf16}
    return hooks[to]


def in_pieces(group: Any, pieces: int, to: str) -> Hook:
    """Return a hook that reduces a bucket in parts of equal size, all called at once.

    Args:
        group: the process group that reduces.
        pieces: number of parts; a bucket of fewer gradients has one part for each.
        to: bf16 or fp16 to reduce in that type; empty for the type of the gradients, which are then divided
            as in DDP.
    """
    num_ranks = dist.get_world_size(group)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def hook(_group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        sent = gradients.to(half[to]).div_(num_ranks) if to else gradients.mul_(1 / num_ranks)
        parts = sent.tensor_split(max(min(pieces, sent.numel()), 1))
        moved = [dist.all_reduce(part, group=group, async_op=True).get_future() for part in parts]

        def finish(_futures: Any) -> torch.Tensor:
            return gradients.copy_(sent) if to else gradients

        return torch.futures.collect_all(moved).then(finish)

    hook.__annotations__ = {}
    return hook


def _keep_local(_state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Leave gradients as they are on this rank, like PyTorch's `noop_hook`."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


_keep_local.__annotations__ = {}


def _hook_of_layers(report: ChangeReport, module: Any, hook: Hook, pattern: str) -> Hook:
    """Return a hook for buckets whose parameters all match; other buckets are reduced as they are."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    names = {id(parameter): name for name, parameter in module.module.named_parameters()}
    num_steps, num_compressed = 0, 0

    def chosen(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        nonlocal num_steps, num_compressed
        fits = all(fnmatchcase(names.get(id(parameter), ""), pattern) for parameter in bucket.parameters())
        num_compressed += fits
        num_steps += bucket.is_last()
        if bucket.is_last() and num_steps == PLAIN_STEPS and not num_compressed:
            report.refuse(
                f"no bucket has only gradients of {pattern}: use smaller buckets, such as bucket:mb=1"
            )
        return hook(group, bucket) if fits else default_hooks.allreduce_hook(group, bucket)

    chosen.__annotations__ = {}
    return chosen


def _bf16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call PyTorch's own hook, which DDP rejects by its name without NCCL, though gloo reduces bf16."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook(group, bucket)


_bf16.__annotations__ = {}  # as in `_after_plain_steps`


def top_k(group: Any, share: float) -> Hook:
    """Return a hook that exchanges the largest gradients of each bucket, and keeps the others for later.

    The method is that of Aji and Heafield (EMNLP 2017), applied to the bucket as a whole.

    Args:
        group: the process group that reduces; None is the default one.
        share: of a bucket's gradients that is exchanged, 0 to 1.
    """
    return _after_plain_steps(group, _largest_hook(group, share))


def _largest_hook(group: Any, share: float) -> Hook:
    left: dict[int, torch.Tensor] = {}
    num_ranks = dist.get_world_size(group)

    def hook(_state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        if bucket.index() in left:
            gradients.add_(left[bucket.index()])
        indices = gradients.abs().topk(max(round(share * gradients.numel()), 1), sorted=False).indices
        values = gradients[indices]
        left[bucket.index()] = gradients.index_fill(0, indices, 0.0)
        return _mean_of_sparse(group, num_ranks, indices.to(torch.int32), values, gradients)

    return hook


def _mean_of_sparse(
    group: Any, num_ranks: int, indices: torch.Tensor, values: torch.Tensor, into: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Return the mean over ranks of tensors whose non-zero elements are `values` at `indices`."""
    everywhere = [torch.empty_like(indices) for _ in range(num_ranks)]
    of_all = [torch.empty_like(values) for _ in range(num_ranks)]
    placed = dist.all_gather(everywhere, indices, group=group, async_op=True)
    moved = dist.all_gather(of_all, values, group=group, async_op=True)

    def add_up(_future: Any) -> torch.Tensor:
        placed.wait()
        into.zero_()
        for where, what in zip(everywhere, of_all):
            into.index_add_(0, where, what)
        return into.div_(num_ranks)

    return moved.get_future().then(add_up)


def _power_sgd(module: Any, rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    if dist.get_backend(module.process_group) == "gloo" and (buckets := _buckets_to_come(module)) > 1:
        raise ValueError(f"PowerSGD crashes on gloo with {buckets} buckets: add bucket:mb= to make it one")
    state = powerSGD_hook.PowerSGDState(
        module.process_group, matrix_approximation_rank=rank, start_powerSGD_iter=PLAIN_STEPS
    )
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _buckets_to_come(module: Any) -> int:
    """Return how many buckets DDP makes after the first gradients; before, it has one."""
    cap = module.bucket_bytes_cap
    first = first_bucket_bytes() if module.bucket_bytes_cap_default else cap
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return len(assign_buckets(parameters[::-1], [first, cap]))


def _local_updates(report: ChangeReport, module: Any, every: int) -> None:
    """Register post-local SGD (Lin et al., 2020): parameters are averaged every few updates."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
    from torch.distributed.algorithms.model_averaging import averagers

    group = module.process_group
    state = hooks.PostLocalSGDState(group, None, PLAIN_STEPS, post_local_gradient_allreduce=False)
    averager = averagers.PeriodicModelAverager(every, warmup_steps=PLAIN_STEPS, process_group=group)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    trained = {id(parameter) for parameter in parameters}
    updating: set[int] = set()

    def average(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        held = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if id(optimizer) not in updating and not trained.isdisjoint(held):
            updating.add(id(optimizer))
            if len(updating) > 1:
                report.refuse("several optimizers update one module: it is ambiguous when to average")
        if id(optimizer) in updating and len(updating) == 1:
            averager.average_parameters(iter(parameters))

    def no_scaler(scaler: Any) -> None:
        if scaler.is_enabled():
            report.refuse(
                "a GradScaler skips updates: without a gradient exchange, ranks would skip different ones"
            )

    patch(torch.amp.GradScaler, "step", before=no_scaler)
    register_optimizer_step_post_hook(average)
    module.register_comm_hook(state, hooks.post_localSGD_hook)
