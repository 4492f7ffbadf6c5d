"""A training job on one GPU, or on the CPU when tiny, that times itself.

python train.py MODEL [--device cuda] [--steps 150] [--tiny] …

It prints one line of JSON at the end: milliseconds per step by events that it records itself on the GPU, and
by the host's clock. With --switch-every it alternately turns the recorder of its process off and on; with
--probes it times each of the recorder's actions. MODEL is one of gpt, resnet, embeddings and small, which
launches many kernels and computes little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.by_hand import profiled_by_hand
from benchmarks.recorder_cost import recorder_switch, step_times_by_turn, timed_actions


class Attention(nn.Module):
    """A transformer block: causal self-attention and a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        """Make a block; the number of heads divides the width."""
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        batch, length, width = x.shape
        parts = self.inner(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outer(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """A small language model."""

    def __init__(self, layers: int, width: int, heads: int, length: int, words: int) -> None:
        """Make a model of this size."""
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Attention(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each next token."""
        x = self.words(tokens[:, :-1])
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        """Make a block with these numbers of channels."""
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.short = short if before != after or stride != 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add the convolutions and the shortcut."""
        return functional.relu(self.way(x) + self.short(x))


class ResNet(nn.Module):
    """A ResNet; of eighteen layers for four widths."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        """Make a model with these widths."""
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        blocks = []
        for before, after in zip((widths[0], *widths), widths):
            blocks += [Residual(before, after, 1 + (before != after)), Residual(after, after, 1)]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return a loss."""
        scores = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return functional.cross_entropy(
            scores, torch.zeros(len(images), dtype=torch.long, device=images.device)
        )


class Embeddings(nn.Module):
    """Large tables with few used rows, and a small network behind them."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        """Make tables of this size."""
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * width, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, places: Tensor) -> Tensor:
        """Return a loss."""
        found = [table(places[:, number]) for number, table in enumerate(self.tables)]
        return functional.softplus(self.top(torch.cat(found, 1))).mean()


class Small(nn.Module):
    """Many layers with little work each."""

    def __init__(self, layers: int) -> None:
        """Make this many layers."""
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        return self.layers(x).square().mean()


class Samples(Dataset[Tensor]):
    """Samples that each take some host time, as decoding does."""

    def __init__(self, make: Callable[[], Tensor], count: int, work: int) -> None:
        """Make this many samples, each with `work` rounds of sorting."""
        self.make, self.count, self.work = make, count, work

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def __getitem__(self, _: int) -> Tensor:
        """Make one sample."""
        for _again in range(self.work):
            sorted(range(2000), key=lambda value: -value)
        return self.make()


def model_and_sample(options: argparse.Namespace) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the model, and a function that makes one sample for it."""
    tiny = options.tiny
    if options.model == "gpt":
        length, words = (16, 64) if tiny else (options.length, 50304)
        layers = 2 if tiny else options.layers
        width, heads = (16, 2) if tiny else (768, 12)
        model: nn.Module = Gpt(layers, width, heads, length, words)
        return model, lambda: torch.randint(words, (length + 1,))
    if options.model == "resnet":
        model = ResNet((8, 16) if tiny else (64, 128, 256, 512), 10)
        side = 32 if tiny else 224
        return model.to(memory_format=torch.channels_last), lambda: torch.rand(3, side, side)
    if options.model == "embeddings":
        tables, rows = (2, 100) if tiny else (16, 100_000)
        return Embeddings(tables, rows, 8 if tiny else 64), lambda: torch.randint(rows, (tables, 20))
    return Small(4 if tiny else 60), lambda: torch.ones(64)


def batches(options: argparse.Namespace, make: Callable[[], Tensor]) -> Iterator[Tensor]:
    """Yield batches on the device, without end."""
    size = 2 if options.tiny else options.batch
    if not options.loader:
        fixed = torch.stack([make() for _ in range(size)]).to(options.device)
        while True:
            yield fixed
    samples = Samples(make, size * (options.steps + 1), 0 if options.tiny else options.sample_work)
    while True:
        for batch in DataLoader(samples, size, num_workers=options.workers):
            yield batch.to(options.device, non_blocking=True)


class Clock:
    """Records the ends of steps, on the GPU and on the host."""

    def __init__(self, device: str) -> None:
        """Begin before the first step."""
        self.on_gpu, self.events, self.ends_s = device == "cuda", [], []

    def tick(self) -> None:
        """Record the end of a step on the host; on the GPU it may not have begun."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
        self.ends_s.append(time.perf_counter())

    def steps_ms(self) -> list[float]:
        """Return ms from the end of each step to that of the next, on the GPU if there is one."""
        if self.on_gpu:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in pairwise(self.events)]
        return [1e3 * (end - begin) for begin, end in pairwise(self.ends_s)]

    def figures(self, skip: int) -> dict[str, float]:
        """Return ms per step, without the first ones: by events, and by the host's clock until idle."""
        if self.on_gpu:
            torch.cuda.synchronize()
        idle_s = time.perf_counter()
        host = [1e3 * (end - begin) for begin, end in pairwise(self.ends_s[skip:])]
        gpu = self.steps_ms()[skip:]
        return {
            "event_mean_ms": statistics.fmean(gpu),
            "event_median_ms": statistics.median(gpu),
            "host_median_ms": statistics.median(host),
            "wall_mean_ms": 1e3 * (idle_s - self.ends_s[skip]) / (len(self.ends_s) - skip - 1),
            "steps": len(gpu),
        }


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the times of steps."""
    torch.manual_seed(0)
    kept = [{"number": number, "list": [number]} for number in range(options.objects)]
    model, make = model_and_sample(options)
    model = model.to(options.device)
    channels_last = options.model == "resnet"
    compiled = {"compile": {}, "reduce-overhead": {"mode": "reduce-overhead"}}.get(options.compile)
    called = torch.compile(model, **compiled) if compiled is not None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if options.fused else None)
    clock, end_step = Clock(options.device), profiled_by_hand() if options.by_hand else None
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    if options.bf16:
        precision = lambda: torch.autocast(options.device, torch.bfloat16)  # noqa: E731
    us_per_step = timed_actions() if options.probes else None
    while options.turn and not options.turn.exists():
        time.sleep(0.01)
    turns, switch = options.switch_every, recorder_switch() if options.switch_every else None
    for number, batch in zip(range(options.steps), batches(options, make)):
        if switch is not None and number % turns == 0:
            switch(number // turns % 2 == 1)
        if channels_last:
            batch = batch.to(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        with precision():
            loss = called(batch)
        loss.backward()
        optimizer.step()
        if options.objects:
            kept += [{"number": each, "list": [each]} for each in range(2000)]
        if options.item_every and not number % options.item_every:
            loss.item()
        if end_step is not None:
            end_step()
        clock.tick()
    own = step_times_by_turn(clock.steps_ms(), turns) if turns else {}
    if us_per_step is not None:
        own["probes_us"] = us_per_step(options.steps)
    return clock.figures(min(options.skip, options.steps // 3)) | {"objects": len(kept), **own}


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=("gpt", "resnet", "embeddings", "small"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--skip", type=int, default=10, help="steps at the beginning that are not timed")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--compile", choices=("compile", "reduce-overhead"))
    parser.add_argument("--loader", action="store_true", help="batches from a DataLoader")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--sample-work", type=int, default=0, help="rounds of 0.1 ms of the host per sample")
    parser.add_argument("--item-every", type=int, default=0, help="steps from one .item() to the next")
    parser.add_argument("--objects", type=int, default=0, help="that the script keeps, for the collector")
    parser.add_argument("--by-hand", action="store_true", help="torch.profiler where windows would be")
    parser.add_argument(
        "--switch-every", type=int, default=0, help="steps for which the recorder is off, then on"
    )
    parser.add_argument("--turn", type=Path, help="train once this file exists, and not before")
    parser.add_argument("--probes", action="store_true", help="time each action of the recorder")
    figures = train(parser.parse_args())
    print(json.dumps(figures))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
