"""A pipeline whose layers sleep: any schedule of torch.distributed.pipelining, any numbers of layers.

A layer sleeps forward, for the gradients of its input, and for those of its weights; each time is that of a
sample times the samples of the micro-batch. Run by torchrun, one stage per rank.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "looped-bfs": "ScheduleLoopedBFS",
    "dualpipev": "ScheduleDualPipeV",
}
SINGLE, V_SHAPED = ("gpipe", "1f1b"), ("zbv", "dualpipev")
WIDTH = 64


class Sleep(torch.autograd.Function):
    """Takes time in both directions."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: Tensor, there: float, back: float) -> Tensor:
        """Sleep, and pass the value on."""
        ctx.back = back
        time.sleep(there)
        return value.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Sleep, and pass the gradient on."""
        time.sleep(ctx.back)
        return gradients[0], None, None


class Layer(nn.Module):
    """Sleeps forward, backward for its input, and backward for its weight, which is a separate branch."""

    def __init__(self, options: argparse.Namespace, more_ms: float = 0.0) -> None:
        """Take the times of the options, and `more_ms` more for each of the three."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.there, self.back, self.apart = (
            (ms + more_ms) / 1e3 for ms in (options.forward_ms, options.inputs_ms, options.weights_ms)
        )

    def forward(self, value: Tensor) -> Tensor:
        """Return the value plus the weight."""
        count = value.shape[0]
        passed = Sleep.apply(value, count * self.there, count * self.back)
        weight = Sleep.apply(self.weight, 0.0, count * self.apart)
        sum_: Tensor = passed + weight
        return sum_


def chunks_of(options: argparse.Namespace, rank: int, world: int) -> dict[int, nn.Module]:
    """Make the chunks of the model on a rank, by their place in it."""
    counts = [int(each) for each in options.layers.split("/")]
    every = sum(counts)
    chunks = 1 if options.schedule in SINGLE else options.chunks
    if chunks > 1:
        counts = [every // (world * chunks)] * world * chunks
    ends = list(accumulate(counts))
    places = [rank + world * chunk for chunk in range(chunks)]
    if options.schedule in V_SHAPED:
        places = [rank, 2 * world - 1 - rank]
    found: dict[int, nn.Module] = {}
    for place in places:
        numbers = range(ends[place] - counts[place], ends[place])
        more = [options.loss_ms if number == every - 1 else 0.0 for number in numbers]
        found[place] = nn.Sequential(*(Layer(options, ms) for ms in more))
    return found


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("schedule", choices=SCHEDULES)
    parser.add_argument("--chunks", type=int, default=2, help="of each stage, where the schedule has several")
    add_options(parser)
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of layers: their times and numbers."""
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--layers", default="2/2/2/2", help="of each stage; of chunks as many each")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="of a step")
    parser.add_argument("--forward-ms", type=float, default=10.0, help="of a layer and sample")
    parser.add_argument("--inputs-ms", type=float, default=10.0)
    parser.add_argument("--weights-ms", type=float, default=10.0)
    parser.add_argument("--loss-ms", type=float, default=0.0, help="more in each of the last layer's three")
    parser.add_argument("--first", action="store_true", help="run before all other programs (root)")


def main() -> None:
    """Train."""
    options = parse_arguments()
    torch.set_num_threads(1)
    if options.first:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
    chunks = chunks_of(options, rank, world)
    places = world * len(chunks)
    stages = [
        PipelineStage(chunk, place, places, torch.device("cpu"), group=mesh.get_group("pp"))
        for place, chunk in chunks.items()
    ]
    made = getattr(pipelining, SCHEDULES[options.schedule], None) or getattr(
        pipelining.schedules, SCHEDULES[options.schedule]
    )
    single = options.schedule in SINGLE
    schedule = made(stages[0] if single else stages, options.micro_batches, loss_fn=nn.functional.mse_loss)
    model = nn.ModuleList(chunks.values())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.ones(options.samples, WIDTH)
    for _ in range(options.steps):
        optimizer.zero_grad()
        inputs = (batch,) if 0 in chunks else ()
        target = {"target": batch} if places - 1 in chunks else {}
        schedule.step(*inputs, **target)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
