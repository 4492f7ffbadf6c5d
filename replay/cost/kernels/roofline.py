"""Roofline of matmuls: operations and bytes of each, and the peaks of GPUs by their data sheets.

Takes names of kernels and shapes of operators; returns floating-point operations and elements of matmuls and
convolutions, and a lower bound on their time. The model is that of Williams, Waterman and Patterson,
"Roofline: An Insightful Visual Performance Model", CACM 2009: time >= max(operations / peak, bytes /
bandwidth).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

from dpro.errors import Unanswerable

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Matmul:
    """Work of one operator: floating-point operations, elements read, elements written."""

    operations: float
    read: float
    written: float

    def least_ns(self, gpu: GpuModel, dtype: str) -> float:
        """Return the lower bound, in ns, of the time on a GPU.

        Args:
            dtype: of the factors, a key of `BYTES`.
        """
        return max(self.compute_ns(gpu, dtype), (self.read + self.written) * BYTES[dtype] / gpu.gbps)

    def compute_ns(self, gpu: GpuModel, dtype: str) -> float:
        """Return the lower bound, in ns, of the time of the arithmetic on a GPU.

        Args:
            dtype: of the factors, a key of `BYTES`.
        """
        return self.operations / gpu.tflops[dtype] / 1e3


@cache
def matmul_of(name: str, shapes: str) -> Matmul | None:
    """Return the work of a matmul or convolution, by input shapes; None for other operators or odd shapes.

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
    """Return batch, m, n and k of a matrix product, m × k by k × n; None for other operators, or odd shapes.

    Args:
        shapes: as in the `spans` table.
    """
    if name not in _FACTORS or matmul_of(name, shapes) is None:
        return None
    first = _FACTORS[name]
    left, right = [shape for shape in json.loads(shapes) if isinstance(shape, list)][first : first + 2]
    *batch, rows, inner = left
    return float(prod(batch)), float(rows), float(right[-1]), float(inner)


# Index of the left factor among the inputs.
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

# Patterns in a kernel's name; the first match counts. cuBLAS's nvjet kernels have a letter for the type of
# their inputs: s, t, h, q.
_STORED = (
    (r"fp8|e4m3|e5m2|nvjet_(sm\d+_)?r?q", "fp8"),
    (r"bf16|bfloat16|nvjet_(sm\d+_)?t|_BBS_|_BSS_", "bf16"),
    (r"half|fp16|f16|h16|hgemm|h884|hmma|nvjet_(sm\d+_)?h|_HHS_|_HSS_", "fp16"),
    (r"tf32|s1688|s16168", "tf32"),
    (r"float|sgemm|f32|nvjet_(sm\d+_)?s|_S_B|cgemm", "fp32"),
)


@cache
def stored_as(kernel: str) -> str:
    """Return the type of the elements that a kernel reads, by its name; empty where that does not show it."""
    return next((dtype for pattern, dtype in _STORED if re.search(pattern, kernel, re.IGNORECASE)), "")


# Peaks of GPU models, by their makers' data sheets.


@dataclass(frozen=True)
class GpuModel:
    """Peaks of a GPU model.

    Attributes:
        tflops: dense matrix multiplication by element type, 1e12 operations per second.
        gbps: memory bandwidth, 1e9 bytes per second.
        source: data sheet of the peaks.
        sms: streaming multiprocessors, or compute units; 0 where not known.
        l2_mb: the last cache before memory, 1e6 bytes; 0 where not known.
        chip: source of `sms` and `l2_mb`.
    """

    tflops: Mapping[str, float]
    gbps: float
    source: str
    sms: int = 0
    l2_mb: float = 0.0
    chip: str = ""


def _gpu(
    source: str, gbps: float, fp32: float, half: float, tf32: float = 0.0, fp8: float = 0.0, bf16: bool = True
) -> GpuModel:
    """Return the peaks of a model; one without TF32 multiplies that as FP32.

    `half` is FP16 accumulated in FP32, as in PyTorch.
    """
    tflops = {"fp32": fp32, "fp16": half, "tf32": tf32 or fp32}
    return GpuModel(tflops | ({"bf16": half} if bf16 else {}) | ({"fp8": fp8} if fp8 else {}), gbps, source)


# NVIDIA's pages on GeForce cards give the rates of FP32 and of memory. Where its white papers give more
# (3090, 4090, 5090), FP16 accumulated in FP32 is twice as fast as FP32, TF32 as fast, FP8 four times.
_PAGES = "NVIDIA's product pages; products by the ratios in its white papers"


def _geforce(gbps: float, fp32: float, fp8: bool = True) -> GpuModel:
    return _gpu(_PAGES, gbps, fp32, 2 * fp32, fp32, 4 * fp32 if fp8 else 0.0)


