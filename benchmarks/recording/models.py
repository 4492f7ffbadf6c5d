"""Small real models: a GPT, a convolutional network with residuals, and a recommendation model (DLRM).

In: sizes, and how long a block takes. Out: modules with the layers, parameters, buffers and messages of their
kind. Each block computes, and then sleeps for a time that grows with the batch, forward and backward: the
time of a separate device, while real tensors pass. With a time of 0 it only computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recording.cpu_job import Late, Sleep

BATCH = 8
VOCABULARY, LENGTH, CLASSES = 512, 16, 100
DENSE, TABLES, ROWS = 16, 8, 500


class Pace(nn.Module):
    """The time of a block for a batch; on one rank it may be late."""

    def __init__(self, block_ms: float, late_ms: float = 0.0) -> None:
        """Take `block_ms` for a batch of `BATCH` samples, forward and again backward."""
        super().__init__()
        self.seconds = block_ms / 1e3 / BATCH
        self.late_s = late_ms / 1e3

    def forward(self, x: Tensor, samples: int) -> Tensor:
        """Take the time for this many samples."""
        if self.seconds:
            x = Sleep.apply(x, self.seconds * samples)
        return Late.apply(x, self.late_s, 0.0) if self.late_s else x


class Block(nn.Module):
    """A block of a transformer: causal attention and a feed-forward network, each with a norm before it."""

    def __init__(self, width: int, heads: int, pace: Pace) -> None:
        """Make a block; heads share the width."""
        super().__init__()
        self.head_width = width // heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.pace = pace

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, W] to [B, T, W]; with split matrices a rank has some of the heads."""
        normed = self.before_attention(x)
        q, k, v = (
            part(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(functional.gelu(self.up(self.before_network(x))))
        return self.pace(x, len(x))


class Gpt(nn.Module):
    """A GPT: tokens to the next token's logits."""

    def __init__(self, paces: list[Pace], width: int, vocabulary: int = VOCABULARY) -> None:
        """Make one block for each pace; samples have the first `VOCABULARY` tokens only."""
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, 4, pace) for pace in paces))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [B, T] to [B, V, T]."""
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH))
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


class Residual(nn.Module):
    """Two convolutions with batch norms, and a shortcut around them."""

    def __init__(self, channels: int, wider: int, pace: Pace) -> None:
        """Halve height and width, and change the number of channels."""
        super().__init__()
        self.first = nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wider) for _ in range(2))
        self.around = nn.Conv2d(channels, wider, 1, stride=2, bias=False)
        self.pace = pace

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, D, H/2, W/2]."""
        straight = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        return self.pace(torch.relu(straight + self.around(x)), len(x))


class ResNet(nn.Module):
    """A ResNet: images of 3 x 16 x 16 to classes."""

    def __init__(self, paces: list[Pace], width: int, classes: int = CLASSES) -> None:
        """Make one block for each pace; the last has `width` channels, each before it half of that, or 16."""
        super().__init__()
        channels = [max(width >> at, 16) for at in range(len(paces), -1, -1)]
        self.stem = nn.Conv2d(3, channels[0], 3, padding=1)
        self.blocks = nn.Sequential(*map(Residual, channels, channels[1:], paces))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map [B, 3, 16, 16] to [B, C]."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Exchange(torch.autograd.Function):
    """Every rank sends each other one its part: forward values, and backward their gradients."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        """Map [R, …] to [R, …]: row r comes from rank r."""
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        """Send the gradients back by the same exchange."""
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient.contiguous())
        return received


class Perceptron(nn.Module):
    """A layer of a multi-layer perceptron."""

    def __init__(self, inputs: int, width: int, pace: Pace) -> None:
        """Make a linear layer, followed by ReLU."""
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.pace = pace

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, I] to [B, W]."""
        return self.pace(torch.relu(self.linear(x)), len(x))


class Dense(nn.Module):
    """The replicated part of a DLRM: an MLP for numbers, products with the embeddings, another MLP."""

    def __init__(self, paces: list[Pace], width: int) -> None:
        """Put the first half of the paces below the products."""
        super().__init__()
        half = len(paces) // 2
        below = [DENSE, *[width] * half]
        above = [width + TABLES, *[2 * width] * (len(paces) - half)]
        self.below = nn.Sequential(*map(Perceptron, below, below[1:], paces[:half]))
        self.above = nn.Sequential(*map(Perceptron, above, above[1:], paces[half:]))
        self.head = nn.Linear(above[-1], 1)

    def forward(self, numbers: Tensor, embedded: Tensor) -> Tensor:
        """Map [B, D] and [B, T, W] to [B]."""
        x = self.below(numbers)
        products = (embedded @ x.unsqueeze(-1)).squeeze(-1)
        return self.head(self.above(torch.cat([x, products], 1))).squeeze(1)


class Dlrm(nn.Module):
    """Tables of embeddings split over the ranks, which exchange their rows; the rest under DDP."""

    def __init__(self, dense: nn.Module, width: int, world: int) -> None:
        """Make this rank's share of `TABLES` tables."""
        super().__init__()
        self.mine = nn.ModuleList(nn.Embedding(ROWS, width) for _ in range(TABLES // world))
        self.dense = dense
        self.world = world

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Map [B, D] and [B, T], the rows that this rank's samples need, to [B]."""
        wanted = rows.unflatten(1, (self.world, -1)).transpose(0, 1)
        asked = Exchange.apply(wanted).flatten(0, 1)
        found = torch.stack([table(asked[:, at]) for at, table in enumerate(self.mine)], 1)
        embedded = Exchange.apply(found.unflatten(0, (self.world, -1)))
        return self.dense(numbers, embedded.transpose(0, 1).flatten(1, 2))


def recommendation(paces: list[Pace], width: int, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Make a DLRM whose dense part is wrapped, usually by DDP."""
    return Dlrm(wrap(Dense(paces, width)), width, dist.get_world_size())


def sample_of(model: str) -> tuple[Tensor, ...]:
    """Draw a training sample of a model: inputs, and last the target."""
    if model == "gpt":
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,))
        return tokens[:-1], tokens[1:]
    if model == "resnet":
        return torch.randn(3, 16, 16), torch.randint(CLASSES, ())
    return torch.randn(DENSE), torch.randint(ROWS, (TABLES,)), torch.rand(())


def loss_of(model: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of a model."""
    return functional.binary_cross_entropy_with_logits if model == "dlrm" else functional.cross_entropy


def data_parallel(bucket_mb: float) -> Callable[[nn.Module], nn.Module]:
    """Return a wrapper in DDP with buckets of a size; 0 for DDP's own, whose first one is smaller."""
    return lambda module: DistributedDataParallel(module, bucket_cap_mb=bucket_mb or None)
