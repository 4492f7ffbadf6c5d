"""Train a small transformer on made-up text: an ordinary data-parallel script, which does not import dpro.

python train.py
torchrun --nproc-per-node 2 train.py --slow-rank 1 --slow-ms 1
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, LENGTH, WIDTH, LAYERS, BATCH = 256, 64, 128, 4, 8


class Text(Dataset[Tensor]):
    """Sequences in which every token follows from the one before, read from a disk of a given speed."""

    def __init__(self, size: int, seed: int, read_ms: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(VOCABULARY, (size, 1), generator=generator)
        stride = torch.randint(1, 4, (size, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
        self.read_ms = read_ms

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.read_ms / 1000)
        return self.tokens[index]


class LanguageModel(nn.Module):
    """A causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens), mask=self.mask, is_causal=True))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--slow-rank", type=int, default=-1, metavar="R", help="rank whose shard is on a slow disk"
    )
    parser.add_argument(
        "--slow-ms", type=float, default=0.0, metavar="MS", help="milliseconds per sample there"
    )
    parser.add_argument(
        "--slow-input-ms", type=float, default=0.0, metavar="MS", help="milliseconds per sample, all ranks"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    read_ms = arguments.slow_input_ms + (arguments.slow_ms if rank == arguments.slow_rank else 0.0)
    text = Text(BATCH * world_size * arguments.steps, arguments.seed, read_ms)
    loader = DataLoader(text, batch_size=BATCH, sampler=DistributedSampler(text, world_size, rank))
    model: nn.Module = LanguageModel()
    if distributed:
        model = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step, tokens in enumerate(loader):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)

    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
