"""A tensor plan: which gradients DDP reduces together, in which order, in how many pieces and in which type.

Takes `reductions` in the order of their calls, each with the names of its `gradients`, its `pieces` and
`reduce_in`, which is empty for the type of the gradients. DDP modules then reduce so: their buckets are
chosen when DDP is constructed; a communication hook applies pieces and types.
"""

from __future__ import annotations

from typing import Any

from _dpro_inside_the_job.recorder import Recorder
from _dpro_inside_the_job.torch_internals import Buckets, choose_buckets

from . import ChangeReport
from .reduction import install as install_hook
from .reduction import refuse_sharded

OF_FSDP = (
    "FSDP2 groups reductions by calls of fully_shard(), and a plan needs DDP: "
    "with FSDP2 call fully_shard() on other modules"
)


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Make DDP modules reduce as planned, from the first step on."""
    planned: list[dict[str, Any]] = arguments["reductions"]
    report.missing = "the job wraps no module in DistributedDataParallel"

    def choose(module: Any, parameters: list[Any], sparse: list[bool]) -> Buckets:
        buckets = assign_parameters(module, parameters, sparse, planned)
        report.applied(f"DDP of {type(module.module).__name__}: {len(buckets)} reductions")
        return buckets

    if not choose_buckets(choose, lambda error: report.refuse(str(error).partition("\n")[0])):
        report.refuse("this version of PyTorch does not let a plan choose DDP's buckets: use 2.6 or newer")
        return
    refuse_sharded(report, recorder, OF_FSDP)
    if any(reduction["pieces"] > 1 or reduction["reduce_in"] for reduction in planned):
        buckets = [
            {"names": reduction["gradients"], "to": reduction["reduce_in"], "pieces": reduction["pieces"]}
            for reduction in planned
        ]
        install_hook(report, recorder, {"buckets": buckets, "planned": True})


def assign_parameters(
    module: Any, parameters: list[Any], sparse: list[bool], planned: list[dict[str, Any]]
) -> Buckets:
    """Return the indices of the parameters of each planned reduction.

    Args:
        module: a DDP module.
        parameters: those whose gradients it reduces.
        sparse: which of them have sparse gradients.
        planned: reductions of the plan.

    Raises:
        ValueError: the plan and the module have different gradients, or some cannot be reduced together.
    """
    names = {id(parameter): name for name, parameter in module.module.named_parameters()}
    index = {names.get(id(parameter), ""): at for at, parameter in enumerate(parameters)}
    owner, wanted = type(module.module).__name__, [reduction["gradients"] for reduction in planned]
    named = {name for gradients in wanted for name in gradients}
    for name in (name for gradients in wanted for name in gradients):
        if name not in index:
            raise ValueError(f"DDP of {owner} has no gradient {name}, which the plan reduces: {AGAIN}")
    for name in index:
        if name not in named:
            raise ValueError(f"the plan has no gradient {name}, which DDP of {owner} reduces: {AGAIN}")
    for reduction in planned:
        members = [(name, parameters[index[name]], sparse[index[name]]) for name in reduction["gradients"]]
        _ensure_possible(members, as_it_is=reduction["pieces"] == 1 and not reduction["reduce_in"])
    return [[index[name] for name in gradients] for gradients in wanted]


AGAIN = "make a plan from a recording of this job"


def _ensure_possible(members: list[tuple[str, Any, bool]], as_it_is: bool) -> None:
    """Raise if DDP cannot reduce gradients as one.

    Args:
        members: name, parameter, and whether its gradients are sparse.
        as_it_is: whether the reduction is in one piece and in the type of the gradients.

    Raises:
        ValueError: types or devices differ, or a gradient is sparse.
    """
    (first, parameter, _), *others = members
    for name, other, _ in others:
        for kind in ("dtype", "device"):
            one, two = getattr(parameter, kind), getattr(other, kind)
            if one != two:
                raise ValueError(f"{first} ({one}) and {name} ({two}) differ in {kind}: plan two reductions")
    for name, _, is_sparse in members:
        if is_sparse and (others or not as_it_is):
            raise ValueError(f"{name} has sparse gradients: plan a separate, unchanged reduction for it")
