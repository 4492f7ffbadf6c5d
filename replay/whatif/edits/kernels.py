"""Edits that do work in fewer kernels, or with fewer bits.

Pointwise work takes as long as memory needs to move its inputs and outputs. After fusion, intermediate
results stay on the chip; the launches and operators of all kernels but one disappear.

A matmul limited by the GPU's arithmetic gains by the ratio of the peaks; one limited by memory, by the bytes;
both keep the share of the limit that they reached. Casts are added, and pointwise kernels between matmuls
move fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.classify import classify
from dpro.errors import NothingToChange, Unanswerable, UsageError
from dpro.replay.cost.kernels.roofline import BYTES, GPUS, common_model, stored_as
from dpro.replay.graph import EdgeKind, Graph, NodeKind, is_one_of
from dpro.replay.whatif.choices import DOWN_TO, choose_precisions, precision_lines
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import MAX_TIMES, key
from dpro.replay.whatif.graph_ops.fewer_bits import by_roofline
from dpro.replay.whatif.graph_ops.scope import (
    OPTIMIZER,
    in_modules,
    launching_only,
    names_in_scope,
    optimizing,
)
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.replay.whatif.rankwise import CountedEdit, Counts, RankwiseEdit
from dpro.schema import SENSITIVITIES

# Per parameter: operators of torch's own loop, tensors that they read and write in total, and tensors that
# one fused pass must move (parameter, gradient and state in; parameter and state out).
LOOPS = {"AdamW": (9, 21, 7), "Adam": (8, 19, 7), "Adagrad": (5, 12, 5), "SGD": (3, 8, 5)}
PLAIN_SGD = (1, 3, 3)  # without momentum
KERNELS = "kernels of the optimizer"

# Share of a pointwise kernel's time spent on writing its result, and on reading that of the kernel before:
# most read two tensors and write one.
SHARE_OF_A_TENSOR = 1 / 3


@dataclass(frozen=True)
class Optimizer(CountedEdit):
    """The optimizer updates all parameters in a few kernels (foreach) or in one pass (fused)."""

    name = "optimizer"
    of_torch = True
    summary = "replace the optimizer's loop over parameters by a foreach or fused implementation"
    example = "optimizer:impl=fused"
    needs = "the range around `Optimizer.step`, recorded by torch.profiler and dpro"
    assumes = "the update is memory-bound, and one fused pass moves each tensor once"
    source = (
        "tensors moved per parameter, by torch's loop and by one fused pass: Adam 19 to 7, AdamW 21, "
        "SGD 8 to 5"
    )
    proof = "AdamW as a loop, foreach and fused, CPU"
    of_training = True
    effort = "flag"
    impl: str = key("implementation", "fused", choices=("fused", "foreach"))
    doubt: float = 0.3

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        return [cls("fused"), cls("foreach")]

    def bound(self, facts: RunFacts) -> float:
        inside = in_modules(facts.graph, f"{OPTIMIZER}*")
        return facts.on_path(inside, inside[facts.graph.edges.target])

    def counts(self, graph: Graph) -> Counts:
        """Return the names of the spans in the optimizer's step, and the number of its kernels."""
        with suppress(NothingToChange):
            names = names_in_scope(graph, f"{OPTIMIZER}*")
            inside = in_modules(graph, f"{OPTIMIZER}*") & (graph.nodes.kind == NodeKind.KERNEL)
            return dict.fromkeys(names, 1.0) | {KERNELS: float(inside.sum())}
        return {}

    def apply(self, graph: Graph) -> Graph:
        """Shorten the work in the optimizer's step, depending on its present implementation."""
        counts = self.counts_of_job(graph)
        names = [name for name in counts if name != KERNELS] or names_in_scope(graph, f"{OPTIMIZER}*")
        now = next((impl for impl in ("fused", "foreach") if _any(names, f"aten::_{impl}_")), "loop")
        if now == self.impl:
            return graph
        if now == "fused":
            raise Unanswerable("the optimizer is fused: the cost of a loop of operators is unknown")
        operators, moved, fused = _loop_of(names)
        mask = in_modules(graph, f"{OPTIMIZER}*")
        ratio = fused / moved if self.impl == "fused" else 1.0
        kernels = mask & (graph.nodes.kind == NodeKind.KERNEL)
        if counts[KERNELS]:
            return _updated_at_once(graph, mask, kernels, ratio, operators)
        if self.impl == "foreach":
            return graph  # foreach loops on CPUs as well
        duration = graph.nodes.duration.astype(np.float64)
        duration[mask & (graph.nodes.kind == NodeKind.CPU)] *= ratio
        duration[mask & is_one_of(graph.nodes.kind, (NodeKind.HOST, NodeKind.GAP))] /= operators
        return graph.with_durations(np.rint(duration).astype(np.int64))

    def describe(self) -> str:
        return f"a {self.impl} optimizer"

    def how(self) -> str:
        return f"torch.optim.…(…, {self.impl}=True)"


