"""When gradients are exchanged: seldom, beside backward, after it, or beside the next step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpro.replay.graph import Graph
from dpro.replay.whatif.bucket import buckets
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.reduction import STEP, Reduced, Reduction, next_of_rank, reduced, with_reductions

AVERAGING_PASSES = 3.0  # flatten, divide, copy back


@dataclass(frozen=True)
class LocalUpdates(Edit):
    """Ranks train by themselves and average their parameters every k steps (local SGD)."""

    name = "local-updates"
    summary = "ranks train by themselves and average parameters every k steps"
    example = "local-updates:every=4"
    needs = "a DDP job recorded by dpro: parameters of its buckets, autograd spans, bytes reduced"
    assumes = "parameters are averaged all at once after the update, and ranks do not drift apart in between"
    source = (
        "post-local SGD (Lin et al., ICLR 2020) as PyTorch's PeriodicModelAverager does it: 1/k of an "
        "averaging in each step, which is right for the mean step"
    )
    proof = "every 4 steps, gloo"
    every: int = key("steps from one averaging to the next", 4, least=1)
    doubt: float = 0.15

    def apply(self, graph: Graph) -> Graph:
        """Take the reductions out of backward, and put 1/k of one of all parameters at each step's end."""
        known = reduced(graph)
        if self.every == 1:
            return graph
        last = {(each.rank, each.window, each.step): which for which, each in enumerate(known.passes)}
        averaging = self._averaging(known)
        at_end = set(last.values())
        return with_reductions(
            known, [[averaging] if which in at_end else [] for which in range(len(known.passes))]
        )

    def _averaging(self, known: Reduced) -> Reduction:
        last = known.parameters.num_bytes.size - 1
        size = known.bytes_of(0, last)
        copying = AVERAGING_PASSES * known.copy_ns_per_byte * size
        return Reduction(
            0,
            last,
            size,
            known.line.ns_per_byte * size / self.every,
            known.line.latency_ns / self.every,
            (known.call_ns + copying) / self.every,
            STEP,
        )

    def describe(self) -> str:
        """What is changed."""
        return f"parameters averaged every {self.every} steps instead of gradients in each"

    def how(self) -> str:
        """How to do it."""
        return (
            "post_localSGD_hook without gradient all-reduce, and PostLocalSGDOptimizer(optimizer, "
            f"PeriodicModelAverager(period={self.every})); look after accuracy"
        )


@dataclass(frozen=True)
class Overlap(Edit):
    """Gradients are reduced after backward, or beside the next step."""

    name = "overlap"
    summary = "gradients reduced after backward (off), or beside the next step (full)"
    example = "overlap:mode=full"
    needs = "a DDP job recorded by dpro: parameters of its buckets, autograd spans, bytes reduced"
    assumes = "with full overlap, that the update may use the gradients of the step before"
    source = "ours; full overlap with gradients one step old as in Pipe-SGD (Li et al., NeurIPS 2018)"
    mode: str = key("off: none, full: a step later", choices=("off", "full"))
    doubt: float = 0.15

    def apply(self, graph: Graph) -> Graph:
        """Call all reductions behind the last gradient, or wait for them one pass later."""
        known = reduced(graph)
        plain = [buckets(known, each.closes) for each in known.passes]
        if self.mode == "full":
            return with_reductions(known, plain, next_of_rank(known))
        last = known.parameters.num_bytes.size - 1
        return with_reductions(known, [[replace(each, called_after=last) for each in own] for own in plain])

    def describe(self) -> str:
        """What is changed."""
        return "gradients reduced after backward" if self.mode == "off" else "gradients awaited a step later"

    def how(self) -> str:
        """How to do it."""
        if self.mode == "off":
            return "nothing to do: it shows what overlap gains; DDP does that with one bucket for all"
        return "an optimizer that applies gradients one step late; look after accuracy"
