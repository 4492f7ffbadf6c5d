"""What matmuls ask of a GPU: one side of a roofline; the other, what the GPU can do, is in `gpus.py`.

In: names of kernels, shapes of operators. Out: floating-point operations and elements of matmuls and
convolutions, and the time that they take at least. The model is that of Williams, Waterman and Patterson,
"Roofline: An Insightful Visual Performance Model", CACM 2009: time >= max(operations / peak, bytes /
bandwidth).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from dpro.replay.models.gpus import GpuModel

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Matmul:
    """What one operator asks for: floating-point operations, elements it reads, elements it writes."""

    operations: float
    read: float
    written: float

    def least_ns(self, gpu: GpuModel, dtype: str) -> float:
        """The time that no implementation on that GPU goes below, ns.

        Args:
            dtype: of what is multiplied, a key of `BYTES`.
        """
        return max(self.compute_ns(gpu, dtype), (self.read + self.written) * BYTES[dtype] / gpu.gbps)

    def compute_ns(self, gpu: GpuModel, dtype: str) -> float:
        """The part of it that the arithmetic needs.

        Args:
            dtype: of what is multiplied, a key of `BYTES`.
        """
        return self.operations / gpu.tflops[dtype] / 1e3


@cache
def matmul_of(name: str, shapes: str) -> Matmul | None:
    """What a matmul or convolution asks for, by its input shapes; None for other operators, or odd shapes.

    A forward convolution counts at stride 1: its output is not among the shapes.

    Args:
        shapes: as in the `spans` table.
    """
    count = _MATMULS.get(name)
    if count is None:
        return None
    try:
        return count([shape for shape in json.loads(shapes) if isinstance(shape, list)])
    except (ValueError, IndexError, TypeError):
        return None


@cache
def product_of(name: str, shapes: str) -> tuple[float, float, float, float] | None:
    """Batch, m, n and k of a matrix product, m × k by k × n; None for other operators, or odd shapes.

    Args:
        shapes: as in the `spans` table.
    """
    if name not in _FACTORS or matmul_of(name, shapes) is None:
        return None
    first = _FACTORS[name]
    left, right = [shape for shape in json.loads(shapes) if isinstance(shape, list)][first : first + 2]
    *batch, rows, inner = left
    return float(prod(batch)), float(rows), float(right[-1]), float(inner)


# Which input is the left factor.
_FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::_scaled_mm": 0} | dict.fromkeys(
    ("aten::addmm", "aten::baddbmm", "aten::_addmm_activation"), 1
)


def _product(left: Sequence[int], right: Sequence[int]) -> Matmul:
    *batch, rows, inner = left
    columns = right[-1]
    if right[-2] != inner:
        raise ValueError("no product")
    out = prod(batch) * rows * columns
    return Matmul(2.0 * out * inner, float(prod(left) + prod(right)), float(out))


def _forward(shapes: list[Any]) -> Matmul:
    image, weight = shapes[0], shapes[1]
    out = image[0] * weight[0] * prod(image[2:])
    return Matmul(2.0 * out * prod(weight[1:]), float(prod(image) + prod(weight)), float(out))


def _backward(shapes: list[Any]) -> Matmul:
    gradient, image, weight = shapes[0], shapes[1], shapes[2]
    operations = 2 * 2.0 * prod(gradient) * prod(weight[1:])  # gradients of input and weight
    return Matmul(
        operations, 2.0 * prod(gradient) + prod(image) + prod(weight), float(prod(image) + prod(weight))
    )


_MATMULS = {
    "aten::mm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::bmm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::addmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::baddbmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_addmm_activation": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_scaled_mm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::convolution": _forward,
    "aten::convolution_backward": _backward,
}
MATMULS = tuple(_MATMULS)

# By what is in a kernel's name; the first that is found counts. cuBLAS's nvjet kernels have a letter for the
# type of what they read: s, t, h, q.
_STORED = (
    (r"fp8|e4m3|e5m2|nvjet_(sm\d+_)?r?q", "fp8"),
    (r"bf16|bfloat16|nvjet_(sm\d+_)?t", "bf16"),
    (r"half|fp16|f16|h16|hgemm|h884|hmma|nvjet_(sm\d+_)?h|_HHS_|_HSS_", "fp16"),
    (r"tf32|s1688|s16168", "tf32"),
    (r"float|sgemm|f32|nvjet_(sm\d+_)?s|_S_B|cgemm", "fp32"),
)


@cache
def stored_as(kernel: str) -> str:
    """The type of the elements that a kernel reads, by its name; empty where that does not say."""
    return next((dtype for pattern, dtype in _STORED if re.search(pattern, kernel, re.IGNORECASE)), "")
