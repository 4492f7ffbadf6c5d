"""A real job of pipelines with data parallelism on gloo in which one rank goes wrong at a step.

Run by torchrun, or by itself with `--spawn N`. Stages are DDP modules; each step ends with an all-reduce over
the whole job. With `--flat` there is data parallelism alone.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, AT = 12, 9
WIDTH = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault")
    parser.add_argument("mark", type=Path, help="made at the moment the rank goes wrong")
    parser.add_argument("--rank", type=int, nargs="+", default=[2])
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--spawn", type=int, default=0)
    options = parser.parse_args()
    if options.spawn:
        import torch.multiprocessing

        torch.multiprocessing.spawn(spawned, (options,), nprocs=options.spawn)
    else:
        run(options)


def spawned(rank: int, options: argparse.Namespace) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(options.spawn),
        "MASTER_ADDR": "127.0.0.1",
    }
    run(options)


def run(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = 1 if options.flat else 2
    stage, replica = rank % stages, rank // stages
    groups = [dist.new_group(list(range(each, size, stages))) for each in range(stages)]
    pipelines = [dist.new_group(list(range(first, first + stages))) for first in range(0, size, stages)]
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH), process_group=groups[stage])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        wrong = step == AT and rank in options.rank
        if wrong:
            options.mark.touch()
            if options.fault == "leave":  # as a loop over fewer batches does
                break
            go_wrong(options.fault, rank, groups[stage])
        if step == AT and options.fault == "deadlock" and rank // 2 == options.rank[0] // 2:
            dist.recv(torch.ones(3), rank ^ 1)
        optimizer.zero_grad()
        inputs = torch.ones(4, WIDTH, requires_grad=True)
        if stages == 2:
            peer = rank + 1 if stage == 0 else rank - 1
            pass_on(model, inputs, stage, peer, pipelines[replica])
        else:
            model(inputs).sum().backward()
        order = [("all_reduce", torch.ones(5)), ("broadcast", torch.ones(7))]
        if wrong and options.fault == "order":
            order.reverse()
        for op, tensor in order:
            if wrong and options.fault == "skip" and op == "all_reduce":
                continue
            dist.all_reduce(tensor) if op == "all_reduce" else dist.broadcast(tensor, 0)
        optimizer.step()
        time.sleep(0.02)
    dist.destroy_process_group()


def pass_on(model: torch.nn.Module, inputs: torch.Tensor, stage: int, peer: int, group: object) -> None:
    """One micro-batch through the pipeline and back."""
    if stage == 0:
        output = model(inputs)
        dist.send(output.detach(), peer, group=group)
        gradient = torch.empty_like(output)
        dist.recv(gradient, peer, group=group)
        output.backward(gradient)
        return
    received = torch.empty(4, WIDTH)
    dist.recv(received, peer, group=group)
    received.requires_grad_()
    model(received).sum().backward()
    dist.send(received.grad, peer, group=group)


def go_wrong(fault: str, rank: int, group: object) -> None:
    if fault == "sleep":
        time.sleep(1000)
    elif fault == "compute":
        while True:
            sum(range(1000))
    elif fault == "group":  # by one of its members alone
        dist.new_group([rank, (rank + 1) % dist.get_world_size()])
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        raise RuntimeError("something of the user's")
    elif fault == "exit":
        sys.exit(0)
    elif fault == "gil":
        ctypes.PyDLL(None).sleep(1000)  # unlike CDLL, PyDLL keeps the interpreter's lock
    elif fault == "size":
        dist.all_reduce(torch.ones(2), group=group)
    elif fault == "dtype":
        dist.all_reduce(torch.ones(WIDTH * (WIDTH + 1), dtype=torch.int8), group=group)


if __name__ == "__main__":
    sys.exit(main())