# The longest key that is in the name, as words, counts: "NVIDIA H200 NVL" is not "H200".
_SHEETS: Mapping[str, GpuModel] = {
    # Volta, Turing
    "V100": _gpu("NVIDIA V100 data sheet (SXM2)", 900, 15.7, 125, bf16=False),
    "V100-PCIE": _gpu("NVIDIA V100 data sheet (PCIe)", 900, 14, 112, bf16=False),
    "T4": _gpu("NVIDIA T4 data sheet", 320, 8.1, 65, bf16=False),
    # Ampere
    "A100": _gpu("NVIDIA A100 data sheet (40 GB)", 1555, 19.5, 312, 156),
    "A100-SXM-80GB": _gpu("NVIDIA A100 data sheet (80 GB SXM)", 2039, 19.5, 312, 156),
    "A100-SXM4-80GB": _gpu("NVIDIA A100 data sheet (80 GB SXM)", 2039, 19.5, 312, 156),
    "A100 80GB PCIe": _gpu("NVIDIA A100 data sheet (80 GB PCIe)", 1935, 19.5, 312, 156),
    "A800": _gpu("NVIDIA A800 40GB Active data sheet", 1555, 19.5, 312, 156),
    "A800-SXM4-80GB": _gpu("NVIDIA A100 data sheet: A800 differs in NVLink", 2039, 19.5, 312, 156),
    "A800 80GB PCIe": _gpu("NVIDIA A100 data sheet: A800 differs in NVLink", 1935, 19.5, 312, 156),
    "A30": _gpu("NVIDIA A30 data sheet", 933, 10.3, 165, 82),
    "A10": _gpu("NVIDIA A10 data sheet", 600, 31.2, 125, 62.5),
    "A10G": _gpu("NVIDIA A10G data sheet (AWS G5)", 600, 31.5, 70, 35),
    "A40": _gpu("NVIDIA A40 data sheet", 696, 37.4, 149.7, 74.8),
    "RTX A6000": _gpu("NVIDIA Ampere GA102 white paper", 768, 38.7, 154.8, 77.4),
    "GeForce RTX 3090": _gpu("NVIDIA Ampere GA102 white paper", 936, 35.6, 71, 35.6),
    # Ada
    "L4": _gpu("NVIDIA L4 data sheet", 300, 30.3, 121, 60, 242),
    "L40": _gpu("NVIDIA L40 data sheet", 864, 90.5, 181, 90.5, 362),
    "L40S": _gpu("NVIDIA L40S data sheet", 864, 91.6, 362, 183, 733),
    "RTX 6000 Ada Generation": _gpu("NVIDIA Ada white paper", 960, 91.1, 364.2, 182.1, 728.5),
    "GeForce RTX 4090": _gpu("NVIDIA Ada white paper", 1008, 82.6, 165.2, 82.6, 330.3),
    # Hopper
    "H100": _gpu("NVIDIA H100 data sheet (SXM)", 3350, 67, 989, 495, 1979),
    "H100 PCIe": _gpu("NVIDIA H100 data sheet (PCIe)", 2000, 51, 756, 378, 1513),
    "H100 NVL": _gpu("NVIDIA H100 data sheet (NVL)", 3900, 60, 835, 417, 1671),
    "H800": _gpu("NVIDIA H100 data sheet (SXM): H800 differs in NVLink and FP64", 3350, 67, 989, 495, 1979),
    "H800 PCIe": _gpu("NVIDIA H800 data sheet (PCIe)", 2000, 51, 756, 378, 1513),
    "H20": _gpu("NVIDIA H20 data sheet", 4000, 44, 148, 74, 296),
    "H20-3e": _gpu("NVIDIA H20 data sheet (141 GB)", 4800, 44, 148, 74, 296),
    "H200": _gpu("NVIDIA H200 data sheet (SXM)", 4800, 67, 989, 495, 1979),
    "H200 NVL": _gpu("NVIDIA H200 data sheet (NVL)", 4800, 60, 835, 417, 1671),
    "GH200 480GB": _gpu("NVIDIA GH200 data sheet (HBM3)", 4000, 67, 989, 495, 1979),
    "GH200 144G HBM3e": _gpu("NVIDIA GH200 data sheet (HBM3e)", 4900, 67, 989, 495, 1979),
    # Blackwell
    "B200": _gpu("NVIDIA HGX B200 data sheet", 8000, 75, 2250, 1100, 4500),
    "GB200": _gpu("NVIDIA GB200 NVL72 data sheet", 8000, 80, 2500, 1250, 5000),
    "B300": _gpu("NVIDIA HGX B300 data sheet", 8000, 75, 2250, 1125, 4500),
    "GB300": _gpu("NVIDIA GB300 NVL72 data sheet", 8000, 80, 2500, 1250, 5000),
    "RTX PRO 6000 Blackwell Server Edition": _gpu(
        "NVIDIA RTX PRO 6000 Server Edition data sheet", 1597, 120, 500, 250, 1000
    ),
    "RTX PRO 6000 Blackwell Workstation Edition": _gpu(
        "NVIDIA RTX Blackwell PRO white paper", 1792, 126, 503.8, 251.9, 1007.6
    ),
    "GeForce RTX 5090": _gpu("NVIDIA RTX Blackwell white paper", 1792, 104.8, 209.5, 104.8, 419),
    "GeForce RTX 3060": _geforce(360, 12.7, fp8=False),
    "GeForce RTX 3060 Ti": _geforce(448, 16.2, fp8=False),
    "GeForce RTX 3070": _geforce(448, 20.3, fp8=False),
    "GeForce RTX 3070 Ti": _geforce(608, 21.7, fp8=False),
    "GeForce RTX 3080": _geforce(760, 29.8, fp8=False),
    "GeForce RTX 3080 Ti": _geforce(912, 34.1, fp8=False),
    "GeForce RTX 3090 Ti": _geforce(1008, 40, fp8=False),
    "GeForce RTX 4060": _geforce(272, 15.1),
    "GeForce RTX 4060 Ti": _geforce(288, 22.1),
    "GeForce RTX 4070": _geforce(504, 29.1),
    "GeForce RTX 4070 SUPER": _geforce(504, 35.5),
    "GeForce RTX 4070 Ti": _geforce(504, 40.1),
    "GeForce RTX 4070 Ti SUPER": _geforce(672, 44.1),
    "GeForce RTX 4080": _geforce(717, 48.7),
    "GeForce RTX 4080 SUPER": _geforce(736, 52.2),
    "GeForce RTX 5070": _geforce(672, 30.9),
    "GeForce RTX 5070 Ti": _geforce(896, 43.9),
    "GeForce RTX 5080": _geforce(960, 56.3),
    # AMD: each of the two dies of MI250 and MI250X is a device.
    "MI210": _gpu("AMD Instinct MI210 data sheet", 1638, 45.3, 181),
    "MI250": _gpu("AMD Instinct MI250 data sheet, one die of two", 1638, 45.3, 181),
    "MI250X": _gpu("AMD Instinct MI250X data sheet, one die of two", 1638, 47.9, 191.5),
    "MI300A": _gpu("AMD Instinct MI300A data sheet", 5300, 122.6, 980.6, 490.3, 1961.2),
    "MI300X": _gpu("AMD Instinct MI300X data sheet", 5300, 163.4, 1307.4, 653.7, 2614.9),
    "MI325X": _gpu("AMD Instinct MI325X data sheet", 6000, 163.4, 1307.4, 653.7, 2614.9),
    "MI350X": _gpu("AMD Instinct MI350X data sheet", 8000, 144.2, 2306.9, fp8=4613.7),
    "MI355X": _gpu("AMD Instinct MI355X data sheet", 8000, 157.3, 2516.6, fp8=5033.2),
}
# Working multiprocessors, and megabytes of the last cache before memory, by the same keys. On AMD's, from
# MI300 on, that is the Infinity Cache; a compute unit counts as a multiprocessor.
_AMPERE = "NVIDIA A100 Tensor Core GPU Architecture white paper, table 4"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture white paper, appendix A"
_ADA = "NVIDIA Ada GPU Architecture white paper, appendix"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture white paper, table 3"
_BLACKWELL = "cudaGetDeviceProperties of a B200, in pytorch/ao pull request 4002: 148 SMs, 126.5 MB"
_RTX = "NVIDIA RTX Blackwell GPU Architecture white paper, appendix"
_CDNA = "AMD ROCm documentation, accelerator and GPU hardware specifications"
_CHIPS: Mapping[str, tuple[int, float, str]] = {
    "V100": (80, 6, "NVIDIA Tesla V100 GPU Architecture white paper, table 1"),
    "V100-PCIE": (80, 6, "NVIDIA Tesla V100 GPU Architecture white paper, table 1"),
    "T4": (40, 4, "NVIDIA Turing GPU Architecture white paper, appendix C"),
    **dict.fromkeys(("A100", "A100-SXM-80GB", "A100-SXM4-80GB", "A100 80GB PCIe"), (108, 40, _AMPERE)),
    **dict.fromkeys(("A800", "A800-SXM4-80GB", "A800 80GB PCIe"), (108, 40, _AMPERE)),
    "A30": (56, 24, "NVIDIA A30 product brief"),
    "A10": (72, 6, "NVIDIA A10 product brief"),
    **dict.fromkeys(("A40", "RTX A6000"), (84, 6, _GA102)),
    "GeForce RTX 3090": (82, 6, _GA102),
    "L4": (58, 48, _ADA),
    **dict.fromkeys(("L40", "L40S", "RTX 6000 Ada Generation"), (142, 96, _ADA)),
    "GeForce RTX 4090": (128, 72, _ADA),
    **dict.fromkeys(("H100", "H100 NVL", "H800", "H200", "H200 NVL"), (132, 50, _HOPPER)),
    **dict.fromkeys(("GH200 480GB", "GH200 144G HBM3e"), (132, 50, _HOPPER)),
    **dict.fromkeys(("H100 PCIe", "H800 PCIe"), (114, 50, _HOPPER)),
    **dict.fromkeys(("B200", "B300"), (148, 126.5, _BLACKWELL)),
    **dict.fromkeys(("GB200", "GB300"), (152, 126.5, f"{_BLACKWELL}; 152 SMs by the ratio of FP32 peaks")),
    "RTX PRO 6000 Blackwell Server Edition": (188, 128, _RTX),
    "RTX PRO 6000 Blackwell Workstation Edition": (188, 128, _RTX),
    "GeForce RTX 5090": (170, 96, _RTX),
    "GeForce RTX 3060": (28, 3, _PAGES),
    "GeForce RTX 3060 Ti": (38, 4, _PAGES),
    "GeForce RTX 3070": (46, 4, _PAGES),
    "GeForce RTX 3070 Ti": (48, 4, _PAGES),
    "GeForce RTX 3080": (68, 5, _GA102),
    "GeForce RTX 3080 Ti": (80, 6, _PAGES),
    "GeForce RTX 3090 Ti": (84, 6, _PAGES),
    "GeForce RTX 4060": (24, 24, _PAGES),
    "GeForce RTX 4060 Ti": (34, 32, _PAGES),
    "GeForce RTX 4070": (46, 36, _PAGES),
    "GeForce RTX 4070 SUPER": (56, 48, _PAGES),
    "GeForce RTX 4070 Ti": (60, 48, _PAGES),
    "GeForce RTX 4070 Ti SUPER": (66, 48, _PAGES),
    "GeForce RTX 4080": (76, 64, _PAGES),
    "GeForce RTX 4080 SUPER": (80, 64, _PAGES),
    "GeForce RTX 5070": (48, 48, _PAGES),
    "GeForce RTX 5070 Ti": (70, 48, _PAGES),
    "GeForce RTX 5080": (84, 64, _PAGES),
    **dict.fromkeys(("MI210", "MI250"), (104, 8, _CDNA)),
    "MI250X": (110, 8, _CDNA),
    "MI300A": (228, 256, _CDNA),
    **dict.fromkeys(("MI300X", "MI325X"), (304, 256, _CDNA)),
    **dict.fromkeys(("MI350X", "MI355X"), (256, 256, _CDNA)),
}


