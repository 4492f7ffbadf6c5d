"""A real data-parallel job on gloo that loses time in some of its steps only, in a way that is asked for.

Its steps sleep, so that they are hardly disturbed by what else runs on the machine.
"""

from __future__ import annotations

import argparse
import gc
import io
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, BATCH = 64, 8
KINDS = (
    "none", "collection", "validation", "validation-all", "checkpoint", "loader", "persistent", "compile",
    "sleep",
)  # fmt: skip


class Samples(Dataset[Tensor]):
    """This many samples of noise."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), float(index))


class Slow(io.BytesIO):
    """A file on a slow disk."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def write(self, content: Any) -> int:
        time.sleep(self.seconds)
        self.seconds = 0
        return super().write(content)


class Start:
    """What a worker does before its first batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, worker: int) -> None:
        time.sleep(self.seconds)


class Validated(nn.Module):
    """A model that takes its time when it is evaluated."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        super().__init__()
        self.model, self.seconds = model, seconds

    def forward(self, batch: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.model(batch)


def batches(options: argparse.Namespace) -> Any:
    """The batches of all steps, from a loader that begins again after this many steps."""
    workers = options.kind in ("loader", "persistent")
    loader = DataLoader(
        Samples(BATCH * (options.every if workers else options.steps)),
        batch_size=BATCH,
        num_workers=1 if workers else 0,
        persistent_workers=options.kind == "persistent",
        worker_init_fn=Start(options.pause) if workers else None,
    )
    served = 0
    while True:
        for batch in loader:
            if served == options.steps:
                return
            served += 1
            yield batch


def pause(options: argparse.Namespace, step: int, model: nn.Module, rank: int) -> None:
    """What the job does beside training once per this many steps."""
    if (step + 1) % options.every:
        return
    if options.kind == "collection" and rank == options.rank:
        gc.collect()
    if options.kind == "validation-all" or (options.kind == "validation" and rank == options.rank):
        slow = Validated(model, options.pause / 4).eval()
        with torch.no_grad():
            for batch in DataLoader(Samples(4 * BATCH), batch_size=BATCH):
                slow(batch)
        slow.train()
    if options.kind == "checkpoint" and rank == options.rank:
        torch.save(model.state_dict(), Slow(options.pause))
    if options.kind == "sleep" and rank == options.rank:
        time.sleep(options.pause)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--ms", type=float, default=20.0, help="of an ordinary step")
    parser.add_argument("--pause", type=float, default=0.3, help="s")
    parser.add_argument("--objects", type=int, default=2_000_000, help="that a collection looks at")
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    held = [[] for _ in range(options.objects)] if options.kind == "collection" else []
    plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    trained = torch.compile(plain, dynamic=False) if options.kind == "compile" else plain
    model = DistributedDataParallel(trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(options)):
        time.sleep(options.ms / 1000)
        if options.kind == "compile":
            batch = batch[: BATCH - step // options.every % BATCH]
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        pause(options, step, plain, rank)
    del held
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
