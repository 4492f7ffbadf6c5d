"""A training job of a small real model on the CPU, independent of dpro.

torchrun --nproc-per-node 2 benchmarks/recording/model_job.py MODEL PARALLELISM [--steps 30] [--block-ms 8] …

MODEL is gpt, resnet or dlrm (`models.py`), PARALLELISM ddp, fsdp (FSDP2, block by block), tp (the matrices of
a GPT split by column and row) or pp (its blocks over stages, one forward and one backward in turn). The parts
that changes apply to are those of common scripts: a `DataLoader`, DDP, an optimizer of `torch.optim`, one
loss.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from benchmarks.recording.cpu_job import begin
from benchmarks.recording.models import (
    BATCH,
    Gpt,
    Pace,
    ResNet,
    data_parallel,
    loss_of,
    recommendation,
    sample_of,
)

DISTINCT = 64  # samples that differ


class Samples(Dataset[tuple[Tensor, ...]]):
    """Samples from a disk of a given speed; reading the first of a batch takes the time of all."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Make as many samples as the steps need."""
        self.samples = [sample_of(options.model) for _ in range(DISTINCT)]
        self.seconds = options.input_ms / 1e3
        self.batch, self.steps = options.batch, options.steps

    def __len__(self) -> int:
        """Return the number of samples in all steps."""
        return self.batch * self.steps

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Read a sample."""
        if self.seconds and index % self.batch == 0:
            time.sleep(self.seconds)
        return self.samples[index % DISTINCT]


def model_of(options: argparse.Namespace, rank: int) -> nn.Module:
    """Make the model, parallel as requested."""
    late_ms = options.slow_ms if rank == options.slow_rank else 0.0
    paces = [Pace(options.block_ms, late_ms * (at == 0)) for at in range(options.blocks)]
    if options.model == "dlrm":
        return recommendation(paces, options.width, data_parallel(options.bucket_mb))
    outputs = [options.outputs] if options.outputs else []
    model = {"gpt": Gpt, "resnet": ResNet}[options.model](paces, options.width, *outputs)
    return PARALLEL[options.parallelism](model, options)


def replicated(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """Wrap a model in DDP."""
    return data_parallel(options.bucket_mb)(model)


def fully_sharded(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """Shard a model with FSDP2, block by block."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """Split attention heads, and the inner rows of the feed-forward network, over the ranks."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    split = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel)
    for block in model.blocks:
        parts = {**split, "out": RowwiseParallel, "down": RowwiseParallel}
        parallelize_module(block, mesh, {name: style() for name, style in parts.items()})
    return model


class Stage(nn.Module):
    """Some blocks of a GPT: with its embeddings on the first rank, with its output layer on the last."""

    def __init__(self, model: Gpt, rank: int, world: int) -> None:
        """Take this rank's blocks; each rank has an equal number, in order."""
        super().__init__()
        each = len(model.blocks) // world
        self.tokens, self.places = (model.tokens, model.places) if rank == 0 else (None, None)
        self.blocks = model.blocks[rank * each : (rank + 1) * each]
        self.norm, self.head = (model.norm, model.head) if rank == world - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Turn tokens, or the previous stage's activations, into activations for the next one, or logits."""
        if self.tokens is not None:
            x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        x = self.blocks(x)
        return x if self.head is None else self.head(self.norm(x)).transpose(1, 2)


def pipelined(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """Return the stage of this rank."""
    return Stage(model, dist.get_rank(), dist.get_world_size())


Train = Callable[[list[Tensor], Tensor], None]


def train_of(options: argparse.Namespace, model: nn.Module) -> Train:
    """Return a function that runs forward and backward of a batch."""
    loss = loss_of(options.model)
    if options.parallelism != "pp":
        return lambda inputs, target: loss(model(*inputs), target).backward()
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("pp",)).get_group("pp")
    stage = PipelineStage(model, rank, world, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, options.micro_batches, loss_fn=loss)

    def train(inputs: list[Tensor], target: Tensor) -> None:
        given = inputs if rank == 0 else []
        schedule.step(*given, **({"target": target} if rank == world - 1 else {}))

    return train


def optimizer_of(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Make SGD, or AdamW, as a loop over parameters."""
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


PARALLEL: dict[str, Callable[[nn.Module, argparse.Namespace], nn.Module]] = {
    "ddp": replicated,
    "fsdp": fully_sharded,
    "tp": tensor_parallel,
    "pp": pipelined,
}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=("gpt", "resnet", "dlrm"))
    parser.add_argument("parallelism", choices=PARALLEL)
    parser.add_argument("--steps", type=int, default=30, help="batches of the usual size")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--block-ms", type=float, default=8.0, help="each sleeps, forward and backward")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a pipeline")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--slow-rank", type=int, default=-1, help="sleeps in its first block, forward")
    parser.add_argument("--slow-ms", type=float, default=0.0)
    parser.add_argument("--input-ms", type=float, default=0.0, help="to read a batch of the usual size")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="0 for DDP's own")
    parser.add_argument("--outputs", type=int, default=0, help="tokens of a GPT, classes of a ResNet")
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adamw"))
    parser.add_argument("--objects", type=int, default=0, help="Python objects that each step makes")
    parser.add_argument("--first", action="store_true", help="run before all other programs, as root")
    return parser.parse_args()


def main() -> None:
    """Train."""
    options = parse_arguments()
    begin(first=options.first)
    model = model_of(options, dist.get_rank())
    optimizer, train = optimizer_of(options, model), train_of(options, model)
    kept: list[list[int]] = []
    for *inputs, target in DataLoader(Samples(options), batch_size=options.batch):
        optimizer.zero_grad()
        kept[:] = [[at] for at in range(options.objects)]
        train(inputs, target)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
