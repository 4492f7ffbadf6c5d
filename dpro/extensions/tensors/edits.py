"""Edit `tensors`, which reduces gradients as a tensor plan specifies.

Takes a graph that reduces gradients in buckets, and a `TensorPlan`; returns the graph with the reductions of
the plan in its order: each is called once its last gradient is ready and all before it were called, as DDP
calls its buckets. Does not search for a plan: `dpro.extensions.tensors.search` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from dpro.errors import Unanswerable
from dpro.extensions.tensors.plan_file import UNNAMED, PlannedReduction, TensorPlan, read_plan
from dpro.replay.gradient_buckets import framework_of
from dpro.replay.gradient_passes import Pass
from dpro.replay.graph import Graph
from dpro.replay.whatif.choices import Codec, compressed
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.gradients import ReductionEdit, require_buckets, require_bytes
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.reductions import (
    GradientReductions,
    Reduction,
    dtypes_of,
    reductions_of,
    with_reductions,
)
from dpro.schema import BUCKETS
from dpro.words import counted

PREFIX = "module."  # of names, by DDP


@dataclass(frozen=True)
class Tensors(ReductionEdit):
    """Each gradient is reduced as a plan says: with which others, when, in how many pieces, in which type."""

    name = "tensors"
    of_torch = True
    summary = "reduce each gradient as a plan says"
    example = "tensors:plan=plan.json"
    needs = "the needs of edit bucket; every pass must reduce the same gradients"
    assumes = (
        "gradients become ready in the recorded order, the cost per byte stays unchanged, and each piece "
        "costs one call"
    )
    source = (
        "per-tensor fusion and partition as in dPRO (Hu et al., MLSys 2022); reductions are called in the "
        "order of the plan, as DDP calls its buckets; half precision as in edit compress"
    )
    effort = "code"
    plan: Path = key("file that `--make-plan` wrote")
    doubt: float = 0.15

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        require_equal_passes(reductions_of(facts.graph))
        return []  # `--make-plan` searches for one

    def changed(self, reductions: GradientReductions) -> Graph:
        """Reduce the gradients of each pass as planned."""
        return with_plan(reductions, self.read)

    @cached_property
    def read(self) -> TensorPlan:
        """The plan in the file."""
        return read_plan(self.plan)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Return how the plan differs from the job, and what is inferred."""
        return difference(reductions_of(graph), self.read), *super().notes(graph)

    def describe(self) -> str:
        return f"gradients reduced as {self.plan} says"

    def how(self) -> str:
        return (
            "give DDP's reducer the buckets of the plan, as `dpro try` does: bucket_cap_mb can only set "
            "one size for all"
        )


def with_plan(reductions: GradientReductions, plan: TensorPlan) -> Graph:
    """Return the graph with the reductions of a plan, unchanged where it has them already.

    Raises:
        Unanswerable: the run lacks what that needs, or has other gradients; the message names the first.
    """
    positions = positions_of(reductions, plan)
    if is_recorded(reductions, plan.reductions, positions):
        return reductions.graph
    return with_planned(reductions, plan.reductions, positions)


def with_planned(
    reductions: GradientReductions, plan: Sequence[PlannedReduction], positions: Sequence[Sequence[int]]
) -> Graph:
    """Return the graph with planned reductions.

    Args:
        positions: gradients of each reduction, as positions in the order in which they become ready.
    """
    wanted = [_planned(reductions, backward, plan, positions) for backward in reductions.passes]
    return with_reductions(reductions, wanted)


def is_recorded(
    reductions: GradientReductions, plan: Sequence[PlannedReduction], positions: Sequence[Sequence[int]]
) -> bool:
    """Return whether every pass already reduces as planned; arguments as in `with_planned`."""
    is_plain = all(reduction.pieces == 1 and not reduction.reduce_in for reduction in plan)
    return is_plain and all(
        list(map(sorted, positions))
        == [list(range(begin + 1, end + 1)) for begin, end in pairwise([-1, *backward.closes.tolist()])]
        for backward in reductions.passes
    )


def require_equal_passes(reductions: GradientReductions) -> None:
    """Raise if a plan cannot describe how the run reduces its gradients.

    Raises:
        Unanswerable: gradients are not in buckets, have unknown bytes, or differ from pass to pass.
    """
    require_buckets(reductions.graph)
    require_bytes(reductions)
    counts = sorted({backward.parameters.num_bytes.size for backward in reductions.passes})
    if len(counts) > 1:
        raise Unanswerable(
            f"passes reduce different numbers of gradients ({counts[0]} to {counts[-1]}): a plan is for one "
            "model on all ranks"
        )