def _any(names: list[str], beginning: str) -> bool:
    return any(name.startswith(beginning) for name in names)


def _loop_of(names: list[str]) -> tuple[int, int, int]:
    """Return the row of `LOOPS` for the recorded optimizer."""
    optimizers = {name.removeprefix(OPTIMIZER).split(".")[0] for name in names if name.startswith(OPTIMIZER)}
    loops = [name for name in LOOPS if name in optimizers]
    if len(loops) != 1 or len(optimizers) != 1:
        given = ", ".join(sorted(optimizers))
        raise Unanswerable(
            f"the memory traffic of {given} is unknown: known are {', '.join(LOOPS)}, one per run"
        )
    if loops == ["SGD"] and not any(name in ("aten::mul_", "aten::_foreach_mul_") for name in names):
        return PLAIN_SGD
    return LOOPS[loops[0]]


def _updated_at_once(graph: Graph, mask: Bools, kernels: Bools, ratio: float, operators: int) -> Graph:
    """Run kernels without gaps; of operators and launches, keep the first of each step."""
    nodes, edges = graph.nodes, graph.edges
    duration = nodes.duration.astype(np.float64)
    duration[kernels] *= ratio
    duration[mask & is_one_of(nodes.kind, (NodeKind.HOST, NodeKind.GAP))] /= operators
    calls = np.zeros(graph.num_nodes, np.bool_)
    calls[edges.source[(edges.kind == EdgeKind.LAUNCH) & kernels[edges.target]]] = True
    for rank, window, step in np.unique(np.stack([nodes.rank, nodes.window, nodes.step])[:, calls], axis=1).T:
        of_step = (nodes.rank == rank) & (nodes.window == window) & (nodes.step == step) & mask
        first = nodes.measured_end[np.flatnonzero(of_step & calls)].min()
        later = (
            of_step
            & (nodes.measured_start >= first)
            & is_one_of(nodes.kind, (NodeKind.CPU, NodeKind.RUNTIME))
        )
        duration[later] = 0
    queued = (edges.kind == EdgeKind.STREAM) & kernels[edges.source] & kernels[edges.target]
    lag = np.where(queued, np.minimum(edges.lag, 0), edges.lag)
    return graph.with_durations(np.rint(duration).astype(np.int64)).with_lags(lag)


