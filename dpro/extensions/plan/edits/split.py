"""Edits that cut work, and the collectives that feed or drain it, into chunks that overlap.

In tensor parallelism, a matmul that waits for all of its input, or whose whole result must be sent before
anything continues, leaves either the link or the arithmetic idle. Row by row, both can be busy.

In a mixture of experts, an all-to-all, the experts' work on its tokens, and the all-to-all that returns them
depend on each other as a whole, but not chunk by chunk. Collectives within a host in between are a stage on
separate links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro.arrays import Bools
from dpro.classify import classify
from dpro.errors import Unanswerable
from dpro.extensions.plan.edits.chunks import (
    DISPATCH,
    EXCHANGES,
    ChunkedEdit,
    Member,
    Order,
    Segment,
    WorkStage,
    awaited_collectives,
    experts_of,
    pairs_of,
)
from dpro.replay.cost.kernels.roofline import MATMULS
from dpro.replay.cost.transfers import unknown_latencies
from dpro.replay.gradient_buckets import gradient_passes
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.mesh import AXES, axes_of_messages
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.scaling import REPLICAS
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.selected import fitting, messages_fitting

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MATMUL = "gemm"
MIN_PER_STEP = (
    2  # of an operation in a group of unknown axis: once per step parameters and gradients move, too
)


@dataclass(frozen=True)
class Split(ChunkedEdit):
    """A matmul and its collective run in overlapping chunks."""

    name = "split"
    of_torch = True
    summary = "split a matmul and its adjacent collective into overlapping chunks"
    example = "split:op=reduce_scatter,chunks=4"
    needs = (
        "collectives next to a matmul that waits for them or feeds them, with sizes that reveal their cost"
    )
    assumes = (
        "rows can be split, chunks are equal, and work overlapping a collective slows down as in the "
        "run, or else by published factors (1.19, at most 1.4)"
    )
    source = (
        "Flux (Chang et al., arXiv 2406.06858), asynchronous tensor parallelism of PyTorch; chunks of a "
        "collective from the run's own cost curve, chunks of a matmul from its shape, if known"
    )
    proof = "row- and column-parallel layers in 4 chunks, gloo"
    effort = "code"
    op: str = key("pattern for the collective operation; default: all", "")
    chunks: int = key("number of chunks", 4, least=1, most=1024)
    work: str = key("pattern for the work to split; default: matmuls", "")
    group: str = key("pattern for the process group; default: all", "")
    axis: str = key("only along this parallelism axis; default: all", "", choices=AXES)
    doubt: float = 0.3

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return edits to two and four chunks of each operation next to matmuls."""
        graph = facts.graph
        ops = Counter(graph.messages[_member(segment).message].op for segment in cls().segments(graph))
        return [cls(op, chunks) for op in sorted(ops) for chunks in (2, 4)]

    def why_none(self, graph: Graph) -> str:
        what = f"work that fits {self.work!r}" if self.work else "a matmul"
        return f"no {self.op or 'collective'} in the run stands next to {what} and is waited for at once"

    def find(self, graph: Graph) -> list[Segment]:
        work = self._work(graph)
        if not graph.messages or not work.any():
            return []
        order, axes = Order(graph), axes_of_messages(graph)
        fits = messages_fitting(graph, self.op, self.group, self.axis)
        if not self.axis:  # gradients are not rows of a product
            fits &= np.array([axis != REPLICAS for axis in axes], np.bool_)
        gradients = _gradients(graph)
        awaited = [
            members
            for members in awaited_collectives(graph)
            if members[0].transfer not in gradients
            if fits[members[0].message] and graph.messages[members[0].message].op in OPERATIONS
        ]
        pairs = pairs_of(graph, order, awaited, work)
        per_step = Counter(_kind_and_step(graph, pair) for pair in pairs)
        return [
            pair
            for pair in pairs
            if axes[_member(pair).message] or per_step[_kind_and_step(graph, pair)] >= MIN_PER_STEP
        ]

    def _work(self, graph: Graph) -> Bools:
        """Return [N] a mask of the work that may be cut."""
        nodes = graph.nodes
        kernels = nodes.kind == NodeKind.KERNEL
        work = kernels if kernels.any() else nodes.kind == NodeKind.CPU
        if self.work:
            named = fitting(graph.names, self.work)
        elif kernels.any():
            named = np.array([classify(name).kind == MATMUL for name in graph.names], np.bool_)
        else:
            named = np.array([name in MATMULS for name in graph.names], np.bool_)
        mask: Bools = work & named[nodes.name] & (nodes.span >= 0)
        return mask

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report the pairs, their order, and operations whose latency the run does not show."""
        segments = self.segments(graph)
        drains = sum(isinstance(segment.ranks[0][1], Member) for segment in segments)
        ways = [
            f"{count} {what}"
            for count, what in ((drains, "behind its matmul"), (len(segments) - drains, "before its matmul"))
            if count
        ]
        return (f"collectives that are cut up: {' and '.join(ways)}", *unknown_latencies(graph))

    def describe(self) -> str:
        what = f"{self.op or 'collectives'} next to {self.work or 'matmuls'}"
        return f"{what} in {self.chunks} overlapping chunks"

    def how(self) -> str:
        return (
            "torch.compile with torch._inductor.config._micro_pipeline_tp = True and "
            "enable_symm_mem_for_group; Transformer Engine: ub_overlap_ag, ub_overlap_rs; or by hand, with "
            "async_op=True per chunk"
        )


def _gradients(graph: Graph) -> set[int]:
    """Return transfers that reduce gradients, where known."""
    try:
        return {int(node) for backward in gradient_passes(graph) for node in backward.transfer}
    except Unanswerable:
        return set()


def _kind_and_step(graph: Graph, segment: Segment) -> tuple[str, str, int]:
    """Return operation, group and step of a pair."""
    member = _member(segment)
    message = graph.messages[member.message]
    return message.op, message.group, int(graph.nodes.step[member.transfer])


def _member(segment: Segment) -> Member:
    """Return the collective of a segment on one rank."""
    return next(stage for stage in segment.ranks[0] if isinstance(stage, Member))


OF_DISPATCH = (
    "kernels that dispatch and combine: two batches side by side (two-batch overlap of SGLang and vLLM), one "
    "of which computes while DeepEP's return_recv_hook receives for the other; how many tokens move was not "
    "recorded"
)


@dataclass(frozen=True)
class MoePipeline(ChunkedEdit):
    """Tokens go to their experts, are computed and come back in chunks."""

    name = "moe-pipeline"
    of_torch = True
    summary = "overlap the all-to-alls and experts of a mixture of experts, in chunks"
    example = "moe-pipeline:chunks=2"
    needs = (
        "an all-to-all, work that waits for it, and a return all-to-all of equal size; or dispatch and "
        "combine kernels such as DeepEP's"
    )
    assumes = (
        "chunks have equal numbers of tokens per expert, links within and between hosts do not compete, "
        "and work overlapping a collective slows down as in the run, or else by published factors "
        "(1.19, at most 1.4)"
    )
    source = (
        "Tutel (Hwang et al., MLSys 2023), FSMoE (Pan et al., arXiv 2501.10714): chunks of a stage run "
        "in order, and an exchange finishes all its chunks before the next in its group; times from the "
        "run's own cost curves"
    )
    proof = "4 chunks, all-to-all on gloo"
    effort = "code"
    chunks: int = key("number of chunks for the tokens of a layer", 2, least=1, most=1024)
    group: str = key("pattern for the process group of the all-to-alls; default: all", "")
    axis: str = key("only along this parallelism axis; default: all", "", choices=AXES)
    doubt: float = 0.3

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        cls().segments(facts.graph)
        return [cls(2), cls(4)]

    def why_none(self, graph: Graph) -> str:
        if any(message.op in EXCHANGES for message in graph.messages):
            return "no all-to-all in the run is followed by work and a return all-to-all of equal size"
        return "the run has no all-to-all: experts exchange no tokens"

    def find(self, graph: Graph) -> list[Segment]:
        if not any(message.op in EXCHANGES for message in graph.messages):
            return []
        order = Order(graph)
        fits = np.zeros(len(graph.messages), np.bool_)
        for op in EXCHANGES:
            fits |= messages_fitting(graph, op, self.group, self.axis)
        awaited = [
            members
            for members in awaited_collectives(graph)
            if fits[members[0].message] or graph.messages[members[0].message].op not in EXCHANGES
        ]
        return experts_of(graph, order, awaited)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report the exchanges, collectives between them, and operations without a known latency."""
        segments = self.segments(graph)
        inner = [
            stage
            for segment in segments
            for stage in segment.ranks[0][1:-1]
            if not isinstance(stage, WorkStage)
        ]
        further = f", with {len(inner)} collectives in between" if inner else ""
        has_dispatch = any(message.op == DISPATCH for message in graph.messages)
        return (
            f"{len(segments)} exchanges there and back{further}",
            *([OF_DISPATCH] if has_dispatch else ()),
            *unknown_latencies(graph),
        )

    def describe(self) -> str:
        return f"token exchanges and experts in {self.chunks} overlapping chunks"

    def how(self) -> str:
        return (
            f"Tutel: moe_layer(…, a2a_ffn_overlap_degree={self.chunks}); or by hand: all_to_all_single with "
            "async_op=True per chunk, the next one in flight while the experts compute"
        )
