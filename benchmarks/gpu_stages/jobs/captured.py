"""A job whose whole training step is captured as a CUDA graph after some warm-ups, and then replayed.

python captured.py [--warmups 3] [--steps 80]

One rank with a process group, so that there are collective calls to dump while the capture runs. It
prints one line of JSON if all went well.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Warm up, capture, replay and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(20)))
    model.to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, **({"capturable": True} if on_gpu else {}))
    batch, target = torch.randn(2, 64, 256, device=options.device).unbind()
    seen = torch.zeros(1, device=options.device)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(batch) - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def warm_up() -> None:
        for _ in range(options.warmups):
            dist.all_reduce(seen)
            step()

    if on_gpu:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            warm_up()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        for _ in range(options.steps):
            graph.replay()
            dist.all_reduce(seen)
        torch.cuda.synchronize()
    else:
        warm_up()
        for _ in range(options.steps):
            loss = step()
            dist.all_reduce(seen)
    print(json.dumps({"replays": options.steps, "finite": bool(torch.isfinite(loss).item())}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
