"""A job that one thing limits, before or after a person has changed its script.

torchrun --nproc-per-node 2 advised_job.py WHAT [--done] [--steps N] [--out FILE]

WHAT is `input`, `optimizer`, `communication`, `uneven` or `crowded`; `--done` is the script after the change.
The first rank writes the time of each step into FILE as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, BATCH = 256, 8
READ_S = 0.004  # per sample, where reading limits
LAYERS = {"optimizer": 100}  # else 12
ROWS = (64, 1536)  # of a short and a long batch, where these are uneven


class Batches(Dataset[Tensor]):
    """Batches of a rank, which take some time to read, or have uneven lengths."""

    def __init__(self, what: str, done: bool, rank: int, steps: int) -> None:
        self.what, self.done, self.rank, self.steps = what, done, rank, steps

    def __len__(self) -> int:
        """Return the number of batches: one for each step."""
        return self.steps

    def __getitem__(self, step: int) -> Tensor:
        """Make the batch of a step: [rows, WIDTH]."""
        if step >= self.steps:
            raise IndexError(step)
        rows = {"crowded": 256, "uneven": sum(ROWS) // 2}.get(self.what, BATCH)
        if self.what == "uneven" and not self.done:  # the ranks alternate
            rows = ROWS[(step + self.rank) % 2]
        if self.what == "input":
            time.sleep(READ_S * BATCH)
        return torch.full((rows, WIDTH), 1.0 + step % 7)


class Layers(nn.Module):
    """Products of a batch with matrices."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, width), *(nn.Linear(width, width) for _ in range(layers))
        )

    def forward(self, values: Tensor) -> Tensor:
        """Return the mean square of the result."""
        for layer in self.layers:
            values = torch.tanh(layer(values))
        return values.pow(2).mean()


def main() -> None:
    """Train and write the times of steps."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("what", choices=("input", "optimizer", "communication", "uneven", "crowded"))
    options.add_argument("--done", action="store_true")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    what, done = chosen.what, chosen.done
    torch.set_num_threads(4 if what == "crowded" and not done else 1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    width = {"optimizer": 64, "communication": 512, "crowded": 512, "uneven": 64}.get(what, 256)
    model = Layers(LAYERS.get(what, 12), width)
    module = DistributedDataParallel(model, static_graph=True)
    if what == "communication" and done:
        module.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
    if what == "optimizer":
        speed = {"fused": True} if done else {"foreach": False}
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), **speed)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    ahead = {"num_workers": 2, "persistent_workers": True} if what == "input" and done else {}
    loader = DataLoader(Batches(what, done, rank, chosen.steps), batch_size=None, **ahead)

    times, begun = [], time.perf_counter()
    for batch in loader:
        optimizer.zero_grad()
        module(batch).backward()
        optimizer.step()
        times.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    if rank == 0 and chosen.out:
        chosen.out.write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
