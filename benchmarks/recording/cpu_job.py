"""A small training job on the CPU whose work is known; other programs here record it.

torchrun --nproc-per-node 2 benchmarks/recording/cpu_job.py KIND [--steps 30] [--layer-ms 5] …

Its layers compute a little and then sleep (or multiply matrices a fixed number of times) for a given time,
forward and backward: sleeping leaves the cores free, so that more ranks than cores take the time they should.
Each option is one change that can be made to a job; another value of the option makes its twin. The job does
not depend on dpro.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

from benchmarks.recording.exchanges import ByPriority, reduce_a_step_late, reduce_after_backward

BATCH = 8
Train = Callable[[Tensor], None]
EXCHANGES = {"after": reduce_after_backward, "late": reduce_a_step_late}


class Sleep(torch.autograd.Function):
    """Computation on a separate device, as the host that waits for it sees it."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        """Sleep; a tensor is saved as by most operations, so that recomputing a block sleeps again."""
        context.seconds = seconds
        context.save_for_backward(x)
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sleep as long again."""
        time.sleep(context.seconds)
        return gradient, None


class Multiply(torch.autograd.Function):
    """A fixed number of matrix products, forward and backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, times: int) -> Tensor:
        """Multiply this many times."""
        context.times = times
        multiply(times)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Multiply as often again."""
        multiply(context.times)
        return gradient, None


class Late(torch.autograd.Function):
    """Work of only some ranks, or only in some steps."""

    @staticmethod
    def forward(context: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """Sleep."""
        context.seconds = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Sleep for a separate time."""
        time.sleep(context.seconds)
        return gradient, None, None


def multiply(times: int) -> None:
    """Multiply matrices; about 0.2 ms each time."""
    matrix = torch.ones(160, 160)
    for _ in range(times):
        torch.mm(matrix, matrix)


class Layer(nn.Module):
    """A linear layer that takes a known time."""

    def __init__(self, options: argparse.Namespace, index: int) -> None:
        """Make number `index` of the model's layers."""
        super().__init__()
        self.linear = nn.Linear(options.width, options.width)
        self.seconds = options.layer_ms / 1e3
        if index == options.layers - 1:
            self.seconds += options.last_layer_ms / 1e3
        self.times = options.products
        self.late_s: tuple[float, float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Compute, then take the time."""
        x = self.linear(x)
        if self.seconds:
            x = Sleep.apply(x, self.seconds)
        if self.times:
            x = Multiply.apply(x, self.times)
        if self.late_s:
            x = Late.apply(x, *self.late_s)
        return torch.relu(x)


class Samples(Dataset[Tensor]):
    """Samples from a disk of a given speed; reading the first of a batch takes the time of all."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Make as many samples as the steps need."""
        self.options = options

    def __len__(self) -> int:
        """Return the number of samples in all steps."""
        return BATCH * self.options.steps

    def __getitem__(self, index: int) -> Tensor:
        """Read a sample."""
        if index % BATCH == 0:
            time.sleep(self.options.input_ms / 1e3)
        return torch.ones(self.options.width)


def layers_of(options: argparse.Namespace, rank: int) -> nn.Sequential:
    """Make the model; the first layer of every rank has the operation in which the slow one is late."""
    layers = [Layer(options, i) for i in range(options.layers)]
    layers[0].times += options.slow_products if rank == options.slow_rank else 0
    layers[0].late_s = (options.slow_ms / 1e3 if rank == options.slow_rank else 0.0, 0.0)
    return nn.Sequential(*layers)


def data_parallel(options: argparse.Namespace, rank: int, world: int) -> tuple[nn.Module, Train]:
    """Make DDP, with gradient accumulation and a logged, averaged loss where they are asked for."""
    model = DistributedDataParallel(
        layers_of(options, rank), bucket_cap_mb=options.bucket_mb, static_graph=options.static_graph
    )
    if options.hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif options.hook in EXCHANGES:
        EXCHANGES[options.hook](model)
    elif options.hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if options.local_updates:
        return average_seldom(model, options.local_updates)

    def train(batch: Tensor) -> None:
        for part in range(options.accumulate):
            last = part == options.accumulate - 1
            without: AbstractContextManager[None] = nullcontext() if last else model.no_sync()
            with without:
                loss = model(batch).sum()
                with record_function("log"):
                    if options.average_loss:
                        dist.all_reduce(loss.detach().clone())
                loss.backward()

    return model, train


def average_seldom(model: DistributedDataParallel, every: int) -> tuple[nn.Module, Train]:
    """Train without exchanging gradients; once per this many steps, average the parameters."""
    averager = PeriodicModelAverager(period=every, warmup_steps=0)

    def train(batch: Tensor) -> None:
        with model.no_sync():
            model(batch).sum().backward()
        averager.average_parameters(model.parameters())

    return model, train


def by_priority(options: argparse.Namespace, rank: int, world: int) -> tuple[nn.Module, Train]:
    """Exchange the gradients of each layer separately, those first that the next step needs first; no DDP."""
    model = layers_of(options, rank)
    exchange = ByPriority(model, options.steps)

    def train(batch: Tensor) -> None:
        model(batch).sum().backward()
        exchange.end_of_step()

    return model, train


def uneven(options: argparse.Namespace, rank: int, world: int) -> tuple[nn.Module, Train]:
    """Make DDP with ranks that alternately have more to do forward in one step, and backward in the next."""
    model, train_evenly = data_parallel(options, rank, world)
    first: Layer = model.module[0]
    steps = iter(range(1 << 30))

    def train(batch: Tensor) -> None:
        step = next(steps)
        late_s = options.uneven_ms / 1e3 * (1 + step % 3)
        first.late_s = (0.0, late_s) if (step + rank) % 2 else (late_s, 0.0)
        train_evenly(batch)

    return model, train


def fully_sharded(options: argparse.Namespace, rank: int, world: int) -> tuple[nn.Module, Train]:
    """Make FSDP2, layer by layer."""
    model = layers_of(options, rank)
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if options.prefetch:
        model._set_unshard_async_op(True)  # otherwise a call on the CPU waits for its result
        layers = list(model)
        for at, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 1 + options.prefetch])
            layer.set_modules_to_backward_prefetch(layers[max(at - 1 - options.prefetch, 0) : at][::-1])
    return model, lambda batch: model(batch).sum().backward()