@dataclass(frozen=True)
class Compile(RankwiseEdit):
    """Pointwise kernels that follow one another on a stream become one."""

    name = "compile"
    of_torch = True
    summary = "fuse adjacent pointwise kernels and reductions, as torch.compile does"
    example = "compile"
    needs = "GPU kernels and their launches"
    assumes = (
        "adjacent kernels use each other's results, and guards cost nothing; matmuls and attention stay "
        "separate kernels, and the interval extends to reductions staying separate, too"
    )
    source = (
        "ours: each kernel saves a third of its time for reading what the one before wrote, and a third for "
        "writing what the next reads (two tensors in, one out); no less than the longest is left"
    )
    effort = "line"
    selection: NodeSelection
    doubt: float = 0.35

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        _require_uncompiled(facts.graph)
        return [cls(NodeSelection())]

    def bound(self, facts: RunFacts) -> float:
        fits = np.array([is_fused(name) for name in facts.graph.names], np.bool_)
        fused = fits[facts.graph.nodes.name] & (facts.graph.nodes.kind == NodeKind.KERNEL)
        return facts.on_path(fused | facts.on_cpu, fused[facts.graph.edges.target])

    def apply(self, graph: Graph) -> Graph:
        """Give the first kernel of each run the time of all, and remove the others with their launches."""
        _require_uncompiled(graph)
        fused = _with_fused(graph, _runs(graph, self.selection.chosen(graph), is_fused))
        if fused is graph:
            raise NothingToChange(
                "nothing to fuse: no pointwise kernels or reductions, which are not fused yet, are adjacent"
            )
        return fused

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Return the graph in which reductions stay separate kernels."""
        return (_with_fused(graph, _runs(graph, self.selection.chosen(graph), _is_fused_alone)),)

    def describe(self) -> str:
        return "pointwise kernels and reductions are fused"

    def how(self) -> str:
        return "torch.compile(model)"


def _require_kernels(graph: Graph) -> None:
    if not (graph.nodes.kind == NodeKind.KERNEL).any():
        raise NothingToChange("the run has no GPU kernels: fusion on CPUs is not modelled")


def _require_uncompiled(graph: Graph) -> None:
    """Raise for a job without GPU kernels, or whose pointwise work torch.compile has mostly fused."""
    _require_kernels(graph)
    nodes = graph.nodes
    of_name = np.bincount(nodes.name, np.where(nodes.kind == NodeKind.KERNEL, nodes.duration, 0))
    took = dict(zip(graph.names, of_name.tolist()))
    compiled_ns, left_ns = (
        sum(ns for name, ns in took.items() if fits(name))
        for fits in (lambda name: name.startswith(COMPILED), is_fused)
    )
    if compiled_ns > left_ns:
        raise NothingToChange("the job already uses kernels fused by torch.compile")


def _with_fused(graph: Graph, run: Ints) -> Graph:
    """Give the first kernel of each run the time of all, and remove the others with their launches."""
    gone = run >= 0
    leads = _firsts(run)
    gone[leads] = False
    if not gone.any():
        return graph
    duration = graph.nodes.duration.copy()
    duration[leads] = _fused_ns(graph, run)
    duration[gone | launching_only(graph, gone)] = 0
    lag = np.where(gone[graph.edges.target], np.minimum(graph.edges.lag, 0), graph.edges.lag)
    return graph.with_durations(duration).with_lags(lag)


def _runs(graph: Graph, chosen: Bools, fitting: Callable[[str], bool]) -> Ints:
    """Return [N] the number of the run of fitting kernels that contains a node, -1 for none.

    A run is two or more successive kernels on a stream that one thread launched in one step, with no
    collective called in between.
    """
    nodes, edges = graph.nodes, graph.edges
    named = np.array([fitting(name) for name in graph.names], np.bool_)
    fits = chosen & (nodes.kind == NodeKind.KERNEL) & named[nodes.name]
    caller = np.full(graph.num_nodes, -1)
    launch = edges.kind == EdgeKind.LAUNCH
    caller[edges.target[launch]] = nodes.lane[edges.source[launch]]
    on_stream = np.flatnonzero(is_one_of(nodes.kind, (NodeKind.KERNEL, NodeKind.COPY, NodeKind.ARRIVE)))
    order = on_stream[
        np.lexsort((nodes.measured_start[on_stream], nodes.lane[on_stream], nodes.window[on_stream]))
    ]
    columns = (nodes.window, nodes.lane, nodes.step, nodes.phase, caller, fits)
    breaks = np.any([np.diff(column[order].astype(np.int64)) != 0 for column in columns], axis=0)
    number = np.cumsum(np.append(True, breaks)[: order.size]) - 1
    several = np.bincount(number)[number] > 1
    run = np.full(graph.num_nodes, -1)
    kept = fits[order] & several & (caller[order] >= 0)
    run[order[kept]] = np.unique(number[kept], return_inverse=True)[1]
    return run


COMPILED = "triton_"  # prefix of the names of kernels made by torch.compile


def is_pointwise(name: str) -> bool:
    """Return whether a kernel reads and writes element by element, including copies and casts."""
    kind = classify(name).kind
    return kind == "elementwise" or (kind == "memory" and "elementwise" in name.lower())


REDUCES = ("reduction", "normalisation")


def is_fused(name: str) -> bool:
    """Return whether torch.compile fuses a kernel with its neighbours: pointwise work and reductions.

    As in the names of its kernels in traces of compiled jobs: `triton_poi_`, `triton_per_` and `triton_red_`
    contain pointwise operators before and after sums and norms; products and attention are kernels of
    libraries. Compiled kernels are fused already.
    """
    return not name.startswith(COMPILED) and (is_pointwise(name) or classify(name).kind in REDUCES)


def _is_fused_alone(name: str) -> bool:
    """Return whether torch.compile fuses a kernel if reductions stay separate."""
    return is_fused(name) and is_pointwise(name)


def _firsts(run: Ints) -> Ints:
    """Return the first node of each run; numbers of nodes on a stream ascend with time."""
    members = np.flatnonzero(run >= 0)
    return members[np.unique(run[members], return_index=True)[1]]


def _fused_ns(graph: Graph, run: Ints) -> Ints:
    """Return [R] ns of each run as one kernel."""
    members = np.flatnonzero(run >= 0)
    of, lasts = run[members], graph.nodes.duration[members]
    first, last = _firsts(run), members[members.size - 1 - np.unique(of[::-1], return_index=True)[1]]
    total = np.bincount(of, lasts)
    ends = graph.nodes.duration[first] + graph.nodes.duration[last]
    longest = np.zeros(total.size, np.int64)
    np.maximum.at(longest, of, lasts)
    saved = SHARE_OF_A_TENSOR * (2 * total - ends)
    return np.maximum(np.rint(total - saved).astype(np.int64), longest)


COMPUTES = ("gemm", "convolution", "attention")


@dataclass(frozen=True)
class Precision(Edit):
    """Matmuls and the pointwise work between them use fewer bits."""

    name = "precision"
    of_torch = True
    summary = "use autocast to bf16 or fp16, fp8 matmuls, or a precision per module"
    example = "precision:dtype=bf16"
    needs = "GPU kernels, operators with shapes (`--shapes`), and a known GPU; or speedup="
    assumes = (
        "matmuls reach the same share of their limit, each forward one casts both operands and each backward "
        "one its result, pointwise kernels on floats move half the bytes, and the rest stays in fp32"
    )
    source = (
        "roofline (Williams et al., CACM 2009) with the makers' peaks; casts move old and new bytes; by "
        "module: an integer program over what `dpro try precision:probe` measured (HAWQ-V2, NeurIPS "
        "2020), and times of docs/devices.md"
    )
    effort = "line"
    training = "fewer bits: the loss may change"
    selection: NodeSelection
    dtype: str = key("of matmuls; with budget the fewest bits", "bf16", choices=tuple(DOWN_TO))
    speedup: float | None = key("of matmuls, instead of a roofline", None, least=1 / MAX_TIMES)
    budget: float | None = key("a precision per module: share by which loss may rise", None, least=0.0)
    doubt: float = 0.3

    def __post_init__(self) -> None:
        """Raise if both a budget and a speed-up are given."""
        super().__post_init__()
        if self.budget is not None and self.speedup is not None:
            raise UsageError("precision: budget and speedup exclude each other")

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        run = facts.graph.run
        measured = run is not None and run.table(SENSITIVITIES).height > 0
        chosen = [cls(NodeSelection(), dtype, budget=0.01) for dtype in ("bf16", "fp8")] if measured else []
        return [*(cls(NodeSelection(), dtype) for dtype in (half_of(facts.graph), "fp8")), *chosen]

    def bound(self, facts: RunFacts) -> float:
        return facts.on_path(self.selection.mask(facts.graph) & (facts.graph.nodes.kind == NodeKind.KERNEL))

    def apply(self, graph: Graph) -> Graph:
        """Scale the kernels of matmuls by their roofline, and pointwise kernels by their bytes."""
        kernels, computing = self._chosen(graph)
        duration = graph.nodes.duration.astype(np.float64)
        if self.budget is not None:
            for choice in choose_precisions(graph, kernels, self.dtype, self.budget):
                duration[choice.nodes] = choice.ns
            return graph.with_durations(np.rint(duration).astype(np.int64))
        if self.speedup is None:
            nodes, new, _ = by_roofline(graph, kernels, self.dtype)
            duration[nodes] = new
        else:
            duration[computing] /= self.speedup
        if self.dtype != "fp8":
            duration[kernels & _pointwise_floats(graph)] *= BYTES[self.dtype] / BYTES["fp32"]
        return graph.with_durations(np.rint(duration).astype(np.int64))

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report which matmuls arithmetic or memory limits; with a budget, the precision of modules."""
        kernels, _ = self._chosen(graph)
        if self.budget is not None:
            return tuple(precision_lines(choose_precisions(graph, kernels, self.dtype, self.budget)))
        halved = int((kernels & _pointwise_floats(graph)).sum()) if self.dtype != "fp8" else 0
        lines = [f"{halved} pointwise kernels on floats move half the bytes"] if halved else []
        if self.speedup is None:
            nodes, _, limits = by_roofline(graph, kernels, self.dtype)
            total = graph.nodes.duration[nodes].sum()
            for limit in ("compute", "memory"):
                of = limits == limit
                share = graph.nodes.duration[nodes[of]].sum() / max(total, 1)
                lines.append(f"{of.sum()} kernels of matmuls, {share:.0%} of their time, are {limit}-bound")
        return tuple(lines)

    def _chosen(self, graph: Graph) -> tuple[Bools, Bools]:
        """Return [N] masks of the selected kernels, and of the matmuls among them with more bits.

        Raises:
            Unanswerable: there is none.
        """
        kernels = self.selection.mask(graph) & (graph.nodes.kind == NodeKind.KERNEL)
        if not kernels.any():
            raise Unanswerable("no such GPU kernel in the run: nothing is known of the precision of CPUs")
        computes: Bools = np.array([classify(name).kind in COMPUTES for name in graph.names], np.bool_)
        matmuls = kernels & computes[graph.nodes.name]
        if not matmuls.any():
            raise Unanswerable(
                "none of these kernels is a matmul, a convolution or attention by its name: fewer bits "
                "change nothing that is known of the others"
            )
        more: Bools = np.array(
            [BYTES.get(stored_as(name), 0) > BYTES[self.dtype] for name in graph.names], np.bool_
        )
        computing = matmuls & more[graph.nodes.name]
        if self.speedup is not None and not computing.any():
            raise Unanswerable(
                f"no matmul in the run has more bits than {self.dtype}, by the names of its kernels"
            )
        return kernels, computing

    def describe(self) -> str:
        if self.budget is not None:
            return f"a precision per module, down to {self.dtype}"
        return f"{'matmuls in fp8' if self.dtype == 'fp8' else 'autocast to ' + self.dtype}"

    def how(self) -> str:
        if self.budget is not None and self.dtype != "fp8":
            return f"use torch.autocast around the chosen modules, as dpro try {self} does"
        if self.dtype == "fp8":
            return "torchao.float8.convert_to_float8_training(model), or Transformer Engine's fp8_autocast"
        scaler = " and torch.amp.GradScaler" if self.dtype == "fp16" else ""
        kind = "bfloat16" if self.dtype == "bf16" else "float16"
        return f"with torch.autocast('cuda', dtype=torch.{kind}) around forward and loss{scaler}"


def half_of(graph: Graph) -> str:
    """Return the half precision of a run's GPU: bf16, or fp16 on older models."""
    model = common_model(graph.run.manifest.gpus) if graph.run is not None else ""
    return "fp16" if model and "bf16" not in GPUS[model].tflops else "bf16"


def _pointwise_floats(graph: Graph) -> Bools:
    """Return [N] a mask of pointwise kernels on 32-bit floats, without the optimizer's."""
    fits = np.array([is_pointwise(name) and stored_as(name) == "fp32" for name in graph.names], np.bool_)
    mask: Bools = fits[graph.nodes.name] & (graph.nodes.kind == NodeKind.KERNEL)
    return mask & ~optimizing(graph)