def _with_chip(key: str, gpu: GpuModel) -> GpuModel:
    sms, l2_mb, chip = _CHIPS.get(key, (0, 0.0, ""))
    return replace(gpu, sms=sms, l2_mb=l2_mb, chip=chip)


GPUS: Mapping[str, GpuModel] = {key: _with_chip(key, gpu) for key, gpu in _SHEETS.items()}
# Words that make a name that of another product, slower or faster, or of a slice: anywhere; after the key.
_ANOTHER = re.compile(r"\bMIG\b|\bLaptop\b|\bMax-Q\b|\bMobile\b", re.IGNORECASE)
_VARIANT = re.compile(r"\s+(?:Ti|D|SUPER)\b", re.IGNORECASE)


def model_named(name: str) -> str:
    """Return the key of `GPUS` of a device name, such as `NVIDIA H100 80GB HBM3`; empty where unknown."""
    if _ANOTHER.search(name):
        return ""
    places = {key: re.search(rf"(?<![A-Za-z0-9]){re.escape(key)}(?![A-Za-z0-9])", name) for key in GPUS}
    key = max((key for key, place in places.items() if place), key=len, default="")
    place = places.get(key)
    return key if place and not _VARIANT.match(name, place.end()) else ""


def common_model(names: Sequence[str]) -> str:
    """Return the key of `GPUS` that all device names share; empty where one is unknown, or they differ."""
    models = {model_named(name) for name in names}
    return models.pop() if len(models) == 1 else ""


def gpu_named(names: Sequence[str]) -> GpuModel:
    """Return the model of a run's GPUs, which must be one.

    Raises:
        Unanswerable: it is not known, or there are several.
    """
    model = common_model(names)
    if not model:
        listed = ", ".join(sorted(set(names))) or "the run names none; `dpro record` records it"
        raise Unanswerable(
            f"the peaks of the run's GPUs are not known ({listed}): give speedup= of its matmuls"
        )
    return GPUS[model]
