"""What a GPU can do at most, and what matmuls ask of it: the two sides of a roofline.

In: names of GPUs and kernels, shapes of operators. Out: peaks by element type, and floating-point operations
and elements of matmuls and convolutions. The model is that of Williams, Waterman and Patterson, "Roofline: An
Insightful Visual Performance Model", CACM 2009: time >= max(operations / peak, bytes / bandwidth).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from dpro.errors import Unanswerable

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Gpu:
    """Peaks of a GPU model.

    Attributes:
        tflops: dense matrix multiplication by element type, 1e12 operations per second.
        gbps: memory bandwidth, 1e9 bytes per second.
    """

    tflops: Mapping[str, float]
    gbps: float


def _gpu(
    gbps: float, fp32: float, half: float, tf32: float = 0.0, fp8: float = 0.0, bf16: bool = True
) -> Gpu:
    tflops = {"fp32": fp32, "fp16": half, "tf32": tf32 or fp32}
    return Gpu(tflops | ({"bf16": half} if bf16 else {}) | ({"fp8": fp8} if fp8 else {}), gbps)


# By the makers' data sheets, without sparsity. The first pattern that is found in the name counts.
GPUS: tuple[tuple[str, Gpu], ...] = (
    (r"\bV100", _gpu(900, 15.7, 125, bf16=False)),
    (r"\bT4\b", _gpu(320, 8.1, 65, bf16=False)),
    (r"\bA100.*80GB", _gpu(2039, 19.5, 312, 156)),
    (r"\bA100", _gpu(1555, 19.5, 312, 156)),
    (r"\bA30\b", _gpu(933, 10.3, 165, 82)),
    (r"\bA10\b", _gpu(600, 31.2, 125, 62.5)),
    (r"\bL4\b", _gpu(300, 30.3, 121, 60, 242)),
    (r"\bL40S", _gpu(864, 91.6, 362, 183, 733)),
    (r"\bH100 PCIe", _gpu(2000, 51, 756, 378, 1513)),
    (r"\bH100 NVL", _gpu(3900, 60, 835, 417, 1671)),
    (r"\bH100", _gpu(3350, 67, 989, 495, 1979)),
    (r"\bH200", _gpu(4800, 67, 989, 495, 1979)),
    (r"\bB200", _gpu(8000, 75, 2250, 1100, 4500)),
    (r"\bMI250X", _gpu(3277, 95.7, 383)),
    (r"\bMI300X", _gpu(5300, 163, 1307, 654, 2615)),
)


def gpu_named(names: Sequence[str]) -> Gpu:
    """The model of a run's GPUs, which must be one.

    Raises:
        Unanswerable: it is not known, or there are several.
    """
    found = {index for name in names for index, (pattern, _) in enumerate(GPUS) if re.search(pattern, name)}
    firsts = {next((i for i in sorted(found) if re.search(GPUS[i][0], name)), -1) for name in names}
    if len(firsts) != 1 or firsts == {-1}:
        said = ", ".join(sorted(set(names))) or "no GPU"
        raise Unanswerable(f"what the run's GPUs can do is not known ({said}): give speedup= of its matmuls")
    return GPUS[firsts.pop()][1]


@dataclass(frozen=True)
class Matmul:
    """What one operator asks for: floating-point operations, elements it reads, elements it writes."""

    operations: float
    read: float
    written: float

    def least_ns(self, gpu: Gpu, dtype: str) -> float:
        """The time that no implementation on that GPU goes below, ns."""
        return max(self.compute_ns(gpu, dtype), (self.read + self.written) * BYTES[dtype] / gpu.gbps)

    def compute_ns(self, gpu: Gpu, dtype: str) -> float:
        """The part of it that the arithmetic needs."""
        return self.operations / gpu.tflops[dtype] / 1e3


@cache
def matmul_of(name: str, shapes: str) -> Matmul | None:
    """What a matmul or convolution asks for, by its input shapes; None for other operators, or odd shapes.

    A forward convolution counts at stride 1: its output is not among the shapes.

    Args:
        name: of the operator.
        shapes: as in the `spans` table.
    """
    count = _MATMULS.get(name)
    if count is None:
        return None
    try:
        return count([shape for shape in json.loads(shapes) if isinstance(shape, list)])
    except (ValueError, IndexError, TypeError):
        return None


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
    """The type of the elements that a kernel reads, by its name; empty where that does not tell."""
    return next((dtype for pattern, dtype in _STORED if re.search(pattern, kernel, re.IGNORECASE)), "")
