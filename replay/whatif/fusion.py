"""Do the same work in fewer kernels: optimizers that update all parameters at once, fused pointwise kernels.

Pointwise work takes as long as memory needs to move what it reads and writes. Fused, what one kernel writes
for the next to read stays on the chip; the launches and operators of all kernels but one go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.classify import classify
from dpro.errors import Unanswerable
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.inside import inside_modules, launching_only, names_inside
from dpro.replay.whatif.select import Selection

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

OPTIMIZER = "Optimizer.step#"
# Per parameter: operators of torch's own loop, tensors that these read and write in all, and that one fused
# pass must (parameter, gradient and state in; parameter and state out).
LOOPS = {"AdamW": (9, 21, 7), "Adam": (8, 19, 7), "Adagrad": (5, 12, 5), "SGD": (3, 8, 5)}
PLAIN_SGD = (1, 3, 3)  # without momentum

# Share of a pointwise kernel's time that goes into writing its result, and into reading the one before: most
# read two tensors and write one.
SHARE_OF_A_TENSOR = 1 / 3


@dataclass(frozen=True)
class Optimizer(Edit):
    """The optimizer updates all parameters in a few kernels (foreach) or in one pass (fused)."""

    name = "optimizer"
    summary = "a foreach or fused optimizer instead of a loop over parameters"
    example = "optimizer:impl=fused"
    needs = "the range that torch.profiler and dpro record around `Optimizer.step`"
    assumes = "updating is bound by memory, and one fused pass moves each tensor once"
    source = (
        "tensors moved per parameter in torch's loops and by one pass: Adam 19 to 7, AdamW 21, SGD 8 to 5"
    )
    proof = "AdamW as a loop, foreach and fused, CPU"
    impl: str = key("which implementation", "fused", choices=("fused", "foreach"))
    doubt: float = 0.3

    def apply(self, graph: Graph) -> Graph:
        """Shorten the work inside the optimizer's step as far as its present implementation lets it."""
        names = names_inside(graph, f"{OPTIMIZER}*")
        now = next((impl for impl in ("fused", "foreach") if _any(names, f"aten::_{impl}_")), "loop")
        if now == self.impl:
            return graph
        if now == "fused":
            raise Unanswerable("the optimizer is fused: what a loop of operators would cost cannot be told")
        operators, moved, fused = _loop_of(names)
        mask = inside_modules(graph, f"{OPTIMIZER}*")
        ratio = fused / moved if self.impl == "fused" else 1.0
        kernels = mask & (graph.nodes.kind == NodeKind.KERNEL)
        if kernels.any():
            return _updated_at_once(graph, mask, kernels, ratio, operators)
        if self.impl == "foreach":
            return graph  # on CPUs it loops all the same
        duration = graph.nodes.duration.astype(np.float64)
        duration[mask & (graph.nodes.kind == NodeKind.CPU)] *= ratio
        duration[mask & np.isin(graph.nodes.kind, (NodeKind.HOST, NodeKind.GAP))] /= operators
        return graph.with_durations(np.rint(duration).astype(np.int64))

    def describe(self) -> str:
        """What is changed."""
        return f"a {self.impl} optimizer"

    def how(self) -> str:
        """How to do it."""
        return f"torch.optim.…(…, {self.impl}=True)"


def _any(names: list[str], beginning: str) -> bool:
    return any(name.startswith(beginning) for name in names)


def _loop_of(names: list[str]) -> tuple[int, int, int]:
    """The row of `LOOPS` for the optimizer that was recorded."""
    found = {name.removeprefix(OPTIMIZER).split(".")[0] for name in names if name.startswith(OPTIMIZER)}
    known = [name for name in LOOPS if name in found]
    if len(known) != 1 or len(found) != 1:
        raise Unanswerable(
            f"what {', '.join(sorted(found))} moves is not known: there are {', '.join(LOOPS)}, one in a run"
        )
    if known == ["SGD"] and not any(name in ("aten::mul_", "aten::_foreach_mul_") for name in names):
        return PLAIN_SGD
    return LOOPS[known[0]]


def _updated_at_once(graph: Graph, mask: Bools, kernels: Bools, ratio: float, operators: int) -> Graph:
    """Kernels behind one another without gaps; of operators and launches, the first of each step are left."""
    nodes, edges = graph.nodes, graph.edges
    duration = nodes.duration.astype(np.float64)
    duration[kernels] *= ratio
    duration[mask & np.isin(nodes.kind, (NodeKind.HOST, NodeKind.GAP))] /= operators
    calls = np.zeros(graph.num_nodes, np.bool_)
    calls[edges.source[(edges.kind == EdgeKind.LAUNCH) & kernels[edges.target]]] = True
    for rank, window, step in np.unique(np.stack([nodes.rank, nodes.window, nodes.step])[:, calls], axis=1).T:
        here = (nodes.rank == rank) & (nodes.window == window) & (nodes.step == step) & mask
        first = nodes.measured_end[np.flatnonzero(here & calls)].min()
        later = here & (nodes.measured_start >= first) & np.isin(nodes.kind, (NodeKind.CPU, NodeKind.RUNTIME))
        duration[later] = 0
    queued = (edges.kind == EdgeKind.STREAM) & kernels[edges.source] & kernels[edges.target]
    lag = np.where(queued, np.minimum(edges.lag, 0), edges.lag)
    return graph.with_durations(np.rint(duration).astype(np.int64)).with_lags(lag)


