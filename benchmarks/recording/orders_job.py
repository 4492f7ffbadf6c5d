"""A pipeline whose layers sleep, with its stages at work in any order that a file lists.

torchrun --nproc-per-node 4 benchmarks/recording/orders_job.py FILE [--trace FOLDER] [options of layers]

FILE has the pieces of work of each rank, in order (`benchmarks/accuracy/orders.py` makes it): their kind, and
the messages from and to other ranks. A piece may skip stages, or belong to a second copy of the model, to a
branch beside others, or to another job: the schedules of torch.distributed.pipelining do none of that.
With a folder, torch.profiler writes a trace into it, in which each piece has the range that
torch.distributed.pipelining would give it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from benchmarks.recording.pipeline_job import WIDTH, Layer, add_options

FORWARD, BACKWARD, WEIGHTS, FOREIGN = "forward", "backward", "weights", "foreign"
WARM_UP, TRACED = 3, 6  # steps


class Stage:
    """One rank's parts of the model, and its micro-batches in progress."""

    def __init__(self, options: argparse.Namespace, pieces: list[dict[str, Any]]) -> None:
        """Make the parts of the model that the pieces need."""
        self.options, self.rank = options, dist.get_rank()
        self.size = options.samples // options.micro_batches
        self.batch = torch.ones(self.size, WIDTH)
        counts = [int(each) for each in options.layers.split("/")]
        parts = sorted({(piece["chunk"], piece["place"]) for piece in pieces if "place" in piece})
        self.model = nn.ModuleDict(
            {str(chunk): nn.Sequential(*(Layer(options) for _ in range(counts[at]))) for chunk, at in parts}
        )
        self.here: dict[int, Tensor] = {}  # messages that stay on this rank, by number
        self.held: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}  # input and output of each layer
        self.left: dict[
            tuple[int, int], list[Tensor]
        ] = {}  # its gradients, where those of weights come later

    def received(self, piece: dict[str, Any]) -> list[Tensor]:
        """Return the messages of other pieces for this one."""
        found, calls = [], []
        for number, rank in piece["from"]:
            if rank == self.rank:
                found.append(self.here.pop(number))
            else:
                found.append(torch.empty(self.size, WIDTH))
                calls.append(dist.irecv(found[-1], rank, tag=number))
        for call in calls:
            call.wait()
        return found

    def work(self, piece: dict[str, Any], given: list[Tensor]) -> Tensor | None:
        """Do a piece; return its message for others, if any."""
        kind, key = piece["kind"], (piece.get("chunk", 0), piece.get("batch", 0))
        if kind == FOREIGN:
            time.sleep(piece["ms"] / 1e3)
            return None
        layers = list(self.model[str(key[0])])
        if kind == FORWARD:
            return self.forward(key, layers, sum(given[1:], given[0]) if given else None)
        if kind == WEIGHTS:
            for layer, (_, y), gradient in zip(layers, self.held.pop(key), self.left.pop(key)):
                torch.autograd.backward(y, gradient, inputs=list(layer.parameters()))
            return None
        return self.backward(key, piece["apart"], sum(given[1:], given[0]))

    def forward(self, key: tuple[int, int], layers: list[nn.Module], given: Tensor | None) -> Tensor:
        """Run layers one by one, so that their gradients can be separate; the input batch needs none."""
        x = self.batch if given is None else given.requires_grad_()
        held = self.held[key] = []
        for layer in layers:
            held.append((x, layer(x)))
            x = held[-1][1].detach().requires_grad_()
        return x.detach()

    def backward(self, key: tuple[int, int], apart: bool, gradient: Tensor | None) -> Tensor | None:
        """Compute all gradients, or those of inputs alone; return that of the input."""
        gradients = []
        for x, y in reversed(self.held[key]):
            gradients.append(gradient)
            if not apart:
                torch.autograd.backward(y, gradient)
            elif x.requires_grad:
                torch.autograd.backward(y, gradient, inputs=[x], retain_graph=True)
            gradient = x.grad
        if apart:
            self.left[key] = gradients[::-1]
        else:
            del self.held[key]
        return gradient

    def hand_on(self, piece: dict[str, Any], made: Tensor | None) -> list[Any]:
        """Pass the result to the pieces that need it; return the sends in progress."""
        calls: list[Any] = []
        if made is None:
            return calls
        for number, rank in piece["to"]:
            if rank == self.rank:
                self.here[number] = made
            else:
                calls.append(dist.isend(made.contiguous(), rank, tag=number))
        return calls

    def step(self, pieces: list[dict[str, Any]]) -> None:
        """Do all pieces of a step; those of one group wait for the inputs of all, and send together."""
        calls: list[Any] = []
        for _, together in groupby(pieces, key=lambda piece: piece["group"]):
            group = list(together)
            given = [self.received(piece) for piece in group]
            made = []
            for piece, tensors in zip(group, given):
                with record_function(piece["range"]) if piece["range"] else nullcontext():
                    made.append(self.work(piece, tensors))
            for piece, tensor in zip(group, made):
                calls += self.hand_on(piece, tensor)
        for call in calls:
            call.wait()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--trace", type=Path)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.first:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    pieces = json.loads(options.file.read_text())[dist.get_rank()]
    stage = Stage(options, pieces)
    optimizer = torch.optim.SGD(stage.model.parameters(), lr=1e-6)
    traced = (
        profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(skip_first=WARM_UP - 1, wait=0, warmup=1, active=TRACED, repeat=1),
            on_trace_ready=lambda it: it.export_chrome_trace(f"{options.trace}/rank{stage.rank}.json"),
            record_shapes=True,
        )
        if options.trace
        else nullcontext()
    )
    with traced as profiler:
        for _ in range(options.steps):
            optimizer.zero_grad()
            stage.step(pieces)
            optimizer.step()
            if profiler is not None:
                profiler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
