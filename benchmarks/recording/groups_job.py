"""A training job on the CPU whose layers communicate in the middle of their work, whole or cut into chunks.

torchrun --nproc-per-node 2 benchmarks/recording/groups_job.py KIND [--chunks 4] [--dp 2] …

Products sleep for a known time, forward and backward, and leave the cores free. `row` reduces each product,
as a layer whose matrix is split by row; `column` gathers before each; `experts` exchanges tokens before
and after. With chunks each product is cut up by hand, and its chunks run while others are in transit.
Ranks of different such groups are data parallel. The job does not depend on dpro.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

TOKENS = 64
ROW, COLUMN, EXPERTS = "row", "column", "experts"


class Product(torch.autograd.Function):
    """A matrix product on a separate device, as the host that waits for it sees it."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        """Sleep."""
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sleep as long again."""
        time.sleep(context.seconds)
        return gradient, None


class Tokens(Dataset[Tensor]):
    """Batches; if asked for, with alternately more and fewer tokens for each rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Make as many batches as the steps need."""
        self.options, self.rank = options, dist.get_rank()

    def __len__(self) -> int:
        """Return the number of batches in all steps."""
        return self.options.steps * self.options.accumulate

    def __getitem__(self, index: int) -> Tensor:
        """Make a batch; the sum over two consecutive ranks is constant."""
        more = self.options.uneven * (1 + index % 3) // 3
        return torch.ones(TOKENS + (more if (index + self.rank) % 2 else -more), self.options.width)


class Layer(nn.Module):
    """A product, the exchange of its ranks before or after it, and parameters."""

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup | None) -> None:
        """Make a layer on the ranks of a group."""
        super().__init__()
        self.weights = nn.Parameter(torch.ones(max(options.parameters, options.width)))
        self.group, self.kind = group, options.kind
        self.chunks, self.seconds = options.chunks, options.layer_ms / 1e3

    def product(self, x: Tensor) -> Tensor:
        """Compute the product of one chunk."""
        return Product.apply(x, self.seconds * x.shape[0] / TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """Compute and communicate, chunk by chunk."""
        parts = list((x * self.weights[: x.shape[1]]).chunk(self.chunks))
        if self.kind == ROW:
            return torch.cat(self.reduced(parts))
        if self.kind == COLUMN:
            return torch.cat(self.gathered(parts))
        return torch.cat(self.routed(parts))

    def reduced(self, parts: list[Tensor]) -> list[Tensor]:
        """Reduce each product while the next one is computed."""
        made, calls = [], []
        for part in parts:
            made.append(self.product(part))
            calls.append(dist.all_reduce(made[-1].detach(), group=self.group, async_op=True))
        for call in calls:
            call.wait()
        return made

    def gathered(self, parts: list[Tensor]) -> list[Tensor]:
        """Gather all parts at once, and compute each product when its part has arrived."""
        calls = []
        for part in parts:
            whole = [torch.empty_like(part) for _ in range(dist.get_world_size(self.group))]
            calls.append(dist.all_gather(whole, part.detach().contiguous(), group=self.group, async_op=True))
        made = []
        for part, call in zip(parts, calls):
            call.wait()
            made.append(self.product(part))
        return made

    def routed(self, parts: list[Tensor]) -> list[Tensor]:
        """Send tokens to their experts, and back."""
        calls = [self.exchange(part) for part in parts]
        made, back = [], []
        for part, call in zip(parts, calls):
            call.wait()
            made.append(self.product(part))
            back.append(self.exchange(made[-1]))
        for call in back:
            call.wait()
        return made

    def exchange(self, part: Tensor) -> dist.Work:
        """Exchange equal parts with all ranks."""
        sent = part.detach().contiguous()
        return dist.all_to_all_single(torch.empty_like(sent), sent, group=self.group, async_op=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=(ROW, COLUMN, EXPERTS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096, help="of a token")
    parser.add_argument("--parameters", type=int, default=1 << 18, help="of a layer")
    parser.add_argument("--layer-ms", type=float, default=20.0, help="each product, forward and backward")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--sharded", action="store_true", help="parameters over data-parallel ranks, FSDP2")
    parser.add_argument("--prefetch", type=int, default=0, help="layers that FSDP gathers ahead")
    parser.add_argument("--uneven", type=int, default=0, help="tokens that some ranks have more, others less")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--first", action="store_true", help="run before all other programs (root)")
    return parser.parse_args()


def parallel(options: argparse.Namespace) -> tuple[nn.Module, Callable[[], Any]]:
    """Make the model, and a context that keeps it from reducing gradients."""
    world = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (options.dp, world // options.dp), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(Layer(options, mesh.get_group("tp")) for _ in range(options.layers)))
    if options.dp == 1:
        return model, nullcontext
    if options.sharded:
        return sharded(model, mesh["dp"], options.prefetch), nullcontext
    replicated = DistributedDataParallel(
        model, process_group=mesh.get_group("dp"), bucket_cap_mb=options.bucket_mb
    )
    return replicated, replicated.no_sync


def sharded(model: nn.Sequential, mesh: dist.DeviceMesh, ahead: int) -> nn.Module:
    """Make FSDP2, layer by layer, which gathers parameters this many layers ahead."""
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if ahead:
        model._set_unshard_async_op(True)  # otherwise a call on the CPU waits for its result
        layers = list(model)
        for at, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 1 + ahead])
            layer.set_modules_to_backward_prefetch(layers[max(at - 1 - ahead, 0) : at][::-1])
    return model


def main() -> None:
    """Train."""
    options = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.first:  # the threads that this one starts inherit it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    model, without = parallel(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batches = iter(DataLoader(Tokens(options), batch_size=None))
    for _ in range(options.steps):
        optimizer.zero_grad()
        for batch in range(options.accumulate):
            with nullcontext() if batch == options.accumulate - 1 else without():
                model(next(batches)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