def tensor_parallel(options: argparse.Namespace, rank: int, world: int) -> tuple[nn.Module, Train]:
    """Split each layer's matrix over the ranks, alternately by column and by row."""
    model = layers_of(options, rank)
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    styles = (ColwiseParallel, RowwiseParallel)
    plan = {f"{i}.linear": styles[i % 2]() for i in range(options.layers)}
    parallelize_module(model, mesh, plan)
    return model, lambda batch: model(batch).sum().backward()


def pipelined(options: argparse.Namespace, rank: int, world: int) -> tuple[nn.Module, Train]:
    """Make one stage per rank, run one-forward-one-backward (1F1B)."""
    model = layers_of(options, rank)
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
    stage = PipelineStage(model, rank, world, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, options.micro_batches, loss_fn=nn.functional.mse_loss)

    def train(batch: Tensor) -> None:
        if rank == 0:
            schedule.step(batch)
        elif rank == world - 1:
            schedule.step(target=batch)
        else:
            schedule.step()

    return model, train


def optimizer_of(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Make SGD, or AdamW in one of its implementations."""
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-6)
    ways = {"foreach": options.optimizer == "foreach", "fused": options.optimizer == "fused"}
    return torch.optim.AdamW(model.parameters(), lr=1e-6, **ways)


KINDS = {
    "ddp": data_parallel,
    "priority": by_priority,
    "uneven": uneven,
    "fsdp": fully_sharded,
    "tp": tensor_parallel,
    "pipeline": pipelined,
}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4, help="per pipeline stage")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layer-ms", type=float, default=8.0, help="each layer sleeps forward and backward")
    parser.add_argument("--last-layer-ms", type=float, default=0.0, help="more in the last layer")
    parser.add_argument("--products", type=int, default=0, help="matrix products per layer and direction")
    parser.add_argument("--slow-rank", type=int, default=-1, help="sleeps in its first layer, forward")
    parser.add_argument("--slow-ms", type=float, default=0.0)
    parser.add_argument(
        "--slow-products", type=int, default=0, help="matrix products that the slow rank has more"
    )
    parser.add_argument("--input-ms", type=float, default=0.0, help="to read a batch")
    parser.add_argument("--update-ms", type=float, default=0.0, help="the optimizer sleeps")
    parser.add_argument("--uneven-ms", type=float, default=10.0, help="unit of uneven work")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--static-graph", action="store_true")
    parser.add_argument("--hook", default="", choices=("", "fp16", "powersgd", *EXCHANGES))
    parser.add_argument("--local-updates", type=int, default=0, help="steps between averages of parameters")
    parser.add_argument("--prefetch", type=int, default=0, help="layers that FSDP gathers ahead")
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader")
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adamw", "foreach", "fused"))
    parser.add_argument(
        "--accumulate", type=int, default=1, help="micro-batches per update, without pipeline"
    )
    parser.add_argument("--micro-batches", type=int, default=4, help="of a pipeline")
    parser.add_argument("--average-loss", action="store_true", help="over the ranks in each step")
    parser.add_argument("--first", action="store_true", help="run before all other programs (root)")
    return parser.parse_args()


def begin(*, first: bool) -> None:
    """Join the job, on one thread and with a fixed seed; `first` runs it before other programs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if first:  # the threads that this one starts inherit it
        with suppress(PermissionError):  # only root may
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")


def main() -> None:
    """Train."""
    options = parse_arguments()
    begin(first=options.first)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, train = KINDS[options.kind](options, rank, world)
    optimizer = optimizer_of(options, model)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(options.update_ms / 1e3))
    for batch in DataLoader(Samples(options), batch_size=BATCH, num_workers=options.workers):
        optimizer.zero_grad()
        train(batch)
        optimizer.step()
    dist.barrier()  # some hooks still reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