@dataclass(frozen=True)
class Compile(Edit):
    """Pointwise kernels that follow one another on a stream become one."""

    name = "compile"
    summary = "runs of pointwise kernels are fused, as torch.compile does"
    example = "compile"
    needs = "GPU kernels and their launches"
    assumes = (
        "kernels that follow one another use each other's results, and guards cost nothing; fusing into "
        "reductions and matmuls, and CUDA graphs, come on top"
    )
    source = (
        "ours: each kernel saves a third of its time for reading what the one before wrote, and a third for "
        "writing what the next reads (two tensors in, one out); no less than the longest is left"
    )
    selection: Selection
    doubt: float = 0.35

    def apply(self, graph: Graph) -> Graph:
        """Give the first of each run the time of all, and take the others with what launched them."""
        if not (graph.nodes.kind == NodeKind.KERNEL).any():
            raise Unanswerable(
                "the run holds no GPU kernels: what torch.compile fuses on CPUs is not modelled"
            )
        run = _pointwise_runs(graph, self.selection.chosen(graph))
        gone = run >= 0
        leads = _firsts(run)
        gone[leads] = False
        if not gone.any():
            raise Unanswerable("no two pointwise kernels follow one another on a stream: nothing to fuse")
        duration = graph.nodes.duration.copy()
        duration[leads] = _fused_ns(graph, run)
        duration[gone | launching_only(graph, gone)] = 0
        lag = np.where(gone[graph.edges.target], np.minimum(graph.edges.lag, 0), graph.edges.lag)
        return graph.with_durations(duration).with_lags(lag)

    def describe(self) -> str:
        """What is changed."""
        return "pointwise kernels are fused"

    def how(self) -> str:
        """How to do it."""
        return "torch.compile(model)"


def _pointwise_runs(graph: Graph, chosen: Bools) -> Ints:
    """[N] number of the run of pointwise kernels that a node is in, -1 for none; runs have two or more.

    What follows on a stream belongs to one run if the same thread launched it in the same step, with no
    collective called in between.
    """
    nodes, edges = graph.nodes, graph.edges
    pointwise = np.array([is_pointwise(name) for name in graph.names], np.bool_)
    fits = chosen & (nodes.kind == NodeKind.KERNEL) & pointwise[nodes.name]
    caller = np.full(graph.num_nodes, -1)
    launch = edges.kind == EdgeKind.LAUNCH
    caller[edges.target[launch]] = nodes.lane[edges.source[launch]]
    on_stream = np.flatnonzero(np.isin(nodes.kind, (NodeKind.KERNEL, NodeKind.COPY, NodeKind.ARRIVE)))
    order = on_stream[
        np.lexsort((nodes.measured_start[on_stream], nodes.lane[on_stream], nodes.window[on_stream]))
    ]
    columns = (nodes.window, nodes.lane, nodes.step, nodes.section, caller, fits)
    breaks = np.any([np.diff(column[order].astype(np.int64)) != 0 for column in columns], axis=0)
    number = np.cumsum(np.append(True, breaks)[: order.size]) - 1
    several = np.bincount(number)[number] > 1
    run = np.full(graph.num_nodes, -1)
    kept = fits[order] & several & (caller[order] >= 0)
    run[order[kept]] = np.unique(number[kept], return_inverse=True)[1]
    return run


def is_pointwise(name: str) -> bool:
    """Whether a kernel reads and writes element by element: also those that copy or cast so."""
    kind = classify(name).kind
    return kind == "elementwise" or (kind == "memory" and "elementwise" in name.lower())


def _firsts(run: Ints) -> Ints:
    """The first node of each run: numbers of nodes on a stream ascend with time."""
    members = np.flatnonzero(run >= 0)
    return members[np.unique(run[members], return_index=True)[1]]


def _fused_ns(graph: Graph, run: Ints) -> Ints:
    """[R] how long each run takes as one kernel."""
    members = np.flatnonzero(run >= 0)
    of, own = run[members], graph.nodes.duration[members]
    first, last = _firsts(run), members[members.size - 1 - np.unique(of[::-1], return_index=True)[1]]
    total = np.bincount(of, own)
    ends = graph.nodes.duration[first] + graph.nodes.duration[last]
    longest = np.zeros(total.size, np.int64)
    np.maximum.at(longest, of, own)
    saved = SHARE_OF_A_TENSOR * (2 * total - ends)
    return np.maximum(np.rint(total - saved).astype(np.int64), longest)
