"""A job whose pairs of ranks compute and reduce in rounds, until a file `stop` exists in its folder.

In: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and arguments: bytes of each reduction, ms that it computes
before each, and most steps. As many ranks as hosts, an even number; no rank is in two pairs of a round.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist


class Descent(torch.optim.Optimizer):
    """Steps down the gradient; the optimizers of torch import its compiler, for seconds."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        """Take the parameters of one group."""
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Move all parameters."""
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad


def rounds_of(ranks: int) -> list[list[tuple[int, int]]]:
    """Return pairs of all ranks, each with each once, in rounds of disjoint pairs (the circle method)."""
    ring, half = list(range(ranks)), ranks // 2
    rounds = []
    for _ in range(ranks - 1):
        rounds.append([(min(pair), max(pair)) for pair in zip(ring[:half], ring[: half - 1 : -1])])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def main() -> None:
    """Run the steps."""
    num_bytes, compute_ms, steps = (int(word) for word in sys.argv[1:4])
    dist.init_process_group("gloo")
    rank, rounds = dist.get_rank(), rounds_of(dist.get_world_size())
    groups = {pair: dist.new_group(list(pair)) for pairs in rounds for pair in pairs}
    data, goes_on = torch.zeros(num_bytes // 4), torch.ones(1)
    model = torch.nn.Linear(4, 4)
    optimizer = Descent(list(model.parameters()))
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        for pairs in rounds:
            time.sleep(compute_ms / 1e3)  # in which the kernel also sends the rest of the round before
            for pair in pairs:
                if rank in pair:
                    dist.all_reduce(data, group=groups[pair])
                    data.mul_(0.5)
        optimizer.step()
        if rank == 0 and os.path.exists("stop"):
            goes_on.zero_()
        dist.broadcast(goes_on, 0)
        if not goes_on.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
