"""A real data-parallel job on gloo in which a rank becomes slow at a step, or never does.

Its work is to sleep, so that it is hardly disturbed by what else runs on the machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mark", type=Path, help="made at the moment the rank becomes slow")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ms", type=float, default=100.0)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--times", type=float, default=1.5)
    parser.add_argument("--since", type=int, default=25)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(options.steps):
        slow = dist.get_rank() == options.slow_rank and step >= options.since
        if slow and step == options.since:
            options.mark.write_text(str(time.time_ns()))
        time.sleep(options.ms / 1000 * (options.times if slow else 1.0))
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