def gradient_names(reductions: GradientReductions) -> tuple[str, ...]:
    """Return [P] names of gradients in the order in which they become ready; `#0`, `#1`, ... where unknown.

    Where the job has gradients outside of DDP, such as those of embeddings divided among ranks, the gradients
    in reductions are inferred; names are then used only if the sizes, in order, match those of DDP.
    """
    sizes, run = reductions.passes[0].parameters.num_bytes.tolist(), reductions.graph.run
    unnamed = tuple(f"{UNNAMED}{number}" for number in range(len(sizes)))
    if run is None or framework_of(run):
        return unnamed
    buckets = run.table(BUCKETS)
    first = buckets.filter(buckets["rank"] == buckets["rank"].min()).sort("bucket")
    recorded = [size for listed in first["parameter_bytes"].to_list() for size in listed or []]
    if first["module"].n_unique() > 1 or (recorded != sizes and not reductions.is_recorded):
        return unnamed
    names = tuple(name.removeprefix(PREFIX) for listed in first["names"].to_list() for name in listed or [])
    return names if len(names) == len(sizes) and len(set(names)) == len(sizes) else unnamed


def positions_of(reductions: GradientReductions, plan: TensorPlan) -> list[list[int]]:
    """Return the gradients of each reduction, as positions in the order in which they become ready.

    Raises:
        Unanswerable: the run has other gradients, a reduction mixes types, or `require_equal_passes` refuses
            the run.
    """
    require_equal_passes(reductions)
    names = gradient_names(reductions)
    place = {name: number for number, name in enumerate(names)}
    place |= {f"{UNNAMED}{number}": number for number in range(len(names))}
    for name in plan.gradients:
        if name not in place:
            raise Unanswerable(
                f"the plan reduces {name}, which is not a gradient of this run: {_MAKE_ANOTHER}"
            )
    positions = [[place[name] for name in reduction.gradients] for reduction in plan.reductions]
    planned = {number for listed in positions for number in listed}
    for number, name in enumerate(names):
        if number not in planned:
            raise Unanswerable(f"the plan does not reduce {name}, a gradient of this run: {_MAKE_ANOTHER}")
    dtypes = dtypes_of(reductions, reductions.passes[0])
    for listed in positions:
        other = next((number for number in listed if dtypes[number] != dtypes[listed[0]]), None)
        if other is not None:
            raise Unanswerable(
                f"the plan reduces {names[listed[0]]} ({dtypes[listed[0]]}) together with {names[other]} "
                f"({dtypes[other]}): one reduction is of one type"
            )
    return positions


_MAKE_ANOTHER = "make a plan from this run with --make-plan"


def _planned(
    reductions: GradientReductions,
    backward: Pass,
    plan: Sequence[PlannedReduction],
    positions: Sequence[Sequence[int]],
) -> list[Reduction]:
    """Return the reductions of a pass, in the order of their calls."""
    dtypes, shapes = dtypes_of(reductions, backward), backward.parameters.shapes
    wanted: list[Reduction] = []
    called_after = 0
    for planned, listed in zip(plan, positions):
        called_after = max(called_after, *listed)
        size = round(reductions.ratio * int(backward.parameters.num_bytes[list(listed)].sum()))
        whole = Reduction(
            *(min(listed), max(listed), size, float(reductions.line.moving_ns(np.float64(size)))),
            *(reductions.line.latency_ns, reductions.call_ns, called_after),
            dtype=dtypes[listed[0]],
            shapes=tuple(shapes[number] for number in listed) if shapes else (),
        )
        wanted += in_pieces(reductions, whole, planned)
    return wanted


def in_pieces(reductions: GradientReductions, whole: Reduction, planned: PlannedReduction) -> list[Reduction]:
    """Return a reduction in its planned type and pieces, each of which costs a call and the latency."""
    if planned.reduce_in:
        whole = compressed(reductions, whole, Codec(planned.reduce_in))
    count = planned.pieces
    if count == 1:
        return [whole]
    copying_ns = whole.call_ns - reductions.call_ns, whole.fixed_ns - reductions.line.latency_ns
    size = max(whole.num_bytes // count, 1)
    piece = replace(
        whole,
        num_bytes=size,
        moving_ns=float(reductions.line.moving_ns(np.float64(size))),
        call_ns=reductions.call_ns + copying_ns[0] / count,
        fixed_ns=reductions.line.latency_ns + copying_ns[1] / count,
    )
    return [piece] * count


def difference(reductions: GradientReductions, plan: TensorPlan) -> str:
    """Describe in a line how a plan differs from the job.

    Raises:
        Unanswerable: the plan does not match the run, as in `positions_of`.
    """
    positions = positions_of(reductions, plan)
    names, closes = gradient_names(reductions), reductions.passes[0].closes
    if is_recorded(reductions, plan.reductions, positions):
        return f"the plan has the buckets of the job ({closes.size})"
    of_plan = {number: bucket for bucket, listed in enumerate(positions) for number in listed}
    in_job = np.searchsorted(closes, np.arange(len(names)))
    moved = [
        names[number]
        for number in range(1, len(names))
        if (of_plan[number] == of_plan[number - 1]) != (in_job[number] == in_job[number - 1])
    ]
    line = f"the plan has {counted(len(positions), 'bucket')}, the job {closes.size}"
    if moved:
        line += f"; they begin or end elsewhere at {', '.join(moved[:3])}" + ", …" * (len(moved) > 3)
    cut = sum(reduction.pieces > 1 for reduction in plan.reductions)
    half = sum(bool(reduction.reduce_in) for reduction in plan.reductions)
    line += f"; {cut} in pieces" * bool(cut) + f"; {half} in half precision" * bool(half)
    return line
