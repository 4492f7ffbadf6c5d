"""A real data-parallel job that computes with several threads per rank, on CPUs."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH = 192, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(options.steps):
        optimizer.zero_grad()
        for _ in range(4):
            model(torch.randn(BATCH, WIDTH)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
