"""Exchange tokens of a mixture of experts, compute and exchange back in chunks: three things side by side.

An all-to-all, what experts do with the tokens it brought, and the all-to-all that takes them back depend on
each other as a whole, and chunk by chunk they do not. What ranks of a host gather or reduce in between is a
stage of its own, on links of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro.replay.cost.transfers import unknown_latencies
from dpro.replay.graph import Graph
from dpro.replay.mesh import AXES
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.parallelism.chunks import (
    DISPATCH,
    EXCHANGES,
    ChunkedEdit,
    Order,
    Segment,
    WorkStage,
    awaited_collectives,
    experts_of,
)
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.selected import messages_fitting

OF_DISPATCH = (
    "kernels that dispatch and combine: two batches side by side (two-batch overlap of SGLang and vLLM), one "
    "of which computes while DeepEP's return_recv_hook receives for the other; how many tokens move was not "
    "recorded"
)


@dataclass(frozen=True)
class MoePipeline(ChunkedEdit):
    """Tokens go to their experts, are computed and come back in chunks."""

    name = "moe-pipeline"
    summary = "all-to-all, experts and all-to-all of a mixture of experts in chunks that overlap"
    example = "moe-pipeline:chunks=2"
    needs = (
        "an all-to-all, work that waits for it, and an all-to-all of as many bytes that takes it back; or "
        "kernels that dispatch and combine, as DeepEP's"
    )
    assumes = (
        "chunks have equal numbers of tokens for each expert, links within and between hosts are not in each "
        "other's way, and work beside a collective is slowed down as the run shows it, or else as others "
        "measured (1.19 times, 1.4 at most)"
    )
    source = (
        "Tutel (Hwang et al., MLSys 2023), FSMoE (Pan et al., arXiv 2501.10714): chunks of a stage follow "
        "each other, all of one exchange before those of the next in its group; times by the run's own curves"
    )
    proof = "4 chunks, all-to-all on gloo"
    effort = "code"
    chunks: int = key("into how many the tokens of a layer are cut", 2, least=1, most=1024)
    group: str = key("pattern for the process group of the all-to-alls; all without", "")
    axis: str = key("only along this axis of parallelism; all without", "", choices=AXES)
    doubt: float = 0.3

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        cls().segments(facts.graph)
        return [cls(2), cls(4)]

    def why_none(self, graph: Graph) -> str:
        if any(message.op in EXCHANGES for message in graph.messages):
            return (
                "no all-to-all in the run is followed by work and an all-to-all that takes as many bytes back"
            )
        return "the run holds no all-to-all: no tokens are exchanged between experts"

    def find(self, graph: Graph) -> list[Segment]:
        if not any(message.op in EXCHANGES for message in graph.messages):
            return []
        order = Order(graph)
        fits = np.zeros(len(graph.messages), np.bool_)
        for op in EXCHANGES:
            fits |= messages_fitting(graph, op, self.group, self.axis)
        awaited = [
            members
            for members in awaited_collectives(graph, order)
            if fits[members[0].message] or graph.messages[members[0].message].op not in EXCHANGES
        ]
        return experts_of(graph, order, awaited)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """How many exchanges there are, what is between them, and whose latency the run does not show."""
        segments = self.segments(graph)
        inner = [
            stage
            for segment in segments
            for stage in segment.ranks[0][1:-1]
            if not isinstance(stage, WorkStage)
        ]
        further = f", with {len(inner)} collectives in between" if inner else ""
        own = any(message.op == DISPATCH for message in graph.messages)
        return (
            f"{len(segments)} exchanges there and back{further}",
            *([OF_DISPATCH] if own else ()),
            *unknown_latencies(graph),
        )

    def describe(self) -> str:
        return f"exchanges of tokens and their experts in {self.chunks} chunks that overlap"

    def how(self) -> str:
        return (
            f"Tutel: moe_layer(…, a2a_ffn_overlap_degree={self.chunks}); or by hand: all_to_all_single with "
            "async_op=True per chunk, the next one on its way while the experts compute"
        )
